"""Which candidate is evicted first: the least of a score, found by bounds and then exactly."""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import truediv
from random import Random

import numpy as np
from numpy.typing import NDArray

from sim.eviction.evictable import CandidateSet, Kin, Lineage, ScoreTable
from sim.eviction.neighbourhood import CostClasses, Neighbourhood, Price
from sim.native import mypyc_attr

NEAR = 1e-12
"""Scores this close, relatively, are compared by exact arithmetic: far above what float64 loses in them."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Ranking:
    """Scores weight / (size * staleness), without the parts that are switched off; the least is evicted first.

    A score over 0 is infinite. Scores are quotients of integers as Python rounds them.

    price: the source of weights, ns; None for the producer's own cost.
    by_size: whether the size counts.
    staleness: ns since the last access, `none` to leave it out, `neighbourhood` to count from the last access to
        anything evicted around.
    ties: whether the `last` or the `first` to become evictable wins; of scores of 0 the first always does.
    """

    def __init__(
        self, lineage: Lineage, table: ScoreTable, price: Price | None, *, by_size: bool, staleness: str, ties: str
    ) -> None:
        self._lineage = lineage
        self._table = table
        self._price = price
        self._by_size = by_size
        self._staleness = staleness
        self._last = ties == "last"

    def least(
        self, candidates: CandidateSet, now: int, barred: Collection[int], ids: NDArray[np.int64] | None = None
    ) -> int:
        """The candidate of least score that is not barred, -1 if there is none.

        ids: consider these alone.
        """
        if ids is None:
            ids = candidates.ids
            slots = [at for at in map(candidates.slot, barred) if at >= 0]
        else:
            slots = [at for at, tensor in enumerate(ids.tolist()) if tensor in barred]
        if len(slots) == len(ids):
            return -1
        scores = self._scores(ids, now)
        for at in slots:
            scores[at] = math.inf
        exact: dict[int, float] = {}
        while True:
            at = int(scores.argmin())
            least = scores.item(at)
            if least != least:  # 0 / 0, which counts as infinite too
                scores[np.isnan(scores)] = math.inf
                continue
            if least == math.inf:
                out = set(slots)
                return self._one(ids, [i for i in range(len(ids)) if i not in out])
            if self._price is not None and at not in exact:
                self._look(ids, at, now, scores, exact)
                continue
            near = (scores <= least + abs(least) * NEAR).nonzero()[0]
            if len(near) == 1:
                return ids.item(at)
            tied = near.tolist()
            fresh = [i for i in tied if i not in exact]
            for i in fresh:
                self._look(ids, i, now, scores, exact)
            if fresh and self._price is not None:
                continue
            low = min(exact[i] for i in tied)
            return self._one(ids, [i for i in tied if exact[i] == low], first=low == 0)

    def score(self, tensor: int, now: int) -> float:
        """The exact score of a candidate."""
        score = self._quotient(tensor, now, math.inf)
        if score is None:
            raise AssertionError("a score without a limit was cut off")
        return score

    def _scores(self, ids: NDArray[np.int64], now: int) -> NDArray[np.float64]:
        table = self._table
        scores = table.weight.take(ids)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self._staleness != "none":
                scores /= now - table.access.take(ids)
            if self._by_size:
                scores /= table.size.take(ids)
        return scores

    def _look(
        self, ids: NDArray[np.int64], at: int, now: int, scores: NDArray[np.float64], exact: dict[int, float]
    ) -> None:
        """Replace a bound by the exact score, or by a bound eight times as high."""
        tensor = ids.item(at)
        score = self._quotient(tensor, now, 8 * self._table.weights[tensor])
        if score is None:
            scores[at] = self._scores(ids[at : at + 1], now)[0]
        else:
            scores[at] = exact[at] = score

    def _quotient(self, tensor: int, now: int, limit: float) -> float | None:
        seen = int(self._table.accesses[tensor]) if self._staleness != "none" else 0
        if self._price is None:
            top = int(self._table.weights[tensor])
        else:
            exact = self._price.exact(tensor, limit)
            if exact is None:
                return None
            top = exact[0]
            if self._staleness == "neighbourhood":
                seen = max(seen, exact[1])
        bottom = self._lineage.size[tensor] if self._by_size else 1
        if self._staleness != "none":
            bottom *= now - seen
        return float(truediv(top, bottom)) if bottom else math.inf  # compiled, `/` would round both to float64 first

    def _one(self, ids: NDArray[np.int64], slots: list[int], first: bool = False) -> int:
        order, tensors = self._table.order, ids.take(slots).tolist()
        best: int = (max if self._last and not first else min)(tensors, key=order.__getitem__)
        return best


@mypyc_attr(allow_interpreted_subclasses=True)
class Oldest(Ranking):
    """The least recently used. Its score is the access and 1, so that an access at time 0 does not score 0."""

    def __init__(self, lineage: Lineage, table: ScoreTable, ties: str) -> None:
        super().__init__(lineage, table, None, by_size=False, staleness="none", ties=ties)

    def _scores(self, ids: NDArray[np.int64], now: int) -> NDArray[np.float64]:
        return self._table.access.take(ids) + 1

    def _quotient(self, tensor: int, now: int, limit: float) -> float | None:
        return self._table.accesses[tensor] + 1


@mypyc_attr(allow_interpreted_subclasses=True)
class Drawn(Ranking):
    """One at random."""

    def __init__(self, lineage: Lineage, table: ScoreTable, random: Random) -> None:
        super().__init__(lineage, table, None, by_size=False, staleness="none", ties="last")
        self._random = random

    def least(
        self, candidates: CandidateSet, now: int, barred: Collection[int], ids: NDArray[np.int64] | None = None
    ) -> int:
        """Any candidate that is not barred, each as likely; -1 if there is none."""
        free = [t for t in (candidates.ids if ids is None else ids).tolist() if t not in barred]
        free.sort(key=lambda tensor: self._table.order[tensor])
        return free[self._random.randrange(len(free))] if free else -1


HEURISTICS = ("dtr", "dtr_eq", "local", "none", "lru", "size", "msps", "random")
"""What a score is made of: see `ranking_for`."""


def ranking_for(
    heuristic: str,
    lineage: Lineage,
    kin: Kin,
    table: ScoreTable,
    evicted: list[bool],
    *,
    staleness: str = "own",
    by_size: bool = True,
    ties: str = "last",
    random: Random,
) -> tuple[Ranking, Price | None]:
    """The ranking of a heuristic by name, and the price that has to be told of evictions and recomputations.

    `dtr` weighs e*, `dtr_eq` evicted components, `local` the tensor's own cost, `none` nothing (1), all over size
    and staleness; `msps` weighs evicted ancestors over size alone; `size` is 1 / size, `lru` the last
    access, `random` a draw.
    """
    price: Price | None = None
    if heuristic == "random":
        return Drawn(lineage, table, random), None
    if heuristic == "lru":
        return Oldest(lineage, table, ties), None
    if heuristic in ("dtr", "msps"):
        price = Neighbourhood(kin, table, evicted, children=heuristic == "dtr")
    elif heuristic == "dtr_eq":
        price = CostClasses(kin, table, evicted)
    elif heuristic in ("none", "size"):
        table.weight[:] = 1
    if heuristic in ("msps", "size"):
        staleness, by_size = "none", True
    return Ranking(lineage, table, price, by_size=by_size, staleness=staleness, ties=ties), price
