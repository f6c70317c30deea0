"""Writing a file atomically: nobody ever sees half of it, even after a power failure."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from sim.regular_files import check_replaceable


def write_aside(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> Path:
    """Let `write` fill a temporary file next to `path`, then rename it to `path`; a missing folder is created.

    After an error nothing is left behind and an older file of that name is untouched. Raises OSError that names `path`.
    """
    target = Path(path)
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_and_rename(target, write)
    except OSError as error:  # it names the temporary file, which means nothing to the user
        raise OSError(error.errno, error.strerror, str(target)) from error
    return target


def _write_and_rename(target: Path, write: Callable[[IO[bytes]], None]) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # else a power failure may keep the name and lose the content
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp makes files that only their owner can read
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):  # what made it fail may keep it from being removed, too
            os.unlink(name)
        raise
