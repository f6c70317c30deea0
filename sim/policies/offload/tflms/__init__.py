"""TFLMS: results that are read many levels of the graph later are swapped out and in, as far as memory is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Beside, Policy, by_parameter
from sim.policies.offload.tflms.counting import fits
from sim.policies.offload.tflms.swaps import Settings, Swapper
from sim.solvers.cascade import cascade

SHARE, DISTRIBUTED_SHARE = 0.9, 0.8
"""Of the memory that weights and states leave what is counted on, in the public code."""


@dataclass(frozen=True, kw_only=True)
class Tflms(Policy):
    """Swap out each result that some op reads more than a number of levels later, and in again for those readers.

    An op's level is the length of the longest path to it. A result's copy out begins when it is produced, and its space
    is free when that copy and the last near reader have ended. Far readers whose levels follow each other closely
    share a copy in; it begins when an op on a path to the first of them has ended. The number of levels is the
    greatest with which the bytes that are resident pass a count; then copies in begin as early, and are shared by
    as many readers, as passes it.
    Source: Le, Imai, Negishi, Kawachiya, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting",
        arXiv:1807.02037, and "Automatic GPU Memory Management for Large Neural Models in TensorFlow", ISMM 2019,
        doi:10.1145/3315573.3329984; parameters, their tuning and the count as in version 2 of its public code.
    Bounds: no copy with a threshold of as many levels as there are; synchronised both ways, with a copy in for each
        reader, a lower threshold never raises the peak. About log2(levels)² counts, each O(ops + swaps). Slower than
        `swap_all` where the greatest `swapin_ahead` that passes is small, or modes other than 0 make the device wait:
        both as published.
    Headline: ResNet-50 with 4.7 times the batch, 3DUnet with twice, on a POWER machine whose host link is NVLink.
        Here on `v100_16` ResNet-50 trains with 7.3 times the batch (1,394 images), over PCIe at 8 times the time per
        image.
    Departs: swaps are moves of a plan, not ops of the graph. Ops run in program order, so that counts follow it and not
        the levels, and a tensor whose copy in would begin before its last near reader has run stays until then.
        A trigger is the latest op of its level. Inputs, weights, gradients of weights, outputs, and what other engines
        or devices produce or read stay. A result of no more than one dimension stays, as published; one of unknown
        shape is swapped. Workspaces are counted. Tensors beyond the host's capacity go on to the tier behind it.

    swapout_threshold: levels beyond which a reader is far; None: tuned.
    swapin_ahead: how many levels before the first of its readers a copy in begins; None: tuned.
    swapin_groupby: how many levels apart two readers may be that share a copy in; None: tuned.
    sync_mode: what computation waits for: 0 for neither, 1 for copies out, 2 for copies in, which then begin at their
        reader, 3 for both; None: the first with which the lowest threshold passes.
    memory_share: of the memory that weights and optimizer state leave, the share that is counted on; None: 0.9, and
        0.8 in a run of several ranks.
    Notes of the plan: the four values.
    Raises PolicyError for a negative number, another mode, a share outside (0, 1], or a platform without a host tier.
    """

    moves = True
    needs = frozenset({"host"})
    fidelity = "equations"
    other_values = by_parameter(
        swapout_threshold=2,
        swapin_ahead=Beside(3, swapout_threshold=2),
        swapin_groupby=Beside(9, swapout_threshold=2),
        sync_mode=Beside(3, swapout_threshold=2),
        memory_share=0.5,
    )

    swapout_threshold: Annotated[int, Ge(1)] | None = None
    swapin_ahead: Annotated[int, Ge(1)] | None = None
    swapin_groupby: Annotated[int, Ge(0)] | None = None
    sync_mode: Literal[0, 1, 2, 3] | None = None
    memory_share: Annotated[float, Gt(0), Le(1)] | None = None

    def plan(self, problem: Problem) -> Plan:
        """The moves of the settings given or found; notes: the settings."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"tflms: {platform.name} has no host tier to swap to")
        swapper, ranks = Swapper(trace), trace.op_columns.ring or trace.op_columns.group
        share = self.memory_share or (DISTRIBUTED_SHARE if ranks else SHARE)
        settings = self._tuned(swapper, lambda s: fits(problem, swapper.stays(s), s, share))
        actions = swapper.actions(settings, platform, platform.host.name)
        return Plan(trace, cascade(trace, platform, actions, platform.host.name), notes=vars(settings))

    def _tuned(self, swapper: Swapper, passes: Callable[[Settings], bool]) -> Settings:
        """The settings, with what is not given tuned in the published order."""
        levels = swapper.levels
        off = Settings(levels, self.swapin_ahead or 1, self.swapin_groupby or 0, self.sync_mode or 0)
        if self.swapout_threshold is None and passes(off):
            return off
        found = replace(off, swapout_threshold=self.swapout_threshold or 1)
        if self.sync_mode is None:
            modes = (replace(found, sync_mode=mode) for mode in range(4))
            found = next((settings for settings in modes if passes(settings)), replace(found, sync_mode=3))
        if self.swapout_threshold is None:
            found = _greatest(found, "swapout_threshold", 1, levels, passes)
        if self.swapin_ahead is None:
            found = _greatest(found, "swapin_ahead", 1, levels, passes)
        if self.swapin_groupby is None:
            found = _greatest(found, "swapin_groupby", 0, levels, passes)
        return found


def _greatest(settings: Settings, name: str, low: int, high: int, passes: Callable[[Settings], bool]) -> Settings:
    """The settings with the greatest value of one that passes, by bisection; the lowest where none does."""
    if passes(replace(settings, **{name: high})):
        return replace(settings, **{name: high})
    while high - low > 1:
        middle = (low + high) // 2
        if passes(replace(settings, **{name: middle})):
            low = middle
        else:
            high = middle
    return replace(settings, **{name: low})
