"""When Python searches for cycles of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

COLLECT_EVERY = 250_000
"""After so many ops a process that runs many jobs searches; most of what a job makes is kept, and each search passes
over all of it."""


@contextmanager
def uncollected() -> Iterator[None]:
    """No search within the body, which makes many objects that its last references free or that stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Seldom:
    """What runs many jobs in a process, and searches for garbage every `COLLECT_EVERY` ops of theirs."""

    def __init__(self) -> None:
        self._ops = 0

    def collecting(self) -> AbstractContextManager[None]:
        """Within, nothing but this searches."""
        return uncollected()

    def count(self, ops: int) -> None:
        """Note that a job has so many ops."""
        self._ops += ops

    def collect_if_due(self) -> None:
        """Search if enough ops were counted since the last time."""
        if self._ops >= COLLECT_EVERY:
            self._ops = 0
            gc.collect()
