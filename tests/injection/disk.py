"""A disk that fails: every write of a command to one folder is counted, and the k-th goes wrong.

What Python writes through (`os`, and `open`, whose files are replaced by ones of this module) is wrapped, in this one
place; only what lies below the watched folder counts.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

WRITING = ("open", "write", "mkdir", "sync", "ftruncate", "truncate")
"""The events that a full disk refuses."""

BACK_S = 10 * 86_400
"""How far a clock is set back."""


class Fault(NamedTuple):
    """What is wrong.

    number: the error, 0 for none.
    kinds: the kinds of events that it befalls, all if none is named.
    stays: whether it befalls the events after it, too.
    is_short: whether a write takes half of its bytes, and the error, if any, comes after it.
    """

    number: int = 0
    kinds: tuple[str, ...] = ()
    stays: bool = False
    is_short: bool = False

    def befalls(self, kind: str) -> bool:
        """Whether it can begin at an event of that kind."""
        return kind == "write" if self.is_short else not self.kinds or kind in self.kinds


FAULTS = {
    "no space": Fault(errno.ENOSPC, WRITING, stays=True),
    "no space for a moment": Fault(errno.ENOSPC, WRITING),
    "a broken disk": Fault(errno.EIO, stays=True),
    "a broken block": Fault(errno.EIO),
    "read-only": Fault(errno.EROFS, stays=True),
    "over quota": Fault(errno.EDQUOT, WRITING, stays=True),
    "short write": Fault(is_short=True),
    "short write, then no space": Fault(errno.ENOSPC, WRITING, stays=True, is_short=True),
    "no locks": Fault(errno.ENOLCK, ("lock",), stays=True),
    "lock lost": Fault(),
    "clock set back": Fault(),
    "killed": Fault(),
    "power failure": Fault(),
}


@dataclass
class Disk:
    """The events of one run of a command below a folder, and the fault at one of them.

    root: the folder that is watched.
    at: the number of that event, from 1; 0 only counts.
    fault: what fails then, by a key of `FAULTS`.
    meanwhile: called at that event.
    events: the kinds of all events so far.
    dirty: by path, how many bytes were there at the last sync of a file that was written since.
    behind_s: how far the clock was set back.
    """

    root: Path
    at: int = 0
    fault: str = "clock set back"
    meanwhile: Callable[[], None] = lambda: None
    events: list[str] = field(default_factory=list)
    dirty: dict[str, int] = field(default_factory=dict)
    behind_s: int = 0
    _known: dict[int, str] = field(default_factory=dict)
    _is_apart: bool = False

    def event(self, kind: str, path: str) -> None:
        """Count one event; raises OSError where it fails."""
        self.events.append(kind)
        count, fault = len(self.events), FAULTS[self.fault]
        if not 0 < self.at <= count or self._is_apart:
            return
        if count == self.at:
            self._is_apart = True
            try:
                self.meanwhile()
            finally:
                self._is_apart = False
        is_now = count > self.at if fault.is_short else count == self.at or fault.stays
        if fault.number and is_now and (not fault.kinds or kind in fault.kinds):
            raise OSError(fault.number, os.strerror(fault.number), path)

    def write(self, handle: int, data: Any, write: Callable[[Any], int]) -> int:
        """One write; how many bytes were taken."""
        path = self.name(handle)
        self.event("write", path)
        self.dirty.setdefault(path, os.fstat(handle).st_size)
        is_half = FAULTS[self.fault].is_short and len(self.events) == self.at and len(data) > 1
        return write(memoryview(data)[: len(data) // 2] if is_half else data)

    def holds(self, path: object, dir_fd: int | None = None) -> bool:
        """Whether a path, or a descriptor, belongs to the watched folder."""
        if isinstance(path, int):
            return path in self._known
        if dir_fd is not None:
            return dir_fd in self._known
        return os.path.abspath(os.fsdecode(path)).startswith(f"{self.root}{os.sep}")  # type: ignore[arg-type]

    def name(self, path: object) -> str:
        """A path for messages, of a descriptor, too."""
        return self._known.get(path, "?") if isinstance(path, int) else os.fsdecode(path)  # type: ignore[arg-type]


def _is_writing(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


class _File(io.FileIO):
    """A file whose writes are events."""

    disk: Disk

    def write(self, data: Any) -> int:  # type: ignore[override]
        return self.disk.write(self.fileno(), data, super().write)

    def truncate(self, size: int | None = None) -> int:
        self.disk.event("truncate", self.disk.name(self.fileno()))
        return super().truncate(size)


@contextmanager
def watched(disk: Disk) -> Iterator[Disk]:
    """Everything that is written below the disk's folder meanwhile goes through it."""
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "ftruncate", "replace", "rename", "mkdir",
                                                 "rmdir", "unlink", "chmod", "close")}  # fmt: skip
    real_open, real_time, real_gmtime = io.open, time.time, time.gmtime

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        mine = disk.holds(path, dir_fd)
        if mine and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            disk.event("open", disk.name(path))
        handle: int = real["open"](path, flags, mode, dir_fd=dir_fd)
        if mine:
            disk._known[handle] = os.path.abspath(disk.name(path)) if dir_fd is None else disk.name(path)
        return handle

    def close(handle: int) -> None:
        disk._known.pop(handle, None)
        real["close"](handle)

    def write(handle: int, data: Any) -> int:
        if handle not in disk._known:
            return int(real["write"](handle, data))
        return disk.write(handle, data, lambda part: int(real["write"](handle, part)))

    def fsync(handle: int) -> None:
        if handle in disk._known:
            disk.event("sync", disk.name(handle))
            disk.dirty.pop(disk.name(handle), None)
        real["fsync"](handle)

    def moved(name: str) -> Callable[..., None]:
        def move(source: Any, target: Any, **more: Any) -> None:
            if disk.holds(target):
                disk.event(name, disk.name(target))
            real[name](source, target, **more)
            if str(source) in disk.dirty:
                disk.dirty[str(target)] = disk.dirty.pop(str(source))

        return move

    def counted(name: str) -> Callable[..., None]:
        def change(path: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> None:
            if disk.holds(path, dir_fd):
                disk.event(name, disk.name(path))
            real[name](path, *rest, **({} if dir_fd is None else {"dir_fd": dir_fd}), **more)

        return change

    def open_file(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
                  newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        if not _is_writing(mode) or not disk.holds(file):
            return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int):
            disk.event("open", disk.name(file))
        raw = _File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.disk = disk
        disk._known[raw.fileno()] = disk.name(file) if isinstance(file, int) else os.path.abspath(os.fsdecode(file))
        if not buffering:
            return raw
        buffer: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

    real_flock = fcntl.flock

    def flock(handle: Any, operation: int) -> None:
        disk.event("lock", "lock")
        real_flock(handle, operation)

    def now() -> float:
        return real_time() - disk.behind_s

    clock = {"time": now, "gmtime": lambda seconds=None: real_gmtime(now() if seconds is None else seconds)}
    instead: dict[str, Any] = {"open": open_, "write": write, "fsync": fsync, "close": close}
    instead |= {name: moved(name) for name in ("replace", "rename")}
    instead |= {name: counted(name) for name in ("mkdir", "rmdir", "unlink", "chmod", "ftruncate")}
    with (
        mock.patch.multiple(os, **instead),
        mock.patch.multiple(time, **clock),
        mock.patch.object(io, "open", open_file),
        mock.patch.object(builtins, "open", open_file),
        mock.patch.object(fcntl, "flock", flock),
    ):
        yield disk


def snapshot(disk: Disk, target: Path, *, lost: bool) -> None:
    """The folder as it is now, elsewhere. lost: without what was written since the last sync of each file."""
    shutil.copytree(disk.root, target)
    for path, size in disk.dirty.items() if lost else ():
        copy = target / Path(path).relative_to(disk.root)
        if copy.is_file():
            os.truncate(copy, size)
