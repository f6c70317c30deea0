"""The measured cells, asked: the best of a policy at a budget, the bound there, the front of all."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scripts.recompute_page.cases import SHARES, budget_at
from sim.analysis.pareto import pareto
from sim.policies import policy_class

Row = Mapping[str, Any]
OPTION = "remove_unnecessary"


@dataclass(frozen=True)
class Results:
    """One job's cells and what is known of it.

    cells: of policies as they are published. others: of planners with the removal of unnecessary recomputation where
    they are published without, and the other way round.
    """

    job: Row
    cells: Sequence[Row]
    others: Sequence[Row] = ()

    @property
    def short(self) -> str:
        """The name of the model."""
        return str(self.job["title"].partition(",")[0])

    @cached_property
    def labels(self) -> list[str]:
        """Rows of the tables, the least mean overhead over the budgets first, those that fit most budgets first."""

        def key(label: str) -> tuple[int, float, str]:
            at = [self.overhead(label, budget) for budget in self.budgets]
            fitting = [value for value in at if value is not None]
            return -len(fitting), statistics.fmean(fitting) if fitting else 0.0, label

        return sorted({row["label"] for row in self.cells}, key=key)

    @cached_property
    def budgets(self) -> list[int]:
        """All budgets of the job, rising."""
        return [budget_at(self.job["floor_bytes"], self.job["peak_bytes"], share) for share in SHARES]

    def of(self, label: str) -> list[Row]:
        """The cells of one row that ran to the end."""
        return [row for row in self.cells if row["label"] == label and row["status"] == "ok"]

    def at(self, label: str, budget: int) -> Row | None:
        """The fastest cell of one row at a budget, None where none fits."""
        rows = [row for row in self.of(label) if row["budget_bytes"] == budget and not row.get("smallest")]
        return min(rows, key=lambda row: (row["makespan_ns"], row["peak_bytes"]), default=None)

    def other(self, label: str, budget: int) -> float | None:
        """`overhead` of the fastest of the `others`."""
        rows = [row for row in self.others if (row["label"], row["budget_bytes"]) == (label, budget)]
        return min((self.over(row) for row in rows if row["status"] == "ok"), default=None)

    def free(self, label: str) -> bool:
        """Whether a row does more than drop and recompute: it moves bytes, or changes the ops. No bound holds then."""
        whole = self.job["makespan_ns"]
        return any(
            row["moved_bytes"] or row["makespan_ns"] - row["recompute_ns"] - row["stall_ns"] != whole
            for row in self.of(label)
        )

    def over(self, row: Row) -> float:
        """Time of a cell over that without a limit, as a fraction."""
        return float(row["makespan_ns"] / self.job["makespan_ns"] - 1)

    def overhead(self, label: str, budget: int) -> float | None:
        """`over` of the fastest cell."""
        row = self.at(label, budget)
        return None if row is None else self.over(row)

    def bound(self, budget: int) -> float:
        """The least overhead that any plan can have at a budget, as a fraction: proven at the next budget above."""
        above = [bound for size, bound in self.job["bounds"] if size >= budget]
        return float(max(above, default=0) / self.job["makespan_ns"])

    def smallest(self, label: str) -> Row | None:
        """The cell of least peak of one row."""
        return min(self.of(label), key=lambda row: (row["peak_bytes"], row["makespan_ns"]), default=None)

    def winner(self, budget: int) -> tuple[str, float]:
        """The fastest row at a budget of those that drop and recompute alone, and its overhead."""
        return self.ranking(budget)[0]

    def ranking(self, budget: int) -> list[tuple[str, float]]:
        """The rows that drop and recompute alone at a budget, the fastest first, with their overheads."""
        found = [(self.overhead(label, budget), label) for label in self.labels if not self.free(label)]
        return [(label, value) for value, label in sorted((v, one) for v, one in found if v is not None)]

    def front(self, label: str | None = None) -> list[Row]:
        """The cells (of one row, or of all that drop and recompute alone) that none beats in peak and time, by peak."""
        labels = [one for one in self.labels if not self.free(one)] if label is None else [label]
        return pareto(row for one in labels for row in self.of(one))

    def shrunk(self, label: str, times: float) -> float | None:
        """The least overhead at which a row's activations take at most 1/times of what they do without a limit."""
        most = self.job["activation_bytes"] / times
        return min((self.over(row) for row in self.of(label) if row["activation_bytes"] <= most), default=None)

    def smallest_activations(self, label: str) -> Row | None:
        """The cell with the fewest bytes of activations at once."""
        return min(self.of(label), key=lambda row: (row["activation_bytes"], row["makespan_ns"]), default=None)

    def above_bound(self, label: str) -> float | None:
        """Median distance to the bound over the budgets that a row fits, a fraction of the time without a limit."""
        if self.free(label):
            return None
        found = [over - self.bound(b) for b in self.budgets if (over := self.overhead(label, b)) is not None]
        return statistics.median(found) if found else None


def results(figures: Mapping[str, Any]) -> dict[str, Results]:
    """By job."""
    found = {}
    for job in figures["jobs"]:
        rows = [row for row in figures["cells"] if row["job"] == job["job"]]
        parts = ([row for row in rows if (OPTION in row["parameters"]) == other] for other in (False, True))
        found[job["job"]] = Results(job, *parts)
    return found


GROUPS = ("chains of stages", "a solver over ops or stages", "rules, separators, online")


def group_of(policy: str) -> int:
    """In which panel a policy is drawn: whether it needs a chain, else whether it solves something."""
    made = policy_class(policy)
    return 0 if "chain" in made.needs else 1 if made.solver else 2
