"""A drive with a region of single-level cells, which holds what the device cannot; the rest goes to its slow cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sim.declared import Time
from sim.errors import PolicyError
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Policy, by_parameter
from sim.solvers.load_curve import Absence, Curve, curve_of
from sim.solvers.longest_away import longest_away, most_away, parts
from sim.solvers.swap_trips import copies_in, scheduled
from sim.trace.index import TraceIndex
from sim.units import parse_time


@dataclass(frozen=True, kw_only=True)
class SlcCache(Policy):
    """Send what memory lacks to the fast region of a drive as long as it has space, then to its other cells.

    While more is resident than fits, the tensor that is away longest across the peak leaves. If its producer, with all
    that it reads resident anyway, recomputes it in less time than the drive reads it, it is dropped. Else it is written
    into the region if it returns within the horizon and fits there, else to the cells behind. What returns is trimmed,
    so that its space in the region is free again without folding. With `replacement`, the region's tensor that is
    needed last, or that came first, is folded to the cells behind where the newcomer is needed before it. Copies out
    begin early, copies back just in time.
    Source: a survey of memory optimisation for training on domestic platforms proposes such a region for hot
        activations, and compares it with a hard disk; it gives neither rule nor figure.
    Bounds: W bytes at once take min(W, C) / w_slc + max(0, W - C) / w_tlc on a region of C bytes. A footprint within
        the region never reaches the cells behind it. One pass over the offloads.
    Departs: all of it is this package's reading. Each of several devices has a part of the region, as it needs. The
        drive does not fold on its own while it is idle. It is slower than `swap_all` where a host has space, for it is
        about the drive and leaves the host's memory alone.

    store: `slc`, the region with the cells behind it; `tlc`, those cells alone; `hdd`, a hard disk, to compare with.
    replacement: what is folded where the region is full: nothing, so that newcomers pass it by (`none`), what is needed
        last (`farthest`), or what came first (`lru`).
    horizon: a tensor that returns later than this is not admitted to the region; None: whenever.
    recompute: whether a tensor may be dropped where recomputing it takes less time than reading it.
    Notes of the plan: `written`, by region the bytes sent there; `folded`, bytes that are to be; `recomputed`, how many
    tensors.
    Raises PolicyError for a negative time, or a platform without tiers of these kinds.
    """

    moves = True
    recomputes = True
    needs = frozenset({"slc"})
    fidelity = "reconstruction"
    rarely = "it moves only what the budget lacks, and recomputes only what is cheaper than a read of the drive"
    other_values = by_parameter(store="tlc", replacement="farthest", horizon=1, recompute=False)

    store: Literal["slc", "tlc", "hdd"] = "slc"
    replacement: Literal["none", "farthest", "lru"] = "none"
    horizon: Time | None = None
    recompute: bool = True

    def plan(self, problem: Problem) -> Plan:
        """What leaves each device, where to, and when it returns."""
        regions = [self._tier(problem, kind) for kind in (("slc", "tlc") if self.store == "slc" else (self.store,))]
        actions: list[Action] = []
        written = dict.fromkeys(regions, 0)
        folded = dropped = 0
        horizon = parse_time(self.horizon) if isinstance(self.horizon, str) else self.horizon
        offloads: list[tuple[Curve, set[Absence]]] = []
        for device in range(problem.trace.devices):
            home = problem.platform.home(device)
            curve = curve_of(problem, device, regions[0])
            chosen, _ = longest_away(curve, home.capacity)
            cheap = self._recomputed(problem, curve, chosen, regions[0], home.name)
            dropped += len(cheap)
            actions += [Drop(one.tensor, home.name, after=curve.ops[one.left]) for one in cheap]
            offloads.append((curve, set(chosen) - set(cheap)))
        space = parts(problem.platform.tier(regions[0]).capacity, [most_away(chosen) for _, chosen in offloads])
        for device, (curve, offloaded) in enumerate(offloads):
            home = problem.platform.home(device)
            stored = _Regions(problem, curve, regions, home.name, self.replacement, space[device])
            for one in sorted(offloaded, key=lambda one: (one.left, one.back, one.tensor)):
                stored.write(one, admitted=horizon is None or one.gap_ns <= horizon)
            actions += stored.actions(home.capacity)
            for region, bytes in stored.written.items():
                written[region] += bytes
            folded += stored.folded
        notes = {"written": written, "folded": folded, "recomputed": dropped}
        return Plan(problem.trace, tuple(actions), notes=notes)

    def _tier(self, problem: Problem, kind: str) -> str:
        """The tier of a kind that the devices write and read. Raises PolicyError where there is none."""
        platform = problem.platform
        for tier in platform.tiers:
            routes = platform.route(problem.home, tier.name), platform.route(tier.name, problem.home)
            if tier.kind == kind and tier.device == -1 and all(routes):
                return tier.name
        raise PolicyError(f"slc_cache: {platform.name} has no tier of kind {kind!r}; mt3000_survey_slc has one")

    def _recomputed(
        self, problem: Problem, curve: Curve, chosen: Sequence[Absence], region: str, home: str
    ) -> list[Absence]:
        """Those that their producer recomputes faster than the drive reads them, from what is resident anyway."""
        if not self.recompute:
            return []
        trace, index = problem.trace, TraceIndex(problem.trace)
        away = {one.tensor for one in chosen}
        found = []
        for one in chosen:
            op, back = int(trace.producer[one.tensor]), curve.ops[one.back]
            stays = all(
                t not in away and (trace.producer[t] < 0 or max(trace.readers(t)) >= back) for t in trace.reads(op)
            )
            alone = op not in index.communicating and op not in trace.op_columns.engine and index.until[op] > back
            if stays and alone and problem.cost.op_ns(op) < problem.cost.move_ns(one.tensor, region, home):
                found.append(one)
        return found


class _Regions:
    """What lies in which region, as tensors leave in order; regions: the fast one first; space: its bytes."""

    def __init__(
        self, problem: Problem, curve: Curve, regions: Sequence[str], home: str, replacement: str, space: int
    ) -> None:
        self._problem, self._curve, self._regions, self._home = problem, curve, regions, home
        self._replacement, self._free = replacement, space
        self._held: dict[Absence, int] = {}  # in the fast region, by when it came
        self._region: dict[Absence, str] = {}
        self._folds: list[Move] = []
        self.written = dict.fromkeys(regions, 0)
        self.folded = 0

    def write(self, one: Absence, *, admitted: bool) -> None:
        """Find a place for a tensor that leaves."""
        for other in [other for other in self._held if other.back <= one.left]:
            self._release(other)  # it has returned, and was trimmed
        fast, slow = self._regions[0], self._regions[-1]
        if fast != slow and (not admitted or not self._fits(one)):
            self._put(one, slow)
            return
        self._put(one, fast)
        if fast != slow:
            self._free -= one.bytes
            self._held[one] = one.left

    def _fits(self, one: Absence) -> bool:
        """Whether the fast region has space, or gets it by folding what is needed after the newcomer."""
        victims: list[Absence] = []
        space = self._free
        if self._replacement != "none":
            by = (lambda v: -v.back) if self._replacement == "farthest" else (lambda v: self._held[v])
            for victim in sorted(self._held, key=by):
                if space >= one.bytes:
                    break
                if victim.back > one.back:
                    victims.append(victim)
                    space += victim.bytes
        if space < one.bytes:
            return False
        for victim in victims:
            self._release(victim)
            self._region[victim] = self._regions[-1]
            self._folds.append(Move(victim.tensor, self._regions[-1], after=self._curve.ops[one.left]))
            self.folded += victim.bytes
        return True

    def _release(self, one: Absence) -> None:
        del self._held[one]
        self._free += one.bytes

    def _put(self, one: Absence, region: str) -> None:
        self._region[one] = region
        self.written[region] += one.bytes

    def actions(self, limit: int) -> list[Action]:
        """Folds, copies out and back, and waits where memory is full."""
        move, home = self._problem.cost.move_ns, self._home
        timed = {
            replace_times(one, move(one.tensor, home, region), move(one.tensor, region, home)): region
            for one, region in self._region.items()
        }
        goes = {(one.tensor, self._curve.ops[one.left]): region for one, region in timed.items()}
        trips = scheduled(self._curve, list(timed), limit)
        folded = {fold.tensor for fold in self._folds}
        out: list[Action] = [*self._folds]
        for trip in trips:
            region = self._regions[0] if trip.tensor in folded else goes[trip.tensor, trip.leaves]
            out.append(Move(trip.tensor, region, after=trip.leaves))
            out += [] if trip.wait is None else [Wait(trip.tensor, before=trip.wait)]
        return [*out, *copies_in(trips, home)]


def replace_times(one: Absence, out_ns: int, in_ns: int) -> Absence:
    """The same absence with the times of copies to and from its region."""
    return one._replace(out_ns=out_ns, in_ns=in_ns)
