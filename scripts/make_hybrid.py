"""Puts what benchmarks/hybrid.json says into docs/hybrid.md: `hybrid` beside the best other policy, cell by cell.

python scripts/make_hybrid.py            write it
python scripts/make_hybrid.py --check    say whether it is current; exit status 1 where it is not

The cells are measured by benchmarks/hybrid.py.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
from make_demo import replaced

from benchmarks.hybrid import DATA, EQUAL, FAST, Row, best_other

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hybrid.md"
COMPOSED = (
    ("full_recompute; checkpoints", "`full_recompute; checkpoints: swap_all`"),
    ("layers ", "layers: half recomputed, half swapped"),
)

DEEP = "gpt2-medium"


def _percent(share: float | None) -> str:
    return "✗" if share is None else f"{100 * share + 0.0:.1f}"


def _name(policy: str) -> str:
    return next((shown for begin, shown in COMPOSED if policy.startswith(begin)), f"`{policy}`")


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _tight(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["rate"] < FAST]


def grid(rows: Sequence[Row]) -> str:
    """Per share of the budget, model and tight link: `hybrid`, the bound, and the best other, over zone bandwidths."""
    tight = _tight(rows)
    bandwidths = sorted({row["bandwidth"] for row in tight})
    header = ["budget", "model", "link", *(f"zone {b} GB/s" for b in bandwidths)]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    order = list(dict.fromkeys(row["model"] for row in rows))
    keys = sorted({(row["share"], order.index(row["model"]), row["rate"]) for row in tight})
    by_key = {(row["share"], row["model"], row["rate"], row["bandwidth"]): row for row in tight}
    for share, model, rate in keys:
        cells = []
        for bandwidth in bandwidths:
            row = by_key.get((share, order[model], rate, bandwidth))
            if row is None:
                cells.append("–")
                continue
            took, name = best_other(row)
            mine = row["overhead"]["hybrid"]
            bound = f" ({_percent(row['bound'])})" if mine >= EQUAL else ""
            cells.append(f"**{_percent(mine)}**{bound}" + ("" if took < EQUAL else f" {_percent(took)} {_name(name)}"))
        lines.append(f"| {share:.1f} | {order[model]} | {rate} GB/s | {' | '.join(cells)} |")
    return "\n".join(lines)


def policies(rows: Sequence[Row]) -> str:
    """Per policy what it takes in the cells of tight links, and for what."""
    tight = _tight(rows)
    found: dict[str, list[tuple[float | None, float | None]]] = {}
    for row in tight:
        for name, took in row["overhead"].items():
            found.setdefault(_name(name), []).append((took, row["recomputed"].get(name)))
    wins = Counter(_name(best_other(row)[1]) for row in tight if best_other(row)[0] >= EQUAL)
    lines = [
        "| policy | cells | fits | median | most | recompute | waits | fastest other in |",
        "| --- |" + " ---: |" * 7,
    ]
    table = []
    for name, cells in found.items():
        fits = [took for took, _ in cells if took is not None]
        known = [(took, part) for took, part in cells if took is not None and part is not None]
        whole = known and len(known) == len(fits)  # in earlier cells recomputation was not noted
        parts = [_median([part for _, part in known]), _median([took - part for took, part in known])] if whole else []
        shown = [_percent(part) for part in parts] or ["–", "–"]
        table.append((_median(fits) if fits else 1e9, name, cells, fits, shown))
    for middle, name, cells, fits, shown in sorted(table, key=lambda line: line[:2]):
        most = [_percent(middle), _percent(max(fits))] if fits else ["–", "–"]
        figures = [str(len(cells)), str(len(fits)), *most, *shown, str(wins.get(name, "–"))]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


def said(rows: Sequence[Row]) -> str:
    """What the cells come to, in sentences."""
    gaps = [best_other(row)[0] - row["overhead"]["hybrid"] for row in rows]
    free = [row for row in rows if best_other(row)[0] < EQUAL]
    left = [(row, gap) for row, gap in zip(rows, gaps, strict=True) if best_other(row)[0] >= EQUAL]
    wide = [gap for row, gap in left if best_other(row)[0] - row["bound"] >= 0.05]
    costs = [row for row in rows if row["overhead"]["hybrid"] >= EQUAL]
    above = [row["overhead"]["hybrid"] - row["bound"] for row in costs]
    joint = [row for row in costs if row["joint"] is not None]
    faster = [row["overhead"]["hybrid"] - row["joint"] for row in joint]
    proven = [row["joint"] - row["joint_bound"] for row in joint]
    deep = [row["joint"] - row["joint_bound"] for row in joint if row["model"] == DEEP]
    winners = Counter(_name(best_other(row)[1]) for row, _ in left)
    won = ", ".join(f"{name} {count}" for name, count in winners.most_common())
    slowest = min(gaps)
    return "\n".join(
        [
            f"* {len(rows)} cells. `hybrid` is "
            + ("never slower than" if slowest > -EQUAL else f"up to {-100 * slowest:.1f} points slower than")
            + " the best other policy of the cell.",
            f"* In {len(rows) - len(costs)} cells `hybrid` is as fast as unlimited memory: nothing is faster. In the"
            f" other {len(costs)} it is at most {100 * max(above):.2f} points above the bound of `sim.lower_bound`,"
            f" {100 * _median(above):.2f} in the median.",
            f"* In those, `joint_optimal` is at most {100 * max(faster):.2f}"
            f" points faster than `hybrid`, and at most {100 * max(proven):.2f}"
            f" points above what it proves for its class; for the 24 layers of `{DEEP}` {100 * max(deep):.2f}.",
            f"* In {len(free)} cells another policy, too, is as fast as unlimited memory: the link keeps up.",
            f"* In the other {len(left)} cells the best other policy is: {won}. `hybrid` takes"
            f" {100 * min(gap for _, gap in left):.1f} to {100 * max(gap for _, gap in left):.1f} points less,"
            f" {100 * _median([gap for _, gap in left]):.1f} in the median.",
            f"* Where the bound leaves at least 5 points to gain ({len(wide)} cells), it gains 5 in"
            f" {sum(gap >= 0.05 for gap in wide)}.",
        ]
    )


def page() -> str:
    """The page with its tables as the cells say."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    for name, part in (("said", said), ("policies", policies), ("grid", grid)):
        text = replaced(text, part(rows), name)
    return text


def main(arguments: Sequence[str]) -> int:
    """Write, or with --check compare."""
    text = page()
    if "--check" in arguments:
        if PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is not current: run python scripts/make_hybrid.py")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
