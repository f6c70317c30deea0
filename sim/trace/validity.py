"""Checks that a trace can be computed: each fault raises a TraceError that names op and tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.foreign_text import half_a_character
from sim.trace.columns import Graph, distinct
from sim.trace.progress import blocked, reached_before

Ints = NDArray[np.int64]


def check_meta(meta: Mapping[str, Any]) -> None:
    """Raise TraceError for facts with a text that no file can hold."""
    if half_a_character([json.dumps(dict(meta), ensure_ascii=False, default=str)]) is not None:
        raise TraceError("meta: a text holds half a character (a lone surrogate)")


def check_graph(trace: Graph) -> None:
    """Raise TraceError for an impossible size, a duplicate name, a bad id, or a read of a tensor not yet produced."""
    t, c = trace.tensor_columns, trace.op_columns
    _check_texts(trace)
    for field, column, names in (
        ("bytes", t.bytes, t.name),
        ("flops", c.flops, c.name),
        ("workspace", c.workspace, c.name),
        ("device", c.device, c.name),
    ):
        bad = np.flatnonzero(column < 0)
        if len(bad):
            raise TraceError(f"{names[bad[0]]!r}: {field} is negative ({column[bad[0]]})")
    for field, column in (("tensors", t.bytes), ("workspaces", c.workspace)):
        if float(column.sum(dtype=np.float64)) >= 2.0**62:
            raise TraceError(f"all {field} together are 2**62 or more")
    if len(c.flops) and int(c.flops.max()) >= 2**62:  # together they may be more
        raise TraceError(f"op {c.name[int(np.argmax(c.flops))]!r}: has 2**62 FLOPs or more")
    for noun, names in (("op", c.name), ("tensor", t.name)):
        if len(set(names)) != len(names):
            seen: set[str] = set()
            duplicate = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
            raise TraceError(f"two {noun}s are called {duplicate!r}")
    for ids, least in ((c.read_ids, 0), (c.write_ids, 0), (t.replaces, -1)):
        if len(ids) and (int(ids.max()) >= len(t.name) or int(ids.min()) < least):
            raise TraceError(f"a tensor id is out of range 0..{len(t.name) - 1}")
    times_written = np.bincount(c.write_ids, minlength=len(t.name))
    if (times_written > 1).any():
        duplicate_id = int(np.argmax(times_written > 1))
        producers = [c.name[i] for i in range(len(c.name)) if duplicate_id in trace.writes(i)]
        raise TraceError(f"tensor {t.name[duplicate_id]!r} has two producers: {', '.join(map(repr, producers))}")
    reader = np.repeat(np.arange(len(c.name)), np.diff(c.read_start))
    too_early = np.flatnonzero(trace.producer[c.read_ids] >= reader)
    if len(too_early):
        op, tensor = int(reader[too_early[0]]), int(c.read_ids[too_early[0]])
        writer = int(trace.producer[tensor])
        fault = "reads its own output" if writer == op else f"reads it before {c.name[writer]!r} produces it"
        raise TraceError(f"op {c.name[op]!r}: tensor {t.name[tensor]!r}: {fault}")
    _check_views(trace, reader)
    _check_overwrites(trace, reader)
    _check_groups(trace)


def sizes_are_possible(trace: Graph, of_one_size: tuple[Ints, Ints]) -> bool:
    """Whether a trace is as it must be that differs in sizes alone from one that has been checked.

    of_one_size: pairs of tensors with the same bytes, see `Trace.of_one_size`.
    """
    t, c = trace.tensor_columns, trace.op_columns
    new, old = of_one_size
    return (
        all(not len(column) or int(column.min()) >= 0 for column in (t.bytes, c.flops, c.workspace))
        and all(float(column.sum(dtype=np.float64)) < 2.0**62 for column in (t.bytes, c.workspace))
        and (not len(c.flops) or int(c.flops.max()) < 2**62)
        and np.array_equal(t.bytes[new], t.bytes[old])
        and not (trace.view_of and t.bytes[list(trace.view_of)].any())
    )


def _check_texts(trace: Graph) -> None:
    """Raise TraceError for a text that no file can hold."""
    t, c = trace.tensor_columns, trace.op_columns
    sparse = (c.engine, c.group, c.function, t.saved_for)
    words = [*set(c.dtype), *set(t.dtype), *(text for column in sparse for text in column.values())]
    words += [each.name for entry in c.alternatives.values() for each in entry]
    words += [part for entry in c.splits.values() for part in entry]
    for texts in (c.name, t.name, words):
        if (wrong := half_a_character(texts)) is not None:
            raise TraceError(f"'{wrong}': holds half a character (a lone surrogate)")


def _check_groups(trace: Graph) -> None:
    """Raise TraceError where members of groups wait for each other, directly or through preceding ops."""
    t, c = trace.tensor_columns, trace.op_columns
    waits = []
    for op, tensor, other, member in blocked(trace):
        verb = "reads" if tensor in trace.reads(op) and trace.producer[tensor] == other else "overwrites"
        if other == member:  # it has not started, because of what precedes it on its device
            reason = f"which op {c.name[other]!r} on device {c.device[other]} has yet to produce"
        else:
            uses = "produces" if trace.producer[tensor] == other else "reads"
            reason = f"which op {c.name[other]!r} {uses} in group {c.group[other]!r}"
            reason += f", and that waits for op {c.name[member]!r} on device {c.device[member]}"
        waits.append(f"op {c.name[op]!r} on device {c.device[op]} {verb} tensor {t.name[tensor]!r}, {reason}")
    if waits:
        raise TraceError(f"ops wait for each other: {'; '.join(waits)}")


def _check_views(trace: Graph, reader: Ints) -> None:
    """Raise TraceError unless each view shares the storage of a tensor that its readers read and that is not a view."""
    t, c = trace.tensor_columns, trace.op_columns
    for op, places in c.views.items():
        results, read = len(trace.writes(op)), len(trace.reads(op))
        if len(places) != results or not all(-1 <= place < read for place in places):
            raise TraceError(f"op {c.name[op]!r}: views: {places} does not fit {results} results and {read} reads")
    views = trace.view_of
    for view, storage in views.items():
        why = ""
        if t.bytes[view]:
            why = f"has {t.bytes[view]} bytes of its own"
        elif storage in views:
            why = f"shares the storage of {t.name[storage]!r}, which is a view itself"
        elif t.replaces[view] >= 0 or trace.replaced_by[view] >= 0:
            why = "is overwritten, or overwrites"
        if why:
            raise TraceError(f"op {c.name[trace.producer[view]]!r}: view {t.name[view]!r} {why}")
    if not views:
        return
    for entry in np.flatnonzero(np.isin(c.read_ids, list(views))).tolist():
        op, view = int(reader[entry]), int(c.read_ids[entry])
        if views[view] not in trace.reads(op):
            both = f"view {t.name[view]!r}, but not {t.name[views[view]]!r}, whose storage it shares"
            raise TraceError(f"op {c.name[op]!r}: reads {both}")


def _check_overwrites(trace: Graph, reader: Ints) -> None:
    t, c = trace.tensor_columns, trace.op_columns
    new = np.flatnonzero(t.replaces >= 0)
    if not len(new):
        return
    old = t.replaces[new]
    times_overwritten = np.bincount(old, minlength=len(t.name))
    if (times_overwritten > 1).any():
        raise TraceError(f"tensor {t.name[int(np.argmax(times_overwritten > 1))]!r} is overwritten twice")
    for wrong, why in (
        (trace.producer[new] < 0, "but no op writes it"),
        (t.bytes[new] != t.bytes[old], "which has another size"),
        (trace.producer[old] >= trace.producer[new], "which is not produced before it"),
    ):
        if wrong.any():
            a, b = int(new[wrong][0]), int(old[wrong][0])
            raise TraceError(f"tensor {t.name[a]!r} replaces {t.name[b]!r}, {why}")
    overwritten_by = np.full(len(t.name), len(c.name), np.int64)
    overwritten_by[old] = trace.producer[new]
    late = np.flatnonzero(reader > overwritten_by[c.read_ids])
    if len(late):
        op, tensor = int(reader[late[0]]), int(c.read_ids[late[0]])
        overwriter = c.name[int(overwritten_by[tensor])]
        raise TraceError(f"op {c.name[op]!r}: tensor {t.name[tensor]!r}: read after {overwriter!r} overwrote it")
    _check_across_devices(trace, reader, overwritten_by)


def _check_across_devices(trace: Graph, reader: Ints, overwritten_by: Ints) -> None:
    """Raise TraceError where nothing orders a write in place and another device's use of the old value.

    Before one device overwrites a tensor in place, every other device that produces or reads it must have done so.
    """
    t, c = trace.tensor_columns, trace.op_columns
    if not c.device.any():
        return
    produced = np.flatnonzero((overwritten_by < len(c.name)) & (trace.producer >= 0))
    ops = np.concatenate((reader, trace.producer[produced]))
    tensors = np.concatenate((c.read_ids, produced))
    overwriter = overwritten_by[tensors]
    rows = np.flatnonzero(overwriter < len(c.name))
    rows = rows[c.device[ops[rows]] != c.device[overwriter[rows]]]
    if not len(rows):
        return
    reached = reached_before(trace, distinct(overwriter[rows]).tolist())
    for row in rows.tolist():
        op, write = int(ops[row]), int(overwriter[row])
        if op > reached[write][int(c.device[op])]:
            tensor, verb = t.name[int(tensors[row])], "reads" if row < len(reader) else "produces"
            raise TraceError(
                f"op {c.name[write]!r} on device {c.device[write]} overwrites tensor {tensor!r} in place, and op "
                f"{c.name[op]!r} on device {c.device[op]} {verb} it: nothing orders the two (a send, a collective, "
                "or a result that one of them waits for)"
            )


def check_range(trace: Graph, outputs: Sequence[int], carry: Sequence[tuple[int, int]]) -> None:
    """Raise TraceError unless the outputs and the carried tensors are tensors of the trace."""
    ids, count = [*outputs, *(t for pair in carry for t in pair)], len(trace.tensor_columns.name)
    if ids and (min(ids) < 0 or max(ids) >= count):
        raise TraceError(f"outputs or carry: a tensor id is out of range 0..{count - 1}")


def check_ends(trace: Graph, outputs: Sequence[int], carry: Sequence[tuple[int, int]]) -> None:
    """Raise TraceError unless outputs exist at the end and carried tensors can start the next iteration."""
    name = trace.tensor_columns.name
    for fault, ids in (
        ("is an output twice", outputs),
        ("is carried twice", [a for a, _ in carry]),
        ("is carried to twice", [b for _, b in carry]),
    ):
        if len(set(ids)) != len(ids):
            values, counts = np.unique(np.array(ids), return_counts=True)
            raise TraceError(f"tensor {name[int(values[counts > 1][0])]!r} {fault}")
    for t in outputs:
        if trace.replaced_by[t] >= 0:
            raise TraceError(f"tensor {name[t]!r} is an output, but {name[trace.replaced_by[t]]!r} overwrites it")
    kept, size = set(outputs), trace.tensor_columns.bytes
    for t in kept & trace.view_of.keys():
        if trace.view_of[t] not in kept:
            raise TraceError(
                f"view {name[t]!r} is an output, but {name[trace.view_of[t]]!r}, whose storage it shares, is not"
            )
    for last, first in carry:
        why = ""
        if last not in kept:
            why = "is not an output"
        elif trace.producer[first] >= 0:
            why = "does not exist when an iteration starts"
        elif size[last] != size[first]:
            why = "has another size"
        if why:
            which = last if last not in kept else first
            raise TraceError(f"carry of {name[last]!r} to {name[first]!r}: {name[which]!r} {why}")


def check_releases(trace: Graph, outputs: Sequence[int]) -> None:
    """Raise TraceError for a release of a tensor not yet produced, released before, or still needed."""
    c, name = trace.op_columns, trace.tensor_columns.name
    released_at = _places(trace, "releases", "released it")
    if not released_at:
        return
    kept, producer, last_use, replaced_by = set(outputs), trace.producer, trace.last_use, trace.replaced_by
    for t, op in released_at.items():
        why = ""
        if producer[t] < 0:
            why = "it exists from the start and is kept"
        elif producer[t] > op:
            why = f"released before {c.name[producer[t]]!r} produces it"
        elif replaced_by[t] >= 0:
            why = f"released, but {name[replaced_by[t]]!r} takes over its storage"
        elif last_use[t] > op:
            why = f"released before {c.name[last_use[t]]!r} reads it"
        elif t in kept:
            why = "released, but it is an output"
        if why:
            raise TraceError(f"op {c.name[op]!r}: tensor {name[t]!r}: {why}")


def check_unbinds(trace: Graph) -> None:
    """Raise TraceError where variables let go of a tensor not yet produced, or twice."""
    for t, op in _places(trace, "unbinds", "let go of it").items():
        if not 0 <= trace.producer[t] <= op:
            name = trace.tensor_columns.name[t]
            raise TraceError(f"op {trace.op_columns.name[op]!r}: tensor {name!r}: unbound before an op produces it")


def _places(trace: Graph, key: str, done: str) -> dict[int, int]:
    """Per tensor that ops name under a key the op. Raises TraceError for one out of range, or named twice."""
    names, count = trace.op_columns.name, len(trace.tensor_columns.name)
    places: dict[int, int] = {}
    for op, tensors in getattr(trace.op_columns, key).items():
        for t in tensors:
            if not 0 <= t < count:
                raise TraceError(f"op {names[op]!r}: {key}: a tensor id is out of range 0..{count - 1}")
            if t in places:
                tensor = trace.tensor_columns.name[t]
                raise TraceError(f"op {names[op]!r}: tensor {tensor!r}: {names[places[t]]!r} has {done} already")
            places[t] = op
    return places
