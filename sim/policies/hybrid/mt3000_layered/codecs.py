"""The codec on the way to DDR: which tensors are encoded there, and in how many bytes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from sim.errors import Infeasible
from sim.log import WHY, EventLog
from sim.plan import Plan, Problem
from sim.rewrites.encoding import may_encode
from sim.rewrites.rewrite import Codec, encode
from sim.trace.chain import saved_tensors
from sim.trace.graph import Trace

NARROWER = {"fp64": "fp32", "fp32": "fp16", "tf32": "fp16", "fp16": "fp8", "bf16": "fp8", "": "half"}
"""The type of half the width as which a tensor is encoded; integers and 8-bit types stay as they are."""


def encoded(problem: Problem, plan: Plan, host: str) -> Trace:
    """The trace with those tensors encoded that a trial run of the plan without a codec offloads.

    Only what forward produces, backward reads and nothing overwrites can be: an encode op follows its last use in
    forward, a decode op precedes its first in backward.
    """
    trace, dtype = problem.trace, problem.trace.tensor_columns.dtype
    offloaded = _offloaded(problem, plan, host)
    codecs: dict[int | str, Codec] = {
        t: Codec(NARROWER[dtype[t]], Fraction(1, 2), lossless=False)
        for t in saved_tensors(trace).tolist()
        if t in offloaded and dtype[t] in NARROWER and may_encode(trace, t) and t not in trace.outputs
    }
    return encode(trace, codecs) if codecs else trace


def _offloaded(problem: Problem, plan: Plan, host: str) -> set[int]:
    """The tensors that a run of a plan copies to a tier; up to where it fails, if it does."""
    try:
        log: EventLog | None = problem.evaluate(plan)
    except Infeasible as error:
        log = error.log
    if log is None:
        return set()
    into = [i for i, link in enumerate(log.platform.links, start=len(log.platform.engines)) if link.target == host]
    rows = (log.interval("why") == WHY["move"]) & np.isin(log.interval("lane"), into)
    return set(log.interval("tensor")[rows].tolist())
