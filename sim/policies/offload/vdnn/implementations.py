"""The implementations among which an op may choose, each with its workspace and time."""

from __future__ import annotations

from collections.abc import Mapping

from sim.errors import OutOfMemory
from sim.log import FIRST_RUNS, WHY
from sim.rewrites.rewrite import choose_implementation
from sim.trace.graph import Trace


def choices(trace: Trace, op: int) -> list[tuple[int, float, str]]:
    """(workspace, time relative to the op's own, name) of each implementation; the op's own is called ""."""
    own = (int(trace.op_columns.workspace[op]), 1.0, "")
    return [own, *((a.workspace, a.time_factor, a.name) for a in trace.op_columns.alternatives[op])]


def choose(trace: Trace, chosen: Mapping[int, str]) -> Trace:
    """The trace with these implementations; ids and order stay."""
    return choose_implementation(trace, {op: name for op, name in chosen.items() if name})


def implementations(trace: Trace, algorithm: str) -> dict[int, str]:
    """Per op with alternatives the one with least workspace (m) or least time (p)."""
    best = (lambda c: c) if algorithm == "m" else (lambda c: (c[1], c[0], c[2]))
    return {op: min(choices(trace, op), key=best)[2] for op in sorted(trace.op_columns.alternatives)}


def next_smaller(trace: Trace, op: int, name: str) -> str | None:
    """Of an op that has the implementation `name`, the one with the next smaller workspace; None where none has."""
    if op not in trace.op_columns.alternatives:
        return None
    known = choices(trace, op)
    now = next(workspace for workspace, _, other in known if other == name)
    smaller = [choice for choice in known if choice[0] < now]
    return max(smaller, key=lambda c: (c[0], -c[1], c[2]))[2] if smaller else None


def overflow(error: OutOfMemory, home: str, trace: Trace) -> int | None:
    """The op that found no space: the one after the last that ran; None where it was no device's memory."""
    if error.log is None or error.tier != home:
        return None
    first = {WHY[name] for name in FIRST_RUNS}
    rows = zip(error.log.interval("why").tolist(), error.log.interval("op").tolist())
    op = max((op for why, op in rows if why in first), default=-1) + 1
    return op if op < len(trace.ops) else None
