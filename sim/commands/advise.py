"""advise, largest-batch, smallest-budget, search: questions with one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sim.commands.declaring import Option, takes
from sim.commands.options import (
    AXES,
    BUDGET,
    JOBS,
    JSON,
    MODEL,
    PARAM,
    PROFILE,
    SEED,
    SET,
    TRACE,
    WORDS,
    budget_of,
    names_of,
    overrides,
    parameters,
    platform_of,
    say,
    workload,
)
from sim.commands.runs import POLICIES

GOAL = Option("goal", Annotated[str, typer.Option(help="{goals}")], "throughput")
SECONDS = Option("seconds", Annotated[float, typer.Option(help="wall-clock time of the search")], 60.0)
OF_BATCH = Option("batch", Annotated[int | None, typer.Option(help="samples per iteration")], None)
POLICY = Option("policy", Annotated[str, typer.Option(help="a policy or a composition")], "keep_all")
DEVICES = Option("devices", Annotated[int, typer.Option(help="how many devices, all of which are used")], 8)
GLOBAL_BATCH = Option("global_batch", Annotated[int, typer.Option(help="samples per iteration, of all devices")], 8)
LAYOUT_POLICIES = Option(
    "policies",
    Annotated[str, typer.Option(help="memory policies to try in each layout, with commas")],
    "keep_all,selective_recompute,full_recompute",
)
MOST = Option("most", Annotated[int, typer.Option(help="layouts to simulate, the most promising ones")], 12)
QUESTION = (PROFILE, MODEL, TRACE, GOAL, OF_BATCH, *AXES[1:], BUDGET, SET, POLICIES, SECONDS, JOBS, SEED, JSON)


@takes(*QUESTION)
def advise(ctx: typer.Context, **options: Any) -> None:
    """Say what to use for a model on a machine: policy or composition, why, and what would change the answer.

    Without --batch the search chooses the batch, too.
    """
    from sim.advice import advise as search
    from sim.outputs import to_json

    if options["trace"]:
        subject, axes = workload({"ctx": ctx, **options}), {}
    elif options["model"]:
        axes = {WORDS.get(axis.name, axis.name): options[axis.name] for axis in AXES[1:]}
        subject, axes = options["model"], {key: value for key, value in axes.items() if value is not None}
    else:
        raise typer.BadParameter("give --model NAME or --trace FILE")
    how = {key: options[key] for key in ("goal", "batch", "budget", "seconds", "jobs", "seed")}
    figures = overrides(options["set_"])
    policies = names_of(options["policies"])
    advice = search(subject, options["profile"], figures=figures, policies=policies, on_row=_told, **how, **axes)
    print(to_json(advice.as_dict()) if options["json"] else advice.text(), end="\n" if options["json"] else "")
    if advice.best is None:
        raise typer.Exit(1)


@takes(PROFILE, POLICY, MODEL, *AXES[1:], BUDGET, SET, PARAM, SEED, JSON)
def largest_batch(**options: Any) -> None:
    """Find the largest batch that a policy fits, and its time; `advise --goal batch` tries all policies."""
    from sim.experiment import simulate
    from sim.search import largest_batch as search

    platform, given = platform_of(options["profile"], options["set_"]), parameters(options["param"])
    made: dict[int, Any] = {}

    def make(batch: int) -> Any:
        return made.setdefault(batch, workload({**options, "trace": None, "batch": batch}))

    budget = budget_of(options["budget"], make(1), platform)
    how = {"budget": budget, "seed": options["seed"], **given}
    batch = search(make, platform, options["policy"], **how)
    result = simulate(make(batch), platform, options["policy"], **how) if batch else None
    _answer({"policy": options["policy"], "batch": batch}, result, options["json"], f"batch {batch}")


@takes(PROFILE, POLICY, MODEL, TRACE, *AXES, SET, PARAM, SEED, JSON)
def smallest_budget(ctx: typer.Context, **options: Any) -> None:
    """Find the smallest memory that a policy fits, and its time there; `advise --goal memory` tries all policies."""
    from sim.experiment import simulate
    from sim.search import smallest_budget as search
    from sim.units import format_bytes

    platform, given = platform_of(options["profile"], options["set_"]), parameters(options["param"])
    trace, how = workload({"ctx": ctx, **options}), {"seed": options["seed"], **given}
    budget = search(trace, platform, options["policy"], **how)
    result = None if budget is None else simulate(trace, platform, options["policy"], budget=budget, **how)
    text = "" if budget is None else f"a budget of {format_bytes(budget)}"
    _answer({"policy": options["policy"], "budget_bytes": budget}, result, options["json"], text)


@takes(PROFILE, DEVICES, GLOBAL_BATCH, LAYOUT_POLICIES, MOST, MODEL, TRACE, *AXES[1:], BUDGET, SET, JSON)
def search(ctx: typer.Context, **options: Any) -> None:
    """Find layout and memory policy together: the fastest that fits so many devices, runner-up, Pareto front."""
    from sim.layout_search import search_layouts
    from sim.outputs import to_json
    from sim.policies.writing import split_outside

    given = {**options, "batch": options["global_batch"], "micro_batches": 1, "divided": True, "ctx": ctx}
    kernels = None
    if options["stack"]:
        from functools import partial

        from workloads import with_stack

        kernels = partial(with_stack, stack=options["stack"])
        given["stack"] = None
    found = search_layouts(
        workload(given),
        options["profile"],
        options["devices"],
        split_outside(options["policies"], ","),
        budget=options["budget"],
        most=options["most"],
        overrides=overrides(options["set_"]) or None,
        kernels=kernels,
        on_row=lambda row: say(str(row)),
    )
    if options["json"]:
        rows = {"best": found.best, "runner_up": found.runner_up}
        answer: dict[str, Any] = {key: row.as_dict() if row else None for key, row in rows.items()}
        answer |= {"front": [row.as_dict() for row in found.front], "rows": [row.as_dict() for row in found.rows]}
        print(to_json({**answer, "cannot_fit": found.cannot_fit, "left_out": found.left_out}))
    else:
        print("best       ", found.best or "nothing fits")
        if found.runner_up:
            print("runner-up  ", found.runner_up)
        for row in found.front[1:]:
            print("less memory", row)
        print(
            f"{len(found.rows)} runs; {found.cannot_fit} layouts cannot hold their training state; "
            f"{found.left_out} left out by an estimate of their time (--most)"
        )
    if found.best is None:
        raise typer.Exit(1)


def _answer(found: Mapping[str, Any], result: Any, as_json: bool, text: str) -> None:
    """Print what was found and the figures of its run. Exits with 1 where nothing fits."""
    from sim.advice.answer import figures
    from sim.outputs import to_json

    summary = {} if result is None else result.summary()
    if as_json:
        print(to_json({**found, **summary}))
    elif result is None:
        print(f"{found['policy']}: nothing fits")
    else:
        print(f"{found['policy']}: {text}: {figures(summary)}")
    if result is None:
        raise typer.Exit(1)


def _told(row: Mapping[str, Any], done: int, of: int) -> None:
    at = f" at batch {row['batch']}" if "batch" in row else ""
    say(f"… {done} of {of}: {row['policy']}{at}: {row['status']}")
