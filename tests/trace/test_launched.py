"""What a trace says of launches, and what is left of it in a rewritten trace."""

from __future__ import annotations

from sim import load_profile
from sim.engine.prepare import prepare
from sim.layout import lay_out
from sim.rewrites.batching import split_batch
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


def test_without_such_facts_none_are_added():
    assert not {AWAITED, CAPTURED} & split_batch(TRACE, 2).meta.keys()


def test_what_is_known_of_another_trace_of_the_structure_is_not_taken_over():
    """Sizes share what a stack makes of them, but not with a trace that says what is awaited."""
    plain, other = (transformer("gpt2", batch=batch, sequence=16, precision="amp_bf16") for batch in (8, 16))
    facts = {**plain.meta, AWAITED: [plain.op_id("h1.attn.core")]}
    same = {"outputs": plain.outputs, "carry": plain.carry, "like": plain}
    said = Trace(plain.tensor_columns, plain.op_columns, meta=facts, **same)
    assert said.structure is plain.structure is other.structure
    for trace in (plain, other, said, plain):
        made = as_workload(trace, "fused")
        waits = [made.op_id("h1.attn.core")] if trace is said else None
        assert made.meta.get(AWAITED) == waits
