"""How long a transfer takes: the one place of this rule."""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """What a route does to a transfer that is alone on it. fixed: ns for each transfer; rate: bytes/s."""

    fixed: int
    rate: int


def transfer_ns(bytes: int, rate: int, fixed: int = 0) -> int:
    """Nanoseconds of a transfer that nothing slows down: the fixed time, then bytes / rate, rounded up.

    >>> transfer_ns(4, 3 * 10**9, 100)
    102
    """
    return fixed - (-bytes * 10**9 // rate)
