"""The lowest layout as an integer program: of two lifetimes that meet, which lies below the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from sim.policies.hybrid.olla.addresses import Layout, Lifetime, most_live
from sim.policies.hybrid.olla.graph import unit_of
from sim.solvers.linear import INFEASIBLE, LinearProgram


@dataclass(frozen=True)
class Placed:
    """layout: the lowest that is known. proven: whether none is lower. limit: "time", "nodes", "" for none."""

    layout: Layout
    proven: bool
    limit: str = ""


def lowest(lives: Sequence[Lifetime], known: Layout, *, nodes: int, seconds: float) -> Placed:
    """A layout that ends lower than the known one, if there is one; nodes, seconds: limits of the search."""
    unit = unit_of((life.size for life in lives), known.end)
    top, low = math.ceil(known.end / unit) - 1, most_live(lives) / unit
    if top < low:
        return Placed(known, True)
    size = [life.size / unit for life in lives]
    rows = LinearProgram()
    end = rows.column(low, top, cost=1.0)
    offsets = [rows.column(0.0, max(0.0, top - bytes)) for bytes in size]
    for bytes, offset in zip(size, offsets, strict=True):
        rows.row([(offset, 1.0), (end, -1.0)], most=-bytes)
    for i, j in combinations(range(len(lives)), 2):
        if lives[i].meets(lives[j]):  # others may share addresses, and need no binary
            below = rows.column(whole=True)
            rows.row([(offsets[i], 1.0), (offsets[j], -1.0), (below, top)], most=top - size[i])
            rows.row([(offsets[j], 1.0), (offsets[i], -1.0), (below, -top)], most=-size[j])
    answer = rows.solve(mip_rel_gap=0.0, node_limit=nodes, time_limit=seconds)
    if answer.status == INFEASIBLE:
        return Placed(known, True)
    limit = "" if answer.status == 0 else "time" if answer.status == 1 else "nodes"
    if answer.x is None:
        return Placed(known, False, limit)
    start: dict[int, int] = {}  # each on the highest of those that the program puts below it
    for i in sorted(range(len(lives)), key=lambda i: (answer.x[offsets[i]], i)):
        start[i] = max((a + lives[j].size for j, a in start.items() if lives[i].meets(lives[j])), default=0)
    layout = Layout(tuple(start[i] for i in range(len(lives))), max(a + lives[i].size for i, a in start.items()))
    proven = not limit and layout.end <= (answer.fun + 0.5) * unit
    return Placed(layout if layout.end < known.end else known, proven, limit)
