"""What docs/mt3000.md is made from: jobs, machines and policies, and the runs of each part of the study.

Each run is kept under a key of its own in docs/mt3000.json, so that a measurement that was stopped goes on where it
was, and one policy can be measured again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim import Platform, Trace

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "mt3000.json"

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 3584,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""Eight experts a layer, 1.1 B parameters: Mixtral's shape at a sixteenth of its layers' size; no published model."""
LONG = {"attention": "flash", "loss": "chunked"}
"""What 32 k tokens are trained with: neither scores nor logits of all tokens are held."""
JOBS: Mapping[str, Mapping[str, Any]] = {
    "GPT-2": {"model": "gpt2", "batch": 12, "sequence": 1024, "precision": "amp_fp16"},
    "GPT-2 medium": {"model": "gpt2-medium", "batch": 4, "sequence": 1024, "precision": "amp_fp16"},
    "GPT-2 XL": {"model": "gpt2-xl", "batch": 1, "sequence": 1024, "precision": "amp_fp16"},
    "BERT-large": {"model": "bert-large", "batch": 16, "sequence": 512, "precision": "amp_fp16"},
    "Llama 1B": {"model": "llama-1b", "batch": 1, "sequence": 2048, "precision": "mixed_fp16"},
    "small Mixtral": {"model": MIXTRAL, "batch": 1, "sequence": 2048, "precision": "mixed_fp16"},
    "Llama 1B, 32 k": {"model": "llama-1b", "batch": 1, "sequence": 32768, "precision": "mixed_fp16", **LONG},
    "Llama 2 7B": {"model": "llama2-7b", "batch": 1, "sequence": 2048, "precision": "mixed_fp16"},
}  # fmt: skip
SAID = ("model", "precision", "batch", "sequence")
"""Options that the page gives a column."""
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
    *("keep_all", "full_recompute", "chen(method=sqrt)", "rotor", "sac_knapsack", "tso"),
    *("swap_all", "vdnn_pp", "offload_activations", "g10", "lru_tiering"),
    *("capuchin", "delta", "mt3000_layered", "hybrid"),
)
STATE = (
    *("zero_offload", "superoffload", "stronghold", "optimizer_in_backward"),
    "zero_offload(weights=host) + weight_streaming",
)
BESIDE = ("full_recompute", "swap_all", "hybrid")
STACKS = tuple(f"{below} + {beside}" for below in STATE for beside in BESIDE)
RIVALS = ("full_recompute", "rotor", "sac_knapsack", "swap_all", "vdnn_pp", "g10", "hybrid")
RATES = (2.5, 5, 10, 20, 40, 80)
ONE_WAY = (2.5, 5, 10, 20)
LARGE = ("GPT-2 XL", "Llama 1B", "small Mixtral", "Llama 1B, 32 k", "Llama 2 7B")
"""Jobs whose weights, gradients and optimizer state exceed the zone: state policies are tried beside the others."""
SWEPT = ("GPT-2 medium", "BERT-large")
"""Jobs whose state the zone holds, so that recomputing and copying activations can be told apart."""
DRAWS, SEED = 100, 1
DRAWN = ("full_recompute", "sac_knapsack", "swap_all", "g10", "hybrid")
STACKS_DRAWN = ("eager", "compiled", "fused")
"""Stacks of which each draw of `chosen` has one, each as likely."""
CHOSEN: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "GPT-2": (40, DRAWN),
    "GPT-2 medium": (40, DRAWN),
    "BERT-large": (40, DRAWN),
    "GPT-2 XL": (15, ("g10", "zero_offload + full_recompute", "zero_offload + swap_all")),
    "Llama 1B": (15, ("g10", "zero_offload + full_recompute", "zero_offload + swap_all")),
}
"""Jobs of which it is drawn at random what is the fastest: how often, and of which policies."""
ELSEWHERE, ELSEWHERE_DRAWS = ("mt3000_cluster", "ascend_910b", "pcie_domestic_low"), 15
"""Other machines on which the jobs of `SWEPT` are drawn as those of `CHOSEN` are, and how often each."""
FUSED = ("GPT-2", "GPT-2 medium", "BERT-large")
"""Jobs that are run with fused kernels, too."""
TOGETHER = ("GPT-2 medium", "GPT-2 XL", "Llama 1B", "Llama 2 7B")
"""Jobs that are divided over clusters and nodes, with a batch of `BATCH` samples."""
BATCH = 16
PIPELINE = {"schedule": "1f1b", "micro_batches": 8}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp 4": {"dp": 4},
    "dp 4, zero 3": {"dp": 4, "zero": 3},
    "pp 4": {"pp": 4, **PIPELINE},
    "tp 4": {"tp": 4, "sequence_parallel": True},
    "dp 2, pp 4": {"dp": 2, "pp": 4, **PIPELINE},
    "tp 4, pp 4": {"tp": 4, "pp": 4, "sequence_parallel": True, **PIPELINE},
    "dp 16, zero 3": {"dp": 16, "zero": 3},
}
"""Layouts over clusters: four of them are a node."""
UNDIVIDED = {"GPT-2 XL": ("tp 4", "tp 4, pp 4")}
"""Layouts that a job has no place for: its 25 heads do not divide by four."""
INSIDE = ("keep_all", "full_recompute", "sac_knapsack", "swap_all", "hybrid", "zero_offload + full_recompute")
KEPT = (
    *("fits", "makespan_ns", "peak_bytes", "recompute_ns", "codec_ns", "stall_ns", "moved_bytes", "overhead"),
    *("unlimited_ns", "refusal"),
)


@dataclass(frozen=True)
class Run:
    """One comparison of the study: policies on a job and a machine.

    figures: changed figures of the machine.
    options: changed options of the job.
    layout: a key of `LAYOUTS`, or "" for one device.
    """

    part: str
    job: str
    machine: str
    figures: Mapping[str, str]
    policies: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""

    @property
    def key(self) -> str:
        """The name of the comparison in the data."""
        changed = ", ".join(f"{path}={value}" for path, value in self.figures.items())
        words = [self.part, self.job, self.machine, changed, self.layout]
        return " | ".join(word for word in words if word)


def job(name: str, options: Mapping[str, Any] | None = None) -> Trace:
    """The trace of a job, with changed options."""
    return _job(name, tuple(sorted((options or {}).items())))


@cache
def _job(name: str, changed: tuple[tuple[str, Any], ...]) -> Trace:
    from workloads import transformer

    options = {**JOBS[name], **dict(changed)}
    return transformer(options.pop("model"), **options)


def wanted(name: str, options: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """The bytes that a job holds at its peak if nothing is done about it, and its bytes of state alone."""
    return _wanted(name, tuple(sorted((options or {}).items())))


@cache
def _wanted(name: str, changed: tuple[tuple[str, Any], ...]) -> tuple[int, int]:
    from sim import load_profile, simulate
    from sim.advice.state import state_of

    machine, trace = load_profile("mt3000_survey"), _job(name, changed)
    peak = simulate(trace, machine, budget=1 << 50).summary()["peak_bytes"]
    return int(peak), state_of(trace, machine).bytes


def machine(name: str, figures: Mapping[str, str] | None = None) -> Platform:
    """A machine of the study, with changed figures."""
    from sim import load_profile

    return load_profile(name, overrides={**MACHINES[name], **(figures or {})})


def budget(run: Run, platform: Platform) -> int:
    """What a job gets on a machine: all that there is, or `SHARE` of what it wants where that is less."""
    most = platform.home(0).capacity
    return most if run.layout else min(most, int(SHARE * wanted(run.job, run.options)[0]))


def runs() -> Iterator[Run]:
    """Every comparison of the study."""
    for name in JOBS:
        for where in MACHINES:
            yield Run("machines", name, where, {}, (*SINGLE, *(STACKS if name in LARGE else ())))
    for name in SWEPT:
        for rate in RATES:
            yield Run("rates", name, "mt3000_survey", both(rate), RIVALS)
    for rate in ONE_WAY:
        for link in ("d2h", "h2d"):
            figures = {f"links.{link}.rate": f"{rate:g} GB/s"}
            yield Run(f"{link} alone", "GPT-2 medium", "mt3000_survey", figures, RIVALS)
    for figures in draws():
        yield Run("draws", "GPT-2 medium", "mt3000_survey", figures, DRAWN)
    for name, (_, policies) in CHOSEN.items():
        for figures, stack in drawn(name):
            yield Run("chosen", name, "mt3000_survey", figures, policies, options={"stack": stack})
    for name in SWEPT:
        for where in ELSEWHERE:
            for figures, stack in drawn(name, where):
                yield Run("elsewhere", name, where, figures, DRAWN, options={"stack": stack})
    for name in FUSED:
        for where in MACHINES:
            yield Run("fused", name, where, {}, RIVALS, options={"stack": "fused"})
    for name in TOGETHER:
        for layout in (each for each in LAYOUTS if each not in UNDIVIDED.get(name, ())):
            yield Run("clusters", name, "mt3000_cluster", {}, INSIDE, options={"batch": BATCH}, layout=layout)


def both(rate: float) -> dict[str, str]:
    """Both links at a rate in GB/s."""
    return {f"links.{link}.rate": f"{rate:g} GB/s" for link in ("d2h", "h2d")}


def draws() -> Iterator[dict[str, str]]:
    """The assumed figures of MT-3000's device, memories and links at random, `DRAWS` times."""
    rng, figures = random.Random(SEED), assumed(("tiers.", "links.", "engines.dsp."))
    for _ in range(DRAWS):
        yield _drawn(figures, rng)


def drawn(name: str, where: str = "") -> Iterator[tuple[dict[str, str], str]]:
    """Every assumed figure of a machine at random, by default of MT-3000, and a stack, as often as a job is drawn."""
    rng = random.Random(" ".join(filter(None, (str(SEED), name, where))))
    figures = assumed(("tiers.", "links.", "engines."), where or "mt3000_survey")
    for _ in range(ELSEWHERE_DRAWS if where else CHOSEN[name][0]):
        yield _drawn(figures, rng), rng.choice(STACKS_DRAWN)


@cache
def assumed(parts: tuple[str, ...], where: str = "mt3000_survey") -> tuple[tuple[str, float, str], ...]:
    """Assumed figures of these parts of a machine but counts and sizes, each with its value and unit."""
    from sim import load_profile
    from sim.advice.reasons import BESIDE_TIME, NUMBER

    facts = [(fact.path, NUMBER.fullmatch(fact.text)) for fact in load_profile(where).assumed]
    return tuple(
        (path, float(match[1]), match[2])
        for path, match in facts
        if match and path.startswith(parts) and not path.endswith(("copy_engines", *BESIDE_TIME))
    )


def _drawn(figures: Sequence[tuple[str, float, str]], rng: random.Random) -> dict[str, str]:
    """Each figure between half and twice its value, evenly in its logarithm; no part of a whole above 1."""
    found = {}
    for path, value, unit in figures:
        other = value * 2 ** rng.uniform(-1, 1)
        found[path] = f"{min(other, 1.0) if not unit.strip() else other:.4g}{unit}"
    return found


def load() -> dict[str, Any]:
    """The data as far as they have been measured."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {}


def measure(parts: Sequence[str] = ()) -> None:
    """Run what is missing, of these parts or of all, in a process per processor."""
    from sim.sweeps.pool import usable_cpus

    data = load()
    with ProcessPoolExecutor(usable_cpus()) as pool:
        found: dict[Future[dict[str, Any]], Run] = {}
        for run in runs():
            known = data.get(run.key, {}).get("rows", {})
            missing = [policy for policy in run.policies if policy not in known]
            if missing and (not parts or run.part in parts):
                found[pool.submit(_cell, run, missing, known)] = run
        for future in as_completed(found):
            run = found.pop(future)
            data[run.key] = future.result()
            print(f"{run.key}: {len(data[run.key]['rows'])} policies", flush=True)
            _write(data)


def _cell(run: Run, policies: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    from sim import compare

    trace, platform = placed(run)
    limit = budget(run, platform)
    rows = compare(trace, platform, list(policies), budget=limit, find_floor=False).rows
    found = {row["policy"]: {each: row[each] for each in KEPT if row.get(each) is not None} for row in rows}
    if set(found) != set(policies):
        raise ValueError(f"{run.key}: {sorted(set(policies) ^ set(found))} have no row of their own name")
    links = [link.rate for link in platform.links if link.source == platform.home(0).name]
    return {"budget": limit, "rate": max(links, default=0), "rows": {**known, **found}}


def placed(run: Run) -> tuple[Trace, Platform]:
    """The trace and the machine of a comparison, divided as its layout says."""
    trace = job(run.job, run.options)
    if not run.layout:
        return trace, machine(run.machine, run.figures)
    from sim.layout import lay_out, to_layout

    return lay_out(trace, run.machine, to_layout(LAYOUTS[run.layout]))


def _write(data: Mapping[str, Any]) -> None:
    lines = [f"{json.dumps(at)}: {json.dumps(cell, sort_keys=True)}" for at, cell in sorted(data.items())]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
