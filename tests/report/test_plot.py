"""Figures show what the log says: no peak lost, no bar moved, no label on another."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import ProfileError
from sim.log import WHY, EventLog
from sim.report.colours import (
    INK,
    ROLE_COLOURS,
    VERMILION,
    WHITE,
    WHY_COLOURS,
    contrast,
    ink_on,
    policy_colour,
    policy_marker,
    policy_signs,
)
from sim.report.draw import COLUMNS, byte_scale, save_figure, thin, time_scale
from sim.report.lanes import _busy_until
from sim.report.plot import NAMED, plot_comparison, plot_lanes, plot_memory

MIB = 2**20


def hexes(artist):
    from matplotlib.colors import to_hex

    return to_hex(artist.get_facecolor()[0]).upper()


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


# ---- thinning ----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000)), min_size=1, max_size=300),
    st.integers(1, 12),
)
def test_thinning_keeps_the_extremes_and_the_ends_of_every_column(steps, bins):
    times = np.cumsum([step for step, _ in steps])
    level = np.array([height for _, height in steps])
    end = int(times[-1]) + 1
    kept = thin(level, times, 0, end, bins).tolist()
    assert kept == sorted(set(kept))
    assert len(kept) <= max(4 * bins, len(steps) if len(steps) <= 4 * bins else 0)
    for column in range(bins):
        inside = [i for i, t in enumerate(times.tolist()) if min(t * bins // end, bins - 1) == column]
        if inside:
            shown = [i for i in kept if i in inside]
            assert (shown[0], shown[-1]) == (inside[0], inside[-1])
            assert max(level[shown]) == max(level[inside])
            assert min(level[shown]) == min(level[inside])


def test_scales_are_units_in_which_the_number_is_easy_to_read():
    assert byte_scale(999, binary=False) == ("B", 1)
    assert byte_scale(5 * 10**9, binary=False) == ("GB", 10**9)
    assert byte_scale(5 * 2**30, binary=True) == ("GiB", 2**30)
    assert byte_scale(0, binary=True) == ("B", 1)
    assert time_scale(300 * 10**6) == ("ms", 10**6)
    assert time_scale(9) == ("ns", 1)


# ---- memory ------------------------------------------------------------------------------------


def test_the_stack_of_the_drawn_run_has_the_drawn_heights(drawn_log):
    axes = plot_memory(drawn_log, binary=True).axes[0]
    (curve,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
    points = list(zip(curve.get_xdata(), curve.get_ydata(), strict=True))
    assert points == [(0, 22), (10, 28), (30, 12), (40, 28), (60, 29), (67, 13), (67, 13)]
    # layers by role from below: weight (y), gradient (z), input (x), activation (a), workspace
    assert [hexes(layer) for layer in axes.collections] == [
        ROLE_COLOURS[role] for role in ("weight", "gradient", "input", "activation", "workspace")
    ]
    # (time, from, to) of what each role holds then, in MiB, added up by hand
    held = {
        "input": [(5, 0, 4), (20, 8, 12), (35, 8, 12), (65, 9, 13)],
        "activation": [(5, 4, 20), (20, 12, 28), (50, 12, 28), (65, 13, 29)],
        "workspace": [(5, 20, 22)],
        "weight": [(20, 0, 8), (35, 0, 8), (65, 0, 8)],
        "gradient": [(65, 8, 9)],
    }
    by_colour = {hexes(layer): layer.get_paths()[0] for layer in axes.collections}
    for role, spans in held.items():
        for at, low, high in spans:
            inside = by_colour[ROLE_COLOURS[role]].contains_points([(at, low + 0.1), (at, high - 0.1)])
            beside = by_colour[ROLE_COLOURS[role]].contains_points([(at, low - 0.1), (at, high + 0.1)])
            assert inside.all(), (role, at)
            assert not beside.any(), (role, at)
    assert axes.get_ylabel() == "in use in hbm0 (MiB)"
    assert axes.get_xlabel() == "time (ns)"
    assert axes.get_title("left") == "▼ peak 29 MiB at 60 ns, b"
    assert axes.get_title("right") == "– – budget 32 MiB (nominal 64 MiB)"
    (limit,) = [line for line in axes.lines if list(line.get_ydata()) == [32, 32]]
    assert limit.get_linestyle() == "--"
    (marker,) = [line for line in axes.lines if line.get_marker() == "v"]
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (60, 29)


def test_the_legend_lists_the_layers_as_they_lie(drawn_log):
    figure = plot_memory(drawn_log)
    assert labels(figure) == ["workspace", "activation", "input", "gradient", "weight"]


def test_a_long_run_is_thinned_and_keeps_its_peak(make_log, tmp_path):
    log = make_log(6000, seed=4)
    assert len(log.changes) > 60_000
    figure = plot_memory(log)
    path = save_figure(figure, tmp_path / "m.svg")
    assert path.stat().st_size < 400_000
    axes = figure.axes[0]
    (curve,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
    used = np.cumsum(log.changes[log.changes[:, 1] == 0, 2])
    size = byte_scale(int(used.max()), binary=False)[1]
    assert len(curve.get_xdata()) <= 3601
    assert max(curve.get_ydata()) == pytest.approx(used.max() / size, rel=1e-12)
    assert axes.get_ylim()[1] >= used.max() / size


def test_a_limit_far_above_is_said_and_not_drawn(step_log):
    wide = replace(step_log, platform=step_log.platform.with_budget(64 * 2**30))
    axes = plot_memory(wide, binary=True).axes[0]
    assert axes.get_title("right") == "budget 64 GiB (nominal 4 GiB), above this figure"
    assert not [line for line in axes.lines if line.get_linestyle() == "--"]


def test_another_tier_an_unused_one_and_a_cut_run(step_log):
    assert plot_memory(step_log, "host").axes[0].get_ylabel().startswith("in use in host")
    cut = replace(step_log, changes=step_log.changes[:0], complete=False)
    axes = plot_memory(cut).axes[0]
    assert axes.get_title("left") == "nothing was held here"
    assert axes.get_xlabel().endswith("; the run did not end")
    with pytest.raises(ProfileError, match="did you mean 'host'"):
        plot_memory(step_log, "hots")


# ---- lanes -------------------------------------------------------------------------------------


def bars(axes):
    """(row, colour of the kind, left, right) of all bars drawn apart."""
    from matplotlib.colors import to_hex

    found = []
    for collection in axes.collections:
        colour = hexes(collection)
        if colour == "#FFFFFF":  # stalls: hatched on white
            colour = to_hex(collection.get_edgecolor()[0]).upper()
        for path in collection.get_paths():
            box = path.get_extents()
            found.append((round((box.y0 + box.y1) / 2), colour, round(box.x0, 6), round(box.x1, 6)))
    return sorted(found)


def test_the_lanes_of_the_drawn_run_are_as_drawn(drawn_log):
    figure = plot_lanes(drawn_log)
    axes = figure.axes[0]
    run, again, move, stall = (WHY_COLOURS[why] for why in ("run", "recompute", "move", "stall"))
    assert stall == VERMILION
    drawn = [(0, run, 0, 10), (0, run, 10, 17), (0, again, 17, 37), (0, stall, 37, 60), (0, run, 60, 67)]
    assert bars(axes) == sorted([*drawn, (1, move, 10, 30), (2, move, 40, 60)])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["gpu0", "d2h0", "h2d0"]  # the cpu was idle
    assert labels(figure) == ["run", "recompute", "move", "stall"]
    assert {text.get_text() for text in axes.texts} == {"f", "g", "b", "a", "transfer"}


def test_a_short_copy_among_long_ops_is_seen(step_log):
    """A copy of a thousandth of the run is a bar of a column of pixels, without an edge that would cover it."""
    from matplotlib.collections import PolyCollection

    rows, length = step_log.intervals, step_log.end
    copies = rows[rows[:, 4] == WHY["move"]].copy()
    assert len(copies)
    copies[:, 1] = copies[:, 0] + max(1, length // 5000)
    short = replace(step_log, intervals=np.concatenate([rows[rows[:, 4] != WHY["move"]], copies]))
    axes = plot_lanes(short).axes[0]
    green = [each for each in axes.collections if isinstance(each, PolyCollection)]
    green = [each for each in green if hexes(each) == WHY_COLOURS["move"]]
    pixel = (axes.get_xlim()[1] - axes.get_xlim()[0]) / COLUMNS
    paths = [path for each in green for path in each.get_paths()]
    assert len(paths) == len(copies)
    assert all(np.ptp(path.vertices[:, 0]) >= 0.99 * pixel for path in paths)
    assert not any(np.any(each.get_linewidths()) for each in green)


def test_names_of_a_long_list_keep_what_they_fit_from():
    rows = comparison_rows(names=["keep_all"])
    rows += [{"policy": "optimizer_in_backward", "fits": False, "floor_bytes": 4_611_234_567}]
    assert "optimizer_in_backward (fits from 4.61 GB)" in labels(plot_comparison(rows))


def test_a_window_cuts_bars_and_leaves_out_what_is_outside(drawn_log):
    axes = plot_lanes(drawn_log, (12, 20)).axes[0]
    run, again, move = (WHY_COLOURS[why] for why in ("run", "recompute", "move"))
    assert bars(axes) == sorted([(0, run, 12, 17), (0, again, 17, 20), (1, move, 12, 20)])
    assert axes.get_xlim() == (12, 20)
    with pytest.raises(ValueError, match="end must come after"):
        plot_lanes(drawn_log, (20, 20))


def test_a_crowded_row_is_filled_in_proportion(drawn_log):
    """Every microsecond: 500 ns run, 300 ns recompute, 200 ns idle; so half of the row's area is `run`."""
    starts = np.arange(3000, dtype=np.int64) * 1000
    rows = np.full((6000, 9), -1, np.int64)
    rows[:, (2, 3, 7, 8)] = 0
    for offset, length, why, part in ((0, 500, "run", slice(0, 3000)), (500, 300, "recompute", slice(3000, None))):
        rows[part, 0], rows[part, 1], rows[part, 4] = starts + offset, starts + offset + length, WHY[why]
    log = EventLog(drawn_log.trace, drawn_log.platform, rows, drawn_log.changes[:0], drawn_log.reserved, 3_000_000)
    axes = plot_lanes(log).axes[0]
    area = {}
    for collection in axes.collections:
        corners = collection.get_paths()[0].vertices
        x, y = corners[:, 0], corners[:, 1]
        area[hexes(collection)] = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
    whole = 0.72 * axes.get_xlim()[1]
    assert area[WHY_COLOURS["run"]] / whole == pytest.approx(0.5, abs=1e-3)
    assert area[WHY_COLOURS["recompute"]] / whole == pytest.approx(0.3, abs=1e-3)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20),
    st.lists(st.integers(0, 200), min_size=1, max_size=20),
)
def test_busy_time_before_an_edge_counts_parts_of_intervals(steps, edges):
    spans, now = [], 0
    for gap, length in steps:
        spans.append((now + gap, now + gap + length))
        now += gap + length
    rows = np.array(spans, np.int64)
    counted = _busy_until(rows, np.array(sorted(edges), float)).tolist()
    busy = {ns for start, end in spans for ns in range(start, end)}
    assert counted == [sum(ns < edge for ns in busy) for edge in sorted(edges)]


def test_the_lanes_of_a_long_run_take_little_space(make_log, tmp_path):
    log = make_log(6000, seed=4, devices=2)
    path = save_figure(plot_lanes(log), tmp_path / "l.svg")
    assert path.stat().st_size < 400_000


# ---- policies ----------------------------------------------------------------------------------

NAMES = [
    *("keep_all", "full_recompute", "chen", "revolve", "rotor", "checkmate", "twremat", "dtr", "mimose", "megtaichi"),
    *("moccasin", "vdnn", "modnn", "swapadvisor", "autoswap", "tflms", "zero_offload", "patrickstar", "stronghold"),
    *("autotm", "sentinel", "flashneuron", "superneurons", "capuchin", "xengine", "str", "olla", "delta", "gist"),
    *("cdma", "cswap"),
]


def comparison_rows(seed=3, names=NAMES):
    import random

    draw = random.Random(seed)
    rows = []
    for name in names:
        x = draw.random()
        peak, took = int(6e9 * (1 - 0.6 * x + 0.1 * draw.random())), int(3e8 * (1 + 0.4 * x * x + 0.1 * draw.random()))
        rows.append({"policy": name, "fits": True, "fidelity": "code", "peak_bytes": peak, "makespan_ns": took})
    return rows


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("names", [NAMES[:NAMED], NAMES], ids=["named", "numbered"])
def test_each_policy_is_named_once_and_no_label_lies_on_another(seed, names):
    rows = comparison_rows(seed, names)
    figure = plot_comparison(rows)
    axes = figure.axes[0]
    told = [text.get_text() for text in axes.texts]
    if len(names) > NAMED:
        assert sorted(told, key=int) == [str(i) for i in range(1, len(names) + 1)]
        by_time = sorted(rows, key=lambda row: row["makespan_ns"])
        assert labels(figure)[0] == "fit, by time"
        assert [line.split(",")[0] for line in labels(figure)[1:]] == [
            f"{i}  {row['policy']}" for i, row in enumerate(by_time, 1)
        ]
    else:
        assert sorted(told) == sorted(names)
        assert not figure.legends
    figure.draw_without_rendering()
    boxes = [text.get_tightbbox() if not text.arrow_patch else _text_box(text) for text in axes.texts]
    for first, second in combinations(boxes, 2):
        width = min(first.x1, second.x1) - max(first.x0, second.x0)
        height = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert width <= 0.5 or height <= 0.5, "two labels overlap"
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 for box in boxes)


def _text_box(annotation):
    from matplotlib.text import Text

    return Text.get_window_extent(annotation)


def test_markers_stand_at_time_and_peak_in_the_policy_s_own_sign():
    rows = comparison_rows(names=["keep_all", "chen", "delta"])
    rows[2]["fidelity"] = "reconstruction"
    rows.sort(key=lambda row: row["makespan_ns"])
    axes = plot_comparison(rows, budget=8 * 10**9).axes[0]
    points = [line for line in axes.lines if line.get_marker() not in ("None", None, "")]
    for row, line in zip(rows, points, strict=True):
        assert line.get_xdata()[0] == pytest.approx(row["makespan_ns"] / 1e6)
        assert line.get_ydata()[0] == pytest.approx(row["peak_bytes"] / 1e9)
        assert line.get_marker() == policy_marker(row["policy"])
        assert line.get_color() == policy_colour(row["policy"])
    hollow = [row["policy"] for row, line in zip(rows, points, strict=True) if line.get_markerfacecolor() == "white"]
    assert hollow == ["delta"]
    assert "reconstruction" in axes.get_title("left")
    assert axes.get_title("right") == "– – budget 8 GB"
    assert [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "--"] == [[8, 8]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time of an iteration (ms)", "peak memory (GB)")


def test_policies_at_one_point_share_a_label():
    rows = comparison_rows(names=["a", "b", "c"])
    rows[2] |= {key: rows[0][key] for key in ("peak_bytes", "makespan_ns")}
    assert sorted(text.get_text() for text in plot_comparison(rows).axes[0].texts) == ["a, c", "b"]


def test_what_does_not_fit_is_listed_with_the_budget_that_would_do():
    rows = comparison_rows(names=["keep_all", "chen"])
    rows += [{"policy": "dtr", "fits": False, "floor_bytes": 9 * 10**9}, {"policy": "vdnn", "fits": False}]
    figure = plot_comparison(rows)
    assert labels(figure) == ["do not fit", "dtr (fits from 9 GB)", "vdnn"]
    many = [{"policy": f"p{i}", "fits": False, "floor_bytes": None} for i in range(40)]
    assert labels(plot_comparison(many))[-1] == "… and 15 more"


def test_the_staircase_joins_what_nothing_beats():
    rows = comparison_rows(names=["a", "b", "c", "d"])
    for row, (took, peak) in zip(rows, ((1, 9), (2, 5), (3, 7), (4, 4)), strict=True):
        row |= {"makespan_ns": took * 10**9, "peak_bytes": peak * 10**9}
    axes = plot_comparison(rows).axes[0]
    (stairs,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
    unit = time_scale(4 * 10**9)[1] / 1e9
    corners = zip(stairs.get_xdata(), stairs.get_ydata(), strict=True)
    assert [(x * unit, y) for x, y in corners] == [(1, 9), (2, 5), (4, 4)]


def test_time_has_a_logarithmic_axis_where_one_policy_would_crowd_all_others():
    rows = comparison_rows(names=["a", "b"])
    rows[0]["makespan_ns"], rows[1]["makespan_ns"] = 10**8, 5 * 10**8
    assert plot_comparison(rows).axes[0].get_xscale() == "linear"
    rows[1]["makespan_ns"] += 10**7
    axes = plot_comparison(rows).axes[0]
    assert axes.get_xscale() == "log"
    axes.figure.draw_without_rendering()
    assert {"100", "200", "500"} <= {tick.get_text() for tick in axes.get_xticklabels()}


def test_the_line_of_the_front_goes_through_no_label():
    rows = comparison_rows(names=["a", "b", "c"])
    for row, (took, peak) in zip(rows, ((1, 9), (1.05, 7), (1.1, 3)), strict=True):
        row |= {"makespan_ns": int(took * 10**9), "peak_bytes": peak * 10**9}
    figure = plot_comparison(rows)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    (stairs,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
    corners = [(x, rows[i]["peak_bytes"] / 1e9) for i, x in enumerate(stairs.get_xdata())]
    for (x, high), (end, low) in pairwise(corners):
        upright = axes.transData.transform([(end, low), (end, high)])
        for box in (_text_box(text) for text in axes.texts):
            assert not (box.x0 < upright[0][0] < box.x1 and box.y0 < upright[1][1] and upright[0][1] < box.y1), x


def crowded_rows(count, seed):
    """Many with the same peak, as planners have that use their budget to the last byte, and times close together."""
    import random

    draw = random.Random(seed)
    times = draw.choice([(0.01, 0.3), (0.01, 0.3, 1, 9)])
    rows = []
    for i in range(count):
        peak = int(draw.choice([8e9, 7.99e9, 7.9e9, 5e9 + 3e9 * draw.random()]))
        row = {"policy": f"policy_{i}" + "_of_many" * (i % 3 == 2), "fits": True, "peak_bytes": peak}
        rows.append(row | {"makespan_ns": int(1e8 * (1 + draw.choice(times) * draw.random())), "fidelity": "code"})
    return rows


def _crosses(line, box):
    """Whether a line from point to point goes through a box (Liang and Barsky, 1984)."""
    low, high = 0.0, 1.0
    for axis in (0, 1):
        start, step = line[0][axis], line[1][axis] - line[0][axis]
        if step == 0:
            if not box[axis] < start < box[axis + 2]:
                return False
            continue
        near, far = sorted(((box[axis] - start) / step, (box[axis + 2] - start) / step))
        low, high = max(low, near), min(high, far)
    return low < high


def _meet(a, b):
    return all(min(a[i + 2], b[i + 2]) - max(a[i], b[i]) > 0.5 for i in (0, 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [3, 9, 16, 17, 30, 60])
def test_no_label_lies_on_a_line_a_marker_or_a_label(count, seed):
    figure = plot_comparison(crowded_rows(count, seed), budget=8 * 10**9)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = {text.get_text(): tuple(_text_box(text).extents) for text in axes.texts}
    lines, signs = [], []
    for line in axes.lines:
        points = line.get_transform().transform(line.get_path().vertices).tolist()
        if line.get_marker() not in ("None", None, ""):
            half = 0.4 * line.get_markersize() * figure.dpi / 72  # a diamond fills half of its square
            signs += [(x - half, y - half, x + half, y + half) for x, y in points]
        elif line.get_drawstyle() == "steps-post":
            corners = [((x, y), (end, y), (end, low)) for (x, y), (end, low) in pairwise(points)]
            lines += [part for first, corner, last in corners for part in ((first, corner), (corner, last))]
        else:
            lines += pairwise(points)
    assert lines
    assert [pair for pair in combinations(boxes, 2) if _meet(boxes[pair[0]], boxes[pair[1]])] == []
    assert [name for name, box in boxes.items() for sign in signs if _meet(box, sign)] == []
    assert [name for name, box in boxes.items() for line in lines if _crosses(line, box)] == []
    leaders = {
        text.get_text(): (
            axes.transData.transform(text.xy),
            np.mean(np.reshape(boxes[text.get_text()], (2, 2)), axis=0),
        )
        for text in axes.texts
        if text.arrow_patch
    }
    crossed = [(a, b) for a, line in leaders.items() for b, box in boxes.items() if a != b and _crosses(line, box)]
    assert len(crossed) <= (0 if count <= NAMED else count)  # in a crowd a line may pass behind a number


@pytest.mark.parametrize("why", [why for why in WHY_COLOURS if why != "stall"])
def test_names_on_bars_contrast_as_text_must(why):
    assert contrast(ink_on(WHY_COLOURS[why]), WHY_COLOURS[why]) >= 4.5
    assert contrast(INK, WHITE) >= 4.5  # of stalls: on a white ground
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)  # as WCAG gives them
    assert contrast("#FFFFFF", "#777777") == pytest.approx(4.48, abs=0.005)


def test_an_empty_comparison_is_drawn():
    assert plot_comparison([]).axes


# ---- colours and files -------------------------------------------------------------------------


def lightness(colour):
    """CIE 1976 L* of an sRGB colour."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * (y ** (1 / 3) if y > 0.008856 else 7.787 * y + 16 / 116) - 16


def test_neighbours_in_the_stack_differ_without_colour():
    from sim.analysis.peak_memory import CATEGORIES

    assert set(ROLE_COLOURS) == set(CATEGORIES)
    assert len(set(ROLE_COLOURS.values())) == len(ROLE_COLOURS)
    for below, above in pairwise(ROLE_COLOURS.values()):
        assert abs(lightness(below) - lightness(above)) >= 10


def test_a_policy_s_sign_is_the_same_in_every_process():
    script = (
        "from sim.report.colours import *; import sys\n"
        f"print([(policy_colour(n), policy_marker(n)) for n in {NAMES!r}])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([(policy_colour(n), policy_marker(n)) for n in NAMES])
    assert policy_colour("chen(segments=4)") == policy_colour("chen")
    assert policy_colour("keep_all") == "#000000"
    # most names have a sign of their own
    assert len({(policy_colour(n), policy_marker(n)) for n in NAMES}) >= 0.75 * len(NAMES)


def test_no_two_policies_of_one_page_share_a_sign():
    from sim.policies import names

    for several in (names(), ["rotor", "swap_attention"], ["swap_attention", "rotor"], ["a(x=1)", "a(x=2)", "a(x=3)"]):
        signs = policy_signs(several)
        assert list(signs) == list(several)
        assert len(set(signs.values())) == len(several)
    assert policy_signs(["rotor", "swap_attention"]) == policy_signs(["swap_attention", "rotor"])
    for name in ("chen", "keep_all", "dtr(heuristic=lru)"):
        assert policy_signs([name]) == {name: (policy_colour(name), policy_marker(name))}
    many = [f"p{i}" for i in range(100)]
    assert len(set(policy_signs(many).values())) == 66  # all that there are; then some share


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_equal_figures_give_equal_files(drawn_log, tmp_path, ending):
    files = [save_figure(plot_memory(drawn_log), tmp_path / f"{i}.{ending}").read_bytes() for i in (1, 2)]
    assert files[0] == files[1]
    assert len(files[0]) > 5000


def test_an_unknown_format_is_refused_before_anything_is_written(drawn_log, tmp_path):
    with pytest.raises(ValueError, match=r"use \.png, \.svg or \.pdf"):
        save_figure(plot_memory(drawn_log), tmp_path / "a.bmp2")
    assert not list(tmp_path.iterdir())


def test_importing_the_reports_loads_nothing_heavy_and_plotting_no_global_state():
    script = """
import sys
import sim.report.plot, sim.report.table, sim.report.markdown, sim.report.timeline
heavy = {"matplotlib", "pandas", "perfetto", "rich", "scipy"} & set(sys.modules)
assert not heavy, heavy
sim.report.plot.plot_comparison([{"policy": "a", "fits": True, "peak_bytes": 1, "makespan_ns": 1}])
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("count", [1, NAMED, len(NAMES)])
@pytest.mark.parametrize("name", ["x" * 5000, "/home/me/" + "policies/" * 40 + "mine.py", "🎉" * 60, "大模型"])
def test_any_name_leaves_space_for_the_figure_and_no_warning(name, count, tmp_path):
    import warnings

    rows = comparison_rows(names=[f"{name}{i}" for i in range(count)])
    rows.append({**rows[0], "policy": f"{name}none", "fits": False, "floor_bytes": 10**9})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot_comparison(rows)
        save_figure(figure, tmp_path / "figure.png")
    axes = figure.axes[0].get_window_extent()
    assert axes.width > 0.15 * figure.bbox.width
    assert axes.height > 0.4 * figure.bbox.height
