"""Storages of a foreign trace and the tensors that represent them: each in-place write creates a new tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sim.trace.builder import TraceBuilder


@dataclass
class Storages:
    """The tensors that represent storages; a key identifies a storage while it lives.

    builder: of the trace.
    now: the current tensor of each storage.
    first: the first tensor of each storage.
    versions: how often each storage was overwritten.
    roles: the role of each storage, which later versions keep.
    """

    builder: TraceBuilder
    now: dict[Hashable, int] = field(default_factory=dict)
    first: dict[Hashable, int] = field(default_factory=dict)
    versions: dict[Hashable, int] = field(default_factory=dict)
    roles: dict[Hashable, str] = field(default_factory=dict)

    def make(self, key: Hashable, name: str, size: int, role: str, *, dtype: str = "", layer: int = -1) -> int:
        """The first tensor of a new storage."""
        self.now[key] = self.first[key] = self.builder.tensor(name, size, role, dtype=dtype, layer=layer)
        self.versions[key], self.roles[key] = 0, role
        return self.now[key]

    def change(self, key: Hashable, name: str, *, dtype: str = "", layer: int = -1) -> int:
        """The next tensor of a storage that is written in place."""
        old = self.now[key]
        self.versions[key] += 1
        label = f"{name}.v{self.versions[key]}"
        size, role = self.builder.bytes_of(old), self.roles[key]
        self.now[key] = self.builder.tensor(label, size, role, dtype=dtype, layer=layer, replaces=old)
        return self.now[key]
