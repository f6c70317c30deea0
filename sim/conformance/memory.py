"""Laws on space: 1 (capacity and conservation), 6 (an answer or a refusal) and 9 (carried tensors)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sim.conformance.ledger import CALLED_OFF, FIRST, FOREVER, FREED, MADE, MOVED_IN, Ledger
from sim.conformance.replayed import LawBroken, Replayed
from sim.engine.replay import replay
from sim.errors import Infeasible, OutOfMemory, PolicyError
from sim.hardware.platform import Platform, Tier
from sim.log import CAUSE, EventLog
from sim.plan import Move, Plan
from sim.policies.base import Policy
from sim.trace.graph import Trace

WORKSPACE = CAUSE["workspace"]


def check_capacity(run: Replayed) -> None:
    """Law 1: no tier holds more than its capacity at any time, bytes are conserved, and nothing leaks."""
    if run.log is None:
        return
    ledger = run.ledger
    if ledger.faults:
        raise LawBroken(ledger.faults[0])
    _within_capacity(run.log)
    _sizes(ledger, run)
    _transfers_have_space(ledger, run)
    _results_have_space(ledger)
    _workspace(ledger)
    _held_until_released(ledger)
    if run.done and run.plan is not None:
        _nothing_leaks(ledger, run.plan)


def _within_capacity(log: EventLog) -> None:
    for i, tier in enumerate(log.platform.tiers):
        rows = log.changes[log.changes[:, 1] == i]
        use = np.cumsum(rows[:, 2])
        for row in np.flatnonzero((use > tier.capacity) | (use < 0))[:1]:
            raise LawBroken(f"{tier.name!r} holds {use[row]} of {tier.capacity} B at {rows[row, 0]} ns")
        taken = log.reserved[log.reserved[:, 1] == i]
        if not len(taken):
            continue
        reserved = np.cumsum(taken[:, 2])
        for row in np.flatnonzero(reserved > tier.capacity)[:1]:
            raise LawBroken(f"{tier.name!r} reserves {reserved[row]} of {tier.capacity} B at {taken[row, 0]} ns")
        # at the end of each instant the blocks in use are part of the reserved bytes
        times = np.unique(rows[:, 0])
        used_at = use[np.searchsorted(rows[:, 0], times, "right") - 1]
        at = np.searchsorted(taken[:, 0], times, "right") - 1
        reserved_at = np.where(at < 0, 0, reserved[at])
        for row in np.flatnonzero(used_at > reserved_at)[:1]:
            raise LawBroken(f"{tier.name!r} uses {used_at[row]} of {reserved_at[row]} B reserved at {times[row]} ns")


def _sizes(ledger: Ledger, run: Replayed) -> None:
    """A copy takes the bytes of its tensor; fewer only if a planned move says so, more if the allocator rounds."""
    size = ledger.trace.tensor_columns.bytes
    wires = defaultdict(set)
    for action in run.plan.actions if run.plan is not None else ():
        if isinstance(action, Move) and action.wire is not None:
            wires[ledger.trace.tensor_id(action.tensor)].add(action.wire)
    compresses = run.plan is not None and run.plan.online is not None
    exact = [tier.allocator.name == "exact" for tier in ledger.log.platform.tiers]
    for stay in ledger.stays:
        want = int(size[stay.tensor])
        if stay.bytes == want or (stay.bytes > want and not exact[stay.tier]):
            continue
        least = min(wires[stay.tensor], default=want)
        if stay.cause == MOVED_IN and (stay.bytes in wires[stay.tensor] or compresses):
            continue
        if stay.cause == MOVED_IN and stay.bytes > least and not exact[stay.tier]:
            continue
        name = ledger.names[stay.tensor]
        raise LawBroken(f"{name!r} has {want} B and takes {stay.bytes} B in {ledger.tier_names[stay.tier]!r}")


def _transfers_have_space(ledger: Ledger, run: Replayed) -> None:
    """Each transfer takes space of its own at its destination, and that space is filled or the transfer called off."""
    for copy in ledger.unmatched:
        raise LawBroken(
            f"a transfer of {ledger.names[copy.tensor]!r} to {ledger.tier_names[copy.target]!r} from {copy.start} to "
            f"{copy.end} ns takes no space of its own there"
        )
    for stay in ledger.stays:
        if stay.cause == MOVED_IN and stay.copy is None and run.done and stay.gone_by != CALLED_OFF:
            raise LawBroken(
                f"{ledger.names[stay.tensor]!r} is in {ledger.tier_names[stay.tier]!r} from {stay.take} ns, but "
                "nothing was transferred"
            )


def _results_have_space(ledger: Ledger) -> None:
    """The results of an op's first run are resident when it ends."""
    for work in ledger.works:
        if work.why not in FIRST:
            continue
        for tensor in ledger.trace.writes(work.op):
            if not any(stay.take <= work.end <= stay.release and stay.cause == MADE for stay in ledger.of[tensor]):
                op, name = ledger.op_names[work.op], ledger.names[tensor]
                raise LawBroken(f"op {op!r} produces {name!r} at {work.end} ns, but no space was taken for it")


def _workspace(ledger: Ledger) -> None:
    rows = ledger.log.changes[ledger.log.changes[:, 3] < 0]
    taken: dict[int, int] = defaultdict(int)
    balance: dict[tuple[int, int], int] = defaultdict(int)
    for time, tier, delta, _, op, cause in rows.tolist():
        if cause != WORKSPACE:
            raise LawBroken(f"a change of {delta} B at {time} ns belongs to no tensor and is not workspace")
        balance[tier, op] += delta
        taken[op] += max(delta, 0)
        if balance[tier, op] < 0:
            raise LawBroken(f"op {ledger.op_names[op]!r} releases more workspace than it took, at {time} ns")
    if ledger.log.complete:
        for (_, op), left in balance.items():
            if left:
                raise LawBroken(f"op {ledger.op_names[op]!r} keeps {left} B of workspace to the end")
    for op, works in ledger.works_of.items():
        need = int(ledger.trace.op_columns.workspace[op]) * len(works)
        if taken[op] < need:
            raise LawBroken(f"op {ledger.op_names[op]!r} took {taken[op]} B of workspace and needs {need} B")


def _held_until_released(ledger: Ledger) -> None:
    """A tensor that the program holds may be dropped by the plan, but is not freed before its release point."""
    for op, tensors in ledger.trace.op_columns.releases.items():
        ends = [work.end for work in ledger.works_of[op] if work.why in FIRST]
        for t in tensors:
            for stay in [stay for stay in ledger.of[t] if stay.gone_by == FREED]:
                time = stay.release
                if time < min(ends, default=FOREVER) and not any(s.come <= time < s.release for s in ledger.of[t]):
                    name, op_name = ledger.names[t], ledger.op_names[op]
                    raise LawBroken(f"{name!r} is freed at {time} ns, but the program holds it until {op_name!r}")


def _nothing_leaks(ledger: Ledger, plan: Plan) -> None:
    """Only outputs and tensors without a producer remain, unless the plan deallocates lazily."""
    outputs, producer = set(ledger.trace.outputs), ledger.trace.producer
    replaced = ledger.trace.replaced_by
    for stay in ledger.remaining():
        overwritten = replaced[stay.tensor] >= 0
        lazy = plan.keep_dead if isinstance(plan.keep_dead, bool) else stay.tensor in plan.keep_dead
        if lazy or stay.tensor in outputs or (producer[stay.tensor] < 0 and not overwritten):
            continue
        why = "was overwritten" if overwritten else "is not an output"
        raise LawBroken(f"{ledger.names[stay.tensor]!r} {why}, and remains in {ledger.tier_names[stay.tier]!r}")


# ---- law 6 -------------------------------------------------------------------------------------


def check_outcome(run: Replayed) -> None:
    """Law 6: a run stays within the budget, or is refused with its need and the holders of memory; never otherwise."""
    if run.crash is not None:
        raise LawBroken(f"{type(run.crash).__name__}: {run.crash}") from run.crash
    if run.error is None:
        assert run.log is not None
        if not run.log.complete:
            raise LawBroken("the log is a partial one, and nothing was raised")
        return
    if isinstance(run.error, PolicyError):
        return
    if not isinstance(run.error, Infeasible):
        raise LawBroken(f"{type(run.error).__name__}: {run.error}")
    if isinstance(run.error, OutOfMemory) and run.plan is not None:
        _check_refusal(run, run.error)
    refused = run.plan is None and _by_default(run.policy)
    if refused and _is_ample(run.trace, run.platform):
        raise LawBroken(f"says that nothing fits where everything does: {run.error}")


def _by_default(policy: Policy) -> bool:
    """Whether a policy has its default parameters; others may forbid it to keep everything."""
    try:
        return policy == type(policy)()
    except (TypeError, PolicyError):  # a parameter without a default, or none that is allowed, as of a composition
        return False


def _is_ample(trace: Trace, platform: Platform) -> bool:
    """Whether keeping everything fits, and every other tier could take all there is.

    Where an allocator rounds, reserves or gives addresses: whether it fits into four fifths of the memory.
    """
    homes = {platform.home(device).name for device in range(trace.devices)}
    whole = int(trace.tensor_columns.bytes.sum())
    if any(tier.capacity < whole for tier in platform.tiers if tier.name not in homes):
        return False
    rounds = any(platform.tier(name).allocator.name != "exact" for name in homes)
    if rounds:
        platform = platform.with_budget(platform.home(0).capacity * 4 // 5)
    try:
        replay(Plan(trace), platform)
    except Infeasible:
        return False
    return True


def _check_refusal(run: Replayed, error: OutOfMemory) -> None:
    """An OutOfMemory of the engine describes the state in which it was raised."""
    log = error.log
    if log is None or log.complete:
        raise LawBroken("OutOfMemory carries no partial log")
    if error.tier not in run.platform.tier_ids:
        raise LawBroken(f"OutOfMemory names no tier: {error.tier!r}")
    tier = run.platform.tier(error.tier)
    rows = log.changes[log.changes[:, 1] == run.platform.tier_ids[error.tier]]
    used = int(rows[:, 2].sum())
    if error.free_bytes != tier.capacity - used:
        raise LawBroken(f"OutOfMemory says {error.free_bytes} B are free; the log says {tier.capacity - used} B")
    if _has_room(error, log, tier):
        raise LawBroken(f"OutOfMemory refuses {error.need_bytes} B although {error.largest_hole_bytes} B are free")
    held = sum(size for _, size, _ in error.holders)
    if used and not error.holders and any(stay.release == FOREVER for stay in Ledger(log).stays):
        raise LawBroken(f"OutOfMemory names no holder of the {used} B in use")
    if held > used:
        raise LawBroken(f"OutOfMemory names holders of {held} B where {used} B are in use")


def _has_room(error: OutOfMemory, log: EventLog, tier: Tier) -> bool:
    """Whether what was refused would have fitted; with an allocator that caches: as a segment of its own."""
    if tier.allocator.name != "caching":
        return error.need_bytes <= min(error.free_bytes, error.largest_hole_bytes)
    step = 2 << 20 if error.need_bytes <= 1 << 20 else 20 << 20
    reserved = int(log.reserved[log.reserved[:, 1] == log.platform.tier_ids[tier.name], 2].sum())
    return reserved + -(-error.need_bytes // step) * step <= tier.capacity


# ---- law 9 -------------------------------------------------------------------------------------


def check_carried(run: Replayed) -> None:
    """Law 9: every tensor carried to the next iteration ends in the tier where it began, and only there."""
    if not run.done or run.plan is None:
        return
    ledger = run.ledger
    began = {stay.tensor: stay.tier for stay in ledger.stays if stay.cause == CAUSE["placed"]}
    ends: dict[int, set[int]] = defaultdict(set)
    for stay in ledger.remaining():
        ends[stay.tensor].add(stay.tier)
    for last, first in ledger.trace.carry:
        if first in began and ends[last] != {began[first]}:
            there = ", ".join(sorted(repr(ledger.tier_names[tier]) for tier in ends[last])) or "nowhere"
            name, home = ledger.names[last], ledger.tier_names[began[first]]
            raise LawBroken(f"{name!r} must end in {home!r}, where the next iteration starts; it is in {there}")
