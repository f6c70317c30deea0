"""Builds a trace from a recording: each storage becomes one tensor per value that it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads.capturing.record import Kernel, Recording, Storage
from workloads.importers.optrace import kind_of

PERSISTENT = ("weight", "optimizer_state")


def build_trace(recording: Recording, meta: dict[str, Any], rounding: int) -> Trace:
    """The trace of a recording.

    A storage lives as long as PyTorch held it. Where that is beyond its last reader (a Python local, a saved tensor),
    it is released by the last op that had run by then.

    recording: one iteration.
    meta: metadata of the trace.
    rounding: every size is rounded up to a multiple of this many bytes.
    """
    return _Building(recording, meta, rounding).run()


class _Building:
    def __init__(self, recording: Recording, meta: dict[str, Any], rounding: int) -> None:
        self.recording, self.rounding = recording, rounding
        self.builder = TraceBuilder(dict(meta))
        self.current: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.versions: dict[int, int] = {}
        self.tensor_names: dict[str, int] = {}
        self.op_names: dict[str, int] = {}

    def run(self) -> Trace:
        storages, kernels = self.recording.storages, self.recording.kernels
        self._name_addends()
        appearing = self._appearing()
        late = {i for storage_ids in appearing.values() for i in storage_ids}
        initial = [
            i
            for i, s in storages.items()
            if s.made < 0 and i not in late and (s.freed is None or s.freed >= max(s.appeared, 0))
        ]
        for i in initial:  # what was made before and leaves is work of no layer of this iteration
            self._tensor(i, storages[i] if storages[i].freed is None else replace(storages[i], layer=-1))
        leaving = [self.current[i] for i in initial if storages[i].freed is not None]
        if leaving:
            # a storage that exists at the start and is released during the iteration needs a producer, or it would stay
            self.builder.op("start", "copy", writes=leaving, bytes=0, duration=0)
        held: dict[int, list[int]] = {}
        for i, storage in storages.items():
            if storage.freed is not None:
                held.setdefault(storage.freed, []).append(i)
        idle = self._idle()
        for index, storage_ids in idle.items():
            held.setdefault(index - 1, []).extend(storage_ids)
        unbound = self._unbound()
        for index, kernel in enumerate(kernels):
            if index in appearing:
                self._appear(kernel, appearing[index])
            self._op(kernel, held.get(index, ()), unbound.get(index, ()), idle.get(index, ()))
        kept = [
            i
            for i, s in storages.items()
            if i in self.current and s.freed is None and (s.role in PERSISTENT or s.made >= 0 or s.mutated)
        ]
        carry = [(self.current[i], self.first[i]) for i in kept if storages[i].made < 0]
        return self.builder.build(outputs=[self.current[i] for i in kept], carry=carry)

    def _name_addends(self) -> None:
        """Give addends of gradients the role of a gradient: the parts of a tied weight's, those of microbatches."""
        storages = self.recording.storages
        for kernel in reversed(self.recording.kernels):  # in reverse, so that addends of a sum of sums are found
            results = [storages[i] for i in (*kernel.made, *kernel.changed)]
            if kernel.phase != "backward" or not any(result.role == "gradient" for result in results):
                continue
            if kernel.op.split(".")[1:2] not in (["add"], ["add_"]):
                continue
            for part in (storages[i] for i in kernel.reads):
                if part.role == "temporary" and part.made >= 0 and part.bytes == results[0].bytes:
                    part.role = "gradient"

    def _tensor(self, i: int, storage: Storage, replaces: int | None = None) -> int:
        size = -(-storage.bytes // self.rounding) * self.rounding
        if i in self.names:
            name = _unique(f"{self.names[i]}.v{self.versions[i]}", self.tensor_names)
        else:
            name = self.names[i] = _unique(storage.name, self.tensor_names)
        self.versions[i] = self.versions.get(i, 0) + 1
        self.current[i] = self.builder.tensor(
            name,
            size,
            storage.role,
            layer=storage.layer,
            shape=storage.shape,
            dtype=storage.dtype,
            replaces=replaces,
            saved_for=storage.saved_for,
        )
        self.first.setdefault(i, self.current[i])
        return self.current[i]

    def _appearing(self) -> dict[int, list[int]]:
        """Per kernel the storages that the program has made without an op (of an array) for it to read.

        Those that outlive the iteration may have been there when it started, and are taken to.
        """
        found: dict[int, list[int]] = {}
        for i, storage in self.recording.storages.items():
            if 0 <= storage.appeared <= (-1 if storage.freed is None else storage.freed):
                found.setdefault(storage.appeared, []).append(i)
        return found

    def _appear(self, kernel: Kernel, storage_ids: Iterable[int]) -> None:
        """Add an op that produces what a kernel is the first to read."""
        writes = [self._tensor(i, self.recording.storages[i]) for i in storage_ids]
        name = _unique("from_host", self.op_names)
        self.builder.op(name, "other", writes=writes, phase=kernel.phase, layer=kernel.layer, bytes=0, duration=0)

    def _idle(self) -> dict[int, list[int]]:
        """Per kernel the storages that it overwrites without reading them, and that no op has used for a while.

        The old value has had its last reader, but its storage is there until it is overwritten: the value is released
        just before that, and the new one needs the bytes again. What exists when the iteration starts is kept anyway.
        """
        storages = self.recording.storages
        last = {i: -1 for i, storage in storages.items() if storage.freed is not None}
        found: dict[int, list[int]] = {}
        for index, kernel in enumerate(self.recording.kernels):
            for i in kernel.changed:
                if i not in kernel.reads and last.get(i, index) < index - 1:
                    found.setdefault(index, []).append(i)
            last.update(dict.fromkeys((*kernel.made, *kernel.changed), index))
            last.update((i, index) for i in kernel.reads if i in last)
        return found

    def _unbound(self) -> dict[int, list[int]]:
        """Per forward kernel the storages of which variables let go at its end, though autograd holds them.

        Left out are those of which a use is the end either way.
        """
        kernels, storages = self.recording.kernels, self.recording.storages
        forward: dict[int, int] = {}  # per storage the last kernel before the next backward that uses it
        found: dict[int, list[int]] = {}
        waiting: dict[int, int] = {}
        for index, kernel in enumerate((*kernels, None)):
            if kernel is None or kernel.phase != "forward":
                for i, end in waiting.items():
                    released = storages[i].freed
                    if end > forward[i] or (released is not None and forward[i] < released < index):
                        found.setdefault(max(end, forward[i]), []).append(i)
                forward, waiting = {}, {}
                continue
            forward.update(dict.fromkeys((*kernel.reads, *kernel.changed, *kernel.made), index))
            for i in kernel.made:
                end, freed = storages[i].unbound, storages[i].freed
                if end >= index and (freed is None or freed > end):
                    waiting[i] = end
        return {end: each for end, each in found.items() if kernels[end].phase == "forward"}

    def _op(self, kernel: Kernel, held: Any, unbound: Any, idle: Any) -> None:
        storages = self.recording.storages
        reads = [self.current[i] for i in kernel.reads]
        writes = [self._tensor(i, storages[i], replaces=None if i in idle else self.current[i]) for i in kernel.changed]
        writes += [self._tensor(i, storages[i]) for i in kernel.made]
        short = kernel.op.split(".")[1] if "." in kernel.op else kernel.op
        kind = kind_of(kernel.op, kernel.phase)
        if kind == "elementwise" and kernel.flops:  # only products are counted
            kind = "matmul"
        self.builder.op(
            _unique(f"{kernel.module}.{short}" if kernel.module else short, self.op_names),
            "other" if kernel.allocates else kind,
            reads=list(dict.fromkeys(reads)),
            writes=writes,
            phase=kernel.phase,
            layer=kernel.layer,
            flops=kernel.executed,
            counted=kernel.flops,
            bytes=kernel.touched,
            duration=0 if kernel.allocates else None,
            random=kernel.random,
            dtype="tf32" if kernel.dtype == "fp32" and kind in self.recording.tf32 else kernel.dtype,
            releases=[t for t in (self.current[i] for i in held if i in self.current) if t not in (*reads, *writes)],
            unbinds=[self.current[i] for i in unbound],
        )


def _unique(name: str, taken: dict[str, int]) -> str:
    """The name, with the next free number appended if it is taken."""
    count = taken[name] = taken.get(name, 0) + 1
    return name if count == 1 else _unique(f"{name}.{count}", taken)
