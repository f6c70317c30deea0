"""A plan's actions with names resolved, by anchor; and those of an online answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from sim.engine.prepare import Prepared
from sim.errors import IllegalPlan, TraceError, near
from sim.hardware.platform import Platform
from sim.log import Ints
from sim.plan import Action, Drop, Move, Plan, Recompute, Wait
from sim.trace.kept import in_common

WHOLE = ("priority", "delay", "wire", "codec")
"""Figures of a move."""

MOST = 2**63
"""What no figure reaches: the log has columns of 64 bits."""


class Act(NamedTuple):
    """An action with ids.

    target: a tensor, or the op to recompute.
    tier: where to drop, or to move to.
    """

    kind: str
    target: int
    tier: int = -1
    move: Move | None = None


ACT: Callable[[tuple[str, int, int, Move | None]], Act] = partial(tuple.__new__, Act)
"""An action from its fields; without the Python code of its constructor."""


class ActionColumns(NamedTuple):
    """The drops and recomputations of a plan that does nothing else, in the order of their anchors.

    recomputed, before: ops to recompute, and the op that anchors each.
    dropped, tier, anchor: tensors to drop, from which tier, and the op that anchors each.
    passed: per drop how many of these recomputations come before it.
    after: per drop whether it is after its anchor.
    """

    recomputed: Ints
    before: Ints
    dropped: Ints
    tier: Ints
    anchor: Ints
    passed: Ints
    after: Ints


NO_ACTIONS = ActionColumns(*[np.zeros(0, np.int64)] * 7)


@dataclass(frozen=True)
class Anchored:
    """Actions by anchor.

    before, after: per op the actions anchored there.
    slow_before, slow_after: ops where some of them take the device's time.
    recomputed: the ops of all Recomputes.
    waited: the tensors of all Waits.
    """

    before: dict[int, list[Act]] = field(default_factory=dict)
    after: dict[int, list[Act]] = field(default_factory=dict)
    slow_before: set[int] = field(default_factory=set)
    slow_after: set[int] = field(default_factory=set)
    recomputed: list[int] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)

    @cached_property
    def columns(self) -> ActionColumns | None:
        """The actions as columns; None if some move or wait, or recompute after an op."""
        if not self.before and not self.after:
            return NO_ACTIONS
        recomputed: list[tuple[int, int]] = []
        dropped: list[tuple[int, int, int, int, int]] = []
        for after, side in enumerate((self.before, self.after)):
            for anchor in sorted(side):
                for kind, target, tier, _ in side[anchor]:
                    if kind == "drop":
                        dropped.append((target, tier, anchor, len(recomputed), after))
                    elif kind == "recompute" and not after:
                        recomputed.append((target, anchor))
                    else:
                        return None
        drops = np.array(dropped, np.int64).reshape(-1, 5).T
        return ActionColumns(*np.array(recomputed, np.int64).reshape(-1, 2).T, *drops)


@dataclass(frozen=True)
class Made:
    """What the paths make of a plan on a trace, each in a list once it has been asked to.

    run: the array path; see `array_path.Rows`.
    copied: the copy path; see `copy_path.covered.Program`.
    """

    run: list[Any] = field(default_factory=list)
    copied: list[Any] = field(default_factory=list)


class Resolved:
    """All that a plan asks for: actions by anchor, and where tensors are to be produced.

    anchored: its actions; before, after, slow_before, slow_after, recomputed, waited: those of `anchored`.
    made: what the paths make of it.
    born: per tensor that it places, tier and offset.
    special: the producers of those.
    columns: the actions as columns, and what an online part adds where memory is never short; None if some have none.
    """

    def __init__(self, plan: Plan, platform: Platform, prepared: Prepared) -> None:
        """Raises IllegalPlan naming an action that cannot be carried out on this trace and platform."""
        self._platform = platform
        self._prepared = prepared
        self._tier_ids: Mapping[str, int] = platform.tier_ids
        self._ops, self._tensors = len(prepared.times.total), len(prepared.trace.tensor_columns.name)
        self._homes = [prepared.home[engine] for engine in prepared.main]
        known = prepared.plans.get(id(plan))
        if known is not None and known[0]() is plan:  # it has run before on this machine
            self.anchored: Anchored = known[1]
            self.made: Made = known[2]
        else:
            actions, structure, plans, key = plan.actions, prepared.trace.structure, prepared.plans, id(plan)
            self.anchored = in_common(structure, actions, "anchored", platform.timing_hash, lambda: self._all(actions))
            self.made = Made()
            plans[key] = (ref(plan, lambda _: plans.pop(key, None)), self.anchored, self.made)
        self.before, self.after = self.anchored.before, self.anchored.after
        self.slow_before, self.slow_after = self.anchored.slow_before, self.anchored.slow_after
        self.recomputed, self.waited = self.anchored.recomputed, self.anchored.waited
        self.born: dict[int, tuple[int, int | None]] = {}
        for tensor, where in plan.place.items():
            name, offset = (where, None) if isinstance(where, str) else where
            offset = int(offset) if isinstance(offset, np.integer) else offset
            self.born[prepared.trace.tensor_id(tensor)] = (self._tier(name, f"place of tensor {tensor!r}"), offset)
        self.special = {prepared.producer[t] for t in self.born}
        self._unpressed = plan.unpressed if plan.online is not None else None

    @property
    def columns(self) -> ActionColumns | None:
        """See the class."""
        planned, more = self.anchored.columns, self._unpressed
        if planned is None or more is None or not len(more.tensor):
            return planned
        tier = np.full(len(more.tensor), self._homes[0])
        passed = np.searchsorted(planned.before, more.before, "right")
        after = np.zeros(len(more.tensor), np.int64)
        drops = (more.tensor, tier, more.before, passed, after)
        joined = (np.concatenate(pair) for pair in zip(planned[2:], drops, strict=True))
        return ActionColumns(planned.recomputed, planned.before, *joined)

    # ---- names -------------------------------------------------------------------------------

    def _all(self, actions: Iterable[Action]) -> Anchored:
        """The actions of a plan by anchor."""
        anchored = Anchored()
        for action in actions:
            if not self._anchor_by_ids(action, anchored):
                self._anchor(action, anchored)
        return anchored

    def _anchor_by_ids(self, action: Action, to: Anchored) -> bool:
        """Note an action that is given by ids, as most are; False leaves it to the general way, and its complaints."""
        before, after = action.before, action.after
        at, side = (after, to.after) if before is None else (before, to.before)
        if type(at) is not int or not 0 <= at < self._ops or (before is not None and after is not None):
            return False
        act: Act | None = None
        if type(action) is Move:
            tensor, tier = action.tensor, self._tier_ids.get(action.to)
            is_plain = action.wire is None and action.codec is None and action.delay == 0
            is_plain = is_plain and type(action.priority) is int
            if type(tensor) is int and 0 <= tensor < self._tensors and tier is not None and is_plain:
                act = ACT(("move", tensor, tier, action))
        elif type(action) is Drop:
            act = self._drop_by_ids(action, self._prepared.device[at])
        elif type(action) is Recompute and type(action.op) is int and 0 <= action.op < self._ops and after is None:
            act = ACT(("recompute", action.op, -1, None))
            to.slow_before.add(at)
            to.recomputed.append(action.op)
        if act is None:
            return False
        if at in side:
            side[at].append(act)
        else:
            side[at] = [act]
        return True

    def _drop_by_ids(self, drop: Drop, device: int) -> Act | None:
        tensor = drop.tensor
        tier = self._homes[device] if drop.tier is None else self._tier_ids.get(drop.tier)
        if type(tensor) is int and 0 <= tensor < self._tensors and tier is not None:
            return ACT(("drop", tensor, tier, None))
        return None

    def _anchor(self, action: Action, to: Anchored) -> None:
        before, after = action.before, action.after
        if (before is None) == (after is None):
            raise IllegalPlan(f"{action}: a planned action is either before or after one op")
        at = after if before is None else before
        try:
            anchor = at if type(at) is int and 0 <= at < self._ops else self._prepared.trace.op_id(at)  # type: ignore[arg-type]
            act = self._resolve(action, self._prepared.device[anchor])
        except TraceError as error:
            raise IllegalPlan(f"{action}: {error}") from None
        side = to.after if before is None else to.before
        if anchor in side:
            side[anchor].append(act)
        else:
            side[anchor] = [act]
        if act.kind in ("wait", "recompute"):
            (to.slow_after if before is None else to.slow_before).add(anchor)
            if act.kind == "recompute":
                to.recomputed.append(act.target)
            else:
                to.waited.add(act.target)
            if before is None and not self._is_here(anchor):
                raise IllegalPlan(f"{action}: the op ends on another engine, where no device can wait")

    def _is_here(self, op: int) -> bool:
        """Whether an op runs on its device's main engine, so that the device is there when it ends."""
        prepared = self._prepared
        return op not in prepared.group_of and prepared.engine[op] == prepared.main[prepared.device[op]]

    def _resolve(self, action: Action, device: int) -> Act:
        trace = self._prepared.trace
        if isinstance(action, Recompute):
            return Act("recompute", trace.op_id(action.op))
        tensor = trace.tensor_id(action.tensor)
        if isinstance(action, Wait):
            return Act("wait", tensor)
        if isinstance(action, Move):
            for name, value in zip(WHOLE, (action.priority, action.delay, action.wire or 0, action.codec or 1)):
                if not isinstance(value, (int, np.integer)) or abs(int(value)) >= MOST:
                    raise IllegalPlan(f"{action}: {name} is not a whole number of less than 64 bits")
            if action.wire is not None and action.wire < 0:
                raise IllegalPlan(f"{action}: wire is negative")
            if action.codec is not None and action.codec < 1:
                raise IllegalPlan(f"{action}: a codec takes at least 1 B/s")
            if action.delay < 0:
                raise IllegalPlan(f"{action}: delay is negative")
            return Act("move", tensor, self._tier(action.to, action), _plain(action))
        if isinstance(action, Drop):
            return Act("drop", tensor, self._homes[device] if action.tier is None else self._tier(action.tier, action))
        raise IllegalPlan(f"{action!r} is not an action; there are Drop, Recompute, Move and Wait")

    def _tier(self, name: str, where: object) -> int:
        if name not in self._tier_ids:
            raise IllegalPlan(f"{where}: {self._platform.name} has no tier {name!r}{near(name, self._tier_ids)}")
        return self._tier_ids[name]

    def answer(self, actions: Iterable[Action] | None, device: int, pressure: bool = False) -> list[Act]:
        """An online answer with ids. Raises IllegalPlan where one under pressure would need time."""
        acts: list[Act] = []
        for action in actions or ():
            if type(action) is Drop and (act := self._drop_by_ids(action, device)) is not None:
                acts.append(act)
                continue
            if pressure and not isinstance(action, Drop | Move):
                raise IllegalPlan(f"{action}: only Drop and Move can answer pressure")
            try:
                acts.append(self._resolve(action, device))
            except TraceError as error:
                raise IllegalPlan(f"{action}: {error}") from None
        return acts


def _plain(move: Move) -> Move:
    """A move whose numbers are Python's: those of NumPy overflow."""
    numbers, wire, codec = (move.priority, move.delay), move.wire, move.codec
    if {type(value) for value in (*numbers, wire or 0, codec or 0)} == {int} and type(move.keep) is bool:
        return move
    priority, delay = map(int, numbers)
    wire, codec = (None if value is None else int(value) for value in (wire, codec))
    return replace(move, priority=priority, delay=delay, wire=wire, codec=codec, keep=bool(move.keep))
