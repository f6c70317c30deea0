"""Law 8: a policy that says it is optimal is, and what a plan says is proven holds for its own run."""

from __future__ import annotations

from sim.conformance.checker import check
from sim.conformance.replayed import LawBroken, Replayed, replayed, run_policy
from sim.conformance.simple_plans import simple_plans
from sim.errors import Infeasible
from sim.experiment import PROVEN, UNLIMITED, problem_for

LOOKED_AT = 60
"""Most ops of a trace whose simple plans are all looked at for whether one fits."""


def check_optimal(run: Replayed) -> None:
    """Law 8: a policy that is optimal never takes longer with more budget, and no plan of its class beats it.

    It is held to what a run claims: a plan whose notes say another `status`, and a refusal that is not proven, claim
    nothing. Planners count bytes. Where the allocator gives addresses, a plan may run into gaps that it could not
    foresee, and more budget may have other gaps: a refusal says nothing there.

    Of any policy, a bound that its plan's notes call proven (`sim.experiment.PROVEN`) is not above what it reaches.
    """
    _bounds(run)
    if not run.policy.optimal or not (run.done or isinstance(run.error, Infeasible)):
        return
    addressed = run.platform.home(0).allocator.name != "exact"
    if run.done or not addressed:
        _beaten(run)
    capacity = run.platform.home(0).capacity
    best = run.log.end if run.done and run.log is not None else None
    for budget in (capacity + max(1, capacity // 8), 2 * capacity, UNLIMITED):
        more = run_policy(run.policy, run.trace, run.platform.with_budget(budget), seed=run.seed)
        if not claims_optimum(more):
            continue
        if not more.done or more.log is None:
            if best is not None and isinstance(more.error, Infeasible) and not addressed:
                raise LawBroken(f"with {budget} B it refuses what fits into {capacity} B: {more.error}")
            continue
        if best is not None and more.log.end > best:
            raise LawBroken(f"with {budget} B it takes {more.log.end} ns; with {capacity} B {best} ns")
        best, capacity = more.log.end, budget


def _bounds(run: Replayed) -> None:
    """A run is not below the least that its own plan's notes call proven."""
    if not run.done or run.plan is None or run.log is None:
        return
    for key, (_, figure, of) in PROVEN.items():
        bound, reached = run.plan.notes.get(key), of(run.log)
        if bound is None or reached is None:
            continue
        slack = 1e-6 * bound if isinstance(bound, float) else 0  # joules are proven to one part in a million
        if reached < bound - slack:
            raise LawBroken(f"its notes say {key} {bound}; the {figure} of its own run is {reached}")


def is_compared(run: Replayed) -> bool:
    """Whether a run claims an optimum, and some simple plan is of the class that the policy names."""
    claims = run.done and bool(run.policy.optimal) and claims_optimum(run)
    return claims and any(map(run.policy.in_class, simple_plans(run.trace)))


def could_claim(run: Replayed) -> bool:
    """Whether keeping everything does not fit, and a simple plan of the class that an optimal policy names does.

    Longer traces have too many simple plans to look at them all, and none is counted there.
    """
    addressed = run.platform.home(0).allocator.name != "exact"
    if not run.policy.optimal or addressed or run.trace.devices > 1 or len(run.trace.ops) > LOOKED_AT:
        return False
    budget, cost = run.platform.home(0).capacity, problem_for(run.trace, run.platform).cost.op_ns
    plain, *others = simple_plans(run.trace)
    if check(plain, cost).peak <= budget:
        return False
    return any(check(plan, cost).peak <= budget and run.policy.in_class(plan) for plan in others)


def claims_optimum(run: Replayed) -> bool:
    """Whether a run says that its plan is optimal, or that no plan of the class fits."""
    if isinstance(run.error, Infeasible):
        return run.error.proven
    return run.plan is None or run.plan.notes.get("status", "optimal") == "optimal"


def _beaten(run: Replayed) -> None:
    """Compare a plan said to be optimal, or a refusal, with simple plans of the class that the policy names."""
    if not claims_optimum(run):
        return
    best = run.log.end if run.done and run.log is not None else None
    budget = run.platform.home(0).capacity
    cost = problem_for(run.trace, run.platform).cost.op_ns
    for plan in simple_plans(run.trace):
        if not run.policy.in_class(plan):
            continue
        checked = check(plan, cost)
        if checked.peak > budget or (best is not None and checked.time >= best):
            continue
        other = replayed(run.policy, plan, run.trace, run.platform, seed=run.seed)
        if other.done and other.log is not None and (best is None or other.log.end < best):
            says = f"it refuses {budget} B" if best is None else f"its plan takes {best} ns"
            reruns = [run.trace.op_columns.name[op] for op in checked.reruns]
            raise LawBroken(
                f"{says}; of its class ({run.policy.optimal}) one that recomputes {reruns} takes {other.log.end} ns"
            )
