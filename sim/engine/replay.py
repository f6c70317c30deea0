"""Replays a plan: the one entry of the engine.

What a run needs of the trace on the platform is prepared (`prepare`) and the plan's actions are resolved (`resolve`).
A run that is a straight sequence takes the array path (`array_path`), one device with copies beside it the copy
path (`copy_path`); any other, and one that fails, takes the event path (`event_path`): devices, engines and links, one
event after the other. All write the same log.
"""

from __future__ import annotations

from collections.abc import Collection

from sim.collecting import uncollected
from sim.engine import array_path
from sim.engine.copy_path import covered, device
from sim.engine.event_path.run import run
from sim.engine.prepare import prepare
from sim.engine.resolve import Resolved
from sim.hardware.platform import Platform
from sim.log import EventLog
from sim.plan import Plan

RECOMPUTE_LIMIT = 100.0
"""The most recomputation of a run, as a multiple of the trace's ideal time; published systems stay below 10."""


def replay(
    plan: Plan,
    platform: Platform,
    *,
    fast: bool = True,
    returned: Collection[int] | None = None,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
) -> EventLog:
    """Run a plan on a platform and return its log; equal inputs give equal logs.

    returned: of the tensors that an iteration starts with and gets back from the one before, those whose place at the
        end must be that of the start; None for all. The others stay where they are.
    recompute_limit: how many times the ideal time of the trace (every op once, one after the other) recomputation may
        take before the run is refused as thrashing; None for no limit.
    fast: whether to take the array path or the copy path where it applies, and else for plain ops the fast path; False
        is slower, with an equal log.

    Raises OutOfMemory and Thrashing (with the partial log), IllegalPlan naming op and tensor, Deadlock naming who
    waits for what, ProfileError and TraceError where trace and platform do not go together.
    """
    with uncollected():  # millions of objects that stay, among which there is no garbage to find
        prepared = prepare(plan.trace, platform)
        resolved = Resolved(plan, platform, prepared)
        if fast and array_path.covers(plan, platform, prepared, resolved):
            log = array_path.run(plan, platform, prepared, resolved, recompute_limit)
            if log is not None:
                return log
        if fast and covered.covers(plan, platform, prepared, resolved):
            log = device.run(plan, platform, prepared, resolved, recompute_limit)
            if log is not None:
                return log
        return run(plan, platform, prepared, resolved, fast=fast, returned=returned, recompute_limit=recompute_limit)
