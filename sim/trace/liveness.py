"""What keeps a tensor resident, and the walker that planners follow it with.

Two facts of a trace decide when a tensor is dead: `uses`, how many of its readers are still to run, with one more
while the program holds it; and `freeable`, whether it may be freed at all. Four walkers apply them, each to what it
alone knows:

    planners   `sim.solvers.residency`, of a schedule as a whole, each tensor's events sorted by time; and `LiveSet`,
               over the parts of a trace that are recomputed together (`sim.solvers.nodes`) and the stages of a chain
               (`sim.trace.chain`): one memory, one op after the other, nothing offloaded
    evictors   `sim.eviction.evictor.Evictor`, which hears of each read and copy while a run goes on
    engine     `sim.engine.event_path.lifetimes.Lifetimes`: copies in several tiers, pins, and transfers in flight
    array path `sim.engine.array_path`: a straight run of one device as a whole, each tensor's events sorted by time

The law in `sim.conformance` has its own. Programs for solvers (`sim.solvers.milp` and others) state the same as
constraints on nodes; what they estimate is checked against a schedule's residency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.trace.graph import Trace

Ints = NDArray[np.int64]


def uses(trace: Trace) -> Ints:
    """Per tensor what keeps it from being freed: the ops that read it, and the program where it releases it."""
    return trace.read_counts + (trace.released >= 0)


def freeable(trace: Trace) -> NDArray[np.bool_]:
    """Per tensor whether it may be freed once nothing uses it: it has a producer and is not an output."""
    may = trace.producer >= 0
    may[list(trace.outputs)] = False
    return may


class LiveSet:
    """The tensors that are live in one memory while ops run one after the other.

    held: their bytes.
    """

    def __init__(self, size: Sequence[int], replaces: Sequence[int], tensors: Iterable[int] = ()) -> None:
        self._size, self._replaces = size, replaces
        self._live = set(tensors)
        self.held = sum(size[t] for t in self._live)

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._live

    def run(self, writes: Iterable[int], workspace: int) -> int:
        """An op runs, and its results are live from now on. Returns the most bytes held while it runs.

        A result takes over the storage of the value that it overwrites. One that is still live is produced in new
        space, which is given back at the op's end.
        """
        live, size, held, scratch, given_up = self._live, self._size, self.held, workspace, 0
        for t in writes:
            old = self._replaces[t]
            if old in live:
                live.discard(old)
                if t in live:
                    given_up += size[t]
            elif t in live:
                scratch += size[t]
            else:
                held += size[t]
            live.add(t)
        self.held = held - given_up
        return held + scratch

    def free(self, tensors: Iterable[int]) -> None:
        """These are dropped or dead."""
        for t in tensors:
            if t in self._live:
                self._live.discard(t)
                self.held -= self._size[t]
