"""POET (ICML 2022): least energy of recomputing and paging within a deadline; against every plan of small graphs."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.analysis.peak_memory import home_peak
from sim.errors import Infeasible, PolicyError
from sim.experiment import Result, reference_run, simulate
from sim.hardware.platform import Engine, Platform
from sim.plan import Move, Recompute
from sim.trace import Op, Trace, TraceBuilder
from tests.machines import machine
from tests.policies.hybrid.joint_plans import small_graph
from tests.policies.recompute.test_checkmate import UNIT
from tests.solvers.test_goldens import POET
from workloads.synthetic import uniform_chain

NPU, OUT, BACK = 2.0, 3e-9, 5e-9
"""Watts of the device, and joules per byte of either link."""


def priced(platform: Platform, npu: float = NPU, out: float = OUT, back: float = BACK) -> Platform:
    """The same machine with the energy of each of its parts."""
    return replace(platform, energy={"npu": npu, "d2h": out, "h2d": back})


def run(trace: Trace, platform: Platform, **parameters: Any) -> Result:
    """A run whose notes agree with its log."""
    result = simulate(trace, platform, "poet", **parameters)
    notes, log = result.plan.notes, result.log
    assert log.complete
    assert home_peak(log) <= platform.home(0).capacity
    # nothing is fetched or recomputed that the plan does not say, and all that it says is done
    assert {log.counters[key] for key in ("implicit_moves", "implicit_recomputes", "ignored_actions")} == {0}
    assert notes["optimal_among"] == (notes["bound_among"] if notes["status"] == "optimal" else "")
    assert cost(result) >= bound(result) * (1 - 1e-9)
    if notes["status"] == "optimal":
        assert cost(result) == pytest.approx(bound(result), rel=1e-6)
        assert [line.split()[1:3] for line in result.bounds] == [["the", "least"]]
    return result


def cost(result: Result) -> float:
    """What the run took, counted from its rows: joules, or ns of ops and copies one after another."""
    rows = result.events
    moves, ops = rows[rows.why == "move"], rows[rows.why.isin(("run", "recompute"))]
    took = ops.end_ns - ops.start_ns
    if not result.platform.energy:
        return float(took.sum() + (moves.end_ns - moves.start_ns).sum())
    each = moves.lane.map(result.platform.energy).astype(float)  # of no moves, a text
    return float(result.platform.energy["npu"] * took.sum() / 1e9 + (each * moves.bytes).sum())


def bound(result: Result) -> float:
    notes = result.plan.notes
    return float(notes["energy_bound_j"] if notes["minimises"] == "energy" else notes["work_bound_ns"])


def does(result: Result, kind: type) -> int:
    return sum(isinstance(action, kind) for action in result.plan.actions)


# ---- the public program's optima -------------------------------------------------------------------


@pytest.mark.parametrize(("n", "page", "budget"), [(n, page, b) for (n, page), row in POET.items() for b in row])
def test_chains_cost_what_the_published_program_says(n, page, budget):
    result = run(uniform_chain(n, duration=10), machine(budget, host=1000, rate=10**9 // page))
    assert cost(result) == result.plan.notes["work_bound_ns"] == POET[n, page][budget]


@pytest.mark.parametrize(("n", "page", "budget"), [(n, page, b) for (n, page), row in POET.items() for b in row])
def test_energy_takes_the_place_of_time(n, page, budget):
    # an op of 10 ns at 1 W takes 10 nJ, a byte `page` nJ, on links so slow that time says the opposite
    platform = priced(machine(budget, host=1000, rate=10**6), 1.0, page * 1e-9, page * 1e-9)
    result = run(uniform_chain(n, duration=10), platform)
    assert result.plan.notes["status"] == "optimal"
    assert result.summary()["energy_j"] == pytest.approx(POET[n, page][budget] * 1e-9)
    assert [line.partition(" among ")[0] for line in result.bounds] == ["energy: the least energy proven possible"]


@pytest.mark.parametrize(("n", "budget", "best"), [(n, b, v) for n in (4, 6, 8) for b, v in UNIT[n].items()])
@pytest.mark.parametrize("off", ["no host", "no route", "asked for", "energy"])
def test_without_copies_it_is_checkmates_optimum(n, budget, best, off):
    platform = machine(budget, host=0 if off == "no host" else 1000, rate=None if off == "no route" else 10**9)
    if off == "energy":
        platform = priced(platform, back=1.0)
    result = run(uniform_chain(n), platform, restore_by="recompute" if off == "asked for" else "both")
    assert not does(result, Move)
    assert result.plan.notes["status"] == "optimal"
    assert result.log.end == best


@pytest.mark.parametrize("budget", [3, 4, 5])
def test_copies_that_cost_nothing_leave_no_recomputation(budget):
    result = run(uniform_chain(6, duration=10), priced(machine(budget, host=1000), out=0.0, back=0.0))
    assert result.plan.notes["rerun_ns"] == 0 < does(result, Move)
    alone = run(uniform_chain(6, duration=10), machine(budget, host=1000, rate=10**8), restore_by="copy")
    assert not does(alone, Recompute)


# ---- the crossover ---------------------------------------------------------------------------------


def one_idle_tensor(cost: int = 10) -> Trace:
    """`a` of 4 bytes is made in `cost` ns and read at the end again; between that it does not fit."""
    b = TraceBuilder({"model": "hand"})
    a, p, q, r = b.tensor("a", 4), b.tensor("p", 2), b.tensor("q", 5), b.tensor("r", 1)
    b.op("make", writes=[a], duration=cost)
    b.op("use", reads=[a], writes=[p], duration=3)
    b.op("wide", reads=[p], writes=[q], duration=10)
    b.op("narrow", reads=[q], phase="backward", writes=[r], duration=3)
    b.op("last", reads=[a, r], phase="backward", writes=[b.tensor("z", 1, "temporary")], duration=3)
    return b.build(outputs=[], carry=())


@settings(max_examples=25, deadline=None)
@given(
    cost=st.integers(1, 40),
    watts=st.sampled_from((0.5, 1.0, 2.0)),
    out=st.integers(0, 9),
    back=st.integers(0, 9),
)
@example(cost=16, watts=1.0, out=1, back=3)
def test_it_pages_where_that_takes_less_energy_and_recomputes_elsewhere(cost, watts, out, back):
    # 4 bytes each way, in nJ, against the energy of one run of `make`; the link is far too slow to be worth its time
    platform = priced(machine(10, host=100, rate=10**5), watts, out * 1e-9, back * 1e-9)
    result = run(one_idle_tensor(cost), platform)
    paging, recomputing = 4 * (out + back), watts * cost
    if paging != recomputing:
        assert (does(result, Move) > 0) == (paging < recomputing)
        assert (does(result, Recompute) > 0) == (paging > recomputing)
    assert result.summary()["energy_j"] == pytest.approx((watts * (cost + 19) + min(paging, recomputing)) * 1e-9)


@pytest.mark.parametrize(("cost", "moved"), [(15, False), (17, True)])
def test_where_energy_is_not_stated_it_minimises_time(cost, moved):
    result = run(one_idle_tensor(cost), machine(10, host=100, rate=5 * 10**8))  # 8 ns out, 8 back
    assert result.plan.notes["minimises"] == "time of ops and copies"
    assert (does(result, Move) > 0) == moved


def test_what_is_read_again_and_again_is_copied_out_once():
    b = TraceBuilder({"model": "hand"})
    a, wide = b.tensor("a", 4), [b.tensor(f"w{i}", 8) for i in range(3)]
    b.op("make", writes=[a], duration=100)
    b.op("use", reads=[a], duration=1)
    for i, w in enumerate(wide):
        b.op(f"wide{i}", writes=[w], duration=1)
        b.op(f"drop{i}", reads=[w], duration=1)
        b.op(f"read{i}", reads=[a], duration=1)
    result = run(b.build(outputs=[], carry=()), machine(8, host=100))
    lanes = list(result.events.query("why == 'move'").lane)
    assert sorted(lanes) == ["d2h", "h2d", "h2d", "h2d"]


# ---- the deadline ----------------------------------------------------------------------------------

CHAIN = uniform_chain(6, duration=10)
SLOW = priced(machine(4, host=1000, rate=2 * 10**7), out=1e-10, back=1e-10)
"""A page takes 50 ns each way and hardly any energy: without a deadline nothing is recomputed."""
LEAST = 10 * UNIT[6][4]
"""Ops and copies one after another take at least so many ns: those of the plan that copies nothing."""


def test_a_deadline_takes_energy_and_is_met():
    deadlines = (None, 1000, LEAST + 100, LEAST + 40, LEAST)
    results = [run(CHAIN, SLOW, deadline=deadline) for deadline in deadlines]
    energies = [cost(result) for result in results]
    assert energies == sorted(energies)
    assert energies[0] == energies[1] < energies[-1]
    for deadline, result in zip(deadlines, results, strict=True):
        assert deadline is None or result.log.end <= deadline
    assert does(results[0], Recompute) == 0 < does(results[0], Move)
    assert does(results[-1], Move) == 0 < does(results[-1], Recompute)


def test_a_deadline_that_nothing_meets_is_refused_with_the_least_time():
    said = f"meets the deadline of {LEAST - 1} ns; the least time is {LEAST} ns"
    with pytest.raises(Infeasible, match=said) as refused:
        run(CHAIN, SLOW, deadline=LEAST - 1)
    assert refused.value.floor_bytes is None
    with pytest.raises(Infeasible, match="meets the deadline of 119 ns; the least time is 120 ns"):
        run(CHAIN, machine(), deadline="119 ns")
    assert run(CHAIN, machine(), deadline="120 ns").log.end == 120


def test_too_little_memory_is_refused_as_such_with_a_deadline_too():
    for deadline in (None, 10**6):
        with pytest.raises(Infeasible, match="no plan of this class fits 2 B; 3 B would do") as refused:
            run(CHAIN, priced(machine(2, host=1000)), deadline=deadline)
        assert refused.value.floor_bytes == 3


@pytest.mark.parametrize("deadline", ["soon", -1, 1.5])
def test_a_deadline_that_is_no_time_is_refused(deadline):
    with pytest.raises(PolicyError, match=r"deadline is .*; expected nanoseconds"):
        simulate(CHAIN, SLOW, "poet", deadline=deadline)


# ---- what it refuses ---------------------------------------------------------------------------------


def test_what_it_does_not_plan_for_is_refused_by_name():
    with pytest.raises(PolicyError, match="policy 'poet' plans op by op for 11 ops at most"):
        simulate(CHAIN, machine(4), "poet", max_ops=11)
    platform = machine(4, host=100)
    reaches = replace(platform, engines=(Engine("npu", 0, "hbm", ("hbm", "host"), {"fp32": 10**9}),))
    with pytest.raises(PolicyError, match=r"policy 'poet' plans for copies .* 'npu' reads 'host' in place"):
        simulate(CHAIN, reaches, "poet")


def test_a_search_that_is_cut_short_finds_a_plan_or_says_so():
    said = ""
    try:
        said = run(CHAIN, SLOW, time_limit=1e-6).plan.notes["limit"]
    except PolicyError as error:
        said = str(error)
    assert said in ("", "time") or "found no plan before it met its limit of time" in said


# ---- every plan of the class -----------------------------------------------------------------------


@dataclass(frozen=True)
class Stages:
    """The published class of plans for a trace, by simulating one stage at a time.

    Costs of a plan are (price, ns) beyond every op run once. again: of each op. byte: of a byte copied one way.
    """

    trace: Trace
    budget: int
    again: list[tuple[float, int]]
    byte: tuple[float, int]

    @cached_property
    def ops(self) -> list[Op]:
        """Those of the trace, made once."""
        return list(self.trace.ops)

    @cached_property
    def size(self) -> list[int]:
        """Bytes per tensor."""
        return self.trace.tensor_columns.bytes.tolist()

    def cheapest(self, spare: float = float("inf")) -> float | None:
        """The least price of plans of at most so many ns, by uniform-cost search; None where there is none."""
        nothing: frozenset[int] = frozenset()
        queue = [(0.0, 0, 0, 0, nothing, nothing)]
        done: dict[tuple[int, frozenset[int], frozenset[int]], int] = {}
        pushed = 0
        while queue:
            price, ns, _, at, here, host = heapq.heappop(queue)
            if at == len(self.ops):
                return price
            if done.get((at, here, host), spare + 1) <= ns:
                continue
            done[at, here, host] = ns
            for (more, longer), then, copied in self.stage(at, here, host):
                if ns + longer <= spare:
                    pushed += 1
                    heapq.heappush(queue, (price + more, ns + longer, pushed, at + 1, then, host | copied))
        return None

    def stage(
        self, at: int, here: frozenset[int], host: frozenset[int]
    ) -> Iterator[tuple[tuple[float, int], frozenset[int], frozenset[int]]]:
        """What a stage may do: its cost, what is resident when the next begins, and what has been copied out in it."""
        size = self.size
        for reruns in subsets(range(at)):
            runs = [self.ops[i] for i in (*reruns, at)]
            made: set[int] = set()
            for op in runs:
                if not set(op.reads) <= here | made:
                    break
                made.update(op.writes)
            else:
                idle = here - {t for op in runs for t in op.reads}
                # what is resident again when the next stage begins comes back only if it was not resident in this one
                for then in subsets(t for t in here | made | host if self.is_wanted(t, at)):
                    back = set(then) - here - made
                    leaving = idle.difference(then)  # else it would have been dropped before
                    if not (here | made).intersection(self.trace.outputs) <= set(then):
                        continue
                    for out in subsets(self.may_leave(here - host - leaving)):
                        if leaving & host or not self.fits(runs, here, leaving, set(then) - back):
                            break
                        copied = frozenset(out) | leaving
                        bytes = sum(size[t] for t in (*back, *copied))
                        price = sum(self.again[i][0] for i in reruns) + self.byte[0] * bytes
                        ns = sum(self.again[i][1] for i in reruns) + self.byte[1] * bytes
                        yield (price, ns), frozenset(then), copied

    def fits(self, runs: list[Op], here: frozenset[int], held: frozenset[int], then: set[int]) -> bool:
        """Whether a stage keeps to the budget: what nothing reads any more is freed behind its last reader."""
        size = self.size
        live = set(here)
        for k, op in enumerate(runs):
            live |= set(op.writes)
            if sum(size[t] for t in live) + op.workspace > self.budget:
                return False
            later = {t for other in runs[k + 1 :] for t in other.reads}
            live = {t for t in live if t in later or t in then or t in held}
        return True

    def may_leave(self, tensors: Iterable[int]) -> list[int]:
        return [t for t in tensors if t not in self.trace.outputs]

    def is_wanted(self, t: int, at: int) -> bool:
        """Whether it is an output, or something is made of it, directly or not, that is read after that op."""
        readers = [int(r) for r in self.trace.readers(t)]
        made = (w for r in readers for w in self.trace.writes(r))
        return t in self.trace.outputs or any(r > at for r in readers) or any(self.is_wanted(w, at) for w in made)


def subsets(of: Iterable[int]) -> Iterator[tuple[int, ...]]:
    every = sorted(of)
    return chain.from_iterable(combinations(every, n) for n in range(len(every) + 1))


def beside_every_plan(seed: int) -> str:
    draw = random.Random(seed)
    trace = small_graph(seed)
    peak = home_peak(reference_run(trace, machine()))
    budget = peak - draw.randint(1, max(1, peak // 6))
    pace = draw.choice((1, 2, 5))
    platform, watts, byte = machine(budget, host=10_000, rate=10**9 // pace), 1.0, float(pace)
    if draw.random() < 0.5:
        watts, byte = draw.choice((0.5, 1.0, 3.0)), draw.choice((0.0, 0.25, 1.0, 4.0))
        platform = priced(platform, watts, byte * 1e-9, byte * 1e-9)
    took = [op.duration or 0 for op in trace.ops]
    every = Stages(trace, budget, [(watts * ns, ns) for ns in took], (byte, pace))
    free = every.cheapest()
    spare = draw.choice((None, draw.randint(0, 30)))
    best = free if spare is None else every.cheapest(spare)
    deadline = None if spare is None else sum(took) + spare
    if best is None:
        with pytest.raises(Infeasible, match="no plan of this class fits" if free is None else "meets the deadline"):
            run(trace, platform, deadline=deadline)
        return "refused"
    result = run(trace, platform, deadline=deadline)
    assert deadline is None or result.log.end <= deadline
    unit = 1e-9 if platform.energy else 1.0
    assert bound(result) == pytest.approx((watts * sum(took) + best) * unit, rel=1e-6)
    assert result.plan.notes["status"] == "optimal"
    return ("copied" if does(result, Move) else "") + ("recomputed" if does(result, Recompute) else "")


def test_no_plan_of_its_class_costs_less():
    seen = Counter(beside_every_plan(seed) for seed in range(24))
    assert min(seen[kind] for kind in ("refused", "copied", "recomputed")) >= 1, seen


@pytest.mark.slow
def test_no_plan_of_its_class_costs_less_on_more_graphs():
    seen = Counter(beside_every_plan(seed) for seed in range(1000, 1100))
    assert min(seen[kind] for kind in ("refused", "copied", "recomputed")) >= 5, seen


@pytest.mark.parametrize(("name", "parameters"), [("poet", {}), ("str", {}), ("str", {"method": "milp"})])
@pytest.mark.parametrize(("budget", "host"), [(450, 1), (300, 99), (350, 150)])
def test_where_the_host_is_too_small_they_recompute(name, parameters, budget, host):
    trace, platform = uniform_chain(5, size=100, duration=10), machine(budget, host=host, rate=10**11)
    end = simulate(trace, platform, name, **parameters).log.end
    assert end == simulate(trace, platform, "checkmate").log.end
