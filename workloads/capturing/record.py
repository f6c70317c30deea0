"""The record of a step: storages and their lifetimes, ops and what they touch. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Storage:
    """One storage, however many views it has.

    bytes: its size.
    role, name, dtype, shape, layer, saved_for: as for `sim.trace.Tensor`.
    made: the op that produced it, -1 if it existed before the iteration.
    freed: the last op that had run when PyTorch released it, None if it still lives.
    mutated: whether an op of the iteration wrote it in place.
    unbound: the last op that had run when the program's own variables had let go of it, -1 where that is not known.
    appeared: the op that first reads it, where no op that was recorded made it (an array's memory), else -1.
    """

    bytes: int
    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    made: int = -1
    freed: int | None = None
    mutated: bool = False
    layer: int = -1
    saved_for: str = ""
    unbound: int = -1
    appeared: int = -1


@dataclass
class Kernel:
    """One dispatched op that computes or allocates; reads and writes are ids of storages.

    op: as PyTorch prints it.
    module: path of its module.
    phase, layer, dtype, random: as for `sim.trace.Op`.
    flops, executed: those that PyTorch's counter counts, and those of them that the kernel executes.
    reads: storages that it reads.
    made: storages that it allocates.
    changed: storages that it writes in place.
    touched: bytes that it reads and writes.
    allocates: it only allocates memory; nothing runs.
    recomputed: a forward op that checkpointing recomputes.
    """

    op: str
    module: str
    phase: str
    layer: int
    reads: tuple[int, ...]
    made: tuple[int, ...]
    changed: tuple[int, ...]
    flops: int
    executed: int
    touched: int
    dtype: str
    random: bool
    allocates: bool
    recomputed: bool


@dataclass
class Recording:
    """One iteration: its ops in order, and all storages by id."""

    kernels: list[Kernel] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    """The kernels, by position, by which autograd itself adds up gradients."""
    folded: int = 0
    """Ops that only create another view of a storage, or touch no tensor."""
    mapped: dict[str, int] = field(default_factory=dict)
    """Calls that were sent to the kernels of a GPU, by name."""
    assumed: dict[str, int] = field(default_factory=dict)
    """What could not be known without data, and how often the step asked for it."""
    host: int = 0
    """Storages that PyTorch would keep on the host; they are left out."""
    layers: tuple[str, ...] = ()
    """Per number of a layer the path of its module; a module that is called several times has several numbers."""
    parameters: int = 0
    tf32: tuple[str, ...] = ()
    """The kinds of op whose fp32 operands may be rounded to TF32."""
    convolutions: dict[bool, int] = field(default_factory=dict)
    """How many convolutions of the forward pass are of images with channels last (True), and of others."""
    version: str = ""
