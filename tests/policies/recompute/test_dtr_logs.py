"""Logs of the prototype's format, with all its instructions, run as in the plain twin, eviction by eviction."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from tests.policies.recompute.dtr_runs import run
from tests.policies.recompute.test_dtr_twin import both
from workloads.importers.dtr import read_dtr


def log_of(draw: Random, calls: int) -> list[dict]:
    """Calls, views, several results, mutations, second names and releases, many of them late."""
    rows: list[dict] = [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}]
    names: list[str] = []
    count = 0

    def add(kind: str, **fields: object) -> None:
        rows.append({"INSTRUCTION": kind, **fields})

    def fresh() -> str:
        nonlocal count
        count += 1
        return f"x{count}"

    for _ in range(2):
        names.append(fresh())
        add("CONSTANT", NAME=names[-1])
        add("MEMORY", NAME=names[-1], MEMORY=str(draw.randint(1, 50)))
    for _ in range(calls):
        args = draw.sample(names, min(len(names), draw.randint(1, 3)))
        kind = draw.choice(("call",) * 6 + ("view", "mutate", "mutate", "copy", "copy_from"))
        if kind == "mutate":
            add("MUTATE", NAME="add_", ARGS=args, MUTATE=[draw.randrange(len(args))], TIME=str(draw.randint(1, 90)))
        elif kind == "copy":
            names.append(fresh())
            add("COPY", DST=names[-1], SRC=args[0])
        elif kind == "copy_from" and len(args) > 1:
            add("COPY_FROM", DST=args[0], SRC=args[1])
        else:
            made = [fresh() for _ in range(1 if kind == "view" else draw.choice((1, 1, 1, 2, 3)))]
            add("CALL", NAME="f", ARGS=args, RESULT=made, TIME=str(draw.randint(1, 90)))
            for name in made:
                add("MEMORY", NAME=name, MEMORY=str(draw.randint(1, 90)))
                add("ALIAS", NAME=name, ALIAS="0" if kind == "view" else "-1")
            names += made
        while len(names) > 6 and draw.random() < 0.7:
            add("RELEASE", NAME=names.pop(draw.randrange(2, len(names))))
    add("CALL", NAME="end", ARGS=names[-1:], RESULT=["end"], TIME="1")
    add("MEMORY", NAME="end", MEMORY="1")
    add("ALIAS", NAME="end", ALIAS="-1")
    return rows


@pytest.mark.parametrize("heuristic", ["dtr", "dtr_eq", "local", "lru", "size", "msps"])
@pytest.mark.parametrize("deallocation", ["eager", "ignore"])
def test_random_logs_run_as_in_the_twin(heuristic, deallocation, tmp_path: Path):
    pressed = held = 0
    for seed in range(12):
        path = tmp_path / f"{seed}.log"
        path.write_text("".join(json.dumps(row) + "\n" for row in log_of(Random(seed), 24)))
        trace = read_dtr(path)
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
