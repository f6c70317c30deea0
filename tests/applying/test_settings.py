"""What frameworks with switches are told: each plan finds its setting, whoever made it, and the others are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache

import pytest

from sim import Drop, Plan, Policy, Recompute, export, load_policy, simulate
from sim.applying.meaning import meaning_of
from sim.applying.settings import FRAMEWORKS
from sim.applying.told import disagreement, shares
from sim.errors import Infeasible, PolicyError
from sim.experiment import unlimited
from sim.hardware.profile import load_profile
from workloads import transformer

CONFIG = {
    "model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 128, "vocab_size": 512,
    "activation_function": "gelu_new",
}  # fmt: skip


@cache
def trace_of(attention="sdpa"):
    return transformer(CONFIG, batch=8, sequence=128, precision="amp_bf16", attention=attention)


@dataclass(frozen=True, kw_only=True)
class FirstTwo(Policy):
    """Recomputes the first two layers, written out op by op."""

    recomputes = True

    def plan(self, problem):
        trace, actions = problem.trace, []
        for layer in (0, 1):
            ops = [op for op in trace.ops if op.layer == layer and op.phase == "forward"]
            own = {op.id for op in ops}
            first = min(op.id for op in trace.ops if op.phase == "backward" and op.layer == layer)
            for op in ops:
                for t in op.writes:
                    early = [r for r in trace.readers(t) if trace.ops[r].phase == "forward"]
                    if own.issuperset(early):
                        actions.append(Drop(t, after=max(early, default=op.id)))
            actions += [Recompute(op.id, before=first) for op in ops]
        return Plan(trace, tuple(actions))


UNIFORM = "--recompute-granularity full\n--recompute-num-layers {}\n--recompute-method uniform\n"
BLOCK = UNIFORM.replace("uniform", "block")
CORE = "--recompute-granularity selective\n--recompute-modules core_attn\n"
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
FOUND = [
    ("full_recompute", "transformers", CHECKPOINTED),
    ("full_recompute", "megatron", UNIFORM.format(1)),
    ("full_recompute", "mindspeed", UNIFORM.format(1)),
    ("every_k(k=2)", "megatron", UNIFORM.format(2)),
    (FirstTwo(), "megatron", BLOCK.format(2)),
    ("layers 0-2: full_recompute; rest: keep_all", "mindspeed", BLOCK.format(3)),
    ("selective_recompute(recompute=attention_core)", "megatron", CORE),
    ("swap_attention", "mindspeed", "--swap-attention\n"),
    ("zero_offload", "deepspeed", OFFLOADED),
]


def text_of(options):
    return options if isinstance(options, str) else json.dumps(options, indent=2) + "\n"


@pytest.mark.parametrize(("policy", "to", "options"), FOUND)
def test_a_plan_finds_its_setting(policy, to, options):
    trace = trace_of("eager" if "attention_core" in str(policy) else "sdpa")
    found = export(simulate(trace, "a100_40_pcie", policy), to)
    assert found.told
    assert found.text == text_of(options)
    assert found.cost.peak_bytes == pytest.approx(found.planned.peak_bytes, rel=0.02)


@pytest.mark.parametrize("to", FRAMEWORKS)
def test_a_plan_without_a_setting_is_not_answered_with_nothing(to):
    found = export(simulate(trace_of(), "a100_40_pcie", "keep_all"), to)
    assert found.told
    options = [line for line in found.text.splitlines() if line not in ("{}", "")]
    none = f"No setting is needed: it is what {to} does by itself."
    assert (none in found.differences) == (not options)


def test_every_second_layer_is_a_setting_of_transformers_alone():
    result = simulate(trace_of(), "a100_40_pcie", "layers 0 2: full_recompute; rest: keep_all")
    found = export(result, "transformers")
    assert json.loads(found.text)["activation_checkpointing_kwargs"]["every_n_layers"] == 2
    assert (found.told, found.cost) == (True, found.planned)
    assert found.differences == ("It needs transformers 5.23 or later.",)
    others = {to: export(result, to) for to in ("torchtune", "deepspeed", "megatron", "mindspeed")}
    for to, other in others.items():
        assert not other.told
        assert other.differences[0].startswith(f"{to} has no switch for this plan. The nearest, which ")


def test_each_setting_of_transformers_is_taken_by_transformers_as_it_stands():
    transformers = pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=4, n_head=2, vocab_size=16))
    known = {field.name for field in fields(transformers.TrainingArguments)}
    if "activation_checkpointing" not in known:
        pytest.skip("this transformers is older than those names")
    for setting in FRAMEWORKS["transformers"].settings(4):
        assert setting.options.keys() <= known
        (enabled, *kwargs) = setting.options.values()
        model.activation_checkpointing_disable()
        if enabled:  # as its trainer does
            rest = dict(kwargs[0])
            chosen = {key: rest.pop(key) for key in ("every_n_layers", "offload") if key in rest}
            model.activation_checkpointing_enable(rest, **chosen)
        wrapped = [k for k, layer in enumerate(model.transformer.h) if layer.gradient_checkpointing]
        assert wrapped == list(setting.recomputes), setting


def test_a_plan_that_moves_weights_is_no_plan_about_activations_alone():
    result = simulate(trace_of(), "a100_40_pcie", "zero_offload")
    assert not export(result, "transformers").told
    (said,) = export(simulate(trace_of(), "a100_40_pcie"), "deepspeed").differences
    assert said == "No setting is needed: it is what deepspeed does by itself."


def test_an_update_in_backward_is_told_from_one_after_it():
    late, early = (export(simulate(trace_of(), "a100_40_pcie", p), "torchtune") for p in ("keep_all", IN_BACKWARD))
    assert (late.told, early.told) == (True, True)
    assert "optimizer_in_bwd: False" in late.text
    assert "optimizer_in_bwd: True" in early.text


IN_BACKWARD = "optimizer_in_backward"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_setting_recomputes_and_moves_where_it_says(name):
    platform, trace = unlimited(load_profile("a100_40_pcie")), trace_of("eager")
    tried = 0
    for setting in FRAMEWORKS[name].settings(4):
        load_policy(setting.policy)
        FRAMEWORKS[name].text(setting.options)
        try:
            meaning = meaning_of(simulate(trace, platform, setting.policy))
        except (Infeasible, PolicyError):
            continue
        tried += 1
        for by_layer, said in zip(shares(meaning), (setting.recomputes, setting.moves), strict=True):
            least = 0 if setting.partly or name == "megatron" else 0.5
            touched = [layer for layer, share in enumerate(by_layer) if share > least]
            assert touched == list(said) or not any(by_layer), setting  # tensors below a threshold stay
        assert disagreement(meaning, meaning) == 0
    assert tried > 4


def test_a_setting_has_what_its_framework_asserts_beside_it():
    """Else the framework stops: torchtune's recipes, Megatron-LM's `arguments.py` and `OptimizerConfig`."""
    for setting in FRAMEWORKS["torchtune"].settings(4):
        assert setting.options["enable_activation_checkpointing"] or not setting.options["enable_activation_offloading"]
    for name in ("megatron", "mindspeed"):
        for options in (setting.options for setting in FRAMEWORKS[name].settings(4)):
            assert "--use-precision-aware-optimizer" in options or "--optimizer-cpu-offload" not in options
            assert "--use-distributed-optimizer" in options or "--use-precision-aware-optimizer" not in options


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 2}, "several devices,"),
        ({"tp": 2, "dp": 2, "zero": 3}, "(tensor parallelism over 2, ZeRO 3),"),
        ({}, ""),
    ],
)
def test_that_the_run_is_divided_over_devices_is_no_option_and_is_said(layout, said):
    trace = transformer("gpt2", batch=4, sequence=16, precision="amp_bf16")
    result = simulate(trace, "a100_80_sxm", "full_recompute", **({"parallel": layout} if layout else {}))
    for to in ("megatron", "deepspeed", "torch"):
        lines = [line for line in export(result, to).differences if "over several devices" in line]
        assert len(lines) == bool(layout)
        assert all(said in line for line in lines)
