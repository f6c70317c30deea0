"""save_on_cpu: time is compute plus every copy, the host holds every saved copy, PyTorch's numbers hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.analysis.peak_memory import peaks_by_phase
from sim.errors import OutOfMemory, PolicyError
from sim.experiment import simulate
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, facts, machine
from tests.strategies import budgets, platforms, traces
from workloads.synthetic import random_dag, w1
from workloads.transformer import transformer


def shared_input() -> Trace:
    """Two products of one input, 10 bytes, with weights of 100 and 200 bytes; each saves the input."""
    b = TraceBuilder()
    x0 = b.tensor("x0", 1, "input")
    v, w = b.tensor("v", 100, "weight"), b.tensor("w", 200, "weight")
    x, p, q = b.tensor("x", 10), b.tensor("p", 30), b.tensor("q", 30)
    b.op("first", reads=[x0], writes=[x], duration=5)
    b.op("left", "matmul", reads=[x, v], writes=[p], duration=10)
    b.op("right", "matmul", reads=[x, w], writes=[q], duration=10)
    loss, g = b.tensor("loss.out", 0), b.tensor("g", 30, "temporary")
    b.op("loss", "loss", reads=[p, q], writes=[loss], duration=5)
    b.op("seed", reads=[], writes=[g], phase="backward", duration=0)
    for name, weight in (("right", w), ("left", v)):
        made = [b.tensor(f"{name}.dx", 10, "temporary"), b.tensor(f"{name}.dw", b.bytes_of(weight), "gradient")]
        b.op(f"{name}.bwd", "matmul", reads=[g, x, weight], writes=made, phase="backward", duration=20)
    return b.build()


def test_each_saving_op_makes_a_copy_of_its_own_while_the_device_waits(run) -> None:
    done = run(shared_input(), "save_on_cpu")
    copies = sorted((name, bytes) for name, bytes in done.out.items())
    assert [bytes for _, bytes in copies] == [100, 200, 10, 10]
    assert done.out == done.back
    assert done.host_peak == 320
    assert done.time == 5 + 10 + 10 + 5 + 20 + 20 + 2 * 320
    # left's two copies after left, right's two after right, then the loss; right's come back first
    assert done.ran("first", "left", "right", "loss") == [(0, 5), (5, 15), (125, 135), (345, 350)]
    assert done.ran("right.bwd", "left.bwd") == [(560, 580), (690, 710)]


def test_each_tensor_goes_once_without_duplicates_and_weights_stay_if_told(run) -> None:
    assert run(shared_input(), "save_on_cpu", duplicates=False).host_peak == 310
    done = run(shared_input(), "save_on_cpu", duplicates=False, weights=False)
    assert done.out == done.back == {"x": 10}
    assert done.moves[0] == ("d2h", "x", 25, 35)  # after its last forward use
    assert done.time == 70 + 20


@pytest.mark.parametrize(("held", "peak"), [("the batch", 30), ("a variable", 40), ("", 30)])
def test_what_the_program_holds_beyond_backward_stays_beside_its_copy(held, peak) -> None:
    """The batch x, what is saved (x, or else y), its copy and the gradient, 10 bytes each, while backward runs."""
    b = TraceBuilder()
    x, y, z, loss = b.tensor("x", 10, "input"), b.tensor("y", 10), b.tensor("z", 10), b.tensor("loss.out", 0)
    g, done = b.tensor("g", 10, "temporary"), b.tensor("done", 0, "temporary")
    saved = x if held == "the batch" else y
    b.op("first", "matmul", reads=[x], writes=[y], duration=10)
    b.op("second", "matmul", reads=[saved], writes=[z], duration=10)
    b.op("loss", "loss", reads=[z], writes=[loss], duration=10)
    b.op("second.bwd", "matmul", reads=[loss, saved], writes=[g], phase="backward", duration=10)
    b.op("update", reads=[g], writes=[done], phase="update", releases=[y] if held == "a variable" else [], duration=10)
    log = simulate(b.build(outputs=[done]), machine(), "save_on_cpu").log
    assert peaks_by_phase(log)["backward"] == peak


def named_for_longer(named: bool) -> Trace:
    """`h`, 10 bytes, is saved; if it is named, a variable lets go of it when `wide`, 90 bytes, has been produced."""
    b = TraceBuilder()
    x, w = b.tensor("x", 1, "input"), b.tensor("w", 1, "weight")
    h, wide, y = b.tensor("h", 10), b.tensor("wide", 90), b.tensor("y", 10)
    b.op("first", reads=[x, w], writes=[h], duration=5)
    b.op("second", reads=[h], writes=[y], duration=5)
    b.op("third", reads=[y], writes=[wide], duration=5, unbinds=[h] if named else [])
    loss, g = b.tensor("loss.out", 0), b.tensor("g", 10, "temporary")
    b.op("loss", "loss", reads=[wide], writes=[loss], duration=5)
    b.op("seed", reads=[], writes=[g], phase="backward", duration=0)
    b.op("second.bwd", reads=[g, h], writes=[b.tensor("w.grad", 1, "gradient")], phase="backward", duration=5)
    return b.build()


@pytest.mark.parametrize("named", [False, True])
def test_what_a_variable_names_stays_on_the_device_until_it_lets_go(run, named) -> None:
    done = run(named_for_longer(named), "save_on_cpu", weights=False)
    assert done.moves[0] == ("d2h", "h", 10, 20)  # it is saved, and waited for, either way
    assert done.peak == 2 + 10 + 90 + (10 if named else 0)


def test_a_weight_is_unpacked_beside_itself(run) -> None:
    # right.bwd holds both weights, the copies of w and x, g, and what it produces; x0 is resident throughout
    assert run(shared_input(), "save_on_cpu").peak == 1 + 300 + 200 + 10 + 30 + 10 + 200
    assert run(shared_input(), "save_on_cpu", weights=False).peak == 1 + 300 + 10 + 30 + 10 + 200


@pytest.mark.parametrize(("kind", "held"), [("copy", 50), ("elementwise", 0)])
def test_a_cast_weight_goes_to_the_host_and_stays_until_the_forward_pass_ends(kind: str, held: int, run) -> None:
    b = TraceBuilder()
    x0, w = b.tensor("x0", 1, "input"), b.tensor("w", 100, "weight")
    x, narrow, p, q = b.tensor("x", 10), b.tensor("w.16", 50), b.tensor("p", 30), b.tensor("q", 400)
    b.op("first", reads=[x0], writes=[x], duration=5)
    b.op("cast", kind, reads=[w], writes=[narrow], duration=5)  # autocast's cache holds copies of weights
    b.op("mid", "matmul", reads=[x, narrow], writes=[p], duration=10)
    b.op("next", reads=[p], writes=[q], duration=10)
    loss, g = b.tensor("loss.out", 0), b.tensor("g", 30, "temporary")
    b.op("loss", "loss", reads=[q], writes=[loss], duration=5)
    b.op("seed", reads=[], writes=[g], phase="backward", duration=0)
    made = [b.tensor("dx", 10, "temporary"), b.tensor("dw", 50, "gradient")]
    b.op("mid.bwd", "matmul", reads=[g, x, narrow], writes=made, phase="backward", duration=20)
    done = run(b.build(), "save_on_cpu")
    assert sorted(bytes for _, bytes in done.out.items()) == sorted(bytes for _, bytes in done.back.items()) == [10, 50]
    # while q is made: the input, the weight, p and q, and what the cache holds
    assert done.peak == 1 + 100 + 30 + 400 + held


def test_ordinary_host_memory_is_a_tier_of_its_own_where_the_machine_has_one(run) -> None:
    both = machine(pageable=GB // 2)
    slow = run(shared_input(), "save_on_cpu", on=both)
    assert {lane for lane, *_ in slow.moves} == {"d2p", "p2d"}
    assert slow.time == 70 + 2 * 2 * 320
    assert run(shared_input(), "save_on_cpu", on=both, pin_memory=True).time == 70 + 2 * 320


@pytest.mark.parametrize("seed", range(8))
def test_time_is_compute_plus_all_copies_out_plus_all_copies_in(seed: int, run) -> None:
    trace = random_dag(12, seed, max_bytes=500, max_ns=300)
    on = machine(fixed=7)
    plain, done = run(trace, "keep_all", on=on), run(trace, "save_on_cpu", on=on)
    # each backward op is called after its forward op; the loss belongs to the op whose result it reads
    early = {op.id for op in trace.ops if op.phase == "forward"}
    copies = set()
    for op in trace.ops:
        if op.phase == "backward":
            for t in op.reads:
                if trace.producer[t] in early or trace.producer[t] < 0:
                    copies.add((t, op.name.removesuffix(".bwd")))
    bytes = sum(trace.tensors[t].bytes for t, _ in copies)
    assert sum(done.out.values()) == sum(done.back.values()) == bytes == done.host_peak
    assert done.time == plain.time + 2 * bytes + 2 * 7 * len(copies)


def test_every_kind_of_copy_computes_the_same_values(run) -> None:
    for trace in (shared_input(), w1(2), random_dag(10, 3)):
        for parameters in ({}, {"weights": False}, {"duplicates": False}):
            assert not departures(run(trace, "save_on_cpu", **parameters).result.plan.trace, trace)


@pytest.mark.parametrize(
    ("precision", "attention", "host_bytes"),
    [
        ("fp32", "sdpa", 6_627_018_516),
        ("fp32", "eager", 11_909_482_068),
        ("amp_bf16", "sdpa", 5_241_201_012),
        ("amp_bf16", "eager", 9_391_202_388),
    ],
)
def test_gpt2_holds_on_host_and_device_what_pytorch_was_measured_to_hold(
    precision: str, attention: str, host_bytes: int, run
) -> None:
    """GPT-2 small, batch 4, 1024 tokens, under PyTorch 2.13's save_on_cpu, counted on fake tensors.

    The bytes on the host include a second copy of the log-probabilities (50257 words by 4096 tokens, fp32),
    which the loss saves and whose kernel does not look at them, the biases of 25 norms, and 4-byte step
    counters of 148 parameters; no op reads these here.
    """
    trace = transformer("gpt2-small", batch=4, sequence=1024, precision=precision, attention=attention, dropout=0.1)
    done = run(trace, "save_on_cpu")
    second_copy, biases, counters = 50257 * 4096 * 4, 25 * 768 * 4, 148 * 4
    loss = 4  # read by the op that starts backward
    assert done.host_peak == host_bytes - second_copy - biases - counters + loss
    assert done.peak == pytest.approx(3_963_576_320, rel=1e-5)


def test_a_trace_without_backward_saves_nothing(run) -> None:
    b = TraceBuilder()
    x, y = b.tensor("x", 8, "input"), b.tensor("y", 8)
    b.op("f", reads=[x], writes=[y], duration=10)
    assert run(b.build(), "save_on_cpu").moves == []


def test_a_machine_without_host_is_refused() -> None:
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(shared_input(), machine(host=False), "save_on_cpu")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_nothing_overlaps_and_all_bytes_come_back(data: st.DataObject) -> None:
    trace, platform = data.draw(traces(cpu=False)), data.draw(platforms(host=True))
    budget = data.draw(st.one_of(st.just(ROOMY), budgets(trace)))
    try:
        done = facts(simulate(trace, platform, "save_on_cpu", budget=budget))
    except OutOfMemory:
        return
    assert done.out == done.back
    assert done.result.log.counters["implicit_moves"] == 0
    runs = done.result.events.query("why == 'run'")
    for _, _, start, end in done.moves:
        assert not ((runs.start_ns < end) & (runs.end_ns > start) & (runs.end_ns > runs.start_ns)).any()
    assert not departures(done.result.plan.trace, trace)
