"""What the zone keeps: the borders of residency groups, and results that are worth their time on its engines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.errors import PolicyError
from sim.hardware.cost import bytes_per_second, flops_per_second
from sim.plan import Problem
from sim.policies.recompute.rotor import held_outside
from sim.solvers.regions import chain_of
from sim.trace.chain import Chain
from sim.trace.op import KINDS


def residency_groups(line: Chain, room: int) -> list[tuple[int, int]]:
    """Maximal runs of stages whose working set fits the zone, as (first stage, last stage).

    The working set of a run is resident during its backward: the checkpoints before it, its input among them, what its
    stages save, and the most that a stage needs beside that. A stage that does not fit by itself is a group.

    room: bytes for activations.
    """
    groups: list[tuple[int, int]] = []
    first, borders, saved, beside = 0, line.x[0], 0, 0
    for i, stage in enumerate(line.stages):
        needs = max(stage.saving_temp, stage.backward_temp + line.x[i + 1])
        if i > first and borders + saved + stage.xbar + max(beside, needs) > room:
            groups.append((first, i - 1))
            first, saved, beside = i, 0, 0
            borders += stage.x
        saved += stage.xbar
        beside = max(beside, needs)
    return [*groups, (first, len(line) - 1)]


def borders_of(problem: Problem) -> tuple[list[tuple[int, int]], list[int]]:
    """The residency groups of the trace, and the tensors between them; no groups where the trace has no chain."""
    try:
        line = chain_of(problem, "mt3000_layered")
    except PolicyError:
        return [], []
    groups = residency_groups(line, problem.budget - held_outside(problem, line))
    return groups, [line.stages[last].output for _, last in groups[:-1]]


def intense_results(problem: Problem, threshold: float | None) -> NDArray[np.bool_]:
    """Per tensor whether its producer has a high compute intensity. Shape (tensors,).

    threshold: FLOPs per byte touched; None where an op's arithmetic takes its engine longer than its bytes.
    """
    trace, platform = problem.trace, problem.platform
    c = trace.op_columns
    balance: dict[tuple[int, str, int, str], float] = {}
    intense = np.zeros(len(c.name) + 1, np.bool_)  # the last entry serves tensors without a producer
    for op in np.flatnonzero(c.flops > 0).tolist():
        if threshold is None:
            key = int(c.device[op]), c.engine.get(op, ""), int(c.kind[op]), c.dtype[op]
            if key not in balance:
                engine, kind = platform.engines[platform.engine_for(*key[:2])], KINDS[key[2]]
                rate = bytes_per_second(engine, kind, platform.tier(engine.home))
                balance[key] = flops_per_second(engine, kind, key[3]) / rate
        least = balance[key] if threshold is None else threshold
        intense[op] = c.flops[op] > least * max(int(trace.touched[op]), 1)
    return intense[trace.producer]
