"""What PyTorch does when it is told so: the plan of checkpoints round modules, and its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.analysis.peak_memory import home_peak, mean_bytes
from sim.applying.parts import Module
from sim.experiment import unlimited
from sim.hardware.platform import Platform
from sim.iterations import run_iteration
from sim.log import EventLog
from sim.plan import Action, Move, Plan, Recompute, Wait
from sim.rewrites.rewrite import hold_longer
from sim.solvers.checkpoints import (
    Rerun,
    by_anchor,
    cached_casts,
    cached_results,
    held_by,
    named,
    outside_of,
    region_reruns,
)
from sim.solvers.regions import Region
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.trace.graph import Trace
from sim.trace.phases import BACKWARD, FORWARD


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint round modules that run one after the other.

    modules: in order.
    keep: forward ops whose results it keeps; it recomputes all others.
    inside: checkpoints round some of its modules, which are recomputed once more when backward comes to them.
    """

    modules: tuple[Module, ...]
    keep: frozenset[int] = frozenset()
    inside: tuple[Checkpoint, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others of the same trace."""
        return tuple(module.path for module in self.modules), self.keep, tuple(each.key for each in self.inside)

    @property
    def all(self) -> tuple[Checkpoint, ...]:
        """Those inside, each before what it is in, and itself."""
        return (*(deeper for each in self.inside for deeper in each.all), self)

    @property
    def regions(self) -> list[Region]:
        """Per call the forward ops, with the backward ops of the layers."""
        calls = zip(*(module.calls for module in self.modules), strict=True)
        return [
            Region(
                tuple(op for part in call for op in part.forward),
                frozenset(op for part in call for op in part.backward),
            )
            for call in calls
        ]


@dataclass(frozen=True)
class Sent:
    """What is sent to the host when it is saved in modules under one wrapper.

    results: tensors that they produce.
    inputs: tensors that enter them, and that no other wrapper produces.
    everything: they send all that is saved, without telling results apart.
    """

    modules: tuple[Module, ...]
    results: frozenset[int]
    inputs: frozenset[int]
    everything: bool = False


def plan_of(trace: Trace, checkpoints: Sequence[Checkpoint], sent: Sequence[Sent], platform: Platform) -> Plan:
    """The plan of a step with checkpoints, and with saved tensors sent to the host beside the computation.

    A tensor leaves after its last use in forward. Where it is first read in backward, the copy back of the one that
    was produced before it begins.
    """
    plan = checkpointed(trace, checkpoints)
    if platform.host is None or not sent:
        return plan
    host, home = platform.host.name, platform.home(0).name
    tensors = sorted({t for each in sent for t in (*each.results, *each.inputs)}, key=lambda t: int(trace.producer[t]))
    phase = trace.op_columns.phase
    again: dict[int, int] = {}  # tensor -> where a recomputed op reads it first
    for action in plan.actions:
        if isinstance(action, Recompute):
            for t in trace.reads(trace.op_id(action.op)):
                again.setdefault(t, trace.op_id(action.before))  # type: ignore[arg-type]
    moves: list[Action] = []
    for k, t in enumerate(tensors):
        readers = trace.readers(t)
        late = [op for op in (*readers, *([again[t]] if t in again else [])) if phase[op] == BACKWARD]
        if not late:
            continue
        first = min(late)
        last = max([int(trace.producer[t]), *(op for op in readers if phase[op] == FORWARD and op < first)])
        moves.append(Move(t, host, after=last))
        moves.append(Move(t, home, before=first))
        moves += [Move(tensors[k - 1], home, before=first)] if k else []
        moves.append(Wait(t, before=first))
    return Plan(plan.trace, (*moves, *plan.actions))


def checkpointed(trace: Trace, checkpoints: Sequence[Checkpoint]) -> Plan:
    """The plan of a step under PyTorch's non-reentrant checkpoints, selective where they keep something."""
    index = TraceIndex(trace)
    regions = [region for checkpoint in checkpoints for region in checkpoint.regions]
    keep = frozenset(op for checkpoint in checkpoints for op in checkpoint.keep)
    reruns = [rerun for checkpoint in checkpoints for rerun in _reruns(index, checkpoint, keep)]
    # what enters a checkpoint inside another is recomputed by that one, which lets it go once it is read
    held = held_by(index, region_reruns(index, regions, keep=keep, before="saved"))
    longer = hold_longer(hold_longer(trace, held.until), cached_results(index, regions, keep, reruns))
    hold = {**named(index, regions), **held.drops, **cached_casts(index, regions)}
    schedule = schedule_of(TraceIndex(longer), by_anchor(reruns), hold=hold, once_recomputed=held.handed)
    return Plan(longer, schedule.actions())


def _reruns(index: TraceIndex, checkpoint: Checkpoint, keep: frozenset[int]) -> list[Rerun]:
    """What a checkpoint recomputes, and then those inside it."""
    own = region_reruns(index, checkpoint.regions, keep=keep, before="saved")
    inner = [region for each in checkpoint.inside for region in each.regions]
    if inner:
        own = [outside_of(index, rerun, inner) for rerun in own]
    return [*own, *(rerun for each in checkpoint.inside for rerun in _reruns(index, each, keep))]


@dataclass(frozen=True)
class Cost:
    """What a run takes: its peak and its mean memory on the device in bytes, its time in ns."""

    peak_bytes: int
    mean_bytes: int
    makespan_ns: int


def cost_of(log: EventLog) -> Cost:
    """The cost of a run."""
    return Cost(home_peak(log), mean_bytes(log), log.end)


def run_of(trace: Trace, plan: Plan, platform: Platform) -> EventLog:
    """The log of a plan where memory is never short."""
    return run_iteration(trace, plan, unlimited(platform)).log
