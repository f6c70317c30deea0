"""Builds a trace: tensors and ops are added in program order and stored in columns from the start."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError, near
from sim.trace.graph import OpColumns, TensorColumns, Trace
from sim.trace.op import AXES, FUNCTIONS, KIND_CODE, KINDS, PHASE_CODE, PHASES, Implementation, Op, Ring
from sim.trace.series import Mark, NoSeries, Series
from sim.trace.tensor import ROLE_CODE, ROLES

if TYPE_CHECKING:
    from sim.trace.origin import Origin

Ints = NDArray[np.int64]
COPIED = (
    *("name", "kind", "reads", "writes", "phase", "layer", "flops", "bytes", "workspace", "device", "engine"),
    *("priority", "group", "random", "duration", "dtype", "alternatives", "splits", "releases"),
    *("function", "ring", "counted"),
)
_copied = attrgetter(*COPIED)
NUMBERS_OF_OPS = (
    *("kind", "phase", "layer", "flops", "bytes", "workspace", "device", "priority", "duration", "random"),
)
SPARSE_OF_OPS = ("engine", "group", "alternatives", "splits", "function", "ring", "counted", "views")
"""The fields that few ops have and that a copy of them has as well."""


@dataclass
class TraceBuilder:
    """Collects tensors and ops in program order and builds the `Trace`.

    meta: facts about the workload to store with the trace, JSON values only.

    >>> b = TraceBuilder()
    >>> x = b.tensor("x", 8, "input")
    >>> y = b.tensor("y", 8, "activation")
    >>> _ = b.op("double", "elementwise", reads=[x], writes=[y])
    >>> b.build()
    <Trace trace: 1 ops, 2 tensors>
    """

    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # arrays, not lists: 8 bytes per number instead of 40, which matters at 10^6 ops
        self._tensors: dict[str, Any] = {"name": [], "dtype": []}
        self._tensors.update({k: array("q") for k in ("bytes", "role", "layer", "replaces")})
        self._ops: dict[str, Any] = {"name": [], "dtype": []}
        numbers = ("kind", "phase", "layer", "flops", "bytes", "workspace", "device", "priority", "duration", "random")
        self._ops.update({k: array("q") for k in numbers})
        self._add_op = tuple(column.append for column in self._ops.values())
        self._reads, self._writes = array("q"), array("q")
        self._read_start, self._write_start = array("q", (0,)), array("q", (0,))
        self._sparse: dict[str, dict[int, Any]] = {
            k: {}
            for k in (
                *("shape", "zeros", "saved_for", "axes", "engine", "group", "alternatives", "splits", "releases"),
                *("views", "function", "ring", "counted", "unbinds"),
            )
        }

    @classmethod
    def of(cls, trace: Trace) -> TraceBuilder:
        """A builder with all tensors of `trace` under the same ids, and none of its ops."""
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
                axes=t.axes,
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
        axes: Sequence[str] | None = None,
    ) -> int:
        """Add a tensor; the arguments are the fields of `Tensor`. Returns its id.

        Raises TraceError for a role that there is not, or bytes that are not whole.
        """
        if role not in ROLE_CODE:
            raise TraceError(f"tensor {name!r}: role {role!r} is unknown{near(role, ROLES)}")
        t, row = self._tensors, len(self._tensors["name"])
        try:
            t["bytes"].append(bytes if type(bytes) is int else _whole(f"tensor {name!r}: bytes", bytes))
        except OverflowError:
            raise TraceError(f"tensor {name!r}: bytes: 2**63 or more") from None
        t["name"].append(name)
        t["role"].append(ROLE_CODE[role])
        t["layer"].append(layer)
        t["replaces"].append(-1 if replaces is None else replaces)
        t["dtype"].append(dtype)
        for key, value in (("shape", shape), ("zeros", zeros), ("saved_for", saved_for)):
            if value is not None and value != "":
                self._sparse[key][row] = tuple(value) if key == "shape" else value  # type: ignore[arg-type]
        if axes is not None:
            self._sparse["axes"][row] = tuple(axes)
        return row

    def mark_saved(self, tensor: int, reason: str) -> None:
        """Record why backward needs a tensor; the first reason wins."""
        self._sparse["saved_for"].setdefault(tensor, reason)

    def set_saved(self, tensor: int, reason: str) -> None:
        """Record why backward needs a tensor, "" where it does not, whatever has been recorded before."""
        self._sparse["saved_for"].pop(tensor, None)
        if reason:
            self._sparse["saved_for"][tensor] = reason

    def is_saved(self, tensor: int) -> bool:
        """Whether `mark_saved` has named a reason for an existing tensor."""
        return tensor in self._sparse["saved_for"]

    def take_over(self, tensor: int, old: int) -> None:
        """Let an existing tensor take over the storage of another in place, with -1 that of none."""
        self._tensors["replaces"][tensor] = old

    @property
    def ops(self) -> int:
        """How many ops there are so far."""
        return len(self._ops["name"])

    def bytes_of(self, tensor: int) -> int:
        """Bytes of an existing tensor."""
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
        releases: Sequence[int] = (),
        views: Sequence[int] = (),
        function: str = "",
        ring: Ring | None = None,
        counted: int | None = None,
        unbinds: Sequence[int] = (),
    ) -> int:
        """Append an op; the arguments are the fields of `Op`. Returns its id.

        Raises TraceError for a kind, phase or function that there is not, and numbers that are not whole, or negative.
        """
        if kind not in KIND_CODE:
            raise TraceError(f"op {name!r}: kind {kind!r} is unknown{near(kind, KINDS)}")
        if phase not in PHASE_CODE:
            raise TraceError(f"op {name!r}: phase {phase!r} is unknown{near(phase, PHASES)}")
        if function and function not in FUNCTIONS:
            raise TraceError(f"op {name!r}: function {function!r} is unknown{near(function, FUNCTIONS)}")
        if duration is not None and duration < 0:
            raise TraceError(f"op {name!r}: duration is negative ({duration})")
        if bytes is not None and bytes < 0:
            raise TraceError(f"op {name!r}: bytes is negative ({bytes})")
        if counted is not None and counted < flops:
            raise TraceError(f"op {name!r}: counted is {counted}, fewer than its {flops} FLOPs")
        row = len(self._ops["name"])
        if not (type(flops) is type(workspace) is int):
            flops, workspace = _whole(f"op {name!r}: FLOPs", flops), _whole(f"op {name!r}: workspace", workspace)
        touched = -1 if bytes is None else bytes if type(bytes) is int else _whole(f"op {name!r}: bytes", bytes)
        measured = -1 if duration is None else duration
        measured = measured if type(measured) is int else _whole(f"op {name!r}: duration", measured)
        values = (name, dtype, KIND_CODE[kind], PHASE_CODE[phase], layer, flops, touched)
        more = (workspace, device, priority, measured, random)
        try:
            for add, value in zip(self._add_op, values + more):
                add(value)
        except OverflowError:
            raise TraceError(f"op {name!r}: FLOPs, bytes, workspace or duration: 2**63 or more") from None
        self._reads.extend(reads)
        self._writes.extend(writes)
        self._read_start.append(len(self._reads))
        self._write_start.append(len(self._writes))
        for key, value in (("engine", engine), ("group", group), ("alternatives", alternatives), ("splits", splits)):
            if value:
                self._sparse[key][row] = value if isinstance(value, str) else tuple(value)
        if function:
            self._sparse["function"][row] = function
        if counted is not None and counted != flops:
            self._sparse["counted"][row] = int(counted)
        if ring is not None:
            self._sparse["ring"][row] = _ring(name, ring)
        if releases:
            self._sparse["releases"][row] = tuple(releases)
        if unbinds:
            self._sparse["unbinds"][row] = tuple(unbinds)
        if any(place >= 0 for place in views):
            self._sparse["views"][row] = tuple(views)
        return row

    def release(self, tensor: int, op: int) -> None:
        """Record that the program holds a tensor until an existing op ends; released after the op's other releases."""
        self._sparse["releases"][op] = (*self._sparse["releases"].get(op, ()), tensor)

    def extend_tensors(self, names: Sequence[str], dtypes: Sequence[str], numbers: Mapping[str, Ints]) -> int:
        """Add many checked tensors by column: `bytes`, `role` (codes) and `layer`. Returns the first id."""
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
        reads: tuple[Ints, Sequence[int]],
        writes: tuple[Ints, Sequence[int]],
    ) -> int:
        """Add many checked ops by column. Returns the first id.

        numbers: every column of numbers (codes; -1 for unknown).
        reads, writes: the ids of all ops one after the other, and how many each op has.
        """
        first = len(self._ops["name"])
        self._ops["name"].extend(names)
        self._ops["dtype"].extend(dtypes)
        for key, column in numbers.items():
            self._ops[key].frombytes(column.astype(np.int64).tobytes())
        for ids, start, (more, counts) in (
            (self._reads, self._read_start, reads),
            (self._writes, self._write_start, writes),
        ):
            ids.frombytes(more.tobytes())
            start.frombytes((start[-1] + np.cumsum(counts, dtype=np.int64)).tobytes())
        return first

    def extend_ops_like(
        self,
        ops: OpColumns,
        like: Sequence[int],
        reads: Sequence[Sequence[int]],
        writes: Sequence[Sequence[int]],
        changes: Mapping[str, Mapping[int, Any]],
    ) -> None:
        """Add many ops, each like one of `ops`, given by its id, with other operands.

        changes: per field, of some of the new ops by their place among them, what they have instead: numbers as
            codes, and -1 for unknown. `views` of an op with more or fewer operands than the old one are left out, and
            `counted` where it is no more than the FLOPs; `releases` and `unbinds` are not copied.
        """
        rows = np.array(like, np.int64)
        numbers = {key: getattr(ops, key)[rows].astype(np.int64) for key in NUMBERS_OF_OPS}
        for key, column in numbers.items():
            if changed := changes.get(key):
                column[list(changed)] = list(changed.values())
        names, dtypes = [ops.name[i] for i in like], [ops.dtype[i] for i in like]
        for row, dtype in changes.get("dtype", {}).items():
            dtypes[row] = dtype
        tables = [
            (np.fromiter(chain.from_iterable(operands), np.int64), [len(each) for each in operands])
            for operands in (reads, writes)
        ]
        first = self.extend_ops(names, dtypes, numbers, *tables)
        counts = [np.diff(start)[rows] != own for start, (_, own) in zip((ops.read_start, ops.write_start), tables)]
        other, flops = (counts[0] | counts[1]).tolist(), numbers["flops"].tolist()
        for key in SPARSE_OF_OPS:
            theirs, changed = getattr(ops, key), changes.get(key, {})
            values = (
                [(row, changed[row] if row in changed else theirs.get(i)) for row, i in enumerate(like)]
                if theirs
                else changed.items()
            )
            for row, value in values:
                if value and not (key == "views" and other[row]) and not (key == "counted" and value == flops[row]):
                    self._sparse[key][first + row] = value

    def note(self, key: str, row: int, value: Any) -> None:
        """Set a sparse field, one that few tensors or ops have, of an existing row."""
        self._sparse[key][row] = value

    def note_all(self, key: str, values: Iterable[tuple[int, Any]]) -> None:
        """Set a sparse field of existing rows, each given with its value."""
        self._sparse[key].update(values)

    def copy_op(self, op: Op, **changes: Any) -> int:
        """Append a copy of `op` with some fields changed; `views` only where it has as many reads and writes.

        Where `flops` change, `counted` changes in proportion, unless it is given. `unbinds` are not copied.
        """
        fields = dict(zip(COPIED, _copied(op)))
        if op.counted is not None and op.flops and "flops" in changes:
            fields["counted"] = -(-op.counted * int(changes["flops"]) // op.flops)
        fields.update(changes)
        if len(fields["reads"]) == len(op.reads) and len(fields["writes"]) == len(op.writes):
            fields.setdefault("views", op.views)
        return self.op(**fields)

    def copier(self, ops: OpColumns) -> Callable[[int, Sequence[int], Sequence[int], int], int]:
        """A function that appends a copy of one of many ops, given its id, with as many other operands, and a device.

        `releases` and `unbinds` are not copied.
        """
        numbers = (getattr(ops, key).tolist() for key in ("kind", "phase", "layer", "flops", "bytes", "workspace"))
        before = list(zip(ops.name, ops.dtype, *numbers))
        after = list(zip(*(getattr(ops, key).tolist() for key in ("priority", "duration", "random"))))
        sparse = [(self._sparse[key], getattr(ops, key)) for key in SPARSE_OF_OPS if getattr(ops, key)]

        def copy(op: int, reads: Sequence[int], writes: Sequence[int], device: int) -> int:
            row = len(self._ops["name"])
            for add, value in zip(self._add_op, (*before[op], device, *after[op])):
                add(value)
            self._reads.extend(reads)
            self._writes.extend(writes)
            self._read_start.append(len(self._reads))
            self._write_start.append(len(self._writes))
            for own, theirs in sparse:
                if op in theirs:
                    own[row] = theirs[op]
            return row

        return copy

    def run_copier(self, ops: OpColumns) -> Callable[[Ints, Ints, Ints, int], None]:
        """A function that appends copies of a run of ops, given their ids, all they read and write, and a device.

        The operands stand one after the other, as many as the ops have; `releases` and `unbinds` are not copied.
        """
        keys = ("kind", "phase", "layer", "flops", "bytes", "workspace", "priority", "duration", "random")
        numbers = {key: getattr(ops, key).astype(np.int64) for key in keys}
        counts = [np.diff(start) for start in (ops.read_start, ops.write_start)]
        sparse = []
        for key in SPARSE_OF_OPS:
            if theirs := getattr(ops, key):
                has = np.zeros(len(ops.name), np.bool_)
                has[list(theirs)] = True
                sparse.append((self._sparse[key], theirs, has))

        def copy(run: Ints, reads: Ints, writes: Ints, device: int) -> None:
            listed: list[int] = run.tolist()
            own = {key: column[run] for key, column in numbers.items()} | {"device": np.full(len(run), device)}
            names, dtypes = ([column[op] for op in listed] for column in (ops.name, ops.dtype))
            per_read, per_write = (count[run].tolist() for count in counts)
            first = self.extend_ops(names, dtypes, own, (reads, per_read), (writes, per_write))
            for mine, theirs, has in sparse:
                mine.update((first + i, theirs[listed[i]]) for i in np.flatnonzero(has[run]).tolist())

        return copy

    def repeat_tensor(self, like: int, name: str, bytes: int, replaces: int | None) -> int:
        """Add a tensor like an existing one, with another name, other bytes and what it takes over. Returns its id."""
        t = self._tensors
        row = _repeat(t, like, {"name": name, "bytes": bytes, "replaces": -1 if replaces is None else replaces})
        self._repeat_sparse(("shape", "zeros", "saved_for", "axes"), like, row)
        return row

    def repeat_op(
        self, like: int, name: str, flops: int, reads: Sequence[int], writes: Sequence[int], group: str = ""
    ) -> int:
        """Append an op like an existing one, with another name, other FLOPs and group, and as many other operands.

        `releases` and `unbinds` are not repeated, nor is `counted`. Returns its id.
        """
        row = _repeat(self._ops, like, {"name": name, "flops": flops})
        self._reads.extend(reads)
        self._writes.extend(writes)
        self._read_start.append(len(self._reads))
        self._write_start.append(len(self._writes))
        self._repeat_sparse(("engine", "alternatives", "splits", "function", "ring", "views"), like, row)
        if group:
            self._sparse["group"][row] = group
        return row

    def mark(self) -> Mark:
        """Where the rows to come begin."""
        return Mark(len(self._tensors["name"]), len(self._ops["name"]), len(self._reads), len(self._writes))

    def continue_series(self, before: Mark, between: Mark, number: int, count: int) -> bool:
        """Append `count` further blocks like the last two, `before` to `between` and `between` to now.

        number: of the last block, which its names and groups say in one place, as those of the one before say
            `number - 1`. Whatever is equal in both stays; ids that are higher in the last by the length of a block go
            on growing.
        Returns whether the two are such a series; where they are none, nothing is appended.
        """
        try:
            rows = Series(before, between, self.mark(), number, count)
            tensors = rows.columns(self._tensors, 0, growing=("replaces",))
            ops = rows.columns(self._ops, 1)
            operands = [
                (ids, start, rows.ids(ids, place), rows.numbers(np.diff(start[rows.first(1) :]), rows.length(1)))
                for place, ids, start in ((2, self._reads, self._read_start), (3, self._writes, self._write_start))
            ]
            sparse = {key: rows.sparse(values, key) for key, values in self._sparse.items()}
        except NoSeries:
            return False
        for own, more in ((self._tensors, tensors), (self._ops, ops)):
            for key, column in more.items():
                own[key].extend(column) if isinstance(column, list) else own[key].frombytes(column.tobytes())
        for ids, start, more_ids, counts in operands:
            ids.frombytes(more_ids.tobytes())
            start.frombytes((start[-1] + np.cumsum(counts)).tobytes())
        for key, values in sparse.items():
            self._sparse[key].update(values)
        return True

    def _repeat_sparse(self, keys: Sequence[str], like: int, row: int) -> None:
        for key in keys:
            values = self._sparse[key]
            if like in values:
                values[row] = values[like]

    def build(
        self,
        *,
        outputs: Sequence[int] | None = None,
        carry: Sequence[tuple[int, int]] | None = None,
        origin: Origin | None = None,
    ) -> Trace:
        """The trace of everything added. Raises TraceError where it cannot be computed."""
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
            axes=s["axes"],
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
            releases=s["releases"],
            views=s["views"],
            function=s["function"],
            ring=s["ring"],
            counted=s["counted"],
            unbinds=s["unbinds"],
        )
        return Trace(tensors, ops, outputs=outputs, carry=carry, meta=self.meta, origin=origin)


def _repeat(columns: Mapping[str, Any], like: int, changes: Mapping[str, Any]) -> int:
    """Append a row like another one to each column, with some values changed; its number."""
    for column in columns.values():
        column.append(column[like])
    row = len(columns["name"]) - 1
    for key, value in changes.items():
        columns[key][row] = value
    return row


def _column(name: str, values: Any, kind: type[np.generic]) -> Any:
    """An array of a narrower type. Raises TraceError where a value does not fit, instead of wrapping around."""
    wide = np.array(values, np.int64)
    if kind is np.int64:
        return wide
    narrow = wide.astype(kind)
    if kind is not np.bool_ and len(wide) and not np.array_equal(narrow, wide):
        raise TraceError(f"{name}: a value between {wide.min()} and {wide.max()} does not fit")
    return narrow


def _whole(field: str, value: Any) -> int:
    """A whole number, of any type. Raises TraceError, which names the field, for any other value."""
    number = None
    with suppress(TypeError, ValueError, OverflowError):  # no number, or none that is finite
        number = int(value)
    if number is None or number != value:
        nearest = f"; nearest: {round(value)}" if number is not None and isinstance(value, Real) else ""
        raise TraceError(f"{field}: value {value!r}: expected a whole number{nearest}")
    return number


def _ring(name: str, ring: Ring) -> Ring:
    """A ring as it is. Raises TraceError where it is none."""
    if ring.axis not in AXES:
        raise TraceError(f"op {name!r}: ring: axis {ring.axis!r} is unknown{near(str(ring.axis), AXES)}")
    for key, value, least in (("ranks", ring.ranks, 2), ("passes", ring.passes, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise TraceError(f"op {name!r}: ring: {key} is {value!r}, not a whole number of at least {least}")
    return ring
