"""kill -9 of workers and of the driver, at any moment: no finished cell is lost or doubled, a resume gives the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim.sweeps import Store, run_sweep, write_csv
from sim.sweeps.store import read_segment

DRIVER = """
import json, sys
from sim.sweeps import run_sweep
run_sweep(json.loads(sys.argv[1]), out=sys.argv[2], jobs=2, resume=True)
"""


def start(study, folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(study), str(folder)], env=environment)


def children(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def lines(folder):
    """Ids of all whole lines, in order."""
    paths = sorted((folder / "segments").glob("*.jsonl"))
    return [record["id"] for path in paths for record in read_segment(path) if record is not None]


def wait_for(condition, process, seconds=60):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "nothing happens"
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ordeal(study, folder, kills, seed):
    """Sweep with kills of workers and drivers until it is done; the number of driver kills."""
    chance = random.Random(seed)
    drivers = 0
    process = start(study, folder)
    try:
        for kill in range(kills):
            before = len(lines(folder))
            wanted = before + chance.randint(1, 6)
            if not wait_for(lambda wanted=wanted: len(lines(folder)) >= wanted, process):
                break
            time.sleep(chance.random() * 0.02)
            workers = children(process)
            if workers and kill % 2 == 0:
                os.kill(chance.choice(workers), signal.SIGKILL)
                continue
            finished = lines(folder)
            process.kill()
            process.wait()
            drivers += 1
            assert lines(folder)[: len(finished)] == finished
            limit = time.monotonic() + 20
            while any(is_alive(pid) for pid in workers):  # they end with their driver
                assert time.monotonic() < limit, "workers outlive their driver"
                time.sleep(0.01)
            process = start(study, folder)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
    return drivers


def check(study, folder, tmp_path, kills, seed):
    whole = write_csv(run_sweep(study, jobs=1).rows, tmp_path / "whole.csv").read_bytes()
    drivers = ordeal(study, folder, kills, seed)
    ids = lines(folder)
    assert len(ids) == len(set(ids)), "a cell was run twice"
    assert write_csv(Store(folder).rows(), tmp_path / "killed.csv").read_bytes() == whole
    return drivers


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_killing_a_worker_and_the_driver_loses_nothing(study, tmp_path):
    asked = study(batch=list(range(1, 8)), sequence=[8, 16], budget=["all", "95%", "90%"])
    assert check(asked, tmp_path / "out", tmp_path, kills=2, seed=0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_twenty_kills_lose_nothing(study, tmp_path, seed):
    asked = study(batch=list(range(1, 13)), sequence=[8, 16, 24, 32], budget=["all", "95%", "90%", "80%"])
    assert check(asked, tmp_path / "out", tmp_path, kills=20, seed=seed) >= 5
