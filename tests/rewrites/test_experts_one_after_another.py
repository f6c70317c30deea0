"""Experts that run one after another (`loop`) on many devices: closed forms, the law, and what it finds."""

from __future__ import annotations

from functools import cache

import pytest

from sim.errors import LayoutError
from sim.layout import lay_out
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers
from sim.rewrites.values import departures
from sim.trace import Trace
from tests.rewrites.test_expert_parallel import MIXTRAL
from tests.rewrites.test_replicas import rebuilt
from workloads import transformer

H, FFN = MIXTRAL["hidden_size"], MIXTRAL["intermediate_size"]


@cache
def step(precision: str = "mixed_bf16") -> Trace:
    given = {"precision": precision, "attention": "flash", "loss": "fused", "optimizer": "adamw_fused"}
    return transformer({**MIXTRAL, "experts_implementation": "loop"}, batch=4, sequence=16, **given)


def loads(layer: int = 0) -> list[int]:
    """Rows of each expert, no multiples of the samples."""
    rows = step().meta["expert_loads"][0][str(layer)]
    assert any(each % 4 for each in rows)
    return rows


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("mixed_bf16", {"dp": 2, "micro_batches": 2, "zero": 3}),
        ("amp_bf16", {"dp": 4, "zero": 1}),
        ("amp_bf16", {"tp": 2, "sequence_parallel": True}),
        ("mixed_bf16", {"tp": 2, "dp": 2, "pp": 2, "micro_batches": 2, "zero": 1, "schedule": "zb_h1"}),
    ],
)
def test_experts_compute_the_same(precision: str, layout: dict) -> None:
    base = step(precision)
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize(("dp", "n"), [(2, 1), (4, 1), (2, 2)])
def test_rows_and_work_of_a_replica(dp: int, n: int) -> None:
    """Of an expert's rows each microbatch has 1 / (d n), to the byte, and so of 2 r h f FLOPs per product."""
    trace, _ = lay_out(step(), "a100_80_sxm", {"dp": dp, "micro_batches": n})
    size, ops = {t.name: t.bytes for t in trace.tensors}, {op.name: op for op in trace.ops}
    for expert, rows in enumerate(loads()):
        for k in range(n):
            part = [k * whole // (dp * n) for whole in (2 * rows * H, 2 * rows * H * FFN)]
            end = [(k + 1) * whole // (dp * n) for whole in (2 * rows * H, 2 * rows * H * FFN)]
            assert size[f"h0.mlp.expert{expert}.dispatch.out.mb{k}"] == end[0] - part[0]
            for name in ("gate", "up", "down"):
                assert ops[f"h0.mlp.expert{expert}.{name}.mb{k}"].flops == end[1] - part[1]


@pytest.mark.parametrize("t", [2, 4])
def test_a_rank_of_tp_has_columns_and_rows_of_each_expert(t: int) -> None:
    """1 / t of weights and work; an all-reduce of each expert's rows in forward, and of two gradients in backward."""
    trace = divide_layers(step(), t)
    held = {x.name: x.bytes for x in trace.tensors if trace.producer[x.id] < 0}
    flops = {op.name: op.flops for op in trace.ops}
    sent = {"forward": 0, "backward": 0}
    for op in trace.ops:
        if op.ring is not None and op.layer == 0 and "expert" in op.name and op.phase in sent:
            sent[op.phase] += op.bytes or 0
    for expert, rows in enumerate(loads()):
        for name in ("gate", "up", "down"):
            assert held[f"h0.mlp.expert{expert}.{name}.weight"] == 2 * H * FFN // t
            assert flops[f"h0.mlp.expert{expert}.{name}"] == 2 * rows * H * FFN // t
    assert sent["forward"] == sum(2 * (t - 1) * 2 * rows * H // t for rows in loads())
    assert sent["backward"] in (sent["forward"], 2 * sent["forward"])


def test_an_experts_term_taken_for_the_sum_is_wrong() -> None:
    trace = divide_layers(step(), 2)
    summed = next(op.id for op in trace.ops if op.ring is not None and op.name.startswith("h0.mlp.expert1.down"))
    alone = {op: ring for op, ring in trace.op_columns.ring.items() if op != summed}
    assert {each.what for each in departures(rebuilt(trace, ring=alone), step())} == {"wrong"}


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 2, "ep": 2}, "ep: experts that run one after another cannot be divided; try .* 'grouped'; nearest: 1"),
        ({"cp": 2}, "cp: rows of experts that run one after another cannot be divided by tokens; try .* 'grouped'"),
    ],
)
def test_what_cannot_be_divided_names_the_other_form(layout: dict, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        lay_out(step(), "a100_80_sxm", layout)
