"""Who launches ops: the figures by stack, what a profile says of it, and what a trace makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from sim import load_profile, simulate
from sim.analysis.stalls import stalls
from sim.engine.prepare import prepare
from sim.errors import PolicyError, ProfileError, TraceError
from sim.hardware.assemble import dispatch_parts
from sim.hardware.cost import LOOPED, op_times
from sim.hardware.dispatch import dispatched
from sim.layout import lay_out
from sim.rewrites.rewriter import with_columns
from sim.trace.launched import AWAITED, CAPTURED
from sim.trace.op import PHASES
from workloads import transformer, with_stack
from workloads.stacks import STACKS

NARROW = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 4, "n_head": 2}
TINY = transformer(NARROW, batch=1, sequence=16, precision="amp_bf16")


def machine(**changes: str):
    return load_profile("h100", overrides=changes or None)


def test_every_stack_has_figures_each_with_its_source_and_standing():
    assert set(dispatch_parts("cpu")) == set(STACKS)
    assert set(dispatch_parts("graphs")) == {"graphs"}
    facts = [fact for fact in machine(dispatch="cpu").facts if fact.path.startswith("dispatch.")]
    assert len(facts) >= 3 * len(STACKS)
    assert all(fact.source and fact.standing for fact in facts)


def test_without_it_the_machine_is_as_before():
    plain, none = machine(), machine(dispatch="none")
    assert plain.dispatch == () == none.dispatch
    assert plain.content_hash == none.content_hash != machine(dispatch="cpu").content_hash
    assert not [fact for fact in plain.facts if fact.path.startswith("dispatch.")]


def test_every_op_takes_what_its_phase_does():
    platform = machine(dispatch="cpu")
    figures = {known.stack: known for known in platform.dispatch}["eager"]
    found = prepare(TINY, platform).dispatch
    assert found is not None
    for op in TINY.ops:
        assert found.each[op.id] == getattr(figures, op.phase)
    assert {op.phase for op in TINY.ops} == set(PHASES)


def test_a_cpu_half_as_fast_takes_twice_as_long():
    once, twice = (machine(dispatch="cpu", dispatch_scale=scale).dispatch for scale in ("1", "2"))
    assert [2 * a.forward for a in once] == [b.forward for b in twice]


def test_a_small_model_is_bound_by_the_cpu_and_a_graph_frees_it():
    """Eager it takes the sum of all dispatches and the last op; as one graph what the device takes."""
    eager, graph, free = (simulate(TINY, machine(dispatch=by)).log for by in ("cpu", "graphs", "none"))
    each = prepare(TINY, eager.platform).dispatch.each
    last = int((eager.interval("end") - eager.interval("start"))[-1])
    assert eager.end == int(each.sum()) + last > 1.5 * free.end
    assert free.end < graph.end < free.end + 10_000  # 2.5 us, and a nanosecond per op until the device is behind
    assert stalls(graph).stall_ns < 5_000
    assert "launch" in stalls(eager).by_cause
    assert "launch" not in stalls(free).by_cause


def test_a_large_model_hides_it():
    trace = transformer("llama2-7b", batch=1, sequence=2048, precision="bf16")
    bound, free = (simulate(trace, machine(dispatch=by), budget="200 GB").log for by in ("cpu", "none"))
    assert free.end < bound.end < 1.001 * free.end


def test_what_is_captured_is_dispatched_as_one():
    platform = machine(dispatch="cpu")
    trace = with_columns(TINY, {**TINY.meta, CAPTURED: [[3, 4, 5], [9, 10]]})
    plain, found = (dispatched(t, platform, prepare(t, platform).times.engine).each for t in (TINY, trace))
    assert np.flatnonzero(plain != found).tolist() == [4, 5, 10]
    assert not found[[4, 5, 10]].any()


def test_where_the_program_reads_from_the_device_the_cpu_begins_afresh():
    """The device is idle for what dispatching the ops from there to the first long one takes; a graph reads nothing."""
    trace = transformer("gpt2-medium", batch=8, sequence=512, precision="bf16")
    middle = len(trace.ops) // 2
    read = with_columns(trace, {**trace.meta, AWAITED: [middle]})
    platform = machine(dispatch="cpu")
    assert prepare(read, platform).dispatch.synchronized == {middle}
    free, bound = (simulate(t, platform).log for t in (trace, read))
    start = {log: int(log.interval("start")[log.interval("op") == middle].max()) for log in (free, bound)}
    each = prepare(read, platform).dispatch.each
    assert start[bound] == start[free] + int(each[middle])
    assert bound.end - free.end >= int(each[middle])
    assert simulate(read, machine(dispatch="graphs")).log.end == simulate(trace, machine(dispatch="graphs")).log.end


def test_an_optimizer_that_goes_through_parameters_one_by_one_launches_eight_kernels_for_each():
    trace = transformer("gpt2", batch=1, sequence=16, optimizer="adamw_loop")
    found = prepare(trace, machine(dispatch="cpu")).dispatch.each
    eager = {known.stack: known for known in machine(dispatch="cpu").dispatch}["eager"]
    updates = [op.id for op in trace.ops if op.phase == "update"]
    assert set(found[updates].tolist()) == {8 * eager.backward}
    for stack in ("compiled", "compiled_layers"):  # the optimizer runs eagerly there, too
        other = with_stack(transformer("gpt2", batch=1, sequence=16, optimizer="adamw_loop"), stack)
        found = prepare(other, machine(dispatch="cpu")).dispatch.each
        updates = [op.id for op in other.ops if op.phase == "update"]
        assert set(found[updates].tolist()) == {8 * eager.backward}


def test_where_layers_are_compiled_what_lies_outside_is_dispatched_eagerly():
    known = {each.stack: each for each in machine(dispatch="cpu").dispatch}
    trace = with_stack(transformer("gpt2", batch=1, sequence=16), "compiled_layers")
    each = prepare(trace, machine(dispatch="cpu")).dispatch.each.tolist()
    found = {(op.phase, op.layer >= 0): each[op.id] for op in trace.ops if op.phase != "update"}
    assert found == {
        (phase, inside): getattr(known["compiled_layers" if inside else "eager"], phase)
        for phase in ("forward", "backward")
        for inside in (False, True)
    }
    assert len({*found.values()}) == 3  # 12 us, and 13 and 9


@pytest.mark.parametrize("ids", [[-1], [10**6], ["x"], [1.5], [True], 7.5])
def test_facts_that_list_no_ops_are_refused(ids):
    for fact, value in ((AWAITED, ids), (CAPTURED, [ids])):
        with pytest.raises(TraceError, match=rf"meta '{fact}': needs ids of ops from 0 to \d+, has"):
            simulate(with_columns(TINY, {**TINY.meta, fact: value}), machine(dispatch="cpu"))


def test_where_each_kernel_is_an_op_none_stands_for_several():
    """Captured, the loop is eight ops per parameter, of the names of PyTorch's; fused, all parameters are one op."""
    eager = {known.stack: known for known in machine(dispatch="cpu").dispatch}["eager"]
    trace = transformer("gpt2", batch=1, sequence=16, optimizer="adamw_loop")
    names = [op.name.replace("optimizer.", "mul_.") for op in trace.ops]
    captured = with_columns(trace, name=names)
    updates = [op.id for op in trace.ops if op.phase == "update"]
    assert set(prepare(captured, machine(dispatch="cpu")).dispatch.each[updates].tolist()) == {eager.update}
    fused = with_stack(trace, "fused")
    updates = [op.id for op in fused.ops if op.phase == "update"]
    assert set(prepare(fused, machine(dispatch="cpu")).dispatch.each[updates].tolist()) == {eager.update}


@pytest.mark.parametrize(("optimizer", "matrix", "vector"), [("adamw_loop", 8, 8), ("adafactor", 18, 9)])
def test_each_kernel_of_a_loop_has_a_launch_on_the_device_as_well(optimizer, matrix, vector):
    """Against the same ops named as a capture names them, which are a kernel each: 6 us more per further kernel."""
    platform = machine()
    trace = transformer("gpt2", batch=1, sequence=16, optimizer=optimizer)
    single = with_columns(trace, name=[op.name.replace("optimizer.", "mul_.") for op in trace.ops])
    more = (op_times(trace, platform).total - op_times(single, platform).total).tolist()
    for op in trace.ops:
        shapes = [trace.tensors[t].shape for t in op.reads if trace.tensors[t].role == "weight"]
        kernels = 1 if op.phase != "update" else matrix if len(shapes[0]) > 1 else vector
        assert more[op.id] == (kernels - 1) * 6_000, op.name
    measured = with_columns(trace, duration=np.full(len(trace.ops), 5))
    assert set(op_times(measured, platform).total.tolist()) == {5}
    fused = with_stack(transformer("gpt2", batch=1, sequence=16, optimizer="adamw_loop"), "fused")
    plain = with_columns(fused, meta={**fused.meta, "optimizer": "adamw_foreach"})
    assert op_times(fused, platform).total.tolist() == op_times(plain, platform).total.tolist()


def test_adafactor_launches_what_pytorch_does_for_each_parameter_and_waits_for_the_device():
    """Kernels as PyTorch dispatches them for a matrix and a vector; its norms are read with `item()` each time."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Kernels(TorchDispatchMode):
        count = reads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            of_step = any(isinstance(a, torch.Tensor) and a is step for a in args)
            if "profiler" not in str(func) and not of_step:
                is_read = "_local_scalar_dense" in str(func)
                self.reads, self.count = self.reads + is_read, self.count + (not is_read)
            return func(*args, **(kwargs or {}))

    counts = []
    for shape in ((8, 4), (8,)):
        weight = torch.nn.Parameter(torch.ones(shape))
        weight.grad = torch.ones(shape)
        optimizer = torch.optim.Adafactor([weight])
        optimizer.step()
        step = optimizer.state[weight]["step"]
        with Kernels() as kernels:
            optimizer.step()
        counts.append(kernels.count)
        assert kernels.reads
    assert tuple(counts) == LOOPED["adafactor"]

    trace = transformer("gpt2", batch=1, sequence=16, optimizer="adafactor")
    found = prepare(trace, machine(dispatch="cpu")).dispatch
    eager = {known.stack: known for known in machine(dispatch="cpu").dispatch}["eager"]
    of_name = {op.name: int(found.each[op.id]) for op in trace.ops if op.phase == "update"}
    assert of_name["optimizer.h0.mlp.fc.weight"] == LOOPED["adafactor"][0] * eager.backward
    assert of_name["optimizer.h0.mlp.fc.bias"] == LOOPED["adafactor"][1] * eager.backward
    assert found.synchronized == {op.id for op in trace.ops if op.phase == "update"}
    assert not prepare(trace, machine(dispatch="graphs")).dispatch.synchronized


def test_tso_captures_what_short_ops_wait_for():
    """Its captured parts are launched together, so that a run that the CPU binds is shorter than without them."""
    platform = machine(dispatch="cpu")
    captured = simulate(TINY, platform, "tso")
    assert captured.plan.trace.meta[CAPTURED]
    assert captured.log.end < simulate(TINY, platform, "keep_all").log.end / 2


def test_devices_of_a_node_have_a_cpu_each():
    trace = transformer("gpt2", batch=2, sequence=16, precision="amp_bf16")
    divided, node = lay_out(trace, load_profile("h100", overrides={"dispatch": "cpu", "devices": "2"}), {"dp": 2})
    assert node.dispatch == machine(dispatch="cpu").dispatch
    log = simulate(divided, node).log
    assert stalls(log).by_cause["launch"] > 0


def test_what_a_graph_cannot_capture_is_refused_in_a_line():
    platform = machine(dispatch="graphs")
    with pytest.raises(PolicyError, match=r"'dtr' decides while it runs.*dispatch = \"cpu\""):
        simulate(TINY, platform, "dtr", budget="1 MB")
    with pytest.raises(PolicyError, match="on 'cpu', which no graph captures"):
        simulate(TINY, platform, "zero_offload")
    assert simulate(TINY, platform, "full_recompute").log.complete


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dispatch": "cpus"}, "did you mean 'cpu'"),
        ({"dispatch_scale": "0"}, "expected a number above 0, up to 100"),
    ],
)
def test_a_mistake_is_one_line(changes, said):
    with pytest.raises(ProfileError, match=said):
        machine(**changes)
