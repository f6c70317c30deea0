"""Small random graphs, and every plan for them that recomputes and offloads a little, replayed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.hardware.platform import Platform
from sim.plan import Action, Drop, Move, Plan, Recompute
from sim.trace import Trace, TraceBuilder


def small_graph(seed: int, forward: int = 3, *, in_place: bool = False) -> Trace:
    """A forward of a few ops and a backward that reads its results in reverse, with odd sizes, times and workspace.

    in_place: whether every other forward op writes its result into the storage of what the one before has written.
    """
    draw = random.Random(seed)
    b = TraceBuilder({"model": "small", "seed": seed})
    results: list[int] = []
    for i in range(forward):
        if in_place and i % 2:
            old = results.pop()
            results.append(b.tensor(f"f{i}.out", b.bytes_of(old), replaces=old))
            b.op(f"f{i}", reads=[old], writes=results[-1:], duration=draw.randint(1, 12))
            continue
        reads = results[-1:] + draw.sample(results[:-1], min(len(results[:-1]), draw.randint(0, 1)))
        out = [b.tensor(f"f{i}.out{k}", draw.randint(1, 9)) for k in range(1 + (draw.random() < 0.2))]
        b.op(f"f{i}", reads=reads, writes=out, duration=draw.randint(1, 12), workspace=draw.choice((0, 0, 3)))
        results.append(draw.choice(out))
    gradient: list[int] = []
    for i in reversed(range(forward)):
        saved = {results[min(max(i - 1, 0), len(results) - 1)]} | set(draw.sample(results, int(draw.random() < 0.4)))
        out = [b.tensor(f"b{i}.out", draw.randint(1, 4), "temporary")]
        b.op(f"b{i}", phase="backward", reads=[*gradient, *sorted(saved)], writes=out, duration=draw.randint(1, 16))
        gradient = out
    return b.build(outputs=gradient, carry=())


def fastest(trace: Trace, platform: Platform, *, moves: int, reruns: int) -> int | None:
    """The least makespan of the plans that `plans` lists and that fit; None where none does."""
    best: int | None = None
    for actions in plans(trace, moves, reruns):
        try:
            end = replay(Plan(trace, actions), platform).end
        except TiersimError:
            continue
        best = end if best is None else min(best, end)
    return best


def plans(trace: Trace, moves: int, reruns: int) -> Iterator[tuple[Action, ...]]:
    """Every choice of so many trips of a tensor to the host and back, and of so many ops recomputed, in program order.

    A trip goes out after some op and is asked back before or after a later one. What is recomputed is dropped as
    soon as nothing reads it before.
    """
    count = len(trace.ops)
    trips = [
        (
            [Move(t, "host", after=out)],
            [Move(t, "hbm", before=back) if side else Move(t, "hbm", after=back)],
        )
        for t in range(len(trace.tensor_columns.name))
        if t not in trace.outputs and trace.producer[t] >= 0 and trace.replaced_by[t] < 0
        for out in range(int(trace.producer[t]), int(trace.last_use[t]))
        for back in range(out + 1, int(trace.last_use[t]) + 1)
        for side in (0, 1)
        if side or back < trace.last_use[t]
    ]
    places = [(anchor, op) for anchor in range(2, count) for op in range(anchor - 1)]
    for n, m in product(range(moves + 1), range(reruns + 1)):
        for trip in combinations(trips, n):
            if len({out[0].tensor for out, _ in trip}) < n:
                continue
            for rerun in combinations(places, m):
                dropped = [_drop(trace, anchor, op, t) for anchor, op in rerun for t in trace.writes(op)]
                if any(drop is None for drop in dropped):
                    continue
                yield (
                    *(drop for drop in dropped if drop is not None),
                    *(move for _, back in trip for move in back),
                    *(Recompute(op, before=anchor) for anchor, op in rerun),
                    *(move for out, _ in trip for move in out),
                )


def _drop(trace: Trace, anchor: int, op: int, tensor: int) -> Drop | None:
    """The drop of a result that is recomputed before `anchor`; None where nothing reads it from there on."""
    readers = [int(r) for r in trace.readers(tensor)]
    if not any(r >= anchor for t in trace.writes(op) for r in trace.readers(t)):
        return None
    return Drop(tensor, after=max((r for r in readers if r < anchor), default=op))
