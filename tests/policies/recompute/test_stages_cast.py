"""Checkpoints of a stage under autocast: what they hold is released by the stage itself, not by another one's ops."""

import pytest

from sim import simulate
from sim.plan import Drop
from workloads.transformer import transformer


@pytest.mark.parametrize(("stages", "micro_batches", "schedule"), [(4, 8, "1f1b"), (2, 2, "gpipe")])
@pytest.mark.parametrize("policy", ["full_recompute", "selective_recompute"])
def test_copies_of_weights_are_dropped_by_their_own_stage(
    policy: str, stages: int, micro_batches: int, schedule: str
) -> None:
    trace = transformer("gpt2", batch=micro_batches, sequence=128, precision="amp_bf16")
    parallel = {"pp": stages, "micro_batches": micro_batches, "schedule": schedule}
    result = simulate(trace, "a100_80_sxm", policy, parallel=parallel)
    assert result.plan is not None
    device, producer = result.trace.op_columns.device, result.trace.producer
    drops = [action for action in result.plan.actions if isinstance(action, Drop)]
    assert drops
    for drop in drops:
        at = drop.after if drop.after is not None else drop.before
        assert device[at] == device[producer[drop.tensor]]
