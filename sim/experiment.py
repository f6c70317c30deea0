"""Runs: objects in, results out. A result says what it includes; a refusal is a row, not a crash."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.engine.prepare import Prepared, prepare
from sim.engine.replay import replay
from sim.errors import PolicyError
from sim.hardware.cost import slow_operand_ns
from sim.hardware.platform import Platform
from sim.log import EventLog
from sim.plan import Plan, Problem, Run
from sim.policies import load
from sim.policies.base import Policy
from sim.trace.graph import Trace
from sim.units import to_bytes

if TYPE_CHECKING:
    import pandas as pd

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
        return total + slow_operand_ns(self.platform, self._prepared.engine[op], away)

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
    reference: Callable[[], EventLog] | None = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        """All figures of the run as one flat record; see `sim.analysis.summary`."""
        from sim.analysis.summary import summarize

        return summarize(self.log, self.reference() if self.reference else None).as_dict()

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


def problem_for(trace: Trace, platform: Platform, *, seed: int = 0, history: tuple[Run, ...] = ()) -> Problem:
    """What a policy is asked."""
    return Problem(
        trace=trace,
        platform=platform,
        cost=Prices(trace, platform),
        evaluate=lambda plan: replay(plan, platform),
        seed=seed,
        history=history,
    )


def unlimited(platform: Platform) -> Platform:
    """The same machine with a home tier that never fills."""
    return platform.with_budget(UNLIMITED)


def reference_run(trace: Trace, platform: Platform) -> EventLog:
    """Keep everything with unlimited memory: what overheads and savings are measured against."""
    return replay(Plan(trace), unlimited(platform))


def simulate(
    trace: Trace | Sequence[Trace],
    platform: Platform,
    policy: str | Policy = "keep_all",
    *,
    budget: int | str | None = None,
    iterations: int | None = None,
    seed: int = 0,
    **parameters: Any,
) -> Result:
    """Run a trace (or one trace an iteration) under a policy and return its steady state.

    budget: bytes of every device's home tier, an int or text such as "7 GB"; None for the platform's own.
    iterations: how many to run, each planned with the history of those before; by default what the
    policy's `warm_up` needs and one more. Further keywords are the policy's parameters.
    Raises OutOfMemory or Infeasible where it does not fit, PolicyError, IllegalPlan, Deadlock.
    """
    chosen = load(policy, **parameters)
    limited = platform if budget is None else platform.with_budget(to_bytes(budget))
    traces = [trace] if isinstance(trace, Trace) else list(trace)
    count = iterations if iterations is not None else max(len(traces), chosen.warm_up + 1)
    if count < 1 or not traces:
        raise PolicyError(f"iterations must be at least 1, not {count}")
    history: tuple[Run, ...] = ()
    plan_s = 0.0
    for i in range(count):
        now = traces[min(i, len(traces) - 1)]
        began = time.perf_counter()
        plan = chosen.plan(problem_for(now, limited, seed=seed, history=history))
        plan_s += time.perf_counter() - began
        history = (*history, Run(now, plan, replay(plan, limited)))
    last = history[-1]
    return Result(
        policy=chosen,
        name=policy if isinstance(policy, str) else type(policy).__name__,
        platform=limited,
        plan=last.plan,
        log=last.log,
        nominal=platform.home(0).nominal,
        warm_up=history[:-1],
        plan_s=plan_s,
        reference=lambda: reference_run(traces[-1], platform),
    )


__all__ = ["Prices", "Result", "problem_for", "reference_run", "simulate", "unlimited"]
