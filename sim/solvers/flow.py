"""The minimum cut nearest the sink of a graph with whole-number capacities of any size (Dinic's algorithm)."""

from __future__ import annotations

from collections import deque


class Flow:
    """A directed graph; node 0 is the source, node 1 the sink. An edge of capacity None is never cut."""

    def __init__(self, count: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(count)]  # per node; the reverse of edge e is e ^ 1
        self._head: list[int] = []
        self._left: list[int] = []
        self._endless: list[int] = []
        self._sum = 0

    def add(self, tail: int, head: int, capacity: int | None) -> None:
        """One more edge."""
        if capacity is None:
            self._endless.append(len(self._head))
        else:
            self._sum += capacity
        self._edges[tail].append(len(self._head))
        self._edges[head].append(len(self._head) + 1)
        self._head += [head, tail]
        self._left += [capacity or 0, 0]

    def sink_side(self) -> list[bool]:
        """Per node whether the minimum cut with the fewest nodes on the sink's side has it there.

        Raises OverflowError where the source reaches the sink by edges that are never cut.
        """
        for edge in self._endless:
            self._left[edge] = self._sum + 1
        flow = 0
        while (level := self._levels())[1] >= 0:
            flow += self._block(level)
            if flow > self._sum:
                raise OverflowError("no cut: the source reaches the sink by edges that are never cut")
        side = [False] * len(self._edges)
        side[1], queue = True, deque([1])
        while queue:
            for edge in self._edges[queue.popleft()]:
                tail = self._head[edge]
                if not side[tail] and self._left[edge ^ 1]:
                    side[tail] = True
                    queue.append(tail)
        return side

    def _levels(self) -> list[int]:
        level = [-1] * len(self._edges)
        level[0], queue = 0, deque([0])
        head, left = self._head, self._left
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                if left[edge] and level[head[edge]] < 0:
                    level[head[edge]] = level[node] + 1
                    queue.append(head[edge])
        return level

    def _block(self, level: list[int]) -> int:
        """Push along shortest paths until each has a full edge."""
        edges, head, left = self._edges, self._head, self._left
        at = [0] * len(edges)
        pushed, path, node = 0, list[int](), 0
        while True:
            if node == 1:
                least = min(left[edge] for edge in path)
                pushed += least
                cut = len(path)
                for i, edge in enumerate(path):
                    left[edge] -= least
                    left[edge ^ 1] += least
                    if not left[edge] and i < cut:
                        cut = i
                node = head[path[cut] ^ 1]
                del path[cut:]
                continue
            mine = edges[node]
            while at[node] < len(mine):
                edge = mine[at[node]]
                if left[edge] and level[head[edge]] == level[node] + 1:
                    break
                at[node] += 1
            if at[node] < len(mine):
                path.append(mine[at[node]])
                node = head[path[-1]]
            elif node:
                edge = path.pop()
                node = head[edge ^ 1]
                at[node] += 1
            else:
                return pushed
