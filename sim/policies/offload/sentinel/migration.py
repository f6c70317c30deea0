"""What migrates at the ends of intervals, and what is prefetched during the interval before its use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop

from sim.plan import Action, Move, Wait
from sim.policies.offload.sentinel.pages import Profiled, Unit

NEVER = 1 << 62


@dataclass
class Migration:
    """The migrations of one interval length.

    begin_slow: tensors that begin in the slow tier: what is needed last of what does not fit.
    page_bytes, tensor_bytes: what migrates, in pages and in tensors.
    fits: whether each interval's own needs fit beside what stays.
    """

    profiled: Profiled
    capacity: int
    interval: int
    home: str
    slow: str
    actions: list[Action] = field(default_factory=list)
    begin_slow: list[int] = field(default_factory=list)
    page_bytes: int = 0
    tensor_bytes: int = 0
    fits: bool = True

    def __post_init__(self) -> None:
        layers, units = self.profiled.layers, self.profiled.units
        count = -(-len(layers) // self.interval)
        self._used = [sorted({layer // self.interval for layer in unit.layers}) for unit in units]
        until = [max(storage.until for storage in unit.storages) for unit in units]
        self._ends = sorted(zip(until, range(len(units)), strict=True), reverse=True)  # those to come, the first last
        self._bytes, self._heat = [unit.bytes for unit in units], [unit.heat for unit in units]
        self._resident: set[int] = set()
        self._away: set[int] = set()
        self._since: dict[int, int] = {}  # the interval in which it arrived, or was used last
        spare = self.capacity - (self.profiled.reserved[0] if layers else 0)
        for i in self.profiled.by_layers:
            unit = units[i]
            begins = [(s.values[0][1], s.bytes) for s in unit.storages if s.values[0][0] < 0]
            spare -= sum(bytes for _, bytes in begins)
            if spare < 0 and len(begins) == len(unit.storages):
                spare += sum(bytes for _, bytes in begins)
                self.begin_slow += [tensor for tensor, _ in begins]
                self._away.add(i)
            elif begins:
                self._resident.add(i)
                self._used[i] += [count] if any(storage.is_carried for storage in unit.storages) else []
        self._by_interval: dict[int, set[int]] = {}
        for i, used in enumerate(self._used):
            for k in used:
                self._by_interval.setdefault(k, set()).add(i)
        self._due = [used[0] for used in self._used]  # the interval that uses it next
        for k in range(count):
            self._interval(k)

    def _interval(self, k: int) -> None:
        """Before an interval: free space for what it uses and for what the next one wants of the slow tier."""
        units = self.profiled.units
        here = slice(k * self.interval, (k + 1) * self.interval)
        first = self.profiled.layers[here.start][0]
        while self._ends and self._ends[-1][0] < first:
            self._resident.discard(self._ends.pop()[1])
        now, later = (self._by_interval.get(at, set()) for at in (k, k + 1))
        missing = sorted(now & self._away, key=lambda i: (units[i].layers, -self._heat[i]))
        soon = sorted((i for i in self._away - now if i in later), key=lambda i: -self._heat[i])
        reserved = max(self.profiled.reserved[here])
        needed = reserved + self._sum(now)
        self.fits = self.fits and needed <= self.capacity
        held = needed + self._sum(self._resident - now)
        wanted = self._sum(soon)
        if held + wanted > self.capacity:
            held = self._evict(k, now, held, wanted)
        for i in (*missing, *soon):
            if i in now or held + units[i].bytes <= self.capacity:
                held += 0 if i in now else units[i].bytes
                self._move(units[i], first, self.home)
                self._away.discard(i)
                self._resident.add(i)
                self._since[i] = k
        self._resident |= now
        self._since.update(dict.fromkeys(now, k))
        for i in now:
            used = self._used[i]
            at = bisect_right(used, k)
            self._due[i] = used[at] if at < len(used) else NEVER

    def _sum(self, units: Iterable[int]) -> int:
        """Their bytes."""
        return sum(map(self._bytes.__getitem__, units))

    def _evict(self, k: int, now: set[int], held: int, wanted: int) -> int:
        """Free space for so many bytes more, but not of what the next interval uses; the bytes that are held then.

        What leaves does so at the end of the interval that used it last, so that its copy has the time until this one.
        """
        units = self.profiled.units
        coldest = [(-self._due[i], self._heat[i], i) for i in self._resident - now]
        heapify(coldest)  # often few of them leave
        while coldest:
            used, _, i = heappop(coldest)
            if held <= self.capacity and (held + wanted <= self.capacity or -used == k + 1):
                break
            idle = (self._since.get(i, -1) + 1) * self.interval
            self._move(units[i], self.profiled.layers[idle][0], self.slow)
            self._resident.discard(i)
            self._away.add(i)
            held -= units[i].bytes
        return held

    def waits(self) -> Iterator[Action]:
        """At the start of each interval the device waits for what was prefetched during the one before."""
        starts = [layer[0] for layer in self.profiled.layers[:: self.interval]]
        for action in self.actions:
            if isinstance(action, Move) and action.to == self.home and isinstance(action.before, int):
                later = bisect_right(starts, action.before)
                if later < len(starts):
                    yield Wait(action.tensor, before=starts[later])

    def _move(self, unit: Unit, before: int, to: str) -> None:
        moved = False
        for storage in unit.storages:
            value = storage.value_after(before - 1)
            if value is not None:
                self.actions.append(Move(value, to, before=before))
                self.tensor_bytes += storage.bytes
                moved = True
        self.page_bytes += unit.page_bytes if moved else 0


def lengths(layers: int) -> Sequence[int]:
    """The intervals that are tried: 1, 2, 4, … layers."""
    return [1 << i for i in range(max(layers, 1).bit_length())][:6]
