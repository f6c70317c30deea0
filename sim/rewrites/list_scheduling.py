"""List scheduling: the order of a block of ops that keeps pipelined or parallel units busy (Gibbons and Muchnick 1986).

A block is a sequence of instructions that read and write registers, or a trace, whose registers are its tensors. An
instruction can be issued when those that it depends on have been, and their weights have passed:

    read after write    it reads what an earlier one wrote last
    write after read    it overwrites what an earlier one reads
    write after write   it overwrites what an earlier one wrote

Each cycle the scheduler issues, of the ready ones, that on the longest weighted path to the end of the block, then that
with the most successors, then the first; it stalls where none is ready. The problem is NP-complete (Hennessy and Gross
1983), so that this is a heuristic.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.errors import TraceError
from sim.hardware.cost import op_times
from sim.hardware.platform import Platform
from sim.rewrites.rewrite import reorder
from sim.trace.graph import Trace

ONE_UNIT = ""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a block.

    reads, writes: names of registers.
    unit: which kind of unit runs it.
    latency: cycles until another one can read what it writes; None for that of the block.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    unit: str = ONE_UNIT
    latency: int | None = None


@dataclass(frozen=True)
class Weights:
    """Cycles between the issues of two instructions, by the kind of their dependence."""

    read_after_write: int = 3
    write_after_read: int = 1
    write_after_write: int = 3


Edges = Mapping[tuple[int, int], int]
"""(before, after) -> cycles that must pass between their issues. `before` has the smaller position."""


def dependences(block: Sequence[Instruction], weights: Weights | None = None) -> dict[tuple[int, int], int]:
    """The dependences of a block; where two instructions depend on each other in several ways, the largest weight."""
    cycles = weights or Weights()
    found: dict[tuple[int, int], int] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}

    def depends(after: int, before: int, cycles: int) -> None:
        if before != after:
            found[before, after] = max(found.get((before, after), 0), cycles)

    for i, each in enumerate(block):
        for register in each.reads:
            if register in writer:
                own = block[writer[register]].latency
                depends(i, writer[register], cycles.read_after_write if own is None else own)
        for register in each.writes:
            if register in writer:
                depends(i, writer[register], cycles.write_after_write)
            for reader in readers.get(register, ()):
                depends(i, reader, cycles.write_after_read)
        for register in each.writes:
            writer[register], readers[register] = i, []
        for register in each.reads:
            if register not in each.writes:
                readers.setdefault(register, []).append(i)
    return found


def issues_in_order(order: Sequence[int], edges: Edges, width: int = 1) -> list[int]:
    """The cycle in which each instruction is issued, by position in the block, if they are issued in this order.

    width: how many can be issued in a cycle. Raises TraceError where the order breaks a dependence.
    """
    place = {each: i for i, each in enumerate(order)}
    before: dict[int, list[tuple[int, int]]] = {}
    for (first, second), cycles in edges.items():
        if place[first] > place[second]:
            raise TraceError(f"the order puts {second} before {first}, which it depends on")
        before.setdefault(second, []).append((first, cycles))
    issue = [0] * len(order)
    now, used = 0, 0
    for each in order:
        earliest = max((issue[first] + cycles for first, cycles in before.get(each, ())), default=0)
        if earliest > now:
            now, used = earliest, 0
        elif used == width:
            now, used = now + 1, 0
        issue[each] = now
        used += 1
    return issue


def schedule(
    count: int, edges: Edges, *, units: Sequence[str] | None = None, width: Mapping[str, int] | None = None
) -> list[int]:
    """The cycle in which each of `count` instructions is issued.

    units: which kind of unit each needs, by default the same. width: how many of a kind there are, 1 unless given.
    """
    kind = list(units) if units is not None else [ONE_UNIT] * count
    after, missing = _successors(edges), _missing(count, edges)
    path = _paths(count, after)
    earliest, issue = [0] * count, [-1] * count
    ready = {i for i in range(count) if not missing[i]}
    now = 0
    while ready:
        free = {unit: (width or {}).get(unit, 1) for unit in kind}
        can = sorted((i for i in ready if earliest[i] <= now), key=lambda i: (-path[i], -len(after.get(i, ())), i))
        for i in can:
            if free[kind[i]]:
                free[kind[i]] -= 1
                issue[i] = now
                ready.discard(i)
                for second, cycles in after.get(i, ()):
                    earliest[second] = max(earliest[second], now + cycles)
                    missing[second] -= 1
                    if not missing[second]:
                        ready.add(second)
        now = max(now + 1, min((earliest[i] for i in ready), default=0))
    return issue


def _paths(count: int, after: Mapping[int, Sequence[tuple[int, int]]]) -> list[int]:
    """The longest weighted path from each instruction to the end of the block."""
    path = [0] * count
    for i in reversed(range(count)):  # positions are a topological order
        path[i] = max((cycles + path[second] for second, cycles in after.get(i, ())), default=0)
    return path


def unrolled(block: Sequence[Instruction], times: int) -> list[Instruction]:
    """The block so many times in a row, as loop unrolling makes it: scheduled as one, iterations overlap.

    A register that an iteration reads before it writes it is what the one before left in it.
    """
    return [
        Instruction(f"{each.name}.{n}", each.reads, each.writes, each.unit, each.latency)
        for n in range(times)
        for each in block
    ]


# ---- traces ------------------------------------------------------------------------------------


def list_scheduled(trace: Trace, platform: Platform) -> Trace:
    """The trace with its ops in the order in which list scheduling starts them.

    Each engine of the platform runs one op at a time; an op takes as long as there. Order changes time only where a
    trace has several engines or devices, and memory everywhere. Data flow is read after write; storage that an op
    takes over is write after read. Raises TraceError, ProfileError.
    """
    times = op_times(trace, platform)
    took, engine = np.maximum(times.total, 1).tolist(), times.engine.tolist()
    edges: dict[tuple[int, int], int] = {}
    replaced = trace.tensor_columns.replaces
    readers: dict[int, list[int]] = {}
    for op in range(len(took)):
        for tensor in trace.reads(op):
            readers.setdefault(tensor, []).append(op)
            if (producer := int(trace.producer[tensor])) >= 0 and producer != op:
                edges[producer, op] = took[producer]
    for op in range(len(took)):
        for tensor in trace.writes(op):
            old = int(replaced[tensor])
            for reader in readers.get(old, ()) if old >= 0 else ():
                if reader != op:
                    edges[reader, op] = max(edges.get((reader, op), 0), took[reader])
    last: dict[int, int] = {}
    for op in sorted(trace.op_columns.group):  # all devices meet their groups in one order
        device = int(trace.op_columns.device[op])
        if device in last:
            edges.setdefault((last[device], op), 1)
        last[device] = op
    path = _paths(len(took), _successors(edges))
    start = _starts(took, engine, edges, path)
    main = [platform.engines[each].main for each in engine]
    # a device's program starts ops of other engines as it comes to them, so that they go before its own
    ranks = sorted((start[op], main[op], op) for op in range(len(took)))
    return reorder(trace, [op for *_, op in ranks])


def _missing(count: int, edges: Edges) -> list[int]:
    """How many instructions each one waits for."""
    missing = [0] * count
    for _, second in edges:
        missing[second] += 1
    return missing


def _successors(edges: Edges) -> dict[int, list[tuple[int, int]]]:
    after: dict[int, list[tuple[int, int]]] = {}
    for (first, second), cycles in edges.items():
        after.setdefault(first, []).append((second, cycles))
    return after


def _starts(took: Sequence[int], engine: Sequence[int], edges: Edges, path: Sequence[int]) -> list[int]:
    """When each op starts if each engine takes the ready one with the longest path ahead of it."""
    after, missing = _successors(edges), _missing(len(took), edges)
    ready = [0] * len(took)
    free: dict[int, int] = {}
    heap = [(0, -path[op] - took[op], op) for op in range(len(took)) if not missing[op]]
    heapq.heapify(heap)
    starts = [0] * len(took)
    while heap:
        at, rank, op = heapq.heappop(heap)
        start = max(at, free.get(engine[op], 0))
        if start > at:
            heapq.heappush(heap, (start, rank, op))
            continue
        free[engine[op]] = start + took[op]
        starts[op] = start
        for second, cycles in after.get(op, ()):
            ready[second] = max(ready[second], start + cycles)
            missing[second] -= 1
            if not missing[second]:
                heapq.heappush(heap, (ready[second], -path[second] - took[second], second))
    return starts
