"""When Python searches for cycles of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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
