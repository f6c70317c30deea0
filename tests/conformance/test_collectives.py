"""Law 3 on collectives, whose runs a log has as bytes on links: recomputed where the plan does so, else a fault."""

from dataclasses import replace

import numpy as np
import pytest

from sim.conformance import CHECKS, LawBroken, Replayed, run_policy
from sim.layout import lay_out
from sim.log import WHY
from sim.policies import load
from sim.trace import Trace
from workloads import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
LAYOUTS = (
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"cp": 4, "ring_attention": True},
    {"dp": 2, "zero": 3},
    {"tp": 2, "pp": 2, "micro_batches": 2},
)
LAWS = ("capacity", "values", "ops", "order", "tiling", "outcome", "carried")


def run_of(layout: dict[str, object], policy: str) -> Replayed:
    found, platform = lay_out(transformer(TINY, batch=4, sequence=16), "a100_80_sxm", layout)
    # as a workload of its own, with which a policy's rewrites are compared
    trace = Trace(found.tensor_columns, found.op_columns, outputs=found.outputs, carry=found.carry, meta=found.meta)
    return run_policy(load(policy), trace, platform)


def runs_of(run: Replayed, op: int) -> np.ndarray:
    """The rows of a collective's runs, in order of time."""
    log = run.log
    rows = np.flatnonzero((log.interval("why") == WHY["move"]) & (log.interval("op") == op))
    return rows[np.argsort(log.interval("start")[rows], kind="stable")]


def recomputed(run: Replayed) -> list[int]:
    ops = [op.id for op in run.trace.ops if op.kind == "collective"]
    return [op for op in ops if len(np.unique(run.log.interval("start")[runs_of(run, op)])) > 1]


@pytest.mark.parametrize("policy", ["full_recompute", "selective_recompute", "dtr", "swap_all"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_law_holds_where_layers_are_divided(layout, policy):
    run = run_of(layout, policy)
    assert run.done
    for law in LAWS:
        CHECKS[law](run)


def test_some_of_these_runs_recompute_collectives():
    assert recomputed(run_of(LAYOUTS[0], "full_recompute"))
    assert not recomputed(run_of(LAYOUTS[0], "keep_all"))


def with_another_run(run: Replayed, op: int, after: int) -> Replayed:
    """The same run, whose collective runs once more, right after run `after`, while its results are all there."""
    log, rows = run.log, runs_of(run, op)
    starts = np.unique(log.interval("start")[rows])
    copied = log.intervals[rows[log.interval("start")[rows] == starts[after]]].copy()
    shift = int(copied[:, 1].max()) - int(copied[:, 0].min())
    copied[:, :2] += shift
    return replace(run, log=replace(log, intervals=np.concatenate([log.intervals, copied])))


@pytest.mark.parametrize("policy", ["keep_all", "full_recompute"])
def test_a_collective_that_runs_again_unasked_is_caught(policy):
    run = run_of(LAYOUTS[0], policy)
    again = recomputed(run)
    op = again[0] if again else next(op.id for op in run.trace.ops if op.kind == "collective")
    CHECKS["ops"](run)
    with pytest.raises(LawBroken, match="runs 2 times"):
        CHECKS["ops"](with_another_run(run, op, after=0))
    if again:
        with pytest.raises(LawBroken, match="runs 2 times"):
            CHECKS["ops"](with_another_run(run, op, after=1))


def test_a_collective_recomputed_by_a_policy_that_declares_none_is_caught():
    run = run_of(LAYOUTS[0], "full_recompute")
    with pytest.raises(LawBroken, match=r"is recomputed at .* declares no recomputation"):
        CHECKS["ops"](replace(run, policy=load("vdnn")))  # it rewrites, too
