"""What an online part sees of the reference run."""

from __future__ import annotations

from collections.abc import Iterator

from tests.engine.reference.copying import Copies
from tests.engine.reference.store import Store


class View:
    """See `sim.plan.Memory`, whose words these are."""

    def __init__(self, store: Store, copies: Copies) -> None:
        self._store, self._copies = store, copies

    @property
    def now(self) -> int:
        return self._store.now

    def free(self, tier: str) -> int:
        return self._store.free(tier)

    def leaving(self, tier: str) -> int:
        return self._copies.leaving(tier)

    def arriving(self, tier: str) -> int:
        return self._copies.arriving(tier)

    def largest_hole(self, tier: str) -> int:
        return self._store.free(tier)

    def where(self, tensor: int) -> tuple[str, ...]:
        return tuple(name for name in self._store.tiers if name in self._store.held[tensor])

    def in_flight(self, tensor: int) -> str | None:
        copy = self._copies.under_way.get(tensor)
        return None if copy is None else copy.target

    def is_locked(self, tensor: int) -> bool:
        return self._store.locks[tensor] > 0

    def last_read(self, tensor: int) -> int:
        return self._store.last_used.get(tensor, -1)

    def neighbours(self, tensor: int, tier: str) -> tuple[int, int]:
        return (0, 0)

    def link_free_at(self, source: str, target: str) -> int:
        return self._copies.free_at(source, target)

    def residents(self, tier: str) -> Iterator[int]:
        return (t for t, held in self._store.held.items() if tier in held)
