"""Saved views of runs: what `report` shows where the run itself must not, or cannot, be repeated."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from sim.errors import TiersimError
from sim.experiment import Result
from sim.foreign import parse_json, part_of
from sim.pages import run_view
from sim.regular_files import MOST_BYTES, read_file
from sim.report.files import write_aside
from sim.report.page import SavedView
from sim.report.page.run import run_data, trace_data
from sim.trace.kept import kept

NAME = "view.json.gz"
FORMAT, VERSION = "tiersim view", 1

MOST_UNPACKED, MOST_RATIO = 64 << 20, 100
"""To how many bytes a view is unpacked: so many, or so many times what it has packed. Large ones have some 15 times."""

PARTS = {
    **dict.fromkeys(("title", "workload", "platform", "description", "memory", "doc", "command"), str),
    **dict.fromkeys(("figures", "ops", "tensors", "lanes"), dict),
    **dict.fromkeys(("fidelity", "manages", "links", "caution", "notes", "facts", "scope", "summary"), list),
    **dict.fromkeys(("whys", "causes", "kinds", "phases", "roles", "tiers", "stalls", "traffic"), list),
    **dict.fromkeys(("end", "warm_up"), int),
    **dict.fromkeys(("steady", "complete"), bool),
}
"""The required keys of a view, and their types."""


def row_view(folder: Path, row: int) -> Path:
    """The file with the view of one row of a comparison. Raises TiersimError where a link leads to it."""
    return part_of(folder, "views", f"{row:03d}.json.gz")


def write_view(result: Result, path: Path, *, title: str = "") -> Path:
    """Save what a page shows of a run; equal runs give equal files. Raises OSError."""
    return write_packed(packed_view(result, title=title), path)


def write_packed(packed: bytes, path: Path) -> Path:
    """Save a view as `packed_view` made it. Raises OSError."""

    def write(file: IO[bytes]) -> None:
        file.write(packed)

    return write_aside(path, write)


def packed_view(result: Result, *, title: str = "") -> bytes:
    """The content of the file of a view."""
    view, trace = run_data(run_view(result, title=title)), result.log.trace
    known = kept(trace, "view", None, lambda: {key: _json(value) for key, value in trace_data(trace).items()})
    parts = (f"{_json(key)}:{known[key] if key in known else _json(value)}" for key, value in view.items())
    text = f'{{"format":{_json(FORMAT)},"version":{_json(VERSION)},"view":{{{",".join(parts)}}}}}'

    packed = BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=6) as out:
        out.write(text.encode())
    return packed.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read_view(path: Path, **about: Any) -> SavedView:
    """Read a saved view.

    path: the file.
    about: keys of the view to override.

    Raises TiersimError, one line that names the file, where it does not exist or is not a view.
    """
    try:
        packed = read_file(path)
        most = min(MOST_BYTES, max(MOST_UNPACKED, MOST_RATIO * len(packed)))
        with gzip.GzipFile(fileobj=BytesIO(packed)) as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise TiersimError(f"{path}: holds more than {most:,} bytes")
        record = parse_json(text)
    except FileNotFoundError:
        raise TiersimError(f"{path}: does not exist: no view was saved") from None
    except OSError as error:
        raise TiersimError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (EOFError, zlib.error, ValueError) as error:
        raise TiersimError(f"{path}: damaged ({error})") from None
    view = record.get("view") if isinstance(record, Mapping) and record.get("format") == FORMAT else None
    if not isinstance(view, Mapping) or record.get("version") != VERSION:
        raise TiersimError(f"{path}: not a view of this version of the program")
    wrong = next((key for key, kind in PARTS.items() if type(view.get(key)) is not kind), None)
    if wrong is not None:
        raise TiersimError(f"{path}: {wrong}: expected {PARTS[wrong].__name__}")
    return SavedView({**view, **about})
