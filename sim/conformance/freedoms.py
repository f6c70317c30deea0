"""Against the clock: memory that is saved is paid for in time, or not at all, never with a gain."""

from __future__ import annotations

from sim.conformance.replayed import LawBroken, Replayed
from sim.experiment import reference_for
from sim.units import format_time


def check_unlimited(run: Replayed) -> None:
    """Law 11: no lossless policy is faster than unlimited memory with the same freedoms."""
    if not run.done or not run.policy.lossless:
        return
    assert run.log is not None
    best = reference_for(run.policy, run.trace, run.platform)
    if run.log.end < best.makespan_ns:
        raise LawBroken(
            f"it takes {format_time(run.log.end)}, but unlimited memory ({best.name}) {format_time(best.makespan_ns)}: "
            "a freedom to make the work itself faster belongs into `unlimited`"
        )
