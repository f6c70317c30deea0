"""What PyTorch's allocator reserves where blocks of collectives are held until the CPU knows that these have ended.

Up to 2.7 PyTorch records NCCL's stream on the tensors of a collective (`Tensor.record_stream`). A block that is freed
is then reused only when the CPU, as it asks for another, sees that the collective has ended. But the CPU runs ahead of
the device, by up to as many kernels as the queue of launches holds: so what a layer gathers for a moment stays in use
for all layers that the CPU is ahead, and the allocator reserves more. Since 2.2 collectives that gather or scatter and
for whose result the program waits at once are not recorded, since 2.8 none is. Where nothing else fits the allocator
waits for what is held.

PyTorch, c10/cuda/CUDACachingAllocator.cpp (`process_events`, `synchronize_and_free_events`); pull requests 111431 and
150398; pytorch/torchtitan, docs/composability.md. A collective is taken to be waited for at once where the op that its
device runs next reads what it writes.

PaddlePaddle (2.5) records likewise, on the tensor that a collective is given, where that has a stream of its own: those
of gradients and weights among replicas have (`group_sharded_stage2.py`: each gradient is reduced, then freed), those of
tensor parallelism run on the stream of the kernels (`mp_ops.py`: `use_calc_stream=True`). Sources:
paddle/fluid/distributed/collective/process_group_nccl.cc (`Collective`), paddle/fluid/memory/allocation/
stream_safe_cuda_allocator.cc (`ProcessUnfreedAllocations`).

The CPU waits for the device where `sim.hardware.dispatch` says so, and, under Megatron-LM's kernels, for each send and
receive (`batch_p2p_sync` of megatron/core/model_parallel_config.py, by default). Departs: other programs wait for no
device, whatever they print; captured graphs have pools of their own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from sim.engine.allocators import Blocks, make_allocator
from sim.errors import TiersimError
from sim.hardware.cost import kernels, op_times
from sim.hardware.dispatch import dispatched
from sim.log import CAUSE, WHY, EventLog, Ints
from sim.trace.op import KIND_CODE

MADE, OVERWRITTEN = CAUSE["made"], CAUSE["overwritten"]
SEND, RECV = KIND_CODE["send"], KIND_CODE["recv"]
EXCHANGES = KIND_CODE["collective"], SEND, RECV
WAITS_FOR_SENDS = ("fused",)
"""Stacks whose kernels are Megatron-LM's, where the CPU waits for each send and receive (`batch_p2p_sync`)."""
SYNCHRONOUS_UNRECORDED, UNRECORDED = (2, 2), (2, 8)
"""The versions since which collectives that a program waits for at once, and since which all, are not recorded."""


def version_of(pytorch: object) -> tuple[int, int]:
    """The version of PyTorch that a text names, such as "2.3". Raises TiersimError where it names none."""
    found = re.match(r"(\d+)\.(\d+)", pytorch, re.ASCII) if isinstance(pytorch, str) else None
    if found is None:
        nearest = f"{pytorch}" if isinstance(pytorch, float) else "2.8"
        raise TiersimError(f"pytorch: needs a version, has {pytorch!r}; nearest: '{nearest}'")
    return int(found[1]), int(found[2])


def recorded_exchanges(log: EventLog, device: int, pytorch: str) -> list[int]:
    """The ops of a device whose tensors NCCL's stream is recorded on, in a version of PyTorch ("2.3").

    Raises TiersimError where that names no version.
    """
    version = version_of(pytorch)
    if version >= UNRECORDED:
        return []
    c = log.trace.op_columns
    own = np.flatnonzero((c.device == device) & np.isin(c.kind, EXCHANGES)).tolist()
    if version < SYNCHRONOUS_UNRECORDED:
        return own
    return [op for op in own if not (_is_one_pass(log, op) and _is_awaited(log, op))]


def recorded_in_paddle(log: EventLog, device: int) -> list[int]:
    """The ops of a device whose tensors NCCL's stream is recorded on by PaddlePaddle."""
    c = log.trace.op_columns
    return sorted(op for op, ring in c.ring.items() if c.device[op] == device and ring.axis == "data")


def _is_one_pass(log: EventLog, op: int) -> bool:
    """Whether it gathers or scatters: `all_gather_into_tensor`, `reduce_scatter_tensor`."""
    ring = log.trace.op_columns.ring.get(op)
    return ring is not None and ring.passes == 1


def _is_awaited(log: EventLog, op: int) -> bool:
    """Whether the op that its device is given next reads what it writes."""
    trace = log.trace
    device = trace.op_columns.device
    later = next((each for each in range(op + 1, len(device)) if device[each] == device[op]), -1)
    return later >= 0 and not set(trace.writes(op)).isdisjoint(trace.reads(later))


def reserved_with_streams(log: EventLog, device: int, recorded: list[int], launches: int) -> int | None:
    """The most bytes that the allocator of a device's memory reserves; None where it reserves none beyond use.

    recorded: the ops whose blocks are held until the CPU sees that they have ended.
    launches: how many kernels the CPU may be ahead of the device.

    Raises TiersimError where the blocks held, even when all have been waited for, leave no space for the rest.
    """
    tier = log.platform.tier_ids[log.platform.home(device).name]
    if log.platform.tiers[tier].allocator.name != "caching":
        return None
    blocks = make_allocator(log.platform.tiers[tier])
    assert blocks is not None
    until: dict[int, int] = {}
    runs = sorted(_runs(log))
    ended: dict[int, int] = {}
    for _, end, op in runs:
        ended[op] = max(end, ended.get(op, -1))
    for op in recorded:
        for t in (*log.trace.reads(op), *log.trace.writes(op)):
            until[t] = max(until.get(t, -1), ended.get(op, -1))
    own = [run for run in runs if log.trace.op_columns.device[run[2]] == device]
    return _Replay(log, blocks, until, _asked(log, own, launches)).most(log.changes[log.changes[:, 1] == tier])


def _runs(log: EventLog) -> Iterator[tuple[int, int, int]]:
    """Start and end of each run of an op, with the op: of all members of a group, which has one interval."""
    c = log.trace.op_columns
    members: dict[str, list[int]] = {}
    for op, name in c.group.items():
        members.setdefault(name, []).append(op)
    rows = (log.interval("op") >= 0) & (log.interval("why") != WHY["stall"])
    rows &= (log.interval("tensor") < 0) | np.isin(c.kind[log.interval("op")], EXCHANGES)
    for start, end, op in log.intervals[rows][:, [0, 1, 5]].tolist():
        yield from ((start, end, each) for each in members.get(c.group.get(op, ""), (op,)))


def _asked(log: EventLog, runs: Iterable[tuple[int, int, int]], launches: int) -> dict[int, list[tuple[int, int]]]:
    """Per op of a device, of each of its runs, when it ended and when the CPU had dispatched it, in order."""
    trace, platform = log.trace, log.platform
    known, kernel = dispatched(trace, platform, op_times(trace, platform).engine), kernels(trace)
    found: dict[int, list[tuple[int, int]]] = {}
    ahead: deque[tuple[int, int]] = deque()
    waits = trace.meta.get("stack") in WAITS_FOR_SENDS
    count, at = 0, 0 if known is None else known.once
    for start, end, op in runs:
        if known is not None:
            at += int(known.each[op])
            if op in known.synchronized:  # it starts once it has been dispatched, after the wait
                at = max(at, start)
        ahead.append((end, int(kernel[op])))
        count += int(kernel[op])
        while count > launches and len(ahead) > 1:
            done, fewer = ahead.popleft()
            count, at = count - fewer, max(at, done)
        found.setdefault(op, []).append((end, min(at, start)))
        if waits and trace.op_columns.kind[op] in (SEND, RECV):
            at = max(at, end)
    return found


class _Replay:
    """The requests of a log, made of an allocator at the times at which the CPU makes them.

    until: of tensors of collectives, when these have ended.
    held: blocks that are freed but not yet known to be, with that time.
    """

    def __init__(
        self, log: EventLog, blocks: Blocks, until: dict[int, int], asked: dict[int, list[tuple[int, int]]]
    ) -> None:
        self.log, self.blocks, self.until, self.asked = log, blocks, until, asked
        self.size = log.trace.tensor_columns.bytes
        self.handles: dict[tuple[int, int], list[int]] = {}
        self.held: list[tuple[int, int]] = []

    def most(self, changes: Ints) -> int:
        """The most bytes reserved over all changes of the tier."""
        most, rows, taken_over = 0, changes.tolist(), -1
        for i, (time, _, delta, tensor, op, cause) in enumerate(rows):
            key = (tensor, -1 if tensor >= 0 else op)
            if taken_over >= 0:
                self.handles.setdefault(key, []).append(taken_over)
                taken_over = -1
            elif cause == OVERWRITTEN and _is_taken_over(rows[i], rows[i + 1 : i + 2]):
                taken_over = self.handles[key].pop()
            elif delta > 0 or (delta == 0 and not self.handles.get(key)):
                bytes = int(self.size[tensor]) if tensor >= 0 else delta
                self.handles.setdefault(key, []).append(self._take(bytes, self._moment(op, time)))
                most = max(most, self.blocks.reserved)
            else:
                self._give(self.handles[key].pop(), self.until.get(tensor, -1))
        return most

    def _moment(self, op: int, time: int) -> int:
        """When the CPU asked for what an op took at that time."""
        runs = self.asked.get(op, ())
        place = bisect_right(runs, (time, time))
        return min(time, runs[place][1]) if place < len(runs) else time

    def _take(self, bytes: int, now: int) -> int:
        self._release(now)
        handle = self.blocks.take(bytes)
        if handle is None:
            self._release(self.log.end)
            handle = self.blocks.take(bytes)
        if handle is None:
            raise TiersimError(f"{bytes:,} B do not fit beside what NCCL's stream has held, in pieces; nothing is read")
        return handle

    def _give(self, handle: int, until: int) -> None:
        if until >= 0:
            self.held.append((until, handle))
        else:
            self.blocks.give(handle)

    def _release(self, now: int) -> None:
        """Give back the blocks of collectives that have ended by then."""
        held, self.held = self.held, []
        for until, handle in held:
            if until <= now:
                self.blocks.give(handle)
            else:
                self.held.append((until, handle))


def _is_taken_over(row: list[int], following: list[list[int]]) -> bool:
    """Whether the next row is the value that has taken the place of this one's."""
    time, _, delta, _, op, _ = row
    return any((time, -delta, op, MADE) == (each[0], each[2], each[4], each[5]) for each in following)


__all__ = ["recorded_exchanges", "recorded_in_paddle", "reserved_with_streams"]
