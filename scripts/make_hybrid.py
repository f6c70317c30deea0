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

from benchmarks.hybrid import DATA, Row, best_other

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hybrid.md"
EQUAL = 0.0005
"""Overheads that are shown alike are alike: a twentieth of a point."""


def _percent(share: float | None) -> str:
    return "✗" if share is None else f"{100 * share + 0.0:.1f}"


def _name(policy: str) -> str:
    return "layers: half recomputed, half swapped" if policy.startswith("layers ") else f"`{policy}`"


def grid(rows: Sequence[Row]) -> str:
    """Per share of the budget, model and link rate: `hybrid`, and the best other policy, over zone bandwidths."""
    bandwidths = sorted({row["bandwidth"] for row in rows})
    header = ["budget", "model", "link", *(f"zone {b} GB/s" for b in bandwidths)]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    order = list(dict.fromkeys(row["model"] for row in rows))
    keys = sorted({(row["share"], order.index(row["model"]), row["rate"]) for row in rows})
    by_key = {(row["share"], row["model"], row["rate"], row["bandwidth"]): row for row in rows}
    for share, model, rate in keys:
        cells = []
        for bandwidth in bandwidths:
            row = by_key.get((share, order[model], rate, bandwidth))
            if row is None:
                cells.append("–")
                continue
            took, name = best_other(row)
            mine = row["overhead"]["hybrid"]
            cells.append(f"**{_percent(mine)}**" + ("" if took - mine < EQUAL else f" {_percent(took)} {_name(name)}"))
        lines.append(f"| {share:.1f} | {order[model]} | {rate} GB/s | {' | '.join(cells)} |")
    return "\n".join(lines)


def said(rows: Sequence[Row]) -> str:
    """What the cells come to, in sentences."""
    gaps = [best_other(row)[0] - row["overhead"]["hybrid"] for row in rows]
    free = [row for row in rows if best_other(row)[0] < EQUAL]
    left = [(row, gap) for row, gap in zip(rows, gaps, strict=True) if best_other(row)[0] >= EQUAL]
    wide = [gap for row, gap in left if best_other(row)[0] >= 0.05]
    winners = Counter(_name(best_other(row)[1]) for row, _ in left)
    won = ", ".join(f"{name} {count}" for name, count in winners.most_common())
    slowest = min(gaps)
    return "\n".join(
        [
            f"* {len(rows)} cells. `hybrid` is "
            + ("never slower than" if slowest > -EQUAL else f"up to {-100 * slowest:.1f} points slower than")
            + " the best other policy of the cell.",
            f"* In {len(free)} cells another policy, too, is as fast as unlimited memory: the link keeps up.",
            f"* In the other {len(left)} cells the best other policy is: {won}. `hybrid` takes"
            f" {100 * min(gap for _, gap in left):.1f} to {100 * max(gap for _, gap in left):.1f} points less,"
            f" {100 * sorted(gap for _, gap in left)[len(left) // 2]:.1f} in the median.",
            f"* Where at least 5 points could be gained ({len(wide)} cells), it gains 5 in"
            f" {sum(gap >= 0.05 for gap in wide)}.",
        ]
    )


def page() -> str:
    """The page with its tables as the cells say."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    return replaced(replaced(text, said(rows), "said"), grid(rows), "grid")


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
