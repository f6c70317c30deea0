"""Report pages of results: what `Result.report`, `Comparison.report` and `tiersim report` hand to `sim.report.page`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.hardware.platform import Platform
from sim.report.cells import approximate_lines, cancelled_lines, ordered
from sim.report.footer import Footer
from sim.report.page import RunView, SavedView, TableView, write_run_page, write_table_page
from sim.rewrites.values import approximate

if TYPE_CHECKING:  # they import this file where they write a page
    from sim.comparison import Comparison
    from sim.experiment import Result

Links = tuple[tuple[str, str], ...]


def run_view(result: Result, *, title: str = "", command: str = "", links: Links = ()) -> RunView:
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


def run_notes(result: Result) -> tuple[str, ...]:
    """Notes beside the figures of a run: what its policy saves, the moves that were cancelled, what is approximate."""
    lossy = approximate_lines(approximate(result.log.trace))
    return (*result.policy.saving_lines(), *cancelled_lines(result.summary()), *lossy)


def comparison_view(comparison: Comparison, *, command: str = "") -> TableView:
    """A comparison as a page shows it, with a view of each run that fits."""
    runs = {name: run_view(result, title=name) for name, result in comparison.results.items()}
    record = {"workload": comparison.trace.meta, "rows": comparison.rows, "left_out": comparison.left_out}
    return saved_table(record, runs, platform=comparison.platform, command=command)


def saved_table(
    record: Mapping[str, Any],
    runs: Mapping[str, RunView | SavedView],
    *,
    platform: Platform | None,
    command: str = "",
    caution: Sequence[str] = (),
) -> TableView:
    """A saved comparison as a page shows it.

    record: `rows`, `left_out`, `workload` and `platform` as saved.
    runs: a view of each run that fits, by label.
    platform: None where its profile was not opened; the figures are then taken from the views.
    command: the command that reproduces the comparison.
    caution: warnings to show first.
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
            *(f"{row['policy']}: {line}" for row in ordered(record["rows"]) for line in cancelled_lines(row)),
            *(f"not run: {name}: {why}" for name, why in record["left_out"].items()),
        ],
        command=command,
        caution=caution,
    )


def report_run(result: Result, path: str | os.PathLike[str], *, command: str = "") -> Path:
    """Write the page of one run; see `Result.report`."""
    return write_run_page(run_view(result, command=command), path)


def report_comparison(comparison: Comparison, path: str | os.PathLike[str], *, command: str = "") -> Path:
    """Write the page of a comparison; see `Comparison.report`."""
    return write_table_page(comparison_view(comparison, command=command), path)


def workload_text(meta: Mapping[str, Any]) -> str:
    """A short description of a trace's workload."""
    known = [f"{key} {meta[key]}" for key in ("batch", "sequence", "precision", "attention") if key in meta]
    return ", ".join([str(meta.get("model", "trace")), *known])
