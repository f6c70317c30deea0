"""The suite is itself tested: each planted fault is caught by the law named beside it, and by no other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import count
from typing import ClassVar

import numpy as np
import pytest

import sim.engine.event_path.fairness
from sim.comparison import compare
from sim.conformance import CHECKS, LawBroken, Replayed, check_costs, replayed, run_policy
from sim.conformance.suite import breaks
from sim.engine import array_path
from sim.engine.copy_path import covered
from sim.engine.event_path.lifetimes import Lifetimes
from sim.engine.event_path.operands import Outputs, Restore
from sim.engine.replay import replay
from sim.errors import Infeasible, OutOfMemory, PolicyFailed
from sim.experiment import simulate
from sim.hardware.cost import op_times
from sim.hardware.platform import Member, Platform, Pool
from sim.limits import TooLong, limited
from sim.log import CAUSE, WHY, EventLog
from sim.plan import Action, Drop, Memory, Move, Need, Online, Plan, Problem, Recompute, Unpressed, Wait
from sim.policies.base import MANAGES, Policy
from sim.rewrites.holding import with_releases
from sim.rewrites.rewrite import Codec, choose_implementation, encode, fuse, reorder, split_batch, split_tensors
from sim.rewrites.rewriter import Rewriter, with_columns
from sim.rewrites.slots import split_updates
from sim.solvers.outcome import in_stages
from sim.trace import Trace, TraceBuilder
from sim.trace.op import KIND_CODE, Implementation, Ring
from sim.trace.origin import Fused, Glue, Origin, Same
from tests.machines import machine as toy_machine

GB = 10**9  # at 1 GB/s one byte takes one nanosecond
ONE_RUN = ("capacity", "values", "ops", "order", "tiling", "outcome", "carried", "unlimited")


@dataclass(frozen=True, kw_only=True)
class Honest(Policy):
    """Declares all that a plan can do."""

    recomputes = True
    moves = True
    manages: ClassVar[tuple[str, ...]] = MANAGES

    actions: tuple[Action, ...] = ()

    def plan(self, problem: Problem) -> Plan:
        return Plan(problem.trace, self.actions)


machine = partial(toy_machine, hbm=1000, host=1000, cpu="host")
"""One device, a host with a CPU engine, a link each way."""


def chain(*, weights: bool = False) -> Trace:
    """a, b, c, d in a row, and `late`, which reads what `a` made; each result 10 B, each op 10 ns."""
    b = TraceBuilder()
    made = [b.tensor("x", 10, "input")]
    w = b.tensor("w", 20, "weight") if weights else None
    for name in "abcd":
        made.append(b.tensor(f"{name}.y", 10))
        b.op(name, reads=[made[-2], *([w] if w is not None and name == "a" else [])], writes=[made[-1]], duration=10)
    end = b.tensor("end", 10)
    b.op("late", reads=[made[1], made[-1]], writes=[end], duration=10)
    outputs = [end, w] if w is not None else [end]
    return b.build(outputs=outputs, carry=[(w, w)] if w is not None else ())


AWAY = (Move("a.y", "host", after="b"), Move("a.y", "hbm", before="d"), Wait("a.y", before="late"))


def broken(run: Replayed, laws: Iterable[str] = ONE_RUN) -> set[str]:
    """The laws that a run does not keep."""
    found = set()
    for law in laws:
        try:
            CHECKS[law](run)
        except LawBroken:
            found.add(law)
    return found


def good(actions: tuple[Action, ...] = AWAY, trace: Trace | None = None, platform: Platform | None = None) -> Replayed:
    """A run without a fault."""
    trace = trace or chain()
    run = replayed(Honest(actions=actions), Plan(trace, actions), trace, platform or machine())
    assert run.error is None
    assert broken(run) == set()
    return run


def with_log(run: Replayed, **changes: object) -> Replayed:
    assert run.log is not None
    return replace(run, log=replace(run.log, **changes))


def rows(log: EventLog | None, kind: str, **values: int | str) -> np.ndarray:
    """Positions of the intervals or changes with these values; names of tensors and ops stand for ids."""
    assert log is not None
    table, column = (log.intervals, log.interval) if kind == "intervals" else (log.changes, log.change)
    keep = np.ones(len(table), bool)
    for key, value in values.items():
        if key == "tensor":
            value = log.trace.tensor_id(value)
        elif key == "op":
            value = log.trace.op_id(value)
        elif key == "cause":
            value = CAUSE[value] if isinstance(value, str) else value
        elif key == "why":
            value = WHY[value] if isinstance(value, str) else value
        keep &= column(key) == value
    return np.flatnonzero(keep)


def edited(run: Replayed, kind: str, edit: Callable[[np.ndarray], np.ndarray | None]) -> Replayed:
    """The run with one of its tables changed."""
    table = getattr(run.log, kind).copy()
    out = edit(table)
    return with_log(run, **{kind: table if out is None else out})


# ---- law 1: capacity, conservation, leaks ------------------------------------------------------


def holding() -> Trace:
    """The chain whose program holds what `b` makes until the end of `d`, though only c reads it."""
    trace = chain()
    return with_releases(trace, [(trace.tensor_id("b.y"), trace.op_id("d"))])


def test_freeing_what_the_program_holds_breaks_capacity():
    run = good((), holding())

    def early(table: np.ndarray) -> np.ndarray:
        at = rows(run.log, "changes", tensor="b.y", cause="freed")[0]
        row = table[at].copy()
        assert row[0] == 40
        row[0] = 30  # with its last reader
        rest = np.delete(table, at, 0)
        return np.insert(rest, np.searchsorted(rest[:, 0], 30, "right"), row, 0)

    assert broken(edited(run, "changes", early)) == {"capacity"}


def test_dropping_what_the_program_holds_is_the_plans_to_say():
    good((Drop("b.y", after="c"),), holding())


def test_one_byte_over_capacity_breaks_capacity():
    run = good()
    peak = int(np.cumsum(run.log.changes[run.log.changes[:, 1] == 0, 2]).max())
    assert broken(with_log(run, platform=machine(hbm=peak))) == set()
    assert broken(with_log(run, platform=machine(hbm=peak - 1))) == {"capacity"}


def test_an_engine_that_does_not_free_leaks(monkeypatch):
    run = good()
    monkeypatch.setattr(Lifetimes, "free_after", lambda *_: None)
    leaky = replace(run, log=replay(run.plan, run.platform, fast=False))
    found = edited(
        run, "changes", lambda table: np.delete(table, rows(run.log, "changes", tensor="b.y", cause="freed"), 0)
    )
    assert broken(found) == {"capacity"}
    assert broken(leaky) == {"capacity"}


def test_a_second_copy_in_one_tier_breaks_capacity():
    run = good()
    at = rows(run.log, "changes", tensor="c.y", cause="made")
    assert broken(edited(run, "changes", lambda table: np.insert(table, at[0], table[at[0]], 0))) == {"capacity"}


def test_giving_back_more_than_was_taken_breaks_capacity():
    run = good()
    at = rows(run.log, "changes", tensor="c.y", cause="freed")
    assert broken(edited(run, "changes", lambda table: table.__setitem__((at, 2), -11))) == {"capacity"}


def test_moving_twice_breaks_capacity():
    run = good()
    at = rows(run.log, "intervals", tensor="a.y", lane=2)

    def again(table: np.ndarray) -> np.ndarray:
        row = table[at].copy()
        row[:, :2] += 10
        return np.concatenate((table, row))

    assert broken(edited(run, "intervals", again)) == {"capacity"}


def test_a_result_without_space_breaks_capacity():
    b = TraceBuilder()
    b.op("f", writes=[b.tensor("y", 10)], duration=10)
    run = good((), b.build())
    assert broken(edited(run, "changes", lambda table: table[:0])) == {"capacity"}


def test_workspace_that_is_kept_breaks_capacity():
    b = TraceBuilder()
    b.op("f", duration=10, workspace=5)
    run = good((), b.build())
    assert broken(edited(run, "changes", lambda table: table[:1])) == {"capacity"}


# ---- law 2: values -----------------------------------------------------------------------------


def test_freeing_too_early_breaks_values():
    run = good(())

    def early(table: np.ndarray) -> np.ndarray:
        at = rows(run.log, "changes", tensor="a.y", cause="freed")[0]
        row = table[at].copy()
        row[0] = 45  # in the midst of its last reader
        kept = np.delete(table, at, 0)
        return np.insert(kept, np.searchsorted(kept[:, 0], 45, "right"), row, 0)

    assert broken(edited(run, "changes", early)) == {"values"}


def overwriting() -> Trace:
    b = TraceBuilder()
    old = b.tensor("old", 50, "input")
    b.op("read", reads=[old], duration=10)
    b.op("write", reads=[old], writes=[b.tensor("new", 50, replaces=old)], duration=5)
    return b.build(outputs=[1], carry=())


def test_copying_a_value_while_it_is_overwritten_breaks_values(monkeypatch):
    actions = (Move("old", "host", keep=True, after="read"),)
    good(actions, overwriting())
    monkeypatch.setattr(Outputs, "overwritable", lambda *_: iter(()))
    monkeypatch.setattr(covered, "covers", lambda *_: False)  # the fault is on the event path
    run = replayed(Honest(), Plan(overwriting(), actions), overwriting(), machine())
    assert broken(run) == {"values"}


def rectified() -> tuple[Trace, tuple[Action, ...]]:
    """`relu_` overwrites what `conv` produces; both are recomputed for `late`."""
    b = TraceBuilder()
    x, a, c = b.tensor("x", 10, "input"), b.tensor("a", 50), b.tensor("c", 10)
    over, end = b.tensor("b", 50, replaces=a), b.tensor("end", 10)
    b.op("conv", reads=[x], writes=[a], duration=10)
    b.op("relu_", reads=[a], writes=[over], duration=5)
    b.op("next", reads=[over], writes=[c], duration=20)
    b.op("late", reads=[over, c], writes=[end], duration=10)
    again = Recompute("conv", before="late"), Recompute("relu_", before="late")
    return b.build(outputs=[end], carry=()), (Drop("b", after="next"), *again)


def test_an_overwritten_value_that_stays_when_its_op_runs_again_breaks_values(monkeypatch):
    trace, actions = rectified()
    good(actions, trace)
    take = Outputs.take_space

    def beside(self, work, engine, **how):
        """Puts the result of a rerun beside the old value."""
        replaces = self._prepared.replaces
        kept = [replaces[t] for t in trace.writes(work.op)]
        if work.why == "recompute":
            for t in trace.writes(work.op):
                replaces[t] = -1
        yield from take(self, work, engine, **how)
        for t, old in zip(trace.writes(work.op), kept, strict=True):
            replaces[t] = old

    monkeypatch.setattr(Outputs, "take_space", beside)
    monkeypatch.setattr(array_path, "covers", lambda *_: False)  # the fault is on the event path
    assert broken(replayed(Honest(), Plan(trace, actions), trace, machine())) == {"values"}


def test_running_in_place_again_on_its_own_result_breaks_values(monkeypatch):
    def skip(self, op, *, fetched):
        """Restores nothing: what an op overwrote is taken to be there."""
        return -1
        yield

    trace, _ = rectified()
    monkeypatch.setattr(Restore, "reads", skip)
    run = replayed(Honest(), Plan(trace, (Recompute("relu_", before="late"),)), trace, machine())
    assert "values" in broken(run)


def test_losing_an_output_breaks_values():
    run = good()
    row = (run.log.end, 0, -10, run.trace.tensor_id("end"), -1, CAUSE["dropped"])
    assert broken(edited(run, "changes", lambda table: np.vstack((table, row)))) == {"values"}


@dataclass(frozen=True, kw_only=True)
class Encodes(Honest):
    """Rewrites with a codec, and says that nothing is lost."""

    rewrites = True
    codec_is_lossless: bool = False

    def plan(self, problem: Problem) -> Plan:
        codec = Codec("half", Fraction(1, 2), 15, 15, lossless=self.codec_is_lossless)
        return Plan(encode(problem.trace, {"f.y": codec}))


def forward_backward() -> Trace:
    b = TraceBuilder()
    y, z, d = b.tensor("f.y", 10), b.tensor("g.y", 10), b.tensor("d", 10, "temporary")
    b.op("f", writes=[y], duration=10)
    b.op("g", reads=[y], writes=[z], duration=10)
    b.op("back", reads=[y, z], writes=[d], duration=10, phase="backward")
    return b.build(outputs=[d], carry=())


def test_a_lossy_codec_that_is_not_declared_breaks_values():
    assert broken(run_policy(Encodes(codec_is_lossless=True), forward_backward(), machine()), CHECKS) == set()
    assert broken(run_policy(Encodes(), forward_backward(), machine()), CHECKS) == {"values"}


@dataclass(frozen=True, kw_only=True)
class StaleWeights(Honest):
    """Its last op reads the weight before the update, and says that it is the one after."""

    rewrites = True

    def plan(self, problem: Problem) -> Plan:
        trace = problem.trace
        new = Rewriter(trace)
        ids = new.all_tensors()
        copy = new.tensor(trace.tensors[0], Same(0), name="kept", role="activation")
        first = True
        for op in trace.ops:
            reads = [copy if op.name == "use" else ids[t] for t in op.reads]
            new.op(op, reads=reads, writes=[ids[t] for t in op.writes])
            if first:
                new.glue("keep", "copy", [ids[0]], [copy], phase="forward", layer=-1, device=0)
            first = False
        return Plan(
            new.build(outputs=[ids[t] for t in trace.outputs], carry=[(ids[a], ids[b]) for a, b in trace.carry])
        )


def test_a_stale_weight_breaks_values():
    b = TraceBuilder()
    w = b.tensor("w", 10, "weight")
    new = b.tensor("w.new", 10, "weight", replaces=w)
    out = b.tensor("out", 10)
    b.op("start", duration=10)
    b.op("step", reads=[w], writes=[new], duration=10, phase="update")
    b.op("use", reads=[new], writes=[out], duration=10, phase="update")
    trace = b.build(outputs=[new, out])
    assert broken(run_policy(StaleWeights(), trace, machine()), CHECKS) == {"values"}


# ---- law 3: every op, and what is declared -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Undeclared(Honest):
    """Does what `actions` say and declares nothing."""

    recomputes = False
    moves = False
    manages = ("activations",)


def test_moving_without_saying_so_breaks_ops():
    assert broken(run_policy(Undeclared(actions=AWAY), chain(), machine()), CHECKS) == {"ops"}


def test_recomputing_without_saying_so_breaks_ops():
    actions = (Drop("a.y", after="b"), Recompute("a", before="late"))
    assert broken(run_policy(Undeclared(actions=actions), chain(), machine()), CHECKS) == {"ops"}


@dataclass(frozen=True, kw_only=True)
class MovesActivations(Honest):
    manages = ("activations",)


def test_sending_away_weights_that_it_does_not_manage_breaks_ops():
    actions = (Move("w", "host", after="a"),)
    assert broken(run_policy(MovesActivations(actions=actions), chain(weights=True), machine()), CHECKS) == {"ops"}
    assert broken(run_policy(Honest(actions=actions), chain(weights=True), machine()), CHECKS) == set()


def beside() -> Trace:
    """Two ops on the CPU engine that nobody waits for, beside one on the device."""
    b = TraceBuilder()
    b.op("one", duration=20, engine="cpu")
    b.op("two", duration=20, engine="cpu")
    b.op("main", duration=100)
    return b.build()


def test_an_op_that_does_not_run_breaks_ops():
    run = good((), beside())
    at = rows(run.log, "intervals", op="two", why="run")
    assert broken(edited(run, "intervals", lambda table: np.delete(table, at, 0))) == {"ops"}


def test_an_op_that_runs_twice_breaks_ops():
    run = good((), beside())
    at = rows(run.log, "intervals", op="two", why="run")
    later = np.array([40, 40, 0, 0, 0, 0, 0, 0, 0])
    assert broken(edited(run, "intervals", lambda table: np.concatenate((table, table[at] + later)))) == {"ops"}


# ---- law 4: order, engines, rates --------------------------------------------------------------


def test_an_op_that_starts_before_its_reads_are_there_breaks_order():
    actions = (*AWAY[:1], Move("a.y", "hbm", keep=True, before="d"), AWAY[2])
    run = good(actions)
    at = rows(run.log, "intervals", tensor="a.y", lane=3)
    assert broken(edited(run, "intervals", lambda table: table.__setitem__((at, slice(0, 2)), (35, 45)))) == {"order"}


def test_double_booking_an_engine_breaks_order():
    run = good((), beside())
    at = rows(run.log, "intervals", op="two", why="run")
    assert broken(edited(run, "intervals", lambda table: table.__setitem__((at, slice(0, 2)), (10, 30)))) == {"order"}


def test_a_transfer_faster_than_its_link_breaks_order():
    run = good()
    at = rows(run.log, "intervals", tensor="a.y", lane=3)
    assert broken(edited(run, "intervals", lambda table: table.__setitem__((at, 1), table[at, 1] - 1))) == {"order"}


def both_ways(pools: tuple[Pool, ...], delay: int = 0) -> Replayed:
    b = TraceBuilder()
    for name in ("out", "in"):
        b.tensor(name, 40, "input")
    b.op("compute", duration=1000)
    trace = b.build(outputs=[], carry=())
    actions = (Move("out", "host", before="compute"), Move("in", "hbm", before="compute", delay=delay))
    return replayed(Honest(), Plan(trace, actions, place={1: "host"}), trace, machine(pools=pools))


POOLS = (
    Pool("bus", (Member("d2h"), Member("h2d", Fraction(3))), GB),
    Pool("duplex", (Member("d2h", factor=Fraction(1, 2)), Member("h2d", factor=Fraction(3, 4)))),
)


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_ignoring_a_pool_breaks_order(pool, monkeypatch):
    assert broken(both_ways((pool,))) == set()
    own = sim.engine.event_path.fairness.fair_rates
    alone = lambda flows, rates, _: [own([users], [None] * len(rates))[0] for users in flows]  # noqa: E731
    monkeypatch.setattr(sim.engine.event_path.fairness, "fair_rates", alone)
    assert broken(both_ways((pool,))) == {"order"}


def test_a_copy_that_its_software_delays_leaves_the_pool_to_others_until_then():
    """The law took the rate that others have meanwhile for too high; it was so for page faults beside an offload."""
    assert broken(both_ways(POOLS[1:], delay=500)) == set()


def test_more_transfers_at_once_than_copy_engines_break_order():
    b = TraceBuilder()
    for name in ("p", "q"):
        b.tensor(name, 40, "input")
    b.op("compute", duration=1000)
    run = good(
        (Move("p", "host", before="compute"), Move("q", "host", before="compute")), b.build(outputs=[], carry=())
    )
    at = rows(run.log, "intervals", tensor="q", why="move")
    early = lambda table: table.__setitem__((at, slice(0, 2)), (20, 80))  # noqa: E731
    assert broken(edited(run, "intervals", early)) == {"order"}


# ---- law 5: time adds up -----------------------------------------------------------------------


def test_time_that_nobody_accounts_for_breaks_tiling():
    actions = (Move("x", "host", before="a"), Wait("x", before="a"))
    run = good(actions)
    at = rows(run.log, "intervals", why="stall")
    assert len(at)
    assert broken(edited(run, "intervals", lambda table: np.delete(table, at[:1], 0))) == {"tiling"}
    assert broken(edited(run, "intervals", lambda table: table.__setitem__((at[0], 1), table[at[0], 1] + 1))) == {
        "tiling"
    }


def test_a_makespan_that_is_not_the_sum_breaks_tiling():
    run = good()
    assert broken(with_log(run, end=run.log.end + 1)) == {"tiling"}


# ---- law 6: an answer or a refusal -------------------------------------------------------------


def test_a_partial_log_that_is_given_as_an_answer_breaks_outcome():
    assert broken(with_log(good(), complete=False)) == {"outcome"}


def refusal() -> Replayed:
    run = replayed(Honest(), Plan(chain()), chain(), machine(hbm=25))
    assert isinstance(run.error, OutOfMemory)
    assert broken(run) == set()
    return run


@pytest.mark.parametrize("lie", [{"free_bytes": 3}, {"need_bytes": 1}, {"log": None}, {"tier": "hmb"}, {"holders": ()}])
def test_a_refusal_that_lies_breaks_outcome(lie):
    run = refusal()
    for key, value in lie.items():
        setattr(run.error, key, value)
    assert broken(run) == {"outcome"}


@dataclass(frozen=True, kw_only=True)
class Crashes(Honest):
    def plan(self, problem: Problem) -> Plan:
        return Plan(problem.trace, [Move("a.y", "host", after={}["nothing"])])


def test_a_crash_or_an_illegal_plan_breaks_outcome():
    assert broken(run_policy(Crashes(), chain(), machine()), CHECKS) == {"outcome"}
    illegal = Honest(actions=(Drop("x", after="a"), Drop("a.y", after="b")))
    assert broken(run_policy(illegal, chain(), machine()), CHECKS) == {"outcome"}


# ---- laws 7, 8 ---------------------------------------------------------------------------------

_calls = count()


@dataclass(frozen=True, kw_only=True)
class Forgetful(Honest):
    """Its plan depends on how often it was asked."""

    def plan(self, problem: Problem) -> Plan:
        return Plan(problem.trace, AWAY if next(_calls) % 2 else ())


class Counts(Online):
    """Keeps what it learnt from one run to the next."""

    seen: ClassVar[list[int]] = []

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        self.seen.append(op)
        return (Move(0, "host"),) if len(self.seen) % 7 == 0 else ()


@dataclass(frozen=True, kw_only=True)
class Remembers(Honest):
    online = True

    def plan(self, problem: Problem) -> Plan:
        return Plan(problem.trace, online=Counts)


def test_a_plan_that_changes_from_call_to_call_breaks_repeats():
    assert broken(run_policy(Forgetful(), chain(), machine()), CHECKS) == {"repeats"}


@dataclass(frozen=True, kw_only=True)
class Hurried(Forgetful):
    solver = "milp"

    says: bool = True
    took: float = 0.05
    time_limit: float = 0.05

    def plan(self, problem: Problem) -> Plan:
        ends = time.perf_counter() + self.took
        while time.perf_counter() < ends:
            sum(range(100))
        return replace(super().plan(problem), notes={"time_limited": self.says})


def test_only_a_solver_that_met_its_limit_on_the_clock_may_find_another_plan_next_time():
    assert broken(run_policy(Hurried(), chain(), machine()), CHECKS) == set()
    assert broken(run_policy(Hurried(says=False), chain(), machine()), CHECKS) == {"repeats"}
    assert broken(run_policy(Hurried(took=0), chain(), machine()), CHECKS) == {"repeats"}

    @dataclass(frozen=True, kw_only=True)
    class NoSolver(Hurried):
        solver = ""

    assert broken(run_policy(NoSolver(), chain(), machine()), CHECKS) == {"repeats"}


@dataclass(frozen=True, kw_only=True)
class Ponders(Honest):
    """Takes its time to plan, each time."""

    def plan(self, problem: Problem) -> Plan:
        ends = time.process_time() + 0.5
        while time.process_time() < ends:
            sum(range(100))
        return Plan(problem.trace)


def test_each_run_that_a_law_asks_for_has_the_whole_limit_of_time():
    with limited(0.9):
        assert broken(run_policy(Ponders(), chain(), machine()), CHECKS) == set()
    with pytest.raises(TooLong), limited(0.2):
        run_policy(Ponders(), chain(), machine())


def test_an_online_part_with_a_memory_breaks_repeats():
    assert "repeats" in broken(run_policy(Remembers(), chain(), machine()), ("repeats", *ONE_RUN))


@dataclass(frozen=True, kw_only=True)
class NotOptimal(Honest):
    """Waits for a needless copy where there is room."""

    optimal = "among plans that do nothing"

    def plan(self, problem: Problem) -> Plan:
        waste = (Move("x", "host", before="a"), Wait("x", before="a"))
        return Plan(problem.trace, waste if problem.budget > 500 else ())


def test_a_policy_that_is_slower_with_more_budget_breaks_optimal():
    assert broken(run_policy(NotOptimal(), chain(), machine(hbm=100)), CHECKS) == {"optimal"}


@dataclass(frozen=True, kw_only=True)
class BestOfItsClass(Honest):
    """Says that it is the best of all plans that recompute before an op; `refuses` all budgets, or does too much."""

    optimal = "among plans that recompute earlier ops before an op, in order"
    refuses: bool = False
    status: str = "optimal"

    def in_class(self, plan: Plan) -> bool:
        return in_stages(plan)

    def plan(self, problem: Problem) -> Plan:
        if self.refuses:
            error = Infeasible("no plan of this class fits")
            error.proven = self.status == "optimal"
            raise error
        return Plan(problem.trace, (Recompute("a", before="c"),), notes={"status": self.status})


def test_a_policy_that_a_plan_of_its_own_class_beats_breaks_optimal():
    assert broken(run_policy(BestOfItsClass(), chain(), machine(hbm=100)), CHECKS) == {"optimal"}
    assert broken(run_policy(BestOfItsClass(refuses=True), chain(), machine(hbm=100)), CHECKS) == {"optimal"}
    for refuses in (False, True):  # neither claims to be optimal
        policy = BestOfItsClass(refuses=refuses, status="feasible")
        assert not broken(run_policy(policy, chain(), machine(hbm=100)), ("optimal",))


# ---- law 9 -------------------------------------------------------------------------------------


class Quick(Honest):
    """Takes faster implementations and does not say that they would be there for everyone."""

    rewrites = True

    def plan(self, problem: Problem) -> Plan:
        return Plan(choose_implementation(problem.trace, {"a": "quick"}))


def quick() -> Trace:
    b = TraceBuilder()
    y = b.tensor("y", 10)
    b.op("a", writes=[y], duration=10, alternatives=(Implementation("quick", 0.5, 30),))
    return b.build(outputs=[y])


def test_a_gain_over_unlimited_memory_breaks_unlimited():
    assert broken(run_policy(Quick(), quick(), machine())) == {"unlimited"}

    class Says(Quick):
        saves: ClassVar[Mapping[str, str]] = {"implementation": "the trace states them"}

        def unlimited(self, problem):
            return {"fastest implementations": self.plan(problem)}

    assert broken(run_policy(Says(), quick(), machine())) == set()


def test_a_copy_before_it_is_needed_elsewhere_is_no_gain_over_unlimited_memory():
    b = TraceBuilder()
    g, w = b.tensor("g", 50, "gradient"), b.tensor("w", 10, "weight")
    new = b.tensor("w.new", 10, "weight", replaces=w)
    b.op("f", writes=[g], duration=10)
    b.op("late", duration=100)
    b.op("step", "optimizer", phase="update", reads=[w, g], writes=[new], duration=10, engine="cpu")
    trace, early = b.build(), (Move("g", "host", after="f"),)
    plain, run = (replayed(Honest(), Plan(trace, actions), trace, machine()) for actions in ((), early))
    assert (plain.log.end, run.log.end) == (170, 120)
    assert broken(run) == set()
    assert broken(with_log(run, end=119), ("unlimited",)) == {"unlimited"}


def test_a_carried_tensor_left_elsewhere_breaks_carried():
    trace = chain(weights=True)
    b = TraceBuilder.of(trace)
    for op in trace.ops:
        b.copy_op(op)
    careless = b.build(outputs=trace.outputs, carry=())
    actions = (Move("w", "host", after="a"),)
    run = replayed(Honest(), Plan(careless, actions), careless, machine())
    assert broken(run) == set()
    fooled = replace(with_log(run, trace=trace), trace=trace, plan=Plan(trace, actions))
    assert broken(fooled) == {"carried"}


# ---- law 10 ------------------------------------------------------------------------------------


class Furthest(Online):
    """Sends away what is read last: nobody can know that online."""

    def __init__(self, trace: Trace, peek: bool) -> None:
        self.trace = trace
        self.order = trace.last_use if peek else np.arange(len(trace.tensors))

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        here = [t for t in memory.residents(need.tier) if not memory.is_locked(t) and memory.in_flight(t) is None]
        return [Move(max(here, key=lambda t: (self.order[t], t)), "host")] if here else []


@dataclass(frozen=True, kw_only=True)
class Peeks(Honest):
    online = True
    peek: bool = True

    def plan(self, problem: Problem) -> Plan:
        return Plan(problem.trace, online=partial(Furthest, problem.trace, self.peek))


def pressed() -> Trace:
    """Six results, read again in another order; four fit."""
    b = TraceBuilder()
    made = [b.tensor(f"y{i}", 10) for i in range(6)]
    for i in range(6):
        b.op(f"f{i}", writes=[made[i]], duration=10)
    for i in (3, 0, 4, 1, 5, 2):
        b.op(f"g{i}", reads=[made[i]], duration=10)
    return b.build()


def test_peeking_ahead_breaks_online():
    assert broken(run_policy(Peeks(peek=False), pressed(), machine(hbm=40)), CHECKS) == set()
    assert broken(run_policy(Peeks(), pressed(), machine(hbm=40)), CHECKS) == {"online"}


class Early(Online):
    """Sends away what is dead one op later than its plan says."""

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        return (Drop("x"),) if op == 2 else ()


@dataclass(frozen=True, kw_only=True)
class Foretells(Honest):
    online = True
    right: bool

    def plan(self, problem: Problem) -> Plan:
        unpressed = Unpressed(np.array([0]), np.array([2 if self.right else 1]))
        return Plan(problem.trace, online=Early, unpressed=unpressed)


def test_foretelling_what_the_online_part_does_not_do_breaks_online():
    assert broken(run_policy(Foretells(right=True), chain(), machine()), ("online",)) == set()
    assert broken(run_policy(Foretells(right=False), chain(), machine()), ("online",)) == {"online"}


@dataclass(frozen=True, kw_only=True)
class SaysOnline(Honest):
    online = True


def test_saying_online_and_planning_offline_breaks_online():
    assert broken(run_policy(SaysOnline(), chain(), machine()), CHECKS) == {"online"}


# ---- law 11: what is saved is declared ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rewrites(Honest):
    """Declares all that a rewrite can do, but for what makes ops cheaper."""

    rewrites = True
    splits_batch = True


@dataclass(frozen=True, kw_only=True)
class Chooses(Rewrites):
    saves: ClassVar[Mapping[str, str]] = {"implementation": "the trace states them"}


@dataclass(frozen=True, kw_only=True)
class Captures(Rewrites):
    saves: ClassVar[Mapping[str, str]] = {"launch": "launched together"}


@dataclass(frozen=True, kw_only=True)
class Fuses(Rewrites):
    saves: ClassVar[Mapping[str, str]] = {"fusion": "one kernel"}


def priced(*, measured: bool = False) -> Trace:
    """Two ops, random and with a workspace; the time of the first is measured where asked, else the model's."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 40, "input"), b.tensor("y", 40), b.tensor("z", 40)
    more = {"duration": 100} if measured else {}
    about = {"flops": 60, "bytes": 80, "workspace": 10, "dtype": "fp32", "splits": ("rows",)}
    b.op("f", "elementwise", reads=[x], writes=[y], random=True, **about, **more)
    other = [Implementation("fast", 0.5, 30)]
    b.op("g", "conv", reads=[y], writes=[z], flops=60, bytes=80, workspace=20, dtype="fp32", alternatives=other)
    return b.build(outputs=[z], carry=())


def machine_with_launch(ns: int = 7) -> Platform:
    found = machine()
    peak = {"fp32": GB, "fp16": 8 * GB}
    engines = tuple(replace(engine, launch=ns, peak=peak) for engine in found.engines)
    return replace(found, engines=engines)


def rewritten(trace: Trace, policy: Policy | None = None, platform: Platform | None = None, notes=None, **columns):
    """A run of a trace with some op columns changed: {"flops": {op: value}}."""
    changed = {}
    for key, values in columns.items():
        column = getattr(trace.op_columns, key)
        column = list(column) if key == "dtype" else column.copy()
        for op, value in values.items():
            column[op] = value
        changed[key] = column
    plan = Plan(with_columns(trace, **changed), notes=notes or {})
    return replayed(policy or Rewrites(), plan, trace, platform or machine_with_launch())


COSTS = (*(law for law in ONE_RUN if law != "unlimited"), "costs")
"""What is cheaper than it may be is faster, too, than without a limit: that is the other half of law 11."""


@pytest.mark.parametrize("measured", [False, True])
def test_an_op_that_is_as_dear_as_the_one_it_stands_for_breaks_nothing(measured):
    assert broken(rewritten(priced(measured=measured), workspace={0: 10}), COSTS) == set()
    run = rewritten(priced(measured=measured), flops={1: 61}, workspace={0: 11})
    assert broken(run, COSTS) == {"costs"}  # it counts more
    trace = with_columns(run.plan.trace, counted={1: 60})
    assert broken(replayed(Rewrites(), Plan(trace), run.trace, run.platform), COSTS) == set()


@pytest.mark.parametrize(
    ("measured", "change"),
    [
        (False, {"flops": {0: 59}}),
        (False, {"bytes": {0: 79}}),
        (False, {"workspace": {0: 9}}),
        (False, {"duration": {0: 146}}),  # launch 7 + 60 FLOPs + 80 bytes: 147 ns
        (False, {"random": {0: False}}),
        (False, {"dtype": {0: "fp16"}}),
        (False, {"dtype": {0: ""}}),
        (True, {"duration": {0: 99}}),
        (True, {"duration": {0: 50}}),
        (True, {"flops": {0: 59}}),
    ],
)
def test_an_op_that_is_cheaper_than_the_one_it_stands_for_breaks_costs(measured, change):
    assert broken(rewritten(priced(measured=measured), **change), COSTS) == {"costs"}


def test_a_measured_time_that_the_model_would_undercut_may_not_be_dropped():
    slow = rewritten(priced(), duration={0: 1000}).plan.trace
    bare = Trace(slow.tensor_columns, slow.op_columns, outputs=slow.outputs, carry=slow.carry, meta=slow.meta)
    assert broken(rewritten(bare, duration={0: -1}), COSTS) == {"costs"}


def test_an_engine_by_its_own_name_does_not_lose_a_measured_time():
    slow = rewritten(priced(), duration={0: 1000}).plan.trace
    bare = Trace(slow.tensor_columns, slow.op_columns, outputs=slow.outputs, carry=slow.carry, meta=slow.meta)
    duration = bare.op_columns.duration.copy()
    duration[0] = -1
    plan = Plan(with_columns(bare, duration=duration, engine={0: "npu"}))
    assert broken(replayed(Rewrites(), plan, bare, machine_with_launch()), COSTS) == {"costs"}


def test_a_rewrite_of_no_iterations_breaks_values():
    trace = chain()
    b, (output,) = TraceBuilder(), trace.outputs
    kept = b.tensor("kept", trace.tensors[output].bytes)
    b.op("nothing", reads=[kept], duration=1)
    origin = Origin(trace.content_hash, (Same(output, -1),), (Glue(),), iterations=0)
    plan = Plan(b.build(outputs=[kept], carry=(), origin=origin))
    run = replayed(Rewrites(), plan, trace, machine())
    assert "0 iterations" in breaks(CHECKS["values"], run)


def test_a_kind_that_an_engine_runs_faster_breaks_costs():
    run = rewritten(priced(), kind={1: KIND_CODE["matmul"]})
    assert "costs" in broken(run, COSTS)


@pytest.mark.parametrize(
    ("workspace", "flops", "touched", "ok"),
    [(30, 30, 40, True), (20, 30, 40, False), (30, 29, 40, False), (30, 30, 39, False)],
)
def test_an_implementation_is_taken_as_the_trace_states_it_and_declared(workspace, flops, touched, ok):
    change = {"workspace": {1: workspace}, "flops": {1: flops}, "bytes": {1: touched}}
    assert broken(rewritten(priced(), Chooses(), **change), COSTS) == (set() if ok else {"costs"})
    assert broken(rewritten(priced(), **change), COSTS) == {"costs"}


def test_a_launch_is_spared_once_and_declared():
    spared = {"duration": {1: 140}}  # 147 ns, 7 of them the launch
    assert broken(rewritten(priced(), Captures(), **spared), COSTS) == set()
    assert broken(rewritten(priced(), **spared), COSTS) == {"costs"}
    assert broken(rewritten(priced(), Captures(), duration={1: 139}), COSTS) == {"costs"}
    assert broken(rewritten(priced(), Captures(), notes={"launch_ns": 10**18}, duration={1: 139}), COSTS) == {"costs"}


def test_a_measured_time_spares_the_launch_that_the_plan_says_up_to_that_of_the_machine():
    assert broken(rewritten(priced(measured=True), Captures(), duration={0: 99}), COSTS) == {"costs"}
    spared = {"notes": {"launch_ns": 1}, "duration": {0: 99}}
    assert broken(rewritten(priced(measured=True), Captures(), **spared), COSTS) == set()
    slow = rewritten(priced(), duration={0: 10**6}).plan.trace
    bare = Trace(slow.tensor_columns, slow.op_columns, outputs=slow.outputs, carry=slow.carry, meta=slow.meta)
    huge = {"launch_ns": 10**18}
    assert broken(rewritten(bare, Captures(), notes=huge, duration={0: 10**6 - 7}), COSTS) == set()
    assert broken(rewritten(bare, Captures(), notes=huge, duration={0: 10**6 - 8}), COSTS) == {"costs"}
    assert broken(rewritten(bare, Captures(), notes=huge, duration={0: 0}), COSTS) == {"costs"}


def test_a_fused_kernel_is_declared_and_touches_each_operand_once():
    b = TraceBuilder()
    x, y, z = b.tensor("x", 40, "input"), b.tensor("y", 40), b.tensor("z", 40)
    b.op("f", "elementwise", reads=[x], writes=[y], flops=60, dtype="fp32", workspace=10)
    b.op("g", "elementwise", reads=[y], writes=[z], flops=60, dtype="fp32", duration=100)
    trace = b.build(outputs=[z], carry=())
    honest = Plan(fuse(trace, [[0, 1]]))
    platform = machine_with_launch()
    assert broken(replayed(Fuses(), honest, trace, platform), COSTS) == set()
    assert broken(replayed(Rewrites(), honest, trace, platform), COSTS) == {"costs"}
    free = Plan(with_columns(honest.trace, bytes=honest.trace.op_columns.bytes - 1))
    assert broken(replayed(Fuses(), free, trace, platform), COSTS) == {"costs"}
    light = Plan(with_columns(honest.trace, flops=honest.trace.op_columns.flops - 1))
    assert broken(replayed(Fuses(), light, trace, platform), COSTS) == {"costs"}


def pair(**of_the_second) -> Trace:
    """Two ops on 40 B each, y between them known to nobody else; the first computes in fp32."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", 40, "input"), b.tensor("y", 40), b.tensor("z", 40)
    b.op("f", "elementwise", reads=[x], writes=[y], flops=800, dtype="fp32", workspace=10)
    b.op("g", "elementwise", reads=[y], writes=[z], **{"flops": 80, "dtype": "fp32", **of_the_second})
    return b.build(outputs=[z], carry=())


def test_one_op_alone_is_no_fusion():
    run = replayed(Fuses(), Plan(fuse(pair(), [[0]])), pair(), machine_with_launch())
    assert broken(run, COSTS) == {"costs"}


@pytest.mark.parametrize("key", ["workspace", "duration", "dtype"])
def test_a_fused_kernel_keeps_workspace_measured_times_and_types(key):
    trace = pair(**{"duration": 10_000} if key == "duration" else {"dtype": "fp16"} if key == "dtype" else {})
    fused, platform = fuse(trace, [[0, 1]]), machine_with_launch()
    columns = fused.op_columns
    honest = {"duration": np.array([11_000])} if key == "duration" else {}
    cheap = {"workspace": {"workspace": columns.workspace - 1}, "duration": {}, "dtype": {"dtype": ["fp16"]}}[key]
    assert broken(replayed(Fuses(), Plan(with_columns(fused, **honest)), trace, platform), COSTS) == set()
    assert broken(replayed(Fuses(), Plan(with_columns(fused, **cheap)), trace, platform), COSTS) == {"costs"}


def test_a_fused_kernel_computes_in_the_widest_type_of_its_ops():
    trace = pair(flops=800, dtype="fp64")
    platform = with_peaks(machine_with_launch(), {"fp16": 8 * GB, "fp32": GB, "fp64": GB // 8})
    fused = fuse(trace, [[0, 1]])
    assert [op.dtype for op in fused.ops] == ["fp64"]
    assert broken(replayed(Fuses(), Plan(fused), trace, platform), COSTS) == set()
    wrong = with_columns(fused, dtype=["fp32"])
    assert broken(replayed(Fuses(), Plan(wrong), trace, platform), COSTS) == {"costs"}


def with_peaks(platform: Platform, peak: Mapping[str, int]) -> Platform:
    return replace(platform, engines=tuple(replace(engine, peak=peak) for engine in platform.engines))


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[0, 2]]])
def test_each_part_of_an_op_in_a_fused_kernel_takes_the_time_of_its_type(groups):
    trace = pair(flops=800, dtype="fp16")
    halves = split_tensors(trace, {"x": 2, "y": 2, "z": 2}, ops=["f", "g"])
    assert [op.name for op in halves.ops] == ["f.part0", "f.part1", "g.part0", "g.part1"]
    fused, platform = fuse(halves, groups), machine_with_launch()
    assert broken(replayed(Fuses(), Plan(fused), trace, platform), COSTS) == set()
    types = ["fp16" if isinstance(expr, Fused) else op.dtype for op, expr in zip(fused.ops, fused.origin.ops)]
    assert broken(replayed(Fuses(), Plan(with_columns(fused, dtype=types)), trace, platform), COSTS) == {"costs"}
    flops = fused.op_columns.flops.copy()
    flops[-1] -= 1  # less than the op that is split has in all, though each part is only rounded
    light = Plan(with_columns(fused, flops=flops))
    assert broken(replayed(Fuses(), light, trace, platform), COSTS) == {"costs"}


def test_a_part_of_a_fused_kernel_costs_its_share_of_it():
    trace = pair(flops=800)
    fused, platform = fuse(trace, [[0, 1]]), machine_with_launch()
    halves = split_tensors(fused, {"x": 2, "z": 2}, ops=["g"])
    assert len(halves.ops) == 2
    assert broken(replayed(Fuses(), Plan(halves), trace, platform), COSTS) == set()
    flops = halves.op_columns.flops - 10
    assert broken(replayed(Fuses(), Plan(with_columns(halves, flops=flops)), trace, platform), COSTS) == {"costs"}


def test_a_codec_takes_the_time_of_its_bytes():
    def run(ns: int | None) -> Replayed:
        codec = Codec("half", Fraction(1, 2), ns, ns)
        trace = forward_backward()
        return replayed(Rewrites(), Plan(encode(trace, {"f.y": codec})), trace, machine())

    assert broken(run(None), COSTS) == set()
    assert broken(run(15), COSTS) == set()  # 10 bytes and 5, at a byte per ns
    assert broken(run(14), COSTS) == {"costs"}


@dataclass(frozen=True, kw_only=True)
class Sends(Rewrites):
    moves = True
    saves: ClassVar[Mapping[str, str]] = {"copy": "straight from the original"}


@pytest.mark.parametrize(
    ("policy", "duration", "over", "sent", "ok"),
    [
        (Rewrites(), None, False, False, True),  # the model's price of 40 bytes read and 40 written
        (Rewrites(), 0, False, False, False),
        (Rewrites(), 79, False, False, False),
        (Rewrites(), 80, False, False, True),
        (Rewrites(), 0, True, False, True),  # a new name for bytes that stay where they are
        (Sends(), 0, False, False, False),
        (Sends(), 0, False, True, True),  # it goes to the host at once
        (Rewrites(), 0, False, True, False),  # which nobody declared
    ],
)
def test_what_computes_nothing_takes_the_time_of_the_bytes_that_it_moves(policy, duration, over, sent, ok):
    trace = pair()
    new = Rewriter(trace)
    ids = new.all_tensors()
    f, g = trace.ops
    again = new.tensor(trace.tensors[f.writes[0]], name="again", replaces=ids[f.writes[0]] if over else None)
    new.op(f, reads=[ids[t] for t in f.reads], writes=[ids[t] for t in f.writes])
    copy = new.glue("copy", "copy", [ids[f.writes[0]]], [again], duration=duration)
    new.op(g, reads=[again], writes=[ids[t] for t in g.writes])
    actions = [Move(again, "host", after=copy), Wait(again, after=copy)] if sent else []
    plan = Plan(new.build(outputs=[ids[t] for t in trace.outputs], carry=()), actions)
    assert broken(replayed(policy, plan, trace, machine()), COSTS) == (set() if ok else {"costs"})


def test_a_lossless_code_of_nothing_breaks_values():
    def run(ratio: Fraction) -> Replayed:
        trace = forward_backward()
        return replayed(Rewrites(), Plan(encode(trace, {"f.y": Codec("magic", ratio)})), trace, machine())

    assert broken(run(Fraction(1, 32)), COSTS) == set()
    assert broken(run(Fraction(0)), COSTS) == {"values"}


def same(trace: Trace, over: Mapping[int, int] | None = None, meta=None, **tensor: object) -> Trace:
    """The trace as a rewrite of itself, with some fields of tensors, or what they take over, changed."""
    new = Rewriter(trace, meta)
    for t in trace.tensors:
        new.tensor(t, **tensor)
    for t in trace.tensors:
        old = (over or {}).get(t.id, t.replaces)
        if old is not None:
            new.builder.take_over(t.id, old)
    for op in trace.ops:
        new.op(op, reads=op.reads, writes=op.writes)
    return new.build(outputs=trace.outputs, carry=trace.carry)


@pytest.mark.parametrize(
    "change",
    [{"over": {2: 1}}, {"role": "input"}, {"meta": {"tokens": 10**12}}, {"meta": {"model_flops": 10**15}}],
)
def test_a_rewrite_in_place_of_another_role_or_of_more_work_breaks_values(change):
    trace = priced()
    assert broken(replayed(Rewrites(), Plan(same(trace)), trace, machine_with_launch()), COSTS) == set()
    assert broken(replayed(Rewrites(), Plan(same(trace, **change)), trace, machine_with_launch()), COSTS) == {"values"}


@dataclass(frozen=True, kw_only=True)
class Compresses(Honest):
    saves: ClassVar[Mapping[str, str]] = {"codec": "zeros take no space"}


def test_fewer_bytes_on_the_wire_are_lossy_or_declared():
    def run(policy: Policy, wire: int) -> Replayed:
        away, back, wait = AWAY
        moves = (replace(away, wire=wire), replace(back, wire=10), wait)
        return replayed(policy, Plan(chain(), moves), chain(), machine())

    assert broken(run(Honest(), 10)) == set()
    assert broken(run(Honest(), 9)) == {"values"}
    assert broken(run(Compresses(), 1)) == set()
    assert broken(run(Compresses(), 0)) == {"values"}


@dataclass(frozen=True, kw_only=True)
class Mutates(Honest):
    what: str = "trace"

    def plan(self, problem: Problem) -> Plan:
        if self.what in ("duration", "touched"):
            column = problem.trace.op_columns.duration if self.what == "duration" else problem.trace.touched
            column.setflags(write=True)
            column[:] = 0
        elif self.what == "hash":  # as if a trace of half the work were the one that was asked for
            ops = problem.trace.op_columns
            half = with_columns(problem.trace, duration=ops.duration // 2)
            vars(problem.trace)["content_hash"] = half.content_hash
            return Plan(half)
        elif self.what == "platform":
            object.__setattr__(problem.platform.tiers[0], "capacity", 1 << 60)
        elif self.what == "history":
            for run in problem.history:
                object.__setattr__(run.log, "end", 0)
        else:
            plan = Plan(problem.trace)
            log = problem.evaluate(plan)
            object.__setattr__(log, "end", 1)
            log.counters["implicit_moves"] = 10**6
            return plan
        return Plan(problem.trace)


@dataclass(frozen=True, kw_only=True)
class MutatesHistory(Mutates):
    warm_up = 1

    what: str = "history"


@pytest.mark.parametrize(
    "policy", [*(Mutates(what=w) for w in ("duration", "touched", "hash", "platform", "log")), MutatesHistory()]
)
def test_changing_what_was_asked_breaks_repeats(policy):
    trace = chain()
    assert trace.content_hash
    assert "repeats" in broken(run_policy(policy, trace, machine()), CHECKS)


def test_a_changed_log_of_evaluate_is_not_the_result():
    plain = simulate(chain(), machine(), Honest())
    result = simulate(chain(), machine(), Mutates(what="log"))
    assert result.log == plain.log
    assert (result.summary()["makespan_ns"], result.log.counters["implicit_moves"]) == (50, 0)


@pytest.mark.parametrize("table", ["intervals", "changes", "reserved"])
@pytest.mark.parametrize("actions", [(), AWAY], ids=["array path", "event path"])
def test_the_tables_of_a_log_are_read_only(table, actions):
    log = replay(Plan(chain(), actions), machine())
    with pytest.raises(ValueError, match="read-only"):
        getattr(log, table)[:] = 0


@pytest.mark.parametrize(
    "column",
    ["producer", "replaced_by", "read_counts", "first_read", "last_use", "released", "touched", "counted_flops"],
)
def test_what_a_trace_computes_is_read_only(column):
    with pytest.raises(ValueError, match="read-only"):
        getattr(chain(), column)[:] = 0


@pytest.mark.parametrize("rows", ["distinct_reads", "all_writes"])
def test_rows_of_a_trace_are_read_only(rows):
    with pytest.raises(TypeError, match="does not support item assignment"):
        getattr(chain(), rows)[0] = ()


@pytest.mark.parametrize("column", ["engine", "fixed", "bytes", "rate", "total"])
def test_times_that_all_share_are_read_only(column):
    with pytest.raises(ValueError, match="read-only"):
        getattr(op_times(chain(), machine()), column)[:] = 0


@dataclass(frozen=True, kw_only=True)
class Lies(Rewrites):
    """Says that unlimited memory makes its ops cheaper, so that it may be as fast."""

    def plan(self, problem: Problem) -> Plan:
        free = np.zeros_like(problem.trace.op_columns.duration)
        return Plan(with_columns(problem.trace, duration=free))

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        return {"free": self.plan(problem)}


def test_what_unlimited_memory_allows_is_held_to_the_costs_too():
    assert broken(run_policy(Lies(), priced(), machine())) == {"unlimited"}


def batch_of_eight() -> Trace:
    b = TraceBuilder({"batch": 8})
    x, w, y = b.tensor("x", 80, "input", shape=(8, 10)), b.tensor("w", 30, "weight"), b.tensor("y", 80, shape=(8, 10))
    b.op("f", "matmul", reads=[x, w], writes=[y], flops=801, dtype="fp32", workspace=10, splits=("batch",))
    return b.build(outputs=[y], carry=())


def test_microbatches_add_up_to_the_op():
    trace = batch_of_eight()
    split = split_batch(trace, 4)
    parts = [op.id for op in split.ops if ".mb" in op.name]
    assert len(parts) == 4

    def run(**columns):
        return replayed(Rewrites(), Plan(with_columns(split, **columns)), trace, machine_with_launch())

    assert broken(run(), COSTS) == set()
    for key in ("flops", "bytes", "workspace"):
        column = getattr(split.op_columns, key).copy()
        column[parts[1]] = (split.touched[parts[1]] if key == "bytes" else column[parts[1]]) // 2
        assert broken(run(**{key: column}), COSTS) == {"costs"}
    less = split.op_columns.flops.copy()
    less[parts[0]] -= 1
    assert broken(run(flops=less), COSTS) == {"costs"}


def test_a_policy_that_splits_the_batch_says_so():
    laws = ("capacity", "values", "ops", "order", "tiling", "outcome")

    @dataclass(frozen=True, kw_only=True)
    class Whole(Rewrites):
        splits_batch = False

    trace, split = batch_of_eight(), split_batch(batch_of_eight(), 4)
    assert broken(replayed(Rewrites(), Plan(split), trace, machine_with_launch()), laws) == set()
    assert broken(replayed(Whole(), Plan(split), trace, machine_with_launch()), laws) == {"ops"}
    for workload in (trace, split):  # a workload may have microbatches of its own
        assert broken(replayed(Whole(), Plan(workload), workload, machine_with_launch()), laws) == set()


def updates() -> Trace:
    """A kernel that updates two weights, one with twice the elements."""
    b = TraceBuilder()
    names = {"v": 40, "w": 80}
    old = [b.tensor(name, size, "weight") for name, size in names.items()]
    grads = [b.tensor(f"{name}.grad", size, "gradient") for name, size in names.items()]
    b.op("f", writes=grads, duration=10)
    new = [b.tensor(f"{name}.new", b.bytes_of(t), "weight", replaces=t) for name, t in zip(names, old, strict=True)]
    reads = [t for pair in zip(old, grads, strict=True) for t in pair]
    b.op("step", "optimizer", phase="update", reads=reads, writes=new, flops=301, workspace=9, dtype="fp32")
    return b.build(outputs=new, carry=zip(new, old, strict=True))


def test_updates_of_single_parameters_add_up_to_that_of_all():
    trace = updates()
    apart = split_updates(trace, lambda slot: int(slot.parameter == "w"))
    assert [op.name for op in apart.ops] == ["f", "step.0", "step.1"]

    def run(**columns: np.ndarray) -> Replayed:
        return replayed(Rewrites(), Plan(with_columns(apart, **columns)), trace, machine_with_launch())

    assert broken(run(), COSTS) == set()
    for key, less in (("flops", 2), ("bytes", 20), ("workspace", 1)):
        column = (apart.touched if key == "bytes" else getattr(apart.op_columns, key)).copy()
        column[1] -= less
        assert broken(run(**{key: column}), COSTS) == {"costs"}, key


def batch_with_a_choice(**measured) -> Trace:
    b = TraceBuilder({"batch": 8})
    x, w, y = b.tensor("x", 80, "input", shape=(8, 10)), b.tensor("w", 30, "weight"), b.tensor("y", 80, shape=(8, 10))
    more = {"workspace": 10, "alternatives": [Implementation("fast", 0.3, 50), Implementation("lean", 1.7, 0)]}
    b.op("f", "conv", reads=[x, w], writes=[y], flops=801, dtype="fp32", splits=("batch",), **more, **measured)
    return b.build(outputs=[y], carry=())


@pytest.mark.parametrize("name", ["fast", "lean"])
@pytest.mark.parametrize("measured", [{}, {"duration": 1003}])
def test_microbatches_may_take_an_implementation_that_the_trace_states_each_its_own(name, measured):
    trace = batch_with_a_choice(**measured)
    after = choose_implementation(split_batch(trace, 4), {"f.mb1": name, "f.mb2": "fast"})
    before = split_batch(choose_implementation(trace, {"f": name}), 4)
    for split in (after, before):
        assert broken(replayed(Chooses(), Plan(split), trace, machine_with_launch()), COSTS) == set()
        assert broken(replayed(Rewrites(), Plan(split), trace, machine_with_launch()), COSTS) == {"costs"}
        part = split.op_id("f.mb1")
        for key in ("flops", "bytes", "workspace", "duration"):
            column = getattr(split.op_columns, key).copy()
            # half of what it may be, which is none of the implementations
            column[part] = (split.touched[part] if key == "bytes" else column[part]) // 2
            if (key == "workspace" and not split.op_columns.workspace[part]) or column[part] < 0:
                continue
            run = replayed(Chooses(), Plan(with_columns(split, **{key: column})), trace, machine_with_launch())
            assert broken(run, COSTS) == {"costs"}, key


def test_microbatches_of_one_implementation_may_not_leave_out_a_flop():
    trace = batch_with_a_choice()
    split = choose_implementation(split_batch(trace, 4), {f"f.mb{k}": "fast" for k in range(4)})
    flops = split.op_columns.flops.copy()
    flops[[op.id for op in split.ops if op.name.startswith("f.mb")]] -= 1
    run = replayed(Chooses(), Plan(with_columns(split, flops=flops)), trace, machine_with_launch())
    assert broken(run, COSTS) == {"costs"}


def held_until_d() -> Trace:
    """The chain, whose program holds what `b` makes until `d` ends; `c` reads it last."""
    return with_releases(chain(), [(2, 3)])


@dataclass(frozen=True, kw_only=True)
class Releases(Rewrites):
    saves: ClassVar[Mapping[str, str]] = {"release": "at the last reader"}


def test_what_the_program_holds_is_held_in_a_rewritten_trace_unless_declared():
    trace = held_until_d()
    bare, kept = Plan(with_columns(trace, releases={})), Plan(same(trace))
    assert kept.trace.released[2] == 3
    assert broken(replayed(Rewrites(), kept, trace, machine()), COSTS) == set()
    assert broken(replayed(Rewrites(), bare, trace, machine()), COSTS) == {"costs"}
    assert broken(replayed(Releases(), bare, trace, machine()), COSTS) == set()
    earlier = Plan(with_columns(trace, releases={2: (2,)}))
    assert broken(replayed(Rewrites(), earlier, trace, machine()), COSTS) == {"costs"}
    later = Plan(with_columns(trace, releases={4: (2,)}))
    assert broken(replayed(Rewrites(), later, trace, machine()), COSTS) == set()


def test_in_another_order_it_is_held_until_the_same_op():
    b = TraceBuilder()
    x, y, z, u, v = b.tensor("x", 1, "input"), b.tensor("y", 9), b.tensor("z", 1), b.tensor("u", 1), b.tensor("v", 1)
    b.op("f", reads=[x], writes=[y], duration=10)
    b.op("g", reads=[y], writes=[z], duration=10)
    b.op("h", reads=[x], writes=[u], duration=10)
    b.op("i", reads=[x], writes=[v], duration=10)
    trace = with_releases(b.build(outputs=[z, u, v], carry=()), [(y, 2)])  # y, until h
    early, late = reorder(trace, [2, 0, 1, 3]), reorder(trace, [0, 1, 3, 2])
    assert [int(each.released[y]) for each in (early, late)] == [-1, 3]
    for each in (early, late):
        assert broken(replayed(Rewrites(), Plan(each), trace, machine()), COSTS) == set()
    bare = with_columns(late, releases={})
    assert broken(replayed(Rewrites(), Plan(bare), trace, machine()), COSTS) == {"costs"}


def test_halves_of_what_is_held_are_held_too():
    trace = held_until_d()
    halves = split_tensors(trace, {"b.y": 2}, ops=[])
    assert broken(replayed(Rewrites(), Plan(halves), trace, machine()), COSTS) == set()
    assert halves.op_columns.releases
    bare = with_columns(halves, releases={})
    assert broken(replayed(Rewrites(), Plan(bare), trace, machine()), COSTS) == {"costs"}


def test_what_is_held_is_held_by_another_name_too():
    trace = held_until_d()
    new = Rewriter(trace)
    ids = new.all_tensors()
    again = new.tensor(trace.tensors[2], name="again", replaces=ids[2])
    for op in trace.ops:
        new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
        if op.name == "c":  # the last reader of what the program holds until d
            new.glue("rename", "copy", [ids[2]], [again], duration=0)
    renamed = new.build(outputs=[ids[t] for t in trace.outputs], carry=())
    assert renamed.released[again] == renamed.op_id("d")
    assert broken(replayed(Rewrites(), Plan(renamed), trace, machine()), COSTS) == set()
    bare = with_columns(renamed, releases={})
    assert broken(replayed(Rewrites(), Plan(bare), trace, machine()), COSTS) == {"costs"}


def test_a_collective_keeps_its_ranks():
    b = TraceBuilder()
    x, y = b.tensor("x", 40, "gradient"), b.tensor("y", 40, "gradient")
    b.op("f", writes=[x], duration=10)
    b.op("sum", "collective", reads=[x], writes=[y], group="all", ring=Ring("data", 4, 2))
    trace = b.build(outputs=[y], carry=())
    for ring, ok in ((Ring("data", 4, 2), True), (Ring("data", 4, 1), False), (Ring("data", 2, 2), False)):
        plan = Plan(with_columns(trace, ring={1: ring}, priority=trace.op_columns.priority + 1))
        text = breaks(check_costs, Replayed(Rewrites(), trace, machine(), plan=plan))
        assert text.startswith("op 'sum' is among other ranks") != ok, text


def test_an_unknown_saving_breaks_costs():
    @dataclass(frozen=True, kw_only=True)
    class Magic(Rewrites):
        @property
        def saves(self) -> Mapping[str, str]:  # what a class says outright is refused where it is defined
            return {"magic": "it just is"}

    assert broken(rewritten(priced(), Magic()), COSTS) == {"costs"}


# ---- policies that leave the program -----------------------------------------------------------


class Escape(BaseException):
    """No `Exception`: it passes every `except Exception`."""


class Leaves(Online):
    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        raise SystemExit(0)


@dataclass(frozen=True, kw_only=True)
class Exits(Honest):
    how: str = "exit"

    def plan(self, problem: Problem) -> Plan:
        if self.how == "online":
            return Plan(problem.trace, online=Leaves)
        if self.how == "exit":
            sys.exit(0)
        raise Escape("out")


@pytest.mark.parametrize("how", ["exit", "escape", "online"])
def test_a_policy_that_leaves_the_program_breaks_outcome_and_is_a_row(how):
    assert "outcome" in broken(run_policy(Exits(how=how), chain(), machine()), CHECKS)
    with pytest.raises(PolicyFailed, match=r"SystemExit|Escape"):
        simulate(chain(), machine(), Exits(how=how))
    (row,) = compare(chain(), machine(), [Exits(how=how)]).rows
    assert row["fits"] is None
    assert "Exit" in row["error"] or "Escape" in row["error"]


def test_control_c_is_the_persons():
    @dataclass(frozen=True, kw_only=True)
    class Interrupted(Honest):
        def plan(self, problem: Problem) -> Plan:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(chain(), machine(), Interrupted())
