"""The question that a search answers: a workload, a machine, a budget, and what may be changed about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from sim.analysis.peak_memory import home_peak
from sim.errors import Infeasible, ProfileError, TiersimError, WorkloadError, near
from sim.experiment import check_trace, reference_run
from sim.floors import largest_op
from sim.hardware.cost import op_times
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.layout import to_layout
from sim.least_time import LowerBound, lower_bound
from sim.sweeps.axes import WORKLOAD_AXES
from sim.sweeps.job import build, job
from sim.sweeps.study import Cell, load_study
from sim.trace.graph import Trace
from sim.trace.io import save

GOALS = ("throughput", "memory", "batch")
OPEN = {"precision": "amp_bf16", "optimizer": "adamw_foreach"}
"""Options of a workload that change the training itself, and what studies take where they are not given; they are
searched only where the question leaves them open."""
BOUND_S = 5.0
"""Seconds that solving for a bound may take; without a solution it is that of the ops alone."""


class Steps:
    """What a function makes of each batch, made once, with a file of each for the processes of a search.

    make: the trace of a batch. folder: where the files are written.
    """

    def __init__(self, make: Callable[[int], Trace], folder: Path) -> None:
        self._make, self._folder = make, folder
        self._made: dict[int, Trace] = {}

    def at(self, batch: int) -> Trace:
        """The trace of a batch. Raises WorkloadError, and TraceError where it is none."""
        if batch not in self._made:
            try:
                trace = self._make(batch)
            except WorkloadError as error:
                raise WorkloadError(f"at batch {batch}: {error}; give a batch for the search to keep to") from error
            check_trace(trace)
            facts = {"samples": batch, **trace.meta, "batch": batch}
            columns = (trace.tensor_columns, trace.op_columns)
            self._made[batch] = Trace(*columns, outputs=trace.outputs, carry=trace.carry, meta=facts)
            save(self._made[batch], self.file(batch))
        return self._made[batch]

    def file(self, batch: int) -> Path:
        """Where the trace of a batch is kept once it is made."""
        return self._folder / f"batch-{batch}.trace.json.gz"


@dataclass(frozen=True)
class Question:
    """What is asked.

    workload: keys of a study that make the trace: `model` and its axes, or `trace`, a file; or `batch` alone, of steps.
    profile: the name or file of a hardware profile.
    figures: what is changed in it, by path.
    budget: bytes of each device's home tier, None for its capacity.
    goal: one of `GOALS`.
    seed: of policies that draw random numbers.
    policies: the only ones to try; None for all that may help.
    parallel: keys of the layout over devices, None for one device.
    layouts: other layouts that are left to the search.
    open: of the options `OPEN` those that are left to the search, with the values to try.
    steps: where a function makes the trace of each batch.

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
    layouts: tuple[Mapping[str, Any], ...] = ()
    open: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steps: Steps | None = None

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise TiersimError(f"goal {self.goal!r} is unknown{near(self.goal, GOALS)}")
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
            **self._source,
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
        cells = load_study(study).cells()
        return [replace(cell, labels={**cell.labels, **self.workload}) for cell in cells] if self.steps else cells

    @property
    def _source(self) -> Mapping[str, Any]:
        """Keys of a study that make the trace."""
        if self.steps is None:
            return self.workload
        self.steps.at(self.workload["batch"])
        return {"trace": str(self.steps.file(self.workload["batch"]))}

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
        if self.steps is not None:
            return self.steps.at(self.workload["batch"])
        return self._divided[0] if self.parallel else build(self._made_of)

    @cached_property
    def variants(self) -> list[Question]:
        """The question with each combination of what it leaves open; itself alone where that is nothing."""
        if not self.open and not self.layouts:
            return [self]
        every = product((self.parallel, *self.layouts), product(*self.open.values()))
        return [
            replace(self.changed(**dict(zip(self.open, values, strict=True))), open={}, parallel=layout, layouts=())
            for layout, values in every
        ]

    @property
    def layout(self) -> str | None:
        """The layout over devices as rows name it; None for one device."""
        return str(to_layout(self.parallel)) if self.parallel else None

    @cached_property
    def kept(self) -> tuple[int, int] | None:
        """Time in ns and peak in bytes of everything kept in unlimited memory; None where it cannot run even there."""
        try:
            log = reference_run(self.trace, self.platform)
        except Infeasible:
            return None
        return log.end, home_peak(log)

    @cached_property
    def largest_op(self) -> tuple[str, int]:
        """The op of forward or backward that holds most, and its bytes; see `sim.floors.largest_op`."""
        return largest_op(self.trace, self.platform)

    @property
    def exceeds(self) -> bool:
        """Whether one op alone holds more than the budget, so that nothing fits that does not split it."""
        return self.largest_op[1] > self.limited.home(0).capacity

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
        usual = {"batch": 1, "sequence": 1024, "precision": OPEN["precision"]}
        return dict(self.workload) if self.is_fixed else {**usual, **self.workload}

    @cached_property
    def _divided(self) -> tuple[Trace, Platform]:
        """The trace and the machine of a layout."""
        task = {"profile": self.profile, "figures": self.figures, "parallel": self.parallel, "workload": self._made_of}
        return job(task)


def left_open(made: Mapping[str, Any], profile: str, figures: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """What a workload leaves open: of `OPEN` each with several values, with commas between them, or with `any`.

    `any` stands for all values with which the workload can be made and the machine can train it, each tried beside the
    usual value of the other option.

    Raises WorkloadError where none of them is.
    """
    from workloads.transformer import CHOICES

    found: dict[str, tuple[str, ...]] = {}
    usual = {name: value for name, value in made.items() if name not in OPEN or _is_one(value)}
    for name in OPEN:
        value = made.get(name)
        if value is None or _is_one(value):
            continue
        if value != "any":
            found[name] = tuple(dict.fromkeys(value.split(",") if isinstance(value, str) else value))
            continue
        every = [Question({**usual, name: each}, profile, figures) for each in CHOICES[name]]
        found[name] = tuple(str(each.workload[name]) for each in every if _can_run(each))
        if not found[name]:
            raise WorkloadError(
                f"{name} 'any': this machine can run this workload with none of {', '.join(CHOICES[name])}"
            )
    return found


def _is_one(value: Any) -> bool:
    """Whether an option has one value."""
    return isinstance(value, str) and value != "any" and "," not in value


def _can_run(asked: Question) -> bool:
    """Whether there is such a workload, and the machine has what it computes with."""
    try:
        op_times(asked.trace, asked.platform)
    except (ProfileError, WorkloadError):
        return False
    return True


def question(
    workload: str | os.PathLike[str] | Trace | Callable[[int], Trace],
    platform: str | os.PathLike[str],
    folder: Path,
    *,
    axes: Mapping[str, Any],
    **rest: Any,
) -> Question:
    """The question about a model by name or configuration, about a trace, or about what a function makes of a batch.

    folder: where traces that are not files are written.
    axes: options of `transformer`; of `OPEN` several values, with commas between them, or `any`.

    Raises ProfileError, WorkloadError, TiersimError.
    """
    if isinstance(platform, Platform):
        raise TiersimError("advise takes the name or file of a profile, and `figures` for what is changed in it")
    if isinstance(workload, (str, os.PathLike)):
        made: dict[str, Any] = {"model": os.fspath(workload), **axes}
        rest["open"] = left_open(made, os.fspath(platform), rest.get("figures") or {})
        made |= {name: values[0] for name, values in rest["open"].items()}
    elif callable(workload):
        if wrong := [name for name in axes if name != "batch"]:
            raise WorkloadError(f"{wrong[0]}: of a function the search chooses the batch alone")
        made, rest["steps"] = dict(axes), Steps(workload, folder)
    else:
        check_trace(workload)
        if axes:
            raise WorkloadError(f"{next(iter(axes))}: a trace is fixed; name a model to change it")
        save(workload, folder / "workload.trace.json.gz")
        made = {"trace": str(folder / "workload.trace.json.gz")}
    asked = Question(made, os.fspath(platform), **rest)
    asked.platform.home(0)  # a fault of the profile is said before anything runs
    return asked
