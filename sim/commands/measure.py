"""calibrate and validate: the machine that this runs on."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sim.commands.declaring import Option, takes
from sim.commands.options import ATTENTION, BATCH, JSON, MODEL, SEQ, platform_of, say


def calibrate(
    out: Annotated[str, typer.Option("-o", "--out", help="profile to write: my_machine.toml")],
    quick: Annotated[bool, typer.Option("--quick", help="few and small sizes: to try it out, not for use")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one")] = None,
) -> None:
    """Measure the machine this runs on and write its profile (extra `torch`)."""
    from sim.measure.calibrate import calibrate as measure

    print(measure(out, quick=quick, device=device))


@takes(
    MODEL,
    BATCH._replace(default=4),
    SEQ._replace(default=128),
    Option("precision", Annotated[str, typer.Option(help="{validated}")], "fp32"),
    ATTENTION,
    Option("device", Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one")], None),
    Option("repeats", Annotated[int, typer.Option(help="timed steps per policy; the median counts")], 7),
    Option("profile", Annotated[str | None, typer.Option(help="profile of this machine, for the times")], None),
    JSON,
)
def validate(**options: Any) -> None:
    """Run a real training step here under several policies and print it next to the simulated one (extra `torch`)."""
    from dataclasses import asdict

    from sim.measure.validate import HEADER, as_table
    from sim.measure.validate import validate as compare_with_real
    from sim.outputs import to_json
    from sim.report.listings import aligned

    model, sequence, profile, json = (options.pop(key) for key in ("model", "seq", "profile", "json"))
    machine = platform_of(profile, None) if profile else None
    rows = compare_with_real(model, sequence=sequence, profile=machine, progress=say, **options)
    print(to_json([asdict(row) for row in rows]) if json else aligned([HEADER, *as_table(rows)]))
