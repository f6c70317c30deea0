"""What makes a trace one that can be computed: each fault is a TraceError that names op and tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.trace.progress import blocked, reached_before

if TYPE_CHECKING:
    from sim.trace.graph import Trace

Ints = NDArray[np.int64]


def check_graph(trace: Trace) -> None:
    """Sizes that can be, names that differ, and reads of what is there."""
    t, c = trace.tensor_columns, trace.op_columns
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
        by = [c.name[i] for i in range(len(c.name)) if double_id in trace.writes(i)]
        raise TraceError(f"tensor {t.name[double_id]!r} has two producers: {', '.join(map(repr, by))}")
    reader = np.repeat(np.arange(len(c.name)), np.diff(c.read_start))
    early = np.flatnonzero(trace.producer[c.read_ids] >= reader)
    if len(early):
        op, tensor = int(reader[early[0]]), int(c.read_ids[early[0]])
        writer = int(trace.producer[tensor])
        how = "reads its own output" if writer == op else f"reads it before {c.name[writer]!r} makes it"
        raise TraceError(f"op {c.name[op]!r}: tensor {t.name[tensor]!r}: {how}")
    _check_overwrites(trace, reader)
    _check_groups(trace)


def _check_groups(trace: Trace) -> None:
    """Members of groups must be able to meet: none waits, itself or by what stands before it, for the others' end."""
    t, c = trace.tensor_columns, trace.op_columns
    waits = []
    for op, tensor, other, member in blocked(trace):
        does = "reads" if tensor in trace.reads(op) and trace.producer[tensor] == other else "overwrites"
        if other == member:  # it has not begun, for what stands before it on its device
            what = f"which op {c.name[other]!r} on device {c.device[other]} has yet to make"
        else:
            uses = "makes" if trace.producer[tensor] == other else "reads"
            what = f"which op {c.name[other]!r} {uses} in group {c.group[other]!r}"
            what += f", and that waits for op {c.name[member]!r} on device {c.device[member]}"
        waits.append(f"op {c.name[op]!r} on device {c.device[op]} {does} tensor {t.name[tensor]!r}, {what}")
    if waits:
        raise TraceError(f"ops wait for each other: {'; '.join(waits)}")


def _check_overwrites(trace: Trace, reader: Ints) -> None:
    t, c = trace.tensor_columns, trace.op_columns
    new = np.flatnonzero(t.replaces >= 0)
    if not len(new):
        return
    old = t.replaces[new]
    values, counts = np.unique(old, return_counts=True)
    if (counts > 1).any():
        raise TraceError(f"tensor {t.name[int(values[counts > 1][0])]!r} is overwritten twice")
    for wrong, why in (
        (trace.producer[new] < 0, "but no op writes it"),
        (t.bytes[new] != t.bytes[old], "which has another size"),
        (trace.producer[old] >= trace.producer[new], "which is not made before it"),
    ):
        if wrong.any():
            a, b = int(new[wrong][0]), int(old[wrong][0])
            raise TraceError(f"tensor {t.name[a]!r} replaces {t.name[b]!r}, {why}")
    gone_at = np.full(len(t.name), len(c.name), np.int64)
    gone_at[old] = trace.producer[new]
    late = np.flatnonzero(reader > gone_at[c.read_ids])
    if len(late):
        op, tensor = int(reader[late[0]]), int(c.read_ids[late[0]])
        raise TraceError(
            f"op {c.name[op]!r}: tensor {t.name[tensor]!r}: read after {c.name[int(gone_at[tensor])]!r} overwrote it"
        )
    _check_across_devices(trace, reader, gone_at)


def _check_across_devices(trace: Trace, reader: Ints, gone_at: Ints) -> None:
    """What one device overwrites in place every other device must have come to make, or to read, before."""
    t, c = trace.tensor_columns, trace.op_columns
    if not c.device.any():
        return
    made = np.flatnonzero((gone_at < len(c.name)) & (trace.producer >= 0))
    ops = np.concatenate((reader, trace.producer[made]))
    tensors = np.concatenate((c.read_ids, made))
    over = gone_at[tensors]
    rows = np.flatnonzero(over < len(c.name))
    rows = rows[c.device[ops[rows]] != c.device[over[rows]]]
    if not len(rows):
        return
    reached = reached_before(trace, np.unique(over[rows]).tolist())
    for row in rows.tolist():
        op, write = int(ops[row]), int(over[row])
        if op > reached[write][int(c.device[op])]:
            tensor, what = t.name[int(tensors[row])], "reads" if row < len(reader) else "makes"
            raise TraceError(
                f"op {c.name[write]!r} on device {c.device[write]} overwrites tensor {tensor!r} in place, and op "
                f"{c.name[op]!r} on device {c.device[op]} {what} it: nothing orders the two (a send, a collective, "
                "or a result of one that the other waits for)"
            )


def check_range(trace: Trace, ids: Sequence[int]) -> None:
    """Outputs and what is carried are tensors of the trace."""
    count = len(trace.tensor_columns.name)
    if ids and (min(ids) < 0 or max(ids) >= count):
        raise TraceError(f"outputs or carry: a tensor id is out of range 0..{count - 1}")


def check_ends(trace: Trace) -> None:
    """Outputs must be there at the end, and what is carried must be able to start the next iteration."""
    name = trace.tensor_columns.name
    for what, once in (
        ("is an output twice", trace.outputs),
        ("is carried twice", [a for a, _ in trace.carry]),
        ("is carried to twice", [b for _, b in trace.carry]),
    ):
        if len(set(once)) != len(once):
            values, counts = np.unique(np.array(once), return_counts=True)
            raise TraceError(f"tensor {name[int(values[counts > 1][0])]!r} {what}")
    for t in trace.outputs:
        if trace.replaced_by[t] >= 0:
            raise TraceError(f"tensor {name[t]!r} is an output, but {name[trace.replaced_by[t]]!r} overwrites it")
    kept, size = set(trace.outputs), trace.tensor_columns.bytes
    for last, first in trace.carry:
        why = ""
        if last not in kept:
            why = "is no output"
        elif trace.producer[first] >= 0:
            why = "is not there when an iteration starts"
        elif size[last] != size[first]:
            why = "has another size"
        if why:
            which = last if last not in kept else first
            raise TraceError(f"carry of {name[last]!r} to {name[first]!r}: {name[which]!r} {why}")


def check_releases(trace: Trace) -> None:
    """What the program lets go of at an op's end is there by then, is let go once, and is wanted no more."""
    c, name, count = trace.op_columns, trace.tensor_columns.name, len(trace.tensor_columns.name)
    let_go: dict[int, int] = {}
    for op, tensors in c.releases.items():
        for t in tensors:
            if not 0 <= t < count:
                raise TraceError(f"op {c.name[op]!r}: releases: a tensor id is out of range 0..{count - 1}")
            if t in let_go:
                first = c.name[let_go[t]]
                raise TraceError(f"op {c.name[op]!r}: tensor {name[t]!r}: {first!r} has released it already")
            let_go[t] = op
    if not let_go:
        return
    kept, producer, last_use, replaced_by = set(trace.outputs), trace.producer, trace.last_use, trace.replaced_by
    for t, op in let_go.items():
        why = ""
        if producer[t] < 0:
            why = "it is there from the start, and stays"
        elif producer[t] > op:
            why = f"released before {c.name[producer[t]]!r} makes it"
        elif replaced_by[t] >= 0:
            why = f"released, but {name[replaced_by[t]]!r} takes over its storage"
        elif last_use[t] > op:
            why = f"released before {c.name[last_use[t]]!r} reads it"
        elif t in kept:
            why = "released, but it is an output"
        if why:
            raise TraceError(f"op {c.name[op]!r}: tensor {name[t]!r}: {why}")
