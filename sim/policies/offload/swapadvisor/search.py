"""The genetic search over orders and allocations."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.policies.offload.swapadvisor.planning import Allocation, Program


@dataclass(frozen=True)
class Genes:
    """A chromosome: a topological order of the ops, and an allocation."""

    order: tuple[int, ...]
    allocation: Allocation


RATIOS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0, 1e18)
"""How many times the smallest tensor of a class the largest may be, where a class for each size takes too much."""

Fitness = Callable[[Genes], float]
"""The time of a run in ns; infinite where it does not fit."""


class Search:
    """Crossover, mutation, repair and selection; everything random comes from one generator."""

    def __init__(
        self, program: Program, before: Sequence[set[int]], capacity: int, fitness: Fitness, seed: int
    ) -> None:
        """before: per op those that it must follow. capacity: of the device, in bytes."""
        self._program, self._capacity = program, capacity
        self._before = before
        self._after: list[set[int]] = [set() for _ in before]
        for op, earlier in enumerate(before):
            for other in earlier:
                self._after[other].add(op)
        self._random = random.Random(seed)
        self._fitness, self._known = fitness, dict[Genes, float]()

    def start(self) -> Genes | None:
        """Program order, each size its own class; where their buffers do not fit, the finest classes that do.

        None where none do.
        """
        sizes = self._program.sizes
        for ratio in (1.0, *RATIOS):
            classes = [bisect_right(sizes, size * ratio) - 1 for size in sizes]
            coarse = tuple(next(c for c in _tops(classes) if c >= i) for i in range(len(sizes)))
            order = tuple(range(len(self._before)))
            genes = self.repaired(Genes(order, Allocation(coarse, (0,) * len(sizes))))
            if genes is not None and self.time(genes) < float("inf"):
                return genes
        return None

    def run(self, start: Genes, population: int, generations: int, good: float) -> tuple[Genes, list[float]]:
        """The fittest, and the time of the fittest of each generation; ends early at a time that is good enough."""
        alive = [start]
        while generations and len(alive) < population:
            alive.append(self.mutated(start))
        alive.sort(key=self.time)
        best = [self.time(alive[0])]
        for _ in range(generations):
            if best[-1] <= good:
                break
            children = [self.mutated(self.crossed(*self._parents(alive))) for _ in range(population)]
            pool = sorted(dict.fromkeys((*alive, *children)), key=self.time)
            fit = pool[: population - population // 5]
            rest = pool[len(fit) :]
            alive = [*fit, *self._random.sample(rest, min(len(rest), population // 5))]
            best.append(self.time(alive[0]))
        return alive[0], best

    def time(self, genes: Genes) -> float:
        """How long a run takes, in ns."""
        if genes not in self._known:
            self._known[genes] = self._fitness(genes)
        return self._known[genes]

    def crossed(self, one: Genes, other: Genes) -> Genes:
        """One's order up to a cut and then other's; classes and counts up to a cut of their own."""
        cut = self._random.randint(0, len(one.order))
        head = one.order[:cut]
        taken = set(head)
        order = (*head, *(op for op in other.order if op not in taken))
        at = self._random.randint(0, len(one.allocation.classes))
        classes = (*one.allocation.classes[:at], *other.allocation.classes[at:])
        counts = (*one.allocation.counts[:at], *other.allocation.counts[at:])
        return self.repaired(Genes(order, Allocation(_rising(classes), counts))) or one

    def mutated(self, genes: Genes) -> Genes:
        """Some ops moved within their legal range, a size in another class, a count changed."""
        order = list(genes.order)
        for _ in range(self._random.randint(0, 3) if order else 0):
            self._move_one(order)
        classes, counts = list(genes.allocation.classes), list(genes.allocation.counts)
        if classes and self._random.random() < 0.5:
            i = self._random.randrange(len(classes))
            classes[i] = self._random.randint(i, min(i + 2, len(classes) - 1))
        if counts:
            i = self._random.randrange(len(counts))
            counts[i] = max(counts[i] + self._random.choice((-2, -1, 1, 2)), 0)
        return self.repaired(Genes(tuple(order), Allocation(_rising(classes), tuple(counts)))) or genes

    def repaired(self, genes: Genes) -> Genes | None:
        """As many buffers as some op needs, no more than are ever used, and no more bytes than there are.

        Bytes that are left go to the classes that have the smallest share of what they could use.
        """
        program, classes = self._program, genes.allocation.classes
        spare = self._capacity - program.reserved(genes.order)
        need, most = program.demand(genes.order, classes)
        counts = [min(max(n, low), high) for n, low, high in zip(genes.allocation.counts, need, most, strict=True)]
        spare -= sum(n * s for n, s in zip(counts, program.sizes, strict=True))
        while spare < 0:
            over = [c for c in range(len(counts)) if counts[c] > need[c]]
            if not over:
                return None
            c = max(over, key=lambda c: (counts[c] - need[c]) * program.sizes[c])
            counts[c] -= 1
            spare += program.sizes[c]
        while short := [c for c in range(len(counts)) if counts[c] < most[c] and program.sizes[c] <= spare]:
            c = min(short, key=lambda c: (counts[c] / most[c], -program.sizes[c]))
            counts[c] += 1
            spare -= program.sizes[c]
        return Genes(genes.order, Allocation(classes, tuple(counts)))

    def _parents(self, alive: Sequence[Genes]) -> tuple[Genes, Genes]:
        """Two of the living, each the fitter of two drawn."""
        drawn = [min(self._random.choices(range(len(alive)), k=2)) for _ in range(2)]
        return alive[drawn[0]], alive[drawn[1]]

    def _move_one(self, order: list[int]) -> None:
        op = order.pop(self._random.randrange(len(order)))
        position = {other: i for i, other in enumerate(order)}
        low = max((position[other] + 1 for other in self._before[op]), default=0)
        high = min((position[other] for other in self._after[op]), default=len(order))
        order.insert(self._random.randint(low, high), op)


def _tops(classes: Sequence[int]) -> list[int]:
    """From the smallest size on, the largest of the class that begins there, then of the one that begins behind it."""
    tops, i = list[int](), 0
    while i < len(classes):
        tops.append(classes[i])
        i = classes[i] + 1
    return tops


def _rising(classes: Sequence[int]) -> tuple[int, ...]:
    """The same, never falling, and each class one of a size that is its own."""
    out: list[int] = []
    for c in classes:
        out.append(max(c, out[-1] if out else 0))
    return tuple(max(c, i) for i, c in enumerate(out))
