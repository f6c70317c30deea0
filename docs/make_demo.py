"""Runs the demo's job and puts its table into the documents that show it.

python docs/make_demo.py            write it
python docs/make_demo.py --check    say whether it is current; exit status 1 where it is not
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "README.zh.md", "docs/demo.md")
BEGIN, END = "<!-- demo -->\n", "<!-- end of demo -->"
SHOWN = ("peak", "time", "vs unlimited", "recompute", "stall", "moved", "fidelity")
EACH = 3
"""Policies shown of each family, the fastest first."""


def rows() -> tuple[Mapping[str, Any], ...]:
    """The rows of the demo's comparison."""
    from sim import compare, load_profile
    from sim.commands.runs import DEMO
    from workloads import transformer

    job: Mapping[str, Any] = DEMO
    trace = transformer(job["model"], batch=job["batch"], sequence=job["seq"], precision=job["precision"])
    return compare(trace, load_profile(job["profile"]), budget=job["budget"], find_floor=False).rows


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


def replaced(text: str, new: str) -> str:
    """A page with what stands between the marks replaced. Raises ValueError without marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no {BEGIN.strip()} … {END} in the page")
    return f"{head}{begin}\n{new}\n{end}{tail}"


def main() -> None:
    """Write the pages, or check them."""
    new = table(rows())
    stale = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        if replaced(text, new) != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(replaced(text, new), encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'none'}")
    sys.exit(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    main()
