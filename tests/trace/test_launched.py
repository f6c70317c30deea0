"""What a trace says of launches, and what is left of it in a rewritten trace."""

from __future__ import annotations

import numpy as np
import pytest

from sim import load_profile, simulate
from sim.engine.prepare import prepare
from sim.hardware.dispatch import dispatched
from sim.layout import lay_out
from sim.rewrites.batching import split_batch
from sim.rewrites.ranks import all_ranks
from sim.rewrites.rewrite import cut, reorder
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace
from sim.trace.launched import AWAITED, CAPTURED
from workloads import transformer, with_stack
from workloads.stacks import as_workload

TRACE = transformer("gpt2", batch=4, sequence=16, precision="amp_bf16")
PART = ("h0.ln2", "h0.mlp.fc.weight.cast", "h0.mlp.fc.input.cast", "h0.mlp.fc.bias.cast", "h0.mlp.fc")


def _said(**facts):
    """The trace with ops given by name."""
    return with_columns(TRACE, {**TRACE.meta, **facts})


def _ids(*names):
    return [TRACE.op_id(name) for name in names]


def _names(trace, ids):
    return [trace.ops[op].name for op in ids]


def test_each_microbatch_waits_and_is_launched_for_itself():
    trace = split_batch(_said(**{AWAITED: _ids("h1.attn.core", "h2.mlp.fc"), CAPTURED: [_ids(*PART)]}), 2)
    found = ["h1.attn.core.mb0", "h2.mlp.fc.mb0", "h1.attn.core.mb1", "h2.mlp.fc.mb1"]
    assert _names(trace, trace.meta[AWAITED]) == found
    first, second = (_names(trace, part) for part in trace.meta[CAPTURED])
    assert first == ["h0.ln2.mb0", PART[1], "h0.mlp.fc.input.cast.mb0", PART[3], "h0.mlp.fc.mb0"]
    assert second == ["h0.ln2.mb1", "h0.mlp.fc.input.cast.mb1", "h0.mlp.fc.mb1"]


def test_a_kernel_of_several_ops_is_awaited_and_captured_for_each():
    trace = with_stack(_said(**{AWAITED: _ids("h0.attn.add"), CAPTURED: [_ids(*PART)]}), "fused")
    (kernel,) = trace.meta[AWAITED]
    (part,) = trace.meta[CAPTURED]
    assert {"h0.attn.add", "h0.ln2"} <= set(_names(TRACE, [same.id for same in trace.origin.ops[kernel].parts]))
    assert part == sorted({kernel, *(trace.op_id(name) for name in ("h0.mlp.fc", PART[1], PART[3]))})


def test_every_device_waits():
    said = _said(**{AWAITED: _ids("h1.attn.core", "h11.attn.core")})
    trace, platform = lay_out(said, load_profile("h100", overrides={"dispatch": "cpu"}), {"pp": 2})
    assert [trace.ops[op].device for op in trace.meta[AWAITED]] == [0, 1]
    assert prepare(trace, platform).dispatch.synchronized == set(trace.meta[AWAITED])


UPDATES = ("optimizer.h0.step", "optimizer.h1.step", "optimizer.h2.step")


def _layout(said, **layout):
    return lay_out(said, load_profile("h100", overrides={"dispatch": "cpu", "devices": "8"}), layout)[0]


def test_ops_in_another_order_are_found_again():
    said = _said(**{AWAITED: _ids("wte"), CAPTURED: [_ids(*PART)]})
    late = _ids("wte", "h0.mlp.fc.weight.cast")  # the one before positions, the other before the norm
    order = [op.id for op in TRACE.ops if op.id not in late]
    order.insert(order.index(TRACE.op_id("wpe")), late[0])
    order.insert(order.index(TRACE.op_id("h0.attn.qkv")), late[1])
    new = reorder(said, order)
    assert new.meta[AWAITED] != said.meta[AWAITED]
    assert _names(new, new.meta[AWAITED]) == ["wte"]
    (part,) = (_names(new, part) for part in new.meta[CAPTURED])
    assert part == [PART[1], PART[0], *PART[2:]]


@pytest.mark.parametrize("policy", ["superoffload(on_device=2)", "optimizer_in_backward", "stronghold"])
def test_policies_that_move_the_update_keep_what_is_named(policy):
    trace = transformer("gpt2", batch=1, sequence=16, precision="mixed_fp16", optimizer="adamw_fused")
    names = ["wte.bwd", "h3.attn.core"]
    said = with_columns(trace, {**trace.meta, AWAITED: [trace.op_id(name) for name in names]})
    ran = simulate(said, load_profile("gh200"), policy).plan.trace
    assert sorted(_names(ran, ran.meta[AWAITED])) == sorted(names)


def test_a_policy_that_captures_keeps_what_was_captured():
    said = _said(**{CAPTURED: [_ids(*PART)]})
    ran = simulate(said, load_profile("h100", overrides={"dispatch": "cpu"}), "tso").plan.trace
    first, *own = ran.meta[CAPTURED]
    assert sorted(_names(ran, first)) == sorted(PART)
    assert own


def test_of_a_part_of_the_trace_only_what_is_there_is_named():
    said = _said(**{AWAITED: _ids("wte", "h11.attn.core"), CAPTURED: [_ids("wpe", "h11.mlp.fc"), _ids("h11.ln2")]})
    new = cut(said, 40)
    assert _names(new, new.meta[AWAITED]) == ["wte"]
    assert [_names(new, part) for part in new.meta[CAPTURED]] == [["wpe"]]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_all_ranks_wait_each_at_its_own_op(layout):
    one = _layout(_said(**{AWAITED: _ids("h3.attn.core"), CAPTURED: [_ids("h0.ln2", "h1.ln2")]}), **layout)
    every = all_ranks(one)
    assert every.devices == 2 > one.devices
    (waits,) = one.meta[AWAITED]
    assert [every.ops[op].device for op in every.meta[AWAITED]] == [0, 1]
    assert {name.partition("@")[0] for name in _names(every, every.meta[AWAITED])} == {one.ops[waits].name}
    assert [{every.ops[op].device for op in part} for part in every.meta[CAPTURED]] == [{0}, {1}]


def test_an_op_that_becomes_several_is_one_graph_and_one_wait():
    said = _said(**{AWAITED: _ids(UPDATES[0]), CAPTURED: [_ids(*UPDATES)]})
    new = _layout(said, tp=2)
    several = [op.id for op in new.ops if op.name.startswith(UPDATES)]
    assert len(several) > len(UPDATES)
    assert new.meta[AWAITED] == several[:1]
    assert new.meta[CAPTURED] == [several]


def test_each_stage_launches_its_part():
    last = "optimizer.h11.step"
    new = _layout(_said(**{CAPTURED: [_ids(last, *UPDATES)]}), pp=2)
    found = {new.ops[part[0]].device: _names(new, part) for part in new.meta[CAPTURED]}
    assert found == {0: list(UPDATES), 1: [last]}


@pytest.mark.parametrize("part", [[3, 3], [4, 3]], ids=str)
def test_a_part_is_launched_with_the_first_of_its_ops(part):
    """However they are listed, and before a rewrite as after it."""
    platform = load_profile("h100", overrides={"dispatch": "cpu"})
    plain, said = (
        dispatched(trace, platform, prepare(trace, platform).times.engine).each
        for trace in (TRACE, _said(**{CAPTURED: [part]}))
    )
    assert np.flatnonzero(plain != said).tolist() == sorted({*part} - {3})


def test_without_such_facts_none_are_added():
    assert not {AWAITED, CAPTURED} & split_batch(TRACE, 2).meta.keys()


def test_what_is_known_of_another_trace_of_the_structure_is_not_taken_over():
    """Sizes share what a stack makes of them, but not with a trace that says what is awaited."""
    plain = transformer("gpt2", batch=4, sequence=16, precision="fp32")
    facts = {**plain.meta, AWAITED: [plain.op_id("h1.attn.core")]}
    same = {"outputs": plain.outputs, "carry": plain.carry, "like": plain}
    other, said = (Trace(plain.tensor_columns, plain.op_columns, meta=meta, **same) for meta in (plain.meta, facts))
    assert said.structure is plain.structure is other.structure
    for trace in (plain, other, said, plain):
        made = as_workload(trace, "fused")
        waits = [made.op_id("h1.attn.core")] if trace is said else None
        assert made.meta.get(AWAITED) == waits
