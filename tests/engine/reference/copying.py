"""Moves between tiers, and how what is to be copied shares the links."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from sim.errors import IllegalPlan
from sim.plan import Move
from tests.engine.reference.durations import NANO, nearest, route_of
from tests.engine.reference.store import Store


@dataclass(eq=False)
class Job:
    """Bytes for a route of links, in chunks if they may be interrupted. left: of the chunk under way."""

    links: tuple[int, ...]
    bytes: int
    priority: int
    joined: int
    device: int
    number: int
    what: Any
    chunk: int = 0
    fixed: int | None = None
    began: int = -1
    has_links: bool = False
    flows_from: int = 0
    left: Fraction = Fraction(0)
    rate: Fraction = Fraction(0)

    @property
    def place_in_queue(self) -> tuple[int, int, int, int]:
        """Lowest priority value first, then first come."""
        return self.priority, self.joined, self.device, self.number


@dataclass(eq=False)
class Copying:
    """One tensor on its way between two tiers. size: bytes at the target; wire: bytes on the links."""

    tensor: int
    source: str
    target: str
    keep: bool
    priority: int
    size: int
    wire: int
    device: int
    op: int
    has_space: bool = False
    drop_on_arrival: bool = False
    followers: list[Move] = field(default_factory=list)
    job: Job | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has started: from then on it cannot be replaced."""
        return self.job is not None and self.job.began >= 0

    @property
    def is_leaving(self) -> bool:
        """Whether the source's space will be released."""
        return self.has_space and not self.keep


class Copies:
    """All moves under way, one per tensor, in the order in which they were asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.under_way: dict[int, Copying] = {}
        self.outside: list[Copying] = []  # those without space, first come first served
        self.jobs: list[Job] = []
        self.requests: dict[str, list[Any]] = {name: [] for name in store.tiers}  # devices that wait for space
        self.overwriting: dict[int, str] = {}  # values that an op under way overwrites, and where
        self.making: set[tuple[int, str]] = set()  # results that an op is recomputing
        self.to_follow: list[Copying] = []  # ended copies that others follow
        self.number = 0

    # ---- asking ------------------------------------------------------------------------------

    def leaving(self, tier: str) -> int:
        """Bytes that copies under way will release."""
        held = self.store.held
        return sum(held[c.tensor][tier] for c in self.under_way.values() if c.is_leaving and c.source == tier)

    def arriving(self, tier: str) -> int:
        """Bytes taken by copies that have not ended."""
        return sum(c.size for c in self.under_way.values() if c.has_space and c.target == tier)

    def free_at(self, source: str, target: str) -> int:
        """When what runs and waits on that route will have ended at present rates, one after the other."""
        store, links = self.store, self.store.platform.links
        route = set(route_of(store.platform, source, target))
        here = [job for job in self.jobs if route.intersection(job.links)]
        end = store.now
        for job in here:
            if job.has_links:
                rate = job.rate or Fraction(min(links[i].rate for i in job.links))
                end = max(end, max(job.flows_from, store.now) + ceil(job.left * NANO / rate))
        for job in here:
            rest = job.bytes
            if not job.has_links and job.began < 0:
                end += sum(links[i].fixed for i in job.links) if job.fixed is None else job.fixed
            end += ceil(Fraction(rest * NANO, min(links[i].rate for i in job.links)))
        return end

    # ---- moves -------------------------------------------------------------------------------

    def move(self, tensor: int, action: Move, device: int, op: int) -> None:
        """Begin, replace, turn round or follow."""
        store = self.store
        if tensor in self.overwriting:
            store.counters["ignored_actions"] += 1
            return
        store.owed.get(tensor, {}).pop(action.to, None)  # that copy is wanted again
        self._begin(tensor, action, device, op)
        if tensor in store.owed and tensor not in self.under_way and not store.locks[tensor]:
            self.pay(tensor, op)
            self.free_if_dead(tensor, op)

    def _begin(self, tensor: int, action: Move, device: int, op: int) -> None:
        store, now = self.store, self.under_way.get(tensor)
        if now is not None and now.is_running:
            if action.to == now.source:
                self.keep_source(now)
                now.drop_on_arrival = not action.keep
            elif action.to == now.target and not now.followers:
                now.drop_on_arrival = False
                now.keep = now.keep and action.keep
            else:
                now.followers.append(action)
            return
        if now is not None:
            if action.to == now.source:
                self.call_back(now)
            else:
                self.cancel(now)
        held = store.held[tensor]
        if not held:
            store.counters["ignored_actions"] += 1
            return
        if action.to in held or (tensor, action.to) in self.making:
            others = [tier for tier in held if tier != action.to]
            if not action.keep and others:
                self.let_go(tensor, self._nearest(tensor, others, action.to), op, "moved out")
            return
        source = self._nearest(tensor, list(held), action.to)
        size = store.tensors[tensor].bytes if action.wire is None else action.wire
        wire = held[source] if action.wire is None else action.wire
        copy = Copying(tensor, source, action.to, action.keep, action.priority, size, wire, device, op)
        self.under_way[tensor] = copy
        queue = [c for c in self.outside if c.target == action.to]
        if queue or self.requests[action.to] or size > store.free(action.to):
            self.outside.append(copy)
        else:
            self.admit(copy, op)

    def _nearest(self, tensor: int, held: list[str], target: str) -> str:
        source = nearest(self.store.platform, held, target)
        if source is None:
            raise IllegalPlan(f"tensor {tensor}: no route from {held} to {target!r}")
        return source

    def fetch(self, tensor: int, target: str, device: int, op: int) -> None:
        """Bring a copy to a device that reads it; the source stays."""
        held = [tier for tier in self.store.held[tensor] if tier != self.overwriting.get(tensor)]
        source = self._nearest(tensor, held, target)
        size, wire = self.store.tensors[tensor].bytes, self.store.held[tensor][source]
        copy = Copying(tensor, source, target, True, 0, size, wire, device, op)
        self.under_way[tensor] = copy
        self.store.counters["implicit_moves"] += 1
        self.admit(copy, op)

    def admit(self, copy: Copying, op: int) -> None:
        """Take space at the target and join the queues of the route."""
        store = self.store
        store.note(copy.target, copy.size, copy.tensor, op, "moved in")
        copy.has_space = True
        if copy in self.outside:
            self.outside.remove(copy)
        links = route_of(store.platform, copy.source, copy.target)
        copy.job = Job(links, copy.wire, copy.priority, store.now, copy.device, self.number, copy)
        self.number += 1
        self.jobs.append(copy.job)

    def call_back(self, copy: Copying) -> None:
        """What a move that has not started was to take is wanted where it lies."""
        self.store.counters["moves_cancelled"] += 1
        self.store.counters["cancelled_bytes"] += copy.wire
        self.store.counters["moves_without_space"] += not copy.has_space
        self.cancel(copy)

    def cancel(self, copy: Copying) -> None:
        """Forget a move that has not started."""
        store = self.store
        del self.under_way[copy.tensor]
        if copy.has_space:
            assert copy.job is not None
            self.jobs.remove(copy.job)
            store.give_back(copy.target, copy.size, copy.tensor, copy.op, "called off")
            if not copy.keep:
                store.stirred.add(copy.source)  # what it promised will not come
        else:
            self.outside.remove(copy)
        store.news[copy.tensor] += 1

    def keep_source(self, copy: Copying) -> None:
        """The release is cancelled, and who waits for that space asks again."""
        if not copy.keep:
            copy.keep = True
            self.store.stirred.add(copy.source)

    def end(self, copy: Copying) -> None:
        """The copy is there."""
        store, tensor = self.store, copy.tensor
        assert copy.job is not None
        for i in copy.job.links:
            name = store.platform.links[i].name
            store.row(copy.job.began, store.now, copy.device, name, "move", copy.op, tensor, "", copy.wire)
        del self.under_way[tensor]
        self.jobs.remove(copy.job)
        store.arrive(tensor, copy.target, copy.size)
        if not copy.keep:
            self.let_go(tensor, copy.source, copy.op, "moved out")
        if copy.drop_on_arrival:
            self.let_go(tensor, copy.target, copy.op, "moved out")
        if copy.followers:
            self.to_follow.append(copy)
        else:
            self.tidy(tensor, copy.op)

    def follow(self, copy: Copying) -> None:
        """The moves that were asked for meanwhile, in order, until one is under way."""
        moves = copy.followers
        while moves and copy.tensor not in self.under_way:
            self.move(copy.tensor, moves.pop(0), copy.device, copy.op)
        if copy.tensor in self.under_way:
            self.under_way[copy.tensor].followers += moves
            self.free_if_dead(copy.tensor, -1)
        else:
            self.tidy(copy.tensor, copy.op)

    # ---- releases ----------------------------------------------------------------------------

    def let_go(self, tensor: int, tier: str, op: int, cause: str) -> None:
        """Release a copy: now, or when its last reader or its copy has done with it."""
        busy = self.under_way.get(tensor)
        if self.store.locks[tensor] or (busy is not None and tier in (busy.source, busy.target)):
            self.store.owed.setdefault(tensor, {}).setdefault(tier, cause)
        else:
            self.store.release(tensor, tier, op, cause)

    def pay(self, tensor: int, op: int) -> None:
        """Carry out the releases that waited."""
        store = self.store
        if store.locks[tensor] or tensor in self.under_way:
            return
        owed = store.owed.pop(tensor, {})
        for tier in store.tiers:
            if tier in owed and tier in store.held[tensor]:
                store.release(tensor, tier, op, owed[tier])

    def tidy(self, tensor: int, op: int) -> None:
        """After a copy: what waited for it goes, and so does a value that nobody needs."""
        self.pay(tensor, op)
        self.free_if_dead(tensor, -1)

    def free_if_dead(self, tensor: int, op: int) -> None:
        """Free what no op still to run and no planned recomputation reads."""
        store = self.store
        if store.is_needed(tensor) or store.locks[tensor] or not store.held[tensor] or not store.may_be_freed(tensor):
            return
        copy = self.under_way.get(tensor)
        if copy is not None and not copy.is_running and tensor not in store.waited_for:
            self.call_back(copy)
            self.pay(tensor, op)
        keeps = store.plan.keep_dead
        if keeps if isinstance(keeps, bool) else tensor in keeps:
            if tensor not in store.dead:
                store.dead.append(tensor)
        else:
            self.free_all(tensor, op)

    def free_all(self, tensor: int, op: int) -> None:
        """All copies go, or go when the copy under way has ended."""
        store = self.store
        for tier in [name for name in store.tiers if name in store.held[tensor]]:
            if tensor in self.under_way:
                store.owed.setdefault(tensor, {}).setdefault(tier, "freed")
            else:
                store.release(tensor, tier, op, "freed")

    def free_the_dead(self, tier: str) -> bool:
        """Where dead tensors are kept: the one that has been dead longest goes; whether there was one."""
        for tensor in self.store.dead:
            if tier in self.store.held[tensor] and not self.store.locks[tensor] and tensor not in self.under_way:
                self.free_all(tensor, -1)
                return True
        return False
