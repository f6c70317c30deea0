"""Random plans over a trace: all four verbs, at random anchors, with and without an online part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar

from hypothesis import strategies as st

from sim.conformance.examples import Example, random_examples
from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Memory, Move, Need, Online, Plan, Problem, Recompute, Wait
from sim.policies.base import MANAGES, Policy
from sim.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Anything(Policy):
    """Declares all that a plan can do."""

    recomputes = True
    moves = True
    manages: ClassVar[tuple[str, ...]] = MANAGES
    saves: ClassVar[Mapping[str, str]] = {"codec": "some of its moves put fewer bytes on the wire"}

    actions: Sequence[Action] = ()

    def plan(self, problem: Problem) -> Plan:
        return Plan(problem.trace, self.actions)


def made_by(trace: Trace, op: int) -> list[int]:
    """Tensors that there are once an op has ended, and that nothing has overwritten."""
    gone = trace.replaced_by
    return [
        t
        for t in range(len(trace.tensors))
        if trace.producer[t] <= op and not (gone[t] >= 0 and trace.producer[gone[t]] <= op)
    ]


def can_run_again(trace: Trace, op: int) -> bool:
    """Whether it is in no group, and what it overwrites, if anything, was made by ops of which the same is true."""
    olds = [t for new in trace.writes(op) if (t := trace.tensors[new].replaces) is not None]
    makers = [int(trace.producer[t]) for t in olds]
    return op not in trace.op_columns.group and all(m >= 0 and can_run_again(trace, m) for m in makers)


def surely_made(trace: Trace, op: int, device: int) -> bool:
    """Whether a device that has passed an op has waited for its end."""
    c = trace.op_columns
    return c.device[op] == device and op not in c.group and op not in c.engine


def plan_of(trace: Trace, platform: Platform, seed: int, count: int, *, gentle: bool) -> Plan:
    """`count` actions at random; a gentle plan drops only copies that can be fetched or recomputed."""
    draw = Random(seed)
    tiers = [tier.name for tier in platform.tiers]
    actions: list[Action] = []
    for _ in range(count):
        anchor = draw.randrange(len(trace.ops))
        side = draw.choice(("before", "after"))
        at = {side: anchor}
        device = int(trace.op_columns.device[anchor])
        here = made_by(trace, anchor if side == "after" else anchor - 1)
        # what another device or engine makes may not be there yet
        here = [t for t in here if trace.producer[t] < 0 or surely_made(trace, int(trace.producer[t]), device)]
        main = trace.op_columns.engine.get(anchor, "") == "" and anchor not in trace.op_columns.group
        verb = draw.choice(("move", "move", "move", "drop", "drop", "recompute", "wait"))
        if verb == "recompute":
            mine = [op for op in range(anchor) if surely_made(trace, op, device)]
            earlier = [op for op in mine if can_run_again(trace, op)]
            if earlier and (side == "before" or main):
                actions.append(Recompute(draw.choice(earlier), **at))
            continue
        if not here:
            continue
        tensor = draw.choice(here)
        if verb == "wait":
            if side == "before" or main:
                actions.append(Wait(tensor, **at))
        elif verb == "move":
            priority = draw.choice((0, 0, 0, -1, 2))
            wire = -(-trace.tensors[tensor].bytes // 2) if draw.random() < 0.1 else None
            keep = draw.random() < 0.3
            actions.append(Move(tensor, draw.choice(tiers), keep=keep, priority=priority, wire=wire, **at))
        elif not gentle or (trace.producer[tensor] >= 0 and can_run_again(trace, int(trace.producer[tensor]))):
            tier = draw.choice((None, None, *tiers))
            actions.append(Drop(tensor, tier, **at))
    return Plan(trace, tuple(actions), keep_dead=draw.random() < 0.1)


class RandomEvictor(Online):
    """Sends away or drops what it comes across, at random."""

    def __init__(self, seed: int, trace: Trace, away: tuple[str, ...]) -> None:
        self.draw = Random(seed)
        self.trace = trace
        self.away = away

    def may_drop(self, tensor: int) -> bool:
        producer = int(self.trace.producer[tensor])
        return producer >= 0 and can_run_again(self.trace, producer)

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        if self.draw.random() > 0.2:
            return ()
        home = [t for t in range(len(self.trace.tensors)) if memory.where(t) and not memory.is_locked(t)]
        if not home:
            return ()
        tensor = self.draw.choice(home)
        if self.away and self.draw.random() < 0.7:
            return (Move(tensor, self.draw.choice(self.away), keep=self.draw.random() < 0.5),)
        return (Drop(tensor),) if self.may_drop(tensor) else ()

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        there = [t for t in memory.residents(need.tier) if not memory.is_locked(t) and memory.in_flight(t) is None]
        self.draw.shuffle(there)
        for tensor in there:
            if self.away and need.tier not in self.away[:1] and self.draw.random() < 0.6:
                return (Move(tensor, self.away[0]),)
            if self.may_drop(tensor):
                return (Drop(tensor, need.tier),)
        return ()


@st.composite
def planned(draw: st.DrawFn, *, online: bool = False, gentle: bool = True, ample: bool = False) -> tuple[Example, Plan]:
    """An example and a random plan for its trace."""
    example = draw(random_examples(real=0))
    if ample:
        example = Example(example.trace, example.machine, 1 << 40)
    code = draw(st.integers(0, 30 * 2**16 - 1))
    plan = plan_of(example.trace, example.platform, code // 30, code % 30, gentle=gentle)
    if online:
        away = tuple(tier.name for tier in example.platform.tiers if tier.device < 0)
        factory = partial(RandomEvictor, code, example.trace, away)
        plan = Plan(plan.trace, plan.actions, online=factory, keep_dead=plan.keep_dead)
    return example, plan
