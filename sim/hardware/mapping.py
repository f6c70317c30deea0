"""The instruction mapping table of a platform: which engine runs which kind of op, where, and how well.

It follows from the figures of the profile. A kind that an engine lacks has no entry there: it cannot run on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.errors import ProfileError
from sim.hardware.cost import bytes_per_second, efficiency_of, peak_dtype
from sim.hardware.platform import Engine, Platform
from sim.trace.op import KINDS


@dataclass(frozen=True, slots=True)
class Entry:
    """How an engine runs a kind of op.

    engine: name.
    zone: its home tier, where results are produced.
    kind: of op.
    flops: FLOP/s by type, peak times efficiency.
    efficiency: fraction of the peak by type.
    rate: bytes/s that it draws from its zone.
    launch: ns.
    """

    engine: str
    zone: str
    kind: str
    flops: Mapping[str, int]
    efficiency: Mapping[str, float]
    rate: int
    launch: int


def entry(platform: Platform, engine: Engine, kind: str) -> Entry | None:
    """The entry of an engine for a kind of op; None where it cannot run there."""
    if kind in engine.lacks:
        return None
    efficiency = {dtype: efficiency_of(engine, kind, dtype) for dtype in engine.peak}
    return Entry(
        engine=engine.name,
        zone=engine.home,
        kind=kind,
        flops={dtype: round(engine.peak[dtype] * share) for dtype, share in efficiency.items()},
        efficiency=efficiency,
        rate=bytes_per_second(engine, kind, platform.tier(engine.home)),
        launch=engine.launch,
    )


def mapping_table(platform: Platform, device: int = 0) -> tuple[Entry, ...]:
    """All entries of the engines that a device has or shares, by engine and kind."""
    engines = [engine for engine in platform.engines if engine.device in (-1, device)]
    entries = (entry(platform, engine, kind) for engine in engines for kind in KINDS)
    return tuple(found for found in entries if found is not None)


def can_run(engine: Engine, kind: str, dtype: str) -> bool:
    """Whether an engine runs a kind of op in a type, itself or as a wider one."""
    if kind in engine.lacks:
        return False
    try:
        peak_dtype(engine, dtype)
    except ProfileError:
        return False
    return True
