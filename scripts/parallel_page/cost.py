"""What a pipeline costs to lay out, plan and replay, per op, beside one stage of it and beside one plain device.

The same layers on one device are a straight sequence, which is computed as arrays; here the engine goes through their
events as well. All are processor times, the least of some tries in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from scripts.parallel_page.measure import MODELS, NO_LIMIT, PROFILE, SEQUENCE, Row
from sim.engine.prepare import prepare
from sim.engine.replay import run
from sim.engine.resolve import Resolved
from sim.experiment import problem_for
from sim.hardware.platform import Platform
from sim.layout import lay_out
from sim.log import EventLog
from sim.policies import load as load_policy
from sim.trace import Trace
from sim.units import parse_bytes
from workloads import transformer, with_stack

STAGES, MICRO_BATCHES, TRIES = 8, 64, 3
POLICIES = ("keep_all", "full_recompute", "selective_recompute")
WHAT = {
    "one device": {},
    "one stage of eight ranks": {"tp": 8, "sequence_parallel": True},
    "eight stages of eight ranks": {"tp": 8, "sequence_parallel": True, "pp": STAGES},
}
"""Layouts of GPT-3 175B, the first two of an eighth of its layers: what one device of the last one has."""


def cost() -> Iterator[Row]:
    """Each layout with each policy."""
    config = MODELS["GPT-3 175B"]
    for name, layout in WHAT.items():
        layers = config["n_layer"] * layout.get("pp", 1) // STAGES
        began = time.process_time()
        base = transformer(
            {**config, "n_layer": layers}, batch=MICRO_BATCHES, sequence=SEQUENCE, precision="mixed_bf16",
            attention="flash", loss="fused", optimizer="adamw_fused",
        )  # fmt: skip
        divided: dict[str, Any] = {**layout, "micro_batches": MICRO_BATCHES}
        trace, machine = lay_out(base, PROFILE, divided, kernels=partial(with_stack, stack="fused"))
        ops, built = len(trace.op_columns.name), time.process_time() - began
        platform = machine.with_budget(parse_bytes(NO_LIMIT))
        for policy in POLICIES:
            planned, replayed = _planned_and_replayed(trace, platform, policy)
            times = {"build_us": built, "plan_us": planned, "replay_us": replayed}
            row: Row = {"what": name, "policy": policy, "ops": ops}
            yield row | {key: round(1e6 * value / ops, 2) for key, value in times.items()}


def _planned_and_replayed(trace: Trace, platform: Platform, policy: str) -> tuple[float, float]:
    """Seconds for the plan, and for its replay, event by event."""
    plan, planned = _least(lambda: load_policy(policy).plan(problem_for(trace, platform)))

    def by_events() -> EventLog:
        prepared = prepare(trace, platform)
        resolved = Resolved(plan, platform, prepared)
        return run(plan, platform, prepared, resolved, fast=True, returned=None, recompute_limit=None)

    return planned, _least(by_events)[1]


def _least(call: Callable[[], Any]) -> tuple[Any, float]:
    found, least = None, float("inf")
    for _ in range(TRIES):
        began = time.process_time()
        found = call()
        least = min(least, time.process_time() - began)
    return found, least


__all__ = ["POLICIES", "WHAT", "cost"]
