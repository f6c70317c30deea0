"""Capuchin (ASPLOS 2020): free time, exposed swaps against recomputation, in-triggers, and their feedback."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.analysis.peak_memory import home_peak
from sim.analysis.stalls import stalls
from sim.errors import OutOfMemory, PolicyError
from sim.eviction.evictable import lineage_of
from sim.experiment import Result, problem_for, reference_run, simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import WHY, EventLog
from sim.plan import Memory, Move, Need
from sim.policies.hybrid.capuchin.choosing import RecomputationSet
from sim.policies.hybrid.capuchin.guide import Guide
from sim.policies.hybrid.capuchin.link import exposed_ns, leads, outs_end
from sim.policies.hybrid.capuchin.measured import Candidate, liveness_of, timeline_of
from sim.policies.hybrid.capuchin.running import Guided
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from tests.strategies import budget_at, platforms, traces
from workloads import cnn, random_dag, transformer, uniform_chain, w1

GB = 10**9


def guide_of(result: Result) -> Guide:
    return result.plan.notes["guide"]


def names(result: Result, chosen: tuple[Candidate, ...]) -> list[str]:
    return [result.log.trace.tensors[one.tensor].name for one in chosen]


def copies(log: EventLog) -> list[tuple[str, str, int, int]]:
    """(link, tensor, start, end) in order of start."""
    rows = log.intervals[log.interval("why") == WHY["move"]]
    lanes, tensors = log.platform.lanes, log.trace.tensor_columns.name
    return sorted(((lanes[r[3]], tensors[r[6]], r[0], r[1]) for r in rows.tolist()), key=lambda one: (one[2], one[0]))


def recomputed(log: EventLog) -> list[str]:
    return [log.trace.op_columns.name[op] for op in log.interval("op")[log.interval("why") == WHY["recompute"]]]


def waited(log: EventLog) -> int:
    return stalls(log).stall_ns


# ---- by hand ---------------------------------------------------------------------------------------
# A link of 1 GB/s carries a byte per nanosecond. `make_a` ends at 100 ns, `make_b` 50 ns later; memory is exceeded
# while `big` is resident, from `make_big` to `use_big`.


def two_tensors(*, bytes_b: int = 100, cost_b: int = 50, big: int = 100) -> Trace:
    b = TraceBuilder()
    first, second, wide = b.tensor("a", 100), b.tensor("b", bytes_b), b.tensor("big", big)
    b.op("make_a", writes=[first], duration=100)
    b.op("make_b", writes=[second], duration=cost_b)
    b.op("idle_1", duration=200)
    b.op("make_big", writes=[wide], duration=100)
    b.op("use_big", reads=[wide], duration=100)
    for i in range(2, 6):
        b.op(f"idle_{i}", duration=100)
    b.op("use_b", reads=[second], duration=100)
    b.op("use_a", reads=[first], duration=100)
    return b.build(outputs=[], carry=())


def test_the_tensor_of_most_free_time_is_swapped_and_returns_at_its_in_trigger():
    # a: 100 to 1050, free 950 - 200; b: 150 to 950, free 800 - 200. 100 bytes are too many: a goes.
    result = simulate(two_tensors(), machine(200), "capuchin")
    guide = guide_of(result)
    assert (dict(guide.choice.need), dict(guide.choice.saved)) == ({"hbm": 100}, {"hbm": 100})
    (a,) = guide.choice.swaps
    assert (a.left, a.wanted, a.out, a.into, a.free_ns) == (100, 1050, 100, 100, 750)
    # the copy back takes 100 ns before 1050; `use_b` starts at 950
    assert copies(result.log) == [("d2h", "a", 100, 200), ("h2d", "a", 950, 1050)]
    assert (result.log.end, waited(result.log)) == (1150, 0)
    assert recomputed(result.log) == []


def test_the_measured_iteration_moves_on_demand_what_was_accessed_first():
    result = simulate(two_tensors(), machine(200), "capuchin")
    log = result.warm_up[0].log
    # `make_big` finds no space at 350 and waits for a; `use_a` waits for its copy
    assert copies(log) == [("d2h", "a", 350, 450), ("h2d", "a", 1150, 1250)]
    assert stalls(log).by_cause == {"space": 100, "transfer": 100}
    assert log.end == 1350
    passive = simulate(two_tensors(), machine(200), "capuchin", guided=0)
    assert (passive.log, passive.warm_up) == (log, ())
    # without the waits the times are those of an iteration that has none
    times, plain = timeline_of(log), timeline_of(reference_run(two_tensors(), machine()))
    assert times.start.tolist() == plain.start.tolist()
    assert times.end.tolist() == plain.end.tolist()


@pytest.mark.parametrize(("cost", "swapped"), [(50, []), (1200, []), (1201, ["b"]), (2000, ["b"])])
def test_an_exposed_swap_is_weighed_against_recomputation(cost, swapped):
    # both have to leave. b's 1000 bytes are out at 1100 + cost and back at 2100 + cost; `use_b` starts at 900 + cost
    trace = two_tensors(bytes_b=1000, cost_b=cost, big=1100)
    result = simulate(trace, machine(1100), "capuchin")
    guide = guide_of(result)
    assert dict(guide.choice.need) == {"hbm": 1100}
    assert names(result, guide.choice.swaps) == ["a", *swapped]
    assert names(result, guide.choice.recomputed) == [name for name in ["b"] if name not in swapped]
    assert recomputed(result.log) == ([] if swapped else ["make_b"])
    assert result.log.end <= result.warm_up[0].log.end


def gap(tensor: int, left: int, wanted: int, out: int, into: int) -> Candidate:
    return Candidate(tensor, 0, "hbm", out, 0, 1, left, wanted, out, into)


def test_copies_of_one_direction_queue_on_the_link():
    # out: 0 to 40, then 40 to 70 though ready at 10; in: 40 to 80 for 100; 80 to 110 for 105, 5 late
    first, second = gap(0, 0, 100, 40, 40), gap(1, 10, 105, 30, 30)
    assert outs_end([first, second]) == {0: 40, 1: 70}
    assert exposed_ns([first]) == exposed_ns([second]) == 0
    assert exposed_ns([first, second]) == 5
    # the second has to start at 75, so the first has to end there, 25 earlier than alone
    assert leads([first, second]) == {0: 25, 1: 0}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 60)] * 4), min_size=1, max_size=5))
def test_the_wait_on_a_link_is_that_of_a_simulated_one(rows):
    # ops of 0 ns at each access, on a machine that copies a byte in a nanosecond; the device is idle between
    swaps = [gap(i, left, left + out + width, out, out) for i, (left, width, out, _) in enumerate(rows)]
    late = now = 0
    out_free = back_free = 0
    out = {}
    for one in sorted(swaps, key=lambda each: (each.left, each.tensor)):
        out_free = max(out_free, one.left) + one.out
        out[one.tensor] = out_free
    for one in sorted(swaps, key=lambda each: (each.wanted, each.tensor)):
        back_free = max(back_free, out[one.tensor]) + one.into
        now = max(one.wanted + late, back_free)
        late = now - one.wanted
    assert exposed_ns(swaps) == late


# ---- the recomputed set ----------------------------------------------------------------------------


def test_recomputing_starts_from_the_nearest_ancestor_that_is_resident():
    # c = h(b), b = g(a): with b dead at c's back-access, c costs g and h; a is read later, so it is there
    b = TraceBuilder()
    a, mid, c, big = b.tensor("a", 10), b.tensor("b", 10), b.tensor("c", 1000), b.tensor("big", 1000)
    b.op("f", writes=[a], duration=1000)
    b.op("g", reads=[a], writes=[mid], duration=30)
    b.op("h", reads=[mid], writes=[c], duration=70)
    b.op("make_big", writes=[big], duration=10)
    b.op("use_big", reads=[big], duration=10)
    b.op("use_c", reads=[c], duration=10)
    b.op("use_a", reads=[a], duration=10)
    result = simulate(b.build(outputs=[], carry=()), machine(1100), "capuchin")
    assert names(result, guide_of(result).choice.recomputed) == ["c"]
    assert recomputed(result.log) == ["g", "h"]


def inner_tensors(big_between: bool) -> Trace:
    """t2 = g(t1), t1 = f(x); both have to leave for `wide`, and for a second one between their last reads."""
    b = TraceBuilder()
    x, t1, t2, wide = b.tensor("x", 1), b.tensor("t1", 1000), b.tensor("t2", 1000), b.tensor("wide", 2000)
    b.op("make_x", writes=[x], duration=10**6)
    b.op("f", reads=[x], writes=[t1], duration=10)
    b.op("g", reads=[t1], writes=[t2], duration=10)
    b.op("make_wide", writes=[wide], duration=10)
    b.op("use_wide", reads=[wide], duration=10)
    b.op("use_t2", reads=[t2], duration=10)
    if big_between:
        again = b.tensor("again", 2000)
        b.op("make_again", writes=[again], duration=10)
        b.op("use_again", reads=[again], duration=10)
    b.op("use_t1", reads=[t1, x], duration=10)
    return b.build(outputs=[], carry=())


@pytest.mark.parametrize(("between", "again"), [(False, ["f", "g"]), (True, ["f", "g", "f"])])
def test_what_is_recomputed_on_the_way_and_read_later_stays_while_memory_lasts(between, again):
    result = simulate(inner_tensors(between), machine(2001, rate=10**5), "capuchin")
    assert sorted(names(result, guide_of(result).choice.recomputed)) == ["t1", "t2"]
    assert recomputed(result.log) == again
    assert copies(result.log) == []


def test_the_published_rules_for_what_one_choice_changes_for_others():
    # t1 from x costs 10 and t2 from t1. With t1 chosen, t2's source is x and it costs 20. With t2 chosen, t1 costs
    # its own 10 and another 10 for t2, whose source it is
    trace = inner_tensors(False)
    result = simulate(trace, machine(2001, rate=10**5), "capuchin")
    problem = problem_for(trace, machine(2001, rate=10**5))
    line, live = lineage_of(problem), liveness_of(trace, problem.platform)
    t2, t1 = sorted(guide_of(result).choice.recomputed, key=lambda one: -one.tensor)
    for first, second in ((t1, t2), (t2, t1)):
        chosen = RecomputationSet(trace, line, live, [t1, t2], {})
        assert [chosen.overhead(one.tensor) for one in (t1, t2)] == [10, 10]
        chosen.choose(first.tensor)
        assert chosen.overhead(first.tensor) is None
        assert chosen.overhead(second.tensor) == 20


def test_what_saves_most_per_second_is_recomputed_first():
    # each from its own source, which stays: a saves 1000 bytes in 10 ns, b 1000 in 100, c 4000 in 200. Without them
    # 3500 bytes more are needed: a (100 bytes per ns) does not suffice, c (20) does, so that b (10) stays
    b = TraceBuilder()
    source = [b.tensor(f"source_{name}", 1) for name in "abc"]
    made = [b.tensor(name, bytes) for name, bytes in (("a", 1000), ("b", 1000), ("c", 4000))]
    wide = b.tensor("wide", 5000)
    for each, name in zip(source, "abc", strict=True):
        b.op(f"source_{name}", writes=[each], duration=10**6)
    for each, own, name, ns in zip(made, source, "abc", (10, 100, 200), strict=True):
        b.op(f"make_{name}", reads=[own], writes=[each], duration=ns)
    b.op("make_wide", writes=[wide], duration=10)
    b.op("use_wide", reads=[wide], duration=10)
    for each, own, name in zip(made, source, "abc", strict=True):
        b.op(f"use_{name}", reads=[each, own], duration=10)
    result = simulate(b.build(outputs=[], carry=()), machine(11_003 - 3500, rate=10**5), "capuchin")
    choice = guide_of(result).choice
    assert (dict(choice.need), dict(choice.saved)) == ({"hbm": 3500}, {"hbm": 5000})
    assert (names(result, choice.swaps), names(result, choice.recomputed)) == ([], ["a", "c"])
    assert recomputed(result.log) == ["make_a", "make_c"]


# ---- limits of the bandwidth -----------------------------------------------------------------------

NETS = {"w1": w1(3), "chain": uniform_chain(24), "dag": random_dag(30, 1, weights=0.2)}


def toy(budget: int, rate: int) -> Platform:
    tiers = Tier("hbm", budget, budget, 10**12, device=0), Tier("host", 1 << 60, 1 << 60, 10**11, kind="ddr")
    links = Link("d2h", "hbm", "host", rate), Link("h2d", "host", "hbm", rate)
    return Platform("toy", tiers, (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**12}),), links)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("share", [0.9, 0.7])
def test_with_infinite_bandwidth_all_are_swapped_and_nothing_waits(net, share):
    peak = home_peak(reference_run(NETS[net], toy(1 << 50, GB)))
    result = simulate(NETS[net], toy(int(share * peak), 10**18), "capuchin")
    assert guide_of(result).choice.swaps
    assert guide_of(result).choice.recomputed == ()
    assert recomputed(result.log) == []
    # a copy of any size takes a nanosecond: the integers leave no less
    assert waited(result.log) <= 2 * len(copies(result.log))


@pytest.mark.parametrize("net", NETS)
def test_with_hardly_any_all_are_recomputed(net):
    peak = home_peak(reference_run(NETS[net], toy(1 << 50, GB)))
    result = simulate(NETS[net], toy(int(0.9 * peak), 1000), "capuchin")
    assert guide_of(result).choice.swaps == ()
    assert guide_of(result).choice.recomputed
    assert recomputed(result.log)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("rate", [10**6, GB, 10**12, 10**15])
def test_what_is_saved_covers_what_is_needed(net, rate):
    peak = home_peak(reference_run(NETS[net], toy(1 << 50, GB)))
    for share in (0.9, 0.8):
        choice = guide_of(simulate(NETS[net], toy(int(share * peak), rate), "capuchin")).choice
        assert choice.need["hbm"] == peak - int(share * peak)
        assert choice.saved["hbm"] >= choice.need["hbm"]
        assert choice.saved["hbm"] == sum(one.bytes for one in (*choice.swaps, *choice.recomputed))


def test_where_all_fits_it_does_nothing():
    trace = NETS["w1"]
    kept = reference_run(trace, toy(1 << 50, GB))
    result = simulate(trace, toy(home_peak(kept), GB), "capuchin")
    assert result.log == simulate(trace, toy(home_peak(kept), GB)).log
    assert result.plan.actions == ()


# ---- guided iterations -----------------------------------------------------------------------------

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 512}
GPT = transformer(TINY, batch=4, sequence=64)


def jobs() -> list[tuple[Trace, Platform]]:
    found = []
    for trace in (GPT, NETS["w1"], NETS["chain"], cnn("googlenet", batch=8, image=112)):
        peak = home_peak(reference_run(trace, toy(1 << 50, GB)))
        found += [(trace, toy(int(share * peak), rate)) for rate in (GB, 10**11) for share in (0.9, 0.8)]
    return found


@pytest.mark.parametrize("hidden", ["alone", "queued"])
def test_as_published_guided_iterations_of_nets_are_not_slower_than_passive_mode_nor_than_each_other(hidden):
    for trace, platform in jobs():
        result = simulate(trace, platform, "capuchin", hidden=hidden, fall_back=False)
        measured, *guided = [run.log for run in (*result.warm_up, result)]
        assert all(log.end <= measured.end for log in guided)
        late = [stalls(log).by_cause.get("transfer", 0) for log in guided]
        assert late == sorted(late, reverse=True)


def held_results() -> Trace:
    """`total` may leave, beside `loss`, which the program holds and nothing reads: only passive mode moves that.

    While `wide` runs, 193 bytes are resident: `total` cannot return before `add`.
    """
    b = TraceBuilder()
    x, y, z, loss, hint, total, wide = (b.tensor(name, 64 if name != "hint" else 1) for name in HELD)
    b.op("f0", writes=[x], duration=100)
    b.op("f1", reads=[x], writes=[y], duration=100)
    b.op("f2", reads=[y], writes=[z], releases=[x], duration=100)
    b.op("last", reads=[z], writes=[loss], releases=[y], duration=100)
    b.op("back", reads=[loss], writes=[hint, total], releases=[z], duration=1000)
    b.op("wide", reads=[hint], writes=[wide], releases=[loss], duration=1000)
    b.op("add", reads=[total, wide], duration=1)
    return b.build(outputs=[], carry=())


HELD = ("x", "y", "z", "loss", "hint", "total", "wide")


def two_results() -> Trace:
    """`y` is cheaper to recompute than to copy, but its producer takes space for `z` again, beside `d`."""
    b = TraceBuilder()
    y, z, loss, d = b.tensor("y", 1000), b.tensor("z", 4000), b.tensor("loss", 10), b.tensor("d", 4000)
    b.op("f0", writes=[y, z], duration=100)
    b.op("f1", reads=[z], writes=[loss], duration=100)
    b.op("f1.b", reads=[loss], writes=[d], duration=100)
    b.op("f0.b", reads=[d, y], duration=100)
    return b.build(outputs=[], carry=())


def ends_of(trace: Trace, platform: Platform, **parameters: Any) -> list[int] | None:
    """When each of five iterations ends; None where one does not fit."""
    try:
        result = simulate(trace, platform, "capuchin", iterations=5, **parameters)
    except OutOfMemory:
        return None
    return [run.log.end for run in (*result.warm_up, result)]


def test_as_published_a_guided_iteration_may_be_slower_than_passive_mode_or_not_fit():
    # passive mode moves x, y, z and loss, 64 ns each; the guide moves `total` instead of `loss`, and back
    job = held_results(), machine(190)
    assert ends_of(*job, guided=0) == ends_of(*job) == [2657] * 5
    assert ends_of(*job, fall_back=False) == [2657, *[2721] * 4]
    # passive mode moves y out and back, 1000 ns each; `f0` needs 5000 bytes beside d's 4000
    job = two_results(), machine(5005)
    assert ends_of(*job, guided=0) == ends_of(*job) == [2400] * 5
    assert ends_of(*job, fall_back=False) is None


@settings(max_examples=40, deadline=None)
@given(
    trace=traces(max_steps=10),
    step=st.integers(5, 10),
    platform=platforms(host=True),
    small=st.one_of(st.none(), st.integers(1, 8)),
)
@example(trace=held_results(), step=-1, platform=machine(190), small=None)
@example(trace=two_results(), step=-1, platform=machine(5005), small=None)
def test_guided_iterations_are_never_slower_than_passive_ones_and_fit_where_those_do(trace, step, platform, small):
    """step: of the budget; -1 for the platform's own. small: the host's capacity in tenths of all tensors."""
    if step >= 0:
        platform = platform.with_budget(budget_at(trace, step))
    if small is not None:
        host = 1 + int(trace.tensor_columns.bytes.sum()) * small // 10
        tiers = [replace(t, nominal=host, capacity=host) if t.name == "host" else t for t in platform.tiers]
        platform = replace(platform, tiers=tuple(tiers))
    passive, guided = ends_of(trace, platform, guided=0), ends_of(trace, platform)
    if passive is not None:
        assert guided is not None
        assert guided[-1] <= passive[-1]
        assert all(ours <= max(passive[0], theirs) for ours, theirs in zip(guided, passive, strict=True))


def test_pressure_in_the_host_is_none_of_its_concern():
    # an engine of the host that finds no space there for its results
    need = Need("host", 100, 100, op=3, reason="results")
    guided = Guided(back={}, chain=("host",), homes=("hbm",), movable=[True], size=[100])
    assert list(guided.on_pressure(need, cast("Memory", None))) == []


def test_a_late_copy_starts_earlier_in_the_next_iteration_by_the_share_of_its_time():
    # b is needed 60 ns before a: alone each copy of 100 ns starts in time, together one is late
    b = TraceBuilder()
    first, second, wide = b.tensor("a", 100), b.tensor("b", 100), b.tensor("big", 200)
    b.op("make_a", writes=[first], duration=10)
    b.op("make_b", writes=[second], duration=10)
    b.op("idle", duration=1000)
    b.op("make_big", writes=[wide], duration=10)
    b.op("use_big", reads=[wide], duration=10)
    for i in range(80):
        b.op(f"step_{i}", duration=10)
    b.op("use_b", reads=[second], duration=60)
    b.op("use_a", reads=[first], duration=10)
    trace = b.build(outputs=[], carry=())
    result = simulate(trace, machine(200), "capuchin", guided=24)
    guided = [*result.warm_up[1:], result]
    # a is 40 ns late, behind b's copy. Each iteration its own begins 5 ns earlier; once it would overtake b's, that
    # begins with it: 10 ns earlier in every second iteration, as the ops are 10 ns long
    assert [run.plan.notes["guide"].lead.get(0, 0) for run in guided] == [5 * i for i in range(20)] + [95] * 4
    waits = [waited(run.log) for run in guided]
    assert waits == [40] * 13 + [30, 30, 20, 20, 10, 10] + [0] * 5


def test_no_copy_back_begins_while_memory_is_full():
    result = simulate(two_tensors(), machine(200), "capuchin", feedback=1.0, guided=6)
    trace = result.log.trace
    back = [action for action in result.plan.actions if isinstance(action, Move) and action.to == "hbm"]
    assert all(trace.op_id(action.before) > trace.op_id("use_big") for action in back)


def test_another_trace_is_measured_again():
    first, second = uniform_chain(12), uniform_chain(16)
    peak = home_peak(reference_run(first, toy(1 << 50, GB)))
    result = simulate([first, first, second, second], toy(int(0.8 * peak), 10**12), "capuchin")
    phases = [run.plan.notes["phase"] for run in (*result.warm_up, result)]
    assert phases == ["measure", "guide", "measure", "guide", "guide"][: len(phases)]


# ---- what the trace may be -------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [10**7, 10**11])
def test_nets_with_ops_in_place_run(rate):
    trace = cnn("googlenet", batch=8, image=112)
    assert (trace.tensor_columns.replaces >= 0).any()
    peak = home_peak(reference_run(trace, toy(1 << 50, rate)))
    result = simulate(trace, toy(int(0.8 * peak), rate), "capuchin")
    assert bool(recomputed(result.log)) == (rate == 10**7)


def test_every_device_has_its_own_excess_and_links():
    b = TraceBuilder()
    for device in (0, 1):
        x, big = b.tensor(f"x{device}", 100), b.tensor(f"big{device}", 100)
        more = {"device": device}
        b.op(f"make{device}", writes=[x], duration=10, **more)
        b.op(f"idle{device}", duration=1000, **more)
        b.op(f"wide{device}", writes=[big], duration=10, **more)
        b.op(f"use_wide{device}", reads=[big], duration=10, **more)
        b.op(f"rest{device}", duration=1000, **more)
        b.op(f"use{device}", reads=[x], duration=10, **more)
    trace = b.build(outputs=[], carry=())
    tiers = (*(Tier(f"hbm{i}", 100 + 100 * i, 200, GB, device=i) for i in (0, 1)), Tier("host", 1 << 40, 1 << 40, GB))
    engines = tuple(Engine(f"npu@{i}", i, f"hbm{i}", (f"hbm{i}",), {"fp32": GB}) for i in (0, 1))
    links = [Link(f"out{i}", f"hbm{i}", "host", GB) for i in (0, 1)]
    links += [Link(f"in{i}", "host", f"hbm{i}", GB) for i in (0, 1)]
    result = simulate(trace, Platform("two", tiers, engines, tuple(links)), "capuchin")
    assert dict(guide_of(result).choice.need) == {"hbm0": 100, "hbm1": 0}
    assert {lane for lane, *_ in copies(result.log)} == {"out0", "in0"}
    assert waited(result.log) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_the_memory_curve_is_that_of_a_run_without_evictions(size, seed):
    trace = random_dag(size, seed, weights=0.3)
    log = reference_run(trace, toy(1 << 50, GB))
    (used,) = liveness_of(trace, log.platform).used.values()
    assert int(used.max()) == home_peak(log)


def test_a_machine_without_a_host_is_refused_by_name():
    with pytest.raises(PolicyError, match="capuchin: toy has no host tier to swap to"):
        simulate(two_tensors(), machine(host=False), "capuchin")


@pytest.mark.parametrize("wrong", [{"guided": -1}, {"feedback": -0.1}, {"hidden": "sometimes"}])
def test_parameters_are_held_to_their_bounds(wrong: dict[str, Any]):
    with pytest.raises(PolicyError, match=next(iter(wrong))):
        simulate(two_tensors(), machine(200), "capuchin", **wrong)


def test_all_runs_stay_within_the_budget():
    for trace, platform in jobs()[1::4]:
        result = simulate(trace, platform, "capuchin")
        for run in (*result.warm_up, result):
            assert home_peak(run.log) <= platform.home(0).capacity
            assert np.all(run.log.intervals[:, 1] >= run.log.intervals[:, 0])
