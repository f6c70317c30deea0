"""TSO: the best cut and modes of chains by a ledger of our own, modes alone and together, launches to the ns."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import load_profile, simulate
from sim.conformance import check_policy
from sim.errors import Infeasible, PolicyError
from sim.hardware.platform import Engine, Platform, Tier
from sim.log import WHY
from sim.plan import Drop
from sim.policies.recompute.tso import Tso
from sim.policies.recompute.tso.segments import MODES
from sim.trace import TraceBuilder
from tests.clocks import cpu_s, least
from workloads import transformer
from workloads.synthetic import chain, w1

ROOMY = 1 << 60
PLAIN = ("eager", "checkpoint")


def lists(seed: int, count: int) -> tuple[list[int], ...]:
    """Six lists that describe a chain; each gradient fits beside the one before."""
    draw = random.Random(seed)
    x = [draw.randint(1, 3) for _ in range(count + 1)]
    xbar = [size + draw.randint(0, 4) for size in x[1:]]
    uf, ub = ([draw.randint(1, 9) for _ in range(count)] for _ in range(2))
    ob = [size + draw.randint(0, 3) for size in x[:-1]]
    return uf, ub, x, xbar, [draw.randint(0, 2) for _ in range(count)], ob


def test_unlimited_memory_may_capture_launches_too():
    trace, card = transformer("gpt2-small", batch=1, sequence=32), load_profile("a100_40_pcie")
    free = {"capture": 0, "switch": 0}
    for modes in (tuple(MODES), ("eager", "graph"), ("eager", "graph_checkpoint")):
        s = simulate(trace, card, "tso", modes=modes, **free).summary()
        assert s["unlimited_run"] == "captured launches"
        assert s["overhead"] >= 0
    assert simulate(trace, card, "tso", modes=PLAIN, **free).summary()["unlimited_run"] == "keep_all"
    dear = simulate(trace, card, "tso", capture=10**12).summary()  # no captures where they cost more than they spare
    assert (dear["unlimited_run"], dear["overhead"]) == ("keep_all", 0)


def ledger_of(given_lists, again: list[tuple[int, int]]) -> tuple[int, int]:
    """Peak and time of a chain whose stages in `again` (first, end) drop their insides and are recomputed, by hand.

    Stage i makes x[i + 1] and its inside; its backward reads x[i], x[i + 1], the inside and a gradient.
    """
    uf, ub, x, xbar, of, ob = given_lists
    count = len(uf)
    rerun = {i: (a, b) for a, b in again for i in range(a, b)}
    dropped = {i + 1 for a, b in again for i in range(a, b - 1)}  # x[i + 1] between stages of a segment
    here = {("x", 0): x[0]}
    peak = sum(here.values())

    def forward(i: int, *, first: bool) -> None:
        nonlocal peak
        fresh = {("x", i + 1): x[i + 1], ("s", i): xbar[i] - x[i + 1]}
        scratch = sum(size for key, size in fresh.items() if key in here)
        here.update(fresh)
        peak = max(peak, sum(here.values()) + of[i] + scratch)
        if first and i in rerun:
            here.pop(("s", i))
        if first and i in dropped:
            here.pop(("x", i))

    for i in range(count):
        forward(i, first=True)
    # an output between segments stays until the next one has been undone, or its own backward has
    took = sum(uf) + sum(ub)
    here["d", count] = x[count]
    peak = max(peak, sum(here.values()))
    for i in reversed(range(count)):
        if i in rerun and i == rerun[i][1] - 1:
            a, b = rerun[i]
            here.pop(("x", b), None)  # recomputed below
            for k in range(a, b):
                forward(k, first=False)
                took += uf[k]
        here["d", i] = x[i]
        peak = max(peak, sum(here.values()) + max(0, ob[i] - x[i]))
        for key in (("d", i + 1), ("x", i + 1), ("s", i)):
            here.pop(key)
    return peak, took


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9), count=st.integers(2, 6), share=st.floats(0.5, 1))
def test_no_cut_into_kept_and_rerun_segments_is_faster_by_a_ledger_of_our_own(seed, count, share, run):
    given_lists = lists(seed, count)
    trace = chain(*given_lists)
    budget = int(share * run(trace, "keep_all").peak)
    best = None
    for cuts in product((False, True), repeat=count - 1):
        marks = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        parts = list(pairwise(marks))[:-1]
        for chosen in product((False, True), repeat=len(parts)):
            again = [part for part, one in zip(parts, chosen, strict=True) if one]
            peak, took = ledger_of(given_lists, again)
            if peak <= budget and (best is None or took < best):
                best = took
    try:
        facts = run(trace, "tso", budget, modes=PLAIN)
    except Infeasible:
        facts = None
    if facts is None:
        assert best is None
    else:
        assert best is not None
        assert facts.time == best == facts.result.plan.notes["model_ns"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**9), count=st.integers(2, 9), share=st.floats(0.3, 1.1),
    method=st.sampled_from(("slots", "price")), launch=st.integers(0, 5),
)  # fmt: skip
def test_model_and_engine_agree_and_refusals_name_what_would_do(seed, count, share, method, launch, run):
    trace = chain(*lists(seed, count))
    budget = int(share * run(trace, "keep_all").peak)
    more = {"method": method, "launch": launch, "overhead": 5, "capture": 1000, "switch": 1}
    try:
        facts = run(trace, "tso", budget, **more)
    except Infeasible as error:
        refused = error
    else:
        assert facts.time == facts.result.plan.notes["model_ns"]
        return
    assert refused.floor_bytes is not None
    assert refused.floor_bytes > budget
    facts = run(trace, "tso", refused.floor_bytes, **more)
    assert facts.time == facts.result.plan.notes["model_ns"]


def test_eager_alone_is_keeping_everything(run):
    trace = w1(4)
    plain = run(trace, "keep_all")
    facts = run(trace, "tso", plain.peak, modes=("eager",))
    assert (facts.time, facts.peak, facts.rerun) == (plain.time, plain.peak, [])
    with pytest.raises(Infeasible) as refused:
        run(trace, "tso", plain.peak - 1, modes=("eager",))
    assert refused.value.floor_bytes == plain.peak


def test_checkpoint_alone_is_chen_with_the_best_segments(run):
    trace = chain([1] * 16, [2] * 16, [1] * 17, [2] * 16)
    chen = [run(trace, "chen", method="sqrt", segments=k) for k in (2, 4, 8)]
    for other in chen:
        facts = run(trace, "tso", other.peak, modes=("checkpoint",))
        assert facts.time <= other.time
        assert all(mode == "checkpoint" for _, _, mode in facts.result.plan.notes["segments"])


def test_graph_alone_spares_every_launch_but_pays_its_captures(run):
    trace = w1(3)
    plain = run(trace, "keep_all")
    facts = run(trace, "tso", modes=("graph",), launch=200, overhead=200, capture=3000, replays=10, switch=0)
    shortened = sum(min(200, op.duration) for op in trace.ops)
    segments = len(facts.result.plan.notes["segments"])
    assert segments == 1
    # one graph forward and one backward, 300 ns each
    assert facts.time == plain.time - shortened + 600
    assert facts.peak > plain.peak  # what dies in the graph stays
    assert facts.rerun == []


def test_no_op_saves_more_than_a_launch_of_its_engine(run):
    trace = w1(3)
    facts = run(trace, "tso", modes=("graph",), launch=200, overhead=3, capture=0, switch=0)
    assert facts.time == run(trace, "keep_all").time - sum(min(3, op.duration) for op in trace.ops)


def test_a_captured_segment_runs_again_as_a_whole_and_an_eager_one_as_far_as_it_is_read(run):
    b = TraceBuilder({"model": "pairs"})
    x = b.tensor("x0", 1, "input")
    inner = []
    for i in range(4):
        s, y = b.tensor(f"s{i}", 8, layer=i), b.tensor(f"x{i + 1}", 1, layer=i)
        b.op(f"in{i}", reads=[x], writes=[s], layer=i, duration=10)
        b.op(f"out{i}", reads=[x, s], writes=[y], layer=i, duration=10)
        inner.append(s)
        x = y
    gradient = x
    for i in reversed(range(4)):
        fresh = b.tensor(f"d{i}", 1, "temporary", layer=i)
        b.op(f"b{i}", phase="backward", reads=[gradient, inner[i]], writes=[fresh], layer=i, duration=20)
        gradient = fresh
    trace = b.build(outputs=(gradient,), carry=())
    budget = run(trace, "keep_all").peak - 8
    eager = run(trace, "tso", budget, modes=PLAIN)
    assert eager.rerun
    assert all(name.startswith("in") for name in eager.rerun)
    whole = run(trace, "tso", budget, modes=("eager", "graph_checkpoint"), launch=9, overhead=9, capture=0, switch=0)
    assert "graph_checkpoint" in {mode for _, _, mode in whole.result.plan.notes["segments"]}
    assert len(whole.rerun) % 2 == 0
    assert whole.rerun == [
        f"{word}{i}" for i in sorted({int(name[-1]) for name in whole.rerun}) for word in ("in", "out")
    ]


def test_a_captured_segment_lets_go_at_its_end_and_an_eager_one_at_once(run):
    trace = chain([1] * 12, [2] * 12, [1] * 13, [3] * 12)
    budget = run(trace, "keep_all").peak * 2 // 3
    for mode, at_once in (("graph_checkpoint", False), ("checkpoint", True)):
        facts = run(trace, "tso", budget, modes=(mode,), capture=0, switch=0)
        segments = facts.result.plan.notes["segments"]
        assert max(last - first for first, last, _ in segments[:-1]) > 0
        ends = {trace.op_id(f"f{last}") for _, last, _ in segments}
        dropped = {action.after for action in facts.result.plan.actions if isinstance(action, Drop)} - {None}
        forward = {op for op in dropped if trace.ops[op].phase == "forward"}
        assert forward
        assert (forward <= ends) != at_once


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1])
def test_modes_together_are_never_worse_than_any_alone(share, run):
    trace = chain([9, 30, 20, 40] * 3, [20, 60, 40, 80] * 3, [1, 2, 1, 3] * 3 + [1], [5, 4, 6, 3] * 3)
    budget = int(share * run(trace, "keep_all").peak)
    more = {"launch": 4, "overhead": 4, "capture": 3000, "switch": 1}
    best = run(trace, "tso", budget, **more).time
    for mode in MODES:
        try:
            alone = run(trace, "tso", budget, modes=(mode,), **more).time
        except Infeasible:
            continue
        assert best <= alone


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_without_graphs_rotor_is_never_slower_for_it_may_nest(share, run):
    trace = chain([1, 3, 2, 4] * 4, [2, 6, 4, 8] * 4, [1, 2, 1, 3] * 4 + [1], [5, 4, 6, 3] * 4)
    budget = int(share * run(trace, "keep_all").peak)
    assert run(trace, "rotor", budget).time <= run(trace, "tso", budget, modes=PLAIN).time


def test_nothing_moves_and_a_transformer_gains_its_launches():
    a100 = load_profile("a100_80_sxm")
    trace = transformer("gpt2-medium", batch=4, sequence=512, precision="bf16")
    plain = simulate(trace, a100, "keep_all").log
    result = simulate(trace, a100, "tso")
    assert any("graph" in mode for _, _, mode in result.plan.notes["segments"])
    assert result.log.end < plain.end
    launch = a100.engines[a100.engine_for(0)].launch
    assert plain.end - result.log.end <= launch * len(trace.ops)
    assert not (result.log.interval("why") == WHY["move"]).any()


@pytest.mark.parametrize("method", ["slots", "price"])
def test_a_transformer_uses_more_memory_to_save_time_and_stays_within_it(method, run):
    trace = transformer("gpt2-small", batch=8, sequence=1024, precision="bf16")
    plain = run(trace, "keep_all")
    found = [run(trace, "tso", int(share * plain.peak), modes=PLAIN, method=method) for share in (0.6, 0.75, 0.9, 1)]
    times = [facts.time for facts in found]
    assert times == sorted(times, reverse=True)
    assert times[-1] == plain.time
    assert times[0] > plain.time


SIBLINGS = ("keep_all", "chen", "revolve", "vlad", "every_k", "full_recompute", "min_cut", "twremat", "sac_knapsack")


@pytest.mark.parametrize("sibling", [*SIBLINGS, "rotor", "dtr", "checkmate", "rockmate"])
def test_it_is_none_of_its_siblings(sibling):
    trace = w1(2 if sibling in ("checkmate", "rockmate") else 4)
    platform = tight(trace, 0.6)
    more = {"checkmate": {"method": "rounding"}, "rockmate": {"levels": 2}}.get(sibling, {})
    try:
        other = simulate(trace, platform, sibling, **more).log
    except Infeasible:
        return
    mine = simulate(trace, platform, "tso", launch=2000).log
    assert mine.intervals.tolist() != other.intervals.tolist()


def tight(trace, share: float) -> Platform:
    def platform(budget: int) -> Platform:
        tier = Tier("hbm", budget, budget, 10**9, device=0)
        return Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}, launch=2000),), ())

    log = simulate(trace, platform(ROOMY), "keep_all").log
    return platform(int(share * log.change("delta").cumsum().max()))


BASE = {"launch": 3000, "overhead": 3000, "capture": 10_000_000, "replays": 1000, "switch": 3000}


@pytest.mark.parametrize(("key", "value"), [
    ("modes", PLAIN), ("method", "price"), ("slots", 20), ("launch", 500), ("capture", 10**9), ("replays", 100),
    ("switch", 10**6),
])  # fmt: skip
def test_every_parameter_changes_some_run(key, value, run):
    trace = w1(6)
    budget = int(0.7 * run(trace, "keep_all").peak)
    before, after = (run(trace, "tso", budget, **more).result.log for more in (BASE, {**BASE, key: value}))
    assert before.intervals.tolist() != after.intervals.tolist()


def test_switches_are_paid_once_each_way(run):
    trace = chain([40] * 6, [80] * 6, [1] * 7, [4, 4, 4, 40, 40, 40])
    times = {}
    for switch in (0, 7):
        facts = run(trace, "tso", launch=30, overhead=30, capture=25_000, switch=switch, modes=("eager", "graph"))
        captured = ["graph" in mode for _, _, mode in facts.result.plan.notes["segments"]]
        times[switch] = facts.time, sum(a != b for a, b in pairwise(captured))
    assert times[7][0] - times[0][0] <= 14 * times[0][1]
    assert times[7][0] >= times[0][0]


def test_a_trace_that_is_no_chain_is_refused_naming_the_op(run):
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    ends = [b.tensor(name, 1) for name in ("left", "right")]
    b.op("split", reads=[x], writes=ends, duration=1)
    made = ends
    for i in range(3):
        made = [*made, b.tensor(f"t{i}", 1)]
        b.op(f"f{i}", reads=made[-2:-1], writes=made[-1:], duration=1)
    out, g = b.tensor("out", 1), b.tensor("g", 1, "temporary")
    b.op("join", reads=[made[0], made[-1]], writes=[out], duration=1)
    b.op("b", phase="backward", reads=[out, *made], writes=[g], duration=1)
    with pytest.raises(PolicyError, match="'tso': this trace is not a chain: op 'join' reads 'left', which 'split'"):
        run(b.build(outputs=(g,), carry=()), "tso")


def test_a_backward_phase_is_needed(run):
    b = TraceBuilder()
    made = [b.tensor("x", 1, "input")]
    for i in range(3):
        made.append(b.tensor(f"t{i}", 1))
        b.op(f"f{i}", reads=made[-2:-1], writes=made[-1:], duration=1)
    with pytest.raises(PolicyError, match="policy 'tso' needs a trace with a backward phase"):
        run(b.build(outputs=(made[-1],), carry=()), "tso")


@pytest.mark.parametrize(("wrong", "text"), [
    ({"modes": ("egger",)}, "did you mean 'eager'"),
    ({"modes": ()}, "expected tuple of .* .not empty"),
    ({"method": "slot"}, "did you mean 'slots'"),
    ({"slots": 1}, "slots is 1; expected int of at least 2"),
    ({"replays": 0}, "replays is 0; expected int of at least 1"),
    ({"launch": -1}, "launch is -1; expected int of at least 0"),
    ({"switch": -1}, "switch is -1; expected int of at least 0"),
])  # fmt: skip
def test_wrong_parameters_are_refused(wrong, text):
    with pytest.raises(PolicyError, match=text):
        Tso(**wrong)


@pytest.mark.parametrize("policy", [
    Tso(), Tso(launch=20_000, capture=0, switch=1), Tso(modes=("graph_checkpoint",), launch=20_000, capture=0),
    Tso(method="price", launch=50, capture=1000, replays=1, switch=1),
], ids=["default", "launches", "graphs", "price"])  # fmt: skip
def test_it_keeps_every_law(policy, tmp_path):
    report = check_policy(policy, examples=15, name="tso", folder=tmp_path, across_processes=False)
    assert report.passed, report.as_text()
    if policy.capture == 0:  # half of the machines have no launch to save, and of most ops on the others it is measured
        assert report.shares["rewrites"] > 0.1


@pytest.mark.alone
def test_planning_a_deep_stack_takes_no_longer_than_rotor_times_ten(run):
    trace = w1(48)
    budget = int(0.6 * run(trace, "keep_all").peak)

    limit = 10 * min(cpu_s(run, trace, "rotor", budget) for _ in range(3))
    assert least(limit, lambda: cpu_s(run, trace, "tso", budget)) < limit


def test_its_mark_says_that_it_is_a_reconstruction():
    assert Tso.fidelity == "reconstruction"
