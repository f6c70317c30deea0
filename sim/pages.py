"""Report pages of results: what `Result.report`, `Comparison.report` and `tiersim report` hand to `sim.report.page`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sim.hardware.platform import Platform
from sim.least_time import LowerBound
from sim.log import EventLog
from sim.policies.base import Policy
from sim.report.cells import approximate_lines, bound_lines, cancelled_lines, left_out_lines, ordered
from sim.report.footer import Footer
from sim.report.page import RunView, SavedView, TableView, write_run_page, write_table_page
from sim.rewrites.values import approximate
from sim.trace.described import workload_text
from sim.trace.graph import Trace
from sim.trace.provenance import assumption_notes, workload_notes

Links = tuple[tuple[str, str], ...]


class Run(Protocol):
    """What a page shows of a `Result`."""

    @property
    def policy(self) -> Policy:
        """Who planned it."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    @property
    def platform(self) -> Platform:
        """With the budget."""

    @property
    def log(self) -> EventLog:
        """What happened."""

    @property
    def warm_up(self) -> Sequence[object]:
        """The iterations before."""

    @property
    def bounds(self) -> tuple[str, ...]:
        """How near it is to what its policy has proven."""

    @property
    def owned_parts(self) -> tuple[str, ...]:
        """What each part of a composition owns."""

    @property
    def idle_parts(self) -> tuple[str, ...]:
        """What parts of a composition do nothing."""

    @property
    def bound(self) -> LowerBound | None:
        """The least time that any plan of a class takes, if it is known."""

    def summary(self) -> dict[str, Any]:
        """Its figures."""


class Compared(Protocol):
    """What a page shows of a `Comparison`."""

    @property
    def trace(self) -> Trace:
        """What was run."""

    @property
    def platform(self) -> Platform:
        """Without a budget."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """A record per policy."""

    @property
    def results(self) -> Mapping[str, Run]:
        """Of the policies that fit, by label."""

    @property
    def attempts(self) -> Mapping[str, Run]:
        """What ran of those that do not fit, by label."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Policies that were not run, and why."""

    @property
    def bounds(self) -> tuple[str, ...]:
        """How near runs are to what their policies have proven."""

    @property
    def idle_parts(self) -> tuple[str, ...]:
        """What parts of compositions do nothing."""


def run_view(result: Run, *, title: str = "", command: str = "", links: Links = ()) -> RunView:
    """A result as a page shows it.

    result: the run.
    title: heading, by default the policy's name.
    command: the command that reproduces the run.
    links: (text, target) pairs to show.
    """
    policy = result.policy
    footer = Footer(
        result.platform,
        warm_up=len(result.warm_up),
        command=command,
        workload=workload_text(result.log.trace.meta),
        trace=result.log.trace,
        notes=run_notes(result),
    )
    return RunView(
        title=title or result.name,
        log=result.log,
        summary=result.summary(),
        footer=footer,
        fidelity=policy.fidelity,
        manages=policy.manages,
        doc=inspect.getdoc(type(policy)) or "",
        links=links,
    )


def run_notes(result: Run) -> tuple[str, ...]:
    """Notes beside a run's figures: what is saved and proven, what parts own, idle or cancelled, what is lossy."""
    lossy = approximate_lines(approximate(result.log.trace))
    saved = (*result.policy.saving_lines(), *result.bounds)
    saved = saved if result.bound is None else (*saved, result.bound.line(result.log))
    return (*saved, *result.owned_parts, *result.idle_parts, *cancelled_lines(result.summary()), *lossy)


def comparison_view(comparison: Compared, *, command: str = "") -> TableView:
    """A comparison as a page shows it, with a view of each run."""
    ran = {**comparison.results, **comparison.attempts}
    runs = {name: run_view(result, title=name) for name, result in ran.items()}
    assumptions = workload_notes(comparison.trace)
    record = {
        "workload": comparison.trace.meta,
        "assumptions": assumptions,
        "rows": comparison.rows,
        "left_out": comparison.left_out,
    }
    bounds = (*comparison.bounds, *comparison.idle_parts)
    return saved_table(record, runs, platform=comparison.platform, command=command, bounds=bounds)


def saved_table(
    record: Mapping[str, Any],
    runs: Mapping[str, RunView | SavedView],
    *,
    platform: Platform | None,
    command: str = "",
    caution: Sequence[str] = (),
    bounds: Sequence[str] = (),
) -> TableView:
    """A saved comparison as a page shows it.

    record: `rows`, `left_out`, `workload`, `platform` and `bound` as saved.
    runs: a view of each run, by label.
    platform: None where its profile was not opened; the figures are then taken from the views.
    command: the command that reproduces the comparison.
    caution: warnings to show first.
    bounds: how near runs are to what their policies have proven.
    """
    meta = record["workload"]
    facts = {tuple(fact): None for run in runs.values() if isinstance(run, SavedView) for fact in run.data["facts"]}
    return TableView(
        title=str(meta.get("model", "trace")),
        lead=workload_text(meta).partition(", ")[2],
        subtitle=platform.name if platform else str(record["platform"]),
        labels=("policy",),
        rows=[{**row, "id": row["policy"]} for row in ordered(record["rows"])],
        platforms=[platform] if platform else [],
        facts=() if platform else list(facts),
        runs=runs,
        notes=[
            *record.get("assumptions", assumption_notes(meta)),
            *bounds,
            *bound_lines(record.get("bound", ""), record["rows"]),
            *left_out_lines(record["left_out"]),
        ],
        command=command,
        caution=caution,
    )


def report_run(result: Run, path: str | os.PathLike[str], *, command: str = "") -> Path:
    """Write the page of one run; see `Result.report`."""
    return write_run_page(run_view(result, command=command), path)


def report_comparison(comparison: Compared, path: str | os.PathLike[str], *, command: str = "") -> Path:
    """Write the page of a comparison; see `Comparison.report`."""
    return write_table_page(comparison_view(comparison, command=command), path)
