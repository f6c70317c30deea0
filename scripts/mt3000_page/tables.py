"""The tables of the page; what is said in them depends on the language, what is counted does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.mt3000_page import study
from scripts.mt3000_page.findings import (
    Cell,
    Cells,
    Correlations,
    cells,
    clusters_of,
    pressure,
    recomputing,
    standing,
    winner,
    winning,
)

Words = Mapping[str, Any]
ALONE = ("recomputation", "copies")
SHOWN = ("keep_all", "full_recompute", "swap_all", "hybrid")
"""Policies whose times stand in the table of layouts."""


def percent(fraction: float | None) -> str:
    """A slowdown, in percent."""
    return "–" if fraction is None else f"{100 * fraction:+.3g} %" if abs(fraction) >= 0.0005 else "0 %"


def table(head: Sequence[str], left: int, rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown: the first columns are set to the left, the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def jobs_table(found: Cells, words: Words) -> str:
    """What each job is, in options of the command line, and what it wants; the 910B has more than any wants."""
    from sim.report.cells import size

    rows = []
    for job, options in study.JOBS.items():
        model = f"`{options['model']}`" if isinstance(options["model"], str) else words["of our own"]
        rest = [f"`{key}={value}`" for key, value in options.items() if key not in study.SAID]
        wanted = found[job, "ascend_910b", ()].budget / study.SHARE
        shown = [
            job,
            ", ".join([model, *rest]),
            f"`{options['precision']}`",
            *(f"{options[key]:,}" for key in ("batch", "sequence")),
            size(round(wanted)),
        ]
        rows.append(shown)
    return table(words["jobs"], 3, rows)


def machines_table(found: Cells, words: Words) -> str:
    """Best policy per job and machine."""
    from sim.report.cells import size

    rows = []
    for (job, where, _), cell in found.items():
        top = cell.best()
        first = (job, f"`{where}`", size(cell.budget))
        if top is None:
            rows.append((*first, words["nothing fits"], "–", "–", "–"))
        else:
            rows.append((*first, f"`{top['policy']}`", percent(cell.over(top)), *alone(cell)))
    head, rule = table(words["machines"], 2, ()).splitlines()
    return "\n".join([head, rule.replace("---: | ---: | ---:", "---: | --- | ---:", 1), *_body(rows)])


def _body(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def alone(cell: Cell, kinds: Sequence[str] = ALONE) -> list[str]:
    """The slowdown of the best run that does nothing but this, for each kind."""
    return [percent(cell.over(cell.best((kind,)))) for kind in kinds]


def policies_table(found: Cells, words: Words) -> str:
    """Per policy what it does and costs, here and on the cards behind PCIe, and the largest job that it fits."""
    rows = []
    cards = [name for name in study.MACHINES if not name.startswith("mt3000")]
    for policy in (*study.SINGLE, *study.STACKS):
        own, other = standing(found, policy, ("mt3000_survey",)), standing(found, policy, cards)
        does = set(own.does | other.does) - {"neither"}
        what = words["kinds"][does.pop() if len(does) == 1 else "both" if does else "neither"]
        shown = [f"{each.fits} / {each.cells}" for each in (own, other)]
        costs = [percent(each.overhead) for each in (own, other)]
        rows.append((f"`{policy}`", what, own.largest or "–", shown[0], costs[0], shown[1], costs[1]))
    return table(words["policies"], 3, rows)


def rates_table(found: Cells, words: Words) -> str:
    """Slowdown over link rates."""
    rows = []
    for (job, _, figures), cell in found.items():
        hybrid = cell.rows["hybrid"]
        last = percent(cell.over(hybrid)) if hybrid["fits"] else "–"
        rows.append((job, figures[0].partition("=")[2], f"{pressure(cell):.2f}", *alone(cell), last))
    return table(words["rates"], 1, rows)


def directions_table(data: Mapping[str, Any], words: Words) -> str:
    """One direction slower than the other."""
    rows = []
    for link in ("d2h", "h2d"):
        for (_, _, figures), cell in cells(data, f"{link} alone").items():
            copies, recomputes = alone(cell, ("copies", "recomputation"))
            rate = figures[0].partition("=")[2]
            rows.append((words[link], rate, copies, percent(cell.over(cell.rows["hybrid"])), recomputes))
    return table(words["directions"], 1, rows)


def fused_table(eager: Cells, fused: Cells, words: Words) -> str:
    """Per job and machine what fused kernels change."""
    rows = []
    for at, cell in fused.items():
        top = cell.best()
        pressures = ["–" if each is None else f"{each:.2f}" for each in (pressure(eager[at]), pressure(cell))]
        best = words["nothing fits"] if top is None else f"`{top['policy']}`"
        rows.append((at[0], f"`{at[1]}`", best, percent(cell.over(top)), *alone(cell), *pressures))
    return table(words["fused"], 3, rows)


def together_table(found: Cells, words: Words) -> str:
    """Per job and layout over clusters the best policy."""
    from sim.report.cells import size

    rows = []
    for (job, layout, _), cell in found.items():
        top, clusters = cell.best(), str(clusters_of(layout))
        if top is None:
            rows.append((job, layout, words["nothing fits"], clusters, *"––––––"))
            continue
        runs = [cell.rows[policy] for policy in SHOWN]
        over = [row["makespan_ns"] / top["makespan_ns"] - 1 if row["fits"] else None for row in runs]
        rate = f"{study.BATCH / top['makespan_ns'] * 1e9:.3g}"
        first = (job, layout, f"`{top['policy']}`", clusters, size(top["peak_bytes"]), rate)
        rows.append((*first, *map(percent, over)))
    return table(words["together"], 3, rows)


def winning_table(found: Mapping[str, Mapping[str, float]], words: Words) -> str:
    """Per job how often each policy is the fastest, or not told apart from it."""
    policies = list(dict.fromkeys(policy for each in found.values() for policy in each))
    rows = [
        (job, str(study.CHOSEN[job][0]), *(f"{100 * each[p]:.0f} %" if p in each else "–" for p in policies))
        for job, each in found.items()
    ]
    return table([*words["winning"], *(f"`{policy}`" for policy in policies)], 1, rows)


def elsewhere_table(found: Cells, words: Words) -> str:
    """The same per job and machine, and in how many draws the fastest run recomputes."""
    rows = []
    for job, where in dict.fromkeys((name, where) for name, where, _ in found):
        own = {at: cell for at, cell in found.items() if at[:2] == (job, where)}
        shown = [f"{100 * share:.0f} %" for share in winning(own)[job].values()]
        rows.append((job, f"`{where}`", str(len(own)), *shown, f"{recomputing(own)} / {len(own)}"))
    policies = [f"`{policy}`" for policy in study.DRAWN]
    first, second, draws, last = words["elsewhere"]
    return table([first, second, draws, *policies, last], 2, rows)


def effects_table(found: Correlations, words: Words) -> str:
    """The figures whose value matters, as far as that many draws tell; and what they cannot tell."""
    rows = [(f"`{path}`", f"{value:+.2f}") for path, value in found.told]
    others = words["noise"].format(len(found.by_figure) - len(rows), noise=found.noise, draws=found.draws)
    return f"{table(words['effects'], 1, rows)}\n\n{others}"


def claims_table(where: Cells, words: Words) -> str:
    """Each claim of the survey that runs of the study bear on."""
    own = [cell for (_, name, _), cell in where.items() if name == "mt3000_survey"]
    cards = [cell for (_, name, _), cell in where.items() if not name.startswith("mt3000")]
    swap, card = ([winner(cell) == "copies" for cell in each if winner(cell)] for each in (own, cards))
    duel = [(cell.rows["delta"], cell.rows["tso"]) for cell in where.values()]
    both = [(a, b) for a, b in duel if a["fits"] and b["fits"]]
    facts = {
        "swap": sum(swap),
        "swap_of": len(swap),
        "card": sum(card),
        "card_of": len(card),
        "cells": len(duel),
        "delta_alone": sum(bool(a["fits"]) and not b["fits"] for a, b in duel),
        "tso_alone": sum(bool(b["fits"]) and not a["fits"] for a, b in duel),
        "both": len(both),
        "tso_faster": sum(b["makespan_ns"] < a["makespan_ns"] for a, b in both),
        **_layered(own),
        **_splits(where),
    }
    return table(words["claims"], 2, [(claim, found.format(**facts)) for claim, found in words["claimed"]])


def _layered(own: Sequence[Cell]) -> dict[str, Any]:
    pairs = [(cell, cell.rows["mt3000_layered"], cell.rows["hybrid"]) for cell in own]
    gaps = [100 * ((cell.over(a) or 0) - (cell.over(b) or 0)) for cell, a, b in pairs if a["fits"] and b["fits"]]
    return {"layered": len(gaps), "own": len(own), "gap": max(gaps)}


def _splits(where: Cells) -> dict[str, Any]:
    pairs = [(cell.rows["chen(method=sqrt)"], cell.rows["rotor"]) for cell in where.values()]
    both = [(even, planned) for even, planned in pairs if even["fits"] and planned["fits"]]
    return {
        "splits": len(both),
        "planned_alone": sum(bool(planned["fits"]) and not even["fits"] for even, planned in pairs),
        "even_slower": sum(even["makespan_ns"] > planned["makespan_ns"] for even, planned in both),
    }
