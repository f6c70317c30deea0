"""Where a policy loses to a simpler one of its own granularity, and the rule of what is published that makes it so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts.recompute_page.results import Results
from scripts.recompute_page.tables import percent, size

STAGES = (
    "full_recompute", "every_k", "chen", "revolve", "mimose", "rotor", "rotor, 2000 slots", "tso, no graphs",
    "moccasin", "checkmate, LP rounding", "checkmate, MILP by stage",
)  # fmt: skip
"""Rows that recompute whole stages or layers here, the simplest first."""
OPS = (
    "selective_recompute", "vlad", "min_cut", "dtr", "megtaichi", "sac_knapsack", "twremat", "rockmate",
    "relax_and_fix",
)  # fmt: skip
"""Rows that choose single ops, the simplest first."""
POINTS = 0.05
"""Percentage points below which two are equal."""
RULES = {
    "every_k": "all layers alike, whatever the budget, k at a time: a group holds k layers when it is recomputed",
    "chen": "the segments of least estimated peak are taken, whatever the budget",
    "revolve": "stages are taken as equal, only their inputs are kept, and each but the last is recomputed, whatever "
    "memory is left",
    "mimose": "blocks are chosen by estimated bytes in buckets of like size, not by their time",
    "rotor": "a checkpoint stays until its backward, and every size is rounded up to a slot, a 500th of the room",
    "rotor, 2000 slots": "a checkpoint stays until its backward; sizes are rounded up to a 2000th of the room, and the "
    "best schedule for rounded sizes need not be the best that fits",
    "tso, no graphs": "a segment is recomputed once and whole; none is nested in another",
    "moccasin": "no node runs more than twice, on at most 60 nodes of several stages each, within a limit of work",
    "checkmate, LP rounding": "each value of each stage is rounded by itself. Near the smallest budget the relaxation "
    "keeps a part of nearly all of them, and reruns are parts, too: a threshold below those parts keeps more than "
    "fits, one above keeps next to nothing, so that each backward node recomputes from far back",
    "checkmate, MILP by stage": "nodes of several ops, at most 60 here, in order and at most once before each; what "
    "one reads and leaves is resident until it ends; and the search ends within seconds, where the authors allow it "
    "an hour",
    "vlad": "the middle op is kept, by number, wherever it stands",
    "min_cut": "no budget is known, and only ops that are cheap by kind are recomputed",
    "dtr": "nothing is known of what comes; it is decided when memory is short",
    "megtaichi": "the score counts the neighbours of the producer only",
    "sac_knapsack": "one graph a layer: what leaves a layer is always kept, and each op is recomputed at most once",
    "twremat": "the results of a whole separator are held while the parts that it leaves are computed, and first runs "
    "stay in program order",
    "rockmate": "each stage takes one of a few options made for it alone, at five limits of memory, and sizes are "
    "rounded up to slots: what is left of the budget between two options is not used",
    "relax_and_fix": "a fractional answer is rounded at three thresholds",
}
"""Per row the rule."""


def lost(result: Results, label: str, simpler: Sequence[str]) -> list[tuple[float, int, str]]:
    """Per budget at which a simpler row is faster, or fits alone: points (100 where it does not fit), budget, row."""
    found = []
    for budget in result.budgets:
        mine = result.overhead(label, budget)
        others = [(over, one) for one in simpler if (over := result.overhead(one, budget)) is not None]
        if others and (mine is None or 100 * (mine - min(others)[0]) > POINTS):
            found.append((100.0 if mine is None else 100 * (mine - min(others)[0]), budget, min(others)[1]))
    return found


def losses(found: Mapping[str, Results]) -> str:
    """A sentence for each row that loses somewhere."""
    lines = []
    for order in (STAGES, OPS):
        for i, label in enumerate(order):
            texts = []
            for result in found.values():
                worst = max(lost(result, label, order[:i]), default=None)
                if worst is not None:
                    _, budget, other = worst
                    mine = result.overhead(label, budget)
                    shown = "does not fit" if mine is None else f"+{percent(mine)} %"
                    there = percent(result.overhead(other, budget), sign=True)
                    texts.append(f"{shown} at {size(budget)}, {_marked(other)} {there} % ({result.short})")
            if texts:
                lines.append(f"* {_marked(label)}: {'; '.join(texts)}. Its rule: {RULES[label]}.\n")
    if not lines:
        return ""
    return (
        "## Where more elaborate policies lose\n\n"
        "Each policy that a simpler one of its own granularity beats at some budget, where that is worst, and "
        "the published rule that makes it so. Both are as published, without a step that they do not have.\n\n"
        + "".join(lines)
        + "\n"
    )


def _marked(label: str) -> str:
    name, _, rest = label.partition(",")
    return f"`{name}`{',' + rest if rest else ''}"
