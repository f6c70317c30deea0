"""A sweep's folder: plain files that are only ever added to, each line with its checksum.

    study.json            the cells of the study run last, in order
    segments/00001.jsonl  finished cells as the driver wrote them: CRC-32, a space, a JSON record
    cells/ID/             timeline and summary, of cells for which one was asked
    index.sqlite, .sum    built from these on request, with its checksum; may be deleted at any time
    lock                  held by the sweep that writes

A segment belongs to one run of the driver. The driver alone writes, whatever executor runs the cells: file systems of
clusters have few inodes, and a single writer needs no locks, which they may lack. A line that a kill or a full disk cut
short fails its checksum, and its cell is repeated. A record's `ran` (time, host, …) is not compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from sim.analysis.figures import misfit
from sim.errors import TiersimError
from sim.foreign import read_file, read_sums
from sim.report.files import write_aside
from sim.sweeps.cell import Outcome

FORMAT = 1
OWN = {"study.json", "segments", "cells", "lock", "index.sqlite", "index.sum", "index.sqlite-wal", "index.sqlite-shm"}
KEYS = {"tiersim_store", "study", "files", "cells", "sum"}
"""The keys of `study.json`."""
ANSWERS = ("ok", "infeasible", "not_applicable")
MOST_SEGMENT = 8 << 30  # bytes of a segment that are read at most: some four million cells
SYNC_EVERY = 256  # records between two calls of fsync; a kill loses none, a power failure up to these


class StoreError(TiersimError):
    """A folder of results cannot be used: another sweep writes it, it is full, or it holds other files."""


class Store:
    """The finished cells in a folder, read-only; `Writer` adds cells. Raises StoreError if it holds no sweep."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.damaged = 0
        self._damage = ""
        self._after_damage: set[str] = set()
        study = self.folder / "study.json"
        if not study.is_file():
            raise StoreError(f"{self.folder}: no sweep's results are here (there is no study.json)")
        try:
            about = json.loads(read_file(study))
            self.format, self.study, self.cells = about["tiersim_store"], about["study"], about["cells"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"{study}: cannot be read: {error}") from None
        if not isinstance(self.format, int) or self.format > FORMAT:
            raise StoreError(f"{study}: format {self.format!r} is of a newer version; this one reads up to {FORMAT}")
        if about.get("sum", _sum(about)) != _sum(about) or set(about) - KEYS:
            raise StoreError(f"{study}: damaged (its checksum fails); --resume with the study restores it")
        if not isinstance(self.study, dict):
            raise StoreError(f"{study}: study: expected a table")
        if not isinstance(self.cells, list) or not all(map(_is_cell, self.cells)):
            raise StoreError(f"{study}: cells: expected a list of cells, each with its id and labels")
        if len({cell["id"] for cell in self.cells}) < len(self.cells):
            raise StoreError(f"{study}: cells: expected each cell once")
        self.files = read_sums(about.get("files"), str(study))

    def cell_folder(self, id: str) -> Path:
        """The folder of a cell's timeline, if it has one."""
        return self.folder / "cells" / id[:16]

    @property
    def segments(self) -> list[Path]:
        """The segments, oldest first."""
        return sorted((self.folder / "segments").glob("*.jsonl"))

    def records(self) -> dict[str, dict[str, Any]]:
        """The last answer of each cell that has one, by id, those of earlier studies included.

        `damaged` then says how many lines failed their checksums.
        """
        found: dict[str, dict[str, Any]] = {}
        self.damaged = 0
        self._after_damage = set()
        self._damage = ""
        for path in self.segments:
            for number, record in enumerate(read_segment(path), 1):
                if record is None or not _is_record(record):
                    self.damaged += 1
                    if record is not None or not _is_cut_short(path, number):
                        self._damage = f"{path}: line {number}"
                        self._after_damage.clear()
                    continue
                id = record["id"]
                self._after_damage.add(id)
                if id not in found or is_answer(record) or not is_answer(found[id]):
                    found[id] = record
        return found

    def whole_rows(self) -> list[tuple[Mapping[str, Any], dict[str, Any] | None]]:
        """As `rows`, provided that no damage leaves any of them in doubt.

        A line that a kill cut short was never finished, and a damaged one does not matter if each cell has an answer in
        another line. Raises StoreError that names the damaged segment.
        """
        found = list(self.rows())
        for cell, record in found:
            settled = record is not None and (is_answer(record) or cell["id"] in self._after_damage)
            if self._damage and not settled:
                raise StoreError(
                    f"{self._damage} is damaged (its checksum fails), and may be that of cell {cell['id'][:12]}: "
                    "--resume repeats what is missing"
                )
        return found

    def rows(self) -> Iterator[tuple[Mapping[str, Any], dict[str, Any] | None]]:
        """Each cell of the study in order, `id` and `labels`, with its record, None where it is not finished."""
        records = self.records()
        for cell in self.cells:
            yield cell, records.get(cell["id"])


def _sum(about: Mapping[str, Any]) -> str:
    """CRC-32 of `study.json` without the sum itself, as eight digits."""
    text = json.dumps({key: value for key, value in about.items() if key != "sum"}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def _is_record(record: Any) -> bool:
    """Whether this is a record as `Writer.add` writes them."""
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return False
    row, ran = record.get("row"), record.get("ran")
    if not isinstance(row, dict) or not isinstance(row.get("status"), str) or not isinstance(ran, dict):
        return False
    return misfit(row) is None


def _is_cut_short(path: Path, number: int) -> bool:
    """Whether a damaged line is the last of its segment and cut short, as a kill leaves it."""
    lines = read_file(path, MOST_SEGMENT).splitlines(keepends=True)
    last = lines[-1]
    if number < len(lines) or last.endswith(b"\n"):
        return False
    try:
        json.JSONDecoder().raw_decode(last.partition(b" ")[2].decode())
    except ValueError:
        return True
    return last.endswith(b"}")  # all of it but the end of its line


def _is_cell(cell: Any) -> bool:
    """Whether this is a cell as a study lists it: an id of hexadecimal digits, since a folder is named by it."""
    is_record = isinstance(cell, dict) and isinstance(cell.get("labels"), dict)
    return is_record and isinstance(cell.get("id"), str) and re.fullmatch("[0-9a-f]{16,}", cell["id"]) is not None


def is_answer(record: Mapping[str, Any]) -> bool:
    """Whether a record need not be repeated: no fault, no kill, and no solver that ran out of time."""
    row = record["row"]
    return row["status"] in ANSWERS and not row.get("time_limited")


def stands(record: Mapping[str, Any], time_limit_s: float | None) -> bool:
    """Whether a sweep with that time limit keeps a record: an answer, or a cell that would exceed the limit again."""
    if record["row"]["status"] == "timed_out":
        return time_limit_s is not None and time_limit_s <= record["ran"]["time_limit_s"]
    return is_answer(record)


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line of a segment."""
    text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_segment(path: Path) -> Iterator[dict[str, Any] | None]:
    """The records of a segment; None for a damaged line."""
    for line in read_file(path, MOST_SEGMENT).splitlines(keepends=True):
        sum_, _, text = line[:-1].partition(b" ")
        if sum_ == b"%08x" % zlib.crc32(text):  # the byte after it ends the line, even if that byte is damaged
            yield json.loads(text)
        else:
            yield None


class Writer:
    """Adds finished cells to a folder, as its only writer; use it in a `with` statement.

    Raises StoreError if another sweep writes there, if the folder holds results and `resume` is false, or if it holds
    other files; OSError if it cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.folder = Path(folder)
        self.resume = resume
        self.written = 0
        self._lock: IO[str] | None = None
        self._segment = -1
        self._path = self.folder

    def __enter__(self) -> Writer:
        self.folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(entry.name for entry in self.folder.iterdir() if entry.name not in OWN)
        foreign = [name for name in foreign if not name.startswith(".")]
        if foreign and not (self.folder / "study.json").exists():
            raise StoreError(f"{self.folder}: holds other files ({foreign[0]!r}, …); choose a folder of its own")
        self._take_lock()
        try:
            if (self.folder / "study.json").exists():
                Store(self.folder)  # one of a newer version is left alone
            done = any((self.folder / "segments").glob("*.jsonl"))
            if done and not self.resume:
                raise StoreError(f"{self.folder}: holds results already; --resume adds what is missing")
            (self.folder / "segments").mkdir(exist_ok=True)
            self._open_segment()
        except BaseException:
            self._drop_lock()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._segment >= 0:
            try:
                self._sync()
            finally:
                os.close(self._segment)
                self._segment = -1
                if not self._path.stat().st_size:
                    self._path.unlink()
        self._drop_lock()

    def begin(
        self,
        source: Mapping[str, Any],
        cells: Iterable[Mapping[str, Any]],
        *,
        time_limit_s: float | None = None,
        files: Mapping[str, str] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Write the study, and the SHA-256 of files that it names; returns the records that exist already, by id."""
        about = {"tiersim_store": FORMAT, "study": source, "files": dict(files or {}), "cells": list(cells)}
        about = json.loads(json.dumps(about, default=str))
        text = json.dumps({**about, "sum": _sum(about)}) + "\n"

        def write(file: IO[bytes]) -> None:
            file.write(text.encode())

        write_aside(self.folder / "study.json", write)
        records = Store(self.folder).records()
        return {id: record for id, record in records.items() if stands(record, time_limit_s)}

    def add(self, id: str, labels: Mapping[str, Any], outcome: Outcome) -> None:
        """Write a finished cell; after this returns, killing this process does not lose it. Raises StoreError."""
        line = line_of({"id": id, "labels": labels, **outcome})
        before = os.fstat(self._segment).st_size
        try:
            done = 0
            while done < len(line):
                done += os.write(self._segment, line[done:])
            self.written += 1
            if self.written % SYNC_EVERY == 0:
                self._sync()
        except OSError as error:
            os.ftruncate(self._segment, before)
            raise StoreError(
                f"{self._path}: {error.strerror}; all cells finished before are kept; continue with --resume"
            ) from error

    def cell_folder(self, id: str) -> Path:
        """The folder for a cell's timeline."""
        return self.folder.absolute() / "cells" / id[:16]

    def _open_segment(self) -> None:
        last = max((int(p.stem) for p in (self.folder / "segments").glob("*.jsonl") if p.stem.isdigit()), default=0)
        self._path = self.folder / "segments" / f"{last + 1:05d}.jsonl"
        self._segment = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)

    def _sync(self) -> None:
        try:
            os.fsync(self._segment)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from error

    # ---- the lock ----------------------------------------------------------------------------

    def _take_lock(self) -> None:
        import fcntl  # the system releases it when the process ends, however it ends

        self._lock = open(self.folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            who = self._lock.read().strip()
            self._lock.close()
            self._lock = None
            raise StoreError(f"{self.folder}: another sweep is writing here{f' ({who})' if who else ''}") from None
        except OSError as error:
            warnings.warn(f"{self.folder}: cannot be locked ({error.strerror}); run one sweep at a time", stacklevel=3)
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._lock.flush()

    def _drop_lock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.truncate(0)
            self._lock.close()
            self._lock = None
