"""JSON documents larger than memory: streams the rows of one array and never holds the whole document.

Text is read in chunks, and values are decoded one by one. A value that is cut off by the end of the text is decoded
again with twice as much text, so that a long one costs its length times a small constant. Only one chunk, or one row,
is held at a time.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from sim.errors import TraceError
from workloads.importers.reading import MAX_BYTES, check_memory, need, open_unpacked

CHUNK = 1 << 18
"""Bytes to read at a time."""

MAX_ROW = 1 << 26
"""The most characters of one row; a file with a longer one is refused."""

MANY_ROWS, SHORT_ROW = 1 << 20, 32
"""A file with so many rows, or entries of another member, is refused if they have fewer bytes on average: no format has
such short ones, and a gigabyte of them would take minutes to read."""

MAX_MEMBERS = 1000
"""The most members of the document; one with more is refused."""

TAIL = 16
"""Number of characters at the end of a text in which an error may be caused by the cut; the longest tokens are
`-Infinity` and the two halves of an escaped character beyond 16 bits."""

WHITESPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()
NUMBER_CUT = re.compile(r"\d[.eE+-]{0,2}\Z")


@contextmanager
def open_document(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, chunk: int = CHUNK) -> Iterator[Document]:
    """Open a JSON file, plain or gzipped. Any fault found while it is open becomes a TraceError naming the file."""
    with open_unpacked(path) as file:
        try:
            yield Document(file, max_bytes, chunk)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
        except (TypeError, ValueError, OverflowError, KeyError, IndexError) as error:
            raise TraceError(f"{path}: malformed: {type(error).__name__}: {error}") from None


class Document:
    """A JSON object or array that is read once, from front to back.

    about: its members so far; lists and objects are empty there.
    bytes: how many have been read, unpacked.
    """

    def __init__(self, file: BinaryIO, max_bytes: int = MAX_BYTES, chunk: int = CHUNK) -> None:
        self.about: dict[str, Any] = {}
        self.bytes = 0
        self._file, self._max_bytes, self._chunk = file, max_bytes, chunk
        self._text, self._at, self._ended = "", 0, False
        self._lines, self._columns = 0, 0  # line breaks before the text, and characters since the last one
        start = self._read(4)
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(start))("surrogatepass")
        self._text = self._decode(start)
        self.is_list = self._peek() == "["
        self._waits = False  # whether the list or object of a member comes next
        self._streamed: set[str] = set()
        self._members = iter(()) if self.is_list else self._walk()

    # ---- what is in it -----------------------------------------------------------------------------

    def find(self, *names: str) -> str | None:
        """Advance to the next member with one of these names, which is then in `about`; None at the end."""
        return next((name for name in self._members if name in names), None)

    def rows(self, name: str = "") -> Iterator[Any]:
        """The entries of the member that `find` returned, or of a document that is a list; then reads to the end.

        Raises TraceError if the member is not a list, or for invalid JSON.
        """
        if not self.is_list:
            need(self.about.get(name), list, name)
            self._waits = False
            self._streamed.add(name)
        yield from self._bounded(self._entries())
        self.find()
        if self.is_list:
            self._finish()

    def _walk(self) -> Iterator[str]:
        for name in self._names():
            if name in self._streamed:
                raise TraceError(f"two members are named {name[:80]!r}")
            if len(self.about) >= MAX_MEMBERS:
                raise TraceError(f"more than {MAX_MEMBERS} members")
            sign = self._peek()
            self._waits = sign in ("[", "{")
            self.about[name] = [] if sign == "[" else {} if sign == "{" else self._value()
            yield name
            if self._waits:
                self._pass_over(sign)
        self._finish()

    def _pass_over(self, sign: str) -> None:
        for _ in self._bounded(self._entries() if sign == "[" else self._names()):
            if sign == "{":
                self._value()

    def _bounded(self, entries: Iterator[Any]) -> Iterator[Any]:
        """The same, as long as they are not many and short."""
        for count, entry in enumerate(entries, 1):
            if count % MANY_ROWS == 0 and self.bytes < SHORT_ROW * count:
                raise TraceError(f"{self._place(self._at)}: {count:,} entries of less than {SHORT_ROW} bytes each")
            yield entry

    def _entries(self) -> Iterator[Any]:
        """The values of the array at the current position."""
        self._take("[", "Expecting value")
        if self._peek() != "]":
            yield self._value()
            while self._peek() == ",":
                self._at += 1
                yield self._value()
        self._take("]", "Expecting ',' delimiter")

    def _names(self) -> Iterator[str]:
        """The names in the object at the current position; the caller reads each value before the next name."""
        self._take("{", "Expecting value")
        more = self._peek() != "}"
        while more:
            if self._peek() != '"':
                raise self._wrong("Expecting property name enclosed in double quotes", self._at)
            name = self._value()
            self._take(":", "Expecting ':' delimiter")
            yield name
            more = self._peek() == ","
            self._at += more
        self._take("}", "Expecting ',' delimiter")

    def _finish(self) -> None:
        if self._peek():
            raise self._wrong("Extra data", self._at)

    # ---- text --------------------------------------------------------------------------------------

    def _peek(self) -> str:
        """The next character that is not whitespace; "" at the end."""
        while True:
            match = WHITESPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._fill()

    def _take(self, sign: str, otherwise: str) -> None:
        if self._peek() != sign:
            raise self._wrong(otherwise, self._at)
        self._at += 1

    def _value(self) -> Any:
        """The complete value at the current position."""
        self._peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self._text) - TAIL or error.msg.startswith("Unterminated string")
                if self._ended or not cut:
                    raise self._wrong(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, nested too deep
                if self._ended or not NUMBER_CUT.search(self._text[-4:]):
                    raise self._wrong(type(error).__name__, self._at) from None
            else:
                # the text may contain only the first digits of a number: up to two more characters can follow it
                if self._ended or self._text[end - 1] in '"]}' or end + 2 < len(self._text):
                    self._at = end
                    return value
            self._fill()

    def _fill(self) -> None:
        """Drop the text that has been processed, and read as much again as is left."""
        lines = self._text.count("\n", 0, self._at)
        self._columns = self._at - 1 - self._text.rfind("\n", 0, self._at) if lines else self._columns + self._at
        self._lines += lines
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > MAX_ROW:
            raise TraceError(f"{self._place(0)}: a value of more than {MAX_ROW:,} characters")
        check_memory(self._text, self._place(0), self._max_bytes)
        self._text += self._decode(self._read(max(self._chunk, len(self._text))))

    def _read(self, count: int) -> bytes:
        try:
            data = self._file.read(min(count, self._max_bytes + 1 - self.bytes))
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"cannot be read: {error}") from None
        self.bytes += len(data)
        if self.bytes > self._max_bytes:
            raise TraceError(f"larger than {self._max_bytes:,} bytes unpacked; allow more with max_bytes")
        return data

    def _decode(self, data: bytes) -> str:
        self._ended = not data
        try:
            return self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            self._text += error.object[: error.start].decode(error.encoding, "surrogatepass")
            raise self._wrong(type(error).__name__, len(self._text)) from None

    def _place(self, at: int) -> str:
        lines = self._text.count("\n", 0, at)
        column = at - self._text.rfind("\n", 0, at) if lines else self._columns + at + 1
        return f"line {self._lines + lines + 1}, column {column}"

    def _wrong(self, message: str, at: int) -> TraceError:
        return TraceError(f"{self._place(at)}: not valid JSON ({message})")
