"""A small machine: one accelerator, its memory, and a host where a test asks for one."""

from __future__ import annotations

from sim.hardware.platform import Allocator, Engine, Link, Platform, Tier

GB = 10**9  # at 1 GB/s one byte takes one nanosecond


def machine(
    budget: int = 1 << 50, *, host: int = 0, rate: int | None = GB, speed: int = GB, allocator: Allocator | None = None
) -> Platform:
    """An engine `npu` on a tier `hbm` of so many bytes.

    host: bytes of a tier `host`, 0 for none. rate: bytes a second of a link each way, None for no links. speed: FLOPs
    and bytes a second of the engine and its memory. allocator: of `hbm`; by default the sum of sizes.
    """
    tiers = [Tier("hbm", budget, budget, speed, device=0, allocator=allocator or Allocator("exact"))]
    if host:
        tiers.append(Tier("host", host, host, speed, kind="ddr"))
    links = (Link("d2h", "hbm", "host", rate), Link("h2d", "host", "hbm", rate)) if host and rate else ()
    return Platform("toy", tuple(tiers), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": speed}),), links)
