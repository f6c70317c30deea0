"""More of PyTorch's own figures, for families, types and sizes that no rule was written from, beside ours.

`truth/make_more.py` made the file; its cases stand in `truth/cases.py`.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from sim.experiment import simulate
from sim.trace import Trace
from tests.validation.oracle import DATA, POLICIES, Peaks, machine, peaks_of
from workloads import transformer


@cache
def rows() -> dict[str, dict[str, Any]]:
    """Every case by its name."""
    found = json.loads((DATA / "pytorch_more.json").read_text(encoding="utf-8"))
    return {row["case"]: row for row in found["rows"]}


def trace_of(row: dict[str, Any]) -> Trace:
    """The trace of a case, from its configuration alone."""
    return transformer(**row["arguments"])


@cache
def simulated(case: str) -> Peaks:
    """The peaks of one case as the engine has them."""
    row = rows()[case]
    policy, parameters = POLICIES[row["policy"]]
    return peaks_of(simulate(trace_of(row), machine(), policy, **parameters).log)
