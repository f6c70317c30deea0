"""An explanation adds up: waits are the run's stalls, differences those of two runs, and each change is a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.experiment import simulate
from sim.explanation import explain
from sim.explanation.parting import parting, steps
from sim.hardware.profile import load_profile
from sim.plan import Plan
from sim.report.error_bars import error_bar
from tests.analysis.test_waits import late, there_and_back
from tests.machines import GB, machine
from tests.test_cli import tiersim
from workloads import transformer, w1

ROOM = 1 << 40


@pytest.mark.parametrize("policy", ["swap_all", "lru_tiering", "delta", "dtr", "full_recompute", "hybrid"])
@pytest.mark.parametrize("rate", [GB // 4, 4 * GB])
def test_waits_are_the_stalls_of_the_run(policy, rate):
    trace = w1(6)
    whole = simulate(trace, machine(host=ROOM, rate=rate))
    result = simulate(trace, machine(host=ROOM, rate=rate), policy, budget=int(0.75 * whole.summary()["peak_bytes"]))
    found, summary = explain(result, whole, seconds=0), result.summary()
    by_cause = found.waits.groupby("cause")["stall_ns"].sum().to_dict()
    assert by_cause == {cause: ns for cause, ns in summary["stall_ns"].items() if ns}
    assert found.waits["stall_ns"].is_monotonic_decreasing
    copies = found.waits[found.waits["cause"] == "transfer"]
    assert set(copies["link"]) <= {"d2h", "h2d"}
    assert (copies["tensor"] != "").all()
    assert found.peak.bytes == summary["peak_bytes"]
    assert sum(found.recomputed.values()) == summary["recompute_ns"]
    more = result.log.end - whole.log.end
    assert sum(found.parting.more.values()) == sum(found.parting.by_phase.values()) == more
    assert ("waiting" in found.text()) is True


def test_two_runs_part_where_their_steps_differ():
    trace = late()
    kept = replay(Plan(trace), machine(host=ROOM))
    moved = replay(there_and_back(), machine(host=ROOM))
    apart = parting(kept, moved)
    assert (apart.first.op, apart.first.does, apart.first.start_ns) == ("z", "runs", 60)
    assert (apart.second.op, apart.second.does, apart.second.ns) == ("z", "waits for transfer", 40)
    assert apart.more == {"waiting: transfer": 40}
    assert apart.by_phase == {"backward": 40}
    same = parting(kept, kept)
    assert (same.first, same.second, same.more, same.by_phase) == (None, None, {}, {})
    assert [step.op for step in steps(kept)] == ["a", *(f"f{i}" for i in range(5)), "z"]


def test_each_change_is_a_run_and_the_best_comes_first():
    trace = w1(6)
    platform = machine(host=ROOM, rate=GB // 4)
    whole = simulate(trace, platform)
    budget = int(0.75 * whole.summary()["peak_bytes"])
    result = simulate(trace, platform, "lru_tiering", budget=budget)
    found = explain(result, trace=trace, seconds=60)
    assert found.untried == 0
    ends = [each.makespan_ns for each in found.changes if each.makespan_ns is not None]
    assert ends == sorted(ends)
    tried = {each.what: each.makespan_ns for each in found.changes}
    assert (
        tried["lru_tiering(prefetch=4)"] == simulate(trace, platform, "lru_tiering", budget=budget, prefetch=4).log.end
    )
    faster = simulate(trace, machine(host=ROOM, rate=GB // 2), "lru_tiering", budget=budget).log.end
    assert tried["links twice as fast (d2h, h2d)"] == faster < result.log.end
    text = found.text()
    assert "links twice as fast" in text
    assert f"{len(found.changes)} tried" in text


def test_a_run_that_waits_for_the_host_names_it_and_what_a_faster_one_saves():
    trace = transformer("gpt2", batch=1, sequence=128, precision="amp_bf16")
    result, plain = (simulate(trace, "a100_40_pcie", policy) for policy in ("zero_offload", "keep_all"))
    found = explain(result, plain, trace=trace, seconds=60)
    waited = found.waits[found.waits["cause"] == "engine"]
    assert waited.groupby("link")["stall_ns"].sum()["cpu"] > result.log.end / 3
    best = min((each for each in found.changes if each.of == "machine"), key=lambda each: each.makespan_ns)
    assert best.what == "cpu twice as fast, and what they share (host_dram)"
    assert 0.5 <= best.makespan_ns / result.log.end < 0.75
    lines = found.text().splitlines()
    assert any("waiting for results of other engines: cpu" in line for line in lines)
    assert any("waits where the plan says so at" in line for line in lines)
    same = explain(plain, plain, trace=trace, seconds=0).text()
    assert "as with unlimited memory" in same
    assert "as fast, the same peak" in same


def test_two_runs_within_the_model_s_own_error_are_said_not_to_be_told_apart():
    trace = transformer("gpt2", batch=1, sequence=128)
    platform = load_profile("a100_80_sxm")
    runs = [simulate(trace, replace(platform, engines=_launching(platform, ns))) for ns in (5000, 5100, 10000)]
    bar = error_bar("policies").worst
    near, far = (run.log.end / runs[0].log.end - 1 for run in runs[1:])
    assert 0 < near < bar < far
    for run, is_near in ((runs[1], True), (runs[2], False)):
        for found in (explain(run, runs[0], seconds=0), explain(runs[0], run, seconds=0)):
            said = "the times can't be told apart: they differ by no more than the model's own error of 4.1 %, n = 11"
            assert (said in found.text()) == found.indistinguishable == is_near
            assert found.as_dict()["indistinguishable"] == is_near
            assert found.as_dict()["error"]["policies"]["bar"] == bar
    assert explain(runs[0], seconds=0).indistinguishable is None
    assert "told apart" not in explain(runs[0], runs[0], seconds=0).text()


def _launching(platform, ns):
    return tuple(replace(engine, launch=ns) if engine.main else engine for engine in platform.engines)


def test_two_layouts_are_told_apart_by_the_error_of_layouts():
    trace = transformer("gpt2", batch=2, sequence=128)
    runs = [simulate(trace, "a100_80_sxm", parallel={"dp": 2, "zero": zero}) for zero in (1, 3)]
    found = explain(*runs, seconds=0)
    assert found.are_two_layouts
    apart = max(run.log.end for run in runs) / min(run.log.end for run in runs) - 1
    assert found.indistinguishable == (apart <= error_bar("layouts").nine_tenths)
    assert not explain(runs[0], runs[0], seconds=0).are_two_layouts


def test_without_time_no_change_is_tried_and_it_says_so():
    result = simulate(w1(4), machine(host=ROOM), "lru_tiering")
    found = explain(result, seconds=1e-9)
    assert (found.changes, found.untried > 0) == ((), True)
    assert "left out for lack of time" in found.text()


def test_runs_of_two_machines_and_rewritten_traces_are_refused():
    one = simulate(w1(4), machine(host=ROOM), "swap_all")
    other = simulate(w1(4), replace(machine(host=ROOM), name="other"), "swap_all")
    with pytest.raises(TiersimError, match="two machines, other and toy"):
        explain(one, other)
    jobs = [simulate(transformer("gpt2", batch=n, sequence=8), "mt3000_survey") for n in (1, 2)]
    with pytest.raises(TiersimError, match="two jobs, batch 2 and 1"):
        explain(*jobs, seconds=0)
    with pytest.raises(TiersimError, match="full_recompute rewrites the trace: give the one that was simulated"):
        explain(simulate(w1(4), machine(host=ROOM), "full_recompute"))


def test_the_command_explains_a_saved_run_beside_another(tmp_path, capsys):
    job = ("--profile", "mt3000_survey", "--model", "gpt2", "--batch", "4", "--seq", "512", "--budget", "70%")
    folders = [str(tmp_path / name) for name in ("reactive", "planned")]
    for folder, policy in zip(folders, ("lru_tiering", "swap_all"), strict=True):
        assert tiersim("run", *job, "--policy", policy, "-o", folder, capsys=capsys)[0] == 0
    code, said, _ = tiersim("explain", *folders, "--seconds", "0", capsys=capsys)
    assert code == 0
    assert "Against swap_all" in said
    assert "they part at" in said
    code, said, _ = tiersim("explain", folders[0], "--seconds", "0", "--json", capsys=capsys)
    found = json.loads(said)
    saved = json.loads((tmp_path / "reactive" / "summary.json").read_text(encoding="utf-8"))
    assert code == 0
    assert found["peak"]["bytes"] == saved["peak_bytes"]
    assert sum(row["stall_ns"] for row in found["waits"]) == sum(saved["stall_ns"].values())
    assert found["parting"] is None


def test_the_command_names_a_folder_without_a_run(tmp_path, capsys):
    code, _, err = tiersim("explain", tmp_path, capsys=capsys)
    assert code == 2
    assert "no run here: expected summary.json" in err


def test_changes_are_simulated_for_as_many_iterations_as_the_run():
    trace = w1(6)
    whole = simulate(trace, machine(host=ROOM, rate=GB // 4))
    budget = int(0.75 * whole.summary()["peak_bytes"])
    first = simulate(trace, machine(host=ROOM, rate=GB // 4), "capuchin", budget=budget, iterations=1)
    steady = simulate(trace, machine(host=ROOM, rate=GB // 4), "capuchin", budget=budget)
    assert first.log.end != steady.log.end
    for result, iterations in ((first, 1), (steady, None)):
        faster = next(each for each in explain(result, trace=trace, seconds=60).changes if "links" in each.what)
        platform = machine(host=ROOM, rate=GB // 2)
        again = simulate(trace, platform, "capuchin", budget=budget, iterations=iterations)
        assert faster.makespan_ns == again.log.end


def test_changes_are_simulated_with_the_runs_own_limit_of_recomputation():
    result = simulate(w1(6), machine(host=ROOM), "full_recompute")
    for limit, refused in ((100, False), (0.01, True)):
        found = explain(result, trace=w1(6), seconds=60, recompute_limit=limit)
        assert all((each.makespan_ns is None) == refused for each in found.changes if each.of == "machine")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_of_search_that_is_none_is_refused(seconds):
    with pytest.raises(TiersimError, match=r"^seconds: value \S+: expected a finite number of at least 0; nearest: 0$"):
        explain(simulate(w1(1), "a100_40_pcie"), seconds=seconds)
