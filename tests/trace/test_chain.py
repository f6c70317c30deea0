"""The chain view: cuts by brute force, the six lists there and back, and what is not a chain."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.trace import Trace, TraceBuilder
from sim.trace.chain import backward_ops, blocks, chain, forward_ops, saved_tensors
from tests.strategies import traces
from workloads import synthetic, transformer

MIB = 2**20


def ns(trace: Trace) -> list[int]:
    return [op.duration or 0 for op in trace.ops]


def lists(count: int) -> st.SearchStrategy[tuple[list[int], ...]]:
    numbers = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    sizes = st.lists(st.integers(1, 50), min_size=count + 1, max_size=count + 1)
    return st.tuples(numbers, numbers, sizes, numbers, numbers, numbers)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 7).flatmap(lists))
def test_the_six_lists_come_back_from_the_trace_made_of_them(given_lists: tuple[list[int], ...]) -> None:
    uf, ub, x, extra, of, more = given_lists
    count = len(uf)
    xbar = [x[i + 1] + extra[i] for i in range(count)]
    ob = [max(more[i], x[i]) for i in range(count)]  # the gradient that is made fits in
    trace = synthetic.chain(uf, ub, x, xbar, of, ob)
    got = chain(trace, ns(trace))
    assert len(got) == count
    assert [stage.uf for stage in got.stages] == uf
    assert [stage.ub for stage in got.stages] == ub
    assert list(got.x) == x
    assert [stage.xbar for stage in got.stages] == xbar
    assert [stage.saving_temp for stage in got.stages] == of
    assert [stage.backward_temp for stage in got.stages] == ob
    # a forward that saves nothing makes it all the same
    assert [stage.forward_temp for stage in got.stages] == [a + b for a, b in zip(of, extra, strict=True)]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 7).flatmap(lists), st.integers(1, 9))
def test_a_gradient_takes_the_place_of_the_one_before_where_there_is_no_room(
    given_lists: tuple[list[int], ...], size: int
) -> None:
    uf, ub, _, extra, of, _ = given_lists
    count = len(uf)
    x = [size] * (count + 1)
    trace = synthetic.chain(uf, ub, x, [size + e for e in extra], of, [0] * count)
    got = chain(trace, ns(trace))
    # the last stage's backward begins with the loss, whose gradient is new
    assert [stage.backward_temp for stage in got.stages] == [0] * count


def test_the_unit_chain_has_one_stage_a_step() -> None:
    trace = synthetic.uniform_chain(6, size=3, duration=5, backward_duration=7)
    got = chain(trace, ns(trace))
    assert [stage.forward for stage in got.stages] == [(i,) for i in range(6)]
    assert [stage.backward for stage in got.stages] == [(11 - i,) for i in range(6)]
    assert [stage.uf for stage in got.stages] == [5] * 6
    assert [stage.ub for stage in got.stages] == [7] * 6
    assert got.x == (0, 3, 3, 3, 3, 3, 3)


def test_a_stage_does_not_end_where_its_result_is_overwritten_in_place() -> None:
    """Two convolutions, each with a ReLU in place, and their backward: what the ReLU overwrites is not a checkpoint."""
    b = TraceBuilder()
    x = b.tensor("x", 8, "input")
    results = [x]
    for i in range(2):
        made = b.tensor(f"{i}.made", 8)
        results.append(b.tensor(f"{i}.out", 8, replaces=made))
        b.op(f"{i}.conv", reads=[results[-2]], writes=[made], duration=5)
        b.op(f"{i}.relu", reads=[made], writes=[results[-1]], duration=1)
    gradient: list[int] = []
    for i in (1, 0):
        fresh = b.tensor(f"{i}.gradient", 8, "temporary")
        b.op(f"{i}.back", phase="backward", reads=[*gradient, results[i], results[i + 1]], writes=[fresh], duration=7)
        gradient = [fresh]
    trace = b.build(outputs=gradient, carry=())
    got = chain(trace, ns(trace))
    assert [stage.forward for stage in got.stages] == [(0, 1), (2, 3)]
    assert [stage.output for stage in got.stages] == results[1:]
    assert [(stage.xbar, stage.forward_temp) for stage in got.stages] == [(8, 0), (8, 0)]  # no byte counts twice


def test_a_transformer_layer_is_two_stages() -> None:
    trace = synthetic.w1(4)
    got = chain(trace, ns(trace))
    a = 16 * MIB
    attention, mlp = got.stages[-2:]
    names = [[trace.ops[op].name.split(".")[1] for op in stage.forward] for stage in (attention, mlp)]
    assert names == [["ln1", "qkv", "attn", "proj", "add1"], ["ln2", "fc1", "gelu", "fc2", "add2"]]
    assert attention.x == mlp.x == a
    assert attention.xbar == (1 + 3 + 1 + 1) * a  # ln1, qkv, attn saved, and add1
    assert mlp.xbar == (1 + 4 + 4 + 1) * a
    backward = [trace.ops[op].name for op in attention.backward]
    assert backward[0] == "h3.add1.bwd"
    assert backward[-2:] == ["h3.ln1.bwd", "h3.ln1.add74"]
    assert sum(stage.uf + stage.ub for stage in got.stages) == 20_346_933
    assert got.weights == 4 * 12 * 1024 * 1024 * 2
    assert got.gradients == got.weights


def brute_force_cuts(trace: Trace) -> list[tuple[int, int]]:
    """Positions at which one activation is live, by looking at every tensor at every position."""
    ops = [op for op in trace.ops if op.phase == "forward"]
    of_weights: set[int] = {t.id for t in trace.tensors if trace.producer[t.id] < 0 and t.role in ("weight",)}
    for op in ops:
        if op.reads and set(op.reads) <= of_weights:
            of_weights |= set(op.writes)
    cuts = []
    for k in range(1, len(ops)):
        made = {t for op in ops[:k] for t in op.writes} - of_weights
        live = made & {t for op in ops[k:] for t in op.reads}
        whole = not any(trace.replaced_by[t] >= 0 for t in live)  # what is overwritten is not a checkpoint
        if len(live) == 1 and whole and (not cuts or cuts[-1][1] != min(live)):
            cuts.append((k, min(live)))
    return cuts


@settings(max_examples=50, deadline=None)
@given(traces(max_steps=9))
def test_stages_end_where_one_activation_is_live(trace: Trace) -> None:
    cuts = brute_force_cuts(trace)
    got = chain(trace, ns(trace), least=1)
    assert [stage.inputs for stage in got.stages[1:]] == [(t,) for _, t in cuts]
    ends, marks = [0, *(k for k, _ in cuts), len(forward_ops(trace))], forward_ops(trace).tolist()
    assert [list(stage.forward) for stage in got.stages] == [marks[a:b] for a, b in pairwise(ends)]
    placed = sorted(op for stage in got.stages for op in stage.backward)
    assert placed == backward_ops(trace).tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 30), st.integers(0, 10**6))
def test_a_random_chain_of_stages_places_each_backward_with_its_forward(count: int, seed: int) -> None:
    """Stages of one or two ops that save their input, their output or nothing: all backward ops known."""
    draw = seed
    b = TraceBuilder()
    x, tape = b.tensor("x", 5, "input"), []
    for i in range(count):
        draw = draw * 1103515245 + 12345 & 0x7FFFFFFF
        y, w = b.tensor(f"y{i}", 5), b.tensor(f"w{i}", 1, "weight")
        b.op(f"f{i}", reads=[x, w], writes=[y], duration=1)
        saves = (x, y)[draw >> 8 & 1]
        tape.append((i, [saves] if i else [y], w))
        x = y
    gradient = b.tensor("d", 5, "temporary")
    b.op("loss", "loss", phase="backward", reads=[x], writes=[gradient], duration=0)
    for i, saved, w in reversed(tape):
        new, dw = b.tensor(f"d{i}", 5, "temporary"), b.tensor(f"dw{i}", 1, "gradient")
        b.op(f"w{i}.grad", phase="backward", reads=[gradient, *saved], writes=[dw], duration=1)
        b.op(f"x{i}.grad", phase="backward", reads=[gradient, w], writes=[new], duration=1)
        gradient = new
    trace = b.build()
    got = chain(trace, ns(trace))
    assert len(got) == count
    for i, stage in enumerate(got.stages):
        expected = [f"w{i}.grad", f"x{i}.grad"]
        names = [trace.ops[op].name for op in stage.backward if trace.ops[op].name != "loss"]
        assert names == expected


def test_what_is_no_chain_names_the_op_that_reads_across() -> None:
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    first, second, third = (b.tensor(f"t{i}", 1) for i in range(3))
    b.op("start", reads=[x], writes=[first, second])
    b.op("side", reads=[second], writes=[third])
    b.op("join", reads=[first, third])
    trace = b.build()
    with pytest.raises(TraceError, match=r"op 'join' reads 't0', which 'start' produced much earlier"):
        chain(trace, [0, 0, 0])
    unet = synthetic.unet(4)
    with pytest.raises(TraceError, match=r"op 'join0' reads 'down0', which 'down0' produced much earlier"):
        chain(unet, ns(unet), least=3)


def test_saved_tensors_are_made_in_forward_and_read_in_backward() -> None:
    trace = synthetic.w1(2)
    names = [trace.tensors[t].name for t in saved_tensors(trace)]
    assert names[:6] == ["h0.ln1", "h0.qkv", "h0.attn", "h0.add1", "h0.ln2", "h0.fc1"]
    assert "h0.proj" not in names


def test_blocks_are_layers_with_what_crosses_their_border() -> None:
    trace = synthetic.w1(3)
    first, middle, last = blocks(trace)
    assert [block.layer for block in (first, middle, last)] == [0, 1, 2]
    assert [trace.tensors[t].name for t in middle.inputs] == ["h0.add2"]
    assert [trace.tensors[t].name for t in middle.outputs] == ["h1.add2"]
    assert [trace.tensors[t].name for t in first.inputs] == ["x0"]
    assert len(middle.forward) == 10
    assert len(middle.saved) == 8  # all but proj and fc2: the next layer's norm saves add2
    assert sum(len(block.backward) for block in (first, middle, last)) == len(backward_ops(trace))


def test_ops_of_no_layer_make_blocks_of_their_own() -> None:
    b = TraceBuilder()
    tokens, table = b.tensor("tokens", 1, "input"), b.tensor("table", 9, "weight")
    h, y, logits, d, dh, dt, dy = (b.tensor(n, 4) for n in ("h", "y", "logits", "d", "dh", "dt", "dy"))
    b.op("embed", "embedding", reads=[tokens, table], writes=[h])
    b.op("layer", reads=[h], writes=[y], layer=0)
    b.op("head", reads=[y], writes=[logits])
    b.op("loss", "loss", phase="backward", reads=[logits], writes=[d])
    b.op("head.bwd", phase="backward", reads=[d, logits], writes=[dy])
    b.op("layer.bwd", phase="backward", reads=[dy, h], writes=[dh], layer=0)
    b.op("embed.bwd", phase="backward", reads=[dh, table], writes=[dt])
    trace = b.build()
    got = blocks(trace)
    assert [block.layer for block in got] == [-1, 0, -1]
    assert [block.backward for block in got] == [(6,), (5,), (3, 4)]


def test_a_tied_weight_does_not_hide_where_stages_end() -> None:
    """Half of its gradient, made in the last stage, waits for the other half through all of backward."""
    b = TraceBuilder()
    tokens, table = b.tensor("tokens", 1, "input"), b.tensor("table", 9, "weight")
    x = [b.tensor(f"x{i}", 4) for i in range(5)]
    b.op("f0", reads=[tokens, table], writes=[x[0]], layer=0)
    for i in range(1, 4):
        b.op(f"f{i}", reads=[x[i - 1]], writes=[x[i]], layer=i)
    b.op("f4", reads=[x[3], table], writes=[x[4]], layer=4)
    d = [b.tensor(f"d{i}", 4, "temporary") for i in range(5)]
    half, other = b.tensor("half", 9, "temporary"), b.tensor("other", 9, "temporary")
    b.op("loss", "loss", phase="backward", reads=[x[4]], writes=[d[4]], layer=4)
    b.op("b4.table", phase="backward", reads=[d[4], x[3]], writes=[half], layer=4)
    b.op("b4", phase="backward", reads=[d[4], table], writes=[d[3]], layer=4)
    for i in (3, 2, 1):  # nothing but the gradients tells where an op of no layer belongs
        b.op(f"b{i}.free", phase="backward", reads=[d[i]], writes=[b.tensor(f"e{i}", 3, "temporary")])
        b.op(f"b{i}", phase="backward", reads=[d[i], x[i - 1], x[i]], writes=[d[i - 1]])
    b.op("b0", phase="backward", reads=[d[0], tokens], writes=[other])
    b.op("tie", phase="backward", reads=[half, other], writes=[b.tensor("table.grad", 9, "gradient")])
    trace = b.build()
    got = chain(trace, [1] * len(trace.ops))
    names = [[trace.ops[op].name for op in stage.backward] for stage in got.stages]
    assert names[::-1] == [["loss", "b4.table", "b4"], *([f"b{i}.free", f"b{i}"] for i in (3, 2, 1)), ["b0", "tie"]]


def test_a_long_trace_is_cut_in_a_moment() -> None:
    trace = synthetic.w1(450)
    got = chain(trace, ns(trace))
    assert len(got) == 900 + 4  # layer 0 starts from the input, which is not an activation


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
FAMILIES = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 100},
    "bert": {"model_type": "bert", **SMALL, "max_position_embeddings": 64, "type_vocab_size": 2},
    "llama": {"model_type": "llama", **SMALL},
    "qwen": {"model_type": "qwen2", **SMALL, "num_key_value_heads": 2},
    "mixtral": {"model_type": "mixtral", **SMALL, **EXPERTS, "num_local_experts": 4},
    "deepseek": {
        "model_type": "deepseek",
        **SMALL,
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_is_a_chain_of_its_layers(family: str, precision: str) -> None:
    trace = transformer(FAMILIES[family], batch=2, sequence=16, precision=precision)
    stages = chain(trace, [1] * len(trace.ops)).stages
    assert sum(len(stage.forward) for stage in stages) == len(forward_ops(trace))
    # each of the three layers is cut from its neighbours at least
    assert len(stages) >= 3
    assert all(stage.backward for stage in stages)
