"""Law 11, first half: saving memory may cost time or nothing, but never gains time."""

from __future__ import annotations

from contextlib import suppress

from sim.conformance.costs import check_costs
from sim.conformance.order import crossing
from sim.conformance.replayed import LawBroken, Replayed, replayed
from sim.conformance.values import check_values
from sim.errors import ProfileError
from sim.experiment import problem_for, reference_for, unlimited
from sim.hardware.ideal import ideal_ns
from sim.units import format_time


def check_unlimited(run: Replayed) -> None:
    """Law 11: no lossless policy is faster than unlimited memory with the same freedoms.

    Where engines use tensors that no tier in reach of all of them holds, the reference copies each when its reader is
    reached. A policy that moves is free to copy it before that: it is held to the time of the ops alone, their longest
    chain and the busiest engine.
    """
    if not run.done or not run.policy.lossless:
        return
    assert run.log is not None
    ample = unlimited(run.platform)
    plans = run.policy.unlimited(problem_for(run.trace, ample))
    for name, plan in plans.items():
        claimed = replayed(run.policy, plan, run.trace, ample, seed=run.seed)
        for check in (check_values, check_costs):
            try:
                check(claimed)
            except LawBroken as error:
                raise LawBroken(f"unlimited memory ({name}): {error}") from None
    best = reference_for(run.policy, (run.trace,) * (len(run.history) + 1), run.platform)
    least, name = best.makespan_ns, best.name
    traces = (run.trace, *(plan.trace for plan in plans.values()))
    if run.policy.moves and any(crossing(trace, run.platform) for trace in traces):
        for trace in traces:
            with suppress(ProfileError):  # one with an op that its engine cannot run
                least, name = min((least, name), (ideal_ns(trace, run.platform), "copies at no time"))
    if run.log.end < least:
        raise LawBroken(
            f"it takes {format_time(run.log.end)}, but unlimited memory ({name}) {format_time(least)}: "
            "a freedom to make the work itself faster belongs into `unlimited`"
        )
