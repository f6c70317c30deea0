"""Hardware profiles: from TOML files to platforms, with errors that name file and key.

    load_profile("a100_80_sxm")                                  a shipped profile
    load_profile("lab/machine.toml")                             a file
    load_profile("a100_80_sxm", overrides={"devices": "4"})      the same machine with four cards

`hardware_profiles/README.md` states the schema.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterable, Mapping
from copy import deepcopy
from decimal import Decimal
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.arguments import explained
from sim.errors import ProfileError, near, nearest
from sim.hardware.platform import STANDINGS, Platform
from sim.toml_text import parse_toml

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SET_BY_USER = {"source": "set by the user", "standing": "assumed"}
_GROUPS = ("tiers", "engines", "links", "pools", "networks")


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _shipped() if entry.name.endswith(".toml")))


def profile_text(name_or_path: str | os.PathLike[str]) -> str:
    """The TOML text of a profile. Raises ProfileError where it does not exist."""
    return _read(name_or_path)[2]


def profile_file(name_or_path: str | os.PathLike[str]) -> Path | None:
    """The file that a profile is read from, whether it exists or not; None for the name of a shipped profile."""
    given = os.fspath(name_or_path)
    is_file = not isinstance(name_or_path, str) or given.endswith(".toml") or os.sep in given or "/" in given
    return Path(given) if is_file else None


@explained
def load_profile(name_or_path: str | os.PathLike[str], *, overrides: Mapping[str, str] | None = None) -> Platform:
    """The platform that a shipped profile or a TOML file describes.

    name_or_path: a string that ends in ".toml" or contains a path separator is a file, any other the name of a
        profile.
    overrides: figures to change, by path: `{"tiers.hbm.bandwidth": "300 GB/s", "devices": "4"}`. They then count as
        assumed.

    Raises ProfileError with every mistake in the file, one line each, and with the nearest valid name for an unknown
    one.
    """
    file, changed = _read(name_or_path), dict(overrides or {})
    key = (*file, *((path, repr(figure)) for path, figure in changed.items()))
    if key in _loaded:
        return _loaded[key]
    if len(_loaded) >= KEPT:
        del _loaded[next(iter(_loaded))]
    _loaded[key] = platform = _load(*file, changed)
    return platform


KEPT = 64
"""How many platforms are kept, by the text of their files and what is changed in it: a run by name costs no reading."""
_loaded: dict[tuple[Any, ...], Platform] = {}


def _load(name: str, label: str, text: str, overrides: Mapping[str, str]) -> Platform:
    from pydantic import ValidationError  # imported here: listing names does not need it

    from sim.hardware.assemble import assemble
    from sim.hardware.schema import ProfileFile

    raw = _parse(label, text)
    _set(label, raw, overrides)
    names = {group: list(raw[group]) if isinstance(raw.get(group), dict) else [] for group in _GROUPS}
    try:
        profile = ProfileFile.model_validate(raw, context=names)
    except ValidationError as error:
        raise ProfileError(_complaints(label, raw, error.errors(include_url=False))) from None
    try:
        return assemble(name, profile)
    except ProfileError as error:
        raise ProfileError(f"{label}: {problem}" for problem in error.problems) from None


def profile_table(platform: Platform) -> tuple[tuple[str, str, str, str], ...]:
    """Rows to print, in the order of the schema: path, value as written, source, standing."""
    return tuple((fact.path, fact.text, fact.source, fact.standing) for fact in platform.facts)


def fit_error(platform: Platform, what: str = "op_time") -> float | None:
    """Mean relative error of the time model against measurements on this machine, None where none is known.

    what: `op_time` or `transfer_time`.
    """
    for fact in platform.facts:
        if fact.path == f"fit.{what}" and fact.text != "no measurement":
            return float(fact.text)
    return None


# ---- reading -------------------------------------------------------------------------------------


def _shipped() -> Iterable[Traversable]:
    return importlib.resources.files("hardware_profiles").iterdir()


LARGEST = 16 << 20
"""Bytes of a profile at most."""


def _read(name_or_path: str | os.PathLike[str]) -> tuple[str, str, str]:
    """Name of the profile, label of its file in messages, and its text."""
    given = os.fspath(name_or_path)
    file: Traversable | None = profile_file(name_or_path)
    if file is not None:
        name, label = Path(given).stem, given
        if not file.is_file():
            if file.is_dir():
                raise ProfileError(f"{label}: a folder, not a TOML file")
            hint = near(name, profile_names(), _plain_first) if nearest(name, profile_names()) else ""
            raise ProfileError(f"{label}: no such file{hint}")
    else:
        if given not in profile_names():
            if {*given.split(",")} & {*profile_names()}:
                raise ProfileError(f"profile {given!r}: expected one; `tiersim sweep` compares machines")
            raise ProfileError(f"no hardware profile is called {given!r}{_instead(given)}")
        name, label = given, f"{given}.toml"
        file = importlib.resources.files("hardware_profiles").joinpath(label)
    try:
        if isinstance(file, Path) and file.stat().st_size > LARGEST:
            raise ProfileError(f"{label}: has more than {LARGEST:,} bytes")
        return name, label, file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{label}: cannot be read: {error}") from None


def _instead(wrong: str) -> str:
    """What may be meant by a name that no profile has, to append to a message."""
    if Path(f"{wrong}.toml").is_file():
        return f"; the file is {wrong + '.toml'!r}, with its ending"
    hint = near(wrong, profile_names(), _plain_first)
    begin = "; to describe another machine, begin with `tiersim profiles a100_40_pcie --toml > mine.toml`"
    return hint if nearest(wrong, profile_names()) else hint + begin


def _plain_first(name: str) -> tuple[bool, str]:
    """Sorts profiles: one that another was made from, with other storage or memory, before it.

    The text of such a profile says which it was made from, as `that_one`.
    """
    text = profile_text(name)
    return any(f"`{other}`" in text for other in profile_names() if other != name), name


def _parse(label: str, text: str) -> dict[str, Any]:
    try:
        return parse_toml(text, parse_float=Decimal)  # Decimal: figures stay exactly as written
    except ValueError as error:
        raise ProfileError(f"{label}: {error}") from None


# ---- overrides -----------------------------------------------------------------------------------


def _set(label: str, raw: dict[str, Any], overrides: Mapping[str, str]) -> None:
    """Change `raw` in place. Raises ProfileError with every path that does not exist."""
    problems = []
    for path, text in overrides.items():
        problem = _set_one(raw, path.split("."), _literal(str(text)))
        if problem:
            problems.append(f"{label}: {path}: {problem}")
    if problems:
        raise ProfileError(problems)


def _with_figure(raw: Mapping[str, Any], figure: str) -> list[str]:
    """The paths of a figure that several parts have: those of the first, a tier before an engine or a link."""
    from sim.hardware.schema import PARTS

    groups = [group for group in _GROUPS if figure in PARTS[group].FIGURES]
    return [f"{group}.{name}.{figure}" for group in groups[:1] for name in raw.get(group, ())]


def _set_one(raw: dict[str, Any], path: list[str], value: Any) -> str:
    """Change one figure. Returns what is wrong with the path, "" for nothing."""
    from sim.hardware.schema import PARTS, ProfileFile, keys

    group, rest = path[0], path[1:]
    if group not in keys(ProfileFile):
        inside = [f"{table}.{'.'.join(path)}" for table in _GROUPS if group in raw.get(table, ())]
        if inside:
            return f"there is no key {group!r} (did you mean {inside[0]!r}?)"
        owners = [] if rest else _with_figure(raw, group)
        return f"there is no key {group!r}{near(group, owners or keys(ProfileFile))}"
    if group not in PARTS:
        if rest:
            return f"{group!r} has no keys of its own"
        raw[group] = value
        return ""
    part = raw.setdefault(group, {})
    if group in _GROUPS:
        if not rest:
            return f"names a whole table; name a figure, such as {_example(raw, group)!r}"
        name, rest = rest[0], rest[1:]
        if name not in part:
            return f"there is no {group.removesuffix('s')} {name!r}{near(name, part)}"
        part = part[name]
    model = PARTS[group]
    if not rest:
        return f"names a whole part; name one of its figures: {', '.join((*model.FIGURES, *model.TABLES))}"
    key, rest = rest[0], rest[1:]
    if key not in keys(model):
        return f"there is no key {key!r}{near(key, keys(model))}"
    if key in model.TABLES or (key == "allocator" and rest):
        if len(rest) != 1:
            return f"{key!r} is a table: name one entry{near('', part.get(key, {}))}"
        if isinstance(part.get(key), str):
            part[key] = {"name": part[key]}
        part.setdefault(key, {})[rest[0]] = {"value": value, **SET_BY_USER} if key in model.TABLES else value
        return ""
    if rest:
        return f"{key!r} has no keys of its own"
    part[key] = {"value": value, **SET_BY_USER} if key in model.FIGURES else value
    return ""


def _example(raw: Mapping[str, Any], group: str) -> str:
    from sim.hardware.schema import PARTS

    model = PARTS[group]
    return f"{group}.{next(iter(raw[group]), 'NAME')}.{(*model.FIGURES, *model.TABLES)[0]}"


def _literal(text: str) -> Any:
    """A number, boolean or list in TOML notation; anything else is text."""
    try:
        parsed = parse_toml(f"value = {text}", parse_float=Decimal)
    except ValueError:
        return text
    return deepcopy(parsed["value"]) if list(parsed) == ["value"] else text


# ---- messages ------------------------------------------------------------------------------------


def _complaints(label: str, raw: Mapping[str, Any], errors: list[ErrorDetails]) -> list[str]:
    """One line per mistake: FILE: key.path: value: what was expected."""
    hints: dict[tuple[int | str, ...], str] = {}
    misspelt: set[tuple[int | str, ...]] = set()
    for error in errors:
        if error["type"] == "extra_forbidden":
            where, wrong = error["loc"][:-1], str(error["loc"][-1])
            valid = _valid_keys(where)
            hints[error["loc"]] = near(wrong, valid)
            misspelt |= {(*where, key) for key in nearest(wrong, valid)}
    lines: dict[str, None] = {}  # each only once: a wrong default of a part is wrong for all its figures
    for error in errors:
        if error["type"] == "extra_forbidden":
            lines[f"{label}: {_path(error['loc'])}: there is no such key{hints[error['loc']]}"] = None
        elif not (error["type"] == "missing" and error["loc"] in misspelt):
            lines[f"{label}: {_complaint(raw, error)}"] = None
    return _joined(list(lines), label)


MISSING = ": this key is missing"


def _joined(lines: list[str], label: str) -> list[str]:
    """Lines about missing keys as one, where there are several."""
    missing = [line for line in lines if line.endswith(MISSING)]
    if len(missing) < 2:
        return lines
    keys = ", ".join(line.removeprefix(f"{label}: ").removesuffix(MISSING) for line in missing)
    return [*(line for line in lines if line not in missing), f"{label}: these keys are missing: {keys}"]


def _complaint(raw: Mapping[str, Any], error: ErrorDetails) -> str:
    loc, kind, value = error["loc"], error["type"], error["input"]
    if kind == "missing" and loc[-1] in ("source", "standing"):
        part = ".".join(map(str, loc[:2] if loc[0] in _GROUPS else loc[:1]))
        figure = _find(raw, loc[:-1])
        shown = figure.get("value") if isinstance(figure, Mapping) else figure
        known = f" (one of {', '.join(STANDINGS)})" if loc[-1] == "standing" else ""
        return f"{_path(loc[:-1])}: value {_text(shown)}: no {loc[-1]}{known}; give it here, or for all of {part}"
    if kind == "missing":
        return f"{_path(loc)}{MISSING}"
    loc = _written(raw, loc)
    if kind == "value_error":
        text = str(error["ctx"]["error"])
        return f"{_path(loc)}: {'key' + text.removeprefix('value') if loc[-1] == '[key]' else text}"
    shown = "" if isinstance(value, Mapping) else f"value {_text(value)}: "
    return f"{_path(loc)}: {shown}{_EXPECTED.get(kind, error['msg'])}"


def _written(raw: Mapping[str, Any], loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where the file states what is read as `loc`: the figure itself, or a default further up."""
    if loc[-1:] == ("value",):
        return loc[:-1]
    if loc[-1:] in (("source",), ("standing",)):
        for depth in range(len(loc) - 1, 0, -1):
            above = _find(raw, loc[:depth])
            if isinstance(above, Mapping) and loc[-1] in above:
                return (*loc[:depth], loc[-1])
    return loc


_EXPECTED = {
    "dict_type": "expected a table",
    "model_type": "expected a table",
    "model_attributes_type": "expected a table",
    "string_type": "expected text",
    "string_too_short": "expected text that is not empty",
    "string_pattern_mismatch": "expected a name of lower-case letters, digits and _, starting with a letter",
    "bool_type": "expected true or false",
    "int_type": "expected a whole number",
    "tuple_type": "expected a list",
    "too_short": "expected at least one entry",
    "greater_than_equal": "expected at least 1",
    "less_than_equal": "expected at most 1024",
}


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(word) for word in loc if word != "[key]") or "the file"


def _text(value: Any) -> str:
    return str(value) if isinstance(value, Decimal) else repr(value)


def _find(raw: Any, loc: Iterable[int | str]) -> Any:
    for word in loc:
        if not isinstance(raw, Mapping) or word not in raw:
            return None
        raw = raw[word]
    return raw


def _valid_keys(where: tuple[int | str, ...]) -> list[str]:
    """The keys that the table at `where` may have."""
    from sim.hardware.schema import PARTS, Figure, ProfileFile, keys

    if not where:
        return keys(ProfileFile)
    part = 2 if where[0] in _GROUPS else 1
    if len(where) == part:
        return keys(PARTS[str(where[0])])
    return keys(Figure)
