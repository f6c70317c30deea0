"""docs/offload.md: its blocks are what the rows say, its sentences hold in them, and rows are what runs come to."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.offload_page import cases, measure, published, text
from scripts.offload_page.bound import bound
from scripts.offload_page.pinned import pinned_on_demand
from scripts.offload_page.rules import rule_of
from sim import load_profile, simulate
from sim.engine.replay import replay
from sim.plan import Move, Online, Plan
from sim.policies import names, policy_class
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool():
    """The script that writes the page."""
    return importlib.import_module("scripts.make_offload")


@pytest.fixture(scope="module")
def rows(tool):
    return tool.load()


def test_the_page_is_what_the_rows_say(tool, rows):
    assert tool.page(rows) == tool.PAGE.read_text(encoding="utf-8"), "run python scripts/make_offload.py"


def test_an_altered_row_alters_the_page(tool, rows):
    page = tool.page(rows)
    for part in rows:
        other = copy.deepcopy(rows)
        for row in other[part]:
            row["time_ns"] = row["time_ns"] and row["time_ns"] * (100 if row["policy"] == "swap_all" else 50)
        assert tool.page(other) != page, part


def test_every_policy_of_the_rows_is_one_of_the_registry(rows):
    assert {row["policy"] for part in rows.values() for row in part} <= set(names())


def test_a_policy_without_rows_is_named(rows):
    other = {part: [row for row in found if row["policy"] != "vdnn"] for part, found in rows.items()}
    assert "vdnn" in text.unmeasured(other)
    assert "`vdnn`" in text.blocks(other)["not measured"]


def test_no_run_is_faster_than_the_bound_of_its_own_ops(rows):
    for part in rows.values():
        for row in part:
            if row["time_ns"] is not None and not row["recompute_ns"]:
                assert row["time_ns"] >= row["own_ns"], row


def test_each_policy_that_is_slower_than_swap_all_has_its_rule(rows):
    unsaid = [name for name in text.slower_than_swap_all(rows) if not rule_of(name)]
    assert not unsaid, "mend these, or say in their docstrings where and why they are slower than `swap_all`"


WAITED_FOR = {
    "wait": "vdnn cdma cswap save_on_cpu offload_activations layer_offload autoswap slc_cache zero_infinity",
    "engine": "zero_offload stronghold patrickstar",
    "transfer": "sentinel vdnn_pp lru_tiering uvm",
    "space": "lru_tiering uvm",
}
"""By cause of the longest stall the policies whose rule it is: a planned wait for a copy, the CPU, a read, space."""


def beside_swap_all(rows):
    """Each row with the time that `swap_all` takes there."""
    yield from ((row, row["swap_all_ns"]) for row in rows["own"])
    for part, keys in (
        ("transformers", ("job", "budget_bytes")),
        ("ablation", ("factor", "value")),
        ("platforms", ("profile", "share")),
    ):
        other = {tuple(r[key] for key in keys): r["time_ns"] for r in rows[part] if r["policy"] == "swap_all"}
        yield from ((row, other.get(tuple(row[key] for key in keys))) for row in rows[part])


def test_where_a_policy_is_slowest_beside_swap_all_it_waits_for_what_its_rule_says(rows):
    worst = {}
    for row, other in beside_swap_all(rows):
        if row["time_ns"] and other and row["time_ns"] > 1.0005 * other and row["policy"] != "full_recompute":
            worst[row["policy"]] = max(
                worst.get(row["policy"], (0, row)), (row["time_ns"] / other, row), key=lambda x: x[0]
            )
    for name, (_, row) in worst.items():
        assert name in WAITED_FOR[max(row["stalls"], key=row["stalls"].get)].split()


# ---- each sentence with a number, counted another way --------------------------------------------------


def overhead(row):
    return 100 * (row["time_ns"] / row["whole_ns"] - 1)


def test_the_fastest_of_each_budget_are_named(rows):
    said = text.said(rows)
    for key, job in cases.TRANSFORMERS.items():
        if key not in {row["job"] for row in rows["transformers"]}:
            continue
        line = next(line for line in said.splitlines() if job.title in line)
        for budget in {row["budget_bytes"] for row in rows["transformers"] if row["job"] == key}:
            fits = [
                row
                for row in rows["transformers"]
                if row["job"] == key
                and row["budget_bytes"] == budget
                and row["time_ns"]
                and row["policy"] != "full_recompute"
            ]
            if fits:
                best = min(fits, key=lambda row: (row["time_ns"], row["policy"]))
                assert f"at {budget / 1e9:.3g} GB `{best['policy']}` {overhead(best):+.0f}"[:-2] in line
            else:
                assert f"nothing fits {budget / 1e9:.3g} GB" in line


def test_what_moves_least_and_most_of_what_must_is_said(rows):
    ratios = [
        (row["back"] / row["must_back"], row["policy"], f"{row['budget_bytes'] / 1e9:.3g} GB")
        for row in rows["transformers"]
        if row["job"] == "gpt2" and row["time_ns"] and row["must_back"] and row["back"]
        if policy_class(row["policy"]).manages == ("activations",)
    ]
    line = next(line for line in text.said(rows).splitlines() if "what has to move" in line)
    (low, least, tight), (high, most, ample) = min(ratios), max(ratios)
    assert f"`{least}` moves {low:.2f} times as much at {tight}" in line
    assert f"`{most}` {high:.1f} times at {ample}" in line


def test_how_many_are_slower_is_said(rows):
    line = next(line for line in text.said(rows).splitlines() if "Slower than" in line)
    slower = {
        row["policy"]
        for row, other in beside_swap_all(rows)
        if row["time_ns"] and other and row["time_ns"] > 1.0005 * other and row["policy"] != "full_recompute"
    }
    assert f"{len(slower)} of {len(rows['own']) - 1} policies" in line


def test_what_changes_most_with_each_factor_is_said(rows):
    lines = dict(line[4:].split(".** ", 1) for line in text.degrading(rows["ablation"]).splitlines())
    assert set(lines) == {row["factor"] for row in rows["ablation"]}
    for factor, line in lines.items():
        spread = {}
        for row in rows["ablation"]:
            if row["factor"] == factor and row["time_ns"] and row["policy"] != "full_recompute":
                spread.setdefault(row["policy"], []).append(overhead(row))
        width = {name: max(values) - min(values) for name, values in spread.items()}
        worst = max(width, key=lambda name: (width[name], name))
        if max(width.values()) <= 0.5:
            assert line == f"None of {len(width)} changes by more than half a point."
            continue
        assert f"`{worst}` changes most" in line
        assert f"{sum(one <= 0.5 for one in width.values())} of {len(width)} by half a point" in line


def test_the_value_of_the_machine_itself_is_marked():
    """Those of a100_80_sxm, as its file states them: 25 GB/s, 15 us, one sharer and copy engine, pinned memory."""
    marked = {name: set(cases.own_values(name)) for name in cases.factors()}
    assert {name: values for name, values in marked.items() if values} == {
        "rate, GB/s": {"25"},
        "out over in": {"1"},
        "duplex": {"0.95, 0.47"},
        "fixed time, us": {"15"},
        "sharers": {"1"},
        "host memory": {cases.PINNED},
        "copy engines": {"1"},
    }


def test_where_offloading_pays_is_said(rows):
    lines = text.platforms_said(rows["platforms"]).splitlines()
    for share, line in zip(measure.SHARES, lines, strict=True):
        better = lost = 0
        for profile in {row["profile"] for row in rows["platforms"]}:
            here = [row for row in rows["platforms"] if row["profile"] == profile and row["share"] == share]
            times = [row["time_ns"] for row in here if row["time_ns"] and row["policy"] != "full_recompute"]
            redo = [row["time_ns"] for row in here if row["time_ns"] and row["policy"] == "full_recompute"]
            pays = bool(times) and (not redo or min(times) < redo[0])
            better, lost = better + pays, lost + (not pays)
            assert (f"`{profile}`" in line) != pays
        assert f"{100 * share:.0f} % of the memory" in line
        assert f"on {better} of {better + lost} machines" in line


def test_a_copy_into_memory_that_is_not_pinned_locks_it_first():
    """Outs of 10 and 20 bytes take as many ns, and at 2 bytes per ns half as long again for the locks."""
    b = TraceBuilder()
    x, y, z, end = (b.tensor(name, size) for name, size in (("x", 0), ("y", 10), ("z", 20), ("end", 0)))
    b.op("start", writes=[x], duration=1)
    b.op("f", reads=[x], writes=[y], duration=10)
    b.op("g", reads=[x], writes=[z], duration=50)
    b.op("h", reads=[y, z], writes=[end], duration=10)
    plan = Plan(b.build(outputs=[end]), (Move(y, "host", after=1), Move(z, "host", after=2)), online=MovesNothing)
    on = machine()
    on = replace(on, tiers=(on.tiers[0], replace(on.tiers[1], pinning=2 * 10**9)))
    for each, out in ((plan, [(11, 21), (61, 81)]), (pinned_on_demand(plan, on), [(11, 26), (61, 91)])):
        moves = replay(each, on).events.query("lane == 'd2h'")
        assert list(zip(moves.start_ns, moves.end_ns)) == out
    asked = pinned_on_demand(replace(plan, actions=(), online=MovesY), on).online()
    assert [move.delay for move in asked.before(2, None)] == [5]


class MovesNothing(Online):
    """An online part that decides nothing."""


class MovesY(Online):
    """One that moves y before each op."""

    def before(self, op, memory):
        return [Move("y", "host")]


def test_what_pinning_takes_is_the_bytes_out_at_the_rate_of_the_profile(rows):
    shown = {line.split("`")[1]: line.split(" | ")[2:] for line in text.pinning_table(rows["own"]).splitlines()[2:]}
    assert set(shown) & {"save_on_cpu", "uvm", "flashneuron", "gist", "pooled_memory", "superoffload"} == set()
    for row in rows["own"]:
        if row["policy"] in shown:
            _, seconds, iteration, share = (cell.split()[0] for cell in shown[row["policy"]])
            seconds, iteration = float(seconds), float(iteration)
            assert seconds == pytest.approx(row["out"] / 2.76e9, rel=0.06)
            assert iteration == pytest.approx(row["time_ns"] / 1e9, rel=0.06)
            # locks run beside the device, one behind the other; what comes from a drive locks memory, too
            if share != "✗" and row["policy"] != "zero_infinity":
                assert 0 <= float(share) <= 100 * row["out"] / 2.76 / row["time_ns"] + 0.6


# ---- measuring ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["swap_all", "vdnn"])
def test_a_row_is_what_a_run_comes_to(name, rows):
    (kept,) = [row for row in rows["own"] if row["policy"] == name]
    (row,) = measure.own(name)
    assert json.loads(json.dumps(row)) == kept


def test_what_was_published_of_zero_offload_is_what_runs_come_to(rows):
    assert json.loads(json.dumps(published.rows("zero_offload"))) == rows["published"]
    assert published.rows("vdnn") == []


def test_an_update_after_two_steps_is_waited_for_once():
    row = {"time_ns": 30_000, "update_ns": 10_000, "flops": 40_000_000, "recomputed_flops": 10_000_000}
    assert published.tflops(row, recomputed=False) == pytest.approx(4 / 3)
    assert published.tflops(row, recomputed=True) == pytest.approx(5 / 3)
    assert published.tflops(row, recomputed=False, steps=2) == pytest.approx(8 / 5)


def test_a_policy_alone_is_measured_and_the_others_kept(monkeypatch, rows):
    found = {"own": [{"policy": "vdnn", "new": True}], "transformers": [], "ablation": [], "platforms": []}
    monkeypatch.setattr(measure, "own", lambda name: found["own"])
    for part in ("on_transformer", "ablation", "on_platforms"):
        monkeypatch.setattr(measure, part, lambda *_: [])
    saved = []
    measure.measure(["vdnn"], rows, saved.append, lambda line: None)
    new = saved[-1]
    assert [row for row in new["own"] if row["policy"] == "vdnn"] == found["own"]
    assert [row for row in new["own"] if row["policy"] != "vdnn"] == [r for r in rows["own"] if r["policy"] != "vdnn"]
    assert new["ablation"] == [row for row in rows["ablation"] if row["policy"] != "vdnn"]


def test_a_word_that_is_no_policy_is_refused(tool):
    assert "did you mean" in tool.misspelt(["--measure", "vdn"]) or "vdnn" in tool.misspelt(["--measure", "vdn"])
    assert tool.misspelt(["vdnn"]) == "a policy is named after --measure"
    assert "--check" in tool.misspelt(["--chek"])
    assert tool.misspelt(["--measure", "vdnn"]) == ""


# ---- the bound ---------------------------------------------------------------------------------------


def two_halves() -> Trace:
    """Four results of 100 bytes; forward 10 ns per op, backward 20."""
    b = TraceBuilder()
    made = [b.tensor("x", 0, "input")]
    for i in range(4):
        made.append(b.tensor(f"a{i}", 100))
        b.op(f"f{i}", reads=made[-2:-1], writes=made[-1:], duration=10)
    gradient = b.tensor("g", 0, "temporary")
    b.op("loss", "loss", reads=made[-1:], writes=[gradient], duration=1)
    for i in reversed(range(4)):
        after = b.tensor(f"d{i}", 0, "temporary")
        b.op(f"f{i}.bwd", reads=[gradient, made[i + 1]], writes=[after], phase="backward", duration=20)
        gradient = after
    return b.build()


def test_the_bound_by_hand():
    # at the loss all four results are to be read later: with space for two, 200 bytes have left and 200 come back
    least = bound(two_halves(), machine(rate=10**9), 200)
    assert (least.out, least.back) == (200, 200)
    # while the backward op of f3 runs, for 20 ns, 200 bytes are still away, 1 ns each; they return once it has ended
    assert least.ns == 200 + 20 + 200
    assert bound(two_halves(), machine(rate=10**10), 200).ns == 4 * 10 + 1 + 4 * 20
    assert bound(two_halves(), machine(rate=10**9), 400).ns == 4 * 10 + 1 + 4 * 20
    assert bound(two_halves(), machine(rate=10**9), 200, ratio=0.5).ns == 100 + 20 + 100


def test_the_bound_of_plans_that_begin_with_all_on_the_device():
    b = TraceBuilder()
    x, w, y = b.tensor("x", 0, "input"), b.tensor("w", 100, "weight"), b.tensor("y", 60)
    b.op("f", reads=[x], writes=[y], duration=10)
    b.op("g", reads=[y, w], writes=[b.tensor("z", 0)], duration=10)
    trace = b.build()
    # beside y there is space for 40 bytes: w, 100, is away while f runs, and returns after it
    assert [bound(trace, machine(rate=10**9), 100, begins_there=there).out for there in (False, True)] == [0, 60]


def test_the_best_plan_of_a_small_chain_meets_the_bound():
    least = bound(two_halves(), machine(rate=10**10), 250)
    took = simulate(two_halves(), machine(250, rate=10**10), "autoswap").log.end
    assert least.ns <= took <= least.ns + 40


def test_every_machine_of_the_table_has_a_host():
    for name in cases.platforms():
        assert load_profile(name).host is not None
        assert text.balance(name) > 0
