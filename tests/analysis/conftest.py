"""One run drawn by hand, and random logs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import CAUSE, STALL, WHY, EventLog
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace

GPU, CPU, OUT, BACK = range(4)
HBM, HOST = range(2)


def machine(devices: int = 1, capacity: int = 1000, energy: dict[str, float] | None = None) -> Platform:
    """Per device a tier of 1 GB/s (1 byte a ns) and an engine of 1 FLOP a ns; one host, links of 1 byte a ns."""
    tiers = [Tier(f"hbm{d}" if d else "hbm", capacity, capacity, 10**9, device=d) for d in range(devices)]
    host = Tier("host", 10_000, 10_000, 10**9, kind="ddr")
    mains = [
        Engine(f"gpu{d}" if d else "gpu", d, tiers[d].name, (tiers[d].name,), {"fp32": 10**9}) for d in range(devices)
    ]
    cpu = Engine("cpu", -1, "host", ("host",), {"fp32": 10**8}, main=False)
    links = [Link("out", "hbm", "host", 10**9), Link("back", "host", "hbm", 10**9)]
    return Platform("toy", (*tiers, host), (*mains, cpu), tuple(links), energy=energy or {})


def log_of(
    trace: Trace,
    platform: Platform,
    intervals: Sequence[tuple],
    changes: Sequence[tuple] = (),
    reserved: Sequence[tuple[int, int, int]] = (),
    end: int | None = None,
    **more: object,
) -> EventLog:
    """Rows with names of why, stall cause and change cause instead of codes."""
    spans = [(s, e, d, lane, WHY[w], op, t, STALL[c], b) for s, e, d, lane, w, op, t, c, b in intervals]
    rows = [(at, tier, delta, t, op, CAUSE[cause]) for at, tier, delta, t, op, cause in changes]
    last = max([row[1] for row in spans] + [row[0] for row in rows], default=0)
    return EventLog(
        trace,
        platform,
        np.array(spans, np.int64).reshape(-1, 9),
        np.array(rows, np.int64).reshape(-1, 6),
        np.array(reserved, np.int64).reshape(-1, 3),
        last if end is None else end,
        **more,
    )


@pytest.fixture
def step() -> EventLog:
    """f makes a of x and w; g makes y of a; h makes gw of y and a; u overwrites w. `a` leaves during g.

    ns    0    100   150   300    350     550       650    660   760  770
    gpu   f     g           stall: a       g again   stall  h     u
    out               a ----------->
    back                           a ----->
    """
    b = TraceBuilder({"samples": 4, "tokens": 40, "model_flops": 300})
    x, w = b.tensor("x", 50, "input"), b.tensor("w", 100, "weight", layer=0)
    a, y = b.tensor("a", 200, "activation", layer=0), b.tensor("y", 10, "activation", layer=1)
    g, w2 = b.tensor("gw", 100, "gradient", layer=0), b.tensor("w2", 100, "weight", layer=0, replaces=w)
    common = {"dtype": "fp32"}
    b.op("f", "matmul", reads=[x, w], writes=[a], flops=100, bytes=0, layer=0, **common)
    b.op("g", "matmul", reads=[a], writes=[y], flops=200, bytes=0, layer=1, workspace=30, **common)
    b.op("h", "matmul", reads=[y, a], writes=[g], flops=100, bytes=0, phase="backward", layer=0, **common)
    b.op("u", "optimizer", reads=[g, w], writes=[w2], flops=10, bytes=0, phase="update", layer=0, **common)
    trace = b.build()
    intervals = [
        (0, 100, 0, GPU, "run", 0, -1, "", 0),
        (100, 300, 0, GPU, "run", 1, -1, "", 0),
        (150, 350, 0, OUT, "move", 1, a, "", 200),
        (350, 550, 0, BACK, "move", 2, a, "", 200),
        (300, 550, 0, GPU, "stall", 2, a, "transfer", 0),
        (550, 650, 0, GPU, "recompute", 1, -1, "", 0),
        (650, 660, 0, GPU, "stall", 2, -1, "space", 0),
        (660, 760, 0, GPU, "run", 2, -1, "", 0),
        (760, 770, 0, GPU, "run", 3, -1, "", 0),
    ]
    changes = [
        (0, HBM, 50, x, -1, "placed"),
        (0, HBM, 100, w, -1, "placed"),
        (0, HBM, 200, a, 0, "made"),  # 350
        (100, HBM, -50, x, 0, "freed"),
        (100, HBM, 10, y, 1, "made"),
        (100, HBM, 30, -1, 1, "workspace"),  # 340
        (150, HOST, 200, a, 1, "moved in"),
        (300, HBM, -30, -1, 1, "workspace"),
        (350, HBM, -200, a, 1, "moved out"),  # 110
        (350, HBM, 200, a, 2, "moved in"),  # 310
        (550, HOST, -200, a, 2, "moved out"),
        (550, HBM, 30, -1, 1, "workspace"),
        (650, HBM, -30, -1, 1, "workspace"),
        (660, HBM, 100, g, 2, "made"),  # 410: the peak
        (760, HBM, -10, y, 2, "freed"),
        (760, HBM, -200, a, 2, "freed"),
        (760, HBM, 0, -1, 3, "workspace"),
        (770, HBM, -100, w, 3, "overwritten"),
        (770, HBM, 100, w2, 3, "made"),
        (770, HBM, -100, g, 3, "freed"),
    ]
    return log_of(trace, machine(), intervals, changes)
