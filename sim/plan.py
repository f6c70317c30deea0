"""The words between policies and the engine: what a policy is asked, and what it may answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sim.hardware.platform import Platform
from sim.log import EventLog
from sim.trace.graph import Trace

# ---- actions -----------------------------------------------------------------------------------
# Tensors, ops and tiers are given by id or by name. In an offline plan each action stands `before` or
# `after` one op; in an online answer it has no anchor.


@dataclass(frozen=True, slots=True)
class Drop:
    """Release the copy of a tensor in `tier` (the device's home tier by default).

    If it was the last copy, only running its producer again brings the tensor back.
    """

    tensor: int | str
    tier: str | None = None
    before: int | str | None = None
    after: int | str | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run an op again that has already run. Outputs still there are not held twice beyond its end.

    The device waits for a first run that it has handed to another engine. An op that writes in place does so on every
    run. What it overwrites is made again first if it is gone, and is
    gone once more when the op ends.
    """

    op: int | str
    before: int | str | None = None
    after: int | str | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a tensor to another tier beside the compute, then release the source unless `keep`.

    Where a copy already lies nothing is copied. The source is the tier with the shortest route among those
    that hold it. wire: bytes on the link and at the destination when it compresses.
    """

    tensor: int | str
    to: str
    keep: bool = False
    priority: int = 0
    wire: int | None = None
    before: int | str | None = None
    after: int | str | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold the device until the transfer of that tensor is done; nothing if none is under way."""

    tensor: int | str
    before: int | str | None = None
    after: int | str | None = None


Action = Drop | Recompute | Move | Wait


# ---- what an online plan sees ------------------------------------------------------------------


class Need(NamedTuple):
    """A request that does not fit. short: bytes still missing once all that is leaving has left, >= 1."""

    tier: str
    bytes: int
    short: int
    op: int
    reason: str


class Change(NamedTuple):
    """A tensor `came` to a tier, `went` from it, or was `read` (by the op just reached)."""

    what: str
    tensor: int
    tier: str
    now: int


class Memory(Protocol):
    """The state of a run, read-only. Times in ns, sizes in bytes, tiers by name, tensors by id."""

    @property
    def now(self) -> int:
        """The present time."""

    def free(self, tier: str) -> int:
        """Bytes not taken."""

    def leaving(self, tier: str) -> int:
        """Bytes that copies under way will release."""

    def arriving(self, tier: str) -> int:
        """Bytes taken by copies that have not ended."""

    def largest_hole(self, tier: str) -> int:
        """The largest contiguous free range; all that is free where the tier has no addresses."""

    def where(self, tensor: int) -> tuple[str, ...]:
        """The tiers that hold a complete copy."""

    def in_flight(self, tensor: int) -> str | None:
        """The tier that a copy of it is on its way to."""

    def is_locked(self, tensor: int) -> bool:
        """Whether something that runs, or is being restored, needs it where it is."""

    def last_read(self, tensor: int) -> int:
        """When an op that reads it was last reached; -1 for never. That it was made counts for nothing here."""

    def neighbours(self, tensor: int, tier: str) -> tuple[int, int]:
        """Free bytes just below and just above it; (0, 0) where the tier has no addresses."""

    def link_free_at(self, source: str, target: str) -> int:
        """When what is queued on that route now will have ended, at present rates."""

    def residents(self, tier: str) -> Iterator[int]:
        """The tensors with a complete copy in a tier, by id."""


class Online:
    """The part of a plan that decides while it runs. A run makes a new one; override what is needed.

    An answer may hold `Drop` and `Move` only in `on_pressure`, any action in `before`.
    """

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """Asked when a device reaches an op, after the planned actions."""
        return ()

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        """Asked when a request does not fit. An empty answer means: nothing more can go."""
        return ()

    def notice(self, change: Change) -> None:
        """Told of each tensor that came, went or was read."""


# ---- the question and the answer ---------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a policy decides; it can be run any number of times.

    trace: the one to run, rewritten or not. actions: anchored; order within an anchor is kept.
    place: tensor -> tier, or (tier, offset) for a planned allocator; default: the home tier of the
    engine that first uses or makes it. online: makes the object that answers while the plan runs, once a
    run; it must be picklable. keep_dead: tensors without readers stay until memory is short; where there is
    an online part they are its to drop.
    notes: what the policy wants to find again in `history`.
    """

    trace: Trace
    actions: Sequence[Action] = ()
    place: Mapping[int, str | tuple[str, int]] = field(default_factory=dict)
    online: Callable[[], Online] | None = None
    keep_dead: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        kinds = Counter(type(action).__name__ for action in self.actions)
        what = [f"{count} {kind}" for kind, count in sorted(kinds.items())] or ["no actions"]
        more = [word for word in ("place", "online", "keep_dead") if getattr(self, word)]
        return f"<Plan for {self.trace!r}: {', '.join([*what, *more])}>"


@dataclass(frozen=True)
class Run:
    """One iteration that has been: for policies that measure before they plan."""

    trace: Trace
    plan: Plan
    log: EventLog


class Cost(Protocol):
    """What things cost on this platform, in nanoseconds, with nothing else running."""

    def op_ns(self, op: int, tiers: Mapping[int, str] | None = None) -> int:
        """One run of an op; `tiers` says where operands lie that are not in its engine's home tier."""

    def move_ns(self, tensor: int, source: str, target: str) -> int:
        """One copy of a tensor."""


@dataclass(frozen=True)
class Problem:
    """What a policy is asked: run this trace on this platform within its capacities.

    The budget is the capacity of `platform.home(0)`. history: earlier iterations, oldest first.
    evaluate: replays a plan and returns its log, for planners whose fitness is simulation; it raises
    what the engine raises.
    """

    trace: Trace
    platform: Platform
    cost: Cost
    evaluate: Callable[[Plan], EventLog]
    seed: int = 0
    history: tuple[Run, ...] = ()

    @property
    def budget(self) -> int:
        """Bytes in the home tier of device 0."""
        return self.platform.home(0).capacity

    @property
    def home(self) -> str:
        """Name of the home tier of device 0."""
        return self.platform.home(0).name
