"""New 16-bit weights take their gradients' place: which do, which cannot, and what the check of values refuses."""

from __future__ import annotations

import pytest

from sim.rewrites.fused_update import touched_once
from sim.rewrites.masters import held_weights, into_gradients, updated_weights, without_held_weights
from sim.rewrites.rewriter import Rewriter
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from workloads.transformer import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}


def step(precision: str, optimizer: str) -> Trace:
    return transformer(TINY, batch=2, sequence=32, precision=precision, optimizer=optimizer)


def weights(trace: Trace) -> list[int]:
    return [t.id for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0]


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach", "adamw_8bit", "lion", "sgd_momentum"])
def test_with_masters_every_weight_ends_with_backward_and_its_gradient_s_place_is_the_new_one_s(optimizer) -> None:
    trace = step("mixed_fp16", optimizer)
    new = into_gradients(trace)
    names = [t.name for t in new.tensors]
    for w in weights(new):
        assert all(new.ops[op].phase != "update" for op in new.readers(w))
        fresh = names.index(f"{names[w]}.new")
        assert names[new.tensor_columns.replaces[fresh]] == f"{names[w]}.grad"
        assert (fresh, w) in new.carry
    assert not departures(new, trace)
    assert new.touched.tolist() == trace.touched.tolist()
    assert into_gradients(new) is new


@pytest.mark.parametrize("precision", ["mixed_fp16", "megatron_bf16"])
@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach", "adamw_loop"])
def test_what_an_update_only_holds_it_does_not_read(precision, optimizer) -> None:
    trace = step(precision, optimizer)
    new = without_held_weights(trace)
    for w in weights(new):
        assert all(new.ops[op].phase != "update" for op in new.readers(w))
        assert new.replaced_by[w] == trace.replaced_by[w] >= 0
    assert not departures(new, trace)
    assert new.touched.tolist() == trace.touched.tolist()
    assert without_held_weights(new) is new


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp_bf16"])
def test_without_masters_every_update_reads_its_weight(precision, optimizer) -> None:
    trace = step(precision, optimizer)
    assert into_gradients(trace) is without_held_weights(trace) is trace
    for op in trace.ops:
        assert not held_weights(trace, op.reads, op.writes)


def test_gradients_of_another_size_and_those_that_a_program_holds_keep_their_place() -> None:
    for precision, optimizer in (("megatron_bf16", "adamw_fused"), ("mixed_fp16", "adamw_loop")):
        trace = step(precision, optimizer)
        new = into_gradients(trace)
        kept = [w for w in weights(new) if new.replaced_by[w] >= 0]
        sizes = trace.tensor_columns.bytes
        if precision == "megatron_bf16":  # its gradients are in fp32
            assert len(kept) == len(weights(trace))
            assert all(2 * sizes[w] == sizes[g] for w, (g, _, _) in updated_weights(trace).items())
        else:  # the loop holds those of a layer until the layer's last update
            assert 0 < len(kept) < len(weights(trace))
        assert not departures(new, trace)


def test_a_kernel_without_masters_touches_its_weights() -> None:
    # a small parameter has moments in fp32 under 8-bit Adam, which are no masters
    trace = step("bf16", "adamw_8bit")
    (op,) = (op for op in trace.ops if op.name == "optimizer.h0.step")
    large = [t for t in (*op.reads, *op.writes) if trace.tensors[t].shape != ()]
    assert touched_once(trace, op.reads, op.writes) == large


def planted(fault: str) -> tuple[Trace, Trace]:
    """Two weights with masters (or without), and a rewrite in which their updates go wrong."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    ws = [b.tensor(f"w{i}", 100, "weight", dtype="fp16") for i in range(2)]
    y = b.tensor("y", 1)
    b.op("f", "matmul", reads=[x, *ws], writes=[y], duration=1)
    gs = [b.tensor(f"w{i}.grad", 100, "gradient", dtype="fp16") for i in range(2)]
    b.op("b", "matmul", reads=[x, y, *ws], writes=gs, phase="backward", duration=1)
    master = "moment" if fault == "no master" else "master"
    states = [b.tensor(f"w{i}.{master}", 200, "optimizer_state", dtype="fp32") for i in range(2)]
    for i in range(2):
        fresh = [b.tensor(f"w{i}.new", 100, "weight", dtype="fp16", replaces=ws[i])]
        fresh.append(b.tensor(f"w{i}.{master}.new", 200, "optimizer_state", dtype="fp32", replaces=states[i]))
        b.op(f"adam{i}", "optimizer", reads=[gs[i], ws[i], states[i]], writes=fresh, phase="update", duration=1)
    trace = b.build()
    new = Rewriter(trace)
    new.all_tensors()
    places = {0: 1, 1: 0} if fault == "another's place" else {0: 0, 1: 1}
    for i in range(2):
        if fault == "another's place" and i == 1:
            continue  # the first one has taken it
        new.builder.take_over(trace.tensor_id(f"w{i}.new"), gs[places[i]])
    for op in sorted(trace.ops, key=lambda op: op.name == "adam0" if fault == "another's place" else 0):
        own = set(ws) if op.phase == "update" else set()
        dropped = {gs[0]} if fault == "no gradient" and op.name == "adam0" else set()
        new.op(op, reads=[t for t in op.reads if t not in own | dropped], writes=op.writes)
    return new.build(outputs=trace.outputs, carry=trace.carry), trace


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("no master", "op 'adam0' does not read 'w0'"),
        ("another's place", "op 'adam0' writes 'w0.new' in place of 'w1.grad'"),
        ("no gradient", "op 'adam0' does not read 'w0.grad'"),
    ],
)
def test_only_a_weight_with_a_master_is_left_unread_and_only_its_own_gradient_is_replaced(fault, said) -> None:
    found = [departure.text for departure in departures(*planted(fault))]
    assert (not found) if not said else any(said in text for text in found), found
