"""Policies with one fault each: the check that a user runs catches every one, by the law named beside it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from sim.conformance import CHECKS, check_policy
from sim.policies import load

HEAD = '''
import copy, datetime, itertools, os, random, signal, sys, threading, time
from dataclasses import dataclass, replace
from typing import ClassVar
from sim.analysis.peak_memory import peak_bytes
from sim.errors import Infeasible, OutOfMemory, PolicyError
from sim.experiment import reference_run
from sim.plan import Drop, Move, Online, Plan, Recompute
from sim.policies.base import MANAGES, Policy
from sim.rewrites.rewriter import Rewriter, with_columns
from sim.solvers.outcome import in_stages

SEEN = []


@dataclass(frozen=True, kw_only=True)
class Base(Policy):
    """Moves one result away."""

    moves = True
    manages: ClassVar[tuple[str, ...]] = MANAGES
    needs = frozenset({"host"})

    def made(self, trace):
        return [t for t in range(len(trace.tensors)) if trace.producer[t] >= 0 and trace.tensors[t].bytes
                and trace.read_counts[t] and t not in trace.outputs and trace.replaced_by[t] < 0]

    def away(self, problem, pick):
        trace, made = problem.trace, self.made(problem.trace)
        if not made:
            return Plan(trace)
        t = made[pick % len(made)]
        return Plan(trace, [Move(t, "host", after=int(trace.producer[t]))])


class Knows(Online):
    def __init__(self, trace):
        self.trace = trace

    def before(self, op, memory):
        for t in self.trace.reads(op + 2) if op + 2 < len(self.trace.ops) else ():
            if 0 <= self.trace.producer[t] < op and t not in self.trace.outputs:
                return [Move(t, "host", keep=True)]
        return []


@dataclass(frozen=True, kw_only=True)
class Planted(Base):
    """Has one fault."""
'''

PLAN = "    def plan(self, problem):\n        trace, made = problem.trace, self.made(problem.trace)\n"

RENAMES = """\
if not trace.op_columns.releases:
    return Plan(trace)
new = Rewriter(trace)
ids = new.all_tensors()
held = {t for tensors in trace.op_columns.releases.values() for t in tensors if t not in trace.outputs}
for op in trace.ops:
    new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
    for t in held:
        if int(trace.last_use[t]) == op.id:
            name = new.tensor(trace.tensors[t], name=f"again.{t}", replaces=ids[t])
            new.glue(f"rename.{t}", "copy", [ids[t]], [name], duration=0, device=op.device, phase=op.phase)
made = new.build(outputs=[ids[t] for t in trace.outputs], carry=[(ids[a], ids[b]) for a, b in trace.carry])
return Plan(with_columns(made, releases={}))"""
"""Each tensor that the program holds has another name after its last reader, and nobody holds that."""

FAULTS = {
    "sys.exit(0)": ("outcome", "sys.exit(0)"),
    "a false Infeasible": ("outcome", "raise Infeasible('nothing fits')"),
    "Infeasible for some": (
        "outcome",
        "if len(trace.ops) % 2: raise Infeasible('nothing fits')\nreturn self.away(problem, 1)",
    ),
    "random ops that lose their seed": (
        "costs",
        "return Plan(with_columns(trace, random=trace.op_columns.random & False))",
    ),
    "halved durations": (
        "costs",
        "return Plan(with_columns(trace, duration=trace.op_columns.duration // 2, flops=trace.op_columns.flops // 2))",
    ),
    "no workspaces": ("costs", "return Plan(with_columns(trace, workspace=trace.op_columns.workspace * 0))"),
    "the order of a set": (
        "repeats",
        "names = {trace.tensors[t].name for t in made}\n"
        "if not names: return Plan(trace)\n"
        "t = trace.tensor_id(next(iter(names)))\n"
        "return Plan(trace, [Move(t, 'host', after=int(trace.producer[t]))])",
    ),
    "the hash of a text": ("repeats", "return self.away(problem, hash('tensor'))"),
    "the clock": ("repeats", "return self.away(problem, int(time.time() * 1000))"),
    "the minute": ("repeats", "return self.away(problem, int(time.time() // 60))"),
    "dice without a seed": ("repeats", "return self.away(problem, random.randrange(1000))"),
    "names of tensors": (
        "repeats",
        "t = min(made, key=lambda t: trace.tensors[t].name, default=None)\n"
        "if t is None: return Plan(trace)\n"
        "return Plan(trace, [Move(t, 'host', after=int(trace.producer[t]))])",
    ),
    "what it saw before": ("repeats", "SEEN.append(1)\nreturn self.away(problem, len(SEEN))"),
    "an online part that looks two ops ahead": ("online", "return Plan(trace, online=lambda: Knows(trace))"),
    "a crash on long traces": ("outcome", "if len(trace.ops) > 12: raise KeyError('x')\nreturn self.away(problem, 1)"),
    "a list for a plan": ("outcome", "return [Move(0, 'host', after=0)]"),
    "endless recursion": ("outcome", "return self.plan(problem)"),
    "a plan that never comes": ("outcome", "while True: pass"),
    "a plan that waits for something else": ("outcome", "time.sleep(10**6)"),
    "a plan that never comes, without timers": (
        "outcome",
        "for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):\n    signal.setitimer(timer, 0)\nwhile True:\n    pass",
    ),
    "actions without end": ("outcome", "return Plan(trace, (Drop(0, after=0) for _ in itertools.count()))"),
    "a drop of what cannot be recomputed": (
        "outcome",
        "first = [t for t in range(len(trace.tensors)) if trace.producer[t] < 0 and len(trace.readers(t))]\n"
        "return Plan(trace, [Drop(first[0], before=trace.readers(first[0])[0])] if first else [])",
    ),
    "names of ops": ("repeats", "return self.away(problem, sum(map(ord, ''.join(problem.trace.op_columns.name[:3]))))"),
    "the machine's name": ("repeats", "return self.away(problem, len(problem.platform.name))"),
    "the working directory": ("repeats", "return self.away(problem, len(os.getcwd()))"),
    "an environment variable": ("repeats", "return self.away(problem, len(os.environ.get('PYTHONHASHSEED', '')))"),
    "the number of the process": ("repeats", "return self.away(problem, os.getpid())"),
    "where an object lies in memory": ("repeats", "return self.away(problem, id(object()) // 16 + os.getpid() % 7)"),
    "a file that it leaves": (
        "repeats",
        "with open('count.txt', 'a+') as file:\n    file.write('x')\n    return self.away(problem, file.tell())",
    ),
    "a plan for an earlier trace": ("values", "SEEN.append(trace)\nreturn Plan(SEEN[0])"),
    "a tensor in a tier that is not there": ("outcome", "return Plan(trace, place={0: 'hbm9'})"),
    "a copy to a tier that is not there": (
        "outcome",
        "return Plan(trace, [Move(t, 'hsot', after=int(trace.producer[t])) for t in made[:1]])",
    ),
    "an action at an op that is not there": (
        "outcome",
        "return Plan(trace, [Move(t, 'host', after=len(trace.ops)) for t in made[:1]])",
    ),
    "a rewrite behind an old hash": (
        "values",
        "trace.content_hash\n"
        "other = copy.copy(trace)\n"
        "ops = trace.op_columns\n"
        "vars(other)['op_columns'] = replace(ops, duration=ops.duration // 2, flops=ops.flops // 2)\n"
        "return Plan(other)",
    ),
    "the device's times on the host's processor": (
        "costs",
        "ops = trace.op_columns\n"
        "elsewhere = {op: 'cpu' for op in range(0, len(trace.ops), 2)\n"
        "             if op not in ops.group and ops.duration[op] >= 0 and not ops.engine.get(op)}\n"
        "return Plan(with_columns(trace, engine={**ops.engine, **elsewhere}))",
    ),
    "no space, by its own word": (
        "outcome",
        "if len(trace.ops) > 12: raise OutOfMemory('no space', tier=problem.home, need_bytes=1)\n"
        "return self.away(problem, 1)",
    ),
    "no space where an allocator rounds": (
        "outcome",
        "if problem.platform.home(0).allocator.name != 'exact': raise Infeasible('no addresses')\n"
        "return self.away(problem, 1)",
    ),
    "short traces alone, undeclared": (
        "outcome",
        "if len(trace.ops) > 3: raise PolicyError('needs short traces')\nreturn self.away(problem, 1)",
    ),
    "a refusal for memory that is called a need": (
        "outcome",
        "whole = reference_run(trace, problem.platform.with_budget(1 << 40))\n"
        "if max(peak_bytes(whole).values()) > problem.budget: raise PolicyError('needs space')\n"
        "return self.away(problem, 1)",
    ),
    "a class without a plan": ("optimal", "return Plan(trace)"),
    "a copy of no bytes": (
        "ops",
        "return Plan(trace, [Move(t, 'host', wire=0, after=int(trace.producer[t])) for t in made[:1]])",
    ),
    "other freedoms each time": ("repeats", "return self.away(problem, 1)"),
    "release points left out": ("costs", "return Plan(with_columns(trace, releases={}))"),
    "more time saved than a launch takes": (
        "costs",
        "duration = trace.op_columns.duration\n"
        "return Plan(with_columns(trace, duration=duration - 20 * (duration > 20)), notes={'launch_ns': 20})",
    ),
    "collectives without a group": ("costs", "return Plan(with_columns(trace, group={}))"),
    "more FLOPs counted": (
        "costs",
        "return Plan(with_columns(trace, counted={op: 10**9 for op in range(len(trace.ops))}))",
    ),
    "another end in the log of evaluate": (
        "repeats",
        "try:\n    object.__setattr__(problem.evaluate(Plan(trace)), 'end', 0)\nexcept OutOfMemory:\n    pass\n"
        "return self.away(problem, 1)",
    ),
    "other times written into the log of evaluate": (
        "outcome",
        "try:\n    problem.evaluate(Plan(trace)).intervals[:, :2] -= 1\nexcept OutOfMemory:\n    pass\n"
        "return self.away(problem, 1)",
    ),
    "a history that it changes": (
        "repeats",
        "for run in problem.history:\n    run.log.counters['implicit_moves'] = 10**6\nreturn self.away(problem, 1)",
    ),
    "reads that it crosses out": (
        "repeats",
        "trace.read_counts.setflags(write=True)\ntrace.read_counts[:] -= 1\nreturn Plan(trace)",
    ),
    "moves that it does not declare": ("ops", "return self.away(problem, 1)"),
    "an optimum that it never claims": (
        "optimal",
        "whole = reference_run(trace, problem.platform.with_budget(1 << 40))\n"
        "if max(peak_bytes(whole).values()) <= problem.budget: return Plan(trace, notes={'status': 'feasible'})\n"
        "error = Infeasible('none found')\nerror.proven = False\nraise error",
    ),
    "an optimum that it claims where everything fits": (
        "optimal",
        "whole = reference_run(trace, problem.platform.with_budget(1 << 40))\n"
        "fits = max(peak_bytes(whole).values()) <= problem.budget\n"
        "if fits: return Plan(trace, notes={'status': 'optimal'})\n"
        "error = Infeasible('none found')\nerror.proven = False\nraise error",
    ),
    "a bound above what it reaches": (
        "optimal",
        "return replace(self.away(problem, 1), notes={'makespan_bound_ns': 10**12, 'bound_among': 'all plans'})",
    ),
    "a rewrite that it does not declare": (
        "ops",
        "return Plan(with_columns(trace, priority=trace.op_columns.priority + 1))",
    ),
    "dice that it calls a limit of time": (
        "repeats",
        "return replace(self.away(problem, random.randrange(1000)), notes={'time_limited': True})",
    ),
    "a new name for what is held": ("costs", RENAMES),
    "an online part that it has once": (
        "repeats",
        "parts = [Online()]\nreturn Plan(trace, online=lambda: parts.pop())",
    ),
    "an online part that cannot be pickled": ("repeats", "return Plan(trace, online=lambda: Online())"),
    "the day of a date": ("repeats", "return self.away(problem, datetime.date.today().toordinal())"),
    "the minute of a date": ("repeats", "return self.away(problem, datetime.datetime.now().minute)"),
    "the user's folder": ("repeats", "return self.away(problem, len(os.path.expanduser('~')))"),
    "the minute of pandas": ("repeats", "import pandas\nreturn self.away(problem, pandas.Timestamp.now().minute)"),
    "the time of NumPy": (
        "repeats",
        "import numpy\nreturn self.away(problem, int(numpy.datetime64('now', 'm').astype(int)))",
    ),
    "a clock by its number": (
        "repeats",
        "return self.away(problem, int(time.clock_gettime(time.CLOCK_REALTIME)) // 60)",
    ),
    "the name of the machine": (
        "repeats",
        "import platform\nreturn self.away(problem, sum(map(ord, platform.node())))",
    ),
    "the number of processors": ("repeats", "return self.away(problem, os.cpu_count())"),
    "the processors that it may use": ("repeats", "return self.away(problem, len(os.sched_getaffinity(0)))"),
    "the number of threads": ("repeats", "return self.away(problem, threading.active_count())"),
    "dice that it keeps in the user's folder": (
        "repeats",
        "path = os.path.expanduser('~/.planted')\n"
        "if not os.path.exists(path):\n"
        "    with open(path, 'w') as file:\n"
        "        file.write(str(random.randrange(1000)))\n"
        "with open(path) as file:\n"
        "    return self.away(problem, int(file.read()))",
    ),
    "more FLOPs where times are measured": (
        "costs",
        "ops = trace.op_columns\nreturn Plan(with_columns(trace, flops=ops.flops + 1000 * (ops.duration >= 0)))",
    ),
    "a copy of no bytes that loses nothing it declares": (
        "values",
        "return Plan(trace, [Move(t, 'host', wire=0, after=int(trace.producer[t])) for t in made[:1]])",
    ),
    "a place that it does not declare": (
        "ops",
        "if 'host' not in problem.platform.engines[0].reaches: return Plan(trace)\n"
        "return Plan(trace, place={t: 'host' for t in range(len(trace.tensors)) if trace.producer[t] < 0})",
    ),
    "another plan after the twentieth": ("repeats", "SEEN.append(1)\nreturn self.away(problem, len(SEEN) > 20)"),
    "the time of the last access to its file": (
        "repeats",
        "about = os.stat(__file__)\n"
        "os.utime(__file__, (about.st_atime + 1, about.st_mtime))\n"
        "return self.away(problem, int(about.st_atime))",
    ),
    "an interruption that it takes for an error of its own": (
        "outcome",
        "try:\n    while True: pass\nexcept BaseException:\n    return self.away(problem, 1)",
    ),
    "a trait that never answers": ("outcome", "return self.away(problem, 1)"),
    "a comparison that never answers": ("outcome", "return self.away(problem, 1)"),
    "a list of actions that hides them": (
        "repeats",
        "class Hidden(tuple):\n"
        "    def __iter__(self):\n"
        "        SEEN.append(1)\n"
        "        return tuple.__iter__(self) if len(SEEN) % 3 else iter(())\n"
        "return Plan(trace, Hidden(self.away(problem, 1).actions))",
    ),
    "moves that never happen": ("", "return Plan(trace)"),
    "recomputation that never happens": ("", "return Plan(trace)"),
}
"""By a name the law that catches it ("" for a declared trait that never shows), and what `plan` does."""

TRAITS = {
    "a trait that never answers": (
        "    def __getattribute__(self, name):\n"
        "        if name == 'optimal':\n            while True: pass\n"
        "        return super().__getattribute__(name)\n"
    ),
    "a comparison that never answers": (
        "    def __eq__(self, other):\n        while True: pass\n\n    __hash__ = None\n"
    ),
    "a rewrite behind an old hash": "    moves = False\n    needs = frozenset()\n",
    "the device's times on the host's processor": (
        "    rewrites = True\n    needs = frozenset({'cpu'})\n    rarely = 'moves only where it must'\n"
    ),
    "a class without a plan": (
        "    optimal = 'among plans that recompute'\n    recomputes = True\n    moves = False\n"
        "    needs = frozenset()\n    rarely = 'often fits'\n"
    ),
    "a copy of no bytes": "    moves = False\n    lossless = False\n",
    "other freedoms each time": (
        "    def unlimited(self, problem):\n"
        "        SEEN.append(1)\n"
        "        return {'a': Plan(problem.trace)} if len(SEEN) % 2 else {}\n"
    ),
    "moves that it does not declare": "    moves = False\n",
    "more time saved than a launch takes": (
        "    rewrites = True\n    moves = False\n    saves = {'launch': 'launched together'}\n    needs = frozenset()\n"
    ),
    **dict.fromkeys(
        ("an optimum that it never claims", "an optimum that it claims where everything fits"),
        "    optimal = 'among plans that recompute'\n    moves = False\n    needs = frozenset()\n\n"
        "    def in_class(self, plan):\n        return in_stages(plan)\n\n",
    ),
    "a rewrite that it does not declare": "    moves = False\n    needs = frozenset()\n",
    "dice that it calls a limit of time": "    solver = 'milp'\n",
    "an online part that it has once": "    online = True\n    moves = False\n    needs = frozenset()\n",
    "an online part that cannot be pickled": "    online = True\n    moves = False\n    needs = frozenset()\n",
    "more FLOPs where times are measured": "    rewrites = True\n    moves = False\n    needs = frozenset()\n",
    "a copy of no bytes that loses nothing it declares": "    lossless = False\n",
    "a place that it does not declare": "    moves = False\n",
    "a new name for what is held": (
        "    rewrites = True\n    moves = False\n    needs = frozenset()\n    rarely = 'not all holds'\n"
    ),
    "a history that it changes": "    warm_up = 1\n",
    "recomputation that never happens": "    recomputes = True\n    moves = False\n",
    "a drop of what cannot be recomputed": "    recomputes = True\n",
    **dict.fromkeys(
        ("random ops that lose their seed", "halved durations", "no workspaces"),
        "    rewrites = True\n",
    ),
    **dict.fromkeys(
        ("release points left out", "collectives without a group", "more FLOPs counted"),
        "    rewrites = True\n    moves = False\n    needs = frozenset()\n",
    ),
}
STOPPED = (
    *("a plan that never comes", "a plan that never comes, without timers", "a plan that waits for something else"),
    *("an interruption that it takes for an error of its own",),
    *("a trait that never answers", "a comparison that never answers"),
)
WITHIN = ("other freedoms each time", "short traces alone, undeclared", "a refusal for memory that is called a need")
"""Those that one process alone shows."""

LONGEST = ("endless recursion", "what it saw before")
"""Those whose check takes more than twenty seconds; a failing example is made smaller for that long."""


EARLY = 8
"""Examples that show most faults, and take less time; `scripts/make_reliability.py --planted` has 50 for each."""


def write_planted(fault: str, folder: Path) -> Path:
    """The file of a policy with that fault, whose class is `Planted`."""
    plan = PLAN + "".join(f"        {line}\n" for line in FAULTS[fault][1].splitlines())
    path = folder / "planted.py"
    path.write_text(f"{HEAD}\n{TRAITS.get(fault, '')}\n{plan}")
    return path


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        pytest.param(fault, law, id=fault, marks=[pytest.mark.slow] if fault in LONGEST else [])
        for fault, (law, _) in FAULTS.items()
    ],
)
def test_a_planted_fault_is_caught_by_its_law(
    fault: str, law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_planted(fault, tmp_path)
    monkeypatch.chdir(tmp_path)
    name = "planted.py:Planted"
    limit = 0.3 if fault in STOPPED else 20
    elsewhere = law in ("repeats", "outcome") and fault not in WITHIN
    for examples in (EARLY, 50):
        report = check_policy(
            load(name), examples=examples, name=name, folder=tmp_path, across_processes=elsewhere, time_limit_s=limit
        )
        is_caught = law in [entry.law for entry in report.broken] or (not law and report.never_shown)
        if is_caught:
            break
    assert not report.passed
    assert is_caught
    if fault in STOPPED:
        assert "TooLong" in report.as_text()
        assert "--time-limit" in report.as_text()


def test_the_length_of_the_working_directory_is_told_from_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        name = f"{write_planted('the working directory', Path(folder))}:Planted"
        monkeypatch.chdir(folder)
        report = check_policy(load(name), examples=10, name=name, folder=folder)
        monkeypatch.undo()
    assert [entry.law for entry in report.broken] == ["repeats"]


def test_without_a_fault_it_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(f"{HEAD}\n{PLAN}        return self.away(problem, 1)\n")
    monkeypatch.chdir(tmp_path)
    report = check_policy(load("planted.py:Planted"), examples=50, name="planted.py:Planted", folder=tmp_path)
    assert report.passed, report.as_text()


def test_a_law_that_no_example_put_to_the_test_is_not_called_kept() -> None:
    report = check_policy(load("keep_all"), examples=20, name="keep_all", across_processes=False)
    assert report.passed
    idle = [line for line in report.as_text().splitlines() if line.endswith("(not exercised)")]
    assert any("Law 8" in line for line in idle)
    assert any("Law 10" in line for line in idle)
    assert not any(line.strip().startswith("ok") for line in idle)
    assert report.as_text().count("ok    Law") == len(CHECKS) - len(idle)
