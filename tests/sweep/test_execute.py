"""Executors: the same cells give the same bytes on each, and no cell takes others with it."""

import pytest

from sim.errors import TiersimError
from sim.sweeps import run_sweep, write_csv
from sim.sweeps.execute import Inline, Job
from sim.sweeps.identity import sources_stamp
from sim.sweeps.pool import Local, _Pool
from sim.sweeps.process import Worker
from tests.clocks import cpu_s, least


def csv(swept, tmp_path, name="out.csv"):
    return write_csv(swept.rows, tmp_path / name).read_bytes()


def test_a_pool_gives_the_bytes_of_one_process(study, tmp_path, own):
    policies = ["keep_all", "dtr", own("Faulty"), own("Loud"), {"name": "chen", "method": ["sqrt", "search"]}]
    asked = study(policy=policies, batch=[1, 2, 3])
    inline = run_sweep(asked, executor=Inline())
    pool = run_sweep(asked, executor=Local(3))
    assert csv(inline, tmp_path) == csv(pool, tmp_path)
    assert inline.progress.statuses == pool.progress.statuses
    assert set(inline.progress.statuses) >= {"ok", "infeasible", "failed"}


def test_a_fault_of_a_policy_is_one_row(study, own):
    swept = run_sweep(study(policy=["keep_all", own("Faulty")], budget="all", batch=1))
    good, bad = (record for _, record in swept.rows)
    assert (good["row"]["status"], bad["row"]["status"]) == ("ok", "failed")
    assert bad["row"]["error"] == "ZeroDivisionError: integer division or modulo by zero"
    assert "1 // 0" in bad["ran"]["traceback"]
    assert swept.failed == 1


def test_what_does_not_go_together_is_said_and_is_no_failure(study):
    swept = run_sweep(study(policy=["keep_all"], batch=[3], micro_batches=[1, 2], budget="all"))
    rows = [record["row"] for _, record in swept.rows]
    assert [row["status"] for row in rows] == ["ok", "not_applicable"]
    assert rows[1]["error"] == "micro_batches: 2 does not divide batch 3; nearest: 1"
    assert swept.failed == 0


def test_a_cell_that_kills_its_worker_is_tried_thrice_and_takes_no_other_with_it(study, tmp_path, own):
    killer = {"name": own("Killer"), "folder": str(tmp_path)}
    asked = study(policy=["keep_all", killer, "dtr"], budget="all", batch=1, seed=[0, 1])
    asked["skip"] = {"policy": own("Killer"), "seed": 1}
    swept = run_sweep(asked, executor=Local(2))
    statuses = {(c["labels"]["policy"].partition("(")[0], r["row"]["status"]) for c, r in swept.rows}
    assert statuses == {("keep_all", "ok"), (own("Killer"), "killed"), ("dtr", "ok")}
    assert len(list(tmp_path.glob("mark*"))) == 3
    assert "died each time" in next(r["row"]["error"] for _, r in swept.rows if r["row"]["status"] == "killed")
    assert swept.failed == 1


def test_a_cell_whose_worker_was_killed_twice_has_its_answer(study, tmp_path, own):
    killer = {"name": own("Killer"), "folder": str(tmp_path), "times": 2}
    swept = run_sweep(study(policy=[killer], budget="all", batch=1), executor=Local(2))
    assert [record["row"]["status"] for _, record in swept.rows] == ["ok"]


def test_suspects_run_alone(study, tmp_path, own):
    jobs = [Job({"id": name}, "group") for name in "abc"]
    pool = _Pool(jobs, 2)
    busy, idle = object.__new__(_FakeWorker), object.__new__(_FakeWorker)
    pool.groups.clear()
    pool.suspects.append(jobs[0])
    busy.job, idle.job, busy.ready, idle.ready = jobs[1], None, True, True
    pool.workers = {1: busy, 2: idle}
    pool.feed()
    assert idle.job is None  # another is at work
    busy.job = None
    pool.feed()
    assert [busy.job, idle.job] == [jobs[0], None]
    pool.suspects.append(jobs[2])
    pool.feed()
    assert idle.job is None
    pool.selector.close()


class _FakeWorker:
    group = ""

    def give(self, job):
        self.job = job


def test_a_worker_stays_with_its_trace():
    jobs = [Job({"id": f"{group}{i}"}, group) for group in "ab" for i in range(3)]
    pool = _Pool(jobs, 2)
    workers = [object.__new__(_FakeWorker) for _ in range(2)]
    pool.workers = dict(enumerate(workers))
    for worker in workers:
        worker.job, worker.ready = None, True
    seen = {0: [], 1: []}
    while pool.groups:
        pool.feed()
        for i, worker in enumerate(workers):
            seen[i].append(worker.job.group)
            worker.job, worker.group = None, worker.job.group
    assert seen == {0: ["a"] * 3, 1: ["b"] * 3}
    pool.selector.close()


def test_workers_end_with_their_run(study):
    executor = Local(2)
    outcomes = executor.run([Job({**cell.task}, cell.group) for cell in _cells(study)])
    next(outcomes)
    pool = outcomes.gi_frame.f_locals["pool"]
    processes = [worker.process for worker in pool.workers.values()]
    outcomes.close()
    assert all(process.poll() is not None for process in processes)


def _cells(study):
    from sim.sweeps import load_study

    return load_study(study()).cells()


@pytest.mark.alone
def test_the_driver_spends_less_than_two_milliseconds_a_cell(study, tmp_path):
    cells = _cells_of(study(batch=list(range(1, 31)), seed=list(range(10)), policy="keep_all", budget="all"))
    jobs = [Job({**cell.task, "figures": {"no.such": "key"}}, cell.group) for cell in cells]  # refused at once
    assert sum(1 for _ in Local(2).run(jobs)) == len(jobs) == 300
    assert least(0.002, lambda: cpu_s(lambda: list(Local(2).run(jobs))) / len(jobs), tries=4) < 0.002


def _cells_of(study):
    from sim.sweeps import load_study

    return load_study(study).cells()


def test_a_worker_that_starts_with_other_sources_stops_the_sweep(study, monkeypatch):
    monkeypatch.setattr("sim.sweeps.pool.sources_stamp", lambda: "those of before an edit")
    with pytest.raises(TiersimError, match="the program was changed while the sweep ran"):
        run_sweep(study(), executor=Local(1))


def test_progress_counts_and_estimates(study):
    seen = []
    run_sweep(study(), on_progress=lambda p: seen.append((p.done, p.total, p.left_s, p.text())))
    assert [(done, total) for done, total, _, _ in seen] == [(i, 8) for i in range(1, 9)]
    assert seen[0][2] > 0
    assert seen[-1][2] == 0
    assert seen[-1][3].startswith("8 of 8 cells in ")


# ---- plans of solvers ----------------------------------------------------------------------------


def plans_made(study, own, tmp_path, **how):
    policy = {"name": own("Solver"), "folder": str(tmp_path), **how}
    asked = study(policy=[policy], budget=["all", "99%"], batch=[1, 2], seed=[0, 1, 2])
    swept = run_sweep(asked, executor=Inline())
    assert len(swept.rows) == 12
    assert {record["row"]["status"] for _, record in swept.rows} <= {"ok", "infeasible"}
    return len(list(tmp_path.glob("plan*")))


@pytest.mark.parametrize(
    ("how", "count"), [({}, 2), ({"seeded": True}, 6), ({"hurried": True}, 12)], ids=["by itself", "seeded", "hurried"]
)
def test_a_solver_plans_once_for_cells_that_differ_in_what_it_does_not_read(study, own, tmp_path, how, count):
    assert plans_made(study, own, tmp_path, **how) == count


def test_a_plan_that_is_shared_gives_the_row_that_one_alone_does(study, tmp_path):
    asked = study(policy=["rotor", "sac_knapsack"], budget=["all", "95%"], batch=1, seed=[0, 1])
    together = run_sweep(asked, executor=Inline())
    alone = [run_sweep({**asked, "seed": seed}, executor=Inline()) for seed in (0, 1)]
    rows = {cell["id"]: record["row"] for swept in alone for cell, record in swept.rows}
    assert {cell["id"]: record["row"] for cell, record in together.rows} == rows
    assert "ok" in together.progress.statuses


def test_a_policy_edited_while_a_sweep_runs_gives_no_wrong_answer(study, own):
    (cell,) = _cells_of(study(policy=own("Loud"), budget="all", batch=1))
    task = {**cell.task, "sums": {**cell.task["sums"], "policy": "that of before an edit"}}
    (_, outcome), *_ = Local(1).run([Job(task, cell.group)])
    assert outcome["row"]["status"] == "failed"
    assert "the policy was changed while the program ran" in outcome["row"]["error"]


def test_a_process_that_nobody_uses_ends_by_itself():
    worker = Worker(idle_s=0.2)
    try:
        worker.begin(sources_stamp())
        assert worker.process.wait(timeout=30) == 0
    finally:
        worker.close()
