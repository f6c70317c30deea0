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

PARTS = ("figure", "figures", "lanes", "recorded_streams", "registry", "stand_in", "summary")
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
    return {name: of for module in modules() for name, of in own_functions(module).items() if _takes_a_log(of)}


def own_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions that a file defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    }


def _takes_a_log(function: Callable[..., Any]) -> bool:
    """Whether the first parameter, and no other required one, is declared as an event log, however that is written."""
    parameters = [*inspect.signature(function).parameters.values()]
    if [each for each in parameters if each.default is each.empty] != parameters[:1] or not parameters:
        return False
    declared = getattr(parameters[0].annotation, "__name__", parameters[0].annotation)
    return str(declared).strip("'\"").rpartition(".")[2] == "EventLog"


def analysis(name: str) -> Analysis:
    """The analysis of that name. Raises TiersimError with the nearest one, or with why a function is none."""
    if name in analyses():
        return analyses()[name]
    for module in modules():
        file = f"sim/analysis/{module.__name__.rpartition('.')[2]}.py"
        if name in own_functions(module):
            raise TiersimError(
                f"{file}: {name} is not an analysis: its one required parameter has to be `log: EventLog`"
            )
        if file == f"sim/analysis/{name}.py":
            raise TiersimError(f"{file} has no function {name!r}{near(name, own_functions(module))}")
    raise TiersimError(f"no analysis is called {name!r}{near(name, analyses())}")


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
