"""A rewrite: new 16-bit weights take the place of their gradients, since they are written from fp32 masters.

An update in mixed precision reads gradient, master and states; of the 16-bit weight it needs the space alone, because
it writes the master's new value into it. Programs keep the old value until then. Where a gradient takes its weight's
place as soon as backward is done with that weight, and the new weight the gradient's, a parameter has 14 bytes with
Adam instead of 16.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from sim.rewrites.holding import points
from sim.rewrites.kept import kept
from sim.rewrites.rewriter import Rewriter
from sim.rewrites.slots import owner
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE

UPDATE = PHASE_CODE["update"]
WEIGHT, GRADIENT, STATE = (ROLE_CODE[role] for role in ("weight", "gradient", "optimizer_state"))
HALF = ("fp16", "bf16")


def held_weights(trace: Trace, reads: Collection[int], writes: Collection[int]) -> set[int]:
    """The 16-bit weights among `reads` that an op of the optimizer holds, and whose values it does not read.

    It overwrites them from their fp32 masters, which it reads too. The master of `w` is named `w.master`; what follows
    says of which rank both are.
    """
    t = trace.tensor_columns
    over = {int(t.replaces[x]) for x in writes} - {-1}
    masters = (t.name[x].rpartition(".master") for x in (*reads, *over) if t.role[x] == STATE and t.dtype[x] == "fp32")
    of = frozenset(name for name, dot, _ in masters if dot)
    halves = {x for x in reads if x in over and t.role[x] == WEIGHT and t.dtype[x] in HALF}
    return {x for x in halves if owner(t.name[x], of) is not None}


class Updated(NamedTuple):
    """What becomes of a weight: its gradient, its value after the update, and the op that updates it."""

    gradient: int
    new: int
    op: int


def updated_weights(trace: Trace) -> dict[int, Updated]:
    """Per weight its update, where it is known which gradient is whose.

    An update's gradients as it reads them belong to its weights as it writes them; ids do not tell, since backward
    makes gradients in reverse.
    """
    c, t = trace.op_columns, trace.tensor_columns
    origin = dict(trace.carry)
    found: dict[int, Updated] = {}
    for op in range(len(c.name)):
        if c.phase[op] != UPDATE or op in c.group:
            continue
        ends = {origin[x]: x for x in trace.writes(op) if x in origin}
        weights = {w: new for w, new in ends.items() if t.role[w] == WEIGHT}
        gradients = dict.fromkeys(x for x in trace.reads(op) if t.role[x] == GRADIENT and trace.producer[x] >= 0)
        if len(weights) == len(gradients):
            for (w, new), g in zip(weights.items(), gradients, strict=True):
                found.setdefault(w, Updated(g, new, op))
    return found


def gradients_replaced(trace: Trace) -> dict[int, int]:
    """Per new 16-bit weight that is written from a master the gradient whose place it could take instead."""
    t, found, updated = trace.tensor_columns, dict[int, int](), updated_weights(trace)
    held = {op: held_weights(trace, trace.reads(op), trace.writes(op)) for op in {op for _, _, op in updated.values()}}
    for w, (g, new, op) in updated.items():
        if t.replaces[new] == w and w in held[op]:
            found[new] = g
    return found


def without_held_weights(trace: Trace, updates: Collection[int] | None = None) -> Trace:
    """The trace in which no update reads a weight that it only holds; the weight's last reader is one before.

    Ops and tensors keep their ids. updates: the ops that this is for, all where none are given.
    """
    unread: dict[int, set[int]] = {}
    for op in np.flatnonzero(trace.op_columns.phase == UPDATE).tolist() if updates is None else updates:
        held = held_weights(trace, trace.reads(op), trace.writes(op))
        if used_before := {w for w in held if any(reader != op for reader in trace.readers(w))}:
            unread[op] = used_before
    return _unread(trace, "without_held_weights", unread, {})


def into_gradients(trace: Trace, updates: Collection[int] | None = None) -> Trace:
    """The trace in which new 16-bit weights take over their gradients' storage, and no update reads the old ones.

    Ops and tensors keep their ids. Where no weight has a gradient of its size that ends with the update, the trace
    itself: fp32 gradients of 16-bit weights are larger, and a loop may hold those of a layer to its last update.
    updates: the ops that this is for, all where none are given.
    """
    t, moved = trace.tensor_columns, dict[int, int]()
    released, outputs = dict(points(trace)), set(trace.outputs)
    for new, g in gradients_replaced(trace).items():
        w, op = int(t.replaces[new]), int(trace.producer[new])
        used_before = any(reader != op for reader in trace.readers(w))
        ends = trace.readers(g)[-1] == op == released.get(g, op) and trace.replaced_by[g] < 0 and g not in outputs
        meant = updates is None or op in updates
        if meant and used_before and ends and w not in outputs and t.bytes[g] == t.bytes[w]:
            moved[new] = g
    unread: dict[int, set[int]] = {}
    for new in moved:
        unread.setdefault(int(trace.producer[new]), set()).add(int(t.replaces[new]))
    return _unread(trace, "into_gradients", unread, moved)


def _unread(trace: Trace, rule: str, unread: dict[int, set[int]], moved: dict[int, int]) -> Trace:
    """Without some reads of some ops, at the same cost. moved: per tensor the one whose storage it takes over."""

    def make() -> tuple[Trace, Trace]:
        new = Rewriter(trace)
        new.all_tensors()
        for tensor, old in moved.items():
            new.builder.take_over(tensor, old)
        copy = new.copier()
        for op, device in enumerate(trace.op_columns.device.tolist()):
            reads, writes = trace.reads(op), trace.writes(op)
            if op in unread:
                reads = tuple(x for x in reads if x not in unread[op])
                new.op(trace.ops[op], reads=reads, writes=writes, bytes=int(trace.touched[op]))
            else:
                copy(op, reads, writes, device)
        built = new.build(outputs=trace.outputs, carry=trace.carry)
        return built, built

    return kept(trace, (rule, frozenset(unread)), make) if unread else trace
