"""The least time that any plan of a class takes: proven from trace, machine and budget, before anything runs.

    from sim import lower_bound, simulate

    bound = lower_bound(trace, platform, budget="7.5 GB")
    print(bound.text())
    run = simulate(trace, platform, "hybrid", budget="7.5 GB")
    print(bound.above(run.log), bound.outside(run.log))

A bound holds for a class of plans, and says which. Whether a run is one of that class is read from its log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from sim.analysis.lanes import MOVE, RECOMPUTE
from sim.arguments import explained
from sim.hardware.cost import op_times
from sim.hardware.ideal import ideal_ns
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.log import CAUSE, EventLog
from sim.solvers.moment_bound import NothingFits, movable, program_of
from sim.solvers.schedule import TraceIndex, schedule_of
from sim.solvers.trip import trip
from sim.trace.columns import distinct
from sim.trace.graph import Trace
from sim.trace.tensor import ROLE_CODE, ROLES
from sim.units import format_bytes, format_percent, format_time, to_bytes

KEEPING = (
    "run the ops as they are, drop, recompute and copy to the host and back what ops produce, and inputs, in whatever "
    "order and however often, and keep weights, optimizer state, weight gradients, outputs and what is overwritten in "
    "place"
)
"""The plans that a bound on one device is about."""
ANY = "run the ops as they are"
"""The plans that it is about elsewhere."""
SEVERAL = {"optimizer_state": "optimizer state", "temporary": "temporaries", "gradient": "weight gradients"}
MOST_OPS = 40_000
LONGEST_S = 20.0


@dataclass(frozen=True)
class LowerBound:
    """A proven lower bound on the time of an iteration.

    makespan_ns: no plan of the class takes less; None where none of them fits the budget.
    ops_ns: every op once, which is the bound wherever memory costs nothing.
    among: the class of plans, in words that follow "plans that".
    weaker: why the budget does not count, "" where it does.
    budget: bytes of each device's home tier.
    """

    makespan_ns: int | None
    ops_ns: int
    among: str
    weaker: str
    budget: int
    trace: Trace = field(repr=False)
    platform: Platform = field(repr=False)

    def above(self, log: EventLog) -> float | None:
        """How much longer than the bound a run took, as a fraction; None for one that is not of the class."""
        return self._above(log, self.outside(log))

    def _above(self, log: EventLog, outside: str) -> float | None:
        """The same of one whose `outside` is known."""
        return None if outside or not self.makespan_ns or not log.complete else log.end / self.makespan_ns - 1

    def record(self, log: EventLog) -> dict[str, Any]:
        """What a run's row says of the bound: `bound_ns`, `above_bound`, `outside_bound`."""
        outside = self.outside(log)
        return {"bound_ns": self.makespan_ns, "above_bound": self._above(log, outside), "outside_bound": outside}

    def line(self, log: EventLog) -> str:
        """How near a run is to the bound, in a sentence."""
        outside = self.outside(log)
        return self.line_of(self._above(log, outside), outside)

    def line_of(self, above: float | None, outside: str) -> str:
        """The same from what `record` keeps of a run."""
        if outside:
            return f"not compared with the bound, since it {outside}: {self.text()}"
        if above is None:
            return self.text()
        near = f"within {format_percent(above)} of what any plan of its class can reach"
        return f"{'no plan of its class is faster' if above < 5e-5 else near}: {self.text()}"

    def outside(self, log: EventLog) -> str:
        """What a run did that plans of the class do not, in words that follow its policy; "" for a run of the class."""
        return next(self._apart(log), "")

    def _apart(self, log: EventLog) -> Iterator[str]:
        if not _same_ops(log.trace, self.trace):
            yield "changes what is computed"
            return
        if self.among == ANY:
            return
        why, tensor, op = (log.interval(name) for name in ("why", "tensor", "op"))
        role, size = self.trace.tensor_columns.role, self.trace.tensor_columns.bytes
        moves = (why == MOVE) & (tensor >= 0)
        moved = tensor[moves]
        for other in distinct(role[moved[~self._may_leave[moved]]]).tolist():
            yield f"copies {_named(other)}"
        if (log.interval("bytes")[moves] < size[moved]).any():
            yield "compresses what it copies"
        tier, changed, cause = (log.change(name) for name in ("tier", "tensor", "cause"))
        born = np.isin(cause, (CAUSE["placed"], CAUSE["made"])) & (changed >= 0) & (tier != self._near[0])
        for other in distinct(role[changed[born]]).tolist():
            yield f"places {_named(other)} elsewhere"
        arrived = tier[cause == CAUSE["moved in"]]
        for other in distinct(arrived[~np.isin(arrived, self._near)]).tolist():
            yield f"copies to {self.platform.tiers[other].name!r}"
        if not self._index.gradient_ops.isdisjoint(op[why == RECOMPUTE].tolist()):
            yield "recomputes weight gradients"

    def text(self) -> str:
        """The bound in a sentence."""
        if self.makespan_ns is None:
            return f"no plan fits {format_bytes(self.budget)} among those that {self.among}"
        more = self.makespan_ns / self.ops_ns - 1 if self.ops_ns else 0.0
        beyond = f", {format_percent(more)} beyond" if more > 0.0 else ","
        why = f" ({self.weaker})" if self.weaker else ""
        least = format_time(self.makespan_ns, digits=4)
        return f"no plan takes less than {least}{beyond} every op once, among those that {self.among}{why}"

    @cached_property
    def _index(self) -> TraceIndex:
        return TraceIndex(self.trace)

    @cached_property
    def _may_leave(self) -> np.ndarray:
        may = np.zeros(len(self.trace.tensor_columns.bytes), np.bool_)
        may[[*movable(self._index), *inputs_of(self._index)]] = True
        return may

    @cached_property
    def _near(self) -> list[int]:
        """The home tier, and what is reached by way of the host, as positions in `platform.tiers`."""
        platform, home, host = self.platform, self.platform.home(0).name, self.platform.host
        found = [platform.tier_ids[home]]
        if host is None:
            return found
        out, back = platform.route(home, host.name), platform.route(host.name, home)
        for tier in platform.tiers:
            there, here = platform.route(home, tier.name), platform.route(tier.name, home)
            # over all links of the route to the host: nothing is faster than a copy to the host itself
            if there[: len(out)] == out and here[-len(back) :] == back:
                found.append(platform.tier_ids[tier.name])
        return found


@explained
def lower_bound(
    trace: Trace,
    platform: Platform | str | os.PathLike[str],
    budget: float | str | None = None,
    *,
    max_ops: int = MOST_OPS,
    seconds: float = LONGEST_S,
) -> LowerBound:
    """The least time of an iteration that any plan of a class takes.

    On one device it is the linear program of `sim.solvers.moment_bound` at the op where keeping everything takes the
    most memory: what is missing there is recomputed, or copied back over a link that has as much time as the ops, the
    recomputation and the waiting give it. It holds for every plan that drops, recomputes and copies what ops produce,
    offline or online. On several devices or engines, for devices that read the host in place, and where the program
    would take too long, the bound is that of the ops alone (`sim.analysis.bounds`), and `weaker` says why.

    platform: a platform, or the name or file of a profile.
    budget: bytes in every device's home tier, as an int or text such as "7 GB"; None for the platform's own.
    max_ops: the most ops of a trace for which the program is solved; 40,000 take some 4 seconds.
    seconds: the most that solving it may take.

    Raises ProfileError, UnitError.
    """
    machine = platform if isinstance(platform, Platform) else load_profile(platform)
    limited = machine if budget is None else machine.with_budget(to_bytes(budget))
    room, once = limited.home(0).capacity, ideal_ns(trace, limited)
    weaker = _not_planned_for(trace, limited, max_ops)
    if weaker:
        return LowerBound(once, once, ANY, weaker, room, trace, limited)
    index = TraceIndex(trace)
    bound = LowerBound(once, once, KEEPING, "", room, trace, limited)
    if schedule_of(index, {}).peak() <= room:
        return bound
    host = limited.host.name if limited.host and limited.route(limited.home(0).name, limited.host.name) else ""
    cost = op_times(trace, limited).total.tolist()
    route = partial(trip, limited, host) if host else None
    try:
        shares = program_of(index, cost, room, route, 1, inputs_of(index)).relax(room, seconds)
    except NothingFits:
        return LowerBound(None, once, KEEPING, "", room, trace, limited)
    if shares is None:
        return LowerBound(once, once, KEEPING, "the program took too long", room, trace, limited)
    return LowerBound(once + shares.bound, once, KEEPING, "", room, trace, limited)


def inputs_of(index: TraceIndex) -> list[int]:
    """Inputs of the iteration that may leave for the host: neither outputs nor overwritten."""
    trace, role = index.trace, ROLE_CODE["input"]
    stay = {*trace.outputs, *index.overwritten}
    return [t for t, producer in enumerate(index.producer) if producer < 0 and index.role[t] == role and t not in stay]


def _not_planned_for(trace: Trace, platform: Platform, max_ops: int) -> str:
    """Why the budget can't be taken into account, "" where it can."""
    if trace.devices > 1:
        return f"the budget does not count: {trace.devices} devices"
    main = platform.engine_for(0)
    others = {name for name in trace.op_columns.engine.values() if platform.engine_for(0, name) != main}
    if others:
        return f"the budget does not count: ops run on {', '.join(sorted(others))}, too"
    engine = platform.main_engine(0)
    if away := [tier for tier in engine.reaches if tier != engine.home]:
        return f"the budget does not count: {engine.name!r} reads {away[0]!r} in place"
    count = len(trace.op_columns.name)
    return f"the budget does not count: {count:,} ops, more than {max_ops:,}" if count > max_ops else ""


def _same_ops(trace: Trace, other: Trace) -> bool:
    """Whether two traces are equal but for how long the program holds tensors, which the bound leaves out."""
    return trace is other or trace.is_but_for_releases(other)


def _named(role: int) -> str:
    """A tensor's role, of several."""
    return SEVERAL.get(ROLES[role]) or f"{ROLES[role]}s"
