"""The page on mt3000_layered: its tables are what the policy does, and its sentences follow from them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tool() -> ModuleType:
    return importlib.import_module("scripts.make_layered")


def test_rows_of_the_page_are_what_the_policy_does():
    layered = tool()
    text = layered.PAGE.read_text(encoding="utf-8")
    rows = [row for row in layered.ROWS if row[0] in ("all", "all but streams", "streams alone", "mode `tso`")]
    fast = layered.measured(rows)
    for line in layered.parts_table(fast, fast).splitlines()[2:]:
        shown = line.rsplit("|", 2)[0]  # the last column is of the slow link
        assert f"\n{shown}|" in text, "run python scripts/make_layered.py"


@pytest.mark.slow
def test_the_page_is_current_and_its_sentences_hold():
    layered = tool()
    text = layered.PAGE.read_text(encoding="utf-8")
    fast, slow = layered.measured(layered.ROWS), layered.measured(layered.ROWS, layered.SLOW_LINK)
    table = layered.parts_table(fast, slow)
    assert layered.replaced(text, table, "parts") == text, "run python scripts/make_layered.py"
    assert layered.replaced(text, layered.large_table(), "large") == text, "run python scripts/make_layered.py"
    quick, late = dict(fast), dict(slow)

    def points(rows, part):
        return 100 * (rows[part]["overhead"] - rows["all"]["overhead"])

    assert points(quick, "all but tiering") > 60
    assert round(points(quick, "all but streams")) == 15
    assert round(points(quick, "all but mode `delta`")) == 10
    assert round(points(quick, "all but release")) == -1
    assert round(points(late, "all but release")) == 12
    assert abs(points(quick, "all but checkpoints")) < 1
    assert round(points(late, "all, and the codec")) == 2
    assert min((row["makespan_ns"], name) for name, row in late.items() if row)[1] == "mode `tso`"
    assert quick["mode `tso`"]["moved_bytes"] == {"d2h": 0, "h2d": 0}
