"""What is recorded of a step: storages and when they lived, ops and what they touched. No PyTorch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Storage:
    """One storage, however many views it has.

    made: the op that made it, -1 if it was there before the iteration. freed: the last op that had run when
    PyTorch released it, None if it still lives. mutated: whether an op of the iteration wrote it in place.
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


@dataclass
class Kernel:
    """One dispatched op that computes or allocates; reads and writes are ids of storages.

    made: storages it allocates. changed: storages it writes in place. touched: bytes it reads and writes.
    allocates: it only takes memory, nothing runs. again: a forward op that checkpointing runs again.
    """

    op: str
    module: str
    phase: str
    layer: int
    reads: tuple[int, ...]
    made: tuple[int, ...]
    changed: tuple[int, ...]
    flops: int
    touched: int
    dtype: str
    random: bool
    allocates: bool
    again: bool


@dataclass
class Recording:
    """One iteration: its ops in order, and all storages by id."""

    kernels: list[Kernel] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    folded: int = 0
    """Ops that only make another view of a storage, or touch no tensor."""
    mapped: dict[str, int] = field(default_factory=dict)
    """Calls that were sent to the kernels of a GPU, by name."""
    host: int = 0
    """Storages that PyTorch keeps on the host beside a GPU, left out."""
    layers: tuple[str, ...] = ()
    parameters: int = 0
    version: str = ""
