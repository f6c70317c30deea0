"""Experts that run one after another (`loop`) on many devices: closed forms, the law, and what it finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from sim.errors import LayoutError
from sim.layout import lay_out
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers, divide_tokens
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
        ("mixed_bf16", {"cp": 4}),
        ("amp_bf16", {"cp": 2, "dp": 2, "zero": 3}),
        ("mixed_bf16", {"cp": 2, "tp": 2, "sequence_parallel": True, "ring_attention": True}),
        ("mixed_bf16", {"cp": 2, "pp": 2, "micro_batches": 2, "zero": 1, "schedule": "zb_h1"}),
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


@pytest.mark.parametrize(("cp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_rows_and_work_of_a_rank_of_cp(cp: int, dp: int) -> None:
    """Of an expert's rows each rank has those of its tokens, 1 / (c d) to the byte; its weights are whole."""
    trace, _ = lay_out(step(), "a100_80_sxm", {"cp": cp, "dp": dp})
    size, ops = {t.name: t.bytes for t in trace.tensors}, {op.name: op for op in trace.ops}
    mark = ".mb0"
    for expert, rows in enumerate(loads()):
        for kept in ("dispatch.out", "down.out"):
            assert size[f"h0.mlp.expert{expert}.{kept}{mark}"] == 2 * rows * H // cp // dp
        assert size[f"h0.mlp.expert{expert}.rows{mark}"] == 8 * rows // cp // dp  # which they are
        for name in ("gate", "up", "down"):
            for phase in ("", ".bwd", ".bwd.weight"):
                assert ops[f"h0.mlp.expert{expert}.{name}{phase}{mark}"].flops == 2 * rows * H * FFN // cp // dp
            assert size[f"h0.mlp.expert{expert}.{name}.weight"] == 2 * H * FFN


def test_ranks_of_cp_send_what_they_send_where_experts_are_one_kernel() -> None:
    """Keys and values, and gradients of as many weights; no row of an expert, since each rank has all experts."""
    sent = []
    for form in ("loop", "grouped"):
        given = {"precision": "mixed_bf16", "attention": "flash", "loss": "fused", "optimizer": "adamw_fused"}
        base = transformer({**MIXTRAL, "experts_implementation": form}, batch=4, sequence=16, **given)
        trace, _ = lay_out(base, "a100_80_sxm", {"cp": 2, "dp": 2})
        rings = [op for op in trace.ops if op.ring is not None]
        assert all(".mlp." not in op.name or ".grad" in op.name for op in rings)
        sent.append((sum(op.bytes or 0 for op in rings), len(rings)))
    assert abs(sent[0][0] - sent[1][0]) <= max(n for _, n in sent)  # each collective rounds up


def test_an_experts_gradient_of_a_ranks_own_tokens_alone_is_wrong() -> None:
    trace = divide_tokens(step(), 2)
    gradient = next(t.id for t in trace.tensors if t.name == "h0.mlp.expert1.down.weight.grad")
    summed = next(op.id for op in trace.ops if op.ring is not None and gradient in op.reads)
    alone = {op: ring for op, ring in trace.op_columns.ring.items() if op != summed}
    assert {each.what for each in departures(rebuilt(trace, ring=alone), step())} == {"wrong"}


def test_the_rows_of_another_ranks_tokens_are_wrong() -> None:
    """An expert's product of rows that the next rank has dispatched."""
    trace = divide_tokens(step(), 2)
    assert trace.origin is not None
    t = next(t.id for t in trace.tensors if t.name == "h0.mlp.expert1.dispatch.out")
    claims = list(trace.origin.tensors)
    claims[t] = replace(claims[t], first=1, stop=2)  # type: ignore[type-var]
    other = rebuilt(trace)
    object.__setattr__(other, "origin", replace(trace.origin, tensors=tuple(claims)))
    wrong = {each.op for each in departures(other, step()) if each.what == "wrong"}
    assert wrong >= {"h0.mlp.expert1.dispatch", "h0.mlp.expert1.gate"}


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


def test_what_cannot_be_divided_names_the_other_form() -> None:
    said = (
        "ep: experts that run one after another find their rows .* sorted and sent first; try .* 'grouped'; nearest: 1"
    )
    with pytest.raises(LayoutError, match=said):
        lay_out(step(), "a100_80_sxm", {"dp": 2, "ep": 2})
