"""Routes between tiers by position, and the nearest copy of a tensor."""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.prepare import Prepared
from sim.errors import IllegalPlan
from sim.hardware.platform import Platform


class Routes:
    """What a run has looked up so far."""

    def __init__(self, platform: Platform, prepared: Prepared) -> None:
        self._platform = platform
        self._prepared = prepared
        self._names = [tier.name for tier in platform.tiers]
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._sources: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

    def between(self, source: int, target: int) -> tuple[int, ...]:
        """Positions of the links from one tier to another; () if there are none."""
        key = (source, target)
        if key not in self._routes:
            self._routes[key] = self._platform.route(self._names[source], self._names[target])
        return self._routes[key]

    def source(self, tensor: int, held: int, target: int) -> tuple[int, tuple[int, ...]]:
        """Of the tiers that hold a tensor (as bits), the one with the shortest route to `target`, and that route.

        Raises IllegalPlan where there is none.
        """
        if (held, target) in self._sources:
            return self._sources[held, target]
        holders = [tier for tier in range(len(self._names)) if held & 1 << tier]
        routes = {tier: route for tier in holders if (route := self.between(tier, target))}
        if not routes:
            name = self._prepared.trace.tensor_columns.name[tensor]
            where = ", ".join(repr(self._names[tier]) for tier in holders)
            raise IllegalPlan(f"tensor {name!r}: no route from {where} to {self._names[target]!r}")
        best = min(routes, key=lambda tier: (len(routes[tier]), self._platform.pace(routes[tier]).fixed, tier))
        self._sources[held, target] = best, routes[best]
        return self._sources[held, target]

    def nearest(self, tensor: int, tiers: Iterable[int], target: int) -> int:
        """Of these tiers the one with the shortest route to `target`, or any where there is none."""
        linked = sum(1 << tier for tier in tiers if self.between(tier, target))
        return self.source(tensor, linked, target)[0] if linked else next(iter(tiers))
