"""The program of one device: its ops in order, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from sim.errors import IllegalPlan
from sim.plan import Action, Change, Drop, Move, Need, Recompute, Wait
from tests.engine.reference.computing import Computing, Work
from tests.engine.reference.copying import Copies, Copying
from tests.engine.reference.durations import dispatch_of, once_of, waits_for_the_device
from tests.engine.reference.store import Store
from tests.engine.reference.view import View


@dataclass(eq=False)
class Waiting:
    """Why a device stands still, and when it goes on. cause "": it runs an op, which is not a stall."""

    cause: str
    op: int
    tensor: int
    is_over: Callable[[], bool]


@dataclass(eq=False)
class Request:
    """A device that waits for space, and is told when to ask again."""

    tier: str
    bytes: int
    op: int
    is_woken: bool = False


Steps = Generator[Waiting, None, None]


class Device:
    """Walks the ops of one device."""

    def __init__(self, index: int, store: Store, copies: Copies, computing: Computing) -> None:
        self.index, self.store, self.copies, self.computing = index, store, copies, computing
        self.home = computing.main(index).home
        self.view = View(store, copies)
        self.request: Request | None = None
        self.alarm = -1  # when it is to look again
        self.dispatched = once_of(store.trace, store.platform)  # how far the CPU has come that launches

    # ---- the program -------------------------------------------------------------------------

    def walk(self) -> Steps:
        """All ops, in program order."""
        store = self.store
        for op in store.ops:
            if op.device != self.index:
                continue
            yield from self.act(self.planned("before", op.id), op.id)
            yield from self.act(list(store.online.before(op.id, self.view) or ()), op.id, is_online=True)
            yield from self.perform(op.id, "run", is_counted=True)

    def planned(self, side: str, op: int) -> list[Action]:
        """The plan's actions at an anchor, in its order."""
        trace, found = self.store.trace, []
        for action in self.store.plan.actions:
            at = getattr(action, side)
            if at is not None and trace.op_id(at) == op:
                found.append(action)
        return found

    def act(self, actions: Iterable[Action], op: int, *, is_online: bool = False) -> Steps:
        """Actions in order; a `Wait` and a `Recompute` hold the device."""
        for action in actions:
            if isinstance(action, Recompute):
                rerun = self.store.trace.op_id(action.op)
                results = self.store.ops[rerun].writes
                while results and not any(t in self.store.made for t in results):
                    under_way = self.computing.awaited().get(results[0])
                    if under_way is None:
                        raise IllegalPlan(f"Recompute of {rerun} before it has run")
                    yield self.news_of(results[0], under_way, rerun)
                yield from self.perform(rerun, "recompute", is_counted=not is_online)
            elif isinstance(action, Wait):
                yield from self.wait(self.store.trace.tensor_id(action.tensor), op)
            else:
                self.carry_out(action, op, is_online=is_online)

    def carry_out(self, action: Drop | Move, op: int, *, is_online: bool = False) -> None:
        """A drop or a move."""
        store, tensor = self.store, self.store.trace.tensor_id(action.tensor)
        if tensor not in store.made:
            raise IllegalPlan(f"{action}: not made yet")
        if is_online and store.locks[tensor]:
            raise IllegalPlan(f"{action}: locked")
        if isinstance(action, Move):
            self.copies.move(tensor, action, self.index, op)
            return
        tier = self.computing.main(store.ops[op].device).home if action.tier is None else action.tier
        if tier in store.held[tensor]:
            self.copies.let_go(tensor, tier, op, "freed" if tensor in store.dead else "dropped")
        else:
            store.counters["ignored_actions"] += 1

    def wait(self, tensor: int, op: int) -> Steps:
        """Until it has been made, if that is under way, and no transfer of it is."""
        while tensor not in self.store.made and (under_way := self.computing.awaited().get(tensor)):
            yield self.news_of(tensor, under_way, op)
        while tensor in self.copies.under_way:
            copy = self.copies.under_way[tensor]
            if not copy.has_space:
                yield from self.demand(copy, op)
            else:
                yield self.until_over(copy, "wait", op)

    def until_over(self, copy: Copying, cause: str, op: int) -> Waiting:
        """Until a copy has ended or is given up."""
        under_way = self.copies.under_way
        return Waiting(cause, op, copy.tensor, lambda: under_way.get(copy.tensor) is not copy)

    # ---- one op ------------------------------------------------------------------------------

    def perform(self, op: int, why: str, *, is_counted: bool) -> Steps:
        """Restore what it reads, recomputing what is nowhere; take space; run."""
        store = self.store
        if waits_for_the_device(store.trace, store.platform, op):
            self.dispatched = max(self.dispatched, store.now)
        self.dispatched += dispatch_of(store.trace, store.platform, op)
        if self.dispatched > store.now:
            then = self.dispatched
            self.alarm = then
            yield Waiting("launch", op, -1, lambda: store.now >= then)
        work = Work(op, self.index, why, is_counted)
        for t in dict.fromkeys(store.ops[op].reads):
            store.locks[t] += 1
            store.last_used[t] = store.now
            store.online.notice(Change("read", t, self.home, store.now))
        while True:
            missing: list[int] = []
            yield from self.restore(op, missing)
            if not missing:
                break
            producer = self.producer(missing[0])
            store.counters["implicit_recomputes"] += 1
            yield from self.perform(producer, "recompute", is_counted=False)
        yield from self.no_hazard(op)
        for t in store.ops[op].writes:
            store.locks[t] += 1
        yield from self.take_space(work)
        if store.ops[op].group:
            self.computing.join(work)
        elif self.computing.engine(op).name != self.computing.main(self.index).name:
            self.computing.hand_over(work)
        else:
            yield from self.run_here(work)

    def restore(self, op: int, missing: list[int]) -> Steps:
        """Have every read within reach of the op's engine; what only recomputation brings back is put in `missing`."""
        store, copies = self.store, self.copies
        reach, home = self.computing.reach(op), self.computing.engine(op).home
        reads = list(dict.fromkeys(store.ops[op].reads))
        for t in reads:
            yield from self.fetch(t, reach, home, op)
        for t in reads:
            while not any(tier in reach for tier in store.held[t]):
                if t in copies.under_way:
                    yield self.news_of(t, "transfer", op)
                elif t in self.computing.awaited() or (t, home) in copies.making:
                    yield self.news_of(t, self.computing.awaited().get(t, "peer"), op)
                elif not store.held[t]:
                    if t in store.made:
                        missing.append(t)
                        return
                    yield self.news_of(t, "peer", op)
                    continue
                yield from self.fetch(t, reach, home, op)

    def news_of(self, tensor: int, cause: str, op: int) -> Waiting:
        """Until a copy of it comes, or is given up."""
        news, seen = self.store.news, self.store.news[tensor]
        return Waiting(cause, op, tensor, lambda: news[tensor] != seen)

    def fetch(self, tensor: int, reach: Sequence[str], home: str, op: int) -> Steps:
        """If it lies only out of reach, start what brings it, without waiting for that."""
        store, copies = self.store, self.copies
        held, copy = store.held[tensor], copies.under_way.get(tensor)
        readable = [tier for tier in reach if tier in held]
        if tensor in copies.overwriting and (readable or list(held)) == [copies.overwriting[tensor]]:
            raise IllegalPlan(f"op {op}: tensor {tensor} is being overwritten")
        if readable:
            if copy is not None and copy.is_leaving and copy.source == readable[0]:
                copies.keep_source(copy)  # it is wanted back
            return
        if copy is not None and copy.has_space:
            return
        if not held or (tensor, home) in copies.making:
            return
        if copy is not None and copy.target in reach:
            yield from self.demand(copy, op)
            return
        yield from self.room(home, store.tensors[tensor].bytes, op, "reading")
        copy = copies.under_way.get(tensor)
        if copy is not None and not copy.has_space:
            copies.call_back(copy)
            copy = None
        if copy is None and not any(tier in reach for tier in store.held[tensor]):
            copies.fetch(tensor, home, self.index, op)

    def producer(self, tensor: int) -> int:
        """The op that brings a tensor back, if one can."""
        store = self.store
        if tensor not in store.producer:
            raise IllegalPlan(f"tensor {tensor} has no producer")
        producer = store.producer[tensor]
        if store.ops[producer].group:
            raise IllegalPlan(f"op {producer} cannot be recomputed alone")
        return producer

    def no_hazard(self, op: int) -> Steps:
        """Nobody copies or reads what the op overwrites."""
        store, copies = self.store, self.copies
        olds = [store.tensors[t].replaces for t in store.ops[op].writes]

        def others_hold(old: int) -> bool:
            return store.locks[old] > (old in store.ops[op].reads)

        while True:
            for old in olds:
                if old is None:
                    continue
                if old in copies.under_way:
                    copy = copies.under_way[old]
                    if copy.has_space:
                        yield self.until_over(copy, "hazard", op)
                    else:
                        yield from self.demand(copy, op)
                    break
                if others_hold(old):
                    yield Waiting("hazard", op, old, lambda old=old: not others_hold(old))  # type: ignore[misc]
                    break
            else:
                return

    def take_space(self, work: Work) -> Steps:
        """For results and workspace; an update in place takes over the storage of the old value."""
        store, copies, op = self.store, self.copies, self.store.ops[work.op]
        reach, home = self.computing.reach(work.op), self.computing.engine(work.op).home
        wants: dict[str, list[tuple[int, int]]] = {}
        for t in op.writes:
            x = store.tensors[t]
            there = [tier for tier in reach if x.replaces is not None and tier in store.held[x.replaces]]
            if there and x.replaces is not None and store.held[x.replaces][there[0]] == x.bytes:
                work.over.append((x.replaces, t, there[0]))
                copies.overwriting[x.replaces] = there[0]
                continue
            where = store.plan.place.get(t, home)
            tier = where if isinstance(where, str) else where[0]
            if tier not in reach:
                raise IllegalPlan(f"op {work.op}: its engine can't write in {tier!r}")
            if tier in store.held[t] or self.computing.is_coming(t, tier):
                wants.setdefault(tier, []).append((-1, x.bytes))  # not held twice: scratch space
            else:
                wants.setdefault(tier, []).append((t, x.bytes))
                work.fresh.append((t, tier))
        if op.workspace:
            wants.setdefault(home, []).append((-1, op.workspace))
        for tier, parts in wants.items():
            yield from self.room(tier, sum(bytes for _, bytes in parts), work.op, "its results")
            for t, bytes in parts:
                tensor = t
                if tensor >= 0 and work.why == "recompute" and self.came_meanwhile(tensor, tier, work.op):
                    work.fresh.remove((tensor, tier))
                    tensor = -1
                store.note(tier, bytes, tensor, work.op, "made" if tensor >= 0 else "workspace")
                if tensor < 0:
                    work.scratch.append((tier, bytes))
                elif work.why == "recompute":
                    copies.making.add((tensor, tier))
        for _, new, tier in work.over:
            if work.why == "recompute" and not self.came_meanwhile(new, tier, work.op):
                copies.making.add((new, tier))

    def came_meanwhile(self, tensor: int, tier: str, op: int) -> bool:
        """Whether a result is there or on its way; a move that has no space yet has nothing left to copy."""
        copy = self.copies.under_way.get(tensor)
        if copy is not None and copy.target == tier and not copy.has_space:
            self.copies.cancel(copy)
            if not copy.keep:
                self.copies.let_go(tensor, copy.source, op, "moved out")
            return False
        return tier in self.store.held[tensor] or self.computing.is_coming(tensor, tier)

    def run_here(self, work: Work) -> Steps:
        """On the device's own engine, after what other devices recompute there."""
        computing = self.computing
        engine = computing.main(self.index).name
        while engine in computing.running or computing.queue[engine]:
            yield Waiting(
                "engine", work.op, -1, lambda: engine not in computing.running and not computing.queue[engine]
            )
        computing.start(work)
        yield Waiting("", work.op, -1, lambda: work.has_ended)
        if work.why == "run" and self.holds(work.op):
            held = False
            for waiting in self.act(self.planned("after", work.op), work.op):
                held = True
                yield waiting
            if held:
                computing.tidy(work)
            else:
                computing.frees.append(work)
                yield Waiting("", work.op, -1, lambda: work.is_tidied)

    def holds(self, op: int) -> bool:
        """Whether the actions after an op may take the device's time."""
        return any(isinstance(action, Wait | Recompute) for action in self.planned("after", op))

    # ---- space -------------------------------------------------------------------------------

    def room(self, tier: str, bytes: int, op: int, reason: str) -> Steps:
        """Until a request fits and no device came before."""
        store, queue = self.store, self.copies.requests[tier]
        request: Request | None = None
        place = 0
        while True:
            if bytes <= store.free(tier) and (request is not None or not queue):
                if queue:
                    store.stirred.add(tier)
                return
            if bytes > store.free(tier) + self.copies.leaving(tier):
                if store.plan.online is not None:
                    if self.ask(tier, bytes, op, reason):
                        continue
                elif store.plan.keep_dead and self.copies.free_the_dead(tier):
                    continue
            if request is None:
                request = Request(tier, bytes, op)
                place = len(queue)
            queue.insert(place, request)  # it keeps its place when it asks in vain
            if queue[0] is request:
                store.stirred.discard(tier)  # it asks again when something changes after it has asked
            request.is_woken = False
            self.request = request
            yield self.until_woken(request)
            self.request = None
            place = queue.index(request)
            queue.remove(request)

    def until_woken(self, request: Request) -> Waiting:
        """Until the request is told to ask again."""
        return Waiting("space", request.op, -1, lambda: request.is_woken)

    def ask(self, tier: str, bytes: int, op: int, reason: str) -> bool:
        """Ask the online part to release bytes; whether it released any."""
        store = self.store
        leaving, rows = self.copies.leaving(tier), len(store.changes)
        need = Need(tier, bytes, max(1, bytes - store.free(tier) - leaving), op, reason)
        store.counters["pressure_calls"] += 1
        for action in list(store.online.on_pressure(need, self.view) or ()):
            if not isinstance(action, Drop | Move):
                raise IllegalPlan(f"{action} under pressure")
            self.carry_out(action, op, is_online=True)
        return (leaving, rows) != (self.copies.leaving(tier), len(store.changes))

    def demand(self, copy: Copying, op: int) -> Steps:
        """A move that a device waits for gets space as an op would."""
        yield from self.room(copy.target, copy.size, op, "reading")
        if self.copies.under_way.get(copy.tensor) is copy and not copy.has_space:
            self.copies.admit(copy, op)

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> Steps:
        """Outputs that are missing are restored, all comes to rest, what is carried goes home."""
        store = self.store
        mine = [op.id for op in store.ops if op.device == self.index]
        last = mine[-1] if mine else 0
        yield from self.drain(last)
        for t in store.trace.outputs:
            store.locks[t] += 1
        for t in store.trace.outputs:
            while not store.held[t] and t in store.made:
                yield from self.perform(self.producer(t), "recompute", is_counted=False)
                store.counters["implicit_recomputes"] += 1
                yield from self.drain(last)
        fast = {engine.home for engine in store.platform.engines if engine.main}
        for is_fast in (False, True):  # a tensor that returns home to a device may need the space of one that leaves it
            for t, first in store.trace.carry:
                home = store.started_in.get(first)
                if home is not None and (home in fast) == is_fast and home not in store.held[t]:
                    store.counters["returned_moves"] += 1
                    yield from self.fetch(t, (home,), home, last)
            yield from self.drain(last)
            for t, first in store.trace.carry:
                home = store.started_in.get(first)
                for tier in [name for name in store.tiers if name in store.held[t]]:
                    if (home is None or home in fast) == is_fast and tier != home:
                        store.release(t, tier, -1, "freed")

    def drain(self, op: int) -> Steps:
        """Until nothing is under way: ops on other engines first, then groups, then copies."""
        computing = self.computing
        while True:
            if computing.has_ops():
                yield Waiting("engine", op, -1, lambda: not computing.has_ops())
            elif computing.has_groups():
                yield Waiting("peer", op, -1, lambda: not computing.has_groups())
            elif self.copies.under_way:
                yield Waiting("drain", op, -1, lambda: not self.copies.under_way)
            else:
                return
