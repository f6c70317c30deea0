"""Orders that compute the same: what must precede an op, and ops run as early as that allows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush

from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import KIND_CODE

SEND, RECV = KIND_CODE["send"], KIND_CODE["recv"]


def must_precede(trace: Trace, op: int) -> set[int]:
    """The ops that must precede one in every order: producers of what it reads, producers and readers of what it
    overwrites.
    """
    needed = {int(trace.producer[t]) for t in trace.reads(op)}
    for t in trace.writes(op):
        old = int(trace.tensor_columns.replaces[t])
        if old >= 0:
            needed |= {int(trace.producer[old]), *trace.readers(old)}
    return needed - {-1, op}


def with_sends(trace: Trace, ops: Collection[int]) -> set[int]:
    """Ops, and of those that receive the ones that send: a stage takes space for a tensor before another sends it."""
    kind, group = trace.op_columns.kind, trace.op_columns.group
    senders = kept(trace, "senders", None, lambda: {name: op for op, name in group.items() if kind[op] == SEND})
    return {*ops, *(senders[group[op]] for op in ops if kind[op] == RECV)}


def as_early(count: int, waits: Mapping[int, Collection[int]]) -> Iterator[int]:
    """All of so many ops: some as early as what must precede them allows, the others in their order.

    waits: per op that is to be early those that must precede it.
    """
    followers: dict[int, list[int]] = {}
    for op, needed in waits.items():
        for other in needed:
            followers.setdefault(other, []).append(op)
    left = {op: len(needed) for op, needed in waits.items()}
    ready = [op for op, count in left.items() if not count]
    heapify(ready)

    def done(op: int) -> None:
        for follower in followers.get(op, ()):
            left[follower] -= 1
            if not left[follower]:
                heappush(ready, follower)

    for op in range(count):
        if op not in waits:
            yield op
            done(op)
        while ready:
            early = heappop(ready)
            yield early
            done(early)


def as_late(trace: Trace, held: Collection[int]) -> Iterator[int]:
    """All ops of a trace: those of `held` just before the first other one that they must precede, the rest as they are.

    What nothing waits for comes last, in program order.
    """
    waiting: dict[int, None] = {}

    def released(op: int) -> Iterator[int]:
        """The op, after what it waits for."""
        todo = [(op, False)]
        while todo:
            at, is_ready = todo.pop()
            if at != op and at not in waiting:
                continue
            if is_ready:
                waiting.pop(at, None)
                yield at
            else:
                todo.append((at, True))
                todo += [(need, False) for need in sorted(must_precede(trace, at), reverse=True) if need in waiting]

    for op in range(len(trace.ops)):
        if op in held:
            waiting[op] = None
        else:
            yield from released(op)
    yield from list(waiting)
