"""Every policy that plans quickly keeps every law on a few examples; `test_conformance.py` tries it on many."""

from __future__ import annotations

import pytest

from sim.conformance import check_policy
from sim.policies import load, names, policy_class

QUICK = [name for name in names() if not policy_class(name).slow]


@pytest.mark.parametrize("name", QUICK)
def test_policy_keeps_every_law_on_a_few_examples(name, tmp_path):
    report = check_policy(load(name), examples=6, name=name, folder=tmp_path, across_processes=False)
    assert not report.broken, report.as_text()
