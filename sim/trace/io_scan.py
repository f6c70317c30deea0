"""The quickest way to read lines of a trace file as `save` writes them: columns found in their bytes, without parsing.

Quotes separate strings from the rest, and a string before a colon is a key; its value reaches to the next key or to the
end of the line. Anything that this does not cover (an escape, white space between values, other than ASCII) is left to
the JSON decoder. Nothing is guessed: every byte of a value that is used is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.trace.columns import distinct

Ints = NDArray[np.int64]
NEWLINE, QUOTE, COMMA, COLON, OPEN, CLOSE, BEGIN, ZERO = (ord(sign) for sign in '\n",:[]{0')
DIGITS = 18
"""Longer numbers may not fit into 64 bits."""


class Unusual(Exception):
    """These lines must be read in another way."""


class Field(NamedTuple):
    """The values of one key: their lines, in order, and where they begin and end."""

    line: Ints
    start: Ints
    end: Ints


class _Written:
    """A block as text, as bytes, and as the eight bytes from each place on."""

    def __init__(self, block: bytes) -> None:
        self.text, self.signs = block.decode(), np.frombuffer(block, np.uint8)
        self._eight = np.ndarray((len(block),), "<u8", block + bytes(8), 0, (1,))

    def by_word(self, start: Ints, end: Ints) -> dict[str, Ints]:
        """Which of the texts between these places are equal. Raises Unusual for one of more than 16 bytes, or none."""
        length = end - start
        if not len(start) or int(length.max()) > 16 or int(length.min()) < 1:
            raise Unusual
        kept = np.uint64(2**64 - 1) >> (8 * (8 - np.minimum(length, 8))).astype(np.uint64)
        head = self._eight[start] & kept
        tail = np.where(length > 8, self._eight[np.maximum(end - 8, 0)], np.uint64(0))
        found: dict[str, Ints] = {}
        for word in distinct(head).tolist():
            rows = np.flatnonzero(head == word)
            for rest in distinct(tail[rows]).tolist():
                alike = rows[tail[rows] == rest]
                if int(length[alike].min()) != int(length[alike].max()):
                    raise Unusual
                found[self.text[start[alike[0]] : end[alike[0]]]] = alike
        return found


class Scan:
    """Some lines, as `sim.trace.io_columns.Table` has them.

    lines: how many.
    fields: by key.
    """

    def __init__(self, written: _Written, lines: int, fields: dict[str, Field], decode: Callable[[str], Any]) -> None:
        self.lines, self.fields = lines, fields
        self._written, self._decode = written, decode

    def has(self, key: str, keys: set[str]) -> bool:
        """Whether every line has this key, and none any but these."""
        return key in self.fields and len(self.fields[key].line) == self.lines and self.fields.keys() <= keys

    def names(self, key: str) -> list[str]:
        """A column of different texts."""
        names = self._strings(self.fields[key])
        if len(set(names)) < len(names):
            raise Unusual
        return names

    def numbers(self, key: str, default: int | None, least: int, most: int) -> Ints:
        """A column of whole numbers in range; where a line has none, the default, which may be out of range."""
        column = np.full(self.lines, default or 0, np.int64)
        field = self.fields.get(key)
        if default is None and (field is None or len(field.line) < self.lines):
            raise Unusual
        if field is not None:
            column[field.line] = self._in_range(_parsed(self._written.signs, field.start, field.end), least, most)
        return column

    def codes(self, key: str, table: dict[Any, int], default: Any) -> Ints:
        """A column of the codes of words, or of truth values."""
        column = np.full(self.lines, table[default], np.int64)
        for word, line in self._words(key):
            if type(word) is not type(default) or word not in table:
                raise Unusual
            column[line] = table[word]
        return column

    def texts(self, key: str, known: dict[str, str]) -> list[str]:
        """A column of texts of which many are equal, one object for each; "" where a line has none."""
        column = np.full(self.lines, "", object)
        for word, line in self._words(key):
            if type(word) is not str:
                raise Unusual
            column[line] = known.setdefault(word, word)
        return column.tolist()

    def _words(self, key: str) -> list[tuple[Any, Ints]]:
        """The different values of a key that has few, and their lines."""
        if key not in self.fields:
            return []
        line, start, end = self.fields[key]
        if (self._written.signs[start] == QUOTE).all():
            if (end - start == 2).any():
                raise Unusual
            return [(word, line[rows]) for word, rows in self._written.by_word(start + 1, end - 1).items()]
        return [(self._value(word), line[rows]) for word, rows in self._written.by_word(start, end).items()]

    def sparse(self, key: str) -> list[tuple[int, Any]]:
        """The lines that have this key, in order, and its values."""
        if key not in self.fields:
            return []
        line, start, end = self.fields[key]
        text = self._written.text
        found = [text[a:b] for a, b in zip(start.tolist(), end.tolist(), strict=True)]
        values = {value: self._value(value) for value in set(found)}
        return list(zip(line.tolist(), map(values.__getitem__, found), strict=True))

    def ids(self, key: str, count: int) -> tuple[Ints, list[int]]:
        """The ids of all lines one after the other, and how many each line has; names are left to another way."""
        counts = np.zeros(self.lines, np.int64)
        if key not in self.fields:
            return counts[:0], counts.tolist()
        line, start, end = self.fields[key]
        if (self._written.signs[start] != OPEN).any() or (end - start < 2).any():
            raise Unusual
        # what follows the bracket, one list after the other: each number ends at a comma or at the closing bracket
        lengths = end - start - 1
        last = np.cumsum(lengths) - 1
        signs = self._written.signs[np.arange(int(last[-1]) + 1) + np.repeat(start + 1 - (last + 1 - lengths), lengths)]
        closing = np.flatnonzero(signs == CLOSE)
        if not np.array_equal(closing, last):
            raise Unusual
        ends = np.flatnonzero((signs == COMMA) | (signs == CLOSE))
        begins = np.concatenate(([0], ends[:-1] + 1))
        empty = ends == begins
        if int(empty.sum()) != int((lengths == 1).sum()) or (empty & (signs[ends] != CLOSE)).any():
            raise Unusual
        counts[line] = np.diff(np.searchsorted(ends, last, "right"), prepend=0) - (lengths == 1)
        ids = _parsed(signs, begins[~empty], ends[~empty])
        return self._in_range(ids, 0, count - 1), counts.tolist()

    def _value(self, text: str) -> Any:
        try:
            return self._decode(text)
        except (ValueError, RecursionError):
            raise Unusual from None

    def _strings(self, field: Field) -> list[str]:
        if (self._written.signs[field.start] != QUOTE).any():
            raise Unusual
        text = self._written.text
        return [text[a:b] for a, b in zip((field.start + 1).tolist(), (field.end - 1).tolist(), strict=True)]

    @staticmethod
    def _in_range(column: Ints, least: int, most: int) -> Ints:
        if len(column) and (int(column.min()) < least or int(column.max()) > most):
            raise Unusual
        return column


def scan(block: bytes, decode: Callable[[str], Any]) -> Scan | None:
    """The lines of a block, each an object that begins the line and ends it; None if they are not written plainly.

    decode: decodes single values that are neither texts nor lists of ids.
    """
    if b"\\" in block or not block.isascii():
        return None
    written = _Written(block)
    signs = written.signs
    newline, quote = np.flatnonzero(signs == NEWLINE), np.flatnonzero(signs == QUOTE)
    opens, closes = quote[0::2], quote[1::2]
    if len(opens) != len(closes) or not len(opens) or int((signs < 32).sum()) != len(newline):
        return None
    line = np.searchsorted(newline, opens)
    if (closes > newline[line]).any():  # a text over two lines
        return None
    key = np.flatnonzero(signs[closes + 1] == COLON)
    line, first = line[key], np.zeros(len(key), np.bool_)
    first[:1], first[1:] = True, line[1:] != line[:-1]
    begins = np.concatenate(([0], newline[:-1] + 1))
    before = opens[key] - 1
    if int(first.sum()) != len(newline) or (signs[before] != np.where(first, BEGIN, COMMA)).any():
        return None
    if (before[first] != begins).any():
        return None
    start, end = closes[key] + 2, newline[line] - 1
    end[:-1] = np.where(first[1:], end[:-1], before[1:])
    # a value that begins with a quote is one text; of others only those that are decoded may have any
    is_text, texts = signs[start] == QUOTE, np.diff(key, append=len(opens)) - 1
    value = key[is_text] + 1
    if (end <= start).any() or (texts[is_text] != 1).any():
        return None
    if (opens[value] != start[is_text]).any() or (closes[value] != end[is_text] - 1).any():
        return None
    try:
        named = written.by_word(opens[key] + 1, closes[key])
    except Unusual:
        return None
    fields = {name: Field(line[rows], start[rows], end[rows]) for name, rows in named.items()}
    if any((np.diff(field.line) <= 0).any() for field in fields.values()):  # a key twice in a line
        return None
    return Scan(written, len(newline), fields, decode)


def _parsed(signs: NDArray[np.uint8], start: Ints, end: Ints) -> Ints:
    """The whole numbers, without a sign, from each place to another."""
    length = end - start
    total = np.zeros(len(start), np.int64)
    if not len(start):
        return total
    longest = int(length.max())
    if longest > DIGITS or ((signs[start] == ZERO) & (length > 1)).any():
        raise Unusual
    for place in range(longest):
        inside = place < length
        digit = signs[np.minimum(start + place, end - 1)].astype(np.int64) - ZERO
        if ((digit < 0) | (digit > 9)).any():
            raise Unusual
        total = np.where(inside, total * 10 + digit, total)
    return total
