"""The search over layouts: every valid one is named, what cannot fit is proven so, and the answer was simulated."""

from __future__ import annotations

import json
from itertools import product

import pytest

from sim import LayoutError, Trace
from sim.layout import Layout, lay_out
from sim.layout_search import layouts, least_state, search_layouts
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
    shapes = {(layout.tp, layout.pp, layout.dp) for layout in found}
    assert shapes == {(t, p, 4 // (t * p)) for t, p in product((1, 2, 4), (1, 2)) if 4 % (t * p) == 0}
    assert all(layout.tp <= 2 for layout in layouts(base, 4, 2))  # inside a node


def test_a_device_holds_at_least_its_part_of_the_state(base: Trace) -> None:
    for layout in (Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2, pp=2), Layout(pp=2)):
        trace, _ = lay_out(base, "a100_80_sxm", layout)
        held = [0] * trace.devices
        for t in trace.tensors:
            if trace.producer[t.id] < 0 and t.role in ("weight", "optimizer_state"):
                held[trace.ops[next(iter(trace.readers(t.id)))].device] += t.bytes
        assert least_state(base, layout) <= max(held)


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
