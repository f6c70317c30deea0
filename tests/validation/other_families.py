"""More of PyTorch's own figures, for families, types and sizes that no rule was written from, beside ours.

`truth/make_more.py` made the file; its cases stand in `truth/cases.py`.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from sim.experiment import simulate
from sim.trace import Trace
from tests.validation.oracle import DATA, PHASE_COLUMNS, POLICIES, Peaks, machine, peaks_of
from workloads import transformer


@cache
def rows() -> dict[str, dict[str, Any]]:
    """Every case by its name."""
    found = json.loads((DATA / "pytorch_more.json").read_text(encoding="utf-8"))
    return {row["case"]: row for row in found["rows"]}


def phases_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The phases whose highest points are compared.

    Not the update's where it runs in the backward pass: hooks of one parameter each hold no temporary of another one,
    while our loop's ops count that of the parameter that was updated before in the old order.
    """
    return tuple(PHASE_COLUMNS)[:2] if row["policy"] == "optimizer_in_backward" else tuple(PHASE_COLUMNS)


def trace_of(row: dict[str, Any]) -> Trace:
    """The trace of a case, from its configuration alone."""
    return transformer(**row["arguments"])


@cache
def simulated(case: str) -> Peaks:
    """The peaks of one case as the engine has them."""
    row = rows()[case]
    policy, parameters = POLICIES[row["policy"]]
    return peaks_of(simulate(trace_of(row), machine(), policy, **parameters).log)
