"""Write docs/reliability.md from docs/reliability.json: what was hunted, with which command, and what was found.

    python tests/fuzz/run.py --cases 100000 --json fuzz.json
    python tests/injection/run.py --json injection.json
    tiersim check POLICY --examples 1000 --json > law-POLICY.json
    python scripts/make_reliability.py --planted fuzz.json injection.json law-*.json

FILE: counts of these commands, which replace those of the same reader, command or policy (a hunt that went on where an
earlier one ended is added to it); without any the page is written from what is there.
--planted: also check every planted policy, and count those that are caught.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import tomllib
from datetime import date, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzz.run import joined  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
DATA = PAGE.with_suffix(".json")
TYPED = ROOT / "tests" / "wrong_words.toml"
WANTED_CASES, WANTED_EXAMPLES = 100_000, 1000

TEXT = """# How reliable it is

What a file says is data, and every reader answers it or refuses it in words. A disk that fails loses no result. What a
policy decides is held to the law, and faults that are put into policies on purpose must be caught. All of it is hunted
by commands of the repository, and this page has what they found, made by `python scripts/make_reliability.py`.

## Wrong input

Each reader gets right files with values replaced, deleted, doubled and swapped, and with bytes changed; and right
words with characters lost and added. A case counts as a fault if it ends in anything but an answer or a refusal,
takes more than 5 s of processor time, or takes more memory than ten times its input beyond 256 MiB. A case is
repeated by its number.

    python tests/fuzz/run.py --cases 100000

| reader | cases | answered | refused | faults | slowest | on |
| --- | ---: | ---: | ---: | ---: | ---: | --- |
{fuzz}
In all {cases:,} cases, {faults} faults; {long} of {readers} readers have been run for {wanted:,} cases. What earlier
runs found is mended and kept in the tests.

Commands as people mistype them are kept in `tests/wrong_words.toml`, {typed} of them: a wrong name, value, unit, file
or option. A test holds each to one line that says what is right, exit status 2 and no file left behind; none has a
traceback or a wrong suggestion.

    python -m pytest tests/test_wrong_words.py

## A disk that fails

No space (for ever, or for a moment), a disk or a block that cannot be written, a read-only folder, a quota, short
writes, no locks, a lock that is lost to another sweep, a clock set back, a kill, and a power failure that loses what
was not synced: each at every write, rename and sync of a command that it can befall. Afterwards the command has ended
with an answer or one line, every finished cell is there once with the right row, and going on leaves, byte for byte,
what a disk without faults leaves.

    python tests/injection/run.py

| command | injected faults | did harm | on |
| --- | ---: | ---: | --- |
{injected}
{injections:,} injected faults in all; {harm} did harm.

## The law

Every policy is held to [the law](how-to/add-a-policy.md) on 40 random examples with each change of the program, and on
a thousand now and then.

    tiersim check POLICY --examples 1000

{law_count} of {policies} policies have been checked on {examples:,} examples; {law_broken} broke a law.

| policy | examples | ran | did not fit | skipped | laws broken | on |
| --- | ---: | ---: | ---: | ---: | --- | --- |
{law}
## Planted faults of policies

{planted}

    python -m pytest -n 0 -m '' tests/conformance/test_planted_policies.py
"""


def fuzz_row(reader: str, found: dict[str, Any]) -> str:
    """A reader's line of the table."""
    outcomes = found["outcomes"]
    answered, faults = outcomes.get("answer", 0), len(found["faults"])
    refused = found["cases"] - answered - outcomes.get("fault", 0)
    numbers = f"{found['cases']:,} | {answered:,} | {refused:,} | {faults} | {found['slowest_s']:.2f} s"
    return f"| {reader} | {numbers} | {found['on']} |\n"


def law_row(policy: str, found: dict[str, Any]) -> str:
    """A policy's line of the table."""
    ran = found["examples"] - found["skipped"] - found["refused"] - found["failed"]
    broken = ", ".join(found["broken"]) or ("none" if found["passed"] else "a trait never showed")
    numbers = f"{found['examples']:,} | {ran:,} | {found['refused']:,} | {found['skipped']:,}"
    return f"| `{policy}` | {numbers} | {broken} | {found['on']} |\n"


def taken(data: dict[str, Any], path: Path) -> None:
    """Take counts into the data, by what they are of."""
    found = json.loads(path.read_text(encoding="utf-8"))
    on = datetime.fromtimestamp(path.stat().st_mtime).date().isoformat()
    for each in found if isinstance(found, list) else [found]:
        if "reader" in each:
            found_before = data["fuzz"].get(each["reader"])
            row = joined(found_before, {k: v for k, v in each.items() if k != "reader"})
            data["fuzz"][each["reader"]] = {**row, "on": on}
        elif "command" in each:
            data["injected"][each["command"]] = {**{k: v for k, v in each.items() if k != "command"}, "on": on}
        else:
            kept = {key: each[key] for key in ("examples", "skipped", "refused", "failed", "passed")}
            broken = [entry["law"] for entry in each["broken"]]
            data["law"][each["policy"]] = {**kept, "broken": broken, "on": on}


def planted() -> dict[str, Any]:
    """How many of the planted faults the check catches, and the longest that it took, in seconds of CPU time."""
    from sim.conformance import check_policy
    from sim.policies import load
    from tests.conformance.test_planted_policies import FAULTS, STOPPED, write_planted

    count, slowest = 0, 0.0
    for fault, (law, _) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # one leaves a file where it runs
            name = f"{write_planted(fault, Path(folder))}:Planted"
            limit, began = 0.3 if fault in STOPPED else 30, time.process_time()
            elsewhere = law in ("repeats", "outcome")
            report = check_policy(load(name), name=name, folder=folder, across_processes=elsewhere, time_limit_s=limit)
        slowest = max(slowest, time.process_time() - began)
        print(f"{fault}: {'missed' if report.passed else 'caught'}", flush=True)
        count += not report.passed
    return {"faults": len(FAULTS), "caught": count, "slowest_s": round(slowest, 1), "on": date.today().isoformat()}


def page(data: dict[str, Any]) -> str:
    """The page."""
    from sim.policies import names
    from tests.fuzz.readers import READERS

    fuzz = {name: data["fuzz"][name] for name in READERS if name in data["fuzz"]}
    law = {name: data["law"][name] for name in names() if name in data["law"]}
    injected, caught = data["injected"], data["planted"]
    slowest = f", the slowest within\n{caught['slowest_s']:g} s of processor time" if "slowest_s" in caught else ""
    found = (
        f"{caught['faults']} policies with one fault each, from `sys.exit(0)` to a plan that lives by the clock; "
        f"{caught['caught']} are caught by\n`tiersim check` with its 50 examples, by the law named beside them in the "
        f"file{slowest} ({caught['on']})."
    )
    return TEXT.format(
        fuzz="".join(fuzz_row(*each) for each in fuzz.items()),
        cases=sum(each["cases"] for each in fuzz.values()),
        faults=sum(len(each["faults"]) for each in fuzz.values()),
        long=sum(each["cases"] >= WANTED_CASES for each in fuzz.values()),
        readers=len(READERS),
        wanted=WANTED_CASES,
        typed=len(tomllib.loads(TYPED.read_text(encoding="utf-8"))["words"]),
        injected="".join(f"| {k} | {v['cases']:,} | {len(v['harm'])} | {v['on']} |\n" for k, v in injected.items()),
        injections=sum(each["cases"] for each in injected.values()),
        harm=sum(len(each["harm"]) for each in injected.values()),
        law_count=sum(each["examples"] >= WANTED_EXAMPLES for each in law.values()),
        policies=len(names()),
        examples=WANTED_EXAMPLES,
        law_broken=sum(not each["passed"] for each in law.values()) or "none",
        law="".join(law_row(*each) for each in law.items()),
        planted=found,
    )


def main() -> int:
    """Take in what was found, and write; 1 if there was a fault."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("files", nargs="*", type=Path, metavar="FILE")
    words.add_argument("--planted", action="store_true")
    asked = words.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {"fuzz": {}, "injected": {}, "law": {}}
    for path in asked.files:
        taken(data, path)
    if asked.planted:
        data["planted"] = planted()
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")
    harm = any(each["faults"] for each in data["fuzz"].values()) or any(x["harm"] for x in data["injected"].values())
    caught = data["planted"]["caught"] == data["planted"]["faults"]
    return 0 if caught and not harm and all(each["passed"] for each in data["law"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
