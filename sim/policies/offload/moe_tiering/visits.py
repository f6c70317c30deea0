"""Which experts each layer's router has chosen, in a trace: the visits to them, in program order."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sim.hardware.platform import Platform
from sim.solvers.streaming import idle, streamed
from sim.trace.chain import FORWARD
from sim.trace.graph import Trace
from sim.trace.layers import layer_runs

EXPERT = re.compile(r"^(.*?\bexperts?\.?\d+)\.")
"""The name of an expert in that of its weight, as `workloads.experts` and Hugging Face's module lists have it."""


@dataclass(frozen=True)
class Visit:
    """The ops of a layer and phase in which experts are read.

    routed: the op before which the router has chosen.
    first: per expert, in program order, its first op that reads one of its weights.
    forward: whether it belongs to the forward pass.
    device: of its ops.
    """

    routed: int
    first: tuple[tuple[str, int], ...]
    forward: bool
    device: int


def experts_of(trace: Trace, platform: Platform) -> dict[str, list[int]]:
    """Per expert the initial tensors of its weights: those that one device alone reads, or that nothing reads."""
    found: dict[str, list[int]] = {}
    for t in sorted([*(weight for weight, _ in streamed(trace, platform)), *idle(trace, "weight")]):
        match = EXPERT.match(trace.tensor_columns.name[t])
        if match:
            found.setdefault(match[1], []).append(t)
    return found


def visits_of(trace: Trace, experts: dict[str, list[int]]) -> list[Visit]:
    """The visits of all devices, in program order. A layer's update is one, too."""
    c = trace.op_columns
    owner = {t: name for name, weights in experts.items() for t in weights}
    visits = []
    plain = [op for op in range(len(trace.ops)) if op not in c.engine]
    for run in layer_runs(trace, plain):
        first: dict[str, int] = {}
        for op in run:
            for t in trace.reads(op):
                if t in owner:
                    first.setdefault(owner[t], op)
        if first:
            forward = bool(c.phase[run[0]] == FORWARD)
            named = (op for op in run if EXPERT.match(c.name[op]))
            routed = next(named, min(first.values())) if forward else run[0]
            visits.append(Visit(min(routed, *first.values()), tuple(first.items()), forward, int(c.device[run[0]])))
    return visits
