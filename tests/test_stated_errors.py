"""What README and the guides say of errors is what the stored measurements give, and each language says the same."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAYING = ("README.md", "README.zh.md", "docs/results.md", "docs/guide.zh.md")


def text_of(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def figures_of(name):
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def percents(text):
    return [float(found) for found in re.findall(r"(\d+(?:\.\d+)?) %", text)]


def rounded(fraction, least):
    """A fraction in per cent to the decimals with which a sentence gives it."""
    return round(100 * fraction, least)


def part(name, start, end):
    text = text_of(name)
    return text[text.index(start) : text.index(end, text.index(start))]


@pytest.fixture(scope="module")
def phases():
    """Errors of the highest point of each phase of every tracked iteration, and how many iterations these are."""
    found = figures_of("docs/validation.json")
    rows = [("memory", row["case"], row) for row in found["memory"]]
    rows += [("more", row["case"], row) for row in found["more"]]
    rows += [("images", tuple(row[key] for key in ("net", "batch", "way", "policy")), row) for row in found["images"]]
    errors = sorted(abs(row["ours"]["total"] / row["truth"]["total"] - 1) for *_, row in rows)
    return errors, len({(kind, case) for kind, case, _ in rows})


@pytest.mark.parametrize("name", SAYING)
def test_errors_of_peaks_are_those_of_the_validation(name, phases):
    errors, iterations = phases
    said = part(name, *(("PyTorch 自己的统计", "[") if "zh" in name else ("nine peaks of ten", "iterations")))
    nine_tenths, worst = percents(said)
    assert math.ceil(1e5 * errors[math.ceil(0.9 * len(errors)) - 1]) / 1e3 == nine_tenths
    assert rounded(errors[-1], 1) == worst
    assert str(iterations) in said


@pytest.mark.parametrize("name", SAYING)
def test_the_bar_of_two_policies_is_the_worst_published_pair(name):
    bar = figures_of("sim/report/error_bars.json")["policies"]
    start, end = ("相差不到", "无法区分") if "zh" in name else ("differ by less than", "pairs")
    said = part(name, start, end)
    assert percents(said) == [rounded(bar["worst"], 1)]
    assert str(bar["rows"]) in said or name == "docs/results.md"


def test_what_results_are_beside_print_is_what_was_compared():
    bars = figures_of("sim/report/error_bars.json")
    said = part("docs/results.md", "Beside ", "in nine tenths")
    assert f"Beside {bars['time']['rows']} published runs" in said
    assert f"in all of {bars['policies']['rows']} pairs" in said
    half, policies, layouts, machines = percents(said)
    assert (half, policies) == (rounded(bars["time"]["median"], 1), rounded(bars["policies"]["worst"], 1))
    assert layouts == rounded(bars["layouts"]["nine_tenths"], 0)
    assert machines == rounded(bars["machines"]["nine_tenths"], 0)
    printed = figures_of("docs/parallel.json")
    rows = [row for row in printed["megatron"] + printed["korthikanti"] if row["printed_s"]]
    median = statistics.median(abs(row["simulated_s"] / row["printed_s"] - 1) for row in rows)
    said = part("docs/results.md", "in nine tenths", "([docs/parallel")
    assert f"of {len(rows)} printed" in said
    assert percents(said) == [rounded(median, 1)]


def test_captured_models_are_those_of_the_zoo():
    rows = figures_of("docs/zoo.json")["rows"]
    words = {4: "four", 5: "five", 6: "six"}
    said = part("docs/results.md", "Of steps captured", "([docs/zoo")
    models, libraries = ({row[key] for row in rows} for key in ("model", "library"))
    assert f"from {len(models)} models of {words[len(libraries)]} libraries" in said
    assert all(row["peak"] == row["tracker"] for row in rows)
