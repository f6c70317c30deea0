"""Sublinear memory: keep the inputs of about sqrt(n) segments of a chain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Beside, PlansFrom, by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.sharing import alike, shared
from sim.solvers.checkpoints import rerun_regions
from sim.solvers.located import index_of
from sim.solvers.regions import chain_of, stage_regions
from sim.solvers.schedule import Schedule, schedule_of
from sim.trace.chain import Chain

GRID = 6


@dataclass(frozen=True, kw_only=True)
class Chen(RecomputationPlanner):
    """Keep one activation per segment of the forward chain; recompute each segment once, before its backward.

    Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
        arXiv:1604.06174: the O(sqrt n) plan of section 4.2, and Algorithm 3 (memory planning with a
        threshold) with its search over the threshold.
    Bounds: on n equal stages the peak is about 2 sqrt(n) activations; at most one more forward pass, because
        no op runs more than twice. Plans in O(stages) for each of 8 thresholds.
    Departs: cuts are possible at the stage borders of the trace's chain. The last segment is still resident
        when backward begins and is not recomputed. The platform's budget plays no part. The recursive scheme of
        section 4.3 is `vlad`.

    method: "search" tries thresholds and takes the least estimated peak; "threshold" uses `threshold`;
        "sqrt" makes `segments` of equal numbers of stages.
    threshold: bytes that a segment may produce before it is cut, for "threshold".
    segments: number of segments for "sqrt"; None takes the integer square root of the number of stages.
    Raises PolicyError where the trace is not a chain, naming the op.
    """

    recomputes = True
    needs = frozenset({"chain"})
    fidelity = "equations"
    other_values = by_parameter(
        method="sqrt", threshold=Beside(1 << 26, method="threshold"), segments=Beside(3, method="sqrt")
    )

    method: Literal["search", "threshold", "sqrt"] = "search"
    threshold: Annotated[int, Ge(0)] | None = None
    segments: Annotated[int, Ge(1)] | None = None

    def __post_init__(self) -> None:
        if (self.method == "threshold") != (self.threshold is not None):
            raise PolicyError("policy 'chen': threshold goes with method='threshold'")
        if self.segments is not None and self.method != "sqrt":
            raise PolicyError("policy 'chen': segments goes with method='sqrt'")

    @property
    def plans_from(self) -> PlansFrom:  # type: ignore[override]
        """What is kept after all depends on the budget."""
        return "problem" if self.remove_unnecessary else "machine"

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations, segment by segment."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        line = chain_of(problem, "chen")
        if self.method == "sqrt":
            ends = equal_segments(len(line), self.segments or math.isqrt(len(line)))
        elif self.threshold is not None:
            ends = threshold_segments(line, self.threshold)[0]
        else:
            ends = searched_segments(line)
        regions = stage_regions(line, ends)

        def schedule() -> Schedule:
            index = index_of(problem)
            return schedule_of(index, rerun_regions(index, regions, skip_last=True))

        if self.remove_unnecessary:
            actions = self.finished(problem, schedule()).actions()
        else:
            key = "chen", tuple((region.forward, frozenset(region.backward)) for region in regions)
            actions = alike(problem.trace, key, lambda: schedule().actions())
        return Plan(problem.trace, actions, notes={"segment_ends": tuple(ends)})


def equal_segments(stages: int, count: int) -> list[int]:
    """The last stage of each of `count` segments, the first ones longest where they can't be equal."""
    length = math.ceil(stages / min(count, stages))
    return [*range(length - 1, stages - 1, length), stages - 1]


def threshold_segments(line: Chain, threshold: int) -> tuple[list[int], int, int]:
    """Algorithm 3: cut where more than `threshold` bytes have been made since the last cut.

    Returns the last stage of each segment; x, the bytes kept; y, the most bytes that a segment makes.
    The estimated peak is x + y.
    """
    ends: list[int] = []
    made = kept = most = 0
    for i, stage in enumerate(line.stages):
        made += stage.xbar
        most = max(most, made)
        if made > threshold and i < len(line) - 1:
            ends.append(i)
            kept += line.x[i + 1]
            made = 0
    return [*ends, len(line) - 1], kept, most


def searched_segments(line: Chain) -> list[int]:
    """The segments of least estimated peak among thresholds round sqrt(x y) of the cut everywhere."""
    ends, kept, most = threshold_segments(line, 0)
    middle = math.sqrt(kept * most)
    best, found = kept + most, ends
    for step in range(GRID):
        factor = 2.0 ** (step / (GRID - 1) - 0.5)  # from 1 / sqrt(2) to sqrt(2)
        ends, kept, most = threshold_segments(line, int(middle * factor))
        if kept + most < best:
            best, found = kept + most, ends
    return found
