"""The page: sentences and a table that follow from the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]
EXACT = 5e-6
"""Relative difference below which two figures are written as equal."""


def blocks(rows: Sequence[Row], versions: Mapping[str, str]) -> dict[str, str]:
    """What stands between the marks of the page, by their names."""
    return {
        "said": said(rows),
        "versions": f"Captured with {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "steps": table(rows),
        "differing": differing(rows),
    }


def difference(row: Row, ours: str, theirs: str) -> float | None:
    """By how much our figure exceeds PyTorch's, None where one is missing."""
    return row[ours] / row[theirs] - 1 if row.get(ours) is not None and row.get(theirs) else None


def is_equal(row: Row, ours: str, theirs: str) -> bool:
    """Whether two figures are the same as far as the page tells."""
    found = difference(row, ours, theirs)
    return found is not None and abs(found) < EXACT


def said(rows: Sequence[Row]) -> str:
    """The sentences about all rows."""
    ran = [row for row in rows if not row["error"]]
    exact = sum(row["peak"] == row["tracker"] for row in ran)
    counted = sum(is_equal(row, "flops", "counter") for row in ran)
    priced = sum(not row["uncounted"] for row in ran)
    blocks_ = [row for row in ran if row["blocks"]]
    same = sum(row["layers"] == row["blocks"] for row in blocks_)
    chains = [row for row in ran if row["stages"] and row["layers"]]
    finer = sum(row["stages"] >= row["layers"] for row in chains)
    checked = [abs(d) for row in ran if (d := difference(row, "recompute", "checkpointed")) is not None]
    close = sum(each < 0.001 for each in checked)
    return (
        f"{len(ran)} of {len(rows)} steps were captured, half of them in less than "
        f"{median(row['capture_s'] for row in ran):.1f} s. Of these, {exact} have the peak of PyTorch's tracker to the "
        f"byte. All products have FLOPs in {priced}, the same number as PyTorch's counter finds in {counted}. "
        f"{same} of {len(blocks_)} stacks of blocks have a layer for each block; {len(chains)} steps are chains, "
        f"{finer} of them with at least as many stages as layers. Full recomputation has the peak of PyTorch's own "
        f"checkpointing within 0.1 % in {close} of {len(checked)}."
    )


def table(rows: Sequence[Row]) -> str:
    """A line per step."""
    head = (
        "| Model | Library | Captured in | Ops | Layers | Stages | Peak | Peak error | FLOPs | Full recomputation | "
        "Its error | Assumed |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    )
    return "\n".join((head, *map(_line, rows)))


def _line(row: Row) -> str:
    if row["error"]:
        return f"| {row['model']} | {row['library']} | ✗ {row['error']} |" + " |" * 9
    blocks_ = f"{row['layers']}" if row["layers"] == row["blocks"] or not row["blocks"] else (
        f"{row['layers']} for {row['blocks']}"
    )  # fmt: skip
    cells = (
        row["model"],
        row["library"],
        f"{row['capture_s']:.1f} s",
        str(row["ops"]),
        blocks_,
        str(row["stages"] or "–"),
        f"{row['peak'] / 1e6:.1f} MB",
        percent(difference(row, "peak", "tracker")),
        percent(difference(row, "flops", "counter")),
        "–" if row["recompute"] is None else f"{row['recompute'] / 1e6:.1f} MB",
        percent(difference(row, "recompute", "checkpointed")),
        "; ".join(row["assumed"]) or "–",
    )
    return "| " + " | ".join(cells) + " |"


def percent(share: float | None) -> str:
    """A difference in percent; 0 for none, a dash where there is nothing to compare with."""
    if share is None:
        return "–"
    return "0" if abs(share) < EXACT else f"{100 * share:+.3f} %"


def differing(rows: Sequence[Row]) -> str:
    """The steps that differ from PyTorch's figures, with the reason where one is known."""
    lines = []
    for row in rows:
        for what, ours, theirs in (
            ("peak", "peak", "tracker"),
            ("FLOPs", "flops", "counter"),
            ("full recomputation", "recompute", "checkpointed"),
        ):
            found = None if row["error"] else difference(row, ours, theirs)
            if found is not None and abs(found) >= 0.001:
                lines.append(f"- {row['model']}, {what}: {percent(found)}. {row['known'].get(ours, 'Not explained.')}")
    return "\n".join(lines) or "None."
