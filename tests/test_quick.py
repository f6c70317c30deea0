"""The lanes: every package has a quick test, and the tests that each lane names are there."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from tests.conftest import LONG, ONE_IN, QUICK, left_out

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for top in ("sim", "workloads")
    for path in (ROOT / top / "__init__.py", *(ROOT / top).glob("*/__init__.py"))
)


def test_every_package_has_a_quick_test():
    assert sorted(QUICK) == PACKAGES


def test_tests_that_lanes_name_are_there():
    named = {test for tests in QUICK.values() for test in tests} | {*LONG, *ONE_IN}
    by_file: dict[str, list[str]] = {}
    for test in named:
        file, _, name = test.partition("::")
        by_file.setdefault(file, []).append(name.partition("[")[0] or "test_")
    missing = []
    for file, names in by_file.items():
        body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        there = [node.name for node in body if isinstance(node, ast.FunctionDef)]
        missing += [f"{file}::{name}" for name in names if not any(each.startswith(name) for each in there)]
    assert not missing


def examples(*rows):
    """Examples of a test with these values of its parameters."""
    return [SimpleNamespace(name=f"test[{row}]", callspec=SimpleNamespace(params=dict(enumerate(row)))) for row in rows]


def test_each_value_of_a_grid_stands_in_its_sample():
    grid = examples(*product("abcdef", ["g", "h", "i"], "jk"))
    left = left_out(grid, 3)
    assert 18 < len(left) < 30
    assert all(is_spare for _, is_spare in left)
    sample = [item for item in grid if item not in [each for each, _ in left]]
    assert {value for item in sample for value in item.callspec.params.values()} == set("abcdefghijk")


def test_what_stands_in_one_example_alone_is_never_spare():
    listed = examples(*([name] for name in "abcdefghijk"))
    left = left_out(listed, 3)
    assert 4 < len(left) < 11
    assert not any(is_spare for _, is_spare in left)
    mixed = examples(*zip("abcdefgh", "xxxxyyyy", strict=True))
    assert not any(is_spare for _, is_spare in left_out(mixed, 3))
    assert left_out(mixed, 1) == []


def test_this_test_is_quick(request):
    assert request.node.get_closest_marker("quick") is not None
