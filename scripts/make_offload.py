"""Writes docs/offload.md: every offload and compression policy beside a proven bound, and what bandwidth is worth.

python scripts/make_offload.py              write the page from docs/offload.json
python scripts/make_offload.py --check      say whether the page is current; exit status 1 where it is not
python scripts/make_offload.py --measure    run all cells again (minutes, one process), then write
python scripts/make_offload.py --measure g10 uvm    the same for some policies; the cells of the others are kept
python scripts/make_offload.py --measure --missing  run only the cells that there are none of: a new machine, or value

Policies are those of the registry; one that has no cells yet is named on the page as not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "offload.json"
PAGE = ROOT / "docs" / "offload.md"
OPTIONS = ("--check", "--measure", "--missing", "--help")


def load() -> dict[str, list[dict[str, Any]]]:
    """The rows as committed."""
    found: dict[str, list[dict[str, Any]]] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def dump(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """JSON with one row per line."""
    parts = [f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in part) + "\n]" for key, part in rows.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The page with its blocks as the rows say."""
    from scripts.make_demo import replaced
    from scripts.offload_page.text import blocks

    text = PAGE.read_text(encoding="utf-8")
    for name, block in blocks(rows).items():
        text = replaced(text, block, name)
    return text


def misspelt(arguments: Sequence[str]) -> str:
    """What is wrong with the words of the command line, "" for nothing."""
    from scripts.offload_page.cases import policies
    from sim.errors import near

    for word in arguments:
        if word.startswith("-") and word not in OPTIONS:
            return f"no option is called {word!r}{near(word, OPTIONS)}"
        if not word.startswith("-") and "--measure" not in arguments:
            return "a policy is named after --measure"
        if not word.startswith("-") and word not in policies():
            return f"no offload or compression policy is called {word!r}{near(word, policies())}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Write, or with --check compare."""
    if "--help" in arguments:
        print(__doc__)
        return 0
    if wrong := misspelt(arguments):
        print(wrong, file=sys.stderr)
        return 2
    if "--measure" in arguments:
        from scripts.offload_page.measure import measure, missing

        only = [word for word in arguments if not word.startswith("-")]
        old = load() if DATA.is_file() else {}

        def save(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
            DATA.write_text(dump(rows), encoding="utf-8")

        def say(line: str) -> None:
            print(line, flush=True)

        if "--missing" in arguments:
            missing(old, save, say)
        else:
            measure(only, old, save, say)
    text = page(load())
    if "--check" in arguments:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(
            f"{PAGE.name} is {'current' if current else 'not what the rows make: run python scripts/make_offload.py'}"
        )
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
