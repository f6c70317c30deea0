"""The CPU that launches: how long it takes to dispatch each op, and where it waits for the device.

A thread of the CPU dispatches the ops of a device in the order in which the device comes to them, recomputations
included, and runs ahead: op k is dispatched `once + sum(dispatch of the ops up to k)` after the iteration has begun,
however far the device is. A device that comes to an op waits until it has been dispatched (stall `launch`), after the
actions before it and before its reads are restored. So short ops are bound by the CPU, and behind long ones it is
hidden. Ops of an engine that devices share, the host's CPU, are not dispatched: they are calls.

What an op adds to an iteration is thus what it takes on the device or what it takes to dispatch, by which of the two
the iteration has to wait for (`added`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.hardware.cost import kernels, looped, op_times
from sim.hardware.platform import Dispatch, Platform
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.launched import awaited, captured
from sim.trace.layers import op_layers
from sim.trace.op import PHASE_CODE, PHASES

EAGER = "eager"
"""The stack of a trace that names none, or one that the platform does not know."""


COMPILES_LAYERS = "compiled_layers"
"""The stack of which only layers are compiled: what lies outside runs eagerly."""

READS = ("adafactor",)
"""Optimizers that read figures of each parameter from the device, for which the CPU waits: norms, by `item()`."""

SCALED = ("amp_fp16",)
"""Precisions of a loss scale: the program reads whether gradients are finite before it updates weights."""


class Dispatched(NamedTuple):
    """What the CPU takes to dispatch the ops of a trace.

    each: ns per op. Shape (ops,).
    once: ns before the first op of each device.
    synchronized: the ops before which the CPU waits for all ops that the device has been given.
    """

    each: NDArray[np.int64]
    once: int
    synchronized: frozenset[int]


def dispatched(trace: Trace, platform: Platform, engine: NDArray[np.int32]) -> Dispatched | None:
    """What the CPU takes to dispatch the ops of a trace; None where the device never waits for it.

    engine: per op the one that runs it, as `op_times` says.
    """
    known = {dispatch.stack: dispatch for dispatch in platform.dispatch}
    if not known:
        return None
    figures = known.get(str(trace.meta.get("stack", EAGER)), known.get(EAGER, platform.dispatch[0]))
    c = trace.op_columns
    each = _each(figures, c.phase)
    if figures.stack == COMPILES_LAYERS and EAGER in known:
        each = np.where(op_layers(trace) < 0, _each(known[EAGER], c.phase), each)
    called = np.array([unit.device < 0 for unit in platform.engines])[engine]
    optimizer = str(trace.meta.get("optimizer", ""))
    updates = looped(trace)
    if len(updates):  # plain calls, as eager backward makes them, under every stack
        each[updates] = known.get(EAGER, figures).backward * kernels(trace)[updates]
    each = np.where(called, 0, each)
    for part in captured(trace.meta, len(c.name)):
        each[part[1:]] = 0
    each.setflags(write=False)
    waits = set[int]()
    if not figures.is_graph:
        waits.update(op for op in awaited(trace.meta, len(c.name)) if not called[op])
    if trace.meta.get("precision") in SCALED and not figures.is_graph:
        for device in range(trace.devices):
            first = np.flatnonzero((c.device == device) & (c.phase == PHASE_CODE["update"]) & ~called)
            waits.update(first[:1].tolist())
    if len(updates) and optimizer in READS and not figures.is_graph:
        waits.update(updates[~called[updates]].tolist())
    return Dispatched(each, figures.once, frozenset(waits))


def _each(figures: Dispatch, phase: NDArray[np.int8]) -> NDArray[np.int64]:
    each: NDArray[np.int64] = np.array([getattr(figures, name) for name in PHASES], np.int64)[phase]
    return each


def added(trace: Trace, platform: Platform) -> NDArray[np.int64]:
    """What each op adds to an iteration that runs them in order and waits for nothing but its CPU, in ns. Shape (ops,).

    Let r be the last op whose start the CPU sets. All before r have to be dispatched until then, and add that; those
    after r add their time on the device, and r both. These are the slopes of the makespan, the largest sum over all r,
    which they add up to, with what the CPU takes once. From where the CPU waits for the device the count begins afresh.
    An op that is not of its device's main engine adds its own time.
    """
    if not platform.dispatch:
        return op_times(trace, platform).total
    return kept(trace, "added", platform.timing_hash, lambda: _added(trace, platform))


def _added(trace: Trace, platform: Platform) -> NDArray[np.int64]:
    times = op_times(trace, platform)
    known = dispatched(trace, platform, times.engine)
    if known is None:
        return times.total
    found = times.total.copy()
    for device in range(trace.devices):
        own = np.flatnonzero(trace.op_columns.device == device)
        on_main = times.engine[own] == platform.engine_for(device)
        fresh = [i for i, op in enumerate(own.tolist()) if op in known.synchronized]
        for first, end in pairwise([0, *fresh, len(own)]):
            ops, main = own[first:end], on_main[first:end]
            takes, launch = np.where(main, times.total[ops], 0), known.each[ops]
            lead = np.cumsum(launch) - (np.cumsum(takes) - takes) + (0 if first else known.once)
            last = int(np.argmax(lead)) if len(ops) else 0
            if len(ops) and lead[last] > 0:
                found[ops[:last][main[:last]]] = launch[:last][main[:last]]
                found[ops[last]] += launch[last]
    found.setflags(write=False)
    return found
