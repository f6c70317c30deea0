"""Runs the demo's job and puts its verdict, tables and figure into the documents that show them.

python scripts/make_demo.py            write it
python scripts/make_demo.py --check    say whether it is current; exit status 1 where it is not
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERDICT_PAGES = ("README.md", "README.zh.md")
PAGES = WHY_PAGES = ("docs/demo.md",)
FIGURE = ROOT / "docs" / "demo.png"
VERDICT, DEMO, WHY = "verdict", "demo", "why"
"""What stands between the marks of a block: `<!-- demo -->` … `<!-- end of demo -->`."""
SHOWN = ("peak", "time", "vs unlimited", "recompute", "stall", "moved", "fidelity")
WIDTH = 118
"""Characters of a line of the verdict."""
EACH = 3
"""Policies shown of each family, the fastest first."""
ASYNCHRONOUS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("swap_all", {}),
    ("lru_tiering", {}),
    ("lru_tiering", {"watermark": 0.1, "prefetch": 5}),
    ("delta", {}),
    ("delta", {"watermark": 0.1, "prefetch": "lifo"}),
)
"""What the second table compares: offload that plans, and offload that reacts, as published and ahead of need."""


def rows(policies: Sequence[Any] | None = None) -> tuple[Mapping[str, Any], ...]:
    """The rows of the demo's comparison, or of another one on the same job."""
    from sim import compare, load_profile
    from sim.commands.runs import DEMO
    from workloads import transformer

    job: Mapping[str, Any] = DEMO
    trace = transformer(job["model"], batch=job["batch"], sequence=job["seq"], precision=job["precision"])
    return compare(trace, load_profile(job["profile"]), policies, budget=job["budget"], find_floor=False).rows


def verdict(rows: tuple[Mapping[str, Any], ...]) -> str:
    """The two lines with which the demo ends, as a block of text."""
    from sim.report.verdict import verdict_lines

    return "\n".join(["```text", *(line for each in verdict_lines(rows) for line in wrap(each, WIDTH)), "```", ""])


def table(rows: tuple[Mapping[str, Any], ...]) -> str:
    """The fastest policies of each family as a Markdown table, and the names of those that do not fit."""
    from sim.policies import family
    from sim.report.cells import columns, ordered
    from sim.report.markdown import escaped

    shown = [column for column in columns(rows) if column.title in SHOWN]
    counts: dict[str, int] = {}
    lines = [
        f"| policy | {' | '.join(column.title for column in shown)} |",
        f"| --- | {' | '.join('---:' if column.right else '---' for column in shown)} |",
    ]
    for row in ordered(rows):
        kind = family(row["policy"])
        counts[kind] = counts.get(kind, 0) + 1
        if row["fits"] and counts[kind] <= EACH:
            lines.append(f"| `{row['policy']}` | {' | '.join(escaped(column.text(row)) for column in shown)} |")
    misfits = ", ".join(f"`{row['policy']}`" for row in rows if row["fits"] is False)
    return "\n".join([*lines, "", f"✗ {misfits}", ""]) if misfits else "\n".join([*lines, ""])


def why_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What each of `ASYNCHRONOUS` waits for, and that this is all by which it is slower than the first of them."""
    from sim.report.cells import clock, percent, size, total

    titles = (
        "time",
        "more than the first",
        "waits for space",
        "waits for copies",
        "recomputes",
        "copies hidden",
        "moved",
    )
    lines = [f"| policy | {' | '.join(titles)} |", f"| --- | {' | '.join('---:' for _ in titles)} |"]
    for row in rows:
        stall = row["stall_ns"]
        more = clock(row["makespan_ns"] - rows[0]["makespan_ns"])
        waits = [clock(stall.get("space", 0)), clock(sum(ns for cause, ns in stall.items() if cause != "space"))]
        rest = [clock(row["recompute_ns"]), percent(row["overlap"]), size(total(row["moved_bytes"]))]
        lines.append(f"| `{row['policy']}` | {' | '.join([clock(row['makespan_ns']), more, *waits, *rest])} |")
    return "\n".join([*lines, ""])


def draw(rows: tuple[Mapping[str, Any], ...]) -> None:
    """Draw the comparison; its bytes depend on the version of matplotlib, so that they are not checked."""
    from sim.report.draw import save_figure
    from sim.report.plot import plot_comparison

    save_figure(plot_comparison(rows), FIGURE)


def replaced(text: str, new: str, block: str = DEMO) -> str:
    """A page with what stands between the marks of a block replaced. Raises ValueError without marks."""
    head, begin, rest = text.partition(f"<!-- {block} -->\n")
    _, end, tail = rest.partition(f"<!-- end of {block} -->")
    if not (begin and end):
        raise ValueError(f"no <!-- {block} --> … <!-- end of {block} --> in the page")
    return f"{head}{begin}\n{new}\n{end}{tail}"


def main() -> None:
    """Write the pages, or check them."""
    stale, check, found = [], "--check" in sys.argv, rows()
    blocks = (
        (VERDICT, VERDICT_PAGES, verdict(found)),
        (DEMO, PAGES, table(found)),
        (WHY, WHY_PAGES, why_table(rows(ASYNCHRONOUS))),
    )
    for block, pages, new in blocks:
        for name in pages:
            page = ROOT / name
            text = page.read_text(encoding="utf-8")
            if replaced(text, new, block) != text:
                stale.append(f"{name} ({block})")
                if not check:
                    page.write_text(replaced(text, new, block), encoding="utf-8")
    if not check:
        draw(found)
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
