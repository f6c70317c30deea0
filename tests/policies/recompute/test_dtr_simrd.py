"""Logs of the prototype's format, imported and run, beside a replay of the log itself that shares no code with us.

The replay tells what the authors' simulator does. Two differences are meant, and are all there are: what an import
makes of a log (`folded`), and what the policy's docstring says under "Departs" (the replay's `hold` and `phantoms`).
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
from sim.eviction.evictor import Evictor
from sim.eviction.neighbourhood import Neighbourhood
from sim.log import WHY
from tests.policies.recompute.dtr_runs import Story, run
from tests.policies.recompute.simrd_logs import Row, folded, random_log
from tests.policies.recompute.simrd_replay import Replay
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


def play(trace, budget: int, **parameters) -> tuple[Story, list[tuple[int, int]], int] | None:
    """Our run, its evictions as (op, result), and the time of all recomputation, that of outputs at the end too."""
    try:
        story = run(trace, budget, **parameters)
    except OutOfMemory:
        return None
    log = story.log
    took = (log.interval("end") - log.interval("start"))[log.interval("why") == WHY["recompute"]]
    named = {t: (i, place) for i, op in enumerate(trace.ops) for place, t in enumerate(op.writes)}
    return story, [named[t] for t in story.dropped], int(took.sum())


def differences(
    rows: list[Row], path: Path, deallocation: str, heuristic: str, staleness: str, fault: dict | None = None
) -> Counter[str]:
    """Over memory ratios: runs equal to the authors' rules to the end, up to the first departure, or not at all.

    fault: what our side is told otherwise.
    """
    ours = dict(fault or {})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hold = ours.pop("hold", True)
    trace, rows = read_dtr(path, hold=hold), folded(rows)
    peak = Replay(1 << 50, deallocation=deallocation).run(rows).peak
    found: Counter[str] = Counter()
    for percent in (50, 70, 85):
        budget = peak * percent // 100
        replay = partial(Replay, budget, heuristic, deallocation, around=staleness == "neighbourhood")
        held, theirs = replay(hold=True, phantoms=False).run(rows), replay().run(rows)
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
    for rows in logs(0, 10, repeat=deallocation != "banish"):
        found += differences(rows, tmp_path / "log", deallocation, heuristic, staleness)
    assert not found["different"], found
    assert found["recomputes"] > 0
    assert found["to the end"] > 3


RARE = [
    (11, "ignore", "local", "of scores of 0 the first goes"),
    (13, "banish", "local", "what is banished and comes back may be evicted again"),
    (27, "banish", "local", "what came back so and is evicted again counts as evicted to what it was made from"),
    (17, "ignore", "dtr", "outputs come back in the order of the log's names"),
]
"""Logs that show rules which few do."""


@pytest.mark.parametrize(("seed", "deallocation", "heuristic", "rule"), RARE)
def test_rare_rules_are_the_authors(seed, deallocation, heuristic, rule, tmp_path):
    (rows,) = logs(seed, seed + 1, repeat=deallocation != "banish")
    assert not differences(rows, tmp_path / "log", deallocation, heuristic, "own")["different"], rule


@pytest.mark.slow
@pytest.mark.parametrize(("deallocation", "heuristic", "staleness"), RUNS)
def test_more_runs_as_the_authors_rules_say(deallocation, heuristic, staleness, tmp_path):
    for rows in logs(6, 60, repeat=deallocation != "banish"):
        assert not differences(rows, tmp_path / "log", deallocation, heuristic, staleness)["different"]


@pytest.mark.parametrize("deallocation", ["eager", "ignore", "banish"])
def test_peak_without_pressure_is_the_authors(deallocation, tmp_path):
    for rows in logs(0, 4, repeat=False):
        (tmp_path / "log").write_text("".join(json.dumps(row) + "\n" for row in rows))
        story = run(read_dtr(tmp_path / "log"), 1 << 50, deallocation=deallocation)
        assert story.peak == Replay(1 << 50, deallocation=deallocation).run(folded(rows)).peak


def test_folding_changes_no_log_without_views():
    for rows in logs(0, 8):
        if all(row.get("ALIAS", "-1") == "-1" for row in rows):
            kept = [row for row in folded(rows) if not row.get("DST", "").startswith("kept ")]
            assert kept == rows


def test_a_views_time_goes_to_the_op_that_made_its_storage(tmp_path):
    rows = [{"INSTRUCTION": "CONSTANT", "NAME": "w"}, {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "4"}]
    for name, args, alias, time in [("t", "w", 0, 3), ("a", "t", -1, 10), ("b", "a", -1, 20), ("v", "a", 0, 5)]:
        rows.append({"INSTRUCTION": "CALL", "NAME": "f", "ARGS": [args], "RESULT": [name], "TIME": str(time)})
        rows.append({"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": "4"})
        rows.append({"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)})
    (tmp_path / "log").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # w's view comes before any op: the first one has its time
    assert [op.duration for op in read_dtr(tmp_path / "log").ops] == [3 + 10 + 5, 20]


def test_folding_keeps_the_time_of_a_log():
    for rows in logs(0, 12):
        assert Replay(1 << 50).run(rows).once == Replay(1 << 50).run(folded(rows)).once


# ---- planted faults ----------------------------------------------------------------------------------


def caught(tmp_path: Path, **ours: object) -> int:
    rules = ("eager", "dtr", "own")
    return sum(differences(rows, tmp_path / "log", *rules, ours)["different"] for rows in logs(0, 12))


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
    notice = Evictor.notice

    def forgetful(self, change):
        before = self.table.access[change.tensor]
        notice(self, change)
        if change.what == "read":
            self.table.access[change.tensor] = before

    monkeypatch.setattr(Evictor, "notice", forgetful)
    assert caught(tmp_path)
