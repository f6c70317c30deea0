"""Writes docs/recompute.md and its figure: every recomputation policy on two whole transformers.

python scripts/make_recompute.py              write the page and the figure from docs/recompute.json
python scripts/make_recompute.py --check      say whether the page is current; exit status 1 where it is not
python scripts/make_recompute.py --measure    run all cells again (some twenty minutes on two free cores), then write
python scripts/make_recompute.py --measure rotor chen    the same for some policies; the cells of the others are kept
python scripts/make_recompute.py --measure --missing     run only the cells that docs/recompute.json has not
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "recompute.json"
PAGE = ROOT / "docs" / "recompute.md"
FIGURE = ROOT / "docs" / "recompute.png"
OPTIONS = ("--check", "--measure", "--missing", "--help")


def load() -> dict[str, Any]:
    """The figures as committed."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def dump(figures: Mapping[str, Any]) -> str:
    """JSON with one row per line."""
    parts = [
        f'"{key}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"
        for key, rows in figures.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page(figures: Mapping[str, Any]) -> str:
    """The whole page."""
    from scripts.recompute_page.text import page_text

    return page_text(figures)


def misspelt(arguments: Sequence[str], only: Sequence[str]) -> str:
    """What is wrong with the words of the command line, "" for nothing."""
    from scripts.recompute_page.cases import entries
    from sim.errors import near

    rows = {word for entry in entries() for word in (entry.policy, entry.label)}
    for word in arguments:
        if word.startswith("-") and word not in OPTIONS:
            return f"no option is called {word!r}{near(word, OPTIONS)}"
    if only and "--measure" not in arguments:
        return "a row is named after --measure"
    return next((f"no row is called {word!r}{near(word, rows)}" for word in only if word not in rows), "")


def main(arguments: Sequence[str]) -> int:
    """Write, or with --check compare."""
    only = [word for word in arguments if not word.startswith("-")]
    if "--help" in arguments:
        print(__doc__)
        return 0
    if wrong := misspelt(arguments, only):
        print(wrong, file=sys.stderr)
        return 2
    if "--measure" in arguments:
        from scripts.recompute_page.measure import measure

        def save(found: Mapping[str, Any]) -> None:
            DATA.write_text(dump(found), encoding="utf-8")

        old = load() if DATA.is_file() else {}
        measure(only, old, save, lambda line: print(line, flush=True), missing="--missing" in arguments)
    figures = load()
    text = page(figures)
    if "--check" in arguments:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'current' if current else 'not what the figures make'}")
        return 0 if current else 1
    from scripts.recompute_page.figure import plot_recompute
    from sim.report.draw import save_figure

    PAGE.write_text(text, encoding="utf-8")
    save_figure(plot_recompute(figures), FIGURE)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
