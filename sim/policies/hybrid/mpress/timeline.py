"""When each op of several devices would run with unlimited memory, and how many bytes each device holds meanwhile."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.hardware.platform import rank_link, shared_link, shares_wires
from sim.hardware.transfer_time import transfer_ns
from sim.plan import Problem
from sim.solvers.load_curve import load_of

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stage:
    """One device. Positions are places in `ops`.

    ops: its ops in order. reached: ns at which the device comes to each, and waits for what it reads. start: ns at
    which each begins. load: bytes resident from then until the next one begins.
    """

    ops: Sequence[int]
    reached: Ints
    start: Ints
    load: Ints

    def during(self, begin: int, end: int) -> slice:
        """The positions of the ops that run, or have run last, at some moment from `begin` to `end` ns."""
        first = max(int(np.searchsorted(self.start, begin, side="right")) - 1, 0)
        return slice(first, max(int(np.searchsorted(self.start, end, side="left")), first + 1))


@dataclass(frozen=True, eq=False)
class Timeline:
    """start, end: of each op in ns. stages: the devices in order."""

    start: Sequence[int]
    end: Sequence[int]
    stages: Sequence[Stage]


def timeline(problem: Problem) -> Timeline:
    """The run with everything resident: ops in their engine's order, each when what it reads is there.

    The members of a group begin when all of them have been reached and have what they read, and their devices go on.
    Transfers do not slow each other down.
    """
    trace = problem.trace
    times = _times(problem)
    stages = []
    for device in range(problem.platform.devices):  # one without a stage lends, too
        ops = np.flatnonzero(trace.op_columns.device == device).tolist()
        reached, begins = (np.maximum.accumulate(np.array([when[op] for op in ops], np.int64)) for when in times[:2])
        stages.append(Stage(ops, reached, begins, load_of(trace, device, ops)))
    return Timeline(times[1], times[2], stages)


def _times(problem: Problem) -> tuple[list[int], list[int], list[int]]:
    """When each op is reached, begins and ends, in ns."""
    trace, platform = problem.trace, problem.platform
    c, producer, engine = trace.op_columns, trace.producer.tolist(), trace.op_columns.engine
    makers = [[producer[t] for t in reads if producer[t] >= 0] for reads in trace.distinct_reads]
    left = Counter(c.group.values())
    members: dict[str, list[int]] = {}
    came, start, end = [0] * len(makers), [0] * len(makers), [-1] * len(makers)
    reached, free = [0] * trace.devices, dict[int, int]()
    queues = [deque(np.flatnonzero(c.device == one).tolist()) for one in range(trace.devices)]
    met: list[list[int]] = []  # groups all of whose members have been reached
    went_on = True
    while went_on:
        went_on = False
        for one, queue in enumerate(queues):
            while queue and (queue[0] in c.group or all(end[maker] >= 0 for maker in makers[queue[0]])):
                op, went_on = queue.popleft(), True
                came[op] = start[op] = reached[one]
                if (name := c.group.get(op)) is not None:
                    members.setdefault(name, []).append(op)
                    left[name] -= 1
                    met += [] if left[name] else [members[name]]
                    continue
                lane = platform.engine_for(one, engine.get(op, ""))
                start[op] = max(reached[one], free.get(lane, 0), *(end[maker] for maker in makers[op]), 0)
                end[op] = free[lane] = start[op] + problem.cost.op_ns(op)
                if op not in engine:
                    reached[one] = end[op]
        for group in [group for group in met if all(end[maker] >= 0 for op in group for maker in makers[op])]:
            met.remove(group)
            begin = max(start[op] for op in group)
            begin = max([begin, *(end[maker] for op in group for maker in makers[op])])
            went_on = True
            for op in group:
                start[op], end[op] = begin, begin + _together(problem, group)
    return came, start, end


def _together(problem: Problem, group: Sequence[int]) -> int:
    """How long the members of a group exchange what they do, alone on its links, in ns."""
    trace, platform = problem.trace, problem.platform
    ops = [trace.ops[op] for op in sorted(group)]
    homes = [platform.home(op.device).name for op in ops]
    payload = max(int(trace.touched[op.id]) for op in ops)
    ring = ops[0].ring
    if ring is not None and len(ops) == 1:
        wanted = {rank_link(ring.axis, ops[0].device)}
        wanted |= {shared_link(ops[0].device)} if shares_wires(ring.axis) else set()
        route = {i for i, link in enumerate(platform.links) if link.name in wanted}
        steps, step = ring.passes, platform.pace(tuple(route)).fixed
    elif {op.kind for op in ops} == {"send", "recv"}:
        sender, receiver = sorted(ops, key=lambda op: op.kind == "recv")
        stated = [op.bytes for op in ops if op.bytes is not None]
        payload = stated[0] if stated else sum(int(trace.tensor_columns.bytes[t]) for t in receiver.writes)
        route = {*platform.route(platform.home(sender.device).name, platform.home(receiver.device).name)}
        steps, step = 1, platform.pace(tuple(route)).fixed
    else:
        hops = [*zip(homes, homes[1:] + homes[:1], strict=True)]
        route = {link for source, target in hops for link in platform.route(source, target)}
        steps, step = ring.steps if ring else len(ops) - 1, platform.step_ns(hops)
    if not route:
        return 0
    return transfer_ns(payload, platform.pace(tuple(sorted(route))).rate, steps * step)
