"""The grid on this machine's CPU, with what a CUDA device would say put in; that part has not run on one."""

from __future__ import annotations

import importlib.util
import inspect
import json
import time

import pytest

from sim.errors import TiersimError
from sim.measure import grid
from sim.measure.grid import GRID, Case, Fit
from sim.measure.validate import TINY, roomy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install 'tiersim[torch]'"
)


@pytest.fixture
def tiny(tmp_path):
    import torch

    torch.set_num_threads(1)  # others may use the machine: threads that wait for each other take minutes
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({**TINY, "n_layer": 2}))
    return str(path)


def rows(cases, *, seconds=600.0, room=1 << 40):
    platform = roomy(10**9, 10**9)
    stop = time.monotonic() + seconds
    return grid.run(cases, platform, "cpu", stop=stop, say=lambda text: None, free=lambda: room)


def test_every_policy_of_a_case_has_a_row_with_what_was_measured(tiny):
    found = rows([Case(tiny, 2, 64, "fp32", ("none", "checkpoint"))])
    assert [row["policy"] for row in found] == ["none", "checkpoint"]
    for row in found:
        assert row["simulated_bytes"] == pytest.approx(row["measured_bytes"], rel=0.02)
        assert row["measured_ns"] > 0
        assert (row["batch"], row["sequence"], row["precision"]) == (2, 64, "fp32")


def test_what_there_is_no_room_or_no_time_for_is_named(tiny):
    cases = [Case(tiny, 2, 64, "fp32", ("none", "checkpoint"))]
    # between the two peaks, less the tenth that is left free
    room = (grid.simulated_peak(cases[0], "none") + grid.simulated_peak(cases[0], "checkpoint")) / 1.8
    found = {row["policy"]: row for row in rows(cases, room=int(room))}
    assert found["none"]["not_run"] == "it needs more memory than there is"
    assert "measured_bytes" in found["checkpoint"]
    assert [row["not_run"] for row in rows(cases, seconds=-1)] == ["there was no time left"] * 2


def test_budgets_lie_between_the_two_simulated_peaks_and_tell_them_apart(tiny, monkeypatch):
    from sim.measure.steps import Steps

    asked = []

    def fits(self, policy, limit):
        asked.append((policy, limit))
        return policy == "checkpoint"

    monkeypatch.setattr(Steps, "fits", fits)
    case = Case(tiny, 4, 128, "fp32", budget=True)
    found = grid.budget_rows(case, roomy(10**9, 10**9), "cpu")
    low, high = (grid.simulated_peak(case, name) for name in ("checkpoint", "none"))
    assert low < found[0].limit < high
    assert found == [Fit("none", found[0].limit, False, False), Fit("checkpoint", found[0].limit, True, True)]
    assert asked == [(fit.policy, fit.limit) for fit in found]


def test_the_grid_goes_from_small_to_xl_and_a_llama_in_16_bits_and_autocast():
    assert {"gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-1b"} <= {case.model for case in GRID}
    assert {"bf16", "amp_bf16"} <= {case.precision for case in GRID}
    assert len({(case.batch, case.sequence) for case in GRID}) >= 5
    assert sum(case.budget for case in GRID) >= 4


def test_without_a_cuda_device_it_says_so(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: the grid would run")
    assert grid.main(["-o", "mine"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    import torch

    from sim.measure import choose_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == "cuda:1"
    with pytest.raises(TiersimError, match="has 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("memory_allocated", ("device",)),
        ("max_memory_allocated", ("device",)),
        ("reset_peak_memory_stats", ("device",)),
        ("synchronize", ("device",)),
        ("set_per_process_memory_fraction", ("fraction", "device")),
        ("mem_get_info", ("device",)),
        ("get_device_name", ("device",)),
        ("get_device_properties", ("device",)),
        ("empty_cache", ()),
    ],
)
def test_the_cuda_functions_that_are_called_take_what_they_are_given(name, arguments):
    import torch

    assert tuple(inspect.signature(getattr(torch.cuda, name)).parameters) == arguments


class Mark:
    """Stands for a CUDA event: it notes the time at which it is recorded."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_copies_are_timed_by_events_one_way_at_a_time_or_both(monkeypatch):
    import contextlib

    import torch

    from sim.measure.samples import QUICK, Bench, copy_times

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    told = []
    for both in (False, True):
        sizes, found = copy_times(Bench(torch.device("cpu"), QUICK, told.append), pinned=False, both=both)
        assert sizes == [1 << power for power in QUICK.copies]
        assert all(len(times) == len(sizes) and min(times) > 0 for times in found.values())
        assert set(found) == {"d2h", "h2d"}
    assert len(told) == 2 * len(sizes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "mine", "--seconds", "-1"], "nearest: 1"),
        (["-o", "mine", "--seconds", "nan"], "expected a finite number above 0"),
        (["-o", "no/such/mine"], "there is no folder"),
        (["-o", "mine", "--profile", "a10O"], "a10O"),
        (["-o", "mine.toml", "--profile-from", "no.json"], "no.json: cannot be read"),
        (["-o", "mine", "--profile-from", "no.json"], "ends in '.toml'"),
    ],
)
def test_wrong_values_are_refused_before_a_device_is_looked_for(options, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grid, "choose_device", lambda name: pytest.fail("a device was looked for"))
    assert grid.main(options) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_profile_is_fitted_again_to_what_a_grid_has_stored(tmp_path, capsys):
    from sim.measure.measured import Copies, Measured, profile_of
    from tests.measure.test_fit import MACHINE, samples

    sizes = [1 << n for n in range(12, 28, 4)]
    copies = Copies(sizes, {way: [15_000 + size / 25 for size in sizes] for way in ("d2h", "h2d")})
    measured = Measured(MACHINE, samples(), samples(), {"pinned": copies, "pageable": copies, "both": copies})
    grid.write(tmp_path / "mine.json", "a card", [{"model": "gpt2-small"}], measured)
    assert grid.main(["--profile-from", str(tmp_path / "mine.json"), "-o", str(tmp_path / "again.toml")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'again.toml'}\n"
    assert (tmp_path / "again.toml").read_text() == profile_of(measured)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "has no measured ops"),
        ('{"machine": "a card", "rows": []}', "has no measured ops"),
        ('{"measured": {"machine": {"device": "a card"}}}', "are not what the grid writes"),
        ('{"measured": 1}', "are not what the grid writes"),
    ],
)
def test_data_without_measured_ops_are_refused_in_one_line(text, words, tmp_path, capsys):
    (tmp_path / "mine.json").write_text(text)
    assert grid.main(["--profile-from", str(tmp_path / "mine.json"), "-o", str(tmp_path / "again.toml")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "again.toml").exists()
