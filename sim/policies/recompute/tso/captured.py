"""Ops that a device runs as one captured graph: they save launch overhead, and hold their results until the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.plan import Problem
from sim.policies.recompute.tso.segments import Ints
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace
from sim.trace.launched import CAPTURED
from sim.trace.launched import captured as captured_before
from sim.trace.tensor import ROLE_CODE


@dataclass(frozen=True, slots=True)
class Part:
    """The ops of one graph, in program order, and earlier ones whose results lie in its memory as well."""

    ops: Sequence[int]
    before: Sequence[int] = ()


def saved_launches(problem: Problem, launch: int | None) -> Ints:
    """Per op the launch overhead, ns, that a captured graph saves, at most the op's time.

    launch: ns, at most that of the engine on which an op runs; None for that, and for nothing where the op's time was
    measured. Members of a group save nothing.
    """
    trace, platform = problem.trace, problem.platform
    c = trace.op_columns
    cost = problem.on_engines().cost
    saved_launch = np.zeros(len(c.name), np.int64)
    for op in range(len(saved_launch)):
        most = platform.engines[platform.engine_for(int(c.device[op]), c.engine.get(op, ""))].launch
        held = most if c.duration[op] < 0 else 0
        ns = held if launch is None else min(launch, most)
        saved_launch[op] = 0 if op in c.group else min(ns, cost.op_ns(op))
    return saved_launch


def saved_dispatch(problem: Problem) -> Ints:
    """Per op the ns that a captured graph saves since it is dispatched as one: what an op adds beyond its own time."""
    alone = problem.on_engines().cost
    return np.array([problem.cost.op_ns(op) - alone.op_ns(op) for op in range(len(problem.trace.ops))], np.int64)


def captured(problem: Problem, parts: Iterable[Part], saved_launch: Ints, charges: Mapping[int, int]) -> Trace:
    """The trace with some parts captured, and further ns charged to some ops.

    What dies inside a part stays in its memory until the part ends: it counts as workspace of the ops that follow
    in it. Weight gradients, outputs, and what passes its bytes on to what overwrites it lie elsewhere. Where a CPU
    dispatches ops, it dispatches a part as one.
    """
    parts = list(parts)
    trace, cost = problem.trace, problem.on_engines().cost
    workspace, duration = trace.op_columns.workspace.copy(), trace.op_columns.duration.copy()
    columns, kept = trace.tensor_columns, set(trace.outputs)
    held_until = trace.held_until
    for op, ns in charges.items():
        duration[op] = cost.op_ns(op) + ns
    for part in parts:
        inside = set(part.ops)
        dying: dict[int, int] = {}
        for op in (*part.before, *part.ops):
            for t in trace.writes(op):
                role, last = columns.role[t], int(held_until[t])
                if last in inside and role != ROLE_CODE["gradient"] and t not in kept and trace.replaced_by[t] < 0:
                    dying[last] = dying.get(last, 0) + int(columns.bytes[t])
        gone = 0
        for op in part.ops:
            workspace[op] += gone
            gone += dying.get(op, 0)
            if saved_launch[op]:
                time = int(duration[op]) if op in charges else cost.op_ns(op)
                duration[op] = time - int(saved_launch[op])
    together = [*captured_before(trace.meta, len(duration)), *(list(part.ops) for part in parts)]
    meta = {**trace.meta, CAPTURED: together} if problem.platform.dispatch and together else None
    return with_columns(trace, meta, workspace=workspace, duration=duration)
