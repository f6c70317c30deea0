"""SuperOffload: on a superchip the CPU updates while backward still runs, and the device updates what comes last."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from annotated_types import Ge

from sim.errors import Deadlock, Infeasible, OutOfMemory, TiersimError
from sim.plan import Action, Drop, Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.sharing import rewriting
from sim.rewrites.fused_update import OPTIMIZER, fuse_updates, tiles
from sim.rewrites.host_update import OnHost, Split, device_updates, updated_on_host, updating_host
from sim.rewrites.masters import into_gradients, without_held_weights
from sim.rewrites.order import must_precede, with_sends
from sim.rewrites.rewrite import reorder
from sim.rewrites.weight_parts import with_weight_parts
from sim.solvers.streaming import parts_up
from sim.trace.graph import Trace
from sim.trace.phases import FORWARD


@dataclass(frozen=True, kw_only=True)
class SuperOffload(Policy):
    """Update each layer on the CPU as soon as its gradients are there, and the layers that come last on the device.

    As in `zero_offload` states live on the host, gradients go down as they are produced and weights come up. But no
    update waits for the end of backward: a layer's begins when the gradients of `lag` further layers are complete,
    which gives its own time to arrive, so that the CPU works beside the device. The layers whose gradients come last,
    which the CPU would still have to update when backward has ended, stay with their states on the device and are
    updated there.
    Source: SuperOffload, arXiv:2509.21271, by its abstract, and DeepSpeed's public `superoffload_stage3`: an update
        begins with the last gradient of its sub-group, and the last sub-groups are updated on the device.
    Bounds: time is at least that of forward and backward. Of M parameters that the CPU updates 2M bytes go down and 2M
        up, and with fp32 masters the host holds 14M at most: 12M of states, and gradients, whose places the new weights
        take. One replay for no layer, and for each number of layers tried, doubling, that might be faster than what has
        been replayed.
    Headline: up to 2.5 times the throughput of other offload systems on GH200. Here, on `gh200`, GPT-3 350M with
        4 x 512 tokens and six layers updated on the device is 1.61 times as fast as `zero_offload`, 1.16 with none.
    Departs: a published update begins before the norm of all gradients is known, and is undone where that asks for
        clipping; here one that needs the norm of all begins behind that. Gradients cross in their own type,
        where the published system casts them on the device. The split is found by replay. Weights stay on the
        device; where they do not fit, `zero_offload(weights=host) + weight_streaming` lets them flow.

    on_device: how many layers, those with the last gradients, the device updates; None for the fastest that fits.
    lag: how many layers' gradients are complete before an update begins.
    Raises PolicyError for a platform without host tier or an engine `cpu`, and where one update reads another's result.
    """

    moves = True
    rewrites = True
    fidelity = "reconstruction"
    needs = frozenset({"host", "cpu"})
    saves = MappingProxyType({"fusion": "the CPU's optimizer is one kernel, which touches each operand once"})
    manages = ("gradients", "optimizer_state", "weights")
    other_values = by_parameter(on_device=0, lag=3)

    on_device: Annotated[int, Ge(0)] | None = None
    lag: Annotated[int, Ge(0)] = 1

    def plan(self, problem: Problem) -> Plan:
        """The fastest of the numbers of layers tried, the least of equally fast ones, or the one asked for."""
        trace = problem.trace
        host = updating_host(problem.platform, "superoffload", "to offload to")
        groups = _by_readiness(trace)
        if not groups:
            return Plan(trace)
        if self.on_device is not None:
            return self._splitting(groups[: max(0, len(groups) - self.on_device)], host, problem)
        plans = [self._splitting(groups, host, problem)]
        ran = {0: _ran(problem, plans[0])}
        if _is_full_in_forward(ran[0], problem):
            return plans[0]
        counts = sorted({*(1 << i for i in range(len(groups).bit_length())), len(groups)})
        plans += [self._splitting(groups[: len(groups) - count], host, problem) for count in counts]
        least = list(map(problem.least_ns, plans))
        best: tuple[int, int] | None = None  # the time, and of equal ones the first
        for place in sorted(range(len(plans)), key=lambda place: (least[place], place)):
            if best is not None and (least[place], place) > best:
                continue
            end = ran[place] if place in ran else _ran(problem, plans[place])
            if isinstance(end, int):
                best = min(best or (end, place), (end, place))
        return plans[best[1] if best else 0]

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The update divided between CPU and device; without memory to save it may still be the faster one."""
        return {"the update beside the device": self.plan(problem)}

    def _splitting(self, on_cpu: list[list[int]], host: str, problem: Problem) -> Plan:
        """The plan where the CPU updates these groups of ops."""
        trace = problem.trace
        if not on_cpu:
            return Plan(trace)
        chosen = sorted(op for group in on_cpu for op in group)
        homes = tuple(problem.platform.home(device).name for device in range(trace.devices))
        key = self, tuple(chosen), host, homes
        return rewriting(trace, key, chosen, lambda: self._split(trace, chosen, host, homes))

    def _split(self, trace: Trace, chosen: Sequence[int], host: str, homes: Sequence[str]) -> Plan:
        """The plan where the CPU runs these ops of the optimizer."""
        fused = fuse_updates(with_weight_parts(trace, chosen), chosen)
        stay = {trace.op_columns.name[op] for op in {*device_updates(trace)} - {*chosen}}
        updates = [op for op in device_updates(fused) if fused.op_columns.name[op] not in stay]
        split = Split(without_held_weights(into_gradients(fused, updates), updates), updates)
        split.check_independent("superoffload")
        new = updated_on_host(split)
        moved, at = self._early(new, split)
        up = parts_up(moved, [at[new.ops[op]] for op in split.updates], homes)
        return Plan(moved, (*_copies(split, new, at, host, homes), *up))

    def _early(self, new: OnHost, split: Split) -> tuple[Trace, Mapping[int, int]]:
        """The CPU's updates between the ops of backward; per op of the trace before, its new id."""
        ends = {tile: max(self._needed(split, tile), default=-1) for tile in split.updates}
        tiles = sorted(ends, key=lambda tile: (ends[tile], tile))
        follow: dict[int, list[int]] = {}
        for k, tile in enumerate(tiles):
            follow.setdefault(ends[tiles[min(k + self.lag, len(tiles) - 1)]], []).append(tile)
        early = dict.fromkeys(follow.get(-1, ()))
        for op in range(len(split.trace.ops)):
            if op not in split.updates:  # what gathers a new weight comes after the update, however late that is
                early |= dict.fromkeys([*sorted(must_precede(split.trace, op) & split.updates), op])
            early |= dict.fromkeys(follow.get(op, ()))
        order = [new.ops[op] for op in early]
        return reorder(new.trace, order), {old: position for position, old in enumerate(order)}

    @staticmethod
    def _needed(split: Split, tile: int) -> set[int]:
        """The ops that an update waits for, other updates aside; what sends a gradient reads it before that."""
        return with_sends(split.trace, must_precede(split.trace, tile)) - {*split.updates}


def _ran(problem: Problem, plan: Plan) -> int | TiersimError:
    """When a plan's replay ends, or why it does not."""
    try:
        return problem.evaluate(plan).end
    except (Infeasible, Deadlock) as error:
        return error


def _is_full_in_forward(ran: int | TiersimError, problem: Problem) -> bool:
    """Whether a device is full before backward begins: with more layers updated there it holds all that, and more."""
    homes = {problem.platform.home(device).name for device in range(problem.trace.devices)}
    if not isinstance(ran, OutOfMemory) or ran.tier not in homes:
        return False
    if ran.log is None:  # at the start
        return True
    ops = ran.log.interval("op")
    return bool((ran.log.trace.op_columns.phase[ops[ops >= 0]] == FORWARD).all())


def _complete(trace: Trace, group: Collection[int]) -> int:
    """The op with which the last operand of some updates is complete, -1 where none is produced."""
    reads = {t for op in group for t in trace.reads(op)}
    return max((int(trace.producer[t]) for t in reads if int(trace.producer[t]) not in group), default=-1)


def _by_readiness(trace: Trace) -> list[list[int]]:
    """The optimizer's ops in groups of a layer each, in the order in which their gradients are complete."""
    optimizer = [op for op in device_updates(trace) if trace.op_columns.kind[op] == OPTIMIZER]
    return sorted(tiles(trace, optimizer), key=lambda group: (_complete(trace, frozenset(group)), group))


def _copies(split: Split, new: OnHost, at: Mapping[int, int], host: str, homes: Sequence[str]) -> Iterator[Action]:
    """Each gradient down when it is complete, each new weight up when it is made."""
    old = split.trace
    for t in split.ready():
        yield Move(new.tensors[t], host, after=at[new.ops[split.last_use[t]]])
    for t, fresh in new.fresh.items():
        used = at[new.ops[split.last_use[t]]]
        home = homes[int(old.op_columns.device[split.last_use[t]])]
        made = at[new.ops[int(old.producer[split.weights[t]])]]
        yield Drop(new.tensors[t], home, after=max(used, made))
        yield Move(fresh, home, after=max(used, made))
