"""`hybrid` against the other policies on MT-3000, over link rate, memory bandwidth, model and budget.

python benchmarks/hybrid.py            print what benchmarks/hybrid.json says
python benchmarks/hybrid.py --measure  run the cells that it has not (some twenty minutes on a free core), then print

Per cell the time over that of unlimited memory, -1, of each policy; null where it does not fit. Policies that only
recompute do not depend on the link, and are run once for all rates.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from sim import Trace, simulate
from sim.analysis.peak_memory import home_peak
from sim.errors import Infeasible
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from workloads import transformer

DATA = Path(__file__).with_suffix(".json")
MODELS = {"gpt2-small": (4, 512), "gpt2-medium": (2, 512), "llama-1b": (4, 1024)}
RATES, BANDWIDTHS, SHARES = (5, 10, 20, 40), (120, 200, 400), (0.5, 0.1, 0.9)
"""GB/s of the link in each direction and of the zone; budgets between full recomputation's peak and keeping all."""
RECOMPUTING = ("full_recompute", "selective_recompute", "every_k", "rotor", "sac_knapsack", "twremat")
MOVING = ("swap_all", "vdnn", "delta", "lru_tiering", "layers 0-{half}: full_recompute; rest: swap_all")
UNLIMITED = "1000 TB"

Row = dict[str, Any]


def platform(rate: int, bandwidth: int) -> Platform:
    """MT-3000 with these figures, and a general zone large enough for all that is offloaded."""
    changed = {f"links.{way}.rate": f"{rate} GB/s" for way in ("d2h", "h2d")}
    return load_profile("mt3000_survey", overrides=changed | {"tiers.zone.bandwidth": f"{bandwidth} GB/s"})


def overhead(trace: Trace, machine: Platform, policy: str, budget: int, kept: int) -> float | None:
    """Time over that of unlimited memory, -1; None where the policy does not fit."""
    try:
        return round(simulate(trace, machine, policy, budget=budget).log.end / kept - 1, 5)
    except Infeasible:
        return None


def measure(rows: list[Row]) -> None:
    """Append the cells that are missing, and write the file after each."""
    done = {(row["model"], row["rate"], row["bandwidth"], row["share"]) for row in rows}
    for share, (model, (batch, sequence)), bandwidth in itertools.product(SHARES, MODELS.items(), BANDWIDTHS):
        rates = [rate for rate in RATES if (model, rate, bandwidth, share) not in done]
        if not rates:
            continue
        trace = transformer(model, batch=batch, sequence=sequence, precision="amp_bf16")
        half = int(trace.op_columns.layer.max()) // 2
        any_rate = platform(rates[0], bandwidth)
        kept = simulate(trace, any_rate, "keep_all", budget=UNLIMITED).log
        least = home_peak(simulate(trace, any_rate, "full_recompute", budget=UNLIMITED).log)
        budget = int(least + share * (home_peak(kept) - least))
        fixed = {name: overhead(trace, any_rate, name, budget, kept.end) for name in RECOMPUTING}
        for rate in rates:
            names = ["hybrid", *(name.format(half=half) for name in MOVING)]
            found = {name: overhead(trace, platform(rate, bandwidth), name, budget, kept.end) for name in names}
            cell = {"model": model, "rate": rate, "bandwidth": bandwidth, "share": share, "budget": budget}
            rows.append(cell | {"overhead": found | fixed})
            DATA.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
            print(*cell.values(), found["hybrid"], best_other(rows[-1]), flush=True)


def best_other(row: Row) -> tuple[float, str]:
    """The least overhead of another policy, and its name."""
    return min((took, name) for name, took in row["overhead"].items() if took is not None and name != "hybrid")


def main(arguments: list[str]) -> None:
    """Measure if asked to; then a line per share of the budget and rate, over models and bandwidths."""
    rows: list[Row] = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    if "--measure" in arguments:
        measure(rows)
    for share, rate in itertools.product(sorted(SHARES), RATES):
        cells = [row for row in rows if (row["share"], row["rate"]) == (share, rate)]
        gaps = [best_other(row)[0] - row["overhead"]["hybrid"] for row in cells]
        if cells:
            mine = [row["overhead"]["hybrid"] for row in cells]
            mean = 100 * sum(mine) / len(mine)
            less = f"{100 * min(gaps):.1f} to {100 * max(gaps):.1f} points less than the best other"
            print(f"budget {share:.1f}, {rate} GB/s: {len(cells)} cells, +{mean:.1f} % on average, {less}")


if __name__ == "__main__":
    main(sys.argv[1:])
