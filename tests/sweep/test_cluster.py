"""Dask: the same cells give the same bytes as on this machine, whoever dies; SLURM's path is really run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from sim.errors import TiersimError
from sim.sweeps import Store, load_study, run_sweep, write_csv
from sim.sweeps.execute import Inline, Job

REASON = "Dask is not installed: pip install 'tiersim[cluster]'"
if find_spec("dask_jobqueue") is None:  # to import it changes what ctrl-C does
    pytest.skip(REASON, allow_module_level=True)
distributed = pytest.importorskip("distributed", reason=REASON)

from sim.sweeps import cluster as module  # noqa: E402
from sim.sweeps.cluster import Dask  # noqa: E402
from tests.clocks import cpu_s, least  # noqa: E402


def csv(swept, tmp_path):
    return write_csv(swept.rows, tmp_path / "out.csv").read_bytes()


def statuses(swept):
    return [record["row"]["status"] for _, record in swept.rows]


def wait_for(condition, seconds=60):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "nothing happens"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def cluster():
    """Two Dask workers that may die at once without taking blame."""
    import dask

    silent = {"distributed.scheduler.allowed-failures": 0, "distributed.logging.distributed": "critical"}
    with (
        dask.config.set(silent),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs="CRITICAL"
        ) as found,
    ):
        yield found


@pytest.fixture
def address(cluster):
    return cluster.scheduler_address


def test_a_cluster_gives_the_bytes_of_one_process(study, tmp_path, own, address):
    policies = ["keep_all", "dtr", own("Faulty"), own("Loud"), {"name": "chen", "method": ["sqrt", "search"]}]
    asked = study(policy=policies, batch=[1, 2, 3])
    inline = run_sweep(asked, executor=Inline())
    swept = run_sweep(asked, dask=address)
    assert csv(inline, tmp_path) == csv(swept, tmp_path)
    assert inline.progress.statuses == swept.progress.statuses
    assert set(inline.progress.statuses) >= {"ok", "infeasible", "failed"}


def test_a_scheduler_is_found_by_its_file(study, tmp_path):
    path = tmp_path / "scheduler.json"
    words = [["scheduler", "--port", "0"], ["worker", "--nworkers", "1", "--nthreads", "2", "--no-nanny"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = []
    try:
        for kind, *rest in words:
            command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--scheduler-file", str(path), *rest]
            command += ["--host", "127.0.0.1", "--no-dashboard"]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, cwd=tmp_path))
            wait_for(path.exists)
        swept = run_sweep(study(), out=tmp_path / "out", dask=str(path))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert csv(swept, tmp_path) == csv(run_sweep(study(), executor=Inline()), tmp_path)
    assert run_sweep(study(), out=tmp_path / "out", resume=True).progress.ran == 0


def test_paths_are_relative_to_the_driver(study, tmp_path, tiny, address, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "m.json").write_text(Path(tiny).read_text())
    monkeypatch.chdir(folder)
    swept = run_sweep(study(model="m.json", timeline={"policy": "dtr"}, budget="all", batch=1), out="o", dask=address)
    assert statuses(swept) == ["ok", "ok"]
    assert len(list((folder / "o" / "cells").glob("*/summary.json"))) == 1


def test_a_cell_that_kills_its_process_takes_no_other_with_it(study, tmp_path, own, address):
    killer = {"name": own("Killer"), "folder": str(tmp_path)}
    swept = run_sweep(study(policy=["keep_all", killer, "dtr"], budget="all", batch=1), dask=address)
    assert statuses(swept) == ["ok", "killed", "ok"]
    assert len(list(tmp_path.glob("mark*"))) == 3


def test_a_cell_that_kills_its_dask_worker_takes_no_other_with_it(study, tmp_path, own, address):
    killer = {"name": own("KillsParent"), "folder": str(tmp_path)}
    asked = study(policy=["keep_all", killer, "dtr"], budget="all", batch=[1, 2])
    asked["skip"] = {"policy": own("KillsParent"), "batch": 2}
    swept = run_sweep(asked, dask=address)
    assert statuses(swept) == ["ok", "killed", "ok", "ok", "ok"]
    assert len(list(tmp_path.glob("mark*"))) == 3


def test_a_dask_worker_that_is_killed_costs_nothing(study, tmp_path, cluster, address):
    asked = study(batch=[1, 2, 3], seed=list(range(8)))
    kills = []

    def kill(progress):
        if progress.ran == 10:
            kills.append(next(iter(cluster.workers.values())).pid)
            os.kill(kills[0], signal.SIGKILL)

    swept = run_sweep(asked, out=tmp_path / "out", dask=address, on_progress=kill)
    assert kills
    assert csv(swept, tmp_path) == csv(run_sweep(asked, executor=Inline()), tmp_path)
    assert sum(1 for _ in Store(tmp_path / "out").segments[0].open()) == len(swept.rows)  # none twice


def test_a_cell_that_takes_too_long_is_ended(study, own, address):
    began = time.monotonic()
    swept = run_sweep(study(policy=[own("Sleeper"), "dtr"], budget="all", batch=1, time_limit="6 s"), dask=address)
    assert statuses(swept) == ["timed_out", "ok"]
    assert time.monotonic() - began < 50


@pytest.mark.alone
def test_the_driver_and_its_scheduler_spend_less_than_two_milliseconds_a_cell(study, address):
    asked = study(batch=list(range(1, 31)), seed=list(range(20)), policy="keep_all", budget="all")
    cells = load_study(asked).cells()
    jobs = [Job({**cell.task, "figures": {"no.such": "key"}}, cell.group) for cell in cells]  # refused at once
    dask = Dask(address)
    list(dask.run(jobs[:10]))
    assert sum(1 for _ in dask.run(jobs)) == len(jobs) == 600
    limit = max(0.002, 6.5 * bare_loop_s())  # 2 ms where a bare loop takes 0.31 ms
    # the scheduler is in this process
    assert least(limit, lambda: cpu_s(lambda: list(dask.run(jobs))) / len(jobs), tries=4) < limit


def bare_loop_s():
    import simpy

    def walk(env):
        for _ in range(659):
            yield env.timeout(1)

    best = float("inf")
    for _ in range(5):
        began, env = time.process_time(), simpy.Environment()
        env.process(walk(env))
        env.run()
        best = min(best, time.process_time() - began)
    return best


DRIVER = """
import json, sys
from sim.sweeps import run_sweep
run_sweep(json.loads(sys.argv[1]), out=sys.argv[2], dask=sys.argv[3])
"""


def test_a_driver_that_is_killed_loses_no_finished_cell(study, tmp_path, address):
    asked, out = study(seed=list(range(20))), tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", DRIVER, json.dumps(asked), str(out), address]
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE)
    segment = out / "segments" / "00001.jsonl"
    wait_for(lambda: segment.exists() and segment.stat().st_size > 2000)
    process.kill()
    process.communicate()
    kept = Store(out).records()
    assert 0 < len(kept) < 160
    again = run_sweep(asked, out=out, resume=True, dask=address)
    assert again.progress.reused == len(kept)
    assert csv(again, tmp_path) == csv(run_sweep(asked, executor=Inline()), tmp_path)


def test_a_worker_of_another_version_stops_the_sweep(study, address, monkeypatch):
    monkeypatch.setattr(module, "sources_stamp", lambda: "those of before an edit")
    with pytest.raises(TiersimError, match="another version of this program is there"):
        run_sweep(study(), dask=address)


def test_a_scheduler_that_lacks_this_program_is_one_line():
    try:
        try:
            import no_such_program  # noqa: F401
        except ImportError as cause:
            raise RuntimeError("Error during deserialization of the task graph.\nSee …") from cause
    except RuntimeError as error:  # as a scheduler without it answers
        said = module._foreign(error)
    assert said == (
        "dask: scheduler and workers need this program, in the same version: "
        "ModuleNotFoundError: No module named 'no_such_program'"
    )


def test_a_scheduler_that_goes_is_one_line(study, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CONNECT_S", 5)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", silence_logs="CRITICAL"
    ) as other:

        def leave(progress):
            if progress.ran == 1:
                other.close()

        with pytest.raises(TiersimError, match="the connection to the scheduler was lost") as caught:
            run_sweep(
                study(seed=list(range(500))), out=tmp_path / "out", dask=other.scheduler_address, on_progress=leave
            )
    assert "\n" not in str(caught.value)
    assert Store(tmp_path / "out").records()


def test_a_scheduler_without_workers_is_not_waited_for_for_ever(study, monkeypatch):
    monkeypatch.setattr(module, "ARRIVE_S", 0.5)
    monkeypatch.setattr(module, "LOOK_S", 0.2)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty,
        pytest.raises(TiersimError, match=r"has no workers, and none has come in 0\.5 s"),
    ):
        run_sweep(study(), dask=empty.scheduler_address)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"dask": "tcp://127.0.0.1:1"}, "no scheduler answers there"),
        ({"dask": "slrum", "jobs": None}, "expected an address such as .*did you mean 'slurm'"),
        ({"dask": "gone.json"}, "expected an address such as"),
        ({"dask": "slurm"}, "say how many workers to start"),
        ({"dask": "tcp://127.0.0.1:1", "jobs": 3}, "jobs: value 3: goes with dask 'slurm'"),
        ({"dask": "tcp://127.0.0.1:1", "slurm": {"queue": "x"}}, "slurm: goes with dask 'slurm'"),
        ({"slurm": {"queue": "x"}}, "slurm: goes with dask 'slurm'"),
        ({"dask": "slurm", "jobs": 1, "slurm": {"queu": "x"}}, "no setting 'queu' .did you mean 'queue'"),
        ({"dask": "slurm", "jobs": 1, "slurm": {"submit_command": "yhbtach"}}, "value 'yhbtach': there is no such"),
    ],
)
def test_what_cannot_be_reached_is_one_line(study, monkeypatch, words, message):
    monkeypatch.setattr(module, "CONNECT_S", 2)
    with pytest.raises(TiersimError, match=message) as caught:
        run_sweep(study(), **words)
    assert "\n" not in str(caught.value)


# ---- SLURM ---------------------------------------------------------------------------------------

SBATCH = """#!/bin/sh
# takes the script as sbatch does, and runs it on this machine as job of its process group's number
if grep -q '^#SBATCH -p closed' "$1"; then echo 'sbatch: error: invalid partition: closed' >&2; exit 1; fi
cp "$1" {folder}/job.$$
setsid sh {folder}/job.$$ > {folder}/job.$$.out 2>&1 < /dev/null &
echo "$!" >> {folder}/submitted
echo "Submitted batch job $!"
"""

SCANCEL = """#!/bin/sh
echo "$1" >> {folder}/cancelled
kill -- "-$1"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder on PATH with `yhbatch` and `yhcancel`, which run jobs here and write down which."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("yhbatch", SBATCH), ("yhcancel", SCANCEL)):
        (folder / name).write_text(text.format(folder=shlex.quote(str(folder))))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield folder
    for line in jobs(folder, "submitted") - jobs(folder, "cancelled"):
        os.killpg(int(line), signal.SIGKILL)


def jobs(folder, what):
    return set((folder / what).read_text().split()) if (folder / what).exists() else set()


SITE = {"submit_command": "yhbatch", "cancel_command": "yhcancel", "queue": "thcp1", "walltime": "00:10:00"}


def test_slurm_starts_the_workers_and_ends_them(study, tmp_path, slurm):
    seen = {}

    def look(progress):
        seen.update((path.name, path.read_text()) for path in slurm.glob("job.*") if path.suffix != ".out")

    swept = run_sweep(study(), dask="slurm", jobs=2, slurm=SITE, on_progress=look)
    assert csv(swept, tmp_path) == csv(run_sweep(study(), executor=Inline()), tmp_path)
    assert len(jobs(slurm, "submitted")) == 2
    assert jobs(slurm, "cancelled") == jobs(slurm, "submitted")
    script = next(iter(seen.values()))
    assert {"#SBATCH -p thcp1", "#SBATCH -n 1", "#SBATCH --cpus-per-task=1", "#SBATCH -t 00:10:00"} <= set(
        script.splitlines()
    )


def test_a_job_that_ends_is_submitted_again(study, tmp_path, slurm, monkeypatch):
    import dask

    asked = study(seed=list(range(20)))
    ended = []

    def end(progress):
        if progress.ran == 1:
            (job,) = jobs(slurm, "submitted")
            ended.append(job)
            os.killpg(int(job), signal.SIGKILL)

    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1s"}):
        swept = run_sweep(asked, dask="slurm", jobs=1, slurm=SITE, on_progress=end)
    assert ended
    assert csv(swept, tmp_path) == csv(run_sweep(asked, executor=Inline()), tmp_path)
    assert len(jobs(slurm, "submitted")) == 2


INTERRUPTED = """
import os, signal, sys
from sim.sweeps import command

def stop(progress):
    if progress.ran == 1:
        os.kill(os.getpid(), signal.SIGINT)

run = command.run_sweep
command.run_sweep = lambda *a, on_progress, **k: run(*a, on_progress=lambda p: (on_progress(p), stop(p)), **k)
site = {"submit_command": "yhbatch", "cancel_command": "yhcancel"}
command.run_study(sys.argv[1], out=sys.argv[2], jobs=1, dask="slurm", slurm=site)
"""


def test_ctrl_c_ends_the_jobs_and_says_how_to_go_on(study_file, tmp_path, slurm):
    path, out = study_file(), str(tmp_path / "out")
    words = [sys.executable, "-c", INTERRUPTED, path, out]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert "KeyboardInterrupt" in run.stderr
    site = "--slurm submit_command=yhbatch --slurm cancel_command=yhcancel"
    said = [line for line in run.stderr.splitlines() if line.startswith("tiersim: ")]
    assert said[-1] == f"tiersim: resume with: tiersim sweep {path} -o {out} --jobs 1 --dask slurm {site} --resume"
    assert jobs(slurm, "submitted") == jobs(slurm, "cancelled")
    assert len(Store(out).records()) >= 1


def test_jobs_that_slurm_does_not_take_are_one_line(study, slurm):
    with pytest.raises(TiersimError) as caught:
        run_sweep(study(), dask="slurm", jobs=2, slurm={**SITE, "queue": "closed"})
    assert str(caught.value) == "slurm: no job was taken: sbatch: error: invalid partition: closed"


# ---- the extra -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gone", "where"), [("distributed", "tcp://a:1"), ("dask_jobqueue.slurm", "slurm")])
def test_without_the_extra_one_line_says_how_to_get_it(study, monkeypatch, gone, where):
    monkeypatch.setitem(sys.modules, gone, None)
    with pytest.raises(TiersimError, match=r"pip install 'tiersim\[cluster\]'") as caught:
        list(Dask(where, jobs=1 if where == "slurm" else None).run(["no job is looked at"]))
    assert "\n" not in str(caught.value)
