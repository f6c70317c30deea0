"""The fast path against the general one where memory is short: equal logs, byte for byte."""

from __future__ import annotations

import pytest

from sim import load_profile
from sim.analysis.peak_memory import home_peak
from sim.engine.copy_path import covered
from sim.engine.event_path.fast_path import FastPath
from sim.engine.event_path.perform import Perform
from sim.engine.prepare import prepare
from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.experiment import problem_for, reference_run
from sim.layout import lay_out
from sim.log import EventLog
from sim.plan import Move, Plan
from sim.policies import load
from sim.trace import TraceBuilder
from workloads import transformer, w1

MACHINE = load_profile("a100_40_pcie")
TRACES = {"w1": w1(6), "gpt2": transformer("gpt2", batch=2, sequence=64, precision="amp_bf16")}
POLICIES = ("dtr", "dtr(heuristic=dtr_eq)", "dtr(deallocation=banish)", "lru_tiering", "uvm", "mimose")


def outcome(plan: Plan, budget: int, fast: bool) -> tuple[str, EventLog | None]:
    try:
        return "done", replay(plan, MACHINE.with_budget(budget), fast=fast)
    except TiersimError as error:
        return f"{type(error).__name__}: {error}", getattr(error, "log", None)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_under_pressure_both_write_one_log(policy, trace):
    peak = home_peak(reference_run(TRACES[trace], MACHINE))
    for share in (0.95, 0.7, 0.5):
        budget = int(share * peak)
        try:
            plan = load(policy).plan(problem_for(TRACES[trace], MACHINE.with_budget(budget)))
        except TiersimError:
            continue
        assert outcome(plan, budget, True) == outcome(plan, budget, False)


@pytest.fixture(autouse=True)
def by_events(monkeypatch):
    """Also of runs that the copy path takes."""
    monkeypatch.setattr(covered, "covers", lambda *_: False)


def run_of(policy: str) -> EventLog:
    budget = int(0.6 * home_peak(reference_run(TRACES["w1"], MACHINE)))
    plan = load(policy).plan(problem_for(TRACES["w1"], MACHINE.with_budget(budget)))
    return replay(plan, MACHINE.with_budget(budget))


def test_what_is_dropped_at_once_makes_room_without_the_general_path(monkeypatch):
    made, make_room = [], FastPath.make_room

    def noted(end: int) -> int:
        made.append(end)
        return end

    monkeypatch.setattr(FastPath, "make_room", lambda *given: noted(make_room(*given)))
    calls = run_of("dtr").counters["pressure_calls"]
    assert sum(end >= 0 for end in made) > calls / 4


@pytest.mark.parametrize("policy", ["lru_tiering", "dtr(heuristic=lru)"])
def test_reads_that_nobody_is_told_of_are_found(policy, monkeypatch):
    right = run_of(policy)
    monkeypatch.setattr(FastPath, "note_reads", lambda *given: None)
    try:
        wrong = run_of(policy)
    except TiersimError:
        return
    assert wrong != right


def test_what_is_recomputed_to_be_read_needs_no_general_path(monkeypatch):
    general, passed = [], []
    execute, past = Perform._execute, Perform._pass
    monkeypatch.setattr(
        Perform, "_execute", lambda self, work, **rest: general.append(work) or execute(self, work, **rest)
    )
    monkeypatch.setattr(Perform, "_pass", lambda self, work, *rest: passed.append(work) or past(self, work, *rest))
    run_of("dtr")
    assert len([work for work in passed if work.why == "recompute"]) > 20
    assert len(general) < len(passed) / 4


def test_recomputations_of_several_devices_at_once_need_no_general_path(monkeypatch):
    """Another device recomputes, or overwrites in place, nearly always; only what concerns the op itself counts."""
    general, passed = [], []
    execute, past = Perform._execute, Perform._pass
    layout = {"pp": 4, "micro_batches": 8}
    trace, machine = lay_out(transformer("gpt2", batch=8, sequence=64, precision="amp_bf16"), "a100_80_sxm", layout)
    plan = load("full_recompute").plan(problem_for(trace, machine))
    slow = replay(plan, machine, fast=False)
    monkeypatch.setattr(
        Perform, "_execute", lambda self, work, **rest: general.append(work) or execute(self, work, **rest)
    )
    monkeypatch.setattr(Perform, "_pass", lambda self, work, *rest: passed.append(work) or past(self, work, *rest))
    assert replay(plan, machine) == slow
    again = [work for work in passed if work.why == "recompute"]
    assert len(again) > 20 * len([work for work in general if work.why == "recompute"])


SMALL = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 128}
DIVIDED = [
    {"tp": 2, "pp": 2, "micro_batches": 4, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "micro_batches": 2, "async_sums": True},
    {"dp": 2, "micro_batches": 4, "zero": 3},
    {"dp": 4, "bucket": "10 KiB", "barrier": False},
    {"pp": 2, "dp": 2, "micro_batches": 4, "schedule": "zb_h1", "zero": 1, "gradient_buffer": True},
]


@pytest.mark.parametrize("policy", ["keep_all", "full_recompute", "offload_activations", "swap_all", "dtr"])
@pytest.mark.parametrize("layout", DIVIDED, ids=str)
def test_sums_in_place_and_collectives_write_the_log_of_the_general_path(layout, policy, monkeypatch):
    """With enough memory for everything, and with less; `dtr` is told of all that happens."""
    base = transformer(SMALL, batch=8, sequence=32, precision="mixed_bf16")
    trace, machine = lay_out(base, "a100_80_sxm", layout)
    taken = {"renew": 0, "exchange": 0}

    def counted(name, of=Perform):
        plain = getattr(of, name)

        def count(*given):
            result = plain(*given)
            taken[name] += result is not False
            return result

        monkeypatch.setattr(of, name, count)

    counted("renew")
    counted("renew", FastPath)
    counted("exchange")
    peak = home_peak(replay(Plan(trace), machine))
    for share in (1.0, 0.8):
        limited = machine.with_budget(int(share * peak))
        try:
            plan = load(policy).plan(problem_for(trace, limited))
        except TiersimError:
            continue
        found = [outcome_on(plan, limited, fast) for fast in (True, False)]
        assert found[0] == found[1]
    if policy == "keep_all":
        assert taken["renew"] > 0
        prepared = prepare(trace, machine)
        assert (taken["exchange"] > 0) == bool(prepared.exchanges or prepared.exchanges_over)


def outcome_on(plan, machine, fast):
    try:
        return "done", replay(plan, machine, fast=fast)
    except TiersimError as error:
        return f"{type(error).__name__}: {error}", getattr(error, "log", None)


def test_a_value_that_a_copy_still_reads_is_overwritten_on_the_general_path(monkeypatch):
    """A sum that is copied away is added to: that waits for the copy (`hazard`)."""
    b = TraceBuilder()
    start = b.tensor("start", 1 << 20, "input")
    total, term = b.tensor("total", 1 << 30, "gradient"), b.tensor("term", 1 << 30, "gradient")
    grown = b.tensor("grown", 1 << 30, "gradient", replaces=total)
    b.op("first", reads=[start], writes=[total], flops=1)
    b.op("second", reads=[start], writes=[term], flops=1)
    b.op("add", "elementwise", reads=[total, term], writes=[grown], flops=1)
    trace = b.build(outputs=[grown])
    plan = Plan(trace, (Move(total, "host", after=trace.op_id("second"), keep=True),))
    taken = []
    renew = Perform.renew
    monkeypatch.setattr(Perform, "renew", lambda self, op, renewal: taken.append(op) or renew(self, op, renewal))
    machine = load_profile("a100_40_pcie")
    log = replay(plan, machine)
    assert log == replay(plan, machine, fast=False)
    assert not taken
    assert replay(Plan(trace), machine) == replay(Plan(trace), machine, fast=False)
