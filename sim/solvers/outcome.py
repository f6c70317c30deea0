"""What a solver's plan says of itself, and its refusal: a word of proof names the class of plans it is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim.errors import Infeasible, OutOfMemory
from sim.plan import Drop, Plan, Problem, Recompute
from sim.solvers.schedule import Schedule
from sim.trace.chain import before_update
from sim.trace.index import TraceIndex
from sim.units import format_bytes

STAGED = (
    "keep weights, inputs, outputs, weight gradients and what is still to be overwritten in place, move nothing, and "
    "before each op that precedes the update recompute earlier ones that produce no weight gradient, in program order, "
    "each at most once there, and what was overwritten in place once more for each op"
)
"""The plans that Checkmate's program and Moccasin's model choose from, and that a proof of theirs is about."""


def in_stages(plan: Plan, most: int | None = None) -> bool:
    """Whether a plan is one of those that `STAGED` describes, with at most so many runs per op."""
    trace = plan.trace
    if plan.online is not None or plan.place or plan.keep_dead or trace.devices > 1:
        return False
    index, update = TraceIndex(trace), before_update(trace)
    last: dict[int, int] = {}  # per anchor the op that was recomputed last
    here: dict[int, set[int]] = {}  # per anchor the ops recomputed so far
    count: Counter[int] = Counter()
    for action in plan.actions:
        if isinstance(action, Drop) and action.tier is None:
            t = trace.tensor_id(action.tensor)
            if not index.droppable[t]:
                return False
        elif isinstance(action, Recompute) and action.before is not None:
            op, anchor = trace.op_id(action.op), trace.op_id(action.before)
            if not last.get(anchor, -1) < op < anchor < update or op in index.gradient_ops:
                return False
            lost = (t for t in index.reads[op] if index.overwritten_at[t] < anchor)
            if any(index.producer[t] not in here.get(anchor, ()) for t in lost):
                return False
            here.setdefault(anchor, set()).add(op)
            last[anchor] = op
            count[op] += 1
        else:
            return False
    return most is None or max(count.values(), default=0) < most


@dataclass(frozen=True, eq=False)
class Answer:
    """The outcome of a search.

    status: `optimal` (proven), `feasible` (stopped by `limit`), `infeasible` (proven), or `unknown` (stopped
        before any plan was found).
    bound: ns of recomputation.
    stages: per stage the nodes that are recomputed.
    limit: `nodes`, `work` or `time`.
    """

    status: str
    bound: int = 0
    stages: Sequence[Sequence[int]] = ()
    limit: str = ""


def rerun_ns(problem: Problem, schedule: Schedule) -> int:
    """Nanoseconds of recomputation of a plan."""
    return sum(problem.cost.op_ns(op) for op, anchor in schedule.steps if anchor >= 0)


def once_ns(problem: Problem) -> int:
    """Nanoseconds of every op of a device's main engine, run once, for the device with most: no plan takes less.

    What a group exchanges takes no time of an engine.
    """
    columns, platform = problem.trace.op_columns, problem.platform
    engine, busy = columns.engine, Counter[int]()
    for op, device in enumerate(columns.device.tolist()):
        if op in columns.group:
            continue
        if op not in engine or platform.engine_for(device, engine[op]) == platform.engine_for(device):
            busy[device] += problem.cost.op_ns(op)
    return max(busy.values(), default=0)


def planned(
    problem: Problem, schedule: Schedule, *, status: str, bound: int | None, limit: str = "", plans: str = STAGED
) -> Plan:
    """The plan, with notes: `status` (`optimal` or `feasible`), `rerun_ns`, `bound_ns`, `limit`, `time_limited`,
    `optimal_among`: the class of plans among which it is proven optimal, "" where nothing is proven; and
    `makespan_bound_ns` and `bound_among`: the least makespan of that class, None where nothing is known.

    bound: no plan of the class recomputes for less time, None where nothing is known. Where a CPU launches, times of
        ops do not add up, and nothing is proven of a plan that recomputes.
    limit: which limit ended the search, "" for none.
    plans: the class.
    """
    if problem.platform.dispatch and rerun_ns(problem, schedule):
        status, bound = "feasible", None
    notes = {
        "status": status,
        "optimal_among": f"plans that {plans}" if status == "optimal" else "",
        "rerun_ns": rerun_ns(problem, schedule),
        "bound_ns": bound,
        "makespan_bound_ns": None if bound is None else once_ns(problem) + bound,
        "bound_among": f"plans that {plans}",
        "limit": limit,
        "time_limited": limit == "time",
    }
    return Plan(problem.trace, schedule.actions(), notes=notes)


def refused(
    problem: Problem, policy: str, least: Schedule | int, *, proven: bool, smallest: bool, plans: str = STAGED
) -> Infeasible:
    """The error where nothing fits.

    least: a plan that would fit in more, or the bytes that would do.
    proven: no plan of the class fits.
    smallest: proven that no plan of the class fits in less than `least`.
    plans: the class. Plans outside it may fit in less.
    """
    floor = least if isinstance(least, int) else least.peak()
    what = "no plan of this class fits" if proven else "no plan was found that fits"
    error = nothing_fits(
        problem,
        f"policy {policy!r}: {what} {format_bytes(problem.budget)}",
        floor,
        more="is the smallest budget that does" if proven and smallest else "would do",
        end=f" (of plans that {plans})" if proven else "",
    )
    error.proven = proven
    return error


def nothing_fits(
    problem: Problem, what: str, floor: int | None, *, more: str = "would do", end: str = ""
) -> Infeasible:
    """The error of a planner: what it has not found, and the bytes that it would need.

    Planners count bytes. Where the allocator gives addresses a run also needs what lies idle between blocks, so that no
    budget is known to fit, and the error says so.

    what: without its full stop. floor: None where no number is known. more: what holds of the floor. end: what follows.
    """
    if floor is None:
        return Infeasible(what + end)
    needed = f"{format_bytes(floor, digits=None)} {more}"
    if problem.platform.home(0).allocator.name != "exact":
        return Infeasible(f"{what}; without fragmentation {needed}{end}")
    return Infeasible(f"{what}; {needed}{end}", floor_bytes=floor)


def fastest(problem: Problem, plans: Iterable[Plan]) -> Plan:
    """Of some plans for the problem's trace, at least one, that whose replay ends first; the first where none fits.

    No run of a trace ends before its ops have run: where one takes no longer, the plans behind it are not asked for.
    """
    best: Plan | None = None
    least: int | None = None
    for plan in plans:
        best = best or plan
        try:
            end = problem.evaluate(plan).end
        except OutOfMemory:
            continue
        if least is None or end < least:
            best, least = plan, end
            if end <= problem.least_ns(plan):
                break
    assert best is not None
    return best
