"""Why does this run take the memory and the time that it takes, and what would change it?

from sim.explanation import explain

print(explain(simulate(trace, "mt3000_survey", "swap_all", budget="7.5 GB")).text())
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sim.analysis.bounds import bounds
from sim.analysis.peak_memory import peak_memory
from sim.analysis.stalls import stalls
from sim.analysis.waits import waits
from sim.arguments import explained
from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import TiersimError
from sim.experiment import Result
from sim.explanation.answer import Explanation
from sim.explanation.parting import Parting, Step, parting
from sim.explanation.tried import Tried, tried
from sim.policies import label

if TYPE_CHECKING:
    from sim.trace.graph import Trace

__all__ = ["Explanation", "Parting", "Step", "Tried", "explain"]

NUMBER = re.compile(r"(?<![A-Za-z])\d+|\d+(?=\.)")
JOB = ("model", "batch", "sequence", "precision", "attention", "optimizer", "loss", "stack")
"""What the description of a trace says of its job."""


@explained
def explain(
    result: Result,
    other: Result | None = None,
    *,
    trace: Trace | None = None,
    seconds: float = 20.0,
    seed: int = 0,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
) -> Explanation:
    """Explain a run: what set its peak, what it waited for and recomputed, and what would change its time.

    result: the run.
    other: another run of the same job, to compare with.
    trace: what was simulated; None for that of the plan. Needed where the policy rewrites the trace.
    seconds: how long single changes are tried, 0 for none. Each is one simulation; one that has begun is finished.
    seed, recompute_limit: those of the run.

    Raises TiersimError where a rewritten trace is needed, the two runs are not of the same machine or job, or seconds
    are no such number.
    """
    if not 0 <= seconds < float("inf"):
        raise TiersimError(f"seconds: value {seconds:g}: expected a finite number of at least 0; nearest: 0")
    if trace is None and seconds and result.policy.rewrites:
        raise TiersimError(f"{label(result.policy)} rewrites the trace: give the one that was simulated, or seconds=0")
    if other is not None:
        _check_alike(result, other)
    log = result.log
    changes: tuple[Tried, ...] = ()
    untried = 0
    if seconds:
        subject = trace or result.plan.trace
        changes, untried = tried(result, subject, seconds=seconds, seed=seed, recompute_limit=recompute_limit)
    return Explanation(
        result,
        peak_memory(log),
        bounds(log),
        stalls(log),
        waits(log),
        _recomputed(result),
        changes,
        untried,
        other,
        None if other is None else parting(other.log, log),
    )


def _check_alike(result: Result, other: Result) -> None:
    """Raise TiersimError for runs of two machines or jobs, as far as their traces say what they are of."""
    names = other.log.platform.name, result.log.platform.name
    if names[0] != names[1]:
        raise TiersimError(f"the runs are of two machines, {names[0]} and {names[1]}: compare runs of one")
    metas = other.log.trace.meta, result.log.trace.meta
    for key in JOB:
        values = [meta.get(key) for meta in metas]
        if values[0] != values[1]:
            raise TiersimError(f"the runs are of two jobs, {key} {values[0]} and {values[1]}: compare runs of one")


def _recomputed(result: Result) -> dict[str, int]:
    from sim.analysis.lanes import RECOMPUTE, on_main

    log = result.log
    rows = on_main(log) & (log.interval("why") == RECOMPUTE)
    names, spent = log.trace.op_columns.name, dict[str, int]()
    ns = (log.interval("end") - log.interval("start"))[rows]
    for op, took in zip(log.interval("op")[rows].tolist(), ns.tolist(), strict=True):
        name = NUMBER.sub("*", names[op])
        spent[name] = spent.get(name, 0) + took
    return dict(sorted(spent.items(), key=lambda item: (-item[1], item[0])))
