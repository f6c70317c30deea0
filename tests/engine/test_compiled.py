"""The engine and the evictors as C write the logs that they write as Python.

They take what a policy says in integers of NumPy, and classes of Python derive from them.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compiled import compiled_copy, modules
from sim import Plan, TraceBuilder, load_profile, simulate
from sim.analysis.peak_memory import home_peak
from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.eviction.evictable import CandidateSet, ScoreTable, lineage_of
from sim.eviction.evictor import Evictor, Rules
from sim.eviction.ranking import Ranking
from sim.eviction.replacement import LeastRecent, movable_results
from sim.experiment import problem_for, reference_run
from sim.log import EventLog
from sim.plan import Action, Change, Memory, Move, Need, Online, Problem
from sim.policies import load, names, policy_class
from sim.policies.base import Beside, Policy
from sim.trace.graph import Trace
from workloads import transformer, w1

SHARES = ("100%", "60%", "35%")
EVICTORS = ("director", "evictable", "evictor", "farthest", "neighbourhood", "ranking", "replacement")
ONLINE = ("recompute/test_dtr", "recompute/test_megtaichi", "offload/test_lru_tiering", "hybrid/test_delta")
"""Tests of policies whose online parts derive from evictors."""


def logs() -> dict[str, str]:
    """What comes of each shipped policy that plans quickly at some budgets: a hash of its log, or its refusal.

    Of those that decide during the run also with other parameters, and on an iteration with views and an optimizer.
    """
    trace, found = w1(4), {}
    for name in names():
        if load(name).solver:
            continue
        for share in SHARES:
            found[f"{name} {share}"] = outcome(trace, name, share)
    iteration = transformer("gpt2", batch=1, sequence=64, precision="amp_bf16")
    for name in names():
        if load(name).online and not load(name).solver:
            for policy in (load(name), *others(policy_class(name))):
                found[f"{policy} on an iteration"] = outcome(iteration, policy, "80%")
                found[f"{policy}"] = outcome(trace, policy, "60%")
    return found


def outcome(trace: Trace, policy: str | Policy, share: str) -> str:
    try:
        return simulate(trace, "a100_40_pcie", policy, budget=share).log.content_hash
    except TiersimError as error:
        return str(error)


def others(policy: type[Policy]) -> Iterable[Policy]:
    """The policy with another value of one parameter each."""
    for name, value in policy.said_of_parameters("other_values").items():
        beside = dict(value.others) if isinstance(value, Beside) else {}
        yield policy(**beside, **{name: value.value if isinstance(value, Beside) else value})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("there is no C compiler")
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs the extra `test`: there is no build")
    return compiled_copy(tmp_path_factory.mktemp("compiled"))


def python(compiled: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(compiled)}
    done = subprocess.run(
        [sys.executable, *words], cwd=compiled, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_engine_is_the_same_engine(compiled):
    where = python(compiled, "-c", "import sim.engine.event_path.run as run; print(run.__file__)")
    assert where.startswith(str(compiled))
    assert Path(where.strip()).suffix != ".py"
    assert "compiled" in python(compiled, "-m", "sim", "--version")
    assert {f"sim.eviction.{name}" for name in EVICTORS} <= {*modules(compiled)}
    printed = python(
        compiled, "-c", "import json; from tests.engine.test_compiled import logs; print(json.dumps(logs()))"
    )
    assert json.loads(printed.splitlines()[-1]) == logs()
    engine = ("test_reference", "test_random_plans", "test_timeline", "test_corner_cases", "test_regressions")
    tests = [f"tests/engine/{name}.py" for name in (*engine, "test_compiled")]
    tests += [f"tests/policies/{name}.py" for name in ONLINE]
    python(compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def in_numpy(action: Action) -> Action:
    numbers = {f.name: getattr(action, f.name) for f in fields(action)}
    changed = {name: np.int32(number) for name, number in numbers.items() if type(number) is int}
    changed |= {name: np.bool_(flag) for name, flag in numbers.items() if type(flag) is bool}
    return replace(action, **changed)


@pytest.mark.parametrize("policy", ["swap_all", "full_recompute"])
def test_a_plan_may_be_in_integers_of_numpy(policy):
    trace, platform = w1(4), load_profile("a100_80_sxm")
    plan = load(policy).plan(problem_for(trace, platform))
    assert any(type(getattr(action, "before", None)) is int for action in plan.actions)
    again = Plan(plan.trace, [in_numpy(action) for action in plan.actions], place=plan.place)
    assert replay(again, platform) == replay(plan, platform)


def asked(kind: type) -> tuple[EventLog, list[object]]:
    """A run whose online part asks about a tensor and moves it, with its numbers of this type; and what it was told."""
    trace, platform, seen = w1(4), load_profile("a100_80_sxm"), list[object]()

    class Asks(Online):
        def before(self, op: int, memory: Memory) -> list[Action]:
            tensor = kind(3)
            seen.append((memory.where(tensor), memory.in_flight(tensor), memory.is_locked(tensor)))
            seen.append((memory.last_read(tensor), next(memory.residents("hbm"), None)))
            if memory.where(tensor) == ("hbm",):
                seen.append(memory.neighbours(tensor, "hbm"))
            return [Move(tensor, "host", priority=kind(1))] if op == 40 else []

    return replay(Plan(trace, online=Asks), platform), seen


def test_an_online_part_may_ask_and_answer_in_integers_of_numpy():
    log, seen = asked(int)
    assert [lane for lane in log.events["lane"] if lane == "d2h"] == ["d2h"]
    assert asked(np.int32) == (log, seen)


# ---- classes of Python that derive from evictors -----------------------------------------------


class Newest(Evictor):
    """Drops the candidate that was produced last, and counts reads."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)
        self.reads = 0

    def notice(self, change: Change) -> None:
        super().notice(change)
        self.reads += change.what == "read"

    def choose(self, candidates: CandidateSet, tier: str, memory: Memory, barred: set[int]) -> int:
        return max((t for t in candidates.ids.tolist() if t not in barred), default=-1)


class Largest(LeastRecent):
    """Moves the largest residents first, of equals the newest."""

    def order(self, tier: str, now: int) -> Iterable[int]:
        return sorted(super().order(tier, now), key=lambda tensor: (self.size[tensor], tensor), reverse=True)


def newest(problem: Problem) -> Callable[[], Online]:
    tiers = tuple(tier.name for tier in problem.platform.tiers)
    return partial(Newest, lineage_of(problem), Rules(), tiers=tiers, evicts=[problem.home], seed=0)


def largest(problem: Problem) -> Callable[[], Online]:
    trace = problem.trace
    movable, size = movable_results(trace), trace.tensor_columns.bytes.tolist()
    return partial(Largest, chain=["host"], homes=[problem.home], movable=movable, size=size)


def run_of(make: Callable[[Problem], Callable[[], Online]]) -> tuple[Trace, EventLog, list[Online], list[set[int]]]:
    """A run at 60 %, its online parts, and what was resident at home before each question about space."""
    trace, platform = w1(4), load_profile("a100_80_sxm")
    limited = platform.with_budget(int(0.6 * home_peak(reference_run(trace, platform))))
    factory, parts, seen = make(problem_for(trace, limited)), list[Online](), list[set[int]]()

    class Watched(factory.func):
        def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
            seen.append({*memory.residents(need.tier)})
            return super().on_pressure(need, memory)

    def watched() -> Online:
        parts.append(Watched(*factory.args, **factory.keywords))
        return parts[-1]

    return trace, replay(Plan(trace, online=watched, keep_dead=make is newest), limited), parts, seen


def test_a_class_of_python_chooses_and_notices_for_an_evictor():
    trace, log, parts, _ = run_of(newest)
    part = parts[-1]  # the copy path may have handed over to another
    assert isinstance(part, Newest)
    assert isinstance(part, Evictor)
    assert isinstance(part, Online)
    rows = log.events
    ran = rows[rows["why"].isin(["run", "recompute"])]
    assert (rows["why"] == "recompute").any()
    ids = {name: i for i, name in enumerate(trace.op_columns.name)}
    assert part.reads == sum(len(trace.distinct_reads[ids[name]]) for name in ran["op"])


def test_a_class_of_python_orders_what_a_cache_moves():
    trace, log, _, seen = run_of(largest)
    moved = log.events[log.events["lane"] == "d2h"]["tensor"].tolist()
    ids = {name: i for i, name in enumerate(trace.tensor_columns.name)}
    size, movable = trace.tensor_columns.bytes, movable_results(trace)
    first = max((t for t in seen[0] if movable[t]), key=lambda tensor: (size[tensor], tensor))
    assert ids[moved[0]] == first


@pytest.mark.parametrize("make", [newest, largest])
def test_factories_of_evictors_are_pickled(make):
    trace, platform = w1(4), load_profile("a100_80_sxm")
    limited = platform.with_budget(int(0.6 * home_peak(reference_run(trace, platform))))
    factory = make(problem_for(trace, limited))
    again = pickle.loads(pickle.dumps(factory))
    logs = [replay(Plan(trace, online=online, keep_dead=make is newest), limited) for online in (factory, again)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("duplicate", [copy.copy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_cache_is_copied_and_pickled(duplicate):
    part = largest(problem_for(w1(4), load_profile("a100_80_sxm")))()
    part.notice(Change("came", part.movable.index(True), "hbm", 7))
    part.mark = 3
    again = duplicate(part)
    assert type(again) is Largest
    assert (again.used, again.mark) == (part.used, 3)
    assert part.used["hbm"][0]


def test_a_score_is_rounded_once():
    """Compiled, a quotient of integers above 2^53 would be one of two rounded floats."""
    top, bottom = 1, (1 << 53) + 1
    assert top / bottom != float(top) / float(bottom)
    b = TraceBuilder()
    b.op("f", reads=[], writes=[b.tensor("x", bottom)], duration=top)
    lineage = lineage_of(problem_for(b.build(outputs=[], carry=()), load_profile("a100_80_sxm")))
    ranking = Ranking(lineage, ScoreTable(lineage), None, by_size=True, staleness="none", ties="last")
    assert ranking.score(0, now=7) == top / bottom
