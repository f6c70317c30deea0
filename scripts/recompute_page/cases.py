"""What is run: two whole transformers on one card, and each recomputation policy with the parameters tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sim.experiment import Prices, reference_run
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.policies import family, names, policy_class
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.relax_and_fix.least_bytes import least_bytes
from sim.policies.recompute.relax_and_fix.moment_search import LEVELS, MomentSearch
from sim.solvers.schedule import TraceIndex
from sim.trace.graph import Trace
from workloads import transformer

PROFILE = "a100_80_sxm"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.8)
"""Budgets, as parts of the way from the proven floor up to what keeping everything needs."""
BOUNDS = 40
"""Points of the curve of the bound."""
MOMENTS = 3
"""Programs that look for the moments of each of them."""


@dataclass(frozen=True)
class Job:
    """A trace: arguments of `workloads.transformer`."""

    title: str
    model: str | Mapping[str, Any]
    options: Mapping[str, Any]

    def trace(self) -> Trace:
        """A new trace of the model."""
        return transformer(self.model, **self.options)


JOBS = {
    "gpt2": Job(
        "GPT-2 medium, attention op by op",
        "gpt2-medium",
        {"batch": 8, "sequence": 1024, "precision": "amp_bf16", "attention": "eager", "optimizer": "adamw_fused"},
    ),
    "llama": Job(
        "Llama 2 7B, fused attention",
        "llama2-7b",
        {"batch": 4, "sequence": 2048, "precision": "bf16", "attention": "flash", "optimizer": "adamw_fused"},
    ),
}
DEEP = Job(
    "GPT-2 medium made 96 layers deep",
    {
        "model_type": "gpt2",
        "n_layer": 96,
        "n_embd": 1024,
        "n_head": 16,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    {"batch": 8, "sequence": 1024, "precision": "amp_bf16", "attention": "eager", "optimizer": "adamw_fused"},
)
DEEP_SHARE = 0.3


@dataclass(frozen=True)
class Entry:
    """A row of the tables: a policy and the sets of parameters of which the fastest that fits counts."""

    label: str
    policy: str
    tried: Sequence[Mapping[str, Any]] = field(default=({},))


STAGES = {"granularity": "stage", "max_ops": 60}
TUNED = (
    Entry("checkmate, MILP by stage", "checkmate", ({"method": "milp", "time_limit": 20.0, **STAGES},)),
    Entry("checkmate, LP rounding", "checkmate", ({"method": "rounding", **STAGES},)),
    Entry("moccasin", "moccasin", ({"work_limit": 3.0, "time_limit": 60.0, **STAGES},)),
    Entry("rotor", "rotor"),
    Entry("rotor, 2000 slots", "rotor", ({"slots": 2000},)),
    Entry("every_k", "every_k", tuple({"k": k} for k in (1, 2, 4, 8))),
    Entry("chen", "chen", ({}, *({"method": "sqrt", "segments": n} for n in (5, 12, 26)))),
    Entry("selective_recompute", "selective_recompute", ({}, {"recompute": "attention_core"})),
    Entry("dtr", "dtr", ({}, {"heuristic": "dtr"}, {"deallocation": "banish"}, {"deallocation": "ignore"})),
    Entry("megtaichi", "megtaichi", ({"parts": 1},)),
    Entry("megtaichi, batch in parts", "megtaichi", ({"parts": 2}, {"parts": 4})),
    Entry("tso", "tso"),
    Entry("tso, no graphs", "tso", ({"modes": ("eager", "checkpoint")},)),
    Entry("min_cut", "min_cut", ({}, {"aggressive": True})),
)
"""Where the defaults are not what one would take for a whole transformer, or where there are several ways."""


def entries() -> tuple[Entry, ...]:
    """Every recomputation policy of the registry, those without an entry of their own with their defaults."""
    own = {entry.policy for entry in TUNED}
    rest = [Entry(name, name) for name in names() if family(name) == "recompute" and name not in own]
    return tuple(sorted((*TUNED, *rest), key=lambda entry: entry.label))


def has_last_step(policy: str) -> bool | None:
    """Whether a policy removes unnecessary recomputation as it is published; None where it has no such step at all."""
    made = policy_class(policy)
    return made().remove_unnecessary if issubclass(made, RecomputationPlanner) else None


def other_ways(entry: Entry) -> list[dict[str, Any]]:
    """The parameters of an entry with that step where it is published without, and without where it is with."""
    has = has_last_step(entry.policy)
    return [] if has is None else [{**tried, "remove_unnecessary": not has} for tried in entry.tried]


@cache
def platform() -> Platform:
    """The card."""
    return load_profile(PROFILE)


def budget_at(floor: int, peak: int, share: float) -> int:
    """Bytes of a budget, to the MB above."""
    return math.ceil((floor + share * (peak - floor)) / 10**6) * 10**6


def facts(name: str, job: Job) -> dict[str, Any]:
    """What is known of a job before any policy is asked: its size, its floor, the bound at many budgets."""
    from sim.analysis.peak_memory import peak_bytes
    from sim.solvers.regions import chain_of

    trace, card = job.trace(), platform()
    log = reference_run(trace, card)
    peak = peak_bytes(log)[card.home(0).name]
    index, prices = TraceIndex(trace), Prices(trace, card)
    floor = least_bytes(index)
    search = MomentSearch(index, [prices.op_ns(op) for op in range(len(index.reads))])
    budgets = {budget_at(floor, peak, i / BOUNDS) for i in range(BOUNDS + 1)}
    budgets |= {budget_at(floor, peak, share) for share in SHARES}
    bounds = [(budget, proven(search, budget)) for budget in sorted(budgets)]
    from sim.experiment import problem_for

    return {
        "job": name,
        "title": job.title,
        "model": job.model,
        "options": dict(job.options),
        "ops": len(trace.ops),
        "stages": len(chain_of(problem_for(trace, card), "recompute")),
        "peak_bytes": peak,
        "activation_bytes": activation_bytes(log),
        "makespan_ns": log.end,
        "static_bytes": sum(index.size[t] for t, maker in enumerate(index.producer) if maker < 0),
        "floor_bytes": floor,
        "capacity_bytes": card.home(0).nominal,
        "bounds": [[budget, bound] for budget, bound in bounds if bound is not None],
    }


def proven(search: MomentSearch, budget: int) -> int | None:
    """The bound, ns, from the moments that a search of a few programs meets first; None where nothing fits."""
    return search.bound(search.dive(budget, LEVELS[0], MOMENTS).moments, budget)


def activation_bytes(log: Any) -> int:
    """The most bytes of activations at once."""
    from sim.analysis.peak_memory import roles_over_time

    return int(roles_over_time(log)["activation"].max())
