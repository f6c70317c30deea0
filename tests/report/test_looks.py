"""What a person sees of a report page: text that can be read, nothing cut or covered, everything reached by keys alone.

`looks.js` finds the faults in a real browser: contrast from the colours as drawn (WCAG 2.2 asks 4.5 : 1 of normal text;
here of all text, of pictures too), text that is cut or lies on other text, and in pictures text on a line or a marker.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sim.report.page import TableView, write_table_page
from tests.report.conftest import PHONE, view_of

LOOKS = Path(__file__).with_name("looks.js")
WIDE = {"width": 1400, "height": 1000}
SIZES = pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desktop", "phone"])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


def looks(page, of="looks"):
    page.wait_for_timeout(200)  # what is drawn in later frames
    return page.evaluate(f"{of}()")


def comparison(count, seed=1, *, crowded=False):
    """Rows of a comparison with a budget: many close to it, as planners that use what they have are."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        peak = int(draw.choice([8e9, 7.99e9, 7.9e9, 5e9 + 3e9 * draw.random()]))
        took = int(1e8 * (1 + draw.choice([0.01, 0.3] if crowded else [0.01, 0.3, 1, 9]) * draw.random()))
        row = {"id": f"run{i}", "policy": f"policy_{i}" + "_of_many_words" * (i % 3 == 2), "fits": True}
        row |= {"makespan_ns": took, "peak_bytes": peak, "devices": 1, "capacity_bytes": 8 * 10**9}
        rows.append(row | {"fidelity": draw.choice(["code", "equations", "reconstruction"])})
    misfit = {"error": "op 'loss' needs 100 B in 'hbm' for reading 'x'; 7 B are free " * 3, "floor_bytes": 9 * 10**9}
    return [*rows, {"id": "misfit", "policy": "misfit", "fits": False} | misfit]


@pytest.fixture(scope="module")
def compared(step_log, folder):
    rows = comparison(14)
    runs = {"run0": view_of(step_log, title="policy_0")}
    view = TableView("a comparison", ("policy",), rows, platforms=[step_log.platform], runs=runs, notes=["a note"],
                     command="tiersim compare --profile bench --model gpt2")  # fmt: skip
    return write_table_page(view, folder / "compared.html")


@SCHEMES
@SIZES
@pytest.mark.parametrize("which", ["drawn", "step", "short", "many", "study", "compared"])
def test_all_text_can_be_read(visit, request, which, size, scheme):
    made = request.getfixturevalue(which)
    page = visit(made[0] if which in ("many", "study") else made, size=size, scheme=scheme, script=LOOKS)
    assert looks(page) == []


@SCHEMES
@SIZES
def test_all_text_can_be_read_whatever_is_open_or_off(visit, compared, size, scheme):
    page = visit(compared, size=size, scheme=scheme, script=LOOKS)
    page.locator(".toggles button").nth(1).click()
    page.locator("#runs thead button").nth(2).click()
    page.locator(".picker summary").click()
    assert looks(page) == []
    page.keyboard.press("Escape")
    assert page.locator(".picker[open]").count() == 0
    page.get_by_label("Filter the rows").fill("nothing has this name")
    assert looks(page) == []
    page.evaluate("location.hash = '#run=misfit'")
    page.wait_for_selector(".pairs")
    assert looks(page) == []
    page.evaluate("location.hash = '#run=run0'")
    page.wait_for_selector("#timeline")
    page.get_by_label("Zoom in").click()
    page.locator(".area").focus()
    page.keyboard.press("ArrowRight")
    box = page.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 90)
    assert looks(page) == []


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("apart", [0, 3e-6, 4e-3])
def test_the_axes_of_runs_that_nearly_equal_each_other_have_no_text_twice(visit, folder, size, apart):
    """Planners that use the memory that they have: their peaks differ by bytes."""
    rows = [
        {"id": f"run{i}", "policy": f"policy_{i}", "fits": True, "makespan_ns": int(1e9 * (1 + apart * i)),
         "peak_bytes": int(1e9 * (1 - apart * i)), "devices": 1, "capacity_bytes": 10**9}
        for i in range(4)
    ]  # fmt: skip
    made = write_table_page(TableView("a comparison", ("policy",), rows), folder / f"equal-{apart}.html")
    page = visit(made, size=size, script=LOOKS)
    assert looks(page, "canvasFaults") == []
    told = [text["text"] for text in page.evaluate("drawnOn(document.querySelector('.scatter canvas'))")["texts"]]
    ticks = [text for text in told if text[0].isdigit()]
    assert len(ticks) > 4
    assert len(ticks) == len(set(ticks))


@pytest.mark.parametrize("count", [3, 8, 16, 25, 40, 60])
def test_no_name_lies_on_a_line_a_marker_or_a_name(visit, folder, count):
    """The front and the budget are drawn, which many runs touch; small comparisons name their runs."""
    for seed, crowded in ((1, False), (2, True), (3, False)):
        rows = comparison(count, seed, crowded=crowded)
        made = write_table_page(TableView("a comparison", ("policy",), rows), folder / f"{count}-{seed}.html")
        page = visit(made, size=WIDE, script=LOOKS)
        assert looks(page, "canvasFaults") == []
        drawn = page.evaluate("drawnOn(document.querySelector('.scatter canvas'))")
        told = [text["text"] for text in drawn["texts"]]
        assert any(text.startswith("budget 8 GB") for text in told)
        assert drawn["lines"]
        names = [row["policy"] for row in rows if row["fits"]]
        fastest = min((row for row in rows if row["fits"]), key=lambda row: (row["makespan_ns"], row["peak_bytes"]))
        if count <= 40:
            assert fastest["policy"] in told
        if count <= 16:  # in a crowd one name in ten may not be drawn; the box beside the pointer tells it
            assert len(set(names) - set(told)) <= count // 10


def test_what_lies_on_another_or_is_faint_or_cut_would_be_found(browser, tmp_path):
    """The finder itself, on a page with one fault of each kind."""
    path = tmp_path / "bad.html"
    path.write_text(
        """<!doctype html><style>:root { --line: #eee } body { margin: 0; background: #fff; color: #000 }</style>
        <p style="color: #999">faint</p><p><span style="opacity: .4">see-through</span></p>
        <p style="width: 40px; overflow: hidden; white-space: nowrap">much too long for its box</p>
        <p style="position: absolute; top: 300px">below</p><p style="position: absolute; top: 304px">above</p>
        <input placeholder="hint" style="color: #000"><style>input::placeholder { color: #ccc }</style>
        <div style="width: 3000px">far</div><canvas width="300" height="100"></canvas><script>
        const c = document.querySelector("canvas").getContext("2d");
        c.font = "12px sans-serif";
        c.fillStyle = "#00aa77"; c.fillRect(0, 0, 60, 40);
        c.fillStyle = "#fff"; c.fillText("on green", 4, 20);
        c.fillStyle = c.strokeStyle = "#000";
        c.beginPath(); c.moveTo(80, 16); c.lineTo(200, 16); c.stroke(); c.fillText("struck", 100, 20);
        c.beginPath(); c.arc(120, 60, 5, 0, 7); c.fill(); c.fillText("hidden", 110, 64);
        c.fillText("one", 200, 60); c.fillText("two", 204, 62); c.fillText("outside", 280, 90);
        </script>""",
        encoding="utf-8",
    )
    page = browser.new_page(viewport={"width": 800, "height": 600})
    page.add_init_script(path=LOOKS)
    page.goto(path.as_uri())
    found = page.evaluate("looks()")
    page.close()
    expected = (
        *(
            '"faint"',
            '"see-through"',
            'cut: "much too long',
            'overlap: "below" and "above"',
            '"hint" in an empty',
            "wide:",
        ),
        *('"on green" in a picture', 'line through "struck"', 'marker under "hidden"', 'overlap: "one" and "two"'),
        *('cut: "outside"', 'contrast 1.00: "hidden"'),
    )
    assert [text for text in expected if not any(text in fault for fault in found)] == []
    assert len(found) == len(expected), found


# ---- keys alone ----------------------------------------------------------------------------------


def stops(page):
    """What Tab reaches from the beginning of the page, in order, until it leaves it."""
    found = []
    page.evaluate("document.body.tabIndex = -1; document.body.focus(); scrollTo(0, 0)")
    for _ in range(400):
        page.keyboard.press("Tab")
        now = page.evaluate("focused()")
        if now is None or (found and now["number"] == found[0]["number"]):
            break
        found.append(now)
    return found


CONTROLS = "a[href], button, input, summary, [tabindex='0'], select, textarea"


@SIZES
@pytest.mark.parametrize("which", ["step", "compared"])
def test_tab_reaches_every_control_in_order_and_shows_where_it_is(visit, request, which, size):
    page = visit(request.getfixturevalue(which), size=size, script=LOOKS)
    page.locator(".picker summary").click() if which == "compared" else None
    wanted = page.evaluate(
        f"""[...document.querySelectorAll("{CONTROLS}")].filter((e) => e.checkVisibility() && !e.disabled)
        .map((e) => [...document.querySelectorAll('*')].indexOf(e))"""
    )
    reached = stops(page)
    assert [stop["what"] for stop in reached if stop["faults"]] == []
    assert [stop["number"] for stop in reached] == wanted
    assert len(wanted) > 20


def test_each_control_does_by_key_what_it_does_by_mouse(visit, compared):
    page = visit(compared, script=LOOKS)

    def press(locator, key="Enter"):
        locator.focus()
        page.keyboard.press(key)

    toggle = page.locator(".toggles button").first
    press(toggle, "Space")
    assert toggle.get_attribute("aria-pressed") == "false"
    press(page.locator(".picker summary"))
    press(page.locator(".picker").get_by_label("devices"), "Space")
    assert "devices" in page.locator("#runs thead").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".picker[open]").count() == 0
    assert page.evaluate("document.activeElement.matches('.picker summary')")
    press(page.locator("#runs tbody a", has_text="policy_1").first)
    page.wait_for_selector(".pairs")
    press(page.get_by_role("link", name="a comparison"))
    page.wait_for_selector("#runs")
    press(page.locator("#runs tbody a", has_text="policy_0").first)
    page.wait_for_selector("#timeline")
    press(page.locator(".u-over"))
    page.wait_for_function("() => document.querySelector('.alive h2').textContent !== 'Alive at the peak'")
    press(page.get_by_role("button", name="back to the peak"))
    page.wait_for_function("() => document.querySelector('.alive h2').textContent === 'Alive at the peak'")
