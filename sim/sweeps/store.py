"""A sweep's folder: plain files that are only ever added to, each line with its checksum.

    study.json            the cells of the study run last, in order
    segments/00001.jsonl  finished cells as the driver wrote them: CRC-32, a space, a JSON record
    cells/ID/             timeline and summary, of cells for which one was asked
    lock                  held by the sweep that writes

A segment belongs to one run of the driver. The driver alone writes, whatever executor runs the cells: file systems of
clusters have few inodes, and a single writer needs no locks, which they may lack. A line that a kill or a full disk cut
short fails its checksum, and its cell is repeated. A record's `ran` (time, host, …) is not compared.

Each record has the labels of its cell, so that the cells of a folder whose `study.json` is damaged are those of its
segments. A sweep that finds every answer writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sim.analysis.figures import misfit
from sim.errors import Caution, TiersimError
from sim.foreign import parse_json, part_of, read_sums
from sim.regular_files import open_regular, read_file
from sim.report.files import write_aside
from sim.sweeps.cell import Outcome

FORMAT = 1
OWN = {"study.json", "segments", "cells", "lock", "index.sqlite", "index.sum"}
"""What a folder may hold; the last two are of earlier versions, and are not read."""

KEYS = {"tiersim_store", "study", "files", "cells", "sum"}
"""The keys of `study.json`."""
ANSWERS = ("ok", "infeasible", "not_applicable")
MOST_SEGMENT = 8 << 30  # bytes of a segment that are read at most: some four million cells
MOST_LINE = 16 << 20  # bytes of a line; a cell has some 2,000
KEPT = "all cells finished before are kept; continue with --resume"
NUMBERED = re.compile("[0-9]{1,18}")  # the stem of a segment that `Writer` made
SYNC_EVERY = 256  # records between two calls of fsync; a kill loses none, a power failure up to these


class StoreError(TiersimError):
    """A folder of results cannot be used: another sweep writes it, it is full, or it holds other files."""


class NewerStore(StoreError):
    """A folder of results was written by a newer version of the program."""


@dataclass(frozen=True)
class About:
    """What `study.json` says.

    study: the study as it was given.
    cells: its cells in order, each with `id` and `labels`.
    files: SHA-256 of the files that it refers to, by name.
    """

    study: Mapping[str, Any]
    cells: Sequence[Mapping[str, Any]]
    files: Mapping[str, str]


def read_about(path: Path) -> About:
    """Read a `study.json`. Raises NewerStore for one of a newer version, StoreError for any other that is none."""
    try:
        about = parse_json(read_file(path))
        format, study, cells = about["tiersim_store"], about["study"], about["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from None
    if type(format) is int and format > FORMAT:
        raise NewerStore(f"{path}: format {format} is of a newer version; this one reads up to {FORMAT}")
    if type(format) is not int or format < 1:
        raise StoreError(f"{path}: format {format!r}: expected a number from 1 to {FORMAT}")
    if about.get("sum", _sum(about)) != _sum(about) or set(about) - KEYS:
        raise StoreError(f"{path}: damaged (its checksum fails)")
    if not isinstance(study, dict):
        raise StoreError(f"{path}: study: expected a table")
    if not isinstance(cells, list) or not all(map(_is_cell, cells)):
        raise StoreError(f"{path}: cells: expected a list of cells, each with its id and labels")
    if len({cell["id"] for cell in cells}) < len(cells):
        raise StoreError(f"{path}: cells: expected each cell once")
    return About(study, cells, read_sums(about.get("files"), str(path)))


class Store:
    """The finished cells in a folder, read-only; `Writer` adds cells. Raises StoreError if it holds no sweep.

    Where `study.json` is damaged, the cells are those of the segments, and a Caution says so. Raises TiersimError where
    a part of the folder is a link.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.damaged = 0
        self._damage = ""
        self._after_damage: set[str] = set()
        study = part_of(self.folder, "study.json")
        if not study.is_file():
            raise StoreError(f"{self.folder}: no sweep's results are here (there is no study.json)")
        try:
            about = read_about(study)
        except NewerStore:
            raise
        except StoreError as error:
            about = self._recovered(error)
        self.study, self.cells, self.files = about.study, about.cells, about.files

    def _recovered(self, error: StoreError) -> About:
        """The cells of the segments. Raises the error where these hold none."""
        records = self.records()
        if not records:
            raise error
        if self._damage:
            raise StoreError(f"{error}, and so is {self._damage}; --resume with the study restores it")
        cells = [{"id": id, "labels": record["labels"]} for id, record in records.items()]
        text = f"{error}; its cells are the {len(cells)} that were finished; --resume with the study restores it"
        warnings.warn(text, Caution, stacklevel=3)
        return About({}, cells, {})

    def cell_folder(self, id: str) -> Path:
        """The folder of a cell's timeline, if it has one."""
        return part_of(self.folder, "cells", id[:16])

    @property
    def segments(self) -> list[Path]:
        """The segments, oldest first."""
        folder = part_of(self.folder, "segments")
        return sorted(part_of(folder, path.name) for path in folder.glob("*.jsonl"))

    def records(self) -> dict[str, dict[str, Any]]:
        """The last answer of each cell that has one, by id, those of earlier studies included.

        `damaged` then says how many lines failed their checksums.
        """
        found: dict[str, dict[str, Any]] = {}
        self.damaged = 0
        self._after_damage = set()
        self._damage = ""
        for path in self.segments:
            for number, line in enumerate(_lines(path), 1):
                record = _record(line)
                if record is None or not _is_record(record):
                    self.damaged += 1
                    if record is not None or not _is_cut_short(line):
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
    if not _is_cell(record):
        return False
    row, ran = record.get("row"), record.get("ran")
    if not isinstance(row, dict) or not isinstance(row.get("status"), str) or not isinstance(ran, dict):
        return False
    return misfit(row) is None


def _is_cut_short(line: bytes) -> bool:
    """Whether a damaged line is cut short, as a kill leaves the last one of a segment; only that lacks its end."""
    if line.endswith(b"\n"):
        return False
    try:
        json.JSONDecoder().raw_decode(line.partition(b" ")[2].decode())
    except (ValueError, RecursionError):
        return True
    return line.endswith(b"}")  # all of it but the end of its line


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
        had = record["ran"].get("time_limit_s")  # a folder may say anything
        return time_limit_s is not None and type(had) in (int, float) and time_limit_s <= had
    return is_answer(record)


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line of a segment."""
    text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_segment(path: Path) -> Iterator[dict[str, Any] | None]:
    """The records of a segment; None for a damaged line."""
    yield from map(_record, _lines(path))


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None for a damaged one."""
    sum_, _, text = line[:-1].partition(b" ")
    if sum_ == b"%08x" % zlib.crc32(text):  # the byte after it ends the line, even if that byte is damaged
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = parse_json(text)
            return found
    return None


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a segment with their ends, up to one longer than `MOST_LINE`: it is damaged, and so is the rest.

    Raises OSError, or TiersimError for what is not a regular file or too large.
    """
    with open_regular(path, MOST_SEGMENT) as file:
        while line := file.readline(MOST_LINE):
            if len(line) == MOST_LINE and not line.endswith(b"\n"):
                yield b"\n"
                return
            yield line


class Writer:
    """Adds finished cells to a folder, as its only writer; use it in a `with` statement.

    beside: finished cells in the folder that are none of the study's, once it has begun.

    Raises StoreError if another sweep writes there, if the folder holds results and `resume` is false, or if it holds
    other files; TiersimError if a part of it is a link; OSError if it cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.folder = Path(folder)
        self.resume = resume
        self.written = 0
        self.beside = 0
        self._lock: IO[str] | None = None
        self._segment = -1
        self._path = self.folder

    def __enter__(self) -> Writer:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("study.json", "segments", "cells", "lock"):
            part_of(self.folder, name)
        foreign = sorted(entry.name for entry in self.folder.iterdir() if entry.name not in OWN)
        foreign = [name for name in foreign if not name.startswith(".")]
        if foreign and not (self.folder / "study.json").exists():
            raise StoreError(f"{self.folder}: holds other files ({foreign[0]!r}, …); choose a folder of its own")
        self._take_lock()
        try:
            if any((self.folder / "segments").glob("*.jsonl")) and not self.resume:
                raise StoreError(f"{self.folder}: holds results already; --resume adds what is missing")
        except BaseException:
            self._drop_lock()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._segment >= 0:
                self._close_segment()
        finally:
            self._drop_lock()

    def begin(
        self,
        source: Mapping[str, Any],
        cells: Iterable[Mapping[str, Any]],
        *,
        time_limit_s: float | None = None,
        files: Mapping[str, str] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Write the study, and the SHA-256 of files that it names, unless the folder has just this study.

        Returns the records that exist already, by id. Raises StoreError for a folder of a newer version.
        """
        about = {"tiersim_store": FORMAT, "study": source, "files": dict(files or {}), "cells": list(cells)}
        about = json.loads(json.dumps(about, default=str))
        text = (json.dumps({**about, "sum": _sum(about)}) + "\n").encode()

        def write(file: IO[bytes]) -> None:
            file.write(text)

        path = self.folder / "study.json"
        if path.exists():
            try:
                read_about(path)
            except NewerStore:
                raise
            except StoreError:  # it is written once more
                pass
        if not _holds(path, text):
            write_aside(path, write)
        records = Store(self.folder).records()
        known = {id: record for id, record in records.items() if stands(record, time_limit_s)}
        self.beside = len(records.keys() - {cell["id"] for cell in about["cells"]})
        if any(cell["id"] not in known for cell in about["cells"]):
            self._sign_lock()
        return known

    def add(self, id: str, labels: Mapping[str, Any], outcome: Outcome) -> None:
        """Write a finished cell; after this returns, killing this process does not lose it. Raises StoreError."""
        line = line_of({"id": id, "labels": labels, **outcome})
        before = -1
        try:
            if self._segment < 0:
                self._open_segment()
            before = os.fstat(self._segment).st_size
            done = 0
            while done < len(line):
                done += os.write(self._segment, line[done:])
            self.written += 1
            if self.written % SYNC_EVERY == 0:
                os.fsync(self._segment)
        except OSError as error:
            if before >= 0:
                with contextlib.suppress(OSError):  # else the line is cut short, which its checksum tells
                    os.ftruncate(self._segment, before)
            raise StoreError(f"{self._path}: {error.strerror}; {KEPT}") from error

    def cell_folder(self, id: str) -> Path:
        """The folder for a cell's timeline."""
        return part_of(self.folder.absolute(), "cells", id[:16])

    # ---- the segment -------------------------------------------------------------------------

    def _open_segment(self) -> None:
        """Create the next segment; not before there is a cell to write."""
        folder = part_of(self.folder, "segments")
        folder.mkdir(exist_ok=True)
        last = max((int(p.stem) for p in folder.glob("*.jsonl") if NUMBERED.fullmatch(p.stem)), default=0)
        while self._segment < 0:
            last += 1
            self._path = folder / f"{last:05d}.jsonl"
            with contextlib.suppress(FileExistsError):  # of a sweep that another machine could not lock out
                self._segment = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)

    def _close_segment(self) -> None:
        """Sync and close the segment; an empty one is removed. Raises StoreError."""
        try:
            try:
                os.fsync(self._segment)
            finally:
                handle, self._segment = self._segment, -1
                os.close(handle)
            if not self._path.stat().st_size:
                self._path.unlink()
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}; {KEPT}") from error

    # ---- the lock ----------------------------------------------------------------------------

    def _take_lock(self) -> None:
        import fcntl  # the system releases it when the process ends, however it ends

        self._lock = _open_lock(part_of(self.folder, "lock"))
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            who = self._lock.read(200).strip()
            self._lock.close()
            self._lock = None
            raise StoreError(f"{self.folder}: another sweep is writing here{f' ({who})' if who else ''}") from None
        except OSError as error:
            text = f"{self.folder}: cannot be locked ({error.strerror}); run one sweep at a time"
            warnings.warn(text, Caution, stacklevel=3)

    def _sign_lock(self) -> None:
        """Say in the lock who writes, for whoever finds it taken."""
        if self._lock is not None and self._lock.writable():
            with contextlib.suppress(OSError):
                self._lock.truncate(0)
                self._lock.write(f"process {os.getpid()} on {os.uname().nodename}")
                self._lock.flush()

    def _drop_lock(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            if lock.writable() and os.fstat(lock.fileno()).st_size:
                with contextlib.suppress(OSError):
                    lock.truncate(0)
            with contextlib.suppress(OSError):
                lock.close()


def _open_lock(path: Path) -> IO[str]:
    """Open a folder's lock; whoever cannot write may find every answer, and opens it for reading alone.

    It will be emptied, so it must be no other file: raises StoreError for one with a second name, and for a pipe or
    device; OSError for a link, and where it can be neither read nor made.
    """
    how = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    mode = "a+"
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | how, 0o666)
    except OSError:
        if not path.is_file():
            raise
        mode, handle = "r", os.open(path, os.O_RDONLY | how)
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(handle)
        what = "has a second name (a hard link)" if stat.S_ISREG(about.st_mode) else "is not a regular file"
        raise StoreError(f"{path}: {what}, so it is not the lock of a sweep; remove it")
    return os.fdopen(handle, mode, encoding="utf-8", errors="replace")


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file has this content."""
    try:
        return read_file(path) == content
    except (OSError, TiersimError):
        return False
