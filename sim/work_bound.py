"""A time that no run of a plan falls below, from the times of its ops alone."""

from __future__ import annotations

from sim.hardware.platform import Platform
from sim.plan import Cost, Plan


def least_ns(plan: Plan, platform: Platform, cost: Cost) -> int:
    """The least time of a plan.

    cost: times on this platform, of whatever trace.

    A device runs its ops in order, and each other engine its own one after another, none before a device could have
    produced what it reads. 0 where a CPU launches the ops, which overlap.
    """
    if platform.dispatch:
        return 0
    trace, cost = plan.trace, cost.over(plan.trace, platform)
    c = trace.op_columns
    joint = {*c.group, *c.ring}  # they take no engine
    elapsed, ended = [0] * trace.devices, [0] * len(c.name)
    jobs: dict[int, list[tuple[int, int]]] = {}
    for op, device in enumerate(c.device.tolist()):
        if op in joint:
            continue
        if unit := c.engine.get(op):
            producers = trace.producer[list(trace.reads(op))].tolist()
            ready = max((ended[producer] for producer in producers if producer >= 0), default=0)
            jobs.setdefault(platform.engine_for(device, unit), []).append((ready, cost.op_ns(op)))
        else:
            elapsed[device] += cost.op_ns(op)
            ended[op] = elapsed[device]
    return max(*elapsed, *map(_earliest_end, jobs.values()), 0)


def _earliest_end(jobs: list[tuple[int, int]]) -> int:
    """When an engine has done some jobs at the earliest, of which each is ready at a time and takes so long."""
    end = 0
    for ready, takes in sorted(jobs):  # in this order it ends first
        end = max(end, ready) + takes
    return end
