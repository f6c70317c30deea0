"""`hybrid` against the other policies on MT-3000, over link rate, memory bandwidth, model and budget.

python benchmarks/hybrid.py            print what benchmarks/hybrid.json says
python benchmarks/hybrid.py --measure  run the cells that it has not (some ten minutes on a free core), then print

Per cell and policy the time over that of unlimited memory, -1, null where it does not fit; how much of that is
recomputation; the least that any plan takes, `sim.lower_bound`; and where `hybrid` is slower than unlimited memory,
what `joint_optimal` takes and proves. Policies that only recompute do not depend on the link, and
are run once for all rates. Where `hybrid` takes no longer than unlimited memory, at rates from 20 GB/s on, nothing can
be faster, and only `swap_all` is run beside it.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim import Trace, lower_bound, simulate
from sim.analysis.peak_memory import home_peak
from sim.errors import TiersimError
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.log import WHY, EventLog
from workloads import transformer

DATA = Path(__file__).with_suffix(".json")
MODELS = {"gpt2-small": (4, 512), "gpt2-medium": (2, 512), "llama-1b": (4, 1024)}
RATES, BANDWIDTHS, SHARES = (5, 10, 20, 40), (120, 200, 400), (0.1, 0.5, 0.9)
"""GB/s of the link in each direction and of the zone; budgets between full recomputation's peak and keeping all."""
FAST = 20
"""GB/s from which on the link keeps up."""
RECOMPUTING = ("full_recompute", "selective_recompute", "every_k", "rotor", "sac_knapsack", "twremat")
MOVING = ("swap_all", "vdnn", "delta", "lru_tiering")
JOINING = ("capuchin", "superneurons", "mt3000_layered")
COMPOSED = (
    "full_recompute; checkpoints: swap_all",
    "layers 0-{half}: full_recompute; rest: swap_all",
)
JOINED = ("olla", "olla + hybrid", "optimizer_in_backward + hybrid", "zero_offload + hybrid")
"""What orders ops, or moves state, alone and with `hybrid`: after all others."""
UNLIMITED = "1000 TB"
EQUAL = 0.0005
"""Overheads that are shown alike are alike: a twentieth of a point."""

Row = dict[str, Any]


def platform(rate: int, bandwidth: int) -> Platform:
    """MT-3000 with these figures, and a general zone large enough for all that is offloaded."""
    changed = {f"links.{way}.rate": f"{rate} GB/s" for way in ("d2h", "h2d")}
    return load_profile("mt3000_survey", overrides=changed | {"tiers.zone.bandwidth": f"{bandwidth} GB/s"})


def recomputed_ns(log: EventLog) -> int:
    """Time of recomputation."""
    chosen = log.interval("why") == WHY["recompute"]
    return int((log.interval("end") - log.interval("start"))[chosen].sum())


def run(trace: Trace, machine: Platform, policy: str, budget: int, kept: int) -> tuple[float | None, float | None]:
    """Time over that of unlimited memory, -1, and the recomputation in it; None where the policy does not fit."""
    try:
        log = simulate(trace, machine, policy, budget=budget).log
    except TiersimError:
        return None, None
    return round(log.end / kept - 1, 5), round(recomputed_ns(log) / kept, 5)


def least(trace: Trace, machine: Platform, budget: int, kept: int) -> float:
    """The bound that is proven, as a part of the time with unlimited memory."""
    found = lower_bound(trace, machine, budget, seconds=600.0).makespan_ns
    return round((found or 0) / kept - 1, 5)


def joint(trace: Trace, machine: Platform, budget: int, kept: int) -> tuple[float | None, float | None]:
    """What `joint_optimal` takes, and what it proves, as `least`; None for no plan, or no bound."""
    try:
        result = simulate(trace, machine, "joint_optimal", budget=budget)
    except TiersimError:
        return None, None
    bound = result.plan.notes["makespan_bound_ns"]
    return round(result.log.end / kept - 1, 5), None if bound is None else round(bound / kept - 1, 5)


class Bench:
    """A model on the machine with one zone's bandwidth: what its cells have in common."""

    def __init__(self, model: str, bandwidth: int) -> None:
        batch, sequence = MODELS[model]
        self.bandwidth = bandwidth
        self.trace = transformer(model, batch=batch, sequence=sequence, precision="amp_bf16")
        self.half = int(self.trace.op_columns.layer.max()) // 2
        machine = platform(RATES[0], bandwidth)
        kept = simulate(self.trace, machine, "keep_all", budget=UNLIMITED).log
        self.kept, self.high = kept.end, home_peak(kept)
        self.low = home_peak(simulate(self.trace, machine, "full_recompute", budget=UNLIMITED).log)

    def complete(self, row: Row, names: Sequence[str]) -> None:
        """Run what a row lacks of these policies, its bound and the joint optimum."""
        row.setdefault("budget", int(self.low + row["share"] * (self.high - self.low)))
        machine = platform(row["rate"], self.bandwidth)
        for name in (each.format(half=self.half) for each in names):
            if name not in row["overhead"]:
                took, part = run(self.trace, machine, name, row["budget"], self.kept)
                row["overhead"][name], row["recomputed"][name] = took, part
        mine = row["overhead"]["hybrid"]
        slower = mine is None or mine >= EQUAL
        if slower and "joint" not in row:
            row["joint"], row["joint_bound"] = joint(self.trace, machine, row["budget"], self.kept)
        if "bound" not in row:
            row["bound"] = least(self.trace, machine, row["budget"], self.kept) if slower else 0.0


def measure(rows: list[Row]) -> None:
    """Add what is missing, `hybrid` and the bound first, and write the file after each cell."""
    by_cell = {tuple(row[key] for key in ("model", "rate", "bandwidth", "share")): row for row in rows}
    bench = functools.cache(Bench)
    first, rest = ("hybrid",), (*JOINING, *COMPOSED, *MOVING, *RECOMPUTING)
    passes = (first, rest, JOINED)
    for names, share, model, bandwidth, rate in itertools.product(passes, SHARES, MODELS, BANDWIDTHS, RATES):
        fresh = {"model": model, "rate": rate, "bandwidth": bandwidth, "share": share, "overhead": {}, "recomputed": {}}
        row = by_cell.setdefault((model, rate, bandwidth, share), fresh)
        fast = rate >= FAST and row["overhead"].get("hybrid", 1.0) < EQUAL
        asked = (*first, "swap_all") if fast else names
        if names is rest:
            same = (by_cell[model, other, bandwidth, share] for other in RATES)
            known = [each for each in same if "twremat" in each["recomputed"]]
            for name in RECOMPUTING if known and not fast else ():  # the link does not matter to them
                for figures in ("overhead", "recomputed"):
                    row[figures].setdefault(name, known[0][figures][name])
        before = json.dumps(row)
        bench(model, bandwidth).complete(row, asked)
        if json.dumps(row) != before:
            lines = ",\n".join(map(json.dumps, by_cell.values()))
            DATA.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
            print(
                model, rate, bandwidth, share, row["bound"], row["overhead"]["hybrid"], len(row["overhead"]), flush=True
            )
    rows[:] = by_cell.values()


def best_other(row: Row) -> tuple[float, str]:
    """The least overhead of a policy without `hybrid` in it, and its name."""
    return min((took, name) for name, took in row["overhead"].items() if took is not None and "hybrid" not in name)


def main(arguments: list[str]) -> None:
    """Measure if asked to; then a line per share of the budget and rate, over models and bandwidths."""
    rows: list[Row] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    if "--measure" in arguments:
        measure(rows)
    for share, rate in itertools.product(SHARES, RATES):
        cells = [row for row in rows if (row["share"], row["rate"]) == (share, rate)]
        if cells:
            mine = [100 * row["overhead"]["hybrid"] for row in cells]
            above = [each - 100 * row["bound"] for each, row in zip(mine, cells, strict=True)]
            gaps = [100 * best_other(row)[0] - each for each, row in zip(mine, cells, strict=True)]
            print(
                f"budget {share:.1f}, {rate} GB/s: {len(cells)} cells, +{sum(mine) / len(mine):.1f} % on average,",
                f"up to {max(above):.1f} points above the bound,",
                f"{min(gaps):.1f} to {max(gaps):.1f} points less than the best other",
            )


if __name__ == "__main__":
    main(sys.argv[1:])
