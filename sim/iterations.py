"""From one iteration to the next: carried tensors start where the previous iteration left them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.analysis.residence import residence
from sim.engine.replay import RECOMPUTE_LIMIT, replay
from sim.hardware.platform import Platform
from sim.plan import Plan, Run
from sim.regathering import gathered_once
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
    """Run a policy's plan for one iteration, after the previous ones.

    trace: the trace that the policy was given.
    plan: its plan.
    platform: the machine.
    history: the previous iterations, oldest first.
    last: at the end, move carried tensors back to where they began, so that the iteration can be repeated as it is;
        otherwise only those that the plan places return, and the others stay where they are.
    recompute_limit: see `replay`.

    Raises what the engine raises.
    """
    own = None if last else frozenset(plan.trace.tensor_id(tensor) for tensor in plan.place)
    ran = continued(gathered_once(plan), history)
    return Run(trace, ran, replay(ran, platform, returned=own, recompute_limit=recompute_limit))


def nothing_returned(run: Run) -> bool:
    """Whether no tensor had to move back at the end of an iteration: then it is the same whether it is the last one."""
    return not run.log.counters["returned_moves"]


def continued(plan: Plan, history: Sequence[Run]) -> Plan:
    """The plan with carried tensors placed where the previous iteration left them, unless the plan places them itself.

    Tensors of two iterations correspond if they have the same name.
    """
    if not history:
        return plan
    left = _left(history[-1])
    own = {plan.trace.tensor_id(tensor) for tensor in plan.place}
    names = plan.trace.tensor_columns.name
    place = {first: left[names[first]] for _, first in plan.trace.carry if first not in own and names[first] in left}
    return replace(plan, place={**plan.place, **place}) if place else plan


def _left(run: Run) -> dict[str, str]:
    """The tier that holds each carried tensor at the end of a run, by its name in the next iteration."""
    trace, tiers = run.log.trace, residence(run.log)
    names = trace.tensor_columns.name
    return {names[first]: tiers[last][0] for last, first in trace.carry if tiers.get(last)}
