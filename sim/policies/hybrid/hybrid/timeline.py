"""How long a choice takes on one device: ops one after another, and a link in each direction beside them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.policies.hybrid.hybrid.results import OFFLOAD, Results, Saved
from sim.solvers.schedule import Schedule

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Frame:
    """The steps of one device in order, whatever is offloaded.

    at: their places in the schedule. ops: which op each runs. is_own: whether that is in its own place.
    ns: how long each takes. held: bytes resident while it runs.
    """

    at: Sequence[int]
    ops: Sequence[int]
    is_own: Sequence[bool]
    ns: Sequence[int]
    held: Ints


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of one device in order.

    at: their places in the schedule. ops: which op each runs.
    ns: how long each takes. held: bytes resident while it runs, offloaded results that are away left out.
    made: per step (-1: the start) the offloaded results (places in `Results.saved`) that may leave from its end on.
    left: per step those that are not read before they are back, and leave when it ends.
    back: (step that reads it first, place) of each, in order.
    """

    at: Sequence[int]
    ops: Sequence[int]
    ns: Sequence[int]
    held: Ints
    made: Mapping[int, Sequence[int]]
    left: Mapping[int, Sequence[int]]
    back: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Timeline:
    """What the model says of a choice on one device.

    ns: the time of all steps, stalls included. stall_ns: those for a copy back, and for space.
    excess: the most bytes above the budget, 0 where all fits.
    early: (place in the schedule after which a copy out is asked for before the last read, -1 for the start; place in
        `Results.saved`).
    fetch: (place in the schedule before which a copy back is asked for, place in `Results.saved`), in order.
    used: per step the bytes in use while it runs. late: ns for which a copy back made the device wait, by place.
    """

    ns: int
    stall_ns: int
    excess: int
    early: Sequence[tuple[int, int]]
    fetch: Sequence[tuple[int, int]]
    used: Sequence[int]
    late: Mapping[int, int]


def frame_of(schedule: Schedule, ns: Sequence[int], device: int) -> Frame:
    """The steps of a device. ns: per op."""
    at = np.flatnonzero(schedule.index.trace.op_columns.device[schedule.ops] == device)
    ops = schedule.ops[at].tolist()
    is_own = (schedule.anchors[at] < 0).tolist()
    return Frame(at.tolist(), ops, is_own, [ns[op] for op in ops], schedule.residency(device).held[at])


def steps_of(results: Results, choice: Sequence[int], frame: Frame, device: int) -> Steps:
    """The steps of a device under a choice."""
    held = frame.held.copy()
    sent = {i: s for i, s in enumerate(results.saved) if s.device == device and choice[i] == OFFLOAD}
    leaves: dict[int, list[int]] = {}
    makes: dict[int, list[int]] = {}
    for i, s in sent.items():
        leaves.setdefault(s.last, []).append(i)
        if s.sends_early:
            makes.setdefault(s.op, []).append(i)
    since: dict[int, int] = {}  # away, and the step after which it left
    made: dict[int, list[int]] = {-1: [i for i, s in sent.items() if s.op < 0 and s.sends_early]}
    left: dict[int, list[int]] = {}
    back: list[tuple[int, int]] = []
    for step, (op, is_own) in enumerate(zip(frame.ops, frame.is_own, strict=True)):
        for i in results.read_by[op] if since else ():
            if i in since:
                start = since.pop(i)
                held[start + 1 : step] -= results.saved[i].bytes
                back.append((step, i))
        if is_own and op in makes:
            made[step] = makes[op]
        if is_own and op in leaves:
            left[step] = leaves[op]
            since.update(dict.fromkeys(leaves[op], step))
    for moments in (made, left):  # what nothing reads is freed
        moments.update({step: [i for i in places if i not in since] for step, places in moments.items()})
    return Steps(frame.at, frame.ops, frame.ns, held, made, left, back)


def timeline(results: Results, steps: Steps, budget: int, *, eager: bool = False) -> Timeline:
    """Run the steps; each copy back starts as soon as it has space until it is read, in the order of need.

    eager: copies out start when the link is idle and an op ends that follows the producer, not at the last read.
    """
    saved, future = results.saved, steps.held.copy()
    leaving: list[tuple[int, int, int]] = []  # end, bytes, which; by end
    early: list[tuple[int, int]] = []
    ready: list[tuple[int, int]] = []  # last read, and which: what might leave already
    ends: dict[int, int] = {}  # of each copy out
    gone: set[int] = set()  # away, or on their way
    arrives: dict[int, int] = {}
    fetch: list[tuple[int, int]] = []
    waiting: list[int] = []  # per step the bytes that have not left yet
    late: dict[int, int] = {}
    now = stall = pending = out_free = back_free = asked = came = retry = 0
    if eager and (ready := sorted(_made(saved, steps, -1))):
        early.append((-1, ready[0][1]))
        out_free = _sent_first(saved, ready, ends, now)
    for step, ns in enumerate(steps.ns):
        while leaving and leaving[0][0] <= now:
            pending -= leaving.pop(0)[1]
        while asked < len(steps.back):
            need, i = steps.back[asked]
            size = saved[i].bytes
            if need > step:
                if step < retry or i not in gone or ends[i] > now:
                    break
                over = np.flatnonzero(future[step:need] > budget - size)
                if len(over) or int(future[step:need].max()) + pending > budget - size:
                    retry = step + 1 + (int(over[-1]) if len(over) else 0)
                    break
                future[step:need] += size
            if ends[i] > now:  # it is read before it has left, and stays
                leaving.remove((ends[i], size, i))
                pending -= size
                arrives[i] = now
            else:
                back_free = arrives[i] = max(now, back_free) + saved[i].back_ns
            fetch.append((steps.at[step], i))
            asked += 1
        begin = now
        while came < len(steps.back) and steps.back[came][0] == step:
            i = steps.back[came][1]
            if arrives[i] > now:
                late[i] = arrives[i] - now
                now = arrives[i]
            came += 1
        while leaving and (leaving[0][0] <= now or int(future[step]) + pending > budget):
            end, size, _ = leaving.pop(0)
            now = max(now, end)
            pending -= size
        waiting.append(pending)
        stall += now - begin
        now += ns
        for i in steps.left.get(step, ()):
            if i not in ends:
                out_free = ends[i] = max(now, out_free) + saved[i].out_ns
            if ends[i] > now:
                insort(leaving, (ends[i], saved[i].bytes, i))
                pending += saved[i].bytes
            gone.add(i)
        if eager:
            ready += _made(saved, steps, step)
            if ready and out_free <= now and (ready := sorted(each for each in ready if each[1] not in gone)):
                early.append((steps.at[step], ready[0][1]))
                out_free = _sent_first(saved, ready, ends, now)
    used = (future + np.array(waiting, np.int64)).tolist()
    return Timeline(now, stall, max(0, max(used, default=0) - budget), early, fetch, used, late)


def _made(saved: Sequence[Saved], steps: Steps, step: int) -> list[tuple[int, int]]:
    """What a step produces that may leave early: (last read, place) of each."""
    return [(saved[i].last, i) for i in steps.made.get(step, ())]


def _sent_first(saved: Sequence[Saved], ready: list[tuple[int, int]], ends: dict[int, int], now: int) -> int:
    """Take the first of what is ready, and note in `ends` when its copy out, which begins now, ends; that time."""
    i = ready.pop(0)[1]
    ends[i] = now + saved[i].out_ns
    return ends[i]
