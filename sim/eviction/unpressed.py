"""What an online part does where memory is never short: nothing, or what is dead leaves before the next op."""

from __future__ import annotations

import numpy as np

from sim.log import Ints
from sim.plan import Problem, Unpressed
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.liveness import freeable

READ, RELEASED, WRITTEN = range(3)


def watermark_of(problem: Problem, share: float) -> int:
    """The headroom of a director, which acts ahead of need once less than a share of the memory would be free.

    It takes all results of the next op into account, also those in place, which take no space.
    """
    if not share:
        return 0
    t, trace = problem.trace.tensor_columns, problem.trace
    in_place = np.zeros(len(trace.op_columns.name), np.int64)
    over = np.flatnonzero(t.replaces >= 0)
    np.add.at(in_place, trace.producer[over], t.bytes[over])
    return int(share * problem.budget) + int(in_place.max(initial=0))


def frees_the_dead(trace: Trace, headroom: int = 0) -> Unpressed | None:
    """Before each op the part drops what the op before was the last to use; None where it is not as simple as that.

    It is not with several devices, with views, and where an op in place overwrites what another produced.
    """
    drops = kept(trace, "dead_drops", (), lambda: _drops(trace))
    return None if drops is None else Unpressed(*drops, headroom)


def _drops(trace: Trace) -> tuple[Ints, Ints] | None:
    if trace.devices > 1 or trace.view_of or ((trace.producer >= 0) & (trace.replaced_by >= 0)).any():
        return None
    c, last = trace.op_columns, trace.held_until.astype(np.int64)
    # of what one op is the last to use: first what it reads, by the last mention, then what is released, then written
    rank, place = np.full(len(last), WRITTEN), np.zeros(len(last), np.int64)
    reads, writes = c.read_ids.astype(np.int64), c.write_ids.astype(np.int64)
    place[writes] = np.arange(len(writes))
    read = trace.read_counts > 0
    rank[read] = READ
    place[read] = 0
    np.maximum.at(place, reads, np.arange(len(reads)))
    for tensors in c.releases.values():
        rank[list(tensors)], place[list(tensors)] = RELEASED, range(len(tensors))
    dead = np.flatnonzero(freeable(trace) & (last + 1 < len(c.name)))
    dead = dead[np.lexsort((place[dead], rank[dead], last[dead]))]
    return dead, last[dead] + 1
