"""The quick lane: every package has a test in it, and the tests that it names are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import QUICK

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for top in ("sim", "workloads")
    for path in (ROOT / top / "__init__.py", *(ROOT / top).glob("*/__init__.py"))
)


def test_every_package_has_a_quick_test():
    assert sorted(QUICK) == PACKAGES


@pytest.mark.parametrize("test", sorted({test for tests in QUICK.values() for test in tests}))
def test_a_quick_test_is_there(test):
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert any(each.startswith(name or "test_") for each in tests)


def test_this_test_is_quick(request):
    assert request.node.get_closest_marker("quick") is not None
