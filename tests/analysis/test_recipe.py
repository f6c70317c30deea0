"""What CONTRIBUTING.md asks of each analysis: found, imported, tested, and giving a record or a table."""

from __future__ import annotations

import dataclasses
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

import sim.analysis
from sim import load_profile, simulate
from sim.analysis import registry
from sim.analysis.registry import analyses, analysis
from sim.errors import TiersimError
from sim.log import EventLog
from sim.trace.op import PHASES
from workloads import uniform_chain

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_figures

TESTS = Path(__file__).parent


@cache
def log():
    return simulate(uniform_chain(8), load_profile("a100_40_pcie"), "swap_all").log


# ---- found and imported ----------------------------------------------------------------------------


def test_the_package_has_the_names_of_its_files():
    assert make_figures.PACKAGE.read_text("utf-8") == make_figures.package(), "run python scripts/make_figures.py"


@pytest.mark.parametrize("name", analyses())
def test_an_analysis_is_imported_from_the_package(name):
    assert getattr(sim.analysis, name) is analyses()[name], "run python scripts/make_figures.py"


@pytest.mark.parametrize("module", registry.modules(), ids=lambda module: module.__name__)
def test_a_file_has_the_function_that_it_is_named_for(module):
    name = module.__name__.rpartition(".")[2]
    assert name in registry.own_functions(module), f"sim/analysis/{name}.py has no function {name!r}"
    if name != "pareto":  # of rows
        assert analysis(name)


def unnamed(log):
    """Its log has no type."""


def two(log: EventLog, tier):
    """It takes more than the log."""


def by_text(log: "EventLog"):  # noqa: UP037
    """Its type is a text."""


def qualified(log: "sim.log.EventLog", tier=None):  # noqa: UP037
    """Its type is a path."""


def by_class(log, share=0.5):
    """Its type is the class itself, as without `from __future__ import annotations`."""


by_class.__annotations__["log"] = EventLog


@pytest.fixture
def mine(monkeypatch):
    """A file of analyses that nobody has written."""
    module = ModuleType("sim.analysis.mine")
    for function in (unnamed, two, by_text, qualified, by_class):
        monkeypatch.setattr(function, "__module__", module.__name__)
        setattr(module, function.__name__, function)
    there = registry.modules()
    monkeypatch.setattr(registry, "modules", lambda: (*there, module))
    analyses.cache_clear()
    yield
    analyses.cache_clear()


@pytest.mark.parametrize("function", [by_text, qualified, by_class], ids=lambda function: function.__name__)
def test_a_log_is_recognised_however_its_type_is_written(mine, function):
    assert analysis(function.__name__) is function


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "unnamed",
            "sim/analysis/mine.py: unnamed is not an analysis: its one required parameter has to be `log: EventLog`",
        ),
        ("two", "sim/analysis/mine.py: two is not an analysis: its one required parameter has to be `log: EventLog`"),
        ("mine", "sim/analysis/mine.py has no function 'mine'"),
        ("trafic", "no analysis is called 'trafic' (did you mean 'traffic'?)"),
    ],
)
def test_what_is_no_analysis_says_why(mine, name, said):
    with pytest.raises(TiersimError) as caught:
        analysis(name)
    assert str(caught.value).startswith(said)


# ---- what it gives ---------------------------------------------------------------------------------


def fault_of(value, log) -> str:
    """What is wrong with the result of an analysis, "" for nothing."""
    if isinstance(value, (pd.DataFrame, int, float)):
        return ""
    if isinstance(value, tuple):
        parts = [each for each in value if not isinstance(each, np.ndarray)]
        return next((fault for each in parts if (fault := fault_of_record(each))), "")
    if isinstance(value, dict):
        platform, tensors = log.platform, set(range(len(log.trace.tensors)))
        keys = {*(tier.name for tier in platform.tiers), *platform.lanes, *tensors, *PHASES}
        said = "a mapping goes by tier, lane, tensor or phase; figures are a frozen dataclass"
        return "" if value.keys() <= keys else said
    return fault_of_record(value)


def fault_of_record(value) -> str:
    if not dataclasses.is_dataclass(value):
        return f"{type(value).__name__}: give a frozen dataclass, a tuple of them or a DataFrame"
    return "" if value.__dataclass_params__.frozen else f"{type(value).__name__}: a dataclass of figures is frozen"


@pytest.mark.parametrize("name", analyses())
def test_an_analysis_gives_a_record_or_a_table(name):
    fault = fault_of(analyses()[name](log()), log())
    assert not fault, f"{name}: {fault}"


def test_what_is_neither_record_nor_table_is_found():
    @dataclasses.dataclass
    class Loose:
        above_ns: int

    assert "frozen dataclass" in fault_of({"share": 0.9, "above_ns": 7}, log())
    assert "frozen" in fault_of(Loose(7), log())
    assert "frozen" in fault_of((Loose(7),), log())
    assert "list" in fault_of([1, 2], log())
    assert fault_of({"hbm": 7}, log()) == ""


# ---- tested ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", analyses())
def test_an_analysis_is_tested_against_a_log_drawn_by_hand(name):
    files = [path for path in TESTS.glob("test_*.py") if path.name not in ("test_recipe.py", "test_figures.py")]
    assert any(re.search(rf"\b{name}\(", path.read_text("utf-8")) for path in files), (
        f"no test of tests/analysis calls {name}: write tests/analysis/test_{name}.py"
    )
