"""The array path: the log of a run that is a straight sequence, as array arithmetic.

A plan that moves nothing and asks nothing, on one engine whose time is its own, leaves nothing to wait for: the order
of its steps is known before it runs. Step 0 places what exists from the start; each later step runs an op, in its own
place or recomputed. The rows of `changes` follow in eight phases per step, each by the event path's rule:

    phase          what happens                                       it makes a row where             cause of the row
    DROP           drops of the plan before the op                    the tensor is resident          dropped
    TAKE           space for each result, then workspace              it takes over no storage        made, workspace
    GIVE           workspace is released                              as taken                        workspace
    ARRIVE         results arrive; what they overwrite is lost        the old value is resident       overwritten, made
    DROP_AFTER     drops of the plan after the op                     the tensor is resident          dropped
    FREE_READ      of what the op read, what nothing uses any more    it is resident                  freed
    FREE_WRITTEN   of what it wrote, the same                         it is resident                  freed
    FREE_RELEASED  of what the program releases here, the same        it is resident                  freed

What an online part drops where memory is never short (`Plan.unpressed`) follows the plan's own actions before the op.
What is dead and retained lazily is not freed; a drop of it is what frees it.

A result that is still resident when it is recomputed takes workspace instead. Whether a tensor is resident follows
from what happened to it last: it is where that was an arrival. So all that happens is sorted by tensor and phase, and
each row looks at its predecessor.

What cannot go on like this is left to the event path, which says what is wrong, or asks the online part: a read that
is not resident, a peak above the capacity, too much recomputation, an action before its time, an output that has been
dropped, an end that no column can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.columns import FREE_READ, FREE_WRITTEN, Ids, TraceColumns
from sim.engine.event_path.record import COUNTERS
from sim.engine.prepare import Prepared
from sim.engine.resolve import ActionColumns, Resolved
from sim.hardware.dispatch import Dispatched
from sim.hardware.platform import Allocator, Platform
from sim.log import CAUSE, CHANGE_COLUMNS, INTERVAL_COLUMNS, RESERVED_COLUMNS, STALL, WHY, EventLog, Ints
from sim.plan import Plan
from sim.trace.graph import Trace
from sim.trace.kept import in_common, kept

DROP, TAKE, GIVE, ARRIVE, DROP_AFTER = range(5)  # and FREE_READ, FREE_WRITTEN, FREE_RELEASED
BITS = 3  # of a key that tell the phase; the others tell the step
PHASES = 1 << BITS
PLACED, MADE, FREED, DROPPED, WORKSPACE, OVERWRITTEN = (
    CAUSE[name] for name in ("placed", "made", "freed", "dropped", "workspace", "overwritten")
)
STALLED, LAUNCH = WHY["stall"], STALL["launch"]
Mask = NDArray[np.bool_]
Pairs = tuple[Ints, Ints]
Numbers = Ints | Ids
Part = tuple[Ints, Numbers | int, Numbers, Numbers | int]
"""Rows of one sort: key, tensor, amount (see `Outline`), cause."""


EXACT = Allocator()
KEPT_OPS = 50_000
"""How many ops a trace may have for runs to be kept with it and its plans; the rows of more take much memory."""


class Rows(NamedTuple):
    """What a log has beside its trace and platform; the arrays are read-only.

    peak: the most bytes at once in the home tier.
    ignored: actions without an effect.
    """

    intervals: Ints
    changes: Ints
    end: int
    peak: int
    ignored: int


def covers(plan: Plan, platform: Platform, prepared: Prepared, resolved: Resolved) -> bool:
    """Whether a plan's run is a straight sequence on this platform, unless something is wrong with it."""
    home, actions = prepared.home[prepared.main[0]], resolved.columns
    return (
        (plan.online is None or plan.unpressed is not None)
        and prepared.is_sequence
        and all(tier.allocator == EXACT for tier in platform.tiers)
        and all(where == (home, None) for where in resolved.born.values())
        and actions is not None
        and bool((actions.tier == home).all())
    )


def run(
    plan: Plan, platform: Platform, prepared: Prepared, resolved: Resolved, recompute_limit: float | None
) -> EventLog | None:
    """The log of a run that is covered; None if it has to take the event path after all."""
    actions = resolved.columns
    if actions is None or _recomputes_too_much(prepared, actions, recompute_limit):
        return None
    rows = _kept_rows(plan, prepared, resolved, actions)
    if rows is None:
        return None
    home = prepared.home[prepared.main[0]]
    headroom = plan.unpressed.headroom if plan.online is not None and plan.unpressed is not None else 0
    if rows.peak + headroom > platform.tiers[home].capacity:
        return None
    return EventLog(
        trace=prepared.trace,
        platform=platform,
        intervals=rows.intervals,
        changes=rows.changes,
        reserved=np.zeros((0, len(RESERVED_COLUMNS)), np.int64),
        end=rows.end,
        counters=dict.fromkeys(COUNTERS, 0) | {"ignored_actions": rows.ignored},
    )


def _kept_rows(plan: Plan, prepared: Prepared, resolved: Resolved, actions: ActionColumns) -> Rows | None:
    """The rows of a run, kept with the plan; those of one without actions, which every reference is, with the trace."""
    if len(prepared.times.total) > KEPT_OPS:
        return _rows(plan, prepared, actions)
    is_bare = not (plan.keep_dead or len(actions.recomputed) or len(actions.dropped))
    made = prepared.bare_run if is_bare else resolved.made.run
    if not made:
        made.append(_rows(plan, prepared, actions, _keeper(plan, prepared, is_bare)))
    known: Rows | None = made[0]
    return known


def _keeper(plan: Plan, prepared: Prepared, is_bare: bool) -> Keep | None:
    """What keeps the outline of a run for others of its structure: one without actions, or with the same ones."""
    structure = prepared.trace.structure
    if not structure.is_shared:
        return None
    if is_bare:
        return lambda key, make: kept(structure, "outlines", key, make)
    if plan.online is not None:  # its drops are not among the plan's actions
        return None
    return lambda key, make: in_common(structure, plan.actions, "outline", (plan.keep_dead, *key), make)


def _rows(plan: Plan, prepared: Prepared, actions: ActionColumns, keep: Keep | None = None) -> Rows | None:
    """The rows of a run; None if it has to take the event path, whatever the capacity."""
    workspace = prepared.trace.op_columns.workspace

    def make() -> Outline:
        return _outline(plan, prepared, actions)

    outline = keep((*_where(prepared), (workspace > 0).tobytes()), make) if keep is not None else make()
    steps, start, end = outline.steps, *_times(prepared, outline.steps)
    if float(_busy(prepared, steps, end - start).sum(dtype=np.float64)) >= 2.0**62:
        return None  # more nanoseconds than a column holds
    if not outline.is_legal:
        return None
    if keep is not None:
        outline = outline._replace(changes=outline.changes.copy())
    changes, intervals = _changes(prepared.trace, outline, start, end), _intervals(prepared, steps, start, end)
    for array in (changes, intervals):
        array.setflags(write=False)
    peak = int(np.cumsum(changes[:, CHANGE_COLUMNS.index("delta")]).max(initial=0))
    return Rows(intervals, changes, int(end[-1]), peak, outline.ignored)


def _where(prepared: Prepared) -> tuple[int, int]:
    """The tier and the lane of a sequence."""
    return prepared.home[prepared.main[0]], prepared.main[0]


def _busy(prepared: Prepared, steps: Steps, ns: Ints) -> Ints:
    """Nanoseconds that the run takes at most, in parts: of each step, and to dispatch it."""
    return ns if prepared.dispatch is None else ns + np.append(prepared.dispatch.each, 0)[steps.op]


def _intervals(prepared: Prepared, steps: Steps, start: Ints, end: Ints) -> Ints:
    """A row for each step but the start, and before it one for a wait until it is dispatched."""
    rows = np.zeros((len(steps.op) - 1, len(INTERVAL_COLUMNS)), np.int64)
    columns = ("start", start[1:]), ("end", end[1:]), ("why", steps.why[1:]), ("op", steps.op[1:])
    for name, column in (*columns, ("lane", prepared.main[0]), ("tensor", -1)):
        rows[:, INTERVAL_COLUMNS.index(name)] = column
    late = np.flatnonzero(start[1:] > end[:-1])
    if not len(late):
        return rows
    waits = rows[late]
    for name, what in (("start", end[late]), ("end", start[late + 1]), ("why", STALLED), ("cause", LAUNCH)):
        waits[:, INTERVAL_COLUMNS.index(name)] = what
    return np.insert(rows, late, waits, axis=0)


def _lazy(plan: Plan, tensors: int) -> Mask | None:
    """Per tensor whether it is retained when it is dead; None where none is."""
    if not plan.keep_dead:
        return None
    lazy = np.full(tensors, plan.keep_dead is True)
    if not isinstance(plan.keep_dead, bool):
        lazy[list(plan.keep_dead)] = True
    return lazy


def _recomputes_too_much(prepared: Prepared, actions: ActionColumns, limit: float | None) -> bool:
    spent = int(np.maximum(prepared.times.total[actions.recomputed], 1).sum())
    return limit is not None and spent > limit * prepared.ideal_ns


# ---- what runs ---------------------------------------------------------------------------------


class Steps(NamedTuple):
    """What runs, in order; step 0 is the start.

    op, why: per step its op, -1 at the start, and what the log calls the run.
    anchor: per step the op in whose place it runs.
    own: per op the step of its first run; 0 for the op -1.
    again: the steps that recompute an op.
    """

    op: Ints
    why: Ints
    anchor: Ints
    own: Ints
    again: Ints


def _steps(prepared: Prepared, actions: ActionColumns) -> Steps:
    ops = np.arange(len(prepared.times.total))
    own = ops + 1
    if len(actions.before):
        own += np.searchsorted(actions.before, ops, "right")
    again = actions.before + 1 + np.arange(len(actions.before))
    op = np.full(len(own) + len(again) + 1, -1, np.int64)
    op[own], op[again] = ops, actions.recomputed
    why, anchor = np.full(len(op), WHY["recompute"], np.int64), op.copy()
    why[own], anchor[again] = prepared.first_run, actions.before
    return Steps(op, why, anchor, np.append(own, 0), again)


def _times(prepared: Prepared, steps: Steps) -> Pairs:
    """Per step when it starts and ends, in ns."""
    ns = np.append(prepared.times.total, 0)[steps.op]
    end = np.cumsum(ns)
    if prepared.dispatch is not None:
        end += _late(prepared.dispatch, steps.op, end - ns, steps.own[:-1])
    return end - ns, end


def _late(dispatch: Dispatched, op: Ints, start: Ints, own: Ints) -> Ints:
    """Per step how much later it starts since the CPU has to dispatch it, and what came before.

    start: when each would start without. own: per op the step of its first run.

    A step begins when it has been dispatched and the one before has ended, so that its delay is the largest of
    (dispatched - start) up to it. Where the CPU waits for the device, it goes on from the end of the step before.
    """
    at = np.cumsum(np.append(dispatch.each, 0)[op])
    at[1:] += dispatch.once
    late = np.maximum(np.maximum.accumulate(at - start), 0)
    for step in np.sort(own[list(dispatch.synchronized)]).tolist():
        at[step:] += start[step] + late[step - 1] - at[step - 1]
        late[step:] = np.maximum(np.maximum.accumulate(at[step:] - start[step:]), late[step - 1])
    return late


# ---- what happens to tensors -------------------------------------------------------------------


class Kind(NamedTuple):
    """Events of one kind: of each its key (step and phase), the tensor, and whether that was resident just before."""

    key: Ints
    tensor: Ids
    resident: Mask


class Events(NamedTuple):
    """All arrivals and departures of tensors.

    placed, written, overwritten, dropped, freed: by kind.
    dead: per drop whether the tensor was dead before, and retained.
    in_place: which of `written` overwrite those of `overwritten`.
    loose: per tensor whether it may come or go more than once; only their events are in the next two.
    moments: tensor and key in one number, sorted.
    arrived: per moment whether it is an arrival.
    """

    placed: Kind
    written: Kind
    overwritten: Kind
    dropped: Kind
    freed: Kind
    dead: Mask
    in_place: Ints
    loose: Mask
    moments: Ints
    arrived: Mask


def _events(columns: TraceColumns, steps: Steps, actions: ActionColumns, lazy: Mask | None) -> Events:
    rewritten_at, rewritten = columns.written.of(actions.recomputed, steps.again)
    written = np.concatenate((columns.written.tensor, rewritten))
    arrivals = np.concatenate((steps.own[columns.written.op], rewritten_at)) * PHASES + ARRIVE
    old = columns.replaces[written]
    in_place = np.flatnonzero(old >= 0)
    drop_before = (actions.anchor + 1 + actions.passed) * PHASES + DROP
    drop_after = steps.own[actions.anchor] * PHASES + DROP_AFTER
    kinds = (
        (np.full(len(columns.placed), ARRIVE), columns.placed),
        (arrivals, written),
        (arrivals[in_place], old[in_place]),
        (np.where(actions.after, drop_after, drop_before), actions.dropped),
        _frees(columns, steps, actions, last := _last_uses(columns, steps, actions), lazy),
    )
    key = np.concatenate([kind[0] for kind in kinds])
    tensor = np.concatenate([kind[1] for kind in kinds], dtype=np.int32, casting="same_kind")
    ends = np.cumsum([0, *(len(kind[0]) for kind in kinds)]).tolist()
    loose = np.zeros(len(columns.replaces), np.bool_)
    for some in (old[in_place], actions.dropped, rewritten):
        loose[some] = True
    resident = np.arange(len(key)) >= ends[4]  # but for loose ones: never when they arrive, always when they are freed
    which = np.flatnonzero(loose[tensor])
    moments = tensor[which].astype(np.int64) * (len(steps.op) * PHASES) + key[which]
    order = np.argsort(moments, kind="stable")  # of drops of one tensor at one place the first counts
    which = which[order]
    whose, arrived = tensor[which], which < ends[2]
    resident[which[:1]], resident[which[1:]] = False, arrived[:-1] & (whose[1:] == whose[:-1])
    placed, made, overwritten, dropped, freed = (Kind(key[a:b], tensor[a:b], resident[a:b]) for a, b in pairwise(ends))
    dead = _are_dead(columns, steps, dropped, last, lazy)
    return Events(placed, made, overwritten, dropped, freed, dead, in_place, loose, moments[order], arrived)


def _last_uses(columns: TraceColumns, steps: Steps, actions: ActionColumns) -> Ints:
    """Per tensor the last step that uses it, 0 for none."""
    last = steps.own[columns.last_use]
    if len(steps.again):
        read = columns.read.of(actions.recomputed, steps.again)
        np.maximum.at(last, read[1], read[0])
    return last


def _frees(
    columns: TraceColumns, steps: Steps, actions: ActionColumns, last: Ints, lazy: Mask | None
) -> tuple[Ints, Ids]:
    """(key, tensor) of what a step touches when nothing uses it any more; it may not be resident."""
    step, freed, may_free = steps.own[columns.free_op], columns.freed, columns.may_free
    key = step * PHASES + columns.free_phase
    if lazy is not None:
        may_free = may_free & ~lazy
    elif not len(steps.again):
        return key, freed
    still = np.flatnonzero((step >= last[freed]) & may_free[freed])
    keys, tensors = [key[still]], [freed[still]]
    for phase, operands in ((FREE_READ, columns.read), (FREE_WRITTEN, columns.written)):
        step, tensor = operands.of(actions.recomputed, steps.again)
        dead = np.flatnonzero((step >= last[tensor]) & may_free[tensor])
        keys.append(step[dead] * PHASES + phase)
        tensors.append(tensor[dead])
    return np.concatenate(keys), np.concatenate(tensors)


def _are_dead(columns: TraceColumns, steps: Steps, dropped: Kind, last: Ints, lazy: Mask | None) -> Mask:
    """Per drop whether nothing used the tensor any more, but for the plan that retains it."""
    if lazy is None or not len(dropped.key):
        return np.zeros(len(dropped.key), np.bool_)
    tensor = dropped.tensor
    used = np.maximum(last[tensor], steps.own[columns.producer[tensor]]) * PHASES + FREE_READ
    dead: Mask = lazy[tensor] & columns.may_free[tensor] & (dropped.key > used)
    return dead


def _is_legal(prepared: Prepared, steps: Steps, actions: ActionColumns, events: Events) -> bool:
    """Whether every action and read comes when its tensor is there, and all outputs are at the end.

    Without actions that is so: the trace has been checked. With some, what is not loose is there from its production
    to its last use.
    """
    trace, columns, span = prepared.trace, prepared.columns, len(steps.op) * PHASES
    if not len(actions.recomputed) + len(actions.dropped):
        return True
    if (actions.recomputed >= actions.before).any():
        return False
    if (events.dropped.key < steps.own[trace.producer[actions.dropped]] * PHASES + ARRIVE).any():
        return False
    again, outputs = columns.read.of(actions.recomputed, steps.again), np.array(trace.outputs, np.int64)
    tensor = np.concatenate((columns.read.tensor, again[1], outputs))
    at_end = np.full(len(outputs), len(steps.op) - 1)
    step = np.concatenate((steps.own[columns.read.op], again[0], at_end))
    which = np.flatnonzero(events.loose[tensor])
    phase = np.where(which < len(tensor) - len(outputs), TAKE, PHASES)
    first = tensor[which] * span
    before = np.searchsorted(events.moments, first + step[which] * PHASES + phase) - 1
    return bool((events.arrived[before] & (events.moments[before] >= first)).all())


# ---- the rows ----------------------------------------------------------------------------------


class Outline(NamedTuple):
    """The rows of a run without what depends on sizes and times: all that runs of one structure have in common.

    steps: what runs.
    changes: the rows without times and bytes; none if it is not legal.
    moment: per change where its time is among those at which steps are reached, then start, then end.
    amount: per change where its bytes are among tensors, then workspaces of ops, then both with the other sign.
    ignored: actions without an effect.
    is_legal: whether the run need not take the event path, whatever the capacity.
    """

    steps: Steps
    changes: Ints
    moment: Ints
    amount: NDArray[np.int32]
    ignored: int
    is_legal: bool = True


Keep = Callable[[tuple[int, int, bytes], Callable[[], Outline]], Outline]
"""Keeps an outline by where it runs and by which ops have workspace."""


def _outline(plan: Plan, prepared: Prepared, actions: ActionColumns) -> Outline:
    steps, none = _steps(prepared, actions), np.zeros(0, np.int64)
    events = _events(prepared.columns, steps, actions, _lazy(plan, len(prepared.columns.replaces)))
    if not _is_legal(prepared, steps, actions, events):
        return Outline(steps, none, none, none.astype(np.int32), 0, is_legal=False)
    ignored, parts = len(actions.dropped) - int(events.dropped.resident.sum()), _parts(prepared, steps, events)
    del events  # of a large trace they are large, as are parts
    return Outline(steps, *_without_sizes(prepared, steps, parts), ignored)


def _changes(trace: Trace, outline: Outline, start: Ints, end: Ints) -> Ints:
    """The changes with their times and bytes, in the place of those of an outline. start, end: per step, in ns."""
    rows, delta = outline.changes, CHANGE_COLUMNS.index("delta")
    reached = np.append(0, end[:-1])  # where a step has to be dispatched first, its start is later
    rows[:, CHANGE_COLUMNS.index("time")] = np.concatenate((reached, start, end))[outline.moment]
    size = np.concatenate((trace.tensor_columns.bytes, trace.op_columns.workspace))
    rows[:, delta] = np.concatenate((size, -size))[outline.amount]
    return rows


def _without_sizes(prepared: Prepared, steps: Steps, parts: list[Part]) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """The changes of an outline, the moment of each, and its amount. parts: taken to pieces as they are used."""
    keys, tensors, amounts, causes = map(list, zip(*parts, strict=True))
    counts = [len(key) for key in keys]
    parts.clear()
    key = np.concatenate(keys)
    keys.clear()
    order = np.argsort(key, kind="stable")
    key = key[order]
    rows = np.empty((len(key), len(CHANGE_COLUMNS)), np.int64)
    rows[:, 0] = rows[:, 2] = 0
    rows[:, 1] = prepared.home[prepared.main[0]]
    rows[:, 3] = _filled(tensors, counts)[order]
    rows[:, 5] = _filled(causes, counts)[order]
    amount = _filled(amounts, counts)[order]
    del order
    step = key >> BITS
    key &= PHASES - 1
    rows[:, 4] = np.where(key == DROP, steps.anchor[step], steps.op[step])
    step += len(steps.op) * np.where(key == DROP, 0, np.where(key == TAKE, 1, 2))
    return rows, step, amount


def _filled(column: list[Any], counts: list[int]) -> NDArray[np.int32]:
    """A column of all parts, with as many numbers for each constant as its part has rows; the parts are given up."""
    whole = [np.full(count, part) if isinstance(part, int) else part for part, count in zip(column, counts)]
    column.clear()
    return np.concatenate(whole, dtype=np.int32, casting="same_kind")


def _parts(prepared: Prepared, steps: Steps, events: Events) -> list[Part]:
    """The rows of `changes` by sort; those of one key come in the order of these parts, and within a part."""
    placed, written, old, dropped, freed, dead, *_ = events
    tensors, workspace = len(prepared.columns.replaces), prepared.trace.op_columns.workspace
    out = tensors + len(workspace)  # where the amounts of departures begin
    takes = np.ones(len(written.key), np.bool_)
    takes[events.in_place] = ~old.resident
    take, taken, again = written.key[takes] - ARRIVE, written.tensor[takes], written.resident[takes]
    busy = np.flatnonzero(np.append(workspace, 0)[steps.op])
    used = tensors + steps.op[busy]
    return [
        (placed.key, placed.tensor, placed.tensor, PLACED),
        _left(dropped, out, np.where(dead[dropped.resident], FREED, DROPPED)),
        (take + TAKE, np.where(again, -1, taken), taken, np.where(again, WORKSPACE, MADE)),
        (busy * PHASES + TAKE, -1, used, WORKSPACE),
        (take[again] + GIVE, -1, out + taken[again], WORKSPACE),
        (busy * PHASES + GIVE, -1, out + used, WORKSPACE),
        _handed_over(events, out),
        _left(freed, out, FREED),
    ]


def _left(kind: Kind, out: int, cause: Numbers | int) -> Part:
    """Rows of what is dropped or freed, where it is resident."""
    tensor = kind.tensor[kind.resident]
    return kind.key[kind.resident], tensor, out + tensor, cause


def _handed_over(events: Events, out: int) -> Part:
    """Rows of storage that an op overwrites: the old value out, the new one in, unless that is resident already."""
    over = np.flatnonzero(events.overwritten.resident)
    if not len(over):
        return over, over, over, over
    new = events.in_place[over]
    tensor = np.column_stack((events.overwritten.tensor[over], events.written.tensor[new])).ravel()
    is_new = np.arange(len(tensor)) % 2 == 1
    rows = np.flatnonzero(~is_new | ~np.repeat(events.written.resident[new], 2))
    key, cause = np.repeat(events.overwritten.key[over], 2), np.where(is_new, MADE, OVERWRITTEN)
    return key[rows], tensor[rows], np.where(is_new, tensor, out + tensor)[rows], cause[rows]
