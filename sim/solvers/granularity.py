"""How finely a solver looks at a trace: op by op, or in groups of ops of one stage or layer."""

from __future__ import annotations

from itertools import groupby

from sim.errors import PolicyError
from sim.plan import Problem
from sim.solvers.nodes import Nodes, body, nodes_of
from sim.solvers.regions import chain_of
from sim.solvers.schedule import TraceIndex
from sim.trace.layers import op_layers

GRANULARITIES = ("op", "stage")


def by_op(problem: Problem, index: TraceIndex, policy: str, *, apart: bool = False) -> Nodes:
    """One node per op. apart: one value per tensor."""
    return nodes_of(problem, index, [[op] for op in range(body(problem, policy))], apart=apart)


def by_stage(problem: Problem, index: TraceIndex, policy: str, most: int) -> Nodes:
    """At most `most` nodes: groups of ops of the same stages of the chain, or of the same layers without a chain.

    Raises PolicyError where the trace has too many phases, or too few layers, for so few nodes.
    """
    count = body(problem, policy)
    stage_of = _stages(problem, policy, count)
    highest = max(stage_of, default=0)
    for width in range(1, highest + 2):
        parts = _parts(problem, stage_of, width)
        if len(parts) <= most:
            return nodes_of(problem, index, parts)
    raise PolicyError(f"policy {policy!r}: the trace can't be divided into {most} nodes or fewer; allow more max_ops")


def _stages(problem: Problem, policy: str, count: int) -> list[int]:
    """Per op its stage, or its layer + 1."""
    try:
        line = chain_of(problem, policy)
    except PolicyError:
        layer: list[int] = op_layers(problem.trace).tolist()
        return [index + 1 for index in layer[:count]]
    return [line.stage_of.get(op, 0) for op in range(count)]


def _parts(problem: Problem, stage_of: list[int], width: int) -> list[list[int]]:
    phase = problem.trace.op_columns.phase.tolist()
    return [list(ops) for _, ops in groupby(range(len(stage_of)), lambda op: (phase[op], stage_of[op] // width))]
