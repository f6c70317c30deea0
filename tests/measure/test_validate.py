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


SHORT = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 50}


@needs_torch
def test_no_more_tokens_are_run_than_the_model_has_positions():
    with pytest.raises(WorkloadError, match="sequence: 33 is longer than the 32 positions of"):
        validate(SHORT, sequence=33, device="cpu")
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Job, "rows", lambda job, *rest: made.append(job) or [])
        validate(SHORT, device="cpu")
        validate(SHORT, sequence=8, device="cpu")
        validate({**SHORT, "n_positions": 512}, device="cpu")
    assert [(job.sequence, job.config["n_positions"]) for job in made] == [(32, 32), (8, 32), (128, 512)]


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
def test_forward_and_backward_have_peaks_of_their_own(rows):
    for row in rows:
        if row.measured_phases is not None:
            assert set(row.measured_phases) == set(row.simulated_phases) == {"forward", "backward", "update"}
            assert max(row.measured_phases.values()) == row.measured_bytes
            assert all(abs(row.phase_error(phase)) <= 0.02 for phase in row.measured_phases), row.policy
    plain, checkpointed = rows[:2]
    assert checkpointed.measured_phases["forward"] < plain.measured_phases["forward"]


# ---- models that are captured --------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
model = nn.Sequential(*blocks).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step({parameters}):
    loss = model(torch.randn({batch}, 32, device="cuda")).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
"""
TRACKED = ("none", "checkpoint", "selective checkpoint")
MEGATRON = {
    "model_type": "megatron", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
    "max_position_embeddings": 128, "vocab_size": 128,
}  # fmt: skip


@pytest.fixture
def script(tmp_path):
    def write(parameters, batch):
        (tmp_path / "train.py").write_text(SCRIPT.format(parameters=parameters, batch=batch), encoding="utf-8")
        return f"{tmp_path / 'train.py'}:step"

    return write


@needs_torch
def test_a_script_has_the_peaks_of_pytorchs_tracker_in_each_phase(script):
    rows = validate(script("batch=8", "batch"), batch=700, policies=TRACKED)
    assert rows[0].measured_phases == rows[0].simulated_phases
    for row in rows:
        # an op that recomputes reads all that it saved at once: the gradient of a bias comes after it, not before
        assert row.simulated_phases == pytest.approx(row.measured_phases, rel=2e-4), row.policy
        assert row.measured_ns is None
    assert len({row.measured_bytes for row in rows}) == 3
    assert [row.note for row in rows] == ["", *["under the checkpoints of torch"] * 2]


@needs_torch
def test_a_model_that_the_step_calls_several_times_is_tracked(tmp_path):
    """Two judgements of a discriminator, or micro-batches: PyTorch's tracker alone refuses the second call."""
    lines = SCRIPT.format(parameters="batch=8", batch="batch").replace(
        "    loss = ", "    for _ in range(2):\n        loss = "
    )
    script = tmp_path / "train.py"
    script.write_text(lines.replace("    loss.backward()", "        loss.backward()"), encoding="utf-8")
    rows = validate(f"{script}:step", batch=700, policies=("none", "checkpoint"))
    for row in rows:
        assert row.simulated_phases == pytest.approx(row.measured_phases, rel=2e-4), row.policy
    assert rows[0].measured_bytes > 1.5 * rows[1].measured_bytes


@needs_torch
def test_a_batch_is_chosen_at_which_the_peaks_differ(script):
    said = []
    rows = validate(script("batch=8", "batch"), policies=("none", "checkpoint"), progress=said.append)
    none, checkpointed = rows
    assert none.batch == checkpointed.batch > module.BATCHES[0]
    assert none.measured_bytes > (1 + module.APART) * checkpointed.measured_bytes
    before = module.BATCHES[module.BATCHES.index(none.batch) - 1]
    smaller = validate(script("batch=8", "batch"), batch=before, policies=("none", "checkpoint"))
    assert smaller[0].measured_bytes <= (1 + module.APART) * smaller[1].measured_bytes


@needs_torch
def test_a_function_without_a_batch_has_its_own(script):
    (row,) = validate(script("", "512"), policies=("none",))
    assert row.batch is None
    assert row.measured_phases == row.simulated_phases


@needs_torch
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_config_of_another_family_is_tracked_under_its_librarys_checkpoints():
    config = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 1, "vocab_size": 100, "num_hidden_layers": 3,
    }  # fmt: skip
    none, checkpointed, offloaded = validate(
        config, batch=8, sequence=64, policies=("none", "checkpoint", "save_on_cpu")
    )
    assert none.measured_phases == none.simulated_phases
    real, ours = checkpointed.measured_phases, checkpointed.simulated_phases
    assert (
        0 <= real["backward"] - ours["backward"] <= 8 * 64
    )  # the checkpoints hold the tokens' positions, 8 bytes each
    assert (
        ours["forward"] <= real["forward"]
    )  # what attention holds until it returns is known only where nothing is saved
    assert "Qwen3ForCausalLM" in checkpointed.note
    assert none.measured_bytes > 1.01 * checkpointed.measured_bytes
    assert offloaded.measured_bytes is None


@needs_torch
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_family_that_is_built_in_is_compared_with_the_librarys_step():
    """Its trace names no modules of the library's; where the layers are in them the family says."""
    config = {
        "model_type": "nemotron", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 900, "max_position_embeddings": 64,
    }  # fmt: skip
    for row in validate(config, sequence=32, batch=4, policies=TRACKED):
        assert row.simulated_phases == pytest.approx(row.measured_phases, rel=5e-4), row.policy


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
        ({"model": "train.py:step", "device": "cpu"}, "a captured model runs on none"),
        ({"model": "train.py:step", "precision": "bf16"}, "precision: .* is a function"),
        ({"policies": ("nome",)}, "did you mean 'none'"),
        ({"device": "cuda:x"}, "neither"),
        ({"precision": "fp8"}, "fp8"),
        ({"attention": "flash"}, "flash"),
        ({"device": "tpu"}, "tpu"),
        ({"repeats": 0}, "repeats must be at least 1, not 0; nearest: 1"),
        ({"model": MEGATRON}, "'megatron' is built in, and transformers has no such models"),
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
    phases = ("–",) * 6
    assert first == ("none", *phases, "1.00", "1.00", "+0.00%", "1.00", "1.10", "+10.0%", "")
    assert second == ("x", *phases, *("–",) * 6, "why")
    assert len(HEADER) == len(first)
    assert set(module.POLICIES) == {"none", "checkpoint", "selective checkpoint", "save_on_cpu"}
