"""A problem that notes what of it a policy reads: the machine, its capacities, the seed.

The capacities of home tiers are the budget; all else of a platform is the same for every budget. So a plan that was
made without a look at them, whatever else of the platform it has looked at, is the plan for every budget.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from sim.hardware.platform import Platform, Tier
from sim.plan import Problem

MACHINE, BUDGET, SEED = "machine", "budget", "seed"
_NOTED = {
    **dict.fromkeys(("platform", "cost", "home", "least_ns"), MACHINE),
    **dict.fromkeys(("evaluate", "budget"), BUDGET),
    "seed": SEED,
}


@dataclass(frozen=True)
class Asked(Problem):
    """A problem that knows what of it has been read; copying it reads all.

    read: `MACHINE`, `BUDGET` (capacities, or a replay, which depends on them) and `SEED`, as far as they were.
    """

    read: set[str] = field(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        if name in _NOTED:
            object.__getattribute__(self, "read").add(_NOTED[name])
        return super().__getattribute__(name)


def asked(problem: Problem) -> Asked:
    """The same problem, with nothing read. What keeps its platform or a tier of it keeps `read` too."""
    read: set[str] = set()
    fields = {each.name: getattr(problem, each.name) for each in dataclasses.fields(problem)}
    platform = _noting(problem.platform, read)
    return Asked(**{**fields, "platform": platform, "cost": problem.cost.over(problem.trace, platform)}, read=read)


def _noting(platform: Platform, read: set[str]) -> Platform:
    homes = {engine.home for engine in platform.engines if engine.main}
    tiers = tuple(_noting_tier(tier, read) if tier.name in homes else tier for tier in platform.tiers)
    noting = object.__new__(_Platform)
    vars(noting).update(vars(platform), tiers=tiers, read=read, plain=platform)
    vars(noting).pop("host", None)  # the rest of what has been derived holds no tier
    return noting


def _noting_tier(tier: Tier, read: set[str]) -> Tier:
    noting = _Tier(**{each.name: getattr(tier, each.name) for each in dataclasses.fields(tier)})
    object.__setattr__(noting, "read", read)
    return noting


def _note(thing: object) -> None:
    read = getattr(thing, "read", None)  # a copy with changes has none
    if read is not None:
        read.add(BUDGET)


_CAPACITY: Any = vars(Tier)["capacity"]


class _Tier(Tier):
    """A tier that notes when its capacity is read; equal to the plain one."""

    __slots__ = ("read",)

    @property
    def capacity(self) -> int:
        _note(self)
        capacity: int = _CAPACITY.__get__(self)
        return capacity

    @capacity.setter
    def capacity(self, value: int) -> None:
        _CAPACITY.__set__(self, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tier) and _plain(self) == _plain(other)

    def __hash__(self) -> int:
        return hash(_plain(self))

    def __repr__(self) -> str:
        return repr(_plain(self))


def _plain(tier: Tier) -> Tier:
    return Tier(**{each.name: getattr(tier, each.name) for each in dataclasses.fields(Tier)})


class _Platform(Platform):
    """A platform that notes when its budget is read, as a figure or in a hash."""

    @property
    def budget(self) -> int | None:
        _note(self)
        budget: int | None = vars(self)["budget"]
        return budget

    @budget.setter
    def budget(self, value: int | None) -> None:
        vars(self)["budget"] = value

    def with_budget(self, budget: int) -> Platform:
        """See `Platform`."""
        plain: Platform | None = vars(self).get("plain")
        return super().with_budget(budget) if plain is None else plain.with_budget(budget)

    @property
    def content_hash(self) -> str:
        """See `Platform`."""
        _note(self)
        return Platform.content_hash.func(self)  # type: ignore[attr-defined, no-any-return]
