"""Orders by list scheduling: of the ops that may run next, one that frees most and takes least."""

from __future__ import annotations

from heapq import heappop, heappush

from sim.policies.hybrid.olla.graph import Graph


def by_net(graph: Graph, *, below: bool) -> list[int]:
    """All ops; next is the one after which least is held, the first in program order where several are equal.

    below: among those after which less is held than before, and among the others, first what needs least while it
        runs.
    """
    takes, frees, used_by = _sizes(graph)
    left = [len(block.users) for block in graph.blocks]
    for number, block in enumerate(graph.blocks):
        if left[number] == 1 and not block.stays:
            frees[next(iter(block.users))] += block.size
    ran: set[int] = set()
    missing = [len(needed) for needed in graph.before]
    ready: list[tuple[int, int, int]] = []

    def offer(op: int) -> None:
        net = takes[op] - frees[op]
        rank = (net > 0, takes[op] + graph.workspace[op]) if below else (net, 0)
        heappush(ready, (*rank, op))

    for op, count in enumerate(missing):
        if not count:
            offer(op)
    order: list[int] = []
    while ready:
        op = heappop(ready)[-1]
        if op in ran:  # it was offered again when it began to free more
            continue
        ran.add(op)
        order.append(op)
        for number in used_by[op]:
            left[number] -= 1
            block = graph.blocks[number]
            if left[number] == 1 and not block.stays:
                last = next(user for user in block.users if user not in ran)
                frees[last] += block.size
                if not missing[last]:
                    offer(last)
        for other in graph.after[op]:
            missing[other] -= 1
            if not missing[other]:
                offer(other)
    return order


def _sizes(graph: Graph) -> tuple[list[int], list[int], list[list[int]]]:
    """Per op the bytes that it takes, those that it frees (none yet), and the blocks that it uses."""
    takes = [0] * len(graph)
    used_by: list[list[int]] = [[] for _ in range(len(graph))]
    for number, block in enumerate(graph.blocks):
        if block.first >= 0:
            takes[block.first] += block.size
        for op in block.users:
            used_by[op].append(number)
    return takes, [0] * len(graph), used_by
