"""The law is trusted because it has failed: each fault planted here is caught by the law named beside it."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from sim.conformance import CHECKS, LawBroken, Replayed, check_policy, run_policy
from sim.hardware.platform import Engine, Link, Member, Platform, Pool, Tier
from sim.log import CAUSE, CHANGE_COLUMNS, INTERVAL_COLUMNS, WHY
from sim.plan import Drop, Move, Online, Plan, Recompute, Wait
from sim.policies import load
from sim.policies.base import Policy
from sim.trace import Trace, TraceBuilder
from sim.trace.rewrite import Codec, encode

GB = 10**9


def machine(capacity: int = 10**6) -> Platform:
    tiers = (Tier("hbm", capacity, capacity, 100 * GB, device=0), Tier("host", 10**7, 10**7, 10 * GB))
    engines = (
        Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**12}),
        Engine("cpu", -1, "host", ("host",), {"fp32": GB}, main=False),
    )
    links = (Link("d2h", "hbm", "host", GB), Link("h2d", "host", "hbm", GB))
    pool = Pool("dram", (Member("d2h"), Member("h2d")), GB)
    return Platform("faults", tiers, engines, links, (pool,))


def network(layers: int = 6, size: int = 1000, ns: int = 500) -> Trace:
    """A chain of layers with weights, its backward and an update in place."""
    b = TraceBuilder({"batch": 1, "samples": 1})
    weights = [b.tensor(f"w{i}", size, "weight", layer=i) for i in range(layers)]
    made = [b.tensor("x", size, "input")]
    for i in range(layers):
        made.append(b.tensor(f"y{i}", size, layer=i))
        b.op(f"f{i}", "matmul", reads=[made[-2], weights[i]], writes=made[-1:], layer=i, duration=ns)
    gradient = b.tensor("g", size, "temporary")
    b.op("loss", "loss", reads=made[-1:], writes=[gradient], duration=ns)
    grads = []
    for i in reversed(range(layers)):
        reads = [gradient, made[i], weights[i]]
        gradient, grad = (
            b.tensor(f"g{i}", size, "temporary", layer=i),
            b.tensor(f"w{i}.grad", size, "gradient", layer=i),
        )
        writes = [gradient, grad] if i else [grad]
        b.op(f"b{i}", "matmul", reads=reads, writes=writes, layer=i, duration=2 * ns, phase="backward")
        grads.append((i, grad))
    for i, grad in grads:
        new = b.tensor(f"w{i}.new", size, "weight", layer=i, replaces=weights[i])
        b.op(f"step{i}", "optimizer", reads=[weights[i], grad], writes=[new], duration=ns, phase="update")
    return b.build()


def broken_laws(run: Replayed) -> set[str]:
    """The laws that this run does not keep."""
    found = set()
    for name, check in CHECKS.items():
        try:
            check(run)
        except LawBroken:
            found.add(name)
    return found


# ---- policies that are wrong on purpose ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MovesUnsaid(Policy):
    """Moves, and does not declare it."""

    def plan(self, problem):
        return Plan(problem.trace, (Move("y1", "host", after="f2"), Move("y1", "hbm", before="b3")))


@dataclass(frozen=True, kw_only=True)
class RecomputesUnsaid(Policy):
    """Recomputes, and does not declare it."""

    def plan(self, problem):
        return Plan(problem.trace, (Drop("y1", after="f2"), Recompute("f1", before="b2")))


@dataclass(frozen=True, kw_only=True)
class MovesWeights(Policy):
    """Moves weights, and manages activations only."""

    moves = True

    def plan(self, problem):
        return Plan(problem.trace, (Move("w1", "host", after="f1"), Move("w1", "hbm", before="b2")))


@dataclass(frozen=True, kw_only=True)
class LossyUnsaid(Policy):
    """Keeps an activation in fewer bytes that do not hold it all, and says that nothing is lost."""

    rewrites = True

    def plan(self, problem):
        codec = Codec("half", 0.5, lossless=False)
        return Plan(encode(problem.trace, {problem.trace.tensor_id("y1"): codec}))


@dataclass(frozen=True, kw_only=True)
class StaleUnsaid(Policy):
    """Updates with the gradients of the iteration before, and says that nothing is lost."""

    rewrites = True
    moves = True
    manages = ("gradients", "optimizer_state", "weights")

    def plan(self, problem):
        return load("zero_offload", delayed=True).plan(problem)


@dataclass(frozen=True, kw_only=True)
class Belady(Policy):
    """Evicts what is read last, which an online policy cannot know."""

    online = True
    moves = True

    def plan(self, problem):
        return Plan(problem.trace, online=lambda: _ReadsTheFuture(problem.trace))


class _ReadsTheFuture(Online):
    def __init__(self, trace):
        self._trace = trace

    def on_pressure(self, need, memory):
        last = self._trace.last_use
        here = [
            t
            for t in memory.residents("hbm")
            if self._trace.tensors[t].role == "activation" and not memory.is_locked(t) and memory.in_flight(t) is None
        ]
        return [Move(max(here, key=lambda t: (last[t], t)), "host")] if here else []


@dataclass(frozen=True, kw_only=True)
class Whimsical(Policy):
    """Decides by the global random state."""

    moves = True

    def plan(self, problem):
        victim = f"y{random.randrange(4)}"
        return Plan(problem.trace, (Move(victim, "host", after="f5"), Move(victim, "hbm", before="b5")))


@dataclass(frozen=True, kw_only=True)
class BoastsOfOptimum(Policy):
    """Waits for a needless copy where memory is ample, and claims to be optimal."""

    optimal = True
    moves = True

    def plan(self, problem):
        if problem.budget < 30_000:
            return Plan(problem.trace)
        return Plan(problem.trace, (Move("y1", "host", keep=True, after="f1"), Wait("y1", after="f1")))


@dataclass(frozen=True, kw_only=True)
class Crashes(Policy):
    """Raises what is no answer."""

    def plan(self, problem):
        raise KeyError("oops")


@dataclass(frozen=True, kw_only=True)
class ClaimsOnline(Policy):
    """Says that it decides while running, and does not."""

    online = True

    def plan(self, problem):
        return Plan(problem.trace)


POLICIES = {
    "moves, and does not say so": (MovesUnsaid(), "ops", None),
    "recomputes, and does not say so": (RecomputesUnsaid(), "ops", None),
    "moves what it does not manage": (MovesWeights(), "ops", None),
    "loses bits, and does not say so": (LossyUnsaid(), "values", None),
    "uses stale gradients, and does not say so": (StaleUnsaid(), "values", None),
    "knows the future": (Belady(), "online", 14_000),
    "uses the global random state": (Whimsical(), "repeats", None),
    "claims to be optimal": (BoastsOfOptimum(), "optimal", 29_000),
    "crashes": (Crashes(), "outcome", None),
    "claims to be online": (ClaimsOnline(), "online", None),
}


@pytest.mark.parametrize("fault", POLICIES)
def test_a_policy_that(fault):
    policy, law, budget = POLICIES[fault]
    platform = machine() if budget is None else machine().with_budget(budget)
    random.seed(1)
    assert law in broken_laws(run_policy(policy, network(), platform))


def test_an_honest_policy_breaks_none():
    for name in ("keep_all", "full_recompute", "swap_all", "dtr", "lru_tiering"):
        for budget in (10**6, 20_000):
            run = run_policy(load(name), network(), machine().with_budget(budget))
            assert broken_laws(run) == set(), name


# ---- logs that are wrong on purpose --------------------------------------------------------------


def honest(name: str = "swap_all") -> Replayed:
    run = run_policy(load(name), network(), machine())
    assert run.done
    return run


def with_rows(run: Replayed, intervals=None, changes=None, **more) -> Replayed:
    log = run.log
    intervals = log.intervals if intervals is None else intervals
    changes = log.changes if changes is None else changes
    return replace(run, log=replace(log, intervals=intervals, changes=changes, **more))


def column(name: str) -> int:
    return INTERVAL_COLUMNS.index(name) if name in INTERVAL_COLUMNS else CHANGE_COLUMNS.index(name)


def pick(run: Replayed, why: str, n: int = 0) -> int:
    """The n-th interval of a kind."""
    return int(np.flatnonzero(run.log.interval("why") == WHY[why])[n])


def one_byte_over(run):
    tight = max(int(np.cumsum(run.log.changes[run.log.changes[:, 1] == 0, 2]).max()) - 1, 0)
    tiers = tuple(replace(t, capacity=tight) if t.name == "hbm" else t for t in run.platform.tiers)
    platform = replace(run.platform, tiers=tiers)
    return replace(with_rows(run, platform=platform), platform=platform)


def leaks(run):
    freed = np.flatnonzero(run.log.change("cause") == CAUSE["freed"])
    return with_rows(run, changes=np.delete(run.log.changes, freed[3], axis=0))


def frees_twice(run):
    freed = np.flatnonzero(run.log.change("cause") == CAUSE["freed"])
    row = run.log.changes[freed[3]]
    return with_rows(run, changes=np.insert(run.log.changes, freed[3] + 1, row, axis=0))


def frees_too_early(run):
    """y2 goes as soon as it is made, though later ops read it."""
    rows = run.log.changes.copy()
    y2 = run.trace.tensor_id("y2")
    here = np.flatnonzero((rows[:, 3] == y2) & (rows[:, 1] == 0))
    made, gone = here[0], here[1]
    row = rows[gone].copy()
    row[0] = rows[made, 0] + 500
    rows = np.delete(rows, gone, axis=0)
    return with_rows(run, changes=np.insert(rows, np.searchsorted(rows[:, 0], row[0], "left"), row, axis=0))


def skips_an_op(run):
    return with_rows(run, intervals=np.delete(run.log.intervals, pick(run, "run", 2), axis=0))


def runs_an_op_twice(run):
    i = pick(run, "run", 2)
    row = run.log.intervals[i].copy()
    return with_rows(run, intervals=np.insert(run.log.intervals, i, row, axis=0))


def double_books_an_engine(run):
    rows = run.log.intervals.copy()
    rows[pick(run, "run", 3), 0] -= 200
    return with_rows(run, intervals=rows)


def starts_before_its_reads_are_there(run):
    rows = run.log.intervals.copy()
    first, second = pick(run, "run", 2), pick(run, "run", 3)
    rows[[first, second], 5] = rows[[second, first], 5]
    return with_rows(run, intervals=rows)


def copies_faster_than_its_link(run):
    rows = run.log.intervals.copy()
    i = pick(run, "move")
    rows[i, 0] = rows[i, 1] - 1
    return with_rows(run, intervals=rows)


def ignores_a_pool(run):
    """A copy up beside a copy down at full rate, though the pool holds one of them."""
    rows = run.log.intervals.copy()
    down = rows[pick(run, "move")].copy()
    down[column("lane")] += 1
    return with_rows(run, intervals=np.vstack([rows, down]))


def moves_two_at_once_on_one_link(run):
    rows = run.log.intervals
    return with_rows(run, intervals=np.vstack([rows, rows[pick(run, "move")]]))


def loses_time(run):
    rows = run.log.intervals.copy()
    rows[pick(run, "run", 3), 1] -= 100
    return with_rows(run, intervals=rows)


def leaves_a_weight_elsewhere(run):
    """The new w0 is said to be made on the host."""
    rows = run.log.changes.copy()
    w0 = run.trace.tensor_id("w0.new")
    rows[rows[:, 3] == w0, 1] = 1
    return with_rows(run, changes=rows)


LOGS = {
    one_byte_over: "capacity",
    leaks: "capacity",
    frees_twice: "capacity",
    frees_too_early: "order",
    skips_an_op: "ops",
    runs_an_op_twice: "ops",
    double_books_an_engine: "order",
    starts_before_its_reads_are_there: "order",
    copies_faster_than_its_link: "order",
    ignores_a_pool: "order",
    moves_two_at_once_on_one_link: "order",
    loses_time: "tiling",
    leaves_a_weight_elsewhere: "carried",
}


@pytest.mark.parametrize("fault", LOGS, ids=lambda fault: fault.__name__)
def test_a_log_that(fault):
    run = honest()
    assert broken_laws(run) == set()
    assert LOGS[fault] in broken_laws(fault(run))


# ---- the suite -----------------------------------------------------------------------------------


def test_a_failing_law_leaves_a_trace_that_can_be_run_again(tmp_path, monkeypatch):
    from sim.trace.io import load as load_trace

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(
        "from dataclasses import dataclass\n"
        "from sim import Move, Plan, Policy\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Bad(Policy):\n"
        "    needs = frozenset({'host'})\n"
        "    def plan(self, problem):\n"
        "        made = [t for t in problem.trace.tensors if problem.trace.producer[t.id] >= 0]\n"
        "        to, by = problem.platform.host.name, problem.trace.producer\n"
        "        acts = [Move(t.id, to, after=int(by[t.id])) for t in made]\n"
        "        return Plan(problem.trace, tuple(acts[:1]))\n"
    )
    report = check_policy(load("bad.py:Bad"), examples=30, name="bad.py:Bad")
    assert not report.passed
    assert "Law 3" in report.as_text()
    (path,) = tmp_path.glob("*.jsonl")
    assert len(load_trace(path).ops) <= 12
    assert str(path.name) in report.as_text()
