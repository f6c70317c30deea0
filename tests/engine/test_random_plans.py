"""The engine against itself and against the suite's ledger, on random plans with all four verbs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from sim.conformance import CHECKS, replayed
from sim.engine.replay import replay
from sim.errors import IllegalPlan, OutOfMemory, Thrashing, TiersimError
from sim.log import EventLog
from tests.engine.random_plans import Anything, planned

some = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
LAWS = ("capacity", "values", "ops", "order", "tiling", "carried")
NO_WAY_BACK = ("overwritten by", "cannot be recomputed alone", "no op produces it")


def outcome(plan, platform, fast: bool) -> tuple[str, EventLog | None]:
    try:
        return "done", replay(plan, platform, fast=fast)
    except TiersimError as error:
        return f"{type(error).__name__}: {error}", getattr(error, "log", None)


@some
@given(planned())
def test_the_fast_path_and_the_general_path_write_the_same_log(case):
    example, plan = case
    assert outcome(plan, example.platform, True) == outcome(plan, example.platform, False)


@pytest.mark.parametrize("online", [False, True], ids=["offline", "online"])
def test_any_plan_keeps_the_laws_or_is_refused_truthfully(online):
    @some
    @given(planned(online=online))
    def check(case):
        example, plan = case
        run = replayed(Anything(), plan, example.trace, example.platform)
        for law in LAWS:
            CHECKS[law](run)
        if isinstance(run.error, IllegalPlan):
            assert any(why in str(run.error) for why in NO_WAY_BACK)
        else:
            CHECKS["outcome"](run)  # no deadlock, and every OutOfMemory tells the truth

    check()


@some
@given(planned(ample=True, online=True))
def test_with_room_for_everything_no_legal_plan_is_refused(case):
    example, plan = case
    run = replayed(Anything(), plan, example.trace, example.platform)
    host = example.platform.tier_ids.get("host")
    if isinstance(run.error, OutOfMemory):
        assert host is not None
        assert run.error.tier == "host"  # some hosts are small
    elif not isinstance(run.error, Thrashing):  # which is about time: a plan may recompute without end
        assert run.error is None or any(why in str(run.error) for why in NO_WAY_BACK)


@some
@given(planned(online=True))
def test_a_plan_replayed_twice_gives_one_log(case):
    example, plan = case
    assert outcome(plan, example.platform, True) == outcome(plan, example.platform, True)
