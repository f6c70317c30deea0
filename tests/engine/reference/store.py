"""Who holds what where: copies of tensors, the space that they take, locks, and the rows of the log."""

from __future__ import annotations

from collections import Counter

from sim.errors import OutOfMemory
from sim.hardware.platform import Platform
from sim.log import CAUSES, STALLS, WHYS
from sim.plan import Change, Online, Plan, Wait


class Store:
    """The state that everything else works on. Tiers go by name, tensors and ops by id."""

    def __init__(self, plan: Plan, platform: Platform) -> None:
        self.plan, self.trace, self.platform = plan, plan.trace, platform
        self.tensors, self.ops = tuple(self.trace.tensors), tuple(self.trace.ops)
        self.tiers = {tier.name: tier for tier in platform.tiers}
        self.producer = {t: op.id for op in self.ops for t in op.writes}
        self.overwritten_by = {x.replaces: x.id for x in self.tensors if x.replaces is not None}
        waits = [action for action in plan.actions if isinstance(action, Wait)]
        self.waited_for = {self.trace.tensor_id(action.tensor) for action in waits}
        self.online: Online = plan.online() if plan.online is not None else Online()
        self.now = 0
        self.held: dict[int, dict[str, int]] = {x.id: {} for x in self.tensors}  # complete copies, and their bytes
        self.used = dict.fromkeys(self.tiers, 0)
        self.locks: Counter[int] = Counter()
        self.made: set[int] = set()
        self.dead: list[int] = []  # kept although nobody reads them any more, oldest first
        self.last_used: dict[int, int] = {}
        self.first_runs = {op.id for op in self.ops}  # those to come: what they release is held till then
        self.runs_to_come: list[int] = [op.id for op in self.ops]  # and planned recomputations: whose reads are needed
        self.owed: dict[int, dict[str, str]] = {}  # why what waits for the last lock, or for a copy, goes then
        self.stirred: set[str] = set()  # tiers where a device that waits for space has reason to ask again
        self.news: Counter[int] = Counter()  # per tensor how often a copy came, or was given up
        self.started_in: dict[int, str] = {}
        self.changes: list[tuple[int, str, int, int, int, str]] = []
        self.intervals: list[tuple[int, int, int, str, str, int, int, str, int]] = []
        self.counters: Counter[str] = Counter()

    # ---- asking ------------------------------------------------------------------------------

    def free(self, tier: str) -> int:
        """Bytes not taken."""
        return self.tiers[tier].capacity - self.used[tier]

    def is_needed(self, tensor: int) -> bool:
        """Whether an op that has not ended, or a planned recomputation, reads it."""
        is_held = any(tensor in getattr(self.ops[op], "releases", ()) for op in self.first_runs)
        return is_held or any(tensor in self.ops[op].reads for op in self.runs_to_come)

    def may_be_freed(self, tensor: int) -> bool:
        """Never freed for want of readers: what has no producer, and outputs; but an overwritten value always."""
        if self.overwritten_by.get(tensor, -1) in self.made:
            return True
        return tensor in self.producer and tensor not in self.trace.outputs

    # ---- space and its rows ------------------------------------------------------------------

    def note(self, tier: str, delta: int, tensor: int, op: int, cause: str) -> None:
        """The use of a tier changes."""
        assert cause in CAUSES
        self.used[tier] += delta
        assert 0 <= self.used[tier] <= self.tiers[tier].capacity, (tier, self.used[tier], tensor, op, cause)
        self.changes.append((self.now, tier, delta, tensor, op, cause))

    def give_back(self, tier: str, bytes: int, tensor: int, op: int, cause: str) -> None:
        """Space is free again, and who waits for some may ask."""
        self.note(tier, -bytes, tensor, op, cause)
        self.stirred.add(tier)

    def row(
        self, start: int, end: int, device: int, lane: str, why: str, op: int, tensor: int, cause: str, bytes: int
    ) -> None:
        """One row of the log's intervals."""
        assert why in WHYS
        assert cause in STALLS
        self.intervals.append((start, end, device, lane, why, op, tensor, cause, bytes))

    # ---- copies ------------------------------------------------------------------------------

    def arrive(self, tensor: int, tier: str, bytes: int) -> None:
        """A copy is complete."""
        self.held[tensor][tier] = bytes
        self.made.add(tensor)
        self.news[tensor] += 1
        self.online.notice(Change("came", tensor, tier, self.now))

    def release(self, tensor: int, tier: str, op: int, cause: str) -> None:
        """A copy goes."""
        bytes = self.held[tensor].pop(tier)
        self.give_back(tier, bytes, tensor, op, cause)
        if tensor in self.dead:
            self.dead.remove(tensor)
        self.online.notice(Change("went", tensor, tier, self.now))

    def place(self) -> None:
        """What has no producer lies where the plan says, else by the engine that first reads it, or overwrites it."""
        from tests.engine.reference.durations import engine_of

        for x in self.tensors:
            if x.id in self.producer:
                continue
            over = [y.id for y in self.tensors if y.replaces == x.id]
            users = [op.id for op in self.ops if x.id in op.reads]
            users += [op.id for op in self.ops if set(over) & set(op.writes)]
            main = next(e for e in self.platform.engines if e.main and e.device == 0)
            tier = engine_of(self.trace, self.platform, users[0]).home if users else main.home
            if x.id in self.plan.place:
                where = self.plan.place[x.id]
                tier = where if isinstance(where, str) else where[0]
            if x.bytes > self.free(tier):
                raise self.too_little(tier, x.bytes, -1)
            self.note(tier, x.bytes, x.id, -1, "placed")
            self.started_in[x.id] = tier
            self.arrive(x.id, tier, x.bytes)

    def too_little(self, tier: str, bytes: int, op: int) -> OutOfMemory:
        """A request that cannot be met."""
        what = f"op {op} needs {bytes} B in {tier!r}, {self.free(tier)} B are free"
        return OutOfMemory(what, tier=tier, need_bytes=bytes, free_bytes=self.free(tier))
