"""The trace as a planner for the devices' memory counts it: what lies in other tiers takes nothing there."""

from __future__ import annotations

import numpy as np

from sim.hardware.cost import first_engines, op_times
from sim.plan import Problem
from sim.trace.index import TraceIndex


def index_of(problem: Problem) -> TraceIndex:
    """Reads, writes and sizes of a problem's trace; sizes and workspaces outside the devices' home tiers are 0.

    A tensor begins in the home tier of the engine that first makes or uses it, a workspace lies in that of the op's. So
    the states of an optimizer that runs on the host's processor take nothing of a device's budget.
    """
    trace, platform = problem.trace, problem.platform
    index = TraceIndex(trace)
    homes = {platform.home(device).name for device in range(trace.devices)}
    inside = np.array([engine.home in homes for engine in platform.engines])
    if not inside.all():
        engine = op_times(trace, platform).engine
        first = first_engines(trace, engine, platform.engine_for(0))
        index.size = np.where(inside[first], index.size, 0).tolist()
        index.workspace = np.where(inside[engine], index.workspace, 0).tolist()
    return index
