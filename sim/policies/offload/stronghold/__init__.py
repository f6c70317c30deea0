"""STRONGHOLD: the device holds a window of layers that moves along; everything else of the model is on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from annotated_types import Ge

from sim.errors import Deadlock, Infeasible
from sim.plan import Action, Drop, Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.stronghold.window import Window, as_gradients_arrive, chosen, distinct
from sim.rewrites.fused_update import fuse_updates
from sim.rewrites.host_update import Split, device_updates, updated_on_host, updating_host, with_resident
from sim.rewrites.weight_parts import with_weight_parts
from sim.solvers.streaming import parts_up, stream_weights


@dataclass(frozen=True, kw_only=True)
class Stronghold(Policy):
    """A window of layers has its weights on the device; the next comes in while one runs, the CPU updates behind it.

    Layers are runs of ops of one layer and phase that read weights, with what follows without any (a loss), those of
    no layer included. The first `window` of them are fetched when the iteration begins, or with `resident` are on the
    device then, where the end of the iteration before has brought them. While
    layer i runs, that of i + window is fetched, and at its end the device's copy is released; the last `window` stay
    for backward, which does the same in reverse. A layer's gradients leave as they are produced. Its update is an op of
    the CPU that begins once they have arrived, beside backward, and new weights of the first layers go up when they
    exist.
    The window is the smallest for which (1) what is resident besides weights and the largest window + 1 neighbouring
    layers fit the device, (2) on a link that copies one after the other each layer's weights arrive before it begins in
    forward, (3) the same in backward, and (4) the CPU has updated a layer before the next iteration fetches it. Where
    none meets all, it is the largest that fits. Of several devices each has to meet them, with the same window.
    Source: Sun et al., "STRONGHOLD: Fast and Affordable Billion-Scale Deep Learning Model Training", SC 2022 (abstract:
        the working window, the analytic choice of its size, updates beside backward).
    Bounds: with `resident`, layers of equal times F and copies H: no stall from window 1 on if H <= F, else from
        L - (L - 1) F / H on; with a smaller window w forward takes (L - w) H + F. Weights on the device: those of
        window + 1 layers. Plans in O(ops + operands) per window tried.
    Departs: the paper's inequalities are per window; the cumulative form is exact for a link that copies in order.
        Times are those of the platform's model, not of profiled iterations, and do not count that a device waits for
        another. Activations stay on the device; other policies move or recompute them. One executor and one CPU
        worker; no drive behind the host, no MILP over windows of different lengths. Condition (4) assumes the next
        iteration at once. Conditions (2) and (4) count the first layers as resident, which without `resident`, the
        default, they are not: forward then waits for the copy of the first.
        The device hands an update to the CPU between two of its ops. The paper's ring of buffers is the release at a
        layer's end.

    window: layers whose weights the device holds ahead; 0 chooses it.
    resident: whether the weights of the first layers are on the device when the iteration begins, as in the paper.
        What forward reads there is then a copy, which backward fetches from the host instead, so that no recomputation
        can read it: leave it off for `stronghold + full_recompute`.
    choice: how it is chosen: by the `formula` above, or by `search`: every window that fits is replayed and the fastest
        taken, the smallest among equals.
    Raises PolicyError for a platform without host tier or engine `cpu`.
    """

    moves = True
    rewrites = True
    needs = frozenset({"host", "cpu"})
    fidelity = "reconstruction"
    saves = MappingProxyType({"fusion": "the CPU's optimizer is one kernel, which touches each operand once"})
    manages = ("gradients", "optimizer_state", "weights")
    other_values = by_parameter(window=3, choice="search", resident=True)

    window: Annotated[int, Ge(0)] = 0
    choice: Literal["formula", "search"] = "formula"
    resident: bool = False

    def plan(self, problem: Problem) -> Plan:
        """The plan for the window that is given or chosen."""
        platform, trace = problem.platform, problem.trace
        host = updating_host(platform, "stronghold", "to keep layers in")
        updates = device_updates(trace)
        fused = fuse_updates(with_weight_parts(trace, updates), updates)
        split = Split(fused)
        new = updated_on_host(split, in_place=True)
        early, arrived = as_gradients_arrive(new.trace, [new.tensors[t] for t in split.ready()], problem, host)
        cost = problem.cost.over(early, platform)
        devices = [Window(early, arrived, platform, cost, host, device) for device in range(early.devices)]
        if self.window:
            return _planned(problem, devices, self.window, self.resident)
        if self.choice == "formula":
            return _planned(problem, devices, chosen(devices), self.resident)
        best: tuple[int, int, Plan] | None = None
        for window in distinct(devices):
            plan = _planned(problem, devices, window, self.resident)
            try:
                end = problem.evaluate(plan).end
            except (Infeasible, Deadlock):
                continue
            if best is None or (end, window) < best[:2]:
                best = end, window, plan
        return best[2] if best else _planned(problem, devices, 1, self.resident)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The update beside the device, as here; without memory to save it may still be the faster one."""
        return {"the update on the CPU": self.plan(problem)}


def _planned(problem: Problem, devices: Sequence[Window], window: int, stays: bool) -> Plan:
    """The plan for a window."""
    trace, platform, host, updates = devices[0].trace, problem.platform, devices[0].host, devices[0].updates
    early = {t: ops for each in devices for t, ops in each.first_reads(window).items()}
    resident = with_resident(trace, early if stays else {})
    whole = resident.trace
    actions: list[Action] = []
    streamed, place = stream_weights(whole, platform, host, window, but=resident.copies, weighted=True)
    for copy, (last, fresh) in resident.copies.items():
        home = platform.home(int(whole.op_columns.device[last])).name
        place[copy] = home
        actions.append(Drop(copy, home, after=last))
        actions.append(Move(fresh, home, after=int(whole.producer[fresh])))
    for last, first in trace.carry:
        made = int(whole.producer[last])
        if first in place and first not in resident.copies and made in updates and whole.replaced_by[first] < 0:
            actions.append(Drop(first, host, after=made))
    for op in sorted(updates):
        for t in whole.reads(op):
            made = int(whole.producer[t])
            if made >= 0 and made not in updates:
                last = max([made, *(r for r in whole.readers(t) if r not in updates)])
                actions.append(Move(t, host, after=last))
    actions += parts_up(whole, updates, [platform.home(d).name for d in range(whole.devices)])
    return Plan(whole, (*streamed, *actions), place=place, notes={"window": window})
