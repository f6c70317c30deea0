"""Assigns the measured op times of a real run to the ops of a trace that was built from a configuration.

PyTorch runs more ops than a trace has: views, copies of handles, scalars read back. None of their time is lost: it is
added to an adjacent op of the trace. Framework time between the ops is added explicitly, per phase, from the time of
the whole iteration.
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
    """One op of a real iteration.

    kind: one of `sim.trace.KINDS`.
    phase: one of `sim.trace.PHASES`.
    layer: its layer, -1 for none.
    ns: its duration.
    view: it moved no bytes (a view, a detach), so that no op of a trace corresponds to it.
    """

    kind: str
    phase: str
    layer: int
    ns: int
    view: bool = False


@dataclass(frozen=True)
class Matched:
    """A trace with durations, and how well the two lists of ops matched.

    trace: the trace with measured durations.
    matched: how many measured ops matched an op of their kind in the trace.
    carried: nanoseconds of the other measured ops, which were added to a neighbour.
    untimed: how many ops of the trace matched no measured op; they take no time.
    runs: for each op of the trace, how many measured ops it represents.
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

    For each phase and layer, the two lists of ops are aligned by kind, like lines in a text comparison.

    trace: the trace to time.
    measured: the ops of one real iteration of the same model, in the order in which they ran.
    phase_ns: total time of each phase. The difference to the sum of its op times is distributed evenly over its
        measured ops; if the ops alone took longer, all of them are shortened by the same factor.
    extra_ns: added to each measured op of a layer's forward pass: what a checkpointing context spends per op.

    Raises TraceError where the measurement has an unknown phase or kind, or only one of the two has ops of a phase.
    """
    rows = list(measured)
    for i, row in enumerate(rows):
        if row.phase not in PHASES or row.kind not in KINDS or row.ns < 0:
            raise TraceError(f"measured op {i}: phase {row.phase!r}, kind {row.kind!r}, {row.ns} ns are not possible")
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
        layers = c.layer[own].tolist() if phase != "update" else [-1] * len(own)
        for first, second in _sections(layers, [row.layer for row in given]):
            ops, part = [own[i] for i in first], [given[i] for i in second]
            times = [row.ns * scale + gap + (extra_ns if phase == "forward" and row.layer >= 0 else 0) for row in part]
            targets, matching = _align([KINDS[c.kind[op]] for op in ops], part)
            matched += len(matching)
            for i, (target, ns) in enumerate(zip(targets, times, strict=True)):
                duration[ops[target]] += ns
                runs[ops[target]] += 1
                carried += 0 if i in matching else ns
    timed = with_columns(trace, duration=np.rint(duration).astype(np.int64))
    return Matched(timed, matched, round(carried), int((runs == 0).sum()), tuple(runs.tolist()))


def _framework(given: Sequence[MeasuredOp], total: int | None) -> tuple[float, float]:
    """(factor on op times, nanoseconds to add to each) so that they sum to `total`."""
    spent = sum(row.ns for row in given)
    if total is None or not spent:
        return 1.0, 0.0
    return (1.0, (total - spent) / len(given)) if total >= spent else (total / spent, 0.0)


def _sections(trace: Sequence[int], measured: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Positions in both lists that belong to the same layer, in order of the trace.

    Ops outside layers form sections of their own: before the first layer, after the last one, and in between.
    """
    keys = _keys(trace)
    sections: dict[tuple[int, int], tuple[list[int], list[int]]] = {key: ([], []) for key in dict.fromkeys(keys)}
    for i, key in enumerate(keys):
        sections[key][0].append(i)
    for i, key in enumerate(_keys(measured)):
        if key not in sections:
            raise TraceError(f"layer {key[0]} was measured and is not in the trace")
        sections[key][1].append(i)
    return list(sections.values())


def _keys(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Per op its section: (layer, 0), or (-1, 0) before the layers, (-1, 1) after them and (-1, 2) in between."""
    inside = [i for i, layer in enumerate(layers) if layer >= 0]
    end = inside[-1] if inside else -1
    return [
        (layer, 0) if layer >= 0 else (-1, 1 if inside and i > end else 0 if not inside or i < inside[0] else 2)
        for i, layer in enumerate(layers)
    ]


def _align(kinds: Sequence[str], part: Sequence[MeasuredOp]) -> tuple[list[int], set[int]]:
    """The position of the op that gets each measured op's time, and which measured ops match in kind."""
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
