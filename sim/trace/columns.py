"""The bare graph of a trace: ops over tensors, kept in columns, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import islice, pairwise
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError, near
from sim.trace.op import KINDS, PHASES, Implementation, Op, Ring
from sim.trace.tensor import ROLES, Tensor

FROM_READS_AND_WRITES = (
    *("distinct_reads", "all_writes", "producer", "replaced_by", "read_counts", "first_read", "last_use"),
    *("_readers", "_reader_lists", "_read_lists", "_write_lists", "_tensor_ids"),
)
"""What is derived from the tensors and from which op reads and writes them, and from nothing else of ops."""

FROM_STRUCTURE = ("op_types", "view_of", "released", "unbound", "held_until", "devices", "_op_ids", "of_one_size")
"""What else is derived from all but sizes."""

FROM_SIZES = ("touched", "counted_flops")
"""What is derived from sizes, but not from where the program releases tensors."""

T = TypeVar("T")
A = TypeVar("A", bound=NDArray[Any])
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TensorColumns:
    """All tensors, one entry per tensor. -1 stands for "none" in `layer` and `replaces`."""

    name: Sequence[str]
    bytes: Ints
    role: NDArray[np.int8]
    layer: NDArray[np.int32]
    replaces: NDArray[np.int32]
    shape: Mapping[int, tuple[int, ...]]
    dtype: Sequence[str]
    zeros: Mapping[int, float]
    saved_for: Mapping[int, str]
    axes: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class OpColumns:
    """All ops in program order. -1 stands for "unknown" in `bytes` and `duration`, "none" in `layer`.

    Op i reads `read_ids[read_start[i]:read_start[i + 1]]`; writes are stored likewise. `releases` gives, for few ops,
    the tensors that the program releases when they end, where that is later than the last reader. `unbinds` are those
    that only autograd holds from then on, `views` those of the few ops that produce some, and `counted` is that of the
    few that execute fewer FLOPs than are counted: see `Op`.
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
    releases: Mapping[int, tuple[int, ...]]
    views: Mapping[int, tuple[int, ...]]
    function: Mapping[int, str]
    ring: Mapping[int, Ring]
    counted: Mapping[int, int]
    unbinds: Mapping[int, tuple[int, ...]]


def _read_only(compute: Callable[[Any], A]) -> cached_property[A]:
    """A column that is computed when it is first asked for; it is shared, so that nobody may write to it."""

    @wraps(compute)
    def column(self: Any) -> A:
        found = compute(self)
        found.setflags(write=False)
        return found

    return cached_property(column)


class Graph:
    """Ops, in program order, over tensors: who reads, writes and overwrites what.

    `ops` and `tensors` are sequences of views; the columns, and those computed from them, are
    read-only.
    """

    def __init__(self, tensors: TensorColumns, ops: OpColumns) -> None:
        self.tensor_columns = tensors
        self.op_columns = ops
        self._make_read_only()

    def _share(self, other: Graph) -> None:
        """Take over what has been derived from another graph with the same reads and writes of the same tensors."""
        columns = ("name", "replaces"), ("read_start", "read_ids", "write_start", "write_ids")
        pairs = (self.tensor_columns, other.tensor_columns), (self.op_columns, other.op_columns)
        if all(getattr(a, key) is getattr(b, key) for (a, b), keys in zip(pairs, columns) for key in keys):
            self._take_over(other, FROM_READS_AND_WRITES)

    def _take_over(self, other: Graph, names: Sequence[str]) -> None:
        """Take over what has been derived from another graph under these names."""
        known = vars(other)
        vars(self).update((name, known[name]) for name in names if name in known)

    def derive(self) -> None:
        """Compute what those that are made like this one take over."""
        for name in (*FROM_READS_AND_WRITES, *FROM_STRUCTURE):
            getattr(self, name)

    def _make_read_only(self) -> None:
        for column in (*vars(self.tensor_columns).values(), *vars(self.op_columns).values()):
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
            counted=c.counted.get(i),
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
            releases=c.releases.get(i, ()),
            unbinds=c.unbinds.get(i, ()),
            views=c.views.get(i, ()),
            function=c.function.get(i, ""),
            ring=c.ring.get(i),
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
            axes=c.axes.get(t),
        )

    def reads(self, op: int) -> tuple[int, ...]:
        """Ids of the tensors that an op reads."""
        start, ids = self._read_lists
        return tuple(ids[start[op] : start[op + 1]])

    def writes(self, op: int) -> tuple[int, ...]:
        """Ids of the tensors that an op writes."""
        start, ids = self._write_lists
        return tuple(ids[start[op] : start[op + 1]])

    def readers(self, tensor: int) -> tuple[int, ...]:
        """Ids of the ops that read a tensor, in program order."""
        start, ids = self._reader_lists
        return tuple(ids[start[tensor] : start[tensor + 1]])

    def op_id(self, op: int | str) -> int:
        """The id of an op given by id or by name. Raises TraceError if there is none."""
        return _lookup(op, self._op_ids, len(self.op_columns.name), "op")

    def tensor_id(self, tensor: int | str) -> int:
        """The id of a tensor given by id or by name. Raises TraceError if there is none."""
        return _lookup(tensor, self._tensor_ids, len(self.tensor_columns.name), "tensor")

    # ---- derived columns ---------------------------------------------------------------------

    @cached_property
    def distinct_reads(self) -> tuple[tuple[int, ...], ...]:
        """Per op the tensors that it reads, each once, by its first mention."""
        c = self.op_columns
        rows = rows_of(c.read_start, c.read_ids)
        return tuple(row if len(row) < 2 or len(set(row)) == len(row) else tuple(dict.fromkeys(row)) for row in rows)

    @cached_property
    def all_writes(self) -> tuple[tuple[int, ...], ...]:
        """Per op the tensors that it writes."""
        c = self.op_columns
        return tuple(rows_of(c.write_start, c.write_ids))

    @cached_property
    def op_types(self) -> tuple[tuple[str, ...], Ints]:
        """The types in which ops compute, sorted, and per op which of them is its own."""
        types = tuple(sorted(set(self.op_columns.dtype)))
        place = {dtype: i for i, dtype in enumerate(types)}
        own = np.fromiter(map(place.__getitem__, self.op_columns.dtype), np.int64, len(self.op_columns.name))
        own.setflags(write=False)
        return types, own

    @_read_only
    def producer(self) -> NDArray[np.int32]:
        """The op that produces each tensor, -1 for one that exists from the start. Shape (tensors,)."""
        c = self.op_columns
        out = np.full(len(self.tensor_columns.name), -1, np.int32)
        out[c.write_ids] = np.repeat(np.arange(len(c.name), dtype=np.int32), np.diff(c.write_start))
        return out

    @_read_only
    def replaced_by(self) -> NDArray[np.int32]:
        """The tensor that takes over each tensor's storage, -1 for none. Shape (tensors,)."""
        replaces = self.tensor_columns.replaces
        out = np.full(len(replaces), -1, np.int32)
        new = np.flatnonzero(replaces >= 0)
        out[replaces[new]] = new
        return out

    @cached_property
    def view_of(self) -> Mapping[int, int]:
        """The tensor whose storage each view shares."""
        written = ((i, zip(self.writes(i), places, strict=True)) for i, places in self.op_columns.views.items())
        return {view: self.reads(i)[place] for i, pairs in written for view, place in pairs if place >= 0}

    @_read_only
    def read_counts(self) -> Ints:
        """How many ops read each tensor; an op that reads it twice counts once. Shape (tensors,)."""
        return np.diff(self._readers[0])

    @_read_only
    def first_read(self) -> NDArray[np.int32]:
        """The first op that reads each tensor, -1 for none. Shape (tensors,)."""
        start, ids = self._readers
        out = np.full(len(start) - 1, -1, np.int32)
        read = np.flatnonzero(np.diff(start) > 0)
        out[read] = ids[start[read]]
        return out

    @_read_only
    def last_use(self) -> NDArray[np.int32]:
        """The last op that reads or writes each tensor, -1 for one that no op touches. Shape (tensors,)."""
        start, ids = self._readers
        out = self.producer.copy()
        read = np.flatnonzero(np.diff(start) > 0)
        out[read] = np.maximum(out[read], ids[start[read + 1] - 1])
        return out

    @_read_only
    def released(self) -> NDArray[np.int32]:
        """The op at whose end the program releases each tensor, -1 where its last reader does. Shape (tensors,)."""
        out = np.full(len(self.tensor_columns.name), -1, np.int32)
        for op, tensors in self.op_columns.releases.items():
            out[list(tensors)] = op
        return out

    @_read_only
    def unbound(self) -> NDArray[np.int32]:
        """The op at whose end variables let go of each tensor (`Op.unbinds`), -1 where not known. Shape (tensors,)."""
        out = np.full(len(self.tensor_columns.name), -1, np.int32)
        for op, tensors in self.op_columns.unbinds.items():
            out[list(tensors)] = op
        return out

    @_read_only
    def held_until(self) -> NDArray[np.int32]:
        """The op until whose end each tensor is held: its release point, else its last use. Shape (tensors,)."""
        return np.maximum(self.last_use, self.released)

    @_read_only
    def touched(self) -> Ints:
        """The bytes that each op touches: as stated, else the sum of its operands. Shape (ops,)."""
        c, size = self.op_columns, self.tensor_columns.bytes
        operands = np.zeros(len(c.name), np.int64)
        for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
            operands += row_sums(start, size[ids])
        return np.where(c.bytes < 0, operands, c.bytes)

    @_read_only
    def counted_flops(self) -> Ints:
        """The FLOPs of each op as PyTorch's counter counts them, masked ones included. Shape (ops,)."""
        out = self.op_columns.flops.copy()
        for op, counted in self.op_columns.counted.items():
            out[op] = counted
        return out

    @cached_property
    def devices(self) -> int:
        """How many devices the trace needs."""
        return int(self.op_columns.device.max(initial=0)) + 1

    @cached_property
    def _readers(self) -> tuple[Ints, NDArray[np.int32]]:
        c = self.op_columns
        op = np.repeat(np.arange(len(c.name), dtype=np.int64), np.diff(c.read_start))
        pairs = distinct(c.read_ids.astype(np.int64) * (len(c.name) + 1) + op)
        tensor, reader = np.divmod(pairs, len(c.name) + 1)
        counts = np.bincount(tensor, minlength=len(self.tensor_columns.name))
        found = np.concatenate(([0], np.cumsum(counts))), reader.astype(np.int32)
        for column in found:
            column.setflags(write=False)
        return found

    @cached_property
    def _reader_lists(self) -> tuple[list[int], list[int]]:
        """The same as lists, since planners ask for the readers of one tensor after the other."""
        start, ids = self._readers
        return start.tolist(), ids.tolist()

    @cached_property
    def _read_lists(self) -> tuple[list[int], list[int]]:
        """The columns of reads as lists, since rewrites ask for those of one op after the other."""
        c = self.op_columns
        return c.read_start.tolist(), c.read_ids.tolist()

    @cached_property
    def _write_lists(self) -> tuple[list[int], list[int]]:
        """The same of writes."""
        c = self.op_columns
        return c.write_start.tolist(), c.write_ids.tolist()

    @cached_property
    def _op_ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.op_columns.name)}

    @cached_property
    def _tensor_ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.tensor_columns.name)}


def rows_of(start: NDArray[Any], ids: NDArray[Any]) -> list[tuple[int, ...]]:
    """The rows of a table in CSR form: row i has the ids from `start[i]` to `start[i + 1]`."""
    flat: list[int] = ids.tolist()
    return [tuple(flat[a:b]) for a, b in pairwise(start.tolist())]


def slots_of(start: NDArray[Any], rows: Ints) -> Ints:
    """Where the values of some rows of a table in CSR form are, one row after the other."""
    count = start[rows + 1] - start[rows]
    skip = start[rows] - (np.cumsum(count) - count)
    places: Ints = np.arange(int(count.sum())) + np.repeat(skip, count)
    return places


def distinct(values: A) -> A:
    """The different values, rising; `np.unique` builds a table of them first, which takes many times as long."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    found: A = ordered[is_new]  # type: ignore[assignment]
    return found


def row_sums(start: NDArray[Any], values: Ints) -> Ints:
    """The sum of each row of such a table, whose values are given in the place of its ids."""
    total = np.concatenate(([0], np.cumsum(values)))
    sums: Ints = total[start[1:]] - total[start[:-1]]
    return sums


class _Views(Sequence[T]):
    """Rows of a table, built on access."""

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


def _lookup(key: int | str, ids: Mapping[str, int], count: int, noun: str) -> int:
    if isinstance(key, str):
        if key not in ids:
            raise TraceError(
                f"no {noun} is called {key!r}{near(key, islice(ids, 2000))}"
            )  # a search for the nearest name is slow
        return ids[key]
    if not 0 <= key < count:
        raise TraceError(f"{noun} {key} is out of range 0..{count - 1}")
    return int(key)
