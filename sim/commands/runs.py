"""run, compare, demo and check."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.commands.declaring import FORMATS, Option, answer, defaults, takes
from sim.commands.options import (
    BUDGET,
    JOBS,
    JSON,
    LAYOUT,
    OUT,
    PARAM,
    PROFILE,
    REPLAY,
    SEED,
    SET,
    WORKLOAD,
    about_run,
    budget_of,
    command_line,
    command_with,
    job_of,
    limit_of,
    names_of,
    parameters,
    say,
)
from sim.commands.progress import told
from sim.limits import RUN_SECONDS, SECONDS, calling

if TYPE_CHECKING:
    from sim.comparison import Comparison
    from sim.experiment import Result

WRITTEN = "name, path/to/file.py:Class, either with (parameter=value), or several: 'zero_offload + rotor(slots=200)'"
POLICY = Option(
    "policy",
    Annotated[str, typer.Option(help=WRITTEN)],
    "keep_all",
)
POLICIES = Option(
    "policies", Annotated[str | None, typer.Option(help="a,b + c,…; default: all that apply and plan quickly")], None
)
ANALYSIS = Option(
    "analysis",
    Annotated[
        list[str] | None,
        typer.Option(help="print a further analysis of the run: {analyses}; may be given more than once"),
    ],
    None,
)
FLOORS = Option(
    "floors",
    Annotated[
        bool,
        typer.Option(
            "--floors",
            help="search the smallest budget of each policy that does not fit; default: of those that one replay tells",
        ),
    ],
    False,
)
FIGURES = Option(
    "figures", Annotated[str | None, typer.Option(help="draw figures into the folder of -o: png, svg or pdf")], None
)
NOTES = Option(
    "notes", Annotated[bool, typer.Option("--notes", help="print every note, and why each misfit does not fit")], False
)
BOUND = Option(
    "bound",
    Annotated[
        bool,
        typer.Option(
            "--bound/--no-bound", help="say how near a run is to the least time that any plan of its class takes"
        ),
    ],
    True,
)
TIME_LIMIT = Option(
    "time_limit",
    Annotated[float, typer.Option(help="seconds of processor time per policy, in check per example; 0: none", min=0)],
    RUN_SECONDS,
)
MOST_ACTIONS = Option(
    "most_actions",
    Annotated[int | None, typer.Option(help="actions that a plan may have; default: 10,000 and 50 per op", min=1)],
    None,
)
LIMITS = (TIME_LIMIT, MOST_ACTIONS)
RUN = (PROFILE, POLICY, *WORKLOAD, *LAYOUT, BUDGET, SET, PARAM, *REPLAY, *LIMITS, ANALYSIS, BOUND, OUT, JSON)
COMPARED = (
    *(PROFILE, *WORKLOAD[:2], POLICIES, *WORKLOAD[2:], *LAYOUT, BUDGET, SET, *REPLAY),
    *(*LIMITS, FLOORS, BOUND, JOBS, OUT, FIGURES, NOTES, JSON),
)


def _what_fits(options: Mapping[str, Any]) -> str:
    """The command that finds what fits where a run does not, "" where its layout cannot be asked for there."""
    if any(options[name] != default for name, default in defaults(LAYOUT).items()):
        return ""
    from workloads.steps import is_reference

    usual: dict[str, Any] = {option.name: option.default for option in (PROFILE, *WORKLOAD, BUDGET, SET)}
    if options["model"] and not is_reference(options["model"]):  # without a batch `advise` chooses one
        usual["batch"] = None
    asked = {name: value for name, value in options.items() if name in usual and value and value != usual[name]}
    return command_with("advise", asked)


@takes(*RUN)
def run(ctx: typer.Context, **options: Any) -> None:
    """Run one policy and print its figures."""
    from sim.analysis.registry import analysis, as_records
    from sim.comparison import compare as run_all
    from sim.errors import Deadlock, Infeasible
    from sim.experiment import simulate
    from sim.outputs import check_folder, to_json, write_analyses, write_run
    from sim.report.error_bars import STATED, statement_errors

    policy, out, json = options["policy"], options["out"], options["json"]
    asked = {name: analysis(name) for name in options["analysis"] or ()}
    folder = check_folder(out, "run") if out else None
    platform, work = job_of({"ctx": ctx, **options})
    given, limit = parameters(options["param"]), budget_of(options["budget"], work, platform)
    how: dict[str, Any] = {"budget": limit, "seed": options["seed"], "iterations": options["iterations"]}
    how |= limit_of(options["recompute_limit"])
    try:
        with calling(policy):
            result = simulate(work, platform, policy, **how, **given)
            result.summary()  # asks the policy, too, and must not do so when half of the folder has been written
    except (Infeasible, Deadlock) as error:
        if folder and (attempt := getattr(error, "attempt", None)) is not None:
            for path in write_run(attempt, folder, about=about_run({**options, "ctx": ctx}, platform, work, [policy])):
                say(f"wrote {path}")
        if isinstance(error, Infeasible) and (command := _what_fits(options)):
            error.add_note(f"what fits: {command}")
        if json:
            (row,) = run_all(work, platform, [(policy, given)], **how).rows
            answer(to_json({**row, "policy": policy}))
        raise
    if options["bound"]:
        result = result.with_bound()
    about = about_run({**options, "ctx": ctx}, platform, work, [policy])
    more = {name: as_records(of(result.log)) for name, of in asked.items()}
    try:
        if folder:
            for path in (*write_run(result, folder, about=about), *write_analyses(more, folder)):
                say(f"wrote {path}")
    finally:  # a folder that can't be written loses nothing of what was run
        near = dict(result.bound.record(result.log)) if result.bound else dict[str, Any]()
        if json:
            near |= {"measured_error": statement_errors(result.platform.name, STATED)}
            near |= {"analyses": more} if more else {}
            answer(to_json({"policy": policy, **result.summary(), **near}))
        else:
            _show(result, policy, work, more)


def _show(result: Result, policy: str, work: Any, more: Mapping[str, Any]) -> None:
    """Print a run's figures, and those of analyses by name."""
    from sim.pages import run_notes
    from sim.report.analyses import analysis_text
    from sim.report.footer import Footer
    from sim.report.table import print_summary
    from sim.trace.described import workload_text

    warm_up, notes = len(result.warm_up), run_notes(result)
    footer = Footer(
        result.platform,
        warm_up=warm_up,
        command=command_line(),
        workload=workload_text(work.meta),
        trace=work,
        notes=notes,
    )
    print_summary({"policy": policy, "fidelity": result.policy.fidelity, **result.summary()}, footer=footer)
    for name, records in more.items():
        print(f"\n{analysis_text(name, records)}")


@takes(*COMPARED)
def compare(ctx: typer.Context, **options: Any) -> None:
    """Run many policies on one job and machine, a row each.

    All have the same trace, platform and budget.
    """
    _compare({"ctx": ctx, **options}, command_line())


def _compare(options: dict[str, Any], command: str) -> None:
    from sim.comparison import Interrupted
    from sim.comparison import compare as run_all
    from sim.outputs import check_folder

    if options["figures"] and not options["out"]:
        raise typer.BadParameter("--figures: name their folder: -o DIR")
    if options["figures"] not in (None, *FORMATS):
        from sim.errors import closest_name

        hint = closest_name(options["figures"], FORMATS)
        raise typer.BadParameter(f"--figures {options['figures']!r}: expected {', '.join(FORMATS)}{hint}")
    folder = check_folder(options["out"], "comparison") if options["out"] else None
    platform, work = job_of(options)
    limit = budget_of(options["budget"], work, platform)
    stopped = False
    try:
        comparison = run_all(
            work,
            platform,
            names_of(options["policies"]),
            budget=limit,
            seed=options["seed"],
            iterations=options["iterations"],
            **limit_of(options["recompute_limit"]),
            find_floor=options["floors"] or None,
            jobs=options["jobs"],
            bound=options["bound"],
            time_limit_s=options["time_limit"],
            most_actions=options["most_actions"],
            views=folder is not None,
            on_progress=told(),
        )
    except Interrupted as stop:
        comparison, stopped = stop.comparison, True
    _present(comparison, options, command, limit, folder)
    if stopped:
        print(f"tiersim: stopped: {len(comparison.rows)} rows so far", file=sys.stderr)
        raise typer.Exit(130)
    if comparison.failed:
        raise typer.Exit(1)


def _present(comparison: Comparison, options: dict[str, Any], command: str, limit: int | None, folder: Any) -> None:
    """Write and print a comparison."""
    from sim.outputs import to_json, write_comparison
    from sim.report.cells import left_out_lines, told_rows
    from sim.report.error_bars import STATED, statement_errors
    from sim.report.footer import Footer
    from sim.report.table import comparison_text, print_comparison
    from sim.trace.described import workload_text

    work, platform = comparison.trace, comparison.platform
    unknown = (row for row in comparison.rows if row["fits"] is False and row["floor_bytes"] is None)
    floors = [] if options["floors"] else [row["policy"] for row in unknown if row["refusal"] != "state"]
    notes = (
        *comparison.bounds,
        *comparison.idle_parts,
        *comparison.notes,
        *([f"smallest budget not searched: {', '.join(floors)}: --floors"] if floors else []),
        *left_out_lines(comparison.left_out),
    )
    limited = platform if limit is None else platform.with_budget(limit)
    warm_up = max((len(result.warm_up) for result in comparison.results.values()), default=0)
    footer = Footer(
        limited, warm_up=warm_up, command=command, workload=workload_text(work.meta), trace=work, notes=notes
    )
    brief = replace(footer, brief=not options["notes"])
    try:
        if folder:
            text = comparison_text(comparison.rows, footer=footer)
            about = about_run(options, platform, work, [row["policy"] for row in comparison.rows])
            for path in write_comparison(comparison, folder, about=about, text=text, figures=options["figures"] or ""):
                say(f"wrote {path}")
    finally:  # as for one run
        if options["json"]:
            error = {"measured_error": statement_errors(platform.name, STATED)}
            answer(to_json([row | (error if row["fits"] else {}) for row in told_rows(comparison.rows)]))
        else:
            print_comparison(comparison.rows, footer=brief)


DEMO = {
    "profile": "mt3000_survey",
    "model": "gpt2-medium",
    "batch": 4,
    "seq": 1024,
    "precision": "amp_bf16",
    "budget": None,
}
"""The demo's options; `docs/demo.md` says why these."""


@takes(JOBS, OUT._replace(default="tiersim-demo"), FIGURES, NOTES, JSON)
def demo(**options: Any) -> None:
    """Compare policies on MT-3000 as the survey describes it.

    The job is GPT-2 medium, more than the memory holds.
    """
    _compare({**defaults(COMPARED), **DEMO, **options}, "tiersim demo")
    if not options["json"]:
        what = "Tables, figures and a timeline" if options["figures"] else "Tables and a timeline"
        print(f"\n{what} for ui.perfetto.dev are in {options['out']}/")


EXAMPLES = Option("examples", Annotated[int, typer.Option(help="random examples per law", min=1)], 50)
PER_EXAMPLE = TIME_LIMIT._replace(default=SECONDS)


FAILING = Option(
    "out",
    Annotated[
        str | None, typer.Option("-o", "--out", help="folder for failing examples; default: the folder of caches")
    ],
    None,
)


@takes(EXAMPLES, PER_EXAMPLE, PARAM, SEED, FAILING, JSON)
def check(
    policy: Annotated[str, typer.Argument(help=WRITTEN)],
    **options: Any,
) -> None:
    """Check that a policy keeps the laws for every policy.

    On random traces, platforms and budgets.
    """
    from sim.conformance.isolation import checked
    from sim.outputs import to_json

    how = {"examples": options["examples"], "seed": options["seed"], "time_limit_s": options["time_limit"]}
    how["folder"] = options["out"]
    report, text = checked(policy, parameters(options["param"]), **how)
    answer(to_json(report) if options["json"] else text)
    if not report["passed"]:
        raise typer.Exit(1)
