"""What a replay needs of a trace on a platform, as flat lists made once and shared by all runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sim.errors import ProfileError, TraceError
from sim.hardware.cost import op_times
from sim.hardware.platform import Engine, Platform
from sim.log import WHY
from sim.trace.graph import Trace
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


@dataclass(frozen=True, eq=False)
class Prepared:
    """Flat lists, one entry per op or tensor; ids of engines and tiers are positions in the platform.

    plain: per op, of one that takes a fixed time on its device's main engine, produces every result in new space, is
        in no group and no codec; None for others.
    operands: per op what it reads and writes.
    touched: per op its operands, and what the program lets go at its end.
    uses: per tensor what keeps it from being freed: its readers, and the program while it holds it.
    releases: per op what the program lets go.
    freeable: per tensor whether it may be freed once nobody reads it: it has a producer and is not an output.
    permanent: per tensor whether it is never freed, since nothing overwrites it either.
    why: per op what the log calls its first run.
    plans: of plans that have run, by id: a weak reference, and their actions by anchor.
    """

    trace: Trace
    order: tuple[tuple[int, ...], ...]
    plain: list[Plain | None]
    reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    operands: list[tuple[int, ...]]
    touched: list[tuple[int, ...]]
    engine: list[int]
    device: list[int]
    fixed: list[int]
    flow_bytes: list[int]
    flow_rate: list[int]
    total: list[int]
    workspace: list[int]
    main: tuple[int, ...]
    home: list[int]
    reach: list[int]
    reach_order: list[tuple[int, ...]]
    charges: Mapping[str, Charges]
    size: list[int]
    producer: list[int]
    replaces: list[int]
    replaced_by: list[int]
    uses: list[int]
    releases: Mapping[int, tuple[int, ...]]
    freeable: list[bool]
    permanent: list[bool]
    groups: Mapping[str, tuple[int, ...]]
    group_of: Mapping[int, str]
    why: list[int]
    plans: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def logged(self, op: int, why: str) -> int:
        """What the log calls a run of an op: an encoding or decoding is `codec`, recomputed it is `recompute`."""
        return self.why[op] if why == "run" else WHY[why]

    @cached_property
    def ideal_ns(self) -> int:
        """Every op run once, one after the other; an op of no time counts a nanosecond."""
        return sum(max(1, ns) for ns in self.total)

    @cached_property
    def first_tier(self) -> list[int]:
        """Per tensor the home tier of the engine that first makes or uses it; device 0's for an idle one."""
        c = self.trace.op_columns
        homes = np.array([self.home[engine] for engine in self.engine] or [0], np.int64)
        first = np.full(len(self.size), self.home[self.main[0]], np.int64)
        for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
            op = np.repeat(np.arange(len(c.name)), np.diff(start))
            tensors, at = np.unique(ids, return_index=True)
            unmade = np.ones(len(tensors), bool) if ids is c.write_ids else self.trace.producer[tensors] < 0
            first[tensors[unmade]] = homes[op[at[unmade]]]
        return first.tolist()


_KEPT = 4


def prepare(trace: Trace, platform: Platform) -> Prepared:
    """Prepared lists; the same object for the same trace on platforms that differ in capacities only.

    Raises TraceError on a group without its other members, ProfileError where a device, an engine or a
    type is missing.
    """
    timing = replace(platform, tiers=tuple(replace(t, capacity=0) for t in platform.tiers), budget=None, facts=())
    key = timing.content_hash
    # kept on the trace and freed with it: a table outside would keep the lists alive, and they the trace
    known: OrderedDict[str, Prepared] = vars(trace).setdefault("_prepared", OrderedDict())
    if key not in known:
        known[key] = _prepare(trace, platform)
        while len(known) > _KEPT:
            known.popitem(last=False)
    return known[key]


def _prepare(trace: Trace, platform: Platform) -> Prepared:
    if trace.devices > platform.devices:
        raise ProfileError(f"{platform.name} has {platform.devices} device(s); the trace needs {trace.devices}")
    c, t = trace.op_columns, trace.tensor_columns
    times = op_times(trace, platform)
    engine = times.engine.tolist()
    charges = _charges(platform)
    pooled = {i for i, unit in enumerate(platform.engines) if unit.name in charges}
    main = tuple(platform.engine_for(d) for d in range(trace.devices))
    reads = _rows(c.read_start.tolist(), c.read_ids.tolist(), unique=True)
    writes = _rows(c.write_start.tolist(), c.write_ids.tolist())
    operands = [(*read, *written) for read, written in zip(reads, writes, strict=True)]
    device = c.device.tolist()
    size = t.bytes.tolist()
    total, workspace = times.total.tolist(), c.workspace.tolist()
    flow_bytes, flow_rate, fixed = times.bytes.tolist(), times.rate.tolist(), times.fixed.tolist()
    for i in range(len(writes)):
        if engine[i] not in pooled:
            fixed[i], flow_bytes[i] = total[i], 0
    replaces, codes = t.replaces.tolist(), (c.kind == KINDS.index("codec")).tolist()
    plain: list[Plain | None] = [None] * len(writes)
    for i, written in enumerate(writes):
        beside = flow_bytes[i] > 0 or engine[i] != main[device[i]] or i in c.group or codes[i]
        if not beside and all(replaces[w] < 0 for w in written):
            sizes = tuple((w, size[w]) for w in written)
            plain[i] = Plain(reads[i], sizes, sum(s for _, s in sizes), workspace[i], total[i])
    may_free = freeable(trace)
    reaches = [_reach_order(unit, platform) for unit in platform.engines]
    return Prepared(
        trace=trace,
        order=tuple(tuple(i for i, d in enumerate(device) if d == own) for own in range(trace.devices)),
        plain=plain,
        reads=reads,
        writes=writes,
        operands=operands,
        touched=[(*pair, *c.releases[i]) if i in c.releases else pair for i, pair in enumerate(operands)],
        engine=engine,
        device=device,
        fixed=fixed,
        flow_bytes=flow_bytes,
        flow_rate=flow_rate,
        total=total,
        workspace=workspace,
        main=main,
        home=[tiers[0] for tiers in reaches],
        reach=[sum(1 << tier for tier in tiers) for tiers in reaches],
        reach_order=reaches,
        charges=charges,
        size=size,
        producer=trace.producer.tolist(),
        replaces=replaces,
        replaced_by=trace.replaced_by.tolist(),
        uses=uses(trace).tolist(),
        releases=c.releases,
        freeable=may_free.tolist(),
        permanent=(~may_free & (trace.replaced_by < 0)).tolist(),
        groups=_groups(trace),
        group_of=dict(c.group),
        why=[WHY["codec"] if is_codec else WHY["run"] for is_codec in codes],
    )


def _reach_order(unit: Engine, platform: Platform) -> tuple[int, ...]:
    """The tiers that an engine reads and writes in place, its home first."""
    return tuple(platform.tier_ids[name] for name in dict.fromkeys((unit.home, *unit.reaches)))


def _rows(start: list[int], ids: list[int], unique: bool = False) -> list[tuple[int, ...]]:
    rows = [tuple(ids[a:b]) for a, b in pairwise(start)]
    if unique:
        rows = [row if len(set(row)) == len(row) else tuple(dict.fromkeys(row)) for row in rows]
    return rows


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
        kinds = sorted(trace.ops[op].kind for op in members)
        if len({int(c.device[op]) for op in members}) != len(members) or len(members) < 2:
            raise TraceError(
                f"group {name!r} lacks a member: {c.name[members[0]]!r} is alone on its device, "
                f"and each member needs a device of its own ({len(members)} found)"
            )
        if ("send" in kinds or "recv" in kinds) and kinds != ["recv", "send"]:
            raise TraceError(f"group {name!r} lacks a member: it joins {', '.join(kinds)}, not one send and one recv")
    return {name: tuple(members) for name, members in groups.items()}
