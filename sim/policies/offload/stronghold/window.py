"""The working window: when updates can begin, and the smallest window that hides every copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from sim.hardware.platform import Platform
from sim.plan import Cost, Problem
from sim.rewrites.order import as_early, must_precede, with_sends
from sim.rewrites.rewrite import reorder
from sim.solvers.streaming import runs_of, streamed
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE

FORWARD, UPDATE = PHASE_CODE["forward"], PHASE_CODE["update"]
MODEL = [ROLE_CODE[role] for role in ("weight", "optimizer_state")]


def as_gradients_arrive(
    trace: Trace, gradients: Sequence[int], problem: Problem, host: str
) -> tuple[Trace, dict[int, int]]:
    """The CPU's updates where their gradients have arrived on the host, by the clock of ops and copies; and when.

    gradients: in the order in which they are complete.
    """
    c, cost = trace.op_columns, problem.cost.over(trace, problem.platform)
    updates = {op for op in range(len(c.name)) if c.phase[op] == UPDATE and op in c.engine}
    arrived: dict[int, int] = {}
    starts: dict[int, list[tuple[int, int]]] = {}  # per device its ops with their ends
    for device in range(trace.devices):
        own = [op for op in range(len(c.name)) if c.device[op] == device and op not in updates and op not in c.engine]
        starts[device] = list(zip(own, accumulate(cost.op_ns(op) for op in own), strict=True))
        ends, free = dict(starts[device]), 0
        home = problem.platform.home(device).name
        for t in gradients:
            last = max([int(trace.producer[t]), *(r for r in trace.readers(t) if r not in updates)])
            if last in ends:
                free = max(free, ends[last]) + cost.move_ns(t, home, host)
                arrived[t] = free
    waits: dict[int, set[int]] = {}
    ready: dict[int, int] = {}
    follows = _following(trace, updates)
    for op in sorted(updates):
        waits[op] = with_sends(trace, must_precede(trace, op))
        own = [arrived[t] for t in trace.reads(op) if t in arrived]
        ready[op] = max([0, *own, *(ready[other] for other in waits[op] if other in ready)])
        here = [(other, end) for other, end in starts[int(c.device[op])] if other not in follows]
        passed = sum(end < ready[op] for _, end in here)
        waits[op] |= {other for other, _ in here[: passed + 1][-1:]}
    order = sorted(updates, key=lambda op: (ready[op], op))
    for before, after in pairwise(order):
        waits[after].add(before)
    for here in starts.values():  # what gathers or reads new weights follows them, in its device's order
        for before, after in pairwise([-1, *(other for other, _ in here)]):
            if after in follows:
                waits[after] = {before, *must_precede(trace, after)} - {-1}
    placed = list(as_early(len(c.name), waits))
    return reorder(trace, placed), {new: ready[op] for new, op in enumerate(placed) if op in ready}


def _following(trace: Trace, updates: Collection[int]) -> set[int]:
    """The ops beside some updates that need what these make, or what such ops make."""
    made = set(updates)
    for op in range(len(trace.op_columns.name)):
        if not made.isdisjoint(must_precede(trace, op)):
            made.add(op)
    return made - set(updates)


class Window:
    """The layers of one device's program, and what a window of them takes.

    updates: the CPU's ops, and when the gradients of each have arrived.
    """

    def __init__(
        self, trace: Trace, updates: Mapping[int, int], platform: Platform, cost: Cost, host: str, device: int
    ) -> None:
        self.trace, self.platform, self.host, self.updates, self.device = trace, platform, host, updates, device
        c = trace.op_columns
        runs, position = runs_of(trace, platform, weighted=True)
        self.runs = runs.get(device, [])
        self.cost = cost
        self.home = platform.home(device).name
        self.weights = [
            (t, readers) for t, readers in streamed(trace, platform, gathered=True) if c.device[readers[0]] == device
        ]
        self.position = position
        self.end = {first: last for last, first in trace.carry}

    def first_reads(self, window: int) -> dict[int, list[int]]:
        """Per weight that the CPU updates its forward reads within the first `window` runs."""
        found = {}
        for t, readers in self.weights:
            here = [op for op in readers if self.position[op] < window and self.trace.op_columns.phase[op] == FORWARD]
            if here and int(self.trace.producer[self.end.get(t, t)]) in self.updates:
                found[t] = here
        return found

    @cached_property
    def forward(self) -> int:
        """How many runs are forward."""
        return sum(1 for run in self.runs if self.trace.op_columns.phase[run[0]] == FORWARD)

    # ---- (1) memory ----------------------------------------------------------------------------

    @cached_property
    def layer_bytes(self) -> list[int]:
        """Per run the bytes of the weights that it reads."""
        size, found = self.trace.tensor_columns.bytes, [0] * len(self.runs)
        for t, readers in self.weights:
            for at in {self.position[op] for op in readers}:
                found[at] += int(size[t])
        return found

    @cached_property
    def rest(self) -> int:
        """The most bytes on the device besides these weights, gradients until the end of the next run included."""
        trace, c = self.trace, self.trace.op_columns
        own = {t for t, _ in self.weights}
        change = [0] * (len(c.name) + 2)
        kept = set(trace.outputs)
        for t, size in enumerate(trace.tensor_columns.bytes.tolist()):
            made = int(trace.producer[t])
            here = [op for op in (made, *trace.readers(t)) if op >= 0 and op not in self.updates]
            here = [op for op in here if c.device[op] == self.device]
            if t in own or not here or (made < 0 and trace.tensor_columns.role[t] in MODEL and t not in kept):
                continue
            last = max(here) if t not in kept or len(here) < 1 else len(c.name)
            if trace.tensor_columns.role[t] == ROLE_CODE["gradient"] and last < len(c.name):
                run = self.position[last] + 1
                last = self.runs[run][-1] if run < len(self.runs) else len(c.name)
            change[max(made, 0)] += int(size)
            change[last + 1] -= int(size)
        workspace = np.where(c.device == self.device, c.workspace, 0)
        return int((np.cumsum(change)[: len(workspace)] + workspace).max(initial=0))

    def fits(self, window: int) -> bool:
        """Condition (1)."""
        layers = self.layer_bytes
        most = max((sum(layers[i : i + window + 1]) for i in range(len(layers))), default=0)
        return most + self.rest <= self.platform.home(self.device).capacity

    # ---- (2) to (4) time -----------------------------------------------------------------------

    @cached_property
    def times(self) -> list[int]:
        """Per run its time."""
        return [sum(self.cost.op_ns(op) for op in run) for run in self.runs]

    @cached_property
    def copies(self) -> list[int]:
        """Per run the time of copying its weights to the device, one after the other."""
        found = [0] * len(self.runs)
        for t, readers in self.weights:
            for at in {self.position[op] for op in readers}:
                found[at] += self.cost.move_ns(t, self.host, self.home)
        return found

    def hides(self, window: int) -> bool:
        """Conditions (2), (3) and (4)."""
        forward = self.forward
        first, second = (self.times[:forward], self.copies[:forward]), (self.times[forward:], self.copies[forward:])
        return _in_time(*first, window) and _in_time(*second, window) and self._updated_in_time(window)

    def _updated_in_time(self, window: int) -> bool:
        """Whether each layer is updated before the next iteration fetches it, `window` runs before it is read."""
        free, total = 0, sum(self.times)
        began = list(accumulate(self.times, initial=0))
        first = {t: self.position[readers[0]] for t, readers in self.weights}
        for op in sorted(self.updates):
            if self.trace.op_columns.device[op] == self.device:
                free = max(free, self.updates[op]) + self.cost.op_ns(op)
                runs = [at for t, at in first.items() if int(self.trace.producer[self.end.get(t, t)]) == op]
                if runs and min(runs) >= window and free > total + began[min(runs) - window]:
                    return False
        return True


def distinct(devices: Sequence[Window]) -> range:
    """The windows that differ: up to all forward runs of any device."""
    return range(1, max(1, *(each.forward for each in devices)) + 1)


def chosen(devices: Sequence[Window]) -> int:
    """The smallest window that meets all conditions on each device, else the largest that fits; 1 where none does."""
    fitting = [window for window in distinct(devices) if all(each.fits(window) for each in devices)]
    hiding = (window for window in fitting if all(each.hides(window) for each in devices))
    return next(hiding, fitting[-1] if fitting else 1)


def _in_time(times: Sequence[int], copies: Sequence[int], window: int) -> bool:
    """Whether copies one after the other, from the run `window` on, each end before their run begins."""
    done = accumulate(copies[window:])
    began = list(accumulate(times, initial=0))
    return all(copied <= began[k] for k, copied in enumerate(done, window))
