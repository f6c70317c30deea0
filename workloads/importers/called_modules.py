"""Which part of a known module is which of a recording, where modules have a class and a number instead of a path.

Numbers follow the order of first calls. Each module that is called is a part of its class within that of its caller:
the first one, in the order of the module, that has not been taken and whose weights have the shapes of what its ops
were given; where none has them all, the one with the most. Twins may be taken for each other where a model calls them
in another order than it has them, which makes no difference to bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from workloads.importers.inputs import Input
from workloads.importers.modules import ModuleCalls, class_of
from workloads.importers.weights import KnownModule

Shape = tuple[int, ...]
MOST_OPTIONS = 1000
"""How many parts of one class are compared with a call of none that fits."""


def paths_of(known: KnownModule, calls: ModuleCalls, inputs: Iterable[tuple[int, Iterable[Input]]]) -> dict[str, str]:
    """Per module of a recording, as the profiler names it, its path in a known module; those without one are left out.

    inputs: per outermost op the position of the innermost call of a module, and what the op was given.
    """
    callers: dict[str, str] = {}
    for place, call in enumerate(calls.calls):
        callers.setdefault(calls.name(place), calls.name(call.parent))
    own: dict[str, set[Shape]] = {name: set() for name in callers}
    for place, some in inputs:
        if name := calls.name(place):
            own[name].update(given.shape for given in some)
    below = {name: set(shapes) for name, shapes in own.items()}
    for name in reversed(callers):  # callers come before what they call
        if (caller := callers[name]) in below and caller != name:
            below[caller] |= below[name]
    matching = _Matching(known)
    paths: dict[str, str] = {}
    for name, caller in callers.items():
        climbed = 0
        while caller and caller not in paths and climbed < MOST_OPTIONS:
            caller, climbed = callers.get(caller, ""), climbed + 1
        path = matching.take(class_of(name), paths.get(caller, ""), own[name], below[name])
        if path is not None:
            paths[name] = path
    return paths


class _Matching:
    """The parts of a module that nothing of the recording has been matched with yet."""

    def __init__(self, known: KnownModule) -> None:
        self._left: dict[str, dict[str, None]] = {}
        for path, kind in known.classes.items():
            self._left.setdefault(kind, {})[path] = None
        self._own: dict[str, set[Shape]] = {}
        self._below: dict[str, Counter[Shape]] = {}
        for weight in known.weights:
            for owner in weight.owners:
                if weight.is_parameter:
                    self._own.setdefault(owner, set()).add(weight.shape)
                steps = owner.split(".") if owner else []
                for i in range(len(steps) + 1):
                    self._below.setdefault(".".join(steps[:i]), Counter())[weight.shape] += 1

    def take(self, kind: str, inside: str, own: set[Shape], below: set[Shape]) -> str | None:
        """The part of a class within another that fits best, which is no longer there; None without any.

        own, below: shapes of what its ops were given, those of its parts left out or included.
        """
        options = [p for p in self._left.get(kind, {}) if not inside or p == inside or p.startswith(f"{inside}.")]
        best, most = None, None
        for path in options[:MOST_OPTIONS]:
            weights: Mapping[Shape, int] = self._below.get(path, {})
            seen = sum(count for shape, count in weights.items() if shape in below)
            fit = self._own.get(path, set()) <= own, 2 * seen - sum(weights.values())
            if most is None or fit > most:
                best, most = path, fit
            if fit[0] and seen == sum(weights.values()):
                break
        if best is not None:
            del self._left[kind][best]
        return best
