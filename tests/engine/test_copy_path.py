"""The copy path against the general event path and the reference simulator: equal logs, byte for byte."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim import load_profile, simulate
from sim.analysis.peak_memory import home_peak
from sim.conformance.examples import random_examples
from sim.engine import array_path
from sim.engine.copy_path import covered, device
from sim.engine.copy_path.copies import NONE, Copies
from sim.engine.copy_path.wires import Wires
from sim.engine.event_path.record import Columns
from sim.engine.prepare import prepare
from sim.engine.replay import replay
from sim.engine.resolve import Resolved
from sim.errors import IllegalPlan, OutOfMemory, Thrashing, TiersimError
from sim.experiment import problem_for, reference_run
from sim.hardware.platform import Member, Platform, Pool
from sim.log import STALLS, EventLog
from sim.plan import Action, Drop, Memory, Move, Need, Online, Plan, Recompute, Wait
from sim.policies import load
from sim.trace import Trace, TraceBuilder
from tests.engine.differential import difference
from tests.engine.random_plans import can_run_again, made_by
from tests.engine.random_problems import Seer
from tests.engine.test_array_path import assert_equal, outcome
from tests.machines import GB
from tests.machines import machine as toy_machine
from workloads import transformer, w1

CODES = st.integers(0, 2**20)
some = settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def ending(plan: Plan, platform: Platform) -> str:
    """How a run ends on the copy path: "done", "refused", or "" where it does not take it, or not to the end."""
    prepared = prepare(plan.trace, platform)
    try:
        resolved = Resolved(plan, platform, prepared)
    except IllegalPlan:
        return ""
    if array_path.covers(plan, platform, prepared, resolved) and array_path.run(
        plan, platform, prepared, resolved, 100
    ):
        return ""
    if not covered.covers(plan, platform, prepared, resolved):
        return ""
    try:
        return "" if device.run(plan, platform, prepared, resolved, 100) is None else "done"
    except (OutOfMemory, Thrashing):
        return "refused"


def is_taken(plan: Plan, platform: Platform) -> bool:
    """Whether a run takes the copy path from beginning to end, and ends well."""
    return ending(plan, platform) == "done"


# ---- random plans --------------------------------------------------------------------------------


def trips(trace: Trace, platform: Platform, code: int) -> Plan:
    """Tensors leave after an op and come back before a reader, in time or late; some are waited for."""
    draw, actions = Random(code), list[Action]()
    behind = [tier.name for tier in platform.tiers if tier.device < 0]
    home, producer = platform.home(0).name, trace.producer.tolist()
    for _ in range(draw.randrange(1, len(trace.tensors) + 2)):
        tensor = draw.randrange(len(trace.tensors))
        readers = [int(op) for op in trace.readers(tensor) if op > max(producer[tensor], 0)]
        if not readers:
            continue
        reader = draw.choice(readers)
        out = draw.randrange(max(producer[tensor], 0), reader)
        back = draw.randrange(out, reader) + 1
        fetched = draw.random() < 0.1  # by the engine, since the plan does not
        away, keep = draw.choice(behind), draw.random() < 0.2
        actions.append(Move(tensor, away, keep=keep, priority=draw.choice((0, 0, 0, -1, 2)), after=out))
        if keep and draw.random() < 0.5:
            actions += [Wait(tensor, after=out), Drop(tensor, home, after=out)]
        elif draw.random() < 0.2:
            actions.append(Wait(tensor, **{draw.choice(("before", "after")): draw.randrange(out, reader) + 1}))
        if draw.random() < 0.2:
            actions.append(Drop(tensor, draw.choice((home, away)), after=draw.randrange(out, reader)))
        if not fetched:
            actions.append(Move(tensor, home, keep=draw.random() < 0.1, priority=draw.choice((0, 0, 1)), before=back))
    return Plan(trace, tuple(actions))


def detours(trace: Trace, platform: Platform, code: int) -> Plan:
    """The same, and what some ops produce is dropped and recomputed before its next reader."""
    draw, plan = Random(code), trips(trace, platform, code)
    moved, actions = {each.tensor for each in plan.actions if isinstance(each, Move)}, list(plan.actions)
    for _ in range(draw.randrange(1, 4)):
        op = draw.randrange(len(trace.ops))
        results = trace.writes(op)
        later = sorted({reader for t in results for reader in trace.readers(t)} - {op})
        if not later or not can_run_again(trace, op) or moved & {*results}:
            continue
        actions += [Drop(tensor, after=op) for tensor in results]
        actions += [Recompute(op, before=later[0])]
    return Plan(trace, tuple(actions))


def anything(trace: Trace, platform: Platform, code: int) -> Plan:
    """Moves, drops and waits at random, most of which mean something."""
    draw, actions = Random(code), list[Action]()
    tiers = [tier.name for tier in platform.tiers]
    for _ in range(draw.randrange(1, 12)):
        anchor, side = draw.randrange(len(trace.ops)), draw.choice(("before", "after"))
        made = made_by(trace, anchor if side == "after" else anchor - 1)
        if not made:
            continue
        tensor, at = draw.choice(made), {side: anchor}
        actions.append(
            draw.choice(
                (
                    Move(tensor, draw.choice(tiers), keep=draw.random() < 0.5, **at),
                    Move(tensor, draw.choice(tiers[:2]), priority=draw.choice((0, 1)), **at),
                    Wait(tensor, **at),
                )
            )
        )
    return Plan(trace, tuple(actions))


def shaken(trace: Trace, platform: Platform, code: int) -> Plan:
    """What a shipped policy plans, but for some actions that are left out, or come an op later."""
    draw, last = Random(code), len(trace.ops) - 1
    policy = load(draw.choice(("swap_all", "swap_all", "swap_all(unit=op)", "save_on_cpu", "offload_activations")))
    actions: list[Action] = []
    for action in policy.plan(problem_for(trace, platform.with_budget(1 << 50))).actions:
        if draw.random() < 0.05:
            continue
        if draw.random() < 0.1 and isinstance(action, Move | Wait):
            at, side = (action.before, "before") if action.after is None else (action.after, "after")
            action = replace(action, **{side: min(at + 1, last)})
        if draw.random() < 0.1 and isinstance(action, Move):
            action = replace(action, priority=draw.choice((-1, 1)), keep=draw.random() < 0.3)
        actions.append(action)
    return Plan(trace, tuple(actions))


def budgets(plan: Plan, platform: Platform) -> list[Platform]:
    """The machine with ample memory, with what the plan takes then, and with less: copies and ops wait for space."""
    ample = platform.with_budget(1 << 50)
    log = outcome(plan, ample, False)[1]
    peak = 0 if log is None else home_peak(log)
    return [ample, *(platform.with_budget(max(1, peak * share // 100)) for share in (100, 95, 90, 80, 65))]


PLANS = {"trips": trips, "detours": detours, "anything": anything, "shaken": shaken}
NEEDS = {"shaken": frozenset({"host", "layers"})}
SEEN = {
    "trips": {"transfer", "wait"},
    "detours": {"transfer", "wait"},
    "anything": {"drain"},
    "shaken": {"transfer", "space"},
}
"""Stalls that each kind is to show on the copy path."""


@pytest.mark.parametrize("kind", PLANS)
def test_a_planned_run_with_copies_has_one_log_on_either_path(kind):
    seen, taken = Counter(), 0

    @some
    @given(
        random_examples(frozenset({"host"} | ({"layers"} if kind == "shaken" else set())), exact=True, real=2), CODES
    )
    def check(example, code):
        nonlocal taken
        plan = PLANS[kind](example.trace, example.platform, code)
        for platform in budgets(plan, example.platform):
            assert_equal(plan, platform)
            how = ending(plan, platform)
            seen[how] += 1
            if how == "done":
                taken += 1
                log = replay(plan, platform)
                seen.update(STALLS[cause] for cause in set(log.interval("cause").tolist()))
                seen["cancelled"] += log.counters["moves_cancelled"] > 0

    check()
    if not taken:
        pytest.skip("none of the plans drawn takes the copy path: it is 10 to 70 of 480")
    if taken > 50:
        assert seen["cancelled"] > 0
        assert seen["refused"] > 0
        assert {cause for cause in SEEN[kind] if not seen[cause]} == set()


@pytest.mark.parametrize("kind", PLANS)
def test_the_reference_simulator_says_the_same(kind):
    taken = 0

    @settings(some, max_examples=25)
    @given(random_examples(frozenset({"host", "chain"}), exact=True, real=0), CODES)
    def check(example, code):
        nonlocal taken
        plan = PLANS[kind](example.trace, example.platform, code)
        for platform in budgets(plan, example.platform)[:3]:
            if ending(plan, platform):
                taken += 1
                assert difference(plan, platform) == ""

    check()
    if not taken:
        pytest.skip("none of the plans drawn takes the copy path")


# ---- shipped policies ----------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
TRACES = {"w1": w1(4), "gpt2": transformer(GPT2, batch=2, sequence=128, precision="amp_bf16")}
POLICIES = (
    *("swap_all", "swap_all(unit=op)", "autoswap", "layer_offload", "offload_activations", "save_on_cpu", "tflms"),
    *("swap_attention", "vdnn", "vdnn_pp", "weight_streaming", "cswap"),
    *("layers 0-1: swap_all; rest: full_recompute", "zero_offload"),
)
NEVER = ("zero_offload",)  # its optimizer runs on the CPU


@cache
def peak_of(name, profile):
    """What a trace takes on a machine with ample memory."""
    return home_peak(reference_run(TRACES[name], load_profile(profile)))


@pytest.mark.parametrize("profile", ["a100_40_pcie", "mt3000_survey", "a100_80_gds", "h100_cxl"])
@pytest.mark.parametrize("policy", POLICIES)
def test_shipped_policies_write_one_log_at_several_budgets(policy, profile):
    machine, taken = load_profile(profile), 0
    for name, trace in TRACES.items():
        for share in (2.0, 0.85, 0.65):
            limited = machine.with_budget(int(share * peak_of(name, profile)))
            try:
                plan = load(policy).plan(problem_for(trace, limited))
            except TiersimError:
                continue
            assert_equal(plan, limited)
            taken += is_taken(plan, limited)
    assert (taken > 0) == (policy not in NEVER)


def test_rows_are_packed_before_they_are_too_many(monkeypatch):
    monkeypatch.setattr(Columns, "PACK", 50)
    packed, pack = [], Copies.pack
    monkeypatch.setattr(Copies, "pack", lambda self: packed.append(len(self.changes)) or pack(self))
    machine = load_profile("a100_40_pcie")
    plan = load("swap_all").plan(problem_for(TRACES["w1"], machine))
    assert is_taken(plan, machine)
    assert len(packed) > 5
    assert max(packed) < 150
    assert_equal(plan, machine)


# ---- online parts --------------------------------------------------------------------------------


def nothing(trace: Trace, platform: Platform, code: int) -> Plan:
    """No actions; on some runs dead tensors stay until memory is short, all or some."""
    some_of_them = frozenset(range(0, len(trace.tensors), 2))
    return Plan(trace, keep_dead=(False, True, some_of_them)[code % 3])


ASKED = {"nothing": nothing, **PLANS}


def seen_by(plan: Plan, platform: Platform, code: int) -> Plan:
    """The same plan with an online part that looks at everything and decides by what it sees."""
    tiers = tuple(tier.name for tier in platform.tiers)
    away = tuple(tier.name for tier in platform.tiers if tier.device < 0)
    return replace(plan, online=partial(Seer, code, plan.trace, tiers, away, links=False))


@pytest.mark.parametrize("kind", ASKED)
def test_an_online_part_is_shown_and_told_what_the_reference_simulator_shows_it(kind):
    """What it decides hangs on all that it has seen: one figure amiss, and the logs differ."""
    taken, counts = 0, Counter()

    @settings(some, max_examples=15 if kind == "shaken" else 30)  # those of its plans take three times as long
    @given(random_examples(NEEDS.get(kind, frozenset({"host"})), exact=True, real=0), CODES)
    def check(example, code):
        nonlocal taken
        plan = ASKED[kind](example.trace, example.platform, code)
        for platform in budgets(plan, example.platform):
            asked = seen_by(plan, platform, code)
            assert_equal(asked, platform)
            how = ending(asked, platform)
            if how:
                taken += 1
                assert difference(asked, platform) == ""
            if how == "done":
                log = replay(asked, platform)
                counts.update({name: count > 0 for name, count in log.counters.items()})

    check()
    if not taken:
        pytest.skip("none of the runs drawn takes the copy path")
    if kind == "nothing":
        # which examples are drawn hangs on the modules that are loaded, so that only what is frequent can be asked for
        assert all(counts[name] for name in ("implicit_moves", "implicit_recomputes", "pressure_calls"))


class Odd(Online):
    """Does under pressure what no online part may, or fails."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_pressure(self, need: Need, memory: Memory) -> list[Action]:
        if self.what == "fails":
            raise ValueError("no answer")
        if self.what == "asks for a queue":
            memory.link_free_at("hbm", "host")
        pinned = [t for t in memory.residents(need.tier) if memory.is_locked(t)]
        return {"takes what is pinned": [Drop(t) for t in pinned], "recomputes": [Recompute(0)]}.get(self.what, [])


@pytest.mark.parametrize("what", ["fails", "asks for a queue", "takes what is pinned", "recomputes", "says nothing"])
def test_what_an_online_part_may_not_do_is_refused_as_ever(what):
    trace = TRACES["w1"]
    machine = load_profile("a100_40_pcie").with_budget(
        home_peak(reference_run(trace, load_profile("a100_40_pcie"))) // 2
    )
    plan = Plan(trace, online=partial(Odd, what))
    assert not is_taken(plan, machine)
    if what == "fails":
        with pytest.raises(ValueError, match="no answer"):
            replay(plan, machine)
    else:
        assert_equal(plan, machine)


def test_a_run_that_recomputes_without_end_is_refused_with_the_log_of_what_ran(monkeypatch):
    trace, machine = TRACES["w1"], load_profile("a100_40_pcie")
    limited = machine.with_budget(int(0.6 * home_peak(reference_run(trace, machine))))
    plan, refusals = load("dtr").plan(problem_for(trace, limited)), []
    for fast in (True, False):
        with pytest.raises(Thrashing) as caught:
            replay(plan, limited, fast=fast, recompute_limit=0.05)
        refusals.append((str(caught.value), caught.value.log))
    assert refusals[0] == refusals[1]
    assert refusals[0][1].counters["implicit_recomputes"] > 0
    monkeypatch.setattr("sim.engine.replay.run", None)  # it does not begin again
    with pytest.raises(Thrashing):
        replay(plan, limited, recompute_limit=0.05)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
@pytest.mark.parametrize("policy", ["lru_tiering", "lru_tiering(prefetch=4)", "dtr", "dtr(heuristic=dtr)", "delta"])
def test_shipped_policies_that_are_asked_take_the_copy_path(policy, share):
    for trace in TRACES.values():
        machine = load_profile("a100_40_pcie")
        limited = machine.with_budget(int(share * home_peak(reference_run(trace, machine))))
        plan = load(policy).plan(problem_for(trace, limited))
        assert_equal(plan, limited)
        log = outcome(plan, limited, True)[1]
        if log is not None and log.complete:
            assert log.counters["pressure_calls"] > 0
            assert is_taken(plan, limited)


@pytest.mark.parametrize("policy", ["sentinel", "g10", "capuchin"])
def test_iterations_of_shipped_policies_that_evict_write_one_log(policy, monkeypatch):
    runs = []

    def noted(plan, platform, *, returned=None, **options):
        log = replay(plan, platform, returned=returned, **options)
        runs.append((plan, platform, log, replay(plan, platform, fast=False, returned=returned, **options)))
        return log

    monkeypatch.setattr("sim.iterations.replay", noted)
    machine, trace = load_profile("mt3000_survey"), transformer("gpt2", batch=8, sequence=256, precision="amp_bf16")
    for share in (0.9, 0.7):
        with suppress(TiersimError):
            simulate(trace, machine, policy, budget=int(share * home_peak(reference_run(trace, machine))))
    assert all(log == other for _, _, log, other in runs)
    assert any(plan.online is not None and is_taken(plan, platform) for plan, platform, *_ in runs)


# ---- a timeline drawn by hand --------------------------------------------------------------------


def test_two_copies_share_a_bus_and_a_third_waits_for_its_link():
    """1 GB/s: a byte takes 1 ns; the bus carries 1.5 GB/s in both directions together, and a copy has 10 ns before it.

    time   0          10                          ...
    out p  |--fixed--|-- flows alone -------------> until 60: `in q` begins to flow, 50 B of 100 are left
    in q                         asked for at 50, flows from 60 on, 30 B
    both at 0.75 GB/s: q ends at 60 + 40 = 100, p has 20 B left, and ends at 120
    out r  asked for at 0, waits for p's link: 120 + 10 + 40
    """
    b = TraceBuilder()
    p, q, r = b.tensor("p", 100, "input"), b.tensor("q", 30, "input"), b.tensor("r", 40, "input")
    first, second = b.tensor("first", 1), b.tensor("second", 1)
    b.op("a", writes=[first], duration=50)
    b.op("b", reads=[first], writes=[second], duration=10)
    b.op("c", reads=[q, second], duration=100)
    trace = b.build(outputs=[], carry=())
    moves = (Move(p, "host", before="a"), Move(r, "host", before="a"), Move(q, "hbm", before="b"))
    plan = Plan(trace, moves, place={q: "host"})
    bus = Pool("bus", (Member("d2h"), Member("h2d")), 3 * GB // 2)
    platform = toy_machine(hbm=1000, host=1000, fixed=10, pools=(bus,))
    assert is_taken(plan, platform)
    log = replay(plan, platform)
    events = log.events[["start_ns", "end_ns", "why", "op", "tensor", "cause"]]
    assert [tuple(row) for row in events.itertuples(index=False)] == [
        (0, 50, "run", "a", "", ""),
        (50, 60, "run", "b", "", ""),
        (50, 100, "move", "b", "q", ""),
        (60, 100, "stall", "c", "q", "transfer"),
        (0, 120, "move", "a", "p", ""),
        (120, 170, "move", "a", "r", ""),
        (100, 200, "run", "c", "", ""),
    ]
    assert log.end == 200


def test_a_value_is_overwritten_when_its_copy_has_ended():
    """Its copy on the host is then of no use; that of the new value is released when the run has waited for it."""
    b = TraceBuilder()
    w, y = b.tensor("w", 20, "weight"), b.tensor("y", 5)
    new = b.tensor("new", 20, "weight", replaces=w)
    b.op("read", reads=[w], writes=[y], duration=10)
    b.op("update", reads=[w, y], writes=[new], duration=10)
    trace = b.build(outputs=[new], carry=[(new, w)])
    moves = (Move(w, "host", keep=True, after="read"), Move(new, "host", keep=True, after="update"))
    plan, platform = Plan(trace, moves), toy_machine(hbm=1000, host=1000)
    assert is_taken(plan, platform)
    log = replay(plan, platform)
    events = log.events[["start_ns", "end_ns", "why", "op", "tensor", "cause"]]
    assert [tuple(row) for row in events.itertuples(index=False)] == [
        (0, 10, "run", "read", "", ""),
        (10, 30, "move", "read", "w", ""),
        (10, 30, "stall", "update", "w", "hazard"),
        (30, 40, "run", "update", "", ""),
        (40, 60, "move", "update", "new", ""),
        (40, 60, "stall", "update", "", "drain"),
    ]
    memory = log.memory[["time_ns", "tier", "delta_bytes", "tensor", "cause"]]
    assert [tuple(row) for row in memory.itertuples(index=False)] == [
        (0, "hbm", 20, "w", "placed"),
        (0, "hbm", 5, "y", "made"),
        (10, "host", 20, "w", "moved in"),
        (40, "hbm", -20, "w", "overwritten"),
        (40, "hbm", 20, "new", "made"),
        (40, "host", 20, "new", "moved in"),
        (40, "host", -20, "w", "freed"),
        (40, "hbm", -5, "y", "freed"),
        (60, "host", -20, "new", "freed"),
    ]


# ---- refusals ------------------------------------------------------------------------------------


def three_ops() -> Trace:
    """`o0` reads w and makes a, `o1` overwrites a with n, `o2` reads w and n: 10 bytes and 10 ns each."""
    b = TraceBuilder()
    w, a = b.tensor("w", 10, "weight"), b.tensor("a", 10, "activation")
    n = b.tensor("n", 10, "activation", replaces=a)
    for op, (reads, writes) in enumerate((([w], [a]), ([w, a], [n]), ([w, n], []))):
        b.op(f"o{op}", "matmul", reads=reads, writes=writes, duration=10)
    return b.build()


@pytest.mark.parametrize(
    ("moves", "hbm", "host", "words", "full"),
    [
        ((), 15, 10, "'o0' needs 10 B in 'hbm' for its results; 5 B of 15 B are free", ("hbm",)),  # 10 B fit in host
        ((), 15, 9, "'o0' needs 10 B in 'hbm' for its results; 5 B of 15 B are free", ("hbm", "host")),
        ((), 20, 0, "", ()),
        (
            (Move("w", "host", keep=True, after="o0"), Wait("w", after="o0")),
            *(25, 5, "'o0' needs 10 B in 'host' for reading 'w'; 5 B of 5 B are free", ("host",)),
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_this_path(moves, hbm, host, words, full):
    plan, platform = Plan(three_ops(), moves), toy_machine(hbm=hbm, host=host)
    assert_equal(plan, platform)
    assert ending(plan, platform) == ("refused" if words else "")  # else it is a straight sequence
    if words:
        with pytest.raises(OutOfMemory) as caught:
            replay(plan, platform)
        assert words in str(caught.value)
        assert caught.value.full == full
        others = [name for name in ("hbm", "host") if f"do that many fit in '{name}'" in str(caught.value)]
        assert others == list(full[1:])


@pytest.mark.parametrize("actions", [(Drop("a", before="o0"),), (Move("a", "host", before="o0"),)])
def test_what_has_not_been_made_before_its_own_op_is_refused(actions):
    plan, platform = Plan(three_ops(), actions), toy_machine(hbm=100, host=100)
    assert outcome(plan, platform, True)[0].startswith("IllegalPlan: ")
    assert_equal(plan, platform)


def test_results_in_another_tier_are_left_to_the_event_path():
    plan, platform = Plan(three_ops(), place={"a": "host"}), toy_machine(hbm=100, host=100)
    assert outcome(plan, platform, True)[0].startswith("IllegalPlan: ")
    assert_equal(plan, platform)


# ---- faults --------------------------------------------------------------------------------------


def without_shares(self, now, share=Wires._share):
    rates = dict(zip(self._users, self._rate, strict=True))
    self._rates = SimpleNamespace(of=lambda flows: [rates[users] for users in flows])
    share(self, now)


def without_order(self, tensor, link, priority, delay, submit=Wires.submit):
    submit(self, tensor, link, -priority, delay)


def without_pins(self, operands, end, run_beside=Copies.run_beside):
    return run_beside(self, (), end)


def at_once(self, tensor, tier, op, cause):
    self._release_now(tensor, tier, op, cause)


def never_asked_again(self, tier):
    self.is_stale = True


def dead_copies_begin(self, tensor, op, free=Copies.free_if_dead):
    if self.stage[tensor] == NONE:
        free(self, tensor, op)


FAULTS = {
    "bandwidth is not shared": (Wires, "_share", without_shares),
    "the wrong copy goes first": (Wires, "submit", without_order),
    "what an op reads is released while it runs": (Copies, "run_beside", without_pins),
    "a release does not wait": (Copies, "_release", at_once),
    "who waits for space is not asked again": (Copies, "_offer", never_asked_again),
    "what nobody needs is copied": (Copies, "free_if_dead", dead_copies_begin),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault, monkeypatch):
    """In what the tests above compare."""
    cases = [(plan, platform) for plan, platform in hundred_cases() if is_taken(plan, platform)]
    right = [replay(plan, platform, fast=False) for plan, platform in cases]
    assert [replay(plan, platform) for plan, platform in cases] == right
    monkeypatch.setattr(*FAULTS[fault])
    wrong = [platform for (plan, platform), log in zip(cases, right, strict=True) if not is_same(plan, platform, log)]
    assert wrong


def is_same(plan: Plan, platform: Platform, log: EventLog) -> bool:
    prepared = prepare(plan.trace, platform)
    try:
        return device.run(plan, platform, prepared, Resolved(plan, platform, prepared), 100) == log
    except OutOfMemory:
        return False


@cache
def hundred_cases() -> list[tuple[Plan, Platform]]:
    """Plans of two shipped policies, shaken or not, on a machine whose links share bandwidth, at several budgets."""
    machine, found = load_profile("a100_40_pcie"), []
    for code in range(10):
        trace = w1(2 + code % 3)
        for plan in (shaken(trace, machine, code), load("swap_all").plan(problem_for(trace, machine))):
            found += [(plan, platform) for platform in budgets(plan, machine)]
    return found
