"""The copies of a run on the copy path, their space, and releases.

The rules are those of the event path's `transfers`, `space`, `lifetimes` and `waits`. At most one copy of a tensor is
under way, so all that is known of it is in lists by tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sim.engine.copy_path.covered import Program
from sim.engine.copy_path.wires import NEVER, Elsewhere, Wires
from sim.engine.event_path.links import Routes
from sim.engine.event_path.record import COUNTERS, Columns
from sim.engine.event_path.refusals import Asked, no_space
from sim.engine.prepare import Prepared
from sim.engine.resolve import Act, Resolved
from sim.errors import IllegalPlan, OutOfMemory
from sim.hardware.platform import Platform
from sim.log import CAUSE, CHANGE_COLUMNS, INTERVAL_COLUMNS, STALL, WHY, Ints
from sim.plan import ChangeFields, Move

LEAVING = 1 << 62
"""Bit of `Copies.held` of a tensor whose copy under way will release its source."""
NONE, OUTSIDE, ADMITTED = range(3)
"""Stages of a copy: there is none, it waits for space, it has space and waits for its link or runs."""
PLACED, DROPPED, FREED = CAUSE["placed"], CAUSE["dropped"], CAUSE["freed"]
MOVED_IN, MOVED_OUT, CALLED_OFF = CAUSE["moved in"], CAUSE["moved out"], CAUSE["called off"]
OVERWRITTEN, MADE = CAUSE["overwritten"], CAUSE["made"]
RUN, MOVE, STALLED = WHY["run"], WHY["move"], WHY["stall"]


class Copies:
    """All that is known of a run but the op of the device.

    now: the present time, in ns.
    is_stale: whether something may be granted at the end of this instant.
    used, capacity: bytes per tier.
    leaving, arriving: per tier the bytes that copies under way will release, and those that they have taken.
    held: by tensor a bit per tier with a complete copy, and `LEAVING`.
    stage: by tensor that of the copy under way.
    pins: by tensor how many ops under way, or being restored, use it where it is.
    waiting: how many copies, and devices, wait for space.
    put_off: releases that wait for the end of an op or of a copy: tensor -> tier -> cause.
    dead: what nobody needs, retained only until memory is short, dead longest first.
    news: the changes that the online part has not been told of yet; none where it does not listen.
    intervals, changes: the rows of the log since it was last packed.
    counters: what else it counts.
    """

    def __init__(
        self,
        platform: Platform,
        prepared: Prepared,
        resolved: Resolved,
        program: Program,
        *,
        lazy: bool | frozenset[int],
        is_told: bool,
    ) -> None:
        """lazy: dead tensors, all or these, stay until memory is short.

        is_told: an online part listens.
        """
        tensors = len(prepared.size)
        self.now = 0
        self.is_stale = False
        self.used = [0] * len(platform.tiers)
        self.capacity = [tier.capacity for tier in platform.tiers]
        self.leaving = [0] * len(platform.tiers)
        self.arriving = [0] * len(platform.tiers)
        self.held = [0] * tensors
        self.stage = [NONE] * tensors
        self.pins = [0] * tensors
        self.waiting = 0
        self.put_off: dict[int, dict[int, int]] = {}
        self.dead: dict[int, None] = {}
        self.news: list[ChangeFields] = []
        self.is_told = is_told
        self._tables = Columns(len(INTERVAL_COLUMNS)), Columns(len(CHANGE_COLUMNS))
        self.intervals, self.changes = (table.rows for table in self._tables)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.wires = Wires(platform, prepared)
        self._platform, self._prepared = platform, prepared
        self._lane = prepared.main[0]
        self._first_link = len(platform.engines)  # lanes are engines, then links
        self._size = prepared.size
        self._last_use, self._freeable = program.last_use, prepared.freeable
        self._waited = resolved.waited
        self._producer = prepared.producer
        self._tiers = [tier.name for tier in platform.tiers]
        self._names = prepared.trace.tensor_columns.name
        self._lazy = lazy
        self._relieve: Callable[[int, int, int, str], bool] | None = None
        self._passed = 0  # how many runs of ops have ended
        self._overwritten: set[int] = set()
        self._routes = Routes(platform, prepared)
        self._ways: dict[tuple[int, int], tuple[int, int]] = {}
        # of the copy under way, by tensor; those without space stand in a queue per tier
        self._way = [(-1, -1)] * tensors  # its source, and its link
        self._target = [-1] * tensors
        self._op = [-1] * tensors
        self._priority = [0] * tensors
        self._delay = [0] * tensors
        self._keeps = [False] * tensors
        self._drops_target = [False] * tensors
        self._under_way = 0
        self._outside: list[deque[int]] = [deque() for _ in platform.tiers]
        self._wanted = -1  # the tier in which the device waits for space, and whether some has been released there
        self._offered = False

    # ---- moves -------------------------------------------------------------------------------

    def move(self, act: Act, op: int) -> None:
        """Begin, replace or turn round the copy of a tensor, as docs/model.md says."""
        _, tensor, target, move = act
        assert move is not None
        if self.put_off and tensor in self.put_off:
            self.put_off[tensor].pop(target, None)
        if self.stage[tensor] == ADMITTED and self.wires.began[tensor] >= 0:
            self._redirect(tensor, target, move.keep)
        else:
            if self.stage[tensor] != NONE:
                if target == self._way[tensor][0]:
                    self._count_cancelled(tensor)
                self._cancel(tensor)
            self._begin(tensor, target, move, op)
        if self.put_off and tensor in self.put_off and self.stage[tensor] == NONE:
            self._release_put_off(tensor, op)
            self.free_if_dead(tensor, op)

    def _begin(self, tensor: int, target: int, move: Move, op: int) -> None:
        held, bit = self.held[tensor], 1 << target
        if not held:
            self.counters["ignored_actions"] += 1
            return
        if held & bit:
            if held != bit and not move.keep:
                self._release(tensor, self._way_to(tensor, held & ~bit, target)[0], op, MOVED_OUT)
            return
        self._note(tensor, target, move.keep, op)
        self._priority[tensor], self._delay[tensor] = move.priority, move.delay
        if self._outside[target] or self.used[target] + self._size[tensor] > self.capacity[target]:
            self.stage[tensor] = OUTSIDE
            self._outside[target].append(tensor)
            self.waiting += 1
        else:
            self._admit(tensor, op)

    def _note(self, tensor: int, target: int, keep: bool, op: int) -> None:
        self._way[tensor] = self._way_to(tensor, self.held[tensor], target)
        self._target[tensor], self._op[tensor] = target, op
        self._priority[tensor] = self._delay[tensor] = 0
        self._keeps[tensor], self._drops_target[tensor] = keep, False
        self._under_way += 1

    def _way_to(self, tensor: int, held: int, target: int) -> tuple[int, int]:
        """The tier that a tensor is copied from, and the link. Raises Elsewhere where there is none, or several."""
        way = self._ways.get((held, target))
        if way is None:
            try:
                source, route = self._routes.source(tensor, held, target)
            except IllegalPlan as error:
                raise Elsewhere from error
            if len(route) != 1:
                raise Elsewhere
            way = self._ways[held, target] = source, route[0]
        return way

    def _admit(self, tensor: int, op: int) -> None:
        """There is space for a copy: it takes it, for an op, and queues for its link."""
        target, size = self._target[tensor], self._size[tensor]
        self.used[target] += size
        self.arriving[target] += size
        self.changes += (self.now, target, size, tensor, op, MOVED_IN)
        if not self._keeps[tensor]:
            self._begin_leaving(tensor)
        self.stage[tensor] = ADMITTED
        self.wires.submit(tensor, self._way[tensor][1], self._priority[tensor], self._delay[tensor])
        self.is_stale = True

    def _redirect(self, tensor: int, target: int, keep: bool) -> None:
        """A copy that runs is turned round, or changed."""
        if target == self._way[tensor][0]:
            self._keep_source(tensor)
            self._drops_target[tensor] = not keep
        elif target == self._target[tensor]:
            self._drops_target[tensor] = False
            if self._keeps[tensor] and not keep:
                self._keeps[tensor] = False
                self._begin_leaving(tensor)
        else:
            raise Elsewhere

    def _begin_leaving(self, tensor: int) -> None:
        """The copy under way will release its source."""
        self.held[tensor] |= LEAVING
        self.leaving[self._way[tensor][0]] += self._size[tensor]

    def _end_leaving(self, tensor: int) -> None:
        """It releases it now, or will not."""
        self.held[tensor] &= ~LEAVING
        self.leaving[self._way[tensor][0]] -= self._size[tensor]

    def _keep_source(self, tensor: int) -> None:
        if not self._keeps[tensor]:
            self._end_leaving(tensor)
            self._keeps[tensor] = True
            self._offer(self._way[tensor][0])

    def _count_cancelled(self, tensor: int) -> None:
        self.counters["moves_cancelled"] += 1
        self.counters["cancelled_bytes"] += self._size[tensor]
        self.counters["moves_without_space"] += self.stage[tensor] == OUTSIDE

    def _cancel(self, tensor: int) -> None:
        """Forget a copy that has not started."""
        target = self._target[tensor]
        if self.stage[tensor] == OUTSIDE:
            self._outside[target].remove(tensor)
            self.waiting -= 1
        else:
            self.wires.withdraw(tensor)
            if not self._keeps[tensor]:
                self._end_leaving(tensor)
                self._offer(self._way[tensor][0])
            self.arriving[target] -= self._size[tensor]
            self._give(tensor, target, self._op[tensor], CALLED_OFF)
        self.stage[tensor] = NONE
        self._under_way -= 1
        self.is_stale = True

    def _end(self, tensor: int) -> None:
        """A copy is complete."""
        now, op, target, held = self.now, self._op[tensor], self._target[tensor], self.held
        source, link = self._way[tensor]
        began, lane, size = self.wires.began[tensor], self._first_link + link, self._size[tensor]
        self.intervals += (began, now, 0, lane, MOVE, op, tensor, 0, size)
        self.stage[tensor] = NONE
        self._under_way -= 1
        self.arriving[target] -= size
        held[tensor] |= 1 << target
        if self.is_told:
            self.news.append(("came", tensor, self._tiers[target], now))
        if not self._keeps[tensor]:
            self._end_leaving(tensor)
            self._release(tensor, source, op, MOVED_OUT)
        if self._drops_target[tensor]:
            self._release(tensor, target, op, MOVED_OUT)
        if self.put_off and tensor in self.put_off and not self.pins[tensor]:
            self._release_put_off(tensor, op)
        if self._last_use[tensor] < self._passed:
            self.free_if_dead(tensor, -1)

    # ---- releases ----------------------------------------------------------------------------

    def drop(self, tensor: int, tier: int, op: int) -> None:
        """Release one copy, as the plan says. Where it keeps dead tensors, dropping one is what frees it."""
        if not self.held[tensor] >> tier & 1:
            self.counters["ignored_actions"] += 1
            return
        cause = FREED if tensor in self.dead else DROPPED
        if self.stage[tensor] or self.pins[tensor]:
            self._release(tensor, tier, op, cause)
        else:
            self._release_now(tensor, tier, op, cause)

    def _release(self, tensor: int, tier: int, op: int, cause: int) -> None:
        """Release one copy now, or when its last reader or the copy that is made of it has done with it."""
        is_busy = self.stage[tensor] != NONE and tier in (self._way[tensor][0], self._target[tensor])
        if is_busy or self.pins[tensor]:
            self.put_off.setdefault(tensor, {}).setdefault(tier, cause)
        else:
            self._release_now(tensor, tier, op, cause)

    def _release_now(self, tensor: int, tier: int, op: int, cause: int) -> None:
        size = self._size[tensor]
        self.held[tensor] &= ~(1 << tier)
        self.used[tier] -= size
        self.changes += (self.now, tier, -size, tensor, op, cause)
        if self.waiting:
            self._offer(tier)
        if self._lazy:
            self.dead.pop(tensor, None)
        if self.is_told:
            self.news.append(("went", tensor, self._tiers[tier], self.now))

    def _release_put_off(self, tensor: int, op: int) -> None:
        if self.stage[tensor] == NONE:
            for tier, cause in sorted(self.put_off.pop(tensor).items()):
                if self.held[tensor] >> tier & 1:
                    self._release_now(tensor, tier, op, cause)

    def free_touched(self, tensors: Sequence[int], op: int) -> None:
        """At the end of an op, of what it used: the releases put off for it, then what nobody needs any more."""
        for tensor in tensors:
            if not self.pins[tensor]:
                if tensor in self.put_off:
                    self._release_put_off(tensor, op)
                self.free_if_dead(tensor, op)

    def free_if_dead(self, tensor: int, op: int) -> None:
        """Free a tensor that nothing retains. A copy of it that has not begun never does."""
        if self._last_use[tensor] >= self._passed or not self.held[tensor] or self.pins[tensor]:
            return
        if not self._freeable[tensor] and tensor not in self._overwritten:
            return
        stage = self.stage[tensor]
        has_begun = stage == ADMITTED and self.wires.began[tensor] >= 0
        if stage != NONE and not has_begun and tensor not in self._waited:
            self._count_cancelled(tensor)
            self._cancel(tensor)
            if tensor in self.put_off:
                self._release_put_off(tensor, op)
        if self._lazy is True or (self._lazy and tensor in self._lazy):
            self.dead.setdefault(tensor)
        else:
            self._free(tensor, op)

    def _free(self, tensor: int, op: int) -> None:
        """Release every copy; while one is being copied, when that ends."""
        held = self.held[tensor] & ~LEAVING
        for tier in range(held.bit_length()):
            if held >> tier & 1:
                if self.stage[tensor] != NONE:
                    self.put_off.setdefault(tensor, {}).setdefault(tier, FREED)
                else:
                    self._release_now(tensor, tier, op, FREED)

    def free_longest_dead(self, tier: int) -> bool:
        """Free the tensor that has been dead longest in a tier; False if there is none."""
        for tensor in self.dead:
            if self.held[tensor] >> tier & 1 and not self.pins[tensor] and self.stage[tensor] == NONE:
                self._free(tensor, -1)
                return True
        return False

    def take_over(self, pairs: Iterable[tuple[int, int]], tier: int, op: int) -> None:
        """An op has written each new value over an old one, which it is to be in the place of."""
        now, bit = self.now, 1 << tier
        for old, new in pairs:
            size = self._size[old]
            self.changes += (now, tier, -size, old, op, OVERWRITTEN, now, tier, size, new, op, MADE)
            self.held[old] &= ~bit
            self.held[new] |= bit
            self._overwritten.add(old)
            self.dead.pop(old, None)
            if self.is_told:
                name = self._tiers[tier]
                self.news += [("went", old, name, now), ("came", new, name, now)]

    def _give(self, tensor: int, tier: int, op: int, cause: int) -> None:
        size = self._size[tensor]
        self.used[tier] -= size
        self.changes += (self.now, tier, -size, tensor, op, cause)
        if self.waiting:
            self._offer(tier)

    def _offer(self, tier: int) -> None:
        """Who waits for space asks again at the end of this instant."""
        self.is_stale = True
        if tier == self._wanted:
            self._offered = True

    def pin(self, tensors: Iterable[int]) -> None:
        """Keep these where they are."""
        for tensor in tensors:
            self.pins[tensor] += 1

    def unpin(self, tensors: Iterable[int]) -> None:
        """One reason fewer to keep these where they are."""
        for tensor in tensors:
            self.pins[tensor] -= 1

    # ---- time --------------------------------------------------------------------------------

    def run_beside(self, operands: Sequence[int], end: int) -> bool:
        """Let an op run to its end while others act; whether they do then, too."""
        if self.is_stale:
            self._settle()
        if self.wires.next_at < end:
            self.pin(operands)
            while self.wires.next_at < end:
                self._next_instant()
                self._settle()
            self.unpin(operands)
        self.now = end
        return self.wires.next_at == end

    def op_ended(self, is_due: bool, *, counted: bool = True) -> None:
        """The results of an op are there, and its reads have been.

        is_due: something else ends now, too. counted: it is one of the program's runs.
        """
        self._passed += counted
        if is_due:
            self._end_copies()

    def pass_run(self, start: int, end: int, op: int) -> None:
        """A run of an op of the program is over."""
        self.intervals += (start, end, 0, self._lane, RUN, op, -1, 0, 0)
        self.now = end

    def count(self, counter: str) -> None:
        """One more of what it counts."""
        self.counters[counter] += 1

    def keep_dead(self, tensor: int) -> None:
        """A tensor that nothing uses any more stays until memory is short."""
        self.dead[tensor] = None

    def ran(self, start: int, op: int, why: int) -> None:
        """A run of an op, until now."""
        self.intervals += (start, self.now, 0, self._lane, why, op, -1, 0, 0)

    def ask_again(self) -> None:
        """The device may have released space: who waits for some looks again at the end of this instant."""
        if self.waiting:
            self.is_stale = True

    def _next_instant(self) -> None:
        """Go on to where something happens next, and let that happen. Raises Elsewhere where nothing does."""
        if not self._goes_on():
            raise Elsewhere

    def _goes_on(self) -> bool:
        """Go on to where something happens next, and let that happen; False where nothing does."""
        if self.is_stale:
            self._settle()
        if self.wires.next_at == NEVER:
            return False
        self.now = self.wires.next_at
        self._end_copies()
        return True

    def _end_copies(self) -> None:
        self.is_stale = True
        for tensor in self.wires.ended():
            self._end(tensor)

    def _settle(self) -> None:
        """The end of an instant: copies without space get in, first come, first served, but where the device waits."""
        self.is_stale = False
        for tier, queue in enumerate(self._outside) if self.waiting else ():
            while queue and tier != self._wanted:
                tensor = queue[0]
                if self.used[tier] + self._size[tensor] > self.capacity[tier]:
                    break
                queue.popleft()
                self.waiting -= 1
                self._admit(tensor, self._op[tensor])
        self.is_stale = False
        if self.wires.is_stale:
            self.wires.settle(self.now)

    def target(self, tensor: int) -> int:
        """The tier that a copy of a tensor is on its way to, -1 for none."""
        return self._target[tensor] if self.stage[tensor] != NONE else -1

    # ---- the device waits --------------------------------------------------------------------

    def restore(self, reads: Sequence[int], tier: int, op: int) -> int:
        """Have what an op reads, which is pinned, in a tier: wait for what is on its way, keep what leaves, fetch what
        is elsewhere. The op that has to be recomputed first, -1 for none.

        Raises Elsewhere for what is on its way to another tier, or cannot be recomputed.
        """
        held, stage, bit = self.held, self.stage, 1 << tier
        for tensor in reads:
            if held[tensor] & bit:
                if held[tensor] & LEAVING and self._way[tensor][0] == tier:
                    self._keep_source(tensor)
            elif stage[tensor] == NONE:
                if held[tensor]:
                    self.wait_for_space(tier, self._size[tensor], op, self.reading(tensor))
                    self.counters["implicit_moves"] += 1
                    self._note(tensor, tier, True, op)
                    self._admit(tensor, op)
            elif self._target[tensor] != tier:
                raise Elsewhere
            elif stage[tensor] == OUTSIDE:
                self._demand(tensor, op)
        for tensor in reads:
            if not held[tensor] & bit:
                if stage[tensor] == NONE and not held[tensor]:
                    if self._producer[tensor] < 0:
                        raise Elsewhere
                    return self._producer[tensor]
                self._wait_for_end(tensor, "transfer", op)
                if not held[tensor] & bit:
                    raise Elsewhere
        return -1

    def reading(self, tensor: int) -> str:
        """The reason of a request for the space of a tensor that an op reads."""
        return f"reading {self._names[tensor]!r}"

    def wait_for_copy(self, tensor: int, op: int) -> None:
        """Until the copy of a tensor that is under way has ended, as the plan says."""
        if self.stage[tensor] == OUTSIDE:
            self._demand(tensor, op)
        self._wait_for_end(tensor, "wait", op)

    def wait_to_overwrite(self, pairs: Iterable[tuple[int, int]], reads: Sequence[int], tier: int, op: int) -> None:
        """Until no copy is made of what an op overwrites. Raises Elsewhere where its results would not fit there."""
        self.pin(reads)
        for old, _ in pairs:
            if self.stage[old] == OUTSIDE:
                raise Elsewhere
            self._wait_for_end(old, "hazard", op)
        self.unpin(reads)
        for old, new in pairs:
            if not self.held[old] >> tier & 1 or not self.is_absent(new):
                raise Elsewhere

    def is_absent(self, tensor: int) -> bool:
        """Whether there is no copy of a tensor, and none on its way."""
        return not self.held[tensor] and self.stage[tensor] == NONE

    def ask_with(self, relieve: Callable[[int, int, int, str], bool]) -> None:
        """What is asked to have something leave a tier, for so many bytes, an op and a reason; whether anything did."""
        self._relieve = relieve

    def wait_for_space(self, tier: int, bytes: int, op: int, reason: str) -> None:
        """Until a request fits: whoever can have something leave is asked, unless what leaves already will do.

        Otherwise it is looked at again whenever some space is released there. Raises OutOfMemory where none ever is.
        """
        while self.used[tier] + bytes > self.capacity[tier]:
            relieve = self._relieve
            if (
                relieve is not None
                and bytes > self.capacity[tier] - self.used[tier] + self.leaving[tier]
                and relieve(tier, bytes, op, reason)
            ):
                continue
            start, self._offered, self._wanted, self.is_stale = self.now, False, tier, True
            self.waiting += 1
            while not self._offered:
                if not self._goes_on():
                    raise self._refusal((tier, bytes, op, reason))
            self.waiting -= 1
            self._stalled(start, op, -1, "space")
        self._wanted = -1

    def _refusal(self, request: Asked) -> OutOfMemory:
        """The error of a request that the device waits for to the end."""
        tier, size = request[0], self._size
        held = [(size[tensor], tensor) for tensor, tiers in enumerate(self.held) if tiers >> tier & 1]
        free = self.capacity[tier] - self.used[tier]
        return no_space(self._platform, self._prepared, request, self.used, held, free)

    def _demand(self, tensor: int, op: int) -> None:
        """A copy without space that the device waits for gets some as an op would."""
        self.wait_for_space(self._target[tensor], self._size[tensor], op, self.reading(tensor))
        if self.stage[tensor] == OUTSIDE:
            self._outside[self._target[tensor]].remove(tensor)
            self.waiting -= 1
            self._admit(tensor, op)

    def _wait_for_end(self, tensor: int, cause: str, op: int) -> None:
        start = self.now
        while self.stage[tensor] != NONE:
            self._next_instant()
        if self.now > start:
            self._stalled(start, op, tensor, cause)

    def _stalled(self, start: int, op: int, tensor: int, cause: str) -> None:
        self.intervals += (start, self.now, 0, self._lane, STALLED, op, tensor, STALL[cause], 0)

    # ---- the log -----------------------------------------------------------------------------

    def pack(self) -> None:
        """Pack the rows, which have grown many."""
        for table in self._tables:
            table.pack()

    def tables(self) -> tuple[Ints, Ints]:
        """All intervals, and all changes, as the log has them."""
        intervals, changes = self._tables
        return intervals.array(), changes.array()

    # ---- the start and the end ---------------------------------------------------------------

    def place(self, tensors: Iterable[tuple[int, int]]) -> None:
        """Tensors, each in a tier, exist from the start. Raises Elsewhere where they do not fit."""
        size, used, held, changes = self._size, self.used, self.held, self.changes
        for tensor, tier in tensors:
            used[tier] += size[tensor]
            changes += (0, tier, size[tensor], tensor, -1, PLACED)
            held[tensor] = 1 << tier
            if self.is_told:
                self.news.append(("came", tensor, self._tiers[tier], 0))
        if any(bytes > most for bytes, most in zip(used, self.capacity, strict=True)):
            raise Elsewhere

    def drain(self, op: int) -> None:
        """Until all copies have ended; whenever one has, the device looks again."""
        while self._under_way:
            start, before = self.now, self._under_way
            while self._under_way == before:
                self._next_instant()
            self._stalled(start, op, -1, "drain")

    def release_spare(self, tensor: int, kept: int) -> None:
        """At the end of the run every copy goes but the one that the next iteration begins with."""
        for tier in range(len(self.used)) if kept < 0 or self.held[tensor] != 1 << kept else ():
            if tier != kept and self.held[tensor] >> tier & 1:
                self._release_now(tensor, tier, -1, FREED)
