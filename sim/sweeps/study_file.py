"""Reads the file of a study, and says what is wrong with it: every mistake at once, one line each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sim.errors import ProfileError, near, nearest
from sim.hardware.profile import load_profile
from sim.regular_files import read_file
from sim.sweeps.axes import COMPARISON, DERIVED, LAYOUT_KEYS, WORKLOAD_AXES, Several, StudyError, alternatives
from sim.sweeps.schema import StudyFile
from sim.toml_text import parse_toml

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def read_study(study: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, StudyFile, Mapping[str, Any]]:
    """The name of a TOML file, or "study" for a dict, and its content, checked and as it is. Raises StudyError."""
    if isinstance(study, Mapping):
        source, raw = "study", dict(study)
    else:
        source = os.fspath(study)
        raw = _read(source)
    problems: list[str] = []
    file = None
    try:
        file = StudyFile.model_validate(raw)
    except ValidationError as error:
        problems = _complaints(source, raw, error.errors(include_url=False))
    problems += [f"{source}: {problem}" for problem in _across(raw)]
    if problems or file is None:
        raise StudyError(list(dict.fromkeys(problems)))
    return source, file, raw


def _read(source: str) -> dict[str, Any]:
    try:
        return parse_toml(read_file(Path(source)).decode("utf-8"))
    except UnicodeDecodeError:
        raise StudyError([f"{source}: no UTF-8 text"]) from None
    except OSError as error:
        raise StudyError([f"{source}: {error.strerror}"]) from None
    except ValueError as error:
        raise StudyError([f"{source}: {error}"]) from None


# ---- complaints ----------------------------------------------------------------------------------

_EXPECTED = {
    "missing": "this key is missing",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "dict_type": "expected a table",
    "list_type": "expected a list",
}


def _complaints(source: str, raw: Mapping[str, Any], errors: list[ErrorDetails]) -> list[str]:
    valid = list(StudyFile.model_fields)
    lines: dict[str, None] = {}
    misspelt = {key for e in errors if e["type"] == "extra_forbidden" for key in nearest(str(e["loc"][0]), valid)}
    for error in errors:
        loc = [part for part in error["loc"] if not (isinstance(part, str) and ("[" in part or part == "bool"))]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        key = str(loc[0]) if loc else ""
        if key in raw and not isinstance(raw[key], list) and len(loc) > 1 and isinstance(loc[1], int):
            where = where.replace("[0]", "", 1)  # one value stands for a list of one
        kind = error["type"]
        if kind == "extra_forbidden":
            lines[f"{source}: {where or repr(key)}: there is no such key{near(key, valid)}"] = None
        elif kind == "missing" and key in misspelt:
            continue
        elif kind == "value_error":
            cause = error["ctx"]["error"]
            for line in cause.problems if isinstance(cause, Several) else [str(cause)]:
                lines[f"{source}: {where}: {line}"] = None
        else:
            shown = "" if kind == "missing" else f"value {error['input']!r}: "
            lines[f"{source}: {where}: {shown}{_EXPECTED.get(kind, error['msg'])}"] = None
    return list(lines)


def _across(raw: Mapping[str, Any]) -> Iterator[str]:
    """Mistakes that involve several keys; the schema checks each key by itself."""
    if ("model" in raw) == ("trace" in raw) and not any("model" in nearest(key, StudyFile.model_fields) for key in raw):
        yield "model: give either model or trace, and one of them"
    if "trace" in raw:
        yield from (f"{key}: goes with model, not with trace" for key in WORKLOAD_AXES if key in raw)
        paths = [path for path in _list(raw["trace"]) if isinstance(path, str)]
        yield from (f"trace: value {path!r}: no such file" for path in paths if path and not Path(path).is_file())
    if "parallel" in raw and any(each != 1 for each in _list(raw.get("micro_batches"))):
        yield "micro_batches: with parallel it goes into its tables: parallel = { pp = 4, micro_batches = 8 }"
    figures = raw.get("figures")
    profiles = [name for name in _list(raw.get("profile")) if isinstance(name, str) and _loads(name)]
    for path, values in figures.items() if isinstance(figures, Mapping) else ():
        for value in _list(values):
            for profile in profiles:
                try:
                    load_profile(profile, overrides={path: str(value)})
                except ProfileError as error:
                    yield from (f"figures: value {value!r}: {problem}" for problem in error.problems)
    known = _filter_keys(raw)
    for key in ("skip", "only", "timeline"):
        for i, each in enumerate(_list(raw.get(key))):
            names = each if isinstance(each, Mapping) else ()
            yield from (f"{key}[{i}].{axis}: there is no such axis{near(axis, known)}" for axis in names
                        if axis not in known)  # fmt: skip
            yield from (f"{key}[{i}].{axis}: {text}" for axis in names if (text := _unlike(axis, names[axis], raw)))


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _unlike(axis: str, asked: Any, raw: Mapping[str, Any]) -> str:
    """What is wrong with a filter's values for an axis of numbers, or of text; "" where none is seen."""
    field = StudyFile.model_fields.get(axis)
    usual = None if field is None or field.is_required() else field.default
    numbers = [isinstance(value, (int, float)) for value in _list(raw.get(axis, usual))]
    if not numbers and axis not in DERIVED:  # no axis of this study, or a parameter
        return ""
    for value in alternatives(asked):
        compares = isinstance(value, str) and COMPARISON.fullmatch(value.strip()) is not None
        if all(numbers) and isinstance(value, str) and not compares:
            return f"value {value!r}: expected a number, or a comparison such as '>= 4'"
        if not any(numbers) and compares and axis not in DERIVED:
            return f"value {value!r}: numbers are compared, and this is none; expected one of its values"
    return ""


def _loads(profile: str) -> bool:
    try:
        load_profile(profile)
    except ProfileError:
        return False
    return True


def _filter_keys(raw: Mapping[str, Any]) -> tuple[str, ...]:
    figures, entries = raw.get("figures"), _list(raw.get("policy"))
    parameters = {f"policy.{key}" for entry in entries if isinstance(entry, Mapping) for key in entry if key != "name"}
    axes = ("trace",) if "trace" in raw else ("model", *WORKLOAD_AXES, *DERIVED)
    changed = figures if isinstance(figures, Mapping) else ()
    layout = ("parallel", *(f"parallel.{key}" for key in LAYOUT_KEYS)) if "parallel" in raw else ()
    rest = (*layout, "policy", "budget", "seed", "iterations", "recompute_limit", *sorted(parameters))
    return (*axes, "profile", *changed, *rest)
