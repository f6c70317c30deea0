"""The page: sentences and tables that follow from the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.offload_page.cases import (
    BASELINES,
    LAYERS,
    OWN,
    RESNET,
    STATES,
    TRANSFORMERS,
    factors,
    own_values,
    policies,
)
from scripts.offload_page.measure import SHARES
from scripts.offload_page.published import LARGEST, TFLOPS, tflops
from scripts.offload_page.rules import rule_of
from sim.hardware.profile import load_profile
from sim.policies import policy_class

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
EQUAL = 0.0005
"""Share of the time by which two runs may differ and count as equally fast."""
UNPINNED = ("save_on_cpu", "uvm", "flashneuron")
"""Policies that go by ordinary or managed host memory, or past the host."""
PLACES = {"transfer": "for copies", "wait": "for copies", "space": "for space", "engine": "for the CPU"}


def blocks(rows: Rows) -> dict[str, str]:
    """What stands between the marks of the page, by their names."""
    found = {"said": said(rows), "own": own_table(rows["own"])}
    for key, job in TRANSFORMERS.items():
        known = bool(cells(rows["transformers"], job=key))
        found[key] = f"### {job.title}\n\nNo policy that could run it has been measured."
        if known:
            found[key] = (
                f"{transformer_head(key, rows['transformers'])}\n\n{transformer_table(key, rows['transformers'])}"
            )
    named = dict.fromkeys(row["factor"] for row in rows["ablation"])
    return found | {
        "why": why_table(rows),
        "job of the ablation": ablation_head(),
        "degrading": degrading(rows["ablation"]),
        "factors": "\n\n".join(factor_table(factor, rows["ablation"]) for factor in named),
        "machines": f"{platforms_said(rows['platforms'])}\n\n{platforms_table(rows['platforms'])}",
        "pinning": pinning_table(rows["own"]),
        "published": "\n".join(published_said(row) for row in rows["published"]),
        "not measured": not_measured(unmeasured(rows)),
    }


# ---- figures of rows -----------------------------------------------------------------------------


def added(row: Row) -> float | None:
    """Time over keeping everything in unlimited memory, less 1; None where the run did not fit."""
    return None if row["time_ns"] is None else row["time_ns"] / row["whole_ns"] - 1


def least(row: Row) -> float:
    """The same of the bound."""
    return row["bound_ns"] / row["whole_ns"] - 1


def percent(share: float | None) -> str:
    """With a sign, in percent; a cross for what does not fit."""
    return "✗" if share is None else f"{100 * share + 0.0:+.1f}" if abs(share) < 0.995 else f"{100 * share:+.0f}"


def gb(bytes: float) -> str:
    """In GB, three digits."""
    return f"{bytes / 1e9:.3g} GB"


def waits(row: Row) -> str:
    """Where the time goes beyond the ops: the largest wait, codecs, recomputation."""
    parts = {f"waits {PLACES.get(cause, cause)}": ns for cause, ns in row["stalls"].items()}
    merged: dict[str, int] = {}
    for what, ns in (
        *((f"waits {PLACES.get(c, c)}", n) for c, n in row["stalls"].items()),
        ("codecs", row["codec_ns"]),
    ):
        merged[what] = merged.get(what, 0) + ns
    parts = {what: ns for what, ns in merged.items() if ns > EQUAL * row["whole_ns"]}
    most = max(parts, key=parts.__getitem__, default="")
    return f"{most} {100 * parts[most] / row['whole_ns']:.0f} %" if most else "–"


def unmeasured(rows: Rows) -> list[str]:
    """Policies of the registry that have no row on their own workload."""
    have = {row["policy"] for row in rows["own"]}
    return [name for name in policies() if name not in have]


def not_measured(names: Sequence[str]) -> str:
    """The sentence on policies without rows."""
    if not names:
        return "Every policy of the registry has cells."
    return f"Policies of the registry without cells yet: {', '.join(f'`{name}`' for name in names)}."


def cells(rows: Iterable[Row], **keys: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in keys.items())]


def fastest(rows: Sequence[Row]) -> Row | None:
    """Of the rows of policies that fit, without baselines."""
    found = [row for row in rows if row["time_ns"] is not None and row["policy"] not in BASELINES]
    return min(found, key=lambda row: (row["time_ns"], row["policy"]), default=None)


def slower_than_swap_all(rows: Rows) -> dict[str, float]:
    """Policies that are somewhere slower than `swap_all`, on its own trace and budget, and by how much at most."""
    found: dict[str, float] = {}
    for row in rows["own"]:
        _note(found, row, row.get("swap_all_ns"))
    for part, keys in (
        ("transformers", ("job", "budget_bytes")),
        ("ablation", ("factor", "value")),
        ("platforms", ("profile", "share")),
    ):
        beside = {tuple(row[key] for key in keys): row["time_ns"] for row in rows[part] if row["policy"] == "swap_all"}
        for row in rows[part]:
            _note(found, row, beside.get(tuple(row[key] for key in keys)))
    return found


def _note(found: dict[str, float], row: Row, other: int | None) -> None:
    if row["time_ns"] is None or other is None or row["policy"] in BASELINES:
        return
    ratio = row["time_ns"] / other - 1
    if ratio > EQUAL:
        found[row["policy"]] = max(found.get(row["policy"], 0.0), ratio)


# ---- sentences -----------------------------------------------------------------------------------


def said(rows: Rows) -> str:
    """What the rows come to."""
    lines = []
    for key, job in TRANSFORMERS.items():
        parts = []
        for budget in sorted({row["budget_bytes"] for row in rows["transformers"] if row["job"] == key}, reverse=True):
            here = cells(rows["transformers"], job=key, budget_bytes=budget)
            best = fastest(here)
            if best is None:
                parts.append(f"nothing fits {gb(budget)}")
                continue
            parts.append(f"at {gb(budget)} `{best['policy']}` {percent(added(best))} %{_over(best)}")
        if parts:
            lines.append(f"* **{job.title}**, on `{job.profile}`. Fastest: {'; '.join(parts)}.")
    moves = [row for row in rows["transformers"] if row["time_ns"] and row["job"] == "gpt2" and row["must_back"]]
    excess = sorted(
        (row["back"] / row["must_back"], row["policy"], gb(row["budget_bytes"]))
        for row in moves
        if row["back"] and policy_class(row["policy"]).manages == ("activations",)
    )
    low, high = excess[0], excess[-1]
    lines.append(
        f"* **Few move only what has to move.** Of the activations that must return on GPT-2 medium, `{low[1]}` moves"
        f" {low[0]:.2f} times as much at {low[2]}, `{high[1]}` {high[0]:.1f} times at {high[2]}."
    )
    slower, others = slower_than_swap_all(rows), len({row["policy"] for row in rows["own"]}) - 1
    lines.append(
        f"* **Slower than `swap_all` in some cell:** {len(slower)} of {others} policies, each by a published rule"
        " ([why](#why-each-loses-where-it-loses))."
    )
    return "\n".join(lines)


def _over(row: Row) -> str:
    """How far a run is above the bound of its own ops."""
    above = (row["time_ns"] - row["own_ns"]) / row["whole_ns"]
    return f", {100 * above:.1f} points above the bound" if above > EQUAL else ", the least possible"


def ablation_head() -> str:
    """What is run there."""
    return (
        f"{LAYERS.title}, with {100 * LAYERS.budgets[0]:.0f} % of the memory that keeping everything takes, on"
        f" `{LAYERS.profile}`, one figure at a time. For CPU Adam the job is {STATES.title}, on `{STATES.profile}` with"
        f" {gb(STATES.budgets[0])}."
    )


def degrading(rows: Sequence[Row]) -> str:
    """Which policy degrades how much between the best and the worst value of each factor."""
    lines = []
    for factor in dict.fromkeys(row["factor"] for row in rows):
        spread: dict[str, tuple[float, float]] = {}
        for name in dict.fromkeys(row["policy"] for row in rows):
            took = [added(row) for row in cells(rows, factor=factor, policy=name)]
            known = [one for one in took if one is not None]
            if known and name not in BASELINES:
                spread[name] = min(known), max(known)
        if not spread:
            continue
        width = {name: high - low for name, (low, high) in spread.items()}
        worst = max(width, key=lambda name: (width[name], name))
        flat = sum(one <= 0.005 for one in width.values())
        if flat == len(width):
            lines.append(f"* **{factor}.** None of {flat} changes by more than half a point.")
            continue
        lines.append(
            f"* **{factor}.** `{worst}` changes most, from {percent(spread[worst][0])} to"
            f" {percent(spread[worst][1])} %; {flat} of {len(width)} by half a point at most."
        )
    return "\n".join(lines)


def pays(rows: Sequence[Row], profile: str, share: float) -> tuple[Row | None, Row | None]:
    """The fastest policy of the family on a machine at a budget, and full recomputation."""
    here = cells(rows, profile=profile, share=share)
    other = [row for row in here if row["policy"] == "full_recompute" and row["time_ns"] is not None]
    return fastest(here), other[0] if other else None


def platforms_said(rows: Sequence[Row]) -> str:
    """Where offloading is faster than recomputing every layer."""
    lines = []
    for share in SHARES:
        better, free = [], []
        names = list(dict.fromkeys(row["profile"] for row in rows))
        for profile in names:
            best, other = pays(rows, profile, share)
            if best is not None and (other is None or best["time_ns"] < other["time_ns"]):
                better.append(profile)
            if best is not None and (added(best) or 0) <= 0.005:
                free.append(profile)
        lost = [name for name in names if name not in better]
        lines.append(
            f"* With {100 * share:.0f} % of the memory offloading is faster than full recomputation on {len(better)} of"
            f" {len(names)} machines, and free on {len(free)}"
            + (f"; not on {', '.join(f'`{name}`' for name in lost)}." if lost else ".")
        )
    return "\n".join(lines)


# ---- tables --------------------------------------------------------------------------------------


def table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are text."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def own_table(rows: Sequence[Row]) -> str:
    """Each policy on its own workload."""
    header = [
        "policy",
        "workload",
        "machine, budget",
        "time",
        "bound",
        "`swap_all`",
        "moved in",
        "hidden",
        "where it goes",
    ]
    lines = []
    for row in sorted(rows, key=lambda row: row["policy"]):
        job = OWN.get(row["policy"], RESNET)
        beside = row.get("swap_all_ns")
        known = [f"`{row['policy']}`", row["title"], f"`{job.profile}`, {gb(row['budget_bytes'])}", percent(added(row))]
        ends = [percent(beside / row["whole_ns"] - 1 if beside else None)]
        if row["time_ns"] is None:
            lines.append([*known, percent(least(row)), *ends, "–", "–", row["refused"]])
            continue
        hidden = "–" if row["hidden"] is None else f"{100 * row['hidden']:.0f} %"
        bound = percent(row["own_ns"] / row["whole_ns"] - 1)
        lines.append([*known, bound, *ends, gb(row["back"]), hidden, waits(row)])
    return table(header, lines, 3)


def transformer_head(key: str, rows: Sequence[Row]) -> str:
    """What the job is."""
    job, row = TRANSFORMERS[key], cells(rows, job=key)[0]
    return (
        f"### {job.title}\n\nOn `{job.profile}`. Keeping everything takes {gb(row['whole_bytes'])} and"
        f" {row['whole_ns'] / 1e6:,.0f} ms."
    )


def transformer_table(key: str, rows: Sequence[Row]) -> str:
    """Time added at each budget, then what the tightest run that fits moved and waited for."""
    here = cells(rows, job=key)
    budgets = sorted({row["budget_bytes"] for row in here}, reverse=True)
    bounds = {budget: cells(here, budget_bytes=budget)[0] for budget in budgets}
    header = [
        "policy",
        *(gb(budget) for budget in budgets),
        "above its bound",
        "in, times what must",
        "hidden",
        "where it goes",
    ]
    lines = [["*bound, every op on the device*", *(percent(least(bounds[b])) for b in budgets), "–", "1", "–", "–"]]
    ranked = []
    for name in dict.fromkeys(row["policy"] for row in here):
        own = {row["budget_bytes"]: row for row in cells(here, policy=name)}
        fits = [row for row in own.values() if row["time_ns"] is not None]
        last = min(fits, key=lambda row: row["budget_bytes"], default=None)
        order = (-len(fits), last["time_ns"] if last else 0, name)
        shown = [percent(added(own[b])) for b in budgets]
        label = f"*`{name}`*" if name in BASELINES else f"`{name}`"
        if last is None:
            ranked.append((order, [label, *shown, "–", "–", "–", "–"]))
            continue
        above = f"{100 * (last['time_ns'] - last['own_ns']) / last['whole_ns']:.1f}"
        must = f"{last['back'] / last['must_back']:.2f}" if last["must_back"] else "–"
        hidden = "–" if last["hidden"] is None else f"{100 * last['hidden']:.0f} %"
        ranked.append((order, [label, *shown, above if name not in BASELINES else "–", must, hidden, waits(last)]))
    return table(header, [*lines, *(line for _, line in sorted(ranked))])


def why_table(rows: Rows) -> str:
    """The rule by which each policy is slower than `swap_all` where it is."""
    slower = slower_than_swap_all(rows)
    lines = [
        [f"`{name}`", rule_of(name), f"{100 * slower[name]:+.0f} %"]
        for name in sorted(slower, key=lambda name: (-slower[name], name))
    ]
    return table(["policy", "its rule, and what that is for", "slower than `swap_all`, at most"], lines, 2)


def pinning_table(rows: Sequence[Row]) -> str:
    """What pinning the memory that leaves the device takes: before training, or again in each iteration."""
    lines = []
    for row in sorted(rows, key=lambda row: row["policy"]):
        job = OWN.get(row["policy"], RESNET)
        host = load_profile(job.profile).host
        rate = host.pinning if host else 0
        if not rate or not row["time_ns"] or not row["out"] or row["policy"] in UNPINNED:
            continue
        once = row["out"] / rate
        slower = row["pinned_ns"] / row["time_ns"] - 1 if row.get("pinned_ns") else None
        lines.append([f"`{row['policy']}`", f"`{job.profile}`", gb(row["out"]), f"{once:.2g} s",
                      f"{row['time_ns'] / 1e9:.2g} s", percent(slower)])  # fmt: skip
    header = ["policy", "machine", "out", "to pin that much", "an iteration", "pinned for each copy"]
    return table(header, lines, 2)


def published_said(row: Row) -> str:
    """What is printed of ZeRO-Offload on one V100, and where the difference comes from."""
    with_them, without, of_two = (
        tflops(row, recomputed=recomputed, steps=steps) for recomputed, steps in ((True, 1), (False, 1), (False, 2))
    )
    times = [f"{row[key] / 1e9:.1f} s" for key in ("time_ns", "own_ns", "recompute_ns", "update_ns")]
    update = row["parameters"] / row["update_ns"]
    weights, layer = 2 * row["layer_parameters"], row["hbm_layer_bytes"]
    return (
        f"* **`zero_offload` reaches {TFLOPS:.0f} TFLOP/s with 10 billion parameters on one V100**, as published. Here"
        f" it is {with_them:.1f} with what checkpoints recompute, and {without:.1f} without; the paper does not say"
        " which, nor its batch (10 samples of 1,024 tokens are second-hand), nor whether a step accumulates gradients."
        f" A step takes {times[0]}: {times[1]} of forward and backward, {times[2]} of recomputation, and {times[3]} in"
        f" which the CPU updates {update:.2f}e9 parameters per second (DeepSpeed measured 1.41e9). With two batches per"
        f" update, which waits for it half as often, it is {of_two:.1f} without what is recomputed, by arithmetic.\n"
        f"* **`zero_offload` trains {LARGEST / 1e9:.0f} billion parameters on one V100 of 32 GB with 1.5 TB of host**,"
        f" as published. Here {row['hbm_parameters'] / 1e9:.1f} billion fit in layers of 4096 (4 samples of 1,024"
        f" tokens, checkpoints). The card binds: of the {layer / 1e6:.0f} MB that a layer takes of it"
        f" {weights / 1e6:.0f} are weights in 16 bits, and the rest is its checkpoint. The host would hold"
        f" {row['host_parameters'] / 1e9:.0f} billion, at {row['host_layer_bytes'] / row['layer_parameters']:.0f} bytes"
        " each."
    )


def factor_table(factor: str, rows: Sequence[Row]) -> str:
    """Time added per policy and value of one factor."""
    here = cells(rows, factor=factor)
    values = list(dict.fromkeys(row["value"] for row in here))
    header = [f"{factor}", *(f"{value} †" if value in own_values(factor) else value for value in values)]
    lines = []
    for name in sorted(dict.fromkeys(row["policy"] for row in here)):
        own = {row["value"]: row for row in cells(here, policy=name)}
        label = f"*`{name}`*" if name in BASELINES else f"`{name}`"
        if any(row["time_ns"] is not None for row in own.values()):
            lines.append([label, *(percent(added(own[value])) if value in own else "–" for value in values)])
    first = {row["value"]: row for row in reversed(here)}
    if factor in factors():
        lines.insert(0, ["*bound*", *(percent(least(first[value])) for value in values)])
    return table(header, lines)


def platforms_table(rows: Sequence[Row]) -> str:
    """Per machine its balance, and the fastest of the family against full recomputation at each budget."""
    header = ["machine", "kFLOP per byte of link", *(f"{100 * share:.0f} %" for share in SHARES), "full recomputation"]
    lines = []
    for profile in dict.fromkeys(row["profile"] for row in rows):
        shown, redo = [], "✗"
        for share in SHARES:
            best, other = pays(rows, profile, share)
            redo = percent(added(other)) if other else redo
            if best is None:
                shown.append("✗")
                continue
            mark = "**" if other is None or best["time_ns"] < other["time_ns"] else ""
            shown.append(f"{mark}{percent(added(best))}{mark} `{best['policy']}`")
        lines.append((balance(profile), [f"`{profile}`", f"{balance(profile) / 1e3:.2g}", *shown, redo]))
    return table(header, [line for _, line in sorted(lines)])


def balance(profile: str) -> float:
    """FLOPs of 16-bit products that a device sustains while a byte crosses to its host."""
    platform = load_profile(profile)
    engine, home, host = platform.main_engine(0), platform.home(0).name, platform.host
    assert host is not None
    peak = next(engine.peak[dtype] for dtype in ("bf16", "fp16", "tf32", "fp32") if dtype in engine.peak)
    share = engine.efficiency.get("matmul", engine.efficiency.get("", 1.0))
    return peak * share / platform.pace(platform.route(home, host.name)).rate
