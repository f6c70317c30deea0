"""Mimose: estimate from the input's size what each block will keep, and checkpoint as few as memory requires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from sim.errors import PolicyError
from sim.plan import Plan, Problem, Run
from sim.policies.base import by_parameter
from sim.policies.recomputation import RecomputationPlanner
from sim.policies.recompute.mimose.shuttling import Blocks, Measured, blocks_of, measured
from sim.solvers.outcome import refused
from sim.solvers.schedule import Schedule
from sim.trace.graph import Trace
from sim.trace.tensor import ROLE_CODE

DEGREE = 2
ALIKE = 0.9
"""Blocks of at least this fraction of the largest one's bytes share its bucket."""
FITS_RELATIVELY, FITS_BYTES, LEAST_BYTES = 0.1, 10**7, 1024


@dataclass(frozen=True, kw_only=True)
class Mimose(RecomputationPlanner):
    """Plan checkpoints for each iteration, from the measured needs of inputs of other sizes.

    Three parts. Sheltered collecting: in the first iterations every block (layer) is checkpointed, and each
    block's forward runs twice, once plainly to measure what it keeps and once as checkpointed. Lightning
    estimator: per block, and for the whole model, a polynomial of degree 2 of the input's size, fitted by least
    squares. Responsive scheduler: the predicted deficit of memory must be covered by checkpointed
    blocks. They stand in buckets of nearly equal bytes, largest first; in a bucket earlier layers
    come first, for they are recomputed last, when memory is empty. The smallest bucket with a block that covers
    the deficit gives it, else `fallback` does, until all is covered. A plan is cached for all inputs that round up to
    the same size.

    The input's size is the trace's `sequence` (`meta`), else the bytes of its inputs. Give `simulate` one trace per
    iteration to see it respond: `simulate([transformer("gpt2", batch=4, sequence=s) for s in lengths], …)`.

    Source: Liao et al., "Mimose: An Input-Aware Checkpointing Planner for Efficient Training on GPU", 2022,
        arXiv:2209.02478; IPDPS 2023; and the authors' public code, whose greedy strategy picks the same blocks on the
        same figures.
    Bounds: plans in O(blocks²) where nothing is cached; a collecting iteration costs one more forward pass than full
        checkpointing. Estimates are exact where what blocks keep is a polynomial of degree 2 of the size.
    Departs: in the first `collect` iterations an input whose size has been collected is planned for at once: the
        code measures it again, and here it would find the same. With fewer than three sizes the polynomial has
        a lower degree. The copies of weights that autocast keeps are not counted as a block's. Blocks are layers,
        where the code takes modules at the middle of the nesting; its other planner, a knapsack over halves of
        layers that it leaves switched off, is not included. See `verify`.

    collect: how many iterations may collect, at least 1.
    round_to: plans are made for sizes rounded up to a multiple of this.
    fallback: where no single block covers the deficit, take one of the `smallest` or
        of the `largest` bucket (the code: smallest).
    static_size: plan for inputs of this size whatever their own, the code's static mode; None: for their own.
    verify: compute the plan's exact peak before it runs, and where it would not fit add the excess to the deficit,
        until it fits or all blocks are checkpointed; where these would not fit, and keeping everything does,
        everything is kept. Without, the plan is the estimate's, as in the code.
    Raises PolicyError on several devices, without layers or a backward, or where history is of another batch or
        number of blocks; Infeasible where neither checkpointing all blocks fits nor keeping everything.
    """

    recomputes = True
    needs = frozenset({"layers", "backward", "history"})
    warm_up = 1
    fidelity = "code"
    rarely = "where its collecting iteration fits, nets this small seldom need a checkpoint after it"
    other_values = by_parameter(collect=1, round_to=1024, fallback="largest", static_size=128, verify=False)
    unseen = by_parameter(fallback="layers of a transformer are equal; see its own tests")

    collect: Annotated[int, Ge(1)] = 10
    round_to: Annotated[int, Ge(1)] = 5
    fallback: Literal["smallest", "largest"] = "smallest"
    static_size: Annotated[int, Ge(1)] | None = None
    verify: bool = True

    def plan(self, problem: Problem) -> Plan:
        """Drops and recomputations; notes: `phase` (`collect` or `respond`), and what was predicted and chosen."""
        blocks = blocks_of(problem, "mimose")
        size = input_size(problem.trace)
        notes: dict[str, Any] = {"input_size": size, "batch": problem.trace.meta.get("batch")}
        past = [run for run in problem.history if run.plan.notes.get("phase") == "collect"]
        self._check(blocks, notes, past)
        seen = {run.plan.notes["input_size"] for run in past}
        if not past or (len(problem.history) < self.collect and size not in seen):
            shuttled = blocks.shuttled()
            schedule = self._fitting(problem, blocks, shuttled)
            if schedule is shuttled:
                notes |= {"phase": "collect", "freed": blocks.freed, "blocks": tuple(range(len(blocks.regions)))}
            return Plan(problem.trace, schedule.actions(), notes=notes)
        rounded = -(-(self.static_size or size) // self.round_to) * self.round_to
        notes |= {"phase": "respond", "rounded": rounded}
        for run in reversed(problem.history):
            if run.plan.notes.get("phase") == "respond" and run.plan.notes["rounded"] == rounded:
                schedule = blocks.checkpointed(run.plan.notes["blocks"])
                if not self.verify or schedule.peak() <= problem.budget:
                    schedule = self.finished(problem, schedule)
                    return Plan(problem.trace, schedule.actions(), notes={**run.plan.notes, **notes, "cached": True})
                break
        return self._respond(problem, blocks, past, {**notes, "cached": False})

    def _check(self, blocks: Blocks, notes: dict[str, Any], past: Sequence[Run]) -> None:
        """Raise PolicyError where what was collected says nothing about this trace."""
        for run in past:
            known = run.plan.notes
            if known["batch"] != notes["batch"]:
                raise PolicyError(
                    f"policy 'mimose': estimates are for one batch size; this trace has batch {notes['batch']}, "
                    f"and batch {known['batch']} was collected"
                )
            if len(known["blocks"]) != len(blocks.regions):
                raise PolicyError(
                    f"policy 'mimose': this trace has {len(blocks.regions)} blocks, and a model of "
                    f"{len(known['blocks'])} was collected"
                )

    def _respond(self, problem: Problem, blocks: Blocks, past: Sequence[Run], notes: dict[str, Any]) -> Plan:
        """A new plan for the size in `notes`."""
        estimate = Estimate({run.plan.notes["input_size"]: measured(run, run.plan.notes["freed"]) for run in past})
        now = estimate.at(notes["rounded"])
        deficit = now.model - problem.budget
        chosen = cover(now.blocks, deficit, self.fallback)
        schedule = blocks.checkpointed(chosen)
        while self.verify and len(chosen) < len(now.blocks) and (over := schedule.peak() - problem.budget) > 0:
            deficit = max(deficit, sum(now.blocks[i] for i in chosen)) + over
            chosen = cover(now.blocks, deficit, self.fallback)
            schedule = blocks.checkpointed(chosen)
        notes |= {"blocks": chosen, "predicted": now, "deficit": deficit, "estimate_fits": estimate.fits}
        if len(chosen) == len(now.blocks):
            schedule = self._fitting(problem, blocks, schedule)
        return Plan(problem.trace, self.finished(problem, schedule).actions(), notes=notes)

    def _fitting(self, problem: Problem, blocks: Blocks, most: Schedule) -> Schedule:
        """The schedule that checkpoints all blocks, or one that keeps everything where a walk says that only it fits.

        Raises Infeasible where neither does.
        """
        main = problem.platform.engine_for(0)
        engines = set(problem.trace.op_columns.engine.values())
        # what runs on other engines may lie in other tiers, which the walk does not know
        alone = all(problem.platform.engine_for(0, name) == main for name in engines)
        if not (self.verify and alone) or most.peak() <= problem.budget:
            return most
        kept = blocks.checkpointed(())
        if kept.peak() > problem.budget:
            raise refused(problem, "mimose", most, proven=False, smallest=False)
        return kept


def input_size(trace: Trace) -> int:
    """What memory is estimated from: tokens a sample, else the bytes of all inputs."""
    sequence = trace.meta.get("sequence")
    if isinstance(sequence, int):
        return sequence
    columns = trace.tensor_columns
    return int(columns.bytes[(columns.role == ROLE_CODE["input"]) & (trace.producer < 0)].sum())


class Estimate:
    """Bytes as polynomials of the input's size, at most of degree 2, fitted to what was measured.

    fits: whether each polynomial is within a tenth, or within 10 MB, of all it was fitted to.
    """

    def __init__(self, points: Mapping[int, Measured]) -> None:
        sizes = np.array(list(points), np.float64)
        series = np.array([(*point.blocks, point.model) for point in points.values()], np.float64)
        self._factors = np.polyfit(sizes, series, min(DEGREE, len(points) - 1))  # (degree + 1, blocks + 1)
        wrong = np.abs(series - self._values(sizes))
        relatively = (wrong / np.maximum(series, LEAST_BYTES)).max(axis=0)
        self.fits = bool(((relatively < FITS_RELATIVELY) | (wrong.max(axis=0) < FITS_BYTES)).all())

    def at(self, size: int) -> Measured:
        """What blocks and model are expected to take, to the nearest byte."""
        *blocks, model = np.rint(self._values(np.array([size], np.float64))[0]).astype(np.int64).tolist()
        return Measured(tuple(blocks), model)

    def _values(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Shape (sizes, blocks + 1)."""
        powers: NDArray[np.float64] = np.vander(sizes, len(self._factors))
        return powers @ self._factors


def cover(sizes: Sequence[int], deficit: int, fallback: str = "smallest") -> tuple[int, ...]:
    """Blocks that together hold at least `deficit` bytes, or all; in the order in which they were chosen.

    sizes: bytes by block, in the order of the forward pass.
    """
    buckets: list[list[int]] = []  # the largest first; in each the last block first
    for block in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if buckets and sizes[block] >= ALIKE * sizes[buckets[-1][0]]:
            buckets[-1].append(block)
        else:
            buckets.append([block])
    waiting = [sorted(bucket, reverse=True) for bucket in buckets]
    chosen: list[int] = []
    while deficit > 0 and any(waiting):
        bucket, block = _next(waiting, sizes, deficit, fallback)
        bucket.remove(block)
        chosen.append(block)
        deficit -= sizes[block]
    return tuple(chosen)


def _next(waiting: list[list[int]], sizes: Sequence[int], deficit: int, fallback: str) -> tuple[list[int], int]:
    """A bucket and its block: the first that covers what is missing from the smallest bucket on, else the fallback."""
    for bucket in reversed(waiting):
        for block in reversed(bucket):
            if sizes[block] >= deficit:
                return bucket, block
    bucket = next(one for one in (waiting if fallback == "largest" else reversed(waiting)) if one)
    return bucket, bucket[-1]
