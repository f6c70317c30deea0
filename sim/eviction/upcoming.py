"""What an online part may know of the op that a device has just reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.plan import Problem
from sim.trace.op import PHASE_CODE


@dataclass(frozen=True, eq=False)
class Upcoming:
    """Per op the tier where its results are born, the bytes that it takes there, what it reads, whether it is backward.

    capacity: bytes of each such tier.
    """

    home: Sequence[str]
    makes: Sequence[int]
    reads: Sequence[tuple[int, ...]]
    backward: Sequence[bool]
    capacity: Mapping[str, int]


def upcoming_of(problem: Problem) -> Upcoming:
    """The ops of a problem's trace, each as its device reaches it. In place, an op takes no space for a result."""
    trace, platform = problem.trace, problem.platform
    c, t = trace.op_columns, trace.tensor_columns
    homes = [platform.home(device).name for device in range(trace.devices)]
    ops = range(len(trace.ops))
    return Upcoming(
        home=[homes[device] for device in c.device.tolist()],
        makes=[int(c.workspace[i]) + sum(int(t.bytes[w]) for w in trace.writes(i) if t.replaces[w] < 0) for i in ops],
        reads=[trace.reads(i) for i in ops],
        backward=(c.phase == PHASE_CODE["backward"]).tolist(),
        capacity={name: platform.tier(name).capacity for name in homes},
    )
