"""MPress: stages of a pipeline that hold too much use the spare memory of others, recompute, or offload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from sim.errors import OutOfMemory, PolicyError
from sim.log import WHY, EventLog
from sim.plan import Action, Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.mpress.assignment import HOST, RECOMPUTE, TECHNIQUES, Assignment, Choice
from sim.policies.hybrid.mpress.timeline import Timeline, timeline
from sim.rewrites.split import split_tensors
from sim.solvers.cascade import cascade
from sim.solvers.located import index_of
from sim.solvers.outcome import nothing_fits
from sim.solvers.schedule import schedule_of
from sim.trace.graph import Trace
from sim.units import format_bytes

STEP = 64
"""By which part of the budget a device's aim is lowered at least where a replay did not fit."""


@dataclass(frozen=True, kw_only=True)
class MPress(Policy):
    """Stages that hold too much send tensors to those with room; what these cannot take is recomputed, or offloaded.

    Under 1F1B the first stages of a pipeline hold activations of more microbatches than the last ones. A stage beyond
    its budget gives up tensors that its forward leaves for its backward, first those that save most bytes for the time
    that they add, each by the technique that adds the least: a peer's memory over a link of their own, recomputation,
    the host's memory. A peer (a device without a stage as well) takes what fits there during the whole absence;
    where the copies to one take longer than the absence, the tensor is striped over several, in proportion to the rates
    of their links. Copies out begin when the tensor was last used, copies back just in time, and a link carries one
    after the other. Then the plan is replayed: where it does not fit, the stage aims lower; a tensor that makes a
    device wait longer than another technique would take gets that one; until no replay gains.
    Source: Zhou, Wang, Yu, Li, Bai, Yan, Xu, "MPress: Democratizing Billion-Scale Model Training on Multi-GPU Servers
        via Memory-Saving Inter-Operator Parallelism", HPCA 2023.
    Bounds: no peer holds more than its budget, lent bytes included. Time O(tensors x (ops + devices squared)) a round,
        and one replay each.
    Headline: more throughput than the ZeRO family in equal memory, on Bert and GPT with PipeDream and DAPPLE on eight
        V100 or A100.
    Departs: the order of techniques and the rule for stripes are ours, since the paper's planner is described without
        them. Times are those of the trace and the cost model in the pipeline's own order, not of measured iterations.
        Which stage runs on which device is not searched: a profile states one rate for all pairs of a node. Weights,
        stashed ones too, and optimizer states stay. Tensors beyond the host's capacity go on to the tier behind it.

    peers: whether tensors go to other devices.
    host: whether they go to the host.
    stripes: whether a tensor may be in the memory of several peers.
    rounds: replays at most.
    Notes of the plan: `peer_bytes`, `recompute_bytes` and `host_bytes`, those of the tensors by technique; `striped`,
        how many tensors are in the memory of several peers; `unlimited_ns`, the time expected with unlimited memory.
    Raises PolicyError for a trace on one device, or with `peers` devices without links between them; Infeasible where
        no replay fits.
    """

    recomputes = True
    moves = True
    rewrites = True
    needs = frozenset({"peers"})
    fidelity = "reconstruction"
    rarely = "nothing leaves a stage that fits, and only what a stage lacks"
    other_values = by_parameter(peers=False, host=False, rounds=1)
    unseen = by_parameter(stripes="it takes three devices; test_mpress.py has them")

    peers: bool = True
    host: bool = True
    stripes: bool = True
    rounds: Annotated[int, Ge(1)] = 8

    def plan(self, problem: Problem) -> Plan:
        """The fastest plan of those that were replayed."""
        trace, platform = problem.trace, problem.platform
        if trace.devices < 2:
            raise PolicyError("mpress: the trace is on one device, and has no peers; a layout with pp > 1 has")
        if self.peers and not platform.has_peers:
            raise PolicyError(f"mpress: {platform.name} has no links between its devices; peers = False does without")
        times, index = timeline(problem), index_of(problem)
        homes = {platform.home(device).name: device for device in range(platform.devices)}
        most = (platform.devices if self.stripes else 1) if self.peers else 0
        margin: Counter[int] = Counter()
        banned = {(t, HOST) for t in range(len(trace.tensors))} if not self.host else set[tuple[int, str]]()
        best: Plan | None = None
        least = 0
        for _ in range(self.rounds):
            chosen = Assignment(problem, times, index, most, dict(margin), banned)
            reached = chosen.choose()
            plan = _plan(problem, times, chosen)
            try:
                log = problem.evaluate(plan)
            except OutOfMemory as error:
                if not reached or error.tier not in homes:
                    break
                lacks = max(error.need_bytes - error.free_bytes, 0)
                margin[homes[error.tier]] += max(lacks, platform.tier(error.tier).capacity // STEP)
                continue
            if best is not None and log.end >= least:
                break
            best, least = plan, log.end
            if not (slow := _dearer(chosen, _waits(log, plan.trace))):
                break
            banned |= slow
        if best is None:
            raise nothing_fits(
                problem, f"policy 'mpress': no plan was found that fits {format_bytes(problem.budget)}", None
            )
        return best


def _plan(problem: Problem, times: Timeline, chosen: Assignment) -> Plan:
    """The actions of these choices, on the trace with its stripes."""
    choices = [chosen.choices[t] for t in sorted(chosen.choices)]
    striped: dict[int | str, list[int]] = {}
    for choice in choices:
        if len(choice.copies) > 1:
            striped[choice.saved.tensor] = [copy.share for copy in choice.copies]
    trace = split_tensors(problem.trace, striped) if striped else problem.trace
    reruns: dict[int, set[int]] = {}
    moves: list[Action] = []
    back: list[tuple[int, int, Action]] = []
    for choice in choices:
        one = choice.saved
        if choice.technique == RECOMPUTE:
            reruns.setdefault(one.back, set()).update(chosen.chain(one))
        for copy, part in zip(choice.copies, _copied(problem.trace, choice), strict=True):
            moves.append(Move(trace.tensor_id(part), copy.tier, after=one.left))
            home = problem.platform.home(one.device).name
            anchor = times.stages[one.device].ops[chosen.fetched(one, copy)]
            back.append((copy.back, one.back, Move(trace.tensor_id(part), home, before=anchor)))
    moves += [move for _, _, move in sorted(back, key=lambda each: each[:2])]
    index = chosen.index if trace is problem.trace else index_of(replace(problem, trace=trace))
    schedule = schedule_of(index, {anchor: sorted(ops) for anchor, ops in reruns.items()}, prune=True)
    host = problem.platform.host
    actions = (*schedule.actions(), *moves)
    sizes: Counter[str] = Counter()
    for choice in choices:
        sizes[choice.technique] += choice.saved.bytes
    notes = {**{f"{way}_bytes": sizes[way] for way in TECHNIQUES}, "striped": len(striped)}
    notes["unlimited_ns"] = max(times.end)
    return Plan(trace, actions if host is None else cascade(trace, problem.platform, actions, host.name), notes=notes)


def _copied(original: Trace, choice: Choice) -> Sequence[str]:
    """The names of what is copied for a choice: of the whole, or of its stripes."""
    name, count = original.tensor_columns.name[choice.saved.tensor], len(choice.copies)
    return [f"{name}.part{k}" for k in range(count)] if count > 1 else [name] * count


def _waits(log: EventLog, trace: Trace) -> Mapping[str, int]:
    """For how long devices waited for copies of a tensor, in ns by its name."""
    waits: Counter[str] = Counter()
    rows = log.intervals[(log.interval("why") == WHY["stall"]) & (log.interval("tensor") >= 0)]
    for start, end, tensor in rows[:, [0, 1, 6]].tolist():
        waits[trace.tensor_columns.name[tensor]] += end - start
    return waits


def _dearer(chosen: Assignment, waits: Mapping[str, int]) -> set[tuple[int, str]]:
    """Tensors, with their technique, for which a device waited longer than another technique would take."""
    found = set()
    for t, choice in chosen.choices.items():
        parts = [waits.get(name, 0) for name in _copied(chosen.problem.trace, choice)]
        other = chosen.instead(choice)
        if other is not None and max(parts, default=0) > other.ns:
            found.add((t, choice.technique))
    return found
