"""Figures of a sweep show what its table says: winners, fronts, what does not fit."""

import pandas as pd
import pytest

from sim.errors import TiersimError
from sim.report.colours import policy_colour
from sim.report.draw import save_figure
from sim.report.sweep_plots import plot_ablation, plot_fits, plot_fronts, plot_overhead, plot_winners

GB = 10**9


def cell(policy, batch, sequence, time_ms, peak, budget="all", limit=8 * GB, full=4 * GB, **more):
    """A row as `sim.sweep` gives it; time_ms None for what does not fit."""
    fits = time_ms is not None
    return {
        "cell": f"{policy}{batch}{sequence}{budget}", "model": "gpt2", "batch": batch, "sequence": sequence, **more,
        "policy": policy, "budget": budget, "seed": 0, "status": "ok" if fits else "infeasible", "fits": fits,
        "fidelity": "reconstruction" if policy == "guess" else "equations", "budget_bytes": limit,
        "unconstrained_peak_bytes": full, "peak_bytes": peak if fits else None,
        "makespan_ns": int(time_ms * 1e6) if fits else None, "overhead": time_ms / 100 - 1 if fits else None,
    }  # fmt: skip


def frame(*rows):
    return pd.DataFrame(list(rows)).astype({"peak_bytes": "Int64", "makespan_ns": "Int64"})


@pytest.fixture
def table():
    return frame(
        cell("keep_all", 1, 512, 100, 4 * GB),
        cell("dtr", 1, 512, 100, 4 * GB),
        cell("guess", 1, 512, 130, 2 * GB),
        cell("keep_all", 2, 512, None, None),
        cell("dtr", 2, 512, 120, 3 * GB),
        cell("guess", 2, 512, 110, 3 * GB),
        *(cell(policy, 4, 512, None, None) for policy in ("keep_all", "dtr", "guess")),
    )


def texts(axes):
    return {text.get_position(): text.get_text() for text in axes.texts}


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_winners_are_the_fastest_that_fit(table):
    (axes,) = plot_winners(table).axes
    assert texts(axes) == {(0, 0): "keep_all\nand 1 more\n+0.0 %", (0, 1): "guess*\n+10.0 %", (0, 2): "nothing fits"}
    hatched = [patch.get_hatch() for patch in axes.patches]
    assert hatched == [None, None, "///"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "2", "4"]


def test_fits_counts_policies(table):
    (axes,) = plot_fits(table).axes
    assert texts(axes) == {(0, 0): "3 of 3", (0, 1): "2 of 3", (0, 2): "0 of 3"}


def test_fronts_join_what_nothing_beats(table):
    figure = plot_fronts(table[table["batch"] == 1])
    (axes,) = figure.axes
    (front,) = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    # 100 ms at 4 GB twice, since equal points stay together, and 130 ms at 2 GB
    assert list(zip(*front.get_data(), strict=True)) == [(100, 4), (100, 4), (130, 2)]
    assert labels(figure) == ["dtr", "guess*", "keep_all"]
    (guess,) = [line for line in axes.lines if line.get_label() == "guess"]
    assert guess.get_markerfacecolor() == "white"


def test_overhead_is_drawn_over_the_part_of_the_peak_and_misfits_are_crossed():
    table = frame(
        cell("dtr", 1, 512, 100, 4 * GB, "all", 8 * GB),
        cell("dtr", 1, 512, 110, 3 * GB, "75%", 3 * GB),
        cell("dtr", 1, 512, None, None, "50%", 2 * GB),
        cell("keep_all", 1, 512, 100, 4 * GB, "all", 8 * GB),
        cell("keep_all", 1, 512, None, None, "75%", 3 * GB),
        cell("keep_all", 1, 512, None, None, "50%", 2 * GB),
    )
    (axes,) = plot_overhead(table).axes
    lines = {line.get_label(): line for line in axes.lines if line.get_marker() != "x"}
    x, y = lines["dtr"].get_data()
    assert list(x) == [75, 100]
    assert list(y) == pytest.approx([10, 0])
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert {(line.get_color(), tuple(line.get_xdata())) for line in crosses} == {
        (policy_colour("dtr"), (50,)),
        (policy_colour("keep_all"), (50, 75)),
    }


def test_an_ablation_orders_a_figure_by_its_size():
    rows = [("80 GB/s", 90), ("900 MB/s", 300), ("8 GB/s", 120)]
    table = frame(*(cell("dtr", 1, 512, time, GB, **{"links.h2d.rate": rate}) for rate, time in rows))
    (axes,) = plot_ablation(table, "links.h2d.rate").axes
    (line,) = axes.lines
    assert list(line.get_xdata()) == [0.9e9, 8e9, 80e9]
    assert list(line.get_ydata()) == [300, 120, 90]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["900 MB/s", "8 GB/s", "80 GB/s"]
    assert axes.get_xscale() == "log"


def test_what_differs_otherwise_gets_panels_with_names(table):
    figure = plot_fronts(table)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["batch 1", "batch 2"]
    many = frame(*(cell("dtr", batch, 512, 100, GB) for batch in range(1, 15)))
    with pytest.raises(TiersimError, match=r"14 panels are too many .*they differ in batch"):
        plot_fronts(many)


def test_nothing_to_draw_and_unknown_axes_are_one_line(table):
    with pytest.raises(TiersimError, match="nothing to draw"):
        plot_fronts(table[table["batch"] == 4])
    with pytest.raises(TiersimError, match=r"no axis 'links.h2d' "):
        plot_ablation(table, "links.h2d")
    with pytest.raises(TiersimError, match="no axis 'batch'"):
        plot_winners(table.drop(columns="batch"))
    with pytest.raises(TiersimError, match="columns 'policy' and 'status'"):
        plot_fits(pd.DataFrame({"a": [1]}))


def test_equal_tables_give_equal_files(table, tmp_path):
    for name in "ab":
        save_figure(plot_winners(table), tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
