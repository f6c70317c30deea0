"""The vocabulary between policies and the engine: what a policy is asked, and what it may answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from sim.hardware.platform import Platform
from sim.limits import counted
from sim.log import EventLog, Ints
from sim.trace.graph import Trace
from sim.trace.pickled import Pickled

# ---- actions -----------------------------------------------------------------------------------
# Tensors, ops and tiers are given by id or by name. In an offline plan each action is anchored `before` or
# `after` one op; in an online answer it has no anchor.


@dataclass(frozen=True, slots=True)
class Drop(Pickled):
    """Release the copy of a tensor in a tier. If it was the last copy, only recomputation brings the tensor back.

    tensor: which one.
    tier: where its copy is released, by default in the device's home tier.
    before, after: the op that anchors the action.
    """

    tensor: int | str
    tier: str | None = None
    before: int | str | None = None
    after: int | str | None = None


@dataclass(frozen=True, slots=True)
class Recompute(Pickled):
    """Run an op again that has already run. Outputs that are still resident are not held twice beyond its end.

    The device waits for the first run if another engine is still executing it. An op that writes in place does so on
    every run: a value that it overwrites is recomputed first if it has been released, and is lost again when the op
    ends.

    op: which one.
    before, after: the op that anchors the action.
    """

    op: int | str
    before: int | str | None = None
    after: int | str | None = None


@dataclass(frozen=True, slots=True)
class Move(Pickled):
    """Copy a tensor to another tier, concurrently with computation, then release the source.

    If the destination already has a copy, nothing is copied. The source is the tier with the shortest route among
    those that hold a copy.

    tensor: which one.
    to: the destination tier.
    keep: do not release the source.
    priority: the lowest value is copied first where transfers queue.
    wire: bytes on the link and at the destination if the link compresses, else None.
    codec: bytes/s, counted before compression, that the codec beside the copy engines takes in this copy, whether it
        compresses or restores what was compressed; None for that of the link, or of the copy that compressed it.
        Where neither says one the link alone sets the pace.
    delay: ns that its software takes before the bytes flow, such as for page faults; the links are taken meanwhile.
    before, after: the op that anchors the action.
    """

    tensor: int | str
    to: str
    keep: bool = False
    priority: int = 0
    wire: int | None = None
    before: int | str | None = None
    after: int | str | None = None
    codec: int | None = None
    delay: int = 0


@dataclass(frozen=True, slots=True)
class Wait(Pickled):
    """Hold the device until the op that first makes a tensor, and its transfer, have ended, if they are under way.

    tensor: which one.
    before, after: the op that anchors the action.
    """

    tensor: int | str
    before: int | str | None = None
    after: int | str | None = None


Action = Drop | Recompute | Move | Wait


# ---- what an online plan sees ------------------------------------------------------------------


class Need(NamedTuple):
    """A request for memory that does not fit.

    tier: where the space is needed.
    bytes: the size of the request.
    short: the deficit in bytes after all tensors that are leaving have left, at least 1.
    op: the op that needs the space, by id.
    reason: what the space is for.
    """

    tier: str
    bytes: int
    short: int
    op: int
    reason: str


class Change(NamedTuple):
    """A change of a tensor's residency, or a read of it.

    what: `came` (it arrived in the tier or was produced there), `went` (it left the tier or was released), or `read`
        (by the op that the device has just reached).
    tensor: its id.
    tier: name of the tier.
    now: time in ns.
    """

    what: str
    tensor: int
    tier: str
    now: int


ChangeFields = tuple[str, int, str, int]
"""The fields of a `Change`, in order."""


class Memory(Protocol):
    """The state of a run, read-only. Times in ns, sizes in bytes, tiers by name, tensors by id."""

    @property
    def now(self) -> int:
        """The current time."""

    def free(self, tier: str) -> int:
        """Free bytes."""

    def leaving(self, tier: str) -> int:
        """Bytes that copies in flight will release."""

    def arriving(self, tier: str) -> int:
        """Bytes reserved for copies that have not arrived yet."""

    def largest_hole(self, tier: str) -> int:
        """Bytes of the largest free block; all free bytes where the tier has no addresses."""

    def where(self, tensor: int) -> tuple[str, ...]:
        """The tiers that hold a complete copy."""

    def in_flight(self, tensor: int) -> str | None:
        """The tier that a copy of it is in flight to, None for none."""

    def is_locked(self, tensor: int) -> bool:
        """Whether it is pinned: a running op, or one whose inputs are being restored, needs it where it is."""

    def last_read(self, tensor: int) -> int:
        """When an op that reads it was last reached, -1 for never. Its production does not count."""

    def neighbours(self, tensor: int, tier: str) -> tuple[int, int]:
        """Free bytes directly below and above it; (0, 0) where the tier has no addresses."""

    def link_free_at(self, source: str, target: str) -> int:
        """When the transfers now queued on that route will have ended, at current rates."""

    def residents(self, tier: str) -> Iterator[int]:
        """Ids of the tensors with a complete copy in a tier."""


class Online:
    """The part of a plan that decides during the run. Every run creates a new one; override what is needed.

    An answer to `before` may contain any action, an answer to `on_pressure` only `Drop` and `Move`.
    """

    __slots__ = ()  # so that what derives from it may be compiled: it has no place for attributes of its own

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "notice" in vars(cls) and "notice_all" not in vars(cls):  # what a base does with many leaves out its own
            cls.notice_all = Online.notice_all  # type: ignore[method-assign]

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Actions to take when a device reaches an op, after the planned ones."""
        return ()

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """Actions to take when a request does not fit; an empty answer means that nothing more can be evicted."""
        return ()

    def notice(self, change: Change) -> None:
        """Told of each tensor that arrives, leaves or is read, in order, before the next question."""

    def notice_all(self, changes: Sequence[ChangeFields]) -> None:
        """Told of all changes since the last question, each by its fields; by default calls `notice` for each."""
        for change in changes:
            self.notice(Change(*change))


# ---- the question and the answer ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Unpressed:
    """All that an online part does in a run where nothing moves and memory is never short: it drops before ops.

    Such a run is known without asking it. Whoever plans must be sure of it; by default nothing is known.

    tensor, before: the drops from the home tier, in order: each tensor, and the op that it is dropped before.
    headroom: free bytes of the home tier, once an op has its results, below which it may act ahead of need.
    """

    tensor: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    before: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    headroom: int = 0


class _ReadOnly(dict[Any, Any]):
    """A copy of a mapping that nobody changes: a plan may stand for many runs. It can be pickled, and be in another."""

    def _refuse(self, *given: Any, **named: Any) -> Any:
        raise TypeError("what a plan says can't be changed: make another one, `replace(plan, ...)`")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


@dataclass(frozen=True)
class Plan:
    """What a policy decides; it can be run any number of times.

    trace: the trace to run, rewritten or not.
    actions: each anchored to an op; the order of actions with the same anchor is kept.
    place: tensor -> tier, or (tier, offset) for a planned allocator. By default a tensor is placed in the home tier of
        the engine that first uses, overwrites or produces it.
    online: creates the object that decides during a run; it must be picklable. Called whenever a run begins, which it
        may do twice.
    keep_dead: lazy deallocation: tensors without further readers stay until memory is short; all (True), or those with
        these ids. If there is an online part, dropping them is its decision.
    notes: what the policy wants to find later in `history`.
    unpressed: what the online part does where memory is never short, None for unknown; where it is known, such a run
        is replayed without it.
    """

    trace: Trace
    actions: Sequence[Action] = ()
    place: Mapping[int, str | tuple[str, int]] = field(default_factory=dict)
    online: Callable[[], Online] | None = None
    keep_dead: bool | frozenset[int] = False
    notes: Mapping[str, Any] = field(default_factory=dict)
    unpressed: Unpressed | None = None

    def __post_init__(self) -> None:
        # what has been replayed is not replayed again, and a plan may stand for many runs: nobody changes one
        object.__setattr__(self, "actions", counted(self.actions, len(self.trace.op_columns.name)))
        object.__setattr__(self, "place", _ReadOnly(self.place))
        if isinstance(self.notes, Mapping):  # a policy's may be anything
            object.__setattr__(self, "notes", _ReadOnly(self.notes))

    def __repr__(self) -> str:
        kinds = Counter(type(action).__name__ for action in self.actions)
        counts = [f"{count} {kind}" for kind, count in sorted(kinds.items())] or ["no actions"]
        options = [word for word in ("place", "online", "keep_dead") if getattr(self, word)]
        return f"<Plan for {self.trace!r}: {', '.join([*counts, *options])}>"

    def differs_in_notes(self, other: Plan) -> bool:
        """Whether a plan is a copy of this one with other notes, so that its runs are the same."""
        same = self.trace is other.trace and self.actions is other.actions and self.online is other.online
        same = same and self.keep_dead is other.keep_dead and self.unpressed is other.unpressed
        return same and self.place == other.place

    def decides_as(self, other: Plan) -> bool:
        """Whether both do the same, as far as their offline parts tell."""
        same_trace = self.trace is other.trace or self.trace.content_hash == other.trace.content_hash
        return same_trace and self.actions == other.actions and self.place == other.place


@dataclass(frozen=True)
class Run:
    """A past iteration, for policies that measure before they plan."""

    trace: Trace
    plan: Plan
    log: EventLog


class Evaluate(Protocol):
    """A replay of a plan, for planners that score plans by simulation."""

    def __call__(self, plan: Plan, budget: int | None = None) -> EventLog:
        """The log of a plan; budget: bytes in the home tiers, by default those of the problem. Raises what the engine
        raises.
        """


class Cost(Protocol):
    """Times on this platform in nanoseconds, with nothing else running."""

    def op_ns(self, op: int, tiers: Mapping[int, str] | None = None) -> int:
        """The time of an op, where a CPU launches what it adds (`sim.hardware.dispatch.added`); `tiers` locates the
        operands that are not in its engine's home tier."""

    def move_ns(self, tensor: int, source: str, target: str) -> int:
        """The time of one copy of a tensor."""

    def over(self, trace: Trace, platform: Platform) -> Cost:
        """The same of another trace, on the same machine with other capacities."""


def _nothing_known(plan: Plan) -> int:
    return 0


@dataclass(frozen=True)
class Problem:
    """What a policy is asked: to run this trace on this platform within its capacities.

    trace: the trace to plan for.
    platform: the machine; the capacity of its home tier is the budget.
    cost: times of ops and moves.
    evaluate: replays a plan and returns its log, for planners that score plans by simulation; raises what the engine
        raises, and Infeasible for what a composition cannot carry out.
    seed: for planners that draw random numbers.
    history: earlier iterations, oldest first.
    least_ns: a time that `evaluate` of a plan does not fall below, from the times of its ops, so that a planner can do
        without that; 0 where nothing is known, as in a composition, whose other parts may change ops.
    """

    trace: Trace
    platform: Platform
    cost: Cost
    evaluate: Evaluate
    seed: int = 0
    history: tuple[Run, ...] = ()
    least_ns: Callable[[Plan], int] = _nothing_known

    @property
    def budget(self) -> int:
        """Bytes in the home tier of device 0."""
        return self.platform.home(0).capacity

    @property
    def home(self) -> str:
        """Name of the home tier of device 0."""
        return self.platform.home(0).name

    def on_engines(self) -> Problem:
        """The same problem, its times of ops those on their engines, whatever the CPU takes that launches them."""
        if not self.platform.dispatch:
            return self
        return replace(self, cost=self.cost.over(self.trace, replace(self.platform, dispatch=())))

    def with_budget(self, budget: int) -> Problem:
        """The same problem for another budget; what is replayed has that, too."""
        platform, evaluate = self.platform.with_budget(budget), self.evaluate
        return replace(
            self,
            platform=platform,
            cost=self.cost.over(self.trace, platform),
            evaluate=lambda plan, other=None: evaluate(plan, budget if other is None else other),
        )
