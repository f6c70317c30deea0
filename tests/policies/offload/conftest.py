"""A device, its host, one link each way, a CPU; and what the tests ask of a run there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sim.experiment import Result, simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import WHY
from sim.trace import Trace

ROOMY = 1 << 60
GB = 10**9


def machine(
    capacity: int = ROOMY, *, rate: int = GB, fixed: int = 0, host: bool = True, cpu_rate: int = GB, pageable: int = 0
) -> Platform:
    """rate: bytes/s of both links (a GB/s is a byte a nanosecond); cpu_rate: of the CPU's memory, bytes/s.

    pageable: bytes/s of the links of a second host tier, 0 for none.
    """
    tiers = [Tier("hbm", capacity, capacity, GB, device=0)]
    engines = [Engine("npu", 0, "hbm", ("hbm",), {"fp32": GB})]
    links = []
    if host:
        tiers.append(Tier("host", ROOMY, ROOMY, cpu_rate))
        engines.append(Engine("cpu", -1, "host", ("host",), {"fp32": ROOMY}, main=False))
        links += [Link("d2h", "hbm", "host", rate, fixed), Link("h2d", "host", "hbm", rate, fixed)]
    if pageable:
        tiers.append(Tier("host_pageable", ROOMY, ROOMY, GB))
        links += [Link("d2p", "hbm", "host_pageable", pageable), Link("p2d", "host_pageable", "hbm", pageable)]
    return Platform("toy", tuple(tiers), tuple(engines), tuple(links))


@dataclass(frozen=True)
class Facts:
    """What a run came to, counted from its log alone. moves: (link, tensor, start, end) in order of start."""

    result: Result
    time: int
    peak: int
    host_peak: int
    moves: list[tuple[str, str, int, int]]
    out: dict[str, int]
    back: dict[str, int]

    def ran(self, *ops: str) -> list[tuple[int, int]]:
        """Start and end of the run of each op."""
        rows = self.result.events
        runs = rows[rows.why == "run"]
        times = {op: (int(a), int(b)) for op, a, b in zip(runs.op, runs.start_ns, runs.end_ns)}
        return [times[op] for op in ops]


def facts(result: Result) -> Facts:
    """Check what holds for every run, and count."""
    log = result.log
    assert log.complete
    assert log.counters["ignored_actions"] == 0
    assert log.counters["implicit_recomputes"] == 0
    changes, names = log.changes, log.trace.tensor_columns.name
    tiers = [int(np.cumsum(changes[changes[:, 1] == i, 2]).max(initial=0)) for i in range(len(log.platform.tiers))]
    for tier, peak in zip(log.platform.tiers, tiers, strict=True):
        assert peak <= tier.capacity
    moves = []
    out: dict[str, int] = {}
    back: dict[str, int] = {}
    for row in log.intervals[log.interval("why") == WHY["move"]].tolist():
        lane, tensor = log.platform.lanes[row[3]], names[row[6]]
        moves.append((lane, tensor, row[0], row[1]))
        side = out if lane.startswith("d2") else back
        side[tensor] = side.get(tensor, 0) + row[8]
    moves.sort(key=lambda move: (move[2], move[0]))
    return Facts(result, log.end, tiers[0], sum(tiers[1:]), moves, out, back)


@pytest.fixture
def run() -> Callable[..., Facts]:
    """Simulate a trace under a policy, with `budget` bytes on a machine made from the other options."""

    def go(trace: Trace, policy: str, budget: int = ROOMY, *, on: Platform | None = None, **parameters: Any) -> Facts:
        platform = machine(budget) if on is None else on.with_budget(budget)
        return facts(simulate(trace, platform, policy, **parameters))

    return go
