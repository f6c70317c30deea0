"""docs/parallel.md says what its data say, the data have every printed row, and short pipelines stand for long ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.parallel_page.inside import BUDGETS, LONG, MACHINES, POLICIES, SCHEDULES
from scripts.parallel_page.inside_text import PRINTED_ZERO
from scripts.parallel_page.measure import MODELS, Job, published
from scripts.parallel_page.text import page

DOCS = Path(__file__).parents[1] / "docs"
ROWS = json.loads((DOCS / "parallel.json").read_text(encoding="utf-8"))


def test_the_page_is_made_from_its_data():
    assert (DOCS / "parallel.md").read_text(encoding="utf-8") == page(ROWS)


def test_every_printed_iteration_has_its_row_and_its_figure():
    four = {row[0]: row[-2:] for row in published()["korthikanti"]}
    found = {(row["model"], row["recompute"]): row["printed_s"] for row in ROWS["korthikanti"]}
    for name, (full, selective) in four.items():
        assert (found[name, "full_recompute"], found[name, "selective_recompute"]) == (full, selective)
    assert [row["model"] for row in ROWS["megatron"]] == [row[0] for row in published()["megatron"]]
    # by the formula that is printed with the table, for its last row: 1,008 billion parameters
    work = 96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
    assert ROWS["megatron"][-1]["printed_s"] == pytest.approx(work / (3072 * 163e12), abs=0.01)


def test_recomputing_less_is_faster_where_printed():
    times = {(row["model"], row["recompute"]): row["simulated_s"] for row in ROWS["korthikanti"]}
    for model, *_ in published()["korthikanti"]:
        assert times[model, "selective_recompute"] < times[model, "full_recompute"]


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches", "policy"),
    [
        (8, 1, 16, "selective_recompute"),
        pytest.param(6, 1, 24, "full_recompute", marks=pytest.mark.slow),
        pytest.param(4, 2, 16, "full_recompute", marks=pytest.mark.slow),
    ],
)
def test_few_stages_and_microbatches_stand_for_many(stages, chunks, microbatches, policy):
    sequence_parallel = policy == "selective_recompute"
    job = Job(8, 2048, 1, 2, stages, chunks, 1, microbatches, 1, sequence_parallel, policy)
    whole, extended = job.run(), job.extended()
    assert extended[0] == pytest.approx(whole[0], rel=0.01)
    assert extended[1] == pytest.approx(whole[1], rel=0.01)


def test_every_cell_inside_was_measured():
    assert [row["schedule"] for row in ROWS["experts"]] == list(SCHEDULES)
    assert {row["profile"] for row in ROWS["machines"]} == {*MACHINES}
    assert len(ROWS["machines"]) == len(MACHINES) * (len(MODELS) + 1)
    assert [(row["schedule"], row["policy"]) for row in ROWS["policies"]] == [(s, p) for s in BUDGETS for p in POLICIES]
    ways = [(tokens, ring) for _ in range(2) for tokens in LONG for ring in (False, True)]
    assert [(row["tokens"], row["ring_attention"]) for row in ROWS["context"]] == ways


def test_zeros_table_is_reproduced():
    """By its formula, 2 P, 2 P and 12 P bytes, and as printed, to its digits."""
    for row in ROWS["zero"]:
        d = row["replicas"]
        wanted = [16, 4 + 12 / d, 2 + 14 / d, 16 / d]
        found = [row[f"level_{level}"] for level in range(4)]
        assert found == pytest.approx([7.5 * each for each in wanted], abs=0.002)
        assert found[1:] == pytest.approx(PRINTED_ZERO[d], abs=0.06)


def test_blocks_expose_less_than_gathers_wherever_they_were_measured():
    found = {(row["profile"], row["tokens"], row["ring_attention"]): row for row in ROWS["context"]}
    for (profile, tokens, ring), row in found.items():
        if ring:
            assert row["seconds"] < found[profile, tokens, False]["seconds"]
            assert row["peak_gib"][0] <= found[profile, tokens, False]["peak_gib"][0]
