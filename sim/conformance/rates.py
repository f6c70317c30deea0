"""Rates, part of law 4: no op, link, pool or CPU that launches is faster than the platform allows.

Each check is a necessary condition on the log: nothing here knows how bandwidth was shared.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from sim.conformance.ledger import Copy, Ledger
from sim.conformance.replayed import LawBroken
from sim.hardware.cost import op_times
from sim.hardware.dispatch import dispatched

NANO = 10**9
MOST_WINDOWS = 2000
"""Most starts of windows that are checked; a longer log is sampled evenly."""


class Use(NamedTuple):
    """A user of bandwidth: bytes that flow between `flows` and `end` (ns), of a row that began at `start`.

    surely: from when on they flow even if software delays them, which no log tells.
    """

    name: str
    start: int
    flows: int
    end: int
    bytes: int
    surely: int


def check_rates(ledger: Ledger) -> None:
    """Raise LawBroken where an op or a transfer is too fast, a link or pool carries too much, or an op is early."""
    _ops(ledger)
    _launches(ledger)
    links = ledger.log.platform.links
    uses: dict[str, list[Use]] = defaultdict(list)
    for copy in (*ledger.copies, *ledger.group_moves):
        _one_transfer(ledger, copy)
        fixed = sum(links[i].fixed for i in copy.route)
        flows = min(copy.start + fixed, copy.end)
        surely = max(flows, copy.end - -(-copy.bytes * NANO // min((links[i].rate for i in copy.route), default=1)))
        for i in copy.route:
            name = links[i].name
            uses[name].append(Use(name, copy.start, flows, copy.end, copy.bytes, surely))
    for link in links:
        _at_once(ledger, link.name, link.copy_engines)
        _windows(link.name, [(use, Fraction(1)) for use in uses[link.name]], link.rate)
    _pools(ledger, uses)


def _ops(ledger: Ledger) -> None:
    times = op_times(ledger.trace, ledger.log.platform)
    for work in ledger.works:
        if work.lane >= 0 and work.end - work.start < times.total[work.op]:
            name, least = ledger.op_names[work.op], int(times.total[work.op])
            raise LawBroken(f"op {name!r} ran {work.end - work.start} ns; it takes at least {least} ns")
        if work.lane >= 0 and work.lane != times.engine[work.op]:
            raise LawBroken(f"op {ledger.op_names[work.op]!r} ran on the wrong engine")


def _launches(ledger: Ledger) -> None:
    """No op of a main lane begins before the CPU has dispatched all that ran there until then, and it."""
    trace, platform = ledger.trace, ledger.log.platform
    known = dispatched(trace, platform, op_times(trace, platform).engine)
    if known is None:
        return
    for device in range(trace.devices):
        lane, at = platform.engine_for(device), known.once
        mine = [work for work in ledger.works if work.lane == lane and work.device == device]
        for work in sorted(mine, key=lambda work: (work.start, work.end)):
            at += int(known.each[work.op])
            if work.start < at:
                name = ledger.op_names[work.op]
                raise LawBroken(f"op {name!r} begins at {work.start} ns; the CPU has dispatched it at {at} ns")


def _one_transfer(ledger: Ledger, copy: Copy) -> None:
    links = [ledger.log.platform.links[link] for link in copy.route]
    fixed = 0 if copy.tensor < 0 else sum(link.fixed for link in links)  # a row of a group is one of many links
    whole = int(ledger.trace.tensor_columns.bytes[copy.tensor]) if copy.tensor >= 0 else 0
    for link in links:
        if link.codec and 0 < copy.bytes != whole and whole * NANO > link.codec * (copy.end - copy.start - fixed):
            raise LawBroken(
                f"link {link.name!r} compresses or restores {whole} B in {copy.end - copy.start} ns "
                f"({fixed} ns of them fixed); its codec takes {link.codec} B/s"
            )
        if copy.bytes * NANO > link.rate * (copy.end - copy.start - fixed):
            raise LawBroken(
                f"link {link.name!r} carries {copy.bytes} B in {copy.end - copy.start} ns ({fixed} ns of them fixed); "
                f"its rate is {link.rate} B/s"
            )


def _at_once(ledger: Ledger, name: str, most: int) -> None:
    """At most as many transfers as there are copy engines; a group may pause between its chunks, and is not counted."""
    links = ledger.log.platform.links
    mine = [copy for copy in ledger.copies if any(links[link].name == name for link in copy.route)]
    marks = sorted(
        [(copy.end, 0) for copy in mine if copy.end > copy.start] + [(c.start, 1) for c in mine if c.end > c.start]
    )
    busy = 0
    for time, begins in marks:
        busy += 1 if begins else -1
        if busy > most:
            raise LawBroken(f"link {name!r} has {busy} transfers at {time} ns; it can make {most} at once")


def _windows(name: str, uses: list[tuple[Use, Fraction]], rate: int) -> None:
    """In any window, the charged bytes of what lies wholly inside fit into its length."""
    uses = [(use, charge) for use, charge in uses if use.bytes and charge]
    if not uses:
        return
    starts = np.array([use.start for use, _ in uses])
    order = np.argsort([use.end for use, _ in uses], kind="stable")
    ends = np.array([use.end for use, _ in uses])[order]
    common = int(np.lcm.reduce([charge.denominator for _, charge in uses]))
    charged = np.array([int(use.bytes * charge * common) for use, charge in uses], object)[order]
    begins = starts[order]
    windows = np.unique(starts)
    for begin in windows[:: max(1, len(windows) // MOST_WINDOWS)].tolist():
        inside = begins >= begin
        total = np.cumsum(np.where(inside, charged, 0))
        limit = (ends - begin).astype(object) * (rate * common)
        over = np.flatnonzero(inside & (total * NANO > limit))
        if len(over):
            raise LawBroken(
                f"{name!r} carries {total[over[0]] / common:g} B from {begin} to {ends[over[0]]} ns; "
                f"its rate is {rate} B/s"
            )


def _pools(ledger: Ledger, uses: dict[str, list[Use]]) -> None:
    platform = ledger.log.platform
    times = op_times(ledger.trace, platform)
    shared = {member.name for pool in platform.pools for member in pool.members}
    for work in ledger.works:
        engine = platform.engines[work.lane].name if work.lane >= 0 else ""
        if engine in shared and times.bytes[work.op]:
            flows = min(work.end, work.start + int(times.fixed[work.op]))
            uses[engine].append(Use(engine, work.start, flows, work.end, int(times.bytes[work.op]), flows))
    limits = {link.name: link.rate for link in platform.links}
    for pool in platform.pools:
        if pool.rate is not None:
            charged = [(use, member.charge) for member in pool.members for use in uses[member.name]]
            _windows(pool.name, charged, pool.rate)
        for member in pool.members:
            if member.factor == 1 or member.name not in limits:
                continue
            others = [use for other in pool.members if other.name != member.name for use in uses[other.name]]
            for use in uses[member.name]:
                _slowed(pool.name, use, others, limits[member.name], member.factor)


def _slowed(pool: str, use: Use, others: list[Use], rate: int, factor: Fraction) -> None:
    """While another member of the pool is active, a user keeps only a part of its rate."""
    together, at = 0, use.flows
    for other in sorted((other for other in others if other.bytes), key=lambda other: other.surely):
        begin, end = max(at, other.surely), min(use.end, other.end)
        if end > begin:
            together, at = together + end - begin, end
    # an end is rounded up to the nanosecond, so that the last one of each may lie outside
    slack = 1 + len(others)
    alone = use.end - use.flows - together
    if use.bytes * NANO > rate * (alone + slack) + rate * factor * together:
        raise LawBroken(
            f"{use.name!r} carries {use.bytes} B in {use.end - use.flows} ns, {together} ns of them with others in "
            f"pool {pool!r}, where it keeps {float(factor):g} of its rate"
        )
