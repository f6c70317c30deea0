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
        "embedding is tied to its head: each of the two stages sums its half of the gradient over the microbatches,",
        "and it is sent once; in a V both halves are on one device. Llama 2 ties nothing.",
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
        lines += [f"| model | {what} | printed, s | simulated, s | difference | peak, GiB |", "| --- " * 6 + "|"]
        offs = []
        for row in rows.get(key, ()):
            printed = row["printed_s"]
            off = row["simulated_s"] / printed - 1 if printed else None
            offs += [off] if off is not None else []
            said = ("–", "–") if off is None else (f"{printed:.2f}", f"{off:+.1%}")
            lines.append(
                f"| {row['model']} | {_how(row, what)} | {said[0]} | {row['simulated_s']:.2f} | {said[1]} "
                f"| {row['peak_gib']:.1f} |"
            )
        if offs:
            lines += [
                "",
                f"Median of the differences' sizes {median(map(abs, offs)):.1%}, "
                f"from {min(offs):+.1%} to {max(offs):+.1%}.",
            ]
        known = {row["model"] for row in rows.get(key, ())}
        left = [row[0] for row in published()[key] if row[0] not in known]
        lines += ["", f"Not measured yet: {', '.join(left)}."] if left else []
    return "\n".join([*lines, "", *inside_text.zero(rows)]) + "\n"


def _how(row: Row, what: str) -> str:
    """The cell that tells a row from its neighbours."""
    return (
        f"`{row[what]}`{', sequence parallel' if row['sequence_parallel'] else ''}"
        if what == "recompute"
        else str(row[what])
    )
