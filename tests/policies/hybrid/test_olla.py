"""OLLA: the order against all topological orders, addresses against all layouts, and both in the engine."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, combinations, pairwise, permutations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sim import Trace, TraceBuilder, load_profile, simulate
from sim.errors import PolicyError
from sim.experiment import problem_for
from sim.hardware.platform import Allocator, Platform
from sim.policies import load
from sim.policies.hybrid.olla.address_program import lowest
from sim.policies.hybrid.olla.addresses import Layout, Lifetime, first_fit, laid_out, most_live, pyramid
from sim.policies.hybrid.olla.graph import graph_of
from sim.policies.hybrid.olla.listing import by_net
from sim.policies.hybrid.olla.order_program import OrderProgram
from sim.rewrites.values import departures
from sim.trace.index import TraceIndex
from tests.policies.offload.conftest import ROOMY, machine
from tests.strategies import traces
from workloads import cnn, transformer

# ---- small graphs, and all their orders --------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn, most: int = 7, in_place: bool = True) -> Trace:
    """Up to so many ops that read earlier results; some overwrite one, some need workspace, some results are kept."""
    b = TraceBuilder()
    here = [b.tensor("w", draw(st.integers(0, 4)), "weight"), b.tensor("x", draw(st.integers(0, 4)), "input")]
    kept: list[int] = []
    for op in range(draw(st.integers(1, most))):
        reads = sorted(draw(st.sets(st.sampled_from(here), max_size=3)))
        writes = []
        for k in range(draw(st.integers(1, 2))):
            old = draw(st.sampled_from([None, None, *here])) if k == 0 and in_place else None
            if old is None:
                writes.append(b.tensor(f"t{op}.{k}", draw(st.integers(0, 6))))
            else:  # whatever was to be read from it has been read, in program order
                writes.append(b.tensor(f"t{op}.{k}", b.bytes_of(old), replaces=old))
                here.remove(old)
                kept = [t for t in kept if t != old]
        b.op(f"op{op}", reads=reads, writes=writes, workspace=draw(st.sampled_from([0, 0, 0, 3])), duration=1)
        here += writes
        kept += [t for t in writes if draw(st.integers(0, 3)) == 0]
    return b.build(outputs=[*kept, *(t for t in (0, 1) if t in here)], carry=())


def least_by_enumeration(trace: Trace) -> int:
    """The lowest peak of all orders in which every op reads what it reads in program order.

    It follows values, bytes and frees step by step, and knows of no edge between ops.
    """
    ops, size = list(trace.ops), [t.bytes for t in trace.tensors]
    replaces = [t.replaces for t in trace.tensors]
    made = {t: op.id for op in ops for t in op.writes}
    start = frozenset(t for t in range(len(size)) if t not in made)
    wanted = {t: {op.id for op in ops if t in op.reads} for t in range(len(size))}
    best = [1 << 60]

    def go(ran: frozenset[int], live: frozenset[int], gone: frozenset[int], peak: int) -> None:
        if peak >= best[0]:
            return
        if len(ran) == len(ops):
            if live >= set(trace.outputs):
                best[0] = peak
            return
        for op in ops:
            olds = {replaces[t] for t in op.writes} - {None}
            if op.id in ran or not set(op.reads) <= live:
                continue
            if any((old in made and made[old] not in ran) or wanted[old] - ran - {op.id} for old in olds):
                continue  # a reader would find another value
            now = (live - olds) | set(op.writes)
            high = sum(size[t] for t in now) + op.workspace
            done = ran | {op.id}
            stays = frozenset(t for t in now if t in start or t in trace.outputs or wanted[t] - done)
            go(done, stays, gone | olds, max(peak, high))

    go(frozenset(), start, frozenset(), sum(size[t] for t in start))
    return best[0]


def diamond() -> Trace:
    """A source, two branches of two ops whose middle is larger than their end, and a join."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    source, left, right = b.tensor("source", 2), b.tensor("left", 10), b.tensor("right", 10)
    ends, out = [b.tensor("left.end", 1), b.tensor("right.end", 1)], b.tensor("out", 1)
    b.op("source", reads=[x], writes=[source], duration=1)
    b.op("left", reads=[source], writes=[left], duration=1)
    b.op("right", reads=[source], writes=[right], duration=1)
    b.op("left.end", reads=[left], writes=[ends[0]], duration=1)
    b.op("right.end", reads=[right], writes=[ends[1]], duration=1)
    b.op("join", reads=ends, writes=[out], duration=1)
    return b.build(outputs=[out], carry=())


def test_a_diamond_takes_one_branch_after_the_other():
    trace = diamond()
    plan = load("olla").plan(problem_for(trace, machine()))
    # program order holds x, the source, and both middles; one branch after the other one middle and the other's end
    assert plan.notes["program_order_bytes"] == 1 + 2 + 10 + 10
    assert plan.notes["peak_bytes"] == least_by_enumeration(trace) == 1 + 2 + 10 + 1
    assert plan.notes["order_status"] == "optimal"
    assert simulate(trace, machine(), "olla").summary()["peak_bytes"] == 14


@given(trace=graphs())
@settings(max_examples=60, deadline=None)
def test_no_order_of_a_small_graph_holds_less(trace):
    plan = load("olla").plan(problem_for(trace, machine()))
    least = least_by_enumeration(trace)
    assert (plan.notes["order_status"], plan.notes["peak_bytes"]) == ("optimal", least)
    assert simulate(trace, machine(), "olla").summary()["peak_bytes"] == least


@given(trace=graphs())
@settings(max_examples=40, deadline=None)
def test_the_program_alone_finds_the_best_order_and_proves_it(trace):
    graph = graph_of(TraceIndex(trace), holds=False)
    known = graph.peak(range(len(graph)))
    found = OrderProgram(graph, known).solve(nodes=10_000, seconds=60)
    assert found.proven
    assert (known if found.order is None else graph.peak(found.order)) == least_by_enumeration(trace) >= graph.least


@given(trace=traces())
@settings(max_examples=40, deadline=None)
def test_what_is_held_is_what_the_engine_holds_and_never_more_than_in_program_order(trace):
    machine_ = machine()
    if trace.devices > 1 or any(trace.op_columns.engine.values()):
        return
    for holds in (False, True):
        policy = replace(load("olla"), holds=holds, max_ops=0)
        plan = policy.plan(problem_for(trace, machine_))
        assert not departures(plan.trace, trace)
        peak = simulate(trace, machine_, policy).summary()["peak_bytes"]
        assert peak == plan.notes["peak_bytes"] <= plan.notes["program_order_bytes"]
        assert plan.notes["program_order_bytes"] == simulate(trace, machine_, "keep_all").summary()["peak_bytes"]
        assert plan.notes["bound_bytes"] <= peak


# ---- orders ------------------------------------------------------------------------------------


def held_to_the_end() -> Trace:
    """Two gradients that the program holds until the last update; the order alone changes nothing about that."""
    b = TraceBuilder()
    x, w = b.tensor("x", 1, "input"), [b.tensor(f"w{i}", 5, "weight") for i in range(2)]
    g = [b.tensor(f"g{i}", 7, "gradient") for i in range(2)]
    last = 0
    for i in range(2):
        b.op(f"b{i}", reads=[x], writes=[g[i]], phase="backward", duration=1)
    new = [b.tensor(f"w{i}.new", 5, "weight", replaces=w[i]) for i in range(2)]
    for i in range(2):
        last = b.op(f"u{i}", "optimizer", reads=[w[i], g[i]], writes=[new[i]], phase="update", duration=1)
    b.release(g[0], last)
    return b.build(outputs=new, carry=list(zip(new, w, strict=True)))


def test_a_graph_holds_nothing_beyond_its_last_reader_unless_told_to():
    peaks = {
        holds: simulate(held_to_the_end(), machine(), "olla", holds=holds).summary()["peak_bytes"]
        for holds in (False, True)
    }
    assert peaks == {False: 1 + 10 + 7, True: 1 + 10 + 14}


@given(trace=graphs(most=12), below=st.booleans())
@settings(max_examples=60, deadline=None)
def test_list_scheduling_keeps_what_must_precede(trace, below):
    graph = graph_of(TraceIndex(trace), holds=True)
    order = by_net(graph, below=below)
    assert sorted(order) == list(range(len(graph)))
    place = {op: i for i, op in enumerate(order)}
    assert all(place[other] < place[op] for op, needed in enumerate(graph.before) for other in needed)


def test_several_engines_are_refused():
    b = TraceBuilder()
    y = b.tensor("y", 1)
    b.op("f", reads=[b.tensor("x", 1, "input")], writes=[y], engine="cpu", duration=1)
    with pytest.raises(PolicyError, match="'f' runs on 'cpu'"):
        simulate(b.build(outputs=[y], carry=()), machine(), "olla")


# ---- addresses ---------------------------------------------------------------------------------

LIVES = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        st.integers(1, 6), st.integers(0, 6), st.integers(0, 5),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


def lowest_by_enumeration(lives: list[Lifetime]) -> int:
    """The lowest end of all layouts: every layout, pressed down, has each lifetime on one of those below it."""
    best = 1 << 60
    for order in permutations(range(len(lives))):
        end: dict[int, int] = {}
        for i in order:
            beneath = [end[j] for j in end if lives[i].first <= lives[j].last and lives[j].first <= lives[i].last]
            end[i] = max(beneath, default=0) + lives[i].size
        best = min(best, *[max(end.values())])
    return best


def overlapping(lives: list[Lifetime], layout: Layout) -> list[tuple[int, int]]:
    """Pairs that share a byte at a step."""
    taken: dict[tuple[int, int], int] = {}
    pairs = []
    for i, (life, offset) in enumerate(zip(lives, layout.offsets, strict=True)):
        for cell in ((t, byte) for t in range(life.first, life.last + 1) for byte in range(offset, offset + life.size)):
            if cell in taken:
                pairs.append((taken[cell], i))
            taken[cell] = i
    return pairs


@given(lives=LIVES)
@example(lives=[Lifetime(2, 0, 1), Lifetime(1, 1, 3), Lifetime(2, 3, 4), Lifetime(1, 0, 2), Lifetime(1, 2, 4)])
@settings(max_examples=80, deadline=None)
def test_the_program_finds_the_lowest_layout(lives):
    known = Layout((0,) * len(lives), sum(life.size for life in lives) + 1)
    placed = lowest(lives, known, nodes=10_000, seconds=60)
    assert placed.proven
    assert placed.layout.end == lowest_by_enumeration(lives) >= most_live(lives)
    assert not overlapping(lives, placed.layout)
    assert placed.layout.end == max(a + life.size for a, life in zip(placed.layout.offsets, lives, strict=True))


@given(lives=st.lists(LIVES, min_size=1, max_size=5).map(lambda lists: [life for lives in lists for life in lives]))
@settings(max_examples=60, deadline=None)
def test_no_two_lifetimes_share_a_byte_at_a_step(lives):
    layout = laid_out(lives)
    assert not overlapping(lives, layout)
    assert most_live(lives) <= layout.end == max(a + life.size for a, life in zip(layout.offsets, lives, strict=True))
    live = max(sum(life.size for life in lives if life.first <= t <= life.last) for t in range(20))
    assert most_live(lives) == live
    inside = pyramid(lives)
    stacked = sorted(inside, key=lambda i: inside[i])
    for below, above in pairwise(stacked):
        assert lives[below].first <= lives[above].first <= lives[above].last <= lives[below].last
        assert inside[above] == inside[below] + lives[below].size


def test_nested_lifetimes_are_stacked_without_a_hole():
    lives = [Lifetime(3, i, 9 - i) for i in range(5)]
    assert pyramid(lives) == {i: 3 * i for i in range(5)}
    assert first_fit(lives, pyramid(lives), lambda i: (0,)).end == most_live(lives) == 15


def planned(platform: Platform, **options: int) -> Platform:
    """The same machine, where plans give addresses in the device's memory."""
    home, allocator = platform.home(0).name, Allocator("planned", tuple(options.items()))
    tiers = (replace(tier, allocator=allocator) if tier.name == home else tier for tier in platform.tiers)
    return replace(platform, tiers=tuple(tiers))


@given(trace=graphs(), rounding=st.sampled_from([1, 4]))
@settings(max_examples=60, deadline=None)
def test_a_small_graph_runs_in_as_many_bytes_as_its_layout_has(trace, rounding):
    roomy = planned(machine(ROOMY), rounding=rounding)
    notes = load("olla").plan(problem_for(trace, roomy)).notes
    assert notes["live_bytes"] <= notes["end_bytes"]
    if rounding == 1:
        assert notes["live_bytes"] == notes["peak_bytes"]
    summary = simulate(trace, roomy.with_budget(notes["end_bytes"]), "olla").summary()
    assert summary["peak_bytes"] <= notes["end_bytes"]


MODELS = {
    "gpt2": lambda: transformer("gpt2", batch=1, sequence=1024),
    "gpt2, short": lambda: transformer("gpt2", batch=1, sequence=64),
    "resnet-50": lambda: cnn("resnet-50", 8),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_real_step_runs_in_as_many_bytes_as_its_layout_has(model):
    trace, roomy = MODELS[model](), planned(load_profile("a100_40_pcie"))
    notes = load("olla").plan(problem_for(trace, roomy)).notes
    assert notes["end_bytes"] <= 1.001 * notes["live_bytes"]
    assert notes["peak_bytes"] <= 1.01 * notes["bound_bytes"]
    before, after = (simulate(trace, where, "olla") for where in (roomy, roomy.with_budget(notes["end_bytes"])))
    assert before.summary()["makespan_ns"] == after.summary()["makespan_ns"]  # nothing waits for space


def test_early_updates_lower_the_peak_of_a_short_step():
    trace, platform = MODELS["gpt2, short"](), load_profile("a100_40_pcie")
    kept, mine = (simulate(trace, platform, policy).summary() for policy in ("keep_all", "olla"))
    assert mine["peak_bytes"] < 0.9 * kept["peak_bytes"]
    assert mine["makespan_ns"] == kept["makespan_ns"]


# ---- spilling and rematerialisation ------------------------------------------------------------


def cheapest_by_enumeration(trace: Trace, budget: int, *, spill: bool, again: int) -> int | None:
    """The least bytes fetched (twice) and generated once more that fit, over all orders; None where none fit.

    Shortest paths over what has run, what is resident and how many recomputations are left. Nothing is in place.
    """
    ops, size = list(trace.ops), [t.bytes for t in trace.tensors]
    made = {t: op.id for op in ops for t in op.writes}
    pinned = frozenset({*(t for t in range(len(size)) if t not in made), *trace.outputs})
    first = (frozenset(), frozenset(t for t in pinned if t not in made), again)
    queue, done, count = [(0, 0, first)], set(), 0
    while queue:
        cost, _, state = heappop(queue)
        if state in done:
            continue
        done.add(state)
        ran, live, left = state
        if len(ran) == len(ops):
            return cost
        for op in ops:
            if (op.id in ran and (not left or pinned & set(op.writes))) or not set(op.reads) <= live | {
                t for t in made if spill and made[t] in ran
            }:
                continue
            fetched = set(op.reads) - live
            loose = [t for t in live - pinned if t not in op.reads]
            price = cost + 2 * sum(size[t] for t in fetched) + (sum(size[t] for t in op.writes) if op.id in ran else 0)
            for kept in chain.from_iterable(combinations(loose, k) for k in range(len(loose) + 1)):
                here = (live & pinned) | set(op.reads) | set(kept)
                if here & set(op.writes):
                    continue
                here |= set(op.writes)
                if sum(size[t] for t in here) + op.workspace <= budget:
                    count += 1
                    heappush(queue, (price, count, (ran | {op.id}, here, left - (op.id in ran))))
    return None


@st.composite
def skips(draw: st.DrawFn, in_place: bool) -> tuple[Trace, int]:
    """A chain that ends with reads of early results, and a budget that holds each op, but is below every order's peak.

    in_place: what the first of them reads is overwritten later, and the last op reads what overwrote it.
    """
    b, length = TraceBuilder(), draw(st.integers(3, 4))
    x = source = b.tensor("x", 1, "input")
    if in_place:
        source = b.tensor("source", 2)
        b.op("source", reads=[x], writes=[source], duration=1)
    made = [b.tensor(f"t{i}", draw(st.integers(1, 6))) for i in range(length)]
    for i, t in enumerate(made):
        workspace = draw(st.sampled_from([0, 0, 2]))
        b.op(f"f{i}", reads=[made[i - 1] if i else source], writes=[t], workspace=workspace, duration=1)
    also = set()
    if in_place:
        also = {b.tensor("source.new", 2, replaces=source)}
        b.op("overwrite", reads=[source], writes=[*also], duration=1)
    last = made[-1]
    for i in reversed(range(draw(st.integers(1, 2)))):
        back = b.tensor(f"g{i}", draw(st.integers(1, 4)))
        b.op(f"b{i}", reads=sorted({last, made[i], *(() if i else also)}), writes=[back], duration=1)
        last = back
    trace = b.build(outputs=[last], carry=())
    peak = load("olla").plan(problem_for(trace, machine())).notes["peak_bytes"]
    size = [t.bytes for t in trace.tensors]
    alone = max(sum(size[t] for t in {x, *op.reads, *op.writes}) + op.workspace for op in trace.ops)
    assume(alone < peak)
    return trace, draw(st.integers(alone, peak - 1))


WAYS = st.sampled_from([(True, 0), (False, 1), (False, 3), (True, 1)])


@given(case=skips(in_place=False), ways=WAYS)
@settings(max_examples=80, deadline=None)
def test_spilling_and_rematerialising_cost_the_fewest_bytes(case, ways):
    (trace, budget), (spill, again) = case, ways
    tight = machine(budget)
    policy = replace(load("olla"), spill=spill, rematerialise=bool(again), more_steps=max(again, 1))
    notes = policy.plan(problem_for(trace, tight)).notes
    least = cheapest_by_enumeration(trace, budget, spill=spill, again=again)
    assert notes["trade_status"] == ("infeasible" if least is None else "optimal")
    if least is None:
        return
    result = simulate(trace, tight, policy)
    assert result.summary()["peak_bytes"] <= budget
    events = result.events
    fetched = events[(events.why == "move") & (events.lane == "h2d")].bytes.sum()
    size = {op.name: sum(trace.tensors[t].bytes for t in op.writes) for op in trace.ops}
    generated = sum(size[op] for op in events[events.why == "recompute"].op)
    assert 2 * fetched + generated == least > 0


@given(case=skips(in_place=True))
@settings(max_examples=12, deadline=None)
def test_what_is_overwritten_in_place_survives_spilling_and_rematerialisation(case):
    trace, budget = case
    policy = replace(load("olla"), spill=True, rematerialise=True, more_steps=1)
    plan = policy.plan(problem_for(trace, machine(budget)))
    assert not departures(plan.trace, trace)
    assume(plan.notes["trade_status"] == "optimal")
    assert simulate(trace, machine(budget), policy).summary()["peak_bytes"] <= budget


def test_a_large_trace_is_referred_to_another_policy():
    with pytest.raises(PolicyError, match="olla \\+ hybrid"):
        simulate(MODELS["gpt2"](), load_profile("a100_40_pcie"), "olla", budget="2 GB", spill=True)


def test_another_policy_spills_and_recomputes_in_the_order_found_here():
    trace, platform = MODELS["resnet-50"](), load_profile("a100_40_pcie")
    ideal = simulate(trace, platform, "keep_all").summary()["makespan_ns"]
    alone, both = (simulate(trace, platform, p, budget="920 MB") for p in ("hybrid", "olla + hybrid"))
    assert (alone.events.why == "move").any()
    assert set(both.events.why) == {"run"}  # the order alone makes it fit
    assert both.summary()["makespan_ns"] == ideal
    assert simulate(trace, platform, "olla + hybrid", budget="700 MB").summary()["peak_bytes"] <= 700_000_000
