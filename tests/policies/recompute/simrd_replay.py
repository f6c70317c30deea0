"""The prototype's simulator, told again from its public description and behaviour: a log in, evictions out.

It reads the log's lines by itself and knows storages, tensors on them, reference counts and locks. It shares
nothing with the importer, the trace, the policies or the engine.

Source: Kirisame et al., ICLR 2021, arXiv:2006.09616, and the authors' simulator simrd.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class Full(Exception):
    """Nothing is left to evict."""


@dataclass(eq=False)
class Store:
    """Memory with the tensors that lie in it. acts: the calls that make them, each once, for their time."""

    name: tuple[int, int]
    size: int
    tensors: list[Value] = field(default_factory=list)
    there: bool = False
    made: bool = False
    pinned: bool = False
    banished: bool = False
    locks: int = 0
    refs: int = 0
    access: float = -math.inf
    cost: int = 0
    group: Group | None = None
    lost: set[Value] = field(default_factory=set)  # what was read from here and is evicted, under banishing
    above: Reach | None = None
    below: Reach | None = None

    def price(self) -> None:
        self.cost = sum(call.time for call in dict.fromkeys(value.call for value in self.tensors))


@dataclass(eq=False)
class Value:
    """A tensor: one result of a call, in memory of its own or in that of an argument."""

    call: Call
    store: Store
    size: int
    parents: list[Value]
    here: bool = False
    refs: int = 1
    children: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """number: among the calls and the constants after the first of them, -1 for a constant before."""

    number: int
    time: int
    results: list[Value] = field(default_factory=list)

    @property
    def room(self) -> int:
        return sum(value.size for value in self.results)


class Group:
    """A class of evicted storages that touch, with the sum of their times."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.into: Group | None = None

    def root(self) -> Group:
        return self if self.into is None else self.into.root()


class Reach:
    """The absent storages reached one way from a storage over absent ones only, and the rim where it ends.

    It is searched when something comes, and only grows by what is evicted in between, as the authors keep it.
    """

    def __init__(self, base: Store, down: bool) -> None:
        self.base, self.down = base, down
        self.inside: set[Store] = set()
        self.rim: set[Store] = set()
        self.total = 0

    def search(self) -> None:
        self.inside, self.rim, self.total = set(), set(), 0
        open_ = [self.base]
        while open_:
            for value in open_.pop().tensors:
                for other in value.children if self.down else value.parents:
                    store = other.store
                    if store.there:
                        if store is not self.base:
                            self.rim.add(store)
                    elif store not in self.inside:
                        self.inside.add(store)
                        self.total += store.cost
                        open_.append(store)

    def swallow(self, store: Store, more: Reach) -> None:
        self.rim = (self.rim - {store}) | more.rim
        new = (more.inside | {store}) - self.inside
        self.total += sum(s.cost for s in new)
        self.inside |= new


@dataclass
class Replay:
    """One run of a log.

    deallocation: `eager`, `ignore`, `banish` as in the authors' runtimes V2 eager, V2 and V1. heuristic: `dtr`,
    `dtr_eq`, `local`, `lru`, `size`, `msps`; `dtr` counts staleness over the neighbourhood with `around`.
    hold: tiersim's rule that an op holds all it waits for, and its results that are there, and that the outputs
    hold each other when they are brought back at the end. fresh: tiersim's rule that an evicted neighbourhood is
    what a search finds now. The authors keep what a search found when something came (what a view joins later is not in
    it, nor what the view costs), and find in it what an op that never ran yet will make, and what is banished.
    once, again: time of first and of further runs. ran: (call that makes storages, whether again); evicted:
    storages in order, as (call, result). departs: how many evictions had been made when a run with the other
    `hold` or `fresh` might choose otherwise. closing: how many had been made, and `closed` how many calls
    had run, when the log ended and its outputs were asked for, -1 where it never did. full: memory ran out.
    """

    budget: float
    heuristic: str = "dtr"
    deallocation: str = "eager"
    around: bool = False
    hold: bool = False
    fresh: bool = False
    clock: int = 1
    used: int = 0
    peak: int = 0
    once: int = 0
    again: int = 0
    ran: list[tuple[int, bool]] = field(default_factory=list)
    evicted: list[tuple[int, int]] = field(default_factory=list)
    departs: float = math.inf
    closing: int = -1
    closed: int = -1
    full: bool = False
    pool: list[Store] = field(default_factory=list)
    held: list[Store] = field(default_factory=list)

    # ---- the log -----------------------------------------------------------------------------------

    def run(self, log: Iterable[dict[str, Any]]) -> Replay:
        """Go through a log to its end, or to where nothing is left to evict."""
        try:
            self._walk(list(log))
        except Full:
            self.full = True
        return self

    def _walk(self, rows: list[dict[str, Any]]) -> None:
        starts = [i for i, row in enumerate(rows) if row.get("ANNOTATION") == "START"]
        rows = rows[starts[0] + 1 :] if starts else rows
        meaning: dict[str, Value] = {}
        calls = 0
        at = 0
        while at < len(rows):
            row = rows[at]
            at += 1
            kind = row["INSTRUCTION"]
            if kind == "CONSTANT":
                value = self.call(Call(calls or -1, 0), [], [(int(rows[at]["MEMORY"]), -1)])[0]
                calls += calls > 0
                at += 1
                self.pin(value)
                meaning[row["NAME"]] = value
            elif kind == "CALL":
                made = []
                for _ in row["RESULT"]:
                    memory, alias = rows[at], int(rows[at + 1]["ALIAS"])
                    made.append((int(memory["MEMORY"]) if alias < 0 else 0, alias))
                    at += 2
                call = Call(calls, int(row["TIME"]))
                calls += 1
                values = self.call(call, [meaning[arg] for arg in row["ARGS"]], made)
                meaning.update(zip(row["RESULT"], values, strict=True))
            elif kind == "MUTATE":
                args = [meaning[arg] for arg in row["ARGS"]]
                made = [(args[place].store.size, -1) for place in row["MUTATE"]]
                values = self.call(Call(calls, int(row["TIME"])), args, made)
                calls += 1
                for value, place in zip(values, row["MUTATE"], strict=True):
                    old, meaning[row["ARGS"][place]] = meaning[row["ARGS"][place]], value
                    self.release(old)
            elif kind == "COPY":
                meaning[row["DST"]] = meaning[row["SRC"]]
                self.get(meaning[row["SRC"]])
            elif kind == "COPY_FROM":
                old, meaning[row["DST"]] = meaning[row["DST"]], meaning[row["SRC"]]
                self.release(old)
                self.get(meaning[row["SRC"]])
            elif kind == "RELEASE" and row["NAME"] in meaning:
                self.release(meaning[row["NAME"]])
        self.closing, self.closed = len(self.evicted), len(self.ran)
        kept = [value for value in meaning.values() if value.refs > 0]
        self.held = [value.store for value in kept]
        for value in kept:
            if not value.here:
                self.make(value, again=True)
            self.pin(value)

    def get(self, value: Value) -> None:
        value.refs += 1
        value.store.refs += 1

    def release(self, value: Value) -> None:
        store = value.store
        value.refs -= 1
        store.refs -= 1
        if store.refs:
            return
        if self.deallocation == "eager" and store.there and not store.pinned:
            self.evict(store)
        elif self.deallocation == "banish":
            self.banish(store)

    def pin(self, value: Value) -> None:
        if not value.store.pinned:
            self.lock(value.store)
            value.store.pinned = True

    # ---- running calls -----------------------------------------------------------------------------

    def call(self, call: Call, args: list[Value], made: list[tuple[int, int]]) -> list[Value]:
        for place, (size, alias) in enumerate(made):
            new = sum(a < 0 for _, a in made[:place])
            store = args[alias].store if alias >= 0 else Store((call.number, new), size)
            if alias < 0:
                store.above, store.below, store.group = Reach(store, False), Reach(store, True), Group(0)
            value = Value(call, store, size, list(args))
            store.tensors.append(value)
            store.refs += 1
            store.price()
            call.results.append(value)
        for arg in args:
            arg.children += call.results
            arg.store.lost.update(v for v in call.results if v.store is not arg.store)
        self.make(call.results[0], again=False)
        for value in call.results:
            value.store.access = self.clock
        return call.results

    def make(self, value: Value, again: bool) -> None:
        before = len(self.held)
        for parent in value.parents:
            if parent.store.refs > 0 or self.deallocation != "banish":
                parent.store.access = self.clock
        absent = [p for p in value.parents if not p.here]
        for parent in value.parents:
            if parent.here:
                self.lock(parent.store)
        self.held += [p.store for p in value.parents]
        for parent in absent:
            if not parent.here:
                self.make(parent, again=True)
            self.lock(parent.store)
        results = [v.store for v in value.call.results if v.store.there]
        self.held += results
        while self.used + value.call.room > self.budget:
            self.evict(self.choose())
        self._run(value, again)
        del self.held[before:]
        for parent in list(value.parents):
            self.unlock(parent.store)
            if self.deallocation == "banish":
                parent.store.lost -= {v for v in value.call.results if v.here}
                self.banish(parent.store)

    def _run(self, value: Value, again: bool) -> None:
        call = value.call
        self.clock += call.time
        self.used += call.room
        self.peak = max(self.peak, self.used)
        if again:
            self.again += call.time
        else:
            self.once += call.time
        if call.number >= 0:
            self.ran.append((call.number, again))
        ordered = [v for v in call.results if v is not value] + [value]
        came = [v.store for v in ordered if not v.store.there]
        for other in ordered:
            if other is not value and other.here:
                self.used -= other.size
            other.here = other.store.there = other.store.made = True
        for store in came:
            if store not in self.pool:
                self.pool.append(store)
            if store.group is not None:
                store.group.root().total -= store.cost
                store.group = None
        self._search_again(came)

    def _search_again(self, came: list[Store]) -> None:
        for store in came:
            if store.above is not None and store.below is not None:
                store.above.search()
                store.below.search()
        for store in came:
            if store.above is None or store.below is None:
                continue
            for other in store.above.rim:
                if other.below is not None:
                    other.below.search()
            for other in store.below.rim:
                if other.above is not None:
                    other.above.search()

    # ---- locks, eviction, banishing ----------------------------------------------------------------

    def lock(self, store: Store) -> None:
        assert store.there
        assert not store.banished
        store.locks += 1
        if store in self.pool:
            self.pool.remove(store)

    def unlock(self, store: Store) -> None:
        store.locks -= 1
        if not store.locks:
            self.pool.append(store)

    def _drop(self, store: Store) -> None:
        assert store.there
        store.there = False
        self.used -= store.size
        if store in self.pool:
            self.pool.remove(store)
        for value in store.tensors:
            value.here = False
            for parent in value.parents:
                if parent.store is not store:
                    parent.store.lost.add(value)
        self.evicted.append(store.name)

    def evict(self, store: Store) -> None:
        assert not store.locks
        self._drop(store)
        if self.deallocation == "banish":
            return  # the authors' banishing runtime keeps neither searches nor classes
        assert store.above is not None
        assert store.below is not None
        for other in store.above.rim:
            assert other.below is not None
            other.below.swallow(store, store.below)
        for other in store.below.rim:
            assert other.above is not None
            other.above.swallow(store, store.above)
        store.group = Group(store.cost)
        for other in self.around_of(store):
            assert other.group is not None
            one, two = other.group.root(), store.group.root()
            if one is not two:
                one.into = two
                two.total += one.total

    def banish(self, store: Store) -> None:
        if store.banished or store.refs > 0 or store.lost:
            return
        if store.there:
            store.locks = 0
            self._drop(store)
        for value in store.tensors:
            for parent in value.parents:
                if parent.store is not store:
                    parent.store.lost.discard(value)
                    parent.children.remove(value)
            for child in value.children:
                if child.store is not store:
                    child.parents.remove(value)
                    self.pin(child)
        store.banished = True

    # ---- heuristics --------------------------------------------------------------------------------

    def choose(self) -> Store:
        best: Store | None = None
        least = math.inf
        for store in self.pool:
            if self.hold and store in self.held:
                continue
            score = self.score(store)
            if score <= least:
                best, least = store, score
            if score == 0:
                break
        if best is None:
            raise Full
        if best in self.held:
            self._departs()
        return best

    def _departs(self) -> None:
        self.departs = min(self.departs, len(self.evicted))

    def around_of(self, store: Store) -> dict[Store, None]:
        """The absent storages next to one."""
        near = [other.store for value in store.tensors for other in (*value.parents, *value.children)]
        return {other: None for other in near if not other.there and other is not store}

    def score(self, store: Store) -> float:
        assert store.above is not None
        assert store.below is not None
        if self.heuristic == "lru":
            return store.access
        if self.heuristic == "size":
            return 1 / store.size if store.size else math.inf
        top, seen = store.cost, store.access
        if self.heuristic == "dtr_eq":
            groups = {id(g): g for g in (s.group.root() for s in self.around_of(store) if s.group is not None)}
            top += sum(group.total for group in groups.values())
        ways = {"dtr": (store.above, store.below), "msps": (store.above,)}.get(self.heuristic, ())
        found = [Reach(store, way.down) for way in ways]
        for way in found:
            way.search()
        if self.around:  # the authors search this one each time, and count what lies both ways once
            inside = list(set().union(*(way.inside for way in found)))
            total = sum(other.cost for other in inside)
        else:
            inside = [other for way in found for other in way.inside]
            total = sum(way.total for way in ways)
        phantoms = sum(other.cost for other in inside if not other.made or other.banished)
        fresh = sum(other.cost for other in inside) - phantoms
        if phantoms or fresh != total:
            self._departs()
        top += fresh if self.fresh else total
        if self.fresh:
            inside = [other for other in inside if other.made and not other.banished]
        if self.around:
            seen = max([seen, *(other.access for other in inside)])
        bottom = store.size * (1 if self.heuristic == "msps" else self.clock - seen)
        return top / bottom if bottom > 0 else math.inf
