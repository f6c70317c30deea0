"""Keeps what a solver's C code prints off standard output, which is for the program's own answers."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_lock = threading.Lock()
_open = 0
"""Solvers under way, in any thread: the first one redirects, the last one restores."""
_kept = -1
"""The descriptor that standard output really is, while it is redirected."""


@contextmanager
def off_stdout() -> Iterator[None]:
    """Send what is written to file descriptor 1 to standard error.

    HiGHS prints some lines whatever its options say. They bypass `sys.stdout`, and in a pipe they lie in a buffer of
    the C library until the program ends, so that buffer is flushed before the descriptor is restored. Standard error
    takes them, rather than nothing, since another thread may be printing meanwhile.
    """
    _redirect()
    try:
        yield
    finally:
        _restore()


def _redirect() -> None:
    global _open, _kept
    with _lock:
        _open += 1
        if _open > 1:
            return
        _flush()  # what C code has printed before is not the solver's
        with suppress(OSError):  # a program without standard output has none to keep clean
            _kept = os.dup(1)
            os.dup2(2, 1)


def _restore() -> None:
    global _open, _kept
    with _lock:
        _open -= 1
        if _open or _kept < 0:
            return
        _flush()
        os.dup2(_kept, 1)
        os.close(_kept)
        _kept = -1


def _flush() -> None:
    """Flush the buffers of the C library, as far as it can be reached from here."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
