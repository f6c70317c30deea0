"""export: a saved run's plan in the words of a framework."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.commands.declaring import Option, answer, takes
from sim.commands.options import JSON, TRUST
from sim.commands.repeating import repeated_run

if TYPE_CHECKING:
    from sim.applying import Exported

TO = Option("to", Annotated[str, typer.Option("--to", help="{frameworks}")])
LAYERS = Option(
    "layers",
    Annotated[
        str | None,
        typer.Option(
            help="paths of the model's layers, * for the number: model.layers.*; default: where they were captured, or "
            "are in Hugging Face's models"
        ),
    ],
    None,
)
NEAREST = Option(
    "nearest",
    Annotated[
        bool,
        typer.Option(
            "--nearest", help="write the nearest also where the framework has no switch for this, or it does not fit"
        ),
    ],
    False,
)
FILE = Option(
    "out", Annotated[str | None, typer.Option("-o", "--out", help="file to write; default: standard output")], None
)


@takes(TO, LAYERS, NEAREST, FILE, TRUST, JSON)
def export(
    run: Annotated[str, typer.Argument(help="folder of `run -o`")],
    **options: Any,
) -> None:
    """Write what a run's plan means in a training framework.

    Code, flags or settings, and what they cost there.
    """
    from sim.applying import check_framework
    from sim.applying import export as written_for
    from sim.outputs import to_json

    check_framework(options["to"])
    exported = written_for(repeated_run(Path(run), options["trust"]).result, options["to"], layers=options["layers"])
    out, lines = options["out"], summary_lines(exported)
    if not (exported.told and exported.fits) and not options["nearest"]:
        _refuse(exported, lines, options["json"])
    if out:
        exported.write(out)
    if options["json"]:
        figures = {key: value for key, value in asdict(exported).items() if key != "text"}
        answer(to_json({**figures, "fits": exported.fits, **({"out": out} if out else {"text": exported.text})}))
    elif out:
        print("\n".join([*lines, f"wrote {out}"]))
    else:
        print("\n".join(lines), file=sys.stderr)
        print(exported.text, end="")


def _refuse(exported: Exported, lines: Sequence[str], json: bool) -> None:
    """Say what the nearest would be and cost, and write nothing. Ends with status 1."""
    from sim.outputs import to_json

    if json:
        answer(to_json({**asdict(exported), "fits": exported.fits}))
    else:
        nearest = [f"    {line}" for line in exported.text.splitlines()] or ["    no option at all"]
        said = [*lines, "The nearest:", *nearest, "Nothing is written; --nearest writes it."]
        print("\n".join(said), file=sys.stderr)
    raise typer.Exit(1)


def summary_lines(exported: Exported) -> Sequence[str]:
    """What the file costs beside what the run did, and how they differ."""
    from sim.report.listings import aligned
    from sim.units import format_bytes, format_time

    rows = [("", "peak", "time")]
    for name, cost in (("the run", exported.planned), (f"in {exported.to}", exported.cost)):
        rows.append((name, format_bytes(cost.peak_bytes), format_time(cost.makespan_ns)))
    return [aligned(rows), *exported.differences]
