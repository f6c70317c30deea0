"""A function that describes a step is a model: it is captured at the sizes asked for."""

from __future__ import annotations

import json
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from sim import cli, load_profile  # noqa: E402
from sim.analysis.peak_memory import home_peak  # noqa: E402
from sim.errors import WorkloadError  # noqa: E402
from sim.experiment import reference_run  # noqa: E402
from workloads import training_step  # noqa: E402
from workloads.steps import config_identity, is_reference  # noqa: E402

SOURCE = """
import torch
from torch import nn


def step(batch=4, sequence=6):
    return {
        "module": lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)),
        "inputs": torch.empty(batch, sequence, dtype=torch.int64, device="meta"),
        "loss": lambda result: result.square().mean(),
    }


def fixed():
    return step()
"""
LOGITS = 50 * 4  # bytes per token: the largest activation


@pytest.fixture
def reference(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(SOURCE))
    return f"{tmp_path / 'mine.py'}:step"


def largest(trace):
    return max(t.bytes for t in trace.tensors if t.role == "activation")


def test_the_step_is_a_function_of_its_sizes(reference):
    for sizes, tokens in (({}, 24), ({"batch": 2}, 12), ({"batch": 3, "sequence": 7}, 21)):
        trace = training_step(reference, **sizes)
        assert largest(trace) == tokens * LOGITS
        assert trace.meta["samples"] == sizes.get("batch", 4)  # the function's own, where nobody says another
        assert trace.meta["tokens"] == tokens


def test_sizes_have_the_names_that_scripts_give_them(reference, tmp_path):
    for batch, sequence in (("batch_size", "seq_len"), ("bs", "block_size"), ("batch", "max_length")):
        source = textwrap.dedent(SOURCE).replace("batch", batch).replace("sequence", sequence)
        (tmp_path / "other.py").write_text(source)
        trace = training_step(f"{tmp_path / 'other.py'}:step", batch=3, sequence=7)
        assert largest(trace) == 21 * LOGITS
        assert trace.meta["tokens"] == 21


def test_a_size_that_the_function_does_not_take_is_named(reference):
    with pytest.raises(WorkloadError, match=r"batch: .* \(or batch_size, bs\), and it takes none"):
        training_step(reference.replace(":step", ":fixed"), batch=2)
    with pytest.raises(WorkloadError, match=r"precision: .* it takes batch, sequence"):
        training_step(reference, precision="bf16")
    with pytest.raises(WorkloadError, match="tiersim trace capture"):
        config_identity(reference)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a.py:f", True),
        ("pack.age:f", True),
        ("gpt2", False),
        ("C:/models/config.json", False),
        ("a:b:c", False),
        (":f", False),
        ({"model_type": "gpt2"}, False),
    ],
)
def test_a_reference_is_told_from_a_name_or_a_file(name, is_one):
    assert is_reference(name) == is_one


def test_the_largest_batch_of_a_step(reference, capsys, monkeypatch):
    job = ["--profile", "a100_40_pcie", "--model", reference, "--budget", "40 kB", "--json"]
    monkeypatch.setattr("sys.argv", ["tiersim", "largest-batch", *job])
    with pytest.raises(SystemExit) as end:
        cli.main()
    batch = json.loads(capsys.readouterr().out)["batch"]
    platform = load_profile("a100_40_pcie")
    peaks = [home_peak(reference_run(training_step(reference, batch=b), platform)) for b in (batch, batch + 1)]
    assert end.value.code == 0
    assert peaks[0] <= 40_000 < peaks[1]


def test_advice_chooses_the_batch_of_a_step(reference, capsys, monkeypatch):
    job = ["--profile", "a100_40_pcie", "--budget", "40 kB", "--policies", "keep_all", "--json"]
    found = {}
    for command in (["advise", "--goal", "batch", "--seconds", "60"], ["largest-batch"]):
        monkeypatch.setattr("sys.argv", ["tiersim", *command, "--model", reference, *job])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0
        found[command[0]] = json.loads(capsys.readouterr().out)
    assert found["advise"]["best"]["batch"] == found["largest-batch"]["batch"] > 1
    assert found["advise"]["best"]["samples_per_s"] == pytest.approx(found["largest-batch"]["samples_per_s"])
