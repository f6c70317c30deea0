"""What a policy needs at least: the state of training, where it leaves that in its tier; the peak of a fixed plan.

The floor of a policy is the smallest budget at which it fits. Of a plan that ignores the budget and waits for nothing,
one replay with ample memory tells it; that of any other policy has to be searched (`sim.search`). And where weights,
gradients and optimizer state alone exceed a tier, nothing need be run of the policies that leave all of these there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.hardware.platform import Platform
from sim.log import CAUSE, EventLog
from sim.plan import Move, Plan
from sim.policies.base import MANAGED_AS, Policy
from sim.trace.columns import distinct
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLES

STATE = ("weights", "gradients", "optimizer_state")
"""The words of `manages` for the state of training, as opposed to activations."""

HOLDERS = 10
"""How many of the largest tensors a refusal names."""


@dataclass(frozen=True)
class State:
    """What weights, gradients and optimizer state take of a tier if nothing moves or drops them.

    tier: its name.
    bytes: the most at any moment.
    placed_bytes: from the start, before there are gradients.
    holders: (tensor name, bytes, role) of the largest that are placed there.
    """

    tier: str
    bytes: int
    placed_bytes: int
    holders: tuple[tuple[str, int, str], ...] = ()


def state_in(kept: EventLog) -> tuple[State, ...]:
    """The state of training in each tier.

    kept: a run that keeps everything with unlimited memory.
    """
    codes = [ROLES.index(role) for role, word in MANAGED_AS.items() if word in STATE]
    tensor, cause = kept.change("tensor"), kept.change("cause")
    columns = kept.trace.tensor_columns
    rows = (tensor >= 0) & np.isin(columns.role[tensor], codes)
    found = []
    for i, tier in enumerate(kept.platform.tiers):
        here = rows & (kept.change("tier") == i)
        delta, time = kept.change("delta")[here], kept.change("time")[here]
        first = here & (cause == CAUSE["placed"])
        most = placed = int(kept.change("delta")[first].sum())
        if len(delta) and _is_sequence(kept):  # which gradients are live together follows from the order of ops
            ends = np.flatnonzero(np.diff(time, append=time[-1] + 1))  # the last change of each instant
            most = max(most, int(np.cumsum(delta)[ends].max()))
        largest = sorted(
            zip(kept.change("delta")[first].tolist(), tensor[first].tolist()), key=lambda row: (-row[0], row[1])
        )
        holders = ((columns.name[t], size, ROLES[columns.role[t]]) for size, t in largest[:HOLDERS])
        found.append(State(tier.name, most, placed, tuple(holders)))
    return tuple(found)


def left_in_place(policy: Policy, state: State) -> int:
    """The bytes of a state that a policy leaves in its tier whatever it decides, as far as its traits tell.

    0 for a policy that manages any part of the state: it may place or shard the rest, too. One that rewrites the trace
    may change how long gradients live, but not what is resident from the start.
    """
    if set(policy.manages) & set(STATE):
        return 0
    return state.placed_bytes if policy.rewrites else state.bytes


def decides_nothing(policy: Policy) -> bool:
    """Whether a policy declares none of what a policy can do, so that its plan is to keep everything."""
    return not (policy.recomputes or policy.moves or policy.rewrites or policy.online)


def too_small(policy: Policy, states: Sequence[State], limited: Platform) -> State | None:
    """The state of the first tier that is too small for what a policy leaves there; None for none.

    limited: the machine, with the budget as the capacity of its home tiers.
    """
    exceeds = (each for each in states if left_in_place(policy, each) > limited.tier(each.tier).capacity)
    return next(exceeds, None)


def largest_op(trace: Trace, platform: Platform) -> tuple[str, int]:
    """The op of forward or backward that holds most while it runs, and its bytes: operands, results and workspace.

    Whatever is moved or recomputed, so much must be resident at once unless the op itself is split. Ops of the
    optimizer, which policies hand to the host, do not count. ("", 0) where a device reads other tiers in place.
    """
    if any(set(engine.reaches) - {engine.home} for engine in platform.engines if engine.main):
        return "", 0
    c, t = trace.op_columns, trace.tensor_columns
    root = np.arange(len(t.bytes))
    for tensor in np.flatnonzero(t.replaces >= 0).tolist():  # what it replaces has a lower id
        root[tensor] = root[t.replaces[tensor]]
    most, name = 0, ""
    for op in np.flatnonzero(c.phase != PHASE_CODE["update"]).tolist():
        reads = c.read_ids[c.read_start[op] : c.read_start[op + 1]]
        writes = c.write_ids[c.write_start[op] : c.write_start[op + 1]]
        held = int(t.bytes[distinct(root[np.concatenate((reads, writes))])].sum()) + int(c.workspace[op])
        if held > most:
            most, name = held, c.name[op]
    return name, most


def waits_for_nothing(plan: Plan, platform: Platform) -> bool:
    """Whether a plan fits just the budgets from its peak with ample memory on: it neither waits nor asks for space."""
    moves = bool(plan.place) or any(isinstance(action, Move) for action in plan.actions)
    decides = plan.online is not None or bool(plan.keep_dead)
    beside = plan.trace.devices > 1 or bool(set(plan.trace.op_columns.engine.values()))
    return not (moves or decides or beside) and platform.home(0).allocator.name == "exact"


def _is_sequence(log: EventLog) -> bool:
    """Whether one engine ran all ops, one after the other."""
    columns = log.trace.op_columns
    return log.trace.devices == 1 and not columns.group and not any(columns.engine.values())
