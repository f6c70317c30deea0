"""Law 10: what an online policy does never depends on ops that are still to come."""

from __future__ import annotations

from dataclasses import replace

from sim.conformance.repeatability import fresh
from sim.conformance.replayed import LawBroken, Replayed, run_policy
from sim.engine.replay import replay
from sim.errors import PolicyError
from sim.log import EventLog
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace


def check_online(run: Replayed) -> None:
    """Law 10: an online policy plans online, and its choices up to an op do not depend on the ops after it.

    Where memory is never short it does what its plan says of such runs, if that says anything. A policy that measures
    first knows the ops to come from earlier iterations: of it the first iteration is checked.
    """
    plan = run.plan
    if plan is None:
        return
    if (plan.online is not None) != run.policy.online:
        says, does = ("online", "offline") if run.policy.online else ("offline", "online")
        raise LawBroken(f"the policy says that it is {says}, and its plan is {does}")
    if plan.unpressed is not None and run.done and run.log is not None and not run.log.counters["pressure_calls"]:
        asked = replay(replace(plan, unpressed=None), run.platform)
        if asked != run.log:
            raise LawBroken("where memory is never short its online part does something else than `unpressed` says")
    if not run.policy.online or run.trace.devices > 1:
        return
    if run.policy.plans_ahead:  # it declares that its choices depend on later ops
        return
    if run.history:  # only the first iteration knew of none before it
        run = run_policy(fresh(run.policy), run.trace, run.platform, seed=run.seed, warm_up=0)
    if run.log is None:
        return
    ops = len(run.trace.ops)
    for last in sorted({ops // 3, (2 * ops) // 3}):
        if not 0 < last < ops - 1 or last in run.trace.op_columns.group:
            continue
        began = _start_of(run.log, run.trace.op_columns.name[last])
        if began is None:
            continue
        policy, future = fresh(run.policy), other_future(run.trace, last)
        other = run_policy(policy, future, run.platform, seed=run.seed, warm_up=0)
        if other.log is None or isinstance(other.error, PolicyError):
            continue
        here, there = _before(run.log, began), _before(other.log, began)
        if here != there:
            row = next((a, b) for a, b in zip([*here, None], [*there, None]) if a != b)
            name = run.trace.op_columns.name[last]
            raise LawBroken(f"with another future after op {name!r} it does {_say(row[1])} instead of {_say(row[0])}")


def other_future(trace: Trace, last: int) -> Trace:
    """The ops up to `last`, then one op that reads all tensors with later readers and releases those still held.

    Lifetimes before that op are unchanged, so that only a policy that looks ahead can tell the traces apart.
    """
    b = TraceBuilder(dict(trace.meta))
    ids: dict[int, int] = {}
    for t in trace.tensors:
        if trace.producer[t.id] <= last:
            fields = {key: getattr(t, key) for key in ("layer", "shape", "dtype", "zeros", "saved_for", "axes")}
            ids[t.id] = b.tensor(t.name, t.bytes, t.role, **fields)
    for t in trace.tensors:
        if t.id in ids and t.replaces is not None:
            b.take_over(ids[t.id], ids[t.replaces])
    for op in trace.ops[: last + 1]:
        operands = {key: [ids[t] for t in getattr(op, key)] for key in ("reads", "writes", "releases")}
        b.copy_op(op, **operands)
    later = [ids[t] for t in ids if any(reader > last for reader in trace.readers(t))]
    held = [ids[t] for t in ids if trace.released[t] > last]
    # a tensor without a producer starts where its first reader's engine has its home: one last op per engine keeps that
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
    """The log before a time, with names: intervals that ended, and changes of space."""
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
