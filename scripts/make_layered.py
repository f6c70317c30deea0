"""Runs mt3000_layered with each of its parts alone and left out, and puts the tables into its page.

python scripts/make_layered.py            write it
python scripts/make_layered.py --check    say whether it is current; exit status 1 where it is not
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_demo import replaced

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mt3000_layered.md"
PROFILE = "mt3000_survey"
SLOW_LINK = "10 GB/s"
JOB = ("gpt2", 8, 1024, "amp_bf16")
LARGE_JOB = ("llama-1b", 1, 2048, "mixed_bf16")
PARTS: Mapping[str, tuple[str, Any, Any]] = {
    "tiering": ("tiering", "lru", "none"),
    "checkpoints": ("checkpoints", True, False),
    "mapping": ("mapping", "activations", "none"),
    "release": ("release", True, False),
    "streams": ("streams", True, False),
    "mode `delta`": ("mode", "delta", "none"),
}
"""Per part its parameter, and the value with which it is on and off."""
ON = {key: on for key, on, _ in PARTS.values()}
OFF = {key: off for key, _, off in PARTS.values()}
ROWS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("all", ON),
    *((f"all but {name}", {**ON, key: off}) for name, (key, _, off) in PARTS.items()),
    ("all, and the codec", {**ON, "codec": "half"}),
    ("mode `tso`", {**ON, "mode": "tso"}),
    *((f"{name} alone", {**OFF, key: on}) for name, (key, on, _) in PARTS.items()),
)
LARGE = (
    "zero_offload",
    "mt3000_layered",
    "zero_offload + full_recompute",
    "zero_offload + mt3000_layered(release=false)",
    "zero_offload + mt3000_layered",
)


def measured(rows: Iterable[tuple[str, Mapping[str, Any]]], rate: str | None = None) -> list[tuple[str, Any]]:
    """What each choice of parts comes to, a summary or None where it does not fit. rate: of both links."""
    from sim import load_profile, simulate
    from sim.errors import Infeasible
    from workloads import transformer

    model, batch, sequence, precision = JOB
    trace = transformer(model, batch=batch, sequence=sequence, precision=precision)
    overrides = {f"links.{link}.rate": rate for link in ("d2h", "h2d")} if rate else {}
    platform = load_profile(PROFILE, overrides=overrides)
    found: list[tuple[str, Any]] = []
    for name, parameters in rows:
        try:
            result = simulate(trace, platform, "mt3000_layered", **parameters)
        except Infeasible:
            found.append((name, None))
            continue
        reruns = int((result.log.interval("why") == _recompute()).sum())
        found.append((name, {**result.summary(), "reruns": reruns}))
    return found


def _recompute() -> int:
    from sim.log import WHY

    return int(WHY["recompute"])


def parts_table(fast: Sequence[tuple[str, Any]], slow: Sequence[tuple[str, Any]]) -> str:
    """The parts as a Markdown table: the profile's link in full, the slow one by its time."""
    from sim.report.cells import clock, percent, size, total

    titles = (
        *("time", "vs unlimited", "ops recomputed", "time of it", "encoding", "waits for space", "waits for copies"),
        *("copies hidden", "moved", f"vs unlimited at {SLOW_LINK}"),
    )
    lines = [f"| parts | {' | '.join(titles)} |", f"| --- | {' | '.join('---:' for _ in titles)} |"]
    for (name, row), (_, other) in zip(fast, slow, strict=True):
        late = percent(other["overhead"], sign=True) if other else "does not fit"
        if row is None:
            lines.append(f"| {name} | does not fit |{' |' * (len(titles) - 2)} {late} |")
            continue
        stall = row["stall_ns"]
        copies = stall.get("transfer", 0) + stall.get("wait", 0)
        cells = (
            *(clock(row["makespan_ns"]), percent(row["overhead"], sign=True), f"{row['reruns']:,}"),
            *(clock(row["recompute_ns"]), clock(row["codec_ns"]), clock(stall.get("space", 0)), clock(copies)),
            *(percent(row["overlap"]), size(total(row["moved_bytes"])), late),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def large_table() -> str:
    """A model whose weights and states exceed the zone, under the policies that may bring it in."""
    from sim import compare, load_profile
    from sim.report.cells import clock, percent, size, total
    from workloads import transformer

    model, batch, sequence, precision = LARGE_JOB
    trace = transformer(model, batch=batch, sequence=sequence, precision=precision)
    rows = compare(trace, load_profile(PROFILE), LARGE, find_floor=False).rows
    titles = ("time", "peak", "recompute", "moved")
    lines = [f"| policy | {' | '.join(titles)} |", f"| --- | {' | '.join('---:' for _ in titles)} |"]
    for row in rows:
        cells: tuple[str, ...] = ("does not fit", "", "", "")
        if row["fits"]:
            moved = size(total(row["moved_bytes"]))
            cells = clock(row["makespan_ns"]), size(row["peak_bytes"]), percent(row["recompute_overhead"]), moved
        lines.append(f"| `{row['policy']}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the page, or check it."""
    text = PAGE.read_text(encoding="utf-8")
    new = replaced(text, parts_table(measured(ROWS), measured(ROWS, SLOW_LINK)), "parts")
    new = replaced(new, large_table(), "large")
    stale = new != text
    if stale and "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {PAGE.name if stale else 'none'}")
    sys.exit(stale and "--check" in sys.argv)


if __name__ == "__main__":
    main()
