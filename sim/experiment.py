"""Runs: objects in, results out. A result says what it includes; a refusal is a row, not a crash."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.analysis.peak_memory import home_peak
from sim.analysis.summary import Reference, summarize
from sim.engine.prepare import Prepared, prepare
from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import PolicyError, PolicyFailed, ProfileError, TiersimError, TraceError
from sim.hardware.cost import slow_operand_ns
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.iterations import run_iteration
from sim.log import EventLog
from sim.plan import Plan, Problem, Run
from sim.policies import label, load
from sim.policies.base import Policy
from sim.trace.graph import Trace
from sim.trace.op import KINDS
from sim.units import format_bytes, format_time, to_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

UNLIMITED = 1 << 60
"""Capacity in bytes of the home tier in reference runs without a limit."""


@dataclass(frozen=True)
class Prices:
    """Op and copy times of a trace on a platform with nothing else running; see `sim.plan.Cost`."""

    trace: Trace
    platform: Platform

    def op_ns(self, op: int, tiers: Mapping[int, str] | None = None) -> int:
        """Nanoseconds of one run of an op, with the operands named in `tiers` in those tiers."""
        total = self._prepared.total[op]
        if not tiers:
            return total
        away: dict[str, int] = {}
        for tensor, tier in tiers.items():
            away[tier] = away.get(tier, 0) + self._prepared.size[tensor]
        kind = KINDS[self.trace.op_columns.kind[op]]
        return total + slow_operand_ns(self.platform, self._prepared.engine[op], kind, away)

    @cached_property
    def _prepared(self) -> Prepared:
        return prepare(self.trace, self.platform)

    def move_ns(self, tensor: int, source: str, target: str) -> int:
        """Nanoseconds of one copy of a tensor. Raises ProfileError without a route."""
        return self.platform.move_ns(int(self.trace.tensor_columns.bytes[tensor]), source, target)


@dataclass(frozen=True, eq=False)
class Result:
    """One policy's run: its steady-state log, and what was asked.

    warm_up: the iterations before the steady state, in order. plan_s: wall time of planning in seconds,
    outside the simulated time. nominal: capacity of the home tier without the budget.
    """

    policy: Policy
    name: str
    platform: Platform
    plan: Plan
    log: EventLog
    nominal: int
    warm_up: tuple[Run, ...] = ()
    plan_s: float = 0.0
    reference: Callable[[], Reference] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        figures = f"{format_time(self.log.end)}, peak {format_bytes(home_peak(self.log))}"
        return f"<Result of {label(self.policy)} on {self.platform.name}: {figures}>"

    def summary(self) -> dict[str, Any]:
        """All figures of the run as one flat record; see `sim.analysis.summary`."""
        return summarize(self.log, self.reference() if self.reference else None).as_dict()

    def plot_memory(self, tier: str | None = None) -> Figure:
        """Figure of the bytes in use of a tier over time, by default the device's; see `sim.report.plot`."""
        from sim.report.plot import plot_memory

        return plot_memory(self.log, tier)

    def plot_lanes(self, window: tuple[int, int] | None = None) -> Figure:
        """Figure of what each engine and link did, from one ns to another; see `sim.report.lanes`."""
        from sim.report.lanes import plot_lanes

        return plot_lanes(self.log, window)

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Write the run for ui.perfetto.dev, to `x.pftrace` or `x.json`; see `sim.report.timeline`."""
        from sim.report.timeline import write_timeline

        return write_timeline(self.log, path)

    def report(self, path: str | os.PathLike[str], *, command: str = "") -> Path:
        """Write a page of this run: one HTML file, to look at in a browser without a network.

        command: what repeats the run, to be shown. Written aside and renamed. Raises OSError.
        """
        from sim.pages import report_run

        return report_run(self, path, command=command)

    @cached_property
    def events(self) -> pd.DataFrame:
        """What each engine and link did when."""
        return self.log.events

    @cached_property
    def memory(self) -> pd.DataFrame:
        """Every change of each tier's use."""
        return self.log.memory


def to_platform(platform: Platform | str | os.PathLike[str]) -> Platform:
    """A platform, or that of a profile's name or file. Raises ProfileError."""
    if isinstance(platform, Platform):
        return platform
    if not isinstance(platform, (str, os.PathLike)):
        raise ProfileError(f"expected a platform or the name of a profile, not a {type(platform).__name__}")
    return load_profile(platform)


def check_trace(trace: Any) -> None:
    """Raises TraceError where this is no trace."""
    if not isinstance(trace, Trace):
        given = repr(trace) if isinstance(trace, str) else f"a {type(trace).__name__}"
        raise TraceError(f"expected a trace, not {given}; transformer(…) and load_trace(…) make one")


def problem_for(
    trace: Trace,
    platform: Platform,
    *,
    seed: int = 0,
    history: tuple[Run, ...] = (),
    recompute_limit: float | None = RECOMPUTE_LIMIT,
) -> Problem:
    """What a policy is asked."""
    return Problem(
        trace=trace,
        platform=platform,
        cost=Prices(trace, platform),
        evaluate=lambda plan: run_iteration(trace, plan, platform, history, recompute_limit=recompute_limit).log,
        seed=seed,
        history=history,
    )


def unlimited(platform: Platform) -> Platform:
    """The same machine with a home tier that never fills."""
    return platform.with_budget(UNLIMITED)


def reference_run(trace: Trace | Sequence[Trace], platform: Platform) -> EventLog:
    """Keep everything with unlimited memory: what overheads and savings are measured against.

    Of several traces, one per iteration, the last one's log: each begins where the one before left what is carried.
    """
    return _last_log((trace,) if isinstance(trace, Trace) else trace, unlimited(platform), Plan)


def _last_log(traces: Sequence[Trace], platform: Platform, plan_for: Callable[[Trace], Plan]) -> EventLog:
    """The log of the last of these iterations."""
    history: tuple[Run, ...] = ()
    for i, trace in enumerate(traces):
        history = (run_iteration(trace, plan_for(trace), platform, history, last=i == len(traces) - 1),)
    return history[0].log


def reference_for(
    policy: Policy, trace: Trace | Sequence[Trace], platform: Platform, kept: EventLog | None = None
) -> Reference:
    """What unlimited memory allows a policy, after as many iterations as there are traces.

    kept: the run that keeps everything, if it is there already. Raises PolicyFailed where `policy.unlimited` fails.
    """
    traces = (trace,) if isinstance(trace, Trace) else trace
    if kept is None:
        kept = reference_run(traces, platform)
    ample = unlimited(platform)

    @cache
    def plans(each: Trace) -> Mapping[str, Plan]:
        return policy.unlimited(problem_for(each, ample))

    fastest = Reference(kept, kept.end)
    try:
        for name in plans(traces[-1]):
            end = _last_log(traces, ample, lambda each, name=name: plans(each).get(name) or Plan(each)).end  # type: ignore[misc]
            if end < fastest.makespan_ns:
                fastest = Reference(kept, end, name)
    except TiersimError:
        raise
    except Exception as error:
        raise PolicyFailed(f"policy {label(policy)!r}: unlimited(): {_fault(policy, error)}") from error
    return fastest


def simulate(
    trace: Trace | Sequence[Trace],
    platform: Platform | str | os.PathLike[str],
    policy: str | Policy | type[Policy] = "keep_all",
    *,
    budget: float | str | None = None,
    iterations: int | None = None,
    seed: int = 0,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
    **parameters: Any,
) -> Result:
    """Run a trace (or one trace an iteration) under a policy and return its steady state.

    platform: one there is, or the name or file of a profile. policy: a name, `path/to/file.py:Class`, a policy
    or its class.
    budget: bytes of every device's home tier, an int or text such as "7 GB"; None for the platform's own.
    iterations: how many to run, each planned with the history of those before; by default what the
    policy's `warm_up` needs and one more. Each begins where the one before left what is carried to it (unless its
    plan says where); the last one, which is the result, brings back what does not lie where it began.
    recompute_limit: how many times the ideal time of the trace (every op once, one after the other) recomputation may
    take before a run is refused as thrashing; None for no limit. Further keywords are the policy's parameters.
    Raises OutOfMemory or Infeasible where it does not fit, Thrashing, PolicyError, PolicyFailed, IllegalPlan, Deadlock.
    """
    traces = list(trace) if isinstance(trace, Sequence) and not isinstance(trace, str) else [trace]
    for each in traces:
        check_trace(each)
    platform = to_platform(platform)
    chosen = load(policy, **parameters)
    name = policy if isinstance(policy, str) else type(chosen).__name__
    limited = platform if budget is None else platform.with_budget(to_bytes(budget))
    count = iterations if iterations is not None else max(len(traces), chosen.warm_up + 1)
    if count < 1 or not traces:
        raise PolicyError(f"iterations must be at least 1, not {count}")
    history: tuple[Run, ...] = ()
    plan_s = 0.0
    for i in range(count):
        now = traces[min(i, len(traces) - 1)]
        began = time.perf_counter()
        try:
            problem = problem_for(now, limited, seed=seed, history=history, recompute_limit=recompute_limit)
            plan = chosen.plan(problem)
            plan_s += time.perf_counter() - began
            if not isinstance(plan, Plan):
                kind = "None" if plan is None else f"a {type(plan).__name__}"
                raise PolicyFailed(f"policy {name!r}: plan() returned {kind}, expected a Plan")
            run = run_iteration(now, plan, limited, history, last=i == count - 1, recompute_limit=recompute_limit)
            history = (*history, run)
        except TiersimError:
            raise
        except BaseException as error:  # `sys.exit()` in a policy ends no program
            if type(error) is KeyboardInterrupt:  # a person's
                raise
            raise PolicyFailed(f"policy {name!r}: {_fault(chosen, error)}") from error
    last = history[-1]
    return Result(
        policy=chosen,
        name=name,
        platform=limited,
        plan=last.plan,
        log=last.log,
        nominal=platform.home(0).nominal,
        warm_up=history[:-1],
        plan_s=plan_s,
        reference=lambda: reference_for(chosen, [run.trace for run in history], platform),
    )


def _fault(policy: Policy, error: BaseException) -> str:
    """Where an exception came from, best a line of the policy's own file, and what it says, in one line."""
    # what an online part raises comes as a copy whose cause knows the line
    raised = [each for each in (error, error.__cause__) if each is not None]
    frames = [frame for each in raised for frame in traceback.extract_tb(each.__traceback__)]
    code = getattr(type(policy).plan, "__code__", None)
    at = next((frame for frame in reversed(frames) if code and frame.filename == code.co_filename), frames[-1])
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{Path(at.filename).name} line {at.lineno}: {text}"


__all__ = [
    "Prices",
    "Result",
    "check_trace",
    "problem_for",
    "reference_for",
    "reference_run",
    "simulate",
    "to_platform",
    "unlimited",
]
