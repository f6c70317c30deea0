"""Expert parallelism: of the replicas of a model, p next to each other have an equal part of the experts each.

Each of them has all other weights and its own part of the samples. In a layer with experts, an all-to-all sends each
row to the rank of its expert (dispatch), where it meets those of all p ranks for it, and another one sends the results
back (combine); so do two in backward. Of r rows of m bytes that a rank routes, it sends (p - 1) / p r m bytes each time
where experts are loaded evenly. A rank keeps 1 / p of the experts' weights, gradients and states; gradients of experts
are summed over the replicas that have the same experts, those of all else over all replicas.

With skewed routing ranks have different numbers of rows. The rank that is simulated has in every layer those of the
most loaded part of the experts (`sim.rewrites.experts`); the others wait for it in each all-to-all, so that its time is
theirs, and none has a higher peak. The counts of rows are exchanged first.

Lepikhin et al., "GShard", ICLR 2021; Rajbhandari et al., "DeepSpeed-MoE", ICML 2022, section 5.
Together with context parallelism a rank routes its part of the tokens, and exchanges rows with the ranks that have the
same part of their samples. Together with tensor parallelism each rank has its columns and rows of its experts, and
exchanges rows with the ranks that have the same.

Departs: experts have no capacity, and no token is dropped. Loads are those of the whole batch; each microbatch and each
rank is taken to route alike. Sorting, and the weighted sum of what a token's experts return, are done by the token's
rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.rewrites.dimensions import dimensions, operands
from sim.rewrites.experts import APART, EXPERTS, is_of_experts, row_span
from sim.rewrites.experts_in_turn import ExpertTurns, experts_in_turn
from sim.rewrites.rewriter import noted, slice_of
from sim.rewrites.slots import split_updates
from sim.trace.graph import Trace
from sim.trace.op import Op
from sim.trace.origin import Along, Expr
from sim.trace.tensor import Tensor


def experts_apart(trace: Trace) -> Trace:
    """The trace with updates of experts in ops of their own; where they run one after another, see `in_order`."""
    if experts_in_turn(trace):
        return trace
    return noted(split_updates(trace, lambda slot: int(is_of_experts(trace, slot.parameter))), **{APART: True})


class ExpertShare:
    """What the first of `ranks` ranks has of the experts of a trace.

    ops: those that work on each expert alone. has: tensors with a share for each expert.
    """

    def __init__(self, trace: Trace, ranks: int, rows: NDArray[np.bool_]) -> None:
        self.trace, self.ranks, self.rows = trace, ranks, rows
        dims = dimensions(trace)
        self.ops, self.has, self.family = dims.of_experts, dims.has[EXPERTS], dims.family
        self.ops_elsewhere = self.elsewhere = frozenset[int]()

    def claim(self, of: Expr) -> Along:
        """This rank's experts of a tensor."""
        return Along(of, EXPERTS, 0, 1, self.ranks)

    claim_op = claim
    """The same of an op."""

    def together(self, t: int, to_experts: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tensors that are sent together with one, to the experts or back, and those that arrive."""
        return (t,), (t,)

    def crosses(self, t: int, op: Op) -> bool:
        """Whether an op needs a tensor on another rank than its producer wrote it: at the tokens', or the experts'."""
        producer = int(self.trace.producer[t])
        if t not in self.has or self.family[t] or producer < 0:
            return False
        return (producer in self.ops) != (op.id in self.ops)

    def saved_for(self, t: Tensor, by_expert: bool) -> str:
        """Why a tensor is kept for backward at the experts, or at the tokens; "" if it is not read there."""
        ops, phase = self.trace.ops, self.trace.op_columns.phase
        readers = (r for r in self.trace.readers(t.id) if phase[r] == 1 and (r in self.ops) == by_expert)
        return t.saved_for if any(t.id in operands(ops[r]) for r in readers) else ""

    def weights(self, t: Tensor) -> dict[str, Any]:
        """Fields of a tensor with a share of equal size for each expert."""
        shape = t.shape
        if shape:  # experts come first, but where tokens' ranks count the rows of each
            at = next((i for i, length in enumerate(shape) if length > 1), 0)
            size, rest = divmod(shape[at], self.ranks)
            shape = None if rest else (*shape[:at], size, *shape[at + 1 :])
        return {"bytes": slice_of(t.bytes, 0, 1, self.ranks), "shape": shape}

    def rows_or_weights(self, t: Tensor, size: int, parts: int) -> dict[str, Any]:
        """Fields of a tensor of a microbatch, one of so many. size: its bytes, of all experts."""
        if not self.rows[t.id]:
            return self.weights(t)
        first, stop, total = row_span(self.trace, t.layer, 0, 1, self.ranks)
        shape = t.shape
        if shape:
            rows, rest = divmod(shape[0] * (stop - first), parts * total)
            shape = None if rest else (rows, *shape[1:])
        return {"bytes": slice_of(size, first, stop, total), "shape": shape}

    def share(self, op: Op, of_group: dict[str, Any], touched: int) -> dict[str, Any]:
        """Of the fields of an op of a group's microbatch those of this rank's rows. touched: bytes of its operands."""
        first, stop, total = row_span(self.trace, op.layer, 0, 1, self.ranks)
        duration, workspace = of_group["duration"], of_group["workspace"]
        before = sum(int(self.trace.tensor_columns.bytes[t]) for t in (*op.reads, *op.writes))
        return {
            **of_group,
            "flops": slice_of(of_group["flops"], first, stop, total),
            "bytes": None if op.bytes is None else -(-op.bytes * touched // max(before, 1)),
            "workspace": -(-workspace * (stop - first) // total),
            "duration": None if duration is None else -(-duration * (stop - first) // total),
        }

    def undivided(self, op: Op) -> dict[str, Any]:
        """Fields of an op on the weights of this rank's experts."""
        return {
            "flops": slice_of(op.flops, 0, 1, self.ranks),
            "bytes": None if op.bytes is None else -(-op.bytes // self.ranks),
            "workspace": -(-op.workspace // self.ranks),
            "duration": None if op.duration is None else -(-op.duration // self.ranks),
        }


def expert_share(trace: Trace, ranks: int, rows: NDArray[np.bool_]) -> ExpertShare | ExpertTurns:
    """What the first of so many ranks has of the experts of a trace."""
    return (ExpertTurns if experts_in_turn(trace) else ExpertShare)(trace, ranks, rows)


__all__ = ["ExpertShare", "expert_share", "experts_apart"]
