"""Blocks of rows that follow each other in a trace under construction, and differ in a number: microbatches.

Two of them say what all further ones are. A value that is equal in both stays, an id that is higher by the length of a
block goes on growing, and a name says the number of its block in one place. Two blocks that differ in anything else are
no series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
WITH_IDS = ("releases", "unbinds")
TENSORS = ("shape", "zeros", "saved_for", "axes")


class NoSeries(Exception):
    """Two blocks of which no third one follows."""


class Mark(NamedTuple):
    """How many tensors, ops, reads and writes there are at one place of a trace under construction."""

    tensors: int
    ops: int
    reads: int
    writes: int


class Series:
    """The last two blocks, `before` to `between` and `between` to `end`, and `count` that follow them.

    A `place` says what rows are meant, as a position in `Mark`.
    number: that of the last block.
    """

    def __init__(self, before: Mark, between: Mark, end: Mark, number: int, count: int) -> None:
        self._marks = before, between, end
        self._number, self._count = number, count
        self._further = np.arange(1, count + 1)[:, None]
        if any(2 * b != a + c for a, b, c in zip(*self._marks)):
            raise NoSeries

    def first(self, place: int) -> int:
        """Where the first of the two blocks begins."""
        return self._marks[0][place]

    def length(self, place: int) -> int:
        """Rows of a block."""
        return self._marks[2][place] - self._marks[1][place]

    def columns(self, columns: Mapping[str, Any], place: int, growing: Sequence[str] = ()) -> dict[str, Any]:
        """The rows of all further blocks, by column: `name`, other text, numbers, and ids (`growing`)."""
        found: dict[str, Any] = {}
        for key, column in columns.items():
            if key == "name":
                found[key] = self.names(*self._both(column, place))
            elif isinstance(column, list):
                found[key] = self._same(*self._both(column, place)) * self._count
            elif key in growing:
                found[key] = self.ids(column, place)
            else:
                found[key] = self.numbers(column[self.first(place) :], self.length(place))
        return found

    def names(self, previous: Sequence[str], last: Sequence[str]) -> list[str]:
        """Names, each of which has the number of its block in one place."""
        parts = [self._around(old, new) for old, new in zip(previous, last)]
        numbers = range(self._number + 1, self._number + self._count + 1)
        return [f"{head}{number}{tail}" for number in numbers for head, tail in parts]

    def _around(self, old: str, new: str) -> tuple[str, str]:
        """What stands before and after the number in two names that differ in it alone."""
        number, end = str(self._number - 1), len(old)
        while (place := old.rfind(number, 0, end)) >= 0:
            head, tail = old[:place], old[place + len(number) :]
            if new == f"{head}{self._number}{tail}":
                return head, tail
            end = place + len(number) - 1
        raise NoSeries

    def ids(self, column: Any, place: int) -> Ints:
        """Ids of tensors: those of the blocks grow by what a block has, others stay."""
        previous, last = (np.array(rows, np.int64) for rows in self._both(column, place))
        step = self.length(0)
        grown = last - previous
        if not np.isin(grown, (0, step)).all():
            raise NoSeries
        rows: Ints = (last + self._further * grown).ravel()
        return rows

    def numbers(self, column: Any, length: int) -> Ints:
        """Numbers that are the same in every block. column: those of both."""
        both = np.array(column, np.int64).reshape(2, length)
        if not np.array_equal(*both):
            raise NoSeries
        return np.tile(both[1], self._count)

    def sparse(self, values: Mapping[int, Any], key: str) -> dict[int, Any]:
        """A field that few rows have, by row."""
        place = 0 if key in TENSORS else 1
        (start, middle), length = (self._marks[0][place], self._marks[1][place]), self.length(place)
        last = {i: values[i] for i in range(middle, middle + length) if i in values} if values else {}
        previous = [i for i in range(start, middle) if i in values] if values else []
        if previous != [i - length for i in last] or (last and key in WITH_IDS):
            raise NoSeries
        old, new = [values[i] for i in previous], list(last.values())
        rows = self.names(old, new) if key == "group" else self._same(old, new) * self._count
        places = [i + length * further for further in range(1, self._count + 1) for i in last]
        return dict(zip(places, rows, strict=True))

    def _both(self, column: Any, place: int) -> tuple[Any, Any]:
        before, between, end = (mark[place] for mark in self._marks)
        return column[before:between], column[between:end]

    def _same(self, previous: list[Any], last: list[Any]) -> list[Any]:
        if previous != last:
            raise NoSeries
        return last
