"""Expert parallelism: closed forms, every rank against the one that stands for all, and faults that the law finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sim import simulate
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.errors import LayoutError
from sim.hardware.nodes import placed
from sim.hardware.platform import Link, Platform, Tier, rank_link, shared_link
from sim.hardware.profile import load_profile
from sim.layout import lay_out
from sim.policies import load
from sim.rewrites.dimensions import EXPERTS
from sim.rewrites.experts import group_loads
from sim.rewrites.ranks import all_ranks
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.io import load as load_trace
from sim.trace.io import save as save_trace
from sim.trace.op import Op, Ring
from sim.trace.origin import Along
from sim.trace.phases import saved_tensors
from tests.rewrites.test_replicas import GB, line, named, op_named, peaks, reading, rebuilt
from workloads import transformer, with_stack

COMMON = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 64}
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 2, "intermediate_size": 128, "num_key_value_heads": 2,
           "num_local_experts": 4, "num_experts_per_tok": 2, **COMMON}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek", "num_hidden_layers": 3, "intermediate_size": 128, "moe_intermediate_size": 32,
            "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
            "num_experts_per_tok": 2, **COMMON}  # fmt: skip
BATCH, TOKENS, WIDTH, CHOSEN, COUNT = 16, 16, 64, 2, 4
ROWS = BATCH * TOKENS * CHOSEN
LAYOUTS = [
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2, "micro_batches": 2},
    {"dp": 4, "ep": 2, "micro_batches": 2, "zero": 1},
    {"dp": 4, "ep": 2, "micro_batches": 2, "zero": 2},
    {"dp": 4, "ep": 4, "micro_batches": 2, "zero": 3},
    {"dp": 4, "ep": 2, "pp": 2, "micro_batches": 2, "zero": 3, "schedule": "zb_h1"},
    {"tp": 2},
    {"dp": 2, "ep": 2, "tp": 2},
    {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "micro_batches": 2, "zero": 1},
]


@cache
def step(skew: float = 0.0) -> Trace:
    """A step of Mixtral's kind; without skew every expert gets as many rows."""
    trace = transformer(MIXTRAL, batch=BATCH, sequence=TOKENS, precision="mixed_bf16", routing_skew=skew)
    if skew:
        return trace
    loads = [{str(layer): [ROWS // COUNT] * COUNT for layer in range(2)}]
    return Trace(
        trace.tensor_columns,
        trace.op_columns,
        outputs=trace.outputs,
        carry=trace.carry,
        meta={**trace.meta, "expert_loads": loads},
    )


def divided(layout: dict, skew: float = 0.0) -> Trace:
    return lay_out(step(skew), "a100_80_sxm", layout)[0]


def rings(stages: int, replicas: int) -> Platform:
    """`line`, with links for all rings of replicas, on the same wires, and for those that divide layers."""
    bare = line(stages, replicas)
    more = [Link(shared_link(i), f"hbm@{i}", f"hbm@{i}", GB) for i in range(stages)]
    more += [Link(rank_link(axis, i), f"hbm@{i}", f"hbm@{i}", GB) for i in range(stages) for axis in
            ("expert", "expert_data", "tensor")]  # fmt: skip
    return replace(bare, links=(*bare.links, *more))


def switch(devices: int) -> Platform:
    """Devices of which each sends and receives one thing at a time, at 1 GB/s, over a switch."""
    bare = line(devices)
    hub = Tier("switch", 1 << 40, 1 << 40, 10**12)
    ways = [(f"hbm@{i}", "switch") for i in range(devices)]
    links = [Link(f"{a}.{b}", a, b, GB) for pair in ways for a, b in (pair, pair[::-1])]
    return replace(bare, tiers=(*bare.tiers, hub), links=tuple(links))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_stands_for_all(layout: dict) -> None:
    """Same time, same peaks, and the same values: the law checks all ranks without knowing that they are symmetric."""
    trace = divided(layout)
    assert {each.what for each in departures(trace, step())} <= {"repeated"}
    every = all_ranks(trace)
    assert {each.what for each in departures(every, step())} <= {"repeated"}
    stages, replicas, tensor = trace.devices, layout.get("dp", 1), layout.get("tp", 1)
    ranks = replicas * tensor
    among = switch(ranks) if stages * tensor == 1 else line(stages * ranks)
    own = rings(stages, replicas)
    alone = layout.get("ep", 1) == replicas and stages * tensor == 1
    if not alone:  # which of several rings goes first on a wire would be arbitrary
        among, own = (replace(p, links=tuple(replace(ln, rate=10**15) for ln in p.links)) for p in (among, own))
    one, all_of_them = peaks(trace, own), peaks(every, among)
    assert one[0] == all_of_them[0]
    assert [peak for peak in one[1] for _ in range(ranks)] == all_of_them[1]


@pytest.mark.parametrize("skew", [0.5, 1.5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_wait_for_the_most_loaded_one(ranks: int, skew: float) -> None:
    """The time of ranks with fewer rows is that of the first, which has the most in every layer; none holds more."""
    trace = divided({"dp": ranks, "ep": ranks}, skew)
    every = all_ranks(trace)
    assert {each.what for each in departures(every, step(skew))} <= {"repeated"}
    one, (time, held) = peaks(trace, rings(1, ranks)), peaks(every, switch(ranks))
    assert one[0] == time
    assert one[1][0] == held[0] == max(held)
    assert skew < 1 or min(held) < held[0]  # with less skew all peak in the update


@settings(max_examples=6, phases=(Phase.generate,), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from((MIXTRAL, DEEPSEEK)),
    st.sampled_from(("fp32", "amp_bf16", "mixed_bf16", "megatron_bf16")),
    st.sampled_from((0.0, 1.0)),
    st.sampled_from(((2, 2), (4, 2), (4, 4))),
    st.fixed_dictionaries(
        {
            "tp": st.sampled_from((1, 2)),
            "zero": st.integers(0, 3),
            "micro_batches": st.sampled_from((1, 2)),
            "schedule": st.sampled_from(("1f1b", "gpipe", "zb_h1")),
            "pp": st.sampled_from((1, 2)),
        }
    ),
)
def test_any_mixture_computes_the_same(config: dict, precision: str, skew: float, ranks: tuple, layout: dict) -> None:
    base = transformer(config, batch=8, sequence=16, precision=precision, routing_skew=skew)
    layers = (1, config["num_hidden_layers"] - 1) if layout["pp"] == 2 else ()
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": ranks[0], "ep": ranks[1], "layers": layers, **layout})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize("policy", ["full_recompute", "offload_activations", "hybrid"])
def test_policies_run_on_a_part_of_the_experts(policy: str) -> None:
    trace, platform = lay_out(step(1.0), "a100_80_sxm", {"dp": 4, "ep": 4, "micro_batches": 2})
    ran = run_policy(load(policy), trace, platform)
    assert ran.done, ran.error
    assert {each.what for each in departures(ran.plan.trace, step(1.0))} <= {"repeated"}
    laws = ("capacity", "ops", "order", "tiling", "outcome")
    assert not [text for law in laws if (text := breaks(CHECKS[law], ran))]


def test_a_file_keeps_which_rank_it_is(tmp_path) -> None:
    trace = divided({"dp": 4, "ep": 2})
    save_trace(trace, tmp_path / "rank.jsonl")
    again = load_trace(tmp_path / "rank.jsonl")
    assert again.origin == trace.origin
    assert not departures(again, step())


# ---- closed forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2), (4, 2)])
def test_state_and_bytes_where_layers_are_divided_too(ep: int, tp: int) -> None:
    """1 / (p t) of the experts; of a rank's rows an all-reduce among t sums results and gradients of inputs."""
    base, trace = step(), divided({"dp": 4, "ep": ep, "tp": tp})

    def held(of: Trace) -> int:
        kept = (t for t in of.tensors if t.role in ("weight", "optimizer_state") and of.producer[t.id] < 0)
        return sum(t.bytes for t in kept if ".mlp.gate_up." in t.name or ".mlp.down." in t.name)

    assert held(trace) * ep * tp == held(base)
    sums = {
        op.name.removesuffix(".tensor.all_reduce.mb0"): op.bytes
        for op in trace.ops
        if op.ring is not None and op.ring.axis == "tensor" and op.layer == 0 and ".mlp." in op.name
    }
    of_rows = 2 * (tp - 1) * 2 * WIDTH * (ROWS // 4) // tp
    assert sums == {"h0.mlp.down.out": of_rows, "h0.mlp.dispatch.out.grad": of_rows}
    flops = {
        op.name: op.flops for op in base.ops if op.kind == "matmul" and ".mlp." in op.name and "router" not in op.name
    }
    own = {name: op.flops for op in trace.ops if (name := op.name.removesuffix(".mb0")) in flops}
    assert all(own[name] * 4 * tp == whole for name, whole in flops.items())


def exchanges(trace: Trace, layer: int) -> list[Op]:
    return [op for op in trace.ops if op.ring is not None and op.ring.axis == "expert" and op.layer == layer]


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_each_all_to_all(ranks: int) -> None:
    """(p - 1) / p of the r rows of 2 h bytes that a rank routes, four times per layer; before the first, the counts."""
    sent = [(op.phase, op.bytes) for op in exchanges(divided({"dp": ranks, "ep": ranks}), 0)]
    rows = 2 * WIDTH * (ROWS // ranks) * (ranks - 1) // ranks
    counts = 4 * COUNT * (ranks - 1) // ranks
    assert sorted(sent) == sorted([("forward", counts), *[("forward", rows)] * 2, *[("backward", rows)] * 2])


@pytest.mark.parametrize("skew", [0.5, 1.5])
def test_the_most_loaded_rank_gets_the_rows_of_its_experts(skew: float) -> None:
    """Of its l rows it gets (p - 1) / p from the others: no rank sends or gets more."""
    trace, ranks = divided({"dp": 2, "ep": 2}, skew), 2
    for layer in range(2):
        loads = step(skew).meta["expert_loads"][0][str(layer)]
        most = max(loads[0] + loads[1], loads[2] + loads[3])
        assert group_loads(trace, layer, ranks) == [most, ROWS - most]
        bytes_of_rows = {op.bytes for op in exchanges(trace, layer)} - {4 * COUNT // 2}
        assert bytes_of_rows == {most * 2 * WIDTH // 2}


@pytest.mark.parametrize(("dp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_state_of_a_rank(dp: int, ep: int) -> None:
    """1 / p of the experts' weights, gradients and states; all of everything else."""
    base, trace = step(), divided({"dp": dp, "ep": ep})

    def held(of: Trace, experts: bool) -> int:
        kept = (t for t in of.tensors if t.role in ("weight", "optimizer_state") and of.producer[t.id] < 0)
        return sum(t.bytes for t in kept if (".mlp.gate_up." in t.name or ".mlp.down." in t.name) == experts)

    assert held(trace, True) * ep == held(base, True) > 0
    assert held(trace, False) == held(base, False) > 0
    gradients = {t.name: t.bytes for t in base.tensors if t.role == "gradient"}
    own = {t.name.removesuffix(".mb0"): t for t in trace.tensors if t.role == "gradient" and t.name.endswith(".mb0")}
    for name, size in gradients.items():
        assert own[name].bytes == (size // ep if ".gate_up." in name or ".mlp.down." in name else size)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_divides_experts_among_the_replicas_that_have_them(level: int) -> None:
    base, trace = step(), divided({"dp": 4, "ep": 2, "zero": level})
    before = {t.name: t.bytes for t in base.tensors}
    states = [t for t in trace.tensors if t.role == "optimizer_state" and trace.producer[t.id] < 0]
    assert states
    assert all(t.bytes * 4 == before[t.name.removesuffix(".shard")] for t in states)  # 2 x 2, or 4
    axes = {op.ring.axis for op in trace.ops if op.ring is not None and "gate_up" in op.name and op.phase == "backward"}
    assert axes <= {"expert", "expert_data"}


def test_gradients_are_summed_over_the_replicas_that_have_them() -> None:
    """2 (d - 1) / d of the bytes, with d = dp / ep for experts, d = dp for all else."""
    base, trace = step(), divided({"dp": 4, "ep": 2})
    sizes = {t.name: t.bytes for t in base.tensors if t.role == "gradient"}
    experts = sum(size for name, size in sizes.items() if ".gate_up." in name or ".mlp.down." in name)
    sent = {"data": 0, "expert_data": 0}
    for op in trace.ops:
        if op.ring is not None and op.ring.passes == 2:
            sent[op.ring.axis] += op.bytes or 0
    assert sent["expert_data"] == 2 * 1 * (experts // 2) // 2
    assert sent["data"] == 2 * 3 * (sum(sizes.values()) - experts) // 4
    whole = divided({"dp": 4, "ep": 4})
    assert not [op for op in whole.ops if op.ring is not None and op.ring.axis == "expert_data"]


def test_what_backward_reads_is_kept_where_it_is_read() -> None:
    """Rows that arrived at the experts are saved there, and not at the rank that sent them."""
    trace = divided({"dp": 2, "ep": 2})
    saved = {trace.tensors[t].name for t in saved_tensors(trace).tolist()}
    assert "h0.mlp.dispatch.out.all_to_all.mb0.out" in saved
    assert "h0.mlp.dispatch.out.mb0" not in saved


def test_work_of_the_ranks_adds_up() -> None:
    every = all_ranks(divided({"dp": 4, "ep": 4}, 1.5))
    base = step(1.5)
    work: dict[int, int] = {}
    for op in every.ops:
        for leaf in _leaves(every, op.id):
            work[leaf] = work.get(leaf, 0) + op.flops
    experts = [op for op in base.ops if op.name.endswith((".gate_up", ".mlp.down", ".gate_up.bwd", ".mlp.act"))]
    assert len(experts) == 4 * 2
    for op in experts:  # a rank's part of a flop is rounded
        assert abs(work[op.id] - op.flops) <= 4


def _leaves(trace: Trace, op: int) -> list[int]:
    from sim.trace.origin import leaves

    assert trace.origin is not None
    return [leaf.id for leaf in leaves(trace.origin.ops[op])]


def test_time_of_an_all_to_all_inside_and_between_nodes() -> None:
    """Of p - 1 parts, those to ranks of the same node go over its links beside those that go over the network."""
    a100 = load_profile("a100_80_sxm", overrides={"devices": "8"})
    links = {link.name: link for link in placed(a100, 1, 16, 1, 16).links}
    inside = next(link for link in a100.links if link.source == a100.home(0).name and link.target == a100.home(1).name)
    network, found = a100.networks[0], links[rank_link("expert", 0)]
    slowest = max(7 / inside.rate, 8 / network.rate)
    assert found.rate == pytest.approx(15 / slowest, rel=1e-6)
    assert found.fixed == max(inside.fixed, network.fixed)
    within = {link.name: link for link in placed(a100, 1, 16, 1, 8).links}[rank_link("expert", 0)]
    assert (within.rate, within.fixed) == (inside.rate, inside.fixed)


def test_more_experts_fit_where_they_are_divided() -> None:
    found = {}
    for ep in (1, 4):
        trace, platform = lay_out(step(), "a100_80_sxm", {"dp": 4, "ep": ep})
        found[ep] = simulate(trace, platform).summary()["peak_bytes"]
    assert found[4] < found[1]


# ---- faults that the law finds -----------------------------------------------------------------------


def whats(trace: Trace) -> set[str]:
    return {each.what for each in departures(trace, step())}


def claiming(trace: Trace, op: int, expr: object) -> Trace:
    """The trace with another claim of what an op stands for."""
    assert trace.origin is not None
    ops = [expr if i == op else old for i, old in enumerate(trace.origin.ops)]
    return Trace(
        trace.tensor_columns,
        trace.op_columns,
        outputs=trace.outputs,
        carry=trace.carry,
        meta=trace.meta,
        origin=replace(trace.origin, ops=tuple(ops)),
    )


@pytest.mark.parametrize("ring", [Ring("expert", 2, 1), Ring("expert_data", 4, 1), Ring("tensor", 4, 1)])
def test_an_all_to_all_without_a_member_or_among_others_is_wrong(ring: Ring) -> None:
    trace = divided({"dp": 4, "ep": 4})
    exchange = op_named(trace, "h0.mlp.dispatch.out.all_to_all.mb0")
    assert "wrong" in whats(rebuilt(trace, ring={**trace.op_columns.ring, exchange: ring}))


def test_the_weights_of_other_experts_are_wrong() -> None:
    """Rows of the first rank's experts times the weights of the second one's."""
    trace = divided({"dp": 2, "ep": 2})
    op = op_named(trace, "h0.mlp.gate_up.mb0")
    assert trace.origin is not None
    claim = trace.origin.ops[op]
    assert isinstance(claim, Along)
    assert claim.dimension == EXPERTS
    assert "wrong" in whats(claiming(trace, op, replace(claim, first=1, stop=2)))


def test_the_weights_of_another_layer_are_wrong() -> None:
    trace = divided({"dp": 2, "ep": 2})
    mine, other = named(trace, "h0.mlp.gate_up.weight"), named(trace, "h1.mlp.gate_up.weight")
    assert whats(reading(trace, op_named(trace, "h0.mlp.gate_up.mb0"), mine, other)) == {"wrong"}


def test_terms_of_experts_that_were_not_summed_over_the_ranks_of_a_layer_are_wrong() -> None:
    trace = divided({"dp": 2, "ep": 2, "tp": 2})
    assert whats(trace) <= {"repeated"}
    summed = op_named(trace, "h0.mlp.down.out.tensor.all_reduce.mb0")
    ring = {op: ring for op, ring in trace.op_columns.ring.items() if op != summed}
    assert "wrong" in whats(rebuilt(trace, ring=ring))


def test_experts_that_see_the_rows_of_their_own_rank_alone_are_wrong() -> None:
    trace = divided({"dp": 2, "ep": 2})
    own, all_rows = named(trace, "h0.mlp.dispatch.out.mb0"), named(trace, "h0.mlp.dispatch.out.all_to_all.mb0.out")
    assert whats(reading(trace, op_named(trace, "h0.mlp.gate_up.mb0"), all_rows, own)) == {"wrong"}


def test_a_gradient_of_experts_summed_over_all_replicas_is_wrong() -> None:
    """It would be counted once for each rank that divides the experts."""
    trace = divided({"dp": 4, "ep": 2})
    summed = op_named(trace, "h0.mlp.down.weight.grad.all_reduce.mb0")
    assert trace.op_columns.ring[summed] == Ring("expert_data", 2, 2)
    assert whats(rebuilt(trace, ring={**trace.op_columns.ring, summed: Ring("expert_data", 4, 2)})) == {"wrong"}
    assert whats(rebuilt(trace, ring={**trace.op_columns.ring, summed: Ring("expert", 2, 2)})) == {"wrong"}


# ---- what cannot be divided --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "layout", "said"),
    [
        ({}, {"dp": 4, "ep": 3}, "ep: 3 ranks of experts do not divide dp 4; nearest: 2"),
        ({}, {"dp": 8, "ep": 8}, "ep: 8 does not divide the 4 experts; nearest: 4"),
        ({"stack": "fused"}, {"dp": 2, "ep": 2}, "ep: experts in kernels of the stack .* build the trace eager"),
        ({"micro_batches": 2}, {"dp": 2, "ep": 2}, "ep: the trace has microbatches already"),
        ({}, {"tp": 3}, "tp: 3 does not divide heads and columns .2.; nearest: 2"),
        ({}, {"ep": 0}, "ep: needs a whole number of at least 1, has 0; nearest: 1"),
    ],
)
def test_a_division_that_there_is_not_names_the_nearest(changes: dict, layout: dict, said: str) -> None:
    given = {"batch": 16, "sequence": 16, "precision": "bf16"} | changes
    with pytest.raises(LayoutError, match=said):
        lay_out(transformer(MIXTRAL, **given), "a100_80_sxm", layout)


def test_rows_of_experts_are_not_told_from_tokens_where_axes_have_no_names() -> None:
    trace = transformer({**MIXTRAL, "num_experts_per_tok": 1}, batch=16, sequence=16, precision="bf16")
    layout = {"tp": 2, "sequence_parallel": True}
    lay_out(trace, "a100_80_sxm", layout)
    columns = replace(trace.tensor_columns, axes={})
    imported = Trace(columns, trace.op_columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)
    with pytest.raises(LayoutError, match=r"rows of experts, .* nearest: false"):
        lay_out(imported, "a100_80_sxm", layout)


def test_a_dense_model_has_no_experts() -> None:
    with pytest.raises(LayoutError, match="ep: the trace has no experts that can be divided; nearest: 1"):
        lay_out(transformer("gpt2", batch=2, sequence=16), "a100_80_sxm", {"dp": 2, "ep": 2})


@pytest.mark.parametrize("stack", ["fused", "compiled"])
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (MIXTRAL, {"dp": 4, "ep": 2, "zero": 1, "micro_batches": 2}),
        (DEEPSEEK, {"dp": 2, "ep": 2, "tp": 2}),
        (MIXTRAL, {"dp": 2, "ep": 2, "cp": 2, "zero": 3}),
    ],
)
def test_experts_in_kernels_that_are_fused_after_division(config: dict, layout: dict, stack: str) -> None:
    """Same values; weights of a rank and bytes of exchanges are those of eager kernels, and updates stay apart."""
    base = transformer(config, batch=8, sequence=16, precision="mixed_bf16", attention="flash", loss="fused")
    trace, _ = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack=stack))
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}
    eager, _ = lay_out(base, "a100_80_sxm", layout)

    def held(of: Trace) -> dict[str, int]:
        return {t.name: t.bytes for t in of.tensors if t.role == "weight" and of.producer[t.id] < 0}

    assert held(trace) == held(eager)
    assert [op.bytes for op in exchanges(trace, 1)] == [op.bytes for op in exchanges(eager, 1)]
    assert len(trace.ops) < len(eager.ops)


def test_a_kernel_on_the_rows_of_its_own_tokens_is_wrong() -> None:
    """One that takes what it has before the all-to-all for the rows of its experts."""
    base = transformer(MIXTRAL, batch=8, sequence=16, precision="mixed_bf16", attention="flash", loss="fused")
    kernels = partial(with_stack, stack="fused")
    trace, _ = lay_out(base, "a100_80_sxm", {"dp": 2, "ep": 2}, kernels=kernels)
    rows = next(op for op in exchanges(trace, 0) if "dispatch" in op.name)
    reader = trace.readers(rows.writes[0])[0]
    lying = reading(trace, reader, rows.writes[0], rows.reads[0])
    assert "wrong" in {each.what for each in departures(lying, base)}
