"""Checkmate's integer program over nodes, solved by HiGHS through SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.solvers.nodes import Nodes


@dataclass(frozen=True, eq=False)
class Answer:
    """What a solver found. status: `optimal`, `feasible`, `infeasible` or `unknown`.

    stages: per stage the earlier nodes that run again (whole-number answers). kept: per (stage, value) how
    far that value lies there at the stage's start, between 0 and 1. objective, bound: ns of reruns.
    limit: which limit ended the search, "" for none.
    """
    status: str
    stages: Sequence[Sequence[int]] = ()
    kept: Any = None
    objective: float = math.inf
    bound: float = 0.0
    limit: str = ""
    info: Any = None


class Program:
    """Rows and columns of the program for a budget."""

    def __init__(self, nodes: Nodes, room: int) -> None:
        self.nodes, self.room = nodes, room
        self.cost: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole: list[int] = []
        self.rows: list[tuple[int, int, float]] = []
        self.least: list[float] = []
        self.most: list[float] = []
        self.run: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self._build()

    def column(self, cost=0.0, low=0.0, high=1.0, whole=0) -> int:
        self.cost.append(cost); self.low.append(low); self.high.append(high); self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms, least=-math.inf, most=math.inf, const=0.0):
        r = len(self.least)
        for col, val in terms:
            if col is None: continue
            self.rows.append((r, col, val))
        self.least.append(least - const); self.most.append(most - const)

    def _build(self):
        n = self.nodes
        runs, there = n.useful
        count = len(n)
        unit = math.gcd(*[v.size for v in n.values], *n.makes) or 1
        self.unit = unit
        room = self.room // unit
        scale = 1.0 if room < 10**4 else 1000.0 / room
        self.scale = scale
        for t in range(count + 1):
            for v in there[t]:
                fixed = t <= n.values[v].held_until or (t == count)
                self.keep[t, v] = self.column(0.0, 1.0 if fixed else 0.0, 1.0, 1)
            if t < count:
                for i in runs[t]:
                    self.run[t, i] = self.column(float(n.cost[i]), 0, 1, 1)
        one = self.column(0, 1, 1, 0)
        for t in range(count):
            self.run[t, t] = one
        for t in range(count):
            self.stage(t, [*runs[t], t], there[t], there[t + 1], unit, room, scale)

    def stage(self, t, steps, now, then, unit, room, scale):
        n = self.nodes
        run, keep = self.run, self.keep
        inside = set(steps)
        vals = sorted(set(now) | set(then) | {v for k in steps for v in n.made_by[k]})
        start = []
        change = {k: [] for k in steps}
        for v in vals:
            value = n.values[v]
            readers = [k for k in value.readers if k in inside]
            s, nxt = keep.get((t, v)), keep.get((t + 1, v))
            made = run.get((t, value.maker)) if value.maker in inside else None
            presence = [(c, 1.0) for c in (s, made) if c is not None]
            size = value.size // unit * scale if True else 0
            if not presence:
                assert not readers and nxt is None, (t, v)
                continue
            # dependencies
            for k in readers:
                self.row([*presence, (run[t, k], -1.0)], 0.0)
            if nxt is not None:
                self.row([*presence, (nxt, -1.0)], 0.0)
            if s is not None and made is not None and t > value.held_until:
                self.row(presence, most=1.0)
            if s is not None and t > value.held_until:
                self.row([(s, -1.0), (nxt, 1.0), *((run[t, k], 1.0) for k in readers)], 0.0)
            # occupancy chain
            if s is not None:
                start.append((s, size))
            lone = len(n.made_by[value.maker]) == 1
            # list of (from step, expr) ; expr = list of (col,coef)
            tail = [(nxt, 1.0)] if nxt is not None else []
            # build Z from the back
            z = [None] * len(readers)
            follow = nxt
            for idx in range(len(readers) - 1, -1, -1):
                k = readers[idx]
                first = idx == 0
                if first and (lone or made is None or (t,value.maker)==(t,t)):
                    break
                if follow is None:
                    z[idx] = run[t, k]; follow = z[idx]
                    continue
                if run[t, k] == run[t, t]:
                    z[idx] = run[t, t]; follow = z[idx]; continue
                col = self.column(0.0, 0.0, 1.0, 0)
                self.row([(col, 1.0), (run[t, k], -1.0)], 0.0)
                self.row([(col, 1.0), (follow, -1.0)], 0.0)
                z[idx] = col; follow = col
            if not size:
                continue
            # transitions
            if made is not None:
                k = value.maker
                # before k: s ; after: first occupancy
                if lone and (readers or nxt is not None):
                    after = presence if readers or True else tail
                    if not readers:
                        after = tail
                else:
                    after = [(z[0], 1.0)] if readers and z[0] is not None else (presence if readers else tail)
                change[k] += [(c, size * a) for c, a in after]
                if s is not None:
                    change[k].append((s, -size))
                current = after
            else:
                current = presence
            for idx, k in enumerate(readers):
                nextocc = [(z[idx + 1], 1.0)] if idx + 1 < len(readers) else tail
                change[k] += [(c, size * a) for c, a in nextocc] + [(c, -size * a) for c, a in current]
                current = nextocc
        # rows
        previous = None
        for k in steps:
            h = self.column(0.0, 0.0, room * scale, 0)
            if previous is None:
                self.row([(h, 1.0), *((c, -a) for c, a in merge(start))], 0.0, 0.0)
            else:
                p, hp = previous
                self.row([(h, 1.0), (hp, -1.0), *((c, -a) for c, a in merge(change[p]))], 0.0, 0.0)
            self.row([(h, 1.0), (run[t, k], n.makes[k] // unit * scale)], most=room * scale)
            previous = (k, h)

    def solve(self, relaxed=False, **options):
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
        r, c, v = zip(*self.rows)
        A = csr_array((v, (r, c)), shape=(len(self.least), len(self.cost)))
        res = milp(np.array(self.cost), integrality=None if relaxed else np.array(self.whole),
                   bounds=Bounds(np.array(self.low), np.array(self.high)),
                   constraints=LinearConstraint(A, np.array(self.least), np.array(self.most)), options=options)
        return res


def merge(terms):
    d = {}
    for c, a in terms:
        d[c] = d.get(c, 0.0) + a
    return [(c, a) for c, a in d.items() if a]
