"""Text from files and other people's names, made safe for where it goes: a terminal, a spreadsheet.

A name in a trace may hold escape sequences, which a terminal obeys, or begin like a formula, which a spreadsheet
computes. Pages escape their text for HTML in `sim.report.page`.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, TextIO

UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories of characters that are not shown as themselves: controls, marks of direction, halves of characters, …"""

STYLING = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])")
"""Colours and cursor movements, as the tables and bars of this program have on a terminal."""

FORMULA = re.compile(r"[\s]*[=+\-@]")
"""The beginnings of texts that spreadsheets compute, unless they are numbers."""

INNER_FORMULA = re.compile(r'([;\t\n|])(?=[\s"]*[=+\-@])')
"""Where such a beginning is inside a text, for a spreadsheet that splits lines there; it does not heed our quotes then,
since they open in the middle of what it takes for a cell."""


def printable(text: str, keep: str = "") -> str:
    """Text with each character that is not shown as itself as an escape, such as `\\x1b`.

    keep: characters that stay as they are, such as the ends of lines.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char in keep or char.isprintable() or unicodedata.category(char) not in UNSEEN else _escaped(char)
        for char in text
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def shortened(line: str, most: int = 1000) -> str:
    """A line for a person: where it repeats a value of thousands of characters, its beginning and its end."""
    return line if len(line) <= most else f"{line[: most - 300]} … {line[-300:]}"


def cell(value: Any) -> Any:
    """A value for a spreadsheet: text that it would compute begins with an apostrophe, and stays text.

    So does a part of a text after a semicolon, a tab, a bar or the end of a line.
    """
    if not isinstance(value, str):
        return value
    text = INNER_FORMULA.sub(r"\1'", printable(value, keep="\n\t"))
    return f"'{text}" if FORMULA.match(text) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def csv_text(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Rows as CSV with a header; a key that a row lacks is empty, and no text is a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([cell(name) for name in names])
    writer.writerows([cell(row.get(name, "")) for name in names] for row in rows)
    return out.getvalue()


def half_a_character(texts: Iterable[str]) -> str | None:
    """The first text with half a character (a lone surrogate), which no file can hold, in a form that can be shown."""
    texts = list(texts)
    if _is_text("".join(texts)):
        return None
    return next(printable(text[:100]) for text in texts if not _is_text(text))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Stream(io.TextIOBase):
    """A stream to a person: control characters arrive as escapes, and what its encoding lacks, too.

    styled: whether colours and bars stay where it is a terminal. That is for writers that have made every text of
    others printable themselves; see `styled`.
    """

    def __init__(self, stream: TextIO, *, styled: bool = False) -> None:
        self.stream = stream
        self.styled = styled

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream below."""
        return self.stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Whether a person reads along."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream below."""
        return self.stream.fileno()

    def flush(self) -> None:
        """Hand on what was written."""
        self.stream.flush()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Write text, made safe."""
        draws = self.styled and self.isatty()
        parts, keep = (STYLING.split(text), "\n\t\r") if draws else ([text], "\n\t")  # \r: what follows hides the line
        safe = "".join(part if i % 2 else printable(part, keep=keep) for i, part in enumerate(parts))
        self.stream.write(safe.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)


def styled(stream: IO[str]) -> IO[str]:
    """The same stream for a writer of colours and bars, all of whose texts from elsewhere are `printable`."""
    return Stream(stream.stream, styled=True) if isinstance(stream, Stream) else stream  # type: ignore[return-value]


@contextmanager
def printed_safely() -> Iterator[None]:
    """Everything that is printed meanwhile, on both streams, is made safe."""
    import sys

    with ExitStack() as both:
        both.enter_context(redirect_stdout(Stream(sys.stdout)))
        both.enter_context(redirect_stderr(Stream(sys.stderr)))
        yield
