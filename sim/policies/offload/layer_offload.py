"""Megatron-LM's CPU offloading: the saved tensors of the first layers, a whole layer at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge

from sim.errors import Deadlock, Infeasible, PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.saved_copies import Save, Trip, forward_passes, round_trips, saves_of
from sim.rewrites.codecs import elements
from sim.solvers.cascade import cascade
from sim.trace.chain import activations, backward_ops
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.layers import layer_runs, op_layers


@dataclass(frozen=True, kw_only=True)
class LayerOffload(Policy):
    """Offload what the first n of L layers save, and keep what the last L - n do.

    Each saved tensor of layer i goes out when it is saved. Before layer L - n + i runs forward, the device waits for
    those copies and releases the tensors; before layer L - n + i - 1 runs backward the copies back begin, all of a
    layer, and its own backward waits for all of them.
    Source: Transformer Engine, `pytorch/cpu_offload.py` (the default synchronization), which Megatron-LM calls with
        `cpu_offloading_num_layers`.
    Bounds: between forward and backward the device holds what L - n layers save. A layer is fetched while L - n - 1
        others run backward: with n = L - 1 none does, and it is slower than `swap_all` in order to hold a
        single layer. Time O(ops + tensors); without `layers` a replay for each halving of their number.
    Departs: one stream carries both directions in the published code; here they overlap where they meet. A user
        chooses n; without it the fewest layers that fit are found by halving. A tensor is one copy, of the layer
        that uses it last, also where ops of two layers save it. With several devices the layers of a stage
        count. Tensors beyond the host's capacity go on to the next tier behind it.

    layers: how many, from the first; None for the fewest that fit.
    min_elements: of a tensor that is offloaded.
    Raises PolicyError for a platform without a host tier, and for as many layers as there are or more.
    """

    moves = True
    needs = frozenset({"host", "layers"})
    fidelity = "code"
    rarely = "tensors of random nets are smaller than what is offloaded"
    other_values = by_parameter(layers=2, min_elements=1 << 24)

    layers: Annotated[int, Ge(0)] | None = None
    min_elements: Annotated[int, Ge(0)] = 1 << 20

    def plan(self, problem: Problem) -> Plan:
        """The plan for so many layers, or for the fewest whose replay fits."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"layer_offload: {platform.name} has no host tier to offload to")
        passes = _layer_passes(trace)
        most = max((len(runs) for runs in passes), default=1) - 1
        if self.layers is not None:
            if self.layers > max(most, 0):
                raise PolicyError(
                    f"layer_offload: layers is {self.layers}; of {most + 1} the last one stays: at most {max(most, 0)}"
                )
            return self._offloading(self.layers, problem, passes)
        few, many = -1, max(most, 0)  # the fewest that fit lie above `few`; `many` are taken if none do
        fitting = None
        while many - few > 1:
            middle = (few + many) // 2 if few >= 0 else 0
            plan = self._offloading(middle, problem, passes)
            if _fits(problem, plan):
                many, fitting = middle, plan
            else:
                few = middle
        return fitting or self._offloading(many, problem, passes)

    def _offloading(self, count: int, problem: Problem, passes: list[list[list[int]]]) -> Plan:
        trace, platform = problem.trace, problem.platform
        assert platform.host is not None
        layer, device = op_layers(trace), trace.op_columns.device
        saves, begins = kept(trace, "layer_saves", self.min_elements, lambda: self._saves(trace, passes))
        trips: dict[int, list[tuple[Save, Trip]]] = {d: [] for d in range(trace.devices)}
        for save, runs, i, own in saves:
            n = min(count, len(runs) - 1)
            if i >= n:
                continue
            ahead, at = int(layer[runs[len(runs) - n + i - 1][0]]), int(device[own])
            before = begins.get((at, ahead), ())
            place = bisect_right(before, own)
            trips[at].append((save, Trip(runs[len(runs) - n + i][0], before[place - 1] if place else own, own)))
        host = platform.host.name
        actions = [a for d, own in trips.items() for a in round_trips(trace, own, host, platform.home(d).name)]
        return Plan(trace, cascade(trace, platform, actions, host))

    def _saves(
        self, trace: Trace, passes: list[list[list[int]]]
    ) -> tuple[list[_Saved], Mapping[tuple[int, int], Sequence[int]]]:
        """What layers save that is large enough to leave; per device and layer where runs of backward ops begin."""
        layer, device = op_layers(trace).tolist(), trace.op_columns.device.tolist()
        backward = layer_runs(trace, backward_ops(trace).tolist())
        begins: dict[tuple[int, int], list[int]] = {}
        for run in backward:
            begins.setdefault((device[run[0]], layer[run[0]]), []).append(run[0])
        begin_of = {op: run[0] for run in backward for op in run}
        position = {op: (runs, i) for runs in passes for i, run in enumerate(runs) for op in run}
        active = activations(trace)
        found = []
        for save in saves_of(trace, weights=False, duplicates=False):
            runs, i = position.get(save.at, ([], 0))
            if i >= len(runs) - 1 or not active[save.tensor] or save.tensor in trace.outputs:
                continue
            if elements(trace.tensors[save.tensor]) >= self.min_elements:
                found.append(_Saved(save, runs, i, begin_of[save.readers[0]]))
        return found, begins


class _Saved(NamedTuple):
    """Something that a layer saves.

    runs: the layers of its forward pass. place: that of its own among them.
    own: the first op of the run of backward that reads it.
    """

    save: Save
    runs: list[list[int]]
    place: int
    own: int


def _layer_passes(trace: Trace) -> list[list[list[int]]]:
    """For each forward pass of a device its layers, as runs of forward ops, in order."""
    layer = op_layers(trace)
    passes = []
    for part in forward_passes(trace):
        runs = [run for run in layer_runs(trace, part.forward) if layer[run[0]] >= 0]
        if runs:
            passes.append(runs)
    return passes


def _fits(problem: Problem, plan: Plan) -> bool:
    try:
        problem.evaluate(plan)
    except (Infeasible, Deadlock):
        return False
    return True
