"""What an online part sees of a run on the copy path.

It is never compiled: policies may ask with integers of NumPy, and `residents` is a generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sim.engine.copy_path.copies import Copies
from sim.engine.copy_path.wires import Elsewhere
from sim.trace.graph import Trace


class View:
    """The run's state, read-only; see `sim.plan.Memory`.

    is_short_sighted: it has been asked for what this path does not know.
    """

    def __init__(
        self, copies: Copies, names: Sequence[str], ids: Mapping[str, int], trace: Trace, reached: Sequence[int]
    ) -> None:
        """reached: by op when it was last reached, -1 for never."""
        self._copies = copies
        self._names = names
        self._ids = ids
        self._trace = trace
        self._reached = reached
        self.is_short_sighted = False

    @property
    def now(self) -> int:
        """The present time."""
        return self._copies.now

    def free(self, tier: str) -> int:
        """Bytes not taken."""
        at = self._ids[tier]
        return self._copies.capacity[at] - self._copies.used[at]

    def leaving(self, tier: str) -> int:
        """Bytes that copies under way will release."""
        return self._copies.leaving[self._ids[tier]]

    def arriving(self, tier: str) -> int:
        """Bytes taken by copies that have not ended."""
        return self._copies.arriving[self._ids[tier]]

    def largest_hole(self, tier: str) -> int:
        """All free bytes: there are no addresses."""
        return self.free(tier)

    def where(self, tensor: int) -> tuple[str, ...]:
        """The tiers that hold a complete copy."""
        held = self._copies.held[tensor]
        return tuple([name for i, name in enumerate(self._names) if held & 1 << i])

    def in_flight(self, tensor: int) -> str | None:
        """The tier that a copy of it is on its way to."""
        target = self._copies.target(tensor)
        return None if target < 0 else self._names[target]

    def is_locked(self, tensor: int) -> bool:
        """Whether something that runs, or is being restored, needs it where it is."""
        return self._copies.pins[tensor] > 0

    def last_read(self, tensor: int) -> int:
        """When an op that reads it was last reached; -1 for never."""
        return max([self._reached[op] for op in self._trace.readers(tensor)], default=-1)

    def neighbours(self, tensor: int, tier: str) -> tuple[int, int]:
        """None: there are no addresses."""
        self._ids[tier]  # one that does not exist is an error here, too
        return 0, 0

    def link_free_at(self, source: str, target: str) -> int:
        """Known to the event path alone."""
        self.is_short_sighted = True
        raise Elsewhere

    def residents(self, tier: str) -> Iterator[int]:
        """The tensors with a complete copy in a tier, by id."""
        bit = 1 << self._ids[tier]
        return (t for t, held in enumerate(self._copies.held) if held & bit)
