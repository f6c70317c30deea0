"""The law does not call a correct policy wrong: kinds that are not shipped, at many seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.conformance import Report, check_policy
from sim.policies.base import Policy
from tests.conformance.unusual_policies import UNUSUAL


def check(policy: type[Policy], examples: int, seed: int, folder: Path) -> Report:
    report = check_policy(policy(), examples=examples, seed=seed, folder=folder, across_processes=False)
    assert report.passed, report.as_text()
    assert report.ran > examples * 0.9
    return report


@pytest.mark.parametrize("policy", UNUSUAL)
def test_a_correct_policy_of_an_unusual_kind_passes(policy, tmp_path):
    shares = check(policy, 20, 0, tmp_path).shares
    assert all(shares.values()), shares


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", UNUSUAL)
def test_it_passes_at_many_seeds(policy, seed, tmp_path):
    check(policy, 50, seed, tmp_path)
