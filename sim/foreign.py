"""Files that saved results name: a policy's program, a profile, a trace, a model's configuration.

What a folder of results says is data, and whoever gave it away may have written anything into it. So no file that it
names is executed or opened unless the person who reads it asks for that: a policy's only if it is the very file that
was run, by the SHA-256 that was recorded then. What is shipped or installed goes by name and is no file; a profile or
a trace that lies in the folder itself belongs to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sim.errors import TiersimError


@dataclass(frozen=True)
class Named:
    """A file that results name. kind: "policy", "profile", "trace" or "model"; name: as they write it."""

    kind: str
    name: str
    path: Path

    @property
    def sum(self) -> str:
        """SHA-256 of the file as hexadecimal digits, "" where there is none."""
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except (OSError, ValueError):  # ValueError: a name that no file can have
            return ""


@dataclass(frozen=True)
class Trust:
    """What a folder of results may make this program do.

    folder: the results. asked: whether its reader asked that the files it names be used. sums: SHA-256 that was
    recorded, by the name of each file.
    """

    folder: Path
    asked: bool
    sums: Mapping[str, str]

    def objection(self, file: Named) -> str:
        """Why a file is not used, in one line; "" if it may be."""
        if file.kind != "policy" and self._holds(file.path):
            return ""
        what = f"{file.kind} {file.name!r} is a file that the results name"
        if not self.asked:
            return f"{what}; it is used only where you say so (--trust)"
        recorded = self.sums.get(file.name, "")
        if not recorded:
            return f"{what}; no SHA-256 of it was recorded, so that nobody can say whether it is the one that was run"
        if file.sum != recorded:
            return f"{what}; it is not the one that was run (its SHA-256 differs from {recorded[:12]}…)"
        return ""

    def objections(self, files: Iterable[Named]) -> list[str]:
        """All reasons why files are not used, each once."""
        return list(dict.fromkeys(filter(None, map(self.objection, files))))

    def _holds(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self.folder.resolve())
        except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle
            return False


def policy_files(names: Iterable[str]) -> list[Named]:
    """Those of some policies that are files."""
    from sim.policies import policy_file

    return [Named("policy", name, path) for name in names if (path := policy_file(name)) is not None]


def profile_files(names: Iterable[str]) -> list[Named]:
    """Those of some profiles that are files."""
    from sim.hardware.profile import profile_file

    return [Named("profile", name, path) for name in names if (path := profile_file(name)) is not None]


def trace_files(names: Iterable[str]) -> list[Named]:
    """Traces, which are all files."""
    return [Named("trace", name, Path(name)) for name in names]


def model_files(names: Iterable[str]) -> list[Named]:
    """Those of some models that are files, or whose folder is named."""
    from workloads.models import config_file

    return [Named("model", name, path) for name in names if (path := config_file(name)) is not None]


def sums_of(files: Iterable[Named]) -> dict[str, str]:
    """The SHA-256 of each file by the name under which it was asked for: what results record of them."""
    return {file.name: file.sum for file in files if file.sum}


def read_sums(values: object, where: str) -> dict[str, str]:
    """Recorded sums as they stand in a file of results. Raises TiersimError naming the file."""
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(sum_, str) for sum_ in values.values()):
        raise TiersimError(f"{where}: files: expected names with a SHA-256 each")
    return values
