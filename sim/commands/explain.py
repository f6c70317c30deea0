"""explain: why a saved run takes what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sim.commands.advise import SECONDS
from sim.commands.declaring import answer, takes
from sim.commands.options import JSON, TRUST
from sim.commands.repeating import repeated_run


@takes(SECONDS._replace(default=20.0), TRUST, JSON)
def explain(
    run: Annotated[str, typer.Argument(help="folder of `run -o`")],
    other: Annotated[str | None, typer.Argument(help="folder of another run of the same job, to compare with")] = None,
    **options: Any,
) -> None:
    """Say what limits a run, or where two runs part.

    What set its peak, what it waited for, and what would help most.

    Single changes are searched for the time given, 0 for none.
    """
    from sim.explanation import explain as explained
    from sim.outputs import to_json

    first = repeated_run(Path(run), options["trust"])
    against = repeated_run(Path(other), options["trust"]).result if other else None
    found = explained(
        first.result, against, trace=first.trace, seconds=options["seconds"], seed=first.seed, **first.limit
    )
    answer(to_json(found.as_dict()) if options["json"] else found.text().rstrip())
