"""Files that saved results refer to: a policy's code, a profile, a trace, a model's configuration.

The content of a folder of results is untrusted data. No file that it refers to is executed or opened unless the user
asks for it, and what is executed (a policy's file, a function that describes a step) only if its SHA-256 is the one
recorded when it ran. Shipped and installed policies are referred to by name, not as files; a profile or trace inside
the folder belongs to the results.

Nor may the content keep the program busy for ever: only plain files of bounded size are read, and a run is repeated
without asking only if its size lets it end within minutes.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import TiersimError
from sim.regular_files import MOST_BYTES, read_file

MOST_LISTS, BYTES_PER_LIST = 1_000_000, 32
"""How many lists and objects a document of JSON may have: so many, or one for so many of its bytes."""

MOST = {
    "batch": 1 << 31,
    "seq": 1 << 24,
    "micro_batches": 1024,
    "iterations": 1000,
    "recompute_limit": 1000,
    "devices": 1 << 20,
    "dp": 1 << 20,
    "tp": 1 << 20,
    "cp": 1 << 20,
    "zero": 3,
    "pp": 1024,
    "chunks": 1024,
}
"""The largest value of each option that a folder gets without --trust; a recompute limit of 0 (none) exceeds it."""

EXECUTED = ("policy", "step")
"""The kinds of files that are programs: where they lie makes them no safer."""

MOST_OPS = 2_000_000
"""The largest number of ops times iterations that a folder gets without --trust."""


def part_of(folder: Path, *names: str) -> Path:
    """The path of a part of a folder of results, by the names that lead to it; it need not exist.

    Raises TiersimError if one of them is a symbolic link: it may lead to files that are none of the results, to be read
    or written there. The folder itself may be one; its user named it.
    """
    path = folder
    for name in names:
        path = path / name
        if path.is_symlink():
            raise TiersimError(f"{path}: is a link; a part of a folder of results must not be one")
    return path


def parse_json(data: bytes) -> Any:
    """A document of JSON as this program writes it. Raises ValueError for anything else, such as NaN or 1e999.

    A list or an object of three bytes takes some sixty of memory, and this program writes few of them.
    """
    if data.count(b"[") + data.count(b"{") > max(MOST_LISTS, len(data) // BYTES_PER_LIST):
        raise ValueError("more lists and objects than this program writes")
    try:
        return json.loads(data, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


MOST_DIVIDED = 200_000
"""The largest number of ops of microbatches that a folder gets without --trust: to make one takes ten times as long."""


@dataclass(frozen=True)
class Named:
    """A file that results refer to.

    kind: "policy", "profile", "trace", "model", or "step" for a model that is a function.
    name: as the results write it.
    path: where it is.
    """

    kind: str
    name: str
    path: Path

    @property
    def sum(self) -> str:
        """SHA-256 as hexadecimal digits, "" for a file that cannot be read; for an executed policy, of its source."""
        from sim.policies import executed_source

        data = executed_source(self.path) if self.kind == "policy" else None
        try:
            return hashlib.sha256(read_file(self.path) if data is None else data).hexdigest()
        except (OSError, ValueError, TiersimError):  # ValueError: a name that no file can have
            return ""


@dataclass(frozen=True)
class Trust:
    """What a folder of results may cause this program to do.

    folder: the results.
    asked: whether the user asked to use the files that the results refer to.
    sums: the recorded SHA-256 of each file, by name.
    """

    folder: Path
    asked: bool
    sums: Mapping[str, str]

    def objection(self, file: Named) -> str:
        """Why a file is not used, in one line; "" if it may be. A policy is then executed from the bytes read here.

        Other files are read again where they are used. If a profile or a workload has changed in between, the figures
        differ from the saved ones, and no page is written.
        """
        if file.kind not in EXECUTED and self._holds(file.path):
            return _unreadable(file)
        subject = f"{file.kind} {file.name!r} is a file that the results refer to"
        if not self.asked:
            return f"{subject}; it is used only if you ask for it (--trust)"
        recorded = self.sums.get(file.name, "")
        if not recorded:
            return f"{subject}; its SHA-256 was not recorded, so it cannot be checked against the one that was run"
        try:
            data = read_file(file.path)
        except (OSError, ValueError, TiersimError):
            data = None
        if data is None or hashlib.sha256(data).hexdigest() != recorded:
            return f"{subject}; it is not the one that was run (its SHA-256 differs from {recorded[:12]}…)"
        if file.kind == "policy":
            from sim.policies import admit_source

            admit_source(file.path, data)
        return ""

    def objections(self, files: Iterable[Named]) -> list[str]:
        """The reasons why files are not used, each only once."""
        return list(dict.fromkeys(filter(None, map(self.objection, files))))

    def too_much(self, asked: Mapping[str, Any]) -> list[str]:
        """The options whose values are too large to use without --trust, one line each."""
        if self.asked:
            return []
        lines = []
        for key, most in MOST.items():
            value = asked.get(key)
            if value is not None and (value > most or (key == "recompute_limit" and not value)):
                shown = str(value) if len(str(value)) <= 24 else f"{str(value)[:23]}…"
                lines.append(f"{key} {shown} is more than the {most:,} that results get without --trust")
        return lines

    def too_long(self, ops: int, iterations: int | None) -> list[str]:
        """Why a run of that many ops per iteration is not repeated without --trust."""
        runs = ops * (iterations or 1)
        if self.asked or runs <= MOST_OPS:
            return []
        return [f"{runs:,} ops are more than the {MOST_OPS:,} that results get without --trust"]

    def too_divided(self, ops: int, micro_batches: int) -> list[str]:
        """Why a trace is not divided into microbatches, each with that many ops, without --trust."""
        made = ops * micro_batches
        if self.asked or micro_batches == 1 or made <= MOST_DIVIDED:
            return []
        return [f"{made:,} ops of microbatches are more than the {MOST_DIVIDED:,} that results get without --trust"]

    def _holds(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self.folder.resolve())
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a cycle of symbolic links
            return False


def _unreadable(file: Named) -> str:
    """Why an existing file is not opened; "" if it may be."""
    try:
        about = file.path.stat()
    except (OSError, ValueError):  # reported where the file is needed
        return ""
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        return f"{file.kind} {file.name!r}: is not a regular file"
    return f"{file.kind} {file.name!r}: has more than {MOST_BYTES:,} bytes" if about.st_size > MOST_BYTES else ""


def policy_files(names: Iterable[str]) -> list[Named]:
    """The files that policies are, or that stand in compositions, by the names under which they stand there."""
    from sim.policies import policy_files as files_of

    return [Named("policy", part, path) for name in names for part, path in files_of(name).items()]


def profile_files(names: Iterable[str]) -> list[Named]:
    """The profiles among `names` that are files."""
    from sim.hardware.profile import profile_file

    return [Named("profile", name, path) for name in names if (path := profile_file(name)) is not None]


def trace_files(names: Iterable[str]) -> list[Named]:
    """The traces in `names`, all of which are files, or prefixes of the files of all ranks."""
    from workloads.importers.chakra import files_by_rank

    files = (file for name in names for file in files_by_rank(name).values() or (name,))
    return [Named("trace", file, Path(file)) for file in files]


def model_files(names: Iterable[str]) -> list[Named]:
    """The models among `names` that are files or folders, or functions of a file or module."""
    from workloads.models import config_file
    from workloads.steps import is_reference, reference_file

    found = []
    for name in names:
        if is_reference(name):
            found.append(Named("step", name, reference_file(name)))
        elif (path := config_file(name)) is not None:
            found.append(Named("model", name, path))
    return found


def sums_of(files: Iterable[Named]) -> dict[str, str]:
    """The SHA-256 of each file that can be read, by name: what results record."""
    return {file.name: file.sum for file in files if file.sum}


def read_sums(values: object, where: str) -> dict[str, str]:
    """Recorded sums as read from the results file `where`. Raises TiersimError naming that file."""
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(sum_, str) for sum_ in values.values()):
        raise TiersimError(f"{where}: files: expected names with a SHA-256 each")
    return values
