"""Advice: what it names has been run, nothing it left out is better, and its sentences agree with its rows."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from sim.advice import advise
from sim.advice.answer import figures
from sim.advice.bench import STOPPED, pace_of
from sim.advice.candidates import candidates, lean, space
from sim.advice.ceiling import Ceiling, keeps_to_class
from sim.advice.goals import candidates_for, largest_batch, least_memory
from sim.advice.layouts import POLICIES, _worth, with_layout
from sim.advice.narrowing import Search, Way, by_ceiling, divisions
from sim.advice.question import Question
from sim.advice.reasons import FACTORS, _ladder, _uncertain, flips
from sim.advice.state import state_of
from sim.advice.trials import BOUND, Trials, best, fits, micro_batches, speed
from sim.errors import Infeasible, PolicyError, TiersimError, WorkloadError
from sim.experiment import simulate, unlimited
from sim.floors import largest_op
from sim.hardware.profile import load_profile
from sim.layout import Layout, lay_out
from sim.layout_search import Found, LayoutSearch, layouts
from sim.policies import load, names
from sim.report.error_bars import error_bar, error_lines, statement_errors
from sim.report.verdict import difference, kind
from sim.search import fits as it_fits
from sim.sweeps.execute import Job
from sim.trace.graph import Trace
from tests.test_cli import tiersim
from tests.test_compare import WAITS
from workloads import cnn, transformer

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 211,
}  # fmt: skip
AXES = {"sequence": 64, "precision": "amp_bf16"}
FEW = ("keep_all", "full_recompute", "swap_all", "selective_recompute")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def trace_of(config, **axes):
    return transformer(config, **{"batch": 4, **AXES, **axes})


def row(policy, time, *, recompute=0, moved=0, stall=0, peak=100, **more):
    """A row of a search, made by hand."""
    figures = {"recompute_ns": recompute, "moved_bytes": {"d2h": moved}, "stall_ns": {"transfer": stall}}
    return {"policy": policy, "status": "ok", "makespan_ns": time, "peak_bytes": peak, "codec_ns": 0, **figures, **more}


def test_the_state_of_adamw_is_sixteen_bytes_a_parameter(config):
    trace, platform = trace_of(config, precision="fp32"), load_profile("a100_40_pcie")
    layer = 12 * 64**2 + 13 * 64  # the matrices of a layer, its biases and norms
    parameters = 3 * layer + 2 * 64 + (211 + 64) * 64
    state = state_of(trace, platform)
    assert (state.weights, state.optimizer_state) == (4 * parameters, 8 * parameters)
    assert state.gradients == 4 * parameters
    assert state.bytes == 16 * parameters


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_gradients_that_are_added_up_are_whole_until_level_2_divides_them(config, zero, share):
    layout = {"dp": 2, "zero": zero, "micro_batches": 2}
    trace, platform = lay_out(trace_of(config, batch=8, precision="fp32"), "a100_80_sxm", layout)
    parameters = 3 * (12 * 64**2 + 13 * 64) + 2 * 64 + (211 + 64) * 64
    assert state_of(trace, platform).gradients == pytest.approx(4 * parameters / share, rel=0.01)


def test_what_leaves_more_state_than_the_memory_holds_is_no_candidate(config):
    trace, platform = trace_of(config), load_profile("a100_40_pcie")
    ample = state_of(trace, platform)
    held = ample.weights + ample.optimizer_state
    small = state_of(trace, platform.with_budget(held - 1))
    every = [name for part in candidates(ample) for name in part]
    left = [name for part in candidates(small) for name in part]
    assert {"keep_all", "full_recompute", "swap_all"} <= set(every) - set(left)
    assert left
    assert all(set(load(name).manages) & {"weights", "optimizer_state"} for name in left)
    for name in ("keep_all", "full_recompute", "swap_all"):  # none of them can run
        assert not it_fits(trace, platform, name, budget=held - 1)


def test_every_quick_policy_is_a_candidate_and_each_once(config):
    first, rest = candidates(state_of(trace_of(config), load_profile("a100_40_pcie")))
    assert len({*first, *rest}) == len(first) + len(rest)
    assert {name for name in names() if load(name).lossless and not load(name).slow} <= {*first, *rest}


def test_the_answer_was_run_and_repeats_and_is_the_best_of_its_candidates(config):
    trace = trace_of(config)
    budget = int(0.8 * simulate(trace, "mt3000_survey").summary()["peak_bytes"])
    advice = advise(config, "mt3000_survey", batch=4, budget=budget, policies=FEW, jobs=1, **AXES)
    assert advice.best is not None
    again = simulate(trace, "mt3000_survey", advice.best["policy"], budget=budget).summary()
    assert (again["makespan_ns"], again["peak_bytes"]) == (advice.best["makespan_ns"], advice.best["peak_bytes"])
    for name in FEW:
        try:
            other = simulate(trace, "mt3000_survey", name, budget=budget)
        except Infeasible:
            continue
        assert advice.best["makespan_ns"] <= 1.005 * other.log.end
    assert f"Use {advice.best['policy']} at batch 4" in advice.text()
    assert advice.best in advice.front
    assert {r["policy"] for r in advice.rows if "assumed" not in r} == set(FEW)


def test_a_part_of_the_peak_is_one_of_keeping_everything(config):
    peak = simulate(trace_of(config), "mt3000_survey").summary()["peak_bytes"]
    advice = advise(config, "mt3000_survey", batch=4, budget="50%", policies=["full_recompute"], jobs=1, **AXES)
    assert advice.question.budget == peak // 2
    with pytest.raises(TiersimError, match="needs a batch"):
        advise(config, "mt3000_survey", budget="50%", **AXES)


def test_the_largest_batch_fits_and_one_more_does_not(config):
    budget = 40_000_000
    advice = advise(config, "a100_40_pcie", goal="batch", budget=budget, policies=FEW, jobs=1, **AXES)
    batch = advice.best["batch"]
    some = [
        it_fits(trace_of(config, batch=b), "a100_40_pcie", name, budget=budget) for b in (batch + 1,) for name in FEW
    ]
    assert batch > 1
    assert not any(some)


def test_of_all_candidates_none_fits_one_sample_more(config):
    few = ("zero_offload + full_recompute", "full_recompute", "swap_all", "stronghold + full_recompute", "every_k")
    lean_ones = lean(few)
    assert lean_ones
    assert set(lean_ones) < set(few)
    advice = advise(config, "a100_40_pcie", goal="batch", budget=5_000_000, policies=few, jobs=1, **AXES)
    more = trace_of(config, batch=advice.best["batch"] + 1)
    assert not any(it_fits(more, "a100_40_pcie", name, budget=5_000_000) for name in few)
    fastest = max((row for row in advice.rows if fits(row)), key=speed)
    assert advice.also is None or speed(advice.also) == speed(fastest)


def test_beside_the_fastest_batch_stands_the_largest(config):
    advice = advise(config, "a100_40_pcie", budget=40_000_000, policies=FEW, jobs=1, **AXES)
    largest = advise(config, "a100_40_pcie", goal="batch", budget=40_000_000, policies=FEW, jobs=1, **AXES)
    assert (advice.also or advice.best)["batch"] == largest.best["batch"]
    if advice.also:
        assert f"Largest batch that fits: {advice.also['batch']}, with {advice.also['policy']}" in advice.text()


def test_of_equal_runs_the_simplest_is_on_the_front(config):
    advice = advise(config, "a100_40_pcie", batch=2, policies=("hybrid", "keep_all", "dtr"), jobs=1, **AXES)
    assert [row["policy"] for row in advice.front] == ["keep_all"]


def test_the_least_memory_is_near_what_no_candidate_fits(config):
    """With whatever number of micro-batches: brute force over all of them."""
    advice = advise(config, "a100_40_pcie", goal="memory", batch=4, policies=FEW, jobs=1, **AXES)
    top = advice.best
    traces = {count: trace_of(config, batch=4, micro_batches=count) for count in (1, 2, 4)}
    assert top["micro_batches"] > 1
    assert it_fits(traces[top["micro_batches"]], "a100_40_pcie", top["policy"], budget=top["peak_bytes"])
    less = int(0.98 * top["peak_bytes"])
    fitting = [(name, count) for name in FEW for count, trace in traces.items()
               if it_fits(trace, "a100_40_pcie", name, budget=less)]  # fmt: skip
    assert not fitting
    assert f"{top['policy']} in {top['micro_batches']} micro-batches" in advice.text()


def test_no_batch_that_was_left_out_is_faster(config):
    budget = 40_000_000
    advice = advise(config, "a100_40_pcie", budget=budget, policies=FEW, jobs=1, **AXES)
    for batch in (1, 2, 8, 32, 64, 128):
        for name in FEW:
            try:
                other = simulate(trace_of(config, batch=batch), "a100_40_pcie", name, budget=budget)
            except Infeasible:
                continue
            assert speed(advice.best) >= 0.98 * other.summary()["samples_per_s"], (batch, name)


def test_what_fits_one_sample_is_found_wherever_it_stands_among_the_candidates(config):
    state = state_of(trace_of(config, batch=1), load_profile("a100_40_pcie"))
    budget = state.weights + state.optimizer_state + state.gradients // 2  # gradients have to leave
    names = (*FEW, "zero_offload + full_recompute")
    advice = advise(config, "a100_40_pcie", budget=budget, policies=names, jobs=1, **AXES)
    assert advice.best is not None
    assert advice.best["policy"] == names[-1]
    assert not any(it_fits(trace_of(config, batch=1), "a100_40_pcie", name, budget=budget) for name in FEW)


def test_a_policy_whose_work_takes_less_time_is_tried_and_told_even_where_everything_fits():
    trace = cnn("alexnet", batch=16, kernels="cudnn", optimizer="sgd")
    advice = advise(trace, "p100", jobs=1)
    times = {name: simulate(trace, "p100", name).log.end for name in ("keep_all", "vdnn")}
    assert times["vdnn"] < 0.9 * times["keep_all"]
    assert advice.best["makespan_ns"] <= times["vdnn"]
    less = 100 * (1 - advice.best["makespan_ns"] / times["keep_all"])
    assert f"{less:.2g} % less time than keeping everything with unlimited memory" in advice.text()


@pytest.mark.parametrize("policies", [FEW, None], ids=["named", "all"])
def test_a_search_that_had_no_time_does_not_say_that_nothing_can_fit(config, policies):
    advice = advise(config, "a100_40_pcie", batch=1, policies=policies, jobs=1, seconds=1e-6, **AXES)
    assert advice.best is None
    assert advice.skipped
    assert "No run ended in the time of the search, so that it is not known what fits (" in advice.text()
    assert "Nothing fits" not in advice.text()


def test_what_all_memories_together_cannot_hold_is_said_before_anything_runs(config):
    machine = "mt3000_survey"  # of two memories
    state = state_of(trace_of(config), load_profile(machine))
    held = state.weights + state.optimizer_state
    small = {f"tiers.ddr.{key}": f"{held // 2} B" for key in ("nominal", "capacity")}
    advice = advise(config, machine, batch=4, budget=held // 2 - 1, figures=small, jobs=1, seconds=1, **AXES)
    assert advice.best is None
    assert not [row for row in advice.rows if "change" not in row]  # nothing was run for it
    text = advice.text()
    assert "weights and optimizer state alone exceed the" in text
    assert "whatever is moved or recomputed" in text


def test_the_ways_to_divide_a_batch(config):
    def counts(**workload):
        asked = Question({"model": config, **AXES, **workload}, "a100_40_pcie")
        return [micro_batches(each.workload) for each in divisions(asked)]

    assert counts(batch=8) == [1, 2, 4, 8]
    assert counts(batch=12) == [1, 2, 4, 12]
    assert counts(batch=7) == [1, 7]
    assert counts(batch=1) == [1]
    assert counts(batch=8, micro_batches=1) == [1]
    assert counts(batch=8, micro_batches=4) == [4]


def everything_run(asked, names, counts):
    """Every run of a space, without any bound or order."""
    trials = Trials(10_000, jobs=1)
    return [
        row for count in counts for row in trials.run(asked.changed(micro_batches=count) if count > 1 else asked, names)
    ]


@pytest.mark.parametrize(
    ("share", "machine"), [(0.75, "a100_40_pcie"), (0.6, "mt3000_survey"), (0.4, "pcie_domestic_low")]
)
def test_bounds_leave_out_nothing_that_is_faster(config, share, machine, monkeypatch):
    """The whole space of a few policies, against a search that leaves out what its bounds say cannot win."""
    few = ("keep_all", "full_recompute", "swap_all", "dtr", "zero_offload", "stronghold", "optimizer_in_backward")
    monkeypatch.setattr("sim.advice.candidates.names", lambda: few)
    budget = int(share * simulate(trace_of(config, batch=2), machine).summary()["peak_bytes"])
    asked = Question({"model": config, "batch": 2, **AXES}, machine, budget=budget)
    rows = Search(asked, Trials(10_000, jobs=1)).run()
    every = everything_run(asked, space().every, (1, 2))
    assert len(rows) < 0.7 * len(every)
    assert speed(best(rows)) >= (1 - 0.006) * max(map(speed, filter(fits, every)))


def test_a_batch_is_divided_where_that_is_the_fastest(config):
    """Only keeping everything is allowed, and the whole batch does not fit."""
    peaks = {
        count: simulate(trace_of(config, micro_batches=count), "a100_40_pcie").summary()["peak_bytes"]
        for count in (1, 2, 4)
    }
    assert peaks[2] < 0.95 * peaks[1]
    found = advise(config, "a100_40_pcie", batch=4, budget=peaks[2], policies=["keep_all"], jobs=1, **AXES)
    assert micro_batches(found.best) == 2
    assert "Use keep_all at batch 4 in 2 micro-batches: " in found.text()
    again = simulate(trace_of(config, micro_batches=2), "a100_40_pcie", budget=peaks[2]).log
    assert found.best["makespan_ns"] == again.end
    whole = simulate(trace_of(config), "a100_40_pcie").log.end
    assert f"{again.end / whole:.2g} times as long as with unlimited memory" in found.text()
    fixed = advise(
        config, "a100_40_pcie", batch=4, budget=peaks[2], policies=["keep_all"], jobs=1, micro_batches=1, **AXES
    )
    assert fixed.best is None


def test_ways_that_nothing_has_fitted_yet_stay_in_the_search(config, monkeypatch):
    """Where state alone exceeds the memory with all gradients, and no probe beside what frees these fits."""
    few = ("keep_all", "full_recompute", "dtr", "g10", "patrickstar", "optimizer_in_backward")
    monkeypatch.setattr("sim.advice.candidates.names", lambda: few)
    state = state_of(trace_of(config), load_profile("a100_40_pcie"))
    budget = state.weights + state.optimizer_state + state.gradients // 2
    asked = Question({"model": config, "batch": 4, "micro_batches": 1, **AXES}, "a100_40_pcie", budget=budget)
    rows = Search(asked, Trials(10_000, jobs=1)).run()
    ran = {row["policy"]: fits(row) for row in rows}
    assert not ran["optimizer_in_backward + full_recompute"]
    assert "optimizer_in_backward + keep_all" not in ran  # the same as alone
    assert "optimizer_in_backward + dtr" in ran
    assert any(ran.values())


def table_of_advice():
    """`scripts/make_advice.py`, and the data that it made."""
    module = importlib.import_module("scripts.make_advice")
    return module, json.loads(module.DATA.read_text(encoding="utf-8"))


def test_what_is_advised_is_within_two_percent_of_an_exhaustive_search():
    module, data = table_of_advice()
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.page(text, data) == text, "run scripts/make_advice.py"
    found = module.complete(data)
    assert found
    assert {name: module.lag(entry) for name, entry in found.items() if module.lag(entry) > 0.02} == {}


def test_the_space_is_that_of_the_exhaustive_search():
    module, _ = table_of_advice()
    every = module.everything({name: load(name) for name in names()})
    assert {frozenset(name.split(" + ")) for name in every} == {frozenset(name.split(" + ")) for name in space().every}
    assert len(every) == len(space().every) > 400


def test_everything_that_may_be_combined_is_not_faster(config):
    module, _ = table_of_advice()
    budget = int(0.7 * simulate(trace_of(config), "mt3000_survey").summary()["peak_bytes"])
    advice = advise(config, "mt3000_survey", batch=4, budget=budget, jobs=1, seconds=30, **AXES)
    asked = Question({"model": config, "batch": 4, **AXES}, "mt3000_survey", budget=budget)
    some = (*FEW, "rotor", "capuchin", "zero_offload", "superoffload", "weight_streaming", "optimizer_in_backward")
    rows = Trials(1000, jobs=1).run(asked, module.everything({name: load(name) for name in some}))
    assert len(rows) > 40
    assert speed(advice.best) >= 0.98 * speed(best(rows))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_search_takes_some_time_and_ends(config, seconds):
    with pytest.raises(TiersimError, match="expected a finite number above 0"):
        advise(config, "a100_40_pcie", batch=1, seconds=seconds, **AXES)


def test_where_nothing_fits_it_says_with_which_change_something_does(config):
    few = ("keep_all", "full_recompute")
    peak = simulate(trace_of(config, batch=1), "a100_40_pcie").summary()["peak_bytes"]
    advice = advise(config, "a100_40_pcie", batch=16, micro_batches=1, budget=peak, policies=few, jobs=1, **AXES)
    assert advice.best is None
    assert advice.changes
    for change in advice.changes:
        options = {key: value for key, value in change.options.items() if key != "budget"}
        changed, more = trace_of(config, **{"batch": 16, **options}), change.options.get("budget", peak)
        assert it_fits(changed, "a100_40_pcie", change.best["policy"], budget=more)
        assert change.text in advice.text()
    assert "Nothing fits" in advice.text()
    divided = advise(config, "a100_40_pcie", batch=16, budget=peak, policies=few, jobs=1, **AXES)
    assert micro_batches(divided.best) > 1  # with their number left to the search it needs no change


def of_one_op(trace, op):
    """What an op holds while it runs, tensor by tensor: of those in one storage the largest."""
    held = {}
    for t in {*op.reads, *op.writes}:
        root = t
        while trace.tensors[root].replaces is not None:
            root = trace.tensors[root].replaces
        held[root] = max(held.get(root, 0), trace.tensors[root].bytes)
    return sum(held.values()) + op.workspace


@pytest.mark.parametrize("loss", ["torch", "chunked"])
def test_nothing_that_splits_no_op_fits_where_one_op_holds_more(config, loss):
    trace = trace_of(config, loss=loss)
    name, size = largest_op(trace, load_profile("a100_40_pcie"))
    sizes = {op.name: of_one_op(trace, op) for op in trace.ops if op.phase != "update"}
    assert size == max(sizes.values()) == sizes[name]
    for policy in ("keep_all", "swap_all", "dtr", "hybrid", "zero_offload + full_recompute", "patrickstar"):
        assert not it_fits(trace, "a100_40_pcie", policy, budget=size - 1), policy


JOBS = (
    ({"batch": 8}, 700_000), ({"batch": 1}, 400_000), ({"batch": 4, "optimizer": "adamw_8bit"}, 600_000),
    ({"batch": 4, "lora_rank": 4}, 400_000), ({"batch": 1}, 40_000),
    *(
        pytest.param(*job, marks=pytest.mark.slow)
        for job in (
            ({"batch": 8}, 1_000_000), ({"batch": 2}, 500_000), ({"batch": 4, "precision": "fp32"}, 800_000),
            ({"batch": 4, "loss": "chunked"}, 300_000), ({"batch": 2, "micro_batches": 2}, 250_000),
        )
    ),
)  # fmt: skip
CHANGED = ("full_recompute", "full_recompute; checkpoints: swap_all", "zero_offload + full_recompute",
           "zero_offload(weights=host) + weight_streaming + full_recompute; checkpoints: swap_all")  # fmt: skip


@pytest.mark.parametrize(("axes", "budget"), JOBS)
def test_the_nearest_change_that_fits_is_found_wherever_there_is_one(config, axes, budget):
    """Every combination of every kind of change, with every policy that was allowed, against the answer."""
    job = {"micro_batches": 1, **AXES, **axes}
    found = advise(config, "a100_40_pcie", budget=budget, policies=CHANGED, jobs=1, seconds=200, **job)
    assert found.best is None
    kinds = {
        "loss": {job.get("loss", "torch"), "chunked"},
        "batch": {1, job["batch"]},
        "optimizer": {job.get("optimizer", "adamw_foreach"), "sgd"},
        "precision": {job["precision"], "bf16"},
        "lora_rank": {job.get("lora_rank"), job.get("lora_rank", 16)},
    }
    fit = []
    for values in product(*kinds.values()):
        changed = {**job, **dict(zip(kinds, values, strict=True))}
        trace = transformer(config, **{**changed, "micro_batches": changed["batch"]})
        fit += [changed for name in CHANGED if it_fits(trace, "a100_40_pcie", name, budget=budget)]
    of_workload = [change for change in found.changes if not {"budget", "profile"} & {*change.options}]
    assert bool(of_workload) >= bool(fit), fit
    for change in found.changes:
        assert change.text in found.text()
        more = change.options.get("budget", budget)
        options = {key: value for key, value in change.options.items() if key != "budget"}
        changed = transformer(config, **{**job, **options})
        assert it_fits(changed, "a100_40_pcie", change.best["policy"], budget=more)
    if "budget" in (last := found.changes[-1].options):  # half as much is not enough for the leanest
        assert not any(it_fits(trace_of(config, **job), "a100_40_pcie", name, budget=last["budget"] // 2 - 1)
                       for name in CHANGED)  # fmt: skip


def test_where_no_change_helps_the_op_that_is_too_large_is_named(config):
    found = advise(config, "a100_40_pcie", batch=2, budget=20_000, policies=CHANGED, jobs=1, seconds=100,
                   figures={"tiers.hbm.nominal": "20 kB", "tiers.hbm.capacity": "20 kB"}, **AXES)  # fmt: skip
    left = [change for change in found.changes if "profile" not in change.options]
    assert not left
    if found.least is not None:
        assert f"even with {found.least.text} {found.least.op!r} alone holds" in found.text()


def test_a_figure_that_decides_is_found_and_decides(config):
    trace, rows = trace_of(config), {}
    budget = int(0.8 * simulate(trace, "mt3000_survey").summary()["peak_bytes"])
    advice = advise(config, "mt3000_survey", batch=4, budget=budget, policies=FEW, jobs=1, **AXES)
    for flip in advice.flips:
        for policy in (flip.policy, advice.best["policy"]):
            machine = load_profile("mt3000_survey", overrides={flip.path: flip.value})
            rows[policy] = simulate(trace, machine, policy, budget=budget).log.end
        assert rows[flip.policy] < rows[advice.best["policy"]] / 1.009, flip
    assert advice.figures_tried == advice.figures_all > 0


def test_equal_speeds_go_to_the_simplest():
    rows = [row("a + b", 1000), row("c", 1003, recompute=5), row("d", 1004), row("e", 1006, peak=1)]
    assert best(rows)["policy"] == "d"
    assert best([row("a", 1000), {**row("b", 1), "status": "infeasible"}])["policy"] == "a"
    assert best([]) is None
    plain = row("keep_all", 1003, peak=1001)
    assert best([row("olla", 1000, peak=1000), plain])["policy"] == "keep_all"  # an eighth of a percent is nothing
    assert best([row("olla", 1000, peak=900), plain])["policy"] == "olla"
    assert best([row("olla", 900, peak=1000), plain])["policy"] == "olla"


def test_a_figure_is_not_said_to_decide_where_a_run_did_not_end(config):
    """Of a run that was stopped it is not known whether it fits, so that nothing fits "alone" beside it."""
    asked = Question({"model": config, "batch": 4, **AXES}, "mt3000_survey")

    class Stopped:
        """Ends every run of the winner before its time."""

        def run_all(self, rounds):
            for _, policies, tags in rounds:
                yield from (
                    {**row(name, 1000), **tags, "status": "timed_out" if name == "swap_all" else "ok"}
                    for name in policies
                )

    winner, other = row("swap_all", 1000, moved=1), row("rotor", 1100, recompute=1)
    found, tried, known = flips(asked, winner, [winner, other], Stopped())
    assert found == []
    assert (tried, known > 0) == (0, True)


def test_where_the_host_updates_the_weights_its_figures_are_varied_first(config):
    asked = Question({"model": config, "batch": 4, **AXES}, "mt3000_survey")
    on_host, on_device = (_uncertain(asked, row(name, 1000)) for name in ("stronghold + swap_all", "swap_all"))
    assert on_host[0].path.startswith("engines.cpu.")
    assert "engines.cpu.bandwidth_share.optimizer" in {fact.path for fact in on_host if fact.standing == "estimate"}
    assert on_device[0].path.startswith("links.")
    assert {*on_host} == {*on_device}


def test_ranking_what_is_left_open_leaves_time_to_run_some_of_it(config, monkeypatch):
    """As on a slow machine: each ceiling takes longer than all are worth."""
    asked = Question(
        {"model": config, "batch": 2, **AXES}, "a100_40_pcie", open={"optimizer": ("sgd", "lion", "adamw_fused")}
    )
    now = [0.0]
    monkeypatch.setattr("sim.advice.trials.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "sim.advice.narrowing.ceiling", lambda each: (now.__setitem__(0, now[0] + 4), Ceiling(1.0, 1))[1]
    )
    trials = Trials(10.0, jobs=1)
    ranked = by_ceiling(asked.variants, trials)
    assert len(ranked) == 2
    assert trials.left_s == 2
    assert trials.skipped_variants == 1


def test_the_reason_names_what_costs_more():
    fast, slow = row("a", 1_000_000, moved=7, stall=0), row("b", 1_500_000, recompute=500_000)
    assert (kind(fast), kind(slow)) == ("copies", "recomputation")
    assert difference(fast, slow) == ["500 µs more recomputation"]
    assert kind(row("c", 1)) == "neither"
    assert kind(row("c", 1, moved=1, recompute=1)) == "both"


def test_the_state_is_told_before_anything_runs(config):
    told = []
    advice = advise(config, "a100_40_pcie", batch=2, policies=FEW, jobs=1, on_state=told.append,
                    on_row=lambda row, done, of: told.append(row), **AXES)  # fmt: skip
    assert told[0] == advice.state
    assert len(told) > 1


def test_policies_that_do_not_apply_are_not_said_not_to_fit(config):
    text = advise(config, "a100_40_pcie", batch=1, policies=["swap_all + swap_all"], jobs=1, seconds=60, **AXES).text()
    assert "swap_all + swap_all does not apply: " in text
    assert "fit" not in text.partition("does not apply")[2]


def test_a_search_without_time_says_so_and_keeps_what_it_has(config):
    asked = Question({"model": config, "batch": 2, **AXES}, "a100_40_pcie")
    trials = Trials(1e-9, jobs=1)
    assert trials.run(asked, FEW) == []
    assert trials.skipped == len(FEW)
    assert FACTORS[0] < 1 < FACTORS[1]


OPEN_AXES = {"precision": "fp32,amp_bf16", "optimizer": "adamw_foreach,adamw_8bit"}


def every_variant(config, name, **axes):
    """What a policy takes with each combination of `OPEN_AXES` within a budget, in ns."""
    found = {}
    for precision, optimizer in product(*(values.split(",") for values in OPEN_AXES.values())):
        trace = trace_of(config, precision=precision, optimizer=optimizer, **axes.get("workload", {}))
        with suppress(Infeasible):
            found[precision, optimizer] = simulate(trace, "a100_40_pcie", name, budget=axes["budget"]).log.end
    return found


@pytest.mark.parametrize("budget", [3_000_000, 4_000_000, 8_000_000])
def test_precision_and_optimizer_are_searched_where_they_are_left_open(config, budget):
    """The best of all combinations of a few policies, by brute force."""
    few = ("keep_all", "full_recompute", "zero_offload", "g10")
    every = {
        (name, *variant): end for name in few for variant, end in every_variant(config, name, budget=budget).items()
    }
    left = {"sequence": 64, "micro_batches": 1, **OPEN_AXES}
    found = advise(config, "a100_40_pcie", batch=4, budget=budget, policies=few, jobs=1, **left)
    assert found.best["makespan_ns"] <= 1.005 * min(every.values())
    best = found.best
    assert every[best["policy"], best["precision"], best["optimizer"]] == best["makespan_ns"]
    assert (found.question.workload["precision"], found.question.workload["optimizer"]) == (
        best["precision"], best["optimizer"],
    )  # fmt: skip
    assert f"Use {best['policy']} at batch 4 with {best['precision']} and {best['optimizer']}: " in found.text()
    assert len(found.choices) == 4
    for choice in found.choices:
        own = [end for (_, *variant), end in every.items() if tuple(variant) == tuple(choice.options.values())]
        if choice.best is not None:
            assert choice.best["makespan_ns"] <= 1.005 * min(own)
        else:
            assert not own or 1e9 * 4 / choice.ceiling.speed >= best["makespan_ns"]


def test_all_policies_are_searched_for_each_precision(config, monkeypatch):
    few = ("keep_all", "full_recompute", "swap_all", "zero_offload", "optimizer_in_backward", "g10")
    monkeypatch.setattr("sim.advice.candidates.names", lambda: few)
    budget = 4_000_000
    asked = Question({"model": config, "batch": 4, "sequence": 64, "precision": "fp32"}, "a100_40_pcie", budget=budget)
    left = replace(asked, open={"precision": ("fp32", "amp_bf16"), "optimizer": ("adamw_foreach", "adamw_8bit")})
    rows = Search(left, Trials(10_000, jobs=1)).run()
    every = [row for each in left.variants for row in everything_run(each, space().every, (1, 2, 4))]
    assert len(rows) < 0.7 * len(every)
    assert speed(best(rows)) >= 0.98 * max(map(speed, filter(fits, every)))


def test_precision_and_optimizer_are_never_changed_unasked(config):
    for name, value in (("precision", "fp32"), ("optimizer", "adamw_loop")):
        found = advise(config, "a100_40_pcie", batch=4, budget="60%", policies=FEW, jobs=1, **{**AXES, name: value})
        assert {row[name] for row in found.rows} == {value}
        assert found.choices == ()
    found = advise(config, "a100_40_pcie", batch=4, policies=["keep_all"], jobs=1, sequence=64, precision="any")
    assert {"fp32", "bf16", "amp_bf16"} < {choice.options["precision"] for choice in found.choices}
    assert "fp8" not in {choice.options["precision"] for choice in found.choices}  # it is for inference
    found = advise(config, "a100_40_pcie", goal="batch", budget=30_000_000, policies=["keep_all"], jobs=1, sequence=64,
                   optimizer="adamw_foreach,sgd")  # fmt: skip
    assert found.best["optimizer"] == "sgd"
    for wrong in ("fp23,fp32", "any,fp32"):
        with pytest.raises(TiersimError, match=r"precision '(fp23|any)' is unknown"):
            advise(config, "a100_40_pcie", batch=4, sequence=64, precision=wrong, policies=["keep_all"])


def test_what_is_not_given_is_what_studies_take(config, monkeypatch):
    monkeypatch.setattr("sim.advice.candidates.names", lambda: FEW)
    rows = Search(Question({"model": config, "batch": 2, "sequence": 64}, "a100_40_pcie"), Trials(1000, jobs=1)).run()
    assert any(map(fits, rows))


class Rehearsed(Trials):
    """A search on one process whose runs take made-up times: a clock that they alone move.

    runs: policy -> seconds of its run, and makespan in ns, 0 where it does not fit; all others do not fit at once.
    """

    def __init__(self, seconds, runs):
        super().__init__(seconds, jobs=1)
        self.clock, self.runs, self.started = 0.0, runs, []

    @property
    def used_s(self):
        return self.clock

    def _here(self, job):
        policy = str(job.task["policy"])
        if job.task.get("pace"):
            return {"row": {"status": "ok", "makespan_ns": 1, "samples_per_s": 1e9}, "ran": {"wall_s": 0.0}}
        seconds, time = self.runs.get(policy, (0.0, 0))
        stop_s = job.task.get("stop_s", float("inf"))
        self.clock += min(seconds, stop_s, self.left_s)
        self.started.append(policy)
        if stop_s < seconds:
            return {"row": {"status": "timed_out"}, "ran": {"wall_s": stop_s, STOPPED: stop_s}}
        rate = {"makespan_ns": time, "samples_per_s": 1e9 / time, "peak_bytes": 1, "recompute_ns": 0} if time else {}
        return {"row": {"status": "ok" if time else "infeasible", **rate}, "ran": {"wall_s": seconds}}

    def _outcomes(self, cells, wanted):
        jobs = [Job(each.cell.task, each.cell.group) for each in cells]
        yield from ((job.id, self._here(job)) for job in jobs if wanted(job))


def test_what_plans_for_long_keeps_nothing_that_is_faster_from_being_run(config, monkeypatch):
    """All that is quick, and what is likely to be the fastest where something fits, in a part of the time of all."""
    long = ("hybrid", "modnn", "rotor", "tso", "capuchin")
    few = ("keep_all", "full_recompute", "dtr", "superoffload", "stronghold", "zero_offload", *long)
    monkeypatch.setattr("sim.advice.candidates.names", lambda: few)
    monkeypatch.setattr("sim.advice.narrowing._in_class", lambda asked: float("inf"))
    asked = Question({"model": config, "batch": 2, "micro_batches": 1, **AXES}, "a100_40_pcie", budget=8_000_000)
    vars(asked)["kept"] = 1, 1  # nothing is left out by a bound
    slow = {name: (20.0, 0) for name in space().every if name.endswith(long)}
    quick = {"stronghold + full_recompute": (0.1, 3000), "stronghold + dtr": (0.2, 2900),
             "superoffload + dtr": (0.2, 2500)}  # fmt: skip
    trials = Rehearsed(60.0, {**slow, **quick, "superoffload + hybrid": (20.0, 2000)})
    assert sum(seconds for seconds, _ in slow.values()) > 2 * trials.seconds
    assert best(Search(asked, trials).run())["policy"] == "superoffload + hybrid"


class Fitting(Rehearsed):
    """As `Rehearsed`; a policy fits where there is as much memory as it needs, and takes all that there is up to twice
    that.

    runs: policy -> bytes; all others need more than there is.
    """

    def _here(self, job):
        self.clock += 1.0
        need, budget = self.runs.get(str(job.task["policy"]), float("inf")), job.task["budget"]
        rate = {"makespan_ns": 1000, "samples_per_s": 1e6, "peak_bytes": min(budget, 2 * need), "recompute_ns": 0}
        return {"row": {"status": "ok", **rate} if budget >= need else {"status": "infeasible"}, "ran": {"wall_s": 1.0}}


@pytest.mark.parametrize("other", [{}, {"patrickstar + save_on_cpu": 900_000}])
def test_the_least_memory_is_looked_for_before_all_candidates_have_been_run(config, other):
    asked = Question({"model": config, "batch": 2, **AXES}, "a100_40_pcie", goal="memory", budget=16_000_000)
    needs = {"keep_all": 4_000_000, "full_recompute": 2_000_000, "zero_offload + full_recompute": 1_000_000, **other}
    candidates_ = [name for part in candidates_for(asked) for name in part]
    assert "patrickstar + save_on_cpu" not in candidates_
    trials = Fitting(2.0 * len(space().every) if other else len(candidates_) - 20.0, needs)
    peaks = [row["peak_bytes"] for row in least_memory(asked, trials) if fits(row)]
    assert min(needs.values()) <= min(peaks) <= 1.02 * min(needs.values())


class Filling(Rehearsed):
    """As `Rehearsed`; runs: policy -> the largest batch that it fits; all others fit none."""

    def _here(self, job):
        self.clock += 1.0
        batch, most = job.task["workload"]["batch"], self.runs.get(str(job.task["policy"]), 0)
        rate = {"makespan_ns": 1000, "samples_per_s": 1e6, "peak_bytes": 1, "recompute_ns": 0}
        return {"row": {"status": "ok", **rate} if batch <= most else {"status": "infeasible"}, "ran": {"wall_s": 1.0}}


@pytest.mark.parametrize("policy", ["full_recompute", "stronghold", "patrickstar + save_on_cpu"])
def test_the_largest_batch_is_that_of_all_that_is_searched_at_one_batch(config, policy):
    asked = Question({"model": config, **AXES}, "a100_40_pcie", goal="batch")
    trials = Filling(2.0 * len(space().every), {"swap_all": 3, "zero_offload + full_recompute": 5, policy: 6})
    assert max(row["batch"] for row in largest_batch(asked, trials) if fits(row)) == 6


def test_what_resembles_the_largest_batch_so_far_is_tried_before_all_else(config):
    """A policy that alone fits most fits still more beside one of state, whatever else there is."""
    asked = Question({"model": config, **AXES}, "a100_40_pcie", goal="batch")
    fitting = {"full_recompute": 3, "twremat": 16, "stronghold + twremat": 22, "patrickstar + twremat": 23}
    trials = Filling(len(space().others) + 120.0, fitting)
    found = {str(row["policy"]): row["batch"] for row in largest_batch(asked, trials) if fits(row)}
    assert found["patrickstar + twremat"] == 23
    assert len(space().every) > 2 * trials.seconds


def test_the_largest_batch_is_one_of_policies_that_take_it_whole(config, monkeypatch):
    """What splits the batch itself fits any; where it is named, it is run all the same."""
    few = ("keep_all", "full_recompute", "swap_all", "modnn", "hybrid")
    monkeypatch.setattr("sim.advice.candidates.names", lambda: few)
    asked = Question({"model": config, "batch": 1, **AXES}, "a100_40_pcie", budget=8_000_000)
    tried = {str(row["policy"]) for row in largest_batch(asked, Trials(60.0, jobs=1))}
    assert {"keep_all", "full_recompute", "swap_all"} <= tried
    assert "modnn" not in tried
    named = Question({"model": config, "batch": 1, **AXES}, "a100_40_pcie", budget=8_000_000, policies=("modnn",))
    assert {str(row["policy"]) for row in largest_batch(named, Trials(2.0, jobs=1))} == {"modnn"}


def test_what_is_likely_to_be_the_fastest_does_not_wait_for_all_that_is_quick(config, monkeypatch):
    """One plans for a seventh of the time; forty others, none of them as fast, for half of that each."""
    monkeypatch.setattr("sim.advice.narrowing._in_class", lambda asked: float("inf"))
    asked = Question({"model": config, "batch": 2, "micro_batches": 1, **AXES}, "a100_40_pcie", budget=8_000_000)
    vars(asked)["kept"] = 1, 1
    runs = dict.fromkeys(space().others, (3.5, 3000)) | {"full_recompute": (0.1, 2500), "hybrid": (8.0, 2000)}
    trials = Rehearsed(60.0, runs)
    assert best(Search(asked, trials).run())["policy"] == "hybrid"
    assert trials.used_s > 59  # it ends for want of time


def test_a_run_that_is_stopped_for_now_is_run_again_with_more_time_only(config, monkeypatch):
    asked = Question({"model": config, "batch": 2, **AXES}, "a100_40_pcie")
    trials, told = Trials(1000, jobs=1), []
    trials.on_row = lambda row, done, of: told.append((row["policy"], done, of))

    def rows(stop_s):
        return [row["policy"] for row in trials.each([(asked, ["hybrid", "keep_all"], {})], lambda labels: True,
                                                     stop_s=stop_s)]  # fmt: skip

    assert rows(1e-3) == []
    assert trials.least_s(asked, "hybrid") >= 1e-3
    assert trials.least_s(asked, "optimizer_in_backward + hybrid") >= 1e-3
    with monkeypatch.context() as patched:
        patched.setattr(trials, "_here", None)  # nothing is started that is known to take so long
        assert rows(1e-3) == []
    assert rows(None) == ["hybrid", "keep_all"]
    assert told == [("hybrid", 1, 2), ("keep_all", 2, 2)]
    assert trials.skipped == 0


def test_what_is_known_to_take_longer_than_is_left_is_not_started(config):
    asked, told = Question({"model": config, "batch": 2, **AXES}, "a100_40_pcie"), []
    trials = Trials(1000, jobs=1, on_row=lambda row, done, of: told.append(row["policy"]))
    (alone,) = trials.run(asked, ["hybrid"])
    trials.extend(trials.used_s + 0.9 * alone["wall_s"])
    assert trials.run(asked, ["optimizer_in_backward + hybrid"]) == []
    assert (trials.skipped, told) == (1, ["hybrid"])
    trials.extend(1000)
    assert len(trials.run(asked, ["optimizer_in_backward + hybrid"])) == 1


@pytest.mark.parametrize(("share", "machine"), [(0.5, "pcie_domestic_low"), (0.6, "v100_32")])
def test_what_only_manages_activations_is_never_beyond_the_proven_bound(config, share, machine):
    """The traits by which runs are left out, against what the log of each run says."""
    axes = {"batch": 64, "sequence": 64, "precision": "amp_fp16"}
    budget = int(share * simulate(transformer(config, **axes), machine).summary()["peak_bytes"])
    asked = Question({"model": config, **axes}, machine, budget=budget)
    kept = [name for name in space().others if keeps_to_class(name)]
    ran = list(filter(fits, Trials(10_000, jobs=1).run(asked, kept, task=BOUND)))
    assert len(ran) > 8
    assert asked.bound.makespan_ns > 1.001 * asked.bound.ops_ns  # memory is short
    for row in ran:
        assert row["outside_bound"] == "", row["policy"]
        assert row["makespan_ns"] >= asked.bound.makespan_ns, row["policy"]


def test_a_policy_that_is_told_any_budget_and_plans_the_same_has_the_pace_of_that_plan(config):
    """Its plan, in unlimited memory: not what it would plan there, which leaves everything on the device."""
    trace = trace_of(config)
    state = state_of(trace, load_profile("a100_40_pcie"))
    machine = load_profile("a100_40_pcie").with_budget(state.weights + state.gradients + state.optimizer_state // 2)
    policy = load("superoffload")
    pace = pace_of(trace, machine, policy).log.end
    ample = simulate(trace, unlimited(machine), policy).log.end
    assert pace > 1.02 * ample
    assert pace == simulate(trace, unlimited(machine), policy, on_device=0).log.end
    for other in ("full_recompute", "swap_all", "hybrid"):
        with suppress(Infeasible):
            assert simulate(trace, machine, f"superoffload + {other}").log.end >= pace
    told = load("patrickstar")  # which moves less where it is told of more
    assert pace_of(trace, machine, told).log.end == simulate(trace, unlimited(machine), told).log.end


def test_named_policies_are_the_only_candidates(config):
    asked = Question({"model": config, **AXES}, "a100_40_pcie", policies=FEW)
    assert candidates_for(asked) == (list(FEW), [])


def test_a_trace_without_samples_is_named_by_its_model_and_has_iterations_per_second(config):
    made = transformer(config, batch=4, **AXES)
    meta = {key: value for key, value in made.meta.items() if key not in ("samples", "batch", "tokens")}
    tensors, ops, rest = made.tensor_columns, made.op_columns, {"outputs": made.outputs, "carry": made.carry}
    step = Trace(tensors, ops, **rest, meta={**meta, "model": "my_step"})
    given = advise(step, "a100_40_pcie", policies=["keep_all"], seconds=20)
    text = given.text()
    assert text.startswith("my_step, sequence 64 on a100_40_pcie")
    rate = 1e9 / given.best["makespan_ns"]
    assert f"{rate:.4g} iterations/s" in text
    assert "samples/s" not in text
    of_batch = Trace(tensors, ops, **rest, meta={**meta, "batch": 4})  # its samples, as in a summary
    text = advise(of_batch, "a100_40_pcie", policies=["keep_all"], seconds=20).text()
    assert f"{round(4 * rate):,} samples/s" in text
    assert "as fast as with unlimited memory" in text


def test_of_a_function_the_search_chooses_the_batch_as_of_a_model_by_name(config):
    how = {"budget": "40 MB", "policies": ["keep_all", "full_recompute"], "seconds": 60, "jobs": 1}
    made = []

    def step(batch):
        made.append(batch)
        return transformer(config, batch=batch, **AXES)

    for goal in ("throughput", "batch"):
        by_name = advise(config, "a100_40_pcie", goal=goal, micro_batches=1, **AXES, **how)
        made.clear()
        given = advise(step, "a100_40_pcie", goal=goal, **how)
        assert len(made) == len(set(made)) > 2  # each once, however many policies run it
        for key in ("batch", "policy", "makespan_ns", "peak_bytes", "samples_per_s"):
            assert given.best[key] == by_name.best[key]
        assert f"batch {given.best['batch']}" in given.text().splitlines()[0]
    assert advise(step, "a100_40_pcie", batch=3, **how).best["samples_per_s"] == pytest.approx(
        3e9 / simulate(transformer(config, batch=3, **AXES), "a100_40_pcie", budget="40 MB").log.end
    )


def test_where_nothing_of_a_function_fits_fewer_samples_are_tried(config):
    from sim.advice.question import question

    asked = question(lambda batch: transformer(config, batch=batch, **AXES), "a100_40_pcie", None, axes={"batch": 8})
    assert [change.options for _, change in _ladder(asked)][:2] == [{"batch": 4}, {"batch": 1}]


def test_a_batch_that_a_function_refuses_is_named(config):
    def step(batch):
        raise WorkloadError("norm: expected more than one value")

    with pytest.raises(WorkloadError, match="at batch 1: norm: expected more than one value; give a batch"):
        advise(step, "a100_40_pcie", seconds=5)
    with pytest.raises(WorkloadError, match="sequence: of a function the search chooses the batch alone"):
        advise(lambda batch: transformer(config, batch=batch, **AXES), "a100_40_pcie", sequence=64)


def test_what_is_known_to_fit_is_run_again_where_it_was_ended_for_lack_of_time(config):
    asked, trials = Question({"model": config, "batch": 2, **AXES}, "a100_40_pcie"), Trials(60.0, jobs=1)
    (id,) = trials._cells([(asked, ["keep_all"], {})], {})
    trials.rows[id] = {"policy": "keep_all", "status": "timed_out"}
    row = trials.at_any_rate(asked, "keep_all")
    assert row["status"] == "ok"
    assert trials.at_any_rate(asked, "keep_all") is row


@pytest.mark.parametrize("goal", ["throughput", "batch", "memory"])
def test_a_search_without_any_time_does_not_say_that_nothing_fits(config, goal):
    given = advise(config, "h100", goal=goal, seconds=1e-9, **AXES)
    assert given.best is None
    assert "No run ended" in given.text()
    assert "Nothing fits" not in given.text()


def test_an_answer_from_few_of_the_runs_says_so_below_the_choice(config):
    given = advise(config, "a100_40_pcie", batch=4, budget="6 MB", policies=FEW, seconds=60, jobs=1, **AXES)
    assert given.best is not None
    hurried = replace(given, skipped=50, rows=tuple(row for row in given.rows if row is given.best))
    line = hurried.text().splitlines()[4]
    assert line.startswith(
        "That is the only run that fits so far; what was not run may be faster: 50 runs were left out"
    )
    assert hurried.as_dict()["unfinished"] == ["50 runs were left out"]
    assert "not run" not in given.text()
    ample = advise(config, "a100_40_pcie", batch=4, policies=["keep_all"], seconds=60, jobs=1, **AXES)
    few = replace(ample, skipped=1, rows=(*ample.rows, {**ample.best, "policy": "dtr", "status": "timed_out"}))
    assert "so far" not in few.text()  # nothing is faster
    assert "Not all was run (1 run was left out; 1 run was ended after 50% of the search's time)" in few.text()


def test_a_way_is_judged_by_what_copies_beside_it_as_well_as_by_what_recomputes(config):
    """Policies of state whose first run recomputes and is slow, while a copy beside them is the fastest of all."""
    asked = Question({"model": config, "batch": 2, **AXES}, "a100_40_pcie", budget=400_000)
    search = Search(asked, Trials(60.0, jobs=1))
    names = {other: f"stronghold + {other}" for other in ("full_recompute", "swap_all", "dtr")}
    way = Way(asked, asked, "stronghold", names, 10.0)
    search.ways = [way]
    ran = {"status": "ok", "fits": True, "makespan_ns": 10**9, "samples_per_s": 0.8}
    search.ran = {("g10",): {**ran, "policy": "g10", "samples_per_s": 1.0}}
    search.ran[way.key("full_recompute")] = {**ran, "policy": names["full_recompute"]}
    assert search._near([way], 0.9) == [way]
    search.ran[way.key("swap_all")] = {**ran, "policy": names["swap_all"]}
    assert search._near([way], 0.9) == []
    assert search._near([way], 0.7) == [way]


def test_what_is_simpler_and_as_fast_within_the_models_error_is_named(config):
    given = advise(config, "a100_40_pcie", batch=4, budget="6 MB", policies=FEW, seconds=60, jobs=1, **AXES)
    top = given.best
    rows = [{**top, "policy": name, "makespan_ns": int(top["makespan_ns"] * slower),
             "samples_per_s": top["samples_per_s"] / slower}
            for name, slower in (("stronghold + swap_all", 1.0), ("superoffload", 1.01), ("dtr", 1.03),
                                 ("hybrid", 1.02), ("rotor", 1.2))]  # fmt: skip
    text = replace(given, best=rows[0], rows=tuple(rows)).text()
    assert "Simpler: hybrid, 2 % slower, within the model's own error of 4.1 %." in text
    assert "; it can't be told from the best, nor can 2 more (within the model's own error of 4.1 %, n = 11)." in (
        replace(given, best=rows[0], runner_up=rows[1], rows=tuple(rows)).text()
    )
    far = replace(given, best=rows[0], runner_up=rows[4], rows=(rows[0], rows[4]))
    assert "can't be told" not in far.text()
    other = replace(far, runner_up={**rows[4], "parallel": "dp 2", "samples_per_s": rows[0]["samples_per_s"] / 1.1})
    bar = error_bar("layouts")
    of = f"{100 * bar.nine_tenths:.0f} %, nine of ten, n = {bar.rows}"
    assert f"can't be told from the best (within the model's own error of {of})" in other.text()
    assert {key: bar["rows"] for key, bar in given.as_dict()["error"].items()}["policies"] == 11
    assert "\nerror, beside published runs: the ratio of two policies' times 4.1 %" in given.text()
    assert "Simpler" not in replace(given, best=rows[3], rows=tuple(rows)).text()
    assert repr(given) == given.text().rstrip()


def test_state_that_no_layout_holds_names_the_number_of_devices_that_do(config):
    """Of two, four, … devices of 0.5 MB each beside a host of 0.3 MB."""
    figures = {"tiers.host.capacity": "300 kB", "tiers.host_pageable.capacity": "1 kB", "tiers.nvme.capacity": "1 kB"}
    how = {"batch": 16, "budget": "500 kB", "figures": figures, "precision": "fp32", "sequence": 64}
    state = sum(t.bytes for t in trace_of(config, precision="fp32").tensors
                if t.role in ("weight", "optimizer_state") and t.replaces is None)  # fmt: skip
    assert 1.3e6 < state < 2.3e6
    with pytest.raises(TiersimError, match=r"no layout of 2 holds weights and optimizer state in .*; nearest: 4$"):
        advise(config, "a100_80_sxm", devices=2, seconds=20, **how)


def test_rates_have_no_exponents():
    row = {"makespan_ns": 10**9, "peak_bytes": 10**9, "samples_per_s": 2.0}
    assert "79,782 tokens/s" in figures({**row, "tokens_per_s": 79_782.3})
    assert "236.4 tokens/s" in figures({**row, "tokens_per_s": 236.37})
    assert "2 samples/s" in figures(row)


def test_a_trace_is_advised_on_as_it_is(config):
    trace = trace_of(config)
    advice = advise(trace, "a100_40_pcie", policies=["keep_all"], jobs=1)
    assert all(map(fits, advice.rows))
    assert advice.best["makespan_ns"] == simulate(trace, "a100_40_pcie").log.end
    with pytest.raises(TiersimError, match="a trace is fixed"):
        advise(trace, "a100_40_pcie", batch=2)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"goal": "thruput"}, "did you mean 'throughput'"),
        ({"seconds": 0}, "seconds: value 0: expected a finite number above 0; nearest: 1"),
        ({"seconds": float("nan")}, "seconds: value nan"),
        ({"jobs": 0}, "jobs: value 0: expected at least 1; nearest: 1"),
        ({"goal": "batch", "batch": 2}, "goal 'batch'"),
        ({"sequnce": 4}, "did you mean 'sequence'"),
        ({"policies": ["swapall"]}, "did you mean 'swap_all'"),
        ({"figures": {"links.d2h.speed": "1 GB/s"}}, "links.d2h.speed"),
    ],
)
def test_a_mistake_is_named(config, asked, word):
    with pytest.raises(TiersimError, match=word):
        advise(config, "a100_40_pcie", **{"sequence": 64, **asked})


def test_on_the_command_line(config, capsys):
    words = ["advise", "--profile", "a100_40_pcie", "--model", config, "--batch", "2", "--seq", "64"]
    code, out, err = tiersim(*words, "--policies", "keep_all,full_recompute", "--jobs", "1", "--json", capsys=capsys)
    assert (code, err) == (0, "")
    assert json.loads(out)["best"]["policy"] == "keep_all"
    code, out, _ = tiersim(*words, "--budget", "1 MB", "--policies", "keep_all", "--seconds", "5", capsys=capsys)
    assert code == 1
    assert "Nothing fits" in out


def test_largest_batch_and_smallest_budget_on_the_command_line(config, capsys):
    job = ["--profile", "a100_40_pcie", "--policy", "full_recompute", "--model", config, "--seq", "64", "--json"]
    code, out, _ = tiersim("largest-batch", *job, "--budget", "20 MB", capsys=capsys)
    found = json.loads(out)
    assert code == 0
    assert it_fits(trace_of(config, batch=found["batch"]), "a100_40_pcie", "full_recompute", budget=20_000_000)
    assert not it_fits(trace_of(config, batch=found["batch"] + 1), "a100_40_pcie", "full_recompute", budget=20_000_000)
    code, out, _ = tiersim("smallest-budget", *job, "--batch", "4", capsys=capsys)
    found = json.loads(out)
    assert found["measured_error"] == statement_errors("a100_40_pcie", ("time", "policies", "peak"))
    assert found["peak_bytes"] <= found["budget_bytes"]
    assert not it_fits(trace_of(config), "a100_40_pcie", "full_recompute", budget=int(0.99 * found["budget_bytes"]))


def without_errors(out: str) -> list[str]:
    """The lines above the model's own error, of a peak, too."""
    stated = error_lines([load_profile("a100_40_pcie")], also=["peak"])
    lines = out.splitlines()
    assert lines[-len(stated) :] == stated
    return lines[: -len(stated)]


def test_several_policies_in_one_command_the_best_first(config, capsys):
    job = ["--profile", "a100_40_pcie", "--model", config, "--seq", "64"]
    several = ["--policies", "keep_all,full_recompute,moe_tiering"]
    code, out, _ = tiersim("largest-batch", *job, *several, "--budget", "20 MB", "--json", capsys=capsys)
    rows = json.loads(out)
    assert code == 0
    assert [row["policy"] for row in rows] == ["full_recompute", "keep_all", "moe_tiering"]
    assert rows[0]["batch"] > rows[1]["batch"]
    assert "experts" in rows[2]["error"]
    assert ["measured_error" in row for row in rows] == [True, True, False]
    code, out, _ = tiersim("smallest-budget", *job, *several, "--batch", "4", capsys=capsys)
    assert code == 0
    assert [line.partition(":")[0] for line in without_errors(out)] == ["full_recompute", "keep_all", "moe_tiering"]


def test_a_layout_of_several_devices_is_found_together_with_the_policy(config, capsys):
    found = advise(config, "a100_80_sxm", batch=8, devices=4, policies=FEW, seconds=60, jobs=1, **AXES)
    assert found.devices is not None
    assert found.devices.search.best is not None
    log = simulate(trace_of(config, batch=8), "a100_80_sxm", found.best["policy"], parallel=found.question.parallel).log
    assert found.best["makespan_ns"] == log.end
    assert found.best["stands_for"] == 4
    simulated = [row.makespan_ns for row in found.devices.search.rows if row.makespan_ns]
    assert found.best["makespan_ns"] <= min(simulated) * (1 + 0.005)
    text = found.text()
    assert "layout of 4 devices: " in text
    assert f"on 4 devices ({found.question.layout})" in text
    words = ["advise", "--profile", "a100_80_sxm", "--model", config, "--seq", "64", "--batch", "4", "--devices", "2"]
    code, out, _ = tiersim(*words, "--policies", "keep_all", "--jobs", "1", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["layout"]


def test_of_layouts_that_are_left_to_the_search_the_best_with_any_policy_is_found(config, monkeypatch):
    """The layout that is the fastest with everything kept does not fit, and is the fastest with another policy."""
    few = ("keep_all", "full_recompute", "swap_all", "zero_offload")
    monkeypatch.setattr("sim.advice.candidates.names", lambda: few)
    layouts = ({"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 1})
    asked = Question({"model": config, "batch": 4, **AXES}, "mt3000_cluster", parallel=layouts[0], layouts=layouts[1:],
                     budget=4_150_000)  # fmt: skip
    rows = Search(asked, Trials(10_000, jobs=1)).run()
    every = [row for each in asked.variants for row in everything_run(each, space().every, (1,))]
    assert {row["parallel"] for row in every if fits(row)} == {each.layout for each in asked.variants}
    assert len(rows) < len(every)
    assert speed(best(rows)) > 0.98 * max(map(speed, filter(fits, every)))


def test_layouts_are_left_to_the_search_by_what_they_reach_and_by_what_they_may(config):
    dp, tp, zero, slow = Layout(dp=2), Layout(tp=2), Layout(dp=2, zero=1), Layout(pp=2)
    rows = (Found(zero, "keep_all", 90, 1), Found(tp, "full_recompute", 95, 1), Found(dp, "keep_all", None, 0))
    unlimited = {zero: (89, 1), tp: (80, 1), dp: (70, 1), slow: (100, 1)}
    assert _worth(LayoutSearch(rows, 0, 0, unlimited), 5) == [zero, tp, dp]
    assert _worth(LayoutSearch(rows, 0, 0, unlimited), 0) == [zero]
    assert _worth(LayoutSearch(rows[2:], 0, 0, unlimited), 5) == [dp, tp, zero, slow]  # nothing has fitted


@pytest.mark.parametrize(
    ("named", "run"),
    [(None, set(POLICIES)), (("keep_all", "hybrid", "rotor"), {"keep_all"}), (("hybrid",), {"hybrid"})],
)
def test_in_each_layout_what_plans_at_once_is_run(config, named, run):
    asked = Question({"model": config, "batch": 2, **AXES}, "a100_80_sxm", budget=2_000_000, policies=named)
    _, found = with_layout(asked, 2, 60.0)
    assert {row.policy for row in found.search.rows} == run


@pytest.mark.slow
def test_layout_and_policy_are_chosen_together(config, monkeypatch):
    """Against every layout with every policy, where only a slower layout keeps everything."""
    few = ("keep_all", "full_recompute", "selective_recompute", "swap_all", "hybrid", "zero_offload", "tso")
    monkeypatch.setattr("sim.advice.candidates.names", lambda: few)
    how = {"budget": 4_150_000}
    found = advise(config, "mt3000_cluster", batch=4, devices=2, seconds=100, jobs=1, **how, **AXES)
    times = {}
    for layout, name in product(layouts(trace_of(config), 2, 4, ["1f1b"]), few):
        with suppress(Infeasible, PolicyError):
            times[layout, name] = simulate(trace_of(config), "mt3000_cluster", name, parallel=layout, **how).log.end
    assert found.best["makespan_ns"] <= 1.02 * min(times.values())
    assert min(times.values()) < 0.95 * min(time for (_, name), time in times.items() if name == "keep_all")


def test_without_time_the_answer_about_several_devices_is_what_the_search_over_layouts_found(config, monkeypatch):
    monkeypatch.setattr("sim.advice.trials.Trials.left_s", 0.0)
    found = advise(config, "a100_80_sxm", batch=8, devices=4, policies=FEW, seconds=1, jobs=1, **AXES)
    assert found.devices is not None
    top = found.devices.search.best
    assert (found.best["policy"], found.best["makespan_ns"]) == (top.policy, top.makespan_ns)
    assert found.skipped


def test_figures_that_are_varied_do_not_divide_the_trace_again(config):
    asked = Question({"model": str(config), "batch": 8, **AXES}, "a100_80_sxm", parallel={"dp": 4})
    varied = replace(asked, figures={"links.h2d.rate": "1 GB/s"})
    trials = Trials(1.0, 1)
    assert trials._ops_of(asked) == trials._ops_of(varied) == asked.ops
    assert "_divided" not in vars(varied)


def test_several_devices_need_a_batch_and_the_goal_of_throughput(config):
    for wrong in ({}, {"batch": 4, "goal": "memory"}):
        with pytest.raises(TiersimError, match="devices: for 2 of them give the batch of all, and goal 'throughput'"):
            advise(config, "a100_80_sxm", devices=2, **wrong, **AXES)


def test_the_state_over_several_devices_is_that_of_the_fullest(config):
    trace, platform = lay_out(trace_of(config), "a100_80_sxm", {"pp": 3, "micro_batches": 4})
    alone = state_of(trace_of(config), platform)
    state = state_of(trace, platform)
    assert alone.bytes / 3 < state.bytes < alone.bytes


def test_largest_batch_refuses_a_part_of_a_peak_that_grows_with_the_batch(config, capsys):
    job = ["--profile", "a100_40_pcie", "--model", config, "--seq", "64"]
    code, out, err = tiersim("largest-batch", *job, "--budget", " 80% ", capsys=capsys)
    assert (code, out) == (2, "")
    assert "--budget  80% : a part of the unconstrained peak, which grows with the batch" in err
    assert "'7.5 GB'" in err


def test_the_largest_batch_says_where_the_search_ends(config, capsys, monkeypatch):
    monkeypatch.setattr("sim.search.LARGEST", 13)
    job = ["--profile", "a100_40_pcie", "--model", config, "--seq", "64"]
    for parts, most in ((1, 13), (3, 12)):
        words = [*job, "--micro-batches", str(parts)]
        code, out, _ = tiersim("largest-batch", *words, capsys=capsys)
        assert code == 0
        assert f"batch {most} (the largest tried: larger ones may fit): " in out
        code, out, _ = tiersim("largest-batch", *words, "--json", capsys=capsys)
        assert (json.loads(out)["batch"], json.loads(out)["is_most_tried"]) == (most, True)
        goal = ["--goal", "batch", "--policies", "keep_all", "--jobs", "1", "--seconds", "20"]
        code, out, _ = tiersim("advise", *words, *goal, capsys=capsys)
        assert f"at batch {most}" in out
        assert ", the largest batch tried: larger ones may fit: " in out
    code, out, _ = tiersim("largest-batch", *job, "--budget", "10 MB", "--json", capsys=capsys)
    assert json.loads(out)["is_most_tried"] is False


def test_the_largest_batch_of_micro_batches_is_a_multiple_of_their_number(config, capsys):
    job = ["--profile", "a100_40_pcie", "--model", config, "--seq", "64", "--micro-batches", "7", "--budget", "60 MB"]

    def runs(batch):
        return it_fits(trace_of(config, batch=batch, micro_batches=7), "a100_40_pcie", "keep_all", budget=60_000_000)

    code, out, _ = tiersim("largest-batch", *job, "--json", capsys=capsys)
    found = json.loads(out)["batch"]
    assert code == 0
    assert found % 7 == 0
    assert runs(found)
    assert not runs(found + 7)
    several = ["--policies", "keep_all", "--jobs", "1", "--seconds", "20", "--json"]
    code, out, _ = tiersim("advise", *job, "--goal", "batch", *several, capsys=capsys)
    assert json.loads(out)["best"]["batch"] == found
    code, out, _ = tiersim("advise", *job, *several, capsys=capsys)
    assert code == 0
    assert json.loads(out)["best"]["batch"] % 7 == 0


RAISING = """
from sim.policies.base import Policy


class Raising(Policy):
    def plan(self, problem):
        raise ValueError("boom")
"""


@pytest.mark.parametrize("command", [["largest-batch", "--budget", "20 MB"], ["smallest-budget", "--batch", "4"]])
def test_among_several_policies_a_wrong_name_is_refused_and_a_failure_is_one(command, config, tmp_path, capsys):
    words = [*command, "--profile", "a100_40_pcie", "--model", config, "--seq", "64", "--policies"]
    code, out, err = tiersim(*words, "keep_all,full_recomptue", capsys=capsys)
    assert (code, out) == (2, "")
    assert "did you mean 'full_recompute'" in err
    (tmp_path / "raising.py").write_text(RAISING)
    code, out, _ = tiersim(*words, f"keep_all,{tmp_path}/raising.py:Raising", capsys=capsys)
    assert code == 1
    assert [line.partition(":")[0] for line in without_errors(out)] == ["keep_all", f"{tmp_path}/raising.py"]
    assert "boom" in out


@pytest.mark.parametrize(
    "command",
    [
        ["advise", "--seconds", "300", "--jobs", "1", "--batch", "4"],
        ["advise", "--seconds", "300", "--jobs", "2", "--batch", "4"],
        ["advise", "--seconds", "300", "--jobs", "2", "--goal", "memory"],
        ["advise", "--seconds", "300", "--jobs", "2", "--devices", "2", "--batch", "4"],
        ["smallest-budget", "--batch", "4", "--time-limit", "300"],
        ["largest-batch", "--budget", "20 MB", "--time-limit", "300"],
        ["search", "--devices", "2", "--global-batch", "4"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_ctrl_c_keeps_what_was_found(command, form, config, tmp_path):
    path = tmp_path / "waits.py"
    path.write_text(f"BEGAN = {str(path.with_suffix('.began'))!r}\n{WAITS}")
    job = ["--profile", "a100_40_pcie", "--model", str(config), "--seq", "64"]
    # over devices both are run in each layout, for want of one that plans at once
    first = "zero_offload" if command[0] == "advise" and "--devices" in command else "full_recompute,keep_all"
    words = [*command, *job, *form, "--policies", f"{first},{path}:Waits"]
    running = subprocess.Popen(
        [sys.executable, "-m", "sim", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        while not path.with_suffix(".began").exists():
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.05)
        time.sleep(1)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        out, err = running.communicate(timeout=100)
    finally:
        running.kill()
    assert running.returncode == 130
    assert re.fullmatch(r"tiersim: stopped: \d+ (runs?|policies) so far\n", err)
    found = json.loads(out) if form else {}
    assert re.search(first.replace(",", "|"), out)
    if command[0] == "advise":
        assert found["stopped"] if found else "so far: the search was stopped" in out


@pytest.mark.parametrize(("precision", "said"), [("bf16", True), ("fp16", False)])
def test_a_type_without_a_peak_is_said_to_be_priced_as_another(precision, said):
    advice = advise(
        "gpt2", "v100_16", batch=1, sequence=16, precision=precision, seconds=60, jobs=1, policies=["keep_all"]
    )
    assert ("no bf16 peak in this profile: priced as fp16" in advice.text().splitlines()) == said
