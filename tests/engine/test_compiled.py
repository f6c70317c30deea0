"""The engine as C writes the logs that it writes as Python, and takes what a policy says in integers of NumPy."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compiled import compiled_copy
from sim import Plan, load_profile, simulate
from sim.engine.replay import replay
from sim.errors import TiersimError
from sim.experiment import problem_for
from sim.log import EventLog
from sim.plan import Action, Memory, Move, Online
from sim.policies import load, names
from workloads import w1

SHARES = ("100%", "60%", "35%")


def logs() -> dict[str, str]:
    """What comes of each shipped policy that plans quickly at some budgets: a hash of its log, or its refusal."""
    trace, found = w1(4), {}
    for name in names():
        if load(name).solver:
            continue
        for share in SHARES:
            try:
                log = simulate(trace, "a100_40_pcie", name, budget=share).log
            except TiersimError as error:
                found[f"{name} {share}"] = str(error)
            else:
                found[f"{name} {share}"] = log.content_hash
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("there is no C compiler")
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs the extra `test`: there is no build")
    return compiled_copy(tmp_path_factory.mktemp("compiled"))


def python(compiled: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(compiled)}
    done = subprocess.run(
        [sys.executable, *words], cwd=compiled, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_compiled_engine_is_the_same_engine(compiled):
    where = python(compiled, "-c", "import sim.engine.event_path.run as run; print(run.__file__)")
    assert where.startswith(str(compiled))
    assert Path(where.strip()).suffix != ".py"
    assert "compiled" in python(compiled, "-m", "sim", "--version")
    printed = python(
        compiled, "-c", "import json; from tests.engine.test_compiled import logs; print(json.dumps(logs()))"
    )
    assert json.loads(printed.splitlines()[-1]) == logs()
    engine = ("test_reference", "test_random_plans", "test_timeline", "test_corner_cases", "test_regressions")
    tests = [f"tests/engine/{name}.py" for name in engine]
    python(compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "tests/engine/test_compiled.py")


def in_numpy(action: Action) -> Action:
    numbers = {f.name: getattr(action, f.name) for f in fields(action)}
    changed = {name: np.int32(number) for name, number in numbers.items() if type(number) is int}
    changed |= {name: np.bool_(flag) for name, flag in numbers.items() if type(flag) is bool}
    return replace(action, **changed)


@pytest.mark.parametrize("policy", ["swap_all", "full_recompute"])
def test_a_plan_may_be_in_integers_of_numpy(policy):
    trace, platform = w1(4), load_profile("a100_80_sxm")
    plan = load(policy).plan(problem_for(trace, platform))
    assert any(type(getattr(action, "before", None)) is int for action in plan.actions)
    again = Plan(plan.trace, [in_numpy(action) for action in plan.actions], place=plan.place)
    assert replay(again, platform) == replay(plan, platform)


def asked(kind: type) -> tuple[EventLog, list[object]]:
    """A run whose online part asks about a tensor and moves it, with its numbers of this type; and what it was told."""
    trace, platform, seen = w1(4), load_profile("a100_80_sxm"), list[object]()

    class Asks(Online):
        def before(self, op: int, memory: Memory) -> list[Action]:
            tensor = kind(3)
            seen.append((memory.where(tensor), memory.in_flight(tensor), memory.is_locked(tensor)))
            seen.append((memory.last_read(tensor), next(memory.residents("hbm"), None)))
            if memory.where(tensor) == ("hbm",):
                seen.append(memory.neighbours(tensor, "hbm"))
            return [Move(tensor, "host", priority=kind(1))] if op == 40 else []

    return replay(Plan(trace, online=Asks), platform), seen


def test_an_online_part_may_ask_and_answer_in_integers_of_numpy():
    log, seen = asked(int)
    assert [lane for lane in log.events["lane"] if lane == "d2h"] == ["d2h"]
    assert asked(np.int32) == (log, seen)
