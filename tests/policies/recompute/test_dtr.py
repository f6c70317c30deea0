"""DTR (ICLR 2021): the authors' prototype simulator, op for op and nanosecond for nanosecond.

The tables were made with that prototype as it is: chains of unit ops with a number of slots, and a
transformer stack with costs in whole nanoseconds. What is recomputed after the last op of the trace, to
have its outputs at the end, is not part of them.
"""

from __future__ import annotations

import pickle
from fractions import Fraction
from math import ceil, sqrt

import pytest

from sim.errors import OutOfMemory, PolicyError
from sim.eviction.evictable import lineage_of
from sim.eviction.evictor import Evictor, Rules
from sim.eviction.neighbourhood import CostClasses
from sim.experiment import problem_for, simulate
from sim.plan import Change
from sim.policies import load
from sim.trace import Trace, TraceBuilder
from tests.policies.recompute.dtr_runs import cut, loose, one_tier, run
from workloads.synthetic import random_dag, uniform_chain, w1
from workloads.transformer import transformer

DTR, EQ, LOCAL, LRU = {"heuristic": "dtr"}, {"heuristic": "dtr_eq"}, {"heuristic": "local"}, {"heuristic": "lru"}
SIZE, MSPS, TIMELESS = {"heuristic": "size"}, {"heuristic": "msps"}, {"heuristic": "dtr", "staleness": "none"}

# ---- chains: extra ops over 2 n ------------------------------------------------------------------

LAST = [
    (16, 8, (DTR, EQ), 8), (16, 8, (TIMELESS,), 13), (16, 8, (MSPS,), 9), (16, 8, (LOCAL, LRU), 11),
    (16, 8, (SIZE,), 44),
    (64, 16, (DTR, EQ), 49), (64, 16, (TIMELESS,), 74), (64, 16, (MSPS,), 60), (64, 16, (LOCAL, LRU), 161),
    (64, 16, (SIZE,), 1224),
    (256, 32, (DTR, EQ), 230), (256, 32, (TIMELESS,), 373), (256, 32, (MSPS,), 304), (256, 32, (LOCAL, LRU), 1982),
    (64, 6, (DTR, EQ), 196), (64, 6, (TIMELESS,), 284), (64, 6, (MSPS,), 159), (64, 6, (LOCAL, LRU), 889),
    (64, 6, (SIZE,), 1769),
    (256, 8, (DTR, EQ), 1107), (256, 8, (TIMELESS,), 3403), (256, 8, (MSPS,), 888),
    (1024, 64, (DTR, EQ), 988), (1024, 64, (TIMELESS,), 1716), (1024, 64, (MSPS,), 1469),
]  # fmt: skip
LAST_LONG = [
    (1024, 64, (LOCAL, LRU), 26604),
    (1024, 10, (DTR, EQ), 5064), (1024, 10, (TIMELESS,), 23576), (1024, 10, (MSPS,), 9870),
]  # fmt: skip
FIRST = [
    (DTR, (8, 49, 230, 177, 979)),
    (TIMELESS, (10, 55, 312, 238, 2936)),
    (MSPS, (8, 51, 257, 208, 1189)),
    (LRU, (10, 108, 952, 450, 5250)),
]


@pytest.mark.parametrize(("n", "slots", "heuristics", "extra"), LAST)
def test_chain_recomputes_what_the_prototype_does(n, slots, heuristics, extra):
    for heuristic in heuristics:
        assert run(uniform_chain(n), slots, **heuristic).recomputed == extra


@pytest.mark.slow
@pytest.mark.parametrize(("n", "slots", "heuristics", "extra"), LAST_LONG)
def test_long_chain_recomputes_what_the_prototype_does(n, slots, heuristics, extra):
    for heuristic in heuristics:
        assert run(uniform_chain(n), slots, **heuristic).recomputed == extra


@pytest.mark.parametrize(("heuristic", "extra"), FIRST)
def test_chain_where_the_first_of_equals_goes(heuristic, extra):
    cases = ((16, 8), (64, 16), (256, 32), (64, 6), (256, 8))
    found = [run(uniform_chain(n), slots, ties="first", **heuristic).recomputed for n, slots in cases]
    assert tuple(found) == extra


def test_chain_of_64_by_number_of_slots():
    printed = {4: 1772, 5: 321, 6: 196, 7: 129, 8: 102, 10: 80, 12: 63, 16: 49, 24: 40, 32: 32}
    assert {slots: run(uniform_chain(64), slots, **DTR).recomputed for slots in printed} == printed


def test_least_number_of_slots_is_three():
    assert run(uniform_chain(16), 3, **DTR).recomputed == 93
    assert run(uniform_chain(64), 3, **DTR).recomputed == 1897
    with pytest.raises(OutOfMemory):
        run(uniform_chain(16), 2, **DTR)


@pytest.mark.parametrize(("deallocation", "full", "local"), [
    ("ignore", 666, 3933), ("eager", 227, 1982), ("banish", 227, 1982),
])  # fmt: skip
def test_chain_by_what_happens_to_the_dead(deallocation, full, local):
    chain = uniform_chain(256)
    assert run(chain, 32, staleness="neighbourhood", deallocation=deallocation, **DTR).recomputed == full
    assert run(chain, 32, deallocation=deallocation, **LOCAL).recomputed == local


@pytest.mark.parametrize("n", [9, 25, 49, 100, 144, 400, 900])
def test_extra_ops_stay_linear_with_two_sqrt_n_slots(n):
    assert run(uniform_chain(n), ceil(2 * sqrt(n)), **EQ).recomputed <= n


# ---- the transformer stack W1 ----------------------------------------------------------------------

PEAK = {4: 1_283_457_024, 12: 3_632_267_264, 24: 7_155_482_624}
IDEAL = {4: 20_346_933, 12: 61_107_909, 24: 122_249_373}
STACK = [
    (4, "0.8", (1_280_236, 1_280_236, 930_926, 1_291_420, 1_500_488, 357_917)),
    (4, "0.6", (2_581_118, 2_581_118, 11_260_560, 3_486_230, 2_780_722, 2_231_807)),
    (12, "0.8", (3_112_832, 3_112_832, 2_703_298, 4_611_597, 3_179_934, 984_269)),
]


@pytest.mark.parametrize(("layers", "ratio", "printed"), STACK)
def test_transformer_stack_recomputes_what_the_prototype_does(layers, ratio, printed):
    trace, budget = loose(w1(layers)), int(PEAK[layers] * Fraction(ratio))
    assert sum(op.duration for op in trace.ops) == IDEAL[layers]
    found = [run(trace, budget, **heuristic).recompute_ns for heuristic in (DTR, EQ, LOCAL, LRU, SIZE, MSPS)]
    assert tuple(found) == printed


def test_deeper_stack_has_the_printed_overheads():
    trace, budget = loose(w1(24)), int(PEAK[24] * Fraction("0.8"))
    found = [1 + run(trace, budget, **h).recompute_ns / IDEAL[24] for h in (DTR, LOCAL, LRU, SIZE, MSPS)]
    assert [round(x, 4) for x in found] == [1.0482, 1.0439, 1.0762, 1.0520, 1.0168]


def test_unlimited_memory_recomputes_nothing_and_peaks_as_printed():
    story = run(loose(w1(4)), 1 << 50, **EQ)
    assert story.recomputed == 0
    assert story.peak == PEAK[4]


def test_weight_gradients_are_left_alone():
    trace = w1(4)
    story = run(trace, int(PEAK[4] * Fraction("0.8")), **EQ)
    roles = {trace.tensors[t].role for t in story.evicted}
    assert roles <= {"activation", "temporary"}
    assert story.recomputed > 0
    assert "gradient" not in {trace.tensors[t].role for t in run(trace, int(PEAK[4] * Fraction("0.6"))).evicted}


# ---- online ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [DTR, EQ, LOCAL, LRU, SIZE, MSPS, {"heuristic": "random"}])
@pytest.mark.parametrize("count", [30, 45, 60])
def test_choices_do_not_change_when_the_trace_is_cut(parameters, count):
    trace = loose(w1(4))
    budget = int(PEAK[4] * Fraction("0.5"))
    whole, part = run(trace, budget, **parameters), run(cut(trace, count), budget, **parameters)
    assert part.ran == whole.ran[: len(part.ran)]
    assert part.names == whole.names[: len(part.names)]
    assert len(part.names) > 5


def test_same_seed_same_log_and_another_seed_another():
    trace, platform = loose(w1(4)), one_tier(int(PEAK[4] * Fraction("0.6")))
    logs = [simulate(trace, platform, "dtr", heuristic="random", seed=seed).log for seed in (1, 1, 2)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_plan_can_be_pickled_and_run_again():
    trace, platform = uniform_chain(64), one_tier(16)
    plan = load("dtr").plan(problem_for(trace, platform))
    assert type(pickle.loads(pickle.dumps(plan.online))()) is type(plan.online())
    story = run(trace, 16)
    assert story.log == run(trace, 16).log


# ---- options ---------------------------------------------------------------------------------------


def _big_and_small():
    """Two tensors of 40 B and one of 1 B, all read once more; the small one is the stalest and cheapest."""
    b = TraceBuilder()
    names = [("small", 1, 1), ("big0", 40, 10), ("big1", 40, 10), ("last", 40, 10)]
    made = [b.tensor(name, size) for name, size, _ in names]
    for t, (name, _, ns) in zip(made, names, strict=True):
        b.op(f"make_{name}", writes=[t], duration=ns)
    b.op("read", reads=made[::-1][:1], writes=[b.tensor("y", 1)], duration=10)
    for t, (name, _, _) in zip(made, names, strict=True):
        b.op(f"read_{name}", reads=[t], writes=[b.tensor(f"y_{name}", 1)], duration=10)
    return b.build(outputs=[], carry=())


def test_small_tensors_are_passed_over_if_asked():
    trace = _big_and_small()
    small = trace.tensor_id("small")
    assert small in run(trace, 120, heuristic="lru").dropped[:2]
    assert small not in run(trace, 120, heuristic="lru", ignore_small=0.5).dropped[:2]


def test_a_sample_makes_other_choices_and_still_fits():
    trace, budget = loose(w1(12)), int(PEAK[12] * Fraction("0.6"))
    all_of_them, some = run(trace, budget), run(trace, budget, sample=True)
    assert some.dropped != all_of_them.dropped
    assert some.recompute_ns > all_of_them.recompute_ns


def test_ablations_change_the_choice():
    trace, budget = loose(w1(4)), int(PEAK[4] * Fraction("0.6"))
    found = {
        tuple(run(trace, budget, heuristic=h, by_size=size, staleness=stale).dropped)
        for h in ("dtr", "local", "none")
        for size in (True, False)
        for stale in ("own", "none")
    }
    assert len(found) == 12


def test_without_cost_and_size_staleness_is_lru():
    trace, budget = loose(w1(4)), int(PEAK[4] * Fraction("0.8"))
    assert run(trace, budget, heuristic="none", by_size=False).dropped == run(trace, budget, heuristic="lru").dropped


@pytest.mark.parametrize("allocator", ["pool", "caching"])
def test_allocators_with_addresses_ask_until_a_hole_is_large_enough(allocator):
    trace = loose(w1(2))
    unit = max(t.bytes for t in trace.tensors)
    budget = int(run(trace, 1 << 50).peak * 0.75) // unit * unit
    story = run(trace, budget, allocator=allocator)
    assert story.recomputed > 0


@pytest.mark.parametrize(("parameters", "text"), [
    ({"heuristic": "dtr_eg"}, "heuristic is 'dtr_eg'; expected .*did you mean 'dtr_eq'"),
    ({"deallocation": "eagre"}, "did you mean 'eager'"),
    ({"ties": "middle"}, "ties is 'middle'; expected 'last' or 'first'$"),
    ({"heuristic": "lru", "staleness": "neighbourhood"}, "goes with heuristic 'dtr', not 'lru'"),
    ({"ignore_small": -1.0}, "ignore_small is -1.0; expected float of at least 0"),
])  # fmt: skip
def test_wrong_parameters_are_named(parameters, text):
    with pytest.raises(PolicyError, match=text):
        load("dtr", **parameters)


# ---- what cannot be recomputed -----------------------------------------------------------------------


def test_what_depends_on_a_weight_is_made_again_before_the_weight_is_overwritten():
    b = TraceBuilder()
    w, x = b.tensor("w", 10, "weight"), b.tensor("x", 10, "input")
    y, z = b.tensor("y", 40), b.tensor("z", 40)
    new = b.tensor("w1", 10, "weight", replaces=w)
    b.op("f", reads=[w, x], writes=[y], duration=10)
    b.op("wide", reads=[x], writes=[z], workspace=20, duration=10)
    b.op("use", reads=[z], writes=[b.tensor("u", 1)], duration=10)
    b.op("step", "optimizer", phase="update", reads=[w], writes=[new], duration=10)
    b.op("late", reads=[y], writes=[b.tensor("v", 1)], phase="update", duration=10)
    story = run(b.build(), 105)
    assert story.dropped[0] == y
    assert story.ran == [(0, False), (1, False), (2, False), (0, True), (3, False), (4, False)]


def test_a_result_in_place_is_kept_where_nothing_brings_back_what_it_overwrote():
    # g overwrites the input a in place, so that b cannot be recomputed; c, computed from b, is evicted when b dies
    b = TraceBuilder()
    a = b.tensor("a", 40, "input")
    inplace = b.tensor("b", 40, replaces=a)
    c, d, e = b.tensor("c", 40), b.tensor("d", 60), b.tensor("e", 1)
    b.op("g", reads=[a], writes=[inplace], duration=10)
    b.op("h", reads=[inplace], writes=[c], duration=10)
    b.op("i", writes=[d], duration=10)
    b.op("j", reads=[inplace, d], writes=[e], duration=10)
    b.op("k", reads=[c], writes=[b.tensor("y", 1)], duration=10)
    b.op("l", writes=[b.tensor("z", 1)], duration=10)
    story = run(b.build(outputs=[], carry=()), 130)
    assert story.dropped[0] == c
    assert [op for op, again in story.ran if again] == [1]
    assert inplace in story.dropped  # once c was there again


def in_place(chain: int) -> Trace:
    """f makes a0, overwritten in place by a1 … a<chain>, which is read late, after what needs its space."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    values = [b.tensor("a0", 40)]
    b.op("f", reads=[x], writes=values, duration=10)
    for i in range(1, chain + 1):
        values.append(b.tensor(f"a{i}", 40, replaces=values[-1]))
        b.op(f"g{i}", reads=[values[-2]], writes=[values[-1]], duration=10)
    wide, c = b.tensor("wide", 60), b.tensor("c", 1)
    b.op("wide", reads=[x], writes=[wide], duration=10)
    b.op("c", reads=[wide], writes=[c], duration=10)
    b.op("late", reads=[values[-1], c], writes=[b.tensor("y", 1)], duration=10)
    return b.build(outputs=[], carry=())


@pytest.mark.parametrize("chain", [1, 2, 3])
@pytest.mark.parametrize("parameters", [DTR, EQ, LOCAL, LRU, {**EQ, "deallocation": "ignore"}])
def test_a_result_in_place_is_evicted_and_recomputed_with_all_that_it_overwrites(chain, parameters):
    trace = in_place(chain)
    assert run(trace, 1000, **parameters).peak > 101
    story = run(trace, 63, **parameters)
    assert [op for op, again in story.ran if again] == list(range(chain + 1))
    assert story.peak == 62  # x, wide and c
    assert f"a{chain}" in story.names


@pytest.mark.parametrize("read_late", ["v1", "w"])
@pytest.mark.parametrize("parameters", [DTR, EQ, LOCAL, {**EQ, "deallocation": "ignore"}])
def test_what_was_made_from_an_overwritten_input_before_it_is_overwritten_itself_stays(read_late, parameters):
    # f makes v from y, and s makes w from v; then q overwrites y, and r overwrites v: nothing brings v1 or w back
    b = TraceBuilder()
    y, v, w = b.tensor("y", 1, "input"), b.tensor("v", 40), b.tensor("w", 20)
    y1, v1 = b.tensor("y1", 1, "input", replaces=y), b.tensor("v1", 40, replaces=v)
    wide, c, d = b.tensor("wide", 60), b.tensor("c", 1), b.tensor("d", 1)
    for name, reads, writes in (
        ("f", [y], [v]),
        ("s", [v], [w]),
        ("q", [y], [y1]),
        ("r", [v], [v1]),
        ("wide", [], [wide]),
        ("c", [wide], [c]),
        ("late", [c, v1 if read_late == "v1" else w], [d]),
    ):
        b.op(name, reads=reads, writes=writes, duration=10)
    trace = b.build(outputs=[y1, d], carry=())
    assert run(trace, 105, **parameters).peak < 105
    with pytest.raises(OutOfMemory):  # and no IllegalPlan, for what a recomputation would read is lost
        run(trace, 63, **parameters)


def test_banishing_what_is_overwritten_in_place_keeps_the_result():
    with pytest.raises(OutOfMemory):
        run(in_place(1), 63, deallocation="banish")


def test_what_an_op_in_place_overwrites_touches_only_what_is_evicted_after_it():
    """a1 and c are evicted; a1 comes back over a0, which goes with a1 there: a0 and c are no neighbours through it."""
    b = TraceBuilder()
    p, a0 = b.tensor("p", 1), b.tensor("a0", 40)
    a1, c = b.tensor("a1", 40, replaces=a0), b.tensor("c", 1)
    for name, reads, writes in (("e", [], [p]), ("f", [p], [a0]), ("g", [a0], [a1]), ("h", [a1], [c])):
        b.op(name, reads=reads, writes=writes, duration=10)
    evictor = Evictor(
        lineage_of(problem_for(b.build(outputs=[], carry=()), one_tier(1000))),
        Rules(),
        tiers=["hbm"],
        evicts=["hbm"],
        seed=0,
    )

    def tell(*changes: str) -> None:
        for what, tensor in (change.split() for change in changes):
            evictor.notice(Change(what, {"p": p, "a0": a0, "a1": a1, "c": c}[tensor], "hbm", 10))

    first = ("came p", "read p", "came a0", "read a0", "went a0", "came a1", "read a1", "came c")
    tell(*first, "went c", "went a1", "read a0", "read p", "came a0", "went a0", "came a1", "read a1")
    assert [evictor.evicted[t] for t in (p, a0, a1, c)] == [False, True, False, True]
    assert isinstance(evictor.price, CostClasses)
    assert evictor.price.cost(p) == 20  # its own 10 ns and a0's
    assert evictor.price.cost(a1) == 30


def test_received_and_updated_tensors_are_no_candidates():
    trace = random_dag(12, 3)
    line = lineage_of(problem_for(trace, one_tier(1 << 40)))
    for t in trace.tensors:
        if line.evictable[t.id]:
            assert t.role in ("activation", "temporary")
            assert trace.ops[line.producer[t.id]].phase != "update"


@pytest.mark.parametrize(("deallocation", "percent"), [("ignore", 90), ("eager", 70), ("banish", 70)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whole_iterations_with_updates_run_to_the_end(seed, deallocation, percent):
    trace = random_dag(40, seed, weights=0.2)
    budget = run(trace, 1 << 50).peak * percent // 100
    story = run(trace, budget, deallocation=deallocation)
    assert [op for op, again in story.ran if not again] == list(range(len(trace.ops)))
    assert story.recomputed > 0


# ---- roles -------------------------------------------------------------------------------------------


def test_the_parts_of_a_tied_gradient_are_gradients_and_stay():
    """The first part came of the logits: recomputing it takes them, and all that they take."""
    trace = transformer(
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 1000},
        batch=4,
        sequence=64,
    )
    parts = [t for t in trace.tensors if ".grad.part" in t.name]
    assert len(parts) == 2
    assert {t.role for t in parts} == {"gradient"}
    budget = run(trace, 1 << 50).peak * 9 // 10
    story = run(trace, budget)
    assert not {t.id for t in parts} & set(story.evicted)


def test_which_roles_are_evicted_is_a_parameter():
    trace, budget = w1(4), int(PEAK[4] * Fraction("0.8"))
    only = run(trace, budget, evicts=("activation",))
    assert {trace.tensors[t].role for t in only.evicted} == {"activation"}
    # with all but constants it is the prototype, which knows no other roles
    everything = run(trace, budget, evicts=("activation", "temporary", "gradient"))
    assert everything.recompute_ns == run(loose(trace), budget).recompute_ns == 1_280_236
    for policy in ("dtr", "delta", "megtaichi"):
        with pytest.raises(PolicyError, match=r"evicts is .'activations',.; .*did you mean 'activation'"):
            load(policy, evicts=("activations",))


# ---- growth --------------------------------------------------------------------------------------


def test_a_choice_computes_hardly_more_costs_exactly_on_a_larger_trace(monkeypatch):
    """A bound too loose has all be looked at that are nearly as good, which are ever more."""
    looked, exact = [], CostClasses.exact
    monkeypatch.setattr(CostClasses, "exact", lambda *given: looked.append(1) or exact(*given))

    def per_choice(layers: int) -> float:
        looked.clear()
        trace = w1(layers)
        budget = int(0.6 * run(trace, 1 << 50).peak)
        log = run(trace, budget, **EQ).log
        return len(looked) / log.counters["pressure_calls"]

    assert per_choice(160) < 1.25 * per_choice(20)
