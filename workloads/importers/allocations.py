"""What a profiler recorded of the allocator, split into what each op allocated and released."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Event:
    """One allocation (bytes > 0) or release (bytes < 0).

    time: in ns.
    bytes, address: of the block.
    total: bytes that the allocator held afterwards, None where unknown.
    """

    time: int
    bytes: int
    address: int
    total: int | None


@dataclass(slots=True)
class Part:
    """A section of a unit in which nothing is allocated after an older storage was released.

    unit: position of the unit.
    first: whether it is the first section of its unit.
    made: bytes of the storages that it allocated and that outlive it.
    released: older storages that it released.
    held, most: bytes that it allocated, now and at the peak.
    """

    unit: int
    first: bool = True
    made: dict[int, int] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    held: int = 0
    most: int = 0

    @property
    def workspace(self) -> int:
        """Peak bytes that it held beyond the storages that outlive it."""
        return self.most - sum(self.made.values())

    def make(self, storage: int, size: int) -> None:
        """Record an allocation."""
        self.made[storage] = size
        self.held += size
        self.most = max(self.most, self.held)

    def release(self, storage: int) -> None:
        """Record a release, of its own storage or an older one."""
        if storage in self.made:
            self.held -= self.made.pop(storage)
        else:
            self.released.append(storage)


@dataclass(slots=True)
class Allocations:
    """The storages of a recording, numbered in the order in which they are first seen.

    parts: the sections of all units, in order.
    size: bytes of each storage.
    released_ns: when each was released, for those that were.
    initial: storages that were there before the recording and are released in it.
    base: bytes of all others that were there before it.
    unrecorded: addresses that were allocated again without having been released.
    """

    parts: list[Part] = field(default_factory=list)
    size: dict[int, int] = field(default_factory=dict)
    released_ns: dict[int, int] = field(default_factory=dict)
    initial: list[int] = field(default_factory=list)
    base: int = 0
    unrecorded: int = 0

    @classmethod
    def of(cls, events: Sequence[Event], starts: Sequence[int]) -> Allocations:
        """Those of some events, in order of time, each in the last unit that starts before it.

        starts: of the units, in ns, in order.
        """
        found = cls()
        of_unit: list[list[Event]] = [[] for _ in starts]
        for event in events:
            of_unit[max(0, bisect_right(starts, event.time) - 1)].append(event)
        address: dict[int, int] = {}
        for i, some in enumerate(of_unit):
            part = Part(i)
            found.parts.append(part)
            for event in some:
                part = found._take(event, part, address)
        if events and events[0].total is not None:
            known = events[0].bytes + sum(found.size[s] for s in found.initial)
            found.base = max(0, events[0].total - known)
        return found

    def _take(self, event: Event, part: Part, address: dict[int, int]) -> Part:
        if event.bytes > 0 and event.address in address:
            self.unrecorded += 1
            self.released_ns[address[event.address]] = event.time
            part.release(address.pop(event.address))
        if event.bytes > 0 and part.released:
            part = Part(part.unit, first=False)
            self.parts.append(part)
        storage = address.pop(event.address, len(self.size))
        if event.bytes > 0:
            address[event.address] = storage
            self.size[storage] = event.bytes
            part.make(storage, event.bytes)
        else:
            if storage not in self.size:
                self.size[storage] = -event.bytes
                self.initial.append(storage)
            self.released_ns[storage] = event.time
            part.release(storage)
        return part
