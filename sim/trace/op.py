"""What a trace knows of one op."""

from __future__ import annotations

from dataclasses import dataclass

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
"""Kinds of op; a profile gives each an efficiency."""

PHASES = ("forward", "backward", "update")
"""Phases of an iteration, in order."""

SPLITS = ("batch", "batch_sum", "rows", "columns", "heads")
"""Ways in which an op may be split into equal parts.

`batch`: what it makes has one row a sample, except gradients of weights, which add up over the samples;
`batch_sum`: all that it makes adds up over them.
"""

KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}


@dataclass(frozen=True, slots=True)
class Implementation:
    """Another way to compute an op: its time relative to the op's own, and its workspace in bytes."""

    name: str
    time_factor: float
    workspace: int


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the computation; a view of one row of a `Trace`.

    reads, writes: ids of tensors. flops: floating-point operations. bytes: bytes the op touches in
    memory, None where it is the sum of its operands. workspace: bytes held only while it runs.
    device: index. engine: name of the engine that runs it, "" for the device's main one.
    priority: lower runs first where ops queue. group: joins the members of a collective or a send/recv
    pair, "" for none. random: draws random numbers (a second run replays the same seed).
    duration: measured nanoseconds, None where the platform's model decides. dtype: of its arithmetic.
    alternatives: other implementations. splits: the ways in which it may be split. releases: tensors that
    the program lets go of once the op has ended, in that order: no reads of it, and no edges.
    """

    id: int
    name: str
    kind: str
    phase: str
    layer: int = -1
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: int = 0
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
