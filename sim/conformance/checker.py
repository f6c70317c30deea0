"""Peak and time of a plan that only drops and recomputes, from a walk over its ops: no clock, no events.

It shares no code with the engine. For every legal plan both give the same peak, to the byte, and the same
times, to the nanosecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sim.errors import IllegalPlan
from sim.plan import Action, Drop, Plan, Recompute
from sim.trace.graph import Trace


@dataclass(frozen=True, slots=True)
class Checked:
    """Memory and time of a plan.

    peak: bytes.
    time: ns.
    rerun: ns of reruns.
    reruns: ops, in order.
    """

    peak: int
    time: int
    rerun: int
    reruns: tuple[int, ...]


def check(plan: Plan, op_ns: Callable[[int], int]) -> Checked:
    """Walk over a plan for one device on one engine; `op_ns` gives the time of each op.

    Raises IllegalPlan, naming the action or op and the tensor: for a move, a wait, an online part or a place; for a
    drop of a tensor that has not been produced or cannot be recomputed; for a rerun before the first run; for a read
    or an output that is not resident (also if it was overwritten), even where the engine would recompute it unasked.
    """
    return _Walk(plan, op_ns).run()


class _Walk:
    def __init__(self, plan: Plan, op_ns: Callable[[int], int]) -> None:
        if plan.online is not None or plan.place or plan.keep_dead or plan.trace.devices > 1:
            raise IllegalPlan("only plans that drop and recompute on one device can be checked")
        trace = self.trace = plan.trace
        self.op_ns = op_ns
        self.size: list[int] = trace.tensor_columns.bytes.tolist()
        self.replaces: list[int] = trace.tensor_columns.replaces.tolist()
        self.kept = {*trace.outputs, *(t for t, maker in enumerate(trace.producer.tolist()) if maker < 0)}
        self.before, self.after, reruns = _anchored(plan.actions, trace)
        self.uses = Counter({t: len(trace.readers(t)) for t in range(len(self.size))})
        self.uses.update(t for op in trace.ops for t in op.releases)  # the program uses what it holds
        for op in reruns:
            self.uses.update(set(trace.reads(op)))
        self.here = {t for t, maker in enumerate(trace.producer.tolist()) if maker < 0}
        self.made = set(self.here)
        self.held = self.peak = sum(self.size[t] for t in self.here)
        self.time = self.rerun = 0
        self.reruns: list[int] = []

    def run(self) -> Checked:
        for op in range(len(self.trace.ops)):
            for action in self.before.get(op, ()):
                self.act(action)
            self.perform(op, again=False)
            released = self.trace.ops[op].releases
            self.uses.subtract(released)
            for action in self.after.get(op, ()):
                self.act(action)
            self.free(op, released)
        for t in self.trace.outputs:
            if t not in self.here:
                raise IllegalPlan(f"output {self.tensor(t)} is not resident at the end")
        return Checked(self.peak, self.time, self.rerun, tuple(self.reruns))

    def act(self, action: Action) -> None:
        if isinstance(action, Recompute):
            op = self.trace.op_id(action.op)
            self.perform(op, again=True)
            self.free(op)
            return
        t = self.trace.tensor_id(action.tensor)
        if t not in self.made:
            raise IllegalPlan(f"{action}: {self.tensor(t)} has not been produced yet")
        if t in self.here:
            self.leave(t)

    def perform(self, op: int, *, again: bool) -> None:
        name, writes = self.trace.op_columns.name[op], self.trace.writes(op)
        if again and writes and not self.made.intersection(writes):
            raise IllegalPlan(f"op {name!r}: Recompute before it has run")
        reads = set(self.trace.reads(op))
        for t in sorted(reads - self.here):
            raise IllegalPlan(f"op {name!r}: {self.tensor(t)} is not resident")
        scratch = int(self.trace.op_columns.workspace[op])
        given_up = 0
        overwritten = []
        for t in writes:
            if self.replaces[t] in self.here:
                overwritten.append(self.replaces[t])
                given_up += self.size[self.replaces[t]] if t in self.here else 0
            elif t in self.here:
                scratch += self.size[t]
            else:
                self.held += self.size[t]
        self.peak = max(self.peak, self.held + scratch)
        self.held -= given_up
        self.here.difference_update(overwritten)
        self.here.update(writes)
        self.made.update(writes)
        self.uses.subtract(reads)
        took = self.op_ns(op)
        self.time += took
        if again:
            self.rerun += took
            self.reruns.append(op)

    def free(self, op: int, released: Sequence[int] = ()) -> None:
        """What the op used or the program releases, and no later op reads."""
        for t in {*self.trace.reads(op), *self.trace.writes(op), *released}:
            if t in self.here and self.uses[t] <= 0 and t not in self.kept:
                self.leave(t)

    def leave(self, t: int) -> None:
        self.here.discard(t)
        self.held -= self.size[t]

    def tensor(self, t: int) -> str:
        return f"tensor {self.trace.tensor_columns.name[t]!r}"


def _anchored(
    actions: Iterable[Action], trace: Trace
) -> tuple[dict[int, list[Action]], dict[int, list[Action]], Sequence[int]]:
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    reruns = []
    for action in actions:
        if not isinstance(action, Drop | Recompute) or (isinstance(action, Drop) and action.tier is not None):
            raise IllegalPlan(f"{action}: only plans that drop and recompute on one device can be checked")
        if (action.before is None) == (action.after is None):
            raise IllegalPlan(f"{action}: a planned action is either before or after one op")
        if action.before is not None:
            before.setdefault(trace.op_id(action.before), []).append(action)
        elif action.after is not None:
            after.setdefault(trace.op_id(action.after), []).append(action)
        if isinstance(action, Recompute):
            reruns.append(trace.op_id(action.op))
    return before, after, reruns
