"""The faults by hand of the mutation check are faults of the code as it stands."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = tomllib.loads((ROOT / "tests/mutation/by_hand.toml").read_text(encoding="utf-8"))["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_fault_by_hand_is_at_one_place_and_changes_a_program_that_still_compiles(mutant) -> None:
    text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    assert text.count(mutant["before"]) == 1
    faulty = text.replace(mutant["before"], mutant["after"])
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text))
