"""Cells share plans: of a policy that looks only at the trace, and of a solver on one machine and budget."""

from copy import copy
from dataclasses import dataclass, replace

import pytest

from sim import load_profile
from sim.errors import PolicyFailed
from sim.experiment import problem_for, simulate
from sim.plan import Online, Plan
from sim.policies.base import Policy
from sim.sweeps import load_study
from sim.sweeps.asked import asked
from sim.sweeps.cell import Bench
from sim.sweeps.kept import Kept
from sim.sweeps.plans import remembering
from workloads import transformer

MACHINE = load_profile("a100_80_sxm")
TRACE = transformer("gpt2", batch=1, sequence=8)
LOOKS = {
    "nothing": lambda problem: None,
    "home": lambda problem: problem.home,
    "platform": lambda problem: problem.platform.host.capacity + problem.platform.home(0).nominal,
    "cost": lambda problem: problem.cost.op_ns(0),
    "budget": lambda problem: problem.budget,
    "a tier": lambda problem: problem.platform.tiers[0].capacity,
    "a tier beside another": lambda problem: problem.platform.tiers[0] == MACHINE.tiers[0],
    "a changed tier": lambda problem: replace(problem.platform.tiers[0], bandwidth=1),
    "the platform's budget": lambda problem: problem.platform.budget,
    "the platform's hash": lambda problem: problem.platform.content_hash,
    "a changed platform": lambda problem: replace(problem.platform, name="another"),
    "the platform of its cost": lambda problem: problem.cost.platform.home(0).capacity,
    "evaluate": lambda problem: problem.evaluate(Plan(problem.trace)),
    "a copy": lambda problem: replace(problem, trace=TRACE),
}
MACHINE_ALONE = ("home", "platform", "cost")


@dataclass(frozen=True, kw_only=True)
class Looking(Policy):
    """Keeps everything, having looked at something."""

    look: str = "nothing"

    def plan(self, problem):
        calls.append(self.look)
        LOOKS[self.look](problem)
        return Plan(problem.trace)


@dataclass(frozen=True, kw_only=True)
class Solving(Looking):
    solver = "highs"


@dataclass(frozen=True, kw_only=True)
class Drawing(Looking):
    """Looks at the seed alone."""

    def plan(self, problem):
        assert problem.seed >= 0
        return super().plan(problem)


@dataclass(frozen=True, kw_only=True)
class Forgetful(Policy):
    def plan(self, problem):
        return None


class Part(Online):
    """Looks at the problem once the run has begun."""

    def __init__(self, problem):
        seen.append((problem.budget // 10**10, problem.seed))


@dataclass(frozen=True, kw_only=True)
class Late(Policy):
    """Its online part holds the problem, or a copy of it."""

    online = True
    solver = "highs"
    copies: bool = False

    def plan(self, problem):
        held = copy(problem) if self.copies else problem
        return Plan(problem.trace, online=lambda: Part(held))


@dataclass(frozen=True, kw_only=True)
class Noteless(Policy):
    def plan(self, problem):
        return Plan(problem.trace, notes=None)


calls: list[str] = []
seen: list[tuple[int, int]] = []


def plans(policy, *cells):
    """How often a policy plans in cells of (budget in 10 GB, seed)."""
    kept = Kept(10**6)
    calls.clear()
    for budget, seed in cells:
        chosen = remembering(policy, kept, "trace", "machine", budget)
        plan = chosen.plan(problem_for(TRACE, MACHINE.with_budget(budget * 10**10), seed=seed))
        assert plan.trace is TRACE
    return len(calls)


def test_a_policy_that_looks_only_at_the_trace_plans_once():
    assert plans(Looking(), (1, 0), (2, 0), (2, 1)) == 1


@pytest.mark.parametrize("look", MACHINE_ALONE)
def test_one_that_looks_at_the_machine_but_not_at_its_budget_plans_once_per_machine(look):
    kept, policy = Kept(10**6), Looking(look=look)
    calls.clear()
    for name in ("a100_80_sxm", "v100_32"):
        for budget in (10**10, 2 * 10**10):
            platform = load_profile(name).with_budget(budget)
            remembering(policy, kept, "trace", name, budget).plan(problem_for(TRACE, platform))
    assert len(calls) == 2


@pytest.mark.parametrize("look", sorted({*LOOKS} - {"nothing", *MACHINE_ALONE}))
def test_one_that_looks_at_the_budget_plans_for_each(look):
    assert plans(Looking(look=look), (1, 0), (2, 0), (1, 0)) == 3


def test_a_platform_that_notes_what_is_read_is_the_platform():
    plain = MACHINE.with_budget(10**10)
    noting = asked(problem_for(TRACE, plain)).platform
    for key in ("tiers", "engines", "links", "host", "budget", "content_hash", "timing_hash"):
        assert getattr(noting, key) == getattr(plain, key), key
    assert repr(noting.tiers) == repr(plain.tiers)
    assert hash(noting.home(0)) == hash(plain.home(0))
    assert noting.with_budget(7).tiers == plain.with_budget(7).tiers
    assert replace(noting, name="other").content_hash == replace(plain, name="other").content_hash


def test_a_solver_plans_once_per_machine_and_budget():
    assert plans(Solving(look="budget"), (1, 0), (2, 0), (1, 0), (2, 1)) == 2


def test_one_that_looks_at_the_seed_plans_once_per_seed():
    assert plans(Drawing(), (1, 0), (2, 0), (1, 1), (2, 1)) == 2


@pytest.mark.parametrize("copies", [False, True])
def test_a_plan_that_holds_the_problem_is_not_shared(copies):
    kept, cells = Kept(10**6), [(1, 0), (2, 0), (1, 0), (1, 1)]
    seen.clear()
    for budget, seed in cells:
        policy = remembering(Late(copies=copies), kept, "trace", "machine", budget)
        policy.plan(problem_for(TRACE, MACHINE.with_budget(budget * 10**10), seed=seed)).online()
    assert seen == cells


def test_notes_need_not_be_a_mapping():
    assert (
        remembering(Noteless(), Kept(9), "trace", "machine", "limits").plan(problem_for(TRACE, MACHINE)).notes is None
    )


def test_a_fault_names_the_policy():
    with pytest.raises(PolicyFailed, match=r"'Forgetful'.*None"):
        simulate(TRACE, MACHINE, remembering(Forgetful(), Kept(9), "trace", "machine", "limits"))


@pytest.mark.parametrize("policy", ["full_recompute", "selective_recompute", "swap_all", "chen"])
def test_cells_have_the_rows_that_they_have_alone(policy):
    study = {"model": "gpt2", "batch": 1, "sequence": 64, "profile": "a100_80_sxm", "policy": policy}
    study["budget"] = ["all", "97%", "60%"]
    cells, shared = load_study(study).cells(), Bench()
    assert [shared.run(cell.task)["row"] for cell in cells] == [Bench().run(cell.task)["row"] for cell in cells]
