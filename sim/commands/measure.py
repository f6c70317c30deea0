"""calibrate and validate: the machine that this runs on."""

from __future__ import annotations

from typing import Annotated

import typer

from sim.commands.options import Attention, Batch, Json, Model, Seq, platform_of, say


def calibrate(
    out: Annotated[str, typer.Option("-o", "--out", help="profile to write: my_machine.toml")],
    quick: Annotated[bool, typer.Option("--quick", help="few and small sizes: for trying it out, not for use")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one")] = None,
) -> None:
    """Measure the machine this runs on and write its profile (extra `torch`)."""
    from sim.measure.calibrate import calibrate as measure

    print(measure(out, quick=quick, device=device))


def validate(
    model: Model = None,
    batch: Batch = 4,
    seq: Seq = 128,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or amp_bf16")] = "fp32",
    attention: Attention = "sdpa",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one")] = None,
    repeats: Annotated[int, typer.Option(help="steps timed a policy; the median counts")] = 7,
    profile: Annotated[str | None, typer.Option(help="profile of this machine, for the times")] = None,
    json: Json = False,
) -> None:
    """Run a real training step here under several policies, and print it beside the simulated one (extra `torch`)."""
    from dataclasses import asdict

    from sim.measure.validate import HEADER, as_table
    from sim.measure.validate import validate as compare_with_real
    from sim.outputs import to_json
    from sim.report.listings import aligned

    rows = compare_with_real(
        model,
        batch=batch,
        sequence=seq,
        precision=precision,
        attention=attention,
        device=device,
        repeats=repeats,
        profile=platform_of(profile, None) if profile else None,
        progress=say,
    )
    print(to_json([asdict(row) for row in rows]) if json else aligned([HEADER, *as_table(rows)]))
