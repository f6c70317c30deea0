"""What of a training job's memory is there before any activation: weights, optimizer state, gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.hardware.platform import Platform
from sim.policies import load
from sim.policies.traits import MANAGED_AS
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE
from sim.units import format_bytes

WORDS = {"weights": "weights", "gradients": "gradients", "optimizer_state": "optimizer state"}


@dataclass(frozen=True)
class State:
    """Bytes of the training state, and of the memory that it begins in.

    tier: name of that memory.
    capacity: its bytes, within the budget.
    total: bytes of all memories of the machine together, with that one within the budget.
    weights, optimizer_state: bytes of all tensors of that role; they live through the whole iteration.
    gradients: bytes of those that the optimizer reads, or, where that is more, of those that microbatches add to (whose
        part the optimizer reads under ZeRO's level 1); how many of them live at once depends on the optimizer.
    resident: what each role keeps in `tier` from the start unless a policy manages the role, by the word that
        policies declare.
    """

    tier: str
    capacity: int
    total: int
    weights: int
    gradients: int
    optimizer_state: int
    resident: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer_state

    @property
    def exceeds_all(self) -> bool:
        """Whether weights and optimizer state alone are more than all memories together, so that no plan fits."""
        return sum(self.resident.values()) > self.total

    def left_by(self, policy: str, *, gradients: bool = False) -> int:
        """Bytes of weights and optimizer state that a policy, or a composition, must leave where they begin.

        gradients: with all gradients, which is how much it leaves where none of them is applied before the last exists.
        """
        return self.left(load(policy).manages, gradients=gradients)

    def left(self, managed: Collection[str], *, gradients: bool = False) -> int:
        """As `left_by`, for a policy that manages these."""
        held = {**self.resident, **({"gradients": self.gradients} if gradients else {})}
        return sum(size for role, size in held.items() if role not in managed)

    def text(self) -> str:
        """One line: what there is of each, and whether the memory holds it."""
        each = [f"{word} {format_bytes(getattr(self, key))}" for key, word in WORDS.items() if getattr(self, key)] or [
            "none"
        ]
        held = sum(self.resident.values())
        verdict = ""
        if self.exceeds_all:
            verdict = f": weights and optimizer state alone exceed the {format_bytes(self.total)} of all memories"
        elif held > self.capacity:
            verdict = f": weights and optimizer state alone exceed the {format_bytes(self.capacity)} of {self.tier}"
        elif self.bytes > self.capacity:
            verdict = f": together more than the {format_bytes(self.capacity)} of {self.tier}"
        return f"state: {', '.join(each)}{verdict}"


def state_of(trace: Trace, platform: Platform) -> State:
    """The state of a trace on the device that begins with most of it; O(tensors)."""
    home = platform.home(0)
    columns = trace.tensor_columns
    own = columns.replaces < 0  # what is written in place has the storage of what it replaces
    begins = own & (trace.producer < 0) & np.isin(columns.role, PERSISTENT)
    device = _devices(trace)
    held = np.bincount(device[begins], weights=columns.bytes[begins], minlength=trace.devices)
    mine = device == int(held.argmax())
    begins &= mine
    resident = {
        str(MANAGED_AS[role]): int(columns.bytes[begins & (columns.role == ROLE_CODE[role])].sum())
        for role in ("weight", "optimizer_state")
    }
    made = np.flatnonzero((trace.producer >= 0) & np.isin(columns.role, PERSISTENT))
    updates = np.unique(trace.producer[made]).tolist()  # the ops that update what persists
    read = {t for op in updates for t in trace.reads(op) if columns.role[t] == ROLE_CODE["gradient"]}
    gradients = max(
        sum(int(columns.bytes[t]) for t in each if mine[t]) for each in (_storages(trace, read), _sums(trace))
    )
    total = sum(tier.capacity for tier in platform.tiers)
    return State(home.name, home.capacity, total, resident["weights"], gradients, resident["optimizer_state"], resident)


def _devices(trace: Trace) -> NDArray[np.int64]:
    """Per tensor the device of the op that produces it, or of its first reader; the first for one without any."""
    ops = [int(made) if made >= 0 else next(iter(trace.readers(t)), -1) for t, made in enumerate(trace.producer)]
    device = np.append(trace.op_columns.device, 0)
    return device[np.array(ops, np.int64)].astype(np.int64)


def _storages(trace: Trace, tensors: Iterable[int]) -> set[int]:
    return {_storage(trace, t) for t in tensors}


def _sums(trace: Trace) -> set[int]:
    """The gradients that backward adds to, microbatch by microbatch."""
    columns = trace.tensor_columns
    added = (columns.replaces >= 0) & (columns.role == ROLE_CODE["gradient"]) & (trace.producer >= 0)
    backward = trace.op_columns.phase[np.where(added, trace.producer, 0)] == PHASE_CODE["backward"]
    return _storages(trace, np.flatnonzero(added & backward).tolist())


def _storage(trace: Trace, tensor: int) -> int:
    """The first tensor in the storage of this one, which scaled or clipped gradients share."""
    while trace.tensor_columns.replaces[tensor] >= 0:
        tensor = int(trace.tensor_columns.replaces[tensor])
    return tensor
