"""A time limit a cell: what takes longer is ended, said, and not tried again under the same limit."""

import time

import pytest

from sim.errors import TiersimError
from sim.sweeps import Store, StudyError, load_study, run_sweep, write_csv
from sim.sweeps.cell import Bench
from sim.sweeps.command import list_results, run_study
from sim.sweeps.execute import Inline, Job, timed_out
from sim.sweeps.pool import Local


def statuses(swept):
    return [record["row"]["status"] for _, record in swept.rows]


class Ends:
    """Runs cells in this process, and says of those of some policies that they took too long."""

    def __init__(self, *policies):
        self.policies = policies
        self.given = 0

    def run(self, jobs):
        bench = Bench()
        for job in jobs:
            self.given += 1
            ended = job.task["policy"] in self.policies
            yield job.id, timed_out(job.limit_s) if ended else bench.run(job.task)


def test_a_cell_that_takes_too_long_is_ended_and_takes_no_other_with_it(study, own):
    asked = study(policy=["keep_all", own("Sleeper"), "dtr"], budget="all", batch=1, time_limit="6 s")
    began = time.monotonic()
    swept = run_sweep(asked, jobs=2)
    assert time.monotonic() - began < 50  # it would have slept for a minute
    assert statuses(swept) == ["ok", "timed_out", "ok"]
    record = swept.rows[1][1]
    assert record["row"] == {"status": "timed_out", "fits": None, "error": "not finished within 6 s"}
    assert record["ran"]["time_limit_s"] == 6
    assert swept.failed == 1


def test_few_cells_are_ended_too(study, own):
    swept = run_sweep(study(policy=own("Sleeper"), budget="all", batch=1, time_limit="200 ms"))
    assert statuses(swept) == ["timed_out"]


def test_a_limit_changes_no_identity_and_no_byte(study, tmp_path):
    def ids(asked):
        return [cell.id for cell in load_study(asked).cells()]

    limited = study(time_limit="60 s")
    assert ids(limited) == ids(study()) == ids(study(time_limit="1 s"))
    with_limit = write_csv(run_sweep(limited, jobs=1).rows, tmp_path / "a.csv").read_bytes()
    assert with_limit == write_csv(run_sweep(study()).rows, tmp_path / "b.csv").read_bytes()


def test_what_was_ended_is_tried_again_under_a_longer_limit_only(study, tmp_path):
    def again(limit, *ends):
        executor = Ends(*ends)
        asked = study(policy=["keep_all", "dtr"], budget="all", batch=1, time_limit=limit)
        swept = run_sweep(asked, out=tmp_path / "out", resume=True, executor=executor)
        assert swept.failed == statuses(swept).count("timed_out")
        return executor.given, statuses(swept)

    assert again("2 s", "dtr") == (2, ["ok", "timed_out"])
    assert again("2 s") == (0, ["ok", "timed_out"])
    assert again("1 s") == (0, ["ok", "timed_out"])
    assert again("3 s", "dtr") == (1, ["ok", "timed_out"])
    assert again("2500 ms") == (0, ["ok", "timed_out"])
    assert again(None) == (1, ["ok", "ok"])
    assert again("1 s", "dtr") == (0, ["ok", "ok"])  # an answer stays one
    assert len(Store(tmp_path / "out").records()) == 2


def test_the_summary_names_it_and_the_exit_status_is_1(study_file, tmp_path, capsys, own):
    path = study_file(policy=own("Sleeper"), budget="all", batch=1, time_limit="300 ms")
    assert run_study(path, out=str(tmp_path / "out")) == 1
    first, line, _ = capsys.readouterr().out.splitlines()
    assert first.endswith(": 1 timed_out")
    assert line.startswith("timed_out: ")
    assert line.endswith("not finished within 0.3 s")
    assert list_results(str(tmp_path / "out")).endswith("1 cells: 1 timed_out")


def test_an_executor_that_cannot_end_a_cell_refuses(study):
    with pytest.raises(TiersimError, match="a time limit needs processes that can be ended"):
        run_sweep(study(time_limit="1 s"), executor=Inline())


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("60", "the unit is missing"),
        (60, "expected a time such as"),
        ("1 h", "expected a time such as"),
        ("1 us", "expected at least 10 ms"),
        (["1 s"], "expected a time such as"),
    ],
)
def test_a_limit_that_makes_no_sense_is_one_line(study, limit, message):
    with pytest.raises(StudyError, match=message) as caught:
        load_study(study(time_limit=limit))
    (line,) = caught.value.problems
    assert line.startswith("study: time_limit: value ")


class Sleeps:
    """Runs a task by sleeping as long as it says."""

    def run(self, task):
        time.sleep(task["seconds"])
        return {"row": {"slept": task["seconds"]}, "ran": {}}


def test_a_pool_stops_what_runs_when_its_time_is_over():
    jobs = [Job({"id": f"{seconds} s", "seconds": seconds}, "") for seconds in (0, 600, 601)]
    pool = Local(2, f"{__name__}:Sleeps", keeps=True)
    assert [id for id, _ in pool.run(jobs[:1])] == ["0 s"]  # a process has started, and stays
    began = time.monotonic()
    assert list(pool.run(jobs, until=began + 1)) in ([], [("0 s", {"row": {"slept": 0}, "ran": {}})])
    assert time.monotonic() - began < 60
    pool.close()
