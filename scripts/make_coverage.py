"""Writes docs/coverage.md from docs/coverage.toml: what the source documents name, and where it stands here.

python scripts/make_coverage.py            write it
python scripts/make_coverage.py --check    say whether it is current; exit status 1 where it is not
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.hardware import load_profile, profile_names
from sim.policies import names

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "coverage.toml"
PAGE = ROOT / "docs" / "coverage.md"

STATUSES = ("done", "partly", "not yet", "left out", "context")
KEYS = {"item", "source", "policies", "awaits", "files", "status", "note"}

HEADER = ("| item | source | status | where, or why |", "| --- | --- | --- | --- |")

INTRODUCTION = """\
# Coverage of the sources

Every system, formula, platform, mechanism and claim of three source documents, with the file that implements it,
or "not yet", or the reason why it is left out. A policy's page (`tiersim policies NAME`) says how near it is to the
published system; a profile's page (`tiersim profiles NAME`) says where each figure is from.

"""


def load_table() -> dict[str, Any]:
    """The table as read; policies and profiles that no item names are the last group's, with what they say they are."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    table["group"][-1]["items"] += [*unnamed(table), *unnamed_profiles(table)]
    return table


def unnamed(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An item for each policy of the tree that the table does not name."""
    named = {name for item in items(table) for name in item.get("policies", ())}
    files = {name: policy_file(name) for name in names() if name not in named}
    return [
        {"item": f"`{name}`: {_first_line(path)}", "source": "not named", "policies": [name]}
        for name, path in files.items()
        if path is not None
    ]


def _first_line(path: str) -> str:
    """What a file says of itself, in a line."""
    return (ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))) or "").split("\n", 1)[0].rstrip(".")


def unnamed_profiles(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An item for each profile of the tree that the table does not name."""
    named = {path for item in items(table) for path in item.get("files", ())}
    files = {name: f"hardware_profiles/{name}.toml" for name in profile_names()}
    return [
        {"item": load_profile(name).description, "source": "not named", "files": [path]}
        for name, path in files.items()
        if path not in named
    ]


def items(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All items of all groups, in order."""
    return [item for group in table["group"] for item in group["items"]]


def policy_file(name: str) -> str | None:
    """Path of a policy inside the repository, None where there is none."""
    found = [path for file in (f"{name}.py", f"{name}/__init__.py") for path in ROOT.glob(f"sim/policies/*/{file}")]
    return found[0].relative_to(ROOT).as_posix() if found else None


def carriers(item: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(files that carry an item, what it still waits for)."""
    there, missing = [], []
    for name in item.get("policies", ()):
        path = policy_file(name)
        if path:
            there.append(path)
        else:
            missing.append(name)
    for path in item.get("awaits", ()):
        (there if (ROOT / path).is_file() else missing).append(path)
    return [*there, *item.get("files", ())], missing


def status_of(item: Mapping[str, Any]) -> str:
    """What is said of an item: as written, else by what is there."""
    if "status" in item:
        return str(item["status"])
    missing = carriers(item)[1]
    if not missing:
        return "done"
    # supporting files alone do not carry a policy
    waits_for_all = len(missing) == len(item.get("policies", ())) + len(item.get("awaits", ()))
    return "not yet" if waits_for_all and not (item.get("awaits") and item.get("files")) else "partly"


def problems(table: Mapping[str, Any]) -> list[str]:
    """What is wrong with the table, one line each."""
    found = []
    seen: set[str] = set()
    for item in items(table):
        name = item.get("item", "")
        for key in item.keys() - KEYS:
            found.append(f"{name}: unknown key {key!r}")
        if not name or not item.get("source"):
            found.append(f"{name or item}: needs item and source")
        if name in seen:
            found.append(f"{name}: named twice")
        seen.add(name)
        if status_of(item) not in STATUSES:
            found.append(f"{name}: no status is called {status_of(item)!r}")
        if "status" in item and not item.get("note"):
            found.append(f"{name}: a status needs a note")
        if item.get("status") in ("not yet", "left out") and item.get("policies") and not carriers(item)[1]:
            found.append(f"{name}: {item['status']!r}, but its policies are there: remove the status, and a note of it")
        if "status" not in item and not any(item.get(key) for key in ("policies", "awaits", "files")):
            found.append(f"{name}: names neither a file nor a status")
        for path in item.get("files", ()):
            if not (ROOT / path).is_file():
                found.append(f"{name}: {path} does not exist")
    return found


def page(table: Mapping[str, Any]) -> str:
    """The Markdown text."""
    counts = Counter(status_of(item) for item in items(table))
    lines = [INTRODUCTION.rstrip(), ""]
    lines += [f"- *{key}*: {value}." for key, value in table["sources"].items()]
    lines += ["", "; ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) + "."]
    lines.append("Made by `scripts/make_coverage.py` from `docs/coverage.toml`: change the table, not the page.")
    for group in table["group"]:
        lines += ["", f"## {group['title']}", "", *HEADER]
        lines += [_row(item) for item in group["items"]]
    return "\n".join(lines) + "\n"


def _row(item: Mapping[str, Any]) -> str:
    where = "; ".join(part for part in (_links(carriers(item)[0]), item.get("note", "")) if part)
    return f"| {item['item']} | {item['source']} | {status_of(item)} | {where} |"


def _links(paths: list[str]) -> str:
    return ", ".join(f"[`{path}`](../{path})" for path in paths)


def main() -> None:
    """Write the page, or check it."""
    table = load_table()
    wrong = problems(table)
    text = page(table)
    if "--check" in sys.argv:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            wrong.append("docs/coverage.md is not what the table makes: run python scripts/make_coverage.py")
    elif not wrong:
        PAGE.write_text(text, encoding="utf-8")
    print("\n".join(wrong) or f"{PAGE.relative_to(ROOT)}: {len(items(table))} items")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
