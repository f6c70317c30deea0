"""On which engine, and so in which zone, each kind of op runs: by the instruction mapping table of the platform."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from sim.hardware.cost import ns_on
from sim.hardware.mapping import can_run
from sim.hardware.platform import Platform
from sim.plan import Problem
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace
from sim.trace.op import KINDS
from sim.trace.tensor import ROLE_CODE

Ints = NDArray[np.int64]


def mapped(problem: Problem, *, roles: Collection[str], crossing: bool = True) -> tuple[Trace, Mapping[str, str]]:
    """The trace with the ops of each kind on the engine that takes the least time, and which kinds run elsewhere.

    The time is that of all its ops of one device and type by the table, and that of the copies that bring operands
    from the device's zone to the engine's and results back. An op that names an engine, or belongs to a group, stays;
    so does one whose time was measured, if its engine can run it. What no engine can run stays, too, and is refused
    by the run. roles: an op that reads or writes a tensor of another role stays.

    crossing: whether an engine of another zone may be chosen.
    """
    trace, platform = problem.trace, problem.platform
    c = trace.op_columns
    free = np.ones(len(c.name), np.bool_)
    free[[*c.engine, *c.group]] = False
    others = ~np.isin(trace.tensor_columns.role, [ROLE_CODE[role] for role in roles])
    for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
        free[np.repeat(np.arange(len(c.name)), np.diff(start))[others[ids]]] = False
    chosen: dict[int, str] = {}
    moved: dict[str, str] = {}
    groups: dict[tuple[int, int, str], list[int]] = {}
    for op in np.flatnonzero(free).tolist():
        groups.setdefault((int(c.device[op]), int(c.kind[op]), c.dtype[op]), []).append(op)
    for (device, code, dtype), members in groups.items():
        kind, main = KINDS[code], platform.engine_for(device)
        able = can_run(platform.engines[main], kind, dtype)
        ops = np.array([op for op in members if not able or c.duration[op] < 0], np.int64)
        times: dict[int, int] = {main: int(ns_on(trace, ops, platform, main).sum())} if able and len(ops) else {}
        for i, engine in enumerate(platform.engines):
            same_zone = engine.home == platform.home(device).name
            if i == main or engine.device not in (-1, device) or not (crossing or same_zone) or not len(ops):
                continue
            if can_run(engine, kind, dtype) and (copies := _crossing_ns(trace, ops, platform, device, i)) is not None:
                times[i] = int(ns_on(trace, ops, platform, i).sum()) + copies
        best = min(times, key=times.__getitem__, default=main)
        if best != main:
            name = platform.engines[best].name
            chosen |= dict.fromkeys(ops.tolist(), name.partition("@")[0])
            moved[kind] = name
    if not chosen:
        return trace, {}
    duration = c.duration.copy()
    duration[list(chosen)] = -1  # a measured time is one of its engine
    return with_columns(trace, engine={**c.engine, **chosen}, duration=duration), moved


def _crossing_ns(trace: Trace, ops: Ints, platform: Platform, device: int, engine: int) -> int | None:
    """Nanoseconds of the copies of operands to an engine's zone and of results back; None where there is no route."""
    unit, home = platform.engines[engine], platform.home(device).name
    if unit.home == home:
        return 0
    if not (platform.route(home, unit.home) and platform.route(unit.home, home)):
        return None
    size = trace.tensor_columns.bytes
    reads = [int(size[t]) for op in ops.tolist() for t in trace.reads(op)] if home not in unit.reaches else []
    writes = [int(size[t]) for op in ops.tolist() for t in trace.writes(op)]
    out, back = ((home, unit.home), (unit.home, home))
    return sum(platform.move_ns(b, *out) for b in reads) + sum(platform.move_ns(b, *back) for b in writes)
