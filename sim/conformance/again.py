"""Laws that need more than one run: 7 (same seed, same log), 8 (optimal is optimal) and 10 (online is online)."""

from __future__ import annotations

import dataclasses

import numpy as np

from sim.conformance.checker import check
from sim.conformance.replayed import LawBroken, Replayed, replayed, run_policy
from sim.conformance.rivals import rivals
from sim.errors import Infeasible, PolicyError
from sim.experiment import UNLIMITED, problem_for
from sim.log import EventLog
from sim.policies.base import Policy
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace


def check_repeats(run: Replayed) -> None:
    """Law 7: the same policy, trace, platform and seed give the same plan and the same log, byte for byte."""
    if run.changed:
        raise LawBroken(f"the policy changes the {run.changed} that it is given, in place")
    if isinstance(run.error, PolicyError) or run.crash is not None:
        return
    again = run_policy(_fresh(run.policy), run.trace, run.platform, seed=run.seed)
    if type(again.error) is not type(run.error) or str(again.error) != str(run.error):
        raise LawBroken(f"asked again, it says: {again.error or 'it fits'}; at first: {run.error or 'it fits'}")
    if run.plan is not None and again.plan is not None:
        first, second = run.plan, again.plan
        if tuple(first.actions) != tuple(second.actions) or dict(first.place) != dict(second.place):
            raise LawBroken("asked again, it plans other actions")
        if first.trace != second.trace or first.keep_dead != second.keep_dead:
            raise LawBroken("asked again, it plans another trace")
    if run.log is not None and again.log is not None and run.log != again.log:
        raise LawBroken(f"asked again, another log comes of it: {_difference(run.log, again.log)}")


def _fresh(policy: Policy) -> Policy:
    return dataclasses.replace(policy)


def _difference(first: EventLog, second: EventLog) -> str:
    for what, a, b in (("interval", first.intervals, second.intervals), ("change", first.changes, second.changes)):
        count = min(len(a), len(b))
        rows = np.flatnonzero((a[:count] != b[:count]).any(axis=1))
        if len(rows) or len(a) != len(b):
            return f"{what} {int(rows[0]) if len(rows) else count} is the first to differ"
    return f"ends at {first.end} and {second.end} ns, counters {dict(first.counters)} and {dict(second.counters)}"


def check_optimal(run: Replayed) -> None:
    """Law 8: a policy that is optimal never takes longer with more budget, and no plan of its class beats it."""
    if not run.policy.optimal or not (run.done or isinstance(run.error, Infeasible)):
        return
    _beaten(run)
    capacity = run.platform.home(0).capacity
    best = run.log.end if run.done and run.log is not None else None
    for budget in (capacity + max(1, capacity // 8), 2 * capacity, UNLIMITED):
        more = run_policy(run.policy, run.trace, run.platform.with_budget(budget), seed=run.seed)
        if not more.done or more.log is None:
            if best is not None and isinstance(more.error, Infeasible):
                raise LawBroken(f"with {budget} B it refuses what fits into {capacity} B: {more.error}")
            continue
        if best is not None and more.log.end > best:
            raise LawBroken(f"with {budget} B it takes {more.log.end} ns; with {capacity} B {best} ns")
        best, capacity = more.log.end, budget


def _beaten(run: Replayed) -> None:
    """Hold a plan said to be optimal, or a refusal, against simple plans of the class that the policy names."""
    best = run.log.end if run.done and run.log is not None else None
    if best is not None and run.plan is not None and run.plan.notes.get("status", "optimal") != "optimal":
        return  # it says itself that it may not be
    budget = run.platform.home(0).capacity
    cost = problem_for(run.trace, run.platform).cost.op_ns
    for plan in rivals(run.trace):
        if not run.policy.in_class(plan):
            continue
        checked = check(plan, cost)
        if checked.peak > budget or (best is not None and checked.time >= best):
            continue
        rival = replayed(run.policy, plan, run.trace, run.platform, seed=run.seed)
        if rival.done and rival.log is not None and (best is None or rival.log.end < best):
            says = f"it refuses {budget} B" if best is None else f"its plan takes {best} ns"
            reruns = [run.trace.op_columns.name[op] for op in checked.reruns]
            raise LawBroken(
                f"{says}; of its class ({run.policy.optimal}) one that recomputes {reruns} takes {rival.log.end} ns"
            )


# ---- law 10 ------------------------------------------------------------------------------------


def check_online(run: Replayed) -> None:
    """Law 10: an online policy plans online, and its choices up to an op do not change with what comes after.

    A policy that measures first knows from earlier iterations what comes; it is held to this in its first one.
    """
    plan = run.plan
    if plan is None:
        return
    if (plan.online is not None) != run.policy.online:
        says, does = ("online", "offline") if run.policy.online else ("offline", "online")
        raise LawBroken(f"the policy says that it is {says}, and its plan is {does}")
    if not run.policy.online or run.trace.devices > 1:
        return
    if run.policy.plans_ahead:  # it says that what comes after changes its choices
        return
    if run.history:  # what comes is known from the iterations before; the first one knew of none
        run = run_policy(_fresh(run.policy), run.trace, run.platform, seed=run.seed, warm_up=0)
    if run.log is None:
        return
    ops = len(run.trace.ops)
    for last in sorted({ops // 3, (2 * ops) // 3}):
        if not 0 < last < ops - 1 or last in run.trace.op_columns.group:
            continue
        began = _start_of(run.log, run.trace.op_columns.name[last])
        if began is None:
            continue
        policy, future = _fresh(run.policy), other_future(run.trace, last)
        other = run_policy(policy, future, run.platform, seed=run.seed, warm_up=0)
        if other.log is None or isinstance(other.error, PolicyError):
            continue
        here, there = _before(run.log, began), _before(other.log, began)
        if here != there:
            row = next((a, b) for a, b in zip([*here, None], [*there, None]) if a != b)
            name = run.trace.op_columns.name[last]
            raise LawBroken(f"with another future after op {name!r} it does {_say(row[1])} instead of {_say(row[0])}")


def other_future(trace: Trace, last: int) -> Trace:
    """The ops up to `last`, then one op that reads all that would still have been read, and releases what is held.

    So lifetimes do not change before that, and only who looks ahead can tell the traces apart.
    """
    b = TraceBuilder(dict(trace.meta))
    ids: dict[int, int] = {}
    for t in trace.tensors:
        if trace.producer[t.id] <= last:
            fields = {"layer": t.layer, "shape": t.shape, "dtype": t.dtype, "zeros": t.zeros, "saved_for": t.saved_for}
            ids[t.id] = b.tensor(t.name, t.bytes, t.role, **fields)  # type: ignore[arg-type]
    for t in trace.tensors:
        if t.id in ids and t.replaces is not None:
            b.take_over(ids[t.id], ids[t.replaces])
    for op in trace.ops[: last + 1]:
        operands = {key: [ids[t] for t in getattr(op, key)] for key in ("reads", "writes", "releases")}
        b.copy_op(op, **operands)
    later = [ids[t] for t in ids if any(reader > last for reader in trace.readers(t))]
    held = [ids[t] for t in ids if trace.released[t] > last]
    # what is there from the start lies where its first reader's engine has it: each engine has a future
    engine_of = {
        t: trace.op_columns.engine.get(next(iter(trace.readers(t)), -1), "") for t in ids if trace.producer[t] < 0
    }
    for engine in sorted({"", *engine_of.values()}):
        reads = [ids[t] for t in ids if ids[t] in later and engine_of.get(t, "") == engine]
        name, more = (f"future.{engine}", ()) if engine else ("future", held)
        if reads or not engine:
            b.op(name, reads=reads, releases=more, phase=trace.ops[-1].phase, duration=1, engine=engine)
    return b.build(outputs=[ids[t] for t in trace.outputs if t in ids], carry=())


def _start_of(log: EventLog, name: str) -> int | None:
    if name not in log.trace.op_columns.name:
        return None
    rows = log.intervals[(log.interval("op") == log.trace.op_id(name)) & (log.interval("why") == 0)]
    return int(rows[0, 0]) if len(rows) else None


def _before(log: EventLog, time: int) -> list[tuple[object, ...]]:
    """What was done before a time, with names: what ended, and what took or gave space."""
    tensors, ops = [*log.trace.tensor_columns.name, ""], [*log.trace.op_columns.name, ""]
    rows: list[tuple[object, ...]] = []
    for start, end, device, lane, why, op, tensor, cause, size in log.intervals.tolist():
        if end < time:
            rows.append((start, end, device, lane, why, ops[op], tensors[tensor], cause, size))
    rows.sort(key=str)
    changes = log.changes[log.changes[:, 0] < time]
    return rows + [(t, tier, delta, tensors[x], ops[op], cause) for t, tier, delta, x, op, cause in changes.tolist()]


def _say(row: tuple[object, ...] | None) -> str:
    return "nothing" if row is None else str(row)
