"""Searches over runs: the smallest budget that a policy fits, the largest batch that fits a budget.

Both bisect. A policy need not be monotone in its budget: a smaller one may fit where a larger does not. Online policies
are like that, since each decision depends on what is full at the moment; so are offline plans that prefetch, since a
prefetch that finds room comes in before the ops that would have needed it; and so are planners, whose plans are made
anew for each budget. What is found is therefore *a* boundary: a budget that was run and fits, and one below it, by the
tolerance, that was run and does not. That no smaller one fits is known only where it is the least that any op needs.
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
    """Whether a policy completes; options as `simulate` takes them."""
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
    """Bytes of the smallest budget found to fit by bisection, within `tolerance` of one that does not.

    None if neither the least nor the most that the search tries fits. A policy that is not monotone may fit still less
    than what is found, see above. The search runs from what one op needs at least to what keeping everything needs, or
    to what the policy takes without a limit where that is more (fast implementations with large workspaces).
    platform: one there is, or the name or file of a profile.
    """
    check_trace(trace)
    platform = to_platform(platform)
    everything = reference_run(trace, platform)
    homes = [platform.home(device).name for device in range(trace.devices)]
    least = low = max(bounds(everything, home).memory_bytes for home in homes)
    high = max(peak_bytes(everything)[home] for home in homes)
    found = fits(trace, platform, policy, budget=high, **options)
    if not found:
        low, high = high, _taken(trace, platform, policy, **options)
        found = high > low and fits(trace, platform, policy, budget=high, **options)
    if fits(trace, platform, policy, budget=least, **options):
        return least
    if not found:
        return None
    while high - low > max(1, int(tolerance * high)):
        middle = (low + high) // 2
        if fits(trace, platform, policy, budget=middle, **options):
            high = middle
        else:
            low = middle
    return high


def _taken(trace: Trace, platform: Platform, policy: str | Policy | type[Policy], **options: Any) -> int:
    """What a policy takes of a home tier that never fills; 0 where it does not even run then."""
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
    """The largest batch found to fit, 0 if not even one sample does; doubling, then bisection.

    make_trace: batch size -> trace, for example `lambda b: transformer("gpt2", batch=b, sequence=1024)`.
    platform: one there is, or the name or file of a profile. Raises WorkloadError where make_trace is no function.
    """
    if not callable(make_trace):
        model = make_trace if isinstance(make_trace, str) else "gpt2"
        raise WorkloadError(f"expected a function of the batch size: lambda b: transformer({model!r}, batch=b, …)")
    platform = to_platform(platform)
    good, bad = 0, 1
    while bad <= limit and fits(make_trace(bad), platform, policy, **options):
        good, bad = bad, bad * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(make_trace(middle), platform, policy, **options):
            good = middle
        else:
            bad = middle
    return good
