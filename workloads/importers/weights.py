"""What a module and its optimizer held before a profiler's recording began, which the recording does not have.

Names, bytes and roles come from the module: parameters, buffers, and the optimizer's state. Which op reads which is
judged by shape, since inputs of a recording have no identity. In forward, an input of a product, a norm or an embedding
that has the shape of a weight is one: in each call of a layer the same ones, else the next, in the order of the module,
that no op has read. In backward, an input of such an op is one if it has the shape of what the forward op of the same
sequence number read. The first op of an optimizer's steps that has a weight's shape reads it and its state, and the
last one writes them. Gradients are what backward allocates with the size of a parameter, and what is released only
after these steps have begun.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.errors import TraceError
from workloads.importers.storages import Storages

READERS = re.compile(r"mm|linear|conv|norm|embedding")
"""Ops of forward that read weights, by name; another does where no other storage has the size."""
SECOND = re.compile(r"addmm|baddbmm|addbmm|addmv|embedding")
"""Those whose activations are not the first input."""

Form = tuple[tuple[int, ...], int]
"""The sides of a tensor beyond 1, in ascending order, since products read views; and the bytes of an element."""


def form_of(shape: Iterable[int], item: int) -> Form:
    """What is compared of two tensors."""
    return tuple(sorted(side for side in shape if side != 1)), item


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer.

    name: its path.
    bytes: of its storage.
    form: of its elements.
    is_trained: whether it is a parameter that has gradients.
    state: names and bytes of what the optimizer holds for it.
    """

    name: str
    bytes: int
    form: Form
    is_trained: bool
    state: tuple[tuple[str, int], ...] = ()


def weights_of(module: Any, optimizer: Any = None) -> list[Weight]:
    """The weights of a module, in its order, shared ones once.

    module: a `torch.nn.Module`.
    optimizer: a `torch.optim.Optimizer` of its parameters that has made a step, so that its state is there.

    Raises TraceError for arguments that are neither, and for an optimizer of other parameters or without state.
    """
    if not hasattr(module, "named_parameters") or not hasattr(module, "named_buffers"):
        raise TraceError(f"module: expected a torch.nn.Module, not {type(module).__name__}")
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        raise TraceError(f"optimizer: expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    state = {} if optimizer is None else optimizer.state
    found: list[Weight] = []
    seen: set[int] = set()
    for path, part in module.named_modules():
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, tensor in own:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{path}.{name}" if path else name
            item = tensor.element_size()
            held = [(k, t) for k, t in (state.get(tensor) or {}).items() if hasattr(t, "element_size")]
            states = tuple((f"{name}.{k}", t.numel() * t.element_size()) for k, t in held)
            form = form_of(tuple(tensor.shape), item)
            found.append(Weight(name, tensor.numel() * item, form, bool(tensor.requires_grad), states))
    if optimizer is not None and not any(weight.state for weight in found):
        raise TraceError(
            "optimizer: it has no state for any parameter of the module: give it after a step, and with its own module"
        )
    return found


class KnownWeights:
    """The tensors of some weights in a trace, and which ops read them.

    total: bytes that they take, as the allocator rounds them.
    """

    def __init__(self, weights: Sequence[Weight], storages: Storages, rounding: int) -> None:
        self._weights, self._storages, self._rounding = weights, storages, rounding
        self.total = 0
        self._of_form: dict[Form, list[int]] = {}
        for i, weight in enumerate(weights):
            self._of_form.setdefault(weight.form, []).append(i)
            parts = [(weight.name, weight.bytes, "weight"), *((*part, "optimizer_state") for part in weight.state)]
            for j, (name, size, role) in enumerate(parts):
                self.total += self._rounded(size)
                storages.make(_key(i, j), name, self._rounded(size), role)
        self._unread: Counter[Form] = Counter()
        self._read_in: dict[tuple[str, Form], list[int]] = {}
        self._turn: Counter[tuple[str, Form]] = Counter()
        self._layer = -1
        self._of_sequence: dict[int, list[int]] = {}
        self._first: dict[int, list[int]] = {}
        self._last: dict[int, list[int]] = {}

    def _rounded(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding

    def updated_by(self, steps: Iterable[tuple[int, Sequence[Form]]]) -> None:
        """Say which ops an optimizer's steps have: the number of each, and the forms of its inputs."""
        spans: dict[Form, tuple[int, int]] = {}
        for number, forms in steps:
            for form in forms:
                spans[form] = (spans.get(form, (number, number))[0], number)
        for form, (first, last) in spans.items():
            trained = [i for i in self._of_form.get(form, []) if self._weights[i].is_trained]
            self._first.setdefault(first, []).extend(trained)
            self._last.setdefault(last, []).extend(trained)

    def gradients(self, candidates: Iterable[tuple[int, int]]) -> set[int]:
        """Those of some storages, with their bytes, that have the size of a trained weight; one for each weight."""
        left = Counter(self._rounded(weight.bytes) for weight in self._weights if weight.is_trained)
        found = set()
        for storage, size in candidates:
            if left[size] > 0:
                left[size] -= 1
                found.add(storage)
        return found

    def read_forward(
        self, name: str, forms: Sequence[Form], taken: Sequence[bool], layer: tuple[int, str], sequence: int | None
    ) -> list[int]:
        """For each input of an op of forward the weight that it is, -1 for none.

        name: of the op.
        forms: of its inputs.
        taken: per input whether another storage has its size.
        layer: its number, and the module as the profiler names it, which is the same for each call; "" outside layers.
        sequence: its number for backward.
        """
        if layer[0] != self._layer:
            self._layer = layer[0]
            self._turn.clear()
        base = name.rsplit("::", 1)[-1]
        activations = 1 if SECOND.search(base) else 0
        found = []
        for at, form in enumerate(forms):
            is_one = at != activations if READERS.search(base) else not taken[at]
            found.append(self._next(form, layer[1]) if is_one and form in self._of_form else -1)
        if sequence is not None:
            self._of_sequence.setdefault(sequence, []).extend(i for i in found if i >= 0)
        return found

    def _next(self, form: Form, module: str) -> int:
        known = self._read_in.setdefault((module, form), [])
        turn = self._turn[module, form]
        self._turn[module, form] += 1
        if module and turn < len(known):
            return known[turn]
        alike = self._of_form[form]
        known.append(alike[self._unread[form] % len(alike)])
        self._unread[form] += 1
        return known[-1]

    def read_backward(self, name: str, forms: Sequence[Form], sequence: int | None) -> list[int]:
        """For each input of an op of backward the weight that it is, -1 for none."""
        reads = sequence is not None and READERS.search(name)
        left = list(self._of_sequence.get(sequence or 0, [])) if reads else []
        found = []
        for form in forms:
            one = next((i for i in left if self._weights[i].form == form), -1)
            if one >= 0:
                left.remove(one)
            found.append(one)
        return found

    def tensor(self, weight: int) -> int:
        """The present tensor of a weight."""
        return self._storages.now[_key(weight, 0)]

    def update(self, number: int) -> tuple[list[int], list[int]]:
        """What an op of an optimizer's step reads and writes of weights and states."""
        first, last = self._first.get(number, []), self._last.get(number, [])
        reads = [self._storages.now[key] for i in dict.fromkeys((*first, *last)) for key, _, _ in self._parts(i)]
        writes = [self._storages.change(*part) for i in last for part in self._parts(i)]
        return reads, writes

    def _parts(self, i: int) -> Iterable[tuple[Hashable, str, str]]:
        """Key, name and role of a weight and its state."""
        yield _key(i, 0), self._weights[i].name, "weight"
        for j, (name, _) in enumerate(self._weights[i].state):
            yield _key(i, 1 + j), name, "optimizer_state"

    def ends(self) -> tuple[list[int], list[tuple[int, int]]]:
        """The tensors that stay to the end, and, of those that were written, each with the one of the start."""
        keys = [key for i in range(len(self._weights)) for key, _, _ in self._parts(i)]
        pairs = [(self._storages.now[key], self._storages.first[key]) for key in keys]
        return [now for now, _ in pairs], [(now, first) for now, first in pairs if now != first]


def _key(weight: int, part: int) -> Hashable:
    return "weight", weight, part
