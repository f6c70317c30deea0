"""What the figures say, in sentences. A sentence that the figures no longer bear out is left out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from scripts.recompute_page.cases import has_last_step
from scripts.recompute_page.results import Results
from scripts.recompute_page.tables import percent, seconds, size

OURS = "relax_and_fix"
OPS = (OURS, "twremat", "rockmate", "sac_knapsack")
"""Rows that choose single ops."""
STAGES = ("rotor", "rotor, 2000 slots", "chen", "revolve", "moccasin", "checkmate, MILP by stage", "every_k", "mimose")
"""Rows that run whole stages or layers again."""
NEAR = 1.0
"""Points within which a plan is called near to the bound."""

Found = Mapping[str, Results]


def sentences(found: Found) -> list[str]:
    """Those that hold, as items of a list."""
    every = (_finer, _near, _last_step, _exact, _blind, _online, _floor, _more)
    return [f"* {text}\n" for make in every if (text := make(found))]


def _best(result: Results, labels: Sequence[str], budget: int) -> float | None:
    return min((v for one in labels if (v := result.overhead(one, budget)) is not None), default=None)


def _each(found: Found, texts: Sequence[str]) -> str:
    """One text per job, joined, with the job's short name."""
    return ", ".join(f"{text} ({result.short})" for result, text in zip(found.values(), texts, strict=True))


def _finer(found: Found) -> str:
    """Whether choosing ops is better than choosing stages, everywhere."""
    texts = []
    for result in found.values():
        pairs = [(_best(result, OPS, b), _best(result, STAGES, b)) for b in result.budgets]
        gains = [100 * (b - a) for a, b in pairs if a is not None and b is not None]
        if not gains or statistics.median(gains) <= 0:
            return ""
        texts.append(f"{statistics.median(gains):.1f} points")
    return (
        "**Choose ops, not layers.** The best plan that picks single ops is faster than the best that recomputes whole "
        f"stages or layers by a median of {_each(found, texts)}. A layer holds both large results of cheap ops "
        "(norms, activation functions, masks, rotary products) and results of expensive ops (matrix products). Plans "
        "by ops recompute the former and keep the latter; plans by stages recompute both."
    )


def _near(found: Found) -> str:
    """How near to the bound the planner comes that the bound is taken from."""
    texts, times = [], []
    for result in found.values():
        rows = [(result.overhead(OURS, b), b) for b in result.budgets]
        gaps = [100 * (over - result.bound(b)) for over, b in rows if over is not None]
        if not gaps or statistics.median(gaps) > NEAR:
            return ""
        texts.append(f"{statistics.median(gaps):.2f} points, at most {max(gaps):.2f}")
        times += [row["plan_s"] for row in result.of(OURS)]
    return (
        "**One moment is nearly the whole problem.** What does not fit when the op of largest footprint runs, in the "
        f"backward of the loss here, has to be recomputed. `{OURS}` rounds the linear program of that moment, and of "
        f"others only where its plan still passes the budget: a median of {_each(found, texts)} above the proven "
        f"bound, planned in a median of {seconds(statistics.median(times))} s. It is this project's own, not a "
        "published system."
    )


def _last_step(found: Found) -> str:
    """What removing unnecessary recomputation does for the planners that are published without it."""
    gains = []
    for result in found.values():
        for label in result.labels:
            row = next(row for row in result.cells if row["label"] == label)
            if has_last_step(row["policy"]) is not False:
                continue
            for budget in result.budgets:
                published, other = result.overhead(label, budget), result.other(label, budget)
                if published is not None and other is not None:
                    gains.append((100 * (published - other), label, published, other, budget, result.short))
    if not gains:
        return ""
    gain, label, published, other, budget, model = max(gains)
    median = statistics.median(row[0] for row in gains)
    return (
        "**What a planner drops need not be dropped.** Keeping what fits after all, instead of dropping and "
        f"recomputing it, takes a median of {median:.1f} points off the planners that are "
        f"published without such a step, and {gain:.1f} off `{label}` at {size(budget)} ({percent(published)} to "
        f"{percent(other)} %, {model}). The page shows each planner both ways; it ranks them as published."
    )


def _exact(found: Found) -> str:
    """Whether exact programs over stages lose to rough ones over ops."""
    texts = []
    for result in found.values():
        pairs = [
            (_best(result, ("moccasin", "checkmate, MILP by stage"), b), _best(result, (OURS,), b))
            for b in result.budgets
        ]
        losses = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
        if not losses or statistics.median(losses) <= 0:
            return ""
        texts.append(f"{statistics.median(losses):.1f} points")
    return (
        "**An exact answer to a coarse question loses to a rough answer to a fine one.** On thousands of ops the exact "
        "programs can look at stages only; the better of the two is a median of "
        f"{_each(found, texts)} slower than `relax_and_fix`, which rounds over ops."
    )


def _blind(found: Found) -> str:
    """What checkpointing every layer costs at the largest budget."""
    costs = [result.overhead("full_recompute", result.budgets[-1]) for result in found.values()]
    bounds = [result.bound(result.budgets[-1]) for result in found.values()]
    if any(cost is None or cost < bound + 0.1 for cost, bound in zip(costs, bounds, strict=True)):
        return ""
    peaks = [row["peak_bytes"] for result in found.values() if (row := result.smallest("full_recompute"))]
    texts = [f"{percent(cost, sign=True)} %" for cost in costs]
    return (
        f"**Checkpointing every layer is for the tightest budgets.** It costs {_each(found, texts)} whatever "
        f"the budget, because it knows none, and is worth that only close to {' and '.join(map(size, peaks))}."
    )


def _online(found: Found) -> str:
    """DTR where memory is nearly enough, and where it is scarce."""
    texts = []
    for result in found.values():
        fits = [(b, over) for b in result.budgets if (over := result.overhead("dtr", b)) is not None]
        if len(fits) < 2 or fits[0][1] - result.bound(fits[0][0]) < 2 * (fits[-1][1] - result.bound(fits[-1][0])):
            return ""
        (low, tight), (high, roomy) = fits[0], fits[-1]
        texts.append(
            f"{percent(roomy, sign=True)} % at {size(high)}, where {percent(result.bound(high))} % is the "
            f"least possible, but {percent(tight, sign=True)} % at {size(low)}"
        )
    return (
        "**Deciding while running is cheap where little is missing.** DTR plans nothing and adds "
        f"{_each(found, texts)}: it recomputes several times what it drops early."
    )


def _floor(found: Found) -> str:
    """Who reaches the least memory."""
    texts = []
    for result in found.values():
        least = {label: row for label in result.labels if not result.free(label) and (row := result.smallest(label))}
        label = min(least, key=lambda one: (least[one]["peak_bytes"], least[one]["makespan_ns"]))
        row, floor = least[label], result.job["floor_bytes"]
        above = percent(row["peak_bytes"] / floor - 1)
        cost = percent(result.over(row), sign=True)
        texts.append(
            f"`{label.partition(',')[0]}` {size(row['peak_bytes'])}, {above} % above the floor, for {cost} % time"
        )
    return f"**Least memory.** {_each(found, texts)}; no plan gets below the floor, which is proven."


def _more(found: Found) -> str:
    """What changing the trace does beside recomputation."""
    texts = []
    for result in found.values():
        gains = []
        for budget in result.budgets:
            over = result.overhead("megtaichi, batch in parts", budget)
            if over is not None and over < result.bound(budget):
                gains.append((100 * (result.bound(budget) - over), budget))
        if not gains or not result.free("megtaichi, batch in parts"):
            continue
        gain, budget = max(gains)
        texts.append(f"{gain:.1f} points below the bound of recomputation at {size(budget)} ({result.short})")
    if not texts:
        return ""
    return (
        "**Dealing out the batch can beat any recomputation.** Half a batch needs half the activations and runs "
        f"nothing again: up to {', '.join(texts)}. It needs a batch that can be divided, and sums "
        "gradients in another order."
    )
