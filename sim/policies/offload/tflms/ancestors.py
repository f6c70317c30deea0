"""The ancestors of ops by level."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MOST_BITS = 1 << 29
"""Of all ops together, at a time; what more ancestors take is found block by block."""


class Ancestors:
    """What each op depends on, as the bits of one number per op: a search of the graph per question takes far longer.

    Bits stand for the ops of a block of levels, in order of level.

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
        self._blocks = [0]  # the first level of each
        most = MOST_BITS // max(len(level), 1)
        for each in range(len(counts)):
            if self._start[each + 1] - self._start[self._blocks[-1]] > most and each > self._blocks[-1]:
                self._blocks.append(each)
        self._known = -1, -1  # the block whose bits are known, and up to which level
        self._bits = [0] * len(level)

    def latest(self, ops: Ints, levels: Ints, before: Ints) -> Ints:
        """Of each op the latest ancestor at a level, before another op, whose end the op's device sees; -1 for none.

        Shape (ops,) each.
        """
        found = np.full(len(ops), -1)
        order = np.argsort(levels, kind="stable")
        asked = zip(*(column[order].tolist() for column in (ops, levels, before)), order.tolist())
        for block, questions in groupby(asked, key=lambda each: bisect_right(self._blocks, each[1]) - 1):
            those = list(questions)
            self._learn(block, max(self._level[op] for op, *_ in those))
            for op, level, end, place in those:
                found[place] = self._latest(op, level, end, self._start[self._blocks[block]])
        return found

    def _latest(self, op: int, level: int, before: int, first: int) -> int:
        start = self._start[level]
        bits = self._bits[op] >> start - first & self._seen_at[self._device[op]][level]
        while bits:
            last = bits.bit_length() - 1
            if self._in_order[start + last] < before:
                return self._in_order[start + last]
            bits ^= 1 << last
        return -1

    def _learn(self, block: int, until: int) -> None:
        """Find the ancestors in a block of levels of all ops up to a level."""
        known, so_far = self._known
        if known == block and so_far >= until:
            return
        if len(self._blocks) == 1:
            until = len(self._start) - 2  # once for all questions
        self._known = block, until
        levels = self._blocks[block], (*self._blocks, len(self._start) - 1)[block + 1]
        first, end = (self._start[each] for each in levels)
        self._bits = [0]  # not two at a time
        bits, level, inputs = [0] * len(self._level), self._level, self._inputs
        for place, op in enumerate(self._in_order[first : self._start[until + 1]]):
            # an op counts as its own ancestor, since nobody asks for its own level
            found = 1 << place if first + place < end else 0
            for each in inputs[op]:
                if level[each] >= levels[0]:
                    found |= bits[each]
            bits[op] = found
        self._bits = bits

    def sees(self, op: int, other: int) -> bool:
        """Whether the device of an op sees the end of another one."""
        return self._seen[other] and self._device[other] == self._device[op]
