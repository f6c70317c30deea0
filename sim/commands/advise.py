"""advise, largest-batch, smallest-budget, search: questions with one answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from sim.commands.declaring import Option, answer, takes
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
from sim.commands.runs import POLICIES, TIME_LIMIT
from sim.limits import calling

if TYPE_CHECKING:
    from sim.hardware.platform import Platform
    from sim.layout_search import LayoutSearch

GOAL = Option("goal", Annotated[str, typer.Option(help="{goals}")], "throughput")
SECONDS = Option("seconds", Annotated[float, typer.Option(help="wall-clock time of the search")], 60.0)
OF_BATCH = Option("batch", Annotated[int | None, typer.Option(help="samples per iteration")], None)
SEVERAL = "a policy or a composition, several of them as in a,b + c, or all"
POLICY = Option("policy", Annotated[str, typer.Option("--policy", "--policies", help=SEVERAL)], "keep_all")
DEVICES = Option("devices", Annotated[int, typer.Option(help="how many devices, all of which are used")], 8)
GLOBAL_BATCH = Option("global_batch", Annotated[int, typer.Option(help="samples per iteration, of all devices")], 8)
LAYOUT_POLICIES = Option(
    "policies",
    Annotated[str, typer.Option(help="memory policies to try in each layout, with commas")],
    "keep_all,selective_recompute,full_recompute",
)
LAYOUT_SCHEDULES = Option(
    "schedules",
    Annotated[str | None, typer.Option(help="schedules of pipelines to try, with commas; default: all")],
    None,
)
BY_PART = Option(
    "by_part",
    Annotated[
        bool, typer.Option("--by-part", help="try attention, MLP and vocabulary divided by tokens, each by itself")
    ],
    False,
)
MOST = Option("most", Annotated[int, typer.Option(help="layouts to simulate, the most promising ones")], 12)
ON_DEVICES = Option(
    "devices",
    Annotated[int, typer.Option(help="devices in all, with --batch of all of them: finds the layout, too")],
    1,
)
QUESTION = (
    PROFILE,
    MODEL,
    TRACE,
    GOAL,
    OF_BATCH,
    ON_DEVICES,
    *AXES[1:],
    BUDGET,
    SET,
    POLICIES,
    SECONDS,
    JOBS,
    SEED,
    JSON,
)


@takes(*QUESTION)
def advise(ctx: typer.Context, **options: Any) -> None:
    """Say what to use for a model on a machine, and why.

    Policy or composition, and what would change the answer. Without --batch the search chooses the batch, too; with it,
    and without --micro-batches, in how many of these it is taken. --precision and --optimizer take several values, with
    commas, or `any`, and leave these to the search, which never changes them otherwise.
    """
    from sim.advice import Interrupted
    from sim.advice import advise as search
    from sim.outputs import to_json
    from workloads.steps import is_reference

    axes: dict[str, Any] = {}
    if is_reference(options["model"]) and options["batch"] is None and options["goal"] != "memory":
        subject = _of_batches({"ctx": ctx, "chosen": ["batch"], **options})
    elif options["trace"] or is_reference(options["model"]):
        chosen = [] if options["batch"] is None else ["batch"]
        subject = workload({"ctx": ctx, "chosen": chosen, **options})
    elif options["model"]:
        axes = {WORDS.get(axis.name, axis.name): options[axis.name] for axis in AXES[1:]}
        subject, axes = options["model"], {key: value for key, value in axes.items() if value is not None}
        source = ctx.get_parameter_source("micro_batches")
        if source is None or source.name != "COMMANDLINE":  # the search chooses their number
            del axes["micro_batches"]
    else:
        raise typer.BadParameter("give --model NAME or --trace FILE")
    how = {key: options[key] for key in ("goal", "batch", "budget", "seconds", "jobs", "seed", "devices")}
    if is_reference(options["model"]):  # captured at that batch
        how["batch"] = None
    figures = overrides(options["set_"])
    policies = names_of(options["policies"])
    told: dict[str, Any] = {"on_row": _told, "on_state": lambda state: say(state.text())}
    stopped = False
    try:
        advice = search(subject, options["profile"], figures=figures, policies=policies, **told, **how, **axes)
    except Interrupted as stop:
        advice, stopped = stop.advice, True
    answer(to_json(advice.as_dict()) if options["json"] else advice.text().rstrip("\n"))
    if stopped:
        _say_stopped(len(advice.rows), "runs")
    if advice.best is None:
        raise typer.Exit(1)


def _say_stopped(number: int, kind: str) -> NoReturn:
    """Say after an answer that it is of so many so far. Exits as Ctrl-C does."""
    print(f"tiersim: stopped: {number} {kind if number != 1 else kind.removesuffix('s')} so far", file=sys.stderr)
    raise typer.Exit(130)


def _of_batches(options: dict[str, Any]) -> Any:
    """What makes the step of a function at each batch; its step as it is where that has no batch."""
    from workloads.capturing.reference import Unsized

    try:
        first = workload({**options, "batch": 1})
    except Unsized as error:
        if options["goal"] == "batch":
            raise
        say(f"the batch is that of the step: {error}")
        return workload({**options, "chosen": []})
    return lambda batch: first if batch == 1 else workload({**options, "batch": batch})


@takes(PROFILE, POLICY, MODEL, *AXES[1:], BUDGET, SET, PARAM, SEED, TIME_LIMIT, JSON)
def largest_batch(ctx: typer.Context, **options: Any) -> None:
    """Find the largest batch that a policy fits, and its time.

    `advise --goal batch` tries all policies.
    """
    from sim.experiment import simulate
    from sim.search import largest_batch as search
    from sim.search import most_tried

    if options["budget"] and options["budget"].strip().endswith("%"):
        raise typer.BadParameter(
            f"--budget {options['budget']}: a part of the unconstrained peak, which grows with the batch; expected a "
            "size, such as '7.5 GB'"
        )
    platform, given = platform_of(options["profile"], options["set_"]), parameters(options["param"])
    parts = max(1, options["micro_batches"])
    most = most_tried(parts)
    made: dict[int, Any] = {}

    def make(batch: int) -> Any:
        if batch not in made:
            made[batch] = workload({**options, "ctx": ctx, "trace": None, "batch": batch, "chosen": ["batch"]})
        return made[batch]

    how = {"budget": budget_of(options["budget"], make(parts), platform), "seed": options["seed"], **given}

    def found(policy: str) -> Found:
        def tried(share: int) -> Any:
            say(f"… {policy} at batch {share * parts}")
            return make(share * parts)

        batch = parts * search(tried, platform, policy, limit=most // parts, **how)
        result = simulate(make(batch), platform, policy, **how) if batch else None
        more = " (the largest tried: larger ones may fit)" if batch == most else ""
        return Found({"policy": policy, "batch": batch, "is_most_tried": batch == most}, result, f"batch {batch}{more}")

    _answer(options, found, lambda one: -one.figures["batch"])


@takes(PROFILE, POLICY, MODEL, TRACE, *AXES, SET, PARAM, SEED, TIME_LIMIT, JSON)
def smallest_budget(ctx: typer.Context, **options: Any) -> None:
    """Find the smallest memory that a policy fits.

    `advise --goal memory` tries all policies.
    """
    from sim.experiment import simulate
    from sim.search import smallest_budget as search
    from sim.units import format_bytes

    platform, given = platform_of(options["profile"], options["set_"]), parameters(options["param"])
    trace, how = workload({"ctx": ctx, **options}), {"seed": options["seed"], **given}

    def found(policy: str) -> Found:
        budget = search(trace, platform, policy, **how)
        result = None if budget is None else simulate(trace, platform, policy, budget=budget, **how)
        text = "" if budget is None else f"a budget of {format_bytes(budget)}"
        return Found({"policy": policy, "budget_bytes": budget}, result, text)

    _answer(options, found, lambda one: one.figures["budget_bytes"])


@takes(
    PROFILE,
    DEVICES,
    GLOBAL_BATCH,
    LAYOUT_POLICIES,
    LAYOUT_SCHEDULES,
    MOST,
    BY_PART,
    MODEL,
    TRACE,
    *AXES[1:],
    BUDGET,
    SET,
    JSON,
)
def search(ctx: typer.Context, **options: Any) -> None:
    """Find layout over devices and memory policy together.

    The fastest that fits so many devices, the runner-up, and the Pareto front.
    """
    from sim.analysis.stand_in import stand_in
    from sim.hardware.profile import load_profile
    from sim.layout_search import SEARCHED, LayoutSearch, search_layouts
    from workloads.stacks import after_division

    figures = overrides(options["set_"]) or None

    given = {
        **options,
        "batch": options["global_batch"],
        "micro_batches": 1,
        "divided": True,
        "ctx": ctx,
        "chosen": ["batch"],
    }
    if kernels := after_division(options["stack"], max(options["devices"], 2)):
        given["stack"] = None
    rows, stopped = list[Any](), False

    def note(row: Any) -> None:
        rows.append(row)
        say(str(row))

    work, node = workload(given), load_profile(options["profile"], overrides=figures)
    try:
        found = search_layouts(
            work,
            options["profile"],
            options["devices"],
            names_of(options["policies"]) or [],
            budget=options["budget"],
            most=options["most"],
            schedules=SEARCHED if options["schedules"] is None else options["schedules"].split(","),
            overrides=figures,
            kernels=kernels,
            by_part=options["by_part"],
            on_row=note,
        )
    except KeyboardInterrupt:
        if not rows:
            raise
        found, stopped = LayoutSearch(tuple(rows), 0, 0), True
    if options["json"]:
        _print_json(found, options["profile"], stopped, stand_in(work, node))
    else:
        _print_layouts(found, node, stopped, stand_in(work, node))
    if found.best is None:
        raise typer.Exit(1)


def _print_json(found: LayoutSearch, profile: str, stopped: bool, priced: tuple[str, str]) -> None:
    """What a search has found, as JSON.

    stopped: whether Ctrl-C ended it.
    priced: see `sim.analysis.stand_in`.
    """
    from sim.outputs import to_json
    from sim.report.error_bars import statement_errors

    chosen = {"best": found.best, "runner_up": found.runner_up}
    values: dict[str, Any] = {key: row.as_dict() if row else None for key, row in chosen.items()}
    values |= {"front": [row.as_dict() for row in found.front], "rows": [row.as_dict() for row in found.rows]}
    values |= {"cannot_fit": found.cannot_fit, "left_out": found.left_out, "stopped": stopped}
    values["priced_as"] = " as ".join(priced) if priced[0] != priced[1] else None
    answer(to_json({**values, "indistinguishable": found.is_close, "error": statement_errors(profile)}))
    if stopped:
        _say_stopped(len(found.rows), "runs")


def _print_layouts(found: LayoutSearch, node: Platform, stopped: bool, priced: tuple[str, str]) -> None:
    """The same in lines. node: the machine."""
    from sim.report.error_bars import error_lines
    from sim.report.footer import priced_lines

    print("best       ", found.best or "nothing fits")
    if found.runner_up:
        print("runner-up  ", f"{found.runner_up}{found.told}")
    for row in found.front[1:]:
        print("less memory", row)
    if stopped:
        _say_stopped(len(found.rows), "runs")
    print(
        f"{len(found.rows)} runs; {found.cannot_fit} layouts cannot hold their training state; "
        f"{found.left_out} left out by an estimate of their time (--most)"
    )
    for line in priced_lines(*priced):
        print(line)
    if found.best is not None:
        for line in error_lines([node], also=["layouts", "peak"]):
            print(line)


class Found(NamedTuple):
    """What was found for a policy: figures, the run there, None where nothing fits, and the figures in words."""

    figures: Mapping[str, Any]
    result: Any
    text: str

    @property
    def line(self) -> str:
        """One line."""
        from sim.advice.answer import figures

        if self.result is None:
            return f"{self.figures['policy']}: nothing fits"
        return f"{self.figures['policy']}: {self.text}: {figures(self.result.summary())}"


def _answer(options: Mapping[str, Any], search: Callable[[str], Found], order: Callable[[Found], int]) -> None:
    """Print what was found for each policy, the best first, and why one can't run.

    Exits with 1 where nothing fits, or a policy failed. Raises PolicyError for one that there is not before any runs.
    """
    from sim.errors import PolicyError, PolicyFailed
    from sim.outputs import to_json
    from sim.policies import load
    from sim.report.error_bars import STATED, error_lines, statement_errors

    names, failed = names_of(options["policy"]) or [], False
    for name in names:
        load(name, **parameters(options["param"]))
    ran, refused, stopped = list[Found](), dict[str, str](), False
    for name in names:
        try:
            with calling(name):
                ran.append(search(name))
            if len(names) > 1:
                say(ran[-1].line)
        except KeyboardInterrupt:
            if not ran:
                raise
            stopped = True
            break
        except (PolicyError, PolicyFailed) as error:
            if len(names) == 1:
                raise
            refused[name] = str(error)
            failed = failed or isinstance(error, PolicyFailed)
    ran.sort(key=lambda one: (one.result is None, 0 if one.result is None else order(one)))
    fitting = [one.result for one in ran if one.result is not None]
    if options["json"]:
        rows = [{**one.figures, **({} if one.result is None else one.result.summary())} for one in ran]
        for row, result in zip(rows, fitting):  # these come first
            row["measured_error"] = statement_errors(result.platform.name, (*STATED, "peak"))
        rows += [{"policy": name, "error": text} for name, text in refused.items()]
        answer(to_json(rows[0] if len(names) == 1 else rows))
    else:
        lines = [*(one.line for one in ran), *(f"{name}: {text}" for name, text in refused.items())]
        lines += error_lines([fitting[0].platform], also=["peak"]) if fitting else []
        print("\n".join(lines))
    if stopped:
        _say_stopped(len(ran) + len(refused), "policies")
    if failed or all(one.result is None for one in ran):
        raise typer.Exit(1)


def _told(row: Mapping[str, Any], done: int, of: int) -> None:
    at = f" at batch {row['batch']}" if "batch" in row else ""
    say(f"… {done} of {of}: {row['policy']}{at}: {row['status']}")
