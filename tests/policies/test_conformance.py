"""Every policy keeps every law, on traces nobody picked by hand."""

from __future__ import annotations

import pytest

from sim.conformance import check_policy
from sim.conformance.across_processes import differences
from sim.policies import load, names, policy_class

EXAMPLES, FEW = 30, 14
"""Of a policy, and of one that plans slowly, or with several programs."""

TRIED = {"swap_attention": {"modules": ("*",)}}
"""Parameters with which a policy is tried, where random traces have nothing for its own."""


@pytest.mark.parametrize("name", names())
def test_policy_keeps_every_law(name, tmp_path):
    examples = FEW if policy_class(name).slow or name == "hybrid" else EXAMPLES
    report = check_policy(
        load(name, **TRIED.get(name, {})), examples=examples, name=name, folder=tmp_path, across_processes=False
    )
    if report.skipped == report.examples and any("OR-Tools" in note for note in report.notes):
        pytest.skip("needs OR-Tools (extra `solvers`)")
    assert report.passed, report.as_text()
    assert set(report.not_exercised) == set() or policy_class(name).rarely, report.as_text()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", names())
def test_policy_keeps_every_law_on_a_thousand_examples(name, tmp_path):
    """What `docs/reliability.md` counts; the nightly lane."""
    report = check_policy(load(name), examples=1000, name=name, folder=tmp_path)
    assert report.passed or report.skipped == report.examples, report.as_text()


def test_another_process_comes_to_the_same_logs():
    quick = [(name, load(name)) for name in names() if not policy_class(name).slow]
    assert differences(quick, examples=3, seed=3) == []
