"""What CONTRIBUTING.md asks of each policy besides the law: a test of its own, and a docstring that says it all."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from sim.policies import FAMILIES, family, names, policy_class

TESTS = Path(__file__).parent
OURS = [name for name in names() if family(name) in FAMILIES]


@pytest.mark.parametrize("name", OURS)
def test_a_policy_has_a_test_of_its_own_in_its_family(name):
    there = [path for path in (TESTS / family(name)).glob(f"test_{name}.py") if "def test_" in path.read_text("utf-8")]
    assert there, f"write what {name} claims into tests/policies/{family(name)}/test_{name}.py"


def test_a_test_of_a_policy_lies_in_the_folder_of_its_family():
    for path in TESTS.glob("*/test_*.py"):
        name = path.stem.removeprefix("test_")
        if name in OURS:
            assert path.parent.name == family(name), f"{path.name} belongs into tests/policies/{family(name)}/"


@pytest.mark.parametrize("name", OURS)
def test_a_docstring_says_where_a_policy_is_from_and_what_bounds_it(name):
    text = inspect.getdoc(policy_class(name)) or ""
    missing = [label for label in ("Source", "Bounds", "Departs") if not re.search(rf"\b{label}( \(.*\))?[:.] ", text)]
    assert not missing, f"the docstring of {name} lacks {', '.join(missing)}"
    assert "`tiersim policies --new`" not in text, f"the docstring of {name} is still that of what it was started from"


@pytest.mark.parametrize("name", OURS)
def test_a_docstring_says_what_each_parameter_is(name):
    policy = policy_class(name)
    # what a base says of a parameter holds for the policy, too
    text = "\n".join(inspect.cleandoc(base.__doc__ or "") for base in policy.__mro__)
    said = {word for line in re.findall(r"^([\w, ]+):(?:\s|$)", text, re.MULTILINE) for word in line.split(", ")}
    missing = [field.name for field in dataclasses.fields(policy) if field.name not in said]
    assert not missing, f"the docstring of {name} does not say what these are: {', '.join(missing)}"
