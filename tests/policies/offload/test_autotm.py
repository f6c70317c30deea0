"""AutoTM: its program against every path of small nets, its time against the run, and what each mode adds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.errors import Infeasible, PolicyError
from sim.experiment import Result, simulate
from sim.hardware.platform import Allocator, Link, Platform, Tier
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, facts, machine
from tests.policies.offload.test_uvm import step
from tests.policies.offload.test_vdnn import net
from workloads import cnn
from workloads.synthetic import w1

MODES = ("static", "synchronous", "asynchronous")


def near(capacity: int, *, slow: int = GB // 4) -> Platform:
    """A device that reads and writes the host's memory in place, at so many bytes/s; its own has 1 GB/s."""
    on = machine(capacity)
    tiers = (on.tiers[0], replace(on.tiers[1], bandwidth=slow, latency=3))
    return replace(on, tiers=tiers, engines=(replace(on.engines[0], reaches=("hbm", "host")), *on.engines[1:]))


def small(seed: int) -> Trace:
    """Three tensors that may move, and results of no bytes."""
    rng = random.Random(seed)
    b = TraceBuilder()
    made = [b.tensor("x", 0, "input")]
    for i in range(3):
        made.append(b.tensor(f"t{i}", rng.randint(2, 12)))
        b.op(f"make{i}", reads=[made[0]], writes=[made[-1]], duration=rng.randint(1, 20))
    for i in range(rng.randint(2, 3)):
        reads = rng.sample(made[1:], rng.randint(1, 2))
        b.op(f"read{i}", reads=reads, writes=[b.tensor(f"o{i}", 0)], duration=rng.randint(1, 20))
    return b.build(outputs=[])


def paths(uses: list[int], in_place: bool) -> Iterator[tuple[tuple[bool, ...], tuple[bool, ...]]]:
    """Per use whether a tensor is in the fast tier, per gap whether it stays there."""
    for fast in product((True, False) if in_place else (True,), repeat=len(uses)):
        for stays in product((True, False), repeat=len(uses) - 1):
            if all(not s or (a and b) for s, (a, b) in zip(stays, pairwise(fast), strict=True)):
                yield fast, stays


def best_by_hand(trace: Trace, on: Platform, capacity: int, *, moves: bool = True) -> int | None:
    """The least time of all synchronous paths of what has bytes, or of those that stay in one tier, by trying each."""
    size = [int(bytes) for bytes in trace.tensor_columns.bytes]
    ops = range(len(trace.ops))
    uses = {t: [int(trace.producer[t]), *trace.readers(t)] for t in range(1, len(size)) if size[t]}
    in_place = "host" in on.engines[0].reaches
    slow, latency = on.tier("host").bandwidth, on.tier("host").latency
    best = None
    ways = [[way for way in paths(u, in_place) if moves or len({*way[0], *way[1]}) == 1] for u in uses.values()]
    for choice in product(*ways):
        held = [0 for _ in ops]
        away: dict[int, int] = {}
        copies = 0
        for (t, when), (fast, stays) in zip(uses.items(), choice, strict=True):
            there = not fast[0]
            for i, op in enumerate(when):
                if fast[i]:
                    held[op] += size[t]
                else:
                    away[op] = away.get(op, 0) + size[t]
                if i + 1 < len(when):
                    if stays[i]:
                        for between in range(op + 1, when[i + 1]):
                            held[between] += size[t]
                    elif fast[i] and not there:
                        copies, there = copies + size[t], True
                    if not stays[i] and fast[i + 1]:
                        copies += size[t]
        if max(held) > capacity:
            continue
        extra = sum(ceil(Fraction(b * GB, slow) - b) + latency for b in away.values())
        total = sum(int(d) for d in trace.op_columns.duration) + copies + extra
        best = total if best is None else min(best, total)
    return best


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.sampled_from([0.9, 0.7, 0.5]), st.booleans(), st.sampled_from(MODES[:2]))
@example(3, 0.5, True, "synchronous")
@example(1, 0.9, True, "static")
def test_no_path_is_faster_than_the_program_that_may_move_and_that_which_may_not(
    seed: int, share: float, in_place: bool, mode: str
) -> None:
    trace = small(seed)
    peak = facts(simulate(trace, machine(), "keep_all")).peak
    on = (near if in_place else machine)(int(share * peak))
    least = best_by_hand(trace, on, int(share * peak), moves=mode != "static")
    if least is None:
        with pytest.raises(Infeasible):
            simulate(trace, on, "autotm", mode=mode)
        return
    done = simulate(trace, on, "autotm", mode=mode)
    assert done.plan.notes["status"] == "optimal"
    assert done.log.end == done.plan.notes["expected_ns"] == least


def test_where_an_allocator_rounds_up_what_just_fits_the_program_is_solved_for_less_memory() -> None:
    trace = net([("conv", bytes, 3000, 3000) for bytes in (5000, 5050, 5100, 4900, 5020)])
    exact = machine(int(0.85 * facts(simulate(trace, machine(), "keep_all")).peak))
    blocks = replace(exact.tiers[0], allocator=Allocator("pool", (("rounding", 512),)))
    rounded = replace(exact, tiers=(blocks, *exact.tiers[1:]))
    plain, done = (simulate(trace, on, "autotm", mode="synchronous") for on in (exact, rounded))
    assert len(done.plan.actions) > len(plain.plan.actions)
    assert done.log.end == done.plan.notes["expected_ns"] > plain.log.end


def random_run(seed: int, share: float, mode: str, in_place: bool) -> Result | None:
    rng = random.Random(seed)
    kinds = ["conv", "elementwise"]
    trace = net([(rng.choice(kinds), *(rng.randint(1, 40) for _ in range(3))) for _ in range(rng.randint(3, 6))])
    budget = int(share * facts(simulate(trace, machine(), "keep_all")).peak)
    try:
        return simulate(trace, (near if in_place else machine)(budget), "autotm", mode=mode)
    except Infeasible:
        return None


@settings(max_examples=3)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9, 0.6]), st.booleans())
@example(0, 0.6, False)
def test_the_run_takes_what_the_program_says_and_more_choices_take_no_longer(
    seed: int, share: float, in_place: bool
) -> None:
    ends = []
    for mode in MODES:
        done = random_run(seed, share, mode, in_place)
        ends.append(1 << 60 if done is None else done.log.end)
        if done is not None:
            assert done.log.end <= done.plan.notes["expected_ns"]
            if mode != "asynchronous":
                assert done.log.end == done.plan.notes["expected_ns"]
    assert ends == sorted(ends, reverse=True)


def test_all_in_the_fast_tier_with_memory_and_all_in_the_slow_one_without() -> None:
    trace = net([("conv", 10, 20, 20)] * 3)
    peak = facts(simulate(trace, machine(), "keep_all")).peak
    plain = simulate(trace, near(peak), "keep_all").log.end
    assert simulate(trace, near(peak), "autotm").log.end == plain
    none = simulate(trace, near(0), "autotm")
    every = simulate(trace, near(0), "autotm", mode="static")
    assert none.log.end == every.log.end > plain
    assert not none.plan.actions
    # each op reads and writes in the slow tier at a quarter of the rate, and waits 3 ns for it
    touched = [int(sum(trace.tensor_columns.bytes[t] for t in (*op.reads, *op.writes))) for op in trace.ops]
    assert every.log.end == plain + sum(3 * bytes + 3 for bytes in touched)


def test_a_copy_beside_an_op_takes_the_longer_of_both(run) -> None:
    b = TraceBuilder()
    x, y, big = b.tensor("x", 1, "input"), b.tensor("y", 10), b.tensor("big", 25)
    b.op("f", reads=[x], writes=[y], duration=10)
    b.op("wait", reads=[x], writes=[b.tensor("z", 0)], duration=20)
    b.op("g", reads=[x], writes=[big], duration=10)
    b.op("h", reads=[big], writes=[b.tensor("u", 0)], duration=10)
    b.op("rest", reads=[x], writes=[b.tensor("v", 0)], duration=4)
    b.op("end", reads=[y], writes=[b.tensor("w", 0)], duration=10)
    done = run(b.build(), "autotm", 30)
    assert done.moves == [("d2h", "y", 10, 20), ("h2d", "y", 50, 60)]
    assert done.time == 70  # `rest` takes 4 and the copy 10
    assert run(b.build(), "autotm", 30, mode="synchronous").time == 84


def test_a_second_eviction_copies_nothing(run) -> None:
    b = TraceBuilder()
    x, y = b.tensor("x", 1, "input"), b.tensor("y", 10)
    b.op("f", reads=[x], writes=[y], duration=10)
    for i in range(2):
        big = b.tensor(f"big{i}", 25)
        b.op(f"g{i}", reads=[x], writes=[big], duration=50)
        b.op(f"h{i}", reads=[big], writes=[b.tensor(f"u{i}", 0)], duration=50)
        b.op(f"r{i}", reads=[y], writes=[b.tensor(f"v{i}", 0)], duration=50)
    done = run(b.build(), "autotm", 30, mode="synchronous")
    assert (done.out, done.back) == ({"y": 10}, {"y": 20})
    assert done.time == done.result.plan.notes["expected_ns"] == 10 + 6 * 50 + 10 + 2 * 10


@pytest.mark.parametrize(("window", "time"), [(1, 90), (2, 78)])
def test_a_copy_runs_beside_so_many_ops_next_to_a_use_and_has_ended_with_its_op(window: int, time: int, run) -> None:
    b = TraceBuilder()
    x, y, big = b.tensor("x", 1, "input"), b.tensor("y", 10), b.tensor("big", 25)

    def op(name: str, took: int, *reads: int, writes: int | None = None) -> None:
        b.op(name, reads=reads or (x,), writes=[b.tensor(f"{name}.y", 0) if writes is None else writes], duration=took)

    op("f", 10, writes=y)
    op("out1", 4)
    op("out2", 20)
    op("g", 10, writes=big)
    op("h", 10, big)
    op("in2", 10)
    op("in1", 4)
    op("end", 10, y)
    done = run(b.build(), "autotm", 30, window=window)
    # beside an op of 4 the device waits for the copies of 10; one further away there is an op that hides each
    assert done.time == done.result.plan.notes["expected_ns"] == time


@pytest.mark.parametrize(("back", "read_in_place"), [(32, True), (20, False)])
def test_an_op_waits_once_for_the_slow_tier_and_copies_have_the_rate_of_their_direction(
    back: int, read_in_place: bool, run
) -> None:
    b = TraceBuilder()
    x, p, q = b.tensor("x", 0, "input"), b.tensor("p", 10), b.tensor("q", 10)
    for t in (p, q):
        b.op(f"make{t}", reads=[x], writes=[t], duration=10)
    b.op("large", reads=[x], workspace=30, duration=10)
    b.op("read", reads=[p, q], writes=[b.tensor("z", 0)], duration=10)
    rates = {"d2h": 10 * GB // 32, "h2d": 10 * GB // back}
    on = near(30)
    on = replace(on, links=tuple(replace(link, rate=rates[link.name]) for link in on.links))
    done = run(b.build(outputs=[]), "autotm", 30, on=on, mode="synchronous")
    # both are copied out in 32 ns each; then they are read in place, 30 ns more each and 3 for the op, or come back
    assert done.time == done.result.plan.notes["expected_ns"] == 4 * 10 + 2 * 32 + (63 if read_in_place else 2 * back)
    assert bool(done.back) is not read_in_place


@pytest.mark.parametrize("capacity", [45, 50, 79, 82])
def test_weights_end_where_they_begin(capacity: int) -> None:
    for on in (near(capacity), machine(capacity)):
        log = simulate(step(), on, "autotm").log
        assert log.complete
        assert log.counters["returned_moves"] == 0


def test_too_much_for_it_is_refused_in_one_line() -> None:
    with pytest.raises(PolicyError, match="plans 3 ops at most"):
        simulate(w1(3), machine(30), "autotm", max_ops=3)
    with pytest.raises(PolicyError, match="no host tier"):
        simulate(step(), machine(50, host=False), "autotm")
    with pytest.raises(Infeasible, match="no asynchronous plan fits 40 B"):
        simulate(step(), machine(40), "autotm")


def test_on_optane_the_loss_is_that_of_the_abstract_and_each_freedom_helps() -> None:
    """Abstract: 27.7 % less speed, geometric mean, with 50 to 80 % of DRAM replaced; first touch loses more."""
    slower, rest = [], 0
    for name, batch in (("vgg-16", 16), ("alexnet", 64)):
        trace = cnn(name, batch, optimizer="sgd")
        plain = simulate(trace, "xeon_optane", "keep_all", budget=1 << 60)
        for share in (0.5, 0.2):
            budget = int(share * plain.summary()["peak_bytes"])
            static, moving = (
                simulate(trace, "xeon_optane", f"autotm(mode={mode})", budget=budget).log
                for mode in ("static", "synchronous")
            )
            assert moving.end <= 1.0001 * static.end  # the solver stops within a ten-thousandth
            slower.append(static.end / plain.log.end)
            rest += simulate(trace, "xeon_optane", "uvm", budget=budget).log.end > static.end
    assert 1 - math.prod(slower) ** (-1 / len(slower)) == pytest.approx(0.277, abs=0.07)
    assert rest == len(slower), "what is moved when it is touched loses more"


def with_modules(host: int, modules: int) -> Platform:
    """The machine of the other tests with 130 bytes, a host of so many, and memory behind it at half of its rate."""
    plain = machine(130)
    hbm, ddr = plain.tiers
    tiers = (hbm, replace(ddr, capacity=host), Tier("cxl", modules, modules, GB, kind="cxl"))
    ways = (("hbm", "cxl"), ("cxl", "hbm"), ("host", "cxl"), ("cxl", "host"))
    return replace(plain, tiers=tiers, links=(*plain.links, *(Link(f"{a}2{b}", a, b, GB // 2) for a, b in ways)))


def nested() -> Trace:
    """Three results of 40 bytes that are read in the reverse order, after an op that needs the memory of all."""
    b = TraceBuilder()
    x = b.tensor("x", 0, "input")
    kept = [b.tensor(f"y{n}", 40) for n in range(3)]
    for n in range(3):
        b.op(f"f{n}", reads=[x], writes=kept[n : n + 1], duration=10)
    b.op("large", reads=[x], workspace=130, duration=10)
    for n in reversed(range(3)):
        b.op(f"b{n}", reads=[kept[n]], writes=[b.tensor(f"o{n}", 0)], duration=10)
    return b.build(outputs=[], carry=())


@pytest.mark.parametrize(
    ("host", "lanes"),
    [
        (120, {"y0": "d2h", "y1": "d2h", "y2": "d2h"}),
        (90, {"y0": "d2h", "y1": "d2h", "y2": "hbm2cxl"}),
        (50, {"y0": "d2h", "y1": "hbm2cxl", "y2": "hbm2cxl"}),
        (10, {"y0": "hbm2cxl", "y1": "hbm2cxl", "y2": "hbm2cxl"}),
    ],
)
def test_what_the_host_has_no_space_for_lies_in_the_memory_behind_it(host: int, lanes: dict[str, str]) -> None:
    """Those that live longest have the nearer one; copies of 40 bytes hold the device for 40 or for 80 ns."""
    done = facts(simulate(nested(), with_modules(host, 1000), "autotm", mode="synchronous"))
    out = {tensor: lane for lane, tensor, _, _ in done.moves if lane in ("d2h", "hbm2cxl")}
    assert out == lanes
    assert done.result.plan.notes["status"] == "optimal"
    far = sum(lane == "hbm2cxl" for lane in lanes.values())
    assert done.time == done.result.plan.notes["expected_ns"] == 7 * 10 + 2 * (3 * 40 + far * 40)


def test_with_no_space_in_either_memory_the_refusal_is_one_line() -> None:
    with pytest.raises(
        Infeasible, match=r"policy 'autotm': no synchronous plan fits .*; 'cxl' has no space for what leaves$"
    ):
        simulate(nested(), with_modules(10, 10), "autotm", mode="synchronous")
