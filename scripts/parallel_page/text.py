"""The text of docs/parallel.md, from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from scripts.parallel_page import inside_text
from scripts.parallel_page.measure import published

Row = Mapping[str, Any]
INTRODUCTION = """\
# Many devices: schedules, experts, machines, policies, and printed figures beside simulated ones

Made by `python scripts/make_parallel.py` from docs/parallel.json: profile `a100_80_sxm`, models as Hugging Face writes
them with fused kernels, 16-bit mixed precision, Adam in one kernel. No figure of the profile was chosen to fit. Kernels
are fused because Megatron-LM's are; with eager ones the 22B model with full recomputation takes 1.70 s, 20 % more than
printed. Differences that are known: 16 bytes of training state per parameter here, 18 in Megatron-LM; gradients are
summed beside backward here, after it there; what the framework does between iterations is not simulated. Iterations of
many microbatches and stages are simulated with fewer and extended: past its start a pipeline of equal stages repeats
itself. Simulated both ways, three layouts with layers of width 2,048 differ by less than 1 % in time and in peak; with
width 512, where launches and latency decide, one differs by 5 % in time.
"""


def page(rows: Mapping[str, Sequence[Row]]) -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    lines += [
        "## Schedules",
        "",
        "Eight stages of eight devices each (tensor and sequence parallelism), 16 microbatches of one sample, and",
        "everything kept; `interleaved`, `zb_v` and `dualpipe_v` have two parts of the model per device. GPT-3's",
        "embedding is tied to its head: the first and the last stage each have it, with states of its own, and sum",
        "its gradient once; in a V both are on one device. Llama 2 ties nothing.",
        "",
        "| model | schedule | s | bubble | peak per stage, GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows.get("schedules", ()):
        peaks = " ".join(f"{peak:.0f}" for peak in row["peak_gib"])
        lines.append(f"| {row['model']} | `{row['schedule']}` | {row['seconds']:.2f} | {row['bubble']:.1%} | {peaks} |")
    for part in (inside_text.experts, inside_text.machines, inside_text.policies, inside_text.context):
        lines += ["", *part(rows)]
    for key, what in (("korthikanti", "recompute"), ("megatron", "gpus")):
        title = {
            "korthikanti": "Four models with and without recomputation",
            "megatron": "From 1.7 billion to 1 trillion",
        }[key]
        lines += ["", f"## {title}", "", f"{published()['sources'][key]}.", ""]
        more = " with `async_sums`, s |" if key == "korthikanti" else ""
        if more:
            lines[-1:] = [
                "With `async_sums` backward sums and gathers beside products, as Megatron-LM does by default.",
                "",
            ]
        lines += [f"| model | {what} | printed, s | simulated, s | difference |{more} peak, GiB |"]
        lines += ["| --- " * (7 if more else 6) + "|"]
        offs = []
        for row in rows.get(key, ()):
            printed = row["printed_s"]
            off = row["simulated_s"] / printed - 1 if printed else None
            offs += [off] if off is not None else []
            said = ("–", "–") if off is None else (f"{printed:.2f}", f"{off:+.1%}")
            lines.append(
                f"| {row['model']} | {_how(row, what)} | {said[0]} | {row['simulated_s']:.2f} | {said[1]} "
                + (f"| {row['async_s']:.2f} ({row['async_s'] / row['simulated_s'] - 1:+.1%}) " if more else "")
                + f"| {row['peak_gib']:.1f} |"
            )
        if offs:
            lines += [
                "",
                f"Median of the differences' sizes {median(map(abs, offs)):.1%}, "
                f"from {min(offs):+.1%} to {max(offs):+.1%}.",
            ]
        lines += _order(rows[key]) if key == "korthikanti" and rows.get(key) else []
        known = {row["model"] for row in rows.get(key, ())}
        left = [row[0] for row in published()[key] if row[0] not in known]
        lines += ["", f"Not measured yet: {', '.join(left)}."] if left else []
    for part in (inside_text.memory, inside_text.zero, inside_text.cost, inside_text.scale):
        lines += ["", *part(rows)]
    return "\n".join(lines) + "\n"


def _order(rows: Sequence[Row]) -> list[str]:
    """In how many models what recomputes less is the faster one, as in print."""
    ours, theirs = ({(r["model"], r["recompute"]): r[key] for r in rows} for key in ("simulated_s", "printed_s"))
    models = list(dict.fromkeys(row["model"] for row in rows))
    ways = ("full_recompute", "selective_recompute")
    pairs = [[(part[m, ways[0]], part[m, ways[1]]) for m in models] for part in (ours, theirs)]
    right = sum((a > b) == (c > d) for (a, b), (c, d) in zip(*pairs, strict=True))
    gains = [f"{c / d - 1:.0%} in print and {a / b - 1:.0%} here" for (a, b), (c, d) in zip(*pairs, strict=True)]
    said = "; ".join(f"{m} {gain}" for m, gain in zip(models, gains, strict=True))
    return [
        "",
        f"In {right} of {len(models)} models the two that are printed are in the printed order. Full recompute takes "
        f"longer by: {said}.",
    ]


def _how(row: Row, what: str) -> str:
    """The cell that tells a row from its neighbours."""
    return (
        f"`{row[what]}`{', sequence parallel' if row['sequence_parallel'] else ''}"
        if what == "recompute"
        else str(row[what])
    )
