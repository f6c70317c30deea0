"""Runs: a trace, a platform and a policy in, a result out."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.analysis.figure import Reference
from sim.analysis.lanes import energy_j, work_ns
from sim.analysis.peak_memory import home_peak, peak_bytes
from sim.analysis.summary import summarize
from sim.arguments import explained
from sim.engine.prepare import Prepared, prepare
from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import (
    Infeasible,
    PolicyError,
    PolicyFailed,
    ProfileError,
    TiersimError,
    TraceError,
    closest,
    refusal_record,
)
from sim.hardware.cost import slow_operand_ns
from sim.hardware.dispatch import added
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.iterations import nothing_returned, run_iteration
from sim.layout import Layout, lay_out
from sim.limits import calling
from sim.log import STALLS, WHY, EventLog
from sim.plan import Plan, Problem, Run
from sim.policies import label, load
from sim.policies.base import Policy
from sim.trace.columns import row_sums
from sim.trace.graph import Trace
from sim.trace.op import KINDS
from sim.units import format_bytes, format_percent, format_time, parse_share, to_bytes
from sim.work_bound import least_ns

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from sim.least_time import LowerBound

MOST_ITERATIONS = 1_000_000
"""More than any policy takes to warm up; each is planned and replayed."""

UNLIMITED = 1 << 60
"""Capacity in bytes of the home tier in reference runs with unlimited memory."""


PROVEN: Mapping[str, tuple[str, str, Callable[[EventLog], float | None]]] = {
    "makespan_bound_ns": ("time", "makespan", lambda log: log.end),
    "energy_bound_j": ("energy", "energy", energy_j),
    "work_bound_ns": ("work", "time of ops and copies", work_ns),
}
"""Notes of a plan that bound a figure of its run from below: the figure in short and in full, and what it came to.

`bound_among` of the same plan names the class of plans that the bound is proven for.
"""


@dataclass(frozen=True)
class Prices:
    """Times of ops and copies of a trace on a platform with nothing else running; see `sim.plan.Cost`."""

    trace: Trace
    platform: Platform

    def op_ns(self, op: int, tiers: Mapping[int, str] | None = None) -> int:
        """Nanoseconds that a run of an op adds: its own, or that of `sim.hardware.dispatch.added` where a CPU launches.

        tiers: of the operands that are not in its engine's home tier.
        """
        total = self._added[op]
        if not tiers:
            return total
        read: dict[str, int] = {}
        written: dict[str, int] = {}
        for tensor, tier in tiers.items():
            there = written if self.trace.producer[tensor] == op else read
            there[tier] = there.get(tier, 0) + self._prepared.size[tensor]
        kind = KINDS[self.trace.op_columns.kind[op]]
        return total + slow_operand_ns(self.platform, self._prepared.engine[op], kind, read, written)

    @cached_property
    def _prepared(self) -> Prepared:
        return prepare(self.trace, self.platform)

    @cached_property
    def _added(self) -> list[int]:
        if not self.platform.dispatch:
            return self._prepared.total
        listed: list[int] = added(self.trace, self.platform).tolist()
        return listed

    def move_ns(self, tensor: int, source: str, target: str) -> int:
        """Nanoseconds of one copy of a tensor. Raises ProfileError where there is no route."""
        return self.platform.move_ns(int(self.trace.tensor_columns.bytes[tensor]), source, target)

    def over(self, trace: Trace, platform: Platform) -> Prices:
        """Those of another trace, on the same machine with other capacities."""
        return Prices(trace, platform)


@dataclass(frozen=True, eq=False)
class Result:
    """One policy's run in the steady state, or what ran until it did not fit.

    policy: the policy that planned it.
    name: the policy as it was asked for.
    platform: the machine, with the budget as the capacity of its home tier.
    plan: what the policy decided.
    log: everything that happened in the steady state.
    nominal: capacity of the home tier without the budget, in bytes.
    warm_up: the iterations before the steady state, in order.
    plan_s: wall-clock time of planning in seconds, not part of the simulated time.
    reference: computes the run with unlimited memory that slowdown and savings are measured against.
    trace: what the policy was asked to plan for, before it rewrote anything.
    bound: the least time that any plan of a class takes, where it was asked for; see `sim.lower_bound`.
    refusal: why it did not fit, as `sim.errors.refusal_record` says it; None for a run that ended. Without its end the
        log is that until then, and there is no reference.
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
    trace: Trace | None = field(default=None, repr=False)
    bound: LowerBound | None = field(default=None, repr=False)
    refusal: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        figures = f"{format_time(self.log.end)}, peak {format_bytes(home_peak(self.log))}"
        return f"<Result of {label(self.policy)} on {self.platform.name}: {figures}>"

    def summary(self) -> dict[str, Any]:
        """All figures of the run as one record; see `sim.analysis.summary`."""
        return copy.deepcopy(self._figures)

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return {**summarize(self.log, self.reference() if self.reference else None).as_dict(), **(self.refusal or {})}

    def referring(self, reference: Callable[[], Reference] | None) -> Result:
        """The same result, with its figures as they are, and another function that computes its reference."""
        other = dataclasses.replace(self, reference=reference)
        vars(other)["_figures"] = self._figures
        return other

    def with_bound(self) -> Result:
        """The same result with the least time that any plan of a class takes, which its page then shows."""
        from sim.least_time import lower_bound

        try:
            return (
                self if self.trace is None else dataclasses.replace(self, bound=lower_bound(self.trace, self.platform))
            )
        except ProfileError:  # an op that its engine can't run, which the policy runs elsewhere
            return self

    @property
    def _notes(self) -> Mapping[str, Any]:
        """The notes of the plan; a policy's may be no mapping."""
        return self.plan.notes if isinstance(self.plan.notes, Mapping) else {}

    @property
    def bounds(self) -> tuple[str, ...]:
        """How near the run is to the least that its policy has proven: a line per figure of `PROVEN` with a proof."""
        notes, lines = self._notes, []
        for key, (short, what, of) in PROVEN.items():
            bound, found = notes.get(key), of(self.log) if notes.get(key) else None
            if not bound or found is None or not self.log.complete:
                continue
            # joules are proven to one part in a million
            is_above = found > bound * (1 + (1e-6 if isinstance(bound, float) else 0))
            above = f"{format_percent(found / bound - 1)} above the least" if is_above else "the least"
            lines.append(f"{short}: {above} {what} proven possible among {notes['bound_among']}")
        return tuple(lines)

    @property
    def owned_parts(self) -> tuple[str, ...]:
        """A line for each part of a composition: what it owns."""
        return tuple(self._notes.get("owned", ()))

    @property
    def idle_parts(self) -> tuple[str, ...]:
        """A line for each part of a composition that does nothing."""
        return tuple(self._notes.get("idle_parts", ()))

    def plot_memory(self, tier: str | None = None) -> Figure:
        """Figure of the bytes in use over time, of a tier or by default of the home tier; see `sim.report.plot`."""
        from sim.report.draw import named
        from sim.report.plot import plot_memory

        return named(plot_memory(self.log, tier), self.name)

    def plot_lanes(self, window: tuple[int, int] | None = None) -> Figure:
        """Figure of what each engine and link did, in a window of (start, end) in ns; see `sim.report.lanes`."""
        from sim.report.draw import named
        from sim.report.lanes import plot_lanes

        return named(plot_lanes(self.log, window), self.name)

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Write the run for ui.perfetto.dev, to `x.pftrace` or `x.json`; see `sim.report.timeline`."""
        from sim.report.timeline import write_timeline

        return write_timeline(self.log, path)

    def report(self, path: str | os.PathLike[str], *, command: str = "") -> Path:
        """Write a report page of this run: one HTML file that needs no network.

        path: the file; it appears complete or not at all.
        command: the command that reproduces the run, to be shown on the page.

        Raises OSError where it cannot be written.
        """
        from sim.pages import report_run

        return report_run(self, path, command=command)

    @cached_property
    def events(self) -> pd.DataFrame:
        """What each engine and link did, and when."""
        return self.log.events

    @cached_property
    def memory(self) -> pd.DataFrame:
        """Every change of each tier's use."""
        return self.log.memory


def to_platform(platform: Platform | str | os.PathLike[str]) -> Platform:
    """A platform as it is, or the one of a profile given by name or file. Raises ProfileError."""
    if isinstance(platform, Platform):
        return platform
    if not isinstance(platform, (str, os.PathLike)):
        raise ProfileError(f"expected a platform or the name of a profile, not a {type(platform).__name__}")
    return load_profile(platform)


def check_trace(trace: Any) -> None:
    """Raise TraceError if this is not a trace."""
    if not isinstance(trace, Trace):
        given = repr(trace) if isinstance(trace, str) else f"a {type(trace).__name__}"
        of_step = "; capture_script(…) and capture(…) of `workloads` return that of a step" if callable(trace) else ""
        raise TraceError(f"expected a trace, not {given}; transformer(…) and load_trace(…) return one{of_step}")


def budget_of(budget: float | str, trace: Trace, platform: Platform) -> int:
    """The bytes of a budget; a part such as "80%" is one of the peak with everything kept in unlimited memory.

    Raises UnitError.
    """
    share = parse_share(budget) if isinstance(budget, str) else None
    return to_bytes(budget) if share is None else int(share * home_peak(reference_run(trace, platform)))


def _traces(trace: Trace | Sequence[Trace]) -> list[Trace]:
    """One trace, or one per iteration, as a list. Raises TraceError where there is none."""
    traces = list(trace) if isinstance(trace, Sequence) and not isinstance(trace, str) else [trace]
    if not traces:
        raise TraceError("expected a trace, or one per iteration, not an empty list")
    for each in traces:
        check_trace(each)
    return traces


def check_replay(seed: Any, recompute_limit: Any) -> None:
    """Raise TiersimError unless the seed is a whole number, and the limit a number or None, each at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise TiersimError(f"seed: value {seed!r}: expected a whole number of at least 0{closest(seed, 0)}")
    is_number = isinstance(recompute_limit, Real) and not isinstance(recompute_limit, bool)
    if recompute_limit is not None and not (is_number and recompute_limit >= 0):
        said = f"recompute_limit: value {recompute_limit!r}"
        hint = closest(recompute_limit, 0, whole=False)
        raise TiersimError(f"{said}: expected a number of at least 0, or None for no limit{hint}")


def check_iterations(count: int) -> None:
    """Raise PolicyError for fewer than one iteration, or more than `MOST_ITERATIONS`."""
    if count < 1:
        raise PolicyError(f"iterations must be at least 1, not {count}{closest(count, 1)}")
    if count > MOST_ITERATIONS:
        raise PolicyError(f"iterations must be at most {MOST_ITERATIONS:,}{closest(count, 1, MOST_ITERATIONS)}")


WITHOUT_HOST = (
    "take a machine that has one (tiersim profiles), describe one in a profile of your own, or take a policy that only "
    "recomputes, such as full_recompute"
)
"""What to do where a policy needs the host, and the machine has none."""


class Evaluated:
    """Of the plans that a planner has replayed the last one and the fastest, with their runs: it mostly returns one."""

    def __init__(self) -> None:
        self._last: tuple[Plan, Run] | None = None
        self._fastest: tuple[Plan, Run] | None = None

    def add(self, plan: Plan, run: Run) -> None:
        """Note a run of a plan."""
        self._last = plan, run
        if self._fastest is None or run.log.end < self._fastest[1].log.end:
            self._fastest = plan, run

    def run_of(self, plan: Plan) -> Run | None:
        """The run of this plan, of which the notes alone may be others now; None if it is not kept."""
        for known, run in filter(None, (self._last, self._fastest)):
            if known is plan:
                return run
            if known.differs_in_notes(plan):
                return replace(run, plan=plan)
        return None


def problem_for(
    trace: Trace,
    platform: Platform,
    *,
    seed: int = 0,
    history: tuple[Run, ...] = (),
    recompute_limit: float | None = RECOMPUTE_LIMIT,
    evaluated: Evaluated | None = None,
) -> Problem:
    """The problem that a policy is asked to solve; see `sim.plan.Problem`.

    evaluated: notes the replays that the policy asks for.
    """

    def evaluate(plan: Plan, budget: int | None = None) -> EventLog:
        machine = platform if budget is None else platform.with_budget(budget)
        known = evaluated.run_of(plan) if evaluated is not None and machine is platform else None
        if known is not None:
            return known.log.copy()
        run = run_iteration(trace, plan, machine, history, recompute_limit=recompute_limit)
        if evaluated is not None and machine is platform:
            evaluated.add(plan, run)
            return run.log.copy()  # what it keeps may be the result
        return run.log

    cost = Prices(trace, platform)
    return Problem(
        trace=trace,
        platform=platform,
        cost=cost,
        evaluate=evaluate,
        seed=seed,
        history=history,
        least_ns=lambda plan: least_ns(plan, platform, cost),
    )


def unlimited(platform: Platform) -> Platform:
    """The same machine with unlimited memory in its home tiers."""
    known = vars(platform)  # a cell of a sweep asks several times
    if "_unlimited" not in known:
        known["_unlimited"] = platform.with_budget(UNLIMITED)
    found: Platform = known["_unlimited"]
    return found


def reference_run(trace: Trace | Sequence[Trace], platform: Platform) -> EventLog:
    """The log of keeping everything with unlimited memory, which slowdown and savings are measured against.

    trace: one trace, or one per iteration. Each iteration starts with carried tensors where the previous one left
        them; the log is that of the last one.
    platform: the machine, whose budget is ignored.
    """
    return _last_log((trace,) if isinstance(trace, Trace) else trace, unlimited(platform), Plan)


def _last_log(traces: Sequence[Trace], platform: Platform, plan_for: Callable[[Trace], Plan]) -> EventLog:
    """The log of the last of these iterations."""
    history: tuple[Run, ...] = ()
    for i, trace in enumerate(traces):
        history = (run_iteration(trace, plan_for(trace), platform, history, last=i == len(traces) - 1),)
    return history[0].log


def _as_unlimited(history: Sequence[Run]) -> EventLog | None:
    """The log of a single run that kept everything and never waited for space: more memory would change nothing."""
    plan, log = history[-1].plan, history[-1].log
    decides = plan.actions or plan.place or plan.online is not None or plan.keep_dead
    if len(history) > 1 or decides or plan.trace is not history[-1].trace or not log.complete:
        return None
    if any(tier.allocator.name != "exact" for tier in log.platform.tiers if tier.device >= 0):
        return None  # how it reuses blocks may depend on how much there is
    waited = (log.interval("why") == WHY["stall"]) & (log.interval("cause") == STALLS.index("space"))
    return None if waited.any() else log


def as_in_ample_memory(run: Run) -> Run | None:
    """The run of the same plan with unlimited memory, where that is the same: nothing in it can have waited for space.

    Where the most that was ever held and the most that anything takes at once fit together, all had space at once.
    """
    plan, log = run.plan, run.log
    if plan.online is not None or plan.keep_dead or not log.complete:
        return None
    t, c = log.trace.tensor_columns, log.trace.op_columns
    results = int(row_sums(c.write_start, t.bytes[c.write_ids]).max(initial=0))
    most = max(int(t.bytes.max(initial=0)), results + int(c.workspace.max(initial=0)))
    homes = {engine.home for engine in log.platform.engines if engine.main}
    peaks = peak_bytes(log)
    for tier in log.platform.tiers:
        if tier.allocator.name != "exact" or (tier.name in homes and peaks[tier.name] + most > tier.capacity):
            return None
    return Run(run.trace, plan, replace(log, platform=unlimited(log.platform)))


def reference_for(
    policy: Policy,
    trace: Trace | Sequence[Trace],
    platform: Platform,
    kept: EventLog | None = None,
    ran: Run | None = None,
) -> Reference:
    """The fastest run with unlimited memory and the same freedoms as a policy.

    policy: the policy; its `unlimited` names the plans that it is compared with.
    trace: one trace, or one per iteration.
    platform: the machine, whose budget is ignored.
    kept: the log of keeping everything, if it has been computed already.
    ran: a run of a plan for that trace, with unlimited memory or `as_in_ample_memory`; if its plan is compared with, it
        is not replayed.

    Raises PolicyFailed where `policy.unlimited` fails.
    """
    traces = (trace,) if isinstance(trace, Trace) else trace
    ample = unlimited(platform)

    planned: dict[int, Mapping[str, Plan]] = {}  # by id: to hash a trace takes longer than most plans
    evaluated = Evaluated() if len(traces) == 1 else None
    if evaluated is not None and ran is not None:
        evaluated.add(ran.plan, ran)

    def plans(each: Trace) -> Mapping[str, Plan]:
        if id(each) not in planned:
            with calling(label(policy)):
                planned[id(each)] = policy.unlimited(problem_for(each, ample, evaluated=evaluated))
        return planned[id(each)]

    def log_of(name: str) -> EventLog:
        plan = plans(traces[-1]).get(name)
        known = evaluated.run_of(plan) if evaluated is not None and plan is not None else None
        if known is not None:
            return known.log
        return _last_log(traces, ample, lambda each: plans(each).get(name) or Plan(each))

    try:
        if kept is None:
            try:
                kept = reference_run(traces, platform)
            except ProfileError:  # an op that its engine cannot run: only the policy's own plans can be compared with
                if not plans(traces[-1]):
                    raise
                kept = log_of(next(iter(plans(traces[-1]))))
        fastest = Reference(kept, kept.end)
        for name in plans(traces[-1]):
            end = log_of(name).end
            if end < fastest.makespan_ns:
                fastest = Reference(kept, end, name)
    except TiersimError:
        raise
    except Exception as error:
        raise PolicyFailed(f"policy {label(policy)!r}: unlimited(): {_fault(policy, error)}") from error
    return fastest


@explained
def simulate(
    trace: Trace | Sequence[Trace],
    platform: Platform | str | os.PathLike[str],
    policy: str | Policy | type[Policy] = "keep_all",
    *,
    budget: float | str | None = None,
    iterations: int | None = None,
    seed: int = 0,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
    parallel: Layout | Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Result:
    """Run a trace under a policy and return the steady state.

    trace: one trace, or one per iteration.
    platform: a platform, or the name or file of a profile.
    policy: a name, `path/to/file.py:Class`, a policy or its class.
    budget: bytes in every device's home tier, as an int or text such as "7 GB"; "80%" of the peak of the first trace
        with everything kept in unlimited memory; None for the platform's own.
    iterations: how many to run, each planned with the history of the previous ones; by default one more than the
        policy's `warm_up`. Each iteration starts with carried tensors where the previous one left them, unless its
        plan places them. The last one is the result; at its end, tensors that are not where they began move back.
    seed: for policies that draw random numbers.
    recompute_limit: how many times the ideal time of the trace (every op once, one after the other) recomputation may
        take before the run is refused as thrashing; None for no limit.
    parallel: how the trace runs on many devices, a `Layout` or a table of its fields, such as
        `{"pp": 4, "micro_batches": 8}`; None for the devices that it has.
    parameters: parameters of the policy.

    Raises OutOfMemory, Infeasible, Thrashing or Deadlock where the trace cannot run within the budget; PolicyError,
    PolicyFailed or IllegalPlan where the policy is at fault; ProfileError, TraceError, LayoutError, UnitError or
    TiersimError for bad arguments.
    """
    check_replay(seed, recompute_limit)
    traces, machine = _laid_out(_traces(trace), platform, parallel)
    chosen = load(policy, **parameters)
    name = policy if isinstance(policy, str) else type(chosen).__name__
    if "gradients" in chosen.manages and any(each.meta.get("gradient_buffer") for each in traces):
        raise PolicyError(f"{name}: manages gradients, and gradient_buffer keeps them in buffers on the device")
    count = iterations if iterations is not None else max(len(traces), chosen.warm_up + 1)
    check_iterations(count)
    limited = machine if budget is None else machine.with_budget(budget_of(budget, traces[0], machine))
    history: tuple[Run, ...] = ()
    plan_s = 0.0
    for i in range(count):
        current, evaluated, last = traces[min(i, len(traces) - 1)], Evaluated(), i == count - 1
        plan = None
        started = time.perf_counter()
        try:
            problem = problem_for(
                current, limited, seed=seed, history=history, recompute_limit=recompute_limit, evaluated=evaluated
            )
            with calling(name):
                plan = chosen.plan(problem)
                plan_s += time.perf_counter() - started
                if not isinstance(plan, Plan):
                    kind = "None" if plan is None else f"a {type(plan).__name__}"
                    raise PolicyFailed(f"policy {name!r}: plan() returned {kind}, expected a Plan")
                _check_capture(name, plan, limited)
                run = evaluated.run_of(plan)  # of an iteration that might be the last one
                if run is None or not (last or nothing_returned(run)):
                    run = run_iteration(current, plan, limited, history, last=last, recompute_limit=recompute_limit)
            history = (*history, run)
        except Infeasible as error:
            error.plan = plan
            if plan is not None and error.log is not None:
                nominal, record = machine.home(0).nominal, refusal_record(error)
                error.attempt = Result(chosen, name, limited, plan, error.log, nominal, history, plan_s, refusal=record)
            raise
        except PolicyError as error:
            if limited.host is None and "host" in chosen.needs:
                raise PolicyError(f"{error}; {WITHOUT_HOST}") from error
            raise
        except TiersimError:
            raise
        except BaseException as error:  # `sys.exit()` in a policy must not end the program
            if type(error) is KeyboardInterrupt:  # from the user
                raise
            raise PolicyFailed(f"policy {name!r}: {_fault(chosen, error)}") from error
    return Result(
        policy=chosen,
        name=name,
        platform=limited,
        plan=history[-1].plan,
        log=history[-1].log,
        nominal=machine.home(0).nominal,
        warm_up=history[:-1],
        plan_s=plan_s,
        reference=lambda: _reference_of(chosen, machine, history),
        trace=history[-1].trace,
    )


def _reference_of(policy: Policy, platform: Platform, history: Sequence[Run]) -> Reference:
    """What the last of these runs of a policy is compared with."""
    kept, ran = _as_unlimited(history), as_in_ample_memory(history[-1])
    return reference_for(policy, [run.trace for run in history], platform, kept, ran)


def _laid_out(
    traces: list[Trace], platform: Platform | str | os.PathLike[str], parallel: Layout | Mapping[str, Any] | None
) -> tuple[list[Trace], Platform]:
    """The traces and the platform as a layout makes them."""
    if parallel is None or not traces:
        return traces, to_platform(platform)
    found = [lay_out(each, platform, parallel) for each in traces]
    return [each for each, _ in found], found[0][1]


def _check_capture(name: str, plan: Plan, platform: Platform) -> None:
    """Raise PolicyError for a plan that cannot run as one captured graph, where the platform has it run so."""
    if not any(known.is_graph for known in platform.dispatch):
        return
    instead = 'dispatch = "cpu" launches ops one by one'
    if plan.online is not None:
        raise PolicyError(f"policy {name!r} decides while it runs, which a captured graph cannot; {instead}")
    for op, engine in plan.trace.op_columns.engine.items():
        unit = platform.engines[platform.engine_for(int(plan.trace.op_columns.device[op]), engine)]
        if unit.device < 0:
            what = plan.trace.op_columns.name[op]
            raise PolicyError(f"policy {name!r} runs op {what!r} on {unit.name!r}, which no graph captures; {instead}")


def _fault(policy: Policy, error: BaseException) -> str:
    """Where an exception was raised, if possible as a line of the policy's own file, and its message, in one line."""
    # an exception of an online part arrives as a copy whose cause has the traceback
    chain = [each for each in (error, error.__cause__) if each is not None]
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    plan_code = getattr(type(policy).plan, "__code__", None)
    frame = next(
        (each for each in reversed(frames) if plan_code and each.filename == plan_code.co_filename), frames[-1]
    )
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{Path(frame.filename).name} line {frame.lineno}: {text}"


__all__ = [
    "Prices",
    "Result",
    "as_in_ample_memory",
    "check_trace",
    "problem_for",
    "reference_for",
    "reference_run",
    "simulate",
    "to_platform",
    "unlimited",
]
