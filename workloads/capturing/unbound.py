"""When the program's own variables let go of a tensor, which autograd may hold for longer.

In a plain step that makes no difference to memory. Under a checkpoint it does, since that keeps nothing of what
autograd saves: what the checkpointed function still has a variable for stays, and the rest is released at once. To see
it, an iteration before the captured one runs with nothing saved: of a fake tensor, backward needs shape and type alone.
Ops that allocate or overwrite a storage are the clock that both iterations have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    """The ops of an iteration that allocate or overwrite a storage, updates left out.

    ops: their names.
    kernels: per op how many kernels had been recorded before it.
    made: per storage the op that allocates it, and which of that op's storages it is.
    ends: per such storage the last op that had run when it was released.
    """

    ops: list[str] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)
    made: dict[int, tuple[int, int]] = field(default_factory=dict)
    ends: dict[tuple[int, int], int] = field(default_factory=dict)

    def ran(self, op: str, allocated: Sequence[int], kernels: int = 0) -> None:
        """An op has run, which allocated these storages."""
        self.made.update((i, (len(self.ops), place)) for place, i in enumerate(allocated))
        self.ops.append(op)
        self.kernels.append(kernels)

    def released(self, storage: int) -> None:
        """PyTorch has released a storage."""
        if storage in self.made:
            self.ends[self.made[storage]] = len(self.ops) - 1


def unbound(saved: Clock, unsaved: Clock, kernels: int) -> dict[int, int]:
    """Per storage of an iteration the kernel at whose end variables let go of it, as in one in which nothing is saved.

    Where the two iterations part, nothing more is known.

    saved: of the captured iteration. unsaved: of the other.
    kernels: how many were captured.
    """
    pairs = zip(saved.ops, unsaved.ops, strict=False)
    known = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(saved.ops), len(unsaved.ops)))
    starts = [*saved.kernels, kernels]
    found = {}
    for storage, place in saved.made.items():
        end = unsaved.ends.get(place, known)
        if end < known:
            found[storage] = starts[end + 1] - 1
    return found


@dataclass
class Unsaved:
    """What autograd saves while `nothing_saved` lasts.

    again: whether a gradient was differentiated again, which needs what was saved.
    """

    torch: Any
    kind: Any
    make: Callable[..., Any]
    again: bool = False

    def pack(self, tensor: Any) -> Any:
        """What is kept of a tensor: shape and type, or all of a weight and of anything but a plain fake tensor."""
        plain = type(tensor) is self.kind and tensor.layout == self.torch.strided and tensor.constant is None
        if not plain or (tensor.is_leaf and tensor.requires_grad) or not tensor.untyped_storage().nbytes():
            return tensor
        return tensor.shape, tensor.stride(), tensor.dtype, dict(vars(tensor))

    def unpack(self, kept: Any) -> Any:
        """A tensor like the one that was packed."""
        if isinstance(kept, self.torch.Tensor):
            return kept
        self.again = self.again or self.torch.is_grad_enabled()
        shape, strides, dtype, known = kept
        tensor = self.make(known["fake_mode"], shape, strides, dtype)
        vars(tensor).update(known)
        return tensor


@contextmanager
def nothing_saved(torch: Any, kind: Any, make: Callable[..., Any]) -> Iterator[Unsaved]:
    """While this lasts, autograd saves of fake tensors (of class `kind`) their shapes and types alone.

    make: makes a fake tensor of a mode with a shape, strides and a type.
    """
    unsaved = Unsaved(torch, kind, make)
    with torch.autograd.graph.saved_tensors_hooks(unsaved.pack, unsaved.unpack):
        yield unsaved
