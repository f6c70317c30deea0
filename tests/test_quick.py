"""The lanes: every package has a quick test, and the tests that each lane names are there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import LONG, ONE_IN, QUICK, SPARE

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
    named = {test for tests in QUICK.values() for test in tests} | {*LONG, *SPARE, *ONE_IN}
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


def test_this_test_is_quick(request):
    assert request.node.get_closest_marker("quick") is not None
