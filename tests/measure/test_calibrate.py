"""`tiersim calibrate --quick` on this machine's CPU."""

from __future__ import annotations

import importlib.util
import time

import pytest

from sim import load_profile, simulate
from sim.errors import TiersimError
from sim.hardware.profile import fit_error
from sim.measure.calibrate import calibrate, seconds_needed
from workloads import transformer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install 'tiersim[torch]'"
)


@pytest.fixture(scope="module")
def one_thread():
    import torch

    torch.set_num_threads(1)  # others may use the machine: threads that wait for each other take minutes


@pytest.fixture(scope="module")
def made(tmp_path_factory, one_thread):
    told = []
    began = time.perf_counter()
    path = calibrate(
        tmp_path_factory.mktemp("here") / "mine.toml", quick=True, device="cpu", progress=lambda *row: told.append(row)
    )
    return path, told, time.perf_counter() - began


def test_profile_is_read_and_a_step_runs_on_it(made):
    platform = load_profile(str(made[0]))
    assert platform.host is None
    assert {fact.standing for fact in platform.facts} == {"measured", "assumed"}
    assert 0 < fit_error(platform) < 2
    trace = transformer("gpt2-small", batch=1, sequence=64)
    # this CPU: more than 0.1 GFLOP/s, less than 100 TFLOP/s
    seconds = simulate(trace, platform).log.end / 1e9
    assert trace.meta["model_flops"] / 1e14 < seconds < trace.meta["model_flops"] / 1e8


def test_it_says_how_far_it_is_and_how_long_it_may_take(made):
    path, told, _ = made
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.toml"]
    assert told[0][0] == 0
    assert "about" in told[0][2]
    assert [row[0] for row in told] == sorted(row[0] for row in told)
    assert told[-1][:2] == (told[0][1],) * 2
    assert 0 < seconds_needed(quick=True) < 15
    assert seconds_needed() < 600


def test_an_interruption_leaves_what_was_there(tmp_path, one_thread):
    path = tmp_path / "mine.toml"
    path.write_text("before")

    def stop(done, total, what):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(path, quick=True, device="cpu", progress=stop)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [("mine.txt", "cpu", "toml"), ("no/such/mine.toml", "cpu", "no folder"), ("mine.toml", "abacus", "abacus")],
)
def test_what_cannot_be_done_is_refused_at_once(tmp_path, name, device, words):
    with pytest.raises(TiersimError, match=words):
        calibrate(tmp_path / name, quick=True, device=device)


def slow_bench(seconds, tick=lambda label: None):
    import torch

    from sim.measure.samples import QUICK, Bench

    class Slow(Bench):
        """A machine on which every call takes so long."""

        def _seconds(self, run, calls):
            return seconds

    return Slow(torch.device("cpu"), QUICK, tick)


def test_a_slow_size_does_not_end_a_sweep_of_too_few():
    from sim.measure.fit import Sample
    from sim.measure.samples import FEWEST

    def make(n):
        return Sample("matmul", "fp32", 2 * n**3, 12 * n**2, 0), lambda: None

    told: list[str] = []
    found = list(slow_bench(5.0, told.append).sweep(range(6, 13), make))
    assert [sample.flops for sample in found] == [2 << 3 * n for n in range(6, 6 + FEWEST)]
    assert len(told) == 7


def test_no_memory_ends_a_sweep_at_once():
    def make(n):
        raise MemoryError

    told: list[str] = []
    assert list(slow_bench(0.0, told.append).sweep(range(6, 13), make)) == []
    assert len(told) == 7


def test_a_slow_call_is_repeated(monkeypatch):
    from sim.measure.fit import Sample

    took = iter([0.5, 0.1, 0.3, 0.7])
    bench = slow_bench(0.0)
    monkeypatch.setattr(type(bench), "_seconds", lambda self, run, calls: time.sleep(0.02) or next(took))
    sample = bench.timed(Sample("copy", "fp32", 0, 8, 0), lambda: None)
    assert sample.ns == pytest.approx(0.3e9)
    assert sample.spread == pytest.approx(2)
