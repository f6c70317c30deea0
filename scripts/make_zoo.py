"""Writes docs/zoo.md: training steps of many models, captured and compared with PyTorch's own tools.

python scripts/make_zoo.py                     write the page from docs/zoo.json
python scripts/make_zoo.py --check             say whether the page is current; exit status 1 where it is not
python scripts/make_zoo.py --measure           capture all steps again (a quarter of an hour, one process), then write
python scripts/make_zoo.py --measure bert t5   the same for some steps; the rows of the others are kept
python scripts/make_zoo.py --measure delta     DELTA beside DTR alone

Measuring needs torch, transformers, torchvision, timm and diffusers; their releases are recorded with the rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "zoo.json"
PAGE = ROOT / "docs" / "zoo.md"
DELTA = "delta"
OPTIONS = ("--check", "--measure", "--help")


def load() -> dict[str, Any]:
    """The rows as committed, and the releases with which they were measured."""
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def dump(found: Mapping[str, Any]) -> str:
    """JSON with one row per line, and one per run of the policies that evict."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in found["rows"])
    evictions = ",\n".join(json.dumps(row) for row in found["evictions"])
    lists = f'"rows": [\n{rows}\n],\n"evictions": [\n{evictions}\n]'
    return f'{{\n"versions": {json.dumps(found["versions"])},\n{lists}\n}}\n'


def page(found: Mapping[str, Any]) -> str:
    """The page with its blocks as the rows say."""
    from scripts.make_demo import replaced
    from scripts.zoo_page.evictions import table
    from scripts.zoo_page.text import blocks

    text = PAGE.read_text(encoding="utf-8")
    for name, block in {**blocks(found["rows"], found["versions"]), "evictions": table(found["evictions"])}.items():
        text = replaced(text, block, name)
    return text


def measure(only: Sequence[str]) -> None:
    """Capture the steps of these names, or all, and keep their rows."""
    from importlib.metadata import PackageNotFoundError, version

    from scripts.zoo_page import evictions
    from scripts.zoo_page.cases import LIBRARIES, cases
    from scripts.zoo_page.measure import row

    known = {each["model"]: each for each in load()["rows"]} if DATA.is_file() else {}
    versions = load()["versions"] if DATA.is_file() else {}
    runs = load().get("evictions", []) if DATA.is_file() else []
    if not only or DELTA in only:
        runs = evictions.measure()
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            print(f"{name} is not installed: its steps keep their rows")
    for name, case in cases().items():
        if only and name not in only:
            continue
        try:
            __import__(case.library)
        except ImportError:
            continue
        known[name] = row(name, case)
        print(f"{name}: {known[name]['error'] or 'captured'}", flush=True)
        rows = [known[each] for each in cases() if each in known]
        DATA.write_text(dump({"versions": versions, "rows": rows, "evictions": runs}), encoding="utf-8")
    DATA.write_text(
        dump({"versions": versions, "rows": [known[each] for each in cases() if each in known], "evictions": runs}),
        encoding="utf-8",
    )


def misspelt(arguments: Sequence[str]) -> str:
    """What is wrong with the words of the command line, "" for nothing."""
    from scripts.zoo_page.cases import cases
    from sim.errors import near

    for word in arguments:
        if word.startswith("-") and word not in OPTIONS:
            return f"no option is called {word!r}{near(word, OPTIONS)}"
        if not word.startswith("-") and "--measure" not in arguments:
            return "a step is named after --measure"
        if not word.startswith("-") and word not in (*cases(), DELTA):
            return f"no step is called {word!r}{near(word, cases())}"
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
        measure([word for word in arguments if not word.startswith("-")])
    text = page(load())
    if "--check" in arguments:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'current' if current else 'not what the rows make: run python scripts/make_zoo.py'}")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
