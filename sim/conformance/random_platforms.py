"""Random platforms for the suite: small profiles, so that a failing one can be saved as a TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from sim.conformance.digits import Digits
from sim.hardware.assemble import assemble
from sim.hardware.platform import Platform
from sim.hardware.schema import ProfileFile

Document = Mapping[str, Any]
"""A profile as the nested tables of its TOML file."""

AMPLE = 1 << 40
RATES = ("1 GB/s", "2 GB/s", "500 MB/s", "3 GB/s", "7 GB/s", "333 MB/s")
FIXED = ("0 ns", "1 ns", "7 ns", "100 ns")
ALLOCATORS: tuple[Any, ...] = ("exact", "exact", "exact", {"name": "pool", "fit": "best"}, "caching")
STYLES = ("none", "none", "half", "factors", "bus", "memory")
"""Shared bandwidth: none, one rate for both directions, measured factors, a bus, or the host's memory."""


def _storage(
    drive: bool, small: str, pool: bool, sizes: dict[str, str], sourced: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tiers and links of what lies behind the device: a drive, one with a region of that size, a pool of two nodes."""
    tiers: dict[str, Any] = {}
    links: dict[str, Any] = {}
    if drive:
        tiers["drive"] = {"kind": "nvme", **sourced, **sizes, "bandwidth": "1 GB/s", "latency": "5 ns"}
        links["drive_write"] = {"from": "hbm", "to": "drive", "rate": "700 MB/s", "fixed": "1 ns", **sourced}
        links["drive_read"] = {"from": "drive", "to": "hbm", "rate": "900 MB/s", "fixed": "2 ns", **sourced}
    if small:
        common = {**sourced, "fixed": "1 ns"}
        for name, capacity, pace in (("slc", small, "900 MB/s"), ("tlc", f"{AMPLE} B", "300 MB/s")):
            tiers[name] = {"kind": name, **sourced, "nominal": capacity, "capacity": capacity, "bandwidth": "1 GB/s"}
            links[f"{name}_read"] = {**common, "from": name, "to": "hbm", "rate": "1 GB/s"}
            links[f"{name}_write"] = {**common, "from": "hbm", "to": name, "rate": pace}
        links["fold"] = {**common, "from": "slc", "to": "tlc", "rate": "300 MB/s"}
    for n in range(2 if pool else 0):
        tiers[f"pool{n}"] = {"kind": "pooled", **sourced, **sizes, "bandwidth": "1 GB/s"}
        node: dict[str, Any] = {**sourced, "fixed": "2 ns", "copy_engines": 2}
        links[f"out{n}"] = {**node, "from": "hbm", "to": f"pool{n}", "rate": "700 MB/s"}
        links[f"in{n}"] = {**node, "from": f"pool{n}", "to": "hbm", "rate": "600 MB/s"}
    return tiers, links


@st.composite
def random_platforms(
    draw: st.DrawFn,
    *,
    devices: int = 1,
    host: bool = True,
    cpu: bool = False,
    drive: bool = False,
    slc: bool = False,
    pool: bool = False,
    exact: bool = False,
) -> Document:
    """Devices with their memory `hbm`; if asked for, a `host` with links both ways, a `cpu` engine, a `drive`, regions.

    At random: a third tier behind the host, links that are slower or have a fixed time per copy, several copy engines,
    shared bandwidth of every kind, a device that reads the host's memory in place, and, unless `exact`, an allocator
    with addresses. At 1 GB/s a byte takes a nanosecond.
    """
    sourced = {"source": "drawn at random", "standing": "assumed"}
    sizes = {"nominal": f"{AMPLE} B", "capacity": f"{AMPLE} B"}
    digits = Digits(draw(st.integers(0, 2**6 * len(ALLOCATORS) * len(RATES) ** 4 * len(FIXED) * len(STYLES) - 1)))
    flags = digits.pick(range(64))
    allocator = digits.pick(ALLOCATORS)
    tiers: dict[str, Any] = {
        "hbm": {
            "kind": "hbm",
            "per_device": True,
            **sourced,
            **sizes,
            "bandwidth": "10 GB/s",
            "allocator": "exact" if exact else allocator,
        }
    }
    engines: dict[str, Any] = {
        "npu": {
            "home": "hbm",
            "main": True,
            **sourced,
            "launch": ("0 ns", "3 ns")[flags & 1],
            "peak": {"fp32": "10 GFLOP/s"},
        }
    }
    links: dict[str, Any] = {}
    pools: dict[str, Any] = {}
    if host:
        rate, fixed = (digits.pick(RATES), digits.pick(RATES)), digits.pick(FIXED)
        copies = 2 if flags & 2 else 1
        tiers["host"] = {"kind": "ddr", **sourced, **sizes, "bandwidth": "2 GB/s"}
        common = {**sourced, "fixed": fixed, "copy_engines": copies}
        if flags & 33 == 33:
            common["codec"] = "2 GB/s"
        links["d2h"] = {"from": "hbm", "to": "host", "rate": rate[0], **common}
        links["h2d"] = {"from": "host", "to": "hbm", "rate": rate[1], **common}
        if flags & 12 == 12:
            tiers["nvme"] = {"kind": "nvme", **sourced, **sizes, "bandwidth": "1 GB/s", "latency": "5 ns"}
            links["h2n"] = {"from": "host", "to": "nvme", "rate": "400 MB/s", "fixed": "1 ns", **sourced}
            links["n2h"] = {"from": "nvme", "to": "host", "rate": "600 MB/s", "fixed": "2 ns", **sourced}
        if flags & 48 == 48:
            engines["npu"]["reaches"] = ["host"]
            if flags & 4:
                tiers["host"]["write_bandwidth"] = "700 MB/s"
        pools.update(_pools(digits.pick(STYLES), digits.pick(RATES), cpu, devices > 1))
        for shared in pools.values():
            shared.update(sourced)
    if slc:
        small = f"{digits.pick(range(60, 180))} B"
    more_tiers, more_links = _storage(drive, small if slc else "", pool, sizes, sourced)
    tiers |= more_tiers
    links |= more_links
    if cpu:
        home = "host" if host else "hbm"
        engines["cpu"] = {"home": home, "main": False, **sourced, "launch": "2 ns", "peak": {"fp32": "1 GFLOP/s"}}
    if devices > 1:
        links["peer"] = {"from": "hbm", "to": "hbm", "peer": True, "rate": digits.pick(RATES)}
        links["peer"] |= {"fixed": "0 ns", **sourced}
    found = {"description": "a machine drawn at random", "devices": devices, "tiers": tiers, "engines": engines}
    fit = {"op_time": "no measurement", "transfer_time": "no measurement", **sourced}
    return {**found, "links": links, "pools": pools, "fit": fit}


def _pools(style: str, rate: str, cpu: bool, per_device: bool) -> dict[str, Any]:
    """Bandwidth that is shared."""
    if style == "half":
        return {"pcie": {"per_device": per_device, "duplex": "half", "charges": {"d2h": 1, "h2d": 1}}}
    if style == "factors":
        factors = {"d2h": Decimal("0.8"), "h2d": Decimal("0.5")}
        return {"pcie": {"per_device": per_device, "duplex": "factors", "factors": factors}}
    if style == "bus":
        return {"pcie": {"rate": rate, "charges": {"d2h": 1, "h2d": 3}}}
    if style == "memory":
        charges = {"d2h": 1, "h2d": 2, **({"cpu": 1} if cpu else {})}
        return {"dram": {"rate": rate, "charges": charges}}
    return {}


def platform_of(document: Document, budget: int | None = None) -> Platform:
    """The platform that a document describes, with `budget` bytes in each device's memory."""
    platform = _assembled(toml_of(document))
    return platform if budget is None else platform.with_budget(budget)


@lru_cache(256)
def _assembled(text: str) -> Platform:
    import tomllib

    raw = tomllib.loads(text, parse_float=Decimal)
    names = {group: list(raw.get(group, {})) for group in ("tiers", "engines", "links", "pools")}
    return assemble("random", ProfileFile.model_validate(raw, context=names))


def toml_of(document: Document) -> str:
    """The document as the text of a profile that `load_profile` reads."""
    lines: list[str] = []
    _table(lines, (), document)
    return "\n".join(lines) + "\n"


def _table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        lines += ["", f"[{'.'.join(path)}]"]
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            _table(lines, (*path, key), value)


def _value(value: Any) -> str:
    return str(value) if isinstance(value, Decimal) else json.dumps(value)
