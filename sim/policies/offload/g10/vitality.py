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
from sim.solvers.spans import spans
from sim.trace.graph import Trace

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
    home, c, size = platform.home(device), trace.op_columns, trace.tensor_columns.bytes
    ops = np.flatnonzero(c.device == device).tolist()
    took = np.array([0 if op in c.engine else cost.op_ns(op) for op in ops], np.int64)
    change = np.zeros(len(trace.ops) + 1, np.int64)
    position = {op: i for i, op in enumerate(ops)}
    periods: list[Period] = []
    uses: dict[int, list[int]] = {}
    for t, span in spans(trace, device).items():
        change[span.first] += size[t]
        change[span.last + 1] -= size[t]
        if not trace.readers(t) or not is_movable(trace, t, device):
            continue
        uses[t] = [position[op] for op in users(trace, t)]
        marks = uses[t] if trace.producer[t] >= 0 else [-1, *uses[t]]
        periods += [Period(t, int(size[t]), left, right) for left, right in pairwise(marks) if right > left + 1]
    load = (np.cumsum(change)[: len(trace.ops)] + c.workspace)[ops].astype(np.int64)
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


def users(trace: Trace, tensor: int) -> list[int]:
    """The ops that produce and read a tensor, in order."""
    return [op for op in (int(trace.producer[tensor]), *trace.readers(tensor)) if op >= 0]


def is_movable(trace: Trace, tensor: int, device: int) -> bool:
    """Whether a tensor may leave: the device sees the end of each of its uses."""
    c = trace.op_columns
    return not any(op in c.engine or op in c.group or c.device[op] != device for op in users(trace, tensor))
