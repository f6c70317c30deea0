"""Allocators: which addresses blocks get in a tier.

    exact     sum of sizes; counted by the engine itself, for which `make_allocator` gives None
    caching   PyTorch's CUDA allocator, in `caching`
    pool      one contiguous range, first or best fit, filled from one end or from both
    planned   one contiguous range, each block at the offset that the plan gives it

A request of zero bytes is legal everywhere: it gets a handle, no space, and address 0.
"""

from __future__ import annotations

from sim.engine.allocators.blocks import Blocks
from sim.engine.allocators.caching import Caching
from sim.engine.allocators.planned import Planned
from sim.engine.allocators.pool import Pool
from sim.errors import ProfileError, near
from sim.hardware.platform import Tier

__all__ = ["OPTIONS", "Blocks", "Caching", "Planned", "Pool", "make_allocator"]

OPTIONS: dict[str, dict[str, type]] = {
    "exact": {},
    "caching": {"expandable_segments": bool, "max_split_size": int},
    "pool": {"fit": str, "ends": int, "classes": str, "rounding": int},
    "planned": {"rounding": int},
}
"""The options of each allocator and their types; sizes in bytes."""


def make_allocator(tier: Tier) -> Blocks | None:
    """The allocator that a tier names, empty; None for `exact`.

    Raises ProfileError on an unknown allocator, option or value.
    """
    name, where = tier.allocator.name, f"tier {tier.name!r}: allocator"
    if name not in OPTIONS:
        raise ProfileError(f"{where}: {name!r} is unknown{near(name, OPTIONS)}")
    given = dict(tier.allocator.options)
    for key, value in given.items():
        if key not in OPTIONS[name]:
            raise ProfileError(f"{where} {name!r}: option {key!r} is unknown{near(key, OPTIONS[name])}")
        if key == "classes" and type(value) is int:
            given[key] = value = str(value)  # a profile turns "2 MiB" into bytes
        if type(value) is not OPTIONS[name][key]:
            raise ProfileError(f"{where} {name!r}: {key}: {value!r} is not of type {OPTIONS[name][key].__name__}")
    try:
        if name == "caching":
            return Caching(tier.capacity, **given)  # type: ignore[arg-type]
        if name == "pool":
            return Pool(tier.capacity, **given)  # type: ignore[arg-type]
        if name == "planned":
            return Planned(tier.capacity, **given)  # type: ignore[arg-type]
    except ValueError as error:
        raise ProfileError(f"{where} {name!r}: {error}") from None
    return None
