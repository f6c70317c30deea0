"""moDNN: sub-batches, algorithms and offloading, each only as far as the budget asks for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.analysis.bounds import bounds
from sim.errors import Infeasible, PolicyError
from sim.experiment import reference_run, simulate
from sim.hardware.cost import op_times
from sim.hardware.profile import load_profile
from sim.policies.offload.modnn.bounds import least_of_parts
from sim.policies.offload.vdnn.implementations import choose, implementations
from sim.rewrites.batching import split_batch_ops
from sim.rewrites.values import departures
from sim.solvers.load_curve import Curve, Variable
from sim.solvers.longest_away import longest_away
from sim.trace import Trace, TraceBuilder
from sim.trace.op import Implementation
from sim.trace.origin import Glue
from tests.policies.offload.conftest import facts, machine
from tests.policies.offload.test_vdnn import LEAN, SLOW, Layer, net
from workloads import cnn

SAMPLE = 8  # bytes of each tensor of the chain per sample


def batched_chain(layers: int = 6, batch: int = 8) -> Trace:
    """A chain whose ops may be split by batch: 10 ns per layer and sample, or twice that without a workspace."""
    b = TraceBuilder({"batch": batch, "samples": batch})
    size = SAMPLE * batch
    x = [b.tensor("x0", size, "input", shape=(batch, 2))]
    ways = {"alternatives": [Implementation("lean", 2.0, 0)], "workspace": 16 * batch, "splits": ("batch",)}
    for n in range(layers):
        x.append(b.tensor(f"x{n + 1}", size, layer=n, shape=(batch, 2)))
        b.op(f"f{n}", "conv", reads=x[-2:-1], writes=x[-1:], layer=n, duration=10 * batch, **ways)
    gradient = b.tensor("d", size, "temporary", shape=(batch, 2))
    b.op("loss", "loss", reads=x[-1:], writes=[gradient], duration=batch, phase="backward", splits=("batch",))
    for n in reversed(range(layers)):
        made = b.tensor(f"d{n}", size, "temporary", layer=n, shape=(batch, 2))
        reads = [gradient, x[n]]
        b.op(f"f{n}.bwd", "conv", reads=reads, writes=[made], layer=n, duration=20 * batch, phase="backward", **ways)
        gradient = made
    return b.build(outputs=(), carry=())


def test_where_everything_fits_nothing_leaves_and_the_batch_is_whole(run) -> None:
    trace = batched_chain()
    keep = run(trace, "keep_all")
    done = run(trace, "modnn", keep.peak)
    assert done.result.plan.notes["parts"] == 1
    assert not done.moves
    assert done.time == keep.time
    assert set(done.result.plan.notes["implementations"].values()) == {""}  # the trace's own are the fastest


def test_workspaces_shrink_only_where_nothing_is_left_to_offload(run) -> None:
    # x1, 400 bytes, is read by the first layer's backward, the neediest op: its workspace has to go, and no other
    trace = net([("conv", 400, 100, 100), ("conv", 10, 100, 100), ("conv", 10, 100, 100)], [SLOW, LEAN], workspace=50)
    keep = run(trace, "keep_all").peak
    chosen = run(trace, "modnn", keep - 31).result.plan.notes["implementations"]
    assert {trace.ops[op].name: name for op, name in chosen.items() if name} == {"f1.bwd": "implicit_gemm"}
    chosen = run(trace, "modnn", keep - 30).result.plan.notes["implementations"]
    assert {trace.ops[op].name: name for op, name in chosen.items() if name} == {"f1.bwd": "fft_tiled"}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_least_memory_falls_with_the_sub_batch_and_no_more_parts_run_than_it_takes(parts, run) -> None:
    trace = batched_chain()
    # the whole input; and of a sub-batch the gradient, the saved tensor and the new gradient, without a workspace
    least = 8 * SAMPLE + 3 * 8 * SAMPLE // parts
    done = run(trace, "modnn", least, most_parts=parts)
    assert done.result.plan.notes["parts"] == parts
    assert done.peak == least
    assert not departures(done.result.plan.trace, trace)
    assert run(trace, "modnn", least - 1, most_parts=parts).result.plan.notes["parts"] == 2 * parts


def test_below_the_working_set_of_a_sample_nothing_fits(run) -> None:
    trace = batched_chain()
    least = 8 * SAMPLE + 3 * SAMPLE
    assert run(trace, "modnn", least).peak == least
    with pytest.raises(Infeasible):
        run(trace, "modnn", least - 1)


@pytest.mark.parametrize(
    ("layers", "factor", "short", "time", "leaves"),
    [
        # f2 and f2.bwd without workspace take 110 ns more than 331; to wait until 100 bytes are away would take 189
        ([("conv", 20, 50, 50), ("conv", 100, 100, 10), ("conv", 100, 20, 100)], 2.0, 20, 441, 0),
        # f2.bwd without workspace would take 300 ns more; 20 bytes are away, and back, in 20 ns
        ([("conv", 50, 10, 100), ("conv", 20, 20, 100), ("conv", 10, 100, 50)], 4.0, 50, 1211, 1),
    ],
)
def test_an_op_takes_less_workspace_or_waits_for_space_whichever_is_faster(
    layers, factor, short, time, leaves, run
) -> None:
    trace = net(layers, [Implementation("lean", factor, 0)], workspace=50)
    done = run(trace, "modnn", run(trace, "keep_all").peak - short)
    assert done.time == time
    assert len(done.out) == leaves


def test_the_longest_away_leaves_first_and_a_peak_that_nothing_lowers_does_not_end_it() -> None:
    away = [(1, 30, 1, 8), (2, 30, 0, 9), (3, 10, 0, 9), (4, 20, 5, 9)]  # tensor, bytes, from, to
    variables = {t: Variable(size, size, size, (left, back)) for t, size, left, back in away}
    start = np.arange(0, 100, 10)
    load = np.array([500, 90, 90, 90, 110, 90, 110, 110, 90, 90])
    curve = Curve(tuple(range(10)), start, start + 10, load, variables)
    chosen, left = longest_away(curve, 100)
    # nothing is away across op 0; of 2 and 3, away equally long, the larger; it is enough for all the others
    assert [one.tensor for one in chosen] == [2]
    assert left.tolist() == [500, 60, 60, 60, 80, 60, 80, 80, 60, 90]
    assert [one.tensor for one in longest_away(curve, 60)[0]] == [2, 3, 1]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["conv", "pool"]), st.integers(1, 40), st.integers(1, 30), st.integers(1, 30)),
        min_size=2,
        max_size=7,
    ),
    st.floats(0.3, 1),
)
def test_the_budget_is_always_kept_and_what_all_needs_costs_no_time(layers: list[Layer], share: float) -> None:
    trace = net(layers, [SLOW, LEAN], workspace=20)
    keep = facts(simulate(trace, machine(), "keep_all"))
    for budget in (int(share * keep.peak), int((share + 1) / 2 * keep.peak), keep.peak):
        try:
            done = facts(simulate(trace, machine(), "modnn", budget=budget))
        except Infeasible:
            assert budget < keep.peak
            continue
        assert done.peak <= budget
        assert done.time >= keep.time
    assert done.time == keep.time
    assert not done.moves


def test_a_net_of_its_time_is_nearer_to_unlimited_memory_than_under_vdnn() -> None:
    """The abstract: 8 % behind no limit with 12 GB, where vDNN loses more."""
    trace, card = cnn("vgg-16", 256, optimizer="sgd", kernels="cudnn"), load_profile("p100")
    mine, theirs = (simulate(trace, card, policy, budget="12 GiB") for policy in ("modnn", "vdnn"))
    assert mine.log.end < theirs.log.end
    assert mine.summary()["overhead"] < 0.08 < theirs.summary()["overhead"]


def test_batch_norm_leaves_the_batch_whole() -> None:
    trace, card = cnn("resnet-50", 16, optimizer="sgd", kernels="cudnn"), load_profile("p100")
    keep = facts(simulate(trace, card, "keep_all"))
    done = simulate(trace, card, "modnn", budget=int(0.6 * keep.peak))
    assert done.plan.notes["parts"] == 1
    assert done.plan.notes["offloaded"] > 0


@pytest.mark.parametrize("kernels", ["cudnn", "torch"])
@pytest.mark.parametrize("platform", ["a100_40_pcie", "ascend_910b"])
def test_what_sub_batches_take_at_least_is_all_but_what_adds_up_gradients(kernels: str, platform: str) -> None:
    trace, card = cnn("vgg-16", 8, kernels=kernels), load_profile(platform)
    fastest = implementations(trace, "p")
    for parts in (2, 4, 8):
        split, which = split_batch_ops(trace, parts)
        adds = np.array([isinstance(each, Glue) for each in split.origin.ops])
        chosen = {op: fastest[which[op][0]] for op in np.flatnonzero(~adds).tolist() if which[op][0] in fastest}
        taken = int(op_times(choose(split, chosen), card).total[~adds].sum())
        assert adds.any()
        assert least_of_parts(trace, card, parts, fastest) == taken
    assert least_of_parts(trace, card, 3, fastest) == 0  # eight images make no three equal parts


def test_what_is_wrong_is_named() -> None:
    trace = batched_chain()
    with pytest.raises(PolicyError, match="modnn: toy has no host tier to offload to"):
        simulate(trace, machine(host=False), "modnn")
    with pytest.raises(PolicyError, match="most_parts is 0; expected"):
        simulate(trace, machine(), "modnn", most_parts=0)


def test_a_measured_op_of_a_sub_batch_takes_its_part_by_the_model_of_op_times() -> None:
    # read and written 128 bytes at a byte per ns after a launch of 64 ns: half of the batch takes 128 of 192 ns
    card = machine()
    slow = replace(card, engines=tuple(replace(engine, launch=64) for engine in card.engines))
    trace = batched_chain()
    budget = bounds(reference_run(trace, slow), slow.home(0).name).memory_bytes  # the largest op with its workspace
    for parts in (2, 4):
        ran = simulate(trace, slow, "modnn(most_parts=8)", budget=int(budget / parts * 1.2))
        assert ran.plan.notes["parts"] >= parts
        split = ran.plan.notes["parts"]
        of_model = -(-80 * (64 + 128 // split) // (64 + 128))
        taken = {op.duration for op in ran.log.trace.ops if op.name.startswith("f0.mb") and "bwd" not in op.name}
        assert taken
        assert taken <= {of_model, 2 * of_model}  # without its workspace twice that
