"""`tiersim validate` on this machine's CPU: a real step beside the simulated one."""

from __future__ import annotations

import importlib.util

import pytest

from sim.errors import TiersimError, WorkloadError
from sim.measure import validate as module
from sim.measure.validate import HEADER, POLICIES, Row, as_table, validate

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install 'tiersim[torch]'"
)


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def rows(request):
    import torch

    torch.set_num_threads(1)  # others may use the machine: threads that wait for each other take minutes
    return validate(attention=request.param, batch=4, sequence=128, device="cpu", repeats=2)


@needs_torch
def test_simulated_memory_is_what_the_real_step_took(rows):
    found = {row.policy: row for row in rows}
    assert list(found) == list(POLICIES)
    for policy in ("none", "checkpoint", "selective checkpoint"):
        assert abs(found[policy].memory_error) <= 0.02, policy
    assert found["checkpoint"].measured_bytes < 0.7 * found["none"].measured_bytes


@needs_torch
def test_a_llama_with_grouped_queries_takes_the_memory_that_is_simulated():
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "vocab_size": 500,
        "tie_word_embeddings": True,
    }
    policies = ("none", "checkpoint", "selective checkpoint")
    for row in validate(config, attention="eager", sequence=96, device="cpu", repeats=1, policies=policies):
        assert abs(row.memory_error) <= 0.02, row.policy


@needs_torch
def test_times_are_of_this_machine_and_the_plain_one_is_given(rows):
    found = {row.policy: row for row in rows}
    assert abs(found["none"].time_error) < 1e-3
    assert "op times are the measured ones" in found["none"].note
    # the machine may be busy with other work: no tighter than a factor
    assert all(1 / 5 < row.simulated_ns / row.measured_ns < 5 for row in rows if row.measured_ns)
    assert found["checkpoint"].simulated_ns > found["none"].simulated_ns


@needs_torch
def test_what_means_nothing_on_a_cpu_is_said_not_measured(rows):
    (row,) = [row for row in rows if row.policy == "save_on_cpu"]
    assert row.measured_bytes is row.simulated_bytes is row.memory_error is row.time_error is None
    assert "host is the device" in row.note


@needs_torch
def test_a_ledger_counts_each_storage_once_and_until_it_goes():
    import torch

    from sim.measure.storages import StorageTracker

    storages = StorageTracker("cpu")
    kept = torch.zeros(1000)
    storages.hold([kept, kept.view(10, 100)])
    assert storages.live == 4000
    with storages:
        made = kept + 1  # 4000 more
        view = made.view(10, 100)
        del made
        assert storages.live == 8000
        del view
        assert storages.live == 4000
        sum_ = kept.sum()
    assert storages.peak == 8000
    assert float(sum_) == 0


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "bert-base"}, "neither a GPT-2 nor a Llama"),
        ({"policies": ("nome",)}, "did you mean 'none'"),
        ({"device": "cuda:x"}, "neither"),
        ({"precision": "fp8"}, "fp8"),
        ({"attention": "flash"}, "flash"),
        ({"device": "tpu"}, "tpu"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_what_cannot_be_validated_is_refused(arguments, words):
    with pytest.raises((WorkloadError, TiersimError), match=words):
        validate(**arguments)


def test_without_pytorch_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("sim.measure.find_spec", lambda name: None)
    with pytest.raises(TiersimError, match=r"tiersim validate .* pip install 'tiersim\[torch\]'"):
        validate()


def test_table_shows_errors_and_leaves_gaps():
    rows = [Row("none", "keep_all", 2**20, 2**20, 10**6, 1_100_000), Row("x", "y", None, None, None, None, "why")]
    first, second = as_table(rows)
    assert first == ("none", "1.00", "1.00", "+0.00%", "1.00", "1.10", "+10.0%", "")
    assert second == ("x", "–", "–", "–", "–", "–", "–", "why")
    assert len(HEADER) == len(first)
    assert set(module.POLICIES) == {"none", "checkpoint", "selective checkpoint", "save_on_cpu"}
