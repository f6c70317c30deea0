"""Memory of one iteration of convolution nets, from name and batch alone, against PyTorch's own trackers."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest

from tests.validation.oracle import net_of

with (Path(__file__).parent / "data" / "pytorch_memory_cnn.csv").open(encoding="utf-8") as file:
    ROWS = {row["case_id"]: row for row in csv.DictReader(file)}
PHASES = {"forward": "forward", "backward": "backward", "update": "optimizer"}


@cache
def trace_of(case):
    return net_of(ROWS[case])


@pytest.mark.parametrize("case", ROWS)
def test_what_is_there_from_the_start_is_exact(case, replay):
    row, start = ROWS[case], replay(trace_of(case)).start
    assert trace_of(case).meta["parameters"] == int(row["n_params"])
    assert start["weight"] == int(row["start__parameter"]) + int(row["start__buffer"])
    assert start["optimizer_state"] == int(row["start__optstate"])
    assert start["input"] == int(row["start__other"])


@pytest.mark.parametrize("case", ROWS)
def test_peak_of_every_phase_agrees(case, replay):
    row, got = ROWS[case], replay(trace_of(case))
    for phase, column in PHASES.items():
        # PyTorch holds the loss and its gradient of one until backward is over: 1 KiB
        assert got.peak_bytes(phase) == pytest.approx(int(row[f"peak_{column}__total"]), rel=1e-4, abs=1024), phase
    assert PHASES[max(PHASES, key=got.peak_bytes)] == row["peak_phase"]


@pytest.mark.parametrize("case", ROWS)
def test_activations_after_the_forward_pass_agree(case, replay):
    # under autocast 32 KB less: the copy of the logits' bias and the like
    want = int(ROWS[case]["after_forward__activation"])
    got = replay(trace_of(case)).after["forward"]["activation"]
    assert got == pytest.approx(want, rel=1e-4 if "amp" in case else 0)


@pytest.mark.parametrize("case", ROWS)
def test_flops_are_those_of_the_flop_counter(case):
    for phase in ("forward", "backward"):
        products = (o.flops for o in trace_of(case).ops if o.phase == phase and o.kind in ("conv", "matmul"))
        assert sum(products) == int(ROWS[case][f"flops_{phase}"])


@pytest.mark.parametrize("case", ROWS)
def test_all_that_is_saved_for_backward_adds_up(case):
    row, saved = ROWS[case], sum(t.bytes for t in trace_of(case).tensors if t.saved_for)
    want = int(row["saved_layers_total"]) + int(row["saved_outside_layers"])
    assert saved == pytest.approx(want, rel=1e-4 if "amp" in case else 0)
