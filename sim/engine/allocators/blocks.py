"""The interface of an allocator that hands out addresses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Blocks(Protocol):
    """The interface of an allocator with addresses. Sizes and addresses in bytes.

    rounding: granularity of a request.
    used: bytes of the live blocks, as `size` counts them.
    reserved: bytes taken from the tier: segments for caching, `used` for the others.
    """

    rounding: int
    used: int

    @property
    def reserved(self) -> int:
        """Bytes taken from the tier."""

    def fits(self, bytes: int, offset: int | None = None) -> bool:
        """Whether `take` would succeed now (for caching, after it has released its cache)."""

    def take(self, bytes: int, offset: int | None = None, end: str = "low") -> int | None:
        """A handle (>= 0) of a new block, None if none fits. `offset` is for planned, `end` for pool."""

    def give(self, handle: int) -> None:
        """Release a block. Raises KeyError where the handle is not live."""

    def size(self, handle: int) -> int:
        """Bytes counted against the tier for that block: at least what was asked for."""

    def largest_hole(self) -> int:
        """The largest request that would fit now."""

    def neighbours(self, handle: int) -> tuple[int, int]:
        """Free bytes just below and just above that block."""

    def address(self, handle: int) -> int:
        """Where that block begins."""

    def would_fit_after(self, handles: Iterable[int], bytes: int, offset: int | None = None) -> bool:
        """Whether a request would fit once these blocks are released. Changes nothing."""
