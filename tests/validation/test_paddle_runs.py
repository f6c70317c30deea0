"""What PaddlePaddle's code does, in bytes and kernels counted by hand."""

from functools import partial

import pytest

from sim.experiment import simulate
from sim.layout import lay_out
from sim.rewrites.chunks import as_base
from tests.validation.paddle_runs import biases_apart, pool_of_building, reducing_to_one, softmax_apart
from tests.validation.published_runs import FUSED, _run, fusing_only, rows
from workloads import transformer

HIDDEN, VOCABULARY, POSITIONS, TOKENS = 64, 128, 32, 32
GPT = {
    "model_type": "gpt", "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 4 * HIDDEN, "max_position_embeddings": POSITIONS, "vocab_size": VOCABULARY,
    "fuse_attention_qkv": False,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}  # fmt: skip


def trace_of(model, batch=1):
    facts = {"precision": "mixed_fp16", "attention": "flash", "loss": "vocab_parallel"}
    return transformer(model, batch=batch, sequence=TOKENS, **facts)


def divided(model, samples=4, **layout):
    trace = as_base(biases_apart(trace_of(model, batch=samples)))
    norms_alone = partial(fusing_only, modules=FUSED["norms"]) if model is LLAMA else None
    layout = {"micro_batches": 2, **layout}
    return lay_out(trace, "a100_80_sxm", layout, overrides={"devices": "8"}, kernels=norms_alone)


def test_building_in_fp32_leaves_four_bytes_per_weight_and_stage_2_two_more():
    layer = 12 * HIDDEN**2 + 13 * HIDDEN
    whole = 2 * layer + VOCABULARY * HIDDEN + POSITIONS * HIDDEN + 2 * HIDDEN
    largest = 4 * HIDDEN**2
    assert pool_of_building(divided(GPT, dp=2, zero=2)[0], 0, "fp32") == 4 * (whole + largest) + 2 * whole
    assert pool_of_building(divided(GPT, dp=2, zero=1)[0], 0, "fp32") == 4 * (whole + largest)


def test_ranks_and_stages_build_their_part():
    whole_on_each = 6 * HIDDEN  # the norms and the biases of what is divided by rows
    layer = 6 * HIDDEN**2 + (3 + 4) * HIDDEN // 2 + whole_on_each
    rank = 2 * layer + VOCABULARY * HIDDEN // 2 + POSITIONS * HIDDEN + 2 * HIDDEN
    assert pool_of_building(divided(GPT, tp=2)[0], 0, "fp32") == 4 * (rank + 2 * HIDDEN**2)
    stages = divided(GPT, pp=2)[0]
    layer, head, largest = 12 * HIDDEN**2 + 13 * HIDDEN, VOCABULARY * HIDDEN, 4 * HIDDEN**2
    first, last = layer + head + POSITIONS * HIDDEN, layer + 2 * HIDDEN + head
    assert [pool_of_building(stages, d, "fp32") for d in (0, 1)] == [4 * (first + largest), 4 * (last + largest)]


def test_llama_is_built_in_fp16():
    weights = 4 * HIDDEN**2 + 3 * HIDDEN * 128 + 2 * HIDDEN + 2 * VOCABULARY * HIDDEN + HIDDEN
    largest = VOCABULARY * HIDDEN
    assert pool_of_building(divided(LLAMA, dp=2, zero=2)[0], 0, "fp16") == 2 * (weights + largest) + 2 * weights


def test_each_bias_is_added_by_a_kernel_that_reads_and_writes_the_result():
    before = trace_of(GPT)
    after = biases_apart(before)
    added = {op.name: after.touched[op.id] for op in after.ops if op.name.endswith(".bias") and op.phase == "forward"}
    layers = {"attn.q": 1, "attn.k": 1, "attn.v": 1, "attn.proj": 1, "mlp.fc": 4, "mlp.proj": 1}
    columns = {f"h{i}.{name}.bias": n * HIDDEN for i in range(2) for name, n in layers.items()}
    assert added == {name: 2 * (2 * TOKENS * n + n) for name, n in columns.items()}
    assert len(after.ops) == len(before.ops) + 12

    def read_backward(trace):
        return {trace.tensors[t].name for op in trace.ops if op.phase == "backward" for t in op.reads}

    assert read_backward(after) == read_backward(before)
    products = [op for op in after.ops if op.kind == "matmul" and op.phase == "forward"]
    assert {len(op.reads) for op in products} == {2}
    assert sum(op.flops for op in products) == sum(
        op.flops for op in before.ops if op.kind == "matmul" and op.phase == "forward"
    )


def test_layers_without_biases_stay():
    before = trace_of(LLAMA)
    assert [op.name for op in biases_apart(before).ops] == [op.name for op in before.ops]


def test_the_softmax_is_beside_the_logits_and_the_gradient_in_its_place():
    before = trace_of(GPT)
    after = softmax_apart(before)
    op = after.op_id("loss.softmax")
    (logits,), (soft,) = after.reads(op), after.writes(op)
    assert after.tensors[soft].replaces is None
    assert after.tensors[soft].bytes == after.tensors[logits].bytes == 4 * TOKENS * VOCABULARY
    assert [t.name for t in after.tensors if t.replaces == soft] == ["head.out.grad"]
    assert [op.name for op in after.ops] == [op.name for op in before.ops]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 2, "bucket": "1 KiB"}, {"tp": 2, "sum_each": True}], ids=str)
def test_kernels_wait_for_sums_of_all_micro_batches_but_the_first(model, layout):
    """As PaddlePaddle's do, since what a micro-batch adds to the sums before is added at once."""
    log = simulate(*divided(model, **layout)).log
    c = log.trace.op_columns
    ran = [(start, end, op) for start, end, _, _, _, op, tensor, *_ in log.intervals.tolist() if op >= 0 > tensor]
    sums = [(start, end) for start, end, op in ran if op in c.ring and ".mb1" in c.name[op]]
    kernels = [(start, end, c.name[op]) for start, end, op in ran if op not in c.ring]
    assert len(sums) >= 7  # one for each matrix of a layer
    assert not {name for first, last in sums for start, end, name in kernels if max(start, first) < min(end, last)}


def test_stage_2_moves_all_bytes_of_what_it_reduces_and_broadcasts():
    trace = reducing_to_one(divided(GPT, dp=2, zero=2)[0])
    weights = 2 * (2 * (12 * HIDDEN**2 + 13 * HIDDEN) + VOCABULARY * HIDDEN + POSITIONS * HIDDEN + 2 * HIDDEN)
    moved = {
        phase: sum(op.bytes for op in trace.ops if op.ring and op.phase == phase) for phase in ("backward", "update")
    }
    assert moved == {"backward": 2 * weights, "update": weights}


NARROW = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "max_position_embeddings": 1024}
SMALL = {**GPT, **NARROW, "vocab_size": 50304}, 1024
STATES = {**GPT, **NARROW, "hidden_size": 1024, "intermediate_size": 4096}, 8
"""Models and tokens of which a run is bound by its kernels, and of which the states are more than all else."""


@pytest.mark.parametrize(
    ("row", "of", "fact", "changes"),
    [
        ("fpgpt-03", SMALL, "biases_apart", "time"),
        ("fpgpt-03", SMALL, "softmax_apart", "peak"),
        ("fpgpt-03", SMALL, "reduces_to_one", "time"),
        ("fpgpt-03", SMALL, "reads_each", "time"),
        ("fpgpt-03", SMALL, "sum_each", "time"),
        ("fpgpt-03", SMALL, "flash", "time"),
        ("fpgpt-03", SMALL, "bucket", "time"),
        ("fpgpt-02", SMALL, "communicators", "peak"),
        ("fpgpt-02", SMALL, "lazy_kernels", "peak"),
        ("fpgpt-01", STATES, "built", "peak"),
    ],
)
def test_a_run_is_another_one_without_each_of_them(row, of, fact, changes):
    (given,) = [each for each in rows() if each["id"] == row]
    setup = {**given["setup"], "model": of[0], "sequence": of[1], "batch": 1}
    time, peak = _run(setup, 2, given["peak_memory_definition"])
    other_time, other_peak = _run(
        {key: value for key, value in setup.items() if key != fact}, 2, given["peak_memory_definition"]
    )
    assert time != other_time if changes == "time" else peak > other_peak


def test_rows_of_paddlepaddle_say_what_is_true_of_them():
    for row in rows():
        setup = row["setup"] or {}
        gpt = str(row["id"]).startswith("fpgpt")
        if not setup.get("paddle"):
            assert not {"built", "biases_apart", "softmax_apart", "reduces_to_one"} & setup.keys(), row["id"]
            continue
        assert setup["built"] == ("fp32" if gpt else "fp16"), row["id"]
        assert setup.get("biases_apart", False) == gpt, row["id"]
        assert setup.get("reduces_to_one", False) == ("bucket" in setup) == (setup["zero"] == 2), row["id"]
        assert setup.get("bucket", "16 MiB") == "16 MiB", row["id"]
        assert [setup[key] for key in ("softmax_apart", "loss", "flash")] == [True, "vocab_parallel", 1], row["id"]
        divided = setup.get("tp", 1) > 1
        assert setup.get("sum_each", False) == divided, row["id"]
        assert setup.get("reads_each", False) == (divided and setup["pp"] == 1), row["id"]
