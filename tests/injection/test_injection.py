"""A disk that fails at any write of a command does no harm; `run.py` beside this tries every fault at every write."""

from __future__ import annotations

import pytest

from tests.injection.commands import COMMANDS, Bench
from tests.injection.disk import FAULTS, Disk, watched
from tests.injection.run import hunt


def test_a_sample_of_faults_does_no_harm():
    found = hunt(6, names=("sweep", "export"))
    assert not found["harm"], "\n".join(found["harm"])
    assert found["cases"] == 6
    assert len(found["faults"]) > 3


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_fault_at_every_write_does_no_harm():
    found = hunt()
    assert not found["harm"], "\n".join(found["harm"])
    assert found["cases"] >= 1000
    assert set(found["commands"]) == set(COMMANDS)
    assert set(found["faults"]) == set(FAULTS)


def test_the_disk_fails_where_it_is_told_to(tmp_path):
    def written(at, fault):
        disk = Disk(tmp_path, at, fault)
        with watched(disk), open(tmp_path / "file", "wb", buffering=0) as file:
            taken = [file.write(b"12345678"), file.write(b"12")]
        return disk.events, taken

    assert written(0, "no space") == (["open", "write", "write"], [8, 2])
    assert written(2, "short write") == (["open", "write", "write"], [4, 2])
    for at, fault in ((1, "read-only"), (3, "no space"), (2, "a broken block"), (2, "short write, then no space")):
        with pytest.raises(OSError, match=str(tmp_path)):
            written(at, fault)
    disk = Disk(tmp_path / "elsewhere", 1, "read-only")
    with watched(disk):
        (tmp_path / "file").write_text("not watched")
    assert disk.events == []


def test_harm_is_noticed(tmp_path, monkeypatch):
    from sim.sweeps.store import Writer

    bench = Bench(tmp_path)
    bench.right("resume")
    monkeypatch.setattr(Writer, "add", lambda *_: None)
    with pytest.raises(AssertionError):
        bench.case("resume", "clock set back", 1)
