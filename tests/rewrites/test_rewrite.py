"""A rewritten trace computes what its base computes: by its origin, and by running both on numbers."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.errors import TraceError
from sim.rewrites.batching import batched
from sim.rewrites.rewrite import (
    Codec,
    choose_implementation,
    cut,
    encode,
    pack_tensors,
    pipeline,
    reorder,
    split_batch,
    split_tensors,
    to_engine,
    unroll,
)
from sim.rewrites.rewriter import Rewriter
from sim.rewrites.symbolic import op_values, plain_values
from sim.rewrites.values import check_origin, departures
from sim.trace import Implementation, Trace, TraceBuilder
from sim.trace.origin import Encoded, Glue, Lossy, Microbatch, Part, Same, leaves
from tests.strategies import traces
from workloads.synthetic import random_dag, unet, w1

# ---- a machine that runs traces on numbers: shares no code with the check --------------------------

few = settings(max_examples=40, deadline=None)
ROWS, PRIME = 12, 2**31 - 1
Number = int | list[int]


def function(op: int, k: int, *values: object) -> int:
    return zlib.crc32(repr((op, k, values)).encode()) % PRIME


class Machine:
    """Runs a trace: a tensor with a batch is a list of 12 rows, any other is one number.

    An op that may be split by batch maps rows to rows, and sums over them what has none.
    """

    def __init__(self, base: Trace) -> None:
        self.base, self.rows = base, batched(base).tolist()

    def start(self, tensor: int, iteration: int) -> Number:
        if self.rows[tensor]:
            return [function(-1, tensor, iteration, row) for row in range(ROWS)]
        return function(-1, tensor, 0)

    def op(self, op: int, reads: list[Number]) -> list[Number]:
        """What base op `op` makes of its reads, whatever rows they hold."""
        split = "batch" in self.base.ops[op].splits
        base_reads = self.base.reads(op)
        rows = max((len(v) for v in reads if isinstance(v, list)), default=ROWS)
        out: list[Number] = []
        for k, t in enumerate(self.base.writes(op)):
            if not split:
                assert not any(isinstance(v, list) for v in reads)
                out.append(function(op, k, *reads))
                continue
            # a sum of gradients, made part by part, is linear: it may only be added
            linear = not self.rows[t] and not any(self.rows[r] for r in base_reads)
            if linear:
                out.append(sum(v for v in reads if isinstance(v, int)) % PRIME)
                continue
            per_row = [function(op, k, *(v[r] if isinstance(v, list) else v for v in reads)) for r in range(rows)]
            out.append(per_row if self.rows[t] else sum(per_row) % PRIME)
        return out

    def run_base(self, iterations: int = 1) -> list[Number]:
        """The values of the base's outputs after some iterations."""
        carried: dict[int, Number] = {}
        for i in range(iterations):
            values = {t: carried.get(t, self.start(t, i)) for t in range(len(self.base.tensors))}
            for op in range(len(self.base.ops)):
                made = self.op(op, [values[t] for t in self.base.reads(op)])
                values.update(zip(self.base.writes(op), made, strict=True))
            carried = {first: values[last] for last, first in self.base.carry}
        return [values[t] for t in self.base.outputs]

    def run(self, trace: Trace) -> list[Number]:
        """The values of a rewritten trace's outputs, op by op."""
        assert trace.origin is not None
        values: dict[int, Number] = {}
        posted: dict[str, Number] = {}
        waiting: dict[str, tuple[int, ...]] = {}
        for t in np.flatnonzero(trace.producer < 0).tolist():
            expr = trace.origin.tensors[t]
            (leaf,) = leaves(expr)
            value = self.start(leaf.id, leaf.iteration)
            if isinstance(expr, Microbatch) and isinstance(value, list):
                value = value[ROWS * expr.first // expr.count : ROWS * expr.stop // expr.count]
            values[t] = value
        for op, expr in zip(trace.ops, trace.origin.ops, strict=True):
            reads = [values[t] for t in op.reads]
            if not isinstance(expr, Glue):
                made = self.op(leaves(expr)[0].id, reads)
            elif op.kind == "send":
                posted[op.group], made = reads[0], []
                values.update(dict.fromkeys(waiting.pop(op.group, ()), reads[0]))
            elif op.kind == "recv" and op.group not in posted:  # it waits beside the ops that follow
                waiting[op.group] = op.writes
                continue
            elif op.kind == "recv":
                made = [posted[op.group]]
            elif op.kind == "elementwise":
                made = [sum(v for v in reads if isinstance(v, int)) % PRIME]
            elif len(reads) > 1:
                made = [[row for v in reads if isinstance(v, list) for row in v]]
            else:
                made = reads
            values.update(zip(op.writes, made, strict=True))
        return [values[t] for t in trace.outputs]


def faithful(rewritten: Trace, base: Trace, iterations: int = 1) -> None:
    assert departures(rewritten, base) == ()
    machine = Machine(base)
    assert machine.run(rewritten) == machine.run_base(iterations)


# ---- every rewrite, on random traces -------------------------------------------------------------


@few
@given(traces(), st.integers(1, 3))
def test_unrolled_iterations_are_iterations_in_a_row(base: Trace, n: int) -> None:
    rewritten = unroll(base, n)
    assert len(rewritten.ops) == n * len(base.ops)
    faithful(rewritten, base, n)


@few
@given(traces(), st.sampled_from((2, 3, 4, 6)))
def test_microbatches_add_up_to_the_batch(base: Trace, n: int) -> None:
    rewritten = split_batch(base, n)
    faithful(rewritten, base)
    for column in ("flops",):
        assert getattr(rewritten.op_columns, column).sum() == getattr(base.op_columns, column).sum()


@few
@given(traces(), st.sampled_from((2, 3)))
def test_rewrites_of_rewrites_speak_of_the_first_base(base: Trace, n: int) -> None:
    split = split_batch(base, n)
    twice = unroll(split, 2)
    faithful(twice, base, 2)
    assert twice.origin is not None
    assert twice.origin.base == base.content_hash
    wide = [t.id for t in split.tensors if t.bytes >= 2]
    faithful_parts = split_tensors(split, dict.fromkeys(wide[::2], 2)) if wide else split
    check_origin(faithful_parts, base)


@few
@given(traces(), st.data())
def test_any_topological_order_is_the_same_computation(base: Trace, data: st.DataObject) -> None:
    # an op may come once what it reads is made, and once all who read what it overwrites have read it
    waits = [{int(p) for t in op.reads if (p := base.producer[t]) >= 0} for op in base.ops]
    for t, old in enumerate(base.tensor_columns.replaces.tolist()):
        if old >= 0:
            op = int(base.producer[t])
            waits[op] |= ({*base.readers(old)} | {int(base.producer[old])}) - {op, -1}
    order: list[int] = []
    while len(order) < len(waits):
        ready = [op for op, before in enumerate(waits) if op not in order and before <= set(order)]
        order.append(ready[data.draw(st.integers(0, len(ready) - 1))])
    faithful(reorder(base, order), base)


def test_an_order_that_breaks_a_dependency_names_it() -> None:
    base = w1(1)
    with pytest.raises(TraceError, match=r"op 'h0.qkv': tensor 'h0.ln1': reads it before 'h0.ln1' produces it"):
        reorder(base, [1, 0, *range(2, len(base.ops))])
    with pytest.raises(TraceError, match="one of them twice"):
        reorder(base, [0] * len(base.ops))


@few
@given(traces(), st.booleans(), st.sampled_from((0.25, 0.5, 1.0)))
def test_encoded_tensors_come_back_or_are_named_lossy(base: Trace, lossless: bool, ratio: float) -> None:
    phase = base.op_columns.phase
    chosen = [
        t.id
        for t in base.tensors
        if base.producer[t.id] >= 0
        and phase[base.producer[t.id]] == 0
        and base.replaced_by[t.id] < 0
        and any(phase[op] for op in base.readers(t.id))
    ]
    assume(chosen)
    rewritten = encode(base, {t: Codec("z", ratio, 5, 7, lossless=lossless) for t in chosen})
    found = departures(rewritten, base)
    if lossless:
        faithful(rewritten, base)
    else:
        late = {(base.ops[op].name, base.tensors[t].name) for t in chosen for op in base.readers(t) if phase[op]}
        assert {(d.op, d.tensor) for d in found} == late
        assert {d.what for d in found} == {"lossy"}
    assert len(rewritten.ops) == len(base.ops) + 2 * len(chosen)
    for t in chosen:
        name = base.tensors[t].name
        code = rewritten.tensors[rewritten.tensor_id(f"{name}.z")]
        assert code.bytes == -(-base.tensors[t].bytes * ratio // 1)
        # once it is encoded nothing reads the tensor itself, and nothing is decoded before that
        encoded = rewritten.op_id(f"{name}.encode")
        assert rewritten.last_use[rewritten.tensor_id(name)] == encoded
        assert rewritten.op_id(f"{name}.decode") > encoded


@few
@given(traces(), st.sampled_from((2, 3, (3, 7), (1, 1, 2))), st.data())
def test_split_tensors_are_all_there(base: Trace, parts: object, data: st.DataObject) -> None:
    need = 10
    wide = [t.id for t in base.tensors if t.bytes >= need]
    assume(wide)
    chosen = data.draw(st.sets(st.sampled_from(wide), min_size=1))
    rewritten = split_tensors(base, dict.fromkeys(chosen, parts))
    assert departures(rewritten, base) == ()
    fresh = [t for t in base.tensors if t.replaces is None]
    again = [t for t in rewritten.tensors if t.replaces is None]
    assert sum(t.bytes for t in again) == sum(t.bytes for t in fresh)


@few
@given(traces(), st.data())
def test_packed_tensors_are_found_in_their_pack(base: Trace, data: st.DataObject) -> None:
    roots = [t.id for t in base.tensors if t.replaces is None and t.role in ("weight", "gradient", "activation")]
    roots = [t for t in roots if t not in {first for _, first in base.carry}] or roots
    kinds = {base.tensors[t].role for t in roots if base.producer[t] >= 0 or base.tensors[t].role == "weight"}
    role = data.draw(st.sampled_from(sorted(kinds))) if kinds else None
    members = [t for t in roots if base.tensors[t].role == role]
    assume(members)
    chosen = data.draw(st.permutations(members).map(lambda order: order[:3]))
    rewritten = pack_tensors(base, {"pack": chosen})
    assert departures(rewritten, base) == ()
    assert rewritten.touched.tolist() == base.touched.tolist()


def test_packed_weights_are_updated_in_place_and_carried_together() -> None:
    base = random_dag(8, 3, weights=1.0)
    names = [f"w{i}" for i in range(8)]
    rewritten = pack_tensors(base, {"chunk": names})
    assert departures(rewritten, base) == ()
    assert len(rewritten.outputs) == len(rewritten.carry) == 1
    size = sum(base.tensors[base.tensor_id(name)].bytes for name in names)
    assert rewritten.tensors[rewritten.outputs[0]].bytes == size


def test_elementwise_ops_split_with_their_tensors() -> None:
    base = random_dag(4, 5, weights=1.0)
    step = next(op for op in base.ops if op.kind == "optimizer")
    rewritten = split_tensors(base, dict.fromkeys([*step.reads, *step.writes], 4), ops=[step.id])
    assert departures(rewritten, base) == ()
    pieces = [op for op in rewritten.ops if op.name.startswith(step.name + ".part")]
    assert len(pieces) == 4
    assert all(len(op.reads) == len(step.reads) for op in pieces)
    with pytest.raises(TraceError, match="is not elementwise"):
        split_tensors(base, {step.reads[0]: 4}, ops=[step.id])


# ---- engines and implementations --------------------------------------------------------------------


def test_ops_go_to_another_engine_and_nothing_else_changes() -> None:
    base = random_dag(6, 1)
    updates = [op.id for op in base.ops if op.phase == "update"]
    rewritten = to_engine(base, updates, "cpu")
    faithful(rewritten, base)
    assert {op.engine for op in rewritten.ops if op.phase == "update"} == {"cpu"}
    assert to_engine(rewritten, updates, "") == base


def test_another_implementation_changes_time_and_workspace() -> None:
    b = TraceBuilder()
    x, y = b.tensor("x", 100, "input"), b.tensor("y", 100)
    small = Implementation("small", 1.5, 0)
    fields = {"reads": [x], "writes": [y], "workspace": 64, "flops": 11, "duration": 7, "alternatives": [small]}
    b.op("f", "conv", **fields)
    base = b.build(outputs=[y])
    (op,) = choose_implementation(base, {"f": "small"}).ops
    assert (op.workspace, op.flops, op.duration, op.bytes) == (0, 17, 11, 300)
    check_origin(choose_implementation(base, {"f": "small"}), base)
    with pytest.raises(TraceError, match="did you mean 'small'"):
        choose_implementation(base, {"f": "smal"})


@few
@given(traces(), st.integers(0, 40))
def test_a_cut_trace_is_the_beginning_of_the_whole(base: Trace, n: int) -> None:
    part = cut(base, n)
    assert len(part.ops) == min(n, len(base.ops))
    for mine, old in zip(part.ops, base.ops, strict=False):
        assert mine.name == old.name
        for ids, old_ids in ((mine.reads, old.reads), (mine.writes, old.writes)):
            assert [part.tensors[t].name for t in ids] == [base.tensors[t].name for t in old_ids]
    assert {d.what for d in departures(part, base) if "carry" not in d.text} <= {"missing"}
    there = {t.name for t in part.tensors if part.producer[t.id] < 0}
    assert there == {t.name for t in base.tensors if base.producer[t.id] < 0}


# ---- pipelines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "n"), [(1, 2), (2, 4), (3, 2), (4, 8)])
def test_a_pipeline_computes_the_same(schedule: str, stages: int, n: int) -> None:
    base = w1(8)
    rewritten = pipeline(base, [i * stages // 8 for i in range(8)], n, schedule)
    faithful(rewritten, base)
    assert rewritten.devices == stages
    sent = [op for op in rewritten.ops if op.kind == "send"]
    assert len(sent) == 2 * (stages - 1) * n  # one activation and one gradient a border and microbatch
    for op in rewritten.ops:
        for t in op.reads:
            maker = int(rewritten.producer[t])
            assert maker < 0 or rewritten.ops[maker].device == op.device


@pytest.mark.parametrize(
    ("schedule", "stage", "most"), [("1f1b", 0, 4), ("1f1b", 3, 1), ("gpipe", 0, 8), ("gpipe", 3, 8)]
)
def test_a_stage_has_so_many_microbatches_in_flight(schedule: str, stage: int, most: int) -> None:
    base = w1(4)
    rewritten = pipeline(base, [0, 1, 2, 3], 8, schedule)
    flying = highest = 0
    for op in rewritten.ops:
        flying += op.name.startswith(f"h{stage}.fc2.mb") and op.kind == "matmul"
        flying -= op.name.startswith(f"h{stage}.qkv.bwd.mb")
        highest = max(highest, flying)
    assert highest == most


@few
@given(traces(update=True, cpu=False, in_place=False), st.integers(1, 3), st.sampled_from((1, 2, 3)))
def test_random_traces_in_a_pipeline_compute_the_same(base: Trace, stages: int, n: int) -> None:
    layers = 1 + max(op.layer for op in base.ops)
    assume(layers >= stages)
    rewritten = pipeline(base, [i * stages // layers for i in range(layers)], n)
    faithful(rewritten, base)


def test_a_layer_without_a_stage_is_named() -> None:
    with pytest.raises(TraceError, match=r"layer 2 of op 'h2.ln1' has no stage"):
        pipeline(w1(3), [0, 1], 2)
    with pytest.raises(TraceError, match="did you mean '1f1b'"):
        pipeline(w1(2), [0, 1], 2, "1f1")


# ---- what must be refused -----------------------------------------------------------------------------


def test_a_batch_is_split_only_where_ops_allow_it() -> None:
    b = TraceBuilder({"batch": 4})
    x, y = b.tensor("x", 8, "input"), b.tensor("y", 8)
    b.op("batchnorm", "norm", reads=[x], writes=[y])
    with pytest.raises(TraceError, match=r"op 'batchnorm' reads 'x', but may not be split by batch"):
        split_batch(b.build(), 2)
    with pytest.raises(TraceError, match="3 microbatches do not divide the batch of 4"):
        split_batch(b.build(), 3)
    with pytest.raises(TraceError, match="computed from all microbatches"):
        split_batch(unroll(random_dag(5, 1, weights=1.0), 2), 2)


def test_encoding_needs_a_backward_reader() -> None:
    with pytest.raises(TraceError, match=r"'h0.add1' is not produced in forward, read in backward"):
        encode(cut(w1(1), 10), {"h0.add1": Codec("z", 0.5)})


# ---- planted faults: each is found, and found where it is -------------------------------------------------


def copy_with(trace: Trace, **changes: dict[str, dict[str, object]]) -> Trace:
    """A copy of a rewritten trace, keeping its origin, with fields of some ops changed by name."""
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op, **changes.get("ops", {}).get(op.name, {}))
    return b.build(outputs=trace.outputs, carry=trace.carry, origin=trace.origin)


def found(trace: Trace, base: Trace) -> set[tuple[str, str]]:
    return {(d.what, d.op or d.tensor) for d in departures(trace, base)}


def test_reading_the_wrong_microbatch_is_found() -> None:
    base = w1(2)
    good = split_batch(base, 2)
    wrong = good.tensor_id("h0.ln1.mb0")
    weight = good.tensor_id("h0.wqkv")
    broken = copy_with(good, ops={"h0.qkv.mb1": {"reads": (wrong, weight)}})
    assert found(broken, base) == {("wrong", "h0.qkv.mb1")}


def test_a_forgotten_gradient_is_found() -> None:
    base = random_dag(4, 2, weights=1.0)
    good = split_batch(base, 2)
    add = next(op for op in good.ops if ".add.mb1" in op.name)
    broken = copy_with(good, ops={add.name: {"reads": add.reads[:1]}})
    assert found(broken, base) == {("wrong", add.name)}


def test_a_stale_weight_is_found() -> None:
    base = random_dag(3, 2, weights=1.0)
    good = unroll(base, 2)
    op = next(op for op in good.ops if op.name == "f1#1")
    old = {
        good.tensor_id(f"w{w.id}.new#0"): good.tensor_id(f"{w.name}#0")
        for w in base.tensors
        if w.role == "weight" and w.replaces is None and f"w{w.id}.new#0" in good.tensor_columns.name
    }
    reads = tuple(old.get(t, t) for t in op.reads)
    assert reads != op.reads
    # the old weight must not have been overwritten to be readable at all: keep both
    b = TraceBuilder()
    for t in good.tensors:
        keep = t.replaces if t.id not in old else None
        b.tensor(t.name, t.bytes, t.role, layer=t.layer, replaces=keep)
    for each in good.ops:
        b.copy_op(each, **({"reads": reads} if each.id == op.id else {}))
    broken = b.build(outputs=good.outputs, carry=good.carry, origin=good.origin)
    assert found(broken, base) == {("stale", "f1#1")}


def test_false_claims_are_found() -> None:
    base = w1(1)
    good = split_batch(base, 2)
    origin = good.origin
    assert origin is not None
    qkv, attn = good.op_id("h0.qkv.mb0"), good.op_id("h0.attn.mb0")

    def with_op(op: int, expr: object) -> set[str]:
        ops = list(origin.ops)
        ops[op] = expr  # type: ignore[call-overload]
        claimed = replace(origin, ops=tuple(ops))
        broken = Trace(good.tensor_columns, good.op_columns, outputs=good.outputs, carry=good.carry, origin=claimed)
        return {d.what for d in departures(broken, base)}

    assert "wrong" in with_op(qkv, Glue())
    assert "wrong" in with_op(qkv, Same(base.op_id("h0.qkv")))
    assert "wrong" in with_op(attn, origin.ops[qkv])
    assert "wrong" in with_op(qkv, origin.ops[good.op_id("h0.qkv.mb1")])
    assert "missing" in with_op(qkv, Glue())
    tensors = list(origin.tensors)
    tensors[good.tensor_id("h0.qkv.mb0")] = Microbatch(Same(base.tensor_id("h0.proj")), 0, 1, 2)
    claimed = replace(origin, tensors=tuple(tensors))
    broken = Trace(good.tensor_columns, good.op_columns, outputs=good.outputs, carry=good.carry, origin=claimed)
    assert {"wrong"} <= {d.what for d in departures(broken, base)}


def test_an_activation_cannot_be_there_from_the_start() -> None:
    base = w1(1)
    b = TraceBuilder.of(base)
    for op in base.ops[1:]:
        b.copy_op(op)
    origin = split_batch(base, 1).origin
    assert origin is None
    whole = reorder(base, range(len(base.ops)))
    claimed = replace(whole.origin, ops=whole.origin.ops[1:])  # type: ignore[type-var, union-attr]
    lazy = b.build(outputs=base.outputs, carry=(), origin=claimed)
    assert found(lazy, base) == {("wrong", "h0.ln1"), ("missing", "h0.ln1")}


def test_a_result_that_is_not_kept_is_found() -> None:
    base = w1(1)
    whole = reorder(base, range(len(base.ops)))
    less = Trace(whole.tensor_columns, whole.op_columns, outputs=whole.outputs[1:], carry=(), origin=whole.origin)
    assert found(less, base) == {("missing", base.tensors[base.outputs[0]].name)}


def test_an_op_done_twice_is_named_repeated() -> None:
    base = w1(1)
    whole = reorder(base, range(len(base.ops)))
    b = TraceBuilder.of(whole)
    for op in whole.ops:
        b.copy_op(op)
    again = b.tensor("again", base.tensors[1].bytes)
    first = base.ops[0]
    made = b.tensor("h0.ln1.again", base.tensors[first.writes[0]].bytes)
    b.copy_op(first, name="twice", writes=(made,))
    origin = whole.origin
    assert origin is not None
    spare = Encoded(Same(1), "none", True)
    tensors = (*origin.tensors, spare, Same(first.writes[0]))
    claimed = replace(origin, tensors=tensors, ops=(*origin.ops, Same(first.id)))
    twice = b.build(outputs=base.outputs, carry=(), origin=claimed)
    assert found(twice, base) == {("repeated", "h0.ln1")}
    assert again == len(tensors) - 2
    check_origin(twice, base)
    with pytest.raises(TraceError, match="repeated"):
        check_origin(twice, base, allowed=())


def test_a_trace_of_another_base_is_refused() -> None:
    with pytest.raises(TraceError, match="another base"):
        departures(split_batch(w1(1), 2), w1(2))


def test_expressions_cannot_be_mistaken_for_each_other() -> None:
    assert Part(Same(1), 0, 1, 2) != Microbatch(Same(1), 0, 1, 2)
    assert Lossy(Same(1), "z") != Encoded(Same(1), "z", False)


# ---- plain values ------------------------------------------------------------------------------------------


@few
@given(traces())
def test_values_differ_where_what_was_read_differs(trace: Trace) -> None:
    values = plain_values(trace)
    assert len(set(values)) == len(values)
    for op in trace.ops:
        made = op_values(op.id, [values[t] for t in op.reads], len(op.writes))
        assert made == [values[t] for t in op.writes]


def test_members_of_a_group_depend_on_each_other() -> None:
    base = unet(2)
    rewritten = pipeline(base, [0, 0, 1, 1, 1], 2)
    values = plain_values(rewritten)
    sent = next(op for op in rewritten.ops if op.kind == "send")
    got = next(op for op in rewritten.ops if op.kind == "recv" and op.group == sent.group)
    other = next(op for op in rewritten.ops if op.kind == "recv" and op.group != sent.group)
    expected = op_values(got.id, [values[sent.reads[0]]], 1)
    assert [values[got.writes[0]]] == expected
    assert values[other.writes[0]] != values[got.writes[0]]


def test_a_group_that_waits_for_itself_is_refused() -> None:
    b = TraceBuilder()
    x, y, z = (b.tensor(name, 1) for name in "xyz")
    b.op("a", "collective", group="g", writes=[x])
    b.op("between", reads=[x], writes=[y])
    b.op("b", "collective", group="g", reads=[y], writes=[z], device=1)
    with pytest.raises(TraceError, match="ops wait for each other"):
        b.build()


@few
@given(trace=traces())
def test_all_tensors_are_added_as_they_are(trace):
    new = Rewriter(trace)
    first = new.tensor(trace.tensors[0], name="before")  # so that ids differ
    ids = new.all_tensors()
    for op in trace.ops:
        new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
    built = new.build(outputs=[ids[t] for t in trace.outputs], carry=[(ids[a], ids[b]) for a, b in trace.carry])
    assert ids[0] == first + 1
    for old, copy in zip(trace.tensors, list(built.tensors)[1:], strict=True):
        replaces = None if old.replaces is None else ids[old.replaces]
        assert replace(copy, id=old.id, replaces=replaces) == replace(old, replaces=replaces)
        assert copy.replaces == replaces
    assert list(built.origin.tensors)[1:] == [Same(t) for t in range(len(trace.tensors))]


def test_slices_are_joined_on_the_engine_that_produced_them() -> None:
    b = TraceBuilder({"batch": 4})
    x, y, z = (
        b.tensor("x", 40, "input", shape=(4, 10)),
        b.tensor("y", 40, shape=(4, 10)),
        b.tensor("z", 40, shape=(4, 10)),
    )
    b.op("f", "elementwise", reads=[x], writes=[y], splits=("batch",), duration=10)
    b.op("g", "elementwise", reads=[y], writes=[z], splits=("batch",), duration=10, device=1, engine="cpu")
    b.op("last", "elementwise", reads=[y], writes=[], splits=("batch",), duration=10)
    split = split_batch(b.build(outputs=[z], carry=()), 2)
    joined = split.ops[split.op_id("z.concat")]
    assert (joined.device, joined.engine) == (1, "cpu")
