"""Measured op times of a real run, laid on the ops of a trace that was built from a configuration.

PyTorch runs more ops than a trace has: views, copies of handles, scalars read back. Nothing of their time is
lost: it goes to the op of the trace before or after which they ran. Framework time between the ops is added
openly: per phase, from the time that the whole iteration took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from sim.errors import TraceError
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace
from sim.trace.op import KINDS, PHASES


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One op of a real iteration: its kind (of `sim.trace.KINDS`), phase, layer (-1 for none) and nanoseconds.

    view: it moved no bytes (a view, a detach): no op of a trace stands for it.
    """

    kind: str
    phase: str
    layer: int
    ns: int
    view: bool = False


@dataclass(frozen=True)
class Matched:
    """A trace with durations, and how well the two lists of ops went together.

    matched: measured ops that found an op of their kind in the trace. carried: nanoseconds of the others,
    added to a neighbour. untimed: ops of the trace that found none; they take no time. runs: per op of the
    trace how many measured ops it stands for.
    """

    trace: Trace
    matched: int
    carried: int
    untimed: int
    runs: tuple[int, ...]


def with_measured(
    trace: Trace,
    measured: Iterable[MeasuredOp],
    *,
    phase_ns: Mapping[str, int] | None = None,
    extra_ns: int = 0,
) -> Matched:
    """Give every op of a trace its measured duration.

    measured: the ops of one real iteration of the same model, in the order in which they ran. Phase by phase
    and layer by layer the two lists are aligned by kind, as a text comparison aligns lines.
    phase_ns: what each phase took in all; what is not op time is spread over the phase's measured ops evenly,
    or, where the ops alone took longer than that, they are all shortened alike. extra_ns: added per measured
    op of a layer's forward pass: what a checkpointing context spends on each op that it sees.
    Raises TraceError where the measurement has a phase or kind that no trace has, or no op of a phase.
    """
    rows = list(measured)
    for i, row in enumerate(rows):
        if row.phase not in PHASES or row.kind not in KINDS or row.ns < 0:
            raise TraceError(f"measured op {i}: phase {row.phase!r}, kind {row.kind!r}, {row.ns} ns cannot be")
    c = trace.op_columns
    duration = np.zeros(len(c.name))
    runs = np.zeros(len(c.name), np.int64)
    matched, carried = 0, 0.0
    for code, phase in enumerate(PHASES):
        own = np.flatnonzero(c.phase == code).tolist()
        given = [row for row in rows if row.phase == phase]
        if not own or not given:
            if own or given:
                raise TraceError(f"phase {phase!r}: {len(own)} ops in the trace, {len(given)} measured")
            continue
        scale, gap = _framework(given, None if phase_ns is None else phase_ns[phase])
        here = c.layer[own].tolist() if phase != "update" else [-1] * len(own)
        for first, second in _stretches(here, [row.layer for row in given]):
            ops, part = [own[i] for i in first], [given[i] for i in second]
            times = [row.ns * scale + gap + (extra_ns if phase == "forward" and row.layer >= 0 else 0) for row in part]
            targets, found = _align([KINDS[c.kind[op]] for op in ops], part)
            matched += len(found)
            for i, (target, ns) in enumerate(zip(targets, times, strict=True)):
                duration[ops[target]] += ns
                runs[ops[target]] += 1
                carried += 0 if i in found else ns
    timed = with_columns(trace, duration=np.rint(duration).astype(np.int64))
    return Matched(timed, matched, round(carried), int((runs == 0).sum()), tuple(runs.tolist()))


def _framework(given: Sequence[MeasuredOp], total: int | None) -> tuple[float, float]:
    """(factor on op times, nanoseconds to add to each) so that they sum to `total`."""
    spent = sum(row.ns for row in given)
    if total is None or not spent:
        return 1.0, 0.0
    return (1.0, (total - spent) / len(given)) if total >= spent else (total / spent, 0.0)


def _stretches(trace: Sequence[int], measured: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Positions in both lists that belong to the same layer, in order of the trace.

    What lies outside layers in one list before the first layer, or after the last, is a stretch of its own.
    """
    keys = _keys(trace)
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {key: ([], []) for key in dict.fromkeys(keys)}
    for i, key in enumerate(keys):
        found[key][0].append(i)
    for i, key in enumerate(_keys(measured)):
        if key not in found:
            raise TraceError(f"layer {key[0]} was measured and is not in the trace")
        found[key][1].append(i)
    return list(found.values())


def _keys(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Per position its layer, or (-1, 0) before all layers and (-1, 1) after the first of them."""
    inside = [i for i, layer in enumerate(layers) if layer >= 0]
    end = inside[-1] if inside else -1
    return [
        (layer, 0) if layer >= 0 else (-1, 1 if inside and i > end else 0 if not inside or i < inside[0] else 2)
        for i, layer in enumerate(layers)
    ]


def _align(kinds: Sequence[str], part: Sequence[MeasuredOp]) -> tuple[list[int], set[int]]:
    """Per measured op the position of the op that gets its time, and which of them match in kind."""
    kernels = [i for i, row in enumerate(part) if not row.view]
    matcher = SequenceMatcher(None, kinds, [part[i].kind for i in kernels], autojunk=False)
    own = {kernels[b + k]: a + k for a, b, size in matcher.get_matching_blocks() for k in range(size)}
    targets, last = [], -1
    pending: list[int] = []
    for i in range(len(part)):
        if i in own:
            last = own[i]
            targets += [last] * (len(pending) + 1)  # views come before the op that reads them
            pending = []
        else:
            pending.append(i)
    return targets + [max(last, 0)] * len(pending), set(own)
