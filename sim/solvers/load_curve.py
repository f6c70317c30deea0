"""The load curve of a device: when each op would run, and how many bytes are resident meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.plan import Problem
from sim.solvers.spans import resident_during, swappable
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.tensor import ROLE_CODE

Load = NDArray[np.int64]
"""Bytes resident during each op."""

SWAPPED = (ROLE_CODE["activation"], ROLE_CODE["temporary"])
STATE = (ROLE_CODE["weight"], ROLE_CODE["gradient"], ROLE_CODE["optimizer_state"])


class Variable(NamedTuple):
    """A tensor that may leave.

    bytes: its size.
    out_ns, in_ns: the time of a copy in each direction, alone.
    accesses: positions on the curve of the ops that produce, read and overwrite it, in order; of what exists from the
        start also the first op.
    """

    bytes: int
    out_ns: int
    in_ns: int
    accesses: tuple[int, ...]


class Absence(NamedTuple):
    """A tensor between two consecutive accesses, at the positions `left` and `back` of the curve; sizes in bytes.

    gap_ns: the time between them.
    """

    tensor: int
    bytes: int
    left: int
    back: int
    gap_ns: int
    out_ns: int
    in_ns: int

    @property
    def slack_ns(self) -> int:
        """The time between them that both copies leave; negative where they take longer."""
        return self.gap_ns - self.out_ns - self.in_ns


@dataclass(frozen=True)
class Curve:
    """ops: of the device, by id. start, end: of each in ns, without stalls. load: bytes resident during each."""

    ops: tuple[int, ...]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    load: Load
    variables: Mapping[int, Variable]


def load_of(trace: Trace, device: int, ops: Sequence[int]) -> Load:
    """Bytes resident during each of a device's ops, with everything there from its production to its last use."""
    load: Load = (resident_during(trace, device) + trace.op_columns.workspace)[list(ops)].astype(np.int64)
    return load


def curve_of(problem: Problem, device: int, host: str, *, with_state: bool = False) -> Curve:
    """The curve of one device, with everything resident from its production to its last use, workspaces included.

    with_state: whether weights, gradients and optimizer states may leave, too, until something overwrites them.
    """
    trace, cost, home = problem.trace, problem.cost, problem.platform.home(device).name
    c = trace.op_columns
    ops = tuple(np.flatnonzero(c.device == device).tolist())
    took = [0 if op in c.engine else cost.op_ns(op) for op in ops]
    end = np.cumsum(np.array(took, np.int64))
    size, load = trace.tensor_columns.bytes.tolist(), load_of(trace, device, ops)
    copies = dict[int, tuple[int, int]]()  # by bytes
    variables = {}
    for t, accesses in _accesses(trace, device, with_state).items():
        if not (bytes := size[t]):
            continue
        if bytes not in copies:
            copies[bytes] = cost.move_ns(t, home, host), cost.move_ns(t, host, home)
        variables[t] = Variable(bytes, *copies[bytes], accesses)
    return Curve(ops, end - np.array(took, np.int64), end, load, variables)


def _accesses(trace: Trace, device: int, with_state: bool) -> Mapping[int, tuple[int, ...]]:
    """Per tensor that may leave if it has bytes its accesses; once for all traces of a structure."""

    def make() -> dict[int, tuple[int, ...]]:
        position = {op: i for i, op in enumerate(np.flatnonzero(trace.op_columns.device == device).tolist())}
        may_leave, found = swappable(trace, SWAPPED, of_no_bytes=True), dict[int, tuple[int, ...]]()
        for t, made in enumerate(trace.producer.tolist()):
            if t in may_leave and made in position:
                found[t] = tuple(position[op] for op in (made, *trace.readers(t)))
            elif with_state and (accesses := _accesses_of_state(trace, t, position)):
                found[t] = accesses
        return found

    return kept(trace.structure, "accesses", (device, with_state), make)


def _accesses_of_state(trace: Trace, tensor: int, position: Mapping[int, int]) -> tuple[int, ...]:
    """The accesses of a weight, a gradient or a state, () where it stays: outputs, and what others use or accumulate.

    position: of the device's ops on its curve.
    """
    c, t = trace.op_columns, trace.tensor_columns
    made, over = int(trace.producer[tensor]), int(trace.replaced_by[tensor])
    ops = {op for op in (made, *trace.readers(tensor), int(trace.producer[over]) if over >= 0 else -1) if op >= 0}
    if t.role[tensor] not in STATE or tensor in trace.outputs or not ops:
        return ()
    if t.replaces[tensor] >= 0 or any(op not in position or op in c.engine or op in c.group for op in ops):
        return ()
    return tuple(sorted({*(position[op] for op in ops), *((0,) if made < 0 else ())}))
