"""What a replay needs of a trace on a platform, made once and shared by all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.columns import TraceColumns
from sim.errors import ProfileError, TraceError
from sim.hardware.cost import OpTimes, first_engines, op_times
from sim.hardware.dispatch import Dispatched, dispatched
from sim.hardware.platform import Engine, Platform
from sim.log import WHY, Ints
from sim.trace.columns import row_sums
from sim.trace.graph import Trace
from sim.trace.kept import kept, of_structure
from sim.trace.liveness import freeable, uses
from sim.trace.op import KINDS

Charges = tuple[tuple[int, Fraction, Fraction], ...]
"""Of one user: (pool, bytes charged per byte of payload, factor while another member is active)."""


class Plain(NamedTuple):
    """An op without anything special.

    writes: the results with their sizes.
    out: bytes of all results.
    workspace: in bytes.
    """

    reads: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    out: int
    workspace: int
    ns: int


class Renewal(NamedTuple):
    """An op without anything special but that each result takes the place of a value.

    pairs: the old value and the new one.
    """

    reads: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    ns: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """A trace on a platform: ids of engines and tiers are positions in the platform.

    The event path works on flat lists, one entry per op or tensor; each is made when it is first asked for, since the
    array path needs none.

    times: the times of all ops, as columns.
    main: per device its main engine.
    reach_order: per engine the tiers that it reads and writes in place, its home first.
    charges: see `Charges`, by the name of a link or engine.
    flowing: per op whether part of its time depends on bandwidth that it shares.
    groups: per group its members.
    dispatch: what the CPU takes to dispatch ops, None where the device never waits for that.
    plans: of plans that have run, by id: a weak reference, their actions by anchor, and what paths make of them.
    bare_run: what the array path makes of a plan without actions, once it has been asked to; see `array_path.Rows`.
    """

    trace: Trace
    times: OpTimes
    main: tuple[int, ...]
    reach_order: list[tuple[int, ...]]
    charges: Mapping[str, Charges]
    flowing: NDArray[np.bool_]
    groups: Mapping[str, tuple[int, ...]]
    dispatch: Dispatched | None
    plans: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    bare_run: list[Any] = field(default_factory=list)

    # ---- engines and time --------------------------------------------------------------------

    @cached_property
    def home(self) -> list[int]:
        """Per engine its home tier."""
        return [tiers[0] for tiers in self.reach_order]

    @cached_property
    def reach(self) -> list[int]:
        """Per engine the tiers within its reach, as bits."""
        return [sum(1 << tier for tier in tiers) for tiers in self.reach_order]

    @cached_property
    def engine(self) -> list[int]:
        """Per op the engine that runs it."""
        return _listed(self.times.engine)

    @cached_property
    def total(self) -> list[int]:
        """Per op its time in ns when nothing shares its bandwidth."""
        return _listed(self.times.total)

    @cached_property
    def fixed(self) -> list[int]:
        """Per op the part of it that depends on nothing else."""
        return _listed(np.where(self.flowing, self.times.fixed, self.times.total))

    @cached_property
    def flow_bytes(self) -> list[int]:
        """Per op the bytes that flow through pools."""
        return _listed(np.where(self.flowing, self.times.bytes, 0))

    @cached_property
    def flow_rate(self) -> list[int]:
        """Per op the most bytes/s at which they do."""
        return _listed(self.times.rate)

    @cached_property
    def dispatched(self) -> list[int]:
        """Per op the ns that the CPU takes to dispatch it; [] where the device never waits for that."""
        return [] if self.dispatch is None else _listed(self.dispatch.each)

    @cached_property
    def ideal_ns(self) -> int:
        """Every op run once, one after the other; an op of no time counts a nanosecond."""
        return sum(_listed(np.maximum(self.times.total, 1)))  # in Python, where no sum is too large

    @cached_property
    def is_sequence(self) -> bool:
        """Whether the ops run one after the other: on one engine of one device, whose time nothing else changes."""
        alone = self.trace.devices == 1 and not self.groups and not self.flowing.any()
        return alone and bool((self.times.engine == self.main[0]).all())

    # ---- ops ---------------------------------------------------------------------------------

    @of_structure
    def device(self) -> list[int]:
        """Per op its device."""
        return _listed(self.trace.op_columns.device)

    @of_structure
    def order(self) -> tuple[tuple[int, ...], ...]:
        """Per device its ops."""
        device = self.trace.op_columns.device
        return tuple(tuple(_listed(np.flatnonzero(device == own))) for own in range(self.trace.devices))

    @cached_property
    def reads(self) -> Sequence[tuple[int, ...]]:
        """Per op what it reads, each once."""
        return self.trace.distinct_reads

    @cached_property
    def writes(self) -> Sequence[tuple[int, ...]]:
        """Per op what it writes."""
        return self.trace.all_writes

    @of_structure
    def operands(self) -> list[tuple[int, ...]]:
        """Per op what it reads and writes."""
        return [(*read, *written) for read, written in zip(self.reads, self.writes, strict=True)]

    @of_structure
    def touched(self) -> list[tuple[int, ...]]:
        """Per op its operands, and what the program lets go at its end."""
        releases = self.releases
        if not releases:
            return self.operands
        return [(*pair, *releases[i]) if i in releases else pair for i, pair in enumerate(self.operands)]

    @cached_property
    def workspace(self) -> list[int]:
        """Per op its workspace in bytes."""
        return _listed(self.trace.op_columns.workspace)

    @cached_property
    def plain(self) -> list[Plain | None]:
        """Per op what there is of one that takes a fixed time on its device's main engine, produces every result in new
        space, is in no group and no codec; None for others."""
        beside, c = self._is_special.copy(), self.trace.op_columns
        beside[list(self.in_place)] = True
        size, out = self.size, row_sums(c.write_start, self.trace.tensor_columns.bytes[c.write_ids]).tolist()
        rows = zip(beside.tolist(), self.reads, self.writes, out, self.workspace, self.total, strict=True)
        return [
            None if special else Plain(reads, tuple([(w, size[w]) for w in written]), bytes, workspace, ns)
            for special, reads, written, bytes, workspace, ns in rows
        ]

    @cached_property
    def renewals(self) -> dict[int, Renewal]:
        """The ops that would be plain if they had new space for their results, without workspace, and what they
        overwrite."""
        special, replaces, found = self._is_special, self.replaces, dict[int, Renewal]()
        for op in self.in_place:
            pairs = tuple((replaces[new], new) for new in self.writes[op])
            if not special[op] and not self.workspace[op] and all(old >= 0 for old, _ in pairs):
                found[op] = Renewal(self.reads[op], pairs, self.total[op])
        return found

    @cached_property
    def exchanges(self) -> dict[int, Plain]:
        """The collectives among symmetric ranks that would be plain if their time were known, as ops of no time."""
        engine, main, device, found = self.engine, self.main, self.device, dict[int, Plain]()
        for op in self.trace.op_columns.ring:
            alone = len(self.groups.get(self.group_of.get(op, ""), ())) == 1 and engine[op] == main[device[op]]
            if alone and not self.workspace[op] and op not in self.in_place:
                sizes = tuple((t, self.size[t]) for t in self.writes[op])
                found[op] = Plain(self.reads[op], sizes, sum(bytes for _, bytes in sizes), 0, 0)
        return found

    @cached_property
    def exchanges_over(self) -> dict[int, Renewal]:
        """The collectives among symmetric ranks that overwrite what they read in place, as ops of no time."""
        engine, main, device, replaces = self.engine, self.main, self.device, self.replaces
        found = dict[int, Renewal]()
        for op in self.trace.op_columns.ring:
            pairs = tuple((replaces[new], new) for new in self.writes[op])
            alone = len(self.groups.get(self.group_of.get(op, ""), ())) == 1 and engine[op] == main[device[op]]
            if alone and pairs and not self.workspace[op] and all(old >= 0 for old, _ in pairs):
                found[op] = Renewal(self.reads[op], pairs, 0)
        return found

    @cached_property
    def _is_special(self) -> NDArray[np.bool_]:
        """Whether each op takes no fixed time on its device's main engine, is in a group, or is a codec."""
        c = self.trace.op_columns
        special: NDArray[np.bool_] = (
            self.flowing | (self.times.engine != np.array(self.main)[c.device]) | self._is_codec
        )
        special[list(c.group)] = True
        return special

    @of_structure
    def why(self) -> list[int]:
        """Per op what the log calls its first run."""
        return _listed(self.first_run)

    @of_structure
    def first_run(self) -> Ints:
        """The same as a column."""
        return np.where(self._is_codec, WHY["codec"], WHY["run"])

    @of_structure
    def _is_codec(self) -> NDArray[np.bool_]:
        is_codec: NDArray[np.bool_] = self.trace.op_columns.kind == KINDS.index("codec")
        return is_codec

    @cached_property
    def group_of(self) -> Mapping[int, str]:
        """The group of each op that is in one."""
        return self.trace.op_columns.group

    def logged(self, op: int, why: str) -> int:
        """What the log calls a run of an op: an encoding or decoding is `codec`, recomputed it is `recompute`."""
        return self.why[op] if why == "run" else WHY[why]

    # ---- tensors -----------------------------------------------------------------------------

    @cached_property
    def size(self) -> list[int]:
        """Per tensor its bytes."""
        return _listed(self.trace.tensor_columns.bytes)

    @of_structure
    def producer(self) -> list[int]:
        """Per tensor the op that produces it, -1 for none."""
        return _listed(self.trace.producer)

    @of_structure
    def replaces(self) -> list[int]:
        """Per tensor the value that it overwrites, -1 for none."""
        return _listed(self.trace.tensor_columns.replaces)

    @of_structure
    def in_place(self) -> frozenset[int]:
        """The ops that overwrite a value in place."""
        return frozenset(_listed(self.trace.producer[self.trace.tensor_columns.replaces >= 0]))

    @of_structure
    def replaced_by(self) -> list[int]:
        """Per tensor the value that overwrites it, -1 for none."""
        return _listed(self.trace.replaced_by)

    @of_structure
    def uses(self) -> list[int]:
        """Per tensor what keeps it from being freed: its readers, and the program while it holds it."""
        return _listed(uses(self.trace))

    @cached_property
    def releases(self) -> Mapping[int, tuple[int, ...]]:
        """Per op what the program lets go."""
        return self.trace.op_columns.releases

    @cached_property
    def columns(self) -> TraceColumns:
        """The columns of the array path."""
        return kept(self.trace.structure, "columns", None, lambda: TraceColumns(self.trace))

    @of_structure
    def deaths(self) -> tuple[list[int], list[list[int]]]:
        """Per tensor the last op that uses it, -1 for none, and per op what may be freed at its end if none is
        recomputed, in the order of `touched`."""
        columns = self.columns
        order = np.argsort(columns.free_op, kind="stable")
        ends = np.searchsorted(columns.free_op[order], np.arange(1, len(self.total) + 1)).tolist()
        freed = _listed(columns.freed[order])
        return _listed(columns.last_use), [freed[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @of_structure
    def freeable(self) -> list[bool]:
        """Per tensor whether it may be freed once nobody reads it: it has a producer and is not an output."""
        return _listed(freeable(self.trace))

    @of_structure
    def permanent(self) -> list[bool]:
        """Per tensor whether it is never freed, since nothing overwrites it either."""
        return _listed(~freeable(self.trace) & (self.trace.replaced_by < 0))

    @cached_property
    def first_tier(self) -> list[int]:
        """Per tensor the home tier of the engine that first makes or uses it; device 0's for an idle one."""
        engines = first_engines(self.trace, self.times.engine, self.main[0])
        return _listed(np.array(self.home, np.int64)[engines])


def prepare(trace: Trace, platform: Platform) -> Prepared:
    """What is prepared; the same object for the same trace on platforms that differ in capacities only.

    Raises TraceError on a group without its other members, ProfileError where a device, an engine or a
    type is missing.
    """
    return kept(trace, "prepared", platform.timing_hash, lambda: _prepare(trace, platform))


def _prepare(trace: Trace, platform: Platform) -> Prepared:
    if trace.devices > platform.devices:
        raise ProfileError(f"{platform.name} has {platform.devices} device(s); the trace needs {trace.devices}")
    times = op_times(trace, platform)
    charges = _charges(platform)
    pooled = np.array([unit.name in charges for unit in platform.engines])
    return Prepared(
        trace=trace,
        times=times,
        main=tuple(platform.engine_for(d) for d in range(trace.devices)),
        reach_order=[_reach_order(unit, platform) for unit in platform.engines],
        charges=charges,
        flowing=pooled[times.engine] & (times.bytes > 0),
        groups=_groups(trace),
        dispatch=dispatched(trace, platform, times.engine),
    )


def _reach_order(unit: Engine, platform: Platform) -> tuple[int, ...]:
    """The tiers that an engine reads and writes in place, its home first."""
    return tuple(platform.tier_ids[name] for name in dict.fromkeys((unit.home, *unit.reaches)))


def _listed(column: NDArray[Any]) -> list[Any]:
    values: list[Any] = column.tolist()
    return values


def _charges(platform: Platform) -> dict[str, Charges]:
    """Per link or engine the pools that it draws from; a link with several copy engines is a pool of its own."""
    found: dict[str, list[tuple[int, Fraction, Fraction]]] = {}
    for p, pool in enumerate(platform.pools):
        for member in pool.members:
            found.setdefault(member.name, []).append((p, member.charge, member.factor))
    for i, link in enumerate(platform.links):
        if link.copy_engines > 1:
            found.setdefault(link.name, []).append((len(platform.pools) + i, Fraction(1), Fraction(1)))
    return {name: tuple(rows) for name, rows in found.items()}


def _groups(trace: Trace) -> dict[str, tuple[int, ...]]:
    c = trace.op_columns
    groups: dict[str, list[int]] = {}
    for op, name in sorted(c.group.items()):
        groups.setdefault(name, []).append(op)
    for name, members in groups.items():
        kinds = sorted(KINDS[c.kind[op]] for op in members)
        alone = len(members) == 1 and members[0] not in c.ring
        if len({int(c.device[op]) for op in members}) != len(members) or alone:
            raise TraceError(
                f"group {name!r} lacks a member: {c.name[members[0]]!r} is alone on its device, "
                f"and each member needs a device of its own ({len(members)} found)"
            )
        rings = {c.ring.get(op) for op in members}
        if len(members) > 1 and any(ring and (len(rings) > 1 or ring.ranks != len(members)) for ring in rings):
            raise TraceError(
                f"group {name!r}: its {len(members)} ops need one and the same ring, of {len(members)} ranks; "
                f"{c.name[members[0]]!r} has {c.ring.get(members[0])}"
            )
        if ("send" in kinds or "recv" in kinds) and kinds != ["recv", "send"]:
            raise TraceError(f"group {name!r} lacks a member: it joins {', '.join(kinds)}, not one send and one recv")
    return {name: tuple(members) for name, members in groups.items()}
