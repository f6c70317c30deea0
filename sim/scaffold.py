"""Starts a policy of one's own: a file that works, and a test that passes."""

from __future__ import annotations

import keyword
from pathlib import Path

from sim.errors import PolicyError

POLICY = '''"""{title}: drops what is cheap to compute, and lets the engine compute it again."""

from __future__ import annotations

from dataclasses import dataclass

from sim import Drop, Plan, Policy, Problem

CHEAP = ("elementwise", "norm", "softmax")


@dataclass(frozen=True, kw_only=True)
class {name}(Policy):
    """Drop saved results of cheap ops after their last forward reader; the engine recomputes them when read.

    Start from here: look at `problem.trace` (ops and tensors), `problem.budget` (bytes) and
    `problem.cost` (nanoseconds), and return the actions of your own policy.

    at_least: bytes a tensor must have to be dropped.
    """

    recomputes = True
    fidelity = "reconstruction"
    at_least: int = 1

    def plan(self, problem: Problem) -> Plan:
        """Drop each saved activation after its last forward reader."""
        trace = problem.trace
        actions = []
        for tensor in trace.tensors:
            readers = [trace.ops[op] for op in trace.readers(tensor.id)]
            forward = [op for op in readers if op.phase == "forward"]
            backward = [op for op in readers if op.phase == "backward"]
            producer = int(trace.producer[tensor.id])
            cheap = producer >= 0 and trace.ops[producer].kind in CHEAP
            if cheap and tensor.role == "activation" and forward and backward and tensor.bytes >= self.at_least:
                actions.append(Drop(tensor.id, after=forward[-1].id))
        return Plan(trace, tuple(actions))
'''

TEST = '''"""{title} keeps the law of all policies, and saves memory."""

from pathlib import Path

from sim import check_policy, load_policy, load_profile, simulate
from workloads import transformer

POLICY = f"{{Path(__file__).with_name('{file}')}}:{name}"


def test_it_keeps_the_law():
    report = check_policy(load_policy(POLICY), examples=20)
    assert report.passed, report.as_text()


def test_it_saves_memory():
    trace = transformer("gpt2", batch=4, sequence=1024)
    platform = load_profile("a100_40_pcie")
    kept = simulate(trace, platform).summary()
    mine = simulate(trace, platform, POLICY).summary()
    assert mine["peak_bytes"] < kept["peak_bytes"]
    assert mine["recompute_ns"] > 0
'''


def write_policy(name: str, folder: str | Path = ".") -> list[Path]:
    """Write NAME.py and test_NAME.py; existing files are left alone. Raises PolicyError."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise PolicyError(f"{name!r} is no name for a policy: write it as a Python module, for example 'my_policy'")
    title = "".join(part.capitalize() for part in name.split("_"))
    target = Path(folder)
    texts = {
        target / f"{name}.py": POLICY.format(title=title, name=title),
        target / f"test_{name}.py": TEST.format(title=title, name=title, file=f"{name}.py"),
    }
    for path in texts:
        if path.exists():
            raise PolicyError(f"{path} exists already; nothing was written")
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)
