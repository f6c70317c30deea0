"""Every policy keeps every law, on traces nobody picked by hand."""

from __future__ import annotations

import pytest

from sim.conformance import check_policy
from sim.conformance.elsewhere import differences
from sim.policies import load, names, policy_class

EXAMPLES = 40
RARELY: dict[str, str] = {
    # policies that show a declared trait in fewer than 30 % of random examples, and why
    "checkmate": "the cheapest plan that fits seldom runs anything again on nets this small",
    "moccasin": "the cheapest plan that fits seldom runs anything again on nets this small",
    "relax_and_fix": "the cheapest plan that fits seldom recomputes anything on nets this small",
    "rockmate": "the cheapest plan that fits seldom runs anything again on nets this small",
    "sac_knapsack": "the cheapest choice that fits seldom runs anything again on nets this small",
    "vlad": "it runs ops again only where a chain of them is long enough",
    "vdnn": "it moves what convolutions read, and few random nets have many; it rewrites only what it must",
    "delta": "it moves only what is dearer to run again than to copy",
    "dtr": "half of the examples fit without dropping anything",
    "colossal_auto": "weights leave only where that is faster than running ops again",
    "twremat": "nets this small seldom leave room between what it needs and keeping all",
    "megtaichi": "half of the examples fit as they are, and a partition is tried only where that is not so",
    "mimose": "where its collecting iteration fits, nets this small seldom need a checkpoint after it",
    "tso": "it captures only where launches outweigh the capture",
    "selective_recompute": "it rewrites only casts of weights that autocast keeps",
}


@pytest.mark.parametrize("name", names())
def test_policy_keeps_every_law(name, tmp_path):
    report = check_policy(load(name), examples=EXAMPLES, name=name, folder=tmp_path, across_processes=False)
    if report.skipped == report.examples and any("OR-Tools" in note for note in report.notes):
        pytest.skip("needs OR-Tools (extra `solvers`)")
    assert report.passed, report.as_text()
    assert set(report.not_exercised) == set() or name in RARELY, report.as_text()


def test_another_process_comes_to_the_same_logs():
    quick = [(name, load(name)) for name in names() if not policy_class(name).slow]
    assert differences(quick, examples=5, seed=3) == []
