"""Vitality of tensors: when each is used, when it is inactive, and how far all of them exceed the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.plan import Problem
from sim.solvers.cascade import resident_bytes
from sim.solvers.load_curve import load_of
from sim.solvers.spans import spans
from sim.trace.graph import Trace
from sim.trace.kept import kept

Ints = NDArray[np.int64]


class Level(NamedTuple):
    """A tier behind a device.

    name: of the tier. spare: bytes that the device may fill there.
    out, back: the links, by position, of a copy to it and of one from it.
    """

    name: str
    spare: int
    out: tuple[int, ...]
    back: tuple[int, ...]


class Period(NamedTuple):
    """A time in which a tensor is inactive: from the end of an op at `left` to the start of one at `right`.

    tensor: its id. bytes: its size.
    left, right: positions on the device's timeline; -1 is the start of the iteration, the number of ops its end.
    """

    tensor: int
    bytes: int
    left: int
    right: int


@dataclass(frozen=True, eq=False)
class Vitality:
    """A device over one iteration with everything resident, and without stalls.

    device: its number. ops: of the device, by id, in order. took: how long each takes, in ns.
    load: bytes resident during each. capacity: bytes of its memory. levels: the tiers behind it, nearest first.
    periods: all times in which a tensor is inactive, with an op in between.
    uses: per tensor the positions of the ops that use it, in order.
    """

    device: int
    ops: Sequence[int]
    took: Ints
    load: Ints
    capacity: int
    levels: Sequence[Level]
    periods: Sequence[Period]
    uses: Mapping[int, Sequence[int]]


def vitality_of(problem: Problem, device: int, host: str) -> Vitality:
    """The vitality of all tensors of a device. host: the first of the tiers behind it."""
    trace, cost, platform = problem.trace, problem.cost, problem.platform
    home, c, size = platform.home(device), trace.op_columns, trace.tensor_columns.bytes.tolist()
    ops = ops_of(trace, device)
    took = np.array([0 if op in c.engine else cost.op_ns(op) for op in ops], np.int64)
    known = kept(trace.structure, "movable", device, lambda: _movable(trace, device))
    uses = {t: own for t, (own, _) in known.items() if size[t]}
    periods = [Period(t, size[t], *ends) for t in uses for ends in known[t][1]]
    load = load_of(trace, device, ops)
    levels = [
        Level(
            name,
            max(platform.tier(name).capacity - resident_bytes(trace, platform, name), 0) // trace.devices,
            platform.route(home.name, name),
            platform.route(name, home.name),
        )
        for name in platform.cascade(host)
    ]
    return Vitality(device, ops, took, load, home.capacity, levels, periods, uses)


def ops_of(trace: Trace, device: int) -> list[int]:
    """The ops of a device, in order."""
    ops: list[int] = np.flatnonzero(trace.op_columns.device == device).tolist()
    return ops


def _movable(trace: Trace, device: int) -> dict[int, tuple[list[int], list[tuple[int, int]]]]:
    """Per tensor that may leave if it has bytes the positions of the ops that use it, and the ends of its periods."""
    position, found = {op: i for i, op in enumerate(ops_of(trace, device))}, {}
    for t in spans(trace, device, of_no_bytes=True):
        if trace.read_counts[t] and is_movable(trace, t, device):
            uses = [position[op] for op in users(trace, t)]
            marks = uses if trace.producer[t] >= 0 else [-1, *uses]
            found[t] = uses, [(left, right) for left, right in pairwise(marks) if right > left + 1]
    return found


def users(trace: Trace, tensor: int) -> list[int]:
    """The ops that produce and read a tensor, in order."""
    return [op for op in (int(trace.producer[tensor]), *trace.readers(tensor)) if op >= 0]


def is_movable(trace: Trace, tensor: int, device: int) -> bool:
    """Whether a tensor may leave: the device sees the end of each of its uses."""
    c = trace.op_columns
    return not any(op in c.engine or op in c.group or c.device[op] != device for op in users(trace, tensor))
