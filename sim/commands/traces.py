"""trace build, show, import, capture and export."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from sim.commands.declaring import Option, answer, takes
from sim.commands.options import (
    AXES,
    BUDGET,
    JSON,
    MODEL,
    PARAM,
    PROFILE,
    SELECTED_HELP,
    Json,
    budget_of,
    parameters,
    platform_of,
    workload,
)

WRITTEN = "file to write: .jsonl or .json, .jsonl.gz or .json.gz"
FILE = Option("out", Annotated[str, typer.Option("-o", "--out", help=WRITTEN)])
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


def _trace_file(path: str) -> str:
    """The path, if its name tells that it is a trace; a folder is refused where it is written. Raises BadParameter."""
    if os.path.isdir(path) or path.endswith(ENDINGS):
        return path
    raise typer.BadParameter(f"-o {path}: the name of a trace ends in {' or '.join(ENDINGS[:2])}")


@takes(Option("model", Annotated[str, MODEL.type.__metadata__[0]]), FILE, *AXES, JSON)
def build(**options: Any) -> None:
    """Build a transformer's training trace and save it."""
    from sim.outputs import to_json
    from sim.report.listings import trace_page
    from sim.trace.io import save

    out, json = _trace_file(options["out"]), options["json"]
    work = workload({**options, "trace": None})
    save(work, out)
    answer(trace_page(work, json) if not json else to_json({"path": out, "hash": work.content_hash}))


def show(path: Annotated[str, typer.Argument(help="trace file")], json: Json = False) -> None:
    """Print what a trace file holds, of any format."""
    from sim.report.listings import trace_page
    from workloads import load_trace

    print(trace_page(load_trace(path), json))


def import_(
    path: Annotated[str, typer.Argument(help="file of another tool; its format is found by its content")],
    out: Annotated[str, typer.Option("-o", "--out", help=WRITTEN)],
    step: Annotated[
        int | None, typer.Option(help="step of a profiler's trace, N of ProfilerStep#N; default: the last complete one")
    ] = None,
    json: Json = False,
) -> None:
    """Import a trace of another tool.

    PyTorch profiler or execution trace, Chakra, op-level JSON, a DTR log: its format is found by its content.
    """
    from sim.report.listings import trace_page
    from sim.trace.io import save
    from workloads import load_trace

    target = _trace_file(out)
    work = load_trace(path, step=step)
    save(work, target)
    print(trace_page(work, json))


def capture(
    reference: Annotated[str, typer.Argument(help="FILE.py:FUNCTION that is or returns a step, or describes it")],
    out: Annotated[str, typer.Option("-o", "--out", help=WRITTEN)],
    batch: Annotated[int | None, typer.Option(help="samples per iteration")] = None,
    seq: Annotated[int | None, typer.Option("--seq", "--sequence", help="tokens per sample")] = None,
    selected: Annotated[str | None, typer.Option(help=SELECTED_HELP)] = None,
    json: Json = False,
) -> None:
    """Capture a training step of a PyTorch module.

    It runs under fake tensors, without memory or an accelerator (extra `torch`).

    Sizes that are given are arguments of the function, `batch` and `sequence`.
    """
    from sim.report.listings import trace_page
    from sim.trace.io import save
    from workloads.capture import capture_from_reference

    target, sizes = _trace_file(out), {"batch": batch, "sequence": seq}
    changes = {} if selected is None else {"selected": selected}
    work = capture_from_reference(
        reference, {name: size for name, size in sizes.items() if size is not None}, **changes
    )
    save(work, target)
    print(trace_page(work, json))


@takes(
    PROFILE,
    Option(
        "out",
        Annotated[str, typer.Option("-o", "--out", help="prefix of the Chakra files, one per device: PREFIX.0.et")],
    ),
    Option("policy", Annotated[str, typer.Option(help="policy whose run is written")], "keep_all"),
    BUDGET,
    PARAM,
)
def export(path: Annotated[str, typer.Argument(help="trace file")], **options: Any) -> None:
    """Replay a trace and write the run for Chakra.

    Memory loads and stores are among its nodes.
    """
    from sim.experiment import simulate
    from workloads import load_trace
    from workloads.exporters.chakra import export_chakra

    platform, work = platform_of(options["profile"], None), load_trace(path)
    budget = budget_of(options["budget"], work, platform)
    result = simulate(work, platform, options["policy"], budget=budget, **parameters(options["param"]))
    export_chakra(result.log, options["out"])
