"""The study of MT-3000: measures its runs, and writes docs/mt3000.md, the same in Chinese, and its figure.

python scripts/make_mt3000.py             write the pages from docs/mt3000.json
python scripts/make_mt3000.py --check     say whether they are current; exit status 1 where one is not
python scripts/make_mt3000.py --measure   run what is missing in docs/mt3000.json first (all: 35 minutes of processor
                                          time, in a process per processor)
python scripts/make_mt3000.py --measure rates draws    only these parts
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.mt3000_page import study, tables
from scripts.mt3000_page.findings import (
    FREE,
    SURE,
    Cells,
    Prediction,
    cells,
    crossing,
    effects,
    free,
    leads,
    most_samples,
    predictions,
    pressure,
    recomputing,
    shares,
    turning_rate,
    winning,
    without_room,
)
from scripts.mt3000_page.words import WORDS

PAGES = {"en": study.ROOT / "docs" / "mt3000.md", "zh": study.ROOT / "docs" / "mt3000.zh.md"}
FIGURE = study.ROOT / "docs" / "mt3000.png"
WIDTH = 118


def page(data: Mapping[str, Any], language: str) -> str:
    """The page as text."""
    template = Path(study.__file__).with_name(f"{language}.md").read_text(encoding="utf-8")
    text = template.format(**facts(data, WORDS[language]))
    for name, said in WORDS[language]["named"].items():
        text = text.replace(name, said)
    return text if language == "zh" else wrapped(text)


def facts(data: Mapping[str, Any], words: tables.Words) -> dict[str, Any]:
    """Everything that a page states, by its name in the templates."""
    where, rates, drawn = cells(data, "machines"), cells(data, "rates"), cells(data, "draws")
    crossed = crossing(rates)
    border = sum(crossed.values()) / len(crossed)
    copies, recomputes, neither = (100 * share for share in shares(drawn).values())
    figures = effects(drawn)
    made = predictions(where, border)
    return {
        "border": border,
        "sure": f"{100 * SURE:.1f} %",
        "share": f"{100 * study.SHARE:.0f} %",
        "copies_share": copies,
        "recomputes_share": recomputes,
        "neither_share": neither,
        "draws": study.DRAWS,
        "seed": study.SEED,
        "figures": len(figures.by_figure),
        "first": figures.by_figure[0][0],
        "turned": round(study.DRAWS * recomputes / 100),
        "turns_at": turning_rate(rates),
        "assumed_rate": where["GPT-2 medium", "mt3000_survey", ()].rate / 1e9,
        "right": sum(each[-1] for each in made),
        "predicted": len(made),
        "wrong": _wrong(made, words),
        **_jobs(where, words),
        **_stacks(where, cells(data, "fused"), border, words),
        **_chosen(cells(data, "chosen"), words),
        **_elsewhere(cells(data, "elsewhere"), border, words),
        **_together(cells(data, "clusters"), words),
        "crossed": words["and"].join(words["crossed"].format(at=at, job=job) for job, at in crossed.items()),
        "jobs_table": tables.jobs_table(where, words),
        "mixtral": study.MIXTRAL,
        "machines_table": tables.machines_table(where, words),
        "policies_table": tables.policies_table(where, words),
        "rates_table": tables.rates_table(rates, words),
        "directions_table": tables.directions_table(data, words),
        "effects_table": tables.effects_table(figures, words),
        "claims_table": tables.claims_table(where, words),
    }


def _jobs(where: Cells, words: tables.Words) -> dict[str, Any]:
    own = {job: cell for (job, name, _), cell in where.items() if name == "mt3000_survey"}
    unfit = [job for job, cell in own.items() if cell.best() is None]
    too_large, others = without_room(where)
    why = words["too large"].format(len(too_large), len(too_large) + len(others))
    if others:
        why += words["others"].format(words["list"].join(f"{job} / `{name}`" for job, name in others))
    if words is WORDS["zh"]:
        why += "。"
    named = free(where)
    return {
        "free_below": f"{100 * FREE:.0f} %",
        "free_count": len(named),
        "own_count": len(own),
        "free_jobs": words["list"].join(named) or "–",
        "nothing_fits": words["none fits"].format(words["list"].join(unfit)) if unfit else "",
        "nothing_why": why,
        "single": words["list"].join(f"`{name}`" for name in study.SINGLE),
        "stacks": words["list"].join(f"`{name}`" for name in study.STACKS),
        "large": words["list"].join(study.LARGE),
    }


def _stacks(eager: Cells, fused: Cells, border: float, words: tables.Words) -> dict[str, Any]:
    made = predictions(fused, border)
    own = [at for at in fused if at[1] == "mt3000_survey"]
    faster = [eager[at].unlimited / fused[at].unlimited for at in own]
    pairs = [(pressure(eager[at]), pressure(cell)) for at, cell in fused.items()]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return {
        "fused_free": len(free(fused)),
        "fused_count": len(own),
        "fused_right": sum(each[-1] for each in made),
        "fused_predicted": len(made),
        "fused_least": min(faster),
        "fused_most": max(faster),
        "fused_both": len(both),
        "fused_up": sum(b > a for a, b in both),
        "fused_wrong": _wrong(made, words),
        "fused_table": tables.fused_table(eager, fused, words),
    }


def _chosen(found: Cells, words: tables.Words) -> dict[str, Any]:
    figures = leads(found)
    return {
        "chosen_draws": len(found),
        "chosen_jobs": len(study.CHOSEN),
        "chosen_figures": len(figures.by_figure),
        "chosen_both": sum(
            bool(cell.best(("copies",)) and cell.best(("recomputation", "both"))) for cell in found.values()
        ),
        "chosen_recomputing": recomputing(found),
        "chosen_told": words["list"].join(words["told"].format(*each) for each in figures.told) or "–",
        "winning_table": tables.winning_table(winning(found), words),
        "leads_table": tables.effects_table(figures, words),
    }


def _elsewhere(found: Cells, border: float, words: tables.Words) -> dict[str, Any]:
    made = predictions(found, border)
    return {
        "elsewhere_draws": len(found),
        "elsewhere_jobs": f" {words['and'].strip()} ".join(study.SWEPT),
        "elsewhere_machines": words["list"].join(f"`{name}`" for name in study.ELSEWHERE),
        "elsewhere_right": sum(each[-1] for each in made),
        "elsewhere_predicted": len(made),
        "elsewhere_table": tables.elsewhere_table(found, words),
    }


def _together(found: Cells, words: tables.Words) -> dict[str, Any]:
    best = most_samples(found)
    none = [job for job in study.TOGETHER if job not in best]
    said = [words["layout"].format(job=job, layout=layout, policy=policy) for job, (layout, policy) in best.items()]
    return {
        "batch": study.BATCH,
        "layouts_said": words["apart"].join(said),
        "no_layout": words["no layout"].format(words["list"].join(none)) if none else "",
        "together_table": tables.together_table(found, words),
    }


def _wrong(made: Sequence[Prediction], words: tables.Words) -> str:
    said = [
        words["each wrong"].format(job=job, where=where, ratio=ratio, faster=words[faster])
        for job, where, ratio, faster, right in made
        if not right
    ]
    return words["wrong"].format(words["apart"].join(said)) if said else ""


def wrapped(text: str) -> str:
    """Paragraphs and items at the width of this project's pages; tables, headings, figures and code as they are."""
    lines, is_code = [], False
    for line in text.splitlines():
        is_fence = line.startswith("```")
        is_code ^= is_fence
        if is_code or is_fence or not line or line.startswith(("|", "#", "!")):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


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
                (pressure(cell) or 0.0, 100 * (cell.over(cell.best((kind,))) or 0.0))
                for (name, _, _), cell in rates.items()
                if name == job and cell.best((kind,)) is not None
            )
            label = f"{job}, {WORDS['en'][kind]}"
            axes.plot(*zip(*points), style, color=colour, marker="o", markersize=3.5, label=label)
        points = sorted(
            (pressure(cell) or 0.0, 100 * (cell.over(cell.rows["hybrid"]) or 0.0))
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
    data, check = study.load(), words == ["--check"]
    new = {path: page(data, language) for language, path in PAGES.items()}
    stale = [p for p, text in new.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    if not check:
        for path, text in new.items():
            path.write_text(text, encoding="utf-8")
        draw(data)
    names = ", ".join(path.relative_to(study.ROOT).as_posix() for path in stale)
    print(f"{'stale' if check else 'written'}: {names or 'none'}")
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
