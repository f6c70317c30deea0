"""Offload everything that backward needs, and prefetch it shortly before its use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from sim.errors import PolicyError
from sim.plan import Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.sharing import alike, shared
from sim.solvers.cascade import cascade
from sim.trace.chain import BACKWARD, backward_ops, saved_tensors
from sim.trace.graph import Trace
from sim.trace.layers import has_layers, layer_runs


@dataclass(frozen=True, kw_only=True)
class SwapAll(Policy):
    """Offload every saved activation after its last forward use; prefetch it one block ahead in backward.

    Source: the naive plan that swapping papers measure themselves against (vDNN_all without its
        layer-end synchronisation, arXiv 1602.08124; TFLMS's lower anchor, arXiv 1807.02037).
    Bounds: each saved byte crosses the link twice; no device ever waits for an offload, except for its
        space. Time O(ops + tensors).
    Departs: a tensor whose prefetch would have to start before any other op has run is not offloaded, nor one last
        used on another engine or in a group, whose ends the device does not see. An offload that has not
        begun when its tensor is to be prefetched is cancelled, and so is one for which the host never had space (both
        are counted as `moves_cancelled`); one under way ends unused. The tensor stays, and nothing is copied back.
        Tensors beyond the host's capacity go on to the next tier behind it, where there is one.

    ahead: how many units before the unit of its first backward reader a tensor's prefetch starts; at the
        first backward op at the earliest.
    unit: `block` for the backward ops of one layer (of no layer: a run of them; each op alone where the
        trace has no layers), or `op`.
    Raises PolicyError for an unknown unit, a negative `ahead`, or a platform without a host tier.
    """

    moves = True
    needs = frozenset({"host"})
    fidelity = "equations"
    plans_from = "machine"
    other_values = by_parameter(ahead=2, unit="op")

    ahead: Annotated[int, Ge(0)] = 1
    unit: Literal["block", "op"] = "block"

    def plan(self, problem: Problem) -> Plan:
        """Two moves for each tensor that leaves."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"swap_all: {platform.name} has no host tier to offload to")
        host = platform.host.name
        homes = tuple(platform.home(each).name for each in range(trace.devices))
        has_bytes = trace.tensor_columns.bytes > 0
        key = "swap_all", self, host, homes, has_bytes.tobytes()
        moves = alike(trace, key, lambda: self._moves(trace, host, homes, has_bytes.tolist()))
        return Plan(trace, cascade(trace, platform, moves, host))

    def _moves(self, trace: Trace, host: str, homes: Sequence[str], has_bytes: Sequence[bool]) -> tuple[Move, ...]:
        """The two moves of each tensor that leaves."""
        prefetch_at, place = _prefetch_points(trace, self.ahead, self.unit == "op"), _places(trace)
        phase, device = trace.op_columns.phase.tolist(), trace.op_columns.device.tolist()
        producer = trace.producer.tolist()
        engine, group = trace.op_columns.engine, trace.op_columns.group
        kept = set(trace.outputs)
        out: list[Move] = []
        back: list[tuple[int, Move]] = []
        for t in saved_tensors(trace).tolist():
            readers = trace.readers(t)
            needed = next(op for op in readers if phase[op] == BACKWARD)
            last = max([op for op in readers if op < needed], default=producer[t])
            start = prefetch_at[needed]
            if t in kept or not has_bytes[t] or device[last] != device[start]:
                continue
            if place[start] <= place[last] + 1 or last in engine or last in group:
                continue
            out.append(Move(t, host, after=last))
            back.append((needed, Move(t, homes[device[needed]], before=start)))
        # copies in that start together queue in the order in which they are needed
        return (*out, *(move for _, move in sorted(back, key=lambda one: one[0])))


def _places(trace: Trace) -> dict[int, int]:
    """Per op its position among the ops of its device."""
    counts: dict[int, int] = {}
    places = {}
    for op, device in enumerate(trace.op_columns.device.tolist()):
        places[op] = counts[device] = counts.get(device, -1) + 1
    return places


def _prefetch_points(trace: Trace, ahead: int, by_op: bool) -> dict[int, int]:
    """Per backward op the op before which a prefetch for it starts: the first of the unit `ahead` units back."""
    ops, device = backward_ops(trace).tolist(), trace.op_columns.device
    units = [[op] for op in ops] if by_op or not has_layers(trace) else layer_runs(trace, ops)
    starts: dict[int, list[int]] = {}
    points = {}
    for unit in units:
        here = starts.setdefault(int(device[unit[0]]), [])
        here.append(unit[0])
        points.update(dict.fromkeys(unit, here[max(len(here) - 1 - ahead, 0)]))
    return points
