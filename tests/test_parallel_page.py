"""docs/parallel.md says what its data say, the data have every printed row, and short pipelines stand for long ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from scripts.parallel_page.cost import POLICIES as COSTED
from scripts.parallel_page.cost import WHAT
from scripts.parallel_page.inside import BUDGETS, LONG, MACHINES, POLICIES, SCHEDULES
from scripts.parallel_page.inside_text import PRINTED_ZERO, printed_memory
from scripts.parallel_page.measure import MODELS, Job, published
from scripts.parallel_page.memory import WAYS, held_by_layers
from scripts.parallel_page.text import page
from sim import load_policy, simulate
from sim.layout import lay_out
from workloads import transformer, with_stack

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


def test_ways_to_recompute_are_in_the_printed_order_in_every_model():
    """By time, and by the memory of the first stage."""
    ours, theirs = (
        {(row["model"], row["recompute"]): row[key] for row in ROWS["korthikanti"]}
        for key in ("simulated_s", "printed_s")
    )
    held = {(row["model"], row["way"]): (row["activations_gib"], printed_memory(row)[1]) for row in ROWS["memory"]}
    for model, *_ in published()["korthikanti"]:
        selective, full = (model, "selective_recompute"), (model, "full_recompute")
        assert ours[selective] < ours[full]
        assert theirs[selective] < theirs[full]
        here, print_ = (sorted(WAYS, key=lambda way, k=k: held[model, way][k]) for k in range(2))
        assert here == print_


def test_the_first_stage_holds_what_the_paper_counts():
    """Its closed forms, of state and of activations by layer and microbatch in flight, and the printed figures."""
    models = {name: row for name, *row in published()["korthikanti"]}
    assert [(row["model"], row["way"]) for row in ROWS["memory"]] == [(m, w) for m in models for w in WAYS]
    for row in ROWS["memory"]:
        a, h, layers, t, p, chunks, _, _, b, *_ = models[row["model"]]
        state, activations = printed_memory(row)
        assert row["state_gib"] == pytest.approx(18 * 12 * layers * h * h / (t * p) / 2**30, rel=0.001)
        assert row["state_gib"] == pytest.approx(state, rel=0.001)
        in_flight = 1 + (p - 1) / (p * chunks) if chunks > 1 else 1
        counted = layers * in_flight * 2048 * b * h * per_layer(row["way"], a, h, t) / 2**30
        assert row["activations_gib"] == pytest.approx(counted, rel=0.01)
        assert row["activations_gib"] == pytest.approx(activations, rel=0.05)


def per_layer(way, heads, width, tp):
    """Bytes of a layer's activations over s b h: table 2 of the paper, s = 2,048."""
    scores = 5 * heads * 2048 / (width * tp)
    return {
        "none": 10 + 24 / tp + scores, "seq": 34 / tp + scores, "sel": 10 + 24 / tp, "seqsel": 34 / tp, "full": 2,
    }[way]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_small_pipeline_holds_what_the_paper_counts_now(way):
    """Four stages of a layer each under 1F1B, tensor parallelism among two; one output is on its way to the next."""
    policy, parameters, by_tokens = WAYS[way]
    config = {
        "model_type": "gpt2", "n_layer": 4, "n_embd": 512, "n_head": 8, "n_positions": 2048, "vocab_size": 512,
        "activation_function": "gelu",
    }  # fmt: skip
    base = transformer(
        config, batch=4, sequence=2048, precision="megatron_bf16", attention="eager", loss="vocab_parallel",
        optimizer="adamw_fused",
    )  # fmt: skip
    layout = {"tp": 2, "pp": 4, "micro_batches": 4, "sequence_parallel": by_tokens, "gradient_buffer": True}
    trace, platform = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack="fused"))
    state, saved = held_by_layers(simulate(trace, platform, load_policy(policy, **parameters)).log)
    assert state == pytest.approx(18 * 12 * 512**2 / 2, rel=0.01)
    counted = 4 * 2048 * 512 * per_layer(way, 8, 512, 2)
    assert counted <= saved <= 1.005 * counted + 2 * 2048 * 512


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


def test_an_op_of_a_large_layout_costs_less_than_twice_one_of_a_single_device():
    """Replayed, beside one stage, which has the same kinds of ops; in all, beside a device without collectives."""
    found = {(row["what"], row["policy"]): row for row in ROWS["cost"]}
    assert found.keys() == {(what, policy) for what in WHAT for policy in COSTED}
    plain, stage, whole = WHAT
    for policy in COSTED:
        assert found[whole, policy]["replay_us"] < 2 * found[stage, policy]["replay_us"]
        one, all_of_it = (
            sum(found[what, policy][key] for key in ("build_us", "plan_us", "replay_us")) for what in (plain, whole)
        )
        assert all_of_it < 2 * one


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
