"""The copies that autograd's hooks keep of saved tensors: one for each op that saves, taken when that op has run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

from sim.plan import Action, Drop, Move, Wait
from sim.rewrites.rewriter import Rewriter
from sim.solvers.checkpoints import cached_casts, named
from sim.solvers.regions import Region
from sim.solvers.schedule import TraceIndex
from sim.solvers.undoing import forward_of
from sim.trace.chain import BACKWARD, FORWARD
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.origin import Same
from sim.trace.phases import saved_through_views
from sim.trace.tensor import ROLE_CODE

IGNORED = (ROLE_CODE["gradient"], ROLE_CODE["optimizer_state"])


class Save(NamedTuple):
    """One saved copy: of `tensor`, once op `at` has run, read by the backward ops `readers`.

    node: the forward op that the first of them undoes: its backward ops are one node of autograd's graph, which
        unpacks all that it has saved at once.
    ends: the last of the readers that belongs to that node.
    since: the first forward op that saves it, `at` or earlier.
    used_until: the last forward op that needs the tensor, where the tensor itself is the copy; -1 where a copy is
        made that stands for it.
    """

    tensor: int
    at: int
    readers: tuple[int, ...]
    node: int
    ends: int
    since: int
    used_until: int = -1


def saves_of(trace: Trace, *, weights: bool = True, duplicates: bool = True) -> list[Save]:
    """What autograd saves, as far as backward ops read it: once for each forward op whose backward ops read it.

    A tensor is saved when that forward op has run; where that op does not touch the tensor, after its last forward
    use. What the program holds beyond backward stays, as weights do, and what is saved is a copy. Copies of weights in
    a narrower type are used until the forward pass ends: autocast's cache holds them. What a variable of the program
    names is used until it lets go, as far as the trace says so (`Op.unbinds`).

    weights: whether weights count.
    duplicates: False for one copy a tensor, after its last forward use, for all its backward readers; so it is always
        where backward ops read views of the tensor, which is then the copy itself, or is not saved.
    """
    size = trace.tensor_columns.bytes.tolist()
    saves = kept(trace.structure, "saves", (weights, duplicates), lambda: _saves(trace, weights, duplicates))
    return [save for save in saves if size[save.tensor]]


def _saves(trace: Trace, weights: bool, duplicates: bool) -> list[Save]:
    """The same, also of tensors without bytes: once for all traces of a structure."""
    c, role, viewed = trace.op_columns, trace.tensor_columns.role, saved_through_views(trace)
    undoes, index, passes = forward_of(trace), TraceIndex(trace), forward_passes(trace)
    held = {**named(index, passes), **cached_casts(index, passes)}

    def is_plain(op: int) -> bool:
        return not (c.engine.get(op) or c.group.get(op))

    ignored = IGNORED if weights else (*IGNORED, ROLE_CODE["weight"])
    found = []
    for t in range(len(trace.tensors)):
        producer, readers = int(trace.producer[t]), trace.readers(t)
        late = tuple(op for op in readers if c.phase[op] == BACKWARD)
        if role[t] in ignored or not late:
            continue
        early = [op for op in (producer, *readers) if op >= 0 and c.phase[op] == FORWARD and op < late[0]]
        if not early:
            continue
        last = max(early)
        until = max(last, held.get(t, last))
        # one copy a forward op that saves it: a node of several backward ops unpacks it once
        nodes: dict[int, list[int]] = {}
        for op in late:
            own = undoes.get(op, last)
            apart = duplicates and own in early and t not in viewed
            nodes.setdefault(own if apart else last, []).append(op)
        saves = []
        for at, ops in nodes.items():
            node = undoes.get(ops[0], last)
            ends = max(op for op in ops if undoes.get(op, last) == node)
            saving = {undoes.get(op, last) for op in ops}
            since = min((op for op in early if op in saving and is_plain(op)), default=at)
            saves.append(Save(t, at, tuple(ops), node, ends, since))
        k = max(range(len(saves)), key=lambda i: saves[i].at)
        # the device must be there when those ops end: to wait for the copy, and before it comes back
        stays = role[t] == ROLE_CODE["weight"] or (duplicates and _outlives_backward(index, t))
        if not stays and is_plain(saves[k].at) and is_plain(until):
            saves[k] = saves[k]._replace(used_until=until)
        found += [save for save in saves if save.used_until >= 0 or t not in viewed]
    return found


def _outlives_backward(index: TraceIndex, tensor: int) -> bool:
    """Whether the program holds a tensor beyond backward: a batch that a caller gives, or what a variable names."""
    if index.trace.producer[tensor] < 0:
        return True
    end = index.released[tensor]
    return bool(end >= 0 and index.trace.op_columns.phase[end] > BACKWARD)


def forward_passes(trace: Trace) -> list[Region]:
    """Runs of forward ops of one device with no backward op of that device between them: one per microbatch."""
    c = trace.op_columns
    device, phase = c.device.tolist(), c.phase.tolist()
    ops = sorted((op for op in range(len(phase)) if phase[op] <= BACKWARD), key=device.__getitem__)
    parts = groupby(ops, key=lambda op: (device[op], phase[op]))
    return [Region(tuple(part), ()) for (_, kind), part in parts if kind == FORWARD]


class Packed(NamedTuple):
    """A saved copy in the trace that has it, by the ids of that trace.

    copy: the tensor that is saved.
    at: the op after which it is.
    readers: the backward ops that read it.
    used_until: the last forward op that needs it, -1 where none but the op that makes it does.
    ends: the last op of the node that reads it first.
    save: what it is of the trace that has been given.
    """

    copy: int
    at: int
    readers: tuple[int, ...]
    used_until: int
    ends: int
    save: Save


def with_copies(trace: Trace, saves: list[Save]) -> tuple[Trace, list[Packed]]:
    """The trace with a tensor, and an op of no time that makes it, for each save whose copy stands for its tensor.

    The saved copies come in the order in which they are made: at one op, a tensor itself after what is copied from it.
    Where nothing needs a copy of its own, the trace is the one that was given.
    """
    saves = sorted(saves, key=lambda save: (save.at, save.used_until))
    if all(save.used_until >= 0 for save in saves):
        return trace, [Packed(s.tensor, s.at, s.readers, s.used_until, s.ends, s) for s in saves]
    after: dict[int, list[Save]] = {}
    for save in saves:
        after.setdefault(save.at, []).append(save)
    new = Rewriter(trace)
    ids = new.all_tensors()
    copies: dict[int, dict[int, int]] = {}  # backward op -> tensor -> the saved copy that it reads
    made: list[tuple[int, int, Save]] = []
    here: list[int] = []
    add = new.copier()
    for op, device in enumerate(trace.op_columns.device.tolist()):
        saved = copies.get(op, {})
        here.append(
            add(op, [saved.get(t, ids[t]) for t in trace.reads(op)], [ids[t] for t in trace.writes(op)], device)
        )
        for save in after.get(op, ()):
            copy, at = ids[save.tensor], here[op]
            if save.used_until < 0:
                copy, at = _pack(new, trace, save, copy)
            for reader in save.readers:
                copies.setdefault(reader, {})[save.tensor] = copy
            made.append((copy, at, save))
    carry = [(ids[a], ids[b]) for a, b in trace.carry]
    built = new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)
    return built, [
        Packed(
            copy,
            at,
            tuple(here[op] for op in s.readers),
            -1 if s.used_until < 0 else here[s.used_until],
            here[s.ends],
            s,
        )
        for copy, at, s in made
    ]


def _pack(new: Rewriter, trace: Trace, save: Save, source: int) -> tuple[int, int]:
    """Add the tensor that stands for a saved copy, and the op that makes it; their ids."""
    old, at = trace.tensors[save.tensor], trace.ops[save.at]
    name = f"{old.name}.saved.{trace.op_columns.name[save.readers[0]]}"
    copy = new.tensor(old, Same(old.id), name=name, role="activation", saved_for="backward")
    where = {"phase": "forward", "layer": at.layer, "device": at.device}
    return copy, new.glue(f"{name}.pack", "copy", [source], [copy], duration=0, **where)


def following(trace: Trace) -> Mapping[int, int]:
    """Per op the next one of its device; no entry for the last. Not to be changed."""

    def make() -> dict[int, int]:
        ops: dict[int, list[int]] = {}
        for op, device in enumerate(trace.op_columns.device.tolist()):
            ops.setdefault(device, []).append(op)
        return {one: other for own in ops.values() for one, other in pairwise(own)}

    return kept(trace.structure, "following", None, make)


class Trip(NamedTuple):
    """When a saved tensor leaves the device and returns. Each is an op.

    release: before it the device waits for the copy out and releases the tensor.
    fetch: before it the copy back begins.
    needed: before it the device waits for that copy.
    """

    release: int
    fetch: int
    needed: int


def round_trips(trace: Trace, trips: Iterable[tuple[Save, Trip]], host: str, home: str) -> list[Action]:
    """The actions by which tensors are copied out once saved, released, fetched and waited for.

    What would be released only after its copy back is due stays. At one anchor copies start before the device waits.
    """
    after = following(trace)
    copies: list[Action] = []
    waits: list[Action] = []
    for save, trip in trips:
        t = save.tensor
        if save.used_until < 0:
            continue
        release, fetch = max(trip.release, after.get(save.used_until, trip.needed)), min(trip.fetch, trip.needed)
        if release > fetch:
            continue
        copies.append(Move(t, host, keep=True, after=save.since))
        copies += [Wait(t, before=release), Drop(t, before=release)]
        copies.append(Move(t, home, before=fetch))
        waits.append(Wait(t, before=trip.needed))
    return [*copies, *waits]
