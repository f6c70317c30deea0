"""An option is declared once, and names come from the registries: what is registered is known everywhere."""

import inspect
import json

import pytest

from sim.cli import app, parser
from sim.commands import runs, traces
from sim.commands.declaring import REGISTRIES, defaults, filled
from sim.commands.options import AXES, JSON, OUT
from sim.errors import TiersimError, WorkloadError
from sim.sweeps.study import load_study
from tests.test_cli import tiersim
from workloads import transformer
from workloads.losses import LOSSES
from workloads.optimizers import OPTIMIZERS, Step
from workloads.precision import PRECISIONS
from workloads.steps import training_step
from workloads.transformer import ATTENTIONS, CHOICES

SMALL = ("--model", "gpt2", "--batch", "1", "--seq", "16", "--optimizer")


@pytest.fixture
def lion(monkeypatch):
    """An optimizer that a single entry of the registry makes known: one state, in place."""
    monkeypatch.setitem(OPTIMIZERS, "lion_test", (Step.sgd, ("m",)))
    parser.cache_clear()
    yield
    parser.cache_clear()


@pytest.mark.parametrize("command", [("run",), ("compare",), ("trace", "build")])
def test_a_new_optimizer_is_in_the_help(command, lion, capsys):
    assert "lion_test" in " ".join(tiersim(*command, "--help", capsys=capsys)[1].split())


def test_a_new_optimizer_is_taken_and_the_nearest_name_of_a_mistake(lion, capsys):
    code, out, _ = tiersim("run", "--profile", "a100_40_pcie", *SMALL, "lion_test", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["fits"]
    code, _, err = tiersim("run", "--profile", "a100_40_pcie", *SMALL, "lion_tset", capsys=capsys)
    assert (code, err) == (2, "tiersim: optimizer 'lion_tset' is unknown (did you mean 'lion_test'?)\n")
    with pytest.raises(WorkloadError, match="did you mean 'lion_test'"):
        transformer("gpt2", batch=1, sequence=16, optimizer="lion-test")


def test_a_new_optimizer_is_an_axis_of_studies(lion):
    study = {"model": "gpt2", "sequence": 16, "profile": "a100_40_pcie", "policy": "keep_all"}
    cells = load_study({**study, "optimizer": ["sgd", "lion_test"]}).cells()
    assert [cell.labels["optimizer"] for cell in cells] == ["sgd", "lion_test"]
    with pytest.raises(TiersimError, match=r", lion_test \(did you mean 'lion_test'"):
        load_study({**study, "optimizer": "lion_tst"})


def test_the_choices_are_the_registries_themselves():
    assert CHOICES["optimizer"] is OPTIMIZERS
    assert CHOICES["precision"] is PRECISIONS
    assert (CHOICES["loss"], CHOICES["attention"]) == (LOSSES, ATTENTIONS)
    for axis, registry in CHOICES.items():
        assert filled(f"{{{axis}}}") == ", ".join(registry) == ", ".join(REGISTRIES[axis]())


def commands():
    for name, group in (("", app), *((g.name, g.typer_instance) for g in app.registered_groups)):
        yield from ((f"{name} {c.name or c.callback.__name__}".strip(), c) for c in group.registered_commands)


def test_options_of_one_name_say_the_same_in_every_command():
    """`out`, `policy` and what `validate` calls precision are other things; all else is declared once."""
    said, alike = {}, 0
    for command, registered in commands():
        for name, option in inspect.signature(registered.callback, eval_str=True).parameters.items():
            if name in ("ctx", "out", "cell", "policy", "precision", "device", "path", "name", "profile"):
                continue
            if (command, name) in (("search", "devices"), ("search", "policies"), ("advise", "devices")):
                continue  # it lays out what the others are told
            if (command, name) == ("results query", "time_limit"):
                continue  # of the clock, for SQL; the others limit policies
            (first, where) = said.setdefault(name, (option.annotation, command))
            help_ = [getattr(a.__metadata__[0], "help", None) for a in (first, option.annotation)]
            assert help_[0] == help_[1], f"--{name}: {where} and {command} differ"
            alike += where != command
    assert alike > 30


def test_run_compare_and_trace_build_take_the_same_axes():
    for command in (runs.run, runs.compare, traces.build):
        taken = inspect.signature(command).parameters
        for axis in AXES:
            assert (taken[axis.name].annotation, taken[axis.name].default) == (axis.type, axis.default)


def test_the_axes_are_arguments_of_the_transformer_and_axes_of_studies():
    from sim.commands.options import WORDS
    from sim.sweeps.schema import StudyFile

    for axis in AXES:
        name = WORDS.get(axis.name, axis.name)
        known = {**inspect.signature(transformer).parameters, **inspect.signature(training_step).parameters}
        assert name in known
        default = StudyFile.model_fields[name].default
        assert (default if default is None else default[0]) == axis.default, name


def test_the_demo_takes_every_option_that_it_does_not_set_as_compare_does(monkeypatch):
    seen = {}
    monkeypatch.setattr(runs, "_compare", lambda options, command: seen.update(options))
    runs.demo(out="x", json=True)
    assert seen == {**defaults(runs.COMPARED), **runs.DEMO, OUT.name: "x", JSON.name: True}


def test_no_help_is_left_unfilled(capsys):
    for command, _ in commands():
        _, out, _ = tiersim(*command.split(), "--help", capsys=capsys)
        assert not [name for name in REGISTRIES if f"{{{name}}}" in out], command
