"""Release points through rewrites: where the new trace lets go of what the old one held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.conformance.holding import check_holding
from sim.conformance.random_traces import held, random_traces
from sim.conformance.replayed import LawBroken
from sim.layout import lay_out
from sim.rewrites.holding import with_points, with_releases
from sim.rewrites.rewrite import (
    Codec,
    cut,
    encode,
    hold_longer,
    pack_tensors,
    pipeline,
    reorder,
    split_batch,
    split_tensors,
    to_engine,
    unroll,
)
from sim.rewrites.values import check_origin
from sim.trace import Trace, TraceBuilder
from workloads import transformer


def step(*, until: str = "c", layers: bool = False) -> Trace:
    """a, b, c forward and loss, back backward; the program holds what `a` makes until the end of `until`."""
    b = TraceBuilder({"batch": 4, "samples": 4})
    x, w = b.tensor("x", 8, "input"), b.tensor("w", 4, "weight")
    last, made = x, {}
    for i, name in enumerate("abc"):
        made[name] = b.tensor(f"{name}.y", 8, layer=i if layers else -1)
        reads = [last, w] if name == "a" else [last]
        b.op(name, "elementwise", reads=reads, writes=[made[name]], layer=i if layers else -1, splits=["batch"])
        last = made[name]
    grad, new = b.tensor("dw", 4, "gradient", layer=0 if layers else -1), b.tensor("w.new", 4, "weight", replaces=w)
    fields = {"phase": "backward", "splits": ["batch"], "layer": 0 if layers else -1}
    b.op("back", "elementwise", reads=[last, made["b"], x], writes=[grad], **fields)
    b.op("step", "optimizer", phase="update", reads=[w, grad], writes=[new])
    trace = b.build()
    return with_releases(trace, [(made["a"], trace.op_id(until))])


def points(trace: Trace) -> dict[str, str]:
    """Per held tensor the op that lets it go, by name."""
    ops, tensors = trace.op_columns, trace.tensor_columns.name
    return {tensors[t]: ops.name[op] for op, rows in ops.releases.items() for t in rows}


def test_release_points_at_or_before_the_last_use_say_nothing_and_outputs_have_none():
    trace = step()
    again = with_releases(trace, [(trace.tensor_id("a.y"), 0), (trace.tensor_id("w.new"), 4), (2, 1)])
    assert points(again) == {"a.y": "b"}  # at its reader: that fixes the order in which things go
    assert points(with_releases(trace, [(2, 0)])) == {}


def unbound(trace: Trace) -> dict[str, str]:
    """Per tensor of which variables let go the op at whose end they do, by name."""
    ops, tensors = trace.op_columns, trace.tensor_columns.name
    return {tensors[t]: ops.name[op] for op, rows in ops.unbinds.items() for t in rows}


def test_what_variables_let_go_of_goes_with_the_ops():
    trace = with_points(step(), [], [(step().tensor_id("b.y"), step().op_id("c"))])
    assert unbound(trace) == {"b.y": "c"}
    assert points(trace) == {}
    assert unbound(unroll(trace, 2)) == {"b.y#0": "c#0", "b.y#1": "c#1"}
    assert unbound(split_batch(trace, 2)) == {"b.y.mb0": "c.mb0", "b.y.mb1": "c.mb1"}
    assert unbound(to_engine(trace, ["b"], "cpu")) == {"b.y": "c"}
    assert unbound(reorder(trace, ["a", "b", "c", "back", "step"])) == {"b.y": "c"}
    assert unbound(cut(trace, 2)) == {"b.y": "b"}
    assert unbound(with_releases(trace, [])) == {"b.y": "c"}


def test_iterations_hold_each_their_own():
    assert points(unroll(step(), 2)) == {"a.y#0": "c#0", "a.y#1": "c#1"}
    assert points(unroll(unroll(step(), 2), 2)) == {f"a.y#{i}#{j}": f"c#{i}#{j}" for i in (0, 1) for j in (0, 1)}


def test_parts_are_held_until_the_whole_op_has_ended():
    assert points(split_tensors(step(), {"a.y": 2})) == {"a.y.part0": "c", "a.y.part1": "c"}
    both = split_tensors(step(), {"b.y": 2, "c.y": 2}, ops=["c"])
    assert points(both) == {"a.y": "c.part1"}


def test_a_pack_is_held_as_long_as_any_of_its_members():
    assert points(pack_tensors(step(), {"pack": ["a.y", "b.y"]})) == {}  # b.y is read later than `c`
    assert points(pack_tensors(step(until="step"), {"pack": ["a.y", "b.y"]})) == {"pack.v1": "step"}


def test_microbatches_hold_each_their_own():
    assert points(split_batch(step(), 2)) == {"a.y.mb0": "c.mb0", "a.y.mb1": "c.mb1"}
    # an op that waits for all microbatches
    assert points(split_batch(step(until="step"), 2)) == {"a.y.mb0": "back.mb0", "a.y.mb1": "back.mb1"}


def test_a_code_is_not_held_and_neither_is_what_comes_of_it():
    trace = encode(step(until="back"), {"b.y": Codec("z", 0.5)})
    assert points(trace) == {"a.y": "back"}
    held_too = with_releases(step(), [(step().tensor_id("b.y"), step().op_id("step"))])
    assert points(encode(held_too, {"b.y": Codec("z", 0.5)})) == {"b.y": "step"}


def test_order_engine_and_cut():
    trace = step()
    assert points(to_engine(trace, ["b"], "cpu")) == points(trace) == {"a.y": "c"}
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    b.op("apart", duration=1)
    more = with_releases(b.build(outputs=trace.outputs), [(2, 5)])
    assert points(reorder(more, ["a", "b", "apart", "c", "back", "step"])) == {"a.y": "apart"}
    assert points(reorder(more, ["apart", "a", "b", "c", "back", "step"])) == {}  # it is let go with its reader
    assert points(cut(trace, 2)) == {"a.y": "b"}  # held to the end of what is left
    assert points(cut(step(until="step"), 4)) == {"a.y": "back"}


@pytest.mark.parametrize(
    ("layout", "released"),
    [
        ({"dp": 2}, "fc.weight.grad.reduced"),
        ({"micro_batches": 2}, "fc.weight.grad"),
        ({"dp": 2, "bucket": "ddp"}, "fc.weight.grad.reduced"),
        ({"dp": 2, "zero": 2, "micro_batches": 2}, "fc.weight.grad.shard"),
        ({"dp": 4, "zero": 3, "shard_within": 2}, "fc.weight.grad.reduced.mb0.shard"),
    ],
    ids=str,
)
def test_a_gradient_is_held_as_the_sum_of_its_terms(layout: dict, released: str) -> None:
    """A loop over parameters holds the gradients of a layer until it has updated all of them."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 8, "vocab_size": 16}
    base = transformer(config, batch=4, sequence=8, precision="fp32", optimizer="adamw_loop")
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    check_holding(trace, base)
    of_fc = {t: op for t, op in points(trace).items() if t.startswith("h0.mlp.fc.weight")}
    assert of_fc == {f"h0.mlp.{released}": points(base)["h0.mlp.fc.weight.grad"]}
    kept = [(trace.tensor_id(t), trace.op_id(op)) for t, op in points(trace).items() if t not in of_fc]
    with pytest.raises(LawBroken, match=r"holds 'h0.mlp.fc.weight.grad' until .* releases 'h0.mlp.fc.weight.grad"):
        check_holding(with_releases(trace, kept), base)


@pytest.mark.parametrize(
    ("layout", "released"),
    [
        ({"dp": 2, "ep": 2}, "grad.mb0"),
        ({"dp": 4, "ep": 4, "zero": 2}, "grad.mb0"),
        ({"dp": 2, "ep": 2, "micro_batches": 2}, "grad.sum1"),
        ({"dp": 2, "ep": 2, "cp": 2, "zero": 1}, "grad.reduced.shard"),
        ({"cp": 2, "zero": 1}, "grad.reduced.shard"),
        ({"cp": 2, "zero": 1, "micro_batches": 2}, "grad.reduced.shard"),
    ],
    ids=str,
)
def test_a_gradient_without_other_terms_is_held_as_it_is(layout: dict, released: str) -> None:
    """Where all replicas divide the experts, the one that has an expert has all of its gradient."""
    config = {"model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16,
              "num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
              "vocab_size": 16, "max_position_embeddings": 8}  # fmt: skip
    options = {"precision": "bf16", "optimizer": "adamw_loop", "attention": "flash"}
    base = transformer(config, batch=4, sequence=8, **options)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    check_holding(trace, base)
    of_experts = {t: op for t, op in points(trace).items() if t.startswith("h0.mlp.gate_up.weight.grad")}
    assert of_experts == {f"h0.mlp.gate_up.weight.{released}": points(base)["h0.mlp.gate_up.weight.grad"]}


@pytest.mark.parametrize(("until", "expected"), [("c", "b"), ("b", "b"), ("back", "back")])
def test_a_stage_lets_go_by_the_last_of_its_own_ops_before_the_release_point(until, expected):
    """Stage 0 has a and b and the backward op, stage 1 has c."""
    trace = pipeline(step(until=until, layers=True), [0, 0, 1], 2)
    assert points(trace) == {f"a.y.mb{k}": f"{expected}.mb{k}" for k in (0, 1)}


def test_slices_of_a_view_are_joined_beside_what_they_are_views_of():
    b = TraceBuilder({"batch": 4, "samples": 4})
    x, y, d = b.tensor("x", 16, "input"), b.tensor("y", 0), b.tensor("d", 0, "temporary")
    b.op("view", reads=[x], writes=[y], views=[0], splits=("batch",))
    b.op("loss", "loss", phase="backward", reads=[y, x], writes=[d], splits=("batch",))
    trace = b.build(outputs=[x, y], carry=())
    halves = split_batch(trace, 2)
    check_origin(halves, trace)
    joined = halves.ops[halves.op_id("y.concat")]
    assert {halves.tensors[t].name for t in joined.reads} == {"y.mb0", "y.mb1", "x.mb0", "x.mb1"}


@settings(max_examples=60, deadline=None)
@given(random_traces(), st.integers(1, 3), st.integers(0, 6), st.data())
def test_rewrites_of_what_holds_are_rewrites_of_what_does_not_and_hold(net, every, longer, data):
    """Release points change no op and no edge; what a rewrite holds it holds to an op that is not too early."""
    plain = with_releases(net, [])
    holds = held(plain, every, longer)
    rewrite = data.draw(st.sampled_from((lambda t: unroll(t, 2), lambda t: split_batch(t, 2), lambda t: cut(t, 5))))
    old, new = rewrite(plain), rewrite(holds)
    assert with_releases(new, []) == old
    assert (new.released[new.released >= 0] >= new.last_use[new.released >= 0]).all()
    assert bool(new.op_columns.releases) <= bool(holds.op_columns.releases)


def test_holding_longer_is_a_rewrite_that_never_holds_less():
    trace = step()
    longer = hold_longer(trace, {trace.tensor_id("a.y"): 4, trace.tensor_id("c.y"): 4, trace.tensor_id("w.new"): 4})
    assert points(longer) == {"a.y": "step", "c.y": "step"}
    check_origin(longer, trace)
    assert hold_longer(trace, {trace.tensor_id("a.y"): 1}) is trace
