"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

Profile = Annotated[str, typer.Option(help="hardware profile: a name or a TOML file")]
Model = Annotated[str | None, typer.Option(help="model name or Hugging Face config.json")]
TraceFile = Annotated[str | None, typer.Option("--trace", help="trace file, instead of a model")]
Batch = Annotated[int, typer.Option(help="samples an iteration")]
Seq = Annotated[int, typer.Option("--seq", "--sequence", help="tokens a sample")]
Precision = Annotated[str, typer.Option(help="fp32, bf16, fp16, amp_bf16, amp_fp16, mixed_bf16, mixed_fp16")]
Attention = Annotated[str, typer.Option(help="eager, sdpa or flash")]
Optimizer = Annotated[str, typer.Option(help="adamw_foreach, adamw_fused, adamw_loop, sgd_momentum")]
Loss = Annotated[str, typer.Option(help="torch, fused or chunked")]
Dropout = Annotated[float | None, typer.Option(help="dropout probability; default: the model's own")]
MicroBatches = Annotated[int, typer.Option(help="micro-batches whose gradients are summed")]
Budget = Annotated[str | None, typer.Option(help='bytes of the device, "7 GB"; default: all of it')]
Set = Annotated[list[str] | None, typer.Option("--set", help='change a figure: tiers.hbm.bandwidth="300 GB/s"')]
Seed = Annotated[int, typer.Option(help="seed of everything random")]
Iterations = Annotated[int | None, typer.Option(help="iterations to run; the last one is reported")]
Out = Annotated[str | None, typer.Option("-o", "--out", help="folder for tables, figures and the timeline")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output on standard output, and nothing else")]
Parameters = Annotated[list[str] | None, typer.Option("-p", "--param", help="policy parameter: heuristic=lru")]


def workload(options: dict[str, Any]) -> Any:
    """The trace that was asked for."""
    if options["trace"]:
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


def about_run(options: dict[str, Any], platform: Any, trace: Any) -> dict[str, Any]:
    """What a file of results says of its run: what was asked, on what, and which figures are assumed."""
    asked = {
        key: value for key, value in options.items() if value is not None and key not in ("out", "json", "options")
    }
    assumed = {fact.path: fact.text for fact in platform.assumed}
    return {
        "asked": asked,
        "assumed": assumed,
        "platform": platform.name,
        "trace": trace.content_hash,
        "workload": dict(trace.meta),
    }
