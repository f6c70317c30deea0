"""Law 11, first half: saving memory may cost time or nothing, but never gains time."""

from __future__ import annotations

from sim.conformance.costs import check_costs
from sim.conformance.replayed import LawBroken, Replayed, replayed
from sim.conformance.values import check_values
from sim.experiment import problem_for, reference_for, unlimited
from sim.units import format_time


def check_unlimited(run: Replayed) -> None:
    """Law 11: no lossless policy is faster than unlimited memory with the same freedoms."""
    if not run.done or not run.policy.lossless:
        return
    assert run.log is not None
    ample = unlimited(run.platform)
    for name, plan in run.policy.unlimited(problem_for(run.trace, ample)).items():
        claimed = replayed(run.policy, plan, run.trace, ample, seed=run.seed)
        for check in (check_values, check_costs):
            try:
                check(claimed)
            except LawBroken as error:
                raise LawBroken(f"unlimited memory ({name}): {error}") from None
    best = reference_for(run.policy, (run.trace,) * (len(run.history) + 1), run.platform)
    if run.log.end < best.makespan_ns:
        raise LawBroken(
            f"it takes {format_time(run.log.end)}, but unlimited memory ({best.name}) {format_time(best.makespan_ns)}: "
            "a freedom to make the work itself faster belongs into `unlimited`"
        )
