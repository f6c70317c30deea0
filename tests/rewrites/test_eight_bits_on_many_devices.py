"""Weights copied in 8 bits under ZeRO 3 and expert parallelism: bytes by hand, all ranks against one, faults."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sim.hardware.platform import Link, rank_link
from sim.layout import lay_out
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.origin import Part
from tests.rewrites.test_expert_parallel import CHOSEN, MIXTRAL, exchanges
from tests.rewrites.test_replicas import GB, line, peaks, rebuilt
from tests.rewrites.test_schedules import FAMILIES
from workloads import transformer

LLAMA = {**FAMILIES["llama"], "model_type": "llama"}
BATCH, TOKENS = 8, 16


@cache
def step(family: str = "llama", precision: str = "mixed_fp8") -> Trace:
    config = LLAMA if family == "llama" else MIXTRAL
    return transformer(config, batch=BATCH, sequence=TOKENS, precision=precision, attention="flash", loss="fused")


def divided(layout: dict, family: str = "llama") -> Trace:
    return lay_out(step(family), "h100", layout)[0]


def copies(trace: Trace) -> dict[str, int]:
    """Bytes of each copy of a weight, by name."""
    made = (t for t in trace.tensors if t.role == "weight" and trace.producer[t.id] >= 0 and t.replaces is None)
    return {t.name: t.bytes for t in made}


@settings(max_examples=6, phases=(Phase.generate,), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(("llama", "mixtral")),
    st.sampled_from(("mixed_fp8", "megatron_fp8")),
    st.sampled_from(((2, 1), (2, 2), (4, 2), (4, 4))),
    st.fixed_dictionaries(
        {
            "zero": st.integers(0, 3),
            "micro_batches": st.sampled_from((1, 2)),
            "tp": st.sampled_from((1, 2)),
            "pp": st.sampled_from((1, 2)),
            "schedule": st.sampled_from(("1f1b", "gpipe", "zb_h1")),
        }
    ),
    st.sampled_from(({}, {"reshard": False}, {"reshard_to": 2}, {"shard_within": 2}, {"prefetch": 0}, {"prefetch": 2})),
)
def test_any_layout_computes_the_same(family: str, precision: str, ranks: tuple, layout: dict, weights: dict) -> None:
    dp, ep = ranks if family == "mixtral" else (ranks[0], 1)
    in_groups = not weights.keys().isdisjoint({"reshard_to", "shard_within"})
    if layout["zero"] == 3 and not (in_groups and (dp < 4 or ep > 1)):
        layout = {**layout, **weights}
    base = step(family, precision)
    trace, _ = lay_out(base, "h100", {"dp": dp, "ep": ep, **layout})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"dp": 2, "zero": 3}),
        ("llama", {"dp": 4, "zero": 3, "micro_batches": 2, "prefetch": 2}),
        ("llama", {"dp": 2, "pp": 2, "zero": 3, "micro_batches": 2, "reshard": False}),
        ("mixtral", {"dp": 2, "ep": 2}),
        ("mixtral", {"dp": 4, "ep": 2, "zero": 3}),
    ],
    ids=str,
)
def test_one_rank_stands_for_all(family: str, layout: dict) -> None:
    base = step(family)
    if family == "mixtral":  # as many rows for every expert
        loads = [{str(layer): [BATCH * TOKENS * CHOSEN // 4] * 4 for layer in range(2)}]
        base = Trace(base.tensor_columns, base.op_columns, outputs=base.outputs, carry=base.carry,
                     meta={**base.meta, "expert_loads": loads})  # fmt: skip
    trace, _ = lay_out(base, "h100", layout)
    axes = ("data", "expert", "expert_data")
    own, every = line(trace.devices), line(trace.devices * layout["dp"])
    rings = [Link(rank_link(axis, i), f"hbm@{i}", f"hbm@{i}", GB) for i in range(trace.devices) for axis in axes]
    own = replace(own, links=(*own.links, *rings))
    own, every = (replace(p, links=tuple(replace(ln, rate=10**15) for ln in p.links)) for p in (own, every))
    one, (time, held) = peaks(trace, own), peaks(all_ranks(trace), every)
    assert one[0] == time
    assert [peak for peak in one[1] for _ in range(layout["dp"])] == held


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_replica_copies_its_part_of_each_weight_once(ranks: int) -> None:
    base, trace = step(), divided({"dp": ranks, "zero": 3, "micro_batches": 2})
    whole, own = copies(base), copies(trace)
    assert whole
    assert {name.removesuffix(".shard"): size * ranks for name, size in own.items()} == whole
    quantised = [op for op in trace.ops if set(op.writes) & {t.id for t in trace.tensors if t.name in own}]
    before = [op for op in base.ops if any(base.tensors[t].name in whole for t in op.writes)]
    assert len(quantised) == len(before)
    assert sum(op.flops for op in quantised) * ranks == sum(op.flops for op in before)


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_are_gathered_instead_of_weights(ranks: int) -> None:
    """(d - 1) / d of a byte per weight of a linear layer in forward, and of its transpose in backward; 2 of others."""
    base, trace = step(), divided({"dp": ranks, "zero": 3})
    names = {name for name in copies(base) if not name.endswith(".t")}
    elements = sum(copies(base)[name] for name in names if name.startswith("h0."))
    others = sum(
        t.bytes for t in base.tensors
        if t.role == "weight" and base.producer[t.id] < 0 and t.layer == 0 and f"{t.name}.fp8" not in names
    )  # fmt: skip
    assert elements > others > 0
    sent = {"forward": 0, "backward": 0}
    for op in trace.ops:
        if (
            op.ring is not None
            and op.name.endswith(".all_gather")
            and all(trace.tensors[t].name.startswith("h0.") for t in op.reads)
        ):
            sent[op.phase] += op.bytes or 0
    assert 0 <= sent["forward"] - (ranks - 1) * (elements + others) // ranks <= 2
    assert 0 <= sent["backward"] - (ranks - 1) * (elements + others) // ranks <= 2


@pytest.mark.parametrize(("dp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_experts_copies_are_those_of_a_ranks_experts(dp: int, ep: int) -> None:
    whole, own = copies(step("mixtral")), copies(divided({"dp": dp, "ep": ep}, "mixtral"))
    assert own.keys() == whole.keys()
    for name, size in whole.items():
        of_experts = ".mlp.gate_up." in name or ".mlp.down." in name
        assert own[name] * (ep if of_experts else 1) == size


def test_rows_go_to_experts_in_8_bits_and_come_back_in_16() -> None:
    """A byte per element to the experts, with the transpose for backward; two per element back."""
    trace = divided({"dp": 2, "ep": 2}, "mixtral")
    loads = step("mixtral").meta["expert_loads"][0]["0"]
    most = max(sum(loads[:2]), sum(loads[2:]))
    sizes = sorted(op.bytes for op in exchanges(trace, 0) if "ends" not in op.name)
    one = -(-most * MIXTRAL["hidden_size"] // 2)
    assert sizes == sorted([one] * 4 + [2 * one] * 2)


# ---- faults that the law finds -----------------------------------------------------------------------


def whats(trace: Trace, family: str = "llama") -> set[str]:
    return {each.what for each in departures(trace, step(family))}


def test_a_copy_of_another_replicas_part_is_wrong() -> None:
    trace = divided({"dp": 2, "zero": 3})
    assert whats(trace) == set()
    assert trace.origin is not None
    name = next(iter(copies(trace)))
    t = next(t.id for t in trace.tensors if t.name == name)
    claims = list(trace.origin.tensors)
    assert isinstance(claims[t], Part)
    claims[t] = replace(claims[t], first=1, stop=2)
    lying = Trace(trace.tensor_columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta,
                  origin=replace(trace.origin, tensors=tuple(claims)))  # fmt: skip
    assert "wrong" in whats(lying)


def test_copies_that_are_not_gathered_are_wrong() -> None:
    trace = divided({"dp": 2, "zero": 3})
    columns, made = trace.op_columns, set(copies(trace))
    gather = next(op.id for op in trace.ops if op.ring and made & {trace.tensors[t].name for t in op.reads})
    alone = {op: ring for op, ring in columns.ring.items() if op != gather}
    assert "wrong" in whats(rebuilt(trace, ring=alone))
