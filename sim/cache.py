"""Where files are kept that nobody asked for by name, such as captures: outside the user's own folders."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for files of this kind, which may not exist yet.

    It lies in $TIERSIM_CACHE, or else in tiersim's part of $XDG_CACHE_HOME, ~/.cache by default.
    """
    if given := os.environ.get("TIERSIM_CACHE"):
        return Path(given) / kind
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tiersim" / kind
