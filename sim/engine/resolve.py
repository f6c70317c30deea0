"""A plan's actions with names resolved, by anchor; and those of an online answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import ref

from sim.engine.prepare import Prepared
from sim.errors import IllegalPlan, TraceError, near
from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Move, Plan, Recompute, Wait


class Act(NamedTuple):
    """An action with ids.

    target: a tensor, or the op to recompute.
    tier: where to drop, or to move to.
    """

    kind: str
    target: int
    tier: int = -1
    move: Move | None = None


class Resolved:
    """All that a plan asks for: actions by anchor, and where tensors are to be produced.

    before, after: per op the actions anchored there.
    slow_before, slow_after: ops where some of them take the device's time.
    recomputed: the ops of its Recomputes.
    born: per tensor that it places, tier and offset.
    special: the producers of those.
    """

    def __init__(self, plan: Plan, platform: Platform, prepared: Prepared) -> None:
        """Raises IllegalPlan naming an action that cannot be carried out on this trace and platform."""
        self._platform = platform
        self._prepared = prepared
        self._tier_ids: Mapping[str, int] = platform.tier_ids
        self._ops, self._tensors = len(prepared.reads), len(prepared.size)
        self.before: dict[int, list[Act]] = {}
        self.after: dict[int, list[Act]] = {}
        self.slow_before: set[int] = set()
        self.slow_after: set[int] = set()
        self.recomputed: list[int] = []
        known = prepared.plans.get(id(plan))
        if known is not None and known[0]() is plan:  # a plan that has run before on this machine
            self.before, self.after, self.slow_before, self.slow_after, self.recomputed = known[1]
        else:
            for action in plan.actions:
                if not (type(action) is Move and self._plain_move(action)):
                    self._anchor(action)
            resolved = (self.before, self.after, self.slow_before, self.slow_after, self.recomputed)
            plans, key = prepared.plans, id(plan)
            plans[key] = (ref(plan, lambda _: plans.pop(key, None)), resolved)
        self.born: dict[int, tuple[int, int | None]] = {}
        for tensor, where in plan.place.items():
            name, offset = (where, None) if isinstance(where, str) else where
            self.born[prepared.trace.tensor_id(tensor)] = (self._tier(name, f"place of tensor {tensor!r}"), offset)
        self.special = {prepared.producer[t] for t in self.born}

    # ---- names -------------------------------------------------------------------------------

    def _plain_move(self, move: Move) -> bool:
        """Note a move that is given by ids, as most are; False leaves it to the general way, and its complaints."""
        tensor, before, after, tier = move.tensor, move.before, move.after, self._tier_ids.get(move.to)
        at, side = (after, self.after) if before is None else (before, self.before)
        if type(tensor) is not int or type(at) is not int or tier is None or move.wire is not None:
            return False
        if not (0 <= tensor < self._tensors and 0 <= at < self._ops) or (before is not None and after is not None):
            return False
        if at in side:
            side[at].append(Act("move", tensor, tier, move))
        else:
            side[at] = [Act("move", tensor, tier, move)]
        return True

    def _anchor(self, action: Action) -> None:
        before, after = action.before, action.after
        if (before is None) == (after is None):
            raise IllegalPlan(f"{action}: a planned action is either before or after one op")
        at = after if before is None else before
        try:
            anchor = at if type(at) is int and 0 <= at < self._ops else self._prepared.trace.op_id(at)  # type: ignore[arg-type]
            act = self._resolve(action, self._prepared.device[anchor])
        except TraceError as error:
            raise IllegalPlan(f"{action}: {error}") from None
        side = self.after if before is None else self.before
        if anchor in side:
            side[anchor].append(act)
        else:
            side[anchor] = [act]
        if act.kind in ("wait", "recompute"):
            (self.slow_after if before is None else self.slow_before).add(anchor)
            if act.kind == "recompute":
                self.recomputed.append(act.target)
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
            if action.wire is not None and action.wire < 0:
                raise IllegalPlan(f"{action}: wire is negative")
            return Act("move", tensor, self._tier(action.to, action), action)
        if isinstance(action, Drop):
            home = self._prepared.home[self._prepared.main[device]]
            return Act("drop", tensor, home if action.tier is None else self._tier(action.tier, action))
        raise IllegalPlan(f"{action!r} is not an action; there are Drop, Recompute, Move and Wait")

    def _tier(self, name: str, where: object) -> int:
        if name not in self._tier_ids:
            raise IllegalPlan(f"{where}: {self._platform.name} has no tier {name!r}{near(name, self._tier_ids)}")
        return self._tier_ids[name]

    def answer(self, actions: Iterable[Action] | None, device: int, pressure: bool = False) -> list[Act]:
        """An online answer with ids. Raises IllegalPlan where one under pressure would need time."""
        acts = []
        for action in actions or ():
            if pressure and not isinstance(action, Drop | Move):
                raise IllegalPlan(f"{action}: only Drop and Move can answer pressure")
            try:
                acts.append(self._resolve(action, device))
            except TraceError as error:
                raise IllegalPlan(f"{action}: {error}") from None
        return acts
