"""Runs cells: a plain record in, a plain record out; what cells share is computed once.

A task has `id`, `workload` (a file of a trace, or the arguments of `transformer`), `profile`, `figures` (what is
changed in it), `parallel` (the keys of a layout that are not its defaults, or None), `policy`, `parameters`, `budget`
(None, bytes, or text such as "62.5%" of the unconstrained peak), `seed`, `iterations`, `recompute_limit` (as `simulate`
takes it), `bound` (whether the row says how near the run is to the least time that any plan of a class takes), `folder`
(for the timeline, or None), `time_limit_s` (enforced by the executor, see `pool`), and `sums`: hashes of profile,
workload and policy from the time when the cell got its identity.
"""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from sim.analysis.figure import Reference
from sim.analysis.peak_memory import home_peak
from sim.analysis.summary import summarize
from sim.collecting import Seldom, uncollected
from sim.errors import (
    Deadlock,
    IllegalPlan,
    Infeasible,
    LayoutError,
    OutOfMemory,
    PolicyError,
    PolicyFailed,
    ProfileError,
    TiersimError,
    WorkloadError,
    refusal_kind,
)
from sim.experiment import Result, as_in_ample_memory, reference_for, reference_run, simulate
from sim.hardware.platform import Platform
from sim.least_time import LowerBound, lower_bound
from sim.limits import CELL_SECONDS, TooLong, limited
from sim.log import EventLog
from sim.plan import Run
from sim.policies import load
from sim.policies.base import Policy
from sim.regular_files import file_sum
from sim.sweeps.identity import policy_identity
from sim.sweeps.job import build, divided, layout_of, platform_of, undivided
from sim.sweeps.kept import Kept
from sim.sweeps.plans import remembering
from sim.sweeps.timeline import write_cell
from sim.trace.graph import Trace

Task = Mapping[str, Any]
Outcome = dict[str, Any]

STATUSES = ("ok", "infeasible", "not_applicable", "failed", "killed", "timed_out")
"""ok: it ran. infeasible: it does not fit. not_applicable: policy, workload and platform do not go together.
failed: an illegal plan or a fault of the program. killed: the process that ran it died each time. timed_out: it
took longer than the study allows."""

KEPT_OPS = 50_000  # of traces, of reference runs, of solvers' plans; the last one of each is kept however large
KEPT_PLATFORMS = 256
LEAST_OPS = 500  # as how many each cell counts at least


class Bench(Seldom):
    """Runs tasks one after another in this process, and caches what they share: traces, references, bounds, plans."""

    def __init__(self) -> None:
        super().__init__()
        self._traces = Kept(KEPT_OPS)
        self._divided = Kept(KEPT_OPS)
        self._platforms = Kept(KEPT_PLATFORMS)
        self._references = Kept(KEPT_OPS)
        self._freedoms = Kept(KEPT_PLATFORMS)
        self._bounds = Kept(KEPT_OPS)
        self._plans = Kept(KEPT_OPS)

    def run(self, task: Task) -> Outcome:
        """`row`, the same in every run, and `ran`, which varies: `wall_s`, `plan_s`, a traceback."""
        began = time.perf_counter()
        limit = None if task.get("time_limit_s") else CELL_SECONDS  # whoever runs the process keeps a study's own
        try:
            with uncollected(), limited(limit, more="time_limit in the study allows more"):
                row, ran = self._answer(task)
            row = _plain(row)
        except TooLong as error:
            row, ran = {"status": "timed_out", "fits": None, "error": str(error)}, {"time_limit_s": limit}
        finally:
            self.collect_if_due()
        return {"row": row, "ran": {"wall_s": time.perf_counter() - began, **ran}}

    def _answer(self, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
        known: dict[str, Any] = {"fidelity": "", "budget_bytes": None, "unconstrained_peak_bytes": None}
        try:
            return self._figures(task, known)
        except (Infeasible, Deadlock) as error:
            holders = [list(holder) for holder in error.holders] if isinstance(error, OutOfMemory) else []
            floor = getattr(error, "floor_bytes", None)
            row = {**_refusal("infeasible", False, error), "refusal": refusal_kind(error)}
            return {**row, **known, "floor_bytes": floor, "holders": holders}, {}
        except (LayoutError, PolicyError, WorkloadError) as error:
            return {**_refusal("not_applicable", None, error), **known}, {}
        except PolicyFailed as error:  # a fault of a policy is one cell's, not the sweep's
            row = _refusal("failed", None, error.__cause__ or error)
            return {**row, **known}, {"traceback": traceback.format_exc()}
        except (IllegalPlan, TiersimError) as error:
            return {**_refusal("failed", None, error), **known}, {}
        except Exception as error:
            return {**_refusal("failed", None, error), **known}, {"traceback": traceback.format_exc()}

    def _figures(self, task: Task, known: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        workload, figures = undivided(task), task["figures"]
        trace_key: tuple[Any, ...] = tuple(sorted(workload.items()))
        platform_key: tuple[Any, ...] = (task["profile"], tuple(sorted(figures.items())))
        policy = load(task["policy"], **task["parameters"])
        known["fidelity"] = policy.fidelity
        if policy_identity(policy) != task["sums"]["policy"]:
            raise TiersimError(f"{task['policy']}: the policy was changed while the program ran; restart the program")
        platform = self._platforms.get(platform_key, lambda: _platform(task))
        trace = self._traces.get(trace_key, lambda: _trace(workload, task["sums"]["workload"]), _ops)
        if task.get("parallel"):
            whole, layout = trace, (str(layout_of(task)), task["workload"].get("stack"))
            trace_key, platform_key = (trace_key, layout, platform_key), (platform_key, layout)
            trace, platform = self._divided.get(trace_key, lambda: divided(task, whole), lambda made: _ops(made[0]))
        kept, peak, refusal = self._references.get(
            (trace_key, platform_key), lambda: _reference(trace, platform), lambda made: _ops(trace) if made[0] else 1
        )
        known["unconstrained_peak_bytes"] = peak
        self.count(max(_ops(trace), LEAST_OPS))
        budget = task["budget"]
        if isinstance(budget, str):
            if peak is None:
                raise refusal or Infeasible("the run without a limit does not end")
            budget = int(Decimal(budget.removesuffix("%")) * peak / 100)
        known["budget_bytes"] = platform.home(0).capacity if budget is None else budget
        limited = platform
        if budget is not None:
            limited = self._platforms.get((platform_key, budget), lambda: platform.with_budget(budget))
        limit = task["recompute_limit"]
        planner = trace_key, task["sums"]["policy"]
        chosen = remembering(policy, self._plans, planner, platform_key, (budget, limit))
        result = self._simulated(task, trace, limited, chosen)
        if task.get("bound"):
            key = trace_key, platform_key, budget
            bound = self._bounds.get(key, lambda: _bound(trace, limited), lambda made: _ops(trace))
            result = replace(result, bound=bound)
        reference = None
        if kept is not None:
            traces = (trace,) * (len(result.warm_up) + 1)
            key = (trace_key, platform_key, len(traces))
            if len(traces) > 1:
                kept = self._references.get(key, lambda: reference_run(traces, platform), lambda made: _ops(trace))
            freedoms = (*key, task["sums"]["policy"])
            end, name = self._freedoms.get(freedoms, lambda: self._unlimited(policy, traces, platform, kept, result))
            reference = Reference(kept, end, name)
        if task.get("folder"):
            write_cell(replace(result, name=task["policy"], policy=policy), reference, Path(task["folder"]))
        notes = result.plan.notes
        row = {
            "status": "ok",
            "error": "",
            **known,
            **summarize(result.log, reference).as_dict(),
            **(result.bound.record(result.log) if result.bound else {}),
            "time_limited": bool(notes.get("time_limited", False)) if isinstance(notes, Mapping) else False,
        }
        return row, {"plan_s": result.plan_s}

    def _simulated(self, task: Task, trace: Trace, limited: Platform, policy: Policy) -> Result:
        """The run of a cell. limited: the machine with the budget."""
        limit = task["recompute_limit"]
        return simulate(trace, limited, policy, seed=task["seed"], iterations=task["iterations"], recompute_limit=limit)

    def _unlimited(
        self, policy: Policy, traces: Sequence[Trace], platform: Platform, kept: EventLog, result: Result
    ) -> tuple[int, str]:
        """Time and name of the fastest run with unlimited memory and the policy's freedoms, after these iterations."""
        ran = as_in_ample_memory(Run(traces[-1], result.plan, result.log))
        reference = reference_for(policy, traces, platform, kept, ran)
        return reference.makespan_ns, reference.name


def _bound(trace: Trace, platform: Platform) -> LowerBound | None:
    """The least time that any plan of a class takes; None where an op can't run on its engine."""
    try:
        return lower_bound(trace, platform)
    except ProfileError:
        return None


def _ops(trace: Trace) -> int:
    return len(trace.op_columns.name)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON would return it, so that it is the same from this process and from another."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(row, allow_nan=False))
    except (TypeError, ValueError) as error:
        return _refusal("failed", None, error)
    return plain


def _refusal(status: str, fits: bool | None, error: BaseException) -> dict[str, Any]:
    text = str(error) if isinstance(error, TiersimError) else f"{type(error).__name__}: {error}"
    return {"status": status, "fits": fits, "error": " ".join(text.split())}


def _platform(task: Task) -> Platform:
    found = platform_of(task)
    if found.content_hash != task["sums"]["profile"]:
        raise TiersimError(f"{task['profile']}: the profile was changed while the sweep ran; repeat the sweep")
    return found


def _trace(workload: Mapping[str, Any], sum_: str) -> Trace:
    path = workload.get("trace")
    if path is not None:
        if file_sum(Path(path)) != sum_:
            raise TiersimError(f"{path}: the trace was changed while the sweep ran; repeat the sweep")
        return build(workload)
    from workloads.steps import config_identity

    config = workload["model"]
    if config_sum(config_identity(config)) != sum_:
        raise TiersimError(f"{config}: the model was changed while the sweep ran; repeat the sweep")
    return build(workload)


def config_sum(config: Any) -> str:
    """Hash of a model's configuration."""
    text = repr([(k, sorted(v) if isinstance(v, frozenset) else v) for k, v in vars(config).items()])
    return hashlib.sha256(text.encode()).hexdigest()


def _reference(trace: Trace, platform: Platform) -> tuple[EventLog | None, int | None, Infeasible | None]:
    """The unconstrained run and its peak in a device's home tier, or why there is none."""
    try:
        log = reference_run(trace, platform)
    except Infeasible as error:
        return None, None, error
    return log, home_peak(log), None
