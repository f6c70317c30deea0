"""Why a run is refused, in words: no space, thrashing, or nothing can happen any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.engine.event_path.state import State
from sim.engine.prepare import Prepared
from sim.errors import OutOfMemory, Thrashing
from sim.hardware.platform import Platform
from sim.units import format_time

Asked = tuple[int, int, int, str]
"""A request for space: tier, bytes, the op that asks (-1 for none), and what for."""

HOLDERS = 10
"""How many of the largest residents an error names; its text three."""


class RecomputeLimit:
    """How much a run may recompute: a multiple of the ideal time of the trace, None for no limit."""

    def __init__(self, prepared: Prepared, limit: float | None) -> None:
        self._prepared = prepared
        self._limit = limit
        self._spent_ns = 0

    def spend(self, op: int) -> None:
        """An op is to be recomputed. Raises Thrashing past the limit."""
        self._spent_ns += max(1, self._prepared.total[op])
        limit, ideal = self._limit, self._prepared.ideal_ns
        if limit is not None and self._spent_ns > limit * ideal:
            raise Thrashing(
                f"op {self._prepared.trace.op_columns.name[op]!r}: recomputation takes more than {limit:g} times "
                f"the {format_time(ideal)} that all ops take once: the run thrashes",
                recompute_ns=self._spent_ns,
                ideal_ns=ideal,
                limit=limit,
            )


def out_of_memory(state: State, request: Asked) -> OutOfMemory:
    """The error of a request that cannot be met, with the table of holders."""
    tier, prepared, space, residency = request[0], state.prepared, state.space, state.residency
    held = [
        (space.size_in(tensor, tier), tensor)
        for tensor in range(len(prepared.size))
        if residency.has_copy(tensor, tier) or space.has_taken(tensor, tier)
    ]
    return no_space(state.platform, prepared, request, space.used, held, space.largest_free_block(tier))


def no_space(
    platform: Platform,
    prepared: Prepared,
    request: Asked,
    used: Sequence[int],
    held: Iterable[tuple[int, int]],
    largest: int,
) -> OutOfMemory:
    """The error of a request that cannot be met, with the table of holders.

    used: bytes per tier. held: bytes and number of each tensor in the tier that is asked. largest: its largest free
    block.
    """
    tier, bytes, op, reason = request
    name, tensors = platform.tiers[tier].name, prepared.trace.tensors
    most = sorted((-size, tensor) for size, tensor in held)[:HOLDERS]
    holders = tuple((tensors[t].name, -size, tensors[t].role) for size, t in most)
    what = f"op {prepared.trace.op_columns.name[op]!r}" if op >= 0 else "the start"
    top = ", ".join(f"{holder} ({size:,} B)" for holder, size, _ in holders[:3])
    free = [each.capacity - taken for each, taken in zip(platform.tiers, used, strict=True)]
    full = [i for i, other in enumerate(platform.tiers) if i != tier and other.device < 0 and free[i] < bytes]
    others = ", ".join(
        f"{platform.tiers[i].name!r} ({free[i]:,} B of {platform.tiers[i].capacity:,} B free)" for i in full
    )
    hole = f"largest free block {largest:,} B"
    if largest >= bytes:  # an allocator that caches serves small and large requests from segments of their own
        hole = f"not enough for a segment that serves this size, though a request of {largest:,} B would be served"
    return OutOfMemory(
        f"{what} needs {bytes:,} B in {name!r} for {reason}; {free[tier]:,} B of {platform.tiers[tier].capacity:,} B "
        f"are free ({hole}); largest holders: {top or 'none'}"
        + (f"; nor do that many fit in {others}" if others else ""),
        tier=name,
        need_bytes=bytes,
        free_bytes=free[tier],
        largest_hole_bytes=largest,
        holders=holders,
        full=(name, *(platform.tiers[i].name for i in full)),
    )


def waiting_transfers(state: State) -> Sequence[str]:
    """The transfers under way, for a deadlock's list of waiters."""
    names = state.prepared.trace.tensor_columns.name
    return [
        f"the copy of {names[tensor]!r} to {state.space.names[transfer.target]!r} {transfer.stage}"
        for tensor, transfer in sorted(state.residency.in_flight.items())
    ]


def stuck_transfer(state: State) -> Asked | None:
    """The request of a transfer that waits for space to the end, if there is one."""
    for tensor, transfer in sorted(state.residency.in_flight.items()):
        if transfer.waits and not state.space.fits(transfer.target, transfer.size):
            name = state.prepared.trace.tensor_columns.name[tensor]
            return transfer.target, transfer.size, transfer.op, f"the copy of {name!r}, which waits to the end"
    return None
