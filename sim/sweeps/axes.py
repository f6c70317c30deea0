"""What a study varies and how filters and tables name it; what its file must be like is in `schema`."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, NamedTuple

from sim.errors import TiersimError
from sim.layout import Layout
from sim.policies.base import Policy
from sim.units import format_bytes

COMPARISON = re.compile(r"(<=|>=|<|>|!=)\s*(-?\d+(?:\.\d+)?)")
LAYOUT_KEYS = (*(field.name for field in fields(Layout)), "devices")
"""What a table of `parallel` may contain, and what filters may name of it."""
DERIVED = ("tokens",)
"""What filters may name besides the axes; `tokens` is batch times sequence."""
WORKLOAD_AXES = (
    *("batch", "sequence", "precision", "attention", "optimizer", "loss", "stack", "dropout", "micro_batches"),
    *("frozen", "frozen_dtype", "lora_rank", "lora_targets", "lora_dropout", "routing_seed", "routing_skew"),
    *("generate", "selected"),
)
"""The axes that go with `model` and not with `trace`."""


class Chosen(NamedTuple):
    """A policy with one set of parameters, and its label in tables and figures."""

    label: str
    name: str
    parameters: tuple[tuple[str, Any], ...]
    policy: Policy


class StudyError(TiersimError):
    """A study with one or more mistakes, one line each in `problems`."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class Several(ValueError):
    """More than one mistake in one value."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def alternatives(asked: Any) -> list[Any]:
    """The values that a filter allows."""
    return asked if isinstance(asked, list) else [asked]


def budget_text(budget: int | str | None) -> str:
    """A budget as tables write it: "7 GB", "50%" or "all"."""
    if budget is None:
        return "all"
    return budget if isinstance(budget, str) else format_bytes(budget, digits=None)
