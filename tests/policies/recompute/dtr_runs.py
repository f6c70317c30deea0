"""Runs of online policies on a machine with one tier, and what the tests read from their logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.errors import OutOfMemory
from sim.experiment import simulate
from sim.hardware.platform import Allocator, Engine, Platform, Tier
from sim.log import CAUSE, WHY, EventLog
from sim.trace import Trace, TraceBuilder


def one_tier(budget: int, allocator: str = "exact") -> Platform:
    tier = Tier("hbm", budget, budget, 10**9, device=0, allocator=Allocator(allocator))
    return Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}),))


def loose(trace: Trace) -> Trace:
    """The same trace with weight gradients as temporaries: the prototype knows constants and the rest."""
    b = TraceBuilder(dict(trace.meta))
    for t in trace.tensors:
        b.tensor(t.name, t.bytes, "temporary" if t.role == "gradient" else t.role)
    for op in trace.ops:
        b.copy_op(op)
    return b.build(outputs=trace.outputs, carry=())


def cut(trace: Trace, count: int) -> Trace:
    """The first `count` ops; what later ops would read is an output, so that nobody counts it as dead."""
    made = {t for op in trace.ops[:count] for t in op.writes}
    b, new = TraceBuilder(), {}
    for t in trace.tensors:
        if t.id in made or trace.producer[t.id] < 0:
            new[t.id] = b.tensor(t.name, t.bytes, t.role)
    for op in trace.ops[:count]:
        b.copy_op(op, reads=[new[t] for t in op.reads], writes=[new[t] for t in op.writes])
    read_later = {t for op in trace.ops[count:] for t in op.reads}
    return b.build(outputs=[new[t] for t in sorted(made & (read_later | set(trace.outputs)))], carry=())


@dataclass(frozen=True)
class Story:
    """What a log says up to the end of the trace's last op.

    ran: (op, whether again) in order; dropped: tensors in order, freed dead ones among them; evicted: those
    that were not dead; peak: most bytes in the first tier.
    """

    log: EventLog
    ran: list[tuple[int, bool]]
    dropped: list[int]
    evicted: list[int]
    recompute_ns: int
    peak: int

    @property
    def recomputed(self) -> int:
        return sum(again for _, again in self.ran)

    @property
    def names(self) -> list[str]:
        """Of the dropped tensors."""
        return [self.log.trace.tensors[t].name for t in self.dropped]


def tell(log: EventLog) -> Story:
    rows = [row for row in log.intervals.tolist() if row[4] in (WHY["run"], WHY["recompute"])]
    last = max(i for i, row in enumerate(rows) if row[4] == WHY["run"])
    rows = rows[: last + 1]
    early = log.change("time") <= rows[-1][0]
    evicted = early & (log.change("cause") == CAUSE["dropped"])
    freed = early & (log.change("cause") == CAUSE["freed"])
    return Story(
        log=log,
        ran=[(row[5], row[4] == WHY["recompute"]) for row in rows],
        dropped=log.change("tensor")[evicted | freed].tolist(),
        evicted=log.change("tensor")[evicted].tolist(),
        recompute_ns=sum(row[1] - row[0] for row in rows if row[4] == WHY["recompute"]),
        peak=int(np.cumsum(log.changes[log.change("tier") == 0][:, 2]).max(initial=0)),
    )


def log_of(trace: Trace, platform: Platform, policy: str, **parameters: Any) -> EventLog:
    """The log of a run, also of one whose ops all ran but whose outputs do not fit together at the end."""
    try:
        return simulate(trace, platform, policy, **parameters).log
    except OutOfMemory as error:
        if error.log is None or (error.log.interval("why") == WHY["run"]).sum() < len(trace.ops):
            raise
        return error.log


def run(trace: Trace, budget: int, policy: str = "dtr", allocator: str = "exact", **parameters: Any) -> Story:
    story = tell(log_of(trace, one_tier(budget, allocator), policy, **parameters))
    assert story.log.counters["ignored_actions"] == 0
    assert story.peak <= budget
    return story
