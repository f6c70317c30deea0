"""SuperNeurons (PPoPP 2018): segments between checkpoints, two ways to recompute them, the cache and its prefetch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.analysis.peak_memory import home_peak
from sim.conformance import run_policy
from sim.conformance.values import check_values
from sim.errors import OutOfMemory, PolicyError
from sim.experiment import Result, reference_run, simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import WHY, EventLog
from sim.policies import load
from sim.policies.hybrid.superneurons.segments import largest_layer, segments_of
from sim.trace import Trace, TraceBuilder
from sim.trace.index import TraceIndex
from tests.machines import machine as tiny
from tests.policies.offload.conftest import GB, ROOMY, machine
from workloads import cnn, transformer, w1


def net(cheap: list[int], *, size: int = 100, work: dict[str, int] | None = None, conv: int = 10) -> Trace:
    """A chain of convolutions with so many cheap layers behind each; each layer saves its input.

    work: workspaces by the name of the op. conv: ns of a convolution, others take 1 ns.
    """
    b, work = TraceBuilder(), work or {}
    layers: list[tuple[str, str]] = []
    for i, count in enumerate(cheap):
        layers += [(f"conv{i}", "conv"), *((f"act{i}.{k}", "elementwise") for k in range(count))]
    layers.append(("last", "conv"))
    x = []
    for name, kind in layers:
        x.append(b.tensor(f"{name}.out", size))
        ns = conv if kind == "conv" else 1
        b.op(name, kind, reads=x[-2:-1], writes=x[-1:], duration=ns, workspace=work.get(name, 0))
    gradient = b.tensor("loss.grad", size, "temporary")
    b.op("loss.bwd", "loss", reads=[x[-1]], writes=[gradient], phase="backward", duration=1)
    for i in reversed(range(len(layers))):
        name, kind = layers[i]
        made = b.tensor(f"{name}.grad", size, "temporary")
        reads = [gradient, *x[i - 1 : i]] if i else [gradient]
        ns = conv if kind == "conv" else 1
        b.op(f"{name}.bwd", kind, reads=reads, writes=[made], phase="backward", duration=ns)
        gradient = made
    return b.build(outputs=[], carry=())


def run(trace: Trace, budget: int = ROOMY, rate: int = GB, **parameters: Any) -> Result:
    result = simulate(trace, machine(budget, rate=rate), "superneurons", **parameters)
    assert home_peak(result.log) <= budget
    return result


def reruns(result: Result) -> list[str]:
    log = result.log
    return [log.trace.op_columns.name[op] for op in log.interval("op")[log.interval("why") == WHY["recompute"]]]


def copies(log: EventLog) -> list[tuple[str, str, int, int]]:
    """(link, tensor, start, end) in order of start."""
    rows = log.intervals[log.interval("why") == WHY["move"]]
    lanes, tensors = log.platform.lanes, log.trace.tensor_columns.name
    return sorted(((lanes[r[3]], tensors[r[6]], r[0], r[1]) for r in rows.tolist()), key=lambda one: (one[2], one[0]))


# ---- segments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cheap", [[1, 0], [3, 0], [2, 4, 1], [5, 5]])
def test_speed_centric_runs_each_layer_once_more_and_memory_centric_each_from_the_start(cheap):
    # a layer's backward reads its input, and the convolution behind the segment reads its last result: of n layers
    # the results 1 to n are needed, the kth after k runs
    trace = net(cheap)
    fast, lean = run(trace, recompute="speed"), run(trace, recompute="memory")
    assert len(reruns(fast)) == sum(cheap)
    assert len(reruns(lean)) == sum(n * (n + 1) // 2 for n in cheap)
    assert home_peak(lean.log) <= home_peak(fast.log) <= home_peak(reference_run(trace, machine()))


def test_memory_centric_goes_back_to_the_start_for_each_layer():
    assert reruns(run(net([3, 0]), recompute="memory")) == [
        *("act0.0", "act0.1", "act0.2"),
        *("act0.0", "act0.1"),
        "act0.0",
    ]


@pytest.mark.parametrize(("spare", "mode"), [(-1, "memory"), (0, "speed"), (100, "speed")])
def test_a_segment_is_speed_centric_while_it_fits_into_the_largest_layer(spare, mode):
    # three results and the backward of `conv1` beside them, two gradients: 500 bytes. `last` takes its two operands
    # and the workspace
    trace = net([3, 0], work={"last": 300 + spare})
    notes = run(trace).plan.notes
    assert notes["l_peak"] == 500 + spare
    ops = tuple(trace.op_id(f"act0.{k}") for k in range(3))
    assert {mode: notes[mode] for mode in ("speed", "memory")} == {"speed": (), "memory": (), mode: (ops,)}


def test_the_updates_temporaries_are_no_layer():
    # a batched update of 10 MB of weights, beside layers of some KB
    trace = transformer(TINY, batch=1, sequence=8, optimizer="adamw_foreach")
    largest = max(trace.ops, key=lambda op: sum(trace.tensors[t].bytes for t in op.writes))
    assert largest.phase == "update"
    layers = [op for op in trace.ops if op.phase != "update"]
    assert run(trace).plan.notes["l_peak"] == max(
        op.workspace
        + sum(
            trace.tensors[t].bytes
            for t in {*op.reads, *op.writes}
            if trace.tensors[t].role in ("activation", "temporary", "input")
            and t not in [trace.tensors[w].replaces for w in op.writes]
        )
        for op in layers
    )


TINY = {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 16}


@st.composite
def drawn_nets(draw: st.DrawFn) -> list[tuple[bool, int, int, str]]:
    """Layers of a chain: whether expensive, bytes, workspace of backward, and what backward reads."""
    kinds = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    one = st.tuples(st.integers(1, 60), st.integers(0, 3), st.sampled_from(["in", "out", "both"]))
    rest = [draw(one) for _ in range(len(kinds) + 2)]
    # the first and the last layer are expensive, so that the segments are what lies between such layers
    return [(kind == 0, b, 40 * w, reads) for kind, (b, w, reads) in zip([0, *kinds, 0], rest, strict=True)]


def chain_of(layers: list[tuple[bool, int, int, str]]) -> Trace:
    b = TraceBuilder()
    x = [b.tensor("x", 10, "input")]
    for i, (heavy, bytes, _, _) in enumerate(layers):
        x.append(b.tensor(f"x{i}", bytes))
        b.op(f"f{i}", "conv" if heavy else "elementwise", reads=x[-2:-1], writes=x[-1:], duration=1)
    gradient = b.tensor("d", layers[-1][1], "temporary")
    b.op("loss", "loss", reads=x[-1:], writes=[gradient], phase="backward", duration=1)
    for i in reversed(range(len(layers))):
        heavy, _, work, reads = layers[i]
        before, gradient = gradient, b.tensor(f"d{i}", layers[i - 1][1] if i else 10, "temporary")
        saved = [*(x[i : i + 1] if reads != "out" else []), *(x[i + 1 : i + 2] if reads != "in" else [])]
        kind = "conv" if heavy else "elementwise"
        b.op(f"b{i}", kind, reads=[before, *saved], writes=[gradient], phase="backward", workspace=work, duration=1)
    return b.build(outputs=[], carry=())


@settings(max_examples=30, deadline=None)
@given(drawn_nets())
def test_modes_and_runs_of_a_chain_are_those_of_the_papers_rule(layers):
    """The paper's rule in its own terms: layers 1 to N, l^f and l^b, segments between expensive layers."""
    count = len(layers)
    out = {-1: 10, **{i: bytes for i, (_, bytes, _, _) in enumerate(layers)}}
    grad = {i: out[i] for i in out}
    reads = {i: {"in": {i - 1}, "out": {i}, "both": {i - 1, i}}[way] for i, (_, _, _, way) in enumerate(layers)}
    forward = [out[i - 1] + out[i] for i in range(count)]
    backward = [grad[i] + grad[i - 1] + sum(out[j] for j in reads[i]) + layers[i][2] for i in range(count)]
    l_peak = max(*forward, *backward, out[count - 1] + grad[count - 1])
    runs = dict.fromkeys(range(count), 0)
    modes = {}
    i = 0
    while i < count:
        if layers[i][0]:
            i += 1
            continue
        segment = [i]
        while not layers[segment[-1] + 1][0]:
            segment.append(segment[-1] + 1)
        i = segment[-1] + 1
        # backward layers, the last one first, with what of the segment each reads
        need = [(j, reads[j] & {*segment}) for j in range(i, segment[0] - 1, -1) if reads[j] & {*segment}]
        if not need:
            continue
        saved = set().union(*(each for _, each in need))
        checkpoint = segment[0] - 1
        kept_anyway = any(checkpoint in reads[j] for j in (checkpoint, segment[0]))
        if not kept_anyway and sum(out[j] for j in saved) <= out[checkpoint]:
            continue
        again = [j for j in segment if j <= max(saved)]
        last = need[0][0]
        together = sum(out[j] for j in again) + backward[last] - sum(out[j] for j in reads[last] & {*again})
        modes[tuple(segment)] = "speed" if together <= l_peak else "memory"
        if together <= l_peak:
            for j in again:
                runs[j] += 1
            continue
        resident: set[int] = set()
        for _, wanted in need:
            if not wanted <= resident:
                for j in range(segment[0], max(wanted) + 1):
                    runs[j] += 1
                resident = wanted
    trace = chain_of(layers)
    result = run(trace)
    assert result.plan.notes["l_peak"] == l_peak
    assert {
        tuple(int(trace.ops[op].name[1:]) for op in ops): mode
        for mode in ("speed", "memory")
        for ops in result.plan.notes[mode]
    } == modes
    assert {j: reruns(result).count(f"f{j}") for j in range(count)} == runs


def test_nothing_is_recomputed_whose_backward_follows_at_once():
    trace = net([2, 2])
    b = TraceBuilder()
    x, y, z = b.tensor("x", 100), b.tensor("y", 100), b.tensor("z", 100)
    b.op("conv", "conv", writes=[x], duration=1)
    b.op("act", "elementwise", reads=[x], writes=[y], duration=1)
    b.op("act.bwd", "elementwise", reads=[y], writes=[z], phase="backward", duration=1)
    assert reruns(run(b.build(outputs=[], carry=()))) == []
    assert reruns(run(trace)) != []


def test_a_segment_is_not_recomputed_for_less_than_its_checkpoint_takes():
    def branch(mask: int) -> Trace:
        # backward needs the mask alone: to recompute it, x would have to stay
        b = TraceBuilder()
        x, y, m, out, g = (b.tensor(n, s) for n, s in zip("xymog", (100, 100, mask, 100, 100)))
        b.op("conv", "conv", writes=[x], duration=1)
        b.op("dropout", "elementwise", reads=[x], writes=[y, m], duration=1)
        b.op("conv2", "conv", reads=[y], writes=[out], duration=1)
        b.op("conv2.bwd", "conv", reads=[out], writes=[g], phase="backward", duration=1)
        b.op("dropout.bwd", "elementwise", reads=[m, g], phase="backward", duration=1)
        return b.build(outputs=[], carry=())

    assert reruns(run(branch(100))) == []
    assert reruns(run(branch(101))) == ["dropout"]


def test_joins_and_ops_in_place_on_a_checkpoint_are_checkpoints():
    b = TraceBuilder()
    a, a2, n, c, s, s2 = (b.tensor(name, 100) for name in ("a", "a2", "n", "c", "s", "s2"))
    b.take_over(a2, a)
    b.take_over(s2, s)
    g = b.tensor("g", 100)
    b.op("conv", "conv", writes=[a], duration=1)
    b.op("relu", reads=[a], writes=[a2], duration=1)
    b.op("norm", "norm", reads=[a2], writes=[n], duration=1)
    b.op("conv2", "conv", reads=[n], writes=[c], duration=1)
    b.op("add", reads=[a2, c], writes=[s], duration=1)
    b.op("relu2", reads=[s], writes=[s2], duration=1)
    b.op("conv3", "conv", reads=[s2], writes=[g], duration=1)
    b.op("bwd", reads=[a2, n, s2, g], phase="backward", duration=1)
    trace = b.build(outputs=[], carry=())
    segments, checkpoints = segments_of(TraceIndex(trace), {"conv"})
    assert {trace.op_columns.name[op] for op in checkpoints} == {"conv", "relu", "conv2", "add", "relu2", "conv3"}
    assert [[trace.op_columns.name[op] for op in each.ops] for each in segments] == [["norm"]]
    assert reruns(run(trace)) == ["norm"]


def test_on_convolution_nets_pooling_activations_and_norms_are_recomputed():
    trace = cnn("resnet-50", batch=2, image=64)
    result = run(trace, rate=10**12)
    kinds = {trace.ops[trace.op_id(name)].kind for name in reruns(result)}
    assert kinds <= {"norm", "elementwise", "pool", "dropout"}
    assert {"norm", "pool"} <= kinds
    again = [name for name in reruns(result) if name.endswith(".norm")]
    assert len(again) > 40
    assert home_peak(result.log) < home_peak(reference_run(trace, machine()))


def test_on_transformers_norms_and_pointwise_ops_are():
    trace = transformer("gpt2", batch=1, sequence=64)
    kinds = {trace.ops[trace.op_id(name)].kind for name in reruns(run(trace, rate=10**12))}
    assert "norm" in kinds
    assert kinds.isdisjoint({"matmul", "attention"})


# ---- the tensor pool -------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [3, 6, 12])
@pytest.mark.parametrize("cheap", [2, 3])
def test_without_the_cache_the_peak_is_the_largest_layer_however_deep_the_net(blocks, cheap):
    # links take no time; the workspace makes the layer in the middle the largest, when nothing else has to be there
    trace = net([cheap] * blocks, work={f"conv{blocks // 2}": 1000})
    result = run(trace, rate=10**18, cache=False)
    assert result.plan.notes["l_peak"] == largest_layer(TraceIndex(trace)) == 1200
    assert home_peak(result.log) == 1200
    assert home_peak(reference_run(trace, machine())) > 1200 or blocks == 3


def test_results_are_fetched_one_layer_ahead():
    # 3 convolutions of 1000 ns, no cheap layers, 100 bytes at a byte per ns: every copy is hidden
    trace = net([0, 0, 0], conv=1000)
    result = run(trace, cache=False)
    # forward: conv0 0-1000, conv1 -2000, conv2 -3000, last -4000; the loss -4001; backward of last -5001, conv2 -6001.
    # The loss needs `last.out`, and while it runs `conv2.out` would be fetched: these two stay
    assert copies(result.log) == [
        ("d2h", "conv0.out", 2000, 2100),
        ("d2h", "conv1.out", 3000, 3100),
        ("h2d", "conv1.out", 4001, 4101),
        ("h2d", "conv0.out", 5001, 5101),
    ]


def test_the_cache_moves_nothing_while_memory_lasts_and_less_the_more_there_is():
    for trace in (net([2, 1, 3, 0], conv=100), w1(4), transformer("gpt2", batch=1, sequence=64)):
        free = simulate(trace, toy(1 << 60), "superneurons")
        assert copies(free.log) == []
        peak = home_peak(free.log)
        moved = []
        for percent in (100, 95, 90, 85, 80):
            try:
                log = simulate(trace, toy(peak * percent // 100), "superneurons").log
            except OutOfMemory:
                break
            moved.append(
                sum(int(log.interval("bytes")[row]) for row in (log.interval("why") == WHY["move"]).nonzero()[0])
            )
        assert moved[0] == 0
        assert len(moved) > 1
        assert moved == sorted(moved)


def toy(budget: int, rate: int = 10**12) -> Platform:
    tiers = Tier("hbm", budget, budget, 10**12, device=0), Tier("host", 1 << 60, 1 << 60, 10**11, kind="ddr")
    links = Link("d2h", "hbm", "host", rate), Link("h2d", "host", "hbm", rate)
    return Platform("toy", tiers, (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**12}),), links)


def test_the_least_recently_used_leaves_first_and_is_fetched_while_the_layer_before_is_undone():
    # results of 100 bytes each; `last` finds no space for its own
    trace = net([0, 0, 0], conv=1000)
    result = run(trace, budget=300)
    moves = copies(result.log)
    assert moves[0] == ("d2h", "conv0.out", 3000, 3100)
    back = [(tensor, start) for lane, tensor, start, _ in moves if lane == "h2d"]
    names = [name for name, _ in back]
    assert names[-1] == "conv0.out"
    # the backward of conv2 is undone when conv0's result, which conv1's backward reads, is sent for
    events = result.log.events
    conv2 = events[(events.op == "conv2.bwd") & (events.why == "run")].iloc[0]
    assert conv2.start_ns <= back[-1][1] <= conv2.end_ns


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.sampled_from(["cost_aware", "speed", "memory", "none"]),
    st.booleans(),
    st.integers(1, 5),
)
def test_a_chain_runs_in_the_largest_layer_with_what_is_fetched_and_recomputed(cheap, recompute, cache, spare):
    trace = net(cheap)
    # four tensors and what one segment holds
    budget = 100 * (4 + max(cheap) + spare)
    result = run(trace, budget=budget, recompute=recompute, cache=cache)
    assert result.log.complete
    for name in reruns(result):
        assert name.startswith("act")


# ---- what the trace may be -------------------------------------------------------------------------


def test_two_devices_each_have_their_own_segments_and_stages():
    b = TraceBuilder()
    for device in (0, 1):
        x, y, z, grad = (b.tensor(f"{name}{device}", 100) for name in "xyzg")
        more: dict[str, Any] = {"duration": 1000, "device": device}
        b.op(f"conv{device}", "conv", writes=[x], **more)
        b.op(f"act{device}", "elementwise", reads=[x], writes=[y], **more)
        b.op(f"out{device}", "conv", reads=[y], writes=[z], **more)
        b.op(f"out{device}.bwd", "conv", reads=[z], writes=[grad], phase="backward", **more)
        b.op(f"act{device}.bwd", reads=[grad, y, x], phase="backward", **more)
    trace = b.build(outputs=[], carry=())
    tiers = (*(Tier(f"hbm{i}", 1000, 1000, GB, device=i) for i in (0, 1)), Tier("host", 1 << 40, 1 << 40, GB))
    engines = tuple(Engine(f"npu@{i}", i, f"hbm{i}", (f"hbm{i}",), {"fp32": GB}) for i in (0, 1))
    links = [Link(f"out{i}", f"hbm{i}", "host", GB) for i in (0, 1)]
    links += [Link(f"in{i}", "host", f"hbm{i}", GB) for i in (0, 1)]
    result = simulate(trace, Platform("two", tiers, engines, tuple(links)), "superneurons", cache=False)
    assert sorted(reruns(result)) == ["act0", "act1"]
    # x leaves after `act`, its last forward reader; it is fetched while `out` is undone, for the recomputation of y
    assert copies(result.log) == [
        *(("out0", "x0", 2000, 2100), ("out1", "x1", 2000, 2100)),
        *(("in0", "x0", 3000, 3100), ("in1", "x1", 3000, 3100)),
    ]


@pytest.mark.parametrize("cache", [True, False])
def test_nets_with_ops_in_place_run_in_less_and_compute_the_same(cache):
    trace = cnn("resnet-50", batch=16, image=64)
    assert (trace.tensor_columns.replaces >= 0).any()
    peak = home_peak(reference_run(trace, toy(1 << 60)))
    done = run_policy(load("superneurons", cache=cache), trace, toy(peak * 17 // 20))
    check_values(done)
    again = done.log.interval("op")[done.log.interval("why") == WHY["recompute"]].tolist()
    assert any(trace.op_columns.name[op].endswith("relu") for op in again)
    assert copies(done.log)


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [("superneurons", {}), ("superneurons", {"cache": False}), ("lru_tiering", {"prefetch": 5})],
)
def test_what_is_fetched_ahead_leaves_space_for_what_the_op_itself_reads(policy, parameters):
    b = TraceBuilder({"model": "hand"})
    m0, m1, y, loss = b.tensor("m0", 16), b.tensor("m1", 9), b.tensor("y", 16), b.tensor("l", 1)
    g1, g0 = b.tensor("g1", 1, "temporary"), b.tensor("g0", 1, "temporary")
    b.op("f0", "matmul", writes=[m0], duration=5)
    b.op("f1", "matmul", reads=[m0], writes=[m1], duration=5)
    b.op("f2", "matmul", reads=[m1], writes=[y], duration=5)
    b.op("f3", "elementwise", reads=[y], writes=[loss], duration=5)
    b.op("b1", "matmul", phase="backward", reads=[loss, m0], writes=[g1], duration=5)
    b.op("b0", "matmul", phase="backward", reads=[g1, m1], writes=[g0], duration=5)
    trace = b.build(outputs=[g0], carry=())
    # b1 needs 18 bytes, and has to fetch 16 of them: m1 comes after that
    assert home_peak(simulate(trace, tiny(25, host=1000), policy, **parameters).log) == 25


def test_a_machine_without_a_host_is_refused_by_name():
    with pytest.raises(PolicyError, match="superneurons: toy has no host tier to offload to"):
        simulate(net([1]), machine(host=False), "superneurons")


@pytest.mark.parametrize("wrong", [{"recompute": "some"}, {"heavy": ("convolution",)}, {"cache": 2}])
def test_parameters_are_held_to_their_choices(wrong: dict[str, Any]):
    with pytest.raises(PolicyError, match=next(iter(wrong))):
        simulate(net([1]), machine(), "superneurons", **wrong)
