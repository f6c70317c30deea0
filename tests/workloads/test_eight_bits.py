"""Linear layers in 8 bits: bytes saved and products counted by hand, and where each type is used."""

from __future__ import annotations

from collections import Counter

import pytest

from sim.analysis.peak_memory import home_peak
from sim.conformance.replayed import run_policy
from sim.conformance.suite import APPLIES, CHECKS
from sim.errors import WorkloadError
from sim.experiment import simulate
from sim.hardware.cost import flops_per_second
from sim.hardware.profile import load_profile
from sim.layout import lay_out
from sim.policies import load
from tests.machines import machine
from workloads import transformer, with_stack

H, KV, F, LAYERS, SAMPLES, TOKENS = 64, 32, 96, 3, 2, 16
LLAMA = {
    "model_type": "llama", "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": F, "vocab_size": 128,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": H, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
EXPERTS = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
WEIGHTS = 2 * H * H + 2 * H * KV + 3 * H * F
"""Of the linear layers of one layer."""
ROWS = SAMPLES * TOKENS


def step(config=LLAMA, precision="mixed_fp8", **options):
    options = {"batch": SAMPLES, "sequence": TOKENS, "attention": "flash", **options}
    return transformer(config, precision=precision, **options)


def saved(trace):
    """Bytes that autograd saves in layer 1."""
    return sum(t.bytes for t in trace.tensors if t.saved_for and t.layer == 1)


def products(trace, kind="matmul"):
    """Type and phase of each product of a layer, counted."""
    return Counter((op.dtype, op.phase) for op in trace.ops if op.kind == kind and op.layer == 1)


@pytest.mark.parametrize(("fp8", "bf16"), [("mixed_fp8", "mixed_bf16"), ("megatron_fp8", "megatron_bf16")])
def test_a_layer_saves_one_byte_where_its_products_saved_two(fp8, bf16):
    # inputs of q, k, v, of gate and up, and of down: 1 byte for 2; that of proj is saved by attention in 16 bits, too,
    # so its transpose comes on top; and a transposed copy of each weight
    inputs = H + H + F - H
    assert saved(step(precision=fp8)) - saved(step(precision=bf16)) == WEIGHTS - ROWS * inputs


def test_all_three_products_of_a_linear_layer_are_in_fp8_and_all_else_is_not():
    eight, sixteen = step(), step(precision="mixed_bf16")
    assert products(eight) == {("fp8", "forward"): 7, ("fp8", "backward"): 14}
    assert products(eight, "attention") == products(sixteen, "attention") == {
        ("bf16", "forward"): 1, ("bf16", "backward"): 1
    }  # fmt: skip
    head = [op for op in eight.ops if op.kind == "matmul" and op.layer == -1]
    assert {op.dtype for op in head} == {"bf16"}
    assert {op.dtype for op in eight.ops if op.kind == "optimizer"} <= {"fp32", "bf16", ""}
    assert sum(op.flops for op in eight.ops if op.kind == "matmul") == sum(
        op.flops for op in sixteen.ops if op.kind == "matmul"
    )
    assert eight.meta["model_flops"] == sixteen.meta["model_flops"]


def test_an_operand_is_quantised_once_with_its_transpose_where_that_is_multiplied():
    trace = step()
    forward = [op for op in trace.ops if op.name.endswith("quantise") and op.layer == 1 and op.phase == "forward"]
    # the seven weights; inputs of q, k and v, of proj, of gate and up, of down
    assert len(forward) == 7 + 4
    assert {len(op.writes) for op in forward} == {2}
    for op in forward:
        (source,), size = op.reads, {trace.tensors[t].bytes for t in op.writes}
        assert size == {trace.tensors[source].bytes // 2}
        assert {trace.tensors[t].dtype for t in op.writes} == {"fp8"}
    backward = [op for op in trace.ops if op.name.endswith("quantise") and op.layer == 1 and op.phase == "backward"]
    assert len(backward) == 7  # the gradient of each result


def test_a_frozen_weight_needs_no_transposed_input():
    trace = step(frozen="h*.mlp.down")
    made = {op.name: len(op.writes) for op in trace.ops if "mlp.down" in op.name and "quantise" in op.name}
    assert made["h1.mlp.down.input.quantise"] == 1
    assert made["h1.mlp.down.quantise"] == 2
    assert made["h1.mlp.down.bwd.gradient.quantise"] == 1


def test_microbatches_of_a_workload_share_the_weights_in_8_bits():
    one, two = step(), step(micro_batches=2)
    count = [sum(".weight.fp8" in t.name for t in trace.tensors) for trace in (one, two)]
    assert count == [2 * 7 * LAYERS] * 2


def test_experts_in_one_kernel_multiply_in_fp8_and_their_router_does_not():
    trace = step(EXPERTS)
    of_layer = [op for op in trace.ops if op.kind == "matmul" and op.layer == 1]
    assert {op.dtype for op in of_layer if "router" in op.name} == {"bf16"}
    assert {op.dtype for op in of_layer if "router" not in op.name} == {"fp8"}
    assert sum("mlp.gate_up" in op.name for op in of_layer) == 3


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_generation_keeps_the_weights_of_layers_in_8_bits(precision):
    eight = step(precision=precision, generate=3)
    sixteen = step(precision="fp16", generate=3)
    weights = [sum(t.bytes for t in trace.tensors if t.role == "weight") for trace in (eight, sixteen)]
    assert weights[1] - weights[0] == WEIGHTS * LAYERS
    assert products(eight) == {(precision, "forward"): 7 * 3}
    assert not any(t.dtype == precision and t.name.endswith(".t") for t in eight.tensors)


@pytest.mark.parametrize("profile", ["h100", "l40s", "a100_80_sxm", "ascend_910b", "cambricon_mlu370"])
def test_chips_that_are_fast_in_int8_generate_faster_with_it(profile):
    config = LLAMA | {"hidden_size": 2048, "intermediate_size": 5632}
    times = [
        simulate(
            transformer(config, batch=8, sequence=512, precision=precision, generate=1), load_profile(profile)
        ).log.end
        for precision in ("fp16", "int8")
    ]
    assert times[1] < 0.9 * times[0]


def test_a_chip_without_the_type_computes_in_the_next_one():
    # MT-3000 has neither: the products take the time of 16 bits
    (dsp,) = [e for e in load_profile("mt3000_survey").engines if e.name == "dsp"]
    assert flops_per_second(dsp, "matmul", "int8") == flops_per_second(dsp, "matmul", "fp16")
    (gpu,) = [e for e in load_profile("h100").engines if e.name == "gpu"]
    assert flops_per_second(gpu, "matmul", "fp8") == pytest.approx(0.81 * 1979e12)


@pytest.mark.parametrize("name", ["keep_all", "full_recompute", "swap_all", "dtr", "hybrid", "zero_offload"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_policies_keep_the_law_on_it(name, config):
    trace = step(config, batch=8, sequence=64, optimizer="adamw_fused")  # activations are the peak
    most = home_peak(simulate(trace, machine(), "keep_all").log)
    platform = machine(most if name == "keep_all" else most * 98 // 100, host=1 << 30, cpu="host")
    run = run_policy(load(name), trace, platform)
    for law, check in CHECKS.items():
        if law not in APPLIES or APPLIES[law](run):
            check(run)
    assert run.error is None


@pytest.mark.parametrize("layout", [
    {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "micro_batches": 2}, {"dp": 2, "zero": 2},
], ids=str)  # fmt: skip
def test_layouts_divide_it(layout):
    trace = step(GPT2, batch=4)
    platform = load_profile("h100", overrides={"devices": "8"})
    divided, _ = lay_out(trace, platform, layout)
    of_all = {op.dtype for op in divided.ops if op.kind == "matmul" and op.layer == 1}
    assert of_all == {"fp8"}


@pytest.mark.parametrize("stack", ["fused", "compiled"])
def test_other_stacks_quantise_in_the_kernel_of_the_norm_and_of_the_activation(stack):
    eager = step()
    fused = with_stack(eager, stack)
    names = [{t.name for t in trace.tensors} for trace in (eager, fused)]
    for of_16_bits in ("h1.norm1.out", "h1.norm2.out", "h1.mlp.mul.out"):
        assert of_16_bits in names[0]
        assert of_16_bits not in names[1]
    flops = [sum(op.flops for op in trace.ops if op.kind == "matmul") for trace in (eager, fused)]
    assert flops[0] == flops[1]


@pytest.mark.parametrize(("options", "words"), [
    ({"precision": "int8"}, "'int8' stores weights in 8 bits, for inference: give generate, or train in FP8 with"),
    ({"precision": "fp8"}, "'mixed_fp8' or 'megatron_fp8'"),
    ({"precision": "mixed_fp8", "generate": 2}, "precision 'mixed_fp8' is for training; with generate it is 'fp8'"),
    ({"precision": "mixed_fp8", "frozen": "h*", "frozen_dtype": "nf4"}, "multiplies no weights stored as nf4"),
    ({"precision": "fp4"}, "precision 'fp4' is unknown"),
])  # fmt: skip
def test_what_cannot_be_says_what_can(options, words):
    with pytest.raises(WorkloadError) as error:
        step(**options)
    assert words in str(error.value)
