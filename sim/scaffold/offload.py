"""Offload a share of the activations, the largest first, and prefetch each a little before backward reads it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from sim.errors import PolicyError
from sim.plan import Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.solvers.cascade import cascade
from sim.trace.chain import BACKWARD, backward_ops, saved_tensors


@dataclass(frozen=True, kw_only=True)
class ScaffoldOffload(Policy):
    """Move the largest activations to the host after their last forward reader, and back ahead of backward.

    What is last used on another engine or in a group stays, since the device does not see those end; so does what
    would have to come back at once.
    Source: none; this is what `tiersim policies --new` starts from.
    Bounds: each tensor crosses each link once. Time O(n log n) for n tensors.
    Departs: from nothing that was published.

    share: of the bytes that backward reads of forward's results, the most that is offloaded.
    ahead: how many backward ops before its first backward reader a tensor is prefetched.
    Raises PolicyError for a platform without a host tier.
    """

    moves = True
    needs = frozenset({"host", "backward"})
    fidelity = "reconstruction"
    other_values = by_parameter(share=0.9, ahead=0)

    share: Annotated[float, Ge(0), Le(1)] = 0.5
    ahead: Annotated[int, Ge(0)] = 4

    def plan(self, problem: Problem) -> Plan:
        """Two moves for each offloaded tensor; what does not fit into the host goes on to the tier behind it."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"{platform.name} has no host tier to offload to")
        c, size = trace.op_columns, trace.tensor_columns.bytes.tolist()
        device, phase = c.device.tolist(), c.phase
        saved = saved_tensors(trace).tolist()
        remaining = int(self.share * sum(size[t] for t in saved))
        out: list[Move] = []
        back: list[tuple[int, Move]] = []
        for t in sorted(saved, key=lambda t: (-size[t], t)):
            readers = trace.readers(t)
            needed = next(op for op in readers if phase[op] == BACKWARD)
            last = max((op for op in readers if op < needed), default=int(trace.producer[t]))
            backward = [op for op in backward_ops(trace).tolist() if device[op] == device[needed]]
            start = backward[max(bisect_left(backward, needed) - self.ahead, 0)]
            if not 0 < size[t] <= remaining or t in trace.outputs or last in c.engine or last in c.group:
                continue
            if device[last] != device[start] or start <= last + 1:
                continue
            remaining -= size[t]
            out.append(Move(t, platform.host.name, after=last))
            back.append((needed, Move(t, platform.home(device[needed]).name, before=start)))
        # copies that start together queue in the order in which they are needed
        moves = (*out, *(move for _, move in sorted(back, key=lambda pair: pair[0])))
        return Plan(trace, cascade(trace, platform, moves, platform.host.name))
