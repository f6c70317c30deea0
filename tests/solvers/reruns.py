"""Twins that share nothing with the solvers: brute force, Checkmate's program as published, small random graphs."""

from __future__ import annotations

import heapq
import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sim.trace import Trace, TraceBuilder


def mirror(costs: list[int], sizes: list[int]) -> Trace:
    """2n + 1 nodes in a row; node i of the first n is also read by node 2n - i."""
    count = len(costs)
    n = count // 2
    b = TraceBuilder({"model": "mirror"})
    t = [b.tensor(f"t{i}", size) for i, size in enumerate(sizes)]
    for i in range(count):
        reads = [t[i - 1]] * (i > 0) + [t[2 * n - i]] * (i > n)
        phase = "forward" if i < n else "backward"
        b.op(f"n{i}", phase=phase, reads=reads, writes=[t[i]], duration=costs[i])
    return b.build(outputs=(t[-1],), carry=())


def unit_mirror(n: int) -> Trace:
    return mirror([1] * (2 * n + 1), [1] * (2 * n + 1))


def mixed_mirror(n: int) -> tuple[Trace, int]:
    """Costs and sizes drawn from 1 to 9, backward twice the forward cost; and half the forward sizes as a budget."""
    draw = random.Random(1)
    cost = [draw.randint(1, 9) for _ in range(n)]
    size = [draw.randint(1, 9) for _ in range(n)]
    return mirror([*cost, 1, *(2 * c for c in cost[::-1])], [*size, 1, *size[::-1]]), sum(size) // 2


def least_time(trace: Trace, budget: int, *, staged: bool = True, keep_inputs: bool = True) -> int | None:
    """The least time within a budget, by A* over the resident sets; None if nothing fits.

    The ops that have not run yet take at least their own time, which is what A* adds.

    staged: before each op of the trace earlier ones run in order, each at most once, what is overwritten in place
    is not dropped before, and once overwritten it is recomputed once more for each op; else in any order.
    keep_inputs: what has no producer stays to the end; else a plan may drop it.
    """
    size, maker = trace.tensor_columns.bytes.tolist(), trace.producer.tolist()
    replaces = trace.tensor_columns.replaces.tolist()
    over = {old: maker[new] for new, old in enumerate(replaces) if old >= 0}  # what overwrites a tensor
    ops = [(frozenset(op.reads), frozenset(op.writes), op.workspace, op.duration or 0) for op in trace.ops]
    start = frozenset(t for t, by in enumerate(maker) if by < 0)
    if sum(size[t] for t in start) > budget:
        return None  # all inputs are there when an iteration starts
    fixed = (start if keep_inputs else frozenset()) | set(trace.outputs)
    rest = [sum(took for *_, took in ops[at:]) for at in range(len(ops) + 1)]
    # time with the rest, further first, then in order; then the state: op, last rerun, resident set
    queue: list[tuple[int, int, int, int, int, frozenset[int]]] = [(rest[0], 0, 0, 0, -1, start)]
    done: set[tuple[int, int, frozenset[int]]] = set()
    pushed = 0
    while queue:
        bound, _, _, at, last, here = heapq.heappop(queue)
        time = bound - rest[at]
        if at == len(ops):
            return time
        if (at, last, here) in done:
            continue
        done.add((at, last, here))
        follow = [(time, at, last, here - {t}) for t in here - fixed if not (staged and at <= over.get(t, -1))]
        for i in range(last + 1 if staged else 0, at + 1):
            reads, writes, workspace, took = ops[i]
            old = {replaces[t] for t in writes if replaces[t] >= 0}
            held = sum(size[t] for t in here) + sum(size[t] for t in writes if replaces[t] < 0) + workspace
            if reads | old <= here and held <= budget:
                where = (at + 1, -1) if i == at else (at, i if staged else -1)
                then = (here - old) | writes
                if staged and i == at:  # what was overwritten is recomputed once more for each op
                    then -= {t for t in then if over.get(t, at) < at}
                follow.append((time + took, *where, then))
        for then, *state in follow:
            pushed += 1
            heapq.heappush(queue, (then + rest[state[0]], -state[0], pushed, *state))
    return None


def published(trace: Trace, budget: int, *, relaxed: bool = False) -> float | None:
    """The optimum of Checkmate's program as printed, with FREE[t, (i, k)] <= R[t, k]; one result an op. None: none."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    cost = [op.duration or 0 for op in trace.ops]
    size = [int(trace.tensor_columns.bytes[op.writes[0]]) for op in trace.ops]
    edges = sorted((int(trace.producer[t]), op.id) for op in trace.ops for t in op.reads)
    count = len(cost)
    run = np.arange(count * count).reshape(count, count)
    keep = run + count * count
    used = keep + count * count
    free = {(t, e): 3 * count**2 + t * len(edges) + n for t in range(count) for n, e in enumerate(edges)}
    low, high = np.zeros(3 * count**2 + len(free)), np.ones(3 * count**2 + len(free))
    high[used.ravel()] = budget
    whole = np.ones(len(low))
    whole[used.ravel()] = 0
    rows: list[tuple[list[tuple[int, float]], float, float]] = []
    for t in range(count):
        low[run[t, t]] = 1
        high[run[t, t + 1 :]] = 0
        high[keep[t, t:]] = 0
        for i, k in edges:
            rows.append(([(run[t, i], 1), (keep[t, i], 1), (run[t, k], -1)], 0, np.inf))
            later = [(run[t, j], 1) for a, j in edges if a == i and j > k]
            hazards = [(run[t, k], -1), *later, *([(keep[t + 1, i], 1)] if t + 1 < count else [])]
            most = 1 + (t + 1 < count) + len(later)
            rows.append(([*hazards, (free[t, (i, k)], 1)], 0, np.inf))
            rows.append(([*hazards, (free[t, (i, k)], most)], -np.inf, most - 1))
            rows.append(([(free[t, (i, k)], 1), (run[t, k], -1)], -np.inf, 0))
        for i in range(count):
            if t + 1 < count:
                rows.append(([(keep[t + 1, i], 1), (keep[t, i], -1), (run[t, i], -1)], -np.inf, 0))
        first = [(used[t, 0], 1), (run[t, 0], -size[0]), *((keep[t, i], -size[i]) for i in range(count))]
        rows.append((first, 0, 0))
        for k in range(1, count):
            freed = [(free[t, (i, j)], size[i]) for i, j in edges if j == k - 1]
            rows.append(([(used[t, k], 1), (used[t, k - 1], -1), (run[t, k], -size[k]), *freed], 0, 0))
    price = np.zeros(len(low))
    price[run.ravel()] = np.tile(cost, count)
    cells = [(r, c, f) for r, (terms, _, _) in enumerate(rows) for c, f in terms]
    r, c, f = zip(*cells)
    matrix = csr_array((f, (r, c)), shape=(len(rows), len(low)))
    found: Any = milp(
        price,
        integrality=None if relaxed else whole,
        bounds=Bounds(low, high),
        constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
    )
    return None if found.x is None else float(found.fun)


@st.composite
def small_graphs(draw: st.DrawFn) -> Trace:
    """Up to 8 ops with one or two results, workspace, an input, one or two outputs, some costs or sizes of 0.

    In half of the graphs half of the ops overwrite something that was made before.
    """
    in_place = draw(st.booleans())
    b = TraceBuilder({"model": "small"})
    x = b.tensor("x", draw(st.sampled_from((0, 1, 2, 3, 9))), "input")
    made: list[int] = []
    for i in range(draw(st.integers(4, 8))):
        reads = draw(st.lists(st.sampled_from(made), max_size=3, unique=True)) if made else []
        if i > 1 and not reads:
            reads = made[-1:]
        if draw(st.integers(0, 4)) == 4:
            reads.append(x)
        sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
        writes = [b.tensor(f"t{i}.{j}", size) for j, size in enumerate(sizes)]
        if in_place and made and draw(st.booleans()):
            old = draw(st.sampled_from([t for t in reads if t != x] or made))
            reads = list(dict.fromkeys((*reads, old)))
            made.remove(old)
            writes.append(b.tensor(f"t{i}.over", b.bytes_of(old), replaces=old))
        workspace, took = draw(st.sampled_from((0, 0, 1, 3))), draw(st.integers(0, 6))
        b.op(f"o{i}", reads=reads, writes=writes, workspace=workspace, duration=took)
        made += writes
    more = draw(st.sampled_from(made)) if draw(st.booleans()) else made[-1]
    return b.build(outputs=tuple(dict.fromkeys((made[-1], more))), carry=())
