"""Which values a compiled region saves from forward to backward: PyTorch's rules for a cut of its joint graph.

What backward needs and is not saved is recomputed there from what is. A minimum cut says what to save, where some
nodes are banned from being recomputed; a memory budget below 1 lifts bans, by a knapsack the last of them. The rules
are those of `min_cut_rematerialization_partition` (torch/_functorch/partitioners.py, 2.13), one function each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from sim.solvers.flow import Flow
from sim.solvers.joint_graph import NEVER_NEEDED, OUTSIDE, JointGraph
from sim.solvers.knapsack import Picker

NEARER = 1.1  # what is saved weighs so much more per step that it lies away from backward
FAR = 100  # steps beyond which it weighs no more, and the length of a chain that is recomputed
REDUCES = 4  # an op whose result is so many times smaller than its operands is a reduction


@dataclass(frozen=True)
class Bans:
    """What is banned from being recomputed beside random and compute-intensive ops; PyTorch's defaults.

    used_far_apart: what a value is used for beyond an op that does not fuse. long_chains: every hundredth place of a
    chain of ops that fuse. materialized: what a backward op reads that does not fuse with it. unlisted: all but ops
    that are cheap by kind. reductions: what is over four times smaller than its operands.
    """

    used_far_apart: bool = True
    long_chains: bool = True
    materialized: bool = True
    unlisted: bool = True
    reductions: bool = True


AGGRESSIVE = Bans(used_far_apart=False, long_chains=False, materialized=False, unlisted=False)
"""PyTorch's `aggressive_recomputation`."""


class Partitioner:
    """Cuts of one graph; each is found once, whatever budgets are asked for."""

    def __init__(self, graph: JointGraph, bans: Bans | None = None) -> None:
        self.graph = graph
        self.bans = bans or Bans()
        self._known: dict[Bans, tuple[list[int], list[int]]] = {}

    def saved(self, budget: float, pick: Picker) -> list[int]:
        """The nodes to save for a memory budget of 0 to 1: 1 for the default cut, 0 for what enters alone.

        Between, the share of the bytes that the default cut saves beyond what enters. pick: the knapsack.
        """
        if budget == 0:
            return self.graph.entering
        default = self._cut(self.bans)[0]
        entering = self._bytes(self.graph.entering)
        beyond = self._bytes(default) - entering
        if budget == 1 or beyond <= 0:
            return default
        fewer = replace(self.bans, used_far_apart=False, long_chains=False, materialized=False)
        fewest = replace(fewer, unlisted=False)
        for bans in (fewer, fewest):
            found = self._cut(bans)[0]
            if (self._bytes(found) - entering) / beyond < budget:
                return found
        nodes = self.graph.nodes
        banned = [i for i in self._cut(fewest)[1] if self.graph.distance[i] < NEVER_NEEDED]
        kept = [i for i in banned if nodes[i].fixed]
        items = sorted(
            (i for i in banned if not nodes[i].enters and not nodes[i].fixed),
            key=self.graph.size.__getitem__,
            reverse=True,
        )
        if not items:
            return self.graph.entering + kept
        size, runtime = self.graph.size, self.graph.runtime
        chosen = pick([size[i] / 1e9 / beyond for i in items], [runtime[i] for i in items], budget)
        return self.cut(fewest, {i for i, save in zip(items, chosen, strict=True) if not save})[0]

    def _cut(self, bans: Bans) -> tuple[list[int], list[int]]:
        if bans not in self._known:
            self._known[bans] = self.cut(bans)
        return self._known[bans]

    def _bytes(self, nodes: Collection[int]) -> float:
        return sum(self.graph.size[i] for i in nodes) / 1e9

    # ---- the cut -----------------------------------------------------------------------------

    def cut(self, bans: Bans, allowed: Collection[int] = ()) -> tuple[list[int], list[int]]:
        """The nodes whose saving weighs least, and those that are banned; allowed: banned by no rule of `bans`."""
        graph, banned = self.graph, self._banned(bans, allowed)
        read, needed = [False] * len(graph.nodes), [False] * len(graph.nodes)  # by backward; by what is recomputed
        for i in reversed(range(len(graph.nodes))):
            if graph.backward[i]:
                continue
            for user in graph.users[i]:
                if user == OUTSIDE:
                    continue
                if graph.backward[user]:
                    read[i] = needed[i] = True
                    break
                if needed[user] and user not in banned:
                    needed[i] = True
        if any(read[i] and graph.nodes[i].tensor < 0 for i in banned):
            raise OverflowError("no cut: what backward reads can neither be saved nor recomputed")
        saved = {i for i in banned if read[i]}
        # the rest is a network: from what is banned, by what may be recomputed, to what backward reads
        inside = [i for i, wanted in enumerate(needed) if wanted and i not in saved]
        place = {i: 2 + 2 * k for k, i in enumerate(inside)}  # where it enters; one further it leaves
        flow = Flow(2 + 2 * len(inside))
        for i, enter in place.items():
            flow.add(0 if i in banned else enter, enter + 1, None if graph.nodes[i].tensor < 0 else self.weight(i))
            if read[i]:
                flow.add(enter + 1, 1, None)
                continue
            for user in graph.users[i]:
                if user in place and user not in banned:
                    flow.add(enter + 1, place[user], None)
        sink = flow.sink_side()
        saved.update(i for i, enter in place.items() if sink[enter + 1] and (i in banned or not sink[enter]))
        return sorted(saved), list(banned)

    def weight(self, node: int) -> int:
        """What saving a node counts: a tenth more per step from backward, twice where no kernel writes it anyway."""
        graph, what = self.graph, self.graph.nodes[node]
        if what.static:
            return 0
        steps = max(min(graph.distance[node], FAR), 1)
        written = what.enters or not all(self.fuses(node, user) for user in graph.users[node])
        return int(graph.size[node] * NEARER**steps) * (1 if written else 2)

    def fuses(self, node: int, user: int) -> bool:
        """Whether a node and its user become one kernel."""
        if user == OUTSIDE:
            return False
        nodes = self.graph.nodes
        if nodes[user].joins:
            return True
        return not nodes[node].enters and nodes[node].fusible and nodes[user].fusible

    # ---- what is banned ----------------------------------------------------------------------

    def _banned(self, bans: Bans, allowed: Collection[int]) -> dict[int, None]:
        """The nodes that may not be recomputed, in the order in which the rules find them."""
        graph = self.graph
        banned: dict[int, None] = {}

        def ban(node: int) -> None:
            what = graph.nodes[node]
            if not what.view and (node not in allowed or what.fixed):
                banned[node] = None

        for i, node in enumerate(graph.nodes):
            if not graph.backward[i] and (node.enters or (graph.required[i] and self._expensive(i, bans))):
                ban(i)
        if bans.used_far_apart:
            self._far_apart(banned, ban)
        if bans.long_chains:
            self._long_chains(banned, ban)
        return banned

    def _expensive(self, node: int, bans: Bans) -> bool:
        """Whether a node is banned by what it is or by who reads it."""
        what = self.graph.nodes[node]
        if what.part:
            return False
        if what.fixed or (not what.allowed if bans.unlisted else what.random or what.intensive):
            return True
        if bans.materialized and self._materialized(node):
            return True
        taken = sum(self.graph.size[i] for i in what.arguments)
        return bans.reductions and self.graph.size[node] * REDUCES < taken

    def _materialized(self, node: int) -> bool:
        """Whether backward reads a node, or a view of it, in a kernel of its own."""
        graph = self.graph
        if graph.nodes[node].view:
            return False
        stack = [node]
        while stack:
            at = stack.pop()
            for user in graph.users[at]:
                if (user == OUTSIDE or not graph.required[user]) and not self.fuses(at, user):
                    return True
                if user != OUTSIDE and graph.nodes[user].view:
                    stack.append(user)
        return False

    def _far_apart(self, banned: Collection[int], ban: Callable[[int], None]) -> None:
        """Ban users of a value that lie behind the first op that does not fuse, counted from its first user on."""
        graph, order = self.graph, self.graph.order
        place = list(order)
        for used in place:
            users = graph.inner_users[used]
            if len(users) < 2:  # none lies behind the first
                continue
            first = self._first_unfused(place, users, max([order[user] for user in users]))
            for user in users:
                if order[user] > first and self.fuses(used, user) and user not in banned:
                    ban(user)

    def _first_unfused(self, place: Sequence[int], start: Sequence[int], furthest: int) -> int:
        """place: the required nodes in order."""
        graph, order = self.graph, self.graph.order
        queue = [(order[node], True) for node in start]
        heapq.heapify(queue)
        seen = set(queue)
        while queue:
            at, fused = heapq.heappop(queue)
            seen.discard((at, fused))
            if not fused:
                return at
            for user in graph.inner_users[place[at]]:
                if order[user] > furthest:
                    continue
                step = (order[user], self.fuses(place[at], user))
                if step not in seen:
                    seen.add(step)
                    heapq.heappush(queue, step)
        return furthest

    def _long_chains(self, banned: Collection[int], ban: Callable[[int], None]) -> None:
        """Ban a node that lies over a hundred places behind the start of a chain of ops that fuse."""
        graph, order = self.graph, self.graph.order
        seen: set[int] = set()
        for start in order:
            queue = [(order[start], start)]
            while queue:
                _, node = heapq.heappop(queue)
                if node in seen:
                    continue
                seen.add(node)
                if order[node] > order[start] + FAR and not queue:
                    ban(node)
                    break
                for user in graph.inner_users[node]:
                    if self.fuses(node, user) and user not in banned:
                        heapq.heappush(queue, (order[user], user))
