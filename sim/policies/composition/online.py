"""Online parts of a composition: each sees and moves only what it owns, and they share one call under pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sim.plan import Action, Change, ChangeFields, Memory, Need, Online, Recompute
from sim.trace.graph import Trace
from sim.trace.index import TraceIndex


@dataclass(frozen=True)
class JoinedOnline:
    """Makes the object that answers for all parts; picklable if theirs are.

    parts: (what makes a part's own, the ids of the tensors that it owns), in the order in which they are asked.
    trace: what runs, for actions that name tensors and ops instead of giving their ids.
    """

    parts: Sequence[tuple[Callable[[], Online], frozenset[int]]]
    trace: Trace

    def __call__(self) -> Online:
        """The object for one run."""
        return _Joined([(make(), owned) for make, owned in self.parts], self.trace)


class _Joined(Online):
    """Asks the parts in order; under pressure the first one with an answer answers."""

    def __init__(self, parts: Sequence[tuple[Online, frozenset[int]]], trace: Trace) -> None:
        self._parts = parts
        self._trace = trace

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        answers: list[Action] = []
        for part, owned in self._parts:
            answers += self._own(part.before(op, _Owned(memory, owned)), owned)
        return answers

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        for part, owned in self._parts:
            if answers := self._own(part.on_pressure(need, _Owned(memory, owned)), owned):
                return answers
        return ()

    def notice(self, change: Change) -> None:
        self.notice_all((change,))

    def notice_all(self, changes: Sequence[ChangeFields]) -> None:
        for part, owned in self._parts:
            if mine := [change for change in changes if change[1] in owned]:
                part.notice_all(mine)

    def _own(self, answers: Iterable[Action], owned: frozenset[int]) -> list[Action]:
        return [action for action in answers if owns(action, owned, self._trace)]


def owns(action: Action, owned: frozenset[int], trace: Trace) -> bool:
    """Whether an action is the owner's: it is about a tensor that it owns, or an op that produces one."""
    if isinstance(action, Recompute):
        return not owned.isdisjoint(trace.writes(trace.op_id(action.op)))
    return trace.tensor_id(action.tensor) in owned


def droppable_among(own: frozenset[int], trace: Trace) -> frozenset[int]:
    """What of `own` may be dropped by a part that keeps its dead tensors in order to recompute from them.

    What comes from other devices cannot be recomputed. Where the part does not own it, it is freed once it is dead, and
    nothing that is computed from it may be dropped.
    """
    index = TraceIndex(trace)
    gone = {t for op in index.communicating for t in index.writes[op] if t not in own}
    for op, reads in enumerate(index.reads) if gone else ():
        if op not in index.communicating and not gone.isdisjoint(reads):
            gone.update(index.writes[op])
    return own - gone


class _Owned:
    """The memory as an owner sees it: what others own is pinned and not listed."""

    def __init__(self, memory: Memory, owned: frozenset[int]) -> None:
        self._memory = memory
        self._tensors = owned

    def is_locked(self, tensor: int) -> bool:
        return tensor not in self._tensors or self._memory.is_locked(tensor)

    def residents(self, tier: str) -> Iterator[int]:
        return (tensor for tensor in self._memory.residents(tier) if tensor in self._tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)
