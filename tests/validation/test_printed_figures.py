"""Memory and FLOP figures printed in papers and lectures, with the unit that they really have.

GPT-3: L = 96, h = 12288, a = 96, s = 2048, b = 128, v = 50000. The lecture prints 650, 1950 and 32895 "GB"
for parameters with gradients, optimizer and activations: all three are GiB. Its formula for activations
carries a factor 4 too many; its value does not.
"""

from __future__ import annotations

from functools import cache

import pytest

from sim.units import parse_bytes
from workloads import transformer

GIB = 2**30
GPT3 = {
    "model_type": "gpt2",
    "n_layer": 96,
    "n_embd": 12288,
    "n_head": 96,
    "n_positions": 2048,
    "vocab_size": 50000,
    "activation_function": "gelu",  # one kernel that keeps its input, as in Megatron-LM
}
MEGATRON = {
    # layers, hidden, heads: Korthikanti et al., MLSys 2023, table 3; sequence 2048, vocabulary 51200
    "22B": (48, 6144, 64),
    "175B": (96, 12288, 96),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}

SMALL = (".logsumexp", ".seed", ".offset", ".rstd.out")
"""Tensors of attention and norms with a few bytes per row or none."""


@cache
def gpt3():
    return transformer(GPT3, batch=128, sequence=2048, precision="mixed_fp16", attention="eager")


@cache
def megatron(name):
    layers, hidden, heads = MEGATRON[name]
    config = {**GPT3, "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 51200}
    return transformer(config, batch=1, sequence=2048, precision="mixed_fp16", attention="eager")


def bytes_of(trace, *roles):
    """What exists from the start, and of gradients what the update reads: not the addends of a tied weight's."""
    made = {t for op in trace.ops for t in op.writes}
    updated = {t for op in trace.ops if op.phase == "update" for t in op.reads}
    return sum(
        t.bytes
        for t in trace.tensors
        if t.role in roles and (t.id in updated if t.role == "gradient" else t.id not in made)
    )


def saved(trace, *, layer=None, part=""):
    """Bytes kept for backward, without the few bytes per row of norms (fp32 mean and 1/deviation)."""
    return sum(
        t.bytes
        for t in trace.tensors
        if t.saved_for and layer in (None, t.layer) and part in t.name and not t.name.endswith((".mean", ".rstd"))
    )


def test_gpt3_parameters_and_gradients_are_650_gib():
    # weights and gradients in fp16, 4 bytes per parameter; the lecture cuts 650.44 off
    assert bytes_of(gpt3(), "weight", "gradient") / GIB == pytest.approx(650.44, abs=0.01)
    assert bytes_of(gpt3(), "weight", "gradient") / 1e9 == pytest.approx(698.4, abs=0.05)


def test_gpt3_optimizer_is_1951_gib():
    # fp32 master, momentum and variance, 12 bytes per parameter; the lecture prints 3 times its 650
    assert bytes_of(gpt3(), "optimizer_state") / GIB == pytest.approx(1951.32, abs=0.01)
    assert bytes_of(gpt3(), "optimizer_state") == pytest.approx(parse_bytes("1950 GiB"), rel=1e-3)


def test_gpt3_activations_are_32895_gib():
    # (L (5 a s^2 + 34 h s) + 5 h s + 4 s v) b bytes: the coefficients are bytes already, so no factor 4
    got = saved(gpt3()) / GIB
    assert got == pytest.approx(32895.83, rel=1e-5)
    assert got * GIB / 1e9 == pytest.approx(35321.6, rel=1e-5)


def test_gpt3_needs_444_gpus_of_80_gib():
    total = bytes_of(gpt3(), "weight", "gradient", "optimizer_state") + saved(gpt3())
    assert total / GIB / 80 == pytest.approx(443.7, abs=0.1)  # printed as 440
    assert total / GIB / 40 == pytest.approx(887.4, abs=0.2)  # printed as 880


@pytest.mark.parametrize("name", MEGATRON)
def test_a_gpt_layer_keeps_sbh_times_34_plus_5as_over_h(name):
    _, h, a = MEGATRON[name]
    b, s = 1, 2048
    trace = megatron(name)
    # one sample needs no copies of q, k and v: they stay in the product that made them, 6 sbh all the same,
    # which is kept once
    assert saved(trace, layer=1) == s * b * h * 34 + 5 * a * s * s * b


def test_the_layer_formula_holds_for_several_samples():
    trace = transformer({**GPT3, "n_layer": 2}, batch=4, sequence=2048, precision="fp16", attention="eager")
    b, s, h, a = 4, 2048, 12288, 96
    assert saved(trace, layer=1) == s * b * h * 34 + 5 * a * s * s * b
    # by part, as in table 1 of the survey: 19 sbh for the MLP, 11 sbh + 5 a s^2 b for attention, 4 sbh for norms
    mlp = saved(trace, layer=1, part=".mlp.") + saved(trace, layer=1, part=".ln2.")
    residual = 2 * s * b * h  # an input of a norm: the sum that the part ends with
    assert mlp - residual == 19 * s * b * h
    attention = saved(trace, layer=1, part=".attn.") + saved(trace, layer=1, part=".ln1.")
    assert attention - residual == 11 * s * b * h + 5 * a * s * s * b


def test_fused_attention_takes_the_quadratic_term_away():
    trace = transformer({**GPT3, "n_layer": 2}, batch=1, sequence=2048, precision="fp16", attention="flash")
    s, h, a = 2048, 12288, 96
    lse, random_state = 4 * a * s, 24
    # the result of attention is what is projected: kept once
    assert saved(trace, layer=1) == 34 * s * h + lse + random_state


@pytest.mark.parametrize("name", MEGATRON)
def test_model_flops_are_megatrons(name):
    layers, h, _ = MEGATRON[name]
    s, v = 2048, 51200
    want = 72 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert megatron(name).meta["model_flops"] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(("name", "percent"), [("175B", 2.7), ("530B", 1.6)])
def test_what_megatron_prints_for_the_attention_core_is_three_forward_passes_of_it(name, percent):
    # Its hardware FLOPs have s/3h for s/6h: as many FLOPs again as the core takes forward and backward.
    # Running the core forward once more is a third of that.
    trace = megatron(name)
    core = sum(o.flops for o in trace.ops if o.phase == "forward" and ".attn.core." in o.name and o.kind == "matmul")
    assert 100 * 3 * core / trace.meta["model_flops"] == pytest.approx(percent, abs=0.06)


def test_deepseek_parameters_are_2499_67_gib():
    # the survey's "2,499.67 GB": 671 billion parameters in fp32, counted in GiB
    assert pytest.approx(parse_bytes("2499.67 GiB"), rel=1e-6) == 671 * 10**9 * 4
    assert parse_bytes("2684 GB") == 671 * 10**9 * 4


def test_deepseek_activations_are_34_2_tb_for_two_million_tokens_of_four_bytes():
    # The survey gives no batch: that its Llama line, (2 + 9 L) b s h + b s v in elements, with the shape of
    # DeepSeek-V3 gives the figure for 2^21 tokens of 4 bytes (512 samples of 4,096, say) is our inference. It is
    # decimal, where the parameters beside it are binary.
    layers, h, v, tokens = 61, 7168, 129280, 2**21
    elements = ((2 + 9 * layers) * h + v) * tokens
    assert 4 * elements == pytest.approx(34.216e12, rel=1e-4)
    assert 4 * elements / 2**40 == pytest.approx(31.12, abs=0.01)


@pytest.mark.parametrize("stack", ["eager", "fused"])
def test_a_llama_layer_keeps_more_than_the_nine_bsh_of_the_survey(stack):
    h, a, kv, ffn, b, s = 8192, 64, 8, 28672, 2, 1024  # Llama 2 70B
    config = {"model_type": "llama", "hidden_size": h, "num_hidden_layers": 2, "num_attention_heads": a,
              "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": 32000}  # fmt: skip
    trace = transformer(config, batch=b, sequence=s, precision="bf16", attention="flash", stack=stack)
    elements = saved(trace, layer=1, part=".") / 2
    few = sum(t.bytes for t in trace.tensors if t.saved_for and t.layer == 1 and t.name.endswith(SMALL)) / 2
    # per token: two residuals, what both norms give, queries, keys and values, attention's result, and in the MLP
    # gate, up and their product; eager norms keep their input in fp32 and once more in 16 bits, the MLP its
    # activation
    extra = 0 if stack == "fused" else 2 * (2 + 1 - 1) + ffn / h
    per_token = 6 + 2 * kv / a + 3 * ffn / h + extra
    assert elements - few == pytest.approx(b * s * h * per_token, rel=1e-12)
    assert per_token > 1.8 * 9


def test_adam_in_fp32_takes_16_bytes_a_parameter_as_1_1_2():
    trace = transformer("gpt2-small", batch=1, sequence=16)
    n = trace.meta["parameters"]
    sizes = [bytes_of(trace, role) for role in ("weight", "gradient", "optimizer_state")]
    assert sizes == [4 * n, 4 * n, 8 * n]
