"""What `sim` and `workloads` offer: every name is there, says what it is, and nothing else is on offer."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

PACKAGES = ("sim", "workloads")
NAMES = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_is_there_and_says_what_it_is(package, name):
    value = getattr(importlib.import_module(package), name)
    assert inspect.isclass(value) or callable(value)
    text = inspect.getdoc(value)
    assert text, f"{package}.{name} has no docstring"
    assert not text.startswith(f"{value.__name__}("), f"{package}.{name} has no docstring of its own"


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_is_one_of_ours(package, name):
    value = getattr(importlib.import_module(package), name)
    assert value.__module__.split(".")[0] in PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_offered_twice(package):
    offered = importlib.import_module(package).__all__
    assert len(set(offered)) == len(offered)


def test_sim_offers_nothing_else():
    import sim

    assert set(dir(sim)) == set(sim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Simulate'"):
        _ = sim.Simulate


def test_workloads_offers_nothing_else():
    import workloads

    others = {
        name
        for name, value in vars(workloads).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in workloads.__all__
    }
    assert others == set()


def test_the_names_that_type_checkers_see_are_those_on_offer():
    import ast
    from pathlib import Path

    import sim

    tree = ast.parse(Path(sim.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    seen = {alias.asname or alias.name for node in block.body for alias in node.names}
    assert seen == set(sim.__all__)


def test_importing_sim_loads_nothing_heavy():
    code = "import sim, sys; print([m for m in ('pandas', 'matplotlib', 'scipy', 'simpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
