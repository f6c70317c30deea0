"""A rewritten trace at other sizes is what the rewrite makes of them, and what decides the rewrite decides it there."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest

from sim import load_policy, load_profile, simulate
from sim.experiment import problem_for
from sim.plan import Plan
from sim.policies.sharing import rewriting
from sim.rewrites.fused_update import fuse_updates
from sim.rewrites.host_update import device_updates
from sim.rewrites.resized import resized
from sim.rewrites.rewriter import Rewriter
from sim.trace import Trace
from sim.trace.tensor import ROLE_CODE
from workloads import transformer

MACHINE = load_profile("a100_80_sxm")
SMALL = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 512, "vocab_size": 256}
POLICIES = (
    *("zero_offload", "zero_offload(delayed=true)", "zero_offload(weights=host)", "zero_offload(bucket=10000)"),
    *("save_on_cpu", "offload_activations", "offload_activations(min_offload_size=200000)"),
    *("zero_offload(partition=cut)", "superoffload", "superoffload(on_device=2)", "superoffload(on_device=1, lag=0)"),
    *("zero_infinity", "zero_infinity(weights=device, bucket=10000)", "optimizer_in_backward"),
)
STEPS = (
    {"precision": "amp_bf16"},
    {"precision": "mixed_fp16", "optimizer": "adamw_fused", "attention": "flash"},
    {"precision": "fp32", "optimizer": "sgd", "attention": "eager", "dropout": 0.1},
)


def sizes(**step: object) -> list[Trace]:
    """One model at several sizes; of the first two the second is built by formulas, which the others follow."""
    pairs = (2, 256), (4, 256), (6, 512), (3, 384), (1, 17)
    return [transformer(SMALL, batch=batch, sequence=sequence, **step) for batch, sequence in pairs]


def alone(trace: Trace) -> Trace:
    """The same trace, which shares nothing."""
    return pickle.loads(pickle.dumps(trace))


def in_full(plan: Plan) -> tuple[object, ...]:
    """All that a plan says, its trace from its columns."""
    t, origin = plan.trace, plan.trace.origin
    ends = t.outputs, t.carry, dict(t.meta), origin
    return t.hashed_anew(), ends, tuple(plan.actions), dict(plan.place), plan.keep_dead, plan.notes


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["precision"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_on_a_rewritten_trace_is_what_it_would_be_alone(policy, step):
    chosen = load_policy(policy)
    structures = []
    for trace in sizes(**step):
        plan = chosen.plan(problem_for(trace, MACHINE))
        own = alone(trace)
        assert in_full(plan) == in_full(chosen.plan(problem_for(own, MACHINE)))
        assert simulate(trace, MACHINE, chosen).log == simulate(own, MACHINE, chosen).log
        structures.append(plan.trace.structure)
    if policy != "superoffload" and "size" not in policy:  # they choose by size
        assert structures[1] is structures[2] is structures[3]


def grown(trace: Trace, names: tuple[str, ...]) -> Trace:
    """The trace of the same structure with twice the bytes in tensors whose names start so."""
    t = trace.tensor_columns
    bytes = np.where([name.startswith(names) for name in t.name], 2 * t.bytes, t.bytes)
    tensors = replace(t, bytes=bytes)
    ends = {"outputs": trace.outputs, "carry": trace.carry, "meta": trace.meta}
    return Trace(tensors, trace.op_columns, **ends, like=trace)


def joined(trace: Trace, like: Trace) -> Trace:
    """A trace in the structure of another one, from which it differs in sizes alone."""
    t, c = trace.tensor_columns, trace.op_columns
    tensors = replace(like.tensor_columns, bytes=t.bytes, shape=t.shape)
    ops = replace(like.op_columns, flops=c.flops, bytes=c.bytes, workspace=c.workspace, counted=c.counted)
    return Trace(tensors, ops, outputs=like.outputs, carry=like.carry, meta=trace.meta, like=like)


def test_what_is_known_at_one_size_alone_is_known_there():
    whole = transformer(SMALL, batch=2, sequence=32)
    t, c = whole.tensor_columns, whole.op_columns
    shape = {row: each for row, each in t.shape.items() if t.role[row] == ROLE_CODE["weight"]}
    counted = {op: flops + 1 for op, flops in enumerate(c.flops.tolist()) if flops}
    bare = joined(Trace(replace(t, shape=shape), replace(c, counted=counted), meta=whole.meta), whole)
    chosen = load_policy("optimizer_in_backward")
    for first, second in ((whole, bare), (bare, whole)):
        first = alone(first)
        second = joined(second, first)
        assert second.structure is first.structure
        for trace in (first, second):
            plans = (chosen.plan(problem_for(each, MACHINE)) for each in (trace, alone(trace)))
            assert len({in_full(plan)[0] for plan in plans}) == 1


def test_where_sizes_that_decide_differ_it_is_a_new_one():
    first, second = sizes(precision="amp_bf16")[1:3]
    weight = next(each.name for each in second.tensors if each.role == "weight" and "attn" in each.name)
    larger = grown(second, (weight,))
    assert larger.structure is second.structure
    made, updates = [], device_updates(first)

    def plan(trace: Trace) -> Plan:
        return rewriting(trace, "twice", updates, lambda: made.append(trace) or Plan(fuse_updates(trace, updates)))

    for trace in (first, second, larger, first):
        assert plan(trace).trace.hashed_anew() == fuse_updates(alone(trace), updates).hashed_anew()
    assert [id(trace) for trace in made] == [id(first), id(larger)]


def encoded(trace: Trace) -> Trace:
    """A rewrite that halves what forward leaves, by its sizes."""
    new = Rewriter(trace)
    size = [each.bytes // 2 if each.role == "activation" else each.bytes for each in trace.tensors]
    ids = [new.tensor(each, bytes=size[each.id]) for each in trace.tensors]
    for op in trace.ops:
        new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes], views=op.views)
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=[(ids[a], ids[b]) for a, b in trace.carry])


def test_a_rewrite_of_other_sizes_than_those_that_decide_is_made_for_each_trace():
    plain = transformer(SMALL, batch=2, sequence=32)
    columns = replace(plain.tensor_columns, replaces=np.full(len(plain.tensors), -1, np.int32))
    first = Trace(columns, plain.op_columns, outputs=(), carry=(), meta=plain.meta)
    assert resized(first, encoded(first), device_updates(first)) is None
    assert resized(first, encoded(first), range(len(first.ops))) is not None


@pytest.mark.parametrize(
    ("own", "follows"), [({}, True), ({"flops": 8}, False), ({"bytes": 8}, False), ({"workspace": 8}, False)]
)
def test_an_op_that_a_rewrite_adds_follows_its_operands_unless_it_has_sizes_of_its_own(own, follows):
    trace = transformer(SMALL, batch=2, sequence=32)
    new = Rewriter(trace)
    new.all_tensors()
    copy = new.copier()
    for op, device in enumerate(trace.op_columns.device.tolist()):
        copy(op, trace.reads(op), trace.writes(op), device)
    new.glue("looks at it", "copy", [trace.outputs[0]], [], **own)
    assert (resized(trace, new.build(outputs=trace.outputs, carry=trace.carry), ()) is not None) == follows


def test_what_is_kept_for_a_structure_keeps_no_trace_alive():
    first, second = sizes(precision="amp_bf16")[1:3]
    policy = load_policy("zero_offload")
    gone = [weakref.ref(policy.plan(problem_for(trace, MACHINE)).trace) for trace in (first, second)]
    gone += [weakref.ref(first), weakref.ref(second)]
    kept = second.structure
    del first, second
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    assert kept.is_shared
