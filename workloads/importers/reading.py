"""Opens foreign files, plain or gzipped, with a limit on their size; nothing in them is ever executed."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from sim.errors import TraceError
from sim.trace.io import check_regular

MAX_BYTES = 1 << 30
"""The most unpacked bytes of a file; a caller may allow more."""

MEMORY_FACTOR = 12
"""The most memory for values held at once (a JSON document, or one row where rows are streamed), as a multiple of the
largest file size. Profiler traces need 6 to 9 times their text, 9 to 11 by the estimate below; a file of brackets needs
up to 40 times."""

VALUE, LIST, OBJECT = 48, 104, 232
"""Bytes that Python needs for a value and its reference, for a list, and for an object with its first entry."""

MAX_SIZE = 1 << 50
"""The most bytes of one tensor, or nanoseconds of one op; a file with more is considered faulty."""


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file, unpacked if it is gzipped. Raises TraceError."""
    data = read_start(path, max_bytes + 1)
    if len(data) > max_bytes:
        raise TraceError(f"{path}: larger than {max_bytes:,} bytes unpacked; allow more with max_bytes")
    return data


def read_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a file is gzipped, judged by its first bytes; False where it cannot be read."""
    try:
        with Path(path).open("rb") as raw:
            return raw.read(2) == b"\x1f\x8b"
    except (OSError, ValueError):
        return False


def read_start(path: str | os.PathLike[str], count: int) -> bytes:
    """The first `count` bytes of a file, unpacked. Raises TraceError."""
    with open_unpacked(path) as file:
        try:
            return file.read(count)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path}: cannot be read: {error}") from None


def open_unpacked(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading, unpacked if it is gzipped. Raises TraceError, also for a pipe or a device."""
    check_regular(path)
    try:
        return cast(BinaryIO, gzip.open(path)) if read_packed(path) else Path(path).open("rb")
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:  # a name with a zero byte
        raise TraceError(f"{str(path)!r}: cannot be opened: {error}") from None


def read_lines(file: BinaryIO, max_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """The lines of an open file, one at a time. Raises TraceError, which does not name the file."""
    left = max_bytes
    while True:
        try:
            line = file.readline(left + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"cannot be read: {error}") from None
        left -= len(line)
        if left < 0:
            raise TraceError(f"larger than {max_bytes:,} bytes unpacked; allow more with max_bytes")
        if not line:
            return
        yield line.removesuffix(b"\n")


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON document from a file. Raises TraceError naming line and column."""
    return parse_json(read_bytes(path, max_bytes), str(path), max_bytes)


def parse_json(data: bytes | str, where: str, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON document. Raises TraceError naming line and column.

    A document is refused before parsing if its values would need more than `MEMORY_FACTOR * max_bytes` of memory.
    """
    check_memory(data, where, max_bytes)
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: line {error.lineno}, column {error.colno}: not valid JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, nested too deep
        raise TraceError(f"{where}: not valid JSON ({type(error).__name__})") from None


def check_memory(data: bytes | str, where: str, max_bytes: int) -> None:
    """Raise TraceError if the values of a JSON text would need more than `MEMORY_FACTOR * max_bytes` of memory."""
    if MEMORY_FACTOR * len(data) > max_bytes and _memory_of(data) > MEMORY_FACTOR * max_bytes:
        most = f"{MEMORY_FACTOR * max_bytes:,} bytes of memory"
        raise TraceError(f"{where}: its values would need more than {most}; allow more with max_bytes")


def _memory_of(data: bytes | str) -> int:
    """An estimate of the memory for the values of a JSON text: nearly every value follows a comma or a bracket."""
    signs = (b",", b"[", b"{") if isinstance(data, bytes) else (",", "[", "{")
    commas, lists, objects = (data.count(sign) for sign in signs)  # type: ignore[arg-type]
    return len(data) + VALUE * commas + LIST * lists + OBJECT * objects


def need(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """The value if it is of that kind (a bool is not a number). Raises TraceError naming `where` it is."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TraceError(f"{where}: expected {names}, found {type(value).__name__}")
    return value


def whole(value: Any, where: str, least: int = 0, most: int = MAX_SIZE) -> int:
    """A whole number within bounds. Raises TraceError naming `where` it is."""
    number = int(need(value, int, where))
    if not least <= number <= most:
        raise TraceError(f"{where}: {_short(number)} is out of range {least}..{most}")
    return number


def microseconds(value: Any, where: str) -> int:
    """Nanoseconds from a number of microseconds, rounded. Raises TraceError naming `where` it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TraceError(f"{where}: expected a number of microseconds, found {type(value).__name__}")
    if not (math.isfinite(value) if isinstance(value, float) else True) or not 0 <= value < 1e16:
        raise TraceError(f"{where}: {_short(value)} is not a time in microseconds")
    return round(value * 1000)


def texts(value: Any, where: str) -> str:
    """A text without line breaks and of limited length, for names. Raises TraceError naming `where` it is."""
    return " ".join(str(need(value, str, where))[:500].split())


def _short(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of many digits"
    return str(value)[:40]
