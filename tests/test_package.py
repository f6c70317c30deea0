"""The wheel: it holds the data files, and it works from another folder."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_data_file_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    data = ("hardware_profiles/*.toml", "workloads/configs/*.toml")
    page = ("template.html", "*.css", "*.js", "uplot/*")
    for pattern in (*data, *(f"sim/report/page/{part}" for part in page), "sim/**/*.py", "workloads/**/*.py"):
        for path in ROOT.glob(pattern):
            assert path.relative_to(ROOT).as_posix() in names
    assert "sim/py.typed" in names
    assert not any(name.startswith(("tests/", "notebooks/", "benchmarks/")) for name in names)


def test_the_wheel_works_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "import json, sim, workloads, hardware_profiles\n"
        "trace = workloads.transformer('gpt2', batch=1, sequence=128)\n"
        "result = sim.simulate(trace, sim.load_profile('mt3000_survey'), 'full_recompute')\n"
        "print(json.dumps([sim.__file__, result.summary()['fits']]))\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=elsewhere, env=env)
    assert run.returncode == 0, run.stderr
    where, fits = json.loads(run.stdout)
    assert Path(where).is_relative_to(site)
    assert fits is True


def test_the_command_is_declared(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "tiersim = sim.cli:program" in archive.read(entry).decode()
