"""Laws on runs: 3 (every op runs, and what the policy declares), 4 (order and rates) and 5 (time adds up)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np

from sim.analysis.bounds import bounds
from sim.conformance.ledger import CODEC, FIRST, RECOMPUTE, RUN, STALL, Copy, Ledger, Stay, Work
from sim.conformance.rates import check_rates
from sim.conformance.replayed import LawBroken, Replayed
from sim.hardware.platform import Platform
from sim.log import CAUSE
from sim.policies.base import MANAGED_AS
from sim.trace.graph import Trace
from sim.trace.origin import Expr, Fused, Microbatch, leaves
from sim.trace.tensor import ROLES

GONE = (CAUSE["dropped"], CAUSE["moved out"])


def check_ops(run: Replayed) -> None:
    """Law 3: every op runs, once unless the policy recomputes; rewrites, moves and evicted roles are declared."""
    if run.plan is not None and not run.policy.rewrites and run.plan.trace != run.trace:
        raise LawBroken("the plan is for another trace than the one it was asked for; the policy declares no rewrite")
    if (
        run.plan is not None
        and not run.policy.splits_batch
        and _microbatches(run.plan.trace) - _microbatches(run.trace)
    ):
        raise LawBroken("the plan has microbatches of its own; the policy does not say that it splits the batch")
    if run.log is None or run.plan is None:
        return
    ledger, policy = run.ledger, run.policy
    alone = _groups_in_one_tier(ledger)
    for op, name in enumerate(ledger.op_names):
        works = ledger.works_of.get(op, [])
        runs = sum(work.why in FIRST for work in works)
        if runs > 1 or (run.done and runs == 0 and op not in alone):
            raise LawBroken(f"op {name!r} runs {runs} times")
        if len(works) > runs and not policy.recomputes:
            again = next(work for work in works if work.why not in FIRST)
            raise LawBroken(f"op {name!r} is recomputed at {again.start} ns; the policy declares no recomputation")
    forced, size, aside = _forced(run), ledger.trace.tensor_columns.bytes, list[int]()
    for copy in ledger.copies:
        if copy.tensor not in forced and not policy.moves and size[copy.tensor]:
            raise LawBroken(
                f"{ledger.names[copy.tensor]!r} moves to {ledger.tier_names[copy.target]!r} at {copy.start} ns; the "
                "policy does not say that it moves"
            )
    for tensor, tier in _placed_elsewhere(run):
        if not policy.moves and size[tensor]:
            raise LawBroken(f"{ledger.names[tensor]!r} is placed in {tier!r}; the policy does not say that it moves")
        aside.append(tensor)
    role = ledger.trace.tensor_columns.role
    touched = [copy.tensor for copy in ledger.copies] + [s.tensor for s in ledger.stays if s.gone_by in GONE]
    for tensor in [*touched, *aside]:
        word = MANAGED_AS[ROLES[role[tensor]]]
        if word not in policy.manages and tensor not in forced and ledger.trace.tensor_columns.bytes[tensor]:
            raise LawBroken(f"{ledger.names[tensor]!r} is dropped or moved; the policy does not say it manages {word}")


def _microbatches(trace: Trace) -> set[Fraction]:
    """The parts of the batch that the ops of a trace work for, each by itself."""
    return {part for expr in (trace.origin.ops if trace.origin else ()) for part in _parts_of_batch(expr)}


def _parts_of_batch(expr: Expr | None) -> Iterator[Fraction]:
    if isinstance(expr, Microbatch):
        yield Fraction(expr.stop - expr.first, expr.count)
    for inner in expr.parts if isinstance(expr, Fused) else [getattr(expr, "of", None)]:
        if inner is not None:
            yield from _parts_of_batch(inner)


def _placed_elsewhere(run: Replayed) -> Iterator[tuple[int, str]]:
    """Tensors that the plan itself places in another tier than the home of the engine that uses or produces them."""
    assert run.plan is not None
    trace, platform, replaces = run.plan.trace, run.platform, run.plan.trace.tensor_columns.replaces
    left = {trace.tensor_columns.name[first] for _, first in trace.carry} if run.history else set()
    for given, where in run.plan.place.items():
        tensor, tier = trace.tensor_id(given), where if isinstance(where, str) else where[0]
        if trace.tensor_columns.name[tensor] in left:  # it may lie where the iteration before left it
            continue
        first = int(trace.producer[tensor])
        if first < 0:
            overwrites = [int(trace.producer[t]) for t in np.flatnonzero(replaces == tensor).tolist()]
            first = min([*trace.readers(tensor), *overwrites], default=-1)
        engine = "" if first < 0 else trace.op_columns.engine.get(first, "")
        home = platform.engines[platform.engine_for(int(trace.op_columns.device[max(first, 0)]), engine)].home
        if tier != home:
            yield tensor, tier


def _groups_in_one_tier(ledger: Ledger) -> set[int]:
    """Members of groups that share a tier: no link carries their bytes, so that the log has no row for them."""
    homes: dict[str, set[str]] = defaultdict(set)
    for op, name in ledger.trace.op_columns.group.items():
        homes[name].add(ledger.log.platform.home(int(ledger.trace.op_columns.device[op])).name)
    return {op for op, name in ledger.trace.op_columns.group.items() if len(homes[name]) == 1}


def _forced(run: Replayed) -> set[int]:
    """Tensors that must move whatever the policy does, because no tier is in reach of all their users."""
    assert run.plan is not None
    asked = crossing(run.trace, run.platform)
    ran = run.plan.trace
    if ran is run.trace or ran == run.trace or ran.origin is None:
        return asked
    return {t for t, expr in enumerate(ran.origin.tensors) if any(leaf.id in asked for leaf in leaves(expr))}


def crossing(trace: Trace, platform: Platform) -> set[int]:
    """Tensors for which no tier is in reach of all engines that use them, so that copies are part of the work."""
    c = trace.op_columns
    users: dict[int, list[set[str]]] = defaultdict(list)
    for op in range(len(c.name)):
        engine = platform.engines[platform.engine_for(int(c.device[op]), c.engine.get(op, ""))]
        for tensor in trace.reads(op):
            if trace.producer[tensor] < 0 and not users[tensor]:
                users[tensor].append({engine.home})  # it starts in the home tier of its first user
            users[tensor].append({engine.home, *engine.reaches})
        for tensor in trace.writes(op):
            users[tensor].append({engine.home})
    for new, old in enumerate(trace.tensor_columns.replaces.tolist()):
        if old >= 0:  # one storage
            users[old] = users[new] = users[old] + users[new]
    last_to_first = dict(trace.carry)
    return {t for t, reaches in users.items() if not set.intersection(*reaches)} | {
        t for t, first in last_to_first.items() if users[first] and not set.intersection(*users[first], *users[t])
    }


# ---- law 4 -------------------------------------------------------------------------------------


def check_order(run: Replayed) -> None:
    """Law 4: no op starts before its reads are resident, an engine runs one op at a time, and no rate is exceeded."""
    if run.log is None:
        return
    ledger = run.ledger
    for work in ledger.works:
        reach = ledger.reach[ledger.engine_of(work)]
        for tensor in ledger.trace.reads(work.op):
            _there(ledger, tensor, reach, work, f"op {ledger.op_names[work.op]!r}")
    for stay in ledger.stays:
        if stay.copy is not None:
            what = f"the transfer of {ledger.names[stay.tensor]!r}"
            _there(ledger, stay.tensor, {stay.copy.source}, stay.copy, what)
    lanes: dict[int, list[Work]] = defaultdict(list)
    for work in ledger.works:
        if work.lane >= 0:
            lanes[work.lane].append(work)
    for lane, works in lanes.items():
        works.sort(key=lambda work: (work.start, work.end))
        for first, second in pairwise(works):
            if second.start < first.end:
                names = [ledger.op_names[work.op] for work in (first, second)]
                raise LawBroken(
                    f"engine {ledger.log.platform.lanes[lane]!r} runs {names[1]!r} from {second.start} ns, while it "
                    f"runs {names[0]!r} until {first.end} ns"
                )
    check_rates(ledger)


def _there(ledger: Ledger, tensor: int, tiers: set[int], use: Work | Copy, what: str) -> None:
    """A copy in one of these tiers is complete when its use starts; law 2 covers one released too early."""

    def near(stay: Stay) -> bool:
        return stay.tier in tiers and stay.release > use.start

    late = [stay for stay in ledger.of[tensor] if near(stay) and stay.come > use.start]
    if late and not any(
        stay.come <= use.start for stay in ledger.of[tensor] if stay.tier in tiers and stay.release >= use.start
    ):
        come = min(stay.come for stay in late)
        when = f"{come} ns" if come <= ledger.log.end else "never"
        raise LawBroken(f"{what} starts at {use.start} ns; {ledger.names[tensor]!r} is resident from: {when}")


# ---- law 5 -------------------------------------------------------------------------------------


def check_tiling(run: Replayed) -> None:
    """Law 5: on each main lane runs and stalls tile the time, to the nanosecond, and no run beats the lower bound."""
    if run.log is None:
        return
    log = run.log
    for device in range(log.trace.devices):
        lane = log.platform.engine_for(device)
        mine = (log.interval("device") == device) & (log.interval("lane") == lane)
        busy = np.isin(log.interval("why"), (RUN, RECOMPUTE, CODEC, STALL))
        rows = log.intervals[mine & busy]
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        ops = np.flatnonzero(np.isin(rows[:, 4], FIRST))
        if log.trace.devices > 1:
            rows = rows[: int(ops[-1]) + 1] if len(ops) else rows[:0]  # one device closes the run for all
        at = 0
        for start, end, *_ in rows.tolist():
            if start != at:
                how = "does nothing" if start > at else "does two things"
                name = log.platform.lanes[lane]
                raise LawBroken(f"{name!r} {how} between {min(start, at)} and {max(start, at)} ns")
            at = end
        if log.complete and log.trace.devices == 1 and at != log.end:
            raise LawBroken(f"the main lane is accounted for until {at} ns, and the run ends at {log.end} ns")
    if log.complete:
        found = bounds(log)
        if log.end < found.time_ns:
            raise LawBroken(f"the run took {log.end} ns; no run can take less than {found.time_ns} ns")
