"""The second process: correct policies get the same there, whatever they import."""

from __future__ import annotations

from sim.conformance.across_processes import differences
from sim.policies import load

TABULATES = """
import pandas
from sim.policies.baseline.keep_all import KeepAll

class Tabulates(KeepAll):
    def plan(self, problem):
        table = pandas.DataFrame({"bytes": [tensor.bytes for tensor in problem.trace.tensors]})
        assert table.bytes.sum() > 0
        return super().plan(problem)
"""


def test_a_policy_may_import_what_is_compiled_against_the_clock(tmp_path):
    path = tmp_path / "tabulates.py"
    path.write_text(TABULATES)
    name = f"{path}:Tabulates"
    assert differences([(name, load(name))], examples=2, seed=0) == []
