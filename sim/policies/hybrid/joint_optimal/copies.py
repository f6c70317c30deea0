"""Offload as columns and rows of Checkmate's program: what leaves, what returns, and the link's time.

Stage t of the program is divided in two. While ops are recomputed, and while the device waits, nothing is known but
that the copies made then fit into that time. Then op t runs, from one instant to another, and memory is counted at
both: at the first with what has not left yet, at the second with what has begun to arrive. A copy may be spread over
several of these intervals, in any order and in parts, as long as all copies of one direction together take no longer
than each interval lasts. The engine's copies run one after the other, take their space before they start and keep
their source until they end. So every run of the engine is a solution, and the least time of a solution is a
lower bound on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.solvers.linear import Terms
from sim.solvers.milp import Program, Residency
from sim.solvers.nodes import Nodes
from sim.solvers.trip import Trip


class Copies:
    """The columns of copies.

    comes, during: per (stage, value) whether it returns before the stage's node runs; while that runs.
    stays: whether it is resident when that starts.
    """

    def __init__(self, nodes: Nodes, trips: dict[int, Trip]) -> None:
        """trips: per value that may leave."""
        self._nodes = nodes
        self._trips = trips
        self.comes: dict[tuple[int, int], int] = {}
        self.during: dict[tuple[int, int], int] = {}
        self.stays: dict[tuple[int, int], int] = {}
        self._arriving: dict[tuple[int, int, int], int] = {}  # (stage, half, value): space is taken at its end
        self._work: dict[tuple[int, int, int, int], int] = {}  # (stage, half, value, 0 out or 1 back): units of time
        self._stall: list[int] = []

    def has(self, stage: int, value: int) -> bool:
        """Whether the value may leave, and has been produced before that stage."""
        return value in self._trips and stage > self._nodes.values[value].producer

    # ---- an answer ---------------------------------------------------------------------------

    @property
    def values(self) -> Sequence[int]:
        """The values that may leave."""
        return list(self._trips)

    def lands(self, found: Sequence[float], stage: int, half: int, value: int) -> bool:
        """Whether in an answer a value returns in a half of a stage."""
        column = (self.during if half else self.comes).get((stage, value))
        return column is not None and found[column] > 0.5

    def begun(self, found: Sequence[float], value: int, stage: int) -> int:
        """The first stage in which the copy works that returns a value in some stage."""
        first = stage
        for t in range(stage, -1, -1):
            if t < stage and (self.lands(found, t, 0, value) or self.lands(found, t, 1, value)):
                break
            columns = (self._work.get((t, half, value, 1)) for half in (0, 1))
            if any(column is not None and found[column] > 1e-6 for column in columns):
                first = t
        return first

    def left(self, found: Sequence[float], value: int) -> int:
        """The stage after which the copy of a value that leaves is asked for."""
        for (stage, _, v, way), column in sorted(self._work.items()):
            if (v, way) == (value, 0) and found[column] > 1e-6:
                return stage - 1
        return self._nodes.values[value].producer

    # ---- columns -----------------------------------------------------------------------------

    def begin(self, program: Program, there: Sequence[Sequence[int]]) -> None:
        """The columns, and how the progress of copies goes on from one stage to the next."""
        self._stall = [program.column(high=float("inf"), cost=1.0) for _ in range(len(self._nodes))]
        for v in self._trips:
            self._value_columns(program, v, [t for t, values in enumerate(there) if v in values])

    def _value_columns(self, program: Program, v: int, stages: Sequence[int]) -> None:
        first = self._nodes.values[v].producer + 1
        unit = program.price_unit
        out, back = self._trips[v].out / unit, self._trips[v].back / unit
        progress: dict[int, Terms] = {0: [], 1: []}
        for t in stages:
            if t < first or t >= len(self._nodes):
                continue
            reads = t in self._nodes.values[v].readers
            self.stays[t, v] = program.run[0, 0] if reads else program.column(whole=True)
            for half in (0, 1):
                leaving = self._work[t, half, v, 0] = program.column(high=out)
                there = [(program.keep[t, v], -out)] if half == 0 else [(self.stays[t, v], -out)]
                if half == 0 and (t, self._nodes.values[v].producer) in program.run:
                    there.append((program.run[t, self._nodes.values[v].producer], -out))
                program.row([(leaving, 1.0), *there], most=0.0)
                progress[0] = [*progress[0], (leaving, 1.0)]
                program.row(progress[0], most=out)
                if t == first and half == 0:
                    continue
                self._return(program, t, half, v, out, back, progress)

    def _return(
        self, program: Program, t: int, half: int, v: int, out: float, back: float, progress: dict[int, Terms]
    ) -> None:
        """Whether a value returns in an interval, and how much of its copy is made in it."""
        lands = program.column(whole=True)
        (self.during if half else self.comes)[t, v] = lands
        taken = self._arriving[t, half, v] = program.column(whole=True)
        coming = self._work[t, half, v, 1] = program.column(high=back)
        state = program.column(high=back)  # ns of the copy that is under way at the interval's end
        program.row([(state, 1.0), (coming, -1.0), (lands, back), *((c, -f) for c, f in progress[1])], 0.0, 0.0)
        program.row([(state, 1.0), (taken, -back)], most=0.0)
        progress[1] = [(state, 1.0)]
        for column in (lands, taken):  # the copy on the host is complete
            program.row([(column, out), *((c, -f) for c, f in progress[0])], most=0.0)

    # ---- rows --------------------------------------------------------------------------------

    def value(self, program: Program, stage: int, value: int, steps: Sequence[int]) -> Residency:
        """The rows of a value; returns after which node (-1: the start) how much of it is resident.

        What returned in this stage is counted where it is read; nobody knows when it came. A value that was resident
        or is recomputed does not return in the same stage as well.
        """
        t, v = stage, value
        node = self._nodes.values[v]
        kept, then = program.keep.get((t, v)), program.keep.get((t + 1, v))
        made = program.run[t, node.producer] if node.producer in steps else None
        comes, during, stays = self.comes.get((t, v)), self.during.get((t, v)), self.stays.get((t, v))
        readers = [k for k in node.readers if k in steps and k != t]
        sources = [(c, 1.0) for c in (kept, made, comes) if c is not None]
        if stays is None:  # nothing reads it any more
            return []
        uses = [*(program.run[t, k] for k in readers), stays]
        for use in uses:
            program.row([*sources, (use, -1.0)], least=0.0)
        if then is not None:
            more = [] if during is None else [(during, 1.0)]
            program.row([(stays, 1.0), *more, (then, -1.0)], least=0.0)
        if comes is not None:
            alone = made is not None and len(self._nodes.produced_by[node.producer]) == 1
            program.row([(c, f) for c, f in sources if alone or c != made], most=1.0)
        left = program.reasons(uses, None, first=True)
        since = [c for c in (comes,) if c is not None]
        before = since if made is None else [*since, made]
        now = _less(program, left[0], before)
        lies: Residency = [(-1, now)]
        if made is not None:
            now = _less(program, left[0], since)
            lies.append((node.producer, now))
        for i, k in enumerate(readers):
            if comes is not None:
                read = program.column()
                program.row([(read, 1.0), (uses[i], -1.0), (comes, -1.0)], least=-1.0)
                lies.append((_before(steps, k), [*now, (read, 1.0)]))
            now = _less(program, left[i + 1], since)
            lies.append((k, now))
        arriving = self._arriving.get((t, 0, v))
        whole: Terms = [(stays, 1.0)]
        if arriving is not None:
            program.row([(stays, 1.0), (arriving, 1.0)], most=1.0)
            whole.append((arriving, 1.0))
        lies.append((_before(steps, t), whole))
        return lies

    def end(self, program: Program, stage: int, held: int) -> None:
        """What is resident when a node ends, and the link's time in the two parts of its stage."""
        t, n = stage, self._nodes
        excess: Terms = [(held, 1.0), (program.run[t, t], program.run_bytes[t])]
        for v in self._trips:
            stays = self.stays.get((t, v))
            if stays is None:
                continue
            then, size = program.keep.get((t + 1, v)), program.size[v]
            begun, coming = self._arriving.get((t, 0, v)), self._arriving.get((t, 1, v))
            if t not in n.values[v].readers:
                excess.append((stays, -size))
                excess += [] if then is None else [(then, size)]
                if then is not None and coming is not None:
                    program.row([(then, 1.0), (coming, 1.0)], most=1.0)
            excess += [] if begun is None else [(begun, -size)]
            excess += [] if coming is None else [(coming, size)]
        program.row(excess, most=program.room)
        recomputed = [(c, -n.cost[i] / program.price_unit) for (s, i), c in program.run.items() if s == t and i < t]
        for way in (0, 1):
            waiting: Terms = [(self._stall[t], -1.0), *recomputed]
            for half, time in ((0, 0.0), (1, n.cost[t] / program.price_unit)):
                work = [(c, 1.0) for v in self._trips if (c := self._work.get((t, half, v, way))) is not None]
                if work:
                    program.row([*work, *(waiting if half == 0 else [])], most=time)


def _before(steps: Sequence[int], node: int) -> int:
    """The step before a node's, -1 for the start."""
    place = steps.index(node)
    return steps[place - 1] if place else -1


def _less(program: Program, terms: Terms, columns: Sequence[int]) -> Terms:
    """Terms less some columns, at least 0."""
    if not columns or not terms:
        return terms
    rest = program.column()
    program.row([(rest, 1.0), *((c, -f) for c, f in terms), *((c, 1.0) for c in columns)], least=0.0)
    return [(rest, 1.0)]
