"""What a trace records about one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KINDS = (
    "matmul",
    "attention",
    "norm",
    "elementwise",
    "embedding",
    "softmax",
    "loss",
    "optimizer",
    "collective",
    "send",
    "recv",
    "conv",
    "pool",
    "reduce",
    "copy",
    "codec",
    "other",
)
"""Kinds of op; a profile gives each kind an efficiency."""

COMMUNICATION = ("collective", "send", "recv")
"""Kinds of op that several devices run together."""

PHASES = ("forward", "backward", "update")
"""The phases of an iteration, in order."""

AXES = (
    "data",
    "tensor",
    "context",
    "neighbour",
    "expert",
    "expert_data",
    "group",
    "data_context",
    "expert_data_context",
    "group_data",
    "group_context",
)
"""Directions in which symmetric ranks may lie: replicas of the model, parts of its layers, parts of a sample's tokens;
the same ranks, each of which sends to the one before it and receives from the one after it; of the replicas, those that
divide the experts among them, those that have the same experts, and those next to each other that keep gathered weights
together, or divide the training state; of all replicas, or those with the same experts, those that divide the tokens of
each, too; of the replicas, those of other groups that have the same part of what each group divides; and those of a
group with those that divide the tokens of each."""

SPLITS = ("batch", "batch_sum", "batch_own", "rows", "columns", "heads")
"""Ways in which an op may be split into equal parts.

`batch`: its results have one row per sample, except gradients of weights, which are summed over the samples.
`batch_sum`: all its results are summed over the samples.
`batch_own`: as `batch`, but with statistics over the samples (batch norm): parts have their own, and compute something
else than the whole. Results of one dimension are statistics; what it overwrites is renewed by each part in turn.
"""

FUNCTIONS = ("relu", "max_pool")
"""What an op of a kind computes, where a policy must tell it from others: the op itself, and its backward.

relu: max(x, 0); its backward needs of the saved result which elements are zero.
max_pool: the largest element of each window; its backward needs of what was saved where each maximum was.
"""

KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}


@dataclass(frozen=True, slots=True)
class Implementation:
    """Another way to compute an op.

    name: what the op's `alternatives` call it.
    time_factor: its time relative to the op's own.
    workspace: bytes that it holds while it runs.
    """

    name: str
    time_factor: float
    workspace: int


class Ring(NamedTuple):
    """How the ranks of a collective exchange what they do.

    axis: one of `AXES`: which ranks.
    ranks: how many, the own one included.
    passes: 1 for a reduce-scatter, an all-gather, an all-to-all or a step to the neighbour, 2 for an all-reduce.
    """

    axis: str
    ranks: int
    passes: int

    @property
    def steps(self) -> int:
        """How many transfers a rank makes one after the other: of a pass one to each other rank of the ring in turn,
        or a single one where it sends to all at once, or to its neighbour alone."""
        return self.passes * (1 if self.axis in ("expert", "neighbour") else self.ranks - 1)


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the computation: a row of a `Trace`.

    id: its row in the trace, which is its place in program order.
    name: unique within the trace.
    kind: one of `KINDS`.
    phase: one of `PHASES`.
    layer: index of the layer it belongs to, -1 for none.
    reads, writes: ids of tensors.
    flops: floating-point operations that it executes; its time follows from them.
    counted: those that PyTorch's counter and model FLOPs count, None where they are `flops`. A fused kernel with a
        causal mask executes fewer: it skips the blocks of scores that are masked.
    bytes: bytes that it touches in memory, None for the sum of its operands.
    workspace: bytes that it holds only while it runs.
    device: index of the device that runs it.
    engine: name of the engine that runs it, "" for the device's main one.
    priority: the lowest value runs first where ops queue.
    group: joins the members of a collective or a send/recv pair, "" for none.
    random: draws random numbers; a recomputation replays the same seed.
    duration: measured nanoseconds, None where the platform's cost model decides.
    dtype: number type of its arithmetic.
    alternatives: other implementations.
    splits: the ways in which it may be split, of `SPLITS`.
    releases: tensors that the program releases when the op ends, in this order. They are not reads and add no edges.
    unbinds: tensors of which the program's own variables let go when the op ends, while autograd still holds them.
        Under a checkpoint, which keeps nothing of what autograd saves, they are released here.
    views: for each result, the position in `reads` of the tensor whose storage it shares, -1 for its own; () where all
        have. A view has no bytes, and whoever reads it reads that tensor, too.
    function: one of `FUNCTIONS`, "" where it is none of them or not known.
    ring: of a collective how its ranks exchange. Where its group has no other members, they do the same on other parts
        and are not in the trace; else all are, as many as the ring has ranks.
    """

    id: int
    name: str
    kind: str
    phase: str
    layer: int = -1
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: int = 0
    counted: int | None = None
    bytes: int | None = None
    workspace: int = 0
    device: int = 0
    engine: str = ""
    priority: int = 0
    group: str = ""
    random: bool = False
    duration: int | None = None
    dtype: str = ""
    alternatives: tuple[Implementation, ...] = ()
    splits: tuple[str, ...] = ()
    releases: tuple[int, ...] = ()
    unbinds: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    function: str = ""
    ring: Ring | None = None
