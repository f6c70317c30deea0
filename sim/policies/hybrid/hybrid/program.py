"""The relaxed choice as a linear program: shares of each result kept, offloaded and recomputed, over time windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.policies.hybrid.hybrid.results import KEEP, OFFLOAD, RECOMPUTE, Results
from sim.solvers.linear import INF, LinearProgram

WINDOWS = 256
MS, MB = 1e-6, 1e-6
"""Times and sizes are numbers near 1 in there."""
OVER = 1e3
"""Price in ms of a MB above the budget: no plan pays it that can avoid it."""
TRAFFIC = 1e-3
"""Price of link time that stalls nobody, relative to a stall: what need not leave stays."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Profile:
    """What the program takes as given on one device; times in ns, sizes in bytes.

    ops: the device's ops in order. ns: how long each takes. base: bytes resident while each runs, everything that is
    chosen for left out between its last use in forward and its first in backward.
    need: per choice the op before which its results must be back. late: for how long one that was offloaded was waited
    for, by place.
    """

    ops: Sequence[int]
    ns: Sequence[int]
    base: Sequence[int]
    need: Sequence[int]
    late: Mapping[int, int]


def shares(results: Results, places: Sequence[int], profile: Profile, budget: int, host: int) -> Mapping[int, Floats]:
    """Per choice (a place in `Results.saved`) the shares kept, offloaded and recomputed that take the least time.

    None at all where the solver finds no answer, as HiGHS does now and then for numbers of very different size.

    places: the device's choices. budget: bytes of the device. host: bytes that offloaded results may take there.

    Time is divided into windows of as many ops each. In each a copy in either direction takes as much of the link's
    time as the window has, stalls and recomputation in it included. Bytes resident at the op of a window that needs
    most: the base, what is kept, what waits to be copied out, what has been copied back early.
    """
    saved, rows = results.saved, LinearProgram()
    count, place = len(profile.ops), {op: p for p, op in enumerate(profile.ops)}
    starts = _starts(profile.base)
    number = len(starts)
    window = np.repeat(np.arange(number), np.diff([*starts, count])).tolist()

    passed = _passed(profile)
    needs = {i: place[profile.need[i]] for i in places}
    rerun, when, off, keep = _choices(rows, results, profile, needs, host)

    # per window, in link time: what is copied out and back, stalls, what waits, what is early; bytes kept
    out, back, stall, waits, early, kept = (
        [rows.column(high=INF, cost=price) for _ in range(number)] for price in (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    )
    over = rows.column(high=INF, cost=OVER)
    times: list[list[tuple[int, float]]] = [[] for _ in range(number)]
    leave: list[list[tuple[int, float]]] = [[] for _ in range(number)]
    come: list[list[tuple[int, float]]] = [[] for _ in range(number)]
    stays: list[list[tuple[int, float]]] = [[] for _ in range(number)]
    at: list[list[tuple[int, float]]] = [[] for _ in range(number)]
    more = [0.0] * number
    for op, column in rerun.items():
        times[window[when[op]]].append((column, -profile.ns[place[op]] * MS))
    for i in places:
        s, size = saved[i], saved[i].bytes * MB
        leave[window[place[s.last]]].append((off[i], -s.out_ns * MS))
        come[window[needs[i]]].append((off[i], s.back_ns * MS))
        first = window[place[s.last]] + 1
        end = window[needs[i] - 1] + 1  # the first window that begins when it is back
        if first < end:
            for w, sign in ((first, 1.0), (end, -1.0)):
                if w < number and i in keep:
                    stays[w].append((keep[i], -sign * size))
                elif w < number:
                    more[w] += sign * size
                    stays[w] += [(off[i], sign * size), *([(rerun[s.op], sign * size)] if s.op in rerun else [])]
        if needs[i] in starts:
            at[window[needs[i]]].append((off[i], -size))
    rate_out = sum(saved[i].bytes for i in places) * MB / max(sum(saved[i].out_ns for i in places) * MS, 1e-9)
    rate_back = sum(saved[i].bytes for i in places) * MB / max(sum(saved[i].back_ns for i in places) * MS, 1e-9)
    for w, (start, end) in enumerate(pairwise([*starts, count])):
        lasts = (passed[end] - passed[start]) * MS
        for link in (out, back):
            rows.row([(link[w], 1.0), (stall[w], -1.0), *times[w]], most=lasts)
        now = [(waits[w], 1.0), (out[w], 1.0), *leave[w]], [(early[w], 1.0), (back[w], -1.0), *come[w]]
        use = [(kept[w], 1.0), (over, -1.0), *at[w]]
        if w:
            now[0].append((waits[w - 1], -1.0))
            now[1].append((early[w - 1], -1.0))
            use += [(waits[w - 1], rate_out), (early[w - 1], rate_back)]
        for terms in now:
            rows.row(terms, 0.0, 0.0)
        rows.row([(kept[w], 1.0), *([(kept[w - 1], -1.0)] if w else []), *stays[w]], more[w], more[w])
        rows.row(use, most=(budget - profile.base[start]) * MB)
    answer = rows.solve()
    if answer.x is None:
        return {}
    x = np.clip(np.asarray(answer.x, np.float64), 0.0, 1.0)
    found = {i: _share(x[off[i]], x[rerun[saved[i].op]] if saved[i].op in rerun else 0.0) for i in places}
    return found | {i: _share(x[off[i]], 1.0 - x[off[i]] - x[column]) for i, column in keep.items()}


def _choices(
    rows: LinearProgram, results: Results, profile: Profile, needs: Mapping[int, int], host: int
) -> tuple[dict[int, int], dict[int, int], dict[int, int], dict[int, int]]:
    """The columns of what is chosen, and what holds for them whatever the windows.

    needs: per choice the position of the op that needs it. Returns per op that may be recomputed, for itself or because
    that needs it, its column and the first position for which it is; per choice the column of its offload; and of what
    forward alone reads the column of keeping it.
    """
    saved, place = results.saved, {op: p for p, op in enumerate(profile.ops)}
    passed = _passed(profile)
    rerun: dict[int, int] = {}
    when: dict[int, int] = {}
    off: dict[int, int] = {}
    keep: dict[int, int] = {}
    for i, needed in needs.items():
        s = saved[i]
        if s.recomputes:
            for op in (s.op, *results.behind(s.op, s.need)):
                if op not in rerun:
                    rerun[op] = rows.column(cost=profile.ns[place[op]] * MS)
                when[op] = min(when.get(op, len(place)), needed)
        copies = s.out_ns + s.back_ns
        late = profile.late.get(i, 0) + max(copies - passed[needed] + passed[place[s.last] + 1], 0)
        off[i] = rows.column(high=float(s.offloads), cost=(TRAFFIC * copies + late) * MS)
        if s.forward_only:
            keep[i] = rows.column(high=1.0)
        taken = [off[i], *([keep[i]] if i in keep else []), *([rerun[s.op]] if s.op in rerun else [])]
        rows.row([(column, 1.0) for column in taken], 0.0, 1.0)
    for op, column in rerun.items():
        for t in results.index.reads[op]:
            producer, i = results.index.producer[t], results.of.get(t, -1)
            again = [(rerun[producer], 1.0)] if producer in rerun and producer != op else []
            if i in keep:
                rows.row([*again, (keep[i], 1.0), (off[i], 1.0), (column, -1.0)], least=0.0)
            elif again and results.is_lost(t, profile.ops[when[op]]):
                rows.row([*again, (column, -1.0)], least=0.0)
    rows.row([(off[i], saved[i].bytes * MB) for i in needs], 0.0, host * MB)
    return rerun, when, off, keep


def _passed(profile: Profile) -> list[int]:
    """Per position the time of all ops before it, and of all."""
    passed: list[int] = np.concatenate(([0], np.cumsum(np.array(profile.ns, np.int64)))).tolist()
    return passed


def _share(offloaded: float, recomputed: float) -> Floats:
    """What of a result is kept, offloaded and recomputed."""
    share = np.zeros(3)
    share[OFFLOAD], share[RECOMPUTE] = offloaded, recomputed
    share[KEEP] = max(1.0 - share[OFFLOAD] - share[RECOMPUTE], 0.0)
    return share


def _starts(base: Sequence[int]) -> list[int]:
    """Where windows begin: at the op that needs most of each of as many parts of equal length, and at the first op."""
    number = min(len(base), WINDOWS)
    cuts = [len(base) * w // number for w in range(number + 1)]
    return sorted({0, *(max(range(a, b), key=lambda p: base[p]) for a, b in pairwise(cuts))})


def rounded(results: Results, found: Mapping[int, Floats]) -> dict[int, int]:
    """Whole choices, in program order: what is rounded up in one result is rounded down in those that follow.

    What forward alone reads is rounded on its own: it frees nothing that the others need.
    """
    choice: dict[int, int] = {}
    owed = {False: np.zeros(3), True: np.zeros(3)}
    for i in sorted(found):
        s = results.saved[i]
        due = owed[s.forward_only]
        due += found[i] * s.bytes
        allowed = [what for what in (KEEP, OFFLOAD, RECOMPUTE) if found[i][what] > 1e-6]
        choice[i] = max(allowed, key=lambda what: (due[what], -what))
        due[choice[i]] -= s.bytes
    return choice
