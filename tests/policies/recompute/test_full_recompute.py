"""Layer checkpointing: what is dropped, what is recomputed, and what PyTorch's own checkpoint was measured to hold."""

from __future__ import annotations

from collections import Counter

import pytest

from sim import load_profile, simulate
from sim.engine.replay import replay
from sim.errors import PolicyError
from sim.experiment import problem_for
from sim.plan import Drop
from sim.policies.recompute.full_recompute import FullRecompute
from sim.rewrites.holding import with_points
from sim.sweeps.asked import asked
from sim.trace import TraceBuilder
from workloads import transformer
from workloads.synthetic import w1


def blocks(count: int, size: int = 10):
    """Layers of three ops: a saves for backward, b is large and saved, c only adds; each layer's input is x."""
    b = TraceBuilder()
    x = b.tensor("x0", size, "input")
    inner = []
    for i in range(count):
        a, big, out = (b.tensor(f"{n}{i}", s) for n, s in (("a", size), ("b", 5 * size), ("x_", size)))
        b.op(f"fa{i}", reads=[x], writes=[a], layer=i, duration=1)
        b.op(f"fb{i}", reads=[a], writes=[big], layer=i, duration=10)
        b.op(f"fc{i}", reads=[big, x], writes=[out], layer=i, duration=100)
        inner.append((x, a, big))
        x = out
    g = b.tensor("loss.grad", size, "temporary")
    b.op("loss", "loss", reads=[x], writes=[g], duration=5)
    for i in reversed(range(count)):
        x, a, big = inner[i]
        new = b.tensor(f"g{i}", size, "temporary")
        b.op(f"bwd{i}", phase="backward", reads=[g, x, a, big], writes=[new], layer=i, duration=200)
        g = new
    return b.build(outputs=[g], carry=())


def test_timeline_of_two_layers_drawn_by_hand(run):
    facts = run(blocks(2), "full_recompute")
    # forward 2 x 111, loss 5, then for each layer 1 + 10 again and 200 back; the last op only adds
    assert facts.time == 222 + 5 + 2 * (11 + 200)
    assert facts.rerun == ["fa1", "fb1", "fa0", "fb0"]
    # highest at bwd1: x0, x1, its gradient, a1, b1, and the gradient that it makes
    assert facts.peak == 10 + 10 + 10 + 10 + 50 + 10
    assert run(blocks(2), "keep_all").peak == 10 + 60 + 10 + 60 + 10 + 10


def test_what_a_variable_names_is_dropped_when_it_lets_go():
    """Two layers of blocks(): a0 is read by fb0 alone, and a variable holds it until fc0 ends."""
    plain = blocks(2)
    named = with_points(plain, [], [(plain.tensor_id("a0"), plain.op_id("fc0"))])
    drops = [
        {plan.trace.tensor_columns.name[plan.trace.tensor_id(each.tensor)]: each.after for each in plan.actions
         if isinstance(each, Drop) and each.after is not None}
        for plan in (FullRecompute().plan(problem_for(trace, load_profile("a100_80_sxm"))) for trace in (plain, named))
    ]  # fmt: skip
    assert (plain.op_id(drops[0]["a0"]), plain.op_id(drops[1]["a0"])) == (plain.op_id("fb0"), plain.op_id("fc0"))
    assert {**drops[0], "a0": None} == {**drops[1], "a0": None}


def test_without_early_stop_the_whole_layer_runs_again(run):
    facts = run(blocks(2), "full_recompute", early_stop=False)
    assert facts.rerun == ["fa1", "fb1", "fc1", "fa0", "fb0", "fc0"]
    assert facts.time == 222 + 5 + 2 * (111 + 200)


def shaped(read: bool):
    """A layer that makes a, and c of 50 bytes from it, which backward lets go of: it reads c, or its shape alone."""
    b = TraceBuilder()
    x, a, c = b.tensor("x", 10, "input"), b.tensor("a", 10), b.tensor("c", 50)
    out, loss = b.tensor("out", 10), b.tensor("loss", 1)
    b.op("fa", reads=[x], writes=[a], layer=0, duration=1)
    b.op("fc", reads=[a], writes=[c], layer=0, duration=1)
    b.op("add", reads=[c, x], writes=[out], layer=0, duration=1)
    b.op("next", reads=[out], writes=[loss], duration=1)
    g = [b.tensor(f"g{i}", 10, "temporary") for i in range(3)]
    b.op("next.b", phase="backward", reads=[loss], writes=g[:1], duration=1)
    b.op("fc.b", phase="backward", reads=[g[0], a, *([c] if read else [])], writes=g[1:2], layer=0, duration=1,
         releases=[] if read else [c])  # fmt: skip
    b.op("fa.b", phase="backward", reads=[g[1], x], writes=g[2:], layer=0, duration=1)
    return b.build(outputs=g[2:], carry=())


@pytest.mark.parametrize("read", [True, False])
def test_what_is_saved_for_its_shape_alone_goes_and_is_there_again_as_what_is_read(read, run):
    facts = run(shaped(read), "full_recompute")
    assert facts.rerun == ["fa", "fc"]
    assert facts.peak == 10 + 10 + 10 + 50 + 10  # at fc.b: x, the gradient, a, c, and what it makes
    memory = facts.result.memory
    assert set(memory[memory.cause == "dropped"].tensor) == {"a", "c"}


def nodes_of_a_layer():
    """A layer whose last op saves a weight alone and whose first saves its result; a mask of 100 bytes enters, too."""
    b = TraceBuilder()
    x0, mask0 = b.tensor("x0", 10, "input"), b.tensor("mask0", 1, "input")
    w = b.tensor("w", 10, "weight")
    x, mask, a, out, loss = (b.tensor(n, s) for n, s in (("x", 10), ("mask", 100), ("a", 20), ("out", 10), ("loss", 1)))
    b.op("start", reads=[x0], writes=[x], duration=1)
    b.op("masking", reads=[mask0], writes=[mask], duration=1)
    b.op("fa", reads=[x, mask], writes=[a], layer=0, duration=1)
    b.op("fw", reads=[a, w], writes=[out], layer=0, duration=1)
    b.op("next", reads=[out], writes=[loss], duration=1)
    g = [b.tensor(f"g{i}", 10, "temporary") for i in range(5)]
    b.op("next.b", phase="backward", reads=[loss], writes=g[:1], duration=1)
    b.op("sum.b", phase="backward", reads=g[:1], writes=g[1:2], layer=0, duration=1)
    b.op("fw.b", phase="backward", reads=[g[1], w], writes=g[2:3], layer=0, duration=1)
    b.op("fa.b", phase="backward", reads=[g[2], a], writes=g[3:4], layer=0, duration=1)
    b.op("last.b", phase="backward", reads=[g[3], w], writes=g[4:], layer=0, duration=1)
    return b.build(outputs=g[4:], carry=())


@pytest.mark.parametrize(("reentrant", "before", "rerun"), [(False, "fw.b", ["fa"]), (True, "sum.b", ["fa", "fw"])])
def test_a_layer_runs_again_before_the_node_that_a_checkpoint_runs_again_for(reentrant, before, rerun, run):
    trace = nodes_of_a_layer()
    facts = run(trace, "full_recompute", reentrant=reentrant)
    assert facts.rerun == rerun
    events, memory = facts.result.events, facts.result.memory
    names = events.op.tolist()
    assert names[names.index(before) - len(rerun) : names.index(before)] == rerun
    freed = memory[memory.delta_bytes < 0].groupby("tensor").time_ns.max()
    end = events.end_ns.max()
    # the mask, an argument of the checkpoint, is there until the last node that saved something has run
    assert freed["mask"] == end
    # a reentrant one holds its result and the gradient of that, too
    assert (freed["g0"] == end) == (freed["out"] == end) == reentrant


def test_last_layer_can_be_left_alone(run):
    facts = run(blocks(3), "full_recompute", skip_last=True)
    assert facts.rerun == ["fa1", "fb1", "fa0", "fb0"]
    assert facts.peak == run(blocks(3), "full_recompute").peak


@pytest.mark.parametrize("layers", [2, 5, 20])
def test_memory_is_one_layer_and_an_input_a_layer(layers, run):
    facts = run(blocks(layers), "full_recompute")
    assert facts.peak == 10 * layers + 10 + 60 + 10
    assert set(Counter(facts.rerun).values()) == {1}


def test_microbatches_of_one_layer_are_separate_regions(run):
    b = TraceBuilder()
    saved, outs = [], []
    for m in range(3):  # one layer only: its microbatches follow each other
        x = b.tensor(f"x{m}", 10, "input")
        a, out = b.tensor(f"a{m}", 50), b.tensor(f"out{m}", 10)
        b.op(f"fa{m}", reads=[x], writes=[a], layer=0, duration=1)
        b.op(f"fb{m}", reads=[a], writes=[out], layer=0, duration=1)
        saved.append(a)
        outs.append(out)
    for m in range(3):
        g = b.tensor(f"g{m}", 10, "temporary")
        b.op(f"b{m}", phase="backward", reads=[saved[m], outs[m]], writes=[g], layer=0, duration=1)
    trace = b.build(outputs=(), carry=())
    facts = run(trace, "full_recompute")
    assert facts.rerun == ["fa0", "fb0", "fa1", "fb1", "fa2", "fb2"]
    names = [trace.op_columns.name[op] for op in facts.result.log.interval("op").tolist()]
    assert names[6:] == ["fa0", "fb0", "b0", "fa1", "fb1", "b1", "fa2", "fb2", "b2"]
    # three inputs, and what one microbatch makes
    assert facts.peak == 30 + 50 + 10 + 10


def rectified(layer: int):
    """make, then relu_ in place, both inside layer 0 or relu_ in another one; layer 1 comes between."""
    b = TraceBuilder()
    x = b.tensor("x", 10, "input")
    a, d, e = b.tensor("a", 50), b.tensor("d", 10), b.tensor("e", 10)
    c = b.tensor("c", 50, replaces=a)
    b.op("make", reads=[x], writes=[a], layer=0, duration=1)
    b.op("relu_", reads=[a], writes=[c], layer=layer, duration=1)
    b.op("use", reads=[c], writes=[d], layer=layer, duration=1)
    b.op("next", reads=[d], writes=[e], layer=5, duration=1)
    g = b.tensor("g", 10, "temporary")
    b.op("b", phase="backward", reads=[e, c], writes=[g], layer=layer, duration=1)
    return b.build(outputs=[g], carry=())


def test_an_op_in_place_runs_again_on_what_the_layer_has_made_again(run):
    facts = run(rectified(0), "full_recompute")
    assert facts.rerun == ["make", "relu_"]  # not use: d is for the next layer alone, and is resident
    assert facts.peak == run(rectified(0), "keep_all").peak == 10 + 50 + 10 + 10
    assert facts.result.log.counters["implicit_recomputes"] == 0


def test_what_was_overwritten_outside_the_layer_does_not_run_again(run):
    assert run(rectified(3), "full_recompute").rerun == []  # relu_ would need make, of another layer


def residual(read_out: bool):
    """A block of a residual net, and the next one; its backward reads its result, as that of a relu does, or not."""
    b = TraceBuilder()
    x, y, z, e = (b.tensor(name, 10, "input" if name == "x" else "activation") for name in "xyze")
    total = b.tensor("sum", 10, replaces=z)
    out = b.tensor("out", 10, replaces=total)
    b.op("conv1", reads=[x], writes=[y], layer=0, duration=1)
    b.op("norm", reads=[y], writes=[z], layer=0, duration=1)
    b.op("add_", reads=[z, x], writes=[total], layer=0, duration=1)
    b.op("relu_", reads=[total], writes=[out], layer=0, duration=1)
    b.op("next", reads=[out], writes=[e], layer=1, duration=1)
    g, end = b.tensor("g", 10, "temporary"), b.tensor("end", 10, "temporary")
    b.op("relu.b", phase="backward", reads=[out, e] if read_out else [e], writes=[g], layer=0, duration=1)
    b.op("norm.b", phase="backward", reads=[g, y], writes=[end], layer=0, duration=1)
    return b.build(outputs=[end], carry=())


def test_what_only_makes_the_border_does_not_run_again(run):
    assert run(residual(read_out=False), "full_recompute").rerun == ["conv1"]


def test_the_whole_layer_runs_again_before_the_first_backward_op_that_reads_its_result(run):
    # as PyTorch's checkpoint does when the first saved tensor is asked for
    facts = run(residual(read_out=True), "full_recompute")
    assert facts.rerun == ["conv1", "norm", "add_", "relu_"]
    names = [facts.result.log.trace.op_columns.name[op] for op in facts.result.log.interval("op").tolist()]
    assert names[5:] == ["conv1", "norm", "add_", "relu_", "relu.b", "norm.b"]


def test_random_ops_run_again(run):
    trace = transformer("gpt2-small", batch=1, sequence=64, dropout=0.1)
    facts = run(trace, "full_recompute")
    assert any(trace.ops[trace.op_id(name)].random for name in facts.rerun)
    assert all(trace.ops[trace.op_id(name)].layer >= 0 for name in facts.rerun)


@pytest.mark.parametrize("micro", [1, 2])
def test_transformers_hold_less_in_several_microbatches_too(micro, run):
    trace = transformer("gpt2-small", batch=2, sequence=256, micro_batches=micro, attention="eager")
    plain, facts = run(trace, "keep_all"), run(trace, "full_recompute")
    assert facts.peak < plain.peak
    assert max(Counter(facts.rerun).values()) == 1


# PyTorch 2.13 with transformers 5.23 under fake tensors, non-reentrant checkpoint round every layer, measured for
# this project: largest sum of live storages in one iteration, and kernels that were repeated (0: not compared)
MEASURED = [
    ("gpt2-small", "eager", 4, 1024, 0.1, "amp_bf16", "adamw_foreach", 4_230_604_288, 0),
    ("gpt2-small", "eager", 4, 1024, 0.1, "fp32", "adamw_foreach", 4_159_700_992, 0),
    ("gpt2-small", "sdpa", 4, 1024, 0.1, "amp_bf16", "adamw_foreach", 4_213_827_072, 360),
    ("gpt2-small", "sdpa", 4, 1024, 0.1, "fp32", "adamw_foreach", 4_142_923_776, 216),
    ("gpt2-medium", "sdpa", 4, 1024, 0.1, "amp_bf16", "adamw_foreach", 7_472_717_312, 720),
    ("gpt2-medium", "sdpa", 4, 1024, 0.1, "bf16", "adamw_foreach", 4_821_576_704, 432),
    ("llama-1b", "sdpa", 1, 1024, 0.0, "amp_bf16", "adamw_foreach", 24_716_305_408, 0),
    ("llama-1b", "sdpa", 1, 1024, 0.0, "bf16", "adamw_foreach", 12_358_161_408, 0),
    ("llama-1b", "sdpa", 2, 2048, 0.0, "amp_bf16", "adamw_foreach", 24_716_354_560, 0),
    ("llama-1b", "sdpa", 2, 2048, 0.0, "bf16", "adamw_foreach", 14_055_094_272, 0),
    ("llama-1b", "sdpa", 4, 4096, 0.0, "amp_bf16", "adamw_foreach", 43_056_752_640, 0),
    ("llama-1b", "sdpa", 4, 4096, 0.0, "bf16", "adamw_foreach", 33_974_630_400, 0),
    ("llama-1b", "sdpa", 8, 1024, 0.0, "bf16", "adamw_fused", 20_694_563_840, 0),
]


@pytest.mark.parametrize(
    ("model", "attention", "batch", "sequence", "dropout", "precision", "optimizer", "peak", "kernels"), MEASURED
)
def test_peak_and_kernels_equal_what_pytorch_was_measured_to_need(
    run, model, attention, batch, sequence, dropout, precision, optimizer, peak, kernels
):
    trace = transformer(
        model,
        batch=batch,
        sequence=sequence,
        attention=attention,
        dropout=dropout,
        precision=precision,
        optimizer=optimizer,
    )
    facts = run(trace, "full_recompute")
    assert facts.peak == pytest.approx(peak, rel=1e-4)
    if kernels:  # else the trace joins some small kernels in one op
        assert len(facts.rerun) == kernels


def test_autocast_keeps_its_copies_of_weights_until_the_forward_ends(run):
    trace = transformer("gpt2-medium", batch=4, sequence=1024, precision="amp_bf16", dropout=0.1)
    cached = run(trace, "full_recompute").peak
    dropped = run(trace, "full_recompute", autocast_cache=False).peak
    # 24 layers of 12.6 million weights in two bytes, less what the later peak of backward hides
    assert 0 < cached - dropped <= 24 * 12_600_000 * 2


def test_a_copy_of_two_weights_is_one_of_autocasts(run):
    b = TraceBuilder()
    weights = [b.tensor(name, 4, "weight") for name in ("w", "v")]
    x, copy, y, z = (b.tensor(name, 8, role) for name, role in zip("xcyz", ("input", *["activation"] * 3)))
    b.op("cast", "copy", reads=weights, writes=[copy], layer=0)
    b.op("first", "matmul", reads=[x, copy], writes=[y], layer=0, flops=1)
    b.op("second", "matmul", reads=[y], writes=[z], flops=1)
    b.op(
        "back", "matmul", reads=[z, y, copy], writes=[b.tensor("g", 8, "temporary")], layer=0, phase="backward", flops=1
    )
    assert "cast" in run(b.build(), "full_recompute").rerun


def test_a_trace_without_layers_is_refused_naming_an_op(run):
    b = TraceBuilder()
    y = b.tensor("y", 1)
    b.op("alone", writes=[y])
    with pytest.raises(PolicyError, match="'alone'"):
        run(b.build(outputs=[y]), "full_recompute")


def test_only_forward_layer_ops_run_again_on_a_transformer_like_stack(run):
    trace = w1(6)
    facts = run(trace, "full_recompute")
    assert {trace.ops[trace.op_id(name)].phase for name in facts.rerun} == {"forward"}
    assert facts.peak < run(trace, "keep_all").peak / 2


@pytest.mark.parametrize("parameters", [{}, {"early_stop": False}, {"reentrant": True}, {"skip_last": True}])
def test_a_plan_is_made_of_the_trace_alone_and_once_for_it(parameters):
    trace, policy = transformer("gpt2", batch=1, sequence=32), FullRecompute(**parameters)
    problem = asked(problem_for(trace, load_profile("a100_40_pcie")))
    plan = policy.plan(problem)
    assert not problem.read
    elsewhere = problem_for(trace, load_profile("mt3000_survey").with_budget(10**9))
    assert FullRecompute(**parameters).plan(elsewhere) is plan
    other = FullRecompute(autocast_cache=False, **parameters)
    assert other.plan(elsewhere) is not plan
    unkept = FullRecompute(remove_unnecessary=True, **parameters)
    assert unkept.plan(elsewhere) is not unkept.plan(elsewhere)


def test_a_plan_that_is_kept_is_replayed_on_each_machine_by_its_own_times():
    trace = transformer("gpt2", batch=1, sequence=32)
    ends = {}
    for name in ("a100_40_pcie", "mt3000_survey", "a100_40_pcie"):
        log = simulate(trace, name, "full_recompute").log
        fresh = transformer("gpt2", batch=1, sequence=32)
        assert log == replay(FullRecompute().plan(problem_for(fresh, log.platform)), log.platform, fast=False)
        ends.setdefault(name, set()).add(log.end)
    assert len(ends["a100_40_pcie"]) == 1
    assert ends["a100_40_pcie"] != ends["mt3000_survey"]
