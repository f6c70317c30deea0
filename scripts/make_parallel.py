"""Writes docs/parallel.md: schedules, tensor parallelism and printed iterations of GPT models beside simulated ones.

python scripts/make_parallel.py              write the page from docs/parallel.json
python scripts/make_parallel.py --check      say whether the page is current; exit status 1 where it is not
python scripts/make_parallel.py --measure    run all cells again (minutes, one process), then write
python scripts/make_parallel.py --measure megatron schedules    the same for some tables
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "parallel.json"
PAGE = ROOT / "docs" / "parallel.md"
TABLES = (
    *("korthikanti", "megatron", "schedules", "experts", "machines", "policies", "context", "zero"),
    *("memory", "cost"),
)
sys.path.insert(0, str(ROOT))


def load() -> dict[str, list[dict[str, Any]]]:
    """The rows as committed."""
    found: dict[str, list[dict[str, Any]]] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def dump(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """JSON with one row per line."""
    parts = [f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in part) + "\n]" for key, part in rows.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str]) -> int:
    """Write, or with --check compare."""
    from scripts.parallel_page.text import page

    if "--help" in arguments:
        print(__doc__)
        return 0
    wrong = [word for word in arguments if word not in ("--check", "--measure", *TABLES)]
    if wrong:
        print(f"no option or table is called {wrong[0]!r}", file=sys.stderr)
        return 2
    if "--measure" in arguments:
        from scripts.parallel_page.measure import measure

        def save(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
            DATA.write_text(dump(rows), encoding="utf-8")
            print(next(reversed(list(rows.values())))[-1:], flush=True)

        measure(load() if DATA.is_file() else {}, [word for word in arguments if word in TABLES], save)
    text = page(load())
    if "--check" in arguments:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print("current" if current else "docs/parallel.md is not current: run python scripts/make_parallel.py")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
