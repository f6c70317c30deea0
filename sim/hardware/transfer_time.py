"""The time of a transfer: the only place with this rule."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Pace(NamedTuple):
    """How fast a transfer is when it has its route to itself.

    fixed: ns per transfer.
    rate: bytes/s.
    """

    fixed: int
    rate: int


def transfer_ns(bytes: int, rate: int | Fraction, fixed: int = 0) -> int:
    """Nanoseconds of an uncontended transfer: the fixed time plus bytes / rate, rounded up.

    bytes: bytes on the wire.
    rate: bytes/s.
    fixed: ns per transfer.

    >>> transfer_ns(4, 3 * 10**9, 100)
    102
    """
    return fixed - (-bytes * 10**9 // rate)


def codec_rate(bytes: int, wire: int, codec: int) -> Fraction:
    """Bytes/s on the wire at which a codec compresses, or restores, a tensor of `bytes` bytes in `wire` bytes.

    codec: bytes/s that it takes, or gives, counted before compression.
    """
    return Fraction(codec * wire, bytes)
