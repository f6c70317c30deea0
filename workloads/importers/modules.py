"""The layers of a profiler's trace, from the calls of modules that `with_stack=True` records.

Such a call has the class of the module and a number, in place of its path, and lists that only hold modules are never
called. What repeats is found as far as that shows it, by the rules of `workloads.capturing.layers`: modules that have
parts, of one class and with parts of the same classes, called by one module; of these the outermost, and all others of
their classes. The parts of a sequence count as its own, and a sequence is never a layer. Where nothing repeats so, the
parts of sequences are layers, and else what is called repeatedly (a recurrent cell). Where the module is known, its
tree says what its layers are. Each call of a module in a forward pass is a layer of its own, and those of another
microbatch are the same ones; one that backward recomputes belongs to the call before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workloads.importers.calls import Call, nest

PREFIX = "nn.Module: "
"""How the profiler's names of a module's calls begin."""
BACKWARD = "autograd::engine::evaluate_function"
SEQUENCE = "Sequential"
DEEPEST = 100
"""Calls nested more deeply are no layers."""


class ModuleCalls:
    """The calls of modules in one step.

    calls: in order of start, each with the position of the one that contains it.
    recomputed: per call whether backward recomputes it.
    first_of_pass: per call whether a forward pass begins with it, after a backward pass.
    """

    def __init__(self, modules: Iterable[Call], ops: Iterable[Call]) -> None:
        """Those of some calls of modules, in any order, given the other calls, among them the autograd engine's."""
        self.calls = sorted(modules, key=lambda call: (call.start, -call.end))
        nest(self.calls)
        engine = [call for call in ops if call.name.startswith(BACKWARD)]
        backward, starts = _Spans(engine), sorted(call.start for call in engine)
        self.recomputed = [backward.at(call.thread, call.start) is not None for call in self.calls]
        self.first_of_pass = [False] * len(self.calls)
        self._starts: dict[Any, list[int]] = {}
        self._places: dict[Any, list[int]] = {}
        passed = 0
        for i, call in enumerate(self.calls):
            self._starts.setdefault(call.thread, []).append(call.start)
            self._places.setdefault(call.thread, []).append(i)
            if call.parent < 0 and not self.recomputed[i]:
                before = bisect_right(starts, call.start)
                self.first_of_pass[i], passed = before > passed, before

    def innermost(self, thread: Any, time: int) -> int:
        """The position of the innermost call that a thread was in at a time in ns, -1 outside all."""
        index = bisect_right(self._starts.get(thread, []), time) - 1
        place = self._places[thread][index] if index >= 0 else -1
        while place >= 0 and self.calls[place].end <= time:
            place = self.calls[place].parent
        return place

    def name(self, place: int) -> str:
        """The module of a call as the profiler names it, "" for none."""
        return self.calls[place].name.removeprefix(PREFIX) if place >= 0 else ""


class ModuleLayers:
    """The layer in which an op ran.

    names: per layer the module as the profiler names it, or its path, in the order of the calls.
    """

    def __init__(self, modules: ModuleCalls, paths: Mapping[str, str] | None = None) -> None:
        """The layers of one step.

        paths: of the modules that are layers, by the profiler's names; without any, what repeats is a layer.
        """
        calls, paths = modules.calls, paths or {}
        layers = {PREFIX + name for name in paths} or _Tree(calls, modules.recomputed).layers()
        names: list[str] = []
        numbers: dict[str, list[int]] = {}
        count: Counter[str] = Counter()
        latest: dict[str, int] = {}
        numbered: list[tuple[Call, int]] = []
        for call, again, begins in zip(calls, modules.recomputed, modules.first_of_pass):
            if begins:
                count.clear()
            if call.name not in layers:
                continue
            if not again or call.name not in latest:
                known = numbers.setdefault(call.name, [])
                if count[call.name] == len(known):
                    known.append(len(names))
                    name = call.name.removeprefix(PREFIX)
                    names.append(paths.get(name, name))
                latest[call.name] = known[count[call.name]]
                count[call.name] += 1
            numbered.append((call, latest[call.name]))
        self.names = tuple(names)
        self._spans = _Spans(call for call, _ in numbered)
        self._numbers = {id(call): number for call, number in numbered}

    def at(self, thread: Any, time: int) -> int:
        """The layer that a thread was in at a time in ns, -1 for none."""
        call = self._spans.at(thread, time)
        return -1 if call is None else self._numbers[id(call)]


class _Spans:
    """The outermost of some calls, per thread."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls: dict[Any, list[Call]] = {}
        self._starts: dict[Any, list[int]] = {}
        for call in sorted(calls, key=lambda call: (call.start, -call.end)):
            kept = self._calls.setdefault(call.thread, [])
            if not kept or call.start >= kept[-1].end:
                kept.append(call)
                self._starts.setdefault(call.thread, []).append(call.start)

    def at(self, thread: Any, time: int) -> Call | None:
        """The call that a thread was in at a time, None outside them."""
        index = bisect_right(self._starts.get(thread, []), time) - 1
        call = self._calls[thread][index] if index >= 0 else None
        return call if call is not None and time < call.end else None


class _Tree:
    """Which modules call which, each placed where it was called first."""

    def __init__(self, calls: Sequence[Call], recomputed: Sequence[bool]) -> None:
        depth = [0] * len(calls)
        self.parts: dict[str, list[str]] = {}
        self.roots: list[str] = []
        self.classes: dict[str, set[str]] = {}
        self.times: Counter[str] = Counter()
        for i, call in enumerate(calls):
            depth[i] = depth[call.parent] + 1 if call.parent >= 0 else 0
            if depth[i] > DEEPEST or recomputed[i]:
                continue
            self.times[call.name] += 1
            if call.name not in self.classes:
                self.classes[call.name] = set()
                above = self.roots if call.parent < 0 else self.parts.setdefault(calls[call.parent].name, [])
                above.append(call.name)
        for i in reversed(range(len(calls))):  # parts come after what they are parts of
            call = calls[i]
            if call.parent >= 0 and call.name in self.classes and calls[call.parent].name in self.classes:
                self.classes[calls[call.parent].name] |= self.classes[call.name] | {class_of(call.name)}

    def layers(self) -> set[str]:
        """The modules that are layers."""
        classes = {class_of(name) for name in self._outermost(self._twins)}
        if classes:
            return set(self._outermost(lambda parts: [part for part in parts if class_of(part) in classes]))
        parts = {part for name, parts in self.parts.items() if class_of(name) == SEQUENCE for part in parts}
        if parts:
            return set(self._outermost(lambda some: [part for part in some if part in parts]))
        return set(self._outermost(lambda some: [part for part in some if self.times[part] > 1]))

    def _twins(self, parts: list[str]) -> list[str]:
        with_parts = [part for part in parts if part in self.parts and class_of(part) != SEQUENCE]
        kinds = {part: (class_of(part), frozenset(self.classes[part])) for part in with_parts}
        count = Counter(kinds.values())
        return [part for part in with_parts if count[kinds[part]] > 1]

    def _outermost(self, choose: Callable[[list[str]], list[str]]) -> list[str]:
        """What is chosen among the parts of a module, for all modules that are no part of what has been chosen."""
        found: list[str] = []
        seen = set(self.roots)
        open_ = list(self.roots)
        while open_:
            parts = self.parts.get(open_.pop(), [])
            chosen = choose(parts)
            found += chosen
            taken = set(chosen)
            for part in parts:
                if part not in taken and part not in seen:
                    seen.add(part)
                    open_.append(part)
        return found


def class_of(name: str) -> str:
    """The class of a module by the profiler's name of it."""
    return name.removeprefix(PREFIX).rpartition("_")[0]
