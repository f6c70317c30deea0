"""The registry of analyses: each public function of a log in a file of this folder is one, by its name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sim.errors import TiersimError, near

if TYPE_CHECKING:
    from sim.analysis.figure import Figure
    from sim.log import EventLog

Analysis = Callable[["EventLog"], Any]

PARTS = ("figure", "figures", "lanes", "registry", "summary")
"""Files of this folder that hold no analysis: parts of analyses, and this registry."""


@cache
def modules() -> tuple[ModuleType, ...]:
    """The files of analyses."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return tuple(
        importlib.import_module(f"sim.analysis.{name}") for name in names if name not in PARTS and name[0] != "_"
    )


def declared_figures() -> Iterator[tuple[ModuleType, str, Figure]]:
    """The figures that files of analyses add to a summary: where each is declared, its key, and what it is."""
    for module in modules():
        for key, figure in getattr(module, "FIGURES", {}).items():
            yield module, key, figure


@cache
def analyses() -> Mapping[str, Analysis]:
    """The analyses by name: functions whose only required argument is a log."""
    found: dict[str, Analysis] = {}
    for module in modules():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_":
                taken = list(inspect.signature(value).parameters.values())
                needed = [parameter for parameter in taken if parameter.default is parameter.empty]
                if needed == taken[:1] and needed and needed[0].annotation == "EventLog":
                    found[name] = value
    return found


def analysis(name: str) -> Analysis:
    """The analysis of that name. Raises TiersimError with the nearest one."""
    if name not in analyses():
        raise TiersimError(f"no analysis is called {name!r}{near(name, analyses())}")
    return analyses()[name]


def meaning(name: str) -> str:
    """What an analysis tells, in one line."""
    return (inspect.getdoc(analysis(name)) or "").split("\n", 1)[0]


def as_records(value: Any) -> list[dict[str, Any]]:
    """The result of an analysis as rows of plain values: one row for a record, many for a table or list of records."""
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return [{str(key): _plain(each) for key, each in row.items()} for row in value.to_dict("records")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [{field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}]
    if isinstance(value, Mapping):
        return [{"key": _plain(key), "value": _plain(each)} for key, each in value.items()]
    if isinstance(value, Sequence) and value and dataclasses.is_dataclass(value[0]):
        return [record for each in value for record in as_records(each)]
    if isinstance(value, tuple) and value and all(hasattr(each, "tolist") for each in value):  # times and levels
        return [
            dict(zip(("time_ns", "bytes"), row, strict=True)) for row in zip(*(a.tolist() for a in value), strict=True)
        ]
    if isinstance(value, (list, tuple)):
        return [{"value": _plain(each)} for each in value]
    return [{"value": _plain(value)}]


def _plain(value: Any) -> Any:
    """JSON values: records as mappings, arrays as lists, NaN and infinity as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and value != value else value
