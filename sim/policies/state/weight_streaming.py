"""Weights reside on the host and are fetched layer by layer, for each visit of forward, backward and update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from sim.errors import PolicyError
from sim.plan import Action, Drop, Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.trace.graph import Trace
from sim.trace.layers import layer_runs
from sim.trace.tensor import ROLE_CODE


@dataclass(frozen=True, kw_only=True)
class WeightStreaming(Policy):
    """Each weight is fetched some layers before the layer that reads it, and its copy is released behind that layer.

    A run is a maximal sequence of ops of one layer and phase on a device, those of no layer included. A weight that a
    run reads is fetched when the run `ahead` of them earlier begins, and released when its own run ends, unless one of
    the next `ahead` runs reads it, too: then it stays until there. A weight that the device itself updates goes
    back to the host after the update; one that nothing updates, or the host, only comes. The host keeps its copy all
    the time. What an op on another engine or in a group reads stays where it is by default.
    Source: the schedule of Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
        Learning", SC 2021, arXiv:2104.07857, sections 5 and 6.2, on one device and without NVMe; "offload_param" with
        "cpu" in DeepSpeed's ZeRO-3.
    Bounds: weights resident at once: those of `ahead` + 1 neighbouring runs; bytes from the host per step: at most
        each weight's once per run that reads it. Time at least those bytes over the link's rate. O(ops + operands).
    Departs: DeepSpeed fetches by module and by a budget of live parameters, and takes order and reuse from the first
        iteration; here from the trace. Nothing is partitioned: one device has all. The prefetch of the first runs
        starts with the iteration, not during the previous one.

    ahead: how many runs before its own a weight is fetched; 0 fetches it when its run begins.
    Raises PolicyError for a platform without host tier, or a negative `ahead`.
    """

    moves = True
    needs = frozenset({"host"})
    manages = ("weights",)
    fidelity = "reconstruction"
    other_values = by_parameter(ahead=2)

    ahead: Annotated[int, Ge(0)] = 1

    def plan(self, problem: Problem) -> Plan:
        """Where weights begin, their fetches, and their releases."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"weight_streaming: {platform.name} has no host tier to keep weights in")
        host = platform.host.name
        runs: dict[int, list[list[int]]] = {}  # per device
        position = [0] * len(trace.ops)  # of an op's run among those of its device
        for run in layer_runs(trace, range(len(trace.ops))):
            own = runs.setdefault(int(trace.op_columns.device[run[0]]), [])
            for op in run:
                position[op] = len(own)
            own.append(run)
        actions: list[tuple[int, Action]] = []
        place = {}
        for weight in _streamed(trace):
            place[weight] = host
            device = int(trace.op_columns.device[trace.readers(weight)[0]])
            home = platform.home(device).name
            actions += self._visits(trace, weight, runs[device], position, home, host)
        return Plan(trace, tuple(action for _, action in sorted(actions, key=lambda row: row[0])), place=place)

    def _visits(
        self, trace: Trace, weight: int, runs: list[list[int]], position: list[int], home: str, host: str
    ) -> Iterator[tuple[int, Action]]:
        """A weight's fetches and releases, each with the op before which it is needed. runs: of its device."""
        first: dict[int, int] = {}  # per run that reads it the first op that does
        for op in trace.readers(weight):
            first.setdefault(position[op], op)
        visits = list(first)
        new = int(trace.replaced_by[weight])
        for k, at in enumerate(visits):
            if k == 0 or at - visits[k - 1] > self.ahead:
                yield first[at], Move(weight, home, keep=True, before=runs[max(at - self.ahead, 0)][0])
            last = k + 1 == len(visits)
            if new < 0 if last else visits[k + 1] - at > self.ahead:
                yield first[at], Drop(weight, home, after=runs[at][-1])
        while new >= 0 and trace.replaced_by[new] >= 0:
            new = int(trace.replaced_by[new])
        if new >= 0:
            yield int(trace.producer[new]), Move(new, host, after=int(trace.producer[new]))


def _streamed(trace: Trace) -> Iterator[int]:
    """Weights that ops of one device's own engine alone read, and overwrite if anything does."""
    c, columns = trace.op_columns, trace.tensor_columns
    for t in range(len(columns.name)):
        if columns.role[t] != ROLE_CODE["weight"] or trace.producer[t] >= 0 or not columns.bytes[t]:
            continue
        touching, value = {*trace.readers(t)}, int(trace.replaced_by[t])
        while value >= 0:
            touching |= {int(trace.producer[value]), *trace.readers(value)}
            value = int(trace.replaced_by[value])
        plain = trace.readers(t) and all(op not in c.engine and op not in c.group for op in touching)
        if plain and len({int(c.device[op]) for op in touching}) == 1:
            yield t
