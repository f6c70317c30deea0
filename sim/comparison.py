"""Compares policies on one trace, platform and budget: one row per policy, whether it fits or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import (
    Deadlock,
    IllegalPlan,
    Infeasible,
    OutOfMemory,
    PolicyError,
    PolicyFailed,
    TiersimError,
    refusal_kind,
)
from sim.experiment import Result, check_trace, simulate, to_platform
from sim.hardware.platform import Platform
from sim.policies import label as label_of
from sim.policies import load, names
from sim.policies.base import Policy
from sim.search import smallest_budget
from sim.trace.graph import Trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Request = str | tuple[str, Mapping[str, Any]] | Policy | type[Policy]

KEY_COLUMNS = (
    *("policy", "fits", "peak_bytes", "makespan_ns", "overhead", "recompute_ns", "saved_fraction"),
    *("floor_bytes", "fidelity", "error"),
)
"""The columns that a notebook shows; `Comparison.to_frame` has all of them."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison of policies.

    trace, platform: the inputs, the same for all policies.
    rows: one record per policy: `policy`, `fits` (None where the policy does not apply or failed), `fidelity`,
        `manages`, and the keys of `Result.summary`; for a policy that does not fit `refusal` (its kind), `error`,
        `holders` and `floor_bytes`, the smallest budget found to fit.
    results: the results of the policies that fit, by label.
    left_out: policies that were not run -> the reason.
    """

    trace: Trace
    platform: Platform
    rows: tuple[Mapping[str, Any], ...]
    results: Mapping[str, Result] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        fitting = sum(row["fits"] is True for row in self.rows)
        return f"<Comparison of {len(self.rows)} policies on {self.platform.name}, {self.trace!r}: {fitting} fit>"

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        shown: str = frame[[key for key in KEY_COLUMNS if key in frame]].to_html(index=False, na_rep="")
        return shown

    @property
    def failed(self) -> bool:
        """Whether some policy neither fitted nor was refused: it did not apply or failed."""
        return any(row["fits"] is None for row in self.rows)

    @property
    def bounds(self) -> tuple[str, ...]:
        """How near runs are to the least makespan that their policies have proven, a line per policy with a proof."""
        return tuple(f"{name}: {line}" for name, result in self.results.items() for line in result.bounds)

    def to_frame(self) -> pd.DataFrame:
        """The rows as a DataFrame; nested figures become columns such as `stall_ns.transfer`."""
        import pandas as pd

        return pd.json_normalize([dict(row) for row in self.rows])

    def plot(self) -> Figure:
        """Figure of time against peak memory, one marker per policy; see `sim.report.plot.plot_comparison`."""
        from sim.report.plot import plot_comparison

        return plot_comparison(self.rows, budget=next((r.platform.budget for r in self.results.values()), None))

    def report(self, path: str | os.PathLike[str], *, command: str = "") -> Path:
        """Write a report page with these rows and every run that fits: one HTML file; see `Result.report`."""
        from sim.pages import report_comparison

        return report_comparison(self, path, command=command)


def compare(
    trace: Trace,
    platform: Platform | str | os.PathLike[str],
    policies: Request | Sequence[Request] | None = None,
    *,
    budget: float | str | None = None,
    seed: int = 0,
    iterations: int | None = None,
    recompute_limit: float | None = RECOMPUTE_LIMIT,
    find_floor: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run policies on one trace, platform and budget.

    trace: the trace to run.
    platform: a platform, or the name or file of a profile.
    policies: a list of names, `(name, parameters)` pairs, policies or their classes, or a single one of these; None for
        all that apply and plan quickly.
    budget, seed, iterations, recompute_limit: see `simulate`.
    find_floor: search the smallest feasible budget of every policy that does not fit.
    on_progress: called with the label of each policy before it runs.

    Raises PolicyError for an unknown name or parameter, before anything runs.
    """
    check_trace(trace)
    platform = to_platform(platform)
    chosen = [(label, load(name, **parameters)) for label, name, parameters in map(_parsed, _listed(policies))]
    rows: list[Mapping[str, Any]] = []
    results: dict[str, Result] = {}
    left_out: dict[str, str] = {}
    for label, policy in chosen:
        if policies is None and policy.slow:
            left_out[label] = "plans slowly; name it to run it"
            continue
        if on_progress is not None:
            on_progress(label)
        traits = {"policy": label, "fidelity": policy.fidelity, "manages": policy.manages}
        try:
            result = simulate(
                trace,
                platform,
                policy,
                budget=budget,
                seed=seed,
                iterations=iterations,
                recompute_limit=recompute_limit,
            )
            rows.append({**traits, **result.summary(), "plan_s": result.plan_s})
            results[label] = result
        except (Infeasible, Deadlock) as error:
            rows.append({**traits, **_refusal(error)})
            if find_floor:
                with suppress(
                    PolicyError, IllegalPlan, PolicyFailed
                ):  # a fault at another budget leaves the floor unknown
                    floor = smallest_budget(
                        trace,
                        platform,
                        policy,
                        seed=seed,
                        iterations=iterations,
                        recompute_limit=recompute_limit,
                        tolerance=0.02,
                    )
                    rows[-1] = {**rows[-1], "floor_bytes": floor}
        except PolicyError as error:
            if policies is None:
                left_out[label] = str(error)
            else:
                rows.append({**traits, "fits": None, "error": str(error)})
        except (IllegalPlan, PolicyFailed) as error:
            rows.append({**traits, "fits": None, "error": str(error)})
    return Comparison(trace, platform, tuple(rows), results, left_out)


def _listed(policies: Request | Sequence[Request] | None) -> Sequence[Request]:
    """The requests as a list; a single one may be given without."""
    if policies is None:
        return names()
    is_pair = isinstance(policies, tuple) and len(policies) == 2 and isinstance(policies[1], Mapping)
    is_one = is_pair or isinstance(policies, (str, Policy, type))
    return cast("Sequence[Request]", (policies,) if is_one else policies)


def _parsed(request: Request) -> tuple[str, str | Policy, Mapping[str, Any]]:
    """(label, policy, parameters) of one request."""
    if isinstance(request, str):
        return request, request, {}
    if isinstance(request, (Policy, type)):
        policy = load(request)
        return label_of(policy), policy, {}
    name, parameters = request
    arguments = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return (f"{name}({arguments})" if arguments else name), name, parameters


def _refusal(error: TiersimError) -> dict[str, Any]:
    row: dict[str, Any] = {"fits": False, "refusal": refusal_kind(error), "error": str(error)}
    row["floor_bytes"] = getattr(error, "floor_bytes", None)
    if isinstance(error, OutOfMemory):
        row["holders"] = [list(holder) for holder in error.holders]
        row["full"] = list(error.full)
    return row
