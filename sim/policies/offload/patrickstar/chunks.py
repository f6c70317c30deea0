"""The chunks of PatrickStar: which weights each has, and where it is at each op of its device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Move
from sim.rewrites.masters import updated_weights
from sim.solvers.streaming import streamed
from sim.trace.graph import Trace


@dataclass
class Weight:
    """A weight in a chunk.

    id: its tensor. bytes: its size.
    reads: the ops of the device that use it or its gradient's space, in order. last: the last one that reads it.
    on_device: whether the device updates it, so that it begins and ends there; else the host keeps it beside copies.
    replaced: whether the host needs it no longer once the device has read it last: its gradient takes its place.
    new: its value after an update on the device, -1 for none.
    gradient: its gradient, -1 for none. produced: by which op. update: the op of the CPU that reads that, -1 for none.
    scattered: whether a collective makes the gradient, which may end long after the device has passed it: moves of the
        gradient are anchored at that end.
    """

    id: int
    bytes: int
    reads: list[int]
    last: int
    on_device: bool
    replaced: bool = False
    new: int = -1
    gradient: int = -1
    produced: int = -1
    update: int = -1
    scattered: bool = False


@dataclass
class Chunk:
    """Weights that are fetched and evicted together.

    present: its tensors on the device. accesses: the ops that need it there, in order. used: the last of them so far.
    ranks: to how many its weights are dealt.
    """

    weights: list[Weight] = field(default_factory=list)
    present: dict[int, Weight] = field(default_factory=dict)
    accesses: list[int] = field(default_factory=list)
    used: int = -1
    ranks: int = 1

    @property
    def bytes(self) -> int:
        """Its size; a gradient takes its weight's place."""
        return sum(weight.bytes for weight in self.weights)

    def next_use(self, op: int, total: int) -> int:
        """The next op after this one that needs it; in the next iteration, `total` ops later, if none is left."""
        at = bisect_right(self.accesses, op)
        return self.accesses[at] if at < len(self.accesses) else self.accesses[0] + total


def chunks_of(trace: Trace, platform: Platform, device: int, limit: int) -> list[Chunk]:
    """A device's weights in chunks of at most `limit` bytes (a larger one alone), in the order of their first use.

    Of a weight that is dealt to several ranks it is the device's part, whose use is the all-gather.
    """
    c, found, updates = trace.op_columns, list[Weight](), updated_weights(trace)
    t = trace.tensor_columns
    for w, readers in streamed(trace, platform, gathered=True):
        if int(c.device[readers[0]]) != device:
            continue
        over = int(trace.replaced_by[w])
        if over >= 0 and int(trace.producer[over]) in c.group:
            continue  # a whole weight, which ranks that keep parts of its state write
        gradient, new, op = updates.get(w, (-1, over, int(trace.producer[over]) if over >= 0 else -1))
        if gradient >= 0 and (t.bytes[gradient] > t.bytes[w] or t.replaces[gradient] >= 0):
            gradient = -1
        here = op >= 0 and op not in c.engine
        found.append(
            Weight(
                w,
                int(t.bytes[w]),
                reads=sorted({*readers, op} if here else readers),
                last=max(readers[-1], op if over >= 0 and here else -1),
                on_device=here,
                replaced=over < 0 and op >= 0,
                new=new if here else -1,
                gradient=gradient,
                produced=int(trace.producer[gradient]) if gradient >= 0 else -1,
                update=op if gradient >= 0 and not here else -1,
                scattered=gradient >= 0 and int(trace.producer[gradient]) in c.group,
            )
        )
    chunks: list[Chunk] = []
    for weight in sorted(found, key=lambda w: (w.reads[0], w.id)):
        if not chunks or chunks[-1].bytes + weight.bytes > limit:
            chunks.append(Chunk())
        chunks[-1].weights.append(weight)
    for chunk in chunks:
        produced_at = (w.produced for w in chunk.weights if w.produced >= 0)
        used_at = {op for w in chunk.weights for op in w.reads}
        chunk.ranks = max(c.ring[op].ranks if op in c.ring else 1 for op in used_at)
        chunk.accesses = sorted({*used_at, *produced_at})
    return chunks


class Walk:
    """The device's ops in order, and what each makes of its chunks.

    room: per op the bytes of chunks that the device may hold. belady: whether next uses are known.
    """

    def __init__(
        self, trace: Trace, chunks: Sequence[Chunk], room: Sequence[int], home: str, host: str, belady: bool
    ) -> None:
        self.chunks, self.room, self.home, self.host, self.belady = chunks, room, home, host, belady
        self.total = len(trace.ops)
        self.resident: dict[int, Chunk] = {}
        self.held = 0
        for i, chunk in enumerate(chunks):  # what the device updates begins there
            chunk.present = {w.id: w for w in chunk.weights if w.on_device}
            if chunk.present:
                self._admit(i)

    def actions(self, prefetch: int) -> Iterator[Action]:
        """The moves and drops of all ops."""
        by_op: dict[int, list[int]] = {}
        for i, chunk in enumerate(self.chunks):
            for op in chunk.accesses:
                by_op.setdefault(op, []).append(i)
        order = sorted(by_op)
        for k, op in enumerate(order):
            needed = by_op[op]
            for i in needed:
                if i not in self.resident:
                    yield from self._make_room(op, self.chunks[i].bytes, needed)
                yield from self._fetch(i, op, op)  # of one that begins here only what the device updates is there
                self.chunks[i].used = op
            yield from self._make_room(op, 0, needed)
            ahead = dict.fromkeys(i for later in order[k + 1 : k + 1 + 8 * prefetch] for i in by_op[later])
            for i in [i for i in ahead if i not in needed][:prefetch]:
                if i not in self.resident and self.held + self.chunks[i].bytes <= self.room[op]:
                    yield from self._fetch(i, order[k + 1], op)
            for i in needed:
                yield from self._after(i, op)
        for chunk in self.chunks:
            for t, weight in chunk.present.items():
                if t == weight.gradient and weight.update >= 0:
                    yield Move(t, self.host, before=weight.update)

    def _make_room(self, op: int, need: int, needed: Sequence[int]) -> Iterator[Action]:
        """Evict until `need` bytes are left, or only chunks that the op needs."""
        while self.held + need > self.room[op]:
            others = [i for i in self.resident if i not in needed]
            if not others:
                return
            if self.belady:
                chosen = max(others, key=lambda i: (self.chunks[i].next_use(op, self.total), i))
            else:
                chosen = min(others, key=lambda i: (self.chunks[i].used, i))
            for t, weight in self.chunks[chosen].present.items():
                if t == weight.id and not weight.on_device:
                    yield Drop(t, self.home, before=op)
                elif weight.scattered and t == weight.gradient:
                    yield Move(t, self.host, after=weight.produced)
                else:
                    yield Move(t, self.host, before=op)
            self.chunks[chosen].present = {}
            self._leave(chosen)

    def _fetch(self, i: int, use: int, op: int) -> Iterator[Action]:
        """Before an op, copy what will still be used from the op `use` on."""
        chunk = self.chunks[i]
        for weight in chunk.weights:
            if weight.last >= use and weight.id not in chunk.present:
                chunk.present[weight.id] = weight
                yield Move(weight.id, self.home, keep=not weight.on_device, before=op)
            returns = weight.on_device and 0 <= weight.produced < op <= weight.reads[-1] and not weight.scattered
            if returns and weight.gradient not in chunk.present:
                chunk.present[weight.gradient] = weight
                yield Move(weight.gradient, self.home, before=op)
        self._admit(i)

    def _after(self, i: int, op: int) -> Iterator[Action]:
        """After an op: weights that no op of the device needs any more make way, for their gradients too."""
        chunk = self.chunks[i]
        for weight in chunk.weights:
            if weight.produced == op and weight.scattered and weight.update >= 0:
                yield Move(weight.gradient, self.host, after=op)
            elif weight.produced == op:
                chunk.present[weight.gradient] = weight
            if weight.last == op and weight.id in chunk.present:
                del chunk.present[weight.id]
                if weight.replaced or not weight.on_device:
                    yield Drop(weight.id, self.home, after=op)
                if weight.replaced and not weight.on_device:  # a bias, which backward does not read, long before that
                    yield Drop(weight.id, self.host, after=max(op, weight.produced))
            if weight.on_device and weight.reads[-1] == op:
                chunk.present.pop(weight.gradient, None)
                chunk.present[weight.new] = weight
        if not chunk.present and i in self.resident:
            self._leave(i)

    def _admit(self, i: int) -> None:
        if i not in self.resident:
            self.resident[i] = self.chunks[i]
            self.held += self.chunks[i].bytes

    def _leave(self, i: int) -> None:
        del self.resident[i]
        self.held -= self.chunks[i].bytes
