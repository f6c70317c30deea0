"""calibrate and validate: the machine that this runs on."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sim.commands.declaring import Option, answer, takes
from sim.commands.options import ATTENTION, JSON, MODEL, SELECTED, platform_of, say


def calibrate(
    out: Annotated[str, typer.Option("-o", "--out", help="profile to write: my_machine.toml")],
    quick: Annotated[bool, typer.Option("--quick", help="few and small sizes: to try it out, not for use")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one")] = None,
) -> None:
    """Measure this machine and write its profile.

    It takes the extra `torch`.
    """
    from sim.measure.calibrate import calibrate as measure

    print(measure(out, quick=quick, device=device))


@takes(
    MODEL,
    Option(
        "batch",
        Annotated[int | None, typer.Option(help="samples per iteration")],
        None,
    ),
    Option("seq", Annotated[int | None, typer.Option("--seq", "--sequence", help="tokens per sample")], None),
    Option("precision", Annotated[str, typer.Option(help="{validated}")], "fp32"),
    ATTENTION,
    SELECTED,
    Option("device", Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one")], None),
    Option("repeats", Annotated[int, typer.Option(help="timed steps per policy; the median counts")], 7),
    Option("profile", Annotated[str | None, typer.Option(help="profile of this machine, for the times")], None),
    JSON,
)
def validate(**options: Any) -> None:
    """Run a real training step beside the simulated one.

    Under several policies; it takes the extra `torch`.

    A GPT-2 or a Llama is run. Any other config.json, and a function, are captured: what is printed is then the peak of
    PyTorch's own memory tracker under fake tensors. Without --batch it is the first at which the peaks differ, without
    --seq there are 128 tokens.
    """
    from dataclasses import asdict

    from sim.measure.validate import HEADER, as_table
    from sim.measure.validate import validate as compare_with_real
    from sim.outputs import to_json
    from sim.report.listings import aligned

    model, sequence, profile, json = (options.pop(key) for key in ("model", "seq", "profile", "json"))
    machine = platform_of(profile, None) if profile else None
    rows = compare_with_real(model, sequence=sequence, profile=machine, progress=say, **options)
    if json:
        answer(to_json([asdict(row) for row in rows]))
        return
    print(aligned([HEADER, *as_table(rows)]))
    batch = next((row.batch for row in rows if row.batch), None)
    if batch and options["batch"] is None:
        print(f"\nbatch {batch}: --batch gives another")
