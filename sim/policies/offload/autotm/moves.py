"""An answer of the program as a plan: where tensors begin and are born, their moves, and the time that it takes."""

from __future__ import annotations

from collections.abc import Mapping

from sim.plan import Action, Drop, Move, Problem, Wait
from sim.policies.offload.autotm.lifetimes import Life, Lives
from sim.policies.offload.autotm.program import Columns


class Moves:
    """What the answer comes to.

    actions: moves, and where the device waits. place: what is in the slow tier from its production or the start on.
    expected_ns: the time of all ops and copies, as the program counts it.
    """

    def __init__(self, problem: Problem, lives: Lives, answer: Mapping[int, Columns]) -> None:
        self._home, self._last = problem.home, len(lives.took) - 1
        # where several have one anchor: what leaves, what the device waits for, what runs beside its op
        self._out: list[Action] = []
        self._back: list[Action] = []
        self._later: list[Action] = []
        self.place: dict[int, str] = {}
        self._copies = 0
        self._beside: dict[int, int] = {}
        used: dict[int, dict[int, str]] = {}
        for life in lives.lives:
            mine = answer[life.tensor]
            if not mine.fast[0]:
                self.place[life.tensor] = life.slow
            for use, fast in zip(life.uses, mine.fast, strict=True):
                if not fast and 0 <= use <= self._last:
                    used.setdefault(use, {})[life.tensor] = life.slow
            for i in range(len(life.gaps)):
                self._gap(life, mine, i)
        self.actions = (*self._out, *self._back, *self._later)
        took = [problem.cost.op_ns(op, used[op]) if op in used else ns for op, ns in enumerate(lives.took)]
        self.expected_ns = self._copies + sum(max(ns, self._beside.get(op, 0)) for op, ns in enumerate(took))

    def _gap(self, life: Life, mine: Columns, i: int) -> None:
        t, left, right = life.tensor, life.uses[i], life.uses[i + 1]
        # (before, after): behind the use on the left, and ahead of the one on the right
        first, behind = (None, left) if left >= 0 else (0, None)
        ahead, last = (right, None) if right <= self._last else (None, self._last)
        if mine.free[i]:
            self._out.append(Drop(t, self._home, before=first, after=behind))
        if mine.out[i]:
            self._out += [
                Move(t, life.slow, before=first, after=behind),
                Wait(t, before=first, after=behind),
            ]
            self._copies += life.out_ns
        for op, taken in mine.out_at[i].items():
            if taken:
                self._later += [Move(t, life.slow, before=op), Wait(t, after=op)]
                self._beside[op] = self._beside.get(op, 0) + life.out_ns
        for op, taken in mine.back_at[i].items():
            if taken:
                self._later += [Move(t, self._home, keep=True, before=op), Wait(t, after=op)]
                self._beside[op] = self._beside.get(op, 0) + life.in_ns
        if mine.back[i]:
            self._back += [
                Move(t, self._home, keep=True, before=ahead, after=last),
                Wait(t, before=ahead, after=last),
            ]
            self._copies += life.in_ns
