"""Faults of the disk at every write of a sweep, an export, a report, a run: python tests/injection/run.py

    --cases N     of each command so many, drawn with a seed; default: every fault at every event
    --only TEXT   those whose name holds it, such as "resume: short write at 12"
    --json FILE   write the counts, after each command
    COMMAND …     these alone

A case that does harm is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.injection.commands import COMMANDS, Bench, cases  # noqa: E402


def hunt(count: int | None = None, only: str = "", names: tuple[str, ...] = COMMANDS) -> dict[str, Any]:
    """Run cases: how many of each command and of each fault, and those that did harm."""
    by_command: Counter[str] = Counter()
    by_fault: Counter[str] = Counter()
    harm: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tiersim-injection-") as base:
        bench = Bench(Path(base))
        chosen = [case for case in cases(bench, names) if only in "{}: {} at {}".format(*case)]
        if count is not None and count < len(chosen):
            chosen = random.Random(0).sample(chosen, count)
        for name, fault, at in chosen:
            by_command[name] += 1
            by_fault[fault] += 1
            try:
                bench.case(name, fault, at)
            except Exception as error:
                harm.append(f"{name}: {fault} at {at}: {type(error).__name__}: {error}")
    return {"cases": by_command.total(), "commands": dict(by_command), "faults": dict(by_fault), "harm": harm}


def main() -> int:
    """Read the options and hunt; 1 if a fault did harm."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("commands", nargs="*", default=[])
    words.add_argument("--cases", type=int)
    words.add_argument("--only", default="")
    words.add_argument("--json")
    asked = words.parse_args()
    found = []
    for name in asked.commands or COMMANDS:
        found.append({"command": name, **hunt(asked.cases, asked.only, (name,))})
        print(f"{name}: {found[-1]['cases']:,} injected faults, {len(found[-1]['harm'])} did harm", flush=True)
        for line in found[-1]["harm"]:
            print(f"  {line}", flush=True)
        if asked.json:
            Path(asked.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any(each["harm"] for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
