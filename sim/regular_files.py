"""Paths that may lead to anything: a pipe that never ends, a device, a file of terabytes."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from sim.errors import TiersimError

MOST_BYTES = 512 << 20
"""The most bytes of a file that is read whole, unless another limit is given."""

MOST_SOURCE = 16 << 20
"""The most bytes of a program."""


@contextmanager
def open_regular(path: Path, most: int = MOST_BYTES) -> Iterator[BufferedReader]:
    """Open a regular file. Raises OSError, or TiersimError for another kind (a pipe may never end) or size."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise TiersimError(f"{path}: is not a regular file")
        if about.st_size > most:
            raise TiersimError(f"{path}: has more than {most:,} bytes")
        yield file


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError, or TiersimError for another kind or size."""
    with open_regular(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # a limit of gigabytes would be taken from memory at once


def check_replaceable(path: Path) -> None:
    """Raise OSError for a pipe, a device or a socket: no file that is renamed to its path may take its place."""
    mode = stat.S_IFREG
    with suppress(OSError, ValueError):  # what does not exist can be written, or that says why not
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def file_sum(path: Path) -> str:
    """SHA-256 of a regular file of any size, as hexadecimal digits. Raises OSError, or TiersimError for another."""
    with open_regular(path, most=1 << 63) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
