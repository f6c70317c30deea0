"""The engine's speed, as ratios to a bare SimPy loop in this process, with a margin for a busy machine."""

import gc

import pytest

from benchmarks import speed
from tests.clocks import least
from workloads import w1

LIMITS = {
    "keep_all": 0.8,
    "full_recompute": 1.4,
    "swap_all": 16,
    "swap_all, planned": 20,
    "dtr with room": 2,
    "lru_tiering at 0.6": 36,
    "dtr_eq at 0.6": 48,
    "dtr at 0.6": 45,
}
MARGIN = 1.5


pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def what_other_tests_left_is_not_collected():
    """In a worker that has run thousands of tests, each full collection would walk all that they keep."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("case", LIMITS)
def test_a_run_stays_within_its_ratio_to_a_bare_loop(case):
    repeats = 3 if "at 0.6" in case else 9
    limit = LIMITS[case] * MARGIN
    assert least(limit, lambda: speed.measure(w1(96), [case], repeats)[case]["ratio"]) < limit


@pytest.mark.parametrize("case", ["keep_all", "swap_all"])
def test_cost_per_op_hardly_grows_with_the_trace(case):
    def growth():
        small = speed.measure(w1(12), [case], repeats=25)[case]["us_per_op"]
        return speed.measure(w1(96), [case], repeats=9)[case]["us_per_op"] / small

    assert least(1.2 * MARGIN, growth) < 1.2 * MARGIN
