"""The same plan where host memory is pinned for each copy, and given back with the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from sim.hardware.platform import Platform
from sim.hardware.transfer_time import transfer_ns
from sim.plan import Action, Change, Memory, Move, Need, Online, Plan

Charge = Callable[[Action], Action]


def pinned_on_demand(plan: Plan, platform: Platform) -> Plan:
    """The plan whose copies into host memory first lock as much of it, at the rate of the profile.

    Locking takes time before the bytes flow, as `Move.delay` has it, and the link is taken meanwhile: one thread locks
    and copies. A copy that finds its tensor there moves nothing, and locks nothing.
    """
    rates = {tier.name: tier.pinning for tier in platform.tiers if tier.pinning}
    size, trace = plan.trace.tensor_columns.bytes, plan.trace

    def charge(action: Action) -> Action:
        if not isinstance(action, Move) or action.to not in rates:
            return action
        bytes = int(size[trace.tensor_id(action.tensor)]) if action.wire is None else action.wire
        return replace(action, delay=action.delay + transfer_ns(bytes, rates[action.to]))

    online = None if plan.online is None else _Factory(plan.online, charge)
    return replace(plan, actions=tuple(map(charge, plan.actions)), online=online)


class _Factory:
    """Creates the online part of a run, whose answers are charged."""

    def __init__(self, online: Callable[[], Online], charge: Charge) -> None:
        self._online, self._charge = online, charge

    def __call__(self) -> Online:
        return _Charged(self._online(), self._charge)


class _Charged(Online):
    def __init__(self, online: Online, charge: Charge) -> None:
        self._online, self._charge = online, charge

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        return [self._charge(action) for action in self._online.before(op, memory)]

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        return [self._charge(action) for action in self._online.on_pressure(need, memory)]

    def notice(self, change: Change) -> None:
        self._online.notice(change)
