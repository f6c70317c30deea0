"""A small machine: accelerators with their memory, and a host where a test asks for one."""

from __future__ import annotations

from sim.hardware.platform import Allocator, Engine, Link, Platform, Pool, Tier

GB = 10**9  # at 1 GB/s one byte takes one nanosecond


def machine(
    hbm: int = 1 << 50,
    *,
    host: int = 0,
    devices: int = 1,
    rate: int | None = GB,
    fixed: int = 0,
    copy_engines: int = 1,
    speed: int = GB,
    cpu: str = "",
    allocator: Allocator | None = None,
    pools: tuple[Pool, ...] = (),
) -> Platform:
    """An engine `npu` on a tier `hbm` of so many bytes; of several devices `npu@0`, `hbm@0` and so on.

    host: bytes of a tier `host`, 0 for none.
    rate: bytes per second of a link each way, and between the first two devices; None for no links.
    fixed, copy_engines: of the links; those between devices have one copy engine.
    speed: FLOPs and bytes per second of the engines and memories.
    cpu: the home tier of an engine `cpu`, "" for none.
    allocator: of the devices' tiers; by default the sum of sizes.
    """
    names = [f"@{d}" if devices > 1 else "" for d in range(devices)]
    allocator = allocator or Allocator("exact")
    tiers = [Tier(f"hbm{n}", hbm, hbm, speed, device=d, allocator=allocator) for d, n in enumerate(names)]
    engines = [Engine(f"npu{n}", d, f"hbm{n}", (f"hbm{n}",), {"fp32": speed}) for d, n in enumerate(names)]
    links = []
    if host:
        tiers.append(Tier("host", host, host, speed, kind="ddr"))
    if host and rate:
        for n in names:
            links.append(Link(f"d2h{n}", f"hbm{n}", "host", rate, fixed, copy_engines))
            links.append(Link(f"h2d{n}", "host", f"hbm{n}", rate, fixed, copy_engines))
    if devices > 1 and rate:
        links += [Link("a2b", "hbm@0", "hbm@1", rate, fixed), Link("b2a", "hbm@1", "hbm@0", rate, fixed)]
    if cpu:
        engines.append(Engine("cpu", -1, cpu, (cpu,), {"fp32": speed}, main=False))
    return Platform("toy", tuple(tiers), tuple(engines), tuple(links), pools)
