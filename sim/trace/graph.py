"""The trace: one iteration as an immutable graph of ops over tensors, kept in columns."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError, near
from sim.trace.op import KIND_CODE, KINDS, PHASE_CODE, PHASES, Implementation, Op
from sim.trace.tensor import ROLE_CODE, ROLES, Tensor

if TYPE_CHECKING:
    from sim.trace.origin import Origin

T = TypeVar("T")
Ints = NDArray[np.int64]
PERSISTENT = (ROLE_CODE["weight"], ROLE_CODE["optimizer_state"])


@dataclass(frozen=True, eq=False)
class TensorColumns:
    """All tensors, one entry a tensor. -1 stands for "none" in `layer` and `replaces`."""

    name: Sequence[str]
    bytes: Ints
    role: NDArray[np.int8]
    layer: NDArray[np.int32]
    replaces: NDArray[np.int32]
    shape: Mapping[int, tuple[int, ...]]
    dtype: Sequence[str]
    zeros: Mapping[int, float]
    saved_for: Mapping[int, str]


@dataclass(frozen=True, eq=False)
class OpColumns:
    """All ops in program order. -1 stands for "unknown" in `bytes` and `duration`, "none" in `layer`.

    `reads` of op i are `read_ids[read_start[i]:read_start[i + 1]]`, and `writes` likewise.
    """

    name: Sequence[str]
    kind: NDArray[np.int8]
    phase: NDArray[np.int8]
    layer: NDArray[np.int32]
    flops: Ints
    bytes: Ints
    workspace: Ints
    device: NDArray[np.int32]
    priority: NDArray[np.int32]
    duration: Ints
    random: NDArray[np.bool_]
    read_start: Ints
    read_ids: NDArray[np.int32]
    write_start: Ints
    write_ids: NDArray[np.int32]
    dtype: Sequence[str]
    engine: Mapping[int, str]
    group: Mapping[int, str]
    alternatives: Mapping[int, tuple[Implementation, ...]]
    splits: Mapping[int, tuple[str, ...]]


class Trace:
    """One iteration of a computation: what has to be computed, and on what values.

    Build one with `TraceBuilder`, a generator in `workloads`, or `load`. It never changes; a rewrite
    makes another. Lengths: `len(trace.ops)` ops over `len(trace.tensors)` tensors.

    outputs: ids of the tensors kept to the end. carry: pairs (tensor at the end, tensor it is when the
    next iteration starts). meta: what the trace stands for, JSON values only (`model`, `batch`,
    `sequence`, `tokens`, `samples`, …). origin: what a rewritten trace stands for, see `sim.trace.origin`;
    it is no part of the content hash, because it changes nothing of what is run.

    Raises TraceError, naming op and tensor, on a read before the write, two producers of one tensor, a
    read of an overwritten tensor, a negative size, or an output or carry that cannot be.
    """

    def __init__(
        self,
        tensors: TensorColumns,
        ops: OpColumns,
        *,
        outputs: Sequence[int] | None = None,
        carry: Sequence[tuple[int, int]] | None = None,
        meta: Mapping[str, Any] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.tensor_columns = tensors
        self.op_columns = ops
        self.meta: Mapping[str, Any] = MappingProxyType(dict(meta or {}))
        self.origin = origin
        self._check()
        self.outputs = self._default_outputs() if outputs is None else tuple(int(t) for t in outputs)
        named = tuple((int(a), int(b)) for a, b in carry or ())
        self._check_range([*self.outputs, *(t for pair in named for t in pair)])
        self.carry = self._default_carry() if carry is None else named
        self._check_ends()
        for column in (*vars(tensors).values(), *vars(ops).values()):
            if isinstance(column, np.ndarray):
                column.setflags(write=False)

    # ---- views -------------------------------------------------------------------------------

    @property
    def ops(self) -> Sequence[Op]:
        """The ops in program order, as a sequence of `Op`."""
        return _Views(len(self.op_columns.name), self._op)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors, as a sequence of `Tensor`."""
        return _Views(len(self.tensor_columns.name), self._tensor)

    def _op(self, i: int) -> Op:
        c = self.op_columns
        touched, duration = int(c.bytes[i]), int(c.duration[i])
        return Op(
            id=i,
            name=c.name[i],
            kind=KINDS[c.kind[i]],
            phase=PHASES[c.phase[i]],
            layer=int(c.layer[i]),
            reads=self.reads(i),
            writes=self.writes(i),
            flops=int(c.flops[i]),
            bytes=None if touched < 0 else touched,
            workspace=int(c.workspace[i]),
            device=int(c.device[i]),
            engine=c.engine.get(i, ""),
            priority=int(c.priority[i]),
            group=c.group.get(i, ""),
            random=bool(c.random[i]),
            duration=None if duration < 0 else duration,
            dtype=c.dtype[i],
            alternatives=c.alternatives.get(i, ()),
            splits=c.splits.get(i, ()),
        )

    def _tensor(self, t: int) -> Tensor:
        c = self.tensor_columns
        replaces = int(c.replaces[t])
        return Tensor(
            id=t,
            name=c.name[t],
            bytes=int(c.bytes[t]),
            role=ROLES[c.role[t]],
            layer=int(c.layer[t]),
            shape=c.shape.get(t),
            dtype=c.dtype[t],
            zeros=c.zeros.get(t),
            replaces=None if replaces < 0 else replaces,
            saved_for=c.saved_for.get(t, ""),
        )

    def reads(self, op: int) -> tuple[int, ...]:
        """Ids of the tensors that op reads."""
        c = self.op_columns
        return tuple(c.read_ids[c.read_start[op] : c.read_start[op + 1]].tolist())

    def writes(self, op: int) -> tuple[int, ...]:
        """Ids of the tensors that op makes."""
        c = self.op_columns
        return tuple(c.write_ids[c.write_start[op] : c.write_start[op + 1]].tolist())

    def readers(self, tensor: int) -> tuple[int, ...]:
        """Ids of the ops that read that tensor, in program order."""
        start, ids = self._readers
        return tuple(ids[start[tensor] : start[tensor + 1]].tolist())

    def op_id(self, op: int | str) -> int:
        """The id of an op given by id or by name. Raises TraceError if there is none."""
        return _lookup(op, self._op_ids, len(self.op_columns.name), "op")

    def tensor_id(self, tensor: int | str) -> int:
        """The id of a tensor given by id or by name. Raises TraceError if there is none."""
        return _lookup(tensor, self._tensor_ids, len(self.tensor_columns.name), "tensor")

    # ---- derived columns ---------------------------------------------------------------------

    @cached_property
    def producer(self) -> NDArray[np.int32]:
        """Per tensor the op that makes it, -1 for one that is there from the start. Shape (tensors,)."""
        c = self.op_columns
        out = np.full(len(self.tensor_columns.name), -1, np.int32)
        out[c.write_ids] = np.repeat(np.arange(len(c.name), dtype=np.int32), np.diff(c.write_start))
        return out

    @cached_property
    def replaced_by(self) -> NDArray[np.int32]:
        """Per tensor the one that takes over its storage, -1 for none. Shape (tensors,)."""
        replaces = self.tensor_columns.replaces
        out = np.full(len(replaces), -1, np.int32)
        new = np.flatnonzero(replaces >= 0)
        out[replaces[new]] = new
        return out

    @cached_property
    def read_counts(self) -> Ints:
        """Per tensor how many ops read it (an op that reads it twice counts once). Shape (tensors,)."""
        return np.diff(self._readers[0])

    @cached_property
    def last_use(self) -> NDArray[np.int32]:
        """Per tensor the last op that reads or makes it, -1 for one that no op touches. Shape (tensors,)."""
        start, ids = self._readers
        out = self.producer.copy()
        read = np.flatnonzero(np.diff(start) > 0)
        out[read] = np.maximum(out[read], ids[start[read + 1] - 1])
        return out

    @cached_property
    def touched(self) -> Ints:
        """Per op the bytes it touches: as stated, else the sum of its operands. Shape (ops,)."""
        c, size = self.op_columns, self.tensor_columns.bytes
        operands = np.zeros(len(c.name), np.int64)
        for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
            total = np.concatenate(([0], np.cumsum(size[ids])))
            operands += total[start[1:]] - total[start[:-1]]
        return np.where(c.bytes < 0, operands, c.bytes)

    @cached_property
    def devices(self) -> int:
        """How many devices the trace needs."""
        return int(self.op_columns.device.max(initial=0)) + 1

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over all that the trace says, as hexadecimal digits."""
        digest = hashlib.sha256()
        for part in (self.tensor_columns, self.op_columns):
            for key, column in vars(part).items():
                digest.update(key.encode())
                if isinstance(column, np.ndarray):
                    digest.update(np.ascontiguousarray(column).tobytes())
                elif key == "name":
                    digest.update(json.dumps(list(column)).encode())
                else:
                    rows = sorted(column) if isinstance(column, Mapping) else range(len(column))
                    # few values are distinct: hash each once, and which row has which
                    seen: dict[Any, int] = {}
                    codes = [seen.setdefault(column[row], len(seen)) for row in rows]
                    digest.update(np.array([list(rows), codes], np.int64).tobytes())
                    digest.update(repr(list(seen)).encode())
        digest.update(repr((self.outputs, self.carry)).encode())
        digest.update(json.dumps(dict(self.meta), sort_keys=True, default=str).encode())
        return digest.hexdigest()

    @cached_property
    def _readers(self) -> tuple[Ints, NDArray[np.int32]]:
        c = self.op_columns
        op = np.repeat(np.arange(len(c.name), dtype=np.int64), np.diff(c.read_start))
        pairs = np.unique(c.read_ids.astype(np.int64) * (len(c.name) + 1) + op)
        tensor, reader = np.divmod(pairs, len(c.name) + 1)
        counts = np.bincount(tensor, minlength=len(self.tensor_columns.name))
        return np.concatenate(([0], np.cumsum(counts))), reader.astype(np.int32)

    @cached_property
    def _op_ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.op_columns.name)}

    @cached_property
    def _tensor_ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.tensor_columns.name)}

    # ---- construction ------------------------------------------------------------------------

    def _check(self) -> None:
        t, c = self.tensor_columns, self.op_columns
        for what, column, names in (
            ("bytes", t.bytes, t.name),
            ("flops", c.flops, c.name),
            ("workspace", c.workspace, c.name),
            ("device", c.device, c.name),
        ):
            bad = np.flatnonzero(column < 0)
            if len(bad):
                raise TraceError(f"{names[bad[0]]!r}: {what} is negative ({column[bad[0]]})")
        for what, column in (("tensors", t.bytes), ("workspaces", c.workspace), ("FLOPs", c.flops)):
            if float(column.sum(dtype=np.float64)) >= 2.0**62:
                raise TraceError(f"all {what} together are 2**62 or more")
        for what, names in (("op", c.name), ("tensor", t.name)):
            if len(set(names)) != len(names):
                seen: set[str] = set()
                double = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
                raise TraceError(f"two {what}s are called {double!r}")
        for ids, least in ((c.read_ids, 0), (c.write_ids, 0), (t.replaces, -1)):
            if len(ids) and (int(ids.max()) >= len(t.name) or int(ids.min()) < least):
                raise TraceError(f"a tensor id is out of range 0..{len(t.name) - 1}")
        made, counts = np.unique(c.write_ids, return_counts=True)
        if (counts > 1).any():
            double_id = int(made[counts > 1][0])
            by = [c.name[i] for i in range(len(c.name)) if double_id in self.writes(i)]
            raise TraceError(f"tensor {t.name[double_id]!r} has two producers: {', '.join(map(repr, by))}")
        reader = np.repeat(np.arange(len(c.name)), np.diff(c.read_start))
        early = np.flatnonzero(self.producer[c.read_ids] >= reader)
        if len(early):
            op, tensor = int(reader[early[0]]), int(c.read_ids[early[0]])
            writer = int(self.producer[tensor])
            how = "reads its own output" if writer == op else f"reads it before {c.name[writer]!r} makes it"
            raise TraceError(f"op {c.name[op]!r}: tensor {t.name[tensor]!r}: {how}")
        self._check_overwrites(reader)

    def _check_overwrites(self, reader: Ints) -> None:
        t, c = self.tensor_columns, self.op_columns
        new = np.flatnonzero(t.replaces >= 0)
        if not len(new):
            return
        old = t.replaces[new]
        values, counts = np.unique(old, return_counts=True)
        if (counts > 1).any():
            raise TraceError(f"tensor {t.name[int(values[counts > 1][0])]!r} is overwritten twice")
        for wrong, why in (
            (self.producer[new] < 0, "but no op writes it"),
            (t.bytes[new] != t.bytes[old], "which has another size"),
            (self.producer[old] >= self.producer[new], "which is not made before it"),
        ):
            if wrong.any():
                a, b = int(new[wrong][0]), int(old[wrong][0])
                raise TraceError(f"tensor {t.name[a]!r} replaces {t.name[b]!r}, {why}")
        gone_at = np.full(len(t.name), len(c.name), np.int64)
        gone_at[old] = self.producer[new]
        late = np.flatnonzero(reader > gone_at[c.read_ids])
        if len(late):
            op, tensor = int(reader[late[0]]), int(c.read_ids[late[0]])
            raise TraceError(
                f"op {c.name[op]!r}: tensor {t.name[tensor]!r}: "
                f"read after {c.name[int(gone_at[tensor])]!r} overwrote it"
            )

    def _check_range(self, ids: Sequence[int]) -> None:
        count = len(self.tensor_columns.name)
        if ids and (min(ids) < 0 or max(ids) >= count):
            raise TraceError(f"outputs or carry: a tensor id is out of range 0..{count - 1}")

    def _check_ends(self) -> None:
        """Outputs must be there at the end, and what is carried must be able to start the next iteration."""
        name = self.tensor_columns.name
        for what, once in (
            ("is an output twice", self.outputs),
            ("is carried twice", [a for a, _ in self.carry]),
            ("is carried to twice", [b for _, b in self.carry]),
        ):
            if len(set(once)) != len(once):
                values, counts = np.unique(np.array(once), return_counts=True)
                raise TraceError(f"tensor {name[int(values[counts > 1][0])]!r} {what}")
        for t in self.outputs:
            if self.replaced_by[t] >= 0:
                raise TraceError(f"tensor {name[t]!r} is an output, but {name[self.replaced_by[t]]!r} overwrites it")
        kept, size = set(self.outputs), self.tensor_columns.bytes
        for last, first in self.carry:
            why = ""
            if last not in kept:
                why = "is no output"
            elif self.producer[first] >= 0:
                why = "is not there when an iteration starts"
            elif size[last] != size[first]:
                why = "has another size"
            if why:
                which = last if last not in kept else first
                raise TraceError(f"carry of {name[last]!r} to {name[first]!r}: {name[which]!r} {why}")

    def _default_outputs(self) -> tuple[int, ...]:
        role = self.tensor_columns.role
        keep = np.isin(role, PERSISTENT) & (self.replaced_by < 0)
        return tuple(np.flatnonzero(keep).tolist())

    def _default_carry(self) -> tuple[tuple[int, int], ...]:
        pairs = []
        for last in self.outputs:
            first = last
            while self.tensor_columns.replaces[first] >= 0:
                first = int(self.tensor_columns.replaces[first])
            if self.producer[first] < 0:
                pairs.append((last, first))
        return tuple(pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.content_hash == other.content_hash

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __repr__(self) -> str:
        label = self.meta.get("model", "trace")
        return f"<Trace {label}: {len(self.ops)} ops, {len(self.tensors)} tensors>"


class _Views(Sequence[T]):
    """Rows of a table, made when looked at."""

    def __init__(self, length: int, make: Any) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._make(index % self._length)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[T]:
        return (self._make(i) for i in range(self._length))


def _lookup(key: int | str, ids: Mapping[str, int], count: int, what: str) -> int:
    if isinstance(key, str):
        if key not in ids:
            raise TraceError(f"no {what} is called {key!r}{near(key, islice(ids, 2000))}")  # spelling is slow
        return ids[key]
    if not 0 <= key < count:
        raise TraceError(f"{what} {key} is out of range 0..{count - 1}")
    return int(key)


@dataclass
class TraceBuilder:
    """Collects tensors and ops in program order and makes the `Trace`.

    >>> b = TraceBuilder()
    >>> x = b.tensor("x", 8, "input")
    >>> y = b.tensor("y", 8, "activation")
    >>> _ = b.op("double", "elementwise", reads=[x], writes=[y])
    >>> b.build()
    <Trace trace: 1 ops, 2 tensors>
    """

    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # arrays, not lists: a number then takes 8 bytes instead of 40, which matters at 10^6 ops
        self._tensors: dict[str, Any] = {"name": [], "dtype": []}
        self._tensors.update({k: array("q") for k in ("bytes", "role", "layer", "replaces")})
        self._ops: dict[str, Any] = {"name": [], "dtype": []}
        numbers = ("kind", "phase", "layer", "flops", "bytes", "workspace", "device", "priority", "duration", "random")
        self._ops.update({k: array("q") for k in numbers})
        self._add_op = tuple(column.append for column in self._ops.values())
        self._reads, self._writes = array("q"), array("q")
        self._read_start, self._write_start = array("q", (0,)), array("q", (0,))
        self._sparse: dict[str, dict[int, Any]] = {
            k: {} for k in ("shape", "zeros", "saved_for", "engine", "group", "alternatives", "splits")
        }

    @classmethod
    def of(cls, trace: Trace) -> TraceBuilder:
        """A builder that holds all tensors of `trace` under the same ids, and none of its ops."""
        builder = cls(dict(trace.meta))
        for t in trace.tensors:
            builder.tensor(
                t.name,
                t.bytes,
                t.role,
                layer=t.layer,
                shape=t.shape,
                dtype=t.dtype,
                zeros=t.zeros,
                replaces=t.replaces,
                saved_for=t.saved_for,
            )
        return builder

    def tensor(
        self,
        name: str,
        bytes: int,
        role: str = "activation",
        *,
        layer: int = -1,
        shape: Sequence[int] | None = None,
        dtype: str = "",
        zeros: float | None = None,
        replaces: int | None = None,
        saved_for: str = "",
    ) -> int:
        """Add a tensor; the arguments are the fields of `Tensor`. Returns its id."""
        if role not in ROLE_CODE:
            raise TraceError(f"tensor {name!r}: role {role!r} is unknown{near(role, ROLES)}")
        t, row = self._tensors, len(self._tensors["name"])
        t["name"].append(name)
        t["bytes"].append(int(bytes))
        t["role"].append(ROLE_CODE[role])
        t["layer"].append(layer)
        t["replaces"].append(-1 if replaces is None else replaces)
        t["dtype"].append(dtype)
        for key, value in (("shape", shape), ("zeros", zeros), ("saved_for", saved_for)):
            if value is not None and value != "":
                self._sparse[key][row] = tuple(value) if key == "shape" else value  # type: ignore[arg-type]
        return row

    def mark_saved(self, tensor: int, reason: str) -> None:
        """Note why backward needs a tensor; the first reason stays."""
        self._sparse["saved_for"].setdefault(tensor, reason)

    def take_over(self, tensor: int, old: int) -> None:
        """Let a tensor added before take over the storage of another in place."""
        self._tensors["replaces"][tensor] = old

    def bytes_of(self, tensor: int) -> int:
        """Bytes of a tensor added before."""
        return int(self._tensors["bytes"][tensor])

    def op(
        self,
        name: str,
        kind: str = "other",
        *,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        phase: str = "forward",
        layer: int = -1,
        flops: int = 0,
        bytes: int | None = None,
        workspace: int = 0,
        device: int = 0,
        engine: str = "",
        priority: int = 0,
        group: str = "",
        random: bool = False,
        duration: int | None = None,
        dtype: str = "",
        alternatives: Sequence[Implementation] = (),
        splits: Sequence[str] = (),
    ) -> int:
        """Add an op after all others; the arguments are the fields of `Op`. Returns its id."""
        if kind not in KIND_CODE:
            raise TraceError(f"op {name!r}: kind {kind!r} is unknown{near(kind, KINDS)}")
        if phase not in PHASE_CODE:
            raise TraceError(f"op {name!r}: phase {phase!r} is unknown{near(phase, PHASES)}")
        if duration is not None and duration < 0:
            raise TraceError(f"op {name!r}: duration is negative ({duration})")
        if bytes is not None and bytes < 0:
            raise TraceError(f"op {name!r}: bytes is negative ({bytes})")
        row = len(self._ops["name"])
        touched, took = -1 if bytes is None else int(bytes), -1 if duration is None else int(duration)
        values = (name, dtype, KIND_CODE[kind], PHASE_CODE[phase], layer, int(flops), touched)
        more = (int(workspace), device, priority, took, random)
        for add, value in zip(self._add_op, values + more):
            add(value)
        self._reads.extend(reads)
        self._writes.extend(writes)
        self._read_start.append(len(self._reads))
        self._write_start.append(len(self._writes))
        for key, value in (("engine", engine), ("group", group), ("alternatives", alternatives), ("splits", splits)):
            if value:
                self._sparse[key][row] = value if isinstance(value, str) else tuple(value)
        return row

    def extend_tensors(self, names: Sequence[str], dtypes: Sequence[str], numbers: Mapping[str, Ints]) -> int:
        """Add many checked tensors: `bytes`, `role` (codes) and `layer` by column. Returns the first id."""
        first = len(self._tensors["name"])
        self._tensors["name"].extend(names)
        self._tensors["dtype"].extend(dtypes)
        for key, column in {**numbers, "replaces": np.full(len(names), -1)}.items():
            self._tensors[key].frombytes(column.astype(np.int64).tobytes())
        return first

    def extend_ops(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        numbers: Mapping[str, Ints],
        reads: tuple[Sequence[int], Sequence[int]],
        writes: tuple[Sequence[int], Sequence[int]],
    ) -> int:
        """Add many checked ops: all columns of numbers (codes, -1 for unknown), and ids with how many each has."""
        first = len(self._ops["name"])
        self._ops["name"].extend(names)
        self._ops["dtype"].extend(dtypes)
        for key, column in numbers.items():
            self._ops[key].frombytes(column.astype(np.int64).tobytes())
        for ids, start, (more, counts) in (
            (self._reads, self._read_start, reads),
            (self._writes, self._write_start, writes),
        ):
            ids.extend(more)
            start.frombytes((start[-1] + np.cumsum(counts, dtype=np.int64)).tobytes())
        return first

    def note(self, key: str, row: int, value: Any) -> None:
        """Set one of the fields that few tensors or ops have, of one added before."""
        self._sparse[key][row] = value

    def copy_op(self, op: Op, **changes: Any) -> int:
        """Add an op like `op`, with some fields changed."""
        names = ("kind", "reads", "writes", "phase", "layer", "flops", "bytes", "workspace", "device", "engine")
        more = ("priority", "group", "random", "duration", "dtype", "alternatives", "splits")
        fields = {name: getattr(op, name) for name in (*names, *more)}
        return self.op(changes.pop("name", op.name), **{**fields, **changes})

    def build(
        self,
        *,
        outputs: Sequence[int] | None = None,
        carry: Sequence[tuple[int, int]] | None = None,
        origin: Origin | None = None,
    ) -> Trace:
        """The trace of all that was added. Raises TraceError where it cannot be computed."""
        t, o, s = self._tensors, self._ops, self._sparse
        tensors = TensorColumns(
            name=t["name"],
            bytes=_column("bytes", t["bytes"], np.int64),
            role=_column("role", t["role"], np.int8),
            layer=_column("layer", t["layer"], np.int32),
            replaces=_column("replaces", t["replaces"], np.int32),
            shape=s["shape"],
            dtype=t["dtype"],
            zeros=s["zeros"],
            saved_for=s["saved_for"],
        )
        ops = OpColumns(
            name=o["name"],
            kind=_column("kind", o["kind"], np.int8),
            phase=_column("phase", o["phase"], np.int8),
            layer=_column("layer", o["layer"], np.int32),
            flops=_column("flops", o["flops"], np.int64),
            bytes=_column("bytes", o["bytes"], np.int64),
            workspace=_column("workspace", o["workspace"], np.int64),
            device=_column("device", o["device"], np.int32),
            priority=_column("priority", o["priority"], np.int32),
            duration=_column("duration", o["duration"], np.int64),
            random=_column("random", o["random"], np.bool_),
            read_start=_column("reads", self._read_start, np.int64),
            read_ids=_column("reads", self._reads, np.int32),
            write_start=_column("writes", self._write_start, np.int64),
            write_ids=_column("writes", self._writes, np.int32),
            dtype=o["dtype"],
            engine=s["engine"],
            group=s["group"],
            alternatives=s["alternatives"],
            splits=s["splits"],
        )
        return Trace(tensors, ops, outputs=outputs, carry=carry, meta=self.meta, origin=origin)


def _column(what: str, values: Any, kind: type[np.generic]) -> Any:
    """An array of a narrower type. Raises TraceError where a value does not fit, instead of wrapping."""
    wide = np.array(values, np.int64)
    if kind is not np.bool_ and len(wide) and not np.array_equal(wide.astype(kind), wide):
        raise TraceError(f"{what}: a value between {wide.min()} and {wide.max()} does not fit")
    return wide.astype(kind)
