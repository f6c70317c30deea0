"""What the planners over tiers have in common: ample memory, links without limit or without rate, and what crosses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.errors import TiersimError
from sim.experiment import simulate
from sim.hardware.platform import Member, Platform, Pool
from sim.hardware.profile import load_profile
from sim.log import WHY
from tests.policies.offload.conftest import GB, facts, machine
from tests.policies.offload.test_lru_tiering import accesses
from tests.policies.offload.test_sentinel import layered
from workloads import cnn

PLANNERS = ("uvm", "g10", "autotm", "sentinel")
PLAIN: dict[str, dict[str, Any]] = {"uvm": {"fault": 0}, "autotm": {"mode": "synchronous"}}
TRACE = layered(8, 40, 20)
PEAK = facts(simulate(TRACE, machine(), "keep_all")).peak
TIME = facts(simulate(TRACE, machine(), "keep_all")).time


def at(rate: int, share: float = 0.6) -> Platform:
    return machine(int(share * PEAK), rate=rate)


@pytest.mark.parametrize("policy", PLANNERS)
def test_with_memory_for_all_the_run_is_that_without_a_policy(policy: str) -> None:
    done = facts(simulate(TRACE, machine(PEAK + 100), policy))
    assert (done.time, done.moves) == (TIME, [])


@pytest.mark.parametrize("policy", PLANNERS)
def test_with_links_without_limit_only_faults_and_rounding_remain(policy: str) -> None:
    done = facts(simulate(TRACE, at(10**6 * GB), policy, **PLAIN.get(policy, {})))
    assert done.moves
    assert TIME <= done.time <= TIME + 2 * len(done.moves)  # a copy takes a nanosecond, and one may wait for another
    assert done.peak <= int(0.6 * PEAK)


@pytest.mark.parametrize("policy", PLANNERS)
def test_with_hardly_any_rate_memory_is_never_exceeded(policy: str) -> None:
    done = facts(simulate(TRACE, at(GB // 10**4), policy, **PLAIN.get(policy, {})))
    assert done.peak <= int(0.6 * PEAK)
    assert done.time > 10**4 * 40


@pytest.mark.parametrize("policy", PLANNERS)
def test_what_leaves_and_is_read_again_comes_back(policy: str) -> None:
    done = facts(simulate(TRACE, at(GB), policy))
    names = {name: t for t, name in enumerate(TRACE.tensor_columns.name)}
    for tensor in done.out:
        assert tensor in done.back or not [op for op in TRACE.readers(names[tensor]) if op > 1]
    assert set(done.back) <= set(done.out)


@pytest.mark.parametrize("policy", PLANNERS)
def test_a_busier_host_never_makes_it_faster(policy: str) -> None:
    """Other users of the host's memory leave both links all of their rates, a tenth, and a hundredth."""
    times = []
    for rate in (2 * GB, GB // 5, GB // 50):
        bus = Pool("dram", (Member("d2h"), Member("h2d")), rate)
        on = replace(at(GB), pools=(bus,))
        times.append(facts(simulate(TRACE, on, policy, **PLAIN.get(policy, {}))).time)
    assert times == sorted(times)
    assert times[-1] > times[0]


@pytest.mark.parametrize(
    "text", ["A B C a b c a b c a b c", "A B C D a c b d d a c b a b c d", "A B a C b a c D a d b"]
)
def test_farthest_next_use_misses_no_more_often_than_least_recent_use(text: str) -> None:
    """Tensors of equal size, two of which fit: the plan that only answers pressure against paging."""
    misses = {}
    for policy in ("g10", "lru_tiering"):
        log = simulate(accesses(text), machine(20, rate=GB // 100), policy).log
        moves = log.interval("why") == WHY["move"]
        misses[policy] = int(np.count_nonzero(moves & (log.interval("lane") == log.platform.lanes.index("h2d"))))
    assert misses["g10"] <= misses["lru_tiering"]


@pytest.mark.parametrize("policy", PLANNERS)
def test_a_host_without_space_is_one_line(policy: str) -> None:
    on = at(GB)
    none = replace(on, tiers=(on.tiers[0], replace(on.tiers[1], capacity=0)))
    with pytest.raises(TiersimError) as refused:
        simulate(TRACE, none, policy)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("policy", ["lru_tiering", *PLANNERS])
@pytest.mark.parametrize("name", ["xeon_optane", "h100_cxl"])
def test_on_optane_and_cxl_what_memory_lacks_lies_in_the_slow_tier(policy: str, name: str) -> None:
    """On `h100_cxl` the host's own memory is taken, and the modules behind it serve."""
    trace = cnn("alexnet", 64, optimizer="sgd")
    taken = {"tiers.host.capacity": "1 MB"} if name == "h100_cxl" else {}
    on = load_profile(name, overrides=taken)
    plain = simulate(trace, on, "keep_all", budget=1 << 60).summary()
    budget = int(0.9 * plain["peak_bytes"])
    done = simulate(trace, on, policy, budget=budget, **PLAIN.get(policy, {})).summary()
    assert on.host is not None
    slow = on.cascade(on.host.name)[-1 if taken else 0]
    peaks = done["peak_by_tier"]
    assert peaks[on.home().name] <= budget < plain["peak_bytes"] <= peaks[on.home().name] + peaks[slow] + 10**6
    assert done["makespan_ns"] >= plain["makespan_ns"]
