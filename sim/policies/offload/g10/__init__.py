"""G10: evictions and prefetches planned ahead against the bandwidth that is free, over device, host and drive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from sim.errors import PolicyError
from sim.eviction.farthest import FarthestNextUse
from sim.plan import Action, Move, Online, Plan, Problem, Unpressed
from sim.policies.base import Policy
from sim.policies.offload.g10.residents import Away, away_of, given_by
from sim.policies.offload.g10.scheduling import Schedule
from sim.policies.offload.g10.vitality import Vitality, ops_of, vitality_of
from sim.policies.offload.swap_all import SwapAll
from sim.solvers.load_curve import load_of
from sim.solvers.outcome import fastest
from sim.solvers.spans import users

LONGEST = 1e6
"""How many times as long ops seem where any tensor has the time to be copied."""
STRETCHES = 4
"""Timelines that are tried before that one."""


@dataclass(frozen=True, kw_only=True)
class G10(Policy):
    """Evict tensors for the periods in which they are inactive, and prefetch them, while the links are free.

    Vitality analysis finds, on the timeline of ops without stalls, when each tensor is used: weights, optimizer state,
    gradients and activations alike. Between two uses it is inactive. As long as memory is exceeded, the period that
    takes most bytes x time above the capacity away, per time of its copies, is chosen: the copy out takes the first gap
    in the link's time behind its use, the copy in the last one that ends before the next use. Where the drive is needed
    beside the host, copies to it take the time of its own links. In the end each prefetch begins as early as memory
    allows.
    Where the links have too little time, the timeline is stretched until they have enough, and a second plan counts
    their time as unlimited. What does not fit at the start begins behind the device, and returns there after its last
    use. Plans are replayed, also one without any prefetch, and the fastest is taken. Under pressure that none foresaw,
    what is used last is moved out, and what is read is fetched while the device waits.
    Source: Zhang, Zhou, Wang, Xue, Huang, "G10: Enabling An Efficient Unified GPU Memory and Storage Architecture with
        Smart Tensor Migrations", MICRO 2023, doi:10.1145/3613424.3614309. The paper was not at hand; ratio of benefit
        and cost, gaps in the link's time, and eager prefetch follow accounts of it.
    Bounds: on a timeline that is not stretched no op waits, as long as copies of both directions do not slow each
        other. Never slower than `swap_all`, whose plan is replayed, too, where any of these fits. Five schedules and as
        many replays at most, or ten where a drive takes part; each O(periods x log + trips x periods).
    Headline: on its machine (`a100_40_g10`) a BERT-base of 256 sequences that peaks at 47.8 GiB takes 0.0 % more time
        than with unlimited memory, and copies the 9.3 GB that are lacking once each way; `swap_all` takes 21 % more,
        `lru_tiering` 55 %. With a host of 4 GiB and the drive 45 %, of which the drive's rate takes 43.
    Departs: the drive is taken first, as published, only where the host is too small for all, since host memory costs
        nothing here. Tensors move whole; G10's are pages whose faults cost as those of `uvm`, of which a plan
        leaves none. Comparing replays, stretching, and what begins behind the device are not published. No period spans
        two iterations. On several devices each is planned alone, with its share of the tiers behind.

    Raises PolicyError for a platform without a host tier.
    """

    online = True
    moves = True
    needs = frozenset({"host"})
    manages = ("activations", "gradients", "optimizer_state", "weights")
    fidelity = "reconstruction"
    plans_ahead = "when each tensor is used, and the copies that follow from it"
    rarely = "it moves only what exceeds the memory"

    def plan(self, problem: Problem) -> Plan:
        """The fastest of a few schedules, by replay."""
        platform = problem.platform
        if platform.host is None:
            raise PolicyError(f"g10: {platform.name} has no host tier to migrate to")
        drafts = Drafts(problem, platform.host.name)
        if drafts.fits:
            return drafts.plan((), {})
        return fastest(problem, drafts.all())


class Drafts:
    """The plans between which a replay decides."""

    def __init__(self, problem: Problem, host: str) -> None:
        self._problem = problem
        self._host = host

    @cached_property
    def _devices(self) -> list[Vitality]:
        problem = self._problem
        return [vitality_of(problem, device, self._host) for device in range(problem.trace.devices)]

    @property
    def fits(self) -> bool:
        """Whether nothing has to leave."""
        trace, platform = self._problem.trace, self._problem.platform
        return all(
            int(load_of(trace, device, ops_of(trace, device)).max(initial=0)) <= platform.home(device).capacity
            for device in range(trace.devices)
        )

    def all(self) -> Iterator[Plan]:
        """With the links' time as it is, and as if each copy had the time that it takes; to the host, and farther.

        Then what answers pressure alone, and `swap_all`.
        """
        for is_timed in (True, False):
            near = self._draft(is_timed, deep=False)
            yield self._joined(near)
            if any(schedule.is_deep for schedule, _ in near):
                yield self._joined(self._draft(is_timed, deep=True))
        yield self.plan((), self._place(near))
        yield replace(SwapAll().plan(self._problem), online=Online)

    def _draft(self, is_timed: bool, *, deep: bool) -> list[tuple[Schedule, list[Away]]]:
        make = self._timed if is_timed else self._untimed
        return [make(vitality, deep) for vitality in self._devices]

    def _timed(self, vitality: Vitality, deep: bool) -> tuple[Schedule, list[Away]]:
        """The first stretch of the timeline with which everything fits, from that which the links need at least."""
        away = away_of(self._problem.trace, vitality, 0)
        stretch = _least_stretch(self._problem, vitality)
        for _ in range(STRETCHES):
            schedule = self._schedule(vitality, away, stretch, deep)
            if not schedule.excess_bytes:
                break
            stretch *= 1.5
        return schedule, away

    def _untimed(self, vitality: Vitality, deep: bool) -> tuple[Schedule, list[Away]]:
        """With all the time of the world; where something exceeds the capacity even then, more begins elsewhere."""
        short = 0
        for _ in range(STRETCHES):
            away = away_of(self._problem.trace, vitality, short)
            schedule = self._schedule(vitality, away, LONGEST, deep)
            if not schedule.excess_bytes:
                break
            short += schedule.excess_bytes
        return schedule, away

    def _schedule(self, vitality: Vitality, away: list[Away], stretch: float, deep: bool) -> Schedule:
        schedule = Schedule(vitality, self._problem.platform, stretch, deep=deep)
        schedule.plan(given_by(self._problem.trace, vitality, away))
        return schedule

    def _joined(self, drafts: Sequence[tuple[Schedule, list[Away]]]) -> Plan:
        actions: list[Action] = []
        for vitality, (schedule, away) in zip(self._devices, drafts, strict=True):
            home = self._problem.platform.home(vitality.device).name
            actions += _actions(vitality, schedule, home, away)
        return self.plan(actions, self._place(drafts))

    def _place(self, drafts: Sequence[tuple[Schedule, list[Away]]]) -> dict[int, str]:
        """What begins behind the devices, and where."""
        places = zip(self._devices, drafts, strict=True)
        return {one.first: vitality.levels[one.level].name for vitality, (_, away) in places for one in away}

    def plan(self, actions: Sequence[Action], place: Mapping[int, str]) -> Plan:
        """A plan with these actions, and what answers pressure."""
        trace, platform = self._problem.trace, self._problem.platform
        assert platform.host is not None
        size = trace.tensor_columns.bytes.tolist()
        online = partial(
            FarthestNextUse,
            chain=platform.cascade(platform.host.name),
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            movable=[bytes > 0 for bytes in size],
            size=size,
            uses=users(trace),
        )
        return Plan(trace, actions, place=place, online=online, unpressed=Unpressed())


def _least_stretch(problem: Problem, vitality: Vitality) -> float:
    """How many times as long ops would have to take for what exceeds the capacity at its worst to be copied beside."""
    over = vitality.load - vitality.capacity
    worst = int(np.argmax(over))
    near, stretch = vitality.levels[0], 1.0
    for route, took in ((near.out, vitality.took[:worst]), (near.back, vitality.took[worst:])):
        rate = problem.platform.pace(route).rate
        stretch = max(stretch, int(over[worst]) * 1e9 / rate / max(int(took.sum()), 1))
    return stretch


def _actions(vitality: Vitality, schedule: Schedule, home: str, away: Sequence[Away]) -> list[Action]:
    """Two moves per trip, in the order in which their copies begin."""
    ops, placed, unchanged = vitality.ops, {one.first for one in away}, {one.final for one in away}
    out: list[tuple[int, Action]] = []
    back: list[tuple[int, int, Action]] = []
    for trip in schedule.trips:
        tensor, left, right = trip.period.tensor, trip.period.left, trip.period.right
        there = vitality.levels[trip.level].name
        if left >= 0:
            # the last op that has ended when the link is free
            at = max(int(np.searchsorted(schedule.end, trip.out_at, side="right")) - 1, left)
            out.append((trip.out_at, Move(tensor, there, after=ops[min(at, len(ops) - 1)])))
        elif tensor not in placed:
            out.append((trip.out_at, Move(tensor, there, before=ops[0])))
        if right < len(ops):
            keep = left < 0 and tensor in placed and tensor in unchanged
            back.append((trip.in_at, right, Move(tensor, home, keep=keep, before=ops[trip.back])))
    moves_out = [move for _, move in sorted(out, key=lambda row: row[0])]
    return [*moves_out, *(move for *_, move in sorted(back, key=lambda row: row[:2]))]
