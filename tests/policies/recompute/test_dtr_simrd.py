"""Logs of the prototype's format, imported and run, beside a replay of the log itself that shares no code with us.

The replay tells what the authors' simulator does. Two differences are meant, and are all there are: what an import
makes of a log (`as_imported`), and what the policy's docstring says under "Departs" (the replay's `hold` and `fresh`).
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import pytest

from sim.errors import OutOfMemory
from sim.eviction import ranking
from sim.eviction.evictable import Kin, lineage_of
from sim.eviction.evictor import Evictor
from sim.eviction.neighbourhood import Neighbourhood
from sim.log import WHY
from sim.policies.recompute import dtr
from sim.trace import Trace
from tests.policies.recompute.dtr_runs import Story, run
from tests.policies.recompute.simrd_logs import Row, as_imported, log_of, random_log
from tests.policies.recompute.simrd_replay import Replay
from tests.policies.recompute.test_dtr_reference import both
from workloads.importers.dtr import read_dtr

HEURISTICS = ("dtr", "dtr_eq", "local", "lru", "size", "msps")
RUNS = [(d, h, "own") for d in ("eager", "ignore") for h in HEURISTICS]
RUNS += [("banish", h, "own") for h in ("local", "lru", "size")] + [("banish", "dtr", "neighbourhood")]
"""What the authors' runtimes can be run with."""


def logs(first: int, last: int, *, repeat: bool = True) -> list[list[Row]]:
    """Every second one without views, and every second of these and of those with few sizes and times."""
    return [
        random_log(Random(seed), 22, views=bool(seed % 2), most=90 if seed % 4 < 2 else 3, repeat=repeat)
        for seed in range(first, last)
    ]


def dense(first: int, last: int, *, repeat: bool = True) -> list[list[Row]]:
    """Logs with many views that are evicted and read later."""
    draws = [(Random(seed), 90 if seed % 2 else 3) for seed in range(first, last)]
    return [random_log(draw, 26, most=most, repeat=repeat, dense=True) for draw, most in draws]


def imported(rows: list[Row], folder: Path, **how) -> Trace:
    """The trace that an import makes of a log."""
    (folder / "log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_dtr(folder / "log", **how)


def play(trace, budget: int, **parameters) -> tuple[Story, list[tuple[int, int]], int] | None:
    """Our run, its evictions as (op, result), and the time of all recomputation, that of outputs at the end too."""
    try:
        story = run(trace, budget, **parameters)
    except OutOfMemory:
        return None
    log = story.log
    took = (log.interval("end") - log.interval("start"))[log.interval("why") == WHY["recompute"]]
    named = {t: (i, place) for i, op in enumerate(trace.ops) for place, t in enumerate(op.writes)}
    return story, [named[t] for t in story.dropped if t not in trace.view_of], int(took.sum())


def differences(
    rows: list[Row], folder: Path, deallocation: str, heuristic: str, staleness: str, fault: dict | None = None
) -> Counter[str]:
    """Over memory ratios: runs equal to the authors' rules to the end, up to the first departure, or not at all.

    fault: what our side is told otherwise.
    """
    ours = dict(fault or {})
    trace, rows = imported(rows, folder, hold=ours.pop("hold", True)), as_imported(rows)
    peak = Replay(1 << 50, deallocation=deallocation).run(rows).peak
    found: Counter[str] = Counter()
    for percent in (50, 70, 85):
        budget = peak * percent // 100
        replay = partial(Replay, budget, heuristic, deallocation, around=staleness == "neighbourhood")
        held, theirs = replay(hold=True, fresh=True).run(rows), replay().run(rows)
        parameters = {"heuristic": heuristic, "deallocation": deallocation, "staleness": staleness} | ours
        mine = play(trace, budget, **parameters)
        if mine is None or held.closing < 0:
            found["too little memory" if mine is None and held.closing < 0 else "different"] += 1
            continue
        story, evicted, again = mine
        same = evicted == held.evicted[: held.closing] and story.ran == held.ran[: held.closed]
        if story.log.complete and not held.full:
            same = same and again == held.again and sum(op.duration for op in trace.ops) == held.once
        until = min(theirs.departs, len(theirs.evicted) if theirs.closing < 0 else theirs.closing)
        same = same and evicted[:until] == theirs.evicted[:until]
        if theirs.departs >= len(theirs.evicted) and not theirs.full and story.log.complete:
            same = same and again == theirs.again
            found["to the end"] += same
        found["recomputes"] += bool(again)
        found["same" if same else "different"] += 1
    return found


@pytest.mark.parametrize(("deallocation", "heuristic", "staleness"), RUNS)
def test_runs_as_the_authors_rules_say(deallocation, heuristic, staleness, tmp_path):
    found: Counter[str] = Counter()
    for rows in (*logs(0, 10, repeat=deallocation != "banish"), *dense(0, 4, repeat=deallocation != "banish")):
        found += differences(rows, tmp_path, deallocation, heuristic, staleness)
    assert not found["different"], found
    assert found["recomputes"] > 0
    assert found["to the end"] > 3


RARE = [
    (11, "ignore", "local", "of scores of 0 the first goes"),
    (13, "banish", "local", "what is banished and comes back may be evicted again"),
    (27, "banish", "local", "what came back so and is evicted again counts as evicted to what it was made from"),
    (88, "banish", "local", "what stays since something under it was banished is looked at again when it is read"),
    (99, "eager", "size", "what an op that makes a view reads comes back in the order of its arguments"),
    (33, "banish", "dtr", "an evicted view keeps what its op reads, but not once its storage is banished"),
    (83, "ignore", "dtr", "a view's other arguments are neighbours of its storage"),
    (17, "ignore", "dtr", "outputs come back in the order of the log's names"),
]
"""Logs that show rules which few do."""


@pytest.mark.parametrize(("seed", "deallocation", "heuristic", "rule"), RARE)
def test_rare_rules_are_the_authors(seed, deallocation, heuristic, rule, tmp_path):
    (rows,) = logs(seed, seed + 1, repeat=deallocation != "banish")
    staleness = "neighbourhood" if (deallocation, heuristic) == ("banish", "dtr") else "own"
    assert not differences(rows, tmp_path, deallocation, heuristic, staleness)["different"], rule


@pytest.mark.slow
@pytest.mark.parametrize(("deallocation", "heuristic", "staleness"), RUNS)
def test_more_runs_as_the_authors_rules_say(deallocation, heuristic, staleness, tmp_path):
    for rows in (*logs(6, 60, repeat=deallocation != "banish"), *dense(4, 40, repeat=deallocation != "banish")):
        assert not differences(rows, tmp_path, deallocation, heuristic, staleness)["different"]


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("deallocation", ["eager", "ignore"])
def test_logs_without_views_run_as_in_the_twin_of_traces(heuristic, deallocation, tmp_path):
    """The other reference model, which knows traces and no logs, sees the same runs."""
    pressed = held = 0
    for seed in range(10):
        rows = random_log(Random(seed), 24, views=False)
        trace = imported(rows, tmp_path)
        held += int((trace.released > trace.last_use).sum())
        peak = run(trace, 1 << 50).peak
        for percent in (30, 50, 70, 90):
            story, twin = both(trace, peak * percent // 100, heuristic, "own", True, deallocation, "last")
            if story is None:
                continue
            assert twin is not None
            assert story.ran == twin.ran
            assert story.dropped == twin.evicted
            pressed += bool(story.recomputed)
    assert pressed > 3
    assert held > 20


@pytest.mark.parametrize("deallocation", ["eager", "ignore", "banish"])
def test_peak_without_pressure_is_the_authors(deallocation, tmp_path):
    for rows in logs(0, 4, repeat=False):
        story = run(imported(rows, tmp_path), 1 << 50, deallocation=deallocation)
        assert story.peak == Replay(1 << 50, deallocation=deallocation).run(as_imported(rows)).peak


def test_a_view_is_an_op_of_its_own_that_is_recomputed_when_it_is_read(tmp_path):
    """x is evicted with its view v; who reads v then needs x's producer and v's, who reads x needs x's alone."""
    calls = ("x 40 = f w", "v x = f x", "y 40 = f w", "z 40 = f y", "release y", "release z", "r 1 = f x", "q 1 = f v")
    trace = imported(log_of("w 1 = constant", *calls), tmp_path)
    assert [op.views for op in trace.ops] == [(), (0,), (), (), (), ()]
    assert run(trace, 90, heuristic="lru").ran[-4:] == [(0, True), (4, False), (1, True), (5, False)]


READ_AFTER_RELEASE = log_of(
    "w 1 = constant",
    *("a 10 = f w", "c 10 = f a", "d 10 = f a", "b 10 = f a", "p 10 = f w", "q 10 = f w", "release a"),
    *("r 1 = f c", "s 10 = f w", "t 1 = f s"),
)
"""c and d go for q and r; c comes back by a, which d keeps from being banished; then a or b goes for s."""


def test_banishing_a_read_of_what_was_released_is_no_access(tmp_path):
    story = run(imported(READ_AFTER_RELEASE, tmp_path), 57, heuristic="lru", deallocation="banish")
    assert story.names == ["c", "d", "a"]  # a and b were last read by the program when b was made, and b is younger
    replay = Replay(57, "lru", "banish").run(READ_AFTER_RELEASE)
    assert replay.evicted[: replay.closing] == [(1, 0), (2, 0), (0, 0)]


# ---- planted faults ----------------------------------------------------------------------------------


def caught(tmp_path: Path, heuristic_of_both: str = "dtr", **ours: object) -> int:
    rules = ("eager", heuristic_of_both, "own")
    return sum(differences(rows, tmp_path, *rules, ours)["different"] for rows in (*logs(0, 8), *dense(0, 4)))


def test_no_fault_is_not_caught(tmp_path):
    assert not caught(tmp_path)


@pytest.mark.parametrize(
    "fault", [{"ties": "first"}, {"hold": False}, {"heuristic": "msps"}, {"deallocation": "ignore"}]
)
def test_another_rule_is_caught(fault, tmp_path):
    assert caught(tmp_path, **fault)


def test_neighbourhood_in_one_direction_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "Neighbourhood", lambda *a, **_: Neighbourhood(*a, children=False))
    assert caught(tmp_path)


def test_access_that_forgets_reads_is_caught(tmp_path, monkeypatch):
    notice_all = Evictor.notice_all

    def forgetful(self, changes):
        for change in changes:
            what, tensor, *_ = change
            before = self.table.access[tensor]
            notice_all(self, (change,))
            if what == "read":
                self.table.access[tensor] = before

    monkeypatch.setattr(Evictor, "notice_all", forgetful)
    assert caught(tmp_path)


def test_a_read_of_what_was_released_that_counts_as_access_is_caught(tmp_path, monkeypatch):
    notice_all = Evictor.notice_all

    def eager(self, changes):
        for change in changes:
            what, tensor, _, now = change
            notice_all(self, (change,))
            if what == "read":
                self.table.access[tensor] = now

    monkeypatch.setattr(Evictor, "notice_all", eager)
    story = run(imported(READ_AFTER_RELEASE, tmp_path), 57, heuristic="lru", deallocation="banish")
    assert story.names == ["c", "d", "b"]


def test_views_that_stay_defined_when_their_storage_goes_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(Evictor, "_drop_views", lambda *_: [])
    assert caught(tmp_path)


def test_tensors_without_bytes_that_stay_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(dtr, "lineage_of", lambda problem, evicts, empty: lineage_of(problem, evicts))
    assert caught(tmp_path, "lru")


def test_views_that_cost_nothing_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(Kin, "add_views", lambda *_: ())
    assert caught(tmp_path)
