"""The row of one policy in a comparison: its figures, or why it does not fit, does not apply or failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import (
    Deadlock,
    IllegalPlan,
    Infeasible,
    PolicyError,
    PolicyFailed,
    TiersimError,
    refusal_record,
)
from sim.experiment import Result, reference_run, simulate
from sim.floors import State, decides_nothing, state_in, too_small
from sim.hardware.platform import Platform
from sim.limits import TooLong, limited
from sim.policies.base import Policy
from sim.search import smallest_budget
from sim.trace.graph import Trace
from sim.units import format_bytes, to_bytes

FLOOR_TOLERANCE = 0.02
"""How near, relatively, a searched floor is to a budget that does not fit."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all policies of a comparison share; `compare` says what each means."""

    trace: Trace
    platform: Platform
    budget: float | str | None = None
    seed: int = 0
    iterations: int | None = None
    recompute_limit: float | None = RECOMPUTE_LIMIT
    find_floor: bool | None = None
    time_limit_s: float | None = None
    most_actions: int | None = None
    views: bool = False

    @property
    def limited(self) -> Platform:
        """The machine with the budget."""
        return self.platform if self.budget is None else self.platform.with_budget(to_bytes(self.budget))

    @property
    def replay(self) -> dict[str, Any]:
        """Options of `simulate` that searches take, too."""
        return {"seed": self.seed, "iterations": self.iterations, "recompute_limit": self.recompute_limit}


@dataclass(frozen=True)
class Answer:
    """What came of one policy: its row, and its run if it fits; if it does not, what ran until then.

    view: the saved view of either (`sim.views`), where another process has made it.
    """

    row: Row
    result: Result | None = None
    attempt: Result | None = None
    does_not_apply: bool = False
    view: bytes | None = None


def answer(label: str, policy: Policy, setting: Setting) -> Answer:
    """Run one policy within the limits; where it does not fit, find its floor."""
    try:
        with limited(setting.time_limit_s, actions=setting.most_actions):
            return _answer(label, policy, setting)
    except TooLong as error:
        return failed(label, policy, f"policy {label!r}: {error}")


def _answer(label: str, policy: Policy, setting: Setting) -> Answer:
    about = _about(label, policy)
    try:
        result = simulate(setting.trace, setting.platform, policy, budget=setting.budget, **setting.replay)
        result = replace(result, name=label)
        return Answer({**about, **result.summary(), "plan_s": result.plan_s}, result)
    except (Infeasible, Deadlock) as error:
        row, ran = {**about, **_refusal(error)}, getattr(error, "plan", None)
        attempt = getattr(error, "attempt", None)
        attempt = attempt if attempt is None else replace(attempt, name=label)
    except PolicyError as error:
        return replace(failed(label, policy, str(error)), does_not_apply=True)
    except (IllegalPlan, PolicyFailed) as error:
        return failed(label, policy, str(error))
    if setting.find_floor is not False:
        with suppress(PolicyError, IllegalPlan, PolicyFailed):  # a fault at another budget leaves the floor unknown
            floor = smallest_budget(
                *(setting.trace, setting.platform, policy),
                tolerance=FLOOR_TOLERANCE,
                search=setting.find_floor is True,
                ran=ran,
                **setting.replay,
            )
            row["floor_bytes"] = row["floor_bytes"] if floor is None else floor
    return Answer(row, attempt=attempt)


def failed(label: str, policy: Policy, error: str) -> Answer:
    """The answer of a policy that neither fits nor is refused."""
    return Answer({**_about(label, policy), "fits": None, "error": error})


def states_of(trace: Trace, platform: Platform) -> tuple[State, ...]:
    """The state of training in each tier; none where nothing runs even with unlimited memory."""
    try:
        return state_in(reference_run(trace, platform))
    except TiersimError:
        return ()


def refused_for_state(
    label: str, policy: Policy, states: Sequence[State], limited: Platform, setting: Setting
) -> Row | None:
    """The row of a policy that leaves more state in a tier than that can hold, whatever it decides; else None."""
    state = too_small(policy, states, limited)
    if state is None:
        return None
    capacity, floor = limited.tier(state.tier).capacity, None
    what, most = "weights, gradients and optimizer state", format_bytes(state.bytes)
    if state.placed_bytes > capacity:
        what, most = "weights and optimizer state", format_bytes(state.placed_bytes)
    if decides_nothing(policy) and setting.find_floor is not False:
        floor = smallest_budget(setting.trace, setting.platform, policy, search=False, **setting.replay)
    return {
        **_about(label, policy),
        "fits": False,
        "refusal": "state",
        "error": f"{what} alone take {most} of {state.tier!r}, which has {format_bytes(capacity)}",
        "floor_bytes": floor,
        "holders": [list(holder) for holder in state.holders],
        "full": [state.tier],
    }


def _about(label: str, policy: Policy) -> dict[str, Any]:
    return {"policy": label, "fidelity": policy.fidelity, "manages": policy.manages}


def _refusal(error: TiersimError) -> dict[str, Any]:
    record = refusal_record(error)
    row = {"fits": False, "refusal": record["refusal"], "error": record["error"]}
    row["floor_bytes"] = getattr(error, "floor_bytes", None)
    return row | {key: record[key] for key in ("holders", "full") if key in record}
