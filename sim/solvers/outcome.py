"""What a solver's plan says of itself, and what its refusal says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import Infeasible
from sim.plan import Plan, Problem
from sim.solvers.runs import Runs
from sim.units import format_bytes


@dataclass(frozen=True, eq=False)
class Answer:
    """What a search came to. bound: ns of reruns.

    status: `optimal` (proven), `feasible` (stopped by `limit`), `infeasible` (proven), or `unknown` (stopped
    before any plan was found). stages: per stage the nodes that run again. limit: `nodes`, `work` or `time`.
    """

    status: str
    bound: int = 0
    stages: Sequence[Sequence[int]] = ()
    limit: str = ""


def rerun_ns(problem: Problem, found: Runs) -> int:
    """Nanoseconds of reruns of a plan."""
    return sum(problem.cost.op_ns(op) for op, anchor in found.steps if anchor >= 0)


def planned(problem: Problem, found: Runs, *, status: str, bound: int | None, limit: str = "") -> Plan:
    """The plan, with notes: `status` (`optimal` or `feasible`), `rerun_ns`, `bound_ns`, `limit`, `time_limited`.

    bound: no plan of the same class has less rerun time, None where nothing is known. limit: which limit
    ended the search, "" for none.
    """
    notes = {
        "status": status,
        "rerun_ns": rerun_ns(problem, found),
        "bound_ns": bound,
        "limit": limit,
        "time_limited": limit == "time",
    }
    return Plan(problem.trace, found.actions(), notes=notes)


def refused(problem: Problem, policy: str, least: Runs, *, proven: bool, smallest: bool) -> Infeasible:
    """The error. proven: that no plan of the class fits. least: one that would in more; smallest: proven so."""
    floor = least.peak()
    what = "no plan of this class fits" if proven else "no plan was found that fits"
    more = "is the smallest budget that does" if proven and smallest else "would do"
    return Infeasible(
        f"policy {policy!r}: {what} {format_bytes(problem.budget)}; {format_bytes(floor, digits=None)} {more}",
        floor_bytes=floor,
    )
