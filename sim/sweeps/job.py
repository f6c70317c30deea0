"""What a cell runs: its trace, divided as its layout says, and its platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.layout import Layout, lay_out, to_layout
from sim.trace.graph import Trace
from sim.trace.io import load as load_trace

Task = Mapping[str, Any]


def layout_of(task: Task) -> Layout:
    """The layout of a task; one device where it names none."""
    return to_layout(task.get("parallel"))


def undivided(task: Task) -> dict[str, Any]:
    """The arguments of the trace before a layout divides it: without a stack whose kernels are fused afterwards."""
    return {key: value for key, value in task["workload"].items() if key != "stack" or _kernels(task) is None}


def build(workload: Mapping[str, Any]) -> Trace:
    """The trace of these arguments of `training_step`, or of the file that `trace` names."""
    from workloads.steps import training_step

    arguments = dict(workload)
    return (
        load_trace(arguments["trace"]) if "trace" in arguments else training_step(arguments.pop("model"), **arguments)
    )


def divided(task: Task, trace: Trace) -> tuple[Trace, Platform]:
    """The trace as the task's layout divides it, and its platform with as many devices. Raises LayoutError."""
    figures, kernels = task["figures"] or None, _kernels(task)
    return lay_out(trace, task["profile"], layout_of(task), overrides=figures, kernels=kernels)


def job(task: Task) -> tuple[Trace, Platform]:
    """The trace of a task and its platform without a budget."""
    trace = build(undivided(task))
    return divided(task, trace) if task.get("parallel") else (trace, platform_of(task))


def platform_of(task: Task) -> Platform:
    """The platform of a task as its profile has it."""
    return load_profile(task["profile"], overrides=task["figures"] or None)


def _kernels(task: Task) -> Callable[[Trace], Trace] | None:
    from workloads.stacks import after_division

    layout = layout_of(task)
    return after_division(task["workload"].get("stack"), layout.tp * layout.cp * layout.ep)
