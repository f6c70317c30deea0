"""Write docs/reliability.md: wrong input for every reader, and planted faults of policies, with the figures measured.

    python scripts/make_reliability.py [--cases N] [--seconds S]

cases: of wrong input, at most so many per reader.
seconds: at most so long per reader.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "reliability.md"
INTRO = """# How reliable it is

What a file says is data, and every reader answers it or refuses it in words. What a policy decides is held to the
law, and faults that are put into policies on purpose must be caught. Both are hunted by commands of the repository,
and this page has what they found on {day}. It is made by `{command}`.

## Wrong input

Each reader gets right files with values replaced, deleted, doubled and swapped, and with bytes changed; and right
words with characters lost and added. A case counts as a fault if it ends in anything but an answer or a refusal,
takes more than 5 s of processor time, or takes more memory than ten times its input beyond 256 MiB. A case is
repeated by its number.

    python tests/fuzz/run.py --cases 100000

| reader | cases | answered | refused | faults | slowest |
| --- | ---: | ---: | ---: | ---: | ---: |
"""
AFTER = """
In all {cases:,} cases, {faults} faults. The number of cases is what fitted into the time given, not what the command
allows.

## Planted faults of policies

{planted} policies with one fault each, from `sys.exit(0)` to a plan that lives by the clock; {caught} are caught by
`tiersim check` with its 50 examples, by the law named beside them in the file.

    python -m pytest -n 0 -m '' tests/conformance/test_planted_policies.py
"""


def row(found: dict[str, Any]) -> str:
    """A reader's line of the table."""
    outcomes = found["outcomes"]
    answered, faults = outcomes.get("answer", 0), len(found["faults"])
    refused = found["cases"] - answered - outcomes.get("fault", 0)
    numbers = f"{found['cases']:,} | {answered:,} | {refused:,} | {faults} | {found['slowest_s']:.2f} s"
    return f"| {found['reader']} | {numbers} |\n"


def caught() -> int:
    """How many of the planted faults the check catches."""
    from sim.conformance import check_policy
    from sim.policies import load
    from tests.conformance.test_planted_policies import FAULTS, STOPPED, write_planted

    count = 0
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            name = f"{write_planted(fault, Path(folder))}:Planted"
            limit = 0.3 if fault in STOPPED else 30
            elsewhere = FAULTS[fault][0] in ("repeats", "outcome")
            report = check_policy(load(name), name=name, folder=folder, across_processes=elsewhere, time_limit_s=limit)
        print(f"{fault}: {'missed' if report.passed else 'caught'}", flush=True)
        count += not report.passed
    return count


def main() -> int:
    """Measure and write; 1 if there was a fault."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--cases", type=int, default=100_000)
    words.add_argument("--seconds", type=float, default=float("inf"))
    asked = words.parse_args()
    from tests.conformance.test_planted_policies import FAULTS
    from tests.fuzz.readers import READERS
    from tests.fuzz.run import hunt

    found = []
    for name in READERS:
        found.append(hunt(name, 100_000, asked.cases, asked.seconds))
        print(row(found[-1]), *found[-1]["faults"][:3], end="", flush=True)
    cases, faults = sum(each["cases"] for each in found), sum(len(each["faults"]) for each in found)
    command = " ".join(["python scripts/make_reliability.py", *sys.argv[1:]])
    text = INTRO.format(day=date.today().isoformat(), command=command) + "".join(map(row, found))
    text += AFTER.format(cases=cases, faults=faults, planted=len(FAULTS), caught=caught())
    PAGE.write_text(text, encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
