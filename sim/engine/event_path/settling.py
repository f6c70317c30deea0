"""The end of an instant: who waits gets what has come free, all at once, when nobody acts any more."""

from __future__ import annotations

from sim.engine.event_path.parts import Parts


class Settling:
    """Grants space, starts ops and copies, shares bandwidth, in this order."""

    def __init__(self, parts: Parts) -> None:
        self._space = parts.space
        self._space_queue = parts.space_queue
        self._transfers = parts.transfers
        self._engines = parts.engines
        self._links = parts.links
        self._flows = parts.flows

    def settle(self) -> bool:
        """Do it; whether it has to be done once more, after devices that have got space."""
        if self._space.waiting:
            if self._space_queue.wake_waiters():  # a device goes as far as it can before anything starts
                return True
            self._transfers.settle()
        if self._engines.stale:
            self._engines.settle()
        if self._links.stale:
            self._links.settle()
        if self._flows.stale:
            self._flows.settle()
        return False
