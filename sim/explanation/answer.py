"""The explanation, as data and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sim.analysis.bounds import Bounds
from sim.analysis.peak_memory import Peak
from sim.analysis.stalls import Stalls
from sim.experiment import Result
from sim.explanation.parting import Parting, Step
from sim.explanation.tried import Tried
from sim.foreign_text import printable
from sim.policies import label
from sim.report.error_bars import ratio_error, statement_errors
from sim.units import format_bytes, format_percent, format_time

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 3
"""Tensors, ops or changes named per line."""
TRIFLE = 0.005
"""Changes of the time by less than this fraction are not named."""
CAUSES = {
    "transfer": "for copies",
    "space": "for space",
    "hazard": "for copies of values that are about to be overwritten",
    "peer": "for other devices",
    "engine": "for results of other engines",
    "wait": "where the plan says so",
    "drain": "for copies at the end",
    "launch": "for the CPU that launches",
}


@dataclass(frozen=True)
class Explanation:
    """Why a run takes what it takes.

    result: the run.
    peak: what set its peak.
    bounds: what no plan for this trace on this machine can beat.
    time: where the time of its devices went.
    waits: what was waited for, by tensor and link; see `sim.analysis.waits`.
    recomputed: per name of an op, with * for the number of its layer, how long its recomputations took, in ns, longest
        first.
    changes: single changes, simulated, the greatest help first.
    untried: changes for which no time was left.
    other: the run that this one is compared with.
    parting: how they differ.
    """

    result: Result
    peak: Peak
    bounds: Bounds
    time: Stalls
    waits: pd.DataFrame
    recomputed: dict[str, int]
    changes: tuple[Tried, ...] = ()
    untried: int = 0
    other: Result | None = None
    parting: Parting | None = None

    @property
    def indistinguishable(self) -> bool | None:
        """Whether the times of the two runs differ by no more than the model's own error; None without another run."""
        if self.other is None:
            return None
        fast, slow = sorted((self.result.log.end, self.other.log.end))
        error, _ = ratio_error(layouts=self.are_two_layouts)
        return slow <= fast * (1 + error)

    @property
    def are_two_layouts(self) -> bool:
        """Whether the other run is of another layout over devices."""
        runs = (self.result, *([] if self.other is None else [self.other]))
        first, *others = (run.log.trace.meta.get("layout") for run in runs)
        return any(other != first for other in others)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON."""
        return {
            "policy": label(self.result.policy),
            "summary": self.result.summary(),
            "peak": asdict(self.peak),
            "bounds": asdict(self.bounds),
            "waits": self.waits.to_dict("records"),
            "recomputed_ns": self.recomputed,
            "changes": [asdict(each) for each in self.changes],
            "untried": self.untried,
            "other": None if self.other is None else label(self.other.policy),
            "parting": None if self.parting is None else asdict(self.parting),
            "indistinguishable": self.indistinguishable,
            "error": statement_errors(self.result.platform.name),
            "text": self.text().splitlines(),
        }

    def __repr__(self) -> str:
        return self.text().rstrip("\n")

    def text(self) -> str:
        """The explanation in words."""
        return "\n\n".join("\n".join(lines) for lines in blocks(self)) + "\n"


def blocks(found: Explanation) -> list[list[str]]:
    """The lines, in blocks: what ran, its peak, its time, the other run, single changes."""
    made = (_headline(found), _peak(found), _time(found), _against(found), _changes(found))
    return [lines for block in made if (lines := [printable(line) for line in block])]


def _ms(ns: int) -> str:
    return format_time(ns, digits=3)


def _signed(ns: int) -> str:
    return f"{'+' if ns > 0 else '-'}{_ms(abs(ns))}"


def _gb(size: int) -> str:
    return format_bytes(size, digits=3)


def _headline(found: Explanation) -> Iterator[str]:
    over, tier = found.result.summary().get("overhead"), found.result.platform.home(0)
    much = (
        ""
        if over is None
        else "as with"
        if abs(over) < 5e-4
        else f"{format_percent(over, digits=3, sign=True)} against"
    )
    than = f", {much} unlimited memory" if much else ""
    where = f"{found.result.platform.name}, {_gb(tier.capacity)} of {tier.name}"
    yield f"{label(found.result.policy)} on {where}: {_ms(found.result.log.end)} per iteration{than}"


def _peak(found: Explanation) -> Iterator[str]:
    peak, least = found.peak, found.bounds
    at = f", set by '{peak.op}' at {_ms(peak.time_ns)}" if peak.op else ""
    yield f"Peak: {_gb(peak.bytes)} of {peak.tier}{at}"
    roles = sorted(peak.by_role.items(), key=lambda item: -item[1])
    yield "  of it " + ", ".join(f"{role.replace('_', ' ')} {_gb(size)}" for role, size in roles)
    yield "  the largest: " + ", ".join(f"{held.tensor} {_gb(held.bytes)}" for held in peak.largest[:SHOWN])
    if least.memory_bytes:
        yield f"  no plan for this trace can hold less than {_gb(least.memory_bytes)}, which '{least.op}' needs"


def _time(found: Explanation) -> Iterator[str]:
    time = found.time
    parts = [f"{_ms(time.compute_ns)} computing", f"{_ms(time.recompute_ns)} recomputing"]
    parts += [f"{_ms(time.codec_ns)} encoding"] if time.codec_ns else []
    yield f"Time: {', '.join([*parts, f'{_ms(time.stall_ns)} waiting'])}"
    if found.recomputed:
        most = [f"{name} {_ms(ns)}" for name, ns in found.recomputed.items()][:SHOWN]
        yield f"  recomputed most: {', '.join(most)}"
    for cause, rows in found.waits.groupby("cause", sort=False):
        links = rows.groupby("link")["stall_ns"].sum().sort_values(ascending=False)
        over = ", ".join(f"{link} {_ms(int(ns))}" for link, ns in links.items() if link)
        longest = zip(rows["tensor"][:SHOWN], rows["stall_ns"][:SHOWN], strict=True)
        named = [f"{tensor} {_ms(int(ns))}" for tensor, ns in longest if tensor]
        count = int((rows["tensor"] != "").sum())
        rest = f" (of {count} tensors; longest {', '.join(named)})" if count > 1 else f" ({named[0]})" if named else ""
        total = _ms(int(rows["stall_ns"].sum()))
        yield f"  {total} waiting {CAUSES.get(str(cause), str(cause))}{f': {over}' if over else ''}{rest}"


def _against(found: Explanation) -> Iterator[str]:
    if found.other is None or found.parting is None:
        return
    apart, name, against = found.parting, label(found.result.policy), label(found.other.policy)
    ns = found.result.log.end - found.other.log.end
    peaks = [_gb(_home_peak(each)) for each in (found.result, found.other)]
    held = f"the same peak, {peaks[0]}" if peaks[0] == peaks[1] else f"peak {peaks[0]} instead of {peaks[1]}"
    longer = f"{_ms(abs(ns))} {'more' if ns > 0 else 'less'}" if ns else "as fast"
    than = f"{longer}, {held}"
    yield f"Against {against} ({_ms(found.other.log.end)}): {than}"
    if ns and found.indistinguishable:
        error, on = ratio_error(layouts=found.are_two_layouts)
        own = f"the model's own error of {format_percent(error)}, {on}"
        yield f"  the times can't be told apart: they differ by no more than {own}"
    for what, parts in (("spent", apart.more), ("by phase", apart.by_phase)):
        if parts:
            yield f"  {what}: " + ", ".join(f"{part} {_signed(n)}" for part, n in parts.items())
    steps = [step for step in (apart.first, apart.second) if step is not None]
    if not steps:
        yield "  the devices do the same, step by step"
    else:
        begin = _ms(min(step.start_ns for step in steps))
        yield f"  they part at {begin}: {against} {_step(apart.first)}, {name} {_step(apart.second)}"


def _home_peak(result: Result) -> int:
    return int(result.summary()["peak_bytes"])


def _step(step: Step | None) -> str:
    if step is None:
        return "has ended"
    op = f" '{step.op}'" if step.op else ""
    kind, waits, cause = step.does.partition(" for ")
    if waits:
        return f"{kind} {CAUSES.get(cause, cause)}{' at' if op else ''}{op}, {_ms(step.ns)}"
    return f"{step.does}{op} for {_ms(step.ns)}"


def _changes(found: Explanation) -> Iterator[str]:
    if not found.changes and not found.untried:
        return
    now = found.result.log.end
    left = f", {found.untried} left out for lack of time" if found.untried else ""
    yield f"Single changes, each simulated ({len(found.changes)} tried{left}):"
    for of, what in (("policy", "of the policy"), ("machine", "of the machine")):
        tried = [each for each in found.changes if each.of == of]
        helps = [
            f"{each.what}: {_ms(each.makespan_ns)} ({format_percent(each.makespan_ns / now - 1, sign=True)})"
            for each in tried
            if each.makespan_ns is not None and each.makespan_ns < (1 - TRIFLE) * now
        ]
        if helps:
            yield f"  {what}: {'; '.join(helps[:SHOWN])}"
        elif tried:
            yield f"  {what}: none saves {100 * TRIFLE:.1g} %"
