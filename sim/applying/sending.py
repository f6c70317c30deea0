"""Which saved tensors go to the host: what the run moved, as far as hooks round modules can tell it from the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sim.applying.as_pytorch import Checkpoint, Sent
from sim.applying.meaning import Meaning
from sim.applying.parts import Module, calls_of, counted, dispatched
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.phases import BACKWARD, FORWARD


@dataclass(frozen=True)
class _Group:
    """Modules under one wrapper: their forward and backward ops, and whether they are recomputed."""

    modules: tuple[Module, ...]
    forward: frozenset[int]
    backward: frozenset[int]
    recomputed: bool
    keep: frozenset[int]


def sent_by(meaning: Meaning, modules: Sequence[Module], checkpoints: Sequence[Checkpoint]) -> tuple[Sent, ...]:
    """Per wrapper what it sends to the host, of the results that the run moved.

    A result is sent where all that save it are wrapped: modules whose backward reads it, and checkpoints that it
    enters. One that a checkpoint recomputes or keeps is not saved by autograd, and cannot be sent.
    """
    if not meaning.moved:
        return ()
    trace = meaning.trace
    groups = _groups(modules, checkpoints)
    inside = {op: g for g, group in enumerate(groups) for op in group.forward}
    results: list[set[int]] = [set() for _ in groups]
    inputs: list[set[int]] = [set() for _ in groups]
    hooked: set[int] = set()
    everything = {g for g, group in enumerate(groups) if not group.recomputed and _sends_all(meaning, group)}
    wanted = {*meaning.moved, *(t for g in everything for t in _saved(trace, groups[g]))}
    for t in sorted(wanted):
        producer = int(trace.producer[t])
        savers = _savers(trace, groups, t)
        home = inside.get(producer)
        if savers is None or not savers:
            continue
        if home is None:
            if min(savers) in everything or _first_input(trace, groups[min(savers)], t):
                inputs[min(savers)].add(t)
                hooked |= savers
        elif home in everything or dispatched(trace, producer):
            results[home].add(t)
            hooked |= savers | {home}
    for g, group in enumerate(groups):
        own = [t for t in _in_every_call(trace, group, results[g]) if _savers(trace, groups, t)]
        results[g].update(own)
        first = (t for call in calls_of(group.modules) for t in _largest_entering(trace, call)) if inputs[g] else ()
        inputs[g].update(t for t in first if _savers(trace, groups, t))
    return tuple(
        Sent(group.modules, frozenset(results[g]), frozenset(inputs[g]), g in everything)
        for g, group in enumerate(groups)
        if g in hooked
    )


def _groups(modules: Sequence[Module], checkpoints: Sequence[Checkpoint]) -> list[_Group]:
    wrapped = {module.path for checkpoint in checkpoints for module in checkpoint.modules}
    whole = [(checkpoint.modules, True, checkpoint.keep) for checkpoint in checkpoints]
    alone = [((module,), False, frozenset[int]()) for module in modules if module.path not in wrapped]
    groups = [
        _Group(
            members,
            frozenset(op for module in members for op in module.forward),
            frozenset(op for module in members for op in module.backward),
            recomputed,
            keep,
        )
        for members, recomputed, keep in (*whole, *alone)
    ]
    return sorted(groups, key=lambda group: min(group.forward))


def _savers(trace: Trace, groups: Sequence[_Group], tensor: int) -> set[int] | None:
    """The groups in which a result is saved; None where something else saves it, too."""
    phase, producer = trace.op_columns.phase, int(trace.producer[tensor])
    found: set[int] = set()
    for reader in trace.readers(tensor):
        if phase[reader] == FORWARD:
            found |= {g for g, group in enumerate(groups) if group.recomputed and reader in group.forward}
        elif phase[reader] == BACKWARD:
            undone = {g for g, group in enumerate(groups) if reader in group.backward}
            if not undone:
                return None
            found |= undone
    # inside a checkpoint nothing is saved of what it computes itself
    return {g for g in found if not (groups[g].recomputed and producer in groups[g].forward)}


def _saved(trace: Trace, group: _Group) -> list[int]:
    """What autograd saves in a group that is not recomputed: results and inputs that its backward reads, no weights."""
    role, phase = trace.tensor_columns.role, trace.op_columns.phase
    read = {t for op in group.backward for t in trace.reads(op)}
    touched = {t for op in group.forward for t in (*trace.reads(op), *trace.writes(op))}
    return sorted(
        t
        for t in read & touched
        if role[t] not in PERSISTENT and trace.producer[t] >= 0 and phase[trace.producer[t]] == FORWARD
    )


def _sends_all(meaning: Meaning, group: _Group) -> bool:
    """Whether a module sends all that is saved in it: where the trace does not name its ops, and most was moved."""
    trace = meaning.trace
    if all(dispatched(trace, op) for op in group.forward):
        return False
    size, saved = trace.tensor_columns.bytes, _saved(trace, group)
    return 2 * sum(int(size[t]) for t in saved if t in meaning.moved) >= sum(int(size[t]) for t in saved) > 0


def _first_input(trace: Trace, group: _Group, tensor: int) -> bool:
    """Whether a tensor is the largest activation that enters a call of a group: what a layer is called with first."""
    return any(tensor in _largest_entering(trace, call) for call in calls_of(group.modules))


def _largest_entering(trace: Trace, call: Sequence[int]) -> list[int]:
    """The largest activations that enter the ops of a call."""
    size, role, inside = trace.tensor_columns.bytes, trace.tensor_columns.role, set(call)
    read = {t for op in call for t in trace.reads(op)}
    entering = [t for t in read if int(trace.producer[t]) not in inside and role[t] not in PERSISTENT]
    most = max((int(size[t]) for t in entering), default=0)
    return [t for t in entering if size[t] == most]


def _in_every_call(trace: Trace, group: _Group, results: Collection[int]) -> list[int]:
    """Results that stand where these do in the other calls of a group: hooks tell results apart, not calls."""
    places: dict[int, tuple[str, int, int]] = {}
    for call in calls_of(group.modules):
        for op, (name, position) in zip(call, counted(trace, call), strict=True):
            places |= {t: (name, position, k) for k, t in enumerate(trace.writes(op))} if name else {}
    wanted = {places[t] for t in results if t in places}
    return [t for t, place in places.items() if place in wanted]
