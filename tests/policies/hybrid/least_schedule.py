"""The least time of any schedule of a small trace on one device and a host, by search: it shares no code with planners.

A schedule starts ops in order, recomputes earlier ones whenever the device is free, copies results to the host and
back, one at a time in each direction, and releases whatever it likes. An op takes space for its results and workspace
when it starts, a copy for what arrives; what leaves takes its space until its copy has ended, what is read until the
op has. Time passes from one end of an op or copy to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from sim.trace import Trace

Going = tuple[int, int]
"""An op or a tensor, and the ns that it still takes; (-1, 0) for none."""
NONE = (-1, 0)


class State(NamedTuple):
    """What a schedule has come to.

    following: the first op that has not started.
    near, far: which tensors are on the device and on the host, a bit each.
    runs: the op under way. leaves, returns: the tensors under way.
    """

    following: int
    near: int
    far: int
    runs: Going
    leaves: Going
    returns: Going


class TooManyStates(Exception):
    """The search is too long."""


class Least:
    """A search for the least time. rate: bytes per second of the link each way, 0 for none."""

    def __init__(self, trace: Trace, capacity: int, rate: int) -> None:
        self.capacity = capacity
        self.ops = trace.ops
        self.size = [tensor.bytes for tensor in trace.tensors]
        self.copy = [-(-size * 10**9 // rate) if rate and size else 0 for size in self.size]
        self.reads = [sum(1 << t for t in {*op.reads}) for op in self.ops]
        self.writes = [sum(1 << t for t in op.writes) for op in self.ops]
        self.outputs = sum(1 << t for t in trace.outputs)
        self.given = sum(1 << t for t, op in enumerate(trace.producer) if op < 0)
        self.left = [sum(op.duration for op in self.ops[k:]) for k in range(len(self.ops) + 1)]
        self.wanted = [self._wanted(k) for k in range(len(self.ops) + 1)]

    def ns(self, most: int) -> int | None:
        """The least time, None where no schedule fits. Raises TooManyStates where it would look at more than `most`."""
        start = State(0, self.given, 0, NONE, NONE, NONE)
        least, queue = {start: 0}, [(self.left[0], 0, start)]
        while queue:
            _, past, state = heappop(queue)  # of equals the one that has come farthest
            now = -past
            if now > least[state]:
                continue
            if len(least) > most:
                raise TooManyStates
            if state.following == len(self.ops) and state.runs == NONE:
                return now
            for passed, reached in self._nexts(state):
                if now + passed < least.get(reached, 1 << 60):
                    least[reached] = now + passed
                    rest = self.left[reached.following] + reached.runs[1]
                    heappush(queue, (now + passed + rest, -now - passed, reached))
        return None

    def _wanted(self, following: int) -> int:
        """What ops from there on read, or recomputation for them."""
        wanted = self.outputs | self.given
        for op in reversed(range(len(self.ops))):
            if op >= following or wanted & self.writes[op]:
                wanted |= self.reads[op]
        return wanted

    def _used(self, state: State) -> int:
        op, back = state.runs[0], state.returns[0]
        used = sum(self.size[t] for t in _bits(state.near)) + (self.size[back] if back >= 0 else 0)
        return used + (self._takes(op) if op >= 0 else 0)

    def _takes(self, op: int) -> int:
        """Bytes of an op's results, those still resident included, and its workspace."""
        return sum(self.size[t] for t in self.ops[op].writes) + self.ops[op].workspace

    def _nexts(self, state: State) -> Iterator[tuple[int, State]]:
        """What may follow: something starts or is released, or time passes until something ends."""
        free, wanted = self.capacity - self._used(state), self.wanted[state.following]
        short = False  # something could start if there were space: only then a release is of use
        if state.runs == NONE:
            for op in range(min(state.following + 1, len(self.ops))):
                first = op == state.following
                useful = first or self.writes[op] & wanted & ~state.near
                if not useful or state.near & self.reads[op] != self.reads[op]:
                    continue
                if self._takes(op) > free:
                    short = True
                    continue
                yield 0, state._replace(runs=(op, self.ops[op].duration), following=state.following + first)
        held = self.reads[state.runs[0]] if state.runs[0] >= 0 else 0
        held |= self.given | self.outputs | (1 << state.leaves[0] if state.leaves[0] >= 0 else 0)
        if state.leaves == NONE:
            for t in _bits(state.near & ~state.far & wanted & ~self.given & ~self.outputs):
                if self.copy[t]:
                    yield 0, state._replace(leaves=(t, self.copy[t]))
        if state.returns == NONE:
            making = self.writes[state.runs[0]] if state.runs[0] >= 0 else 0
            for t in _bits(state.far & ~state.near & ~making & wanted):
                if self.size[t] > free:
                    short = True
                    continue
                yield 0, state._replace(returns=(t, self.copy[t]))
        for t in _bits(state.near & ~held) if short else ():
            yield 0, state._replace(near=state.near & ~(1 << t))
        under_way = [going[1] for going in (state.runs, state.leaves, state.returns) if going != NONE]
        if under_way:
            passed = min(under_way)
            yield passed, self._after(state, passed)

    def _after(self, state: State, passed: int) -> State:
        """The state when so much time has passed."""
        runs, leaves, returns = (
            going if going == NONE else (going[0], going[1] - passed)
            for going in (state.runs, state.leaves, state.returns)
        )
        near, far = state.near, state.far
        if runs[0] >= 0 and runs[1] == 0:
            near, runs = near | self.writes[runs[0]], NONE
        if leaves[0] >= 0 and leaves[1] == 0:
            far, leaves = far | 1 << leaves[0], NONE
        if returns[0] >= 0 and returns[1] == 0:
            near, returns = near | 1 << returns[0], NONE
        held = self.reads[runs[0]] if runs[0] >= 0 else 0
        held |= 1 << leaves[0] if leaves[0] >= 0 else 0
        wanted = self.wanted[state.following]
        return State(state.following, near & (wanted | held), far & wanted, runs, leaves, returns)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
