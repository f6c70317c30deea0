"""A chain cut into segments of stages, each run in one of several modes: what every segment costs in every mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.trace.chain import Chain
from sim.trace.graph import Trace
from sim.trace.tensor import ROLE_CODE

Ints = NDArray[np.int64]
FAR = 1 << 60


@dataclass(frozen=True, slots=True)
class Mode:
    """How a segment runs.

    captured: as one CUDA graph that is launched whole, else op by op.
    recompute: its inside is recomputed before its backward, else it stays resident.
    """

    captured: bool
    recompute: bool


MODES: Mapping[str, Mode] = {
    "eager": Mode(captured=False, recompute=False),
    "graph": Mode(captured=True, recompute=False),
    "checkpoint": Mode(captured=False, recompute=True),
    "graph_checkpoint": Mode(captured=True, recompute=True),
}


@dataclass(frozen=True, eq=False)
class Figures:
    """What the modes of a chain of L stages are priced with: per stage, times in ns, sizes in bytes; see `Stage`.

    x: L + 1 sizes.
    uf: forward time.
    turn: of it what a segment that ends here recomputes op by op.
    saved_launch_f, saved_launch_b: launch overhead that a captured graph saves, in forward and in backward.
    made_f, made_b: bytes of all results of either's ops.
    work_f, work_b: the largest workspace.
    capture: ns, for the graphs of one segment.

    The rest as in `Stage`.
    """

    x: Ints
    xbar: Ints
    forward_temp: Ints
    saving_temp: Ints
    backward_temp: Ints
    uf: Ints
    turn: Ints
    saved_launch_f: Ints
    saved_launch_b: Ints
    made_f: Ints
    made_b: Ints
    work_f: Ints
    work_b: Ints
    capture: int = 0

    def __len__(self) -> int:
        return len(self.xbar)


def figures_of(chain: Chain, trace: Trace, turn: Sequence[int], saved_launch: Ints, capture: int) -> Figures:
    """The figures of a chain. turn: per stage; saved_launch: per op ns that a captured graph saves; capture: ns."""
    c, columns = trace.op_columns, trace.tensor_columns
    # what takes over another's bytes needs none, and weight gradients stay whatever the mode
    fresh = np.where((columns.replaces < 0) & (columns.role != ROLE_CODE["gradient"]), columns.bytes, 0)
    total = np.concatenate(([0], np.cumsum(fresh[c.write_ids])))
    made = total[c.write_start[1:]] - total[c.write_start[:-1]]
    stages = chain.stages

    def sums(column: Ints, backward: bool) -> Ints:
        return np.array([column[list(s.backward if backward else s.forward)].sum() for s in stages], np.int64)

    def most(backward: bool) -> Ints:
        workspace = c.workspace
        parts = [workspace[list(s.backward if backward else s.forward)] for s in stages]
        return np.array([part.max(initial=0) for part in parts], np.int64)

    return Figures(
        x=np.array(chain.x, np.int64),
        xbar=np.array([s.xbar for s in stages], np.int64),
        forward_temp=np.array([s.forward_temp for s in stages], np.int64),
        saving_temp=np.array([s.saving_temp for s in stages], np.int64),
        backward_temp=np.array([s.backward_temp for s in stages], np.int64),
        uf=np.array([s.uf for s in stages], np.int64),
        turn=np.array(turn, np.int64),
        saved_launch_f=sums(saved_launch, False),
        saved_launch_b=sums(saved_launch, True),
        made_f=sums(made, False),
        made_b=sums(made, True),
        work_f=most(False),
        work_b=most(True),
        capture=capture,
    )


@dataclass(frozen=True, eq=False)
class ModePrices:
    """Of every segment i … j - 1 in one mode, at [i, j]: time beyond one plain forward and backward, ns, and bytes.

    FAR where j <= i. Shape (L, L + 1). A segment that ends the chain is not recomputed.

    saved: from its forward to its backward, its output included.
    peak: the most beyond what is resident before it, its input included, and never less for a longer segment.
    """

    mode: Mode
    cost: Ints
    saved: Ints
    peak: Ints

    @cached_property
    def lists(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Cost, saved and peak as lists, which are quicker to read one by one."""
        return self.cost.tolist(), self.saved.tolist(), self.peak.tolist()


def prices_of(figures: Figures, mode: Mode) -> ModePrices:
    """The prices of all segments in a mode, from running sums and maxima: O(L^2)."""
    count = len(figures)
    cost, saved, peak = (np.full((count, count + 1), FAR, np.int64) for _ in range(3))
    for i in range(count):
        f = _from(figures, i)
        row = slice(i + 1, count + 1)
        kept = np.cumsum(f.xbar)
        inside = np.cumsum(f.made_f)
        saved_launch = np.cumsum(f.saved_launch_f)
        if mode.captured:
            forward = inside + np.maximum.accumulate(f.work_f)
            saving = forward
            backward = kept + f.x[1:] + np.cumsum(f.made_b) + np.maximum.accumulate(f.work_b)
        else:
            entered = np.where(np.arange(count - i) > 0, f.x[:-1], 0)
            forward = np.maximum.accumulate(entered + f.x[1:] + f.forward_temp)
            saving = np.maximum.accumulate(kept + f.saving_temp)
            backward = np.maximum.accumulate(kept + f.x[1:] + f.backward_temp)
        cost[i, row] = f.capture - saved_launch - np.cumsum(f.saved_launch_b) if mode.captured else 0
        saved[i, row] = kept
        peak[i, row] = np.maximum.accumulate(np.maximum(saving, backward))
        if mode.recompute:
            early = slice(i + 1, count)
            run = np.cumsum(f.uf) - saved_launch if mode.captured else np.cumsum(f.uf) - f.uf + f.turn
            cost[i, early] += run[:-1]
            saved[i, early] = f.x[1:-1]
            most = np.maximum.accumulate(np.maximum(np.maximum(forward, backward), saving + f.x[1:]))
            peak[i, early] = most[:-1]
    return ModePrices(mode, cost, saved, peak)


def _from(figures: Figures, i: int) -> Figures:
    """The figures of the stages from i on."""
    columns = {key: value[i:] for key, value in vars(figures).items() if key != "capture"}
    return Figures(**columns, capture=figures.capture)
