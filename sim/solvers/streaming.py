"""Weights that are fetched for the layers that read them, and gradients that leave in buckets: for all state offload.

A *run* is a maximal sequence of ops of one layer and phase on a device, those of no layer included (`layer_runs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Move
from sim.trace.graph import Trace
from sim.trace.layers import layer_runs
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE

UPDATE = PHASE_CODE["update"]


def stream_weights(
    trace: Trace, platform: Platform, far: str, ahead: int, *, but: Collection[int] = (), weighted: bool = False
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Fetches and releases of the weights that reside in `far`, in order of their ops; and where they begin.

    A weight that a run reads is fetched when the run `ahead` of them earlier begins, and released when its own run
    ends, unless one of the next `ahead` runs reads it, too. One that the device itself updates goes back then; one
    that the host's processor updates in place only comes. What an op of another engine, of a group of several ops or of
    a second device touches, too, stays where it is. A part that a collective gathers is fetched for that. What nothing
    reads begins in `far` and stays there.

    but: weights to leave out. weighted: see `runs_of`.
    """
    runs, position = runs_of(trace, platform, weighted)
    actions: list[tuple[int, Action]] = []
    place = {}
    for weight, readers in streamed(trace, platform, gathered=True):
        if weight in but:
            continue
        place[weight] = far
        device = int(trace.op_columns.device[readers[0]])
        home = platform.home(device).name
        actions += _visits(trace, weight, readers, runs[device], position, home, far, ahead)
    place.update(dict.fromkeys((t for t in idle(trace, "weight") if t not in but), far))
    return tuple(action for _, action in sorted(actions, key=lambda row: row[0])), place


def idle(trace: Trace, role: str) -> list[int]:
    """Initial tensors of a role that no op reads or overwrites: weights and states of experts without tokens."""
    columns = trace.tensor_columns
    unused = (trace.producer < 0) & (trace.first_read < 0) & (trace.replaced_by < 0) & (columns.bytes > 0)
    found: list[int] = np.flatnonzero(unused & (columns.role == ROLE_CODE[role])).tolist()
    return found


def runs_of(trace: Trace, platform: Platform, weighted: bool = False) -> tuple[dict[int, list[list[int]]], list[int]]:
    """Per device its runs, in order; per op the position of its run among those, 0 for updates on the host.

    weighted: count those alone that read weights of these; others are part of the run before.
    """
    runs: dict[int, list[list[int]]] = {}
    position = [0] * len(trace.ops)
    reading = {op for _, readers in streamed(trace, platform, gathered=True) for op in readers} if weighted else set()
    for run in layer_runs(trace, [op for op in range(len(trace.ops)) if not _on_host(trace, platform, op)]):
        own = runs.setdefault(int(trace.op_columns.device[run[0]]), [])
        if own and weighted and not reading.intersection(run):
            own[-1] += run
        else:
            own.append(run)
        for op in run:
            position[op] = len(own) - 1
    return runs, position


def _visits(
    trace: Trace,
    weight: int,
    readers: Sequence[int],
    runs: list[list[int]],
    position: list[int],
    home: str,
    far: str,
    ahead: int,
) -> Iterator[tuple[int, Action]]:
    """A weight's fetches and releases, each with the op before which it is needed. runs: of its device."""
    first: dict[int, int] = {}  # per run that reads it the first op that does
    for op in readers:
        first.setdefault(position[op], op)
    visits = list(first)
    new = int(trace.replaced_by[weight])
    if new >= 0 and int(trace.producer[new]) in trace.op_columns.engine:
        new = -1  # updated where it resides
    for k, at in enumerate(visits):
        if k == 0 or at - visits[k - 1] > ahead:
            yield first[at], Move(weight, home, keep=True, before=runs[max(at - ahead, 0)][0])
        last = k + 1 == len(visits)
        if new < 0 if last else visits[k + 1] - at > ahead:
            yield first[at], Drop(weight, home, after=runs[at][-1])
    while new >= 0 and trace.replaced_by[new] >= 0:
        new = int(trace.replaced_by[new])
    if new >= 0:
        yield int(trace.producer[new]), Move(new, far, after=int(trace.producer[new]))


def streamed(trace: Trace, platform: Platform, *, gathered: bool = False) -> Iterator[tuple[int, list[int]]]:
    """Weights that ops of one device's own engine read, with those ops.

    They alone overwrite such a weight if anything does, or else only the host's processor touches it after them.

    gathered: whether parts of weights that the device gathers from other ranks count.
    """
    c, columns = trace.op_columns, trace.tensor_columns
    members = Counter(c.group.values())
    for t in range(len(columns.name)):
        if columns.role[t] != ROLE_CODE["weight"] or trace.producer[t] >= 0 or not columns.bytes[t]:
            continue
        touching, value = {*trace.readers(t)}, int(trace.replaced_by[t])
        while value >= 0:
            touching |= {int(trace.producer[value]), *trace.readers(value)}
            value = int(trace.replaced_by[value])
        updating = {op for op in touching if _on_host(trace, platform, op)}
        readers = [op for op in trace.readers(t) if op not in updating]
        most = 1 if gathered else 0  # ops of a group that the trace may have
        if not readers or any(op in c.engine or members[c.group.get(op, "")] > most for op in touching - updating):
            continue
        if updating and max(touching - updating) > min(updating):
            continue
        if len({int(c.device[op]) for op in touching - updating}) == 1:
            yield t, readers


def _on_host(trace: Trace, platform: Platform, op: int) -> bool:
    """Whether an op belongs to the update and to the host's processor."""
    c = trace.op_columns
    if c.phase[op] != UPDATE or op not in c.engine or op in c.group:
        return False
    return platform.engines[platform.engine_for(int(c.device[op]), c.engine[op])].device == -1


def buckets(
    ready: Sequence[tuple[int, int]], size: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]], bucket: int
) -> Iterator[tuple[list[int], int]]:
    """Tensors in groups of at least `bucket` bytes, each with the op after which it is full; the last at its end.

    ready: tensors with the ops after which they are complete, in that order.
    """
    waiting: list[int] = []
    for i, (tensor, op) in enumerate(ready):
        waiting.append(tensor)
        if i + 1 == len(ready) or sum(int(size[t]) for t in waiting) >= bucket:
            yield waiting, op
            waiting = []


def parts_up(trace: Trace, updates: Collection[int], homes: Sequence[str]) -> Iterator[Action]:
    """The copies of what updates on the host make for a collective, each from its update to the collective's end.

    updates: ops of the host's processor. homes: the memory of each device.
    """
    c = trace.op_columns
    for update in sorted(updates):
        for t in trace.writes(update):
            gathers = [op for op in trace.readers(t) if op in c.group]
            if gathers:
                home = homes[int(c.device[gathers[0]])]
                yield Move(t, home, keep=True, after=update)
                yield Drop(t, home, after=gathers[-1])
