"""A run that recomputes without end is refused, as a refusal of its own kind, with the log of what ran."""

from __future__ import annotations

import json

import pytest

from sim import compare, simulate
from sim.cli import main
from sim.engine.replay import RECOMPUTE_LIMIT, replay
from sim.errors import Infeasible, Thrashing
from sim.plan import Plan, Recompute
from sim.policies.base import Policy
from tests.engine.test_timeline import chain, machine


def status(monkeypatch, words) -> int:
    monkeypatch.setattr("sys.argv", ["tiersim", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def recomputing(times: int, ns: int = 100) -> Plan:
    return Plan(chain(("a", ns), ("b", ns)), [Recompute("a", before="b")] * times)


class Restless(Policy):
    """Recomputes the first op as often as `times` says."""

    recomputes = True
    times: int = 1000

    def plan(self, problem):
        return Plan(problem.trace, [Recompute(0, before=1)] * self.times)


def recompute_ns(log) -> int:
    rows = log.events.query("why == 'recompute'")
    return int((rows["end_ns"] - rows["start_ns"]).sum())


def test_recomputation_up_to_the_limit_is_carried_out():
    # two ops of 100 ns: the limit is 100 times 200 ns
    log = replay(recomputing(200), machine())
    assert recompute_ns(log) == RECOMPUTE_LIMIT * 200


@pytest.mark.parametrize("fast", [True, False])
def test_one_more_is_refused_with_the_partial_log(fast):
    with pytest.raises(Thrashing, match=r"op 'a': recomputation takes more than 100 times the 200 ns") as caught:
        replay(recomputing(201), machine(), fast=fast)
    error = caught.value
    assert isinstance(error, Infeasible)
    assert (error.recompute_ns, error.ideal_ns, error.limit) == (20_100, 200, 100)
    assert not error.log.complete
    assert recompute_ns(error.log) == 20_000


def test_ops_that_take_no_time_cannot_recompute_for_ever():
    with pytest.raises(Thrashing):
        replay(recomputing(201, ns=0), machine())


def test_the_limit_can_be_set_and_switched_off():
    with pytest.raises(Thrashing, match=r"more than 1\.5 times"):
        replay(recomputing(4), machine(), recompute_limit=1.5)
    assert recompute_ns(replay(recomputing(5000), machine(), recompute_limit=None)) == 500_000


def test_simulate_raises_it_and_compare_makes_it_a_row_of_its_kind():
    trace, platform = chain(("a", 100), ("b", 100)), machine()
    with pytest.raises(Thrashing):
        simulate(trace, platform, Restless())
    assert simulate(trace, platform, Restless(), recompute_limit=None).log.complete
    (row,) = compare(trace, platform, Restless(), find_floor=False).rows
    assert (row["fits"], row["refusal"]) == (False, "thrashing")
    assert "the run thrashes" in row["error"]


def test_the_command_line_ends_with_1_and_takes_the_limit(tmp_path, capsys, monkeypatch):
    policy = tmp_path / "restless.py"
    policy.write_text(
        "from sim.plan import Plan, Recompute\nfrom sim.policies.base import Policy\n\n\n"
        "class Restless(Policy):\n    recomputes = True\n\n    def plan(self, problem):\n"
        "        return Plan(problem.trace, [Recompute(0, before=1)] * 3)\n"
    )
    words = ["run", "--profile", "mt3000_survey", "--model", "gpt2", "--seq", "64", "--policy", f"{policy}:Restless"]
    assert status(monkeypatch, [*words, "--json"]) == 0
    capsys.readouterr()
    assert status(monkeypatch, [*words, "--json", "--recompute-limit", "0.000001"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["refusal"] == "thrashing"
    assert "the run thrashes" in said.err
    assert status(monkeypatch, [*words, "--json", "--recompute-limit", "0"]) == 0
