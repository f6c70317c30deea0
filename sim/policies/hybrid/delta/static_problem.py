"""The static problem behind evictors: what must be away at one op, and the least that this costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sim.plan import Problem
from sim.solvers.knapsack import Group, least_cover
from sim.solvers.located import index_of
from sim.solvers.schedule import schedule_of
from sim.trace.index import TraceIndex
from sim.trace.kept import kept
from sim.trace.tensor import ROLE_CODE


@dataclass(frozen=True)
class StaticProblem:
    """A knapsack at the op of the largest footprint.

    What is resident there, and not used by that op, may be away; it comes back by its producer's recomputation or
    by a copy. So many bytes have to be away; whatever else a plan does, it takes no less time of ops and copies.

    op: name of the op, "" where everything fits.
    need: bytes that have to be away while it runs.
    cost_ns: the least ns of recomputations, and of copies out and back, that bring so many bytes back.
    work_ns: that and every op run once.
    plans: the class of plans that this is a bound for.
    """

    op: str
    need: int
    cost_ns: int
    work_ns: int
    plans: str


def static_problem(
    problem: Problem, roles: Collection[str], trips: Mapping[int, tuple[int, int]]
) -> StaticProblem | None:
    """The least that plans take which evict tensors of these roles alone.

    None on several devices, where the device reads other tiers in place, or if nothing fits.

    trips: per size in bytes the ns of a copy out and back; {} where nothing can be copied.
    """
    problem = problem.on_engines()  # a bound of the time of ops and copies, without that of a CPU that launches
    trace, index = problem.trace, index_of(problem)
    engine = problem.platform.main_engine(0)
    if trace.devices > 1 or {*engine.reaches} - {engine.home}:
        return None
    once = sum(problem.cost.op_ns(op) for op in range(len(index.reads)))
    held = kept(trace, "held_in_order", problem.platform.timing_hash, lambda: schedule_of(index, {}).peaks()[1:])
    worst = max(range(len(held)), key=held.__getitem__, default=-1)
    need = held[worst] - problem.budget if held else 0
    cost = least_cover(_groups(problem, index, worst, roles, trips), need) if need > 0 else 0
    if cost is None:
        return None
    name = trace.op_columns.name[worst] if need > 0 else ""
    plans = f"plans that run the ops in order and evict nothing but what is of role {' or '.join(sorted(roles))}"
    if name:
        plans += f", by the static problem at {name!r}"
    return StaticProblem(name, max(need, 0), cost, once + cost, plans)


def _groups(
    problem: Problem, index: TraceIndex, worst: int, roles: Collection[str], trips: Mapping[int, tuple[int, int]]
) -> list[Group]:
    """What may be away at an op, by producer: one recomputation brings all of its results back."""
    trace, outputs = problem.trace, set(problem.trace.outputs)
    codes = {ROLE_CODE[role] for role in roles}
    main = problem.platform.engine_for(0)
    others = [op for op, name in trace.op_columns.engine.items() if problem.platform.engine_for(0, name) != main]
    read_elsewhere = {t for op in others for t in index.reads[op]}  # that copy is made anyway
    used = {*index.reads[worst], *index.writes[worst], *(index.replaces[t] for t in index.writes[worst])}
    made: dict[int, list[tuple[int, int | None]]] = {}
    for t, size in enumerate(index.size):
        producer = index.producer[t]
        if not size or index.role[t] not in codes or t in used or not producer < worst < index.overwritten_at[t]:
            continue
        last, over = int(trace.last_use[t]), index.overwritten_at[t]
        if max(last, index.released[t], over if over < len(index.reads) else -1) <= worst and t not in outputs:
            continue
        out, back = trips.get(size, (None, None))
        cost: int | None = None
        if t in read_elsewhere:
            cost = 0
        elif last <= worst:  # nothing reads it any more: away for good, an output in another tier
            cost = 0 if t not in outputs else out
        elif out is not None and back is not None:
            cost = back if producer < 0 else out + back  # what begins in another tier need not leave
        key = producer if producer >= 0 else -1 - t
        made.setdefault(key, []).append((size, cost))
    return [Group(items, problem.cost.op_ns(op) if op >= 0 else None) for op, items in sorted(made.items())]
