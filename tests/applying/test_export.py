"""tiersim export: a saved run's plan as a file, with what it costs there."""

from __future__ import annotations

import ast
import json
import sys
from types import SimpleNamespace

import pytest

from sim import PolicyError, TraceBuilder, cli, export, load_profile, simulate
from workloads import transformer


@pytest.fixture
def tiersim(monkeypatch, capsys):
    """Runs the command line; returns the exit status, standard output and standard error."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["tiersim", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code, stdout=said.out, stderr=said.err)

    return run


def test_the_file_of_a_saved_run_goes_where_it_is_asked_for_and_nowhere_else(tmp_path, tiersim):
    job = ("--profile", "a100_40_pcie", "--model", "gpt2", "--batch", 1, "--seq", 64)
    assert tiersim("run", *job, "--policy", "full_recompute", "-o", tmp_path / "run").returncode == 0
    before = sorted(tmp_path.rglob("*"))
    shown = tiersim("export", tmp_path / "run", "--to", "torch")
    assert shown.returncode == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert "'transformer.h.11'" in shown.stdout
    ast.parse(shown.stdout)
    written = tiersim("export", tmp_path / "run", "--to", "torch", "--json", "-o", tmp_path / "plan.py")
    figures = json.loads(written.stdout)
    assert figures["cost"] == figures["planned"]
    assert figures["differences"] == []
    assert (tmp_path / "plan.py").read_text() == shown.stdout
    settings = tiersim("export", tmp_path / "run", "--to", "transformers", "-o", tmp_path / "arguments.json")
    assert (settings.returncode, json.loads((tmp_path / "arguments.json").read_text())["gradient_checkpointing"]) == (
        0,
        True,
    )
    assert (
        tiersim(
            "run", *job, "--policy", "layers 0-5: full_recompute; rest: keep_all", "-o", tmp_path / "six"
        ).returncode
        == 0
    )
    refused = tiersim("export", tmp_path / "six", "--to", "transformers", "-o", tmp_path / "none.json")
    assert (refused.returncode, refused.stdout, (tmp_path / "none.json").exists()) == (1, "", False)
    assert "transformers has no switch for this plan" in refused.stderr
    assert '"every_n_layers": 4' in refused.stderr
    asked = tiersim("export", tmp_path / "six", "--to", "transformers", "--nearest", "-o", tmp_path / "none.json")
    assert (asked.returncode, (tmp_path / "none.json").exists()) == (0, True)
    wrong = tiersim("export", tmp_path / "run", "--to", "pytorch")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean 'torch'" in wrong.stderr
    none = tiersim("export", tmp_path, "--to", "torch")
    assert (none.returncode, "no run here" in none.stderr) == (2, True)


@pytest.fixture(scope="module")
def small():
    return transformer("gpt2", batch=1, sequence=32)


def test_layers_may_be_anywhere_in_the_model(small):
    result = simulate(small, "a100_40_pcie", "full_recompute")
    assert "'decoder.3.block'" in export(result, "torch", layers="decoder.*.block").text
    with pytest.raises(PolicyError, match="with one '\\*' for the number"):
        export(result, "torch", layers="decoder")


def test_products_are_counted_where_the_trace_does_not_name_pytorchs_ops(small):
    found = export(simulate(small, "a100_40_pcie", "selective_recompute"), "torch")
    assert "'product': (4, " in found.text


def test_a_trace_without_layers_has_nothing_to_wrap():
    b = TraceBuilder()
    x = b.tensor("x", 8, "input")
    b.op("f", "other", reads=[x], writes=[b.tensor("y", 8, "activation")])
    with pytest.raises(PolicyError, match="no op of this trace has a layer"):
        export(simulate(b.build(), "a100_40_pcie"), "torch")


def test_names_from_a_trace_cannot_become_code():
    b = TraceBuilder({"model": 'x\n"""; import os\nos.abort()', "family": "gpt2"})
    x = b.tensor("x", 8, "input")
    w = b.tensor("w", 8, "weight")
    y = b.tensor("y", 1 << 20, "activation")
    z = b.tensor("z", 8, "activation")
    b.op("f", "matmul", reads=[x, w], writes=[y], layer=0, flops=8)
    b.op("g", "matmul", reads=[y, w], writes=[z], layer=0, flops=8)
    b.op("g.grad", "matmul", reads=[y, z], writes=[b.tensor("d", 8, "gradient")], phase="backward", layer=0, flops=8)
    result = simulate(b.build(), "a100_40_pcie", "full_recompute")
    text = export(result, "torch", layers="a'];import os#.*").text
    names = {alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"weakref", "torch"}


def test_what_is_left_out_is_said():
    trace = transformer("gpt2", batch=1, sequence=32)
    found = export(simulate(trace, load_profile("a100_40_pcie"), "swap_all"), "torch")
    assert any("activations" in line and "stay here" in line for line in found.differences)
