"""Which storages share pages, and so migrate together; what is used when, by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sim.plan import Problem
from sim.solvers.spans import resident_during, spans
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.layers import has_layers, layer_runs


@dataclass(frozen=True)
class Storage:
    """A tensor and all values that overwrite it in place.

    values: (the op from whose end on it holds that value, -1 for the start; tensor), in order.
    layers: the layers that use it, in order. accesses: by how many ops. until: the op at whose end it is freed.
    is_carried: whether the next iteration begins with it.
    """

    values: Sequence[tuple[int, int]]
    bytes: int
    layers: Sequence[int]
    accesses: int
    until: int
    is_carried: bool = False

    def value_after(self, op: int) -> int | None:
        """The value that it holds when an op has ended, None before the first and after its end."""
        held = (tensor for since, tensor in reversed(self.values) if since <= op)
        return next(held, None) if op < self.until else None


@dataclass(frozen=True)
class Unit:
    """Storages on the same pages, which migrate together. bytes: of the storages. page_bytes: of their pages."""

    storages: Sequence[Storage]
    bytes: int
    page_bytes: int

    @cached_property
    def layers(self) -> list[int]:
        """The layers that use any of it, in order."""
        return sorted({layer for storage in self.storages for layer in storage.layers})

    @cached_property
    def heat(self) -> float:
        """Accesses per byte."""
        return sum(storage.accesses for storage in self.storages) / max(self.bytes, 1)


@dataclass(frozen=True, eq=False)
class Profiled:
    """What the profiling step shows of a device.

    layers: its ops, by layer and phase, in order. took: ns of each layer.
    reserved: per layer the most bytes of what stays: short-lived storages, workspaces, and what may not move.
    units: what may migrate.
    """

    layers: Sequence[Sequence[int]]
    took: Sequence[int]
    reserved: Sequence[int]
    units: Sequence[Unit]

    @cached_property
    def by_layers(self) -> list[int]:
        """The units in the order of the layers that use them."""
        return sorted(range(len(self.units)), key=lambda i: self.units[i].layers)


def profiled(problem: Problem, device: int, page: int, *, coallocate: bool) -> Profiled:
    """The layers and pages of a device. coallocate: whether pages hold storages of one lifetime alone."""
    trace, c = problem.trace, problem.trace.op_columns
    layers, known = kept(trace.structure, "storages", device, lambda: _storages(trace, device))
    size, stays = trace.tensor_columns.bytes, np.ones(len(trace.tensor_columns.name), np.bool_)
    long = [replace(storage, bytes=int(size[t])) for t, storage in known.items() if size[t]]
    stays[[value for storage in long for _, value in storage.values]] = False
    load = c.workspace + resident_during(trace, device, stays)
    took = [sum(0 if op in c.engine else problem.cost.op_ns(op) for op in layer) for layer in layers]
    reserved = [int(load[layer].max()) for layer in layers]
    return Profiled(layers, took, reserved, paged(long, page, coallocate=coallocate))


def _storages(trace: Trace, device: int) -> tuple[list[list[int]], dict[int, Storage]]:
    """The layers of a device; by their first value the storages that live longer than one of them, as if without bytes.

    It is the same for all traces of a structure.
    """
    ops = np.flatnonzero(trace.op_columns.device == device).tolist()
    layers = layer_runs(trace, ops) if has_layers(trace) else [[op] for op in ops]
    layer_of = {op: i for i, layer in enumerate(layers) for op in layer}
    outputs, carried = frozenset(trace.outputs), frozenset(end for end, _ in trace.carry)
    replaces, resident = trace.tensor_columns.replaces.tolist(), spans(trace, device, of_no_bytes=True)
    found = {}
    for t in resident:
        if replaces[t] not in resident:
            storage = _storage(trace, t, device, layer_of, outputs, carried)
            if storage is not None and (len(storage.layers) > 1 or storage.values[0][0] < 0):
                found[t] = storage
    return layers, found


def _storage(
    trace: Trace,
    first: int,
    device: int,
    layer_of: Mapping[int, int],
    outputs: Collection[int],
    carried: Collection[int],
) -> Storage | None:
    """A storage that the device sees each use of, None where others use it, too.

    carried: the tensors that the next iteration starts with.
    """
    c = trace.op_columns
    values, uses, tensor = list[tuple[int, int]](), set[int](), first
    while tensor >= 0:
        values.append((int(trace.producer[tensor]), tensor))
        uses |= {op for op in (int(trace.producer[tensor]), *trace.readers(tensor)) if op >= 0}
        last, tensor = tensor, int(trace.replaced_by[tensor])
    if not uses or any(op in c.engine or op in c.group or c.device[op] != device for op in uses):
        return None
    if any(trace.released[value] >= 0 for _, value in values):
        return None
    stays = last in outputs or trace.producer[last] < 0
    until = len(trace.ops) if stays else max(uses)
    layers = sorted({layer_of[op] for op in uses})
    return Storage(values, 0, layers, len(uses), until, last in carried)


def paged(storages: Sequence[Storage], page: int, *, coallocate: bool) -> list[Unit]:
    """The pages of storages: those smaller than a page share them, in the order in which they are allocated.

    coallocate: only with others of the same first and last layer, and as many accesses to a factor of two.
    """
    units: list[Unit] = []
    open_pages: dict[object, list[Storage]] = {}
    for storage in storages:
        if storage.bytes >= page:
            units.append(Unit((storage,), storage.bytes, -(-storage.bytes // page) * page))
            continue
        key = (storage.layers[0], storage.layers[-1], storage.accesses.bit_length()) if coallocate else None
        shared = open_pages.setdefault(key, [])
        if sum(other.bytes for other in shared) + storage.bytes > page:
            units.append(_unit(shared, page))
            shared.clear()
        shared.append(storage)
    return [*units, *(_unit(shared, page) for shared in open_pages.values() if shared)]


def _unit(storages: Sequence[Storage], page: int) -> Unit:
    return Unit(tuple(storages), sum(storage.bytes for storage in storages), page)
