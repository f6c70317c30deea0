"""The report page in a real browser without a network: it draws, zooms, tells and sorts, and asks for nothing."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from sim import TraceBuilder
from sim.analysis import peak_memory, roles_over_time, summarize
from sim.report.cells import clock, size
from sim.report.colours import WHY_COLOURS
from sim.report.footer import Footer
from sim.report.page import TableView, write_run_page, write_table_page
from tests.report.conftest import DESKTOP, PHONE, view_of


def timeline(page):
    return {
        key: float(value) for key, value in page.evaluate("({...document.querySelector('#timeline').dataset})").items()
    }


def after_drawing(page, act):
    """Do something that changes the span of time, and wait until it is drawn."""
    before = timeline(page)["drawn"]
    act()
    until = time.monotonic() + 30
    while timeline(page)["drawn"] == before:
        assert time.monotonic() < until, "nothing was drawn"
        page.wait_for_timeout(5)
    page.wait_for_timeout(30)  # a second frame, where one gesture asked for more than one
    return timeline(page)


def drag(page, box, start, end):
    y = box["y"] + 12
    page.mouse.move(box["x"] + box["width"] * start, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * (start + end) / 2, y)
    page.mouse.move(box["x"] + box["width"] * end, y)
    page.mouse.up()


def told(page):
    """What the box beside the pointer says: its title, and its lines as a dict."""
    page.wait_for_selector(".tip:not([hidden])")
    lines = zip(page.locator(".tip dt").all_inner_texts(), page.locator(".tip dd").all_inner_texts())
    return page.locator(".tip-title").inner_text(), dict(lines)


def at(page, where, share, row=0):
    """Move the pointer to a time of the lanes (by row) or of the memory."""
    box = page.locator(where).bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + 20 + 30 * row)


# ---- drawing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_run_is_drawn_within_the_width_of_the_window(visit, step, size, scheme):
    page = visit(step, size=size, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    assert page.locator("h1").inner_text() == "some_policy"
    headings = page.locator("h2").all_inner_texts()
    for part in ("Timeline", "Alive at the peak", "Where the time goes", "Stalls by cause", "Figures of the machine"):
        assert part in headings
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"
    assert light == (scheme == "light")


def test_lanes_have_the_colours_of_all_figures(visit, drawn):
    page = visit(drawn)
    colours = page.evaluate(
        """() => {
          const canvas = document.querySelector('.lanes canvas');
          const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const found = new Set();
          for (let i = 0; i < data.length; i += 4)
            found.add('#' + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, '0')).join('').toUpperCase());
          return [...found];
        }"""
    )
    assert {WHY_COLOURS[why] for why in ("run", "recompute", "move")} <= set(colours)


LIMIT = 30
UNIT = """() => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 300;
  const context = canvas.getContext('2d');
  const marks = [];
  for (let i = 0; i < 40000; i++) marks.push({at: (i * 7919) % 40009, text: `mark ${i}`});
  marks.sort((a, b) => a.at - b.at);
  for (const {at, text} of marks) context.fillRect(at % 300, text.length, 1, 1);
  return context.getImageData(0, 0, 1, 1).data[3];
}"""


@pytest.fixture
def measured(browser):
    """Opens a file; then `spent()` says how long the page's own thread has computed since it last did.

    On an idle machine that is what people wait; what else a busy one does is not counted. The unit is a piece of work
    of the same kind (objects made, sorted and drawn), timed in the same page, so that a slow machine changes little.
    15 units took a second where this was written; `LIMIT` leaves as much again for noise.
    """
    context = browser.new_context(viewport=DESKTOP, offline=True)
    page = context.new_page()
    page.set_default_timeout(120_000)
    meter = context.new_cdp_session(page)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    last = 0.0

    def computed():
        nonlocal last
        metrics = meter.send("Performance.getMetrics")["metrics"]
        now = next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
        before, last = last, now
        return now - before

    def go(path):
        computed()
        page.goto(path.as_uri())
        page.wait_for_selector("main[aria-busy=false]")
        first = computed()
        units = []
        for _ in range(5):
            page.evaluate(UNIT)
            units.append(computed())
        unit = statistics.median(units)
        waiting = [first]  # what opening took, which the first call tells

        def spent():
            return (waiting.pop() if waiting else computed()) / unit

        return page, spent

    yield go
    context.close()


@pytest.mark.alone
def test_the_first_drawing_and_a_zoom_of_100_000_events_take_about_a_second(measured, make_log, folder):
    log = make_log(34_000)
    assert len(log.intervals) > 100_000
    page, spent = measured(write_run_page(view_of(log), folder / "long.html"))
    assert 0 < spent() < LIMIT
    box = page.locator(".area").bounding_box()
    for start, end in ((0.2, 0.9), (0.4, 0.6), (0.45, 0.55)):
        after_drawing(page, lambda: drag(page, box, start, end))  # noqa: B023
        assert 0 < spent() < LIMIT


@pytest.mark.alone
def test_a_table_of_10_000_runs_is_drawn_and_sorted_in_about_a_second(measured, folder):
    rows = []
    for i in range(10_000):
        row = {"id": str(i), "policy": f"policy_{i % 5}", "batch": i // 5, "fits": True, "devices": 1}
        rows.append({**row, "peak_bytes": 10**9 + i * 7919 % 10_007, "makespan_ns": 10**9 + i * 104_729 % 10_009})
    page, spent = measured(write_table_page(TableView("long", ("policy", "batch"), rows), folder / "table.html"))
    assert 0 < spent() < LIMIT
    page.get_by_role("button", name="time", exact=True).click()
    assert 0 < spent() < LIMIT
    assert len(column(page, "time")) == 100


def test_a_run_in_which_nothing_happened_is_drawn(visit, drawn_log, folder):
    nothing = {"intervals": drawn_log.intervals[:0], "changes": drawn_log.changes[:0], "end": 0, "complete": False}
    page = visit(write_run_page(view_of(replace(drawn_log, **nothing)), folder / "nothing.html"))
    assert "did not end" in page.locator(".badges").inner_text()
    assert page.locator("#stalls, #links").count() == 0  # neither has anything to say
    assert "never" in page.locator(".tiles").inner_text()


def test_a_run_that_did_not_fit_says_why_and_shows_what_was_asked_for(visit, short):
    page = visit(short)
    assert "does not fit" in page.locator(".badges").inner_text()
    said = page.locator("#refusal").inner_text()
    assert "After 67 ns 41.94 MB more were asked for in hbm0, and 3.146 MB were free." in said
    assert "op 'b' needs 40 MiB" in said
    assert "ran until" in page.locator(".tiles").inner_text()
    assert "time of an iteration" not in page.locator(".tiles").inner_text()
    assert page.locator(".limit .short").inner_text() == "× 41.94 MB more asked for at the end"
    assert page.locator(".alive h2").inner_text() == "Alive when it did not fit"
    assert "13.63 MB in hbm0" in page.locator(".alive .hint").first.inner_text()  # x 4, y 8 and z 1 MiB
    bad = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad').trim()")
    drawn = page.evaluate(
        """() => {
          const canvas = document.querySelector('.memory canvas');
          const {data, width} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const rows = [];
          const colour = (i) => '#' + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, '0')).join('');
          for (let i = 0; i < data.length; i += 4) if (colour(i) === BAD) rows.push(Math.floor(i / 4 / width));
          return [Math.min(...rows), Math.max(...rows)];
        }""".replace("BAD", repr(bad))
    )
    assert drawn[1] - drawn[0] > 100  # from 13 to 53 MiB, on an axis that ends a little above
    page.locator("button", has_text="host").click()
    assert page.locator(".limit .short").count() == 0
    assert page.locator(".alive h2").inner_text() == "Alive at the peak"
    page.locator("button", has_text="hbm0").click()
    page.locator(".u-over").focus()
    page.keyboard.press("Enter")
    assert page.locator(".alive h2").inner_text().startswith("Alive at 33")
    page.get_by_role("button", name="back to the end").click()
    assert page.locator(".alive h2").inner_text() == "Alive when it did not fit"


# ---- zoom ----------------------------------------------------------------------------------------


def test_dragging_zooms_and_a_double_click_shows_all(visit, step, step_log):
    page = visit(step)
    assert (timeline(page)["start"], timeline(page)["end"]) == (0, step_log.end)
    for where in (".area", ".u-over"):
        box = page.locator(where).bounding_box()
        now = after_drawing(page, lambda: drag(page, box, 0.25, 0.5))  # noqa: B023
        assert now["start"] == pytest.approx(step_log.end * 0.25, abs=step_log.end * 0.01)
        assert now["end"] == pytest.approx(step_log.end * 0.5, abs=step_log.end * 0.01)
        now = after_drawing(page, lambda: page.locator(where).dblclick(position={"x": 40, "y": 12}))  # noqa: B023
        assert (now["start"], now["end"]) == (0, step_log.end)


def test_buttons_keys_and_the_wheel_zoom_and_move(visit, step, step_log):
    page = visit(step)
    span = after_drawing(page, lambda: page.get_by_label("Zoom in").click())
    assert span["end"] - span["start"] == pytest.approx(step_log.end / 2)
    page.locator(".area").focus()
    span = after_drawing(page, lambda: page.keyboard.press("+"))
    assert span["end"] - span["start"] == pytest.approx(step_log.end / 4)
    moved = after_drawing(page, lambda: page.keyboard.press("Shift+ArrowRight"))
    assert moved["start"] == pytest.approx(span["start"] + step_log.end / 20)
    box = page.locator(".area").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 12)
    page.keyboard.down("Control")
    span = after_drawing(page, lambda: page.mouse.wheel(0, 60))
    page.keyboard.up("Control")
    assert span["end"] - span["start"] > step_log.end / 4
    span = after_drawing(page, lambda: page.keyboard.press("0"))
    assert (span["start"], span["end"]) == (0, step_log.end)


def test_a_tap_on_a_phone_tells(visit, drawn):
    page = visit(drawn, size=PHONE, touch=True)
    page.locator(".area").scroll_into_view_if_needed()
    box = page.locator(".area").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] * 5 / 67, box["y"] + 20)
    assert told(page)[0] == "f"


def test_two_fingers_zoom_on_a_phone_and_one_moves(visit, step, step_log):
    page = visit(step, size=PHONE, touch=True)
    page.locator(".area").scroll_into_view_if_needed()
    box = page.locator(".area").bounding_box()
    touch = page.context.new_cdp_session(page)
    middle, y = box["x"] + box["width"] / 2, box["y"] + 20

    def fingers(kind, apart):
        points = [{"x": middle + side * apart, "y": y, "id": i} for i, side in enumerate((-1, 1))]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points if apart else []})

    def pinch():
        fingers("touchStart", 20)
        for apart in (30, 45, 60, 80):
            fingers("touchMove", apart)
        fingers("touchEnd", 0)

    span = after_drawing(page, pinch)
    assert span["end"] - span["start"] == pytest.approx(step_log.end * 20 / 80, rel=0.1)
    assert (span["start"] + span["end"]) / 2 == pytest.approx(step_log.end / 2, rel=0.05)

    def swipe():
        for kind, x in (("touchStart", 0), ("touchMove", -20), ("touchMove", -40), ("touchEnd", None)):
            points = [] if x is None else [{"x": middle + x, "y": y, "id": 0}]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    moved = after_drawing(page, swipe)
    assert moved["end"] - moved["start"] == pytest.approx(span["end"] - span["start"])
    assert moved["start"] > span["start"]


# ---- hover ---------------------------------------------------------------------------------------


def test_an_interval_says_what_it_is(visit, drawn):
    page = visit(drawn)
    at(page, ".area", 5 / 67)
    name, lines = told(page)
    assert name == "f"
    assert (lines["why"], lines["kind"], lines["phase"], lines["layer"]) == ("run", "matmul", "forward", "3")
    assert (lines["takes"], lines["start"], lines["end"]) == ("10 ns", "0 ns", "10 ns")
    at(page, ".area", 27 / 67)
    assert told(page)[0] == "recompute f"
    at(page, ".area", 50 / 67)
    name, lines = told(page)
    assert name == "stall: transfer"
    assert lines["waits for"] == "a copy of something that it reads"
    assert lines["tensor"] == "a"
    at(page, ".area", 50 / 67, row=2)
    name, lines = told(page)
    assert name == "a"
    assert (lines["lane"], lines["from"], lines["to"], lines["bytes"]) == ("h2d0", "host", "hbm0", "16.78 MB")


@pytest.mark.parametrize("where", [".area", ".u-over"])
def test_what_the_box_says_follows_a_zoom_under_a_still_pointer(visit, step, where):
    page = visit(step)
    at(page, where, 0.3)
    before = told(page)

    def matches():
        """Whether the box says what a new movement of the pointer to the same place says."""
        now = told(page)
        at(page, where, 0.31)
        at(page, where, 0.3)
        return now == told(page), now

    page.locator(where).focus()
    after_drawing(page, lambda: [page.keyboard.press("+") for _ in range(4)])
    same, zoomed = matches()
    assert same
    assert zoomed != before
    after_drawing(page, lambda: page.keyboard.press("Shift+ArrowRight" if where == ".area" else "ArrowRight"))
    assert matches()[0]
    after_drawing(page, lambda: page.keyboard.press("0"))
    assert matches() == (True, before)


def said_under(page, x, y):
    """What the box says while the pointer rests at a place, and what it says of it to one that has just come."""

    def says():
        page.wait_for_timeout(100)  # frames after which it is drawn
        return page.locator(".tip").evaluate("(box) => box.hidden || box.innerText")

    rests = says()
    page.mouse.move(x + 3, y)
    page.mouse.move(x, y)
    return rests, says()


@pytest.mark.parametrize("where", [".area", ".u-over"])
def test_the_box_tells_what_lies_under_a_mouse_that_rests_whatever_changes_the_page(visit, step, where):
    page = visit(step, size={"width": 1280, "height": 1400})
    box = page.locator(where).bounding_box()
    x, y, width = box["x"] + box["width"] * 0.45, box["y"] + 20, box["width"]

    def pressed(locator):
        locator.focus()
        page.keyboard.press("Enter")

    def dragged():
        page.mouse.move(x - width / 5, y)
        page.mouse.down()
        page.mouse.move(x, y, steps=4)
        page.mouse.up()

    def turned(*by, key=None):
        if key:
            page.keyboard.down(key)
        for dx, dy in by:
            page.mouse.wheel(dx, dy)
        if key:
            page.keyboard.up(key)

    acts = {
        "drag": dragged,
        "wheel with Ctrl": lambda: turned((0, -60), (0, -60), (0, -60), key="Control"),
        "wheel sideways": lambda: turned((90, 0)),
        "double click": lambda: page.mouse.dblclick(x, y),
        "button": lambda: pressed(page.get_by_label("Zoom in")),
        "another tier": lambda: pressed(page.get_by_role("button", name="host")),
        "the tier again": lambda: pressed(page.get_by_role("button", name="hbm0")),
        "narrower": lambda: page.set_viewport_size({"width": 1000, "height": 1400}),
        "wider": lambda: page.set_viewport_size({"width": 1280, "height": 1400}),
        "scrolled": lambda: turned((0, 25)),
    }
    told_something = 0
    for name, act in acts.items():
        page.mouse.move(x, y)
        act()
        rests, comes = said_under(page, x, y)
        assert rests == comes, name
        told_something += rests is not True
    assert told_something > 5
    page.keyboard.press("Escape")
    assert page.locator(".tip").is_hidden()


def test_a_marker_that_is_no_longer_there_is_not_told(visit, many):
    page = visit(many[0], size={"width": 1280, "height": 1400})
    page.get_by_label("Filter the rows").fill("keep_all 83")
    page.wait_for_function("() => document.querySelectorAll('.panels canvas').length === 1")
    box = page.locator(".scatter canvas").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)  # where a single marker stands, about
    for x, y in product(np.arange(-6, 7) * 8 + middle[0], np.arange(-6, 7) * 8 + middle[1]):
        page.mouse.move(x, y)
        if page.locator(".tip:not([hidden])").count():
            break
    assert page.locator(".tip:not([hidden])").count(), "no marker was found"
    page.get_by_label("Filter the rows").focus()
    page.keyboard.type(" 5")
    assert said_under(page, x, y) == (True, True)
    page.keyboard.press("Backspace")
    rests, comes = said_under(page, x, y)
    assert rests == comes
    assert rests.startswith("keep_all, 83")


def test_memory_says_what_each_role_holds(visit, step, step_log):
    page = visit(step)
    at(page, ".u-over", 0.5, row=4)
    name, lines = told(page)
    box = page.locator(".u-over").bounding_box()
    moment = step_log.end * round(box["width"] * 0.5) / box["width"]
    table = roles_over_time(step_log)
    row = table[table["time_ns"] <= moment].iloc[-1]
    sizes = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "B": 1}
    for role in set(table.columns) - {"time_ns"}:
        number, unit = lines[role.replace("_", " ")].split()
        assert float(number) * sizes[unit] == pytest.approx(row[role], rel=1e-3)
    assert name.endswith("in hbm0")


def test_keys_step_through_intervals_and_say_them(visit, drawn):
    page = visit(drawn)
    page.locator(".area").focus()
    page.keyboard.press("ArrowRight")
    for name in ("stall: transfer", "b"):
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "(text) => document.querySelector('.said').textContent.startsWith(text)", arg=f"{name}: why"
        )
    page.keyboard.press("ArrowDown")
    assert page.locator(".said").inner_text().startswith("a: why move")


# ---- what is held --------------------------------------------------------------------------------


def alive(page):
    rows = page.locator(".alive tbody tr")
    names = rows.locator("th").all_inner_texts()
    return dict(zip(names, rows.locator("td:nth-child(2)").all_inner_texts()))


def test_the_tensors_at_the_peak_are_those_of_the_analysis(visit, step, step_log):
    page = visit(step)
    peak = peak_memory(step_log, largest=12)
    shown = alive(page)
    shown.pop("(workspace)", None)
    largest = {holder.tensor: holder.bytes for holder in peak.largest}
    assert len(shown) >= 11
    for name, text in shown.items():
        assert float(text.split()[0]) * 1e6 == pytest.approx(largest[name], rel=1e-3)
    assert f"as {peak.op} ran" in page.locator(".alive .hint").first.inner_text()


def test_a_click_on_the_memory_lists_what_is_held_then(visit, drawn):
    page = visit(drawn)
    box = page.locator(".u-over").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 35 / 67, box["y"] + 100)
    page.wait_for_function("() => document.querySelector('.alive h2').textContent.startsWith('Alive at 3')")
    assert alive(page) == {"x": "4.194 MB", "y": "8.389 MB"}  # a lies in the host, f has run
    page.get_by_role("button", name="back to the peak").click()
    assert alive(page) == {"a": "16.78 MB", "y": "8.389 MB", "x": "4.194 MB", "z": "1.049 MB"}
    page.get_by_role("button", name="host").click()
    assert alive(page) == {"a": "16.78 MB"}


@pytest.mark.parametrize("size", [{"width": 1400, "height": 900}, PHONE], ids=["desktop", "phone"])
def test_what_a_click_on_the_memory_chooses_is_in_view_beside_it(visit, step, size):
    page = visit(step, size=size)
    memory = page.locator(".u-over")
    memory.scroll_into_view_if_needed()
    box = memory.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.6)
    page.wait_for_function("() => document.querySelector('.alive h2').textContent.startsWith('Alive at ')")
    time = page.locator(".alive h2").inner_text().removeprefix("Alive at ")
    first = page.locator(".alive tbody tr").first.inner_text().split("\t")
    seen = ".alive tbody tr" if size["width"] > 1100 else ".picked"
    shown = page.locator(seen).first
    assert first[0] in shown.inner_text()
    for part in (shown, memory):
        place = part.bounding_box()
        assert place["y"] >= 0, part
        assert place["y"] + place["height"] <= size["height"], part
    assert seen != ".picked" or shown.inner_text().startswith(f"{time}: ")
    page.get_by_role("button", name="back to the peak").click()
    assert page.locator(".picked").inner_text() == ""


def test_a_role_can_be_hidden_and_shown(visit, step):
    page = visit(step)
    button = page.locator(".toggles button", has_text="activation")
    for pressed in ("false", "true"):
        after_drawing(page, button.click)
        assert button.get_attribute("aria-pressed") == pressed


# ---- tables --------------------------------------------------------------------------------------


def column(page, title, root="#runs"):
    heads = page.locator(f"{root} thead th").all_inner_texts()
    number = next(i for i, head in enumerate(heads) if head.strip() == title)
    return page.locator(f"{root} tbody tr > :nth-child({number + 1})").all_inner_texts()


def test_a_table_sorts_by_mouse_and_by_key(visit, many):
    path, rows = many
    page = visit(path)
    head = page.locator("#runs thead th", has=page.get_by_role("button", name="time", exact=True))
    assert head.get_attribute("aria-sort") == "none"
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    times = sorted(row["makespan_ns"] for row in rows if row["fits"])
    assert column(page, "time")[:100] == [
        f"{ns // 10**6} ms" if ns < 10**9 else f"{ns / 1e9:.3g} s" for ns in times[:100]
    ]
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    shown = column(page, "time")
    assert shown[0] == f"{times[-1] / 1e9:.3g} s"
    assert "–" not in shown  # what has no time comes last either way
    page.locator(".more").first.click()
    assert len(column(page, "time")) == len(rows)
    assert column(page, "time")[-1] == "–"


def test_rows_are_filtered_and_columns_are_chosen(visit, many):
    path, rows = many
    page = visit(path)
    page.get_by_label("Filter the rows").fill("dtr 17")
    expected = [row for row in rows if row["policy"] == "dtr" and str(row["batch"]).find("17") >= 0]
    assert column(page, "batch") == [str(row["batch"]) for row in expected]
    page.get_by_label("Filter the rows").fill("")
    page.locator(".toggles button", has_text="chen").click()
    assert {text.strip() for text in column(page, "policy")} <= {
        "keep_all ▸ timeline",
        "keep_all",
        "dtr",
        "dtr ▸ timeline",
    }
    page.locator(".picker summary").click()
    page.locator(".picker").get_by_label("devices").check()
    assert "1" in column(page, "devices")


def test_why_a_run_does_not_fit_can_be_read_to_its_end(visit, folder):
    said = (
        "op 'h11.mlp.act.cube.cast' needs 25,165,824 B in 'zone' for its results; 20,166,313 B of 3,227,902,921 B are "
        "free (largest free block 20,166,313 B); largest holders: wte.weight (154,389,504 B), wte.weight.m "
        "(154,389,504 B), wte.weight.v (154,389,504 B)"
    )
    row = {"id": "a", "policy": "chen", "fits": False, "fidelity": "code", "status": "infeasible", "error": said}
    page = visit(write_table_page(TableView("a study", ("policy",), [row]), folder / "refused.html"))
    cell = page.locator("#runs .clip")
    assert (cell.inner_text(), cell.get_attribute("title")) == (said, said)
    assert cell.evaluate("(each) => each.clientHeight < 2 * parseFloat(getComputedStyle(each).fontSize)")  # one line
    assert page.locator("#scatter").count() == 0  # no run that time could be set against memory of
    page.locator("#runs tbody a").click()
    whole = page.locator(".pairs dd", has_text="needs 25,165,824 B")
    assert whole.inner_text() == said
    assert whole.evaluate("(each) => each.scrollHeight <= each.clientHeight + 1")


def test_a_row_leads_to_its_run_and_back(visit, many, step_log):
    path, _ = many
    page = visit(path)
    page.locator("#runs tbody a").first.click()
    page.wait_for_selector("#timeline")
    assert page.locator("h1").inner_text() == "the run of cell 0"
    assert timeline(page)["end"] == step_log.end
    page.get_by_role("link", name="a study").click()
    page.wait_for_selector("#runs")
    page.locator("#runs tbody a").nth(1).click()
    page.wait_for_function("() => location.hash === '#run=cell001' && !document.querySelector('#runs')")
    assert "batch" in page.locator(".pairs dt").all_inner_texts()
    page.go_back()
    page.wait_for_selector("#runs")


def test_a_marker_of_the_picture_tells_its_run(visit, many):
    path, rows = many
    page = visit(path)
    page.get_by_label("Filter the rows").fill("keep_all 1")
    page.locator(".scatter canvas").first.scroll_into_view_if_needed()
    found = page.evaluate("() => document.querySelector('.scatter canvas').getBoundingClientRect().toJSON()")
    page.wait_for_timeout(50)
    for x in np.linspace(found["x"] + 70, found["x"] + found["width"] - 20, 60):
        for y in np.linspace(found["y"] + 15, found["y"] + found["height"] - 60, 12):
            page.mouse.move(x, y)
            if page.locator(".tip:not([hidden])").count():
                name, lines = told(page)
                assert name.startswith("keep_all, 1")
                batch = int(name.split(", ")[1])
                (row,) = [row for row in rows if row["policy"] == "keep_all" and row["batch"] == batch]
                assert row["fits"]
                assert lines["peak"].endswith("MB") or lines["peak"].endswith("GB")
                return
    raise AssertionError("no marker was found")


def test_runs_of_two_jobs_are_never_in_one_picture(visit, many):
    path, rows = many
    page = visit(path)
    batches = dict.fromkeys(row["batch"] for row in rows if row["fits"])
    captions = page.locator(".panels figcaption").all_inner_texts()
    assert captions == [f"batch {batch}" for batch in batches][:12]
    assert page.locator(".panels canvas").count() == len(captions) > 1
    page.get_by_label("Filter the rows").fill("keep_all 83")
    page.wait_for_function("() => document.querySelectorAll('.panels canvas').length === 1")
    assert page.locator(".panels figcaption").all_inner_texts() == ["batch 83"]


def test_the_map_of_winners_names_the_fastest_of_each_job_and_leads_to_it(visit, study):
    path, rows = study
    page = visit(path)
    maps = page.locator("#winners table")
    assert page.locator("#winners figcaption").all_inner_texts() == ["profile a_card", "profile another"]
    for i, machine in enumerate(("a_card", "another")):
        lines = [line.split("\t") for line in maps.nth(i).locator("tr").all_inner_texts()]
        assert [head.strip() for head in lines[0]][1:] == ["budget all", "budget 90%", "budget 75%", "budget 50%"]
        for batch, cells in zip((2, 4, 16), lines[1:], strict=True):
            assert cells[0].strip() == f"batch {batch}"
            for budget, cell in zip(("all", "90%", "75%", "50%"), cells[1:], strict=True):
                mine = [
                    row for row in rows if (row["profile"], row["batch"], row["budget"]) == (machine, batch, budget)
                ]
                fitting = [row for row in mine if row["fits"]]
                if not fitting:
                    assert cell.strip() == "nothing fits"
                    continue
                least = min(row["makespan_ns"] for row in fitting)
                name, figures = cell.strip().split("\n")
                assert name in {row["policy"] for row in fitting if row["makespan_ns"] == least}
                near = [row for row in fitting if row["makespan_ns"] <= 1.041 * least]
                assert figures.endswith(f"≈ {len(near) - 1} more") == (len(near) > 1)
    assert "nothing fits" in maps.first.inner_text()
    page.locator(".toggles button", has_text="keep_all").click()
    assert "keep_all" not in page.locator("#winners").inner_text()
    page.get_by_label("Filter the rows").fill("another")
    page.wait_for_function("() => document.querySelectorAll('#winners table').length === 1")
    page.locator("#winners a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".way")
    assert "profile another" in page.locator(".way").inner_text()


def test_time_added_is_drawn_over_the_budget_with_a_picture_for_each_job(visit, study):
    path, rows = study
    page = visit(path, script=Path(__file__).with_name("looks.js"))
    captions = page.locator("#overhead figcaption").all_inner_texts()
    assert sorted(captions) == sorted(f"profile {m} · batch {b}" for m in ("a_card", "another") for b in (2, 4, 16))
    at = captions.index("profile a_card · batch 16")
    mine = [row for row in rows if (row["profile"], row["batch"]) == ("a_card", 16)]
    canvas = page.locator("#overhead .panels canvas").nth(at)
    canvas.scroll_into_view_if_needed()
    drawn = page.evaluate("n => drawnOn(document.querySelectorAll('#overhead .panels canvas')[n])", at)
    crosses = [(a, b) for a, b in drawn["lines"] if abs(b[0] - a[0]) < 8]
    spots = {(round((left + right) / 2), round((t + b) / 2)) for left, t, right, b in drawn["marks"]}
    spots |= {(round((a[0] + b[0]) / 2), round((a[1] + b[1]) / 2)) for a, b in crosses}
    box, seen = canvas.bounding_box(), {}
    for x, y in spots:
        page.mouse.move(box["x"] + x, box["y"] + y)
        page.wait_for_selector(".tip:not([hidden])")
        seen[page.locator(".tip-title").inner_text()] = (x, y)
    told = {f"a_card, 16, {row['policy']}, {row['budget']}": row for row in mine}
    assert set(seen) <= set(told)
    assert len(seen) >= len(mine) - 2  # one marker may lie on another
    lowest = max(y for title, (_, y) in seen.items() if told[title]["fits"])
    assert all(y > lowest for title, (_, y) in seen.items() if not told[title]["fits"])  # crosses lie below
    for title, (x, _) in seen.items():  # a smaller budget lies further left
        others = [seen[t][0] for t in seen if told[t]["budget_bytes"] < told[title]["budget_bytes"]]
        assert all(other < x for other in others)


def test_what_a_filter_leaves_out_is_not_said_to_not_fit(visit, study):
    page = visit(study[0])
    box = page.get_by_label("Filter the rows")
    nothing = page.locator("#winners").inner_text().count("nothing fits")
    box.fill("keep_all")
    page.wait_for_function("() => document.querySelector('#winners').innerText.includes('none of those chosen fits')")
    assert page.locator("#winners").inner_text().count("nothing fits") == nothing > 0  # where no policy does
    for empty, said in (("zzzz", "No run matches the filter."), ("chen 50%", "None of the runs that are chosen fits.")):
        box.fill(empty)
        page.wait_for_function("said => document.querySelector('#scatter').innerText.includes(said)", arg=said)
        assert page.locator("#scatter canvas:not(.marker), #overhead .panels canvas").count() == 0
        assert said in page.locator("#overhead").inner_text()
    box.fill("zzzz")
    for part in ("#winners", "#runs"):
        assert "No run matches the filter." in page.locator(part).inner_text()
    box.fill("")
    for name in ("keep_all", "chen", "swap_all"):
        page.locator("#scatter .toggles button", has_text=name).click()
    assert "No policy is chosen." in page.locator("#runs").inner_text()


def test_time_added_is_left_out_where_no_job_has_two_budgets(visit, study, folder):
    _, rows = study
    labels = ("profile", "batch", "policy", "budget")
    one = [{**row, "unconstrained_peak_bytes": row["unconstrained_peak_bytes"] - i} for i, row in enumerate(rows)]
    one = [row for row in one if row["budget"] == "75%"]  # parts that differ in what was rounded
    page = visit(write_table_page(TableView("one budget", labels, one), folder / "one_budget.html"))
    assert page.locator("#overhead").count() == 0
    none = [row for row in rows if row["batch"] != 2 or not row["fits"]]
    page = visit(write_table_page(TableView("a job without a fit", labels, none), folder / "no_fit.html"))
    assert page.locator("#overhead figcaption").count() == 4
    assert not any(said.endswith("batch 2") for said in page.locator("#overhead figcaption").all_inner_texts())


def test_one_map_has_the_width_of_its_card(visit, study, folder):
    labels = ("batch", "policy", "budget")
    rows = [row for row in study[1] if row["profile"] == "a_card"]
    page = visit(write_table_page(TableView("one machine", labels, rows), folder / "one_map.html"))
    whole, mine = (page.locator(part).bounding_box()["width"] for part in ("#winners .maps", "#winners figure"))
    assert mine == whole


def test_halves_are_rounded_as_in_tables(visit, folder):
    times = [1015, 1025, 22_450, 22_550, 1_005_000, 1_015_000, 999_499, 999_500, 12_345_000, 7]
    rows = [
        {"id": f"r{i}", "policy": f"p{i}", "fits": True, "makespan_ns": ns, "peak_bytes": ns}
        for i, ns in enumerate(times)
    ]
    page = visit(write_table_page(TableView("halves", ("policy",), rows), folder / "halves.html"))
    shown = {
        line.split("\t")[0].strip(): line.split("\t")[2:4] for line in page.locator("#runs tbody tr").all_inner_texts()
    }
    assert {name: [text.strip() for text in texts] for name, texts in shown.items()} == {
        row["policy"]: [size(row["peak_bytes"]), clock(row["makespan_ns"])] for row in rows
    }


def test_long_names_break_within_the_window(visit, step_log, folder):
    name = "mypolicies.py:" + "AVeryLongNameThatSomebodyMightReallyUseInAPaper" * 2
    rows = [
        {"id": f"{name}{i}", "policy": f"{name}{i}", "fits": True, "makespan_ns": 10**9 + i, "peak_bytes": 10**9}
        for i in range(3)
    ]
    view = TableView("a comparison", ("policy",), rows, notes=[name], caution=[f"policy '{name}': not repeated"])
    page = visit(write_table_page(view, folder / "long.html"), size=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    summary = {
        **summarize(step_log).as_dict(),
        "fits": False,
        "refusal": "out_of_memory",
        "error": f"op '{name}' needs",
    }
    view = view_of(step_log, title=name, summary={**summary, "full": None})
    page = visit(write_run_page(view, folder / "long_run.html"), size=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_figures_stay_within_their_card_on_a_phone(visit, step, study):
    page = visit(step, size=PHONE)
    out = """() => [...document.querySelectorAll('.pairs dd, .pairs dt')].filter((each) => {
      const card = each.closest('.card').getBoundingClientRect();
      const range = document.createRange();
      range.selectNodeContents(each);
      return range.getBoundingClientRect().right > card.right - 10;
    }).map((each) => each.textContent)"""
    assert page.evaluate(out) == []


def test_a_logarithmic_axis_says_so(visit, folder):
    rows = [
        {"id": f"{batch}{i}", "policy": f"p{i}", "batch": batch, "fits": True, "makespan_ns": ns, "peak_bytes": 10**9}
        for batch, times in ((1, (10**6, 10**7)), (2, (10**6, 10**6 + 10**5)))
        for i, ns in enumerate(times)
    ]
    path = write_table_page(TableView("scales", ("policy", "batch"), rows), folder / "scales.html")
    page = visit(path, script=Path(__file__).with_name("looks.js"))
    pictures = page.evaluate("() => [...document.querySelectorAll('#scatter .panels canvas')].map((c) => drawnOn(c))")
    texts = [{one["text"] for one in picture["texts"]} for picture in pictures]
    assert [{"time of an iteration", "time of an iteration, logarithmic"} & said for said in texts] == [
        {"time of an iteration, logarithmic"},
        {"time of an iteration"},
    ]


def test_an_unknown_run_leads_back_to_the_table(visit, many):
    page = visit(many[0])
    page.evaluate("location.hash = '#run=nobody'")
    page.wait_for_function("() => document.querySelector('h1').innerText === 'No such run'")
    page.locator(".way a").click()
    page.wait_for_function("() => document.querySelector('h1').innerText === 'a study'")


def test_a_comparison_has_neither_map_nor_curves(visit, step_log, folder):
    rows = [
        {"id": f"r{i}", "policy": f"p{i}", "fits": True, "makespan_ns": 10**9 + i, "peak_bytes": 10**9} for i in (1, 2)
    ]
    page = visit(write_table_page(TableView("a comparison", ("policy",), rows), folder / "neither.html"))
    assert page.locator("#winners, #overhead").count() == 0


# ---- names that mean ill -------------------------------------------------------------------------


def test_names_from_a_file_are_shown_and_not_run(visit, drawn_log, folder):
    name = "</script><img src=x onerror='window.pwned=1'>"
    b = TraceBuilder({"model": name})
    x = b.tensor(name, 2**20, "input")
    b.op(name, "matmul", reads=[x], writes=[b.tensor("y", 2**20)])
    intervals = np.array([[0, 10, 0, 0, 0, 0, -1, 0, 0]], np.int64)
    changes = np.array([[0, 0, 2**20, 0, -1, 0], [0, 0, 2**20, 1, 0, 1]], np.int64)
    log = replace(drawn_log, trace=b.build(), intervals=intervals, changes=changes, end=10)
    view = view_of(log, title=name, footer=Footer(log.platform, workload=name, command=name), doc=name)
    page = visit(write_run_page(view, folder / "mean.html"))
    at(page, ".area", 0.5)
    assert told(page)[0] == name
    assert page.locator("h1").inner_text() == name
    assert name in alive(page)
    table = TableView(name, ("policy", name), [{"id": name, "policy": name, name: name, "fits": False, "error": name}])
    other = visit(write_table_page(table, folder / "mean_table.html"))
    assert other.locator("#runs tbody a").inner_text().strip() == name
    other.locator("#runs tbody a").click()
    other.wait_for_selector(".pairs")
    for each in (page, other):
        assert each.evaluate("window.pwned") is None
        assert each.locator("img").count() == 0
