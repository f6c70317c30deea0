"""Context parallelism: closed forms, every rank against the one that stands for all, and faults that the law finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sim import simulate
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.errors import LayoutError
from sim.hardware.platform import Link, Platform, rank_link
from sim.layout import lay_out
from sim.policies import load
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers, divide_tokens
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.op import Ring
from sim.trace.phases import saved_tensors
from tests.rewrites.test_expert_parallel import CHOSEN, COUNT, DEEPSEEK, MIXTRAL, exchanges
from tests.rewrites.test_replicas import GB, line, named, op_named, peaks, reading, rebuilt
from tests.rewrites.test_schedules import FAMILIES
from tests.rewrites.test_tensor_parallel import among
from workloads import transformer, with_stack

LLAMA = {**FAMILIES["llama"], "model_type": "llama"}
BATCH, TOKENS, KV_WIDTH = 4, 16, 16
LAYOUTS = [
    {"cp": 4},
    {"cp": 2, "dp": 2, "zero": 1, "micro_batches": 2},
    {"cp": 2, "dp": 2, "pp": 2, "zero": 3, "schedule": "zb_h1", "micro_batches": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "sequence_parallel": True, "dp": 2, "zero": 1},
]


@cache
def step(family: str = "llama", attention: str = "flash") -> Trace:
    config = {**FAMILIES[family], "model_type": family}
    given = {"precision": "mixed_bf16", "loss": "fused", "attention": attention, "optimizer": "adamw_fused"}
    return transformer(config, batch=BATCH, sequence=TOKENS, **given)


def by_context(trace: Trace, ranks: int) -> Trace:
    return divide_tokens(trace, ranks)


def alike(trace: Trace, every: Trace, own: Platform, among_all: Platform, layout: dict) -> tuple[Any, Any]:
    """Time and peaks of one rank, and of all.

    Where weights of several stages are gathered beside keys, which of two rings goes first on a wire would be
    arbitrary; links are then so fast that an exchange takes its one nanosecond, and time may differ by these.
    """
    if layout.get("zero") != 3:
        return peaks(trace, own), peaks(every, among_all)
    own, among_all = (replace(p, links=tuple(replace(ln, rate=10**15) for ln in p.links)) for p in (own, among_all))
    one, (time, held) = peaks(trace, own), peaks(every, among_all)
    exchanges = sum(op.ring is not None for op in trace.ops)
    return one, (one[0] if abs(one[0] - time) <= exchanges else time, held)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_stands_for_all(layout: dict) -> None:
    """Same time, same peaks, and the same values: the law checks all ranks without knowing that they are symmetric."""
    trace, _ = lay_out(step(), "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, step())} <= {"repeated"}
    every = all_ranks(trace)
    assert {each.what for each in departures(every, step())} == {"repeated"}
    stages, replicas, tokens, tensor = trace.devices, layout.get("dp", 1), layout["cp"], layout.get("tp", 1)
    ranks = replicas * tokens * tensor
    own, among_all = among(stages, replicas, tensor, tokens), line(stages * ranks)
    one, (time, held) = alike(trace, every, own, among_all, layout)
    assert one[0] == time
    assert [peak for peak in one[1] for _ in range(ranks)] == held


@settings(max_examples=4, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(("amp_bf16", "mixed_bf16", "megatron_bf16")),
    st.sampled_from(("torch", "fused")),
    st.sampled_from(({"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 4, "tp": 2, "sequence_parallel": True})),
    st.fixed_dictionaries(
        {
            "dp": st.sampled_from((1, 2)),
            "pp": st.sampled_from((1, 2)),
            "zero": st.integers(0, 3),
            "micro_batches": st.sampled_from((1, 2)),
            "schedule": st.sampled_from(("1f1b", "gpipe", "zb_h1")),
        }
    ),
)
def test_any_transformer_computes_the_same(family: str, precision: str, loss: str, ranks: dict, layout: dict) -> None:
    config = {**FAMILIES[family], "model_type": family}
    base = transformer(config, batch=4, sequence=16, precision=precision, loss=loss, attention="flash")
    trace, _ = lay_out(base, "a100_80_sxm", {**ranks, **layout})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize("policy", ["full_recompute", "offload_activations", "hybrid"])
def test_policies_run_on_a_part_of_the_tokens(policy: str) -> None:
    trace, platform = lay_out(step(), "a100_80_sxm", {"cp": 2, "micro_batches": 2})
    ran = run_policy(load(policy), trace, platform)
    assert ran.done, ran.error
    assert {each.what for each in departures(ran.plan.trace, step())} <= {"repeated"}
    laws = ("capacity", "ops", "order", "tiling", "outcome")
    assert not [text for law in laws if (text := breaks(CHECKS[law], ran))]


# ---- closed forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_activations_are_divided_and_weights_are_not(ranks: int) -> None:
    base, trace = step(), by_context(step(), ranks)

    def saved(of: Trace) -> dict[str, int]:
        every = [of.tensors[t] for t in saved_tensors(of).tolist()]
        return {t.name: t.bytes for t in every if t.layer >= 0 and not t.name.endswith((".seed", ".offset"))}

    before, after = saved(base), saved(trace)
    assert before.keys() == after.keys()
    assert all(after[name] * ranks == size for name, size in before.items())
    for role in ("weight", "optimizer_state"):
        held = [sum(t.bytes for t in of.tensors if t.role == role and of.producer[t.id] < 0) for of in (base, trace)]
        assert held[0] == held[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_work_is_divided_evenly(ranks: int) -> None:
    """Causal attention, too: with two slices per rank, from both ends, all have as much."""
    base, trace = step(), by_context(step(), ranks)
    flops = {op.name: op.flops for op in base.ops if op.phase != "update" and op.layer >= 0}
    own = {op.name: op.flops for op in trace.ops if op.name in flops}
    assert sum(own.values()) * ranks == sum(flops.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_that_a_layer_sends(ranks: int) -> None:
    """(c - 1) k for keys and values of 4 b s / c h_kv bytes in forward; twice as much in backward, with gradients."""
    trace = by_context(step(), ranks)
    k = 4 * BATCH * TOKENS // ranks * KV_WIDTH
    sent = {"forward": 0, "backward": 0}
    for op in trace.ops:
        if op.ring is not None and op.layer == 0 and op.phase != "update":
            sent[op.phase] += op.bytes or 0
    assert sent == {"forward": (ranks - 1) * k, "backward": 2 * (ranks - 1) * k}


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(2, 2), (4, 2)])
def test_bytes_that_a_layer_sends_where_both_are_divided(tokens: int, heads: int, by_tokens: bool) -> None:
    """Keys and values of 1 / t of the heads over the ranks of cp; what tp sends, for 1 / c of the tokens."""
    trace = divide_layers(by_context(step(), tokens), heads, by_tokens)
    sent = dict.fromkeys(((axis, phase) for axis in ("context", "tensor") for phase in ("forward", "backward")), 0)
    for op in trace.ops:
        if op.ring is not None and op.layer == 0 and op.phase != "update":
            sent[op.ring.axis, op.phase] += op.bytes or 0
    k = 4 * BATCH * TOKENS // tokens * KV_WIDTH // heads
    assert sent["context", "forward"] == (tokens - 1) * k
    assert sent["context", "backward"] == 2 * (tokens - 1) * k
    whole = divide_layers(step(), heads, by_tokens)
    of_tensor = [(op.phase, op.bytes or 0) for op in whole.ops if op.ring is not None and op.layer == 0]
    for phase in ("forward", "backward"):
        assert sent["tensor", phase] * tokens == sum(size for its, size in of_tensor if its == phase)


def test_saved_bytes_of_a_layer_where_both_are_divided() -> None:
    """Those of a rank of tp with sequence parallelism, divided by c."""
    whole, trace = divide_layers(step(), 2, True), divide_layers(by_context(step(), 2), 2, True)

    def saved(of: Trace) -> int:
        tensors = (of.tensors[t] for t in saved_tensors(of).tolist())
        return sum(t.bytes for t in tensors if t.layer == 0 and not t.name.endswith((".seed", ".offset")))

    assert saved(trace) * 2 == saved(whole)
    assert saved(step()) == saved(whole) * 2


def test_weight_gradients_are_summed_once() -> None:
    trace = by_context(step(), 4)
    weights = sum(t.bytes for t in trace.tensors if t.role == "weight" and trace.producer[t.id] < 0)
    sent = [op.bytes or 0 for op in trace.ops if op.ring is not None and op.phase == "update"]
    assert 0 <= sum(sent) - 2 * 3 * weights // 4 <= len(sent)


@pytest.mark.parametrize(("cp", "dp"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_are_summed_with_those_of_replicas(cp: int, dp: int, zero: int) -> None:
    """Of p = d c ranks each sends 2 (p - 1) / p of the weights, and at level 3 once more those that backward reads."""
    base, p = step(), cp * dp
    trace, _ = lay_out(base, "a100_80_sxm", {"cp": cp, "dp": dp, "zero": zero})
    initial = [t for t in base.tensors if t.role == "weight" and base.producer[t.id] < 0]
    weights = sum(t.bytes for t in initial)
    again = sum(t.bytes for t in initial if any(base.ops[r].phase == "backward" for r in base.readers(t.id)))
    rings = [op for op in trace.ops if op.ring is not None and op.ring.axis != "context"]
    assert {(op.ring.axis, op.ring.ranks) for op in rings if op.ring} == {("data_context", p)}
    sent = {phase: sum(op.bytes or 0 for op in rings if op.phase == phase) for phase in ("backward", "update")}
    if zero < 3:
        halves = 1 if zero else 2
        for phase, passes in (("backward", halves), ("update", 2 - halves)):
            assert 0 <= sent[phase] - passes * (p - 1) * weights // p <= len(rings)
    total = sum(op.bytes or 0 for op in rings)
    assert 0 <= total - (p - 1) * (2 * weights + (again if zero == 3 else 0)) // p <= len(rings)
    assert not [op for op in trace.ops if op.phase == "update" and op.ring and op.ring.axis == "context"]


@pytest.mark.parametrize(("cp", "dp"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("level", [1, 3])
def test_state_is_divided_among_replicas_and_ranks(cp: int, dp: int, level: int) -> None:
    """As Megatron-LM's distributed optimizer and FSDP's mesh `dp_shard_cp` do."""
    trace, _ = lay_out(step(), "a100_80_sxm", {"cp": cp, "dp": dp, "zero": level})

    def held(of: Trace, role: str) -> int:
        own = (t for t in of.tensors if t.role == role and of.producer[t.id] < 0 and t.shape != ())
        return sum(t.bytes for t in own)

    assert held(trace, "optimizer_state") * cp * dp == held(step(), "optimizer_state")
    assert held(trace, "weight") * (cp * dp if level == 3 else 1) == held(step(), "weight")


@pytest.mark.parametrize("ring", [Ring("data", 2, 2), Ring("context", 2, 2), Ring("data_context", 2, 2)])
def test_a_gradient_that_misses_replicas_or_tokens_is_wrong(ring: Ring) -> None:
    trace, _ = lay_out(step(), "a100_80_sxm", {"cp": 2, "dp": 2})
    summed = next(op.id for op in trace.ops if op.ring == Ring("data_context", 4, 2))
    assert whats(trace) <= {"repeated"}
    assert "wrong" in whats(rebuilt(trace, ring={**trace.op_columns.ring, summed: ring}))


def test_longer_sequences_fit_where_tokens_are_divided() -> None:
    base = transformer("gpt2", batch=2, sequence=1024, precision="mixed_bf16", attention="flash", loss="fused")
    peaks = []
    for cp in (1, 2, 4):
        trace, platform = lay_out(base, "a100_80_sxm", {"cp": cp}, kernels=partial(with_stack, stack="fused"))
        peaks.append(simulate(trace, platform).summary()["peak_bytes"])
    assert peaks[0] > peaks[1] > peaks[2]


# ---- experts -----------------------------------------------------------------------------------------

EXPERT_LAYOUTS = [
    {"cp": 4},
    {"cp": 2, "tp": 2},
    {"cp": 2, "dp": 2, "ep": 2},
    {"cp": 2, "dp": 4, "ep": 2, "zero": 1, "micro_batches": 2},
    {"cp": 2, "dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    {"cp": 2, "dp": 4, "ep": 2, "pp": 2, "zero": 3, "micro_batches": 2, "schedule": "zb_h1"},
]
ROWS = 16 * TOKENS * CHOSEN


@cache
def mixture(skew: float = 0.0) -> Trace:
    """A step of Mixtral's kind of 16 samples; without skew every expert gets as many rows."""
    given = {"precision": "mixed_bf16", "attention": "flash", "routing_skew": skew}
    trace = transformer(MIXTRAL, batch=16, sequence=TOKENS, **given)
    if skew:
        return trace
    loads = [{str(layer): [ROWS // COUNT] * COUNT for layer in range(2)}]
    columns = trace.tensor_columns, trace.op_columns
    return Trace(*columns, outputs=trace.outputs, carry=trace.carry, meta={**trace.meta, "expert_loads": loads})


def instant(stages: int, ranks: int) -> tuple[Platform, Platform]:
    """Machines of one rank per stage, and of all, with links so fast that their order does not matter."""
    axes = ("tensor", "context", "data", "expert", "expert_data", "data_context", "expert_data_context")
    own = line(stages)
    rings = [Link(rank_link(axis, i), f"hbm@{i}", f"hbm@{i}", GB) for i in range(stages) for axis in axes]
    both = replace(own, links=(*own.links, *rings)), line(stages * ranks)
    return tuple(replace(p, links=tuple(replace(ln, rate=10**15) for ln in p.links)) for p in both)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
def test_one_rank_with_experts_stands_for_all(layout: dict) -> None:
    trace, _ = lay_out(mixture(), "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, mixture())} <= {"repeated"}
    every = all_ranks(trace)
    assert {each.what for each in departures(every, mixture())} == {"repeated"}
    ranks = layout.get("dp", 1) * layout["cp"] * layout.get("tp", 1)
    own, among_all = instant(trace.devices, ranks)
    one, (time, held) = alike(trace, every, own, among_all, layout)
    assert one[0] == time
    assert [peak for peak in one[1] for _ in range(ranks)] == held


@settings(max_examples=6, phases=(Phase.generate,), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from((MIXTRAL, DEEPSEEK)),
    st.sampled_from(("amp_bf16", "mixed_bf16", "megatron_bf16", "mixed_fp8")),
    st.sampled_from((0.0, 1.0)),
    st.sampled_from(((1, 1), (2, 1), (2, 2), (4, 2))),
    st.sampled_from(({"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "tp": 2, "sequence_parallel": True})),
    st.fixed_dictionaries({"zero": st.integers(0, 3), "micro_batches": st.sampled_from((1, 2))}),
)
def test_any_mixture_computes_the_same(
    config: dict, precision: str, skew: float, ranks: tuple, tokens: dict, layout: dict
) -> None:
    base = transformer(config, batch=8, sequence=16, precision=precision, attention="flash", routing_skew=skew)
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": ranks[0], "ep": ranks[1], **tokens, **layout})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize(("cp", "dp", "ep"), [(2, 2, 2), (4, 2, 2), (2, 4, 4)])
def test_a_rank_sends_the_rows_of_its_tokens_alone(cp: int, dp: int, ep: int) -> None:
    """(p - 1) / p of r / (d c) rows of 2 h bytes, four times per layer; before the first, how many for each expert."""
    trace, _ = lay_out(mixture(), "a100_80_sxm", {"cp": cp, "dp": dp, "ep": ep})
    rows = 2 * MIXTRAL["hidden_size"] * (ROWS // (dp * cp)) * (ep - 1) // ep
    counts = 4 * COUNT * (ep - 1) // ep
    sent = sorted((op.phase, op.bytes) for op in exchanges(trace, 0))
    assert sent == sorted([("forward", counts), *[("forward", rows)] * 2, *[("backward", rows)] * 2])
    k = 4 * 16 * TOKENS // (dp * cp) * (MIXTRAL["hidden_size"] // 2)  # keys and values of two of four heads
    around = {"forward": 0, "backward": 0}
    for op in trace.ops:
        if op.ring is not None and op.ring.axis == "context" and op.layer == 0 and op.phase in around:
            around[op.phase] += op.bytes or 0
    assert around == {"forward": (cp - 1) * k, "backward": 2 * (cp - 1) * k}


@pytest.mark.parametrize(("cp", "dp", "ep", "tp"), [(2, 1, 1, 1), (4, 2, 2, 1), (2, 2, 2, 2)])
def test_work_and_memory_of_a_mixture_are_those_of_its_tokens(cp: int, dp: int, ep: int, tp: int) -> None:
    """FLOPs of experts and router, and rows saved, fall by d c; weights of experts by p, whatever c is."""
    base = mixture()
    trace, _ = lay_out(base, "a100_80_sxm", {"cp": cp, "dp": dp, "ep": ep, "tp": tp})
    whole = {op.name: op.flops for op in base.ops if op.layer == 0 and op.kind == "matmul" and ".mlp." in op.name}
    own = {op.name.removesuffix(".mb0"): op.flops for op in trace.ops}
    for name, flops in whole.items():
        assert own[name] * dp * cp * (1 if "router" in name else tp) == flops

    def saved(of: Trace) -> dict[str, int]:
        every = (of.tensors[t] for t in saved_tensors(of).tolist())
        names = (
            (t.name.removesuffix(".mb0").partition(".all_to_all")[0].removesuffix(".summed"), t.bytes)
            for t in every
            if t.layer == 0
        )
        return {name: size for name, size in names if ".mlp." in name and not name.endswith(".ends")}

    before, after = saved(base), saved(trace)
    assert before.keys() == after.keys()
    for name, size in after.items():
        columns = tp if any(word in name for word in ("gate", "up", "act", "mul")) and "router" not in name else 1
        assert size * dp * cp * columns == before[name], name

    def held(of: Trace) -> int:
        kept = (t for t in of.tensors if t.role in ("weight", "optimizer_state") and of.producer[t.id] < 0)
        return sum(t.bytes for t in kept if ".mlp.gate_up." in t.name or ".mlp.down." in t.name)

    assert held(trace) * ep * tp == held(base)


def test_the_most_loaded_experts_get_the_rows_of_their_ranks_tokens() -> None:
    """With skewed routing a group of p ranks shares r / c rows, of which the first rank has those of its experts."""
    trace, _ = lay_out(mixture(1.0), "a100_80_sxm", {"cp": 2, "dp": 2, "ep": 2})
    loads = mixture(1.0).meta["expert_loads"][0]["0"]
    most = max(loads[0] + loads[1], loads[2] + loads[3])
    of_rows = {op.bytes for op in exchanges(trace, 0)} - {4 * COUNT // 2}
    width = 2 * MIXTRAL["hidden_size"]
    assert of_rows == {-(-(ROWS // 2 * width * most // ROWS) // 2)}


def test_experts_gradients_of_its_own_tokens_alone_are_wrong() -> None:
    """A rank that does not sum its experts' gradients with those of the ranks that have other tokens."""
    trace, _ = lay_out(mixture(), "a100_80_sxm", {"cp": 2, "dp": 2, "ep": 2})
    columns = trace.op_columns
    sums = [op for op in trace.ops if op.ring and op.ring.axis == "expert_data_context"]
    assert {op.ring for op in sums} == {Ring("expert_data_context", 2, 2)}
    alone = {op: ring for op, ring in columns.ring.items() if op != sums[0].id}
    assert {each.what for each in departures(rebuilt(trace, ring=alone), mixture())} == {"wrong"}


def test_counts_of_a_ranks_own_rows_are_not_those_of_all() -> None:
    """One that takes how many rows its own experts have of its own tokens for what all ranks' tokens make."""
    trace = by_context(mixture(), 2)
    assert trace.origin is not None
    ends = named(trace, "h0.mlp.ends")
    assert trace.tensors[ends].bytes == mixture().tensors[named(mixture(), "h0.mlp.ends")].bytes
    claims = list(trace.origin.tensors)
    claims[ends] = claims[ends].of
    lying = Trace(
        trace.tensor_columns,
        trace.op_columns,
        outputs=trace.outputs,
        carry=trace.carry,
        meta=trace.meta,
        origin=replace(trace.origin, tensors=tuple(claims)),
    )
    assert {each.what for each in departures(lying, mixture())} == {"wrong"}


# ---- faults that the law finds -----------------------------------------------------------------------


def whats(trace: Trace, base: Trace | None = None) -> set[str]:
    return {each.what for each in departures(trace, base or step())}


def test_attention_to_its_own_keys_alone_is_wrong() -> None:
    trace = by_context(step(), 2)
    core, own = op_named(trace, "h0.attn.core"), named(trace, "h0.attn.rope.k.add.out")
    whole = named(trace, "h0.attn.rope.k.add.out.context.for.h0.attn.core")
    assert whats(trace) == set()
    assert whats(reading(trace, core, whole, own)) == {"wrong"}


def test_a_gradient_summed_over_the_heads_ranks_alone_is_wrong() -> None:
    """With tp and cp, an update that takes what the ranks of one part of the tokens know."""
    trace = divide_layers(by_context(step(), 2), 2, True)
    assert whats(trace) == set()
    columns = trace.op_columns
    last = max(op for op, ring in columns.ring.items() if ring.axis == "context")
    alone = replace(columns, ring={op: ring for op, ring in columns.ring.items() if op != last})
    lonely = Trace(
        trace.tensor_columns, alone, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )
    assert whats(lonely) == {"wrong"}


def test_the_values_of_another_layer_are_wrong() -> None:
    trace = by_context(step(), 2)
    mine, other = (named(trace, f"h{i}.attn.v.out.context.for.h{i}.attn.core") for i in (1, 0))
    assert "wrong" in whats(reading(trace, op_named(trace, "h1.attn.core"), mine, other))


def test_a_gradient_of_keys_from_its_own_queries_alone_is_wrong() -> None:
    """A rank that takes its own term for the sum over all ranks."""
    trace = by_context(step(), 2)
    term = trace.ops[op_named(trace, "h0.attn.core.bwd")].writes[1]
    reduce = next(op for op in trace.ops if op.kind == "collective" and term in op.reads)
    columns = trace.op_columns
    alone = replace(columns, ring={op: ring for op, ring in columns.ring.items() if op != reduce.id})
    lonely = Trace(
        trace.tensor_columns, alone, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin
    )
    assert whats(lonely) == {"wrong"}


def test_a_collective_without_a_member_is_wrong() -> None:
    trace = by_context(step(), 4)
    first = min(trace.op_columns.ring)
    ring = {**trace.op_columns.ring, first: Ring("context", 3, trace.op_columns.ring[first].passes)}
    assert whats(rebuilt(trace, ring=ring)) == {"wrong"}


# ---- what cannot be divided --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "layout", "said"),
    [
        ({}, {"cp": 3}, "cp: 3 does not divide the sequence of 16; nearest: 2"),
        ({"attention": "eager"}, {"cp": 2}, "cp: scores of all tokens with all others .* try attention 'flash'"),
        (
            {"sequence": 18},
            {"cp": 2, "tp": 2, "sequence_parallel": True},
            "tp: 2 does not divide the 9 tokens of a rank of cp 2; nearest: 1",
        ),
        ({}, {"cp": 0}, "cp: needs a whole number of at least 1, has 0; nearest: 1"),
    ],
)
def test_a_division_that_there_is_not_names_the_nearest(changes: dict, layout: dict, said: str) -> None:
    given = {"config": LLAMA, "batch": 4, "sequence": 16, "attention": "flash", "precision": "bf16", **changes}
    with pytest.raises(LayoutError, match=said):
        lay_out(transformer(**given), "a100_80_sxm", layout)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rotary_tables_are_of_a_ranks_own_tokens(ranks: int) -> None:
    whole, own = ({t.name: t.bytes for t in trace.tensors} for trace in (step(), by_context(step(), ranks)))
    tables = [name for name in whole if name.startswith("rotary.")]
    assert len(tables) == 2
    assert all(own[name] * ranks == whole[name] for name in tables)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("stack", ["eager", "compiled"])
def test_a_loss_in_several_kernels_has_gradients_of_a_ranks_own_tokens(batch: int, stack: str) -> None:
    """Of one sample PyTorch's labels are a view of padded ones, which have no tokens that could be divided."""
    base = transformer(LLAMA, batch=batch, sequence=TOKENS, precision="mixed_bf16", loss="torch", attention="flash")
    trace, _ = lay_out(base, "a100_80_sxm", {"cp": 2, "tp": 2}, kernels=partial(with_stack, stack=stack))
    assert whats(trace, base) <= {"repeated"}
    whole, own = (t.bytes for of in (base, trace) for t in of.tensors if "loss.log_softmax.out.grad" in t.name)
    assert own * 4 == whole
