"""The layers of a trace, as it states them: of ops, of tensors, and what crosses their borders.

A *layer* is the number that an op or a tensor has, -1 for none; only `op_layers` says which an op has. Consecutive
ops of one layer are a *run* (`layer_runs`), all ops of a layer with the tensors at its border a *block*. Where a trace
states no layers, a *stage* may take their place: a part of its chain, between two positions at which a single
activation is live (`sim.trace.chain`). What recomputes layer by layer takes *regions*, made of either
(`sim.solvers.regions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.trace.graph import PERSISTENT, Trace
from sim.trace.kept import kept
from sim.trace.phases import BACKWARD, FORWARD, Ints, backward_ops, forward_ops


def op_layers(trace: Trace) -> Ints:
    """Per op its layer: its own, or the highest of the tensors that it produces where it has none; -1 for no layer."""

    def make() -> Ints:
        c = trace.op_columns
        highest = np.full(len(c.name), -1, np.int64)
        writers = np.repeat(np.arange(len(c.name)), np.diff(c.write_start))
        np.maximum.at(highest, writers, trace.tensor_columns.layer[c.write_ids])
        found = np.where(c.layer >= 0, c.layer, highest)
        found.setflags(write=False)
        return found

    return kept(trace, "op_layers", None, make)


def has_layers(trace: Trace) -> bool:
    """Whether some forward op has a layer."""
    return bool(((trace.op_columns.phase == FORWARD) & (op_layers(trace) >= 0)).any())


def layer_runs(trace: Trace, ops: Iterable[int], every: int = 1) -> list[list[int]]:
    """Ops, per device in the order given, divided where another phase or layer begins. Those of no layer make runs too.

    every: so many layers count as one; a run ends where they begin again, as they do for the next microbatch.
    """
    columns = op_layers(trace), trace.op_columns.phase, trace.op_columns.device
    layer, phase, device = (column.tolist() for column in columns)
    found: list[list[int]] = []
    last: dict[int, list[int]] = {}  # per device its last run
    for op in ops:
        run = last.get(device[op])
        if (
            run is None
            or phase[op] != phase[run[-1]]
            or layer[op] // every != layer[run[-1]] // every
            or layer[op] < layer[run[-1]]
        ):
            run = last[device[op]] = []
            found.append(run)
        run.append(op)
    return found


def tensor_layers(trace: Trace) -> NDArray[np.int32]:
    """Per tensor its layer: that of the op that produces it, or its own where there is none; -1 for no layer."""
    made = trace.producer >= 0
    by_op = trace.op_columns.layer[np.where(made, trace.producer, 0)]
    found: NDArray[np.int32] = np.where(made & (by_op >= 0), by_op, trace.tensor_columns.layer)
    return found


@dataclass(frozen=True, slots=True)
class Block:
    """The ops of one layer, or consecutive ops that belong to no layer (layer -1), and the tensors at its boundary.

    layer: index of the layer, -1 for none.
    forward, backward: op ids.
    inputs: tensors that its forward reads but does not produce, weights and optimizer states excluded.
    outputs: tensors produced here that another block's forward reads or that are kept to the end.
    saved: tensors produced here that any backward op reads.
    """

    layer: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]


def blocks(trace: Trace) -> tuple[Block, ...]:
    """The forward ops in blocks, in order of their first op: one per layer, and one per sequence of ops of no layer.

    Backward ops of no layer belong to the sequence whose results or weights they read, else to the block of the
    preceding op.
    """
    layer = op_layers(trace).tolist()
    block_of: dict[int, int] = {}
    by_layer: dict[int, int] = {}
    members: list[list[int]] = []
    previous: int | None = None
    for op in forward_ops(trace).tolist():
        index = layer[op]
        if index >= 0 and index in by_layer:
            block = by_layer[index]
        elif index < 0 and previous is not None and layer[previous] < 0:
            block = block_of[previous]
        else:
            block = len(members)
            members.append([])
            if index >= 0:
                by_layer[index] = block
        members[block].append(op)
        block_of[op], previous = block, op
    backward: list[list[int]] = [[] for _ in members]
    current = len(members) - 1
    for op in backward_ops(trace).tolist():
        if layer[op] >= 0 and layer[op] in by_layer:
            current = by_layer[layer[op]]
        elif members:
            current = _block_without_layer(trace, op, block_of, layer, current)
        if members:
            backward[current].append(op)
    return tuple(_block(trace, k, layer[members[k][0]], members[k], backward[k], block_of) for k in range(len(members)))


def _block_without_layer(trace: Trace, op: int, block_of: dict[int, int], layer: list[int], default: int) -> int:
    for t in trace.reads(op):
        producer = int(trace.producer[t])
        candidates = [producer] if producer >= 0 else [r for r in trace.readers(t) if r in block_of]
        for candidate in candidates:
            if candidate in block_of and layer[candidate] < 0:
                return block_of[candidate]
    return default


def _block(
    trace: Trace, k: int, layer: int, forward: list[int], backward: list[int], block_of: dict[int, int]
) -> Block:
    role, producer, phase = trace.tensor_columns.role, trace.producer, trace.op_columns.phase
    kept = set(trace.outputs)
    inputs: dict[int, None] = {}
    outputs, saved = [], []
    for op in forward:
        for t in trace.reads(op):
            if role[t] not in PERSISTENT and block_of.get(int(producer[t])) != k:
                inputs[t] = None
        for t in trace.writes(op):
            readers = trace.readers(t)
            if t in kept or any(block_of.get(r, k) != k for r in readers):
                outputs.append(t)
            if any(phase[r] == BACKWARD for r in readers):
                saved.append(t)
    return Block(layer, tuple(forward), tuple(backward), tuple(inputs), tuple(outputs), tuple(saved))
