"""Ring attention: bytes, memory and time by hand, every rank against the one that stands for all, planted faults."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sim import simulate
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks
from sim.engine.replay import replay
from sim.errors import LayoutError
from sim.hardware.nodes import placed
from sim.hardware.platform import Engine, Link, Platform, Tier, rank_link
from sim.hardware.profile import load_profile
from sim.layout import lay_out
from sim.plan import Plan
from sim.policies import load
from sim.rewrites.ranks import all_ranks
from sim.rewrites.tensor_parallel import divide_layers, divide_tokens
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from sim.trace.op import Op
from tests.rewrites.test_context_parallel import alike
from tests.rewrites.test_expert_parallel import MIXTRAL, claiming
from tests.rewrites.test_replicas import GB, line, named, op_named, reading, rebuilt
from tests.rewrites.test_schedules import FAMILIES
from tests.rewrites.test_tensor_parallel import among
from workloads import transformer, with_stack

BATCH, TOKENS, KV_WIDTH = 4, 16, 16
LAYOUTS = [
    {"cp": 2},
    {"cp": 4},
    {"cp": 4, "dp": 2, "zero": 1, "micro_batches": 2},
    {"cp": 2, "dp": 2, "pp": 2, "zero": 3, "schedule": "zb_h1", "micro_batches": 2},
    {"cp": 4, "tp": 2},
    {"cp": 2, "tp": 2, "sequence_parallel": True, "dp": 2, "zero": 1},
]


@cache
def step(family: str = "llama") -> Trace:
    config = {**FAMILIES[family], "model_type": family}
    given = {"precision": "mixed_bf16", "loss": "fused", "attention": "flash", "optimizer": "adamw_fused"}
    return transformer(config, batch=BATCH, sequence=TOKENS, **given)


def with_neighbours(platform: Platform) -> Platform:
    """With a link from each device to its ranks' neighbours, as fast as the others."""
    homes = [tier.name for tier in platform.tiers if tier.name.startswith("hbm")]
    links = [Link(rank_link("neighbour", i), home, home, platform.links[0].rate if platform.links else GB)
             for i, home in enumerate(homes)]  # fmt: skip
    return replace(platform, links=(*platform.links, *links))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_stands_for_all(layout: dict) -> None:
    """Same time, same peaks, and the same values: the law checks all ranks without knowing that they are symmetric."""
    trace, _ = lay_out(step(), "a100_80_sxm", {**layout, "ring_attention": True})
    assert {each.what for each in departures(trace, step())} <= {"repeated"}
    every = all_ranks(trace)
    assert {each.what for each in departures(every, step())} == {"repeated"}
    stages, replicas, tokens, tensor = trace.devices, layout.get("dp", 1), layout["cp"], layout.get("tp", 1)
    ranks = replicas * tokens * tensor
    own, among_all = with_neighbours(among(stages, replicas, tensor, tokens)), line(stages * ranks)
    one, (time, held) = alike(trace, every, own, among_all, layout)
    assert one[0] == time
    assert [peak for peak in one[1] for _ in range(ranks)] == held


@settings(max_examples=6, phases=(Phase.generate,), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from((*sorted(FAMILIES), "mixtral")),
    st.sampled_from(("amp_bf16", "mixed_bf16", "megatron_bf16", "fp32")),
    st.sampled_from(
        ({"cp": 2}, {"cp": 4}, {"cp": 8}, {"cp": 2, "tp": 2}, {"cp": 4, "tp": 2, "sequence_parallel": True})
    ),
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
def test_any_transformer_computes_the_same(family: str, precision: str, ranks: dict, layout: dict) -> None:
    config = MIXTRAL if family == "mixtral" else {**FAMILIES[family], "model_type": family, "num_key_value_heads": 4}
    given = {"loss": "fused", "attention": "flash" if precision != "fp32" else "sdpa"}
    base = transformer(config, batch=4, sequence=16, precision=precision, **given)
    experts = {"ep": layout["dp"]} if family == "mixtral" else {}
    trace, _ = lay_out(base, "a100_80_sxm", {**ranks, **layout, **experts, "ring_attention": True})
    if precision != "fp32" or family != "mixtral":  # whose heads share keys, for which fp32 has no fused kernel
        assert any(op.ring is not None and op.ring.axis == "neighbour" for op in trace.ops)
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert {each.what for each in departures(all_ranks(trace), base)} <= {"repeated"}


@pytest.mark.parametrize("precision", ["mixed_bf16", "megatron_fp8"])
@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}, {"micro_batches": 2, "dp": 2}], ids=str)
def test_kernels_that_add_up_blocks_of_divided_layers_compute_the_same(precision: str, more: dict) -> None:
    """A kernel joins the sum of blocks with what reads it: the share of a sum is the sum of the shares."""
    config = {**FAMILIES["llama"], "model_type": "llama"}
    base = transformer(config, batch=4, sequence=64, precision=precision, loss="fused", attention="flash")
    layout = {"cp": 2, "tp": 2, "ring_attention": True, **more}
    trace, _ = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack="fused"))
    assert {each.what for each in departures(trace, base)} == {"repeated"}
    block = next(op for op in trace.ops if op.kind == "attention" and op.phase == "backward")
    of_blocks = {*block.writes}
    adding = next(op for op in trace.ops if of_blocks & {*op.reads} and op.kind == "elementwise")
    term = next(t for t in adding.reads if t in of_blocks)
    other = next(t for t in adding.reads if t != term)
    missing = {each.what for each in departures(reading(trace, adding.id, term, other), base)}
    assert "wrong" in missing  # one block's terms alone


@pytest.mark.parametrize("policy", ["full_recompute", "selective_recompute", "offload_activations", "hybrid", "dtr"])
def test_policies_run_on_blocks(policy: str) -> None:
    trace, platform = lay_out(step(), "a100_80_sxm", {"cp": 4, "micro_batches": 2, "ring_attention": True})
    ran = run_policy(load(policy), trace, platform)
    assert ran.done, ran.error
    assert {each.what for each in departures(ran.plan.trace, step())} <= {"repeated"}
    laws = ("capacity", "ops", "order", "tiling", "outcome")
    assert not [text for law in laws if (text := breaks(CHECKS[law], ran))]


# ---- bytes, work and memory by hand ------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_to_the_neighbour(ranks: int, heads: int) -> None:
    """(c - 1) m in forward, (c - 1) m of blocks and c m of gradients in backward; m = 4 b s / c h_kv / t."""
    trace = divide_layers(divide_tokens(step(), ranks, ring=True), heads)
    m = 4 * BATCH * TOKENS // ranks * KV_WIDTH // heads
    sent = {"forward": 0, "backward": 0}
    for op in trace.ops:
        if op.ring is not None and op.ring.axis != "tensor" and op.layer == 0 and op.phase in sent:
            assert op.ring == ("neighbour", ranks, 1)
            assert op.bytes == m
            sent[op.phase] += m
    assert sent == {"forward": (ranks - 1) * m, "backward": (2 * ranks - 1) * m}


@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_have_equal_shares_of_the_work(ranks: int) -> None:
    """With two slices per rank, from both ends, every block leaves as much of a causal product."""
    whole = {op.name: op.flops for op in divide_tokens(step(), ranks).ops if op.kind == "attention"}
    blocks: dict[str, list[int]] = {}
    for op in divide_tokens(step(), ranks, ring=True).ops:
        if op.kind == "attention":
            blocks.setdefault(op.name.partition(".with_block")[0], []).append(op.flops)
    assert blocks.keys() == whole.keys()
    for name, flops in blocks.items():
        assert len(flops) == ranks
        assert sum(flops) == whole[name]
        assert max(flops) - min(flops) <= 1


def held_at_once(trace: Trace, is_one: partial) -> int:
    """The most bytes of some tensors between their producers and their last readers, in program order."""
    size = trace.tensor_columns.bytes
    spans = [(int(trace.producer[t]), max(trace.readers(t)), int(size[t])) for t in range(len(size)) if is_one(t)]
    return max(sum(b for first, last, b in spans if first <= op <= last) for op, _, _ in spans)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_rank_holds_two_blocks_of_the_keys_and_never_all(ranks: int) -> None:
    trace = divide_tokens(step(), ranks, ring=True)
    names, m = trace.tensor_columns.name, 4 * BATCH * TOKENS // ranks * KV_WIDTH
    assert held_at_once(trace, lambda t: ".block" in names[t] and ".for." in names[t]) == 2 * m
    gathered = divide_tokens(step(), ranks)
    names = gathered.tensor_columns.name
    assert held_at_once(gathered, lambda t: ".context.for." in names[t] and ".core" in names[t]) == ranks * m


@pytest.mark.parametrize("stack", ["eager", "fused"])
def test_backward_of_attention_reads_a_block_instead_of_all_keys(stack: str) -> None:
    """Of c blocks of m bytes it reads one, with its own queries, results and their gradient."""
    base = transformer("gpt2", batch=1, sequence=1024, precision="mixed_bf16", attention="flash", loss="fused")
    most = {}
    for ring in (False, True):
        layout = {"cp": 8, "ring_attention": ring}
        trace, platform = lay_out(base, "a100_80_sxm", layout, kernels=partial(with_stack, stack=stack))
        size = trace.tensor_columns.bytes
        held = [op.reads for op in trace.ops if op.kind == "attention" and op.phase == "backward"]
        most[ring] = max(sum(int(size[t]) for t in reads) for reads in held)
        assert simulate(trace, platform).summary()["exchanged_bytes"] > 0
    of_all = 3 * 2 * 1024 * 768  # queries, keys and values in one tensor
    assert most[False] - most[True] == of_all - 2 * of_all // 8


# ---- time by hand ------------------------------------------------------------------------------------

WIDTH, BYTES = 8, 2
FLOPS = 10**6


def attention(ranks: int, backward: bool) -> Trace:
    """One layer's attention of a sample, with as many tokens as there are ranks, and its gradients."""
    b = TraceBuilder({"batch": 1, "sequence": ranks})
    shape, size = (1, 1, ranks, WIDTH), ranks * WIDTH * BYTES

    def value(name: str, role: str = "activation", **fields: object) -> int:
        return b.tensor(name, size, role, shape=shape, dtype="bf16", layer=0, **fields)

    x, out = value("x", "input"), value("out")
    q, k, v = map(value, "qkv")
    scale = b.tensor("scale", 4 * ranks, "activation", shape=(1, 1, ranks), dtype="fp32", layer=0)
    fields = {"layer": 0, "splits": ("batch", "heads")}
    work = {"flops": FLOPS * ranks * ranks, **fields}
    b.op("project", "elementwise", reads=[x], writes=[q, k, v], **fields)
    b.op("core", "attention", reads=[q, k, v], writes=[out, scale], **work)
    if not backward:
        return b.build(outputs=[out])
    fields, work = {**fields, "phase": "backward"}, {**work, "phase": "backward"}
    grad, *gradients = (value(f"{name}.grad") for name in ("out", "q", "k", "v"))
    b.op("loss", "elementwise", reads=[out], writes=[grad], **fields)
    b.op("core.bwd", "attention", reads=[grad, q, k, v, out, scale], writes=gradients, **work)
    return b.build(outputs=gradients)


def machine(transfer_ns: int) -> Platform:
    """A device that takes 1,000 ns for a block's product, nothing for bytes, and as given to send a block."""
    size = 2 * WIDTH * BYTES
    rate = size * 10**9 // transfer_ns if transfer_ns else 10**18
    return Platform(
        "ring",
        (Tier("hbm", 1 << 40, 1 << 40, 10**18, device=0),),
        (Engine("gpu", 0, "hbm", ("hbm",), {"fp32": 10**12, "bf16": 10**12}),),
        tuple(Link(rank_link(axis, 0), "hbm", "hbm", rate) for axis in ("neighbour", "context")),
    )


def ends(trace: Trace, transfer_ns: int) -> int:
    """When the last op ends, in ns."""
    return replay(Plan(trace), machine(transfer_ns)).end


def about(time: int, wanted: int, trace: Trace) -> bool:
    """Whether times are equal but for each op's rounding up to the nanosecond."""
    return 0 <= time - wanted <= len(trace.ops)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_with_free_links_time_is_that_of_the_undivided_product(ranks: int, backward: bool) -> None:
    ring = divide_tokens(attention(ranks, backward), ranks, ring=True)
    whole = divide_tokens(attention(ranks, backward), ranks)
    passes = 2 if backward else 1
    assert about(ends(whole, 0), passes * ranks * 1000, whole)
    assert about(ends(ring, 0), passes * ranks * 1000, ring)


@pytest.mark.parametrize("transfer", [1, 500, 999, 1000, 1500, 4000])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_forward_hides_a_transfer_behind_a_product(ranks: int, transfer: int) -> None:
    """p + (c - 1) max(p, t); gathering all first takes (c - 1) t + c p."""
    ring = divide_tokens(attention(ranks, False), ranks, ring=True)
    assert about(ends(ring, transfer), 1000 + (ranks - 1) * max(1000, transfer), ring)
    whole = divide_tokens(attention(ranks, False), ranks)
    assert about(ends(whole, transfer), (ranks - 1) * transfer + ranks * 1000, whole)


@pytest.mark.parametrize("transfer", [600, 1700])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_exposed_time_is_what_transfers_are_longer(ranks: int, transfer: int) -> None:
    """(c - 1) max(0, t - p) in forward."""
    ring = divide_tokens(attention(ranks, False), ranks, ring=True)
    exposed = simulate(ring, machine(transfer)).summary()["exposed_ns"]
    assert abs(exposed - (ranks - 1) * max(0, transfer - 1000)) <= len(ring.ops)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_backward_is_hidden_but_for_the_last_hop(ranks: int) -> None:
    """With two transfers per product at most: c products and one hop; with longer ones the link never rests."""
    ring, forward = (divide_tokens(attention(ranks, backward), ranks, ring=True) for backward in (True, False))
    for transfer in (1, 250, 500):
        whole = ends(ring, transfer) - ends(forward, transfer)
        assert about(whole, ranks * 1000 + transfer, ring)
    for transfer in (1001, 5000):
        whole = ends(ring, transfer) - ends(forward, transfer)
        assert about(whole, (2 * ranks - 1) * transfer, ring)


@given(st.sampled_from((2, 4, 8)), st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=20, deadline=None)
def test_time_is_monotone_in_the_transfer(ranks: int, one: int, other: int) -> None:
    ring = divide_tokens(attention(ranks, True), ranks, ring=True)
    slow, fast = (ends(ring, transfer) for transfer in (max(one, other), min(one, other)))
    assert slow >= fast - len(ring.ops)


def test_a_hop_takes_as_long_as_the_slowest_link() -> None:
    """Inside a node its links; where ranks are on several nodes, the network, whatever the others have."""
    node = load_profile("a100_80_sxm", overrides={"devices": "8"})
    inside, outside = (placed(node, 1, 1, context=c, neighbours=True) for c in (8, 16))
    inner = next(link for link in node.links if link.name.endswith("@0-1"))
    near, far = (next(ln for ln in p.links if ln.name == rank_link("neighbour", 0)) for p in (inside, outside))
    assert near.fixed == inner.fixed
    assert near.rate <= inner.rate
    assert far.rate == min(near.rate, node.networks[0].rate)
    assert far.fixed == max(inner.fixed, node.networks[0].fixed)
    assert not any(ln.name == rank_link("neighbour", 0) for ln in placed(node, 1, 1, context=8).links)


# ---- faults that the law finds -----------------------------------------------------------------------


def whats(trace: Trace) -> set[str]:
    return {each.what for each in departures(trace, step())}


def blocks_of(trace: Trace, op: str) -> list[Op]:
    return [each for each in trace.ops if each.name.startswith(f"{op}.with_block")]


def test_a_block_of_another_rank_is_wrong() -> None:
    """The second product takes the block that the first one had."""
    trace = divide_tokens(step(), 4, ring=True)
    assert whats(trace) == set()
    first, second = blocks_of(trace, "h0.attn.core")[:2]
    assert whats(reading(trace, second.id, second.reads[1], first.reads[1])) == {"wrong"}


def test_a_block_of_another_layer_is_wrong() -> None:
    trace = divide_tokens(step(), 4, ring=True)
    mine, other = (named(trace, f"h{i}.attn.v.out.block2.for.h{i}.attn.core") for i in (1, 0))
    assert "wrong" in whats(reading(trace, op_named(trace, "h1.attn.core.with_block2"), mine, other))


def test_a_result_without_a_block_is_wrong() -> None:
    """An op that adds the first block's term once more in place of the second one's."""
    trace = divide_tokens(step(), 4, ring=True)
    add = op_named(trace, "h0.attn.core.out.add1")
    so_far, term = trace.ops[add].reads[:2]
    assert whats(reading(trace, add, term, so_far)) == {"wrong"}


def test_a_gradient_of_keys_from_one_block_alone_is_wrong() -> None:
    """A rank that sends on its own term, and not the sum so far."""
    trace = divide_tokens(step(), 4, ring=True)
    hop, keys = op_named(trace, "h0.attn.core.bwd.gradients3"), "h0.attn.rope.k.add.out.grad"
    grown, term = (named(trace, f"{keys}.{what}") for what in ("to_block2", "of_block2"))
    assert whats(reading(trace, hop, grown, term)) == {"wrong"}


def test_blocks_that_no_neighbour_sends_are_wrong() -> None:
    trace = divide_tokens(step(), 4, ring=True)
    columns = trace.op_columns
    for op in (op_named(trace, "h0.attn.core.block1"), op_named(trace, "h0.attn.core.bwd.gradients4")):
        alone = {each: ring for each, ring in columns.ring.items() if each != op}
        assert whats(rebuilt(trace, ring=alone)) == {"wrong"}


def test_a_product_that_is_said_to_be_two_is_missing() -> None:
    """A block computed twice, and another one never."""
    trace = divide_tokens(step(), 4, ring=True)
    assert trace.origin is not None
    second = blocks_of(trace, "h0.attn.core")[1]
    lying = claiming(trace, second.id, replace(trace.origin.ops[second.id], first=0, stop=1))
    assert "wrong" in whats(lying)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"ring_attention": True}, "ring_attention: blocks go round among the ranks of cp, which is 1; nearest: cp 2"),
        ({"cp": 2, "ring_attention": 1}, "ring_attention: needs true or false, has 1"),
    ],
)
def test_a_ring_that_there_is_not_names_the_nearest(layout: dict, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        lay_out(step(), "a100_80_sxm", layout)
