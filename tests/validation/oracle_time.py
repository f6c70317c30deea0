"""Iteration times of real PyTorch runs, beside those predicted from the plain run alone."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sim.experiment import simulate
from tests.validation.oracle import DATA, POLICIES, machine
from workloads import transformer
from workloads.importers.optrace import kind_of, layer_of
from workloads.measured import Matched, MeasuredOp, with_measured

CASES = ("A", "B", "C", "F")
PHASES = {"forward": "forward", "backward": "backward", "optimizer": "update"}
VIEW = re.compile(
    r"^profiler|\.(_?(unsafe_)?view|t|transpose|expand|detach|alias|unsqueeze|slice|select|split|as_strided|lift_fresh"
    r"|_local_scalar_dense)\."
)

CONTEXT_NS = {"full_ckpt": 4_000, "selective_ckpt": 20_000}
"""What a checkpoint's hooks and contexts add in Python to each op that they see, forward and again in
backward. Measured on another machine than the runs below, on a loop of 180 ops on 64 elements (sin and
views): 3 to 5 us an op for a plain checkpoint, 20 to 24 us for one with selective contexts."""


class Prediction(NamedTuple):
    """One run: nanoseconds of the iteration measured (median), its quartiles, ours, and ours without CONTEXT_NS."""

    case: str
    policy: str
    measured: int
    low: int
    high: int
    ours: int
    bare: int

    @property
    def error(self) -> float:
        return self.ours / self.measured - 1

    @property
    def noise(self) -> float:
        """Half the distance of the quartiles, relative."""
        return (self.high - self.low) / 2 / self.measured


@cache
def given(case: str) -> dict[str, Any]:
    with gzip.open(DATA / f"pytorch_time_{case}.input.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


@cache
def truth() -> dict[str, Any]:
    return json.loads((Path(DATA) / "pytorch_time_truth.json").read_text(encoding="utf-8"))


@cache
def ops_of(case: str) -> tuple[MeasuredOp, ...]:
    """The measured ops of the plain run. An op of no module belongs where the op before it did."""
    found: list[MeasuredOp] = []
    layer = -1
    for op in given(case)["given"]["ops"]:
        phase = PHASES[op["phase"]]
        if op["module"]:
            layer = layer_of(op["module"])
        if phase == "update" or (found and found[-1].phase != phase):
            layer = -1 if not op["module"] else layer
        view = VIEW.search(op["op"]) is not None
        found.append(MeasuredOp(kind_of(op["op"], phase), phase, layer, round(op["us_median"] * 1000), view))
    return tuple(found)


@cache
def matched(case: str, extra_ns: int = 0) -> Matched:
    """The trace built from the configuration, with the durations of the plain run."""
    config = given(case)["config"]
    trace = transformer(
        {
            "model_type": "gpt2",
            "n_positions": config["seq"],
            **{key: config[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size", "activation_function")},
        },
        batch=config["batch"],
        sequence=config["seq"],
        precision=config["precision"],
        attention=config["attn"],
        optimizer=config["optimizer"],
        dropout=config["dropout"],
    )
    iteration = given(case)["given"]["iteration"]
    phases = {ours: round(iteration[theirs]["median_us"] * 1000) for theirs, ours in PHASES.items()}
    return with_measured(trace, ops_of(case), phase_ns=phases, extra_ns=extra_ns)


@cache
def predict(case: str, policy: str) -> Prediction:
    """One case under one policy; nothing of the run under that policy is used."""
    name, parameters = POLICIES[policy]
    total = truth()[case][policy]["total"]
    times = [
        simulate(matched(case, extra).trace, machine(), name, **parameters).log.end
        for extra in (CONTEXT_NS.get(policy, 0), 0)
    ]
    measured = [round(total[key] * 1000) for key in ("median_us", "p25_us", "p75_us")]
    return Prediction(case, policy, *measured, *times)


def predictions() -> list[Prediction]:
    """All cases under all policies."""
    return [predict(case, policy) for case in CASES for policy in ("none", "full_ckpt", "selective_ckpt")]
