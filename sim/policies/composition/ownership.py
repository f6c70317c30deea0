"""Which tensors each part of a composition owns, and which ops produce them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.errors import PolicyError
from sim.plan import Action, Drop, Move
from sim.policies.base import Policy, label
from sim.policies.composition import selectors
from sim.policies.composition.checkpoints import with_recomputation
from sim.policies.composition.merging import restricted
from sim.policies.composition.selectors import CHECKPOINTS, REST, Mask
from sim.trace.chain import saved_tensors
from sim.trace.gathers import gathers
from sim.trace.graph import Trace


class Part(NamedTuple):
    """A policy and what it owns: all that it manages, or of that what a selector names, "" for all."""

    policy: Policy
    selector: str = ""

    @property
    def label(self) -> str:
        """The policy as it is written."""
        return label(self.policy)


def managed_beside(part: Part, parts: Sequence[Part]) -> tuple[str, ...]:
    """What a part's policy manages beside others, wherever they manage it: not what it yields to one of them."""
    others = {word for other in parts if other is not part for word in other.policy.manages}
    return tuple(word for word in part.policy.manages if not (word in part.policy.yields and word in others))


def owners(
    parts: Sequence[Part], actions: Sequence[Sequence[Action]], trace: Trace, rewriting: Sequence[bool]
) -> list[frozenset[int]]:
    """The tensors that each part owns. Raises PolicyError naming one that two own.

    actions: what each part has planned, for `checkpoints`.
    rewriting: whether each part has changed the trace, for the error.
    """
    masks: list[Mask] = []
    for part in parts:
        mask = selectors.roles(trace, managed_beside(part, parts))
        if part.selector:
            named = selectors.selected(trace, part.selector)
            mask &= named
            if part.policy.manages and named.any() and not mask.any():
                words = ", ".join(part.policy.manages)
                raise PolicyError(f"{part.label!r} manages {words}; {part.selector!r} names none of that")
        masks.append(mask)
    relative = {i: {REST, CHECKPOINTS} & {*selectors.terms(part.selector)} for i, part in enumerate(parts)}
    taken = np.full(len(trace.tensor_columns.name), -1)
    for i in (i for i, words in relative.items() if not words):
        _refuse_two(masks[i], taken, i, parts, trace, rewriting)
        taken[masks[i]] = i
    for i in relative:
        if REST in relative[i]:
            masks[i] &= (taken < 0) | (taken == i)
            taken[masks[i]] = i
    left = [i for i in relative if CHECKPOINTS in relative[i]]
    if left:
        others = [
            action
            for i in relative
            if i not in left
            for action in restricted(actions[i], trace, np.flatnonzero(masks[i]).tolist())
        ]
        kept = resident(others, trace)
        found = np.full(len(taken), -1)
        for i in left:
            masks[i] &= kept
            _refuse_two(masks[i], found, i, parts, trace, rewriting)
            found[masks[i]] = i
        for i in relative:
            if i not in left:
                masks[i] &= found < 0
    return [frozenset(np.flatnonzero(mask).tolist()) for mask in masks]


def _refuse_two(
    mask: Mask, taken: NDArray[np.int64], i: int, parts: Sequence[Part], trace: Trace, rewriting: Sequence[bool]
) -> None:
    """Raise PolicyError where part i would own what another one has taken; taken: per tensor its owner, or -1."""
    twice = np.flatnonzero(mask & (taken >= 0))
    if len(twice):
        tensor, other = int(twice[0]), parts[int(taken[twice[0]])]
        rewriters = [
            part.label for part, does in ((other, rewriting[int(taken[tensor])]), (parts[i], rewriting[i])) if does
        ]
        if other == parts[i]:
            way_out = "name it once"
        elif len(rewriters) == 2:
            way_out = "both rewrite the trace for it, so name one of them"
        elif rewriters:
            way_out = f"{rewriters[0]!r} rewrites the trace, and not for some of its tensors alone, so name one of them"
        else:
            way_out = f"say who owns what, as in 'layers 0-3: {other.label}; rest: {parts[i].label}'"
        raise PolicyError(
            f"tensor {trace.tensor_columns.name[tensor]!r} has two owners, {other.label!r} and {parts[i].label!r}; "
            f"{way_out}"
        )


def is_narrowed(part: Part, own: Collection[int], trace: Trace) -> bool:
    """Whether a part owns less of a trace than its policy manages."""
    return len(own) < int(selectors.roles(trace, part.policy.manages).sum())


def own_ops(parts: Sequence[Part], i: int, trace: Trace, manages: tuple[str, ...] = ()) -> Mask:
    """Per op whether part i chooses how it is implemented: its selector names a result, of whatever role.

    Of `rest` they are the ops of which no other part's selector does. manages: only results of these roles count, as
    words; by default all.
    """
    named = selectors.selected(trace, parts[i].selector)
    if manages:
        named &= selectors.roles(trace, manages)
    if REST in selectors.terms(parts[i].selector):
        for other in parts:
            if other.selector and not {REST, CHECKPOINTS} & {*selectors.terms(other.selector)}:
                named &= ~selectors.selected(trace, other.selector)
    found = np.zeros(len(trace.op_columns.name), np.bool_)
    found[trace.producer[named & (trace.producer >= 0)]] = True
    return found


def resident(actions: Sequence[Action], trace: Trace) -> Mask:
    """Per tensor whether it stays from forward to backward, for a backward op or for a recomputation there."""
    gone = taken_away(actions, trace)
    found = np.zeros(len(gone), np.bool_)
    found[saved_tensors(with_recomputation(trace, actions, gone))] = True
    found[[t for op in gathers(trace) for t in trace.writes(op)]] = False  # copies of weights are none
    return found & ~gone


def taken_away(actions: Iterable[Action], trace: Trace) -> Mask:
    """Per tensor whether an action drops or moves it."""
    found = np.zeros(len(trace.tensor_columns.name), np.bool_)
    found[[trace.tensor_id(action.tensor) for action in actions if isinstance(action, Drop | Move)]] = True
    return found
