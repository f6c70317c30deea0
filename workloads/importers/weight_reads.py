"""Which units of a timeline read which weights of a known module.

They are found for outermost ops, which are given a weight as it is (a linear layer), then shared among their parts,
the ops of the trace, which are given views and copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workloads.importers.called_modules import paths_of
from workloads.importers.calls import Timeline
from workloads.importers.inputs import Input, inputs_of
from workloads.importers.modules import BACKWARD, ModuleCalls
from workloads.importers.weights import KnownModule, KnownWeights


class Outermost:
    """The outermost ops of a timeline, and in which modules they are.

    of_unit: per unit the position of its outermost op.
    """

    def __init__(self, line: Timeline, modules: ModuleCalls) -> None:
        self._line, self._modules = line, modules
        self.of_unit = [self._top(unit.call) for unit in line.units]
        self.units: dict[int, list[int]] = {}
        for i, top in enumerate(self.of_unit):
            self.units.setdefault(top, []).append(i)

    def _top(self, call: int) -> int:
        """The outermost call that is an op of a library's, neither the autograd engine's nor a function in Python."""
        top = call
        while call >= 0:
            name = self._line.calls[call].name
            if self._line.calls[call].is_op and "::" in name and "autograd::" not in name:
                top = call
            call = self._line.calls[call].parent
        return top

    def place(self, top: int) -> int:
        """The innermost call of a module that an op is in, -1 for none."""
        call = self._line.calls[top]
        return self._modules.innermost(call.thread, call.start)

    def is_recomputed(self, unit: int) -> bool:
        """Whether a unit is a part of a module that backward recomputes."""
        place = self.place(self.of_unit[unit])
        return place >= 0 and self._modules.recomputed[place]

    def paths(self, known: KnownModule) -> dict[str, str]:
        """Per module that the recording names its path in a known one."""
        if not known.weights:
            return {}
        given = ((self.place(top), inputs_of(self._line.calls[top].args)) for top in self.units)
        return paths_of(known, self._modules, given)


class WeightReads:
    """Shares out what outermost ops read of known weights."""

    def __init__(self, line: Timeline, modules: ModuleCalls, outermost: Outermost, weights: KnownWeights) -> None:
        self._line, self._modules, self._outermost, self._weights = line, modules, outermost, weights
        self._assigned: dict[int, dict[int, tuple[list[int], list[int]]]] = {}

    def of(
        self,
        unit: int,
        inputs: Sequence[Input],
        phase: str,
        sequence: Callable[[int], int | None],
        is_live: Callable[[Input], bool],
    ) -> tuple[list[int], list[Input]]:
        """The weights that a unit reads, and its inputs that are none.

        sequence: the number for backward of a call.
        is_live: whether another storage has the size of an input.
        """
        if phase == "update":
            return [], list(inputs)
        top = self._outermost.of_unit[unit]
        is_forward = phase == "forward" or self._outermost.is_recomputed(unit)
        if top not in self._assigned:
            self._assigned[top] = self._assign(top, sequence(top), is_live if is_forward else None)
        weights, given = self._assigned[top][unit]
        if is_forward:
            self._weights.note(sequence(self._line.units[unit].call), weights)
        found = self._weights.assign(list(given), inputs)
        return weights, [each for each, i in zip(inputs, found) if i < 0]

    def _assign(
        self, top: int, sequence: int | None, is_live: Callable[[Input], bool] | None
    ) -> dict[int, tuple[list[int], list[int]]]:
        """For each unit of an outermost op the weights that it reads, and those that it is given.

        A part of another one reads none (a bias is copied for the product that reads it). What no unit is given, its
        products read, or the first one.

        is_live: of forward; None for backward.
        """
        call, inputs = self._line.calls[top], inputs_of(self._line.calls[top].args)
        if is_live is not None:
            place = self._outermost.place(top)
            at = place, self._modules.name(place)
            read = self._weights.read_forward(call.name, inputs, [is_live(each) for each in inputs], at)
        else:
            read = self._weights.read_backward(call.name, inputs, sequence, self._engine(top))
        weights = [i for i in read if i >= 0]
        each: dict[int, tuple[list[int], list[int]]] = {}
        left = list(weights)  # twins go to one op each
        products = []
        units = self._outermost.units[top]
        calls = {unit: self._line.calls[self._line.units[unit].call] for unit in units}
        # products first: a call round one may be an op, too, if it took long
        for unit in sorted(units, key=lambda unit: not calls[unit].is_main):
            op = calls[unit]
            if op.parent >= 0 and self._line.calls[op.parent].is_main:
                each[unit] = [], weights
                continue
            found = [i for i in self._weights.assign(left, inputs_of(op.args)) if i >= 0]
            each[unit] = found, list(found)
            if op.is_main:
                products.append(unit)
        for unit in products or units[:1]:
            each[unit][0].extend(left)
        return each

    def _engine(self, call: int) -> int:
        """The position of the innermost call of the autograd engine that an op is in, -1 for none."""
        while call >= 0 and not self._line.calls[call].name.startswith(BACKWARD):
            call = self._line.calls[call].parent
        return call
