"""TSO: segments of a chain, each in the execution mode that suits it, by dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from sim.declared import OneOf
from sim.errors import OutOfMemory
from sim.plan import Plan, Problem
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.rotor import costs_of, held_outside
from sim.policies.recompute.tso.captured import Part, captured, saved_dispatch, saved_launches
from sim.policies.recompute.tso.segment_dp import Segment, by_price, by_slots, tightest, total_ns
from sim.policies.recompute.tso.segments import MODES, Ints, figures_of, prices_of
from sim.solvers.checkpoints import rerun_regions
from sim.solvers.located import index_of
from sim.solvers.outcome import nothing_fits
from sim.solvers.regions import chain_of, first_backward, stage_regions
from sim.solvers.schedule import Schedule, TraceIndex, backward_slice, schedule_of
from sim.trace.chain import Chain
from sim.units import format_bytes

ATTEMPTS = 8


@dataclass(frozen=True, kw_only=True)
class Tso(RecomputationPlanner):
    """Cut the chain into segments, and run each op by op or as one captured graph, kept or recomputed.

    Modes: `eager` keeps what a segment's backward needs. `checkpoint` keeps its output, and recomputes its inside
    before its backward. `graph` captures its forward, and its backward, as CUDA graphs that are launched whole:
    its ops save their launch overhead, each capture costs time once, and all results stay until the graph ends.
    `graph_checkpoint` does both, and recomputes the segment as one graph. The cuts and the modes together take the
    least time within the budget. Nothing is offloaded.
    Source: Tang et al., "TSO", poster, EuroSys 2025, of which only a summary was at hand: recomputation
        planned together with execution modes, by a segmented, convex-optimised dynamic program.
    Bounds: no other choice of segments and modes takes less time by the model, sizes rounded up to slots.
        O(L^2 slots modes) time for L stages.
    Departs: a reconstruction: the modes, their costs and the recurrences are a reading of that summary, and no
        figure of the poster is claimed. Segments consist of stages of the trace's chain. Eager
        execution evicts nothing by itself. Modes change the trace: times and workspaces of captured ops. A
        captured op's time is fixed beforehand, so it shares no bandwidth pool. A plan may be faster than
        keeping all, by the saved launch overhead. Weight gradients, and other memory outside the chain,
        show in the plan's exact peak only; where that exceeds the budget the model's budget is bisected, as in `rotor`.

    modes: the modes that a segment may take.
    method: "slots", or "price": a price on saved bytes instead, with exact sizes, O(L modes) per price; it may miss
        the best plan, and on long chains beats rounding to slots.
    slots: parts into which the budget is divided, at least 2.
    launch: ns that a captured op saves, at most its engine's launch; None for exactly that, and for nothing where its
        time is measured.
    capture: ns to capture one graph, of which a segment has two; an assumed figure.
    replays: iterations that share a capture; an assumed figure.
    switch: ns for each change between captured and eager execution; an assumed figure.
    Notes: `segments` (first stage, last stage, mode), `model_ns`, the time of forward and backward by the model,
        `launch_ns` where `launch` is given.
    Raises PolicyError where the trace is not a chain or has no backward, Infeasible naming a budget that would do.
    """

    recomputes = True
    rewrites = True
    needs = frozenset({"chain", "backward"})
    solver = "dp"
    fidelity = "reconstruction"
    saves = MappingProxyType({"launch": "the ops of a captured segment are launched together, as one graph"})
    rarely = "it captures only where launches outweigh the capture"
    other_values = by_parameter(
        modes=("eager", "checkpoint"), method="price", slots=20, launch=10**6, capture=10**12, replays=1, switch=10**9
    )

    modes: Annotated[tuple[Annotated[str, OneOf(MODES)], ...], MinLen(1)] = tuple(MODES)
    method: Literal["slots", "price"] = "slots"
    slots: Annotated[int, Ge(2)] = 500
    launch: Annotated[int, Ge(0)] | None = None
    capture: Annotated[int, Ge(0)] = 10_000_000
    replays: Annotated[int, Ge(1)] = 1000
    switch: Annotated[int, Ge(0)] = 10_000

    def plan(self, problem: Problem) -> Plan:
        """The trace with captured segments; drops and recomputations."""
        line = chain_of(problem, "tso")
        first_backward(line, "tso")
        saved_launch = saved_launches(problem, self.launch)
        turn = costs_of(problem, index_of(problem), line).turn
        saved = saved_launch + saved_dispatch(problem)
        figures = figures_of(line, problem.trace, turn, saved, self._captures)
        prices = [prices_of(figures, MODES[mode]) for mode in self.modes]
        outside = held_outside(problem, line) + line.x[0]

        def filled(segments: Sequence[Segment]) -> _Filled:
            time = total_ns(prices, segments, 2 * self.switch)
            return _Filled(segments, time, self._runs(problem, line, segments, saved_launch))

        def attempt(room: int) -> _Filled | None:
            if room <= 0:
                return None
            if self.method == "price":
                segments = by_price(prices, room, 2 * self.switch)
            else:
                segments = by_slots(prices, room, self.slots, 2 * self.switch)
            return None if segments is None else filled(segments)

        # weight gradients come while activations go: hope that none adds to the peak, then make sure
        room, low, best = problem.budget - outside + line.gradients, 0, None
        high = room + room // 4  # the model may count too much, too
        for _ in range(ATTEMPTS):
            tried = attempt(room)
            excess = tried.runs.peak() - problem.budget if tried is not None else 0
            if tried is None or excess > 0:
                high = room
                room = room - excess if low < room - excess < room else (low + high) // 2
            else:
                low = room
                best = tried if best is None or tried.time < best.time else best
                if high - low <= problem.budget // self.slots:
                    break
                room = (low + high) // 2
        if best is None and "eager" in self.modes and _fits_as_it_is(problem):
            best = filled([(0, len(line), self.modes.index("eager"))])
        if best is None:
            floor = (best := filled(tightest(prices))).runs.peak()
            if floor > problem.budget:
                what = f"tso finds no segments of {len(line)} stages that fit {format_bytes(problem.budget)}"
                raise nothing_fits(problem, what, floor)
        notes = {
            "segments": tuple((i, j - 1, self.modes[q]) for i, j, q in best.segments),
            **self._said(),
            "model_ns": int(figures.uf.sum()) + sum(stage.ub for stage in line.stages) + best.time,
        }
        replayed = any(MODES[self.modes[q]].captured and MODES[self.modes[q]].recompute for _, _, q in best.segments)
        schedule = best.runs if replayed else self.finished(problem, best.runs)  # a captured graph is launched whole
        return Plan(schedule.index.trace, schedule.actions(), notes=notes)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The whole chain as two captured graphs: no mix of modes saves more launches for fewer captures."""
        if not any(MODES[mode].captured for mode in self.modes):
            return {}
        line = chain_of(problem, "tso")
        first_backward(line, "tso")
        whole = replace(self, modes=("graph",))
        runs = whole._runs(problem, line, [(0, len(line), 0)], saved_launches(problem, self.launch))
        return {"captured launches": Plan(runs.index.trace, runs.actions(), notes=self._said())}

    def _said(self) -> dict[str, int]:
        """What a plan says of the launch that a measured op is taken to have."""
        return {} if self.launch is None else {"launch_ns": self.launch}

    @property
    def _captures(self) -> int:
        """Nanoseconds per iteration for the two graphs of a segment."""
        return 2 * -(-self.capture // self.replays)

    def _runs(self, problem: Problem, line: Chain, segments: Sequence[Segment], saved_launch: Ints) -> Schedule:
        """The runs of a choice, over the trace as its modes make it."""
        regions = stage_regions(line, [j - 1 for _, j, _ in segments])
        modes = [MODES[self.modes[q]] for _, _, q in segments]
        parts: list[Part] = []
        charges: dict[int, int] = {}
        for k, (region, mode) in enumerate(zip(regions, modes, strict=True)):
            undoing = sorted(region.backward)
            # a forward op may be recomputed, and charged twice
            bearer = undoing[0] if undoing else region.forward[0]
            if mode.captured:
                parts += [Part(region.forward), Part(undoing, region.forward)]
                charges[bearer] = self._captures
            if k + 1 < len(modes) and mode.captured != modes[k + 1].captured:
                charges[bearer] = charges.get(bearer, 0) + 2 * self.switch
        trace = captured(problem, parts, saved_launch, {op: ns for op, ns in charges.items() if ns})
        index = TraceIndex(trace)
        reruns: dict[int, list[int]] = {}
        hold: dict[int, int] = {}
        for region, mode in zip(regions[:-1], modes, strict=False):
            if not mode.recompute:
                continue
            for anchor, ops in rerun_regions(index, [region], early_stop=not mode.captured).items():
                wanted = [t for op in region.backward for t in index.reads[op]]
                reruns.setdefault(anchor, []).extend(ops if mode.captured else backward_slice(index, ops, wanted))
            if mode.captured:
                hold.update((t, region.forward[-1]) for op in region.forward for t in index.writes[op])
        return schedule_of(index, reruns, hold=hold)


def _fits_as_it_is(problem: Problem) -> bool:
    """Whether nothing need be done: the count of bytes takes all memory for the device's, a replay does not."""
    try:
        problem.evaluate(Plan(problem.trace))
    except OutOfMemory:
        return False
    return True


@dataclass(frozen=True, eq=False)
class _Filled:
    """A choice, its time beyond one plain forward and backward by the model, and its runs."""

    segments: Sequence[Segment]
    time: int
    runs: Schedule
