"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Annotated, Any

import typer

AXES = ("model", "batch", "seq", "precision", "attention", "optimizer", "loss", "dropout", "micro_batches")
"""Options of which a trace is made: a trace that was read has them behind it."""


def _readable(budget: str | None) -> str | None:
    """A budget as it was given, if it is one: a size above zero or a part of the unconstrained peak."""
    if budget is None:
        return None
    from sim.errors import UnitError
    from sim.units import parse_bytes

    hint = ""
    try:
        if (_share(budget) or parse_bytes(budget)) > 0:
            return budget
    except UnitError as error:
        _, found, rest = str(error).partition(" (did you mean ")
        hint = found + rest
    wanted = "a size above zero with its unit, such as '7.5 GB', or a part of the unconstrained peak, such as '80%'"
    raise typer.BadParameter(f"{budget!r}: expected {wanted}{hint}")


Profile = Annotated[str, typer.Option(help="hardware profile: a name or a TOML file")]
Model = Annotated[str | None, typer.Option(help="model name or Hugging Face config.json")]
TraceFile = Annotated[str | None, typer.Option("--trace", help="trace file, instead of a model")]
Batch = Annotated[int, typer.Option(help="samples an iteration")]
Seq = Annotated[int, typer.Option("--seq", "--sequence", help="tokens a sample")]
Precision = Annotated[str, typer.Option(help="fp32, bf16, fp16, amp_bf16, amp_fp16, mixed_bf16, mixed_fp16")]
Attention = Annotated[str, typer.Option(help="eager, sdpa or flash")]
Optimizer = Annotated[str, typer.Option(help="adamw_foreach, adamw_fused, adamw_loop, sgd, sgd_momentum")]
Loss = Annotated[str, typer.Option(help="torch, fused or chunked")]
Dropout = Annotated[float | None, typer.Option(help="dropout probability; default: the model's own")]
MicroBatches = Annotated[int, typer.Option(help="micro-batches whose gradients are summed")]
Budget = Annotated[
    str | None,
    typer.Option(
        callback=_readable,
        help='bytes of the device, "7.5 GB", or a part of what keeping everything takes, "80%"; default: all of it',
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help='change a figure: tiers.hbm.bandwidth="300 GB/s"; may be given more than once'),
]
Seed = Annotated[int, typer.Option(help="seed of everything random")]
Iterations = Annotated[int | None, typer.Option(help="iterations to run; the last one is reported")]
RecomputeLimit = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="times the ideal time of the trace that recomputation may take before a run counts as thrashing; 0: any",
    ),
]
Out = Annotated[str | None, typer.Option("-o", "--out", help="folder for tables, figures and the timeline")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output on standard output, and nothing else")]
Parameters = Annotated[
    list[str] | None,
    typer.Option("-p", "--param", help="policy parameter: heuristic=lru; may be given more than once"),
]


def workload(options: dict[str, Any]) -> Any:
    """The trace that was asked for; options["ctx"], where there is one, knows which options were given."""
    if options["trace"]:
        if "ctx" in options:
            _refuse_axes(options["ctx"])
        from workloads import load_trace

        return load_trace(options["trace"])
    from workloads import transformer

    if not options["model"]:
        raise typer.BadParameter("give --model NAME or --trace FILE")
    more = {} if options["dropout"] is None else {"dropout": options["dropout"]}
    return transformer(
        options["model"],
        batch=options["batch"],
        sequence=options["seq"],
        precision=options["precision"],
        attention=options["attention"],
        optimizer=options["optimizer"],
        loss=options["loss"],
        micro_batches=options["micro_batches"],
        **more,
    )


def _refuse_axes(ctx: typer.Context) -> None:
    for option in ctx.command.params:
        source = ctx.get_parameter_source(str(option.name))
        if option.name in AXES and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"{option.opts[0]}: a file of --trace is made already; give one or the other")


def budget_of(budget: str | None, trace: Any, platform: Any) -> int | None:
    """Bytes of a budget that was asked for; a part such as "80%" is one of the unconstrained peak, as in sweeps."""
    if budget is None:
        return None
    from sim.units import parse_bytes

    share = _share(budget)
    if share is None:
        return parse_bytes(budget)
    from sim.analysis.peak_memory import home_peak
    from sim.experiment import reference_run

    return int(share * home_peak(reference_run(trace, platform)))


def _share(budget: str) -> Fraction | None:
    """The part of a text such as "80%", None for any other text."""
    found = re.fullmatch(r"\s*(\d{1,4}(?:\.\d{1,6})?)\s*%\s*", budget, re.ASCII)
    return Fraction(found[1]) / 100 if found else None


def platform_of(profile: str, changes: list[str] | None) -> Any:
    """The platform that was asked for, with the figures of `--set` changed."""
    from sim.hardware.profile import load_profile

    overrides = {}
    for change in changes or ():
        path, equals, value = change.partition("=")
        if not equals:
            raise typer.BadParameter(f'--set {change!r}: expected PATH=VALUE, as in tiers.hbm.bandwidth="300 GB/s"')
        overrides[path.strip()] = value.strip()
    return load_profile(profile, overrides=overrides or None)


def parameters(pairs: list[str] | None) -> dict[str, Any]:
    """Policy parameters from `NAME=VALUE`, the values as JSON or else as text."""
    import json

    found = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"-p {pair!r}: expected NAME=VALUE")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            found[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return found


def say(text: str) -> None:
    """A line for people who watch; nothing in a pipe."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def again() -> str:
    """The command that repeats this one."""
    import shlex

    return shlex.join(["tiersim", *sys.argv[1:]])


def label(trace: Any) -> str:
    """What a trace stands for, in a few words."""
    meta = trace.meta
    known = [f"{key} {meta[key]}" for key in ("batch", "sequence", "precision", "attention") if key in meta]
    return ", ".join([str(meta.get("model", "trace")), *known])


def files_of(asked: Mapping[str, Any], policies: Iterable[str]) -> list[Any]:
    """The files that were asked for by what `about_run` keeps: profile, trace or model, and those of policies."""
    from sim.foreign import model_files, policy_files, profile_files, trace_files

    named = {key: [asked[key]] if asked.get(key) else [] for key in ("profile", "trace", "model")}
    models = [] if named["trace"] else named["model"]
    return [
        *profile_files(named["profile"]),
        *trace_files(named["trace"]),
        *model_files(models),
        *policy_files(dict.fromkeys(policies)),
    ]


def about_run(options: dict[str, Any], platform: Any, trace: Any, policies: Iterable[str]) -> dict[str, Any]:
    """What a file of results says of its run: what was asked, on what, of which files, and which figures are assumed.

    policies: the names of those that ran.
    """
    from sim.foreign import sums_of

    beside = ("ctx", "out", "json", *(AXES if options["trace"] else ()))
    asked = {key: value for key, value in options.items() if value is not None and key not in beside}
    assumed = {fact.path: fact.text for fact in platform.assumed}
    return {
        "asked": asked,
        "assumed": assumed,
        "files": sums_of(files_of(asked, policies)),
        "platform": platform.name,
        "trace": trace.content_hash,
        "workload": dict(trace.meta),
    }


def limit_of(recompute_limit: float | None) -> dict[str, Any]:
    """The limit on recomputation as `simulate` takes it: nothing where it was not given, None where it is to be off."""
    return {} if recompute_limit is None else {"recompute_limit": recompute_limit or None}
