"""Searches over runs: the smallest budget at which a policy fits, the largest batch that fits a budget.

Both bisect. A policy need not be monotone in its budget: it may fit a smaller budget and fail with a larger one. This
holds for online policies, whose decisions depend on what is full at the moment; for offline plans that prefetch, since
a prefetch that finds free space takes it from the ops that follow; and for planners, which plan each budget separately.
The result is therefore *a* boundary: a budget that was run and fits, and one below it, within the tolerance, that was
run and does not. It is known to be the minimum only where it is the least that any op needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sim.analysis.bounds import bounds
from sim.analysis.peak_memory import home_peak, peak_bytes
from sim.errors import Deadlock, Infeasible, WorkloadError
from sim.experiment import check_trace, reference_run, simulate, to_platform, unlimited
from sim.hardware.platform import Platform
from sim.policies.base import Policy
from sim.trace.graph import Trace


def fits(
    trace: Trace, platform: Platform | str | os.PathLike[str], policy: str | Policy | type[Policy], **options: Any
) -> bool:
    """Whether a run completes; the arguments are those of `simulate`."""
    try:
        simulate(trace, platform, policy, **options)
    except (Infeasible, Deadlock):
        return False
    return True


def smallest_budget(
    trace: Trace,
    platform: Platform | str | os.PathLike[str],
    policy: str | Policy | type[Policy] = "keep_all",
    *,
    tolerance: float = 0.005,
    **options: Any,
) -> int | None:
    """The smallest budget in bytes found to fit, by bisection; None if none fits.

    The search starts between the least that any op needs and what keeping everything needs, or what the policy uses
    with unlimited memory where that is more (fast implementations with large workspaces). A policy that is not monotone
    may fit an even smaller budget, see the module's text.

    trace: the trace to run.
    platform: a platform, or the name or file of a profile.
    policy: see `simulate`.
    tolerance: the result is this close, relatively, to a budget that does not fit.
    options: further arguments of `simulate`.
    """
    check_trace(trace)
    platform = to_platform(platform)
    everything = reference_run(trace, platform)
    homes = [platform.home(device).name for device in range(trace.devices)]
    least = low = max(bounds(everything, home).memory_bytes for home in homes)
    high = max(peak_bytes(everything)[home] for home in homes)
    high_fits = fits(trace, platform, policy, budget=high, **options)
    if not high_fits:
        low, high = high, _unlimited_peak(trace, platform, policy, **options)
        high_fits = high > low and fits(trace, platform, policy, budget=high, **options)
    if fits(trace, platform, policy, budget=least, **options):
        return least
    if not high_fits:
        return None
    while high - low > max(1, int(tolerance * high)):
        middle = (low + high) // 2
        if fits(trace, platform, policy, budget=middle, **options):
            high = middle
        else:
            low = middle
    return high


def _unlimited_peak(trace: Trace, platform: Platform, policy: str | Policy | type[Policy], **options: Any) -> int:
    """The peak of a policy with unlimited memory, in bytes; 0 where it fails even then."""
    try:
        return home_peak(simulate(trace, unlimited(platform), policy, **options).log)
    except (Infeasible, Deadlock):
        return 0


def largest_batch(
    make_trace: Callable[[int], Trace],
    platform: Platform | str | os.PathLike[str],
    policy: str | Policy | type[Policy] = "keep_all",
    *,
    limit: int = 1 << 16,
    **options: Any,
) -> int:
    """The largest batch found to fit, by doubling, then bisection; 0 if not even one sample fits.

    make_trace: batch size -> trace, for example `lambda b: transformer("gpt2", batch=b, sequence=1024)`.
    platform: a platform, or the name or file of a profile.
    policy: see `simulate`.
    limit: the largest batch to try.
    options: further arguments of `simulate`.

    Raises WorkloadError where `make_trace` is not a function.
    """
    if not callable(make_trace):
        model = make_trace if isinstance(make_trace, str) else "gpt2"
        raise WorkloadError(f"expected a function of the batch size: lambda b: transformer({model!r}, batch=b, …)")
    platform = to_platform(platform)
    fitting, failing = 0, 1
    while failing <= limit and fits(make_trace(failing), platform, policy, **options):
        fitting, failing = failing, failing * 2
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(make_trace(middle), platform, policy, **options):
            fitting = middle
        else:
            failing = middle
    return fitting
