"""The footer of a result: what its figures include and leave out, and how to reproduce them."""

from __future__ import annotations

from dataclasses import dataclass

from sim.analysis.stand_in import stand_in
from sim.hardware.platform import Platform
from sim.report.error_bars import error_lines
from sim.trace.graph import Trace
from sim.trace.provenance import workload_notes
from sim.units import format_bytes, parse_bytes

INCLUDES = "ops, recomputed ops, codecs, stalls, and at the end the transfers that restore everything"
LEAVES_OUT = "planning, loading of input data, allocator calls, and the framework's work other than launches"
ASSUMED_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Footer:
    """What a reader has to know of a result.

    platform: that of the run, with its budget.
    steady: whether the figures are those of the steady state.
    warm_up: how many iterations came before.
    command: the command that reproduces the result, "" if it came from Python.
    workload: one line.
    trace: the trace that ran, for the type that it computes in.
    notes: more lines, such as which policies were left out and why.
    brief: whether the notes of the platform are counted instead of printed, and what does not fit is summed up.
    """

    platform: Platform
    steady: bool = True
    warm_up: int = 0
    command: str = ""
    workload: str = ""
    trace: Trace | None = None
    notes: tuple[str, ...] = ()
    brief: bool = False


def notes_beside(footer: Footer) -> tuple[str, ...]:
    """The notes of a result that are not of its platform: what was assumed of the workload, and those of the run."""
    return *(workload_notes(footer.trace) if footer.trace is not None else ()), *footer.notes


def footer_lines(footer: Footer, *, binary: bool = False) -> list[str]:
    """The footer as lines of text."""
    platform = footer.platform
    lines = [f"platform {platform.name}" + (f", workload {footer.workload}" if footer.workload else "")]
    lines.append("; ".join(_memory(platform, binary)))
    lines += warnings(footer, binary=binary)
    warm = f" after {footer.warm_up} for warm-up" if footer.warm_up else ""
    state = f"the steady state{warm}" if footer.steady else "the first iteration, not the steady state"
    lines.append(f"time: one iteration, {state}: {INCLUDES}")
    lines.append(f"left out of it: {LEAVES_OUT}")
    lines += error_lines([platform])
    assumed = platform.assumed
    if assumed:
        shown = ", ".join(f"{fact.path} = {fact.text}" for fact in assumed[:ASSUMED_SHOWN])
        more = f" and {len(assumed) - ASSUMED_SHOWN} more" if len(assumed) > ASSUMED_SHOWN else ""
        lines.append(f"assumed, neither measured nor published ({len(assumed)}): {shown}{more}")
    elif platform.facts:
        lines.append(f"no figure of the profile is merely assumed ({len(platform.facts)} have a source)")
    count = len(platform.notes)
    if footer.brief and count > 1:
        lines.append(f"{count} notes on how this machine was described: --notes")
    else:
        lines += platform.notes
    lines += notes_beside(footer)
    if footer.command:
        lines.append(f"reproduce: {footer.command}")
    return lines


def _memory(platform: Platform, binary: bool) -> list[str]:
    """Budget, usable and nominal capacity of the home tiers; equal ones are given once."""
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


def warnings(footer: Footer, *, binary: bool = False) -> list[str]:
    """What of a result is of another machine than the one named: its budget, or the type of its peak."""
    platform = footer.platform
    main, priced = ("", "") if footer.trace is None else stand_in(footer.trace, platform)
    return [*beyond_lines(platform, platform.budget, binary=binary), *priced_lines(main, priced)]


def beyond_lines(platform: Platform, budget: int | None, *, binary: bool = False) -> list[str]:
    """A warning where a budget exceeds the capacity in the profile."""
    name = platform.home(0).name.partition("@")[0]
    usable = next((parse_bytes(fact.text) for fact in platform.facts if fact.path == f"tiers.{name}.capacity"), None)
    if budget is None or usable is None or budget <= usable:
        return []
    given, most = (format_bytes(amount, binary=binary) for amount in (budget, usable))
    return [f"the budget of {given} exceeds this machine: a run that takes more than {most} does not fit on it"]


def priced_lines(main: str, priced: str) -> list[str]:
    """A warning where the machine has no peak for the type of most FLOPs, but prices them in another."""
    return [f"no {main} peak in this profile: priced as {priced}"] if main != priced else []
