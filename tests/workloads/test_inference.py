"""Prefill and decode: what the cache takes, what each pass computes, and that nothing is trained."""

from __future__ import annotations

import pytest

from sim.analysis.peak_memory import home_peak
from sim.conformance.replayed import run_policy
from sim.conformance.suite import APPLIES, CHECKS
from sim.errors import WorkloadError
from sim.policies import load
from tests.machines import machine
from workloads import transformer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 97,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97}
# of a layer: weights in products; heads, kv_heads, width of a head
SIZES = {"llama": (LLAMA, 3, 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96, 4, 2, 16), "gpt2": (GPT2, 2, 12 * 64**2, 4, 4, 16)}


def passes(trace):
    """The ops of each pass, by the beginning of their names."""
    found = {}
    for op in trace.ops:
        found.setdefault(op.name.split(".")[0], []).append(op)
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("family", SIZES)
def test_the_cache_grows_by_the_keys_and_values_of_each_pass(family, precision):
    config, layers, _, _, kv_heads, head = SIZES[family]
    batch, prompt, generate, width = 3, 11, 5, 4 if precision == "fp32" else 2
    trace = transformer(config, batch=batch, sequence=prompt, generate=generate, precision=precision)
    caches = [t for t in trace.tensors if t.name.endswith(".cache")]
    assert len(caches) == layers * generate
    assert sum(t.bytes for t in caches) == 2 * layers * batch * (prompt + generate - 1) * kv_heads * head * width
    assert {t.bytes for t in caches} == {2 * batch * n * kv_heads * head * width for n in (prompt, 1)}
    of_layer = [t.id for t in caches if t.layer == 1]
    last = [op for op in trace.ops if op.kind == "attention" and op.layer == 1][-1]
    assert set(of_layer) < set(last.reads)  # the last token of a layer attends to all of them
    assert last.bytes == sum(trace.tensors[t].bytes for t in of_layer) + 2 * batch * 64 * width  # and query and result


@pytest.mark.parametrize("family", SIZES)
def test_each_pass_computes_two_flops_a_weight_and_token_and_its_attention(family):
    config, layers, weights, heads, _, head = SIZES[family]
    batch, prompt, generate = 3, 11, 5
    trace = transformer(config, batch=batch, sequence=prompt, generate=generate, precision="fp16")
    found = passes(trace)
    assert list(found) == ["prefill", *(f"token{i}" for i in range(1, generate))]
    for i, ops in enumerate(found.values()):
        tokens = 1 if i else prompt
        flops = 2 * batch * layers * weights * tokens  # linear layers
        flops += 2 * batch * 97 * 64  # the head, of the last token
        flops += 4 * batch * layers * heads * head * tokens * (prompt + i)  # QK^T and PV
        assert sum(op.flops for op in ops if op.kind in ("matmul", "attention")) == flops
    assert trace.meta["model_flops"] == sum(op.flops for op in trace.ops if op.kind in ("matmul", "attention"))
    assert trace.meta["tokens"] == batch * generate


def test_nothing_is_trained_or_saved_and_what_was_chosen_is_kept():
    trace = transformer(GPT2, batch=4, sequence=8, generate=3, precision="fp16", micro_batches=2)
    assert {op.phase for op in trace.ops} == {"forward"}
    assert {t.role for t in trace.tensors} == {"weight", "activation", "input"}
    assert not any(t.saved_for for t in trace.tensors)
    assert not any(op.random for op in trace.ops)
    chosen = [op.writes[0] for op in trace.ops if op.name.endswith("choose")]
    assert len(chosen) == 2 * 3
    assert set(chosen) < set(trace.outputs)
    assert len(trace.carry) == sum(t.role == "weight" for t in trace.tensors)
    for token in chosen[:2]:  # and the next pass reads it
        assert [trace.ops[op].kind for op in trace.readers(token)] == ["embedding"]


def test_experts_are_routed_anew_for_each_token():
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}
    config["experts_implementation"] = "loop"
    trace = transformer(config, batch=1, sequence=4, generate=6, precision="fp16")
    used = [{t for op in ops for t in op.reads if "expert" in trace.tensors[t].name} for ops in passes(trace).values()]
    assert len({frozenset(experts) for experts in used[1:]}) > 1


@pytest.mark.parametrize(
    ("policy", "share"),
    [("keep_all", 1.0), ("lru_tiering", 0.8), ("uvm", 0.6), ("g10", 0.6), ("weight_streaming", 0.8)],
)
def test_policies_keep_the_law_on_it(policy, share):
    config = {**LLAMA, "vocab_size": 8}
    trace = transformer(config, batch=8, sequence=48, generate=2, precision="fp16", micro_batches=2)
    roomy = run_policy(load("keep_all"), trace, machine(host=1 << 30))
    run = run_policy(load(policy), trace, machine(int(share * home_peak(roomy.log)), host=1 << 30))
    assert run.done, run.error
    for name, check in CHECKS.items():
        if APPLIES.get(name, lambda _: True)(run):
            check(run)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("bert-base", {}, "generate: 'bert-base' is an encoder, which generates no tokens"),
        (GPT2, {"sequence": 62}, "generate: 62 tokens of prompt and 4 generated exceed the 64 positions of 'gpt2'"),
        (GPT2, {"generate": 0}, "generate: needs an integer of at least 1, has 0"),
        (GPT2, {"attention": "eager"}, "with generate attention is one kernel: 'sdpa', or 'flash' in 16 bits"),
        (GPT2, {"attention": "flash", "precision": "fp32"}, "attention 'flash' computes in 16 bits"),
        (GPT2, {"lora_rank": 4}, "lora_rank: is about training, and with generate nothing is trained"),
        (GPT2, {"frozen": "wte"}, "frozen: is about training, and with generate nothing is trained"),
        ({**LLAMA, "sliding_window": 9, "model_type": "mistral"}, {}, "11 tokens exceed the sliding window of 9"),
    ],
)
def test_what_cannot_be_generated_is_refused(config, options, message):
    with pytest.raises(WorkloadError, match="^[^\n]*" + message.replace("(", r"\(").replace("^", r"\^") + "[^\n]*$"):
        transformer(config, **{"batch": 1, "sequence": 8, "generate": 4, "precision": "fp16", **options})


def test_weights_may_have_four_bits():
    plain, small = (
        transformer(LLAMA, batch=1, sequence=8, generate=2, precision="fp16", frozen_dtype=kind)
        for kind in (None, "nf4")
    )
    held = [sum(t.bytes for t in trace.tensors if t.role == "weight") for trace in (plain, small)]
    assert held[1] < held[0] / 2


def test_it_is_asked_for_on_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from sim.cli import app
    from sim.trace.io import load as read

    out = str(tmp_path / "t.jsonl")
    words = ["trace", "build", "--model", "gpt2", "--seq", "16", "--generate", "2", "--precision", "fp16", "-o", out]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert read(out) == transformer("gpt2", batch=1, sequence=16, generate=2, precision="fp16")
