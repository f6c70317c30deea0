"""The Pareto front of two figures: the results that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def pareto_front(points: Sequence[tuple[float | None, float | None]]) -> list[int]:
    """Positions of the points that no other beats: less of one figure and no more of the other.

    Of equal points all are kept. A point with None or NaN is left out. Ordered by the first figure. O(n log n).
    """
    known = [i for i, point in enumerate(points) if all(v is not None and v == v for v in point)]
    known.sort(key=lambda i: (points[i], i))
    front: list[int] = []
    for i in known:
        if not front or points[i][1] < points[front[-1]][1] or points[i] == points[front[-1]]:  # type: ignore[operator]
            front.append(i)
    return front


def pareto(rows: Iterable[Mapping[str, Any]], x: str = "peak_bytes", y: str = "makespan_ns") -> list[Mapping[str, Any]]:
    """The rows on the front of two columns, both to be small, ordered by `x`; rows without either are left out."""
    table = list(rows)
    return [table[i] for i in pareto_front([(row.get(x), row.get(y)) for row in table])]
