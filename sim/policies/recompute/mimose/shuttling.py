"""Measuring blocks by running each twice: the collecting iteration of an input-aware planner, and its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.errors import PolicyError
from sim.log import CAUSE
from sim.plan import Problem
from sim.plan import Run as Iteration
from sim.solvers.checkpoints import cached_casts, named, rerun_regions
from sim.solvers.located import index_of
from sim.solvers.regions import Region, layer_regions
from sim.solvers.schedule import Schedule, TraceIndex, backward_slice, schedule_of
from sim.trace.chain import FORWARD


@dataclass(frozen=True, eq=False)
class Blocks:
    """The layers of a trace as blocks that can be checkpointed.

    casts: 16-bit copies of weights that autocast keeps to the end of the forward pass, and the op that ends it.
    """

    index: TraceIndex
    regions: Sequence[Region]
    casts: Mapping[int, int]

    def checkpointed(self, chosen: Sequence[int]) -> Schedule:
        """The iteration with the chosen blocks recomputed just before their backward."""
        reruns = rerun_regions(self.index, [self.regions[i] for i in chosen])
        return schedule_of(self.index, reruns, hold={**named(self.index, self.regions), **self.casts})

    @cached_property
    def freed(self) -> tuple[tuple[int, ...], ...]:
        """Per block the tensors that are resident from its forward to its backward, unless it is checkpointed."""
        index, everything = self.index, self.checkpointed(range(len(self.regions)))
        # a tensor that a backward op frees was resident all the time, and is only recomputed for its own block
        forward = (index.trace.op_columns.phase == FORWARD).tolist()
        pairs = zip(everything.steps, everything.drops, strict=True)
        dropped = {t for (op, anchor), gone in pairs if anchor < 0 and forward[op] for t in gone}
        freed = []
        for region in self.regions:
            inside = set(region.forward)
            made = [t for op in region.forward for t in index.writes[op] if t in dropped and t not in self.casts]
            freed.append(tuple(t for t in made if not inside.issuperset(index.trace.readers(t))))
        return tuple(freed)

    def shuttled(self) -> Schedule:
        """The collecting iteration: each block runs plainly, keeping all it would keep, then checkpointed.

        Between the two runs it holds what a plain forward keeps, so that it can be measured; then
        that is dropped, and the second run keeps the block's results alone. Random ops draw the same numbers as before.
        """
        index = self.index
        reruns: dict[int, list[int]] = {}
        hold = dict(self.casts)
        for region in self.regions:
            last, inside = region.forward[-1], set(region.forward)
            made = [t for op in region.forward for t in index.writes[op]]
            outside = [t for t in made if not inside.issuperset(index.trace.readers(t))]
            ops = [op for op in region.forward if not self.casts.keys() >= set(index.writes[op])]
            legal = index.can_run_together(ops, last + 1)
            if len(legal) < len(ops):
                legal = backward_slice(index, legal, outside)
            reruns[last + 1] = legal
            hold.update({t: last for t in outside if t not in self.casts})
        for anchor, ops in rerun_regions(index, self.regions).items():
            reruns.setdefault(anchor, []).extend(ops)
        return self._with_casts_kept(schedule_of(index, reruns, hold=hold))

    def _with_casts_kept(self, schedule: Schedule) -> Schedule:
        """Second runs of blocks leave the cached copies of weights where they are."""
        drops = [list(dropped) for dropped in schedule.drops]
        place = {op: i for i, (op, anchor) in enumerate(schedule.steps) if anchor < 0}
        for i, (_, anchor) in enumerate(schedule.steps):
            early = [t for t in drops[i] if anchor >= 0 and self.casts.get(t, -1) >= anchor]
            for t in early:
                drops[i].remove(t)
                drops[place[self.casts[t]]].append(t)
        return Schedule(schedule.index, schedule.ops, schedule.anchors, drops)


def blocks_of(problem: Problem, policy: str) -> Blocks:
    """One block per layer. Raises PolicyError on several devices, without layers, or without a backward phase."""
    trace = problem.trace
    if trace.devices > 1:
        raise PolicyError(f"policy {policy!r} plans for one device; this trace has {trace.devices}")
    if not (trace.op_columns.phase == 1).any():
        raise PolicyError(f"policy {policy!r} needs a trace with a backward phase")
    index = index_of(problem)
    regions = layer_regions(index, policy)
    return Blocks(index, regions, cached_casts(index, regions))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one collecting iteration showed, in bytes.

    blocks: per block what it keeps from forward to backward.
    model: what the iteration would have needed, had no block been checkpointed: its peak with all that blocks keep
        resident from their first run to their end. Where a block is recomputed meanwhile, it is a little too much.
    """

    blocks: tuple[int, ...]
    model: int


def measured(iteration: Iteration, freed: Sequence[Sequence[int]]) -> Measured:
    """Read the log of a collecting iteration; sizes are as the tier's allocator counts them."""
    log = iteration.log
    home = log.platform.tier_ids[log.platform.home(0).name]
    rows = log.changes[log.change("tier") == home]
    made = rows[rows[:, 5] == CAUSE["made"]]
    tensors, first = np.unique(made[:, 3], return_index=True)
    size = dict(zip(tensors.tolist(), made[first, 2].tolist(), strict=True))
    blocks = tuple(sum(size.get(t, 0) for t in kept) for kept in freed)
    delta = rows[:, 2].copy()
    for t in {t for kept in freed for t in kept}:
        mine = np.flatnonzero(rows[:, 3] == t)
        delta[mine[1:-1]] = 0  # it stays between
    return Measured(blocks, int(np.cumsum(delta).max(initial=0)))
