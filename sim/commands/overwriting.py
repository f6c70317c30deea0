"""What a command writes takes the place of nothing that it reads, and of no part of saved results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import typer

OUTPUTS = {"out": "-o", "csv": "--csv", "parquet": "--parquet"}
"""Options that name what is written: a file, a folder, or what the names of files begin with."""

FILES = ("profile", "model", "reference", "trace", "path", "study", "policy", "policies")
"""Options and arguments that name files to read."""

FOLDERS = ("run", "other", "source", "folder")
"""Arguments that name results, which in turn name files."""


def check_outputs(given: Mapping[str, Any]) -> None:
    """Check what the options of a command say is to be written, before any work is done.

    given: the values of the options and arguments, by name.

    Raises BadParameter for a blank name, for two outputs of one name, and where something would be replaced: what the
    command reads, what the results that it reads were made from, or a part of any saved results.
    """
    outputs = {OUTPUTS[name]: value for name, value in given.items() if name in OUTPUTS and isinstance(value, str)}
    if not outputs:
        return
    from sim.outputs import folder_of_part

    read = [path for path in _read(given) if path.exists()]
    seen: dict[str, str] = {}
    for option, text in outputs.items():
        if not text.strip():
            raise typer.BadParameter(f"{option} {text!r}: expected a name, such as 'results'")
        target = Path(text)
        for path in read:
            if _replaces(target, path):
                raise typer.BadParameter(
                    f"{option} {text}: would replace {str(path)!r}, which is read here; expected another name, such as "
                    f"{str(_free(target))!r}"
                )
        if found := folder_of_part(target):
            raise typer.BadParameter(
                f"{option} {text}: is a part of the results in {str(found)!r}; expected another name, such as "
                f"{str(_free(Path(target.name)))!r}"
            )
        if (other := seen.setdefault(os.path.realpath(text), option)) != option:
            raise typer.BadParameter(f"{other} and {option} {text}: one file; expected a name for each")


def _read(given: Mapping[str, Any]) -> Iterator[Path]:
    """The files that a command reads, there or not."""
    for name in FILES:
        if isinstance(given.get(name), str):
            yield from _files(given[name])
    for name in FOLDERS:
        if isinstance(given.get(name), str):
            for text in _made_from(Path(given[name])):
                yield from _files(text)


def _made_from(folder: Path) -> Iterator[str]:
    """What a folder of results says that they were made from: names of policies, profiles, models and traces."""
    from sim.errors import TiersimError
    from sim.foreign import parse_json, part_of
    from sim.outputs import MARKS
    from sim.regular_files import read_file

    for mark in MARKS.values():
        with suppress(OSError, ValueError, TiersimError):
            saved = parse_json(read_file(part_of(folder, mark)))
            about = saved if isinstance(saved, dict) else {}
            sums, asked = about.get("files"), about.get("asked")
            named = [*(sums if isinstance(sums, dict) else ()), *(asked.values() if isinstance(asked, dict) else ())]
            yield from (text for text in named if isinstance(text, str))


def _files(text: str) -> Iterator[Path]:
    """The files that a text stands for as the name of a trace, profile, model, policy, or list of policies."""
    from sim.errors import TiersimError
    from sim.foreign import model_files, policy_files, profile_files, trace_files
    from sim.policies.writing import listed

    for files in (trace_files, profile_files, model_files, policy_files):
        with suppress(TiersimError, OSError, ValueError):
            yield from (file.path for file in files([text]))
    with suppress(TiersimError, OSError, ValueError):
        yield from (file.path for file in policy_files(listed(text)))


def _replaces(target: Path, path: Path) -> bool:
    """Whether writing `target`, a file, a folder of results or a prefix of the files of devices, replaces a file."""
    from sim.outputs import is_part

    if path.is_dir():
        return False
    if _same(target, path) or (is_part(path.name) and _same(target, path.parent)):
        return True
    of_device = re.fullmatch(re.escape(target.name) + r"\.\d+\.et", path.name)
    return of_device is not None and _same(target.parent, path.parent)


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are one file or folder, by whatever names."""
    with suppress(OSError, ValueError):
        return one.samefile(other)
    return False


def _free(path: Path) -> Path:
    """A name like that of `path` that is not taken."""
    names = (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in count(2))
    return next(name for name in names if not os.path.lexists(name))
