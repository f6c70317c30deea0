"""What an online part may know of the op that a device has just reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.plan import Memory, Problem
from sim.trace.columns import row_sums
from sim.trace.op import PHASE_CODE


@dataclass(frozen=True, eq=False)
class Upcoming:
    """Per op the tier where its results are born, the bytes that it takes there, what it reads, whether it is backward.

    size: bytes per tensor.
    capacity: bytes of each such tier.
    """

    home: Sequence[str]
    makes: Sequence[int]
    reads: Sequence[tuple[int, ...]]
    backward: Sequence[bool]
    size: Sequence[int]
    capacity: Mapping[str, int]

    def room(self, op: int, memory: Memory) -> int:
        """Bytes left in an op's tier beyond what it makes, and what it reads that has yet to come there."""
        tier = self.home[op]
        away = (t for t in {*self.reads[op]} if tier not in memory.where(t) and memory.in_flight(t) != tier)
        return memory.free(tier) - self.makes[op] - sum(self.size[t] for t in away)


def upcoming_of(problem: Problem) -> Upcoming:
    """The ops of a problem's trace, each as its device reaches it. In place, an op takes no space for a result."""
    trace, platform = problem.trace, problem.platform
    c, t = trace.op_columns, trace.tensor_columns
    homes = [platform.home(device).name for device in range(trace.devices)]
    fresh = np.where(t.replaces[c.write_ids] < 0, t.bytes[c.write_ids], 0)
    return Upcoming(
        home=[homes[device] for device in c.device.tolist()],
        makes=(row_sums(c.write_start, fresh) + c.workspace).tolist(),
        reads=trace.distinct_reads,
        backward=(c.phase == PHASE_CODE["backward"]).tolist(),
        size=t.bytes.tolist(),
        capacity={name: platform.tier(name).capacity for name in homes},
    )
