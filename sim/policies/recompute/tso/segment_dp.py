"""Cutting a chain into segments and choosing the mode of each, by dynamic programming.

A segment fits if what the segments before it save, and its own peak, are within the room. Between a captured
segment and one that is not, execution switches, once forward and once backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from sim.policies.recompute.tso.segments import FAR, Ints, ModePrices

Segment = tuple[int, int, int]
"""First stage, the stage after the last, and which of the modes."""

GRID = 8  # rooms for a single segment that are tried when bytes are priced
NEVER = FAR * FAR * FAR  # more than any time and price


def total_ns(prices: Sequence[ModePrices], segments: Sequence[Segment], switch: int) -> int:
    """Time of a choice beyond one plain forward and backward. switch: ns, both ways together."""
    total = sum(int(prices[q].cost[i, j]) for i, j, q in segments)
    captured = [prices[q].mode.captured for _, _, q in segments]
    return total + switch * sum(a != b for a, b in pairwise(captured))


def room_for(prices: Sequence[ModePrices], segments: Sequence[Segment]) -> int:
    """The most bytes resident at once under a choice."""
    before = most = 0
    for i, j, q in segments:
        most = max(most, before + int(prices[q].peak[i, j]))
        before += int(prices[q].saved[i, j])
    return most


def by_slots(prices: Sequence[ModePrices], room: int, slots: int, switch: int) -> list[Segment] | None:
    """The choice of least time whose sizes, rounded up to slots, fit in the room; None if there is none.

    D[j, w] = min over i < j and modes of D[i, w - saved(i, j)] + cost(i, j), where w - saved + peak(i, j) fits; one
    such row for what ends captured, one for what does not. O(L^2 slots modes), a vector operation over slots.
    Exact where the room holds no more than `slots` multiples of the sizes' greatest common divisor.
    """
    count = prices[0].cost.shape[0]
    known = [p[p < FAR] for one in prices for p in (one.saved, one.peak)]
    unit = math.gcd(*(int(np.gcd.reduce(p)) for p in known)) or max(room, 1)
    slot = Fraction(unit) if room // unit <= slots else Fraction(room, slots)
    width = int(room / slot) + 1
    saved, peak = ([_up(getattr(one, name), slot, width) for one in prices] for name in ("saved", "peak"))
    best = np.full((count + 1, 2, width), FAR, np.int64)
    best[0, :, 0] = 0
    entered = np.full((count, 2, width), FAR, np.int64)  # at each cut, a switch to go on that way included
    for j in range(1, count + 1):
        entered[j - 1] = np.minimum(best[j - 1], best[j - 1, ::-1] + (switch if j > 1 else 0))
        for q, one in enumerate(prices):
            way = int(one.mode.captured)
            for i in np.flatnonzero(peak[q][:j, j] < width).tolist():
                more, most = int(saved[q][i, j]), width - int(peak[q][i, j])
                target = best[j, way, more : more + most]
                np.minimum(target, entered[i, way, :most] + int(one.cost[i, j]), out=target)
    way, w = divmod(int(best[count].argmin()), width)
    if best[count, way, w] >= FAR // 2:
        return None
    found: list[Segment] = []
    j = count
    while j:
        i, q, at = _before(prices, saved, peak, best, entered, j, way, w)
        found.append((i, j, q))
        # the other way round, if coming from there cost the switch
        way = way if best[i, way, at] == entered[i, way, at] else 1 - way
        j, w = i, at
    return found[::-1]


def _before(
    prices: Sequence[ModePrices],
    saved: Sequence[Ints],
    peak: Sequence[Ints],
    best: Ints,
    entered: Ints,
    j: int,
    way: int,
    w: int,
) -> tuple[int, int, int]:
    """The last segment of the best choice for an entry, and the slots before it."""
    width = best.shape[2]
    for q, one in enumerate(prices):
        if int(one.mode.captured) != way:
            continue
        for i in range(j):
            at = w - int(saved[q][i, j])
            if 0 <= at < width - int(peak[q][i, j]) and entered[i, way, at] + one.cost[i, j] == best[j, way, w]:
                return i, q, at
    raise AssertionError("a table whose entry comes from nowhere")


def _up(sizes: Ints, slot: Fraction, width: int) -> Ints:
    """Sizes in slots, rounded up; `width` for what is larger than all of them."""
    up: Ints = -(-np.where(sizes < FAR, sizes, 0) * slot.denominator // slot.numerator)
    return np.where(sizes < FAR, np.minimum(up, width), width)


def tightest(prices: Sequence[ModePrices]) -> list[Segment]:
    """A choice that fits in the least room.

    Within a given room what is saved least up to each cut is best for all that follows, so that one number a cut
    is enough; the least room is found by bisection.
    """
    low, high = 0, min(int(one.peak[0, -1]) for one in prices)
    found = _within(prices, high)
    while low < high:
        middle = (low + high) // 2
        tried = _within(prices, middle)
        low, high, found = (low, middle, tried) if tried is not None else (middle + 1, high, found)
    assert found is not None
    return found


def _within(prices: Sequence[ModePrices], room: int) -> list[Segment] | None:
    """The choice that saves least, of those that fit in a room."""
    count = prices[0].cost.shape[0]
    least = np.full(count + 1, FAR, np.int64)
    least[0] = 0
    last: list[tuple[int, int]] = [(0, 0)] * (count + 1)
    for j in range(1, count + 1):
        for q, one in enumerate(prices):
            sums = np.where(least[:j] + one.peak[:j, j] <= room, least[:j] + one.saved[:j, j], FAR)
            i = int(sums.argmin())
            if sums[i] < least[j]:
                least[j], last[j] = sums[i], (i, q)
    return None if least[count] >= FAR else _chosen(last)


def _chosen(last: Sequence[tuple[int, int]]) -> list[Segment]:
    found: list[Segment] = []
    j = len(last) - 1
    while j:
        i, q = last[j]
        found.append((i, j, q))
        j = i
    return found[::-1]


# ---- bytes at a price --------------------------------------------------------------------------


def by_price(prices: Sequence[ModePrices], room: int, switch: int) -> list[Segment] | None:
    """A choice of little time that fits in the room, by putting a price on each saved byte; sizes are exact.

    For a share of the room that one segment may take: from the choice of least time and that of least bytes, the price
    at which both cost the same gives the next one, until none is better (Handler and Zang, Networks 10(4), 1980).
    The best for all shares is taken. O(L modes) for each share and price, after O(L^2). None where nothing
    fits. It may miss the best: what lies inside the convex hull of time and bytes has no price.
    """
    best: list[Segment] | None = None
    time = FAR
    least = max(min(int(one.peak[j, j + 1]) for one in prices) for j in range(prices[0].cost.shape[0]))
    for k in range(GRID + 1):
        part = least + (room - least) * k // GRID
        fast, small = at_price(prices, part, Fraction(0), switch), at_price(prices, part, Fraction(FAR), switch)
        while fast is not None and small is not None:
            for found in (fast, small):
                if room_for(prices, found) <= room and total_ns(prices, found, switch) < time:
                    best, time = found, total_ns(prices, found, switch)
            more = _before_last(prices, fast) - _before_last(prices, small)
            if more <= 0:
                break
            longer = total_ns(prices, small, switch) - total_ns(prices, fast, switch)
            price = Fraction(max(longer, 0), more)
            middle = at_price(prices, part, price, switch)
            assert middle is not None
            gain = total_ns(prices, fast, switch) - total_ns(prices, middle, switch)
            if gain + price * (_before_last(prices, fast) - _before_last(prices, middle)) <= 0:
                break
            fast, small = (middle, small) if room_for(prices, middle) > room else (fast, middle)
    return best


def _before_last(prices: Sequence[ModePrices], segments: Sequence[Segment]) -> int:
    """Bytes that all segments but the last save."""
    return sum(int(prices[q].saved[i, j]) for i, j, q in segments[:-1])


def at_price(prices: Sequence[ModePrices], part: int, price: Fraction, switch: int) -> list[Segment] | None:
    """The choice of least time and price of what is saved before the last segment, no segment's peak above `part`.

    price: ns per byte. None where there is none.
    Time and bytes of a segment i … j - 1 are differences u(j) - v(i), and it fits from some i on that only rises
    with j: so the best i for each j is a minimum over a sliding window (the costs obey the quadrangle
    inequality with equality, and the split points are monotone).
    """
    count, time, byte = prices[0].cost.shape[0], price.denominator, price.numerator
    best: list[list[int]] = [[0, 0]]  # per cut, for what is not captured before it and what is
    last: list[list[tuple[int, int, int]]] = [[(0, 0, 0), (0, 0, 0)]]
    windows: list[deque[tuple[int, int]]] = [deque() for _ in prices]
    for j in range(1, count + 1):
        best.append([NEVER] * 2)
        last.append([(0, 0, 0)] * 2)
        for q, one in enumerate(prices):
            way = int(one.mode.captured)
            if j < count:
                entered = _entered(best[j - 1], way, time * switch, j - 1)
                value, start = _slide(windows[q], one, part, (time, byte), j, entered)
            else:
                value, start = min(
                    (_entered(best[i], way, time * switch, i) + time * one.lists[0][i][j], i)
                    if one.lists[2][i][j] <= part else (NEVER, 0) for i in range(count)
                )  # fmt: skip
            if value < best[j][way]:
                same = best[start][way] <= best[start][1 - way] + time * switch
                best[j][way], last[j][way] = value, (start, q, way if same else 1 - way)
    way = int(best[count][1] < best[count][0])
    if best[count][way] >= NEVER // 2:
        return None
    found: list[Segment] = []
    j = count
    while j:
        i, q, way = last[j][way]
        found.append((i, j, q))
        j = i
    return found[::-1]


def _entered(best: Sequence[int], way: int, switch: int, cut: int) -> int:
    return min(best[way], best[1 - way] + (switch if cut else 0))


def _slide(
    window: deque[tuple[int, int]], one: ModePrices, part: int, price: tuple[int, int], j: int, entered: int
) -> tuple[int, int]:
    """The least value of a segment that ends before stage j in a mode, and where it starts.

    window: values of starts that may still win, rising, without what depends on the end. price: of ns and bytes.
    """
    (time, byte), (cost, saved, peak) = price, one.lists
    end = time * cost[0][j] + byte * saved[0][j]
    value = entered + time * cost[j - 1][j] + byte * saved[j - 1][j] - end
    while window and window[-1][0] >= value:
        window.pop()
    window.append((value, j - 1))
    while window and peak[window[0][1]][j] > part:
        window.popleft()
    return (window[0][0] + end, window[0][1]) if window else (NEVER, 0)
