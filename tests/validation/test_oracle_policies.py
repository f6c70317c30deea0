"""Memory under checkpointing and offload, replayed by the engine, against PyTorch running the same.

The trace is built from the configuration alone; the policy decides; the engine replays; the log is read.
PyTorch's figures are those of `torch.utils.checkpoint` (non-reentrant, round every layer), of its selective
contexts, and of `save_on_cpu`. Sizes are rounded up to 512 bytes per tensor on both sides.
"""

from __future__ import annotations

import json
import statistics

import pytest

from tests.validation import oracle

CASES = {case: row for case, row in oracle.rows().items() if row["policy"] != "none"}
RERUN = [case for case, row in CASES.items() if row["policy"] != "save_on_cpu"]
OFFLOAD = [case for case, row in CASES.items() if row["policy"] == "save_on_cpu"]
HOST_PEAK = {
    # bytes that PyTorch held on the host at most, the step counters of the optimizer among them
    "gpt2-small_eager_b4_s1024_d0.1_amp_bf16_save_on_cpu_adamw_foreach": 9391202388,
    "gpt2-small_eager_b4_s1024_d0.1_fp32_save_on_cpu_adamw_foreach": 11909482068,
    "gpt2-small_sdpa_b4_s1024_d0.1_amp_bf16_save_on_cpu_adamw_foreach": 5241201012,
    "gpt2-small_sdpa_b4_s1024_d0.1_fp32_save_on_cpu_adamw_foreach": 6627018516,
    "llama-1b_sdpa_b2_s2048_d0.0_bf16_save_on_cpu_adamw_foreach": 16062321612,
}


def wanted(case, phase, category="total"):
    column = f"peak_{oracle.PHASE_COLUMNS[phase]}__"
    if category == "rest":
        return sum(int(CASES[case][column + key]) for key in ("gradient", "temp", "optstate"))
    return int(CASES[case][column + category])


@pytest.mark.parametrize("case", CASES)
def test_peak_of_every_phase_agrees(case):
    got = oracle.simulated(case)
    for phase in oracle.PHASE_COLUMNS:
        assert got.total(phase) == pytest.approx(wanted(case, phase), rel=0.006), phase
    peak = max(map(got.total, oracle.PHASE_COLUMNS))
    assert peak == pytest.approx(int(CASES[case]["peak_total"]), rel=1e-4)
    highest = max(oracle.PHASE_COLUMNS, key=got.total)
    assert oracle.PHASE_COLUMNS[highest] == CASES[case]["peak_phase"]


@pytest.mark.parametrize("case", RERUN)
def test_peak_of_every_phase_agrees_by_category(case):
    got = oracle.simulated(case)
    for phase in oracle.PHASE_COLUMNS:
        assert got.category(phase, "parameter") == wanted(case, phase, "parameter")
        if got.total(phase) != pytest.approx(wanted(case, phase), rel=1e-4):
            continue  # the highest point is another moment there, with other tensors alive
        for category in ("activation", "rest"):
            # of two moments equally high either may be the first: they differ by one tensor's category
            assert got.category(phase, category) == pytest.approx(wanted(case, phase, category), rel=1e-3, abs=2**25)


@pytest.mark.parametrize("case", OFFLOAD)
def test_host_holds_what_pytorch_copied_there(case):
    row = CASES[case]
    # the loss saves its log-probabilities twice, in fp32, and no kernel reads the second: not copied here
    second = int(row["batch"]) * int(row["seq"]) * json.loads(row["config_json"])["vocab_size"] * 4
    # what else differs are step counters, and the biases of norms
    assert oracle.simulated(case).host + second == pytest.approx(HOST_PEAK[case], rel=2e-5)


def test_error_of_the_peak_is_within_the_goal():
    errors = [
        abs(oracle.simulated(case).total(phase) / wanted(case, phase) - 1)
        for case in CASES
        for phase in oracle.PHASE_COLUMNS
    ]
    assert statistics.median(errors) <= 1e-4
    assert max(errors) <= 0.04


@pytest.mark.parametrize("case", RERUN)
def test_checkpointing_is_what_brings_the_peak_down(case):
    """The figures would not agree by accident: keeping all takes more than PyTorch's checkpointing did."""
    row = CASES[case]
    activations = wanted(case, "backward", "activation")
    plain = oracle.keep_all_activations(row)
    assert plain > 1.2 * activations
