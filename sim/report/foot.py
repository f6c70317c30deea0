"""The lines under a result: what its figures hold and leave out, and how to get them again."""

from __future__ import annotations

from dataclasses import dataclass

from sim.hardware.platform import Platform
from sim.units import format_bytes

INCLUDES = "ops, recomputed ops, codecs, stalls, and at the end the transfers that bring everything back"
LEAVES_OUT = "planning, loading of input data, allocator calls, and what the framework does beside its launches"
ASSUMED_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Foot:
    """What a reader has to know of a result.

    platform: the one that was run on, its budget set. steady: whether the figures are those of the steady state,
    after `warm_up` iterations. command: what repeats the result, "" where it came from Python. workload: one line.
    notes: more lines, such as which policies were left out and why.
    """

    platform: Platform
    steady: bool = True
    warm_up: int = 0
    command: str = ""
    workload: str = ""
    notes: tuple[str, ...] = ()


def foot_lines(foot: Foot, *, binary: bool = False) -> list[str]:
    """The foot as lines of text."""
    platform = foot.platform
    lines = [f"platform {platform.name}" + (f", workload {foot.workload}" if foot.workload else "")]
    lines.append("; ".join(_memory(platform, binary)))
    warm = f" after {foot.warm_up} for warm-up" if foot.warm_up else ""
    state = f"the steady state{warm}" if foot.steady else "the first iteration, not the steady state"
    lines.append(f"time: one iteration, {state}: {INCLUDES}")
    lines.append(f"left out of it: {LEAVES_OUT}")
    assumed = platform.assumed
    if assumed:
        shown = ", ".join(f"{fact.path} = {fact.text}" for fact in assumed[:ASSUMED_SHOWN])
        more = f" and {len(assumed) - ASSUMED_SHOWN} more" if len(assumed) > ASSUMED_SHOWN else ""
        lines.append(f"assumed, neither measured nor published ({len(assumed)}): {shown}{more}")
    elif platform.facts:
        lines.append(f"no figure of the profile is merely assumed ({len(platform.facts)} have a source)")
    lines += [*platform.notes, *foot.notes]
    if foot.command:
        lines.append(f"again: {foot.command}")
    return lines


def _memory(platform: Platform, binary: bool) -> list[str]:
    """Budget, usable and nominal capacity of the home tiers; equal ones are said once."""
    found = []
    for name in dict.fromkeys(engine.home for engine in platform.engines if engine.main):
        tier = platform.tier(name)
        word = "usable capacity" if platform.budget is None else "budget"
        amounts = f"{word} {format_bytes(tier.capacity, binary=binary)}"
        found.append((f"{amounts}, nominal {format_bytes(tier.nominal, binary=binary)}", name))
    texts = list(dict.fromkeys(text for text, _ in found))
    if len(texts) == 1:
        names = found[0][1] if len(found) == 1 else f"each of {len(found)} devices"
        return [f"{texts[0]} ({names})"]
    return [f"{text} ({name})" for text, name in found]
