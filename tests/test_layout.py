"""Layouts: one way to say how a trace runs on many devices, in Python and on the command line."""

from __future__ import annotations

import gc
import itertools
import json
import re
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import fields, replace

import pytest

from sim import LayoutError, Trace, compare, lay_out, load_profile, save_trace, simulate
from sim.analysis.stages import stages
from sim.errors import Infeasible, PolicyError
from sim.hardware.nodes import placed
from sim.hardware.platform import rank_link
from sim.layout import Layout
from sim.rewrites.rewriter import with_columns
from sim.rewrites.values import departures
from tests.machines import machine
from tests.test_cli import tiersim
from workloads import cnn, transformer

GB = 10**9
CONFIG = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256}


@pytest.fixture(scope="module")
def base() -> Trace:
    return transformer(CONFIG, batch=4, sequence=32)


def test_a_layout_is_a_rewrite_that_computes_the_same(base: Trace) -> None:
    layout = {"pp": 2, "schedule": "interleaved", "micro_batches": 4}
    trace, platform = lay_out(base, "a100_80_sxm", layout)
    found = departures(trace, base)
    assert {each.what for each in found} == {"repeated"}
    tied = {op.name for op in base.ops if op.name.startswith(("optimizer", "wte.weight.grad.add"))}
    assert {each.op for each in found} <= {"positions", "wpe"} | tied
    assert trace.devices == platform.devices == 2
    result = simulate(base, "a100_80_sxm", parallel=layout)
    assert result.log.trace.content_hash == trace.content_hash
    assert result.log.complete


@pytest.mark.parametrize(
    "given",
    [{"precision": "amp_bf16"}, {"precision": "mixed_bf16"}, {"lora_rank": 4, "frozen_dtype": "nf4"}],
    ids=str,
)
def test_microbatches_of_a_layout_run_what_a_training_loop_runs(given: dict) -> None:
    # which casts each weight once per microbatch: autocast's cache ends with its context
    config = {**CONFIG, "n_layer": 2}
    looped = transformer(config, batch=4, sequence=32, micro_batches=2, **given)
    divided, _ = lay_out(transformer(config, batch=4, sequence=32, **given), "a100_80_sxm", {"micro_batches": 2})

    def work(trace: Trace) -> list[Counter]:
        ops = [op for op in trace.ops if op.kind != "elementwise"]  # sums of gradients have other names
        names = (re.sub(r"^mb\d\.|\.mb\d", "", op.name) for op in ops)
        return [Counter(names), Counter(op.kind for op in trace.ops)]

    assert work(divided) == work(looped)
    peaks = [simulate(trace, "a100_80_sxm").summary()["peak_bytes"] for trace in (divided, looped)]
    assert peaks[0] == peaks[1]


def test_one_device_and_one_microbatch_change_nothing(base: Trace) -> None:
    platform = load_profile("a100_80_sxm")
    assert lay_out(base, platform, {"pp": 1}) == (base, platform)


def test_every_device_has_the_budget_and_a_policy_runs_inside(base: Trace) -> None:
    layout = {"pp": 4, "micro_batches": 4}
    kept = simulate(base, "mt3000_cluster", parallel=layout)
    peaks = [stage.peak_bytes for stage in stages(kept.log)]
    assert peaks[0] > peaks[3] / 2
    for policy in ("full_recompute", "swap_all", "zero_offload + full_recompute"):
        limited = simulate(base, "mt3000_cluster", policy, budget=max(peaks), parallel=layout)
        table = stages(limited.log)
        assert limited.log.complete
        assert all(stage.capacity_bytes == max(peaks) for stage in table)
        assert max(stage.peak_bytes for stage in table) <= max(peaks)


def test_stages_may_have_policies_of_their_own(base: Trace) -> None:
    """What the first stage saves costs no time where it waits for the last one anyway."""
    layout = {"pp": 4, "micro_batches": 4}
    texts = ("keep_all", "full_recompute", "stages 0-1: full_recompute; rest: keep_all")
    kept, full, mixed = (simulate(base, "mt3000_cluster", text, parallel=layout).log for text in texts)
    assert [stage.peak_bytes for stage in stages(mixed)] == [
        *[stage.peak_bytes for stage in stages(full)[:2]],
        *[stage.peak_bytes for stage in stages(kept)[2:]],
    ]
    assert kept.end == mixed.end < full.end
    for text, hint in (("stages 7", ""), ("stages 0-9", r" \(did you mean 'stages 0-3'\?\)")):
        with pytest.raises(PolicyError, match=f"^selector '{text}': this trace has 4 stages, 0 to 3{hint}$"):
            simulate(base, "mt3000_cluster", f"{text}: full_recompute; rest: keep_all", parallel=layout)


def test_the_parts_of_a_stages_time_add_up(base: Trace) -> None:
    result = simulate(base, "mt3000_cluster", "full_recompute", parallel={"pp": 4, "micro_batches": 2})
    for stage in stages(result.log):
        assert stage.busy_ns + stage.stall_ns + stage.exposed_ns + stage.bubble_ns == result.log.end
        assert min(stage.busy_ns, stage.stall_ns, stage.exposed_ns, stage.bubble_ns) >= 0
    summary = result.summary()
    assert summary["bubble"] > 0
    assert summary["exposed_ns"] > 0
    assert summary["binding_device"].startswith("time: ")


def test_one_device_has_no_bubble(base: Trace) -> None:
    summary = simulate(base, "a100_80_sxm").summary()
    assert summary["bubble"] is summary["binding_device"] is None
    assert summary["exposed_ns"] == 0


def test_a_comparison_runs_its_policies_on_the_layout(base: Trace) -> None:
    found = compare(base, "mt3000_cluster", ["keep_all", "full_recompute"], parallel={"pp": 2, "micro_batches": 2})
    assert [row["devices"] for row in found.rows] == [2, 2]
    assert found.rows[1]["peak_bytes"] < found.rows[0]["peak_bytes"]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pp": 3}, "pp: 4 layers do not divide into 3 parts; nearest: 2, or give layers"),
        ({"pp": 0}, "pp: needs a whole number of at least 1, has 0"),
        ({"microbatches": 2}, r"'microbatches' is unknown \(did you mean 'micro_batches'\?\)"),
        ({"pp": 2, "schedule": "1f1"}, "schedule: '1f1' is unknown .did you mean '1f1b'"),
        ({"pp": 2, "micro_batches": 3}, "micro_batches: 3 does not divide the batch of 4; nearest: 2"),
        (
            {"pp": 2, "micro_batches": 3, "schedule": "interleaved"},
            "needs a multiple of its 2 stages, not 3; nearest: 4",
        ),
        ({"pp": 2, "chunks": 2}, "chunks: 1f1b has one part per device, not 2; nearest: 1"),
        ({"pp": 2, "schedule": "zb_v", "chunks": 3}, "chunks: zb_v has 2 parts per device, not 3; nearest: 2"),
        (
            {"pp": 2, "schedule": "dualpipe_v", "micro_batches": 2},
            "micro_batches: dualpipe_v needs .* not 2; nearest: 4",
        ),
        ({"pp": 2, "layers": (1, 1, 2)}, "layers: 3 numbers for 2 parts of the model"),
        ({"pp": 2, "layers": (1, 1)}, r"layers: \[1, 1\] are 2; the model has 4"),
        ({"pp": 4, "layers": (2, 0, 1, 1)}, "layers: needs a whole number of at least 1, has 0; nearest: 1"),
        ({"pp": 2, "layers": "even"}, "layers: needs a list of numbers, 'balanced' or 'dapple', has 'even'"),
        ({"dp": 3}, "dp: 3 does not divide the batch of 4; nearest: 2"),
        ({"dp": 2, "micro_batches": 4}, "micro_batches: 4 does not divide the 2 samples of a replica; nearest: 2"),
        ({"dp": 2, "zero": 4}, "zero: needs one of 0, 1, 2, 3, has 4; nearest: 3"),
        ([2], "expected a table such as"),
    ],
)
def test_a_layout_without_a_place_names_the_nearest(base: Trace, layout: object, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        lay_out(base, "a100_80_sxm", layout)  # type: ignore[arg-type]


def test_a_machine_without_the_devices_or_their_links_is_named(base: Trace) -> None:
    with pytest.raises(LayoutError, match=r"pp: toy has 2 device\(s\) and states no network .* nearest: 2"):
        lay_out(base, machine(devices=2), {"pp": 4})
    with pytest.raises(LayoutError, match="has no link from one device to the next; nearest: 1"):
        lay_out(base, machine(devices=2, rate=None), {"pp": 2})
    trace, platform = lay_out(base, "a100_80_sxm", {"pp": 2})
    with pytest.raises(LayoutError, match="already on 2 devices"):
        lay_out(trace, platform, {"pp": 2})


def test_a_norm_over_all_samples_is_named_where_nobody_says_how_it_splits() -> None:
    base = cnn("resnet-50", batch=4, image=32)
    splits = {op: ways for op, ways in base.op_columns.splits.items() if ways != ("batch_own",)}
    other = with_columns(base, splits=splits)
    with pytest.raises(LayoutError, match=r"dp: norm 'stem.norm' .* over all samples: .* nearest: 1"):
        lay_out(other, "a100_80_sxm", {"dp": 2})


def test_the_dies_of_a_supernode_are_those_of_its_packages() -> None:
    """CloudMatrix384: 384 packages of two dies and 192 sockets on one fabric, here with four dies to a socket."""
    base = transformer("gpt2", batch=1536, sequence=2, precision="bf16")
    _, platform = lay_out(base, "ascend_910c_die", {"dp": 16})
    ring = next(link for link in platform.links if link.name == rank_link("data", 0))
    inside, between, p = 124e9, 120e9, 16
    seconds = 3 / 4 / inside + 3 / 16 / between  # of a byte: three of four dies of a socket, then among four sockets
    assert ring.rate == pytest.approx((p - 1) / p / seconds, rel=1e-9)
    assert ring.fixed == 3 * 10_000 + 3 * 11_000
    lay_out(base, "ascend_910c_die", {"dp": 768})
    with pytest.raises(LayoutError, match=r"'ub_plane' of ascend_910c_die joins 768 devices, .* nearest: 768"):
        lay_out(base, "ascend_910c_die", {"dp": 1536})


def test_uneven_parts_are_given_by_their_layers(base: Trace) -> None:
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 2, "layers": [1, 3]})
    assert {op.layer for op in trace.ops if op.device == 0 and op.phase == "forward"} == {-1, 0}


def test_a_layout_on_the_command_line_is_saved_and_reported(capsys, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["--profile", "mt3000_cluster", "--model", tmp_path / "config.json", "--batch", "2", "--seq", "16"]
    words += ["--pp", "4", "--schedule", "gpipe", "--micro-batches", "2"]
    code, out, _ = tiersim("run", *words, "--json", "-o", tmp_path / "r", capsys=capsys)
    assert code == 0
    assert json.loads(out)["devices"] == 4
    assert tiersim("report", tmp_path / "r", "-o", tmp_path / "r.html", "--trust", capsys=capsys)[0] == 0
    code, _, err = tiersim("run", *words, "--schedule", "gpip", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'gpipe'" in err


def test_a_trace_file_may_be_divided(capsys, tmp_path, base: Trace) -> None:
    save_trace(base, tmp_path / "t.jsonl.gz")
    words = ["--profile", "mt3000_cluster", "--trace", tmp_path / "t.jsonl.gz", "--pp", "2", "--micro-batches", "2"]
    code, out, _ = tiersim("compare", *words, "--policies", "keep_all", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)[0]["devices"] == 2


def test_eight_offloading_cards_have_an_eighth_of_the_host_each(base: Trace) -> None:
    wide = transformer(CONFIG, batch=8, sequence=32)
    alone = load_profile("a100_80_sxm")
    _, shared = lay_out(wide, "a100_80_sxm", {"dp": 8})
    assert shared.tier("host").capacity == alone.tier("host").capacity // 8
    rate = {pool.name: pool.rate for pool in shared.pools}["host_dram"]
    assert rate == {pool.name: pool.rate for pool in alone.pools}["host_dram"] // 8
    _, one_each = lay_out(wide, alone, {"dp": 8})  # nodes of one card
    assert one_each.tier("host").capacity == alone.tier("host").capacity


def test_of_a_shared_tier_that_writes_slowly_each_card_gets_its_part_of_both_rates() -> None:
    node = load_profile("a100_80_sxm", overrides={"devices": "8"})
    slow = replace(node, tiers=tuple(replace(t, write_bandwidth=8 * GB) if t.name == "host" else t for t in node.tiers))
    assert placed(slow, stages=1, ranks=8).tier("host").write_bandwidth == GB
    assert placed(slow, stages=2, ranks=4).tier("host").write_bandwidth == 2 * GB
    assert placed(node, stages=1, ranks=8).tier("host").write_bandwidth == 0, "no rate of its own: writes as it reads"


def test_shared_links_engines_and_switches_are_divided_among_the_cards_that_use_them() -> None:
    node = load_profile("a100_80_sxm", overrides={"devices": "8"})
    for simulated in (1, 2):
        part = placed(node, stages=simulated, ranks=8 // simulated)
        rates = {link.name: link.rate for link in part.links}
        assert rates["nvme_read"] == simulated * 10 * GB // 8
        assert part.tier("host").nominal == simulated * node.tier("host").nominal // 8
        cpu = next(engine for engine in part.engines if engine.name == "cpu")
        assert cpu.peak["fp32"] == simulated * 2.5e12 / 8
    # two cards are behind a switch of 26 GB/s, whatever the others do
    pools = {pool.name: pool.rate for pool in placed(node, stages=1, ranks=8).pools}
    assert {name: rate for name, rate in pools.items() if name.startswith("switch")} == {
        "switch_up@0": 13 * GB,
        "switch_down@0": 13 * GB,
    }


def test_a_ring_over_nodes_sums_inside_them_first(base: Trace) -> None:
    """16 ranks on two nodes of 8: (g - 1) m / (g b) + (k - 1) m / (k g B) per pass."""
    wide = transformer(CONFIG, batch=16, sequence=32)
    _, platform = lay_out(wide, "a100_80_sxm", {"dp": 16})
    link = next(link for link in platform.links if link.name == "data@0")
    per_byte = 7 / (8 * 235e9) + 1 / (2 * 8 * 25e9)
    assert (15 / 16) / link.rate == pytest.approx(per_byte, rel=1e-9)
    assert link.fixed == 7 * 10_000 + 5_000


def test_a_machine_of_nodes_without_a_network_is_refused(base: Trace) -> None:
    with pytest.raises(LayoutError, match=r"dp: sunway_sw26010pro has 6 device\(s\) and states no network to others"):
        lay_out(transformer(CONFIG, batch=8, sequence=32), "sunway_sw26010pro", {"dp": 8})


def test_a_thousand_devices_cost_what_one_pipeline_costs(base: Trace) -> None:
    wide = transformer(CONFIG, batch=1024, sequence=32)
    ops = {}
    for dp in (2, 256):
        layout = {"dp": dp, "pp": 4, "micro_batches": 4, "zero": 1}
        result = simulate(wide, "a100_80_sxm", "full_recompute", parallel=layout)
        ops[dp] = len(result.log.trace.ops)
        assert result.summary()["exposed_ns"] > 0
    assert ops[2] == ops[256]


def test_devices_beyond_the_stages_are_replicas(capsys, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["run", "--profile", "a100_80_sxm", "--model", tmp_path / "config.json", "--batch", "8", "--seq", "16"]
    code, out, _ = tiersim(*words, "--devices", "8", "--pp", "2", "--zero", "1", "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["devices"] == 2
    assert found["moved_bytes"]["data@1"] > 0
    code, _, err = tiersim(*words, "--devices", "7", "--pp", "2", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "nearest: 8" in err


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v", "dualpipe_v"])
def test_balance_is_of_what_a_device_holds_where_it_holds_several_parts(schedule: str) -> None:
    """Faster than equal parts, and than parts of which each by itself takes as little as it can."""
    config = {"model_type": "gpt2", "n_layer": 16, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 50257}
    wide = transformer(config, batch=8, sequence=128, precision="fp32", optimizer="sgd", loss="fused")
    layout = {"pp": 4, "micro_batches": 8, "schedule": schedule}
    ends = [
        simulate(wide, "mt3000_cluster", parallel={**layout, **more}, budget="1 TB").summary()["makespan_ns"]
        for more in ({"layers": "balanced"}, {}, {"layers": (2, 3, 3, 3, 2, 1, 1, 1)})
    ]
    assert ends[0] < 0.95 * min(ends[1:])


def test_balanced_stages_are_faster_than_equal_ones() -> None:
    """A head of 50,257 columns takes as long as several of these layers."""
    config = {"model_type": "gpt2", "n_layer": 8, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 50257}
    wide = transformer(config, batch=4, sequence=128, precision="fp32")
    layout = {"pp": 4, "micro_batches": 4}
    equal, chosen = (
        simulate(wide, "mt3000_cluster", parallel={**layout, **more}) for more in ({}, {"layers": "balanced"})
    )
    assert chosen.summary()["makespan_ns"] < 0.95 * equal.summary()["makespan_ns"]
    trace = chosen.log.trace
    norms = [op for op in trace.ops if (op.kind, op.phase) == ("norm", "forward")]
    parts = [{op.layer for op in norms if op.device == s} - {-1} for s in range(4)]
    assert sum(map(len, parts)) == 8
    assert len(parts[0]) > len(parts[-1])


def test_layers_of_stages_on_the_command_line(capsys, tmp_path, base: Trace) -> None:
    save_trace(base, tmp_path / "t.jsonl.gz")
    words = ["--profile", "mt3000_cluster", "--trace", tmp_path / "t.jsonl.gz", "--pp", "2", "--micro-batches", "2"]
    for text in ("balanced", "3,1"):
        assert tiersim("run", *words, "--stage-layers", text, "--json", capsys=capsys)[0] == 0
    code, _, err = tiersim("run", *words, "--stage-layers", "3,x", capsys=capsys)
    assert code == 2
    assert "expected numbers such as 3,3,2, balanced or dapple" in err


TIED = {**CONFIG, "vocab_size": 4096, "n_embd": 128}
"""Embeddings that are large beside the layers, and tied to the head."""


@pytest.mark.parametrize("more", [{}, {"dp": 2}, {"dp": 2, "zero": 1}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_tied_weights_gradient_is_summed_on_each_stage_and_exchanged_once(schedule, more):
    base = transformer(TIED, batch=16, sequence=32)
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 4, "micro_batches": 4, "schedule": schedule, **more})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert not [op.name for op in trace.ops if op.kind == "send" and op.name.startswith("wte.weight")]
    assert sum(op.name.startswith("wte.weight.grad.add") for op in trace.ops) == 2


def test_zb_h1_with_tied_embeddings_is_not_slower_than_1f1b():
    """Before, each microbatch's weight gradients on stage 0 waited for those of the last stage, which come last."""
    base = transformer(TIED, batch=32, sequence=64)
    layout = {"pp": 4, "micro_batches": 16}
    alternating, zero_bubble = (
        simulate(base, "a100_80_sxm", parallel={**layout, "schedule": schedule}).summary()
        for schedule in ("1f1b", "zb_h1")
    )
    assert zero_bubble["makespan_ns"] < alternating["makespan_ns"]
    assert zero_bubble["bubble"] < alternating["bubble"]


ODD = (
    None,
    3.0,
    1.5,
    float("nan"),
    float("inf"),
    -1,
    0,
    True,
    False,
    "x",
    "",
    b"x",
    [],
    [1],
    [0, 4],
    [True],
    ["a"],
    {1: 2},
    object(),
)


@pytest.mark.parametrize("key", [field.name for field in fields(Layout)])
def test_a_value_of_any_kind_is_taken_or_refused_by_key(key):
    plain = type(next(field.default for field in fields(Layout) if field.name == key))
    for given, beside in itertools.product(ODD, ({}, {"pp": 2}, {"dp": 4}, {"dp": 4, "zero": 3})):
        table = {**beside, key: given}
        try:
            layout = Layout(**table)
        except LayoutError:
            with pytest.raises(LayoutError, match=r"^[a-z_]+: "):
                Layout(**table)
        else:
            assert type(getattr(layout, key)) in (plain, tuple, str)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 3}], ids=["right", "refused"])
def test_cycles_of_garbage_are_searched_for_afterwards(layout: dict[str, int]) -> None:
    with suppress(LayoutError):
        lay_out(transformer("gpt2", batch=2, sequence=8), "a100_80_sxm", layout)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("profile", "model", "tokens", "context", "tensor", "width", "layers"),
    [
        ("h100", "llama3-8b", 1 << 17, 8, 8, 4096, 32),
        ("h100", "llama3-8b", 1 << 20, 16, 8, 4096, 32),
        ("mt3000_cluster", "llama-1b", 1 << 17, 16, 4, 2048, 16),
    ],
)
def test_windows_of_128_k_and_a_million_tokens_fit_where_they_are_divided(
    profile, model, tokens, context, tensor, width, layers
):
    """Each rank has its part of the products; what recomputation keeps, the input of every layer, is a lower bound."""
    long = {"batch": 1, "sequence": tokens, "precision": "amp_bf16", "attention": "flash", "loss": "fused"}
    whole = transformer(model, **long)
    part, node = lay_out(whole, profile, {"cp": context, "tp": tensor, "sequence_parallel": True})
    for kind in ("matmul", "attention"):
        flops, own = (sum(op.flops for op in trace.ops if op.kind == kind) for trace in (whole, part))
        assert flops == own * context * tensor > 0
    peak = simulate(part, node, "full_recompute").summary()["peak_bytes"]
    assert 2 * layers * width * tokens // (context * tensor) < peak < node.home(0).capacity
    with pytest.raises(Infeasible):
        simulate(whole, profile, "full_recompute")


@pytest.mark.parametrize("sequence", [16, 20, 32])
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_heads_are_counted_whatever_the_tokens(sequence: int, attention: str) -> None:
    """Attention saves sums of its scores as (batch, heads, tokens): the tokens were counted among the columns."""
    config = {**CONFIG, "n_embd": 96, "n_head": 12, "vocab_size": 288}
    trace = transformer(config, batch=2, sequence=sequence, attention=attention, precision="bf16")
    for tp in (3, 6, 12):
        assert lay_out(trace, "a100_80_sxm", {"tp": tp, "dp": 1})[0].origin is not None
    with pytest.raises(LayoutError, match=r"tp: 5 does not divide heads and columns \(12\); nearest: 4"):
        lay_out(trace, "a100_80_sxm", {"tp": 5})


@pytest.mark.parametrize("policy", ["stronghold", "superoffload"])
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2, "tp": 4, "sequence_parallel": True},
        {"pp": 2, "schedule": "pipedream", "micro_batches": 4},
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach", "adafactor"])
def test_updates_on_the_host_go_before_what_gathers_or_reads_the_new_weights(
    policy: str, layout: dict, optimizer: str
) -> None:
    trace = transformer(CONFIG, batch=8, sequence=16, optimizer=optimizer, loss="fused", precision="mixed_bf16")
    # superoffload refuses updates that read each other's results; it failed with an order that could not be
    with suppress(PolicyError) if policy == "superoffload" else nullcontext():
        assert simulate(trace, "a100_80_sxm", policy, parallel=layout).log.complete


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "dualpipe_v"])
def test_offloaded_activations_stay_for_gradients_of_weights_that_come_later(schedule: str) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 96, "tie_word_embeddings": False,
    }  # fmt: skip
    trace = transformer(config, batch=8, sequence=16, precision="mixed_bf16", loss="fused")
    layout = {"pp": 2, "schedule": schedule, "micro_batches": 4}
    result = simulate(trace, "ascend_910b", "offload_activations", parallel=layout)
    assert result.summary()["recompute_ns"] == 0
    assert result.log.counters["implicit_recomputes"] == 0
    assert any(result.events.why == "move")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 10**20, "ep": 7}, "dp: is 100000000000000000000, and at most 1000000000"),
        ({"dp": 10**9, "ep": 7}, "nearest: 8"),
        ({"pp": 10**9, "layers": "balanced"}, "pp: 4 layers do not make 1000000000 parts; nearest: 4"),
        ({"pp": 8, "layers": "balanced", "micro_batches": 4}, "pp: 4 layers do not make 8 parts; nearest: 4"),
    ],
)
def test_huge_numbers_are_refused_at_once(layout: dict, said: str, base: Trace) -> None:
    with pytest.raises(LayoutError, match=re.escape(said)):
        lay_out(base, "a100_80_sxm", layout)
