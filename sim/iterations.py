"""From one iteration to the next: what is carried begins where the iteration before left it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.analysis.residence import residence
from sim.engine.replay import RECOMPUTE_LIMIT, replay
from sim.hardware.platform import Platform
from sim.plan import Plan, Run
from sim.trace.graph import Trace


def run_iteration(
    trace: Trace,
    plan: Plan,
    platform: Platform,
    history: Sequence[Run] = (),
    *,
    last: bool = True,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
) -> Run:
    """Run the plan that a policy made for `trace` after the iterations before it.

    last: bring back what the next iteration expects where this one began, so that it could be repeated as it is;
    otherwise what the plan does not place itself stays where it lies. recompute_limit: see `replay`.
    Raises what the engine raises.
    """
    own = None if last else frozenset(plan.trace.tensor_id(tensor) for tensor in plan.place)
    ran = continued(plan, history)
    return Run(trace, ran, replay(ran, platform, returned=own, recompute_limit=recompute_limit))


def continued(plan: Plan, history: Sequence[Run]) -> Plan:
    """The plan with carried tensors placed where the iteration before left them, but for those that it places itself.

    Tensors of two iterations are the same where they have the same name.
    """
    if not history:
        return plan
    left = _left(history[-1])
    own = {plan.trace.tensor_id(tensor) for tensor in plan.place}
    names = plan.trace.tensor_columns.name
    place = {first: left[names[first]] for _, first in plan.trace.carry if first not in own and names[first] in left}
    return replace(plan, place={**plan.place, **place}) if place else plan


def _left(run: Run) -> dict[str, str]:
    """Per tensor that the next iteration starts with, by name: the tier in which its value lies at the end."""
    trace, lies = run.log.trace, residence(run.log)
    names = trace.tensor_columns.name
    return {names[first]: lies[last][0] for last, first in trace.carry if lies.get(last)}
