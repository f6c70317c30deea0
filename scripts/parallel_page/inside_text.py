"""The text of docs/parallel.md on other machines, experts, policies inside a schedule, long sequences, and ZeRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
PRINTED_ZERO = {
    4: (52.5, 41.3, 30.0), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}  # fmt: skip
"""GB per device of a model of 7.5 billion parameters at levels 1, 2 and 3: Rajbhandari et al., SC 2020, table 1."""


def experts(rows: Rows) -> list[str]:
    """A mixture of experts under each schedule."""
    lines = [
        "## A mixture of experts",
        "",
        "DeepSeek MoE 16B, 64 experts of which six per token, in seven stages of eight replicas that divide the",
        "experts (`dp` 8, `ep` 8), 14 microbatches of one sample per replica, kernels eager, everything kept,",
        "routing even but for chance. Exposed is the part of the devices' time in which they wait for bytes.",
        "",
        "| schedule | s | bubble | exposed | peak per stage, GiB |",
        "| --- " * 5 + "|",
    ]
    for row in rows.get("experts", ()):
        lines.append(f"| `{row['schedule']}` | {_time(row)} | {row['exposed']:.1%} | {_peaks(row)} |")
    return lines


def machines(rows: Rows) -> list[str]:
    """The same models on other machines."""
    lines = [
        "## Other machines",
        "",
        "The models above under `1f1b` in as many stages, of eight devices on Ascend 910B, of four clusters, which",
        "is one node, on MT-3000. Everything is kept in unlimited memory; where a device has less than the peak, it",
        "is bold.",
        "",
        "| model | profile | devices | s | bubble | exposed | peak per stage, GiB | a device has |",
        "| --- " * 8 + "|",
    ]
    for row in rows.get("machines", ()):
        over = "**" if max(row["peak_gib"]) > row["capacity_gib"] else ""
        lines.append(
            f"| {row['model']} | `{row['profile']}` | {row['devices']} | {_time(row)} | {row['exposed']:.1%} "
            f"| {over}{_peaks(row)}{over} | {row['capacity_gib']:.0f} |"
        )
    return lines


def policies(rows: Rows) -> list[str]:
    """Policies inside schedules."""
    lines = [
        "## Which policy inside which schedule, and for which stage",
        "",
        "GPT-3 175B as above on A100, in less memory than the fullest stage of the schedule takes. The fastest that",
        "fits is in bold. Where microbatches in flight fall from stage to stage, it is enough that the first ones",
        "recompute: 12 % faster under 1F1B than where all do, and as fast as offloading to within 2 %. Under `zb_v`",
        "nothing here fits in 54 GiB: on the last stages what binds is what waits for the gradients of weights,",
        "which recomputation does not shorten. Attention's core alone saves next to nothing, since its kernel is",
        "fused here.",
        "",
        "| schedule | each has | policy | s | peak per stage, GiB |",
        "| --- " * 5 + "|",
    ]
    every = rows.get("policies", ())
    for row in every:
        same = [each["seconds"] for each in every if each["schedule"] == row["schedule"] and each["seconds"]]
        if row["seconds"] is None:
            said, peaks = "does not fit", "–"
        else:
            mark = "**" if row["seconds"] == min(same) else ""
            said, peaks = f"{mark}{row['seconds']:.2f}{mark}", _peaks(row)
        lines.append(f"| `{row['schedule']}` | {row['budget']} | `{row['policy']}` | {said} | {peaks} |")
    return lines


def context(rows: Rows) -> list[str]:
    """Long sequences."""
    lines = [
        "## Long sequences",
        "",
        "Llama 2 7B, one sample whose tokens eight devices divide (`cp` 8), everything kept in unlimited memory.",
        "Keys and values are gathered before attention, or go from rank to rank in blocks beside the products",
        "(`ring_attention`). Exposed are gathers, or blocks that products do not hide; the weights' gradients are",
        "summed beside backward.",
        "",
        "| profile | tokens | gathered, s | exposed, s | in blocks, s | exposed, s | peaks, GiB |",
        "| --- " * 7 + "|",
    ]
    every = {(row["profile"], row["tokens"], row["ring_attention"]): row for row in rows.get("context", ())}
    for profile, tokens, ring in every:
        if ring:
            continue
        whole, blocks = (every[profile, tokens, way] for way in (False, True))
        times = " | ".join(f"{row['seconds']:.2f} | {row['seconds'] * row['exposed']:.2f}" for row in (whole, blocks))
        peaks = ", ".join(f"{row['peak_gib'][0]:.1f}" for row in (whole, blocks))
        lines.append(f"| `{profile}` | {tokens:,} | {times} | {peaks} |")
    return lines


def zero(rows: Rows) -> list[str]:
    """ZeRO's table."""
    lines = [
        "## ZeRO's table",
        "",
        "Rajbhandari et al., ZeRO, SC 2020, table 1: GB of training state per device of a model of 7.5 billion",
        "parameters, printed and of a simulated GPT of 36 layers of width 4,096, scaled to that number: weights,",
        "states, and the gradients that are held when the second of two microbatches begins. Differences are those",
        "of rounding.",
        "",
        "| replicas | level 1 | level 2 | level 3 |",
        "| --- " * 4 + "|",
    ]
    for row in rows.get("zero", ()):
        both = zip(PRINTED_ZERO[row["replicas"]], (row[f"level_{level}"] for level in (1, 2, 3)), strict=True)
        lines.append(f"| {row['replicas']:,} | " + " | ".join(f"{a:g} and {b:.2f}" for a, b in both) + " |")
    return lines


def _time(row: Row) -> str:
    return f"{row['seconds']:.2f} | {row['bubble']:.1%}"


def _peaks(row: Row) -> str:
    return " ".join(f"{peak:.0f}" for peak in row["peak_gib"])
