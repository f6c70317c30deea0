"""Experts that run one after another (`loop`) on many devices: closed forms, the law, and what it finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from sim import simulate
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.errors import LayoutError
from sim.layout import lay_out
from sim.policies import load
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers, divide_tokens
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.io import load as load_trace
from sim.trace.io import save as save_trace
from sim.trace.op import Ring
from sim.trace.origin import Chosen, Expr
from tests.rewrites.test_expert_parallel import MIXTRAL, rings, switch
from tests.rewrites.test_replicas import peaks, rebuilt
from workloads import transformer, with_stack

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


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("layout", [{"pp": 2, "micro_batches": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_rank_of_tp_and_cp_has_its_columns_of_an_expert_for_the_rows_of_its_tokens(layout: dict, named: bool) -> None:
    """Whatever remains of the rows. Where a trace names no axes such rows are not known, and weights are gathered."""
    base = step() if named else unnamed(step())
    trace, platform = lay_out(base, "a100_80_sxm", {"tp": 2, "cp": 2, **layout})
    assert any(rows % 2 for rows in loads())
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    gathers = [op for op in trace.ops if op.ring == Ring("tensor", 2, 1) and ".weight.for." in op.name]
    assert bool(gathers) != named
    assert {op.bytes for op in gathers} <= {2 * H * FFN // 2}
    flops = {op.name: op.flops for op in trace.ops}
    for expert, rows in enumerate(loads() if named else ()):
        assert flops[f"h0.mlp.expert{expert}.gate.mb0"] == 2 * rows * H * FFN // 8
    assert simulate(trace, platform).log.end


def unnamed(trace: Trace) -> Trace:
    """The trace without names of axes, as one that is imported."""
    columns = replace(trace.tensor_columns, axes={})
    return Trace(columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)


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


# ---- divided among replicas -------------------------------------------------------------------

LAYOUTS = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 4, "zero": 3},
    {"dp": 4, "ep": 2, "micro_batches": 2, "zero": 1},
    {"dp": 4, "ep": 2, "micro_batches": 2, "zero": 3, "gathered": "module"},
    {"dp": 2, "ep": 2, "pp": 2, "micro_batches": 2, "zero": 2, "schedule": "zb_h1"},
    {"dp": 2, "ep": 2, "tp": 2},
    {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "micro_batches": 2, "async_sums": True},
    {"dp": 2, "ep": 2, "micro_batches": 2, "gradient_buffer": True},
]


@cache
def routed(rows: tuple[int, ...] = (128, 128, 128, 128), form: str = "loop", **given: str) -> Trace:
    """A step with the same rows of each expert in both layers, of 16 samples."""
    about = {"precision": "mixed_bf16", "attention": "flash", "loss": "fused", "optimizer": "adamw_fused", **given}
    config = {**MIXTRAL, "experts_implementation": form}
    with patch("workloads.transformer.routing", lambda *_, **__: dict.fromkeys(range(2), rows)):
        seed = sum(i * each for i, each in enumerate(rows))  # traces are kept by it
        return transformer(config, batch=16, sequence=16, routing_seed=seed, **about)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("precision", ["amp_bf16", "megatron_bf16"])
def test_ranks_that_divide_experts_compute_the_same(precision: str, layout: dict, tmp_path: Path) -> None:
    """The law checks all ranks without knowing which has which expert; sizes are rounded as the first rank's."""
    base = routed((160, 96, 192, 64), precision=precision, optimizer="adamw_foreach")
    trace, _ = lay_out(base, "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}
    save_trace(trace, tmp_path / "t")
    assert load_trace(tmp_path / "t").content_hash == trace.content_hash


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_stands_for_all_that_divide_experts(ranks: int) -> None:
    trace, _ = lay_out(routed(), "a100_80_sxm", {"dp": ranks, "ep": ranks})
    one, (time, held) = peaks(trace, rings(1, ranks)), peaks(all_ranks(trace), switch(ranks))
    assert one[0] == time
    assert one[1] * ranks == held


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_wait_for_the_rank_whose_experts_have_most_rows(ranks: int) -> None:
    trace, _ = lay_out(routed((64, 128, 96, 224)), "a100_80_sxm", {"dp": ranks, "ep": ranks})
    kept = {t.name.split(".")[2] for t in trace.tensors if trace.producer[t.id] < 0 and ".expert" in t.name}
    assert kept == ({"expert2", "expert3"} if ranks == 2 else {"expert3"})
    one, (time, held) = peaks(trace, rings(1, ranks)), peaks(all_ranks(trace), switch(ranks))
    assert one[0] == time
    assert one[1][0] == held[0] == max(held)


@pytest.mark.parametrize(("dp", "ep", "n"), [(2, 2, 1), (4, 4, 1), (4, 2, 2)])
def test_a_rank_has_its_experts_and_their_rows_of_all_ranks(dp: int, ep: int, n: int) -> None:
    """Of an expert's r rows each microbatch of its rank has p r / (d n); four exchanges send (p - 1) / p of them."""
    rows, chosen = (160, 96, 192, 64), {2: (0, 1), 4: (2,)}[ep]
    trace, _ = lay_out(routed(rows), "a100_80_sxm", {"dp": dp, "ep": ep, "micro_batches": n})
    parts = dp // ep * n
    products = {op.name: op.flops for op in trace.ops if op.kind == "matmul" and ".expert" in op.name}
    for layer in range(2):
        for k in chosen:
            for name in ("gate", "gate.bwd", "gate.bwd.weight", "up", "down"):
                flops = 2 * rows[k] * H * FFN // parts
                assert products[f"h{layer}.mlp.expert{k}.{name}.mb0"] == flops
    assert len(products) == 2 * len(chosen) * 9 * n
    held = sum(
        t.bytes for t in trace.tensors if trace.producer[t.id] < 0 and ".expert" in t.name and t.role == "weight"
    )
    assert held == 2 * len(chosen) * 3 * 2 * H * FFN
    exchanged = [op.bytes for op in trace.ops if op.ring == Ring("expert", ep, 1)]
    size = 2 * H * sum(rows[k] for k in chosen) // parts
    assert exchanged == [(ep - 1) * size // ep] * (2 * 4 * n)


@pytest.mark.parametrize("layout", [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "micro_batches": 2}], ids=str)
def test_experts_of_their_own_send_what_grouped_ones_do(layout: dict) -> None:
    """Rows there and back, and gradients; grouped ones exchange first how many rows each expert has."""
    sent = []
    for form in ("loop", "grouped"):
        trace, _ = lay_out(routed(form=form), "a100_80_sxm", layout)
        found: Counter[tuple[str, int]] = Counter()
        for op in trace.ops:
            if op.ring is not None and not any(trace.tensors[t].dtype == "int32" for t in op.reads):
                found[op.ring.axis, op.ring.passes] += op.bytes or 0
        sent.append(found)
    assert sent[0] == sent[1]


def placed_at(trace: Trace, tensors: dict[int, Expr] | None = None, ops: dict[int, Expr] | None = None) -> Trace:
    """The trace with other claims."""
    assert trace.origin is not None
    new = rebuilt(trace)
    claims = [(tensors or {}).get(t, expr) for t, expr in enumerate(trace.origin.tensors)]
    done = [(ops or {}).get(op, expr) for op, expr in enumerate(trace.origin.ops)]
    object.__setattr__(new, "origin", replace(trace.origin, tensors=tuple(claims), ops=tuple(done)))
    return new


def wrong(trace: Trace, base: Trace) -> set[str]:
    return {each.op for each in departures(trace, base) if each.what in ("wrong", "missing")}


def test_an_expert_that_two_ranks_have_and_none_has_are_wrong() -> None:
    base = routed()
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 2, "ep": 2})
    assert trace.origin is not None
    op = next(op.id for op in trace.ops if op.name == "h0.mlp.expert0.gate.mb0")
    expr = trace.origin.ops[op]
    assert isinstance(expr, Chosen)
    twice = Chosen((expr.parts[0], expr.parts[0]), 0)
    assert {"h0.mlp.expert0.gate.mb0", "h0.mlp.expert2.gate"} <= wrong(placed_at(trace, ops={op: twice}), base)


def test_an_expert_on_the_rows_of_another_ones_is_wrong() -> None:
    """The second rank's product takes the rows of its other expert."""
    base = routed()
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 2, "ep": 2})
    assert trace.origin is not None
    name = "h0.mlp.expert{}.dispatch.out.all_to_all.mb0.out"
    a, b = (next(t.id for t in trace.tensors if t.name == name.format(k)) for k in (0, 1))
    one, other = trace.origin.tensors[a], trace.origin.tensors[b]
    assert isinstance(one, Chosen)
    assert isinstance(other, Chosen)
    swapped = {a: Chosen((one.parts[0], other.parts[1]), 0), b: Chosen((other.parts[0], one.parts[1]), 0)}
    assert "h0.mlp.expert0.gate.mb0" in wrong(placed_at(trace, tensors=swapped), base)


def test_a_rank_of_experts_that_has_its_own_rows_alone_is_wrong() -> None:
    base = routed()
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 2, "ep": 2})
    first = next(op.id for op in trace.ops if op.ring is not None and op.ring.axis == "expert")
    alone = {op: ring for op, ring in trace.op_columns.ring.items() if op != first}
    assert wrong(rebuilt(trace, ring=alone), base) == {trace.op_columns.name[first]}


def test_a_gradient_of_experts_summed_over_all_replicas_is_wrong() -> None:
    base = routed()
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 4, "ep": 2})
    summed = next(op.id for op in trace.ops if op.ring == Ring("expert_data", 2, 2))
    ring = {**trace.op_columns.ring, summed: Ring("expert_data", 4, 2)}
    assert wrong(rebuilt(trace, ring=ring), base) == {trace.op_columns.name[summed]}


@pytest.mark.parametrize("policy", ["full_recompute", "swap_all", "delta"])
def test_the_law_holds_for_policies_where_ranks_divide_experts(policy: str) -> None:
    trace, platform = lay_out(routed(), "a100_80_sxm", {"dp": 4, "ep": 2, "micro_batches": 2, "zero": 1})
    ran = run_policy(load(policy), trace, platform)
    assert ran.done, ran.error
    assert {each.what for each in departures(ran.plan.trace, routed())} <= {"repeated"}
    laws = ("capacity", "ops", "order", "tiling", "outcome")
    assert not [text for law in laws if (text := breaks(CHECKS[law], ran))]


def test_what_cannot_be_divided_says_why() -> None:
    for layout, said in (
        ({"dp": 8, "ep": 8}, "ep: 8 does not divide the 4 experts; nearest: 4"),
        ({"dp": 2, "ep": 2, "cp": 2}, "ep: experts that run one after another are not divided with cp; .*'grouped'"),
    ):
        with pytest.raises(LayoutError, match=said):
            lay_out(step() if "cp" in layout else routed(), "a100_80_sxm", layout)
    with pytest.raises(LayoutError, match="not divided in fused kernels"):
        lay_out(routed(), "a100_80_sxm", {"dp": 2, "ep": 2}, kernels=lambda trace: with_stack(trace, "compiled"))
    with pytest.raises(LayoutError, match="ep: no token chose expert 1 of layer 0, so that the trace has no ops of it"):
        lay_out(routed((256, 0, 192, 64)), "a100_80_sxm", {"dp": 2, "ep": 2})
    unknown = routed()
    unknown = Trace(
        unknown.tensor_columns,
        unknown.op_columns,
        outputs=unknown.outputs,
        carry=unknown.carry,
        meta={key: value for key, value in unknown.meta.items() if key != "expert_loads"},
    )
    with pytest.raises(LayoutError, match="ep: the trace does not say how many rows each expert of layer 0 has"):
        lay_out(unknown, "a100_80_sxm", {"dp": 2, "ep": 2})
