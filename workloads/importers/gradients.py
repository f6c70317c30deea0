"""Which storages of a recording are gradients of weights, from the calls by which autograd stores them.

Such a call (`AccumulateGrad`) has the shape of the gradient, and runs directly after what produced it. Where it adds to
a gradient that exists, what it adds is one, too; where it does so the first time in a recording, the gradient was held
before (`zero_grad(set_to_none=False)`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from workloads.importers.allocations import Allocations
from workloads.importers.calls import Call
from workloads.importers.inputs import Input, inputs_of

STORES = "torch::autograd::AccumulateGrad"
SPARSE = "aten::_indices"
ADD, ADD_ELSEWHERE = "aten::add_", "aten::add"


@dataclass(frozen=True, slots=True)
class Stored:
    """A call that stores a gradient.

    call: its position.
    gradient: its shape and type.
    adds: whether it adds to a gradient that exists.
    in_place: whether it writes that.
    """

    call: int
    gradient: Input
    adds: bool = False
    in_place: bool = False


def stored(calls: Sequence[Call]) -> Iterator[Stored]:
    """The calls that store gradients, in order, but those of sparse ones, whose storages have other sizes.

    calls: of a step, in order of start.
    """
    for i, call in enumerate(calls):
        if call.name != STORES or not (inputs := inputs_of(call.args)):
            continue
        names = set()
        j = i + 1
        while j < len(calls) and calls[j].start < call.end:
            if calls[j].thread == call.thread:
                names.add(calls[j].name)
            j += 1
        if SPARSE not in names:
            yield Stored(i, inputs[0], bool({ADD, ADD_ELSEWHERE} & names), ADD in names)


def held_before(some: Sequence[Stored]) -> Counter[tuple[int, ...]]:
    """Per shape how often gradients were added to that were never stored: at least as often as there are such."""
    added = Counter(each.gradient.shape for each in some if each.adds)
    fresh = Counter(each.gradient.shape for each in some if not each.adds)
    return Counter({shape: count for shape, count in added.items() if not fresh[shape]})


def gradients(
    some: Iterable[Stored],
    calls: Sequence[Call],
    made: Sequence[tuple[int, int]],
    allocations: Allocations,
    rounded: Callable[[int], int],
) -> tuple[set[int], dict[int, int]]:
    """The storages that are gradients, or are added to one; and, per call that adds to one in place, which.

    A gradient is the newest storage of its size as it is stored. Gradients of one shape are added to in the order in
    which they were stored.

    some: the calls that store them.
    made: when backward began what allocated each of its storages, in ns and in order, and the storage.
    rounded: as many bytes as the allocator takes.
    """
    there: dict[int, list[int]] = {}  # by size, the newest last
    found: set[int] = set()
    targets: dict[int, int] = {}
    order: dict[tuple[int, ...], deque[int]] = {}
    taken = 0
    for each in some:
        call = calls[each.call]
        time = call.start if each.in_place else call.end
        while taken < len(made) and made[taken][0] <= time:
            storage = made[taken][1]
            there.setdefault(allocations.size[storage], []).append(storage)
            taken += 1
        for size in dict.fromkeys((each.gradient.bytes, rounded(each.gradient.bytes))):
            line = there.get(size, [])
            while line and allocations.released_ns.get(line[-1], time) < time:
                line.pop()
            if line:
                found.add(line[-1])
                if not each.in_place:
                    order.setdefault(each.gradient.shape, deque()).append(line[-1])
                line.pop()
                break
        turn = order.get(each.gradient.shape)
        if each.in_place and turn:
            targets[each.call] = turn[0]
            turn.rotate(-1)
    return found, targets
