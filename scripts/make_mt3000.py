"""The study of MT-3000: measures its runs, and writes docs/mt3000.md with its figures from what was measured.

python scripts/make_mt3000.py             write the page from docs/mt3000.json
python scripts/make_mt3000.py --check     say whether it is current; exit status 1 where it is not
python scripts/make_mt3000.py --measure   run what is missing in docs/mt3000.json first (20 minutes on two cores)
python scripts/make_mt3000.py --measure rates draws    only these parts
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import study_mt3000 as study

from sim.report.error_bars import policies_error

PAGE = study.ROOT / "docs" / "mt3000.md"
FIGURE = study.ROOT / "docs" / "mt3000.png"
WORDS = {
    "recomputation": "recomputes",
    "copies": "copies",
    "both": "both",
    "neither": "neither",
}
SURE = policies_error()
"""Times that differ by less than this fraction are not told apart: as in every comparison."""

FREE = 0.01
"""A policy that costs less than this fraction of an iteration is called free."""
WIDTH = 118

Row = Mapping[str, Any]
Prediction = tuple[str, str, float, str, bool]


class Cell:
    """One job on one machine under many policies."""

    def __init__(self, data: Mapping[str, Any], policies: Sequence[str]) -> None:
        self.budget, self.rate = data["budget"], data["rate"]
        self.rows = {name: {**data["rows"][name], "policy": name} for name in policies}

    def best(self, kinds: Iterable[str] = WORDS) -> Row | None:
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
    """The comparisons of a part: job, machine and changed figures -> what was found."""
    found = {}
    for part_, job, where, figures, policies in study.runs():
        at = study.key(part_, job, where, figures)
        if part_ == part:
            if at not in data or set(policies) - set(data[at]["rows"]):
                raise SystemExit(f"{at}: not measured: python scripts/make_mt3000.py --measure {part}")
            found[job, where, tuple(f"{path}={value}" for path, value in figures.items())] = Cell(data[at], policies)
    return found


def percent(fraction: float | None) -> str:
    """A slowdown, in percent."""
    return "–" if fraction is None else f"{100 * fraction:+.3g} %" if abs(fraction) >= 0.0005 else "0 %"


def pressure(job: str, cell: Cell) -> float | None:
    """How long copying out what is too much takes, over a third of the time with unlimited memory: of forward, about.

    Above 1 a link can't keep up with forward. None where nothing is too much, nothing runs, or there is no
    link.
    """
    too_much = study.wanted(job)[0] - cell.budget
    return (
        None
        if too_much <= 0 or not cell.rate or cell.best() is None
        else too_much / cell.rate * 1e9 / (cell.unlimited / 3)
    )


# ---- parts of the page -------------------------------------------------------------------------


def machines_table(found: Mapping[Any, Cell]) -> list[str]:
    """Best policy per job and machine."""
    lines = [
        "| job | machine | memory | best | against unlimited | only recomputes | only copies |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    from sim.report.cells import size

    for (job, where, _), cell in found.items():
        top = cell.best()
        if top is None:
            lines.append(f"| {job} | `{where}` | {size(cell.budget)} | nothing fits | – | – | – |")
            continue
        others = [percent(cell.over(cell.best((kind,)))) for kind in ("recomputation", "copies")]
        lines.append(
            f"| {job} | `{where}` | {size(cell.budget)} | `{top['policy']}` | {percent(cell.over(top))} | "
            f"{' | '.join(others)} |"
        )
    return lines


def winner(cell: Cell) -> str:
    """`copies` or `recomputation`, whichever is faster alone by more than nothing; "" where one of them can't run."""
    alone = {kind: cell.best((kind,)) for kind in ("copies", "recomputation")}
    if any(row is None for row in alone.values()):
        return ""
    return min(alone, key=lambda kind: alone[kind]["makespan_ns"])  # type: ignore[index]


def rates_table(found: Mapping[Any, Cell]) -> list[str]:
    """Slowdown over link rates."""
    lines = [
        "| job | link, each way | pressure | only recomputes | only copies | `hybrid` |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (job, _, figures), cell in found.items():
        rate = figures[0].partition("=")[2]
        alone = [percent(cell.over(cell.best((kind,)))) for kind in ("recomputation", "copies")]
        hybrid = cell.rows["hybrid"]
        lines.append(
            f"| {job} | {rate} | {pressure(job, cell):.2f} | {' | '.join(alone)} | "
            f"{percent(cell.over(hybrid)) if hybrid['fits'] else '–'} |"
        )
    return lines


def crossing(found: Mapping[Any, Cell]) -> dict[str, float]:
    """Per job the pressure at which copying alone and recomputing alone take as long, between points of the sweep."""
    crossed = {}
    for job in study.SWEPT:
        points = []
        for (name, _, _), cell in found.items():
            copies, recomputes = cell.best(("copies",)), cell.best(("recomputation",))
            if name == job and copies and recomputes:
                points.append((pressure(job, cell) or 0.0, copies["makespan_ns"] - recomputes["makespan_ns"]))
        points.sort()
        for (low, below), (high, above) in pairwise(points):
            if below <= 0 < above:
                crossed[job] = low + (high - low) * -below / (above - below)
    return crossed


def predictions(found: Mapping[Any, Cell], at: float) -> list[Prediction]:
    """(job, machine, pressure, faster kind, whether the axis said so) of cells that were not used to find `at`."""
    made = []
    for (job, where, _), cell in found.items():
        ratio, faster = pressure(job, cell), winner(cell)
        if where == "mt3000_survey" or ratio is None or not faster:
            continue
        made.append((job, where, ratio, faster, (faster == "copies") == (ratio < at)))
    return made


def directions_table(data: Mapping[str, Any]) -> list[str]:
    """One direction slower than the other."""
    lines = [
        "| link slowed down | to | only copies | `hybrid` | only recomputes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for link, what in (("d2h", "out of the zone"), ("h2d", "back into it")):
        for (_, _, figures), cell in cells(data, f"{link} alone").items():
            over = [cell.over(cell.best((kind,))) for kind in ("copies", "recomputation")]
            hybrid = cell.over(cell.rows["hybrid"])
            rate = figures[0].partition("=")[2]
            lines.append(f"| {what} | {rate} | {percent(over[0])} | {percent(hybrid)} | {percent(over[1])} |")
    return lines


def shares(found: Mapping[Any, Cell]) -> dict[str, float]:
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


def effects(found: Mapping[Any, Cell]) -> list[tuple[str, float]]:
    """Per assumed figure the rank correlation of its value with the time of copying over that of recomputing."""
    import pandas as pd

    rows = []
    for (_, _, figures), cell in found.items():
        copies, recomputes = (cell.best((kind,)) for kind in ("copies", "recomputation"))
        if copies is None or recomputes is None:
            continue
        values = {path: float(text.split()[0]) for path, _, text in (each.partition("=") for each in figures)}
        rows.append({**values, "ratio": copies["makespan_ns"] / recomputes["makespan_ns"]})
    table = pd.DataFrame(rows).rank()
    against = table.drop(columns="ratio").corrwith(table["ratio"])
    return sorted(((str(path), float(value)) for path, value in against.items()), key=lambda each: -abs(each[1]))


# ---- the page ----------------------------------------------------------------------------------


def page(data: Mapping[str, Any]) -> str:
    """The page as text."""
    where, rates, drawn = cells(data, "machines"), cells(data, "rates"), cells(data, "draws")
    crossed = crossing(rates)
    border = sum(crossed.values()) / len(crossed)
    made = predictions(where, border)
    right = sum(each[-1] for each in made)
    blocks = [
        _answer(where, drawn, border, (right, len(made))),
        _jobs(where),
        _crossing(rates, crossed, border, made),
        _directions(data),
        _sure(drawn),
        _claims(where),
        _left_out(),
    ]
    return "\n".join(line for block in blocks for line in [*block, ""])


def _answer(
    where: Mapping[Any, Cell], drawn: Mapping[Any, Cell], border: float, predicted: tuple[int, int]
) -> Sequence[str]:
    own = [(job, cell) for (job, name, _), cell in where.items() if name == "mt3000_survey"]
    free = [job for job, cell in own if (top := cell.best()) and (cell.over(top) or 0) < FREE]
    nothing = [job for job, cell in own if cell.best() is None]
    copies, recomputes, neither = (100 * share for share in shares(drawn).values())
    fit = f" Nothing that was run makes {', '.join(nothing)} fit." if nothing else ""
    return [
        "# Which policy on MT-3000, and why",
        "",
        *text(
            "A survey of memory optimisation on Chinese platforms (Li et al. 2026) leaves open which policy is",
            "right on a machine like MT-3000. This page answers as far as simulation can. It is made by",
            "`python scripts/make_mt3000.py`, and every number in it follows from `docs/mt3000.json`; a test holds",
            "it to that.",
        ),
        "",
        "**In short.**",
        "",
        *item(
            "On MT-3000 as the survey states it, the best policy costs less than",
            f"{100 * FREE:.0f} % of an iteration in {len(free)} of {len(own)} jobs: {', '.join(free) or 'none'}.{fit}",
        ),
        *item(
            "The reason is the link: the chip computes slowly *for the rate at which it copies*. Copying wins where",
            f"what is too much for the memory leaves it within about {border:.1f} times the forward pass. That one",
            f"ratio names the faster of copying and recomputing in {predicted[0]} of {predicted[1]} cells on four",
            "machines that were not used to find it.",
        ),
        *item(
            "With every unpublished figure of the machine drawn at random between half and twice its assumed value,",
            f"copying is faster by more than {100 * SURE:.1f} % in {copies:.0f} % of the draws, recomputation in",
            f"{recomputes:.0f} %, and in {neither:.0f} % the two are not told apart.",
        ),
    ]


def _jobs(found: Mapping[Any, Cell]) -> Sequence[str]:
    names, stacks = (", ".join(f"`{name}`" for name in each) for each in (study.SINGLE, study.STACKS))
    return [
        "## Every job on every machine",
        "",
        *text(
            f"Each machine gives its whole memory, or {100 * study.SHARE:.0f} % of what the job wants where it has",
            "more, so that something has to be done about memory everywhere. *only recomputes*, *only copies*: the",
            "best run that does nothing else. Of equal times the run that copies less is named. `mt3000_cluster` is",
            "one cluster of the measured node, alone on it.",
        ),
        "",
        *machines_table(found),
        "",
        *text(f"Tried in every cell: {names}; for {' and '.join(study.LARGE)} {stacks}, too."),
    ]


def _crossing(
    rates: Mapping[Any, Cell], crossed: Mapping[str, float], border: float, made: Sequence[Prediction]
) -> Sequence[str]:
    wrong = [f"{job} on `{where}` ({ratio:.2f}: {WORDS[faster]})" for job, where, ratio, faster, ok in made if not ok]
    right = sum(each[-1] for each in made)
    return [
        "## Where recomputation and offloading cross",
        "",
        *text(
            "*Pressure* is the time that copying out what exceeds the memory takes, over a third of the iteration with",
            "unlimited memory, which is about its forward pass. Machine and job enter by their FLOP per byte alone:",
            "those that the machine does while its link moves a byte, and those that the job has per byte that is",
            "too much.",
        ),
        "",
        "![Slowdown of copying alone and recomputing alone over pressure](mt3000.png)",
        "",
        *rates_table(rates),
        "",
        *text(
            "In this sweep of the link of `mt3000_survey`, copying alone and recomputing alone take as long at a",
            f"pressure of {' and '.join(f'{at:.2f} ({job})' for job, at in crossed.items())}. Below it copying is",
            "faster, and below about 1 it costs next to nothing; recomputing costs the same everywhere. The mean,",
            f"{border:.2f}, was then applied to the cells of the table above on all other machines where both can run:",
            f"it names the faster in {right} of {len(made)}." + (f" It fails for {'; '.join(wrong)}." if wrong else ""),
        ),
    ]


def _directions(data: Mapping[str, Any]) -> Sequence[str]:
    return [
        "## What asymmetry changes",
        "",
        *text(
            "The survey calls the zones asymmetric, and gives no figures. GPT-2 medium, one direction slowed down",
            "while the other stays at 40 GB/s:",
        ),
        "",
        *directions_table(data),
        "",
        *text(
            "What the parts of the scheme that the survey proposes for this machine bring is on",
            "[a page of its own](mt3000_layered.md).",
        ),
    ]


def _sure(drawn: Mapping[Any, Cell]) -> Sequence[str]:
    found = effects(drawn)
    return [
        "## How sure this is, and what to measure first",
        "",
        *text(
            f"GPT-2 medium, {study.DRAWS} draws (seed {study.SEED}) of {len(found)} assumed figures of the machine.",
            "The rank correlation of each with the time of copying over the time of recomputing: above 0 a higher",
            "value favours recomputation.",
        ),
        "",
        "| figure | correlation |",
        "| --- | ---: |",
        *(f"| `{path}` | {value:+.2f} |" for path, value in found[:6]),
        "",
        f"The figure to measure first on the real machine is `{found[0][0]}`.",
    ]


def _claims(where: Mapping[Any, Cell]) -> Sequence[str]:
    own = [cell for (_, name, _), cell in where.items() if name == "mt3000_survey"]
    cards = [cell for (_, name, _), cell in where.items() if not name.startswith("mt3000")]
    swap, card = ([winner(cell) == "copies" for cell in each if winner(cell)] for each in (own, cards))
    duel = [(cell.rows["delta"], cell.rows["tso"]) for cell in where.values()]
    both = [(a, b) for a, b in duel if a["fits"] and b["fits"]]
    alone = [sum(bool(pair[i]["fits"]) and not pair[1 - i]["fits"] for pair in duel) for i in (0, 1)]
    faster = sum(b["makespan_ns"] < a["makespan_ns"] for a, b in both)
    pairs = [(cell, cell.rows["mt3000_layered"], cell.rows["hybrid"]) for cell in own]
    gaps = [100 * (cell.over(a) - cell.over(b)) for cell, a, b in pairs if a["fits"] and b["fits"]]
    swapped = (
        f"confirmed: copying alone is the faster of the two in {sum(swap)} of {len(swap)} jobs on `mt3000_survey`, "
        f"and in {sum(card)} of {len(card)} cells of the three cards behind PCIe"
    )
    duelled = (
        f"of {len(duel)} cells `delta` alone fits in {alone[0]} and `tso` alone in {alone[1]}; of the {len(both)} "
        f"where both fit, `tso` is the faster in {faster}"
    )
    layered = (
        f"`mt3000_layered` and `hybrid` both fit {len(gaps)} of {len(own)} jobs there; it is at most {max(gaps):.1f} "
        "points slower, and what each part brings is [measured](mt3000_layered.md)"
        if gaps
        else "`mt3000_layered` and `hybrid` fit no job together"
    )
    return [
        "## What the survey says, and what was found",
        "",
        "| claim | found |",
        "| --- | --- |",
        f"| swapping first is not always right (4.1) | {swapped} |",
        f"| DELTA for tight memory, TSO for speed (6.5) | {duelled} |",
        f"| a layered scheme suits MT-3000 (6.5) | {layered} |",
    ]


def _left_out() -> Sequence[str]:
    return [
        "## What this leaves out",
        "",
        *item(
            "All ops run as PyTorch runs them, unfused. A stack that fuses element-wise work computes faster, so",
            "that a link of the same rate keeps up less: the pressure of a job rises with it.",
        ),
        *item("Policies that plan slowly, more than one cluster, and several nodes."),
        *item(
            "No training time of MT-3000 has been published, so that nothing here could be compared with the",
            "machine itself.",
        ),
    ]


def text(*parts: str) -> list[str]:
    """A paragraph."""
    return wrap(" ".join(parts), WIDTH, break_long_words=False, break_on_hyphens=False)


def item(*parts: str) -> list[str]:
    """An item of a list."""
    return wrap("- " + " ".join(parts), WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def draw(data: Mapping[str, Any]) -> None:
    """The figure: slowdown over pressure, one curve per job and kind; its bytes are not checked."""
    from matplotlib.figure import Figure

    from sim.report.draw import save_figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    rates = cells(data, "rates")
    for colour, job in zip(("#0072b2", "#d55e00"), study.SWEPT, strict=True):
        for style, kind in (("-", "copies"), ("--", "recomputation")):
            points = sorted(
                (pressure(job, cell) or 0.0, 100 * (cell.over(cell.best((kind,))) or 0.0))
                for (name, _, _), cell in rates.items()
                if name == job and cell.best((kind,)) is not None
            )
            axes.plot(*zip(*points), style, color=colour, marker="o", markersize=3.5, label=f"{job}, {WORDS[kind]}")
        points = sorted(
            (pressure(job, cell) or 0.0, 100 * (cell.over(cell.rows["hybrid"]) or 0.0))
            for (name, _, _), cell in rates.items()
            if name == job and cell.rows["hybrid"]["fits"]
        )
        axes.plot(*zip(*points), ":", color=colour, marker="o", markersize=3.5, label=f"{job}, hybrid")
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.set_ylim(-3, 125)
    axes.set_xlabel("pressure: time to copy out what is too much / forward pass")
    axes.set_ylabel("slowdown against unlimited memory (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, FIGURE)


def main() -> None:
    """Measure, write, or check."""
    words = sys.argv[1:]
    if words[:1] == ["--measure"]:
        study.measure(words[1:])
    elif words not in ([], ["--check"]):
        sys.exit(f"make_mt3000.py: unknown: {' '.join(words)}: expected --check, or --measure and parts")
    data = study.load()
    new, check = page(data), words == ["--check"]
    stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != new
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        draw(data)
    print(f"{'stale' if check else 'written'}: {'docs/mt3000.md' if stale else 'none'}")
    sys.exit(stale and check)


if __name__ == "__main__":
    main()
