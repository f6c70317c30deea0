"""Runs the cells, two processes at a time, each cell with a limit of its own."""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from scripts.recompute_page.cases import (
    DEEP,
    DEEP_SHARE,
    JOBS,
    SHARES,
    Entry,
    activation_bytes,
    budget_at,
    entries,
    facts,
    other_ways,
    platform,
)
from sim.engine.replay import replay
from sim.errors import Infeasible, OutOfMemory, TiersimError
from sim.experiment import problem_for, reference_run, simulate, unlimited
from sim.policies import load
from sim.trace.graph import Trace

Row = dict[str, Any]
PROCESSES = 2
CELL_LIMIT = 60.0
"""Seconds of processor time after which a cell is given up and its process ended."""
SAID = ("status", "limit", "bound_ns", "rerun_ns")  # notes of plans that a solver made
BARE = 50_000  # timeouts in the loop that is the measure: clocks are coarse
_limited = False  # whether this process is one that may be ended
HALVINGS = 6
"""Steps towards the smallest budget of a policy that does not name one."""


def measure(
    only: Collection[str],
    old: Mapping[str, Any],
    save: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None] = print,
    *,
    missing: bool = False,
) -> None:
    """All rows, or those of some policies or labels; saved after each, with what `old` knew of the others.

    only: names of policies or labels, empty for all. missing: of these only the cells that `old` has not. Rows of
    `old` that no entry asks for any more, with other parameters or at another budget, are left out.
    """
    known = list(old["jobs"]) if missing and old.get("jobs") else [facts(name, job) for name, job in JOBS.items()]
    chosen = [entry for entry in entries() if not only or entry.policy in only or entry.label in only]
    tasks = [(job, entry) for entry in chosen for job in known]
    tasks.sort(key=lambda task: load(task[1].policy).slow, reverse=not only)
    labels = {entry.label: [_plain(one) for one in (*entry.tried, *other_ways(entry))] for entry in entries()}
    budgets = {
        job["job"]: {budget_at(job["floor_bytes"], job["peak_bytes"], share) for share in SHARES} for job in known
    }
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in old.get("cells", ()):
        current = row.get("smallest") or row["budget_bytes"] in budgets[row["job"]]
        if current and _plain(row["parameters"]) in labels.get(row["label"], ()):
            rows.setdefault((row["job"], row["label"]), []).append(row)
    planned = {row["label"]: row for row in old.get("deep", ()) if row["label"] in labels}
    lock = threading.Lock()

    def figures() -> dict[str, Any]:
        found = [row for part in rows.values() for row in part]
        found.sort(key=lambda row: (row["job"], row["label"], row["budget_bytes"], str(row["parameters"])))
        return {"jobs": known, "cells": found, "deep": [planned[label] for label in sorted(planned)]}

    def one(task: tuple[Row, Entry]) -> None:
        job, entry = task
        began = time.perf_counter()
        kept = rows.get((job["job"], entry.label), []) if missing else []
        there = {(row["budget_bytes"], _plain(row["parameters"])) for row in kept if not row.get("smallest")}
        there |= {(SMALLEST, _plain(row["parameters"])) for row in kept if row.get("smallest")}
        questions = [one for one in asked(job, entry) if (one[0], _plain(one[1])) not in there]
        found = list(_guarded(job, entry, questions)) if questions else []
        say(f"{job['job']}: {entry.label}: {len(found)} cells in {time.perf_counter() - began:.1f} s")
        with lock:
            rows[job["job"], entry.label] = [*kept, *found]
            save(figures())

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(one, tasks))
    planned |= {row["label"]: row for row in deep([e for e in chosen if not missing or e.label not in planned])}
    save(figures())


def _plain(parameters: Mapping[str, Any]) -> str:
    """Parameters as they look in the file."""
    return json.dumps(dict(parameters), sort_keys=True)


# ---- one cell ------------------------------------------------------------------------------------


def cell(trace: Trace, job: Mapping[str, Any], entry: Entry, parameters: Mapping[str, Any], budget: int) -> Row:
    """One policy at one budget; never raises what is an answer."""
    row: Row = {
        "job": job["job"],
        "label": entry.label,
        "policy": entry.policy,
        "parameters": dict(parameters),
        "budget_bytes": budget,
        "fidelity": load(entry.policy).fidelity,
    }
    loop = _bare_s(len(trace.ops))
    if _limited:
        signal.setitimer(signal.ITIMER_PROF, CELL_LIMIT)
    began, spent = time.perf_counter(), time.process_time()
    try:
        result = simulate(trace, platform(), entry.policy, budget=budget, **parameters)
    except Infeasible as error:
        took = time.perf_counter() - began
        return row | {"status": "does not fit", "error": str(error), "floor_bytes": error.floor_bytes, "plan_s": took}
    except TiersimError as error:
        return row | {"status": "refused", "error": str(error)}
    spent = time.process_time() - spent
    summary = result.summary()
    return row | {
        "status": "ok",
        "peak_bytes": summary["peak_bytes"],
        "makespan_ns": summary["makespan_ns"],
        "recompute_ns": summary["recompute_ns"],
        "stall_ns": sum(summary["stall_ns"].values()),
        "moved_bytes": sum(summary["moved_bytes"].values()),
        "activation_bytes": activation_bytes(result.log),
        "plan_s": round(result.plan_s, 4),
        "loops": round(spent / loop, 1),
        "solver": {key: result.plan.notes[key] for key in SAID if key in result.plan.notes},
    }


@cache
def _bare_s(ops: int) -> float:
    """Processor seconds of a bare SimPy loop with as many timeouts as there are ops."""
    from benchmarks.speed import bare

    times = 1 + BARE // ops
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        for _ in range(times):
            bare(ops)
        best = min(best, time.process_time() - began)
    return best / times


SMALLEST = 0
"""Stands for the smallest budget of a policy, which has to be found."""
Question = tuple[int, Mapping[str, Any]]
"""A budget, or `SMALLEST`, and parameters."""


def asked(job: Mapping[str, Any], entry: Entry) -> list[Question]:
    """Every budget, then the smallest that is found; then every budget without, or with, the last step of planners."""
    budgets = [budget_at(job["floor_bytes"], job["peak_bytes"], share) for share in reversed(SHARES)]
    first = [(budget, parameters) for budget in (*budgets, SMALLEST) for parameters in entry.tried]
    return first + [(budget, parameters) for budget in budgets for parameters in other_ways(entry)]


def cells(job: Mapping[str, Any], entry: Entry, questions: Sequence[Question]) -> Iterator[Row]:
    """The cells of a policy on one job."""
    trace = JOBS[job["job"]].trace()
    for budget, parameters in questions:
        if budget == SMALLEST:
            yield smallest(trace, job, entry, parameters)
        else:
            yield cell(trace, job, entry, parameters, budget)


def smallest(trace: Trace, job: Mapping[str, Any], entry: Entry, parameters: Mapping[str, Any]) -> Row:
    """The cell at the smallest budget found: the one the policy names, its plan's own peak, or by bisection."""
    found = cell(trace, job, entry, parameters, job["floor_bytes"])
    if found["status"] == "refused":
        return found | {"smallest": True}
    named = found.get("floor_bytes") or _own_peak(trace, entry, parameters, job["floor_bytes"])
    if found["status"] != "ok" and named is not None and named <= job["peak_bytes"]:
        found = cell(trace, job, entry, parameters, named)
    if found["status"] != "ok":
        low, high = job["floor_bytes"], job["peak_bytes"]
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            tried = cell(trace, job, entry, parameters, middle)
            low, high = (low, middle) if tried["status"] == "ok" else (middle, high)
            found = tried if tried["status"] == "ok" else found
    return found | {"smallest": True}


def _own_peak(trace: Trace, entry: Entry, parameters: Mapping[str, Any], budget: int) -> int | None:
    """The peak of the plan that a policy makes for a budget it does not fit; None for online ones."""
    from sim.analysis.peak_memory import peak_bytes

    policy, limited = load(entry.policy, **parameters), platform().with_budget(budget)
    try:
        plan = policy.plan(problem_for(trace, limited))
    except TiersimError:
        return None
    if plan.online is not None:
        return None
    log = replay(plan, unlimited(platform()))
    return peak_bytes(log)[platform().home(0).name]


# ---- processes -----------------------------------------------------------------------------------


def _guarded(job: Mapping[str, Any], entry: Entry, questions: Sequence[Question]) -> Iterator[Row]:
    """The cells of one policy, run in a process that is ended where a cell takes too long."""
    context = multiprocessing.get_context("spawn")
    left = list(questions)
    while left:
        mine, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(job, entry, left, theirs), daemon=True)
        worker.start()
        theirs.close()
        try:
            while (row := mine.recv()) is not None:
                yield row
                left.pop(0)
        except EOFError:
            worker.join()
            over = worker.exitcode == -signal.SIGPROF
            why = f"over {CELL_LIMIT:.0f} s" if over else f"exit status {worker.exitcode}"
            yield _lost(job, entry, *left.pop(0), why)


def _lost(job: Mapping[str, Any], entry: Entry, budget: int, parameters: Mapping[str, Any], why: str) -> Row:
    row = {"job": job["job"], "label": entry.label, "policy": entry.policy, "parameters": dict(parameters)}
    return row | {
        "budget_bytes": budget or job["floor_bytes"],
        "fidelity": load(entry.policy).fidelity,
        "status": "given up",
        "error": why,
        "smallest": budget == SMALLEST,
    }


def _work(job: Mapping[str, Any], entry: Entry, questions: Sequence[Question], pipe: Connection) -> None:
    """In a process of its own, which the timer's signal ends, also inside a solver."""
    global _limited
    _limited = True
    for row in cells(job, entry, questions):
        pipe.send(row)
    pipe.send(None)


# ---- a deep trace --------------------------------------------------------------------------------


def deep(only: Iterable[Entry] | None = None) -> list[Row]:
    """Planning and replaying on a trace of 96 layers, every policy that is not declared slow."""
    trace, card = DEEP.trace(), platform()
    peak, floor = _ends(trace)
    budget = budget_at(floor, peak, DEEP_SHARE)
    loop = _bare_s(len(trace.ops))
    found = []
    for entry in entries() if only is None else only:
        if load(entry.policy).slow or entry.label != entry.policy:
            continue
        began, spent = time.perf_counter(), time.process_time()
        row: Row = {"label": entry.label, "ops": len(trace.ops), "budget_bytes": budget}
        try:
            result = simulate(trace, card, entry.policy, budget=budget, **entry.tried[0])
            row |= {"status": "ok", "plan_s": round(result.plan_s, 3), "makespan_ns": result.log.end}
        except OutOfMemory:
            # replayed to the end in more memory: the time is what is asked here
            began, spent = time.perf_counter(), time.process_time()
            policy = load(entry.policy, **entry.tried[0])
            if policy.online:
                result = simulate(trace, card, policy, budget=peak)
                row |= {"status": "more memory", "plan_s": round(result.plan_s, 3), "makespan_ns": result.log.end}
            else:
                plan = policy.plan(problem_for(trace, card.with_budget(budget)))
                took = time.perf_counter() - began
                log = replay(plan, unlimited(card))
                row |= {"status": "more memory", "plan_s": round(took, 3), "makespan_ns": log.end}
        except Infeasible as error:
            row |= {"status": "does not fit", "error": str(error)}
        except TiersimError as error:
            row |= {"status": "refused", "error": str(error)}
        spent = time.process_time() - spent
        found.append(row | {"total_s": round(time.perf_counter() - began, 3), "loops": round(spent / loop, 1)})
    return found


def _ends(trace: Trace) -> tuple[int, int]:
    """Peak without a limit, and the proven floor."""
    from sim.analysis.peak_memory import peak_bytes
    from sim.policies.recompute.relax_and_fix.least_bytes import least_bytes
    from sim.solvers.schedule import TraceIndex

    card = platform()
    return peak_bytes(reference_run(trace, card))[card.home(0).name], least_bytes(TraceIndex(trace))
