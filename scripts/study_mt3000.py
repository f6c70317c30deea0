"""What docs/mt3000.md is made from: jobs, machines and policies, and the runs of each part of the study.

Each run is kept under a key of its own in docs/mt3000.json, so that a measurement that was stopped goes on where it
was, and one policy can be measured again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim import Platform, Trace

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "mt3000.json"

JOBS: Mapping[str, Mapping[str, Any]] = {
    "GPT-2": {"model": "gpt2", "batch": 12, "sequence": 1024, "precision": "amp_fp16"},
    "GPT-2 medium": {"model": "gpt2-medium", "batch": 4, "sequence": 1024, "precision": "amp_fp16"},
    "GPT-2 XL": {"model": "gpt2-xl", "batch": 1, "sequence": 1024, "precision": "amp_fp16"},
    "BERT-large": {"model": "bert-large", "batch": 16, "sequence": 512, "precision": "amp_fp16"},
    "Llama 1B": {"model": "llama-1b", "batch": 1, "sequence": 2048, "precision": "mixed_fp16"},
}  # fmt: skip
MACHINES: Mapping[str, Mapping[str, str]] = {
    "mt3000_survey": {},
    "mt3000_cluster": {"devices": "1"},  # one cluster works, three rest
    "ascend_910b": {},
    "a100_40_pcie": {},
    "pcie_domestic_low": {},
}
SHARE = 0.6
"""Of the memory that a job wants, where the machine has more: to ask the same question of every machine."""
SINGLE = (
    *("keep_all", "full_recompute", "rotor", "sac_knapsack", "tso"),
    *("swap_all", "vdnn_pp", "offload_activations", "g10", "lru_tiering"),
    *("capuchin", "delta", "mt3000_layered", "hybrid"),
)
STATE = ("zero_offload", "zero_offload(weights=host) + weight_streaming")
BESIDE = ("full_recompute", "swap_all", "hybrid")
STACKS = tuple(f"{below} + {beside}" for below in STATE for beside in BESIDE)
RIVALS = ("full_recompute", "rotor", "sac_knapsack", "swap_all", "vdnn_pp", "g10", "hybrid")
RATES = (2.5, 5, 10, 20, 40, 80)
ONE_WAY = (2.5, 5, 10, 20)
LARGE = ("GPT-2 XL", "Llama 1B")
"""Jobs whose weights, gradients and optimizer state exceed the zone: state policies are tried beside the others."""
SWEPT = ("GPT-2 medium", "BERT-large")
"""Jobs whose state the zone holds, so that recomputing and copying activations can be told apart."""
DRAWS, SEED = 100, 1
DRAWN = ("full_recompute", "sac_knapsack", "swap_all", "g10", "hybrid")
KEPT = (
    *("fits", "makespan_ns", "peak_bytes", "recompute_ns", "codec_ns", "stall_ns", "moved_bytes", "overhead"),
    *("unlimited_ns", "refusal"),
)


@cache
def job(name: str) -> Trace:
    """The trace of a job."""
    from workloads import transformer

    options = dict(JOBS[name])
    return transformer(options.pop("model"), **options)


@cache
def wanted(name: str) -> tuple[int, int]:
    """The bytes that a job holds at its peak if nothing is done about it, and its bytes of state alone."""
    from sim import load_profile, simulate
    from sim.advice.state import state_of

    machine = load_profile("mt3000_survey")
    peak = simulate(job(name), machine, budget=1 << 50).summary()["peak_bytes"]
    return int(peak), state_of(job(name), machine).bytes


def machine(name: str, figures: Mapping[str, str] | None = None) -> Platform:
    """A machine of the study, with changed figures."""
    from sim import load_profile

    return load_profile(name, overrides={**MACHINES[name], **(figures or {})})


def budget(name: str, platform: Platform) -> int:
    """What a job gets on a machine: all that there is, or `SHARE` of what it wants where that is less."""
    return min(platform.home(0).capacity, int(SHARE * wanted(name)[0]))


def runs() -> Iterator[tuple[str, str, str, dict[str, str], tuple[str, ...]]]:
    """(part, job, machine, changed figures, policies) of every comparison of the study."""
    for name in JOBS:
        for where in MACHINES:
            yield "machines", name, where, {}, (*SINGLE, *(STACKS if name in LARGE else ()))
    for name in SWEPT:
        for rate in RATES:
            yield "rates", name, "mt3000_survey", both(rate), RIVALS
    for rate in ONE_WAY:
        for link in ("d2h", "h2d"):
            yield f"{link} alone", "GPT-2 medium", "mt3000_survey", {f"links.{link}.rate": f"{rate:g} GB/s"}, RIVALS
    for figures in draws():
        yield "draws", "GPT-2 medium", "mt3000_survey", figures, DRAWN


def both(rate: float) -> dict[str, str]:
    """Both links at a rate in GB/s."""
    return {f"links.{link}.rate": f"{rate:g} GB/s" for link in ("d2h", "h2d")}


def draws() -> Iterator[dict[str, str]]:
    """Every assumed figure of MT-3000 at random between half and twice its value, evenly in its logarithm."""
    from sim import load_profile
    from sim.advice.reasons import NUMBER

    figures = []
    for fact in load_profile("mt3000_survey").assumed:
        match = NUMBER.fullmatch(fact.text)
        if match and fact.path.startswith(("tiers.", "links.", "engines.dsp.")) and "copy_engines" not in fact.path:
            figures.append((fact.path, float(match[1]), match[2]))
    rng = random.Random(SEED)
    for _ in range(DRAWS):
        found = {}
        for path, value, unit in figures:
            drawn = value * 2 ** rng.uniform(-1, 1)
            found[path] = f"{min(drawn, 1.0) if not unit.strip() else drawn:.4g}{unit}"
        yield found


def key(part: str, name: str, where: str, figures: Mapping[str, str]) -> str:
    """The name of a comparison in the data."""
    changed = ", ".join(f"{path}={value}" for path, value in figures.items())
    return " | ".join([part, name, where, *([changed] if changed else [])])


def load() -> dict[str, Any]:
    """The data as far as they have been measured."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {}


def measure(parts: Sequence[str] = ()) -> None:
    """Run what is missing, of these parts or of all."""
    data = load()
    for part, name, where, figures, policies in runs():
        if parts and part not in parts:
            continue
        at = key(part, name, where, figures)
        missing = [policy for policy in policies if policy not in data.get(at, {}).get("rows", {})]
        if not missing:
            continue
        print(f"{at}: {len(missing)} policies", flush=True)
        data[at] = _cell(name, where, figures, missing, data.get(at, {}).get("rows", {}))
        _write(data)


def _cell(
    name: str, where: str, figures: Mapping[str, str], policies: Sequence[str], known: Mapping[str, Any]
) -> dict[str, Any]:
    from sim import compare

    platform = machine(where, figures)
    limit = budget(name, platform)
    rows = compare(job(name), platform, list(policies), budget=limit, find_floor=False).rows
    found = {row["policy"]: {each: row[each] for each in KEPT if row.get(each) is not None} for row in rows}
    if set(found) != set(policies):
        raise ValueError(f"{name} on {where}: {sorted(set(policies) ^ set(found))} have no row of their own name")
    links = [link.rate for link in platform.links if link.source == platform.home(0).name]
    return {"budget": limit, "rate": max(links, default=0), "rows": {**known, **found}}


def _write(data: Mapping[str, Any]) -> None:
    lines = [f"{json.dumps(at)}: {json.dumps(cell, sort_keys=True)}" for at, cell in sorted(data.items())]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
