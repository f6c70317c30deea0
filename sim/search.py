"""Searches over runs: the smallest budget at which a policy fits, the largest batch that fits a budget.

Both bisect. A policy need not be monotone in its budget: it may fit a smaller budget and fail with a larger one. This
holds for online policies, whose decisions depend on what is full at the moment; for offline plans that prefetch, since
a prefetch that finds free space takes it from the ops that follow; and for planners, which plan each budget separately.
The result is therefore *a* boundary: a budget that was run and fits, and one below it, within the tolerance, that was
run and does not. It is known to be the minimum only where it is the least that any op needs, or where the plan ignores
the budget, as far as three budgets tell, and waits for nothing: then it is the peak of one replay with ample memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sim.analysis.bounds import bounds
from sim.analysis.peak_memory import home_peak, peak_bytes
from sim.arguments import explained
from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import Deadlock, Infeasible, TiersimError, WorkloadError
from sim.experiment import check_replay, check_trace, problem_for, reference_run, simulate, to_platform, unlimited
from sim.floors import left_in_place, state_in, waits_for_nothing
from sim.hardware.platform import Platform
from sim.iterations import run_iteration
from sim.plan import Plan
from sim.policies import load
from sim.policies.base import Policy
from sim.trace.graph import Trace

REPLAY = ("seed", "iterations", "recompute_limit")
"""Options of `simulate` that are no parameters of a policy."""

LARGEST = 1 << 16
"""The largest batch that is tried, unless another is asked for."""


def fits(
    trace: Trace, platform: Platform | str | os.PathLike[str], policy: str | Policy | type[Policy], **options: Any
) -> bool:
    """Whether a run completes; the arguments are those of `simulate`."""
    try:
        simulate(trace, platform, policy, **options)
    except (Infeasible, Deadlock):
        return False
    return True


@explained
def smallest_budget(
    trace: Trace,
    platform: Platform | str | os.PathLike[str],
    policy: str | Policy | type[Policy] = "keep_all",
    *,
    tolerance: float = 0.005,
    search: bool = True,
    ran: Plan | None = None,
    **options: Any,
) -> int | None:
    """The smallest budget in bytes found to fit, by bisection; None if none fits.

    The search starts between the least that any op that the policy cannot change, or the state that it leaves in place,
    needs and what keeping everything needs, or what the policy uses with unlimited memory where that is more (fast
    implementations with large workspaces). A plan that ignores the budget is made once and replayed. A policy that is
    not monotone may fit an even smaller budget, see the module's text.

    trace: the trace to run.
    platform: a platform, or the name or file of a profile.
    policy: see `simulate`.
    tolerance: the result is this close, relatively, to a budget that does not fit.
    search: whether to search for a policy that heeds the budget, which plans for each; without, the result is None.
    ran: the policy's plan for some budget that is too small, where it is known.
    options: further arguments of `simulate`.

    Raises TiersimError for a tolerance that is none.
    """
    check_trace(trace)
    check_replay(options.get("seed", 0), options.get("recompute_limit"))
    if not 0 <= tolerance < 1:
        raise TiersimError(f"tolerance: value {tolerance}: expected a number of at least 0 and below 1, such as 0.005")
    platform = to_platform(platform)
    replay = {key: options.pop(key) for key in REPLAY if key in options}
    chosen = load(policy, **options)
    everything = reference_run(trace, platform)
    homes = [platform.home(device).name for device in range(trace.devices)]
    largest = max(bounds(everything, home).memory_bytes for home in homes)
    state = [left_in_place(chosen, each) for each in state_in(everything) if each.tier in homes]
    plan = fixed_plan(trace, platform, chosen, ran or platform.with_budget(max([largest, *state])), **replay)
    # a policy that rewrites the trace may divide the op that needs most, or run it elsewhere
    least = max([1 if chosen.rewrites else largest, *state])
    if plan is not None:
        limit = replay.get("recompute_limit", RECOMPUTE_LIMIT)
        try:
            peaks = peak_bytes(run_iteration(trace, plan, unlimited(platform), recompute_limit=limit).log)
        except (Infeasible, Deadlock):
            return None
        highest = max(peaks[home] for home in homes)
        found: int | None = highest
        below = highest - 1
        if not waits_for_nothing(plan, platform):
            found = _boundary(
                lambda budget: _replays(trace, plan, platform, budget, limit), least, highest, lambda: 0, tolerance
            )
            below = highest - 1 if found is None else found - max(1, int(tolerance * found))
        # one that gives up where memory is too short may plan for it what it plans for plenty, and another in between
        if below < least or _is_plan_at(plan, below, trace, platform, chosen, **replay):
            return found
    if not search:
        return None
    highest = max(peak_bytes(everything)[home] for home in homes)

    def higher() -> int:
        return _unlimited_peak(trace, platform, chosen, **replay)

    return _boundary(
        lambda budget: fits(trace, platform, chosen, budget=budget, **replay), least, highest, higher, tolerance
    )


def _boundary(
    runs: Callable[[int], bool], least: int, high: int, higher: Callable[[], int], tolerance: float
) -> int | None:
    """A budget that fits above one that does not, by bisection.

    runs: whether a budget fits.
    least, high: where to search, in bytes.
    higher: where to search on if `high` does not fit.
    """
    low = least
    high_fits = runs(high)
    if not high_fits:
        low, high = high, higher()
        high_fits = high > low and runs(high)
    if runs(least):
        return least
    if not high_fits:
        return None
    while high - low > max(1, int(tolerance * high)):
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle
    return high


def fixed_plan(
    trace: Trace,
    platform: Platform,
    policy: Policy,
    small: Plan | Platform,
    *,
    seed: int = 0,
    iterations: int | None = None,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
) -> Plan | None:
    """The plan of a policy that ignores the budget; None where it heeds it, decides while it runs, or measures first.

    A policy counts as ignoring the budget if it plans the same for a small one and for unlimited memory.

    small: its plan for that, or the machine to plan for.
    """
    if policy.online or policy.warm_up or (iterations or 1) > 1:
        return None
    tight = small if isinstance(small, Plan) else _planned(trace, small, policy, seed, recompute_limit)
    ample = None if tight is None else _planned(trace, unlimited(platform), policy, seed, recompute_limit)
    return ample if tight is not None and ample is not None and are_same(tight, ample) else None


def _is_plan_at(
    plan: Plan,
    budget: int,
    trace: Trace,
    platform: Platform,
    policy: Policy,
    *,
    seed: int = 0,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
    **_: Any,
) -> bool:
    """Whether a policy plans this for that budget, too, or nothing."""
    planned = _planned(trace, platform.with_budget(budget), policy, seed, recompute_limit)
    return planned is None or are_same(planned, plan)


def _planned(trace: Trace, platform: Platform, policy: Policy, seed: int, recompute_limit: float | None) -> Plan | None:
    """A policy's plan, None where it has none."""
    try:
        plan = policy.plan(problem_for(trace, platform, seed=seed, recompute_limit=recompute_limit))
    except Infeasible:
        return None
    except TiersimError:
        raise
    except Exception:  # a fault of the policy: `simulate` says where
        return None
    return plan if isinstance(plan, Plan) else None


def are_same(plan: Plan, other: Plan) -> bool:
    """Whether both are offline and do the same."""
    return plan.online is None is other.online and plan.keep_dead == other.keep_dead and plan.decides_as(other)


def _replays(trace: Trace, plan: Plan, platform: Platform, budget: int, recompute_limit: float | None) -> bool:
    """Whether a plan runs within a budget."""
    try:
        run_iteration(trace, plan, platform.with_budget(budget), recompute_limit=recompute_limit)
    except (Infeasible, Deadlock):
        return False
    return True


def _unlimited_peak(trace: Trace, platform: Platform, policy: Policy, **options: Any) -> int:
    """The peak of a policy with unlimited memory, in bytes; 0 where it fails even then."""
    try:
        return home_peak(simulate(trace, unlimited(platform), policy, **options).log)
    except (Infeasible, Deadlock):
        return 0


def most_tried(micro_batches: int = 1) -> int:
    """The largest batch that is tried of those that so many micro-batches divide."""
    return max(1, LARGEST // micro_batches) * micro_batches


@explained
def largest_batch(
    make_trace: Callable[[int], Trace],
    platform: Platform | str | os.PathLike[str],
    policy: str | Policy | type[Policy] = "keep_all",
    *,
    limit: int = LARGEST,
    **options: Any,
) -> int:
    """The largest batch found to fit, by doubling, then bisection; 0 if not even one sample fits.

    make_trace: batch size -> trace, for example `lambda b: transformer("gpt2", batch=b, sequence=1024)`.
    platform: a platform, or the name or file of a profile.
    policy: see `simulate`.
    limit: the largest batch to try; where that fits, it is the result, and larger ones may fit.
    options: further arguments of `simulate`.

    Raises WorkloadError where `make_trace` is not a function.
    """
    if not callable(make_trace):
        model = make_trace if isinstance(make_trace, str) else "gpt2"
        raise WorkloadError(f"expected a function of the batch size: lambda b: transformer({model!r}, batch=b, …)")
    platform = to_platform(platform)
    fitting, failing = 0, 1
    while failing <= limit and fits(make_trace(failing), platform, policy, **options):
        fitting, failing = failing, min(failing * 2, limit + 1)
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(make_trace(middle), platform, policy, **options):
            fitting = middle
        else:
            failing = middle
    return fitting
