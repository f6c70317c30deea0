"""The suite as a tool: its report, its files, and that it says when it has tested nothing."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
from annotated_types import Ge

from sim.conformance import CHECKS, LawBroken, check_costs, check_policy, run_policy
from sim.conformance.across_processes import differences, renamed
from sim.conformance.causality import check_online
from sim.conformance.examples import Example, for_each, random_examples
from sim.conformance.random_platforms import platform_of, toml_of
from sim.conformance.tried import tried
from sim.errors import Infeasible, PolicyError
from sim.experiment import simulate
from sim.hardware import load_profile
from sim.plan import Move, Online, Plan
from sim.policies import load
from sim.policies.base import MANAGES, Policy
from sim.report.listings import policy_page
from sim.rewrites.slots import slots_of
from sim.scaffold import write_policy
from sim.trace import TraceBuilder
from sim.trace.chain import chain
from sim.trace.io import load as load_trace
from workloads import cnn, transformer

LIAR = '''
from dataclasses import dataclass
from sim.plan import Move, Plan, Problem
from sim.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class Liar(Policy):
    """Moves the largest result, and says that it moves nothing."""

    needs = frozenset({"host"})
    times: int = 1

    def plan(self, problem: Problem) -> Plan:
        trace = problem.trace
        made = [t for t in trace.tensors if trace.producer[t.id] >= 0 and t.bytes and t.role == "activation"]
        if not made:
            return Plan(trace)
        largest = max(made, key=lambda t: (t.bytes, -t.id)).id
        return Plan(trace, (Move(largest, "host", after=int(trace.producer[largest])),))
'''


@pytest.fixture
def liar(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIERSIM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "liar.py").write_text(LIAR)
    return "liar.py:Liar"


def test_a_policy_that_keeps_the_laws_passes():
    report = check_policy(load("keep_all"), examples=20, name="keep_all")
    assert report.passed
    assert report.as_dict()["passed"] is True
    assert report.examples == 20
    text = report.as_text()
    assert text.startswith("keep_all: passed: 20 examples")
    assert text.count("ok    Law") + text.count("–     Law") == len(CHECKS)
    assert text.count("ok    Law") >= 8


def test_a_broken_law_comes_with_the_smallest_example_and_the_command_that_runs_it(liar, tmp_path):
    report = check_policy(load(liar, times=2), examples=30, name=liar)
    assert not report.passed
    assert [entry.law for entry in report.broken] == ["ops"]
    entry = report.broken[0]
    assert "the policy does not say that it moves" in entry.text
    assert "FAIL  Law 3" in report.as_text()
    trace_file, profile_file = entry.files
    assert Path(trace_file).parent == tmp_path / "cache" / "checks"
    assert re.fullmatch(r"tiersim-check-liar\.py_Liar-ops-[0-9a-f]{8}\.jsonl", Path(trace_file).name)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"cache", "liar.py"}
    trace = load_trace(trace_file)
    assert len(trace.ops) <= 3
    words = shlex.split(entry.command)
    assert words[:4] == ["tiersim", "run", "--trace", trace_file]
    assert words[words.index("-p") + 1] == "times=2"
    budget = words[words.index("--budget") + 1]
    result = simulate(trace, load_profile(words[words.index("--profile") + 1]), liar, budget=budget, times=2)
    assert (result.log.interval("why") == 2).any()
    assert load_profile(profile_file).name


def test_the_same_seed_gives_the_same_report_and_another_one_other_examples(liar):
    policy = load(liar)
    first, again = (check_policy(policy, examples=15, name=liar, across_processes=False) for _ in range(2))
    assert first == again
    other = check_policy(policy, examples=15, seed=1, name=liar, across_processes=False)
    assert other.broken[0].text != first.broken[0].text or other.refused != first.refused or other != first


def test_it_leaves_nothing_behind_but_failing_examples(liar):
    check_policy(load("keep_all"), examples=5, name="keep_all")
    assert sorted(os.listdir()) == ["liar.py"]


class Refuses(Policy):
    """Needs what no example has."""

    def plan(self, problem):
        raise PolicyError("needs a quantum computer")


def test_a_policy_that_refuses_every_example_has_not_passed():
    report = check_policy(Refuses(), examples=5)
    assert not report.passed
    assert report.skipped == 5
    assert "nothing ran: no law was put to the test" in report.as_text()
    assert "needs a quantum computer" in report.as_text()


class Divides(Policy):
    """Fails on every example."""

    def plan(self, problem):
        return 1 // 0


def test_a_policy_that_fails_on_every_example_ran_on_none(tmp_path):
    report = check_policy(Divides(), examples=3, folder=tmp_path)
    assert not report.passed
    assert (report.ran, report.failed) == (0, 3)
    text = report.as_text()
    assert "FAILED: 3 examples, 0 ran, 3 failed, 0 did not fit" in text
    assert "ok  " not in text
    assert "–     Law 1" in text
    assert "nothing ran: no law was put to the test" in text


class FailsLarge(Policy):
    """Fails on some examples."""

    def plan(self, problem):
        return [] if len(problem.trace.ops) % 2 else load("keep_all").plan(problem)


def test_those_that_failed_are_not_among_those_that_ran(tmp_path):
    report = check_policy(FailsLarge(), examples=20, folder=tmp_path)
    assert not report.passed
    assert report.failed > 0
    assert report.ran > 0
    assert report.examples == report.ran + report.failed + report.refused + report.skipped
    assert f"{report.ran} ran, {report.failed} failed, " in report.as_text()
    assert report.as_dict()["failed"] == report.failed


def test_no_examples_are_refused():
    with pytest.raises(PolicyError, match="examples must be at least 1, not 0"):
        check_policy(load("keep_all"), examples=0)


class OnlySays(Policy):
    """Says that it recomputes and moves, and never does."""

    recomputes = True
    moves = True
    manages = MANAGES

    def plan(self, problem):
        return load("keep_all").plan(problem)


def test_a_trait_that_never_shows_is_reported():
    report = check_policy(OnlySays(), examples=20)
    assert "recomputes" in report.not_exercised
    assert "recomputes" in report.never_shown
    assert "note: a trait that examples seldom show: take it away" in report.as_text()


def test_a_few_examples_blame_no_trait(tmp_path):
    write_policy("fresh", tmp_path)
    few = check_policy(load(f"{tmp_path}/fresh.py:Fresh"), examples=5).as_text()
    assert "not exercised: recomputes" in few
    assert "so few examples do not tell how often a trait shows, the first being the simplest: 50 do" in few
    assert "take it away" not in few
    assert "note:" not in check_policy(load(f"{tmp_path}/fresh.py:Fresh"), examples=50).as_text()


@dataclass(frozen=True, kw_only=True)
class Unbounded(Policy):
    """A parameter of every kind, one of them without bounds."""

    ahead: int = 4
    share: Annotated[float, Ge(0)] = 0.5
    order: Literal["first", "last"] = "last"
    early: bool = True

    def plan(self, problem):
        return load("keep_all").plan(problem)


def test_a_parameter_that_takes_anything_is_noted():
    (note,) = check_policy(Unbounded(), examples=1, across_processes=False).notes
    assert note.startswith("ahead: int takes anything: give a number its bounds, as in Annotated[int, Ge(0)]")


# ---- what examples are like --------------------------------------------------------------------


def drawn(needs: set[str], count: int = 40) -> list[Example]:
    found: list[Example] = []
    for_each(random_examples(frozenset(needs)), found.append, count, 0)
    return found


def test_examples_meet_the_needs_that_a_policy_declares():
    for example in drawn({"chain", "host"}):
        trace, platform = example.trace, example.platform
        assert platform.host is not None
        costs = np.ones(len(trace.ops), np.int64)
        assert chain(trace, costs) is not None
    for example in drawn({"layers"}):
        assert (example.trace.op_columns.layer >= 0).any()
    for example in drawn({"backward"}):
        assert (example.trace.op_columns.phase == 1).any()
    for example in drawn({"cpu", "host"}):
        assert any(engine.name == "cpu" for engine in example.platform.engines)


def test_examples_have_every_feature_now_and_then():
    found = drawn(set(), 150)
    platforms = [example.platform for example in found]
    traces = [example.trace for example in found]
    assert {platform.devices for platform in platforms} == {1, 2}
    assert {platform.tiers[0].allocator.name for platform in platforms} == {"exact", "pool", "caching"}
    assert any(platform.pools for platform in platforms)
    assert any(platform.host is None for platform in platforms)
    assert any("nvme" in platform.tier_ids for platform in platforms)
    assert any(link.copy_engines > 1 for platform in platforms for link in platform.links)
    assert any(len(engine.reaches) > 1 for platform in platforms for engine in platform.engines)
    assert any((trace.tensor_columns.replaces >= 0).any() for trace in traces)
    assert any(set(trace.op_columns.engine.values()) == {"cpu"} for trace in traces)
    kinds = {op.kind for trace in traces for op in trace.ops}
    assert {"send", "recv", "collective", "conv", "matmul", "optimizer"} <= kinds
    assert any(trace.meta["model"] == "gpt2" for trace in traces)
    assert any(trace.op_columns.views for trace in traces)
    assert any(trace.op_columns.counted for trace in traces)
    assert any(len(trace.ops) > 159 for trace in traces)
    assert any(trace.tensor_columns.bytes.max(initial=0) > 1 << 30 for trace in traces)
    runs = [run_policy(load("keep_all"), example.trace, example.platform) for example in found]
    assert 0.25 < np.mean([run.done for run in runs]) < 0.75


def test_what_does_not_fit_is_tried_with_more_memory_to_the_last():
    kept = [list(tried(load("keep_all"), example)) for example in drawn(set(), 60)]
    assert all(runs[-1][1].done for runs in kept)
    assert {len(runs) for runs in kept} == {1, 2, 3}
    for runs in kept:
        assert all(isinstance(run.error, Infeasible) for _, run in runs[:-1])
        budgets = [example.budget for example, _ in runs]
        assert budgets == sorted(set(budgets))


def test_an_allocator_that_caches_is_met_in_every_state():
    """Segments of both pools, a cache that pressure empties, and requests that do not fit between blocks."""
    runs = [
        run
        for example in drawn(set(), 150)
        if example.platform.tiers[0].allocator.name == "caching"
        for _, run in tried(load("lru_tiering"), example)
    ]
    assert any(run.error for run in runs)
    logs = [run.log for run in runs if run.done]
    assert any((log.reserved[:, 2] == 2 << 20).any() for log in logs)
    assert any((log.reserved[:, 2] == 20 << 20).any() for log in logs)
    assert any((log.reserved[:, 2] < 0).any() for log in logs)


def test_a_machine_as_text_is_the_machine(tmp_path):
    for example in drawn(set(), 20):
        path = tmp_path / "random.toml"
        path.write_text(toml_of(example.machine))
        read, made = load_profile(path), platform_of(example.machine)
        assert (read.tiers, read.engines, read.links, read.pools) == (made.tiers, made.engines, made.links, made.pools)


ENDS = '''
from dataclasses import dataclass
import os
import sys
from sim.plan import Plan, Problem
from sim.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class Ends(Policy):
    """Ends the program that it runs in, as if all were well."""

    how: str = "plan"

    def __post_init__(self) -> None:
        if self.how == "constructor":
            sys.exit(0)

    def plan(self, problem: Problem) -> Plan:
        if self.how == "process":
            os._exit(0)
        sys.exit(0)
'''


@pytest.mark.parametrize("how", ["plan", "process", "constructor"])
def test_a_policy_that_ends_the_program_does_not_pass(how, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    words = [sys.executable, "-m", "sim", "check", "ends.py:Ends", "--examples", "2", "-p", f"how={how}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if how == "constructor" else 1)
    assert ("FAILED" in done.stdout) == (how != "constructor")
    assert "Traceback" not in done.stderr
    said = done.stderr if how == "constructor" else done.stdout
    assert ("exit status 0" if how == "process" else "SystemExit") in said


def test_other_names_leave_to_each_weight_what_is_its_own():
    trace = transformer({**TINY_GPT, "n_layer": 1}, batch=1, sequence=8, optimizer="adamw_fused")
    other = renamed(trace)
    step = max((op for op in trace.ops if op.kind == "optimizer"), key=lambda op: len(op.reads)).id
    slots = [[(slot.reads, slot.writes) for slot in slots_of(each, step)] for each in (trace, other)]
    assert len(slots[0]) > 5
    assert slots[0] == slots[1]
    assert not set(trace.tensor_columns.name) & set(other.tensor_columns.name)
    assert sorted(range(9), key=trace.tensor_columns.name.__getitem__) != sorted(
        range(9), key=other.tensor_columns.name.__getitem__
    )


TINY_GPT = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}

REMEMBERS = """
import os
from dataclasses import dataclass
from typing import ClassVar

from sim.plan import Move, Plan
from sim.policies.base import MANAGES, Policy

SEEN = {}

@dataclass(frozen=True, kw_only=True)
class Remembers(Policy):
    moves = True
    manages: ClassVar[tuple[str, ...]] = MANAGES
    needs = frozenset({"host"})
    at: int = 0

    def plan(self, problem):
        trace = problem.trace
        at = SEEN.setdefault((trace.content_hash, problem.budget), len(SEEN))
        if self.at and at >= self.at:
            os._exit(0)
        if self.at:
            return Plan(trace)
        made = [t for t in range(len(trace.tensors)) if trace.producer[t] >= 0 and trace.tensors[t].bytes
                and trace.read_counts[t] and t not in trace.outputs and trace.replaced_by[t] < 0]
        t = made[at % len(made)] if made else -1
        return Plan(trace, [Move(t, "host", after=int(trace.producer[t]))] if made else [])
"""


def test_a_policy_that_remembers_earlier_examples_breaks_repeats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "remembers.py").write_text(REMEMBERS)
    name = "remembers.py:Remembers"
    assert differences([(name, load(name))], examples=5, seed=3)


def test_a_policy_that_ends_the_process_at_a_later_example_does_not_pass(tmp_path):
    (tmp_path / "remembers.py").write_text(REMEMBERS)
    words = [sys.executable, "-m", "sim", "check", "remembers.py:Remembers", "--examples", "100", "-p", "at=60"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "without a report (exit status 0)" in done.stdout


def test_a_policy_that_prints_is_checked_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = "        trace = problem.trace\n"
    (tmp_path / "loud.py").write_text(LIAR.replace(trace, f"{trace}        print(trace)\n        return Plan(trace)\n"))
    assert check_policy(load("loud.py:Liar"), examples=3, name="loud.py:Liar").passed


def test_savings_are_declared_where_a_policy_is_shown():
    assert "Declared saving: launch" in policy_page("tso")
    report = check_policy(load("zero_offload"), examples=3, across_processes=False)
    assert any(note.startswith("declared saving: fusion") for note in report.notes)


FREE_CAPTURE = {"capture": 0, "switch": 0}


@pytest.mark.parametrize(
    ("name", "parameters", "saving"),
    [
        ("tso", FREE_CAPTURE, "launch"),
        ("tso", {**FREE_CAPTURE, "launch": 9000}, "launch"),
        ("vdnn", {}, "implementation"),
    ],
)
def test_what_a_shipped_policy_saves_is_what_it_declares(name, parameters, saving):
    if name == "tso":
        sizes = {"n_embd": 64, "n_layer": 4, "n_head": 2, "vocab_size": 100, "n_positions": 32}
        trace = transformer({"model_type": "gpt2", **sizes}, batch=1, sequence=32)
    else:
        trace = cnn("alexnet", batch=8)
    run = run_policy(load(name, **parameters), trace, load_profile("a100_40_pcie"))
    assert run.done
    assert run.plan.trace != trace
    check_costs(run)
    silent = type(f"Silent{name}", (type(run.policy),), {"saves": {}})
    with pytest.raises(LawBroken):
        check_costs(dataclasses.replace(run, policy=silent(**parameters)))
    assert saving in run.policy.saves


def test_what_an_engine_beside_the_device_reads_later_lies_there_in_another_future_too():
    b = TraceBuilder()
    state = b.tensor("state", 8, "optimizer_state")
    x, y = b.tensor("x", 8), b.tensor("y", 8)
    b.op("f0", writes=[x], duration=10)
    b.op("f1", reads=[x], writes=[y], duration=10)
    b.op("b", reads=[x, y], phase="backward", duration=10)
    b.op("adam", "optimizer", reads=[state], phase="update", engine="cpu")
    run = run_policy(load("lru_tiering"), b.build(), load_profile("a100_40_pcie"))
    assert run.log.memory.query("tensor == 'state'").tier.iloc[0] == "host"
    check_online(run)


class Early(Policy):
    """Measures an iteration; moves `a` in the first one where the trace has a later op, which it must not know of."""

    online = True
    moves = True
    warm_up = 1
    needs = frozenset({"host"})
    PEEKS = True

    def plan(self, problem):
        knows = self.PEEKS or problem.history
        moves = [Move("a", "host", after="make")] if knows and "late" in problem.trace.op_columns.name else []
        return Plan(problem.trace, moves, online=Online)


class Told(Early):
    """The same, from what the iteration before tells."""

    PEEKS = False


def test_a_policy_that_measures_first_may_know_what_comes_from_its_second_iteration_on():
    b = TraceBuilder()
    a = b.tensor("a", 10**6)
    b.op("make", writes=[a], duration=10)
    for i in range(4):
        b.op(f"idle{i}", duration=10**7)
    b.op("late", reads=[a], phase="backward", duration=10)
    trace, platform = b.build(outputs=[], carry=()), load_profile("a100_40_pcie")
    check_online(run_policy(Told(), trace, platform))
    with pytest.raises(LawBroken, match="with another future"):
        check_online(run_policy(Early(), trace, platform))


def test_examples_do_not_depend_on_constants_that_other_tests_have_read(monkeypatch):
    providers = pytest.importorskip("hypothesis.internal.conjecture.providers")

    class Filled(dict):
        """As the cache of constants is once other tests have drawn numbers from the same ranges."""

        def __contains__(self, key):
            return True

        def __missing__(self, key):
            return (), (3,) if key[0] == "integer" else ()

    def drawn():
        traces = []
        for_each(random_examples(real=0), lambda example: traces.append(example.trace.content_hash), 20, 0)
        return traces

    before = drawn()
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", Filled(), raising=False)
    assert drawn() == before
