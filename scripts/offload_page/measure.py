"""Runs the cells, one after the other; each row is what one run came to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from scripts.offload_page import published
from scripts.offload_page.bound import bound
from scripts.offload_page.cases import (
    ADAM,
    BASELINES,
    LAYERS,
    OWN,
    RESNET,
    ROOMY,
    STATE_JOBS,
    STATES,
    TRANSFORMERS,
    WIDE,
    Job,
    factors,
    platforms,
    policies,
    quick,
)
from scripts.offload_page.pinned import pinned_on_demand
from sim.analysis.overlap import overlap
from sim.analysis.stalls import stalls
from sim.engine.replay import replay
from sim.errors import Deadlock, TiersimError
from sim.experiment import Result, simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.log import WHY, EventLog
from sim.policies import policy_class
from sim.trace.graph import Trace

Row = dict[str, Any]
SHARES = (0.9, 0.6)
"""Budgets of the machines' table, as fractions of what keeping everything needs."""

PARTS = ("own", "transformers", "ablation", "platforms", "published")
FEW = 2
ADAM_FACTOR = "CPU Adam, 1e9 parameters/s"
SPLIT = ("modnn",)
"""Policies that deal out the batch: they are fast where no link is needed for it, which says nothing of the link."""


def measure(
    only: Collection[str],
    old: Mapping[str, list[Row]],
    save: Callable[[Mapping[str, list[Row]]], None],
    say: Callable[[str], None],
) -> None:
    """All rows, or those of some policies, with what `old` has of the others; saved after each policy."""
    chosen = [name for name in policies() if not only or name in only]
    known, extra = {*policies(), *BASELINES}, [] if only else list(BASELINES)
    rows: dict[str, list[Row]] = {part: [] for part in PARTS}
    if only:
        for part in rows:
            rows[part] = [row for row in old.get(part, ()) if row["policy"] in known and row["policy"] not in chosen]
    for name in [*chosen, *extra]:
        if name not in BASELINES:
            rows["own"] += own(name)
        rows["transformers"] += on_transformers(name)
        rows["published"] += published.rows(name)
        if quick(name):
            rows["ablation"] += ablation(name)
        say(name)
        save(rows)
    best = [*contenders(rows["transformers"]), *BASELINES]
    rows["platforms"] = [row for row in rows["platforms"] if row["policy"] in best]
    for name in best:
        if name not in {row["policy"] for row in rows["platforms"]}:
            rows["platforms"] += on_platforms(name)
            say(f"{name}: machines")
            save(rows)


def missing(
    old: Mapping[str, list[Row]], save: Callable[[Mapping[str, list[Row]]], None], say: Callable[[str], None]
) -> None:
    """The rows that the data lack: of a new policy, machine or value of a factor. Saved after each policy."""
    rows = {part: list(old.get(part, ())) for part in PARTS}
    for name in [*policies(), *BASELINES]:
        here = {part: [row for row in each if row["policy"] == name] for part, each in rows.items()}
        if name not in BASELINES and not any("pinned_ns" in row or row["time_ns"] is None for row in here["own"]):
            place = next((i for i, row in enumerate(rows["own"]) if row["policy"] == name), len(rows["own"]))
            rows["own"][place : place + 1] = own(name)
        if not here["published"]:
            rows["published"] += published.rows(name)
            save(rows)
        if not here["transformers"]:
            rows["transformers"] += on_transformers(name)
            save(rows)
        if not quick(name):
            continue
        rows["ablation"] += ablation(name, {(row["factor"], row["value"]) for row in here["ablation"]})
        if name in (*contenders(rows["transformers"]), *BASELINES):
            rows["platforms"] += on_platforms(name, {row["profile"] for row in here["platforms"]})
        order = list(dict.fromkeys(row["policy"] for row in rows["ablation"]))
        rows["ablation"].sort(key=lambda row: (order.index(row["policy"]), *_place(row)))
        say(name)
        save(rows)


def _place(row: Row) -> tuple[int, int]:
    """The order of factors, and of their values, on the page."""
    values = {**factors(), ADAM_FACTOR: ADAM}
    return list(values).index(row["factor"]), list(values[row["factor"]]).index(row["value"])


def contenders(rows: Sequence[Row]) -> list[str]:
    """The policies that go on to all machines: `swap_all`, and the fastest for activations on GPT-2."""
    names = {"swap_all"}
    for budget in {row["budget_bytes"] for row in rows if row["job"] == "gpt2"}:
        fits = [row for row in rows if row["budget_bytes"] == budget and row["time_ns"] is not None]
        fits = [row for row in fits if policy_class(row["policy"]).manages == ("activations",) and quick(row["policy"])]
        fits = [row for row in fits if row["policy"] not in (*BASELINES, *SPLIT) and row["job"] == "gpt2"]
        names |= {row["policy"] for row in sorted(fits, key=lambda row: (row["time_ns"], row["policy"]))[:FEW]}
    return sorted(names)


# ---- the parts -----------------------------------------------------------------------------------


def own(name: str) -> list[Row]:
    """A policy, and `swap_all`, on the policy's own workload."""
    job = OWN.get(name, RESNET)
    rows = [{**cell(job, name, job.budgets[0], pinning=True), "title": job.title}]
    beside = cell(job, "swap_all", job.budgets[0])
    rows[0]["swap_all_ns"] = beside["time_ns"]
    return rows


def on_transformers(name: str) -> list[Row]:
    """A policy on the transformers that it may be able to run."""
    states = "optimizer_state" in policy_class(name).manages
    return [row for key in TRANSFORMERS if states or key not in STATE_JOBS for row in on_transformer(key, name)]


def on_transformer(key: str, name: str) -> list[Row]:
    """A policy at each budget of a transformer."""
    job = TRANSFORMERS[key]
    return [{**cell(job, name, budget), "job": key} for budget in job.budgets]


def ablation(name: str, done: Collection[tuple[str, str]] = ()) -> list[Row]:
    """A policy under each value of each factor; the rate of CPU Adam for those that update there.

    done: factors and values to leave out.
    """
    rows, manages = [], policy_class(name).manages
    known: dict[str, Row] = {}  # values that are the machine's own are run once
    for factor, values in factors().items():
        if "activations" not in manages and factor not in WIDE:
            continue
        for value, overrides in values.items():
            if (factor, value) in done:
                continue
            machine = load_profile(LAYERS.profile, overrides=overrides).content_hash
            if machine not in known:
                known[machine] = cell(LAYERS, name, LAYERS.budgets[0], overrides)
            rows.append({**known[machine], "factor": factor, "value": value})
    if "optimizer_state" in manages:
        for value, share in ADAM.items():
            if (ADAM_FACTOR, value) in done:
                continue
            overrides = {"engines.cpu.bandwidth_share.optimizer": str(share)}
            row = cell(STATES, name, STATES.budgets[0], overrides)
            rows.append({**row, "factor": ADAM_FACTOR, "value": value})
    return rows


def on_platforms(name: str, done: Collection[str] = ()) -> list[Row]:
    """A policy on every shipped machine of one device but those of `done`, at shares of the job's own memory."""
    return [
        {**cell(job, name, share), "profile": job.profile, "share": share}
        for job in map(_small, [name for name in platforms() if name not in done])
        for share in SHARES
    ]


def _small(profile: str) -> Job:
    options = {"batch": 8, "sequence": 512, "precision": "amp_bf16", "optimizer": "adamw_fused", "attention": "flash"}
    return Job("GPT-2 small, 8 x 512, amp_bf16", profile, SHARES, "gpt2-small", options)


# ---- one cell ------------------------------------------------------------------------------------


def cell(
    job: Job, name: str, budget: float, overrides: Mapping[str, str] | None = None, *, pinning: bool = False
) -> Row:
    """One run; what does not fit is an answer. Times in ns, sizes in bytes.

    pinning: whether it is also repeated with host memory pinned for each copy.
    """
    trace, platform = _trace(job), load_profile(job.profile, overrides=overrides)
    whole_ns, peak = _whole(job)
    space = int(budget if budget > 1 else budget * peak)
    least = bound(trace, platform, space)
    row: Row = {
        "policy": name,
        "budget_bytes": space,
        "whole_bytes": peak,
        "whole_ns": whole_ns,
        "bound_ns": least.ns,
        "must_out": least.out,
        "must_back": least.back,
        "time_ns": None,
    }
    try:
        result = simulate(trace, platform, name, budget=space)
    except (TiersimError, Deadlock) as error:
        return {**row, "refused": getattr(error, "refusal", "") or type(error).__name__}
    row |= _facts(result.log, platform, space, result.summary())
    return {**row, "pinned_ns": _pinned(result)} if pinning else row


def _pinned(result: Result) -> int | None:
    """Time with host memory pinned for each copy; None where that does not run, or no rate is stated."""
    host = result.log.platform.host
    if host is None or not host.pinning:
        return None
    try:
        return replay(pinned_on_demand(result.plan, result.log.platform), result.log.platform).end
    except (TiersimError, Deadlock):
        return None


def _facts(log: EventLog, platform: Platform, budget: int, summary: Mapping[str, Any]) -> Row:
    home = platform.home(0).name
    lanes = {lane: i for i, lane in enumerate(platform.lanes)}
    moved = log.interval("why") == WHY["move"]
    lane, size, tensor = log.interval("lane")[moved], log.interval("bytes")[moved], log.interval("tensor")[moved]
    out, back = (
        int(size[[one in ids for one in lane.tolist()]].sum())
        for ids in (
            {lanes[link.name] for link in platform.links if link.source == home},
            {lanes[link.name] for link in platform.links if link.target == home},
        )
    )
    whole = log.trace.tensor_columns.bytes[tensor]
    ratio = float((size[whole > 0] / whole[whole > 0]).min(initial=1.0))
    own_bound = bound(log.trace, log.platform, budget, ratio=ratio).ns if log.trace.devices == 1 else 0
    causes = stalls(log).by_cause
    hidden = overlap(log).fraction
    return {
        "time_ns": log.end,
        "peak_bytes": summary["peak_bytes"],
        "out": out,
        "back": back,
        "own_ns": own_bound,
        "stalls": {cause: ns for cause, ns in sorted(causes.items()) if ns},
        "codec_ns": summary["codec_ns"],
        "compute_ns": summary["compute_ns"],
        "recompute_ns": summary["recompute_ns"],
        "hidden": None if hidden is None else round(hidden, 4),
    }


def _key(job: Job) -> str:
    return repr((job.model, sorted(job.options.items(), key=str), job.image))


@cache
def _traces() -> dict[str, Trace]:
    return {}


def _trace(job: Job) -> Trace:
    if _key(job) not in _traces():
        _traces()[_key(job)] = job.trace()
    return _traces()[_key(job)]


@cache
def _known() -> dict[tuple[str, str], tuple[int, int]]:
    return {}


def _whole(job: Job) -> tuple[int, int]:
    """Time and peak of keeping everything in unlimited memory."""
    key = job.profile, _key(job)
    if key not in _known():
        whole = simulate(_trace(job), load_profile(job.profile), "keep_all", budget=ROOMY)
        _known()[key] = whole.log.end, whole.summary()["peak_bytes"]
    return _known()[key]
