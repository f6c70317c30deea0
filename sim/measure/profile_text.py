"""Formats fitted constants as the TOML text of a hardware profile. Needs no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sim.measure.fit import LinkFit, OpFit


@dataclass(frozen=True)
class Machine:
    """What is known about the machine without timing it.

    device: its name.
    is_cuda: whether it is a CUDA device.
    date: of the measurement, as ISO text.
    torch: version of PyTorch.
    memory, free: total and free bytes of its memory.
    host_memory: bytes of the host's memory.
    """

    device: str
    is_cuda: bool
    date: str
    torch: str
    memory: int
    free: int
    host_memory: int


@dataclass(frozen=True)
class Links:
    """Copies between a CUDA device and the host.

    fits: by name of the link.
    factors: fraction of its rate that remains when both directions are active, by name of the link.
    """

    fits: Mapping[str, LinkFit]
    factors: Mapping[str, float]


def profile_text(
    machine: Machine, ops: OpFit, host: OpFit | None = None, links: Links | None = None, doubt: str = ""
) -> str:
    """The TOML text of a profile.

    machine: what is known without timing.
    ops: fit of the device's ops.
    host: fit of the CPU's ops on a machine with a CUDA device.
    links: its copies.
    doubt: what speaks against the figures, a note.
    """
    tier = "hbm" if machine.is_cuda else "ram"
    source = f"tiersim calibrate, {machine.date}, {machine.device}, PyTorch {machine.torch}"
    worst = ops.worst_sample
    notes = (
        "Peaks are the fastest rates that were measured, so that no efficiency is above 1.",
        f"Largest residual of an op: {worst.kind} in {worst.dtype} with {worst.flops} FLOPs and {worst.bytes} bytes: "
        f"{ops.worst:.0%}.",
        *_residuals(ops),
        *([f"{doubt[0].upper()}{doubt[1:]}."] if doubt else []),
    )
    lines = [
        f"description = {_text(f'{machine.device}, measured {machine.date}')}",
        "notes = [",
        *(f"  {_text(note)}," for note in notes),
        "]",
        "",
        f"[tiers.{tier}]",
        f'kind = "{"hbm" if machine.is_cuda else "ddr"}"',
        "per_device = true",
        f"source = {_text(source)}",
        'standing = "measured"',
        f'nominal = "{machine.memory} B"',
        f'capacity = "{machine.free} B"',
        f'bandwidth = "{round(ops.bandwidth)} B/s"',
        "",
    ]
    if host is not None:
        for name in ("host", "host_pageable"):
            half = _figure(
                f"{machine.host_memory // 2} B", "half of the machine's memory each, pinned and pageable", "assumed"
            )
            lines += [
                f"[tiers.{name}]",
                'kind = "ddr"',
                f"source = {_text(source)}",
                'standing = "measured"',
                f'nominal = "{machine.host_memory} B"',
                f"capacity = {half}",
                f'bandwidth = "{round(host.bandwidth)} B/s"',
                "",
            ]
    lines += _engine("device" if machine.is_cuda else "cpu", tier, True, ops, source)
    if host is not None:
        lines += _engine("cpu", "host", False, host, source, reaches=("host", "host_pageable"))
    if links is not None:
        lines += _links(links, source, host)
    transfer = (
        _figure("no measurement", "there is no device apart from the host", "measured", bare=True)
        if links is None
        else _figure(
            _number(sum(f.error for f in links.fits.values()) / len(links.fits)), source, "measured", bare=True
        )
    )
    op_time = _figure(_number(ops.error), f"mean relative residual; {source}", "measured", bare=True)
    lines += ["[fit]", f"op_time = {op_time}", f"transfer_time = {transfer}", ""]
    return "\n".join(lines)


def _residuals(fit: OpFit) -> list[str]:
    """Notes on how far the fit is off, and on which kinds of op do not show it."""
    exact = sorted(set(fit.share) - set(fit.residuals))
    notes = []
    if fit.residuals:
        notes.append(f"Mean residuals by kind: {_list(fit.residuals)}.")
        notes.append(f"Median residuals at sizes that the fit did not have: {_list(fit.held_out)}.")
    if exact:
        notes.append(f"No residual, too few sizes: {', '.join(exact)}.")
    return notes


def _engine(name: str, home: str, main: bool, fit: OpFit, source: str, reaches: tuple[str, ...] = ()) -> list[str]:
    lines = [f"[engines.{name}]", f'home = "{home}"']
    if not main:
        lines += ["main = false", f"reaches = {json.dumps(list(reaches))}"]
    lines += [
        f"source = {_text(source)}",
        'standing = "measured"',
        f'launch = "{max(0, round(fit.launch_ns))} ns"',
        "",
        f"[engines.{name}.peak]",
    ]
    lines += [f'{dtype} = "{round(rate)} FLOP/s"' for dtype, rate in fit.peak.items()]
    lines += ["", f"[engines.{name}.efficiency]"]
    lines += [f"{kind}_{dtype} = {_number(min(1.0, value))}" for (kind, dtype), value in fit.efficiency.items()]
    first = next(iter(fit.peak))
    of_products = min(1.0, fit.efficiency.get(("matmul", first), 1.0))
    default = _figure(
        _number(of_products), "other kinds were not measured: same as matrix products", "assumed", bare=True
    )
    lines += [f"default = {default}", "", f"[engines.{name}.bandwidth_share]"]
    lines += [f"{kind} = {_number(share)}" for kind, share in fit.share.items()]
    other = fit.share.get("elementwise", 1.0)
    default = _figure(_number(other), "other kinds were not measured: same as elementwise ops", "assumed", bare=True)
    return [*lines, f"default = {default}", ""]


def _links(links: Links, source: str, host: OpFit | None) -> list[str]:
    ends = {"d2h": ("hbm", "host"), "h2d": ("host", "hbm")}
    ends |= {"d2h_pageable": ("hbm", "host_pageable"), "h2d_pageable": ("host_pageable", "hbm")}
    lines = []
    for name, fit in links.fits.items():
        lines += [
            f"[links.{name}]",
            f'from = "{ends[name][0]}"',
            f'to = "{ends[name][1]}"',
            f"source = {_text(source)}",
            'standing = "measured"',
            f'rate = "{round(fit.rate)} B/s"',
            f'fixed = "{max(0, round(fit.fixed_ns))} ns"',
            "",
        ]
    lines += ["[pools.wires]", "per_device = true", f"source = {_text(source)}", 'standing = "measured"']
    lines += ["", "[pools.wires.factors]"]
    lines += [f"{name} = {_number(min(1.0, factor))}" for name, factor in links.factors.items()]
    if host is not None:
        charged = "a pinned copy reads or writes host memory once, a pageable one is staged"
        lines += [
            "",
            "[pools.host_memory]",
            f"rate = {_figure(f'{round(host.bandwidth)} B/s', source, 'measured')}",
            "",
            "[pools.host_memory.charges]",
            f"source = {_text(charged)}",
            'standing = "estimate"',
            "cpu = 1",
            *(f"{name} = {3 if name.endswith('pageable') else 1}" for name in links.fits),
        ]
    return [*lines, ""]


def _figure(value: str, source: str, standing: str, *, bare: bool = False) -> str:
    """A figure as a table. bare: the value is a number (or "no measurement"), not a quantity with a unit."""
    shown = value if bare and value != "no measurement" else _text(value)
    return f"{{ value = {shown}, source = {_text(source)}, standing = {_text(standing)} }}"


def _number(value: float) -> str:
    """A positive number in TOML: four decimals, never 0 and never with an exponent."""
    return f"{max(value, 1e-4):.4f}"


def _list(values: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {value:.0%}" for kind, value in values.items())


def _text(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's."""
    return json.dumps(text, ensure_ascii=False)
