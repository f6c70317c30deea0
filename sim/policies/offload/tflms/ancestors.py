"""The ancestors of ops by level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


class Ancestors:
    """What each op depends on, as the bits of one number per op: a search of the graph per question takes far longer.

    Bits stand for ops in order of level, the lowest for the first op that is at most `span` levels before.

    inputs: per op those whose results it reads.
    level: per op its level.
    seen: per op whether its device sees its end. device: per op.
    """

    def __init__(
        self, inputs: Sequence[Sequence[int]], level: Sequence[int], seen: NDArray[np.bool_], device: NDArray[np.int32]
    ) -> None:
        self._inputs, self._level = inputs, level
        self._device: list[int] = device.tolist()
        self._seen: list[bool] = seen.tolist()
        self._in_order = sorted(range(len(level)), key=level.__getitem__)
        counts = np.bincount(level) if level else ()
        self._start = list(accumulate(map(int, counts), initial=0))
        self._seen_at = [[0] * len(counts) for _ in range(max(self._device, default=0) + 1)]
        for i, op in enumerate(self._in_order):
            if self._seen[op]:
                self._seen_at[self._device[op]][level[op]] |= 1 << i - self._start[level[op]]
        self._span, self._lowest, self._bits = 0, [*map(self._start.__getitem__, level)], [0] * len(level)

    def widen(self, span: int) -> None:
        """Find the ancestors at as many levels before each op."""
        if span <= self._span:
            return
        self._span = span
        self._lowest = [self._start[max(level - span, 0)] for level in self._level]
        place = dict(zip(self._in_order, range(len(self._in_order))))
        for op, before in enumerate(self._inputs):
            own, found = self._lowest[op], 0
            for each in before:
                if place[each] >= own:
                    found |= self._bits[each] >> own - self._lowest[each] | 1 << place[each] - own
            self._bits[op] = found

    def latest(self, op: int, level: int, before: int) -> int:
        """The latest ancestor of an op, at a level no more than `span` before its own, whose end the op's device sees.

        -1 for none before the op `before`.
        """
        start = self._start[level]
        bits = self._bits[op] >> start - self._lowest[op] & self._seen_at[self._device[op]][level]
        while bits:
            last = bits.bit_length() - 1
            if self._in_order[start + last] < before:
                return self._in_order[start + last]
            bits ^= 1 << last
        return -1

    def sees(self, op: int, other: int) -> bool:
        """Whether the device of an op sees the end of another one."""
        return self._seen[other] and self._device[other] == self._device[op]
