"""The search over layouts: every valid one is named, what cannot fit is proven so, and the answer was simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from sim import LayoutError, Trace, load_profile, simulate
from sim.advice.layouts import Devices
from sim.analysis.peak_memory import home_peak
from sim.layout import Layout, lay_out, with_layers
from sim.layout_estimate import Estimate, Estimator
from sim.layout_search import (
    BUCKETS,
    SEARCHED,
    Found,
    LayoutSearch,
    _distinct,
    _ranked,
    layouts,
    least_state,
    search_layouts,
    variants,
)
from sim.report.error_bars import error_bar, policies_error
from tests.rewrites.test_expert_parallel import MIXTRAL
from tests.test_cli import tiersim
from workloads import transformer

CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 64}


@pytest.fixture(scope="module")
def base() -> Trace:
    return transformer(CONFIG, batch=4, sequence=16, precision="mixed_bf16")


def test_the_layouts_are_those_that_divide_the_trace(base: Trace) -> None:
    found = list(layouts(base, 4, 8))
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.devices == 4
        lay_out(base, "a100_80_sxm", layout)
    shapes = {(layout.tp, layout.pp, layout.dp) for layout in found if layout.cp == 1}
    assert shapes == {(t, p, 4 // (t * p)) for t, p in product((1, 2, 4), (1, 2)) if 4 % (t * p) == 0}
    assert all(layout.tp <= 2 for layout in layouts(base, 4, 2))  # inside a node


def test_schedules_and_context_parallelism_are_tried_where_they_apply(base: Trace) -> None:
    found = list(layouts(base, 4, 8))
    assert {layout.schedule for layout in found if layout.pp == 2} == {"1f1b", "gpipe", "zb_h1"}  # two layers
    assert all(layout.schedule == "1f1b" for layout in found if layout.pp == 1 or layout.micro_batches == 1)
    deep = transformer(
        {**CONFIG, "n_layer": 4}, batch=4, sequence=16, precision="mixed_bf16", attention="flash", dropout=0.0
    )
    found = list(layouts(deep, 2, 8))
    assert {layout.schedule for layout in found} == set(SEARCHED)
    assert {layout.schedule for layout in layouts(deep, 2, 8, ["gpipe", "zb_v"]) if layout.pp > 1} == {"gpipe", "zb_v"}
    assert {(layout.tp, layout.cp) for layout in layouts(deep, 4, 4)} == {
        (1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)
    }  # fmt: skip
    for layout in found:
        lay_out(deep, "a100_80_sxm", layout)
    with pytest.raises(LayoutError, match=r"schedules: 'zb_1' is not searched \(did you mean"):
        search_layouts(deep, "a100_80_sxm", 2, schedules=["zb_1"])


def test_what_a_policy_moves_proves_nothing_about_what_a_device_must_hold(base: Trace) -> None:
    layout = Layout(dp=2)
    assert 0 == least_state(base, layout, ["weights", "optimizer_state"]) < least_state(base, layout)
    budget = least_state(base, layout) - 1
    kept, moved = (
        search_layouts(base, "a100_80_sxm", 2, policies, budget=budget, most=1)
        for policies in (["keep_all"], ["keep_all", "zero_offload(weights=host) + full_recompute"])
    )
    assert kept.cannot_fit > moved.cannot_fit == 0


def test_where_time_is_short_few_microbatches_come_before_what_is_hardly_faster() -> None:
    few, many, slow, large = Layout(dp=4), Layout(dp=4, micro_batches=8), Layout(tp=4), Layout(pp=2, dp=2)
    times = {few: 1.2, many: 1.0, slow: 2.0, large: 0.1}
    estimates = {layout: Estimate(ns, *((9, 9) if layout == large else (1, 1)), 9) for layout, ns in times.items()}

    def order(*, is_short: bool) -> list[Layout]:
        return _ranked(list(times), estimates, 4, 4, is_short=is_short)

    assert order(is_short=False) == [many, few, slow, large]
    assert order(is_short=True) == [few, many, slow, large]


@pytest.fixture(scope="module")
def every() -> tuple[Trace, dict[Layout, tuple[int, int]]]:
    """A trace, and time and peak of the fullest device of all its layouts on four devices, each simulated."""
    config = {**CONFIG, "n_layer": 4, "n_embd": 256, "n_positions": 128, "vocab_size": 512}
    trace = transformer(config, batch=8, sequence=128, precision="mixed_bf16", attention="flash", dropout=0.0)
    runs = {layout: simulate(trace, "a100_80_sxm", parallel=layout).log for layout in layouts(trace, 4, 8)}
    return trace, {layout: (log.end, home_peak(log)) for layout, log in runs.items()}


@pytest.mark.slow
def test_nothing_that_fits_is_proven_not_to(every) -> None:
    """The bound on the state is one: of no layout is it more than the fullest device holds."""
    trace, runs = every
    for layout, (_, peak) in runs.items():
        assert least_state(trace, layout) <= peak


@pytest.mark.slow
def test_the_search_finds_what_trying_every_layout_finds(every) -> None:
    """With `most` for all of them; with few it finds one that fits wherever one does, for half of budgets the best."""
    trace, runs = every
    whole = search_layouts(trace, "a100_80_sxm", 4, ["keep_all"], most=len(runs))
    assert whole.best is not None
    assert whole.best.makespan_ns == min(time for time, _ in runs.values())
    ratios = []
    for budget in sorted(peak for _, peak in runs.values())[::20]:
        fastest = min(time for time, peak in runs.values() if peak <= budget)
        found = search_layouts(trace, "a100_80_sxm", 4, ["keep_all"], budget=budget)
        assert found.left_out
        assert found.best is not None
        ratios.append(found.best.makespan_ns / fastest)
    assert sorted(ratios)[len(ratios) // 2] == 1


@pytest.mark.slow
def test_estimates_know_bubbles_and_memory(every) -> None:
    trace, runs = every
    estimator = Estimator(trace, load_profile("a100_80_sxm", overrides={"devices": "4"}))
    found = {layout: estimator.of(layout) for layout in runs}
    times = [(each.time_ns, runs[layout][0]) for layout, each in found.items()]
    assert spearmanr(*zip(*times, strict=True)) > 0.9
    assert sorted(each.kept_bytes / runs[layout][1] for layout, each in found.items())[len(runs) // 2] == pytest.approx(
        1, abs=0.15
    )
    zero, alternating, flush = (
        found[Layout(pp=4, micro_batches=8, schedule=schedule)] for schedule in ("zb_h1", "1f1b", "gpipe")
    )
    assert zero.time_ns < alternating.time_ns == flush.time_ns
    assert alternating.kept_bytes < flush.kept_bytes


def test_what_generates_is_divided_by_tensor_parallelism_alone(base: Trace) -> None:
    trace = transformer(CONFIG, batch=4, sequence=16, generate=4, precision="mixed_bf16")
    found = list(layouts(trace, 2, 8))
    assert found
    assert {(layout.tp, layout.devices) for layout in found} == {(2, 2)}
    for layout in found:
        lay_out(trace, "a100_80_sxm", layout)
    for key in ("dp", "pp", "cp"):
        with pytest.raises(LayoutError, match=f"{key}: 2: passes that generate tokens"):
            lay_out(trace, "a100_80_sxm", {key: 2})


# ---- stages of unequal depth ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headed() -> Trace:
    """Six layers, beside whose work that of the head and the loss is large."""
    config = {**CONFIG, "n_layer": 6, "n_embd": 128, "vocab_size": 32768, "n_positions": 256}
    return transformer(config, batch=8, sequence=256, precision="mixed_bf16")


FLASH = {"precision": "mixed_bf16", "attention": "flash", "dropout": 0.0}


@pytest.mark.parametrize(("config", "options"), [
    ({**MIXTRAL, "experts_implementation": "loop"}, {}), (CONFIG, {"loss": "chunked"}), (CONFIG, {"lora_rank": 4}),
], ids=["loop", "chunked", "lora"])  # fmt: skip
def test_what_ranks_can_divide_is_searched(config: dict, options: dict) -> None:
    """One sample leaves nothing but ranks and stages: all of them run, and the best of all is found."""
    given = {key: value for key, value in FLASH.items() if config is CONFIG or key != "dropout"}
    trace = transformer(config, batch=1, sequence=16, **given, **options)
    times = {}
    for layout in layouts(trace, 4, 4):
        divided, platform = lay_out(trace, "a100_80_sxm", layout)
        times[layout] = simulate(divided, platform).log.end
    shapes = {(layout.tp, layout.cp, layout.pp) for layout in times}
    assert shapes >= {(2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)}
    found = search_layouts(trace, "a100_80_sxm", 4, ["keep_all"], most=len(times))
    tried = {row.layout: row.makespan_ns for row in found.rows}
    assert times.items() <= tried.items()  # and ways to exchange the same


def test_stages_may_have_unequal_numbers_of_layers(base: Trace, headed: Trace) -> None:
    found = list(layouts(headed, 4, 8, ["1f1b", "interleaved"]))
    assert {layout.pp for layout in found if not layout.layers} == {1, 2}  # four stages do not divide six layers
    assert {layout.pp for layout in found if layout.layers == "balanced"} == {2, 4}
    assert {(layout.schedule, layout.pp) for layout in found if layout.layers == "dapple"} == {("1f1b", 2), ("1f1b", 4)}
    assert len(set(found)) == len(found)
    assert not any(layout.layers for layout in layouts(base, 2, 8))  # two layers are one for each of two stages
    for layout in found:
        lay_out(headed, "a100_80_sxm", layout)


def test_a_search_balances_stages_where_that_is_faster(headed: Trace) -> None:
    """Beside every number of layers that each of two stages may have."""
    how = {"pp": 2, "micro_batches": 4}
    every = {
        (first, 6 - first): simulate(headed, "a100_80_sxm", parallel={**how, "layers": (first, 6 - first)}).log.end
        for first in range(1, 6)
    }
    search = search_layouts(headed, "a100_80_sxm", 2, ["keep_all"], most=99, schedules=["1f1b"])
    times = {row.layout: row.makespan_ns for row in search.rows}
    assert times[Layout(**how)] == every[3, 3]
    assert times[Layout(**how, layers="balanced")] == min(every.values()) < every[3, 3]


def test_a_search_plans_for_the_filling_of_a_pipeline_where_that_is_faster() -> None:
    """Of two microbatches the first stage does half while the second waits: it takes more than an even half."""
    config = {**CONFIG, "n_layer": 6, "n_embd": 128, "vocab_size": 16384, "n_positions": 256}
    trace = transformer(config, batch=8, sequence=256, precision="mixed_bf16")
    how = {"pp": 2, "micro_batches": 2}
    every = [
        simulate(trace, "a100_80_sxm", parallel={**how, "layers": (first, 6 - first)}).log.end for first in range(1, 6)
    ]
    search = search_layouts(trace, "a100_80_sxm", 2, ["keep_all"], most=99, schedules=["1f1b"])
    times = {row.layout: row.makespan_ns for row in search.rows}
    planned, balanced = (times[Layout(**how, layers=each)] for each in ("dapple", "balanced"))
    assert planned == min(every) < balanced


def test_what_gives_every_stage_as_many_layers_is_tried_once(headed: Trace) -> None:
    estimator = Estimator(headed, load_profile("a100_80_sxm", overrides={"devices": "4"}))
    given = list(layouts(headed, 4, 8))
    kept = _distinct(given, estimator)
    resolved = [(each, with_layers(headed, estimator.node, each)) for each in given]
    sizes = {each: resolved.layers or (6 // each.parts,) * each.parts for each, resolved in resolved}
    seen = [(replace(each, layers=()), sizes[each]) for each in given]
    assert len(kept) == len(set(seen)) < len(given)
    assert {(replace(each, layers=()), sizes[each]) for each in kept} == set(seen)
    assert all(estimator.resolved(each) == resolved for each, resolved in resolved)


# ---- experts, and how the same is exchanged ---------------------------------------------------------

WIDE = {**MIXTRAL, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256}
EXCHANGES = {"bucket": 0, "reshard": True, "reshard_to": 0, "ring_attention": False}


@pytest.fixture(scope="module")
def mixture() -> Trace:
    return transformer(WIDE, batch=4, sequence=128, precision="mixed_bf16", attention="flash")


def test_experts_are_divided_where_there_are_some(base: Trace, mixture: Trace) -> None:
    found = list(layouts(mixture, 4, 8))
    assert {(layout.dp, layout.ep) for layout in found} == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
    assert {layout.ep for layout in layouts(base, 4, 8)} == {1}
    assert any(layout.cp > 1 and layout.ep > 1 for layout in found)


HYBRID = Layout(dp=4, zero=3, shard_within=2)


def test_replicas_of_a_node_may_divide_the_state_for_themselves() -> None:
    found = list(variants(Layout(dp=8, tp=2, zero=3), per_node=8))
    assert {each.shard_within for each in found} == {0, 4}
    assert len(found) == 5 * len(BUCKETS) - 1  # reshard false, reshard_to 2 and 4, shard_within 4
    one_node, one_each = (Layout(dp=4, zero=3), 8), (Layout(dp=8, tp=2, zero=1), 2)
    for layout, per_node in (one_node, one_each, (Layout(dp=8, zero=3, ep=2), 4), (Layout(dp=8), 4)):
        assert {each.shard_within for each in variants(layout, per_node=per_node)} == {0}


def test_a_device_holds_at_least_its_part_of_the_experts(mixture: Trace) -> None:
    for layout in layouts(mixture, 4, 8, ["1f1b"]):
        if layout.micro_batches > 1:
            continue
        trace, _ = lay_out(mixture, "a100_80_sxm", layout)
        held = [0] * trace.devices
        for t in trace.tensors:
            if trace.producer[t.id] < 0 and t.role in ("weight", "optimizer_state"):
                held[trace.ops[next(iter(trace.readers(t.id)))].device] += t.bytes
        assert least_state(mixture, layout) <= max(held)
        if layout.pp == layout.tp == 1 and layout.zero == 0:
            assert least_state(mixture, layout) == held[0]


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        (Layout(pp=2), 0),
        (Layout(dp=2), 2),
        (Layout(cp=2), 2 * 3 - 1),
        (Layout(dp=2, cp=2, zero=1), 2 * 3 - 1),
        (Layout(dp=8, zero=3), 4 * 3 - 1),  # reshard false, reshard_to 2 and 4
        (Layout(dp=8, zero=3, ep=2), 2 * 3 - 1),
    ],
)
def test_variants_exchange_the_same_in_other_ways(layout: Layout, number: int) -> None:
    found = list(variants(layout))
    assert len(found) == len({*found, layout}) - 1 == number
    plain = {key: value for key, value in layout.said().items() if key not in EXCHANGES}
    for each in found:
        assert {key: value for key, value in each.said().items() if key not in EXCHANGES} == plain
        assert each.bucket in BUCKETS
    differ = [sum(getattr(each, key) != value for key, value in EXCHANGES.items()) for each in found]
    assert differ == sorted(differ)


def exhaustive(trace: Trace, profile: str, devices: int, figures: dict[str, str]) -> dict[Layout, tuple[int, int]]:
    """Time and peak of every layout and every variant of it, each simulated with everything kept."""
    bases = list(layouts(trace, devices, 8, ["1f1b"]))
    runs = {}
    for layout in dict.fromkeys([*bases, *(each for base in bases for each in variants(base))]):
        divided, platform = lay_out(trace, profile, layout, overrides=figures)
        log = simulate(divided, platform).log
        runs[layout] = log.end, home_peak(log)
    return runs


def best_of_search_is_that_of_all(trace: Trace, devices: int, figures: dict[str, str], most: int) -> None:
    runs = exhaustive(trace, "a100_80_sxm", devices, figures)
    how = {"most": most, "overrides": figures, "schedules": ["1f1b"]}
    whole = search_layouts(trace, "a100_80_sxm", devices, ["keep_all"], **how)
    assert whole.best is not None
    assert (whole.best.makespan_ns, whole.best.layout) in [(time, layout) for layout, (time, _) in runs.items()]
    assert whole.best.makespan_ns == min(time for time, _ in runs.values())
    assert len(whole.rows) < len(runs)
    budget = sorted(peak for _, peak in runs.values())[len(runs) // 4]
    tight = search_layouts(trace, "a100_80_sxm", devices, ["keep_all"], budget=budget, **how)
    assert tight.best is not None
    assert tight.best.makespan_ns == min(time for time, peak in runs.values() if peak <= budget)


def test_a_search_finds_what_trying_all_variants_finds() -> None:
    trace = transformer(WIDE, batch=2, sequence=64, precision="mixed_bf16", attention="flash")
    best_of_search_is_that_of_all(trace, 2, {}, 1000)


@pytest.mark.slow
def test_a_search_over_slow_links_finds_what_trying_all_variants_finds(mixture: Trace) -> None:
    slow = {f"links.nvlink.{key}": "5 GB/s" for key in ("rate", "egress")}
    best_of_search_is_that_of_all(mixture, 4, slow, 1000)


def test_no_more_variants_are_tried_than_layouts(mixture: Trace) -> None:
    found = search_layouts(mixture, "a100_80_sxm", 4, ["keep_all", "full_recompute"], most=4)
    tried = list(dict.fromkeys(row.layout for row in found.rows))
    plain = [layout for layout in tried if all(getattr(layout, key) == value for key, value in EXCHANGES.items())]
    assert tried[: len(plain)] == plain
    assert len(plain) == 4
    assert 0 < len(tried) - len(plain) <= 4
    assert found.left_out == len(list(layouts(mixture, 4, 8))) - 4


def test_estimates_know_what_experts_hold_send_and_update() -> None:
    config = {**WIDE, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1024}
    trace = transformer(config, batch=8, sequence=256, precision="mixed_bf16", attention="flash")
    estimator = Estimator(trace, load_profile("a100_80_sxm", overrides={"devices": "4"}))
    found, runs = [], []
    for layout in layouts(trace, 4, 8, ["1f1b"]):
        if layout.micro_batches in (1, 4):
            found.append(estimator.of(layout))
            runs.append(simulate(trace, "a100_80_sxm", parallel=layout).log)
    assert spearmanr([each.time_ns for each in found], [log.end for log in runs]) > 0.9
    off = np.array([each.kept_bytes for each in found]) / [home_peak(log) for log in runs]
    assert 0.85 < off.min() <= off.max() < 1.2  # most of it is what the optimizer's own results take


def spearmanr(first, second) -> float:
    """The rank correlation of two lists of numbers."""
    ranks = [np.argsort(np.argsort(each)) for each in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_a_search_ends_in_time_with_what_it_has(base: Trace) -> None:
    found = search_layouts(base, "a100_80_sxm", 2, ["keep_all"], seconds=0.0)
    assert len(found.rows) == 1
    assert found.best is not None
    assert found.left_out == len(list(layouts(base, 2, 8))) - 1


def test_a_device_holds_at_least_its_part_of_the_state(base: Trace) -> None:
    for layout in (Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2, pp=2), Layout(pp=2), HYBRID):
        trace, _ = lay_out(base, "a100_80_sxm", layout)
        held = [0] * trace.devices
        for t in trace.tensors:
            if trace.producer[t.id] < 0 and t.role in ("weight", "optimizer_state"):
                held[trace.ops[next(iter(trace.readers(t.id)))].device] += t.bytes
        assert least_state(base, layout) <= max(held)


@pytest.mark.parametrize("part", [0.7, 1.0])
def test_where_only_the_fastest_is_asked_for_what_cannot_be_it_is_left_out(base: Trace, part: float) -> None:
    policies = ["keep_all", "full_recompute", "swap_all"]
    peak = home_peak(simulate(base, "mt3000_cluster", parallel=Layout(dp=2)).log)
    how = {"budget": int(part * peak), "most": 99, "schedules": ["1f1b"]}
    whole = search_layouts(base, "mt3000_cluster", 2, policies, **how)
    found = search_layouts(base, "mt3000_cluster", 2, policies, fastest=True, **how)
    assert found.best is not None
    assert whole.best is not None
    assert found.best.makespan_ns <= 1.005 * whole.best.makespan_ns
    assert len(found.rows) < len(whole.rows)
    assert {row.layout for row in whole.rows} == {*found.unlimited}
    kept = {row.layout: row.makespan_ns for row in whole.rows if row.policy == "keep_all" and row.makespan_ns}
    assert kept.items() <= {layout: ns for layout, (ns, _) in found.unlimited.items()}.items()


def test_the_best_is_the_fastest_that_was_simulated_and_fits(base: Trace) -> None:
    found = search_layouts(base, "a100_80_sxm", 2, ["keep_all", "full_recompute"], most=3)
    assert found.best is not None
    assert found.runner_up is not None
    assert found.best.makespan_ns == min(row.makespan_ns for row in found.rows if row.makespan_ns)
    assert found.runner_up.layout != found.best.layout
    peaks = [row.peak_bytes for row in found.front]
    assert peaks == sorted(peaks, reverse=True)
    assert len({row.layout for row in found.rows[:6]}) == 3
    assert len({row.layout for row in found.rows}) <= 6, "as many variants at most"
    assert found.left_out == len(list(layouts(base, 2, 8))) - 3


@pytest.mark.slow
def test_as_long_as_nothing_fits_lean_layouts_are_tried_in_turn(headed: Trace) -> None:
    """In half of the least memory of the fastest layouts; without turns those are all tried first."""
    peaks = {}
    for layout in layouts(headed, 4, 8, ["1f1b"]):
        log = simulate(*lay_out(headed, "a100_80_sxm", layout)).log
        peaks[layout] = home_peak(log)
    budget = sorted(peaks.values())[1]
    found = search_layouts(headed, "a100_80_sxm", 4, ["keep_all"], budget=budget, schedules=["1f1b"], most=99)
    first = next(i for i, row in enumerate(found.rows) if row.makespan_ns is not None)
    assert first < 6 < len(found.rows) - 2
    tried = [
        row.layout
        for row in found.rows
        if not any(getattr(row.layout, key) != value for key, value in EXCHANGES.items())
    ]
    assert len(tried) == len(set(tried))


def test_what_cannot_hold_its_state_is_not_simulated(base: Trace) -> None:
    found = search_layouts(base, "a100_80_sxm", 2, ["keep_all"], budget=1000)
    assert found.rows == ()
    assert found.best is None
    assert found.cannot_fit == len(list(layouts(base, 2, 8)))


def test_a_number_of_devices_without_a_layout_names_the_nearest(base: Trace) -> None:
    with pytest.raises(LayoutError, match="no layout of this trace takes 7; nearest: 8"):
        search_layouts(base, "a100_80_sxm", 7)


@pytest.mark.parametrize("is_close", [True, False])
def test_a_runner_up_within_the_error_of_layouts_is_said_to_be(is_close) -> None:
    bar = error_bar("layouts")
    assert bar.nine_tenths > policies_error()
    slower = 1 + bar.nine_tenths * (0.9 if is_close else 1.1)
    rows = (Found(Layout(dp=8), "keep_all", 10**6, 1), Found(Layout(tp=8), "keep_all", round(10**6 * slower), 1))
    found = LayoutSearch(rows, 0, 0)
    assert found.is_close == is_close
    error = f"{100 * bar.nine_tenths:.0f} %, nine of ten, n = {bar.rows}"
    said = f"slower (not told from the best: the model's own error is {error})"
    assert (said in Devices(8, found).text()) == is_close


def test_a_search_on_the_command_line(capsys, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["search", "--profile", "a100_80_sxm", "--model", tmp_path / "config.json", "--seq", "16", "--devices", "2"]
    words += ["--global-batch", "2", "--policies", "keep_all", "--most", "2"]
    code, out, _ = tiersim(*words, "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["best"]["policy"] == "keep_all"
    bar = found["error"]["layouts"]["bar"]
    assert found["indistinguishable"] == (found["runner_up"]["makespan_ns"] <= (1 + bar) * found["best"]["makespan_ns"])
    assert found["error"]["layouts"]["rows"] == error_bar("layouts").rows
    code, out, _ = tiersim(*words, capsys=capsys)
    assert out.startswith("best")
    assert "left out by an estimate" in out
    assert ("not told from the best" in out) == found["indistinguishable"]
    assert f"the ratio of two layouts' times {100 * bar:.0f} % in nine of ten" in out


def test_a_search_says_in_which_type_a_machine_without_a_peak_is_priced(capsys, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["search", "--profile", "v100_16", "--model", tmp_path / "config.json", "--seq", "16", "--devices", "2"]
    words += ["--global-batch", "2", "--policies", "keep_all", "--most", "1", "--precision"]
    for precision, priced in (("bf16", "bf16 as fp16"), ("fp16", None)):
        assert json.loads(tiersim(*words, precision, "--json", capsys=capsys)[1])["priced_as"] == priced
        said = (
            "no bf16 peak in this profile: priced as fp16" in tiersim(*words, precision, capsys=capsys)[1].splitlines()
        )
        assert said == (priced is not None)
