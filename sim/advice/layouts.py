"""The layouts over devices in which policies are then searched: the fastest that a few fit, and what may be faster."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from sim.advice.question import Question
from sim.errors import TiersimError
from sim.layout import Layout
from sim.layout_search import POLICIES as USUAL
from sim.layout_search import Found, LayoutSearch, nearest_number, search_layouts
from sim.units import format_percent

POLICIES = (*USUAL, "swap_all", "zero_offload + full_recompute", "tso")
"""What is run in each layout: policies that plan at once, one of each kind; the last one launches from a recording."""
OTHERS = 6
"""How many layouts beside the best are left to the search of policies, at most."""
PART = 0.1
"""The part of the time of the search over layouts that each of these may have taken there."""
MOST = 64


@dataclass(frozen=True)
class Devices:
    """The layouts that were tried for so many devices.

    others: in how many of them beside the best one policies were searched, too.
    is_stopped: whether Ctrl-C ended the search over layouts.
    """

    number: int
    search: LayoutSearch
    others: int = 0
    is_stopped: bool = False

    def text(self) -> str:
        """What was chosen and what is next, in one line."""
        top, other, search = self.search.best, self.search.runner_up, self.search
        tried = len({*search.unlimited, *(row.layout for row in search.rows)})
        rest = f"{search.left_out} more left out by an estimate, {search.cannot_fit} cannot hold their state"
        if self.is_stopped:
            rest = "the search was stopped"
        if top is None or top.makespan_ns is None:
            return f"layout of {self.number} devices: {search.rows[0].layout}; none of {tried} fitted ({rest})"
        text = f"layout of {self.number} devices: {top.layout}, the fastest of {tried} with {top.policy} ({rest})"
        if other is not None and other.makespan_ns is not None:
            slower = format_percent(other.makespan_ns / top.makespan_ns - 1)
            text += f"; next: {other.layout} with {other.policy}, {slower} slower{search.told}"
        return text + (f"; policies were searched in {self.others + 1} layouts" if self.others else "")


def with_layout(asked: Question, devices: int, seconds: float) -> tuple[Question, Devices]:
    """The question about the best layouts that were found within some seconds, and the search.

    Of policies that are named those that plan at once are run there, if there are any: so more layouts are tried.

    Beside the layout that a few policies fit as the fastest, those others are left to the search of policies in which
    everything kept in unlimited memory takes less time than that: `OTHERS` of them, fewer where each takes long, none
    where options of the training are left to it.

    Raises TiersimError where no layout can hold the training state; LayoutError where none has so many devices;
    KeyboardInterrupt on Ctrl-C where none has fitted yet.
    """
    from workloads.stacks import after_division

    stack = asked.workload.get("stack")
    kernels = after_division(stack, devices)
    plain = asked if kernels is None else replace(asked, workload={**asked.workload, "stack": "eager"})
    began = time.monotonic()
    named = asked.policies or POLICIES
    policies = [name for name in POLICIES if name in named] or named
    so_far, is_stopped = list[Found](), False
    try:
        found = search_layouts(
            plain.trace, asked.profile, devices, policies, budget=asked.budget, most=MOST, seconds=seconds,
            overrides=asked.figures or None, kernels=kernels, fastest=True, on_row=so_far.append,
        )  # fmt: skip
    except KeyboardInterrupt:
        found, is_stopped = LayoutSearch(tuple(so_far), 0, 0), True
        if found.best is None:
            raise
    if not found.rows:
        more = nearest_number(plain.trace, asked.profile, devices, budget=asked.budget, overrides=asked.figures or None)
        nearest = "another batch or machine" if more is None else more
        what = "weights and optimizer state in all memories of its machines"
        raise TiersimError(f"devices: no layout of {devices} holds {what}; nearest: {nearest}")
    each_s = (time.monotonic() - began) / max(1, len(found.unlimited))
    most = 0 if asked.open or is_stopped else min(OTHERS, int(seconds * PART / max(1e-9, each_s)))
    first, *others = _worth(found, most)
    new = replace(asked, parallel=first.said(), layouts=tuple(layout.said() for layout in others))
    for each, layout in zip(new.variants, (first, *others), strict=False):
        if layout in found.unlimited:
            vars(each)["kept"] = found.unlimited[layout]
    return new, Devices(devices, found, len(others), is_stopped)


def _worth(found: LayoutSearch, most: int) -> list[Layout]:
    """The fastest layout, and others that may be faster with other policies: one by what it has reached, one by what it
    may reach, and so on."""
    top = found.best or found.rows[0]
    times: dict[Layout, int] = {}
    for row in found.fitting:
        times.setdefault(row.layout, row.makespan_ns or 0)
    least = {layout: ns for layout, (ns, _) in found.unlimited.items()
             if layout != top.layout and (top.makespan_ns is None or ns < top.makespan_ns)}  # fmt: skip
    by_least = sorted(least, key=lambda layout: least[layout])
    reached = [layout for layout in sorted(times, key=lambda layout: times[layout]) if layout in least]
    turns = chain.from_iterable(zip_longest(reached, by_least))
    return [top.layout, *dict.fromkeys(layout for layout in turns if layout is not None)][: 1 + most]
