"""A machine with one tier, and what the tests ask of a run on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sim.experiment import Result, simulate
from sim.hardware.platform import Engine, Platform, Tier
from sim.log import WHY
from sim.trace import Trace

ROOMY = 1 << 60


@dataclass(frozen=True)
class Facts:
    """What a run came to, counted from its log alone."""

    result: Result
    peak: int
    time: int
    rerun: list[str]

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.result.log.counters)


@pytest.fixture
def run() -> Callable[..., Facts]:
    """Simulate a trace under a policy with `budget` bytes; every offline plan must be explicit.

    overhead: ns of a launch on the engine.
    """

    def go(trace: Trace, policy: str, budget: int = ROOMY, overhead: int = 0, **parameters: Any) -> Facts:
        tier = Tier("hbm", budget, budget, 10**9, device=0)
        platform = Platform("toy", (tier,), (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**9}, launch=overhead),), ())
        result = simulate(trace, platform, policy, **parameters)
        log = result.log
        assert log.complete
        assert log.counters["ignored_actions"] == 0
        assert log.counters["implicit_recomputes"] == 0
        peak = int(np.cumsum(log.change("delta")).max(initial=0))
        assert peak <= budget
        again = log.interval("op")[log.interval("why") == WHY["recompute"]]
        names = log.trace.op_columns.name
        return Facts(result, peak, log.end, [names[op] for op in again.tolist()])

    return go
