"""Regions that are recomputed before their backward, as PyTorch's checkpoints do, and what those hold meanwhile."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sim.solvers.regions import Region
from sim.solvers.schedule import TraceIndex, backward_slice
from sim.trace.chain import BACKWARD, FORWARD
from sim.trace.gathers import is_gather
from sim.trace.graph import PERSISTENT
from sim.trace.op import KIND_CODE, PHASE_CODE
from sim.trace.tensor import ROLE_CODE


@dataclass(frozen=True, slots=True)
class Rerun:
    """Ops of a region that are recomputed before the anchor.

    start: the first of the region's own backward ops.
    """

    region: Region
    start: int
    anchor: int
    ops: Sequence[int]


def region_reruns(
    index: TraceIndex,
    regions: Sequence[Region],
    *,
    early_stop: bool = True,
    skip_last: bool = False,
    keep: Collection[int] = (),
    before: str = "result",
) -> list[Rerun]:
    """Recompute each region just before its backward.

    What enters a region stays, and so do results that only other regions read. A tensor that the region's backward
    only releases (autograd saved it for its shape alone) counts as read there. Ops that can't be recomputed keep their
    results. A region of which nothing would be dropped is not recomputed.

    early_stop: recompute only what the region's backward needs; else the whole region.
    skip_last: do not recompute a region whose backward begins before any later region's forward.
    keep: ops that are not recomputed, so that their results stay.
    before: recompute before the region's first backward op that reads a result of the region ("result"), that reads
        anything that autograd saved, weights included ("saved"), or the first of all ("start").
    """
    kept, outputs = set(keep), frozenset(index.trace.outputs)
    next_on: dict[int, int] = {}  # per device the first op of the region that follows
    reruns: list[Rerun] = []
    for region in sorted(regions, key=lambda region: region.forward[0], reverse=True):
        device = index.device[region.forward[0]]
        first, last, wanted, stays = _inside(index, region, kept, outputs)
        follower = next_on.get(device, len(index.reads))
        next_on[device] = region.forward[0]
        if first < 0 or (skip_last and first < follower):
            continue
        own = _up_to(index, region, first)
        places = {"result": first, "saved": next(op for op in own if op == first or _reads_saved(index, op))}
        anchor = places.get(before, own[0])
        ops = [op for op in region.forward if op not in kept]
        possible = index.can_run_together(ops, anchor)
        if early_stop or len(possible) < len(ops):
            # a kept op is not recomputed, but its inputs are
            passed = {t for op in region.forward if op in kept and op <= last for t in index.reads[op]}
            there = {t for t in stays if index.overwritten_at[t] >= anchor}
            possible = backward_slice(index, possible, (wanted | passed) - there, there)
        reruns.append(Rerun(region, own[0], anchor, possible))
    return reruns[::-1]


def outside_of(index: TraceIndex, rerun: Rerun, inner: Sequence[Region]) -> Rerun:
    """A rerun of a region with checkpoints inside it: up to what its own backward needs, and what enters those."""
    deeper = {op for region in inner for op in region.forward}
    own = set(rerun.region.forward)
    wanted = set()
    for op in rerun.region.forward:
        for t in index.writes[op]:
            readers = index.trace.readers(t)
            enters = op not in deeper and any(r in deeper for r in readers)
            undone = index.released[t] in rerun.region.backward or any(r in rerun.region.backward for r in readers)
            # between two checkpoints inside, what one hands to the other enters that one
            handed = any(
                op not in region.forward
                and not own.isdisjoint(region.forward)
                and any(r in region.forward for r in readers)
                for region in inner
            )
            if enters or handed or (undone and op not in deeper):
                wanted.add(t)
    return replace(rerun, ops=backward_slice(index, rerun.ops, wanted))


def by_anchor(reruns: Iterable[Rerun]) -> dict[int, list[int]]:
    """Reruns of regions as `schedule_of` takes them."""
    anchored: dict[int, list[int]] = {}
    for rerun in reruns:
        anchored.setdefault(rerun.anchor, []).extend(rerun.ops)
    return anchored


def rerun_regions(
    index: TraceIndex, regions: Sequence[Region], *, early_stop: bool = True, skip_last: bool = False
) -> dict[int, list[int]]:
    """Recompute each region just before its first backward op that reads a result of it (`region_reruns`)."""
    return by_anchor(region_reruns(index, regions, early_stop=early_stop, skip_last=skip_last))


def _inside(
    index: TraceIndex, region: Region, kept: Collection[int], outputs: Collection[int]
) -> tuple[int, int, set[int], set[int]]:
    """What of a region its backward needs.

    Returns the first op that does (-1 for none), the last of the region's ops whose results it needs, those results
    that are not kept by name, and the tensors that stay.
    """
    inside, undoing, released = set(region.forward), region.backward, index.released
    begin = last = -1
    drops = False
    wanted, stays = set(), set()
    for op in region.forward:
        for t in index.writes[op]:
            readers, first, leaves = index.trace.readers(t), len(index.reads), False
            for r in readers:
                if r in undoing:
                    first = r
                    break
            if released[t] in undoing and released[t] < first:
                first = released[t]
            for r in readers:  # which are in order
                if r >= first:
                    break
                if r not in inside:
                    leaves = True
                    break
            if op in kept or t in outputs:
                stays.add(t)
            elif first < len(index.reads):
                wanted.add(t)
                begin = first if begin < 0 else min(begin, first)
                drops = drops or not leaves
            elif leaves:
                stays.add(t)
            if first < len(index.reads):
                last = op
    return begin if drops else -1, last, wanted, stays


def _up_to(index: TraceIndex, region: Region, first: int) -> list[int]:
    """The region's backward ops up to one of them that produce, or also read, the gradients that lead to it.

    A layer's backward ops are those of all its microbatches; their gradients meet in those of weights alone.
    """
    own, flow, waiting = list[int](), set[int](), [-first]  # the last one first
    while waiting:
        op = -heappop(waiting)
        if own and own[-1] == op:
            continue
        own.append(op)
        for t in index.reads[op]:
            if t not in flow and is_passing(index, t):
                flow.add(t)
                for other in (index.producer[t], *index.trace.readers(t)):
                    if other < op and other in region.backward:
                        heappush(waiting, -other)
    return own[::-1]


def is_passing(index: TraceIndex, t: int) -> bool:
    """Whether a tensor is a gradient that backward passes on, and not one of a weight."""
    producer = index.producer[t]
    return producer >= 0 and index.phase[producer] == BACKWARD and index.role[t] != ROLE_CODE["gradient"]


def is_saved(index: TraceIndex, t: int) -> bool:
    """Whether backward has a tensor because autograd saved it: a forward result, a weight, an input."""
    producer = index.producer[t]
    return index.phase[producer] == FORWARD if producer >= 0 else index.role[t] != ROLE_CODE["gradient"]


def _reads_saved(index: TraceIndex, op: int) -> bool:
    return any(is_saved(index, t) for t in index.reads[op])


def cached_results(
    index: TraceIndex, regions: Iterable[Region], keep: Collection[int], reruns: Iterable[Rerun]
) -> dict[int, int]:
    """The kept results that would be freed before their region's backward begins, and that backward's last op.

    The cache of PyTorch's selective checkpoint holds them, whether backward reads them or not.
    """
    read_again = {t for rerun in reruns for op in rerun.ops for t in index.reads[op]}
    found: dict[int, int] = {}
    for region in regions:
        # a layer has backward ops for every microbatch: its own read what it made
        made = (t for op in region.forward for t in index.writes[op])
        own = {reader for t in made for reader in index.trace.readers(t) if reader in region.backward}
        for op in region.forward:
            if own and op in keep:
                held = {_version(index, t, max(own)) for t in index.writes[op]} - read_again
                gone = [t for t in sorted(held) if index.trace.last_use[t] < min(own)]
                found.update(dict.fromkeys(gone, max(own)))
    return found


def _version(index: TraceIndex, tensor: int, op: int) -> int:
    """What a tensor's storage holds when an op runs: the tensor, or what has overwritten it."""
    while index.overwritten_at[tensor] < op:
        tensor = int(index.trace.replaced_by[tensor])
    return tensor


# ---- what is held ------------------------------------------------------------------------------


def cached_casts(index: TraceIndex, regions: Sequence[Region]) -> dict[int, int]:
    """Copies of weights that a region makes, and the last forward op before the next backward, to be held until then.

    PyTorch's autocast casts each weight that is trained once and keeps the copy until its context is left, which is
    after the forward pass and the loss. It casts a frozen weight for each use and keeps no copy.
    """
    held: dict[int, int] = {}
    trained = _trained(index)
    for region, last in _forward_ends(index, regions):
        for op in region.forward:
            if _casts_weights(index, op) and trained[list(index.reads[op])].all():
                held.update(dict.fromkeys(index.writes[op], last))
    return held


def named(index: TraceIndex, regions: Sequence[Region]) -> dict[int, int]:
    """Results of regions and the op until whose end a variable of the program holds them, in the same forward pass.

    A checkpoint keeps nothing of what autograd saves, but the function in it is the same and has its variables. Copies
    of weights are apart (`cached_casts`).
    """
    held: dict[int, int] = {}
    for region, last in _forward_ends(index, regions):
        for op in region.forward:
            for t in index.writes[op] if not _casts_weights(index, op) else ():
                end = index.unbound[t] if index.unbound[t] >= 0 else index.released[t]
                if op < end <= last:
                    held[t] = end
    return held


def _forward_ends(index: TraceIndex, regions: Sequence[Region]) -> Iterator[tuple[Region, int]]:
    """Each region with the last forward op of its device before the next backward."""
    c = index.trace.op_columns
    ends: dict[int, NDArray[np.int64]] = {}
    forward: dict[int, NDArray[np.int64]] = {}
    for device in range(index.trace.devices):
        ends[device] = np.flatnonzero((c.device == device) & (c.phase == BACKWARD))
        forward[device] = np.flatnonzero((c.device == device) & (c.phase == FORWARD))
    for region in regions:
        device = index.device[region.forward[0]]
        later, own = ends[device], forward[device]
        after = later[np.searchsorted(later, region.forward[-1]) :]
        stop = int(after[0]) if len(after) else len(index.reads)
        yield region, int(own[np.searchsorted(own, stop) - 1])


def _casts_weights(index: TraceIndex, op: int) -> bool:
    """Whether an op copies weights to another type; a copy of the same type, transposed say, is work as any other."""
    reads, dtype = index.reads[op], index.trace.tensor_columns.dtype
    if index.trace.op_columns.kind[op] != KIND_CODE["copy"] or not reads:
        return False
    types = {dtype[t] for t in (*reads, *index.writes[op])}
    return all(index.role[t] in PERSISTENT for t in reads) and (len(types) > 1 or "" in types)


def _trained(index: TraceIndex) -> NDArray[np.bool_]:
    """Which tensors are weights that are trained; all where there is no update.

    Those that are overwritten, or that the next iteration begins with as an op has made them: an update elsewhere sends
    its result to where the weight is.
    """
    trace = index.trace
    weights = np.isin(trace.tensor_columns.role, PERSISTENT)
    if PHASE_CODE["update"] not in trace.op_columns.phase:
        return weights
    renewed = trace.replaced_by >= 0
    renewed[[first for last, first in trace.carry if trace.producer[last] >= 0]] = True
    return weights & renewed


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors that checkpoints hold up to the end of an op.

    until: per tensor the op at whose end the program releases it.
    drops: per tensor the op after which it is dropped, because it is recomputed later; for `schedule_of`'s `hold`.
    handed: per recomputed tensor the op at whose end it is dropped, where a step without checkpoints holds it longer;
        for `schedule_of`'s `once_recomputed`.
    """

    until: Mapping[int, int]
    drops: Mapping[int, int]
    handed: Mapping[int, int]


def held_by(index: TraceIndex, reruns: Sequence[Rerun], *, reentrant: bool = False) -> Held:
    """What the checkpoints round regions hold beside what autograd saves.

    PyTorch's non-reentrant checkpoint holds the arguments of its function (the region's inputs, except weights,
    gathered ones among them, and copies of them) until the region's last backward node that saved something has run.
    The reentrant one runs a backward pass inside the outer one: until that has ended, its arguments, its recomputed
    results and their gradients are local variables there.

    An autograd node holds what it saved until its gradients have been cast to the types and summed to the shapes of
    what they belong to. What the non-reentrant checkpoint recomputed is a local variable of the node's own kernels,
    and nothing holds it once they have run.
    """
    anchor_of = {t: rerun.anchor for rerun in reruns for op in rerun.ops for t in index.writes[op]}
    starts = sorted(rerun.start for rerun in reruns)
    in_order: dict[int, list[int]] = {}  # backward ops, which all microbatches of a layer share
    until: dict[int, int] = {}
    drops: dict[int, int] = {}
    for rerun in reruns:
        inside, undoing = set(rerun.region.forward), rerun.region.backward
        if id(undoing) not in in_order:
            in_order[id(undoing)] = sorted(undoing)
        later = islice(starts, bisect_right(starts, rerun.start), None)
        stop = next((s for s in later if s in undoing), len(index.reads))
        ordered = in_order[id(undoing)]
        own = ordered[bisect_left(ordered, rerun.start) : bisect_left(ordered, stop)]
        made = {t for op in inside for t in index.writes[op]}
        end = own[-1]
        if not reentrant:
            lets_go = {index.released[t] for t in made}
            end = max(op for op in own if op in lets_go or any(is_saved(index, t) for t in index.reads[op]))
        for t in {t for op in inside for t in index.reads[op]} - made:
            producer = index.producer[t]
            if producer < 0 or is_gather(index.trace, producer) or _casts_weights(index, producer):
                continue
            if t in anchor_of and end < anchor_of[t]:
                drops[t] = max(end, drops.get(t, -1))
            if t not in anchor_of or index.trace.last_use[t] <= end < anchor_of[t]:  # no read would hold it
                until[t] = max(end, until.get(t, -1))
        if reentrant:
            readers = ((t, r) for t in made & anchor_of.keys() for r in index.trace.readers(t))
            results = [t for t, r in readers if index.phase[r] == FORWARD and r not in inside]
            gradients = {t for op in own for t in index.reads[op] if is_passing(index, t)}
            entering = [t for t in gradients if index.producer[t] < rerun.start]
            until.update((t, max(end, until.get(t, -1))) for t in (*results, *entering))
    handed = {} if reentrant else _handed_over(index, anchor_of)
    return Held(until, drops, {t: op for t, op in handed.items() if t not in until})


def _handed_over(index: TraceIndex, recomputed: Collection[int]) -> dict[int, int]:
    """Per recomputed tensor that a node holds while its gradients are cast and summed, the last op that is its own."""
    handed: dict[int, int] = {}
    fits = np.isin(index.trace.op_columns.kind, [KIND_CODE[kind] for kind in ("copy", "reduce")])
    for op, tensors in index.releases.items():
        saved = [t for t in tensors if t in recomputed and index.phase[index.trace.last_use[t]] == BACKWARD]
        if not saved or index.phase[op] != BACKWARD:
            continue
        last = max(int(index.trace.last_use[t]) for t in saved)
        made = {w for t in saved for r in index.trace.readers(t) if r <= last for w in index.writes[r]}
        for after in range(last + 1, op + 1):
            reads = index.reads[after]
            if made.isdisjoint(reads) or not fits[after] or any(is_saved(index, t) for t in reads):
                break  # another node, or a kernel of this one
            made.update(index.writes[after])
        else:
            handed.update(dict.fromkeys(saved, last))
    return handed
