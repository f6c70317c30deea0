"""tiersim: a discrete-event simulator of heterogeneous accelerator memory.

    from sim import load_profile, simulate, compare
    from workloads import transformer

    platform = load_profile("mt3000_survey")
    trace = transformer("gpt2-medium", batch=4, sequence=1024, precision="amp_bf16")
    result = simulate(trace, platform, policy="delta", budget="7 GB")

A policy takes a trace (what is computed) and a platform (on what) and returns a plan. The engine replays the plan and
writes a log. Analyses read the log, and reports present their results.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.advice import Advice, advise
    from sim.applying import Exported, export
    from sim.comparison import Comparison, compare
    from sim.conformance import check_policy
    from sim.errors import (
        Deadlock,
        IllegalPlan,
        Infeasible,
        LayoutError,
        OutOfMemory,
        PolicyError,
        PolicyFailed,
        ProfileError,
        Thrashing,
        TiersimError,
        TraceError,
        UnitError,
        WorkloadError,
    )
    from sim.experiment import Result, simulate
    from sim.explanation import Explanation, explain
    from sim.hardware.platform import Platform
    from sim.hardware.profile import load_profile, profile_names
    from sim.layout import Layout, lay_out
    from sim.layout_search import LayoutSearch, search_layouts
    from sim.least_time import LowerBound, lower_bound
    from sim.log import EventLog
    from sim.plan import Drop, Memory, Move, Online, Plan, Problem, Recompute, Wait
    from sim.policies import load as load_policy
    from sim.policies import names as policy_names
    from sim.policies.base import Policy
    from sim.search import largest_batch, smallest_budget
    from sim.sweeps.sweep import sweep as sweep
    from sim.trace.builder import TraceBuilder
    from sim.trace.graph import Trace
    from sim.trace.io import load as load_trace
    from sim.trace.io import save as save_trace

_HOMES = {
    "sim.advice": ("Advice", "advise"),
    "sim.applying": ("Exported", "export"),
    "sim.conformance": ("check_policy",),
    "sim.errors": (
        *(
            "Deadlock",
            "IllegalPlan",
            "Infeasible",
            "OutOfMemory",
            "LayoutError",
            "PolicyError",
            "PolicyFailed",
            "ProfileError",
        ),
        *("Thrashing", "TiersimError", "TraceError", "UnitError", "WorkloadError"),
    ),
    "sim.comparison": ("Comparison", "compare"),
    "sim.experiment": ("Result", "simulate"),
    "sim.layout": ("Layout", "lay_out"),
    "sim.layout_search": ("LayoutSearch", "search_layouts"),
    "sim.explanation": ("Explanation", "explain"),
    "sim.search": ("largest_batch", "smallest_budget"),
    "sim.sweeps.sweep": ("sweep",),
    "sim.hardware.platform": ("Platform",),
    "sim.hardware.profile": ("load_profile", "profile_names"),
    "sim.log": ("EventLog",),
    "sim.least_time": ("LowerBound", "lower_bound"),
    "sim.plan": ("Drop", "Memory", "Move", "Online", "Plan", "Problem", "Recompute", "Wait"),
    "sim.policies": (("load_policy", "load"), ("policy_names", "names")),
    "sim.policies.base": ("Policy",),
    "sim.trace.builder": ("TraceBuilder",),
    "sim.trace.graph": ("Trace",),
    "sim.trace.io": (("load_trace", "load"), ("save_trace", "save")),
}
"""The module of each public name; it is imported on first access, so that the command line starts quickly."""

_PUBLIC = {
    (entry if isinstance(entry, str) else entry[0]): (module, entry if isinstance(entry, str) else entry[1])
    for module, entries in _HOMES.items()
    for entry in entries
}

__all__ = [  # noqa: RUF022  (in the order of first use)
    "load_profile",
    "profile_names",
    "simulate",
    "Layout",
    "lay_out",
    "LayoutSearch",
    "search_layouts",
    "compare",
    "sweep",
    "advise",
    "explain",
    "smallest_budget",
    "largest_batch",
    "lower_bound",
    "export",
    "Result",
    "Comparison",
    "Advice",
    "Exported",
    "Explanation",
    "LowerBound",
    "Platform",
    "Trace",
    "TraceBuilder",
    "load_trace",
    "save_trace",
    "EventLog",
    "Policy",
    "policy_names",
    "load_policy",
    "Problem",
    "Plan",
    "Drop",
    "Recompute",
    "Move",
    "Wait",
    "Online",
    "Memory",
    "check_policy",
    "TiersimError",
    "UnitError",
    "ProfileError",
    "TraceError",
    "WorkloadError",
    "LayoutError",
    "PolicyError",
    "PolicyFailed",
    "IllegalPlan",
    "Deadlock",
    "Infeasible",
    "Thrashing",
    "OutOfMemory",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
