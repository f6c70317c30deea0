"""A mutation check of the engine: faults put in one at a time, and which test finds each.

    python tests/mutation/run.py                  # the sample of the committed table and all faults by hand
    python tests/mutation/run.py --only links.py  # one module
    python tests/mutation/run.py --sample 1000    # a larger sample
    python tests/mutation/run.py --survivors      # what is new since the table, and what nothing found

Each fault is one change at one place in a module of `sim/engine`, made in a scratch copy of the project: an
operator, a constant or a condition turned, a statement left out, `min` for `max` (`operators.py`); and the
faults that were once seen to survive, written by hand (`by_hand.toml`). The random problems of the differential test
are run against it, then the other tests of the engine, cheapest first, until one fails. A fault that none finds is
either named in `equivalent.toml`, with the reason why it changes nothing that can be seen, or reported, and the exit
status is 1.

What came out is written to `results.csv`: file, line, scope, source, mutation, and the test that found it.
A fault is known by its line's text, not by its number: both files hold while the lines stay as they are. The
committed rows were found before files of the event path were merged, and carried over by those lines; the array path
is not among them. Runs in one process; most faults are found within a few seconds each.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
sys.dont_write_bytecode = True

from operators import Mutant, mutants, sampled  # noqa: E402

APART = "allocators"
"""The folder of the engine that is not mutated: allocators have oracles of their own."""
SUITE = (
    "tests/engine/test_corner_cases.py",
    "tests/engine/test_timeline.py",
    "tests/engine/test_array_path.py",
    "tests/engine/test_copy_path.py",
    "tests/engine/test_regressions.py",
    "tests/engine/test_allocators.py",
    "tests/engine/test_thrashing.py",
    "tests/engine/test_fairness.py",
    "tests/conformance/test_planted_faults.py",
    "tests/test_iterations.py",
    "tests/engine/test_random_plans.py",
    "tests/engine/test_instant.py",
)
"""After the problems of `test_reference.py`; cheapest first. Tests that do not end count as having found the fault."""

SAMPLE = 150
PROBLEMS_S, TESTS_S = 20, 200
"""Limits in seconds of processor time; without a fault the problems take about 2, the tests about 50."""

COLUMNS = ("file", "line", "scope", "source", "mutation", "found_by")


class Result(NamedTuple):
    """A fault, and the test that found it: "" if none did."""

    mutant: Mutant
    found_by: str


def main() -> int:
    """Run the check; 0 if every fault is found, or named as one that changes nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"faults drawn from the code (default {SAMPLE})")
    parser.add_argument("--only", default="", help="faults of this module only; the table is not written")
    parser.add_argument("--survivors", action="store_true", help="as --resume, and try again what nothing found")
    parser.add_argument("--resume", action="store_true", help="keep what the table says already, and go on")
    parser.add_argument("--table", type=Path, default=HERE / "results.csv")
    args = parser.parse_args()
    equivalent = {row["key"]: row["reason"] for row in tomllib.loads((HERE / "equivalent.toml").read_text())["mutant"]}
    faults = chosen(args.sample)
    go_on = args.resume or args.survivors
    known = {row["key"]: row["found_by"] for row in _rows(args.table)} if go_on else {}
    again = {key for key, found_by in known.items() if args.survivors and not found_by and key not in equivalent}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Path(scratch)
        for part in ("sim", "tests", "workloads", "hardware_profiles", "pyproject.toml"):
            where = ROOT / part
            (shutil.copytree if where.is_dir() else shutil.copy)(where, copy / part)
        sys.path.insert(0, str(copy))
        problems = Problems()
        if not go_on and tried(copy, problems) != "":
            print("the tests fail without any fault", file=sys.stderr)
            return 2
        here = [fault for fault in faults if args.only in fault.file]
        for number, fault in enumerate(here, 1):
            if fault.key in known and fault.key not in again:
                continue
            start = time.monotonic()
            known[fault.key] = found_by = with_fault(copy, fault, problems)
            if not args.only:
                write(args.table, [Result(f, known[f.key]) for f in faults if f.key in known])
            verdict = found_by or ("equivalent" if fault.key in equivalent else "SURVIVED")
            print(f"{number}/{len(here)} {time.monotonic() - start:.1f} s {fault.key}: {verdict}", flush=True)
    return report([Result(fault, known[fault.key]) for fault in here], equivalent)


def chosen(sample: int) -> list[Mutant]:
    """A sample of all mutations of the modules, and the faults by hand."""
    drawn, texts = [], {}
    for path in sorted((ROOT / "sim/engine").rglob("*.py")):
        if path.parent.name != APART:
            file = path.relative_to(ROOT).as_posix()
            texts[file] = path.read_text()
            drawn += mutants(file, texts[file])
    faults = []
    for row in tomllib.loads((HERE / "by_hand.toml").read_text())["mutant"]:
        text = texts.get(row["file"]) or (ROOT / row["file"]).read_text()
        if text.count(row["before"]) != 1:
            raise SystemExit(f"by_hand.toml: {row['name']!r}: {text.count(row['before'])} places in {row['file']}")
        start = text.index(row["before"])
        line = text.count("\n", 0, start) + 1
        faults.append(Mutant(row["file"], "by hand", line, start, row["before"], row["after"], row["name"]))
    return faults + list(sampled(drawn, sample))


def with_fault(copy: Path, fault: Mutant, problems: Problems) -> str:
    """The test that finds a fault, "" if none does."""
    path = copy / fault.file
    sound = path.read_text()
    faulty = fault.applied(sound)
    try:
        compile(faulty, fault.file, "exec")
    except SyntaxError:
        return "does not compile"
    path.write_text(faulty)
    try:
        return tried(copy, problems)
    finally:
        path.write_text(sound)


def tried(copy: Path, problems: Problems) -> str:
    """Run the problems, then the tests, each in a child of this process; the first that fails, "" if none does."""
    found_by = _in_child(copy, problems.first_difference, PROBLEMS_S)
    return found_by or _in_child(copy, partial(_first_failure, copy), TESTS_S)


def _in_child(copy: Path, search: Callable[[], str], limit: int) -> str:
    """What `search` finds in a child, which has the libraries loaded and nothing of the engine."""
    answer = copy / "answer.txt"
    answer.write_text("the tests did not end")
    child = os.fork()
    if not child:
        os.chdir(copy)
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + limit,) * 2)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        answer.write_text(search())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return "time limit" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU else answer.read_text()


class Problems:
    """The problems of the differential test, with the answers of the reference, which no fault changes."""

    def __init__(self) -> None:
        from tests.engine import differential, test_reference
        from tests.engine.random_problems import problem

        self.test = "tests/engine/test_reference.py::test_engine_and_reference_agree_in_every_figure"
        self.part = test_reference.FEW // 4
        self.cases = [problem(seed) for seed in range(test_reference.FEW)]
        self.known = [differential.expected(case.plan, case.platform) for case in self.cases]

    def first_difference(self) -> str:
        """In a child: the part of the test that fails against the engine as it stands there."""
        _forget("sim.engine")
        number = 0
        try:
            from sim.engine.replay import replay
            from tests.engine import differential

            differential.replay = replay  # type: ignore[attr-defined]
            for number, (case, known) in enumerate(zip(self.cases, self.known)):
                if differential.difference(case.plan, case.platform, known=known):
                    return f"{self.test}[{number // self.part}]"
        except Exception:
            return f"{self.test}[{number // self.part}]"
        return ""


def _forget(*packages: str) -> None:
    """Have these imported once more."""
    for name in list(sys.modules):
        if any(name == package or name.startswith(f"{package}.") for package in packages):
            del sys.modules[name]


def _first_failure(copy: Path) -> str:
    """In a child: the first test that fails."""
    import pytest

    _forget("sim", "tests")

    class First:
        """Notes the first failure."""

        name = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.name:
                self.name = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.name:
                self.name = f"{report.nodeid} (collection)"

    first = First()
    here = [name for name in SUITE if (copy / name).exists()]
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "0", "-o", "addopts="]
    status = pytest.main([*options, "--import-mode=importlib", "-m", "not slow", *here], plugins=[first])
    return first.name or f"pytest ends with {int(status)}" if status else ""


def _rows(table: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader(table.open()))
    return [{**row, "key": f"{row['file']} {row['scope']}: {row['source']} {row['mutation']}"} for row in rows]


def write(table: Path, results: list[Result]) -> None:
    """The table that is committed."""
    with table.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for fault, found_by in results:
            change = f"[{fault.before} -> {fault.after}]"
            writer.writerow((fault.file, fault.line, fault.scope, fault.source, change, found_by))


def report(results: list[Result], equivalent: dict[str, str]) -> int:
    """How many were found, and those that were not though nobody says why."""
    unseen = [r for r in results if not r.found_by]
    unexpected = [r.mutant for r in unseen if r.mutant.key not in equivalent]
    telling = len(results) - (len(unseen) - len(unexpected))
    found = len(results) - len(unseen)
    print(f"{len(results)} faults, {len(results) - telling} of them equivalent; {found} of {telling} found "
          f"({100 * found / max(telling, 1):.1f} %)")  # fmt: skip
    for fault in unexpected:
        print(f"survived: {fault.file}:{fault.line} {fault.key}")
    known = {r.mutant.key for r in results if r.found_by}
    for key in sorted(known & set(equivalent)):
        print(f"named as equivalent, but found: {key}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
