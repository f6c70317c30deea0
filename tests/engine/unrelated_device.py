"""A device that shares nothing with a run: its own tiers, engine and links, busy at given nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from sim.analysis.lanes import RUN, on_main
from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.hardware.platform import Engine, Link, Member, Platform, Pool, Tier
from sim.log import EventLog
from sim.plan import Action, Change, Memory, Move, Need, Online, Plan
from sim.trace import TraceBuilder

GB = 10**9


@dataclass(frozen=True)
class Unaware:
    """Makes an online part that hears of nothing but the ops and tensors it knows."""

    make: object
    ops: int
    tensors: int

    def __call__(self) -> Online:
        inner, ops, tensors = self.make(), self.ops, self.tensors  # type: ignore[operator]

        class Part(Online):
            def before(self, op: int, memory: Memory) -> Iterable[Action] | None:
                return inner.before(op, memory) if op < ops else ()

            def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action] | None:
                return inner.on_pressure(need, memory)

            def notice(self, change: Change) -> None:
                if change.tensor < tensors:
                    inner.notice(change)

        return Part()


def beside(
    plan: Plan, platform: Platform, times: Iterable[int], *, copies: bool, pooled: bool
) -> tuple[Plan, Platform]:
    """The plan and the platform with an unrelated device whose ops end at `times`.

    copies: a copy starts at each, and ends a nanosecond later. pooled: its two links share their bandwidth.
    """
    device, trace = platform.devices, plan.trace
    tiers = (Tier("far", GB, GB, GB, device=device), Tier("farther", GB, GB, GB, device=device))
    links = (Link("out", "far", "farther", GB), Link("back", "farther", "far", GB))
    pools = (Pool("strange", (Member("out"), Member("back")), GB),) if pooled else ()
    wider = replace(
        platform,
        tiers=(*platform.tiers, *tiers),
        engines=(*platform.engines, Engine("unrelated", device, "far", ("far",), {"fp32": GB})),
        links=(*platform.links, *links),
        pools=(*platform.pools, *pools),
    )
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    thing = b.tensor("strange", 1, "input")
    actions = list(plan.actions)
    for k, (last, now) in enumerate(pairwise([0, *sorted(set(times) - {0})])):
        op = b.op(f"strange {k}", reads=[] if k else [thing], device=device, duration=now - last)
        if copies:
            actions.append(Move(thing, ("farther", "far")[k % 2], after=op))
    online = None if plan.online is None else Unaware(plan.online, len(trace.ops), len(trace.tensors))
    longer = b.build(outputs=trace.outputs, carry=trace.carry)
    return Plan(longer, actions, place=plan.place, online=online, keep_dead=plan.keep_dead), wider


def outcome(plan: Plan, platform: Platform) -> tuple[str, EventLog | None]:
    try:
        return "done", replay(plan, platform)
    except TiersimError as error:
        return f"{type(error).__name__}: {error}", getattr(error, "log", None)


def instants(log: EventLog) -> list[int]:
    """Every nanosecond at which something happens while a device still runs ops.

    After that a run waits for all that is under way, on whatever device, before it brings back what is missing.
    """
    last = int(log.interval("end")[on_main(log) & (log.interval("why") == RUN)].max(initial=0))
    both = {*log.interval("start").tolist(), *log.interval("end").tolist(), *log.change("time").tolist()}
    return sorted(t for t in both if t <= last)


def without_unrelated(log: EventLog) -> tuple[object, ...]:
    """The log in names, without the rows of the unrelated device."""
    events, memory = log.events, log.memory
    own = events[~events["lane"].isin(["unrelated", "out", "back"])].reset_index(drop=True)
    kept = memory[~memory["tier"].isin(["far", "farther"])].reset_index(drop=True)
    counters = tuple(sorted(log.counters.items()))
    return own.values.tolist(), kept.values.tolist(), log.end, log.complete, counters
