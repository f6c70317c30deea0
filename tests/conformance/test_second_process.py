"""The second process: correct policies get the same there, whatever they import."""

from __future__ import annotations

import sys

import pytest

from sim.conformance.across_processes import differences, elsewhere
from sim.policies import load, policy_class

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


READS = """
import hashlib, locale, os, platform, shutil, time, uuid
from dataclasses import dataclass
from sim.plan import Move, Plan
from sim.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class Reads(Policy):
    needs = frozenset({"host"})
    moves = True
    fact: str

    def plan(self, problem):
        trace, fact = problem.trace, FACTS[self.fact]()
        made = [t for t in range(len(trace.tensors)) if trace.producer[t] >= 0 and trace.tensors[t].bytes
                and trace.read_counts[t] and t not in trace.outputs and trace.replaced_by[t] < 0]
        t = made[int(hashlib.sha256(f"{self.fact} {fact}".encode()).hexdigest(), 16) % len(made)]
        return Plan(trace, [Move(t, "host", after=int(trace.producer[t]))])


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


FACTS = {
    "nothing": lambda: 0,
    "language": lambda: os.environ.get("LANG"),
    "locale": lambda: locale.setlocale(locale.LC_CTYPE),
    "terminal": lambda: os.environ.get("TERM"),
    "width of the terminal": lambda: shutil.get_terminal_size().columns,
    "name of the time zone": lambda: time.tzname[0],
    "shell": lambda: os.environ.get("SHELL"),
    "folder of the shell": lambda: os.environ.get("PWD"),
    "machine": lambda: platform.uname().node,
    "network address": uuid.getnode,
    "rights of new files": umask,
}
"""


@pytest.mark.slow
def test_a_policy_that_reads_its_surroundings_is_told_by_a_second_process(tmp_path):
    path = tmp_path / "reads.py"
    path.write_text(READS)
    name = f"{path}:Reads"
    facts = sys.modules[policy_class(name).__module__].FACTS
    policies = [(name, load(name, fact=fact)) for fact in facts]
    seen = [bool(answer.difference()) for answer in elsewhere(policies, examples=12, seed=0)]
    assert dict(zip(facts, seen, strict=True)) == {fact: fact != "nothing" for fact in facts}
