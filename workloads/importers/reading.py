"""Opening foreign files: JSON, plain or gzipped, with a guard against size; nothing in them is ever executed."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from sim.errors import TraceError

MAX_BYTES = 1 << 30
"""Unpacked bytes above which a file is refused; a caller may allow more."""


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file, unpacked if its name or its first bytes say gzip. Raises TraceError."""
    name = Path(path)
    try:
        with name.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            data = gzip.GzipFile(fileobj=raw).read(max_bytes + 1) if packed else raw.read(max_bytes + 1)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    if len(data) > max_bytes:
        raise TraceError(f"{path}: larger than {max_bytes:,} bytes unpacked; allow more with max_bytes")
    return data


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Any:
    """A JSON document. Raises TraceError naming line and column."""
    try:
        return json.loads(read_bytes(path, max_bytes))
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}: line {error.lineno}, column {error.colno}: no valid JSON ({error.msg})") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: no valid JSON ({type(error).__name__})") from None


def need(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """The value if it is of that kind (a bool is no number). Raises TraceError naming where it stands."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TraceError(f"{where}: expected {names}, found {type(value).__name__}")
    return value
