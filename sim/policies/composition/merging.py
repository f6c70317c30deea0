"""From the plans of several parts to one: each keeps to what it owns, follows later rewrites, and meets the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from sim.errors import PolicyError
from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Move, Recompute, Wait
from sim.trace.columns import distinct
from sim.trace.graph import Trace
from sim.trace.origin import Expr, Origin

At = tuple[int, int]
"""Where an action stands: an op, and 0 before or 1 after it."""
Place = str | tuple[str, int]
"""Where a tensor begins: a tier, or a tier and an address."""


def anchor(action: Action, trace: Trace) -> At:
    """Where an action stands."""
    if action.before is not None:
        return trace.op_id(action.before), 0
    return trace.op_id(action.after), 1  # type: ignore[arg-type]


def by_ids(action: Action, trace: Trace) -> Action:
    """The action with ids in place of names."""
    op, after = anchor(action, trace)
    before, behind = (None, op) if after else (op, None)
    if isinstance(action, Recompute):
        return replace(action, op=trace.op_id(action.op), before=before, after=behind)
    return replace(action, tensor=trace.tensor_id(action.tensor), before=before, after=behind)


def restricted(actions: Sequence[Action], trace: Trace, owned: Collection[int]) -> list[Action]:
    """What of a plan is about the tensors that its part owns.

    An op is recomputed if it produces one of them, or if such a recomputation reads a result that nobody holds any
    more by then, because no later op of the trace reads it.
    """
    ordered = sorted(actions, key=lambda action: anchor(action, trace))
    kept: list[Action] = []
    wanted: set[int] = set()
    passing: set[int] = set()  # produced for a recomputation alone, and released with it
    for action in reversed(ordered):
        at = anchor(action, trace)
        if isinstance(action, Recompute):
            op = trace.op_id(action.op)
            writes = trace.writes(op)
            absent = [t for t in writes if t in wanted and not _read_later(trace, t, at)]
            if absent or not all(t not in owned for t in writes):
                wanted = (wanted - {*writes}) | {*trace.reads(op)}
                passing.update(absent)
                kept.append(action)
        elif trace.tensor_id(action.tensor) in owned:
            kept.append(action)
        elif isinstance(action, Drop) and not _read_later(trace, trace.tensor_id(action.tensor), at):
            kept.append(action)  # kept for now: it releases what a recomputation before it produces, if one does
    kept.reverse()
    own = {*owned, *passing}
    return [action for action in kept if isinstance(action, Recompute) or trace.tensor_id(action.tensor) in own]


def _read_later(trace: Trace, tensor: int, at: At) -> bool:
    """Whether an op of the trace reads a tensor from that place on, or the program keeps it to the end."""
    op, after = at
    return tensor in trace.outputs or any(reader >= op + after for reader in trace.readers(tensor))


def carried_over(
    actions: Iterable[Action], place: Mapping[int, Place], old: Trace, new: Trace, part: str, rewriter: str
) -> tuple[list[Action], dict[int, Place]]:
    """Actions on a trace, and where its tensors begin, as the same on what a later part has made of it.

    Ops and tensors are found by name, and must stand for the same as before. Raises PolicyError naming what is
    not there any more.
    """
    before, after = Origin.identity(old), Origin.identity(new)

    def following(kind: str, names: Sequence[Sequence[str]], exprs: Sequence[Sequence[Expr]]) -> Callable[[int], int]:
        """From an old id to the new one. names, exprs: of all ops, or all tensors, old and new."""
        ids = {name: i for i, name in enumerate(names[1])}

        def follow(i: int) -> int:
            found = ids.get(names[0][i])
            if found is None or exprs[1][found] != exprs[0][i]:
                raise PolicyError(
                    f"{rewriter!r} rewrites {kind} {names[0][i]!r}, on which {part!r} has decided; name {rewriter!r} "
                    f"before {part!r}"
                )
            return found

        return follow

    op_of = following("op", (old.op_columns.name, new.op_columns.name), (before.ops, after.ops))
    names = (old.tensor_columns.name, new.tensor_columns.name)
    tensor_of = following("tensor", names, (before.tensors, after.tensors))

    def moved(action: Action) -> Action:
        at = {side: op_of(op) for side in ("before", "after") if (op := getattr(action, side)) is not None}
        if isinstance(action, Recompute):
            return replace(action, op=op_of(action.op), **at)  # type: ignore[arg-type]
        return replace(action, tensor=tensor_of(action.tensor), **at)  # type: ignore[arg-type]

    return [moved(action) for action in actions], {tensor_of(t): where for t, where in place.items()}


def merged(parts: Sequence[Sequence[Action]], aware: Sequence[bool], trace: Trace, platform: Platform) -> list[Action]:
    """The actions of all parts, in the order of their anchors; at one anchor copies and waits before recomputation.

    parts: with ids in place of names. What one part recomputes may read what another has offloaded, earlier than the
    trace does: prefetches of that start as much earlier (`earlier`). What a part recomputes itself it has planned for.
    aware: per part whether it knew of the recomputations when it planned, so that its prefetches stay.
    """
    reruns = [
        (anchor(action, trace)[0], i, trace.reads(action.op))  # type: ignore[arg-type]
        for i, part in enumerate(parts)
        for action in part
        if isinstance(action, Recompute)
    ]
    reruns.sort()
    rows = []
    for i, part in enumerate(parts):
        recomputes = any(isinstance(action, Recompute) for action in part)
        reads: dict[int, list[int]] = defaultdict(list)
        for op, other, tensors in reruns:
            for tensor in tensors if other != i else ():  # a part knows its own
                reads[tensor].append(op)
        for action in part if aware[i] else earlier(part, reads, trace, platform):
            rows.append((anchor(action, trace), recomputes, i, action))
    rows.sort(key=lambda row: row[:3])
    return [action for *_, action in rows]


def earlier(
    actions: Sequence[Action], reads: Mapping[int, Sequence[int]], trace: Trace, platform: Platform
) -> list[Action]:
    """Actions with each prefetch as far ahead of the first recomputation that reads the tensor as it was of the op.

    reads: per tensor the ops before which something is recomputed that reads it. Where nothing is left between
    the offload and that recomputation, the tensor stays.
    """
    found: list[Action | None] = list(actions)
    by_tensor: dict[int, list[int]] = defaultdict(list)
    for i, action in enumerate(actions):
        if isinstance(action, Move | Wait) and action.tensor in reads:
            by_tensor[action.tensor].append(i)  # type: ignore[index]
    for tensor, places in by_tensor.items():
        places.sort(key=lambda i: anchor(actions[i], trace))
        out: int | None = None
        shift = 0
        for i in places:
            action = actions[i]
            op, after = anchor(action, trace)
            if isinstance(action, Wait):
                if shift:
                    found[i] = replace(action, before=max(op + after - shift, 0), after=None)
                continue
            assert isinstance(action, Move)
            if action.to not in _homes(platform, trace):
                out, shift = i, 0
                continue
            if out is None:
                continue
            needed = next((r for r in trace.readers(tensor) if r >= op + after), None)
            left = anchor(actions[out], trace)[0]
            first = next((r for r in reads[tensor] if left < r), None)
            if needed is None or first is None or first >= needed:
                continue
            shift = needed - first
            start = op + after - shift
            if start <= left + 1:
                found[out] = found[i] = None
            else:
                found[i] = replace(action, before=start, after=None)
    return [action for action in found if action is not None]


def _homes(platform: Platform, trace: Trace) -> set[str]:
    return {platform.home(device).name for device in distinct(trace.op_columns.device).tolist()}
