"""What a module and its optimizer held before a profiler's recording began, which the recording does not have.

Names, bytes and roles come from the module: parameters, buffers, and the optimizer's state. Which op reads which is
judged by shape, since inputs of a recording have no identity. In forward, and where backward recomputes, an input of an
outermost op that has the shape of a weight is one: of those of the module that runs (see
`workloads.importers.called_modules`), then of its parts that are never called, then of those that contain it; without
modules in the recording the next, in the order of the module, that no op has read. Twins are read in turn in each call.
An op that multiplies, normalises or looks up takes weights wherever it takes them by its definition; another one where
no other storage has the size, or where the module that runs has a vector of that length. In backward, an input of such
an op is one if it has the shape of what the forward op of the same sequence number read. The first op of an optimizer's
steps that has a weight's shape reads it and its state, and the last one writes them.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.errors import TraceError
from workloads.capturing.layers import layer_paths
from workloads.importers.inputs import Input
from workloads.importers.storages import Storages

READERS = re.compile(r"mm|matmul|linear|conv|norm|embedding|lstm|gru|rnn|einsum|bilinear")
"""Ops of forward that read weights, by name; another does where no other storage has the size."""
SECOND = re.compile(r"addmm|baddbmm|addbmm|addmv|embedding")
"""Those whose activations are not the first input."""
MOST_OF_A_NUMBER = 64
"""How many weights are remembered per sequence number: a frozen model's ops all have one."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer.

    name: its path; of one that several modules share, the first.
    shape, item: its sides, and the bytes of an element.
    owners: the paths of the modules that have it as their own.
    is_parameter: False for a buffer.
    is_trained: whether it has gradients.
    is_updated: whether the optimizer updates it.
    state: names and bytes of what the optimizer holds for it.
    """

    name: str
    shape: tuple[int, ...]
    item: int
    owners: tuple[str, ...]
    is_parameter: bool = True
    is_trained: bool = False
    is_updated: bool = False
    state: tuple[tuple[str, int], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.item

    def fits(self, given: Input, *, exactly: bool) -> bool:
        """Whether an input has its elements; unless exactly, in any order of its sides, since products read views."""
        if given.kind and given.item != self.item:
            return False
        return given.shown == self.shape or (not exactly and _sides(given.shown) == _sides(self.shape))


def _sides(shape: Iterable[int]) -> tuple[int, ...]:
    """The sides of a tensor beyond 1, in ascending order."""
    return tuple(sorted(side for side in shape if side != 1))


@dataclass(frozen=True, slots=True)
class KnownModule:
    """A module, with its optimizer, or several.

    weights: in the order of the module, shared ones once.
    classes: per path of a module in it the name of its class.
    layers: the paths of its layers.
    unknown: parameters of the optimizer that the module does not have.
    """

    weights: tuple[Weight, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    unknown: int = 0


def known_module(module: Any, optimizer: Any = None) -> KnownModule:
    """What is known of a module.

    module: a `torch.nn.Module`.
    optimizer: a `torch.optim.Optimizer` of its parameters that has made a step, so that its state is there; or a list
        of them.

    Raises TraceError for arguments that are neither, and for an optimizer of other parameters or without state.
    """
    torch: Any = sys.modules.get("torch")  # who has a module has imported it
    if torch is None or not isinstance(module, torch.nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TraceError(f"module: expected a torch.nn.Module, not {what}")
    given = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    optimizers = [each for each in given if each is not None]
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise TraceError(f"module: {name!r} has no shape yet: give the module after a step")
    owners: dict[int, list[str]] = {}
    tensors: dict[int, tuple[str, Any]] = {}
    parameters = {id(parameter) for parameter in module.parameters()}
    for path, part in module.named_modules():
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            owners.setdefault(id(tensor), []).append(path)
            tensors.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
    updated: dict[int, dict[str, Any]] = {}  # per parameter its state
    for each in optimizers:
        updated |= _states(each, tensors)
    weights = []
    for key, (name, tensor) in tensors.items():
        held = [(k, t) for k, t in updated.get(key, {}).items() if hasattr(t, "element_size")]
        weights.append(
            Weight(
                name,
                tuple(tensor.shape),
                tensor.element_size(),
                tuple(owners[key]),
                key in parameters,
                bool(tensor.requires_grad),
                key in updated if optimizers else bool(tensor.requires_grad),
                tuple((f"{name}.{k}", t.numel() * t.element_size()) for k, t in held),
            )
        )
    classes = {path: type(part).__name__ for path, part in module.named_modules()}
    return KnownModule(tuple(weights), classes, layer_paths(module), len(updated.keys() - tensors.keys()))


def _states(optimizer: Any, tensors: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """The state of each parameter of an optimizer, by its id.

    tensors: those of the module.

    Raises TraceError where it is not an optimizer, is of another module, or is without state.
    """
    if not isinstance(getattr(optimizer, "state", None), Mapping):
        raise TraceError(f"optimizer: expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    found = {id(p): dict(optimizer.state.get(p) or {}) for g in optimizer.param_groups for p in g["params"]}
    known = [state for key, state in found.items() if key in tensors]
    if not known:
        raise TraceError("optimizer: it has no parameter of the module: give it with its own module")
    has_state = any(hasattr(t, "element_size") for state in known for t in state.values())
    if not has_state and not _keeps_nothing(optimizer):
        raise TraceError("optimizer: it has no state for any parameter of the module: give it after a step")
    return found


def _keeps_nothing(optimizer: Any) -> bool:
    """Whether it has no state however many steps it has made: SGD without momentum."""
    is_sgd = any(kind.__name__ == "SGD" for kind in type(optimizer).__mro__)
    return is_sgd and not any(group.get("momentum") for group in optimizer.param_groups)


class KnownWeights:
    """The tensors of a module's weights in a trace, and which ops read them.

    total: bytes that they take, as the allocator rounds them.
    count: how many they are.
    unknown: parameters of the optimizer that are not among them.
    """

    def __init__(
        self,
        known: KnownModule,
        paths: Mapping[str, str],
        held: Mapping[tuple[int, ...], int],
        storages: Storages,
        rounding: int,
    ) -> None:
        """Weights that no op has read.

        paths: of the module's parts, by the name that the recording has for a module that it calls.
        held: per shape how many gradients were held before the recording.
        """
        self._weights, self._storages, self._rounding = known.weights, storages, rounding
        self._paths = paths
        self.total, self.count, self.unknown = 0, len(known.weights), known.unknown
        self._of_owner: dict[str, list[int]] = {}
        self._of_sides: dict[tuple[int, ...], list[int]] = {}
        self._grads: dict[int, str] = {}
        left = Counter(held)
        for i, weight in enumerate(known.weights):
            self._of_sides.setdefault(_sides(weight.shape), []).append(i)
            for owner in weight.owners:
                self._of_owner.setdefault(owner, []).append(i)
            parts = [(weight.name, weight.bytes, "weight"), *((*part, "optimizer_state") for part in weight.state)]
            for j, (name, size, role) in enumerate(parts):
                self._hold(_key(i, j), name, size, role)
            if weight.is_trained and left[weight.shape] > 0:
                left[weight.shape] -= 1
                self._grads[i] = f"{weight.name}.grad"
                self._hold(_key(i, -1), self._grads[i], weight.bytes, "gradient")
        self._parts_of = _parts_of(known.classes, set(paths.values()))
        self._read: set[int] = set()
        self._next: Counter[tuple[int, ...]] = Counter()
        self._call, self._turn = -1, Counter[tuple[int, ...]]()
        self._of_sequence: dict[int, list[int]] = {}
        self._left: tuple[int, list[int]] = (-1, [])
        self._first: dict[int, list[int]] = {}
        self._last: dict[int, list[int]] = {}

    @property
    def unread(self) -> int:
        """How many no op has read so far."""
        return self.count - len(self._read)

    def _hold(self, key: Hashable, name: str, size: int, role: str) -> None:
        size = self.rounded(size)
        self.total += size
        self._storages.make(key, name, size, role)

    def rounded(self, size: int) -> int:
        """As many bytes as the allocator takes."""
        return -(-size // self._rounding) * self._rounding

    def sizes(self) -> Counter[int]:
        """How many gradients there are of each size."""
        return Counter(self.rounded(weight.bytes) for weight in self._weights if weight.is_trained)

    def updated_by(self, steps: Iterable[tuple[int, Sequence[Input]]]) -> None:
        """Say which ops an optimizer's steps have: the number of each, and its inputs."""
        spans: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
        for number, inputs in steps:
            for given in inputs:
                form = given.shown, given.item if given.kind else 0
                spans[form] = (spans.get(form, (number, number))[0], number)
        for i, weight in enumerate(self._weights):
            both = [spans[form] for form in ((weight.shape, weight.item), (weight.shape, 0)) if form in spans]
            if weight.is_updated and both:
                self._first.setdefault(min(first for first, _ in both), []).append(i)
                self._last.setdefault(max(last for _, last in both), []).append(i)

    def read_forward(self, name: str, inputs: Sequence[Input], taken: Sequence[bool], at: tuple[int, str]) -> list[int]:
        """For each input of an outermost op the weight that it is, -1 for none.

        name: of the op.
        taken: per input whether another storage has its size.
        at: the innermost call of a module, and the module as the profiler names it; -1 and "" outside modules.
        """
        if at[0] != self._call:
            self._call = at[0]
            self._turn.clear()
        base = name.rsplit("::", 1)[-1]
        reads, activations = READERS.search(base) is not None, 1 if SECOND.search(base) else 0
        found = []
        for place, given in enumerate(inputs):
            sure = reads and place != activations
            alike = self._alike(given, at[1], by_sides=reads, anywhere=sure or not at[1])
            if not sure and (reads or taken[place]):
                own = self._of_owner.get(self._paths[at[1]], ()) if at[1] in self._paths else ()
                alike = [i for i in alike if i in own and len(self._weights[i].shape) < 2]
            found.append(self._choose(alike, at[1]) if alike else -1)
        return found

    def _alike(self, given: Input, module: str, *, by_sides: bool, anywhere: bool) -> list[int]:
        """The weights that an input may be: those of the nearest module that has any, and then those anywhere."""
        for exactly in (True, False) if by_sides else (True,):
            for owners in self._owners(module):
                own = dict.fromkeys(i for owner in owners for i in self._of_owner.get(owner, ()))
                if alike := [i for i in own if self._weights[i].fits(given, exactly=exactly)]:
                    return alike
        sides = self._of_sides.get(_sides(given.shown), ()) if anywhere else ()
        for exactly in (True, False) if by_sides else (True,):
            if alike := [i for i in sides if self._weights[i].fits(given, exactly=exactly)]:
                return alike
        return []

    def _owners(self, module: str) -> Iterable[Sequence[str]]:
        """The module that runs with its parts that are never called, then the same of what contains it."""
        path: str | None = self._paths.get(module)
        while path is not None:
            if path in self._parts_of:
                yield self._parts_of[path]
            path = path.rpartition(".")[0] if path else None

    def _choose(self, alike: list[int], module: str) -> int:
        key = self._weights[alike[0]].shape
        if module in self._paths:
            chosen = alike[self._turn[key] % len(alike)]
            self._turn[key] += 1
        else:
            chosen = alike[self._next[key] % len(alike)]
            self._next[key] += 1
        self._read.add(chosen)
        return chosen

    def note(self, sequence: int | None, weights: Iterable[int]) -> None:
        """An op of forward, of that number for backward, reads these.

        Ops without a gradient have the number of the next that has one, so that the last op is the one that counts.
        """
        if sequence is not None:
            self._of_sequence[sequence] = [*weights, *self._of_sequence.get(sequence, ())][:MOST_OF_A_NUMBER]

    def read_backward(self, name: str, inputs: Sequence[Input], sequence: int | None, call: int) -> list[int]:
        """For each input of an op of backward the weight that it is, -1 for none: each is one in each call.

        call: of the autograd engine.
        """
        if call != self._left[0]:
            self._left = call, list(self._of_sequence.get(sequence, ())) if sequence is not None else []
        return self.assign(self._left[1], inputs) if READERS.search(name) else [-1] * len(inputs)

    def assign(self, weights: list[int], inputs: Sequence[Input]) -> list[int]:
        """For each input the one of some weights that it is, -1 for none; the last first, since weights come last.

        weights: those that were found leave it.
        """
        found = [-1] * len(inputs)
        for place in reversed(range(len(inputs))):
            one = next((i for i in weights if self._weights[i].fits(inputs[place], exactly=False)), -1)
            if one >= 0:
                found[place] = one
                weights.remove(one)
        return found

    def tensor(self, weight: int) -> int:
        """The present tensor of a weight."""
        return self._storages.now[_key(weight, 0)]

    def accumulate(self, given: Input) -> tuple[int, int] | None:
        """What adding to a gradient that was held before reads and writes; None if none of its shape was."""
        for i, name in self._grads.items():
            if self._weights[i].shape == given.shape:
                del self._grads[i]
                self._grads[i] = name  # the next one is another's
                key = _key(i, -1)
                return self._storages.now[key], self._storages.change(key, name)
        return None

    def update(self, number: int) -> tuple[list[int], list[int]]:
        """What an op of an optimizer's step reads and writes of weights and states."""
        first, last = self._first.get(number, []), self._last.get(number, [])
        both = dict.fromkeys((*first, *last))
        reads = [self._storages.now[key] for i in both for key, _ in self._parts(i)]
        reads += [self._storages.now[_key(i, -1)] for i in both if i in self._grads]
        writes = [self._storages.change(*part) for i in last for part in self._parts(i)]
        return reads, writes

    def _parts(self, i: int) -> Iterable[tuple[Hashable, str]]:
        """Key and name of a weight and its state."""
        yield _key(i, 0), self._weights[i].name
        for j, (name, _) in enumerate(self._weights[i].state):
            yield _key(i, 1 + j), name

    def ends(self) -> tuple[list[int], list[tuple[int, int]]]:
        """The tensors that stay to the end, and, of those that were written, each with the one of the start."""
        keys = [key for i in range(len(self._weights)) for key, _ in self._parts(i)]
        keys += [_key(i, -1) for i in sorted(self._grads)]
        pairs = [(self._storages.now[key], self._storages.first[key]) for key in keys]
        return [now for now, _ in pairs], [(now, first) for now, first in pairs if now != first]


def _parts_of(classes: Mapping[str, str], called: set[str]) -> dict[str, list[str]]:
    """Per module that is called its path, and those of its parts that never are, nor what contains them within it."""
    found: dict[str, list[str]] = {}
    for path in classes:
        above = path
        while above not in called and above:
            above = above.rpartition(".")[0]
        found.setdefault(above, []).append(path)
    return found


def _key(weight: int, part: int) -> Hashable:
    """Of a weight (0), a part of its state (from 1 on), or a gradient of before (-1)."""
    return "weight", weight, part
