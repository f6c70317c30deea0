"""The update's side of ZeRO-Infinity: gradients that go down to it, and the tiles that it streams from the drive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sim.errors import Infeasible
from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Move, Wait
from sim.rewrites.host_update import OnHost, Split
from sim.solvers.streaming import buckets
from sim.units import format_bytes


class Update:
    """The update's side: the gradients that it receives, what it streams from the drive, and what it returns.

    drive: the tier where states and gradients wait, "" if that is the host itself.
    weights: per weight that is streamed the tier where it resides.
    """

    def __init__(
        self, split: Split, new: OnHost, platform: Platform, host: str, drive: str, weights: Mapping[int, str]
    ) -> None:
        self.split, self.new, self.platform = split, new, platform
        self.host, self.drive, self.weights = host, drive, weights
        trace, device = new.trace, new.trace.op_columns.device
        self.size = trace.tensor_columns.bytes
        self.tiles: dict[int, list[int]] = {}  # per device the updates in order
        for op in sorted(new.ops[old] for old in split.updates):
            self.tiles.setdefault(int(device[op]), []).append(op)
        self.tile = {op: k for tiles in self.tiles.values() for k, op in enumerate(tiles)}
        self.gradients = [new.tensors[t] for t in split.ready()]
        self.states = list(self._touched())
        self.place = dict.fromkeys(self.states, drive) if drive else {}
        self.states += [t for t in self._updated_in_place() if weights.get(t, host) != host]

    def _touched(self) -> dict[int, None]:
        """What updates alone touch of what exists from the beginning."""
        trace, found = self.new.trace, dict[int, None]()
        for op in self.tile:
            over = (int(trace.tensor_columns.replaces[t]) for t in trace.writes(op))
            for t in (*trace.reads(op), *(t for t in over if t >= 0)):
                if trace.producer[t] < 0 and self.size[t] and all(op in self.tile for op in self._users(t)):
                    found[t] = None
        return found

    def _updated_in_place(self) -> list[int]:
        """The weights that updates overwrite where they reside."""
        split, new = self.split, self.new
        own = (new.tensors[t] for t in split.weights if t not in new.kept and t not in new.fresh)
        return [t for t in own if self.new.trace.replaced_by[t] >= 0]

    def check_fits(self) -> None:
        """Raise Infeasible where the host cannot hold what one update reads and makes."""
        trace, capacity = self.new.trace, self.platform.tier(self.host).capacity
        resident = {t for t, tier in self.weights.items() if tier == self.host}
        for op in self.tile:
            made = [t for t in trace.writes(op) if trace.tensor_columns.replaces[t] < 0]
            need = sum(int(self.size[t]) for t in {*trace.reads(op), *made} | resident)
            if need > capacity:
                raise Infeasible(
                    f"zero_infinity: the update {trace.op_columns.name[op]!r} needs {format_bytes(need)} "
                    f"of pinned memory at once; {self.host!r} has {format_bytes(capacity)}"
                )

    def gradients_out(self, bucket: int) -> Iterator[Action]:
        """Each bucket's moves when it is full; the device waits for all before its first update."""
        split, new = self.split, self.new
        full = [(new.tensors[t], new.ops[split.last_use[t]]) for t in split.ready()]
        for tensors, at in buckets(full, self.size, bucket):
            yield from (Move(t, self.drive or self.host, after=at) for t in tensors)
        for tiles in self.tiles.values():
            yield from (Wait(t, before=tiles[0]) for t in self.gradients)

    def streams(self, ahead: int) -> Iterator[Action]:
        """Per tile the reads from the drive, `ahead` tiles early, and the writes behind it.

        A tile begins when the buffers of the tile `ahead` + 2 before it are written.
        """
        trace, device = self.new.trace, self.new.trace.op_columns.device
        reads: list[tuple[int, Action]] = []
        drive = {t: self.weights.get(t, self.drive) for t in (*self.gradients, *self.states)}
        for t in (t for t, tier in drive.items() if tier):
            users = [op for op in self._users(t) if op in self.tile]
            if not users:
                continue
            tiles = self.tiles[int(device[users[0]])]
            at = tiles[max(self.tile[users[0]] - ahead, 0)]
            end = self._end(t)
            clean = end == t and t not in self.gradients
            reads.append((self.tile[users[0]], Move(t, self.host, keep=clean, before=at)))
            if clean:
                yield Drop(t, self.host, after=users[-1])
            elif t not in self.gradients:
                yield Move(end, drive[t], after=int(trace.producer[end]))
                if (later := self.tile[users[-1]] + ahead + 2) < len(tiles):
                    yield Wait(end, before=tiles[later])
        yield from (action for _, action in sorted(reads, key=lambda row: row[0]))

    def weights_back(self) -> Iterator[Action]:
        """New weights go where the old ones reside, which are released."""
        split, new, trace = self.split, self.new, self.new.trace
        for t, fresh in new.fresh.items():
            old, made = new.tensors[t], new.ops[int(split.trace.producer[split.weights[t]])]
            home = self.platform.home(int(trace.op_columns.device[new.ops[split.last_use[t]]])).name
            where = self.weights.get(old, home)
            yield Drop(old, where, after=made)
            if where != self.host:
                yield Move(fresh, where, after=made)

    def _end(self, tensor: int) -> int:
        while self.new.trace.replaced_by[tensor] >= 0:
            tensor = int(self.new.trace.replaced_by[tensor])
        return tensor

    def _users(self, tensor: int) -> list[int]:
        """The ops that read or overwrite any value of its storage from this one on, in order."""
        trace, found = self.new.trace, set[int]()
        while tensor >= 0:
            found |= {int(op) for op in trace.readers(tensor)}
            tensor = int(trace.replaced_by[tensor])
            if tensor >= 0:
                found.add(int(trace.producer[tensor]))
        return sorted(found)
