"""The page's text round the tables."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.recompute_page.cases import DEEP, PROFILE
from scripts.recompute_page.findings import sentences
from scripts.recompute_page.losses import losses
from scripts.recompute_page.results import Results, results
from scripts.recompute_page.tables import (
    deep,
    last_step,
    misfits,
    name,
    overheads,
    percent,
    seconds,
    size,
    table,
    winners,
)

HEADLINES = Path(__file__).resolve().parents[2] / "docs" / "recompute_headlines.toml"
NOTHING = "does not apply"


def page_text(figures: Mapping[str, Any]) -> str:
    """All of it."""
    found = results(figures)
    parts = [
        "# Recomputation: which policy, at what price\n\n",
        _finding(found),
        "![time added against peak memory](recompute.png)\n\n",
        FIGURE_NOTE,
    ]
    for result in found.values():
        parts += [f"## {result.job['title']}\n\n", _job(result), winners(result), overheads(result)]
    parts += [
        COLUMNS,
        _last_step(found),
        losses(found),
        _headlines(found),
        _deep(figures["deep"]),
        _misfits(found),
        INCLUDED,
    ]
    return "".join(parts).rstrip() + "\n"


# ---- what was found ------------------------------------------------------------------------------


def _finding(found: Mapping[str, Results]) -> str:
    lines = []
    for result in found.values():
        wins: dict[str, int] = {}
        for budget in result.budgets:
            label = result.winner(budget)[0]
            wins[label] = wins.get(label, 0) + 1
        first = ", ".join(f"{name(result, label)} ({n})" for label, n in sorted(wins.items(), key=lambda w: (-w[1], w)))
        gaps = [result.winner(b)[1] - result.bound(b) for b in result.budgets]
        lines.append(
            f"* **{result.job['title']}.** Fastest, and at how many of {len(result.budgets)} budgets: {first}. The "
            f"best plan lies {100 * min(gaps):.1f} to {100 * max(gaps):.1f} points of the iteration's time above the "
            "proven bound.\n"
        )
    return "".join(lines) + "\n" + "".join(sentences(found)) + "\n"


FIGURE_NOTE = """\
Each point is one run; a line joins those of a policy that no other run of it beats in both. The grey area is proven
empty (see [the bound](#the-bound)).

"""


def _job(result: Results) -> str:
    job = result.job
    shown = ", ".join(f"{key} {value}" for key, value in job["options"].items())
    over = " (more than the card has)" if job["peak_bytes"] > job["capacity_bytes"] else ""
    return (
        f"`{job['model']}`, {shown}, on `{PROFILE}`: {job['ops']:,} ops, a chain of {job['stages']} stages. Keeping "
        f"everything takes {size(job['peak_bytes'])}{over} and {job['makespan_ns'] / 1e6:,.0f} ms; weights, optimizer "
        f"state and inputs are {size(job['static_bytes'])} of it.\n\n"
    )


COLUMNS = """\
Time added in percent of the iteration without a limit, at each budget (GB, and as a part of the peak without a
limit). Of a policy with several sets of parameters the fastest that fits counts. Bold: the fastest. ✗: does not fit.
*smallest*: the least peak found. *above the bound*: median over the budgets that fit, in points. *planner, s*: median
wall time of planning, on a machine with other work on it; [how fast it is](performance.md) has times that are measured
together. *solver*: what the solver said of its plan, and how often; only `optimal` is proven, and
`feasible` without a limit is an answer over stages or by rounding. A gap is the solver's own. †: does more than drop
and recompute (it deals out the batch in parts, captures graphs, or offloads weights), so that no bound holds for it,
and it is not counted as the fastest. \\*: a reconstruction, since details of the system were not public.

### The bound

A linear program for moments of the schedule. A moment is the time when one op runs in its place: first the op of
largest footprint, then those at which a plan made from the program still passes the budget, three at most. What a
later op reads is resident at the moment, or its producer is recomputed later; what that producer reads is resident or
recomputed, too; what is resident fits the budget; and what is resident at one moment was so at the one before, or was
produced or recomputed in between. Every plan that only drops and recomputes on one device keeps these conditions,
however often it recomputes, online or not, so the least time of recomputation under them is a lower bound for all of
them (`sim/solvers/moments.py`). It is near where each op has to be recomputed once at most.
Close to the least memory it is low, because parts of a tensor may be kept in it, and because it does not count what
has to be resident while something is recomputed. It assumes that weight gradients stay once they are made, and that
nothing is offloaded; an input may be dropped after its last read. The exact solvers look at whole stages here, so
their own bounds hold for stage plans only, and are not used. The least bytes of any plan count at each op what it
reads and makes, and what can't be recomputed any more.

"""

LAST_STEP = """\
## With and without removing unnecessary recomputation

Time added in percent, without → with the last step that keeps resident what need not be dropped (parameter
`remove_unnecessary`). Bold: as published, which is what all other tables show. `twremat` follows an implementation
that ends with such a step, and it is part of `relax_and_fix`, which is this project's own; in none of the other
planners' papers it was found.

"""

INCLUDED = """\
## What these figures include and leave out

* Included: whole iterations, forward, backward and update, op by op; all storages; each recomputed op at its own time
  by the profile's cost model.
* Left out: fusion, overlap of kernels, the CPU time of frameworks and planners while the iteration runs (DTR's
  searches and Mimose's planning cost nothing), fragmentation. Random ops are recomputed with the same seed.
* One card, one batch size and one sequence length. Plans are for the steady state; planning is paid once, except
  online.
* Times of two policies that differ by less than the cost model's own error are not told apart in absolute terms; but
  all plans here run the same ops on the same card, so that errors of the model largely cancel in the comparison.

To reproduce the page: `python scripts/make_recompute.py --measure`.
"""


def _last_step(found: Mapping[str, Results]) -> str:
    parts = [LAST_STEP]
    for result in found.values():
        if shown := last_step(result):
            parts.append(f"{result.job['title']}:\n\n{shown}")
    return "".join(parts) if len(parts) > 1 else ""


# ---- headlines -----------------------------------------------------------------------------------


def headlines() -> list[dict[str, str]]:
    """What the systems are known for."""
    found: list[dict[str, str]] = tomllib.loads(HEADLINES.read_text(encoding="utf-8"))["headline"]
    return found


def _headlines(found: Mapping[str, Results]) -> str:
    rows = []
    for item in headlines():
        shown = "<br>".join(
            f"{result.short}: {text}" for result in found.values() if (text := SHOWS[item["shows"]](result, item))
        )
        rows.append([item["system"], item["headline"], item["standing"], shown or NOTHING, item["why"]])
    note = (
        "## Published headlines beside what is shown here\n\n"
        "*standing*: where the claim was read (`abstract`, `code`, `second-hand`); `none`: no figure could be "
        "verified. Activations are the most bytes of that role at once, recomputed ones included.\n\n"
    )
    return note + table(("system", "known for", "standing", "here", "why they differ"), rows)


def _label(result: Results, policy: str) -> list[str]:
    """The rows of a policy, the one of its plain name first."""
    found = [label for label in result.labels if label.partition(",")[0] == policy]
    return sorted(found, key=lambda label: label != policy)


def _shrink(result: Results, item: Mapping[str, str]) -> str:
    """The cost of activations two, three and five times smaller, and the smallest."""
    labels = [label for label in _label(result, item["policy"]) if result.of(label)]
    if not labels:
        return ""
    parts = []
    for times in (2, 3, 5):
        costs = [cost for label in labels if (cost := result.shrunk(label, times)) is not None]
        if costs:
            parts.append(f"÷{times} for {percent(min(costs), sign=True)} %")
    rows = [row for label in labels if (row := result.smallest_activations(label))]
    least = min(rows, key=lambda row: (row["activation_bytes"], row["makespan_ns"]))
    factor = result.job["activation_bytes"] / least["activation_bytes"]
    parts.append(f"at most ÷{factor:.1f} ({percent(result.over(least), sign=True)} %)")
    return "activations " + ", ".join(parts)


def _against(result: Results, item: Mapping[str, str]) -> str:
    """Time against another policy where both fit, and the smallest budgets of both."""
    labels = _label(result, item["policy"])
    if not labels or not result.of(labels[0]) or not result.of(item["against"]):
        return ""
    label, other = labels[0], item["against"]
    differences = [
        a - b
        for budget in result.budgets
        if (a := result.overhead(label, budget)) is not None and (b := result.overhead(other, budget)) is not None
    ]
    mine, theirs = result.smallest(label), result.smallest(other)
    if mine is None or theirs is None:
        return ""
    text = f"smallest {size(mine['peak_bytes'])}, `{other}` {size(theirs['peak_bytes'])}"
    if not differences:
        return text
    median = 100 * statistics.median(differences)
    best, worst = 100 * min(differences), 100 * max(differences)
    return f"{median:+.1f} points of time against `{other}` ({best:+.1f} to {worst:+.1f}); {text}"


def _attention(result: Results, item: Mapping[str, str]) -> str:
    """The attention core alone, beside all of each layer."""
    core = [row for row in result.of(item["policy"]) if row["parameters"].get("recompute") == "attention_core"]
    full = result.of(item["against"])
    if not core or not full:
        return ""
    saved = 1 - result.over(core[0]) / result.over(full[0])
    factor = result.job["activation_bytes"] / core[0]["activation_bytes"]
    return (
        f"attention cores alone: activations ÷{factor:.1f} for {percent(result.over(core[0]), sign=True)} %, where "
        f"`{item['against']}` takes {percent(result.over(full[0]), sign=True)} %: {saved:.0%} saved"
    )


def _planner(result: Results, item: Mapping[str, str]) -> str:
    """Median time of planning, beside another's, and how much better the plans are."""
    mine, other = result.of(item["policy"]), result.of(item["against"])
    if not mine or not other:
        return ""
    a, b = (statistics.median(row["plan_s"] for row in rows) for rows in (mine, other))
    return f"{seconds(a)} s a plan, {item['against']} {seconds(b)} s; {_against(result, item)}"


SHOWS = {"shrink": _shrink, "against": _against, "attention": _attention, "planner": _planner}


# ---- the rest ------------------------------------------------------------------------------------


def _deep(rows: Sequence[Mapping[str, Any]]) -> str:
    slowest = max(rows, key=lambda row: row["total_s"])
    batch = f"{DEEP.options['batch']} × {DEEP.options['sequence']}"
    return (
        f"## Planning on {rows[0]['ops']:,} ops\n\n"
        f"{DEEP.title}, batch {batch}, at {size(rows[0]['budget_bytes'])}: planning and replaying with every policy "
        "that is not declared slow, once each, one process, on a machine with other work on it. The slowest is "
        f"`{slowest['label']}`.\n\n"
    ) + deep(rows)


def _misfits(found: Mapping[str, Results]) -> str:
    parts = ["## What did not run\n\n"]
    for result in found.values():
        lines = misfits(result)
        if lines:
            parts.append(f"{result.job['title']}:\n\n" + "\n".join(lines) + "\n\n")
    return "".join(parts) if len(parts) > 1 else ""
