"""Wrong input for every reader, as much as asked for: python tests/fuzz/run.py --cases 100000

    --cases N     cases per reader
    --seconds S   at most so long per reader
    --first N     the number of the first case; with --cases 1 a single case is repeated
    --json FILE   add the counts to a file; those of the same reader are replaced, or added to if they end at --first
    READER …      these alone

A fault is printed with the command that repeats it, and the exit status is 1. Ctrl-C ends a reader's hunt after the
case at hand, and what it has found until then counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.fuzz.readers import READERS, run_case  # noqa: E402

HANGS_S = 60
"""Seconds of processor time after which a case is stopped."""

SLOW_S = 5.0
BASE = 256 << 20
"""Bytes of memory beyond ten times its input that a case may take."""


class Hangs(BaseException):
    """A case that takes longer than `HANGS_S`; not an `Exception`, so that no reader takes it for its own."""


def _stop(*_: object) -> None:
    raise Hangs


def hunt(name: str, first: int, cases: int, seconds: float = float("inf")) -> dict[str, Any]:
    """Run cases of one reader: how many gave what, the slowest in seconds of CPU time, and the faults."""
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    slowest, most, began = 0.0, 0, time.monotonic()
    old = signal.signal(signal.SIGPROF, _stop)
    stop: list[int] = []  # Ctrl-C lets a case end, since a reader may make something else of it
    interrupted = signal.signal(signal.SIGINT, lambda number, _: stop.append(number))
    base = Path(tempfile.mkdtemp(prefix="tiersim-fuzz-"))
    number, peak = first, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for number in range(first, first + cases):
            if stop or time.monotonic() - began > seconds:
                break
            folder = base / "case"
            folder.mkdir()
            before = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, HANGS_S)
            try:
                outcomes[run_case(name, number, folder)] += 1
            except (Exception, Hangs) as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                outcomes["fault"] += 1
                said = " ".join(str(error).split())[:160]
                faults.append(f"{type(error).__name__} at {where}: {said}: python tests/fuzz/run.py --first {number} "
                              f"--cases 1 '{name}'")  # fmt: skip
            signal.setitimer(signal.ITIMER_PROF, 0)
            spent = time.process_time() - before
            peak, old_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, peak
            taken = (peak - old_peak) * 1024
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if spent > SLOW_S:
                faults.append(f"{spent:.1f} s: python tests/fuzz/run.py --first {number} --cases 1 '{name}'")
            if taken > BASE + 10 * size:
                faults.append(f"{taken:,} bytes of memory for {size:,}: --first {number} --cases 1 '{name}'")
            slowest, most = max(slowest, spent), max(most, taken)
            shutil.rmtree(folder)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
        signal.signal(signal.SIGINT, interrupted)
        shutil.rmtree(base, ignore_errors=True)
    done = outcomes.total()
    return {"reader": name, "first": first, "cases": done, "slowest_s": round(slowest, 2), "most_bytes": most,
            "outcomes": dict(outcomes.most_common()), "faults": faults}  # fmt: skip


def joined(earlier: dict[str, Any] | None, found: dict[str, Any]) -> dict[str, Any]:
    """Counts of a reader with those of the cases just before them, if that is where the earlier ones end."""
    if earlier is None or earlier.get("first", 0) + earlier["cases"] != found["first"] or not found["first"]:
        return found
    worst = {key: max(earlier[key], found[key]) for key in ("slowest_s", "most_bytes")}
    outcomes = Counter(earlier["outcomes"]) + Counter(found["outcomes"])
    return {**found, **worst, "first": earlier.get("first", 0), "cases": earlier["cases"] + found["cases"],
            "outcomes": dict(outcomes.most_common()), "faults": [*earlier["faults"], *found["faults"]]}  # fmt: skip


def main() -> int:
    """Read the options and hunt; 1 if there is a fault."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("readers", nargs="*", default=[])
    words.add_argument("--cases", type=int, default=1000)
    words.add_argument("--first", type=int, default=0)
    words.add_argument("--seconds", type=float, default=float("inf"))
    words.add_argument("--json")
    asked = words.parse_args()
    unknown = [name for name in asked.readers if name not in READERS]
    if unknown:
        words.error(f"no reader is called {unknown[0]!r}; there are {', '.join(READERS)}")
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    found = []
    for name in asked.readers or READERS:
        found.append(hunt(name, asked.first, asked.cases, asked.seconds))
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in found[-1]["outcomes"].items())
        print(f"{name}: {found[-1]['cases']:,} cases, slowest {found[-1]['slowest_s']} s: {counts}", flush=True)
        seen: set[str] = set()
        for fault in found[-1]["faults"]:
            if (key := fault.partition(": ")[0]) not in seen:
                seen.add(key)
                print(f"  {fault}", flush=True)
    if asked.json:
        path, ran = Path(asked.json), {each["reader"] for each in found}
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        kept, same = [each for each in earlier if each["reader"] not in ran], {each["reader"]: each for each in earlier}
        rows = [*kept, *(joined(same.get(each["reader"]), each) for each in found)]
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["faults"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
