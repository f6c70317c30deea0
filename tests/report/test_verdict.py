"""The verdict says in two lines what the rows of a comparison say."""

from dataclasses import replace

import pytest

from sim.hardware.profile import load_profile
from sim.report.cells import failure_lines, left_out_lines, state_lines
from sim.report.footer import Footer, footer_lines
from sim.report.table import comparison_text
from sim.report.verdict import difference, does, kind, verdict_lines, winners_lines

MS, GB = 10**6, 10**9


def row(policy, ms, peak=5 * GB, *, recompute=0, moved=0, stall=0, **more):
    return {
        "policy": policy, "fits": True, "makespan_ns": ms * MS, "peak_bytes": peak, "recompute_ns": recompute * MS,
        "moved_bytes": {"d2h": moved, "h2d": 0}, "stall_ns": {"transfer": stall * MS}, "overhead": ms / 100 - 1, **more,
    }  # fmt: skip


def misfit(policy, floor=None, full=("hbm",), **more):
    return {"policy": policy, "fits": False, "floor_bytes": floor, "full": full, "error": "too large", **more}


@pytest.mark.parametrize(
    ("one", "what", "said"),
    [
        (row("a", 100), "neither", "everything stays where it is: nothing is recomputed, nothing copied"),
        (row("a", 130, recompute=30), "recomputation", "it recomputes for 30 ms and copies nothing"),
        (row("a", 100, moved=2 * GB), "copies", "it copies 2 GB without waiting and recomputes nothing"),
        (row("a", 100, moved=GB, stall=7), "copies", "it copies 1 GB, waits 7 ms for that and recomputes nothing"),
        (row("a", 9, recompute=2, moved=GB), "both", "it recomputes for 2 ms and copies 1 GB without waiting"),
        ({"policy": "a", "fits": True, "makespan_ns": 5, "peak_bytes": 7}, "", ""),
    ],
)
def test_what_a_run_does(one, what, said):
    assert (kind(one), does(one)) == (what, said)


def test_the_fastest_what_is_as_good_and_the_first_of_each_other_kind():
    rows = [
        row("slow_recompute", 150, recompute=50), row("recompute", 130, recompute=30), row("keep", 100, moved=3),
        row("near", 105, moved=GB, stall=5), row("mixed", 111, recompute=2, moved=GB, stall=9), misfit("none"),
    ]  # fmt: skip
    first, second = verdict_lines(rows, 0.1)
    assert first == (
        "keep is the fastest: 100 ms, as with unlimited memory, peak 5 GB; it copies 3 B without waiting and "
        "recomputes nothing."
    )
    assert second == (
        "near can't be told from it (within the model's own error of 10 %); the fastest that recomputes and copies is "
        "mixed, +11 %: 9 ms more waiting for copies and memory; the fastest that only recomputes is recompute, +30 %: "
        "30 ms more recomputation."
    )  # fmt: skip


def test_one_policy_has_one_line_and_the_only_one_that_fits_is_called_so():
    assert verdict_lines([row("a", 120)]) == [
        "a: 120 ms, 20 % above that with unlimited memory, peak 5 GB; everything stays where it is: nothing is "
        "recomputed, nothing copied."
    ]
    (line,) = verdict_lines([row("a", 90), misfit("b")])
    assert line.startswith("a is the only one that fits: 90 ms, 10 % below that with unlimited memory")


def test_where_nothing_fits_the_least_need_is_named():
    assert verdict_lines([misfit("a", 9 * GB), misfit("b", 7 * GB), misfit("c")]) == [
        "None of 3 policies fits.",
        "The smallest budget known to fit is 7 GB, of b. Compositions of policies, and the nearest job that fits: "
        "tiersim advise.",
    ]
    state = [misfit(name, refusal="state", error="weights alone take 9 GB of 'hbm'") for name in "ab"]
    assert verdict_lines(state)[0] == "None of 2 policies fits: weights alone take 9 GB of 'hbm'."
    assert verdict_lines([*state, misfit("c")])[0] == "None of 3 policies fits."
    assert verdict_lines([misfit("c")]) == ["c does not fit."]
    assert verdict_lines([{"policy": "a", "fits": None, "error": "needs a host"}]) == []


def test_of_several_jobs_it_counts_in_how_many_each_policy_is_the_fastest():
    jobs = [
        [row("a", 100), row("b", 102), misfit("c")],
        [row("a", 100), row("b", 150), row("c", 120)],
        [row("b", 90), row("a", 91)],
        [misfit("a"), misfit("b", 9 * GB)],
    ]
    assert winners_lines(jobs, 0.05) == [
        "a is the fastest in 2 of 4 jobs, b in 1.",
        "Not told from the fastest (within the model's own error of 5.0 %): b in 1, a in 1.",
        "No policy fits in 1 of 4 jobs.",
    ]
    assert winners_lines([[row("a", 100)], [row("a", 200)]], 0.05) == []
    assert winners_lines([[row("a", 100)], [row("b", 200)]], 0) == ["a is the fastest in 1 of 2 jobs, b in 1."]


def test_what_costs_more_is_named_largest_first_and_trifles_are_not():
    fast, slow = row("a", 100, stall=5), row("b", 200, recompute=80, stall=24, codec_ns=MS)
    assert difference(fast, slow) == ["80 ms more recomputation", "19 ms more waiting for copies and memory"]
    assert difference(slow, fast) == ["80 ms less recomputation", "19 ms less waiting for copies and memory"]


def test_misfits_of_one_cause_share_a_line_and_all_others_keep_theirs():
    rows = [
        misfit("a", 9 * GB), misfit("b"), misfit("c", 9 * GB), misfit("d", 8 * GB, full=("host",)),
        {"policy": "e", "fits": None, "error": "needs a host"}, misfit("f", refusal="state", error="alone too large"),
    ]  # fmt: skip
    assert failure_lines(rows, brief=True) == [
        "d: does not fit: fits from 8 GB; host full; too large",
        "e: not run: needs a host",
        "hbm full: a, c: fits from 9 GB; b: no budget is known to fit",
    ]
    said = failure_lines(rows)
    assert len(said) == len(rows) - 1
    assert state_lines(rows) == ["alone too large: f leaves them there and is not run"]
    assert comparison_text(rows).startswith("alone too large: f leaves them there and is not run\n\npolicy")
    assert failure_lines(rows[:2], brief=True) == failure_lines(rows[:2])


def test_policies_that_were_left_out_for_one_reason_share_a_line_and_no_name_stands_twice():
    assert left_out_lines({"a": "plans slowly", "b": "b: needs a drive", "c": "plans slowly"}) == [
        "not run: a, c: plans slowly",
        "not run: b: needs a drive",
    ]


def test_notes_of_the_machine_are_counted_or_printed():
    platform = replace(load_profile("mt3000_survey"), budget=7 * GB)
    brief, whole = (footer_lines(Footer(platform, brief=each)) for each in (True, False))
    assert f"{len(platform.notes)} notes on how this machine was described: --notes" in brief
    assert [line for line in whole if line not in brief] == list(platform.notes)


def test_a_time_that_is_compared_with_another_baseline_says_so():
    own = {**row("a", 114), "overhead": 0.14, "unlimited_run": "captured launches"}
    assert "14 % above its own time with unlimited memory" in verdict_lines([own])[0]
    assert "14 % above that with unlimited memory" in verdict_lines([{**own, "unlimited_run": "keep_all"}])[0]
