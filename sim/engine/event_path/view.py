"""What an online part sees of a run.

It is never compiled: policies may ask with integers of NumPy, and `residents` is a generator."""

from __future__ import annotations

from collections.abc import Iterator

from sim.engine.event_path.links import Links
from sim.engine.event_path.state import State


class View:
    """The run's state, read-only; see `sim.plan.Memory`."""

    def __init__(self, state: State, links: Links) -> None:
        self._platform = state.platform
        self._clock = state.clock
        self._space = state.space
        self._residency = state.residency
        self._lifetimes = state.lifetimes
        self._links = links
        self._ids = state.platform.tier_ids

    @property
    def now(self) -> int:
        """The present time."""
        return self._clock.now

    def free(self, tier: str) -> int:
        """Bytes not taken."""
        return self._space.free(self._ids[tier])

    def leaving(self, tier: str) -> int:
        """Bytes that copies under way will release."""
        return self._space.leaving[self._ids[tier]]

    def arriving(self, tier: str) -> int:
        """Bytes taken by copies that have not ended."""
        return self._space.arriving[self._ids[tier]]

    def largest_hole(self, tier: str) -> int:
        """The largest contiguous free range."""
        return self._space.largest_free_block(self._ids[tier])

    def where(self, tensor: int) -> tuple[str, ...]:
        """The tiers that hold a complete copy."""
        copies = self._residency.copies[tensor]
        return tuple(name for i, name in enumerate(self._space.names) if copies & 1 << i)

    def in_flight(self, tensor: int) -> str | None:
        """The tier that a copy of it is on its way to."""
        transfer = self._residency.in_flight.get(tensor)
        return None if transfer is None else self._space.names[transfer.target]

    def is_locked(self, tensor: int) -> bool:
        """Whether something that runs, or is being restored, needs it where it is."""
        return self._lifetimes.pins[tensor] > 0

    def last_read(self, tensor: int) -> int:
        """When an op that reads it was last reached; -1 for never."""
        return self._residency.last_read[tensor]

    def neighbours(self, tensor: int, tier: str) -> tuple[int, int]:
        """Free bytes just below and just above it."""
        return self._space.neighbours(int(tensor), self._ids[tier])

    def link_free_at(self, source: str, target: str) -> int:
        """When what is queued on that route now will have ended."""
        return self._links.free_at(self._platform.route(source, target), self._clock.now)

    def residents(self, tier: str) -> Iterator[int]:
        """The tensors with a complete copy in a tier, by id."""
        bit = 1 << self._ids[tier]
        return (t for t, copies in enumerate(self._residency.copies) if copies & bit)
