"""Layouts over devices as an axis of a study: crossed, checked, filtered, run as `simulate(parallel=…)` runs them."""

import json

import pytest

from sim.commands.report_sweep import _combinations, _numbers
from sim.experiment import simulate
from sim.foreign import Trust
from sim.hardware.profile import load_profile
from sim.layout import lay_out
from sim.sweeps import StudyError, load_study, run_sweep
from sim.sweeps.command import show_results
from sim.sweeps.job import job
from workloads.transformer import transformer

A100 = {"profile": "a100_80_sxm", "policy": "keep_all", "budget": "all"}


def rows_of(study):
    return run_sweep(study).to_frame().to_dict("records")


def test_lists_in_a_table_are_crossed_and_a_list_of_layers_is_one_value(study):
    tables = [{}, {"pp": 2, "schedule": ["gpipe", "1f1b"], "micro_batches": [2, 4]}, {"pp": 2, "layers": [1, 1]}]
    found = [cell.labels["parallel"] for cell in load_study(study(**A100, batch=4, parallel=tables)).cells()]
    assert found == [
        "one device",
        "pp 2, schedule gpipe, micro_batches 2",
        "pp 2, schedule gpipe, micro_batches 4",
        "pp 2, micro_batches 2",
        "pp 2, micro_batches 4",
        "pp 2, layers (1, 1)",
    ]


def test_a_cell_is_the_run_that_simulate_makes_of_the_layout(study, tiny):
    layout = {"pp": 2, "micro_batches": 2, "schedule": "gpipe"}
    one, two = rows_of(study(**A100, batch=4, parallel=[{}, layout]))
    trace = transformer(tiny, batch=4, sequence=16, precision="fp32")
    alone, divided = simulate(trace, "a100_80_sxm"), simulate(trace, "a100_80_sxm", parallel=layout)
    for row, result in ((one, alone), (two, divided)):
        assert row["makespan_ns"] == result.summary()["makespan_ns"]
        assert row["peak_bytes"] == result.summary()["peak_bytes"]
    assert (one["stands_for"], two["stands_for"]) == (1, 2)
    assert two["bubble"] == divided.summary()["bubble"] > 0
    assert two["binding_device"] == divided.summary()["binding_device"]
    homes = [load_profile("a100_80_sxm", overrides={"devices": "2"}).home(device).name for device in (0, 1)]
    peaks = [two[f"peak_by_tier.{home}"] for home in homes]
    assert two["peak_bytes"] == two["fullest_bytes"] == max(peaks) > min(peaks) > 0


@pytest.mark.parametrize(
    ("profile", "path", "slow", "fast", "dp"),
    [
        ("ascend_910b", "links.hccs.rate", "1 GB/s", "50 GB/s", 4),
        ("mt3000_cluster", "networks.express.rate", "0.1 GB/s", "25 GB/s", 8),
    ],
)
def test_a_figure_of_what_joins_devices_makes_cells_of_its_own(study, tiny, profile, path, slow, fast, dp):
    given = {**A100, "profile": profile, "figures": {path: [slow, fast]}}
    rows = rows_of(study(**given, batch=8, parallel={"dp": dp}))
    trace = transformer(tiny, batch=8, sequence=16, precision="fp32")
    alone = [simulate(*lay_out(trace, profile, {"dp": dp}, overrides={path: rate})) for rate in (slow, fast)]
    assert [row["makespan_ns"] for row in rows] == [result.summary()["makespan_ns"] for result in alone]
    assert rows[0]["makespan_ns"] > rows[1]["makespan_ns"]
    assert len({row["cell"] for row in rows}) == 2


def test_replicas_stand_for_the_devices_asked(study):
    (row,) = rows_of(study(**A100, batch=4, parallel={"devices": 4, "zero": 1}))
    assert row["status"] == "ok"
    assert row["stands_for"] == 4


def test_a_stack_is_fused_after_ranks_divide_the_layers(study):
    (row,) = rows_of(study(**A100, batch=2, stack="fused", parallel={"tp": 2}))
    assert row["status"] == "ok"
    assert row["stands_for"] == 2


def test_a_budget_in_parts_is_of_the_fullest_device(study):
    layout = {"pp": 2, "micro_batches": 4, "schedule": "gpipe"}
    whole, part = rows_of(study(**{**A100, "budget": ["all", "90%"]}, batch=4, sequence=64, parallel=layout))
    first = load_profile("a100_80_sxm", overrides={"devices": "2"}).home(0).name
    assert whole["peak_bytes"] > whole[f"peak_by_tier.{first}"]  # the last stage has the logits
    assert whole["unconstrained_peak_bytes"] == whole["peak_bytes"]
    assert part["budget_bytes"] == whole["peak_bytes"] * 9 // 10
    assert part["status"] == "infeasible"


def test_a_layout_that_does_not_divide_the_job_is_an_answer_of_its_cell(study):
    rows = rows_of(study(**A100, batch=[2, 3], parallel={"pp": 2, "micro_batches": 2}))
    assert [row["status"] for row in rows] == ["ok", "not_applicable"]
    assert rows[1]["error"] == "micro_batches: 2 does not divide the batch of 3; nearest: 1"


def test_filters_name_what_a_layout_has(study):
    tables = [{}, {"pp": 2, "schedule": ["gpipe", "1f1b"], "micro_batches": 2}]
    skip = [{"parallel.schedule": "gpipe", "policy": "dtr"}, {"parallel.devices": "< 2"}]
    cells = load_study(study(**{**A100, "policy": ["keep_all", "dtr"]}, batch=2, parallel=tables, skip=skip)).cells()
    assert [(cell.labels["parallel"], cell.labels["policy"]) for cell in cells] == [
        ("pp 2, schedule gpipe, micro_batches 2", "keep_all"),
        ("pp 2, micro_batches 2", "keep_all"),
        ("pp 2, micro_batches 2", "dtr"),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": 2}, "study: parallel: there is no key 'stages' (valid: "),
        ([{}, {"shedule": "gpipe"}], "study: parallel[1]: there is no key 'shedule' (did you mean 'schedule'?)"),
        (
            {"schedule": "1fb1"},
            "study: parallel: value schedule 1fb1: schedule: '1fb1' is unknown (did you mean '1f1b'?)",
        ),
        ({"pp": 0}, "study: parallel: value pp 0: pp: needs a whole number of at least 1, has 0; nearest: 1"),
        ({"pp": "two", "devices": 4}, "pp: needs a whole number of at least 1, has 'two'; nearest: 1"),
        ({"devices": 6, "pp": 4}, "devices: 6 are not dp * tp * cp * pp with tp * cp * pp = 4; nearest: 8"),
        ({"pp": 2, "zero": 4}, "zero: needs one of 0, 1, 2, 3, has 4; nearest: 3"),
        ([4], "study: parallel[0]: value 4: expected a table such as { pp = 4, micro_batches = 8 }"),
        ({"pp": []}, "expected at least one value of each key"),
        ({"pp": list(range(1, 60)), "tp": list(range(1, 60))}, "its lists cross to 3,481 layouts"),
    ],
)
def test_a_mistake_in_a_layout_names_its_key_and_the_nearest_value(study, given, message):
    with pytest.raises(StudyError) as error:
        load_study(study(parallel=given))
    (line,) = [line for line in error.value.problems if "parallel" in line]
    assert message in line


def test_micro_batches_beside_layouts_go_into_their_tables(study):
    with pytest.raises(StudyError, match="micro_batches: with parallel it goes into its tables"):
        load_study(study(micro_batches=[1, 2], parallel={"pp": 2}))


def test_layouts_count_among_the_cells_that_a_study_may_have(study):
    with pytest.raises(StudyError, match=r"16 cells, and most_cells allows 15; the longest are .*parallel \(8\)"):
        load_study(study(**A100, parallel={"pp": [1, 2], "micro_batches": [1, 2, 4, 8]}, most_cells=15)).cells()


def test_the_layout_is_part_of_a_cells_identity_however_it_is_written(study):
    ids = [load_study(study(**A100, batch=2, **more)).cells()[0].id for more in (
        {}, {"parallel": {}}, {"parallel": {"pp": 1, "dp": 1}}, {"parallel": {"pp": 2}},
        {"parallel": {"pp": 2, "schedule": "1f1b"}}, {"parallel": {"devices": 2}}, {"parallel": {"dp": 2}},
    )]  # fmt: skip
    plain, empty, spelt, two, named, by_devices, by_replicas = ids
    assert plain == empty == spelt
    assert two == named
    assert by_devices == by_replicas
    assert len({plain, two, by_devices}) == 3


def test_results_show_devices_where_there_are_several(study, tmp_path):
    layout = {"pp": 2, "micro_batches": 2, "layers": [1, 1]}
    swept = study(**A100, batch=2, parallel=[{}, layout])
    run_sweep(swept, out=tmp_path / "kept", jobs=2)
    head = show_results(str(tmp_path / "kept")).splitlines()[0].split()
    assert head[1:3] == ["parallel", "policy"]
    assert {"stands_for", "peak_bytes", "bubble", "binding_device"} <= set(head)
    run_sweep(study(**A100, batch=2), out=tmp_path / "one", jobs=1)
    assert "bubble" not in show_results(str(tmp_path / "one")).splitlines()[0]


def test_a_page_repeats_a_cell_with_its_layout_and_refuses_too_many_devices(study, tmp_path):
    swept = study(**A100, batch=2, parallel=[{"pp": 2, "micro_batches": 2}, {"tp": 2, "micro_batches": [1, 2]}])
    first, *_ = load_study(swept).cells()
    trace, platform = job(json.loads(json.dumps(first.task)))
    assert trace.devices == platform.devices == 2
    assert _combinations(swept) == 3
    assert Trust(tmp_path, False, {}).too_much({**_numbers(first.task), "pp": 2000}) == [
        "pp 2000 is more than the 1,024 that results get without --trust"
    ]
    assert not Trust(tmp_path, False, {}).too_much(_numbers(first.task))
