"""Ops under way: on engines, one at a time each, and in groups that several devices share."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from sim.errors import IllegalPlan
from sim.hardware.platform import Engine
from tests.engine.reference.copying import Copies, Job
from tests.engine.reference.durations import away_ns, engine_of, exchange_ns, parts_of, ring_of, route_of
from tests.engine.reference.store import Store

CHUNK = 4 * 2**20


@dataclass(eq=False)
class Work:
    """One run of an op. fresh: results in new space; over: (old, new, tier) in place; scratch: (tier, bytes)."""

    op: int
    device: int
    why: str
    is_counted: bool
    fresh: list[tuple[int, str]] = field(default_factory=list)
    over: list[tuple[int, int, str]] = field(default_factory=list)
    scratch: list[tuple[str, int]] = field(default_factory=list)
    asked_at: int = 0
    number: int = 0
    start: int = -1
    flows_from: int = 0
    left: Fraction = Fraction(0)
    rate: Fraction = Fraction(0)
    has_ended: bool = False
    is_tidied: bool = False


class Computing:
    """The engines and what they run, and groups on their way."""

    def __init__(self, store: Store, copies: Copies) -> None:
        self.store, self.copies = store, copies
        self.running: dict[str, Work] = {}  # by engine
        self.queue: dict[str, list[Work]] = {engine.name: [] for engine in store.platform.engines}
        self.meetings: dict[tuple[str, int], list[Work]] = {}
        self.groups: list[tuple[Job, list[Work], int]] = []
        self.met_here: list[list[Work]] = []  # groups whose members share a tier: nothing is to be moved
        self.runs: dict[int, int] = {}
        self.anchors: list[Work] = []  # ended, with their actions to come
        self.frees: list[Work] = []  # ended, with their releases to come
        self.number = 0

    def engine(self, op: int) -> Engine:
        """Where an op runs."""
        return engine_of(self.store.trace, self.store.platform, op)

    def reach(self, op: int) -> list[str]:
        """The tiers that its engine reads and writes in place, home first."""
        engine = self.engine(op)
        return list(dict.fromkeys((engine.home, *engine.reaches)))

    def main(self, device: int) -> Engine:
        """A device's main engine."""
        return next(e for e in self.store.platform.engines if e.main and e.device == device)

    def is_guest(self, work: Work) -> bool:
        """Whether it runs on the main engine of another device."""
        engine = self.engine(work.op)
        return engine.main and engine.device != work.device

    def awaited(self) -> dict[int, str]:
        """Results under way elsewhere, and what one who reads them waits for."""
        found = {}
        for name, queue in self.queue.items():
            here = [self.running[name]] if name in self.running else []
            for work in (*queue, *here):
                if self.engine(work.op).name != self.main(work.device).name:
                    found.update(dict.fromkeys(self.results(work), "engine"))
        groups = [members for _, members, _ in self.groups] + self.met_here + list(self.meetings.values())
        for work in (work for members in groups for work in members):
            found.update(dict.fromkeys(self.results(work), "peer"))
        return found

    def results(self, work: Work) -> list[int]:
        """Tensors that a run makes new."""
        return [t for t, _ in work.fresh] + [new for _, new, _ in work.over]

    def has_ops(self) -> bool:
        """Whether ops are under way that devices handed to other engines."""
        beside = [w for w in self.running.values() if self.engine(w.op).name != self.main(w.device).name]
        return bool(beside) or any(self.queue.values())

    def has_groups(self) -> bool:
        """Whether groups are under way, or wait for members."""
        return bool(self.groups or self.met_here or self.meetings)

    # ---- engines -----------------------------------------------------------------------------

    def hand_over(self, work: Work) -> None:
        """To an engine beside the device's main one."""
        work.asked_at, work.number = self.store.now, self.number
        self.number += 1
        self.queue[self.engine(work.op).name].append(work)

    def start(self, work: Work) -> None:
        """On its engine, which is free."""
        store, op = self.store, work.op
        engine, home = self.engine(op), self.engine(op).home
        self.running[engine.name] = work
        away: dict[str, int] = {}
        written: dict[str, int] = {}
        for t in dict.fromkeys(store.ops[op].reads):
            if home not in store.held[t]:
                tier = next(name for name in self.reach(op) if name in store.held[t])
                away[tier] = away.get(tier, 0) + store.tensors[t].bytes
        for t, tier in (*work.fresh, *((old, tier) for old, _, tier in work.over)):
            if tier != home:
                written[tier] = written.get(tier, 0) + store.tensors[t].bytes
        fixed, bytes, rate = parts_of(store.trace, store.platform, op)
        fixed += away_ns(store.platform, engine, store.ops[op].kind, away, written)
        if not any(member.name == engine.name for pool in store.platform.pools for member in pool.members):
            fixed, bytes = fixed + -int(-bytes * 10**9 // rate), 0
        work.start = store.now
        work.flows_from, work.left = store.now + fixed, Fraction(bytes)

    def start_next(self, engine: Engine) -> bool:
        """Lowest priority value first, then first come."""
        queue = self.queue[engine.name]
        if engine.name in self.running or not queue:
            return False
        work = min(queue, key=lambda w: (self.store.ops[w.op].priority, w.asked_at, w.device, w.number))
        queue.remove(work)
        self.start(work)
        return True

    # ---- ends --------------------------------------------------------------------------------

    def deliver(self, work: Work) -> None:
        """The results are there; nothing is held any more."""
        store, op = self.store, self.store.ops[work.op]
        for tier, bytes in work.scratch:
            store.give_back(tier, bytes, -1, work.op, "workspace")
        for old, new, tier in work.over:
            bytes = store.held[old].pop(tier)
            del self.copies.overwriting[old]
            store.note(tier, -bytes, old, work.op, "overwritten")
            self._went(old, tier)
            if tier in store.held[new] or self.is_coming(new, tier):
                store.stirred.add(tier)
            else:
                store.note(tier, bytes, new, work.op, "made")
                self.copies.making.discard((new, tier))
                store.arrive(new, tier, bytes)
        for t, tier in work.fresh:
            self.copies.making.discard((t, tier))
            store.arrive(t, tier, store.tensors[t].bytes)
        if work.is_counted:
            store.runs_to_come.remove(work.op)
        for t in (*dict.fromkeys(op.reads), *op.writes):
            store.locks[t] -= 1
        work.has_ended = True
        if work.why == "run":
            store.first_runs.remove(work.op)
            self.anchors.append(work)
        self.frees.append(work)

    def is_coming(self, tensor: int, tier: str) -> bool:
        """Whether a copy is on its way there and has its space."""
        copy = self.copies.under_way.get(tensor)
        return copy is not None and copy.has_space and copy.target == tier

    def _went(self, tensor: int, tier: str) -> None:
        from sim.plan import Change

        if tensor in self.store.dead:
            self.store.dead.remove(tensor)
        self.store.online.notice(Change("went", tensor, tier, self.store.now))

    def end_on_engine(self, name: str) -> None:
        """An op's time is over."""
        work = self.running.pop(name)
        is_codec = work.why == "run" and self.store.ops[work.op].kind == "codec"
        why = "codec" if is_codec else work.why
        self.store.row(work.start, self.store.now, work.device, name, why, work.op, -1, "", 0)
        self.deliver(work)

    def tidy(self, work: Work) -> None:
        """Releases that waited for the last lock, then what has no reader to come."""
        op = self.store.ops[work.op]
        released = getattr(op, "releases", ()) if work.why == "run" else ()
        for t in (*dict.fromkeys(op.reads), *op.writes, *(old for old, _, _ in work.over), *released):
            if not self.store.locks[t]:
                self.copies.pay(t, work.op)
                self.copies.free_if_dead(t, work.op)
        work.is_tidied = True

    # ---- groups ------------------------------------------------------------------------------

    def members_of(self, name: str) -> list[int]:
        """The ops of a group."""
        return [op.id for op in self.store.ops if op.group == name]

    def join(self, work: Work) -> None:
        """A member has its inputs and its space; the last one to come sets the group off."""
        name = self.store.ops[work.op].group
        turn = self.runs[work.op] = self.runs.get(work.op, 0) + 1
        here = self.meetings.setdefault((name, turn), [])
        here.append(work)
        if len(here) == len(self.members_of(name)):
            del self.meetings[name, turn]
            self._set_off(sorted(here, key=lambda w: w.op))

    def _set_off(self, members: list[Work]) -> None:
        store, platform = self.store, self.store.platform
        ops = [store.ops[w.op] for w in members]
        if any(op.kind == "send" for op in ops):
            sender = next(w for w in members if store.ops[w.op].kind == "send")
            receiver = next(w for w in members if w is not sender)
            stated = [op.bytes for op in ops if op.bytes is not None]
            bytes = stated[0] if stated else sum(store.tensors[t].bytes for t in store.ops[receiver.op].writes)
            ends = self._where_from(sender), self._where_to(receiver)
            links, chunk, fixed = route_of(platform, *ends), 0, None
            reachable = bool(links) or ends[0] == ends[1]
        else:
            operands = [sum(store.tensors[t].bytes for t in (*op.reads, *op.writes)) for op in ops]
            bytes = max(size if op.bytes is None else op.bytes for op, size in zip(ops, operands))
            homes = [self.main(w.device).home for w in members]
            links, chunk, fixed = ring_of(platform, homes), CHUNK, exchange_ns(platform, homes, ops[0].ring)
            reachable = all(a == b or route_of(platform, a, b) for a, b in zip(homes, homes[1:] + homes[:1]))
        if not reachable:
            raise IllegalPlan(f"group {ops[0].group!r}: no route between its members")
        if not links:
            self.met_here.append(members)
            return
        priority = min(op.priority for op in ops)
        job = Job(links, bytes, priority, store.now, members[0].device, self.copies.number, members, chunk, fixed)
        self.copies.number += 1
        self.copies.jobs.append(job)
        self.groups.append((job, members, bytes))

    def _where_from(self, work: Work) -> str:
        reads = self.store.ops[work.op].reads
        found = [tier for t in reads for tier in self.reach(work.op) if tier in self.store.held[t]]
        return found[0] if found else self.engine(work.op).home

    def _where_to(self, work: Work) -> str:
        return work.fresh[0][1] if work.fresh else self.engine(work.op).home

    def end_group(self, members: list[Work], job: Job | None, bytes: int) -> None:
        """All members end together."""
        store = self.store
        if job is not None:
            self.groups.remove((job, members, bytes))
            self.copies.jobs.remove(job)
            for i in job.links:
                name = store.platform.links[i].name
                store.row(job.began, store.now, members[0].device, name, "move", members[-1].op, -1, "", bytes)
        else:
            self.met_here.remove(members)
        for work in members:
            self.deliver(work)
