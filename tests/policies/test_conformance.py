"""Every policy keeps the law of all policies, on traces that nobody picked by hand."""

import pytest

from sim import check_policy
from sim.policies import load, names, policy_class

EXAMPLES = {False: 25, True: 2}
"""Random examples a policy; fewer for those that plan slowly."""


@pytest.mark.parametrize("name", names())
def test_a_policy_keeps_the_law(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a failing law writes its shrunken trace here
    report = check_policy(load(name), examples=EXAMPLES[policy_class(name).slow], name=name)
    if report.skipped == report.examples and any("OR-Tools" in note for note in report.notes):
        pytest.skip("OR-Tools is not installed (extra `solvers`)")
    assert report.passed, report.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_policy_keeps_the_law_on_many_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = check_policy(load(name), examples=200, seed=1, name=name)
    assert report.passed, report.as_text()
