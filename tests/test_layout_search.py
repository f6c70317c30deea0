"""The search over layouts: every valid one is named, what cannot fit is proven so, and the answer was simulated."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from sim import LayoutError, Trace, load_profile, simulate
from sim.analysis.peak_memory import home_peak
from sim.layout import Layout, lay_out
from sim.layout_estimate import Estimator
from sim.layout_search import SEARCHED, layouts, least_state, search_layouts
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


@pytest.fixture(scope="module")
def every() -> tuple[Trace, dict[Layout, tuple[int, int]]]:
    """A trace, and time and peak of the fullest device of all its layouts on four devices, each simulated."""
    config = {**CONFIG, "n_layer": 4, "n_embd": 256, "n_positions": 128, "vocab_size": 512}
    trace = transformer(config, batch=8, sequence=128, precision="mixed_bf16", attention="flash", dropout=0.0)
    runs = {layout: simulate(trace, "a100_80_sxm", parallel=layout).log for layout in layouts(trace, 4, 8)}
    return trace, {layout: (log.end, home_peak(log)) for layout, log in runs.items()}


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
    for layout in (Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2, pp=2), Layout(pp=2)):
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
    assert len(found.rows) == 6
    assert found.left_out == len(list(layouts(base, 2, 8))) - 3


def test_what_cannot_hold_its_state_is_not_simulated(base: Trace) -> None:
    found = search_layouts(base, "a100_80_sxm", 2, ["keep_all"], budget=1000)
    assert found.rows == ()
    assert found.best is None
    assert found.cannot_fit == len(list(layouts(base, 2, 8)))


def test_a_number_of_devices_without_a_layout_names_the_nearest(base: Trace) -> None:
    with pytest.raises(LayoutError, match="no layout of this trace takes 7; nearest: 8"):
        search_layouts(base, "a100_80_sxm", 7)


def test_a_search_on_the_command_line(capsys, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["search", "--profile", "a100_80_sxm", "--model", tmp_path / "config.json", "--seq", "16", "--devices", "2"]
    words += ["--global-batch", "2", "--policies", "keep_all", "--most", "2"]
    code, out, _ = tiersim(*words, "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["best"]["policy"] == "keep_all"
    code, out, _ = tiersim(*words, capsys=capsys)
    assert out.startswith("best")
    assert "left out by an estimate" in out
