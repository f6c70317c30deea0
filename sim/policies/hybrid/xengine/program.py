"""XEngine's program: on which engine each op runs, which memory keeps what, what is recomputed and what is copied.

Stages and recomputations are Checkmate's (`sim.solvers.nodes`): stage t recomputes some earlier ops in order and then
runs op t. An op has one engine, for its first run and all others. "Recomputed there, and on that engine" is a product
of two choices: it has columns of its own, which add up to the recomputation and are at most the choice of the engine.
All is serial: a copy ends before the next op begins, and its time adds to that of the ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sim.policies.hybrid.xengine.engines import Choices
from sim.solvers.linear import INFEASIBLE, LinearProgram, Terms, limit_of
from sim.solvers.milp import WIDE, unit_of
from sim.solvers.nodes import Nodes, NodeValue, in_place_of_inputs
from sim.solvers.schedule import TraceIndex

Copy = tuple[int, int, str, str]
"""Stage, tensor, from and to which memory."""
Kept = tuple[int, int, str]
"""Stage, tensor, and the memory where it is resident when the stage starts."""


@dataclass(frozen=True, eq=False)
class Scene:
    """What there is to plan.

    nodes: one per op, with one value per tensor.
    roots: per tensor without a producer, and per one that an op writes in the storage of such a tensor, the tensor
        without a producer. All of one root lie in one memory, and are only copied to others.
    """

    index: TraceIndex
    nodes: Nodes
    choices: Choices
    roots: Mapping[int, int]

    @classmethod
    def of(cls, index: TraceIndex, nodes: Nodes, choices: Choices) -> Scene:
        """The scene of these nodes."""
        roots: dict[int, int] = {}
        for t in (*(t for t, op in enumerate(index.producer) if op < 0), *in_place_of_inputs(index)):
            roots[t] = t
            while index.replaces[roots[t]] >= 0:
                roots[t] = index.replaces[roots[t]]
        return cls(index, nodes, choices, roots)


@dataclass(frozen=True, eq=False)
class Answer:
    """What the program chooses.

    status: `optimal` (proven), `feasible` (stopped by `limit`), `infeasible` (proven), `unknown` (stopped before any).
    bound: no schedule takes less, ns; 0 where bytes are minimised.
    limit: `time` or `nodes`.
    engine: per op.
    reruns: per stage the ops that are recomputed.
    kept, copies: what is resident when a stage starts, and what is copied in it.
    home: per tensor without a producer the memory where it lies throughout.
    used: where the bytes of a memory are minimised, how many.
    """

    status: str
    bound: int = 0
    limit: str = ""
    engine: Sequence[int] = ()
    reruns: Sequence[Sequence[int]] = ()
    kept: frozenset[Kept] = frozenset()
    copies: frozenset[Copy] = frozenset()
    home: Mapping[int, str] = field(default_factory=dict)
    used: int = 0


class Placement:
    """The program for a scene.

    room: bytes per memory.
    least: the memory of which as few bytes as possible are to be used; "" to take as little time as possible.
    """

    def __init__(self, scene: Scene, room: Mapping[str, int], *, least: str = "") -> None:
        self._scene, self._nodes, self._index = scene, scene.nodes, scene.index
        self._memories, self._able = scene.choices.memories, scene.choices.able
        self._values: dict[int, NodeValue] = {value.tensors[0]: value for value in scene.nodes.values}
        self._rows = LinearProgram()
        self._again, there = scene.nodes.useful
        self._there = [[scene.nodes.values[v].tensors[0] for v in stage] for stage in there]
        self._steps = [[*again, t] for t, again in enumerate(self._again)]
        self._unit, _ = unit_of([*scene.choices.ns.values()])
        self._least = least
        size, nodes = scene.index.size, scene.nodes
        most = sum(size) + max((*nodes.run_bytes, *nodes.rerun_bytes), default=0)
        gcd = math.gcd(*size, *nodes.run_bytes, *nodes.rerun_bytes) or 1
        self._byte = gcd * max(1.0, min(most, max(room.values())) // gcd / WIDE)
        self._room = {m: bytes // gcd * gcd for m, bytes in room.items() if bytes < most or m == least}
        self._engine_columns()
        self._residence_columns()
        self._used = self._rows.column(high=math.inf, cost=1.0) if least else -1
        self._homes()
        for t in range(len(scene.nodes)):
            self._stage(t)

    # ---- columns -----------------------------------------------------------------------------

    def _price(self, ns: int) -> float:
        """What a time adds to the objective; where bytes are minimised it only breaks ties."""
        return ns / self._unit * (1e-6 if self._least else 1.0)

    def _engine_columns(self) -> None:
        """Where each op runs; and per stage what is recomputed, and what is recomputed on which engine."""
        column, row, ns = self._rows.column, self._rows.row, self._scene.choices.ns
        self._runs: dict[tuple[int, int, int], int] = {}  # stage, op, engine
        for op, able in enumerate(self._able):
            low = float(len(able) == 1)
            for e in able:
                self._runs[op, op, e] = column(low=low, cost=self._price(ns[op, e]), whole=True)
            row([(self._runs[op, op, e], 1.0) for e in able], 1.0, 1.0)
        self._rerun: dict[tuple[int, int], int] = {}
        for t, again in enumerate(self._again):
            for op in again:
                able = self._able[op]
                prices = [self._price(ns[op, e]) for e in able]
                alone = len(able) == 1
                rerun = self._rerun[t, op] = column(cost=prices[0] if alone else 0.0, whole=True)
                parts = [rerun] if alone else [column(cost=price) for price in prices]
                self._runs.update(((t, op, e), part) for e, part in zip(able, parts, strict=True))
                if not alone:
                    row([(rerun, -1.0), *((part, 1.0) for part in parts)], 0.0, 0.0)
                    for e, part in zip(able, parts, strict=True):
                        row([(part, 1.0), (self._runs[op, op, e], -1.0)], most=0.0)

    def _residence_columns(self) -> None:
        """Where tensors without a producer lie; what is resident when stages start; what is copied."""
        column, row, index = self._rows.column, self._rows.row, self._index
        self._home: dict[tuple[int, str], int] = {}
        for root in dict.fromkeys(self._scene.roots.values()):
            for m in self._memories:
                self._home[root, m] = column(whole=True)
            row([(self._home[root, m], 1.0) for m in self._memories], 1.0, 1.0)
        self._kept: dict[Kept, int] = {}
        self._copy: dict[Copy, int] = {}
        for t, tensors in enumerate(self._there):
            for x in tensors:
                self._kept |= {(t, x, m): column(whole=True) for m in self._memories}
                if t == len(self._nodes) or t <= self._values[x].held_until:
                    row([(self._kept[t, x, m], 1.0) for m in self._memories], least=1.0)
        for t, steps in enumerate(self._steps):
            made = (x for op in self._again[t] for x in index.writes[op] if x in self._values)
            for x in dict.fromkeys((*self._there[t], *made)):
                self._copies(t, x)
            for x in dict.fromkeys(x for op in steps for x in index.reads[op] if x in self._scene.roots):
                self._copies(t, x)
        for x in self._scene.roots:
            stages = [t for t, steps in enumerate(self._steps) if any(x in index.reads[op] for op in steps)]
            for t in range(min(stages, default=0) + 1, min(max(stages, default=-1), index.overwritten_at[x]) + 1):
                self._kept |= {(t, x, m): column(whole=True) for m in self._memories}

    def _copies(self, t: int, x: int) -> None:
        """A tensor may be copied in a stage, from any memory to any other."""
        platform, bytes = self._scene.choices.platform, self._index.size[x]
        for a in self._memories:
            for b in self._memories:
                if a != b:
                    cost = self._price(platform.move_ns(bytes, a, b))
                    self._copy[t, x, a, b] = self._rows.column(cost=cost, whole=True)

    # ---- sums of columns ---------------------------------------------------------------------

    def _on(self, t: int, op: int, memory: str) -> Terms:
        """How far an op runs in a stage on an engine whose operands lie in a memory."""
        at = self._scene.choices.memory
        return [(self._runs[t, op, e], 1.0) for e in self._able[op] if at(e) == memory and (t, op, e) in self._runs]

    def _made(self, t: int, x: int, memory: str) -> Terms:
        """How far a tensor that is not resident is recomputed there in a stage."""
        value = self._values.get(x)
        if value is None or value.producer == t or not value.produced_in(t) or t <= value.held_until:
            return []
        return self._on(t, value.producer, memory)

    def _lies(self, t: int, x: int, memory: str) -> Terms:
        """How far a tensor is resident there when a stage starts."""
        kept = self._kept.get((t, x, memory))
        root = self._scene.roots.get(x)
        home: Terms = [] if root is None else [(self._home[root, memory], 1.0)]
        return home if kept is None else [*home, (kept, 1.0)]

    def _moved(self, t: int, x: int, source: str = "", target: str = "") -> Terms:
        """How far a tensor is copied in a stage, from one memory or to one."""
        ends = [(a, b) for a in self._memories for b in self._memories if source in ("", a) and target in ("", b)]
        return [(c, 1.0) for a, b in ends if (c := self._copy.get((t, x, a, b))) is not None]

    # ---- rows --------------------------------------------------------------------------------

    def _homes(self) -> None:
        """What overwrites a tensor without a producer runs where that lies; what is carried ends where it began."""
        row, index, roots = self._rows.row, self._index, self._scene.roots
        for op, able in enumerate(self._able):
            for x in index.writes[op]:
                if x in roots and index.replaces[x] >= 0:
                    for e in able:
                        home = self._home[roots[x], self._scene.choices.memory(e)]
                        row([(self._runs[op, op, e], 1.0), (home, -1.0)], most=0.0)
        end = len(self._nodes)
        for x, initial in index.trace.carry:
            for m in self._memories:
                if (end, x, m) in self._kept:
                    row([(self._kept[end, x, m], 1.0), (self._home[initial, m], -1.0)], least=0.0)

    def _stage(self, t: int) -> None:
        """What must be resident when ops run, and how many bytes are at each step."""
        index, steps = self._index, self._steps[t]
        use: dict[tuple[str, int], Terms] = {(m, q): [] for m in self._memories for q in range(len(steps))}
        tensors = {x for op in steps for x in (*index.reads[op], *index.writes[op])}
        tensors |= {*self._there[t], *self._there[t + 1], *(x for s, x, _ in self._kept if s == t)}
        for x in sorted(tensors):
            if x in self._values or x in self._scene.roots:
                for m in self._memories:
                    for q, lies in self._tensor(t, x, m):
                        use[m, q] += [(c, f * index.size[x]) for c, f in lies]
        inputs = [(c, m, index.size[root]) for (root, m), c in self._home.items()]
        for (m, q), terms in use.items():
            if m not in self._room:
                continue
            op = steps[q]
            running = (self._nodes.run_bytes if op == t else self._nodes.rerun_bytes)[op]
            terms += [(c, running) for c, _ in self._on(t, op, m)]
            terms += [(c, bytes) for c, where, bytes in inputs if where == m]
            limit = [(self._used, -self._byte)] if m == self._least else []
            room = 0.0 if limit else self._room[m] / self._byte
            self._rows.row(_sum((c, f / self._byte) for c, f in (*terms, *limit)), most=room)

    def _tensor(self, t: int, x: int, m: str) -> list[tuple[int, Terms]]:
        """Rows of a tensor in a memory and a stage; returns at which steps how much of it is resident there.

        For one without a producer that is its copies alone. What is copied is so when it is there: at the start, or
        when it has been recomputed, and then only for an op of that stage.
        """
        row, steps = self._rows.row, self._steps[t]
        value, pinned = self._values.get(x), x in self._scene.roots
        then = [(c, 1.0)] if (c := self._kept.get((t + 1, x, m))) is not None else []
        if not pinned and value is not None and value.producer == t:
            if then:
                row([*self._on(t, t, m), *_minus(then)], least=0.0)
            return []
        kept = [(c, 1.0)] if (c := self._kept.get((t, x, m))) is not None else []
        lies, made = self._lies(t, x, m), self._made(t, x, m)
        coming, leaving = self._moved(t, x, target=m), self._moved(t, x, source=m)
        reading = [(q, op) for q, op in enumerate(steps) if x in self._index.reads[op]]
        readers = [(q, uses) for q, op in reading if (uses := self._on(t, op, m))]
        there = [*lies, *made, *coming]
        for _, uses in readers:
            row([*there, *_minus(uses)], least=0.0)
        if then:
            row([*there, *_minus(then)] if not pinned else [*kept, *coming, *_minus(then)], least=0.0)
        for other in self._memories:
            copy = self._copy.get((t, x, other, m))
            if copy is not None:
                row([*self._lies(t, x, other), *self._made(t, x, other), (copy, -1.0)], least=0.0)
                wanted = [use for _, uses in readers for use in uses]
                row([*self._lies(t, x, other), *wanted, (copy, -1.0)], least=0.0)
        if len(there) > 1:
            row(there, most=1.0)
        reasons = [*(use for _, uses in readers for use in uses), *then, *leaving]
        if kept and (value is None or t > value.held_until):
            row([*reasons, *_minus(kept)], least=0.0)
        if pinned:  # where it lies throughout it needs no copy; a copy stays to the stage's last reader
            end = max((q for q, _ in reading), default=-1)
            return [(q, [*kept, *coming] if q <= end else then) for q in range(len(steps))]
        return self._residency(t, x, kept, coming, dict(readers), then)

    def _residency(
        self, t: int, x: int, kept: Terms, coming: Terms, readers: Mapping[int, Terms], then: Terms
    ) -> list[tuple[int, Terms]]:
        """Per step how much is resident: until its producer's what was there, from then on what is still wanted.

        What is only copied from here leaves before the next step, which takes its space.
        """
        steps = self._steps[t]
        made = [term for memory in self._memories for term in self._made(t, x, memory)]
        first = steps.index(self._values[x].producer) + 1 if made else 0
        before = kept
        if coming and made:
            early = self._rows.column()
            self._rows.row([(early, 1.0), *made, *_minus(coming)], least=0.0)
            before = [*kept, (early, 1.0)]
        elif coming:
            before = [*kept, *coming]
        found = [(q, before) for q in range(first)]
        follow = then
        for q in reversed(range(first, len(steps))):
            if q in readers and follow:
                need = self._rows.column()
                for reason in (readers[q], follow):
                    self._rows.row([(need, 1.0), *_minus(reason)], least=0.0)
                follow = [(need, 1.0)]
            elif q in readers:
                follow = readers[q]
            found.append((q, follow))
        return found

    # ---- solving -----------------------------------------------------------------------------

    def solve(self, *, node_limit: int, time_limit: float) -> Answer:
        """Branch and bound, up to a number of nodes and of seconds. A limited answer is never `optimal`."""
        found = self._rows.solve(mip_rel_gap=0.0, node_limit=node_limit, time_limit=time_limit)
        if found.status == INFEASIBLE:
            return Answer("infeasible")
        limit = limit_of(found)
        low = None if self._least else found.mip_dual_bound
        bound = math.ceil(low * self._unit * (1 - 1e-6)) if low is not None and math.isfinite(low) else 0
        if found.x is None:
            return Answer("unknown", max(bound, 0), limit)
        chosen = {c for c, share in enumerate(found.x) if share > 0.5}
        reruns: list[list[int]] = [[] for _ in self._steps]
        for t, op in sorted(key for key, c in self._rerun.items() if c in chosen):
            reruns[t].append(op)
        return Answer(
            "feasible" if limit else "optimal",
            max(bound, 0),
            limit,
            [next(e for e in able if self._runs[op, op, e] in chosen) for op, able in enumerate(self._able)],
            reruns,
            frozenset(key for key, c in self._kept.items() if c in chosen),
            frozenset(key for key, c in self._copy.items() if c in chosen),
            {root: m for (root, m), c in self._home.items() if c in chosen},
            math.ceil((found.x[self._used] - 1e-3) * self._byte) if self._least else 0,
        )


def _minus(terms: Iterable[tuple[int, float]]) -> Terms:
    return [(column, -factor) for column, factor in terms]


def _sum(terms: Iterable[tuple[int, float]]) -> Terms:
    total: dict[int, float] = {}
    for column, factor in terms:
        total[column] = total.get(column, 0.0) + factor
    return list(total.items())
