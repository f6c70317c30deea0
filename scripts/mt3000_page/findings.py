"""What follows from the runs of the study, without words."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from scripts.mt3000_page import study
from sim.report.error_bars import policies_error

if TYPE_CHECKING:
    import pandas as pd

SURE = policies_error()
"""Times that differ by less than this fraction are not told apart: as in every comparison."""

FREE = 0.01
"""A policy that costs less than this fraction of an iteration is called free."""

KINDS = ("recomputation", "copies", "both", "neither")
Row = Mapping[str, Any]
Cells = Mapping[tuple[str, str, tuple[str, ...]], "Cell"]
Prediction = tuple[str, str, float, str, bool]


class Cell:
    """One job on one machine under many policies."""

    def __init__(self, data: Mapping[str, Any], run: study.Run) -> None:
        self.budget, self.rate, self.run = data["budget"], data["rate"], run
        self.rows = {name: {"fits": None, **data["rows"][name], "policy": name} for name in run.policies}

    def best(self, kinds: Iterable[str] = KINDS) -> Row | None:
        """The fastest run of these kinds; of equal ones the one that does less."""
        from sim.report.verdict import kind

        found = [row for row in self.rows.values() if row["fits"] and kind(row) in kinds]
        return min(found, key=lambda row: (row["makespan_ns"], sum(row["moved_bytes"].values())), default=None)

    def over(self, row: Row | None) -> float | None:
        """The slowdown of a run against unlimited memory."""
        return None if row is None else row["makespan_ns"] / self.unlimited - 1

    @property
    def unlimited(self) -> int:
        """The time with unlimited memory, in ns."""
        return int(next(row["unlimited_ns"] for row in self.rows.values() if row.get("unlimited_ns")))


def cells(data: Mapping[str, Any], part: str) -> dict[tuple[str, str, tuple[str, ...]], Cell]:
    """The comparisons of a part: job, machine or layout, and changed figures -> what was found."""
    found = {}
    for run in study.runs():
        if run.part == part:
            if run.key not in data or set(run.policies) - set(data[run.key]["rows"]):
                raise SystemExit(f"{run.key}: not measured: python scripts/make_mt3000.py --measure {part}")
            changed = tuple(f"{path}={value}" for path, value in run.figures.items())
            found[run.job, run.layout or run.machine, changed] = Cell(data[run.key], run)
    return found


def pressure(cell: Cell) -> float | None:
    """How long copying out what is too much takes, over a third of the time with unlimited memory: of forward, about.

    Above 1 a link can't keep up with forward. None where nothing is too much, nothing runs, or there is no
    link.
    """
    too_much = study.wanted(cell.run.job, cell.run.options)[0] - cell.budget
    return (
        None
        if too_much <= 0 or not cell.rate or cell.best() is None
        else too_much / cell.rate * 1e9 / (cell.unlimited / 3)
    )


def winner(cell: Cell) -> str:
    """`copies` or `recomputation`, whichever is faster alone by more than nothing; "" where one of them can't run."""
    alone = {kind: cell.best((kind,)) for kind in ("copies", "recomputation")}
    if any(row is None for row in alone.values()):
        return ""
    return min(alone, key=lambda kind: alone[kind]["makespan_ns"])  # type: ignore[index]


def crossing(found: Cells) -> dict[str, float]:
    """Per job the pressure at which copying alone and recomputing alone take as long, between points of the sweep."""
    crossed = {}
    for job in study.SWEPT:
        points = []
        for (name, _, _), cell in found.items():
            copies, recomputes = cell.best(("copies",)), cell.best(("recomputation",))
            if name == job and copies and recomputes:
                points.append((pressure(cell) or 0.0, copies["makespan_ns"] - recomputes["makespan_ns"]))
        points.sort()
        for (low, below), (high, above) in pairwise(points):
            if below <= 0 < above:
                crossed[job] = low + (high - low) * -below / (above - below)
    return crossed


def turning_rate(rates: Cells, job: str = "GPT-2 medium") -> float:
    """The rate in GB/s, each way, at which copying alone and recomputing alone take as long for a job of the sweep."""
    border = crossing(rates)[job]
    (at, rate), *_ = [(pressure(cell) or 0.0, cell.rate) for (name, _, _), cell in rates.items() if name == job]
    return at * rate / border / 1e9


def predictions(found: Cells, at: float) -> list[Prediction]:
    """(job, machine, pressure, faster kind, whether the axis said so) of cells that were not used to find `at`."""
    made = []
    for (job, where, _), cell in found.items():
        ratio, faster = pressure(cell), winner(cell)
        if where == "mt3000_survey" or ratio is None or not faster:
            continue
        made.append((job, where, ratio, faster, (faster == "copies") == (ratio < at)))
    return made


def shares(found: Cells) -> dict[str, float]:
    """In which part of the draws copying alone, recomputing alone, or neither is the faster by more than `SURE`."""
    counts = {"copies": 0, "recomputation": 0, "not told apart": 0}
    for cell in found.values():
        counts[_told(cell)] += 1
    return {name: count / len(found) for name, count in counts.items()}


def _told(cell: Cell) -> str:
    times = {kind: (cell.best((kind,)) or {}).get("makespan_ns") for kind in ("copies", "recomputation")}
    fitting = {kind: ns for kind, ns in times.items() if ns is not None}
    first = min(fitting, key=lambda kind: fitting[kind])
    others = [ns for kind, ns in fitting.items() if kind != first]
    return first if all(ns > (1 + SURE) * fitting[first] for ns in others) else "not told apart"


def winning(found: Cells) -> dict[str, dict[str, float]]:
    """Per job the share of its draws in which each policy is the fastest, or not told apart from it."""
    shares: dict[str, dict[str, float]] = {}
    for job in dict.fromkeys(name for name, _, _ in found):
        own = [cell for (name, _, _), cell in found.items() if name == job]
        shares[job] = {policy: sum(map(partial(_leads, policy), own)) / len(own) for policy in own[0].rows}
    return shares


def _leads(policy: str, cell: Cell) -> bool:
    row, top = cell.rows[policy], cell.best()
    return bool(row["fits"] and top and row["makespan_ns"] <= (1 + SURE) * top["makespan_ns"])


def recomputing(found: Cells) -> int:
    """In how many draws the fastest run recomputes, alone or beside copying."""
    return sum(cell.best() is not None and bool(cell.best()["recompute_ns"]) for cell in found.values())  # type: ignore[index]


@dataclass(frozen=True)
class Correlations:
    """Rank correlations by figure, the strongest first.

    draws: of how many.
    """

    by_figure: Sequence[tuple[str, float]]
    draws: int

    @property
    def noise(self) -> float:
        """What a figure without any effect exceeds in one of twenty studies of so many draws."""
        return 1.96 / math.sqrt(max(2, self.draws) - 1)

    @property
    def told(self) -> list[tuple[str, float]]:
        """Those that are told from such a figure."""
        return [(path, value) for path, value in self.by_figure if abs(value) >= self.noise]


def leads(found: Cells) -> Correlations:
    """Per assumed figure the rank correlation of its value with the lead of what recomputes over what only copies.

    Among draws of the same job and stack, and only those where both fit.
    """
    import pandas as pd

    rows = []
    for (job, _, figures), cell in found.items():
        copies, recomputes = cell.best(("copies",)), cell.best(("recomputation", "both"))
        if copies is not None and recomputes is not None:
            values = {path: float(text.split()[0]) for path, _, text in (each.partition("=") for each in figures)}
            rows.append({**values, "ratio": copies["makespan_ns"] / recomputes["makespan_ns"],
                         "of": f"{job} {cell.run.options['stack']}"})  # fmt: skip
    table = pd.DataFrame(rows)
    ranked = table.drop(columns="of").groupby(table["of"]).rank(pct=True)
    return _correlations(ranked)


def effects(found: Cells) -> Correlations:
    """Per assumed figure the rank correlation of its value with the time of copying over that of recomputing."""
    import pandas as pd

    rows = []
    for (_, _, figures), cell in found.items():
        copies, recomputes = (cell.best((kind,)) for kind in ("copies", "recomputation"))
        if copies is None or recomputes is None:
            continue
        values = {path: float(text.split()[0]) for path, _, text in (each.partition("=") for each in figures)}
        rows.append({**values, "ratio": copies["makespan_ns"] / recomputes["makespan_ns"]})
    return _correlations(pd.DataFrame(rows).rank())


def _correlations(ranked: pd.DataFrame) -> Correlations:
    against = ranked.drop(columns="ratio").corrwith(ranked["ratio"])
    found = [(str(path), float(value)) for path, value in against.items()]
    return Correlations(sorted(found, key=lambda each: -abs(each[1])), len(ranked))


def clusters_of(layout: str) -> int:
    """How many clusters a layout takes."""
    return math.prod(study.LAYOUTS[layout].get(axis, 1) for axis in ("dp", "tp", "pp"))


def free(found: Cells, where: str = "mt3000_survey") -> list[str]:
    """The jobs whose best policy costs next to nothing on a machine."""
    own = {job: cell for (job, name, _), cell in found.items() if name == where}
    return [job for job, cell in own.items() if (top := cell.best()) and (cell.over(top) or 0) < FREE]


def most_samples(found: Cells) -> dict[str, tuple[str, str]]:
    """Per job the layout and the policy with the most samples per second and cluster; only jobs that fit."""
    fastest: dict[str, tuple[float, str, str]] = {}
    for (job, layout, _), cell in found.items():
        if (top := cell.best()) is not None:
            spent = float(top["makespan_ns"] * clusters_of(layout))
            if job not in fastest or spent < fastest[job][0]:
                fastest[job] = (spent, layout, top["policy"])
    return {job: found[1:] for job, found in fastest.items()}


def without_room(found: Cells) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(job, machine) where nothing fits: those whose state alone exceeds all tiers of the machine, and the others."""
    too_large, others = [], []
    for (job, where, _), cell in found.items():
        if cell.best() is None:
            room = sum(tier.capacity for tier in study.machine(where).tiers)
            (too_large if study.wanted(job)[1] > room else others).append((job, where))
    return too_large, others


@dataclass(frozen=True)
class Standing:
    """How a policy stands over the cells of some machines.

    does: the kinds of its runs.
    fits, cells: in how many cells it fits, of how many in which it was tried.
    overhead: the median slowdown against unlimited memory where it fits, as a fraction; None if it fits nowhere.
    largest: the job that wants the most memory of those that it fits; "" for none.
    """

    does: frozenset[str]
    fits: int
    cells: int
    overhead: float | None
    largest: str


def standing(found: Cells, policy: str, machines: Collection[str]) -> Standing:
    """How a policy stands on some machines."""
    from sim.report.verdict import kind

    tried = [(job, cell, cell.rows[policy]) for (job, name, _), cell in found.items()
             if name in machines and policy in cell.rows]  # fmt: skip
    fits = [(job, cell, row) for job, cell, row in tried if row["fits"]]
    overhead = median(cell.over(row) or 0.0 for _, cell, row in fits) if fits else None
    largest = max((job for job, _, _ in fits), key=lambda job: study.wanted(job)[0], default="")
    return Standing(frozenset(kind(row) for _, _, row in fits), len(fits), len(tried), overhead, largest)
