"""The layout over devices for which policies are then searched: the fastest that a few of them fit."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from sim.advice.question import Question
from sim.errors import TiersimError
from sim.layout_search import POLICIES, LayoutSearch, search_layouts

LAST = ("zero_offload + full_recompute",)
"""What may fit where the policies of a search over layouts do not."""
MOST = 64


@dataclass(frozen=True)
class Devices:
    """The layouts that were tried for so many devices."""

    number: int
    search: LayoutSearch

    def text(self) -> str:
        """What was chosen and what is next, in one line."""
        top, other, search = self.search.best, self.search.runner_up, self.search
        tried = len({row.layout for row in search.rows})
        rest = f"{search.left_out} more left out by an estimate, {search.cannot_fit} cannot hold their state"
        if top is None or top.makespan_ns is None:
            return f"layout of {self.number} devices: {search.rows[0].layout}; none of {tried} fitted ({rest})"
        text = f"layout of {self.number} devices: {top.layout}, the fastest of {tried} with {top.policy} ({rest})"
        if other is None or other.makespan_ns is None:
            return text
        slower = 100 * (other.makespan_ns / top.makespan_ns - 1)
        return f"{text}; next: {other.layout} with {other.policy}, {slower:.2g} % slower"


def with_layout(asked: Question, devices: int, seconds: float) -> tuple[Question, Devices]:
    """The question about the best layout that was found within some seconds, and the search.

    Raises TiersimError where no layout can hold the training state; LayoutError where none has so many devices.
    """
    from workloads.stacks import after_division

    stack = asked.workload.get("stack")
    kernels = after_division(stack, devices)
    plain = asked if kernels is None else replace(asked, workload={**asked.workload, "stack": "eager"})
    found, began = None, time.monotonic()
    for policies in (asked.policies or POLICIES, LAST):
        left = seconds - (time.monotonic() - began)
        found = search_layouts(
            plain.trace, asked.profile, devices, policies,
            budget=asked.budget, most=MOST, seconds=left, overrides=asked.figures or None, kernels=kernels,
        )  # fmt: skip
        if found.best is not None or asked.policies is not None:
            break
    assert found is not None
    if not found.rows:
        raise TiersimError(
            f"devices: no layout of {devices} holds its part of the training state; nearest: more of them"
        )
    layout = (found.best or found.rows[0]).layout
    return replace(asked, parallel=layout.said()), Devices(devices, found)
