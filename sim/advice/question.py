"""The question that a search answers: a workload, a machine, a budget, and what may be changed about them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sim.errors import ProfileError, TiersimError, WorkloadError, near
from sim.experiment import check_trace
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.least_time import LowerBound, lower_bound
from sim.sweeps.job import build, job
from sim.sweeps.schema import WORKLOAD_AXES
from sim.sweeps.study import Cell, load_study
from sim.trace.graph import Trace

GOALS = ("throughput", "memory", "batch")
BOUND_S = 5.0
"""Seconds that solving for a bound may take; without a solution it is that of the ops alone."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    workload: keys of a study that make the trace: `model` and its axes, or `trace`, a file.
    profile: the name or file of a hardware profile.
    figures: what is changed in it, by path.
    budget: bytes of each device's home tier, None for its capacity.
    goal: one of `GOALS`.
    seed: of policies that draw random numbers.
    policies: the only ones to try; None for all that may help.
    parallel: keys of the layout over devices, None for one device.

    Raises TiersimError, WorkloadError.
    """

    workload: Mapping[str, Any]
    profile: str
    figures: Mapping[str, str] = field(default_factory=dict)
    budget: int | None = None
    goal: str = "throughput"
    seed: int = 0
    policies: tuple[str, ...] | None = None
    parallel: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise TiersimError(f"goal {self.goal!r}: expected one of {', '.join(GOALS)}{near(self.goal, GOALS)}")
        wrong = [key for key in self.workload if key not in ("model", "trace", *WORKLOAD_AXES)]
        if wrong:
            raise WorkloadError(f"{wrong[0]}: there is no such option of a workload{near(wrong[0], WORKLOAD_AXES)}")

    @property
    def is_fixed(self) -> bool:
        """Whether the workload is a trace, of which nothing can be changed."""
        return "trace" in self.workload

    @cached_property
    def platform(self) -> Platform:
        """The machine, without the budget, with as many devices as the layout takes."""
        return self._divided[1] if self.parallel else load_profile(self.profile, overrides=self.figures or None)

    @property
    def limited(self) -> Platform:
        """The machine with the budget."""
        return self.platform if self.budget is None else self.platform.with_budget(self.budget)

    def cells(self, policies: Iterable[str], *, limit_s: float | None = None) -> list[Cell]:
        """A cell of a sweep per policy. Raises StudyError."""
        study: dict[str, Any] = {
            **self.workload,
            "profile": self.profile,
            "policy": list(policies),
            "seed": self.seed,
            "figures": {path: [value] for path, value in self.figures.items()},
        }
        if self.parallel:
            study["parallel"] = dict(self.parallel)
        if self.budget is not None:
            study["budget"] = f"{self.budget} B"
        if limit_s is not None:
            study["time_limit"] = f"{max(1, round(limit_s * 1000))} ms"
        return load_study(study).cells()

    def changed(self, **workload: Any) -> Question:
        """The same question about a changed workload."""
        new = {**self.workload, **workload}
        return self if new == self.workload else replace(self, workload=new)

    @property
    def ops(self) -> int:
        """How many ops the trace has."""
        return len(self.trace.op_columns.name)

    @cached_property
    def trace(self) -> Trace:
        """The trace itself, divided as the layout says. Raises WorkloadError, TraceError or LayoutError."""
        return self._divided[0] if self.parallel else build(self._made_of)

    @cached_property
    def bound(self) -> LowerBound | None:
        """The least time that any plan of a class takes within the budget; None where an op can't run on its engine."""
        try:
            return lower_bound(self.trace, self.limited, seconds=BOUND_S)
        except ProfileError:
            return None

    @property
    def _made_of(self) -> dict[str, Any]:
        """The arguments of the trace, with what studies have in place of what is not given."""
        usual = {"batch": 1, "sequence": 1024, "precision": "amp_bf16"}
        return dict(self.workload) if self.is_fixed else {**usual, **self.workload}

    @cached_property
    def _divided(self) -> tuple[Trace, Platform]:
        """The trace and the machine of a layout."""
        task = {"profile": self.profile, "figures": self.figures, "parallel": self.parallel, "workload": self._made_of}
        return job(task)


def question(
    workload: str | os.PathLike[str] | Trace,
    platform: str | os.PathLike[str],
    folder: Path,
    *,
    axes: Mapping[str, Any],
    **rest: Any,
) -> Question:
    """The question about a model by name or configuration, or about a trace.

    folder: where a trace that is not a file is written.
    axes: options of `transformer`.

    Raises ProfileError, WorkloadError, TiersimError.
    """
    if isinstance(platform, Platform):
        raise TiersimError("advise takes the name or file of a profile, and `figures` for what is changed in it")
    if isinstance(workload, (str, os.PathLike)):
        made: dict[str, Any] = {"model": os.fspath(workload), **axes}
    else:
        check_trace(workload)
        if axes:
            raise WorkloadError(f"{next(iter(axes))}: a trace is fixed; name a model to change it")
        from sim.trace.io import save

        save(workload, folder / "workload.trace.json.gz")
        made = {"trace": str(folder / "workload.trace.json.gz")}
    asked = Question(made, os.fspath(platform), **rest)
    asked.platform.home(0)  # a fault of the profile is said before anything runs
    return asked
