"""Studies: what a sweep runs. Lists are crossed; filters remove cells.

    model = ["gpt2"]
    batch = [1, 2]
    sequence = [512]
    profile = ["mt3000_survey"]
    policy = ["keep_all", "dtr"]

is a whole study of four cells. `docs/sweeps.md` shows the rest.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import ProfileError
from sim.hardware.profile import load_profile
from sim.layout import Layout, machine_for
from sim.regular_files import file_sum
from sim.sweeps.axes import COMPARISON, LAYOUT_KEYS, WORKLOAD_AXES, Chosen, StudyError, alternatives, budget_text
from sim.sweeps.cell import config_sum
from sim.sweeps.identity import digest, engine_version, policy_identity, workload_version

if TYPE_CHECKING:
    from sim.sweeps.schema import StudyFile


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    id: hash of all that its answer depends on.
    labels: its values in tables, axis by axis.
    task: the record that `sim.sweeps.cell` runs, JSON values only.
    group: cells of one group share a trace.
    """

    id: str
    labels: Mapping[str, Any]
    task: Mapping[str, Any]
    group: str


@dataclass(frozen=True)
class Study:
    """A checked study.

    source: its name in messages.
    file: its content.
    """

    source: str
    file: StudyFile
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, or that of its file."""
        return self.file.name or Path(self.source).stem

    def bounded(self) -> Study:
        """The same study, whose rows say how near each run is to the least time that any plan of a class takes."""
        return Study(self.source, self.file.model_copy(update={"bound": True}), {**self.raw, "bound": True})

    def cells(self) -> list[Cell]:
        """All cells in order, each once: traces outermost, policies innermost. Raises StudyError, TiersimError."""
        return _Expansion(self).cells()


def load_study(study: str | os.PathLike[str] | Mapping[str, Any] | Study) -> Study:
    """Read and check a study: a TOML file, or a dict with the same keys.

    Raises StudyError with every mistake, one line each: file, key, value, what was expected, the nearest name.
    """
    if isinstance(study, Study):
        return study
    from sim.sweeps.study_file import read_study  # pydantic's model of it takes longer to make than all else to import

    return Study(*read_study(study))


# ---- expansion -----------------------------------------------------------------------------------


class _Expansion:
    """The cells of a study; values that many of them share are looked up once."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.file = study.file
        self._nodes: dict[tuple[str, int, int], str] = {}

    def cells(self) -> list[Cell]:
        file = self.file
        self._check_number()
        figures = [dict(zip(file.figures, values, strict=True)) for values in product(*file.figures.values())]
        policies = [chosen for entry in file.policy for chosen in entry]
        identities = {chosen.label: policy_identity(chosen.policy) for chosen in policies}
        platforms = self._platforms(figures)
        found: dict[str, Cell] = {}
        layouts: list[Layout | None] = [layout for entry in file.parallel or () for layout in entry]
        for (workload, workload_sum, shown), layout in product(self._workloads(), layouts or [None]):
            parallel = None if layout is None else layout.said()
            group = digest([workload, parallel] if parallel else workload)
            for profile, (i, changed) in product(file.profile, enumerate(figures)):
                platform_sum = platforms[profile, i]
                node_sum = "" if layout is None else self._node(profile, i, changed, layout)
                repeats: list[int | None] = [*file.iterations] if file.iterations else [None]
                limits: list[float | None] = [*file.recompute_limit] if file.recompute_limit else [None]
                rest = product(file.budget, policies, file.seed, repeats, limits)
                for budget, chosen, seed, iterations, asked_limit in rest:
                    labels = {
                        **shown,
                        "profile": profile,
                        **changed,
                        **({} if layout is None else {"parallel": str(layout)}),
                        "policy": chosen.label,
                        "budget": budget_text(budget),
                        "seed": seed,
                        **({} if iterations is None else {"iterations": iterations}),
                        **({} if asked_limit is None else {"recompute_limit": asked_limit}),
                    }
                    limit = RECOMPUTE_LIMIT if asked_limit is None else asked_limit or None
                    known = {**workload, **labels, **_layout_values(layout)}
                    if not self._wanted(known, chosen):
                        continue
                    shared = [workload_sum, platform_sum, identities[chosen.label], budget, seed, iterations]
                    content = [*shared, *self._more(chosen, limit, parallel, node_sum)]
                    timeline = self._has_timeline(known, chosen)
                    id = digest([engine_version(), *content, timeline])
                    task = {
                        "id": id,
                        "workload": workload,
                        "profile": profile,
                        "figures": changed,
                        "parallel": parallel,
                        "policy": chosen.name,
                        "parameters": dict(chosen.parameters),
                        "budget": budget,
                        "seed": seed,
                        "iterations": iterations,
                        "recompute_limit": limit,
                        "timeline": timeline,
                        "bound": file.bound,
                        "time_limit_s": file.time_limit,
                        "sums": {
                            "profile": platform_sum,
                            "workload": workload_sum[0],
                            "policy": identities[chosen.label],
                        },
                    }
                    found.setdefault(id, Cell(id, labels, task, group))
        if not found:
            raise StudyError([f"{self.study.source}: no cell is left: skip and only take out all of them"])
        return list(found.values())

    def _more(
        self, chosen: Chosen, limit: float | None, parallel: dict[str, Any] | None, node_sum: str
    ) -> Iterator[Any]:
        """What else identifies a cell, as far as it can change a result."""
        if chosen.policy.recomputes and limit != RECOMPUTE_LIMIT:
            yield {"recompute_limit": limit}
        if parallel:
            yield {"parallel": parallel, "node": node_sum}
        if self.file.bound:
            yield "bound"

    def _check_number(self) -> None:
        """Raise StudyError, before any cell is built, if the axes cross to more cells than the study allows."""
        file = self.file
        axes: dict[str, list[Any]] = {"profile": file.profile, "budget": file.budget, "seed": file.seed, **file.figures}
        axes |= {"policy": [chosen for entry in file.policy for chosen in entry]}
        axes["parallel"] = [layout for entry in file.parallel or () for layout in entry] or [None]
        for key in ("trace",) if file.trace is not None else ("model", *WORKLOAD_AXES):
            axes[key] = getattr(file, key) or [None]
        axes |= {key: getattr(file, key) or [None] for key in ("iterations", "recompute_limit")}
        number = prod(map(len, axes.values()))
        if number > file.most_cells:
            longest = sorted(axes, key=lambda key: len(axes[key]), reverse=True)[:3]
            shown = ", ".join(f"{key} ({len(axes[key]):,})" for key in longest)
            text = f"the axes cross to {number:,} cells, and most_cells allows {file.most_cells:,}"
            raise StudyError([f"{self.study.source}: {text}; the longest are {shown}"])

    def _workloads(self) -> Iterator[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]]:
        """Arguments, what identifies them, and labels of every workload."""
        file = self.file
        if file.trace is not None:
            for path in file.trace:
                content = file_sum(Path(path))
                yield {"trace": path}, (content, workload_version()), {"trace": path}
            return
        from workloads.steps import config_identity

        axes: dict[str, list[Any]] = {key: getattr(file, key) for key in WORKLOAD_AXES if getattr(file, key)}
        for model in file.model or ():
            content = config_sum(config_identity(model))
            for values in product(*axes.values()):
                arguments = dict(zip(axes, values, strict=True))
                shown = {"model": model, **{k: v for k, v in arguments.items() if self._is_shown(k)}}
                yield {"model": model, **arguments}, (content, arguments, workload_version()), shown

    def _is_shown(self, key: str) -> bool:
        """Axes that every table has, and those that the study names."""
        return key in ("batch", "sequence", "precision") or key in self.study.raw

    def _platforms(self, figures: list[dict[str, str]]) -> dict[tuple[str, int], str]:
        """Hash of each profile with each set of changes."""
        found, problems = {}, []
        for profile in self.file.profile:
            for i, changed in enumerate(figures):
                try:
                    found[profile, i] = load_profile(profile, overrides=changed or None).content_hash
                except ProfileError as error:
                    problems += [f"{self.study.source}: figures: {problem}" for problem in error.problems]
        if problems:
            raise StudyError(list(dict.fromkeys(problems)))
        return found

    def _node(self, profile: str, i: int, changed: Mapping[str, str], layout: Layout) -> str:
        """Hash of a node with as many devices as a layout takes, and of what joins nodes, with one set of changes.

        One device has neither links to others nor a network.
        """
        key = profile, i, layout.devices
        if key not in self._nodes:
            try:
                machine = machine_for(profile, layout, changed or None)
            except ProfileError as error:  # which the cell then says, as its answer
                self._nodes[key] = str(error)
            else:
                self._nodes[key] = digest([machine.content_hash, repr(machine.networks)])
        return self._nodes[key]

    # ---- filters -----------------------------------------------------------------------------

    def _wanted(self, labels: Mapping[str, Any], chosen: Chosen) -> bool:
        file = self.file
        if file.only and not any(_matches(each, labels, chosen) for each in file.only):
            return False
        return not any(_matches(each, labels, chosen) for each in file.skip)

    def _has_timeline(self, labels: Mapping[str, Any], chosen: Chosen) -> bool:
        asked = self.file.timeline
        return asked if isinstance(asked, bool) else any(_matches(each, labels, chosen) for each in asked)


def _layout_values(layout: Layout | None) -> dict[str, Any]:
    """What filters may name of a layout: `parallel.pp` and the like."""
    return {} if layout is None else {f"parallel.{key}": getattr(layout, key) for key in LAYOUT_KEYS}


def _matches(condition: Mapping[str, Any], labels: Mapping[str, Any], chosen: Chosen) -> bool:
    """Whether a cell has all values of a filter."""
    values: dict[str, tuple[Any, ...]] = {key: (value,) for key, value in labels.items()}
    if "batch" in labels and "sequence" in labels:
        values["tokens"] = (labels["batch"] * labels["sequence"],)
    values["policy"] = (chosen.label, chosen.name)
    values |= {f"policy.{key}": (value,) for key, value in chosen.parameters}
    return all(
        any(_holds(value, wanted) for value in values.get(key, ()) for wanted in alternatives(asked))
        for key, asked in condition.items()
    )


def _holds(value: Any, wanted: Any) -> bool:
    comparison = COMPARISON.fullmatch(wanted.strip()) if isinstance(wanted, str) else None
    if comparison is None or isinstance(value, (bool, str)):
        return bool(value == wanted)
    sign, number = comparison[1], float(comparison[2])
    signs = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "!=": operator.ne}
    return bool(signs[sign](value, number))
