"""DELTA beside DTR on two captured models, and what makes the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SIZES = {"vocab_size": 8000}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "num_hidden_layers": 6, **SIZES,
    },
    "t5": {"d_model": 512, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 8, **SIZES},
}  # fmt: skip
PROFILE, SHARE = "a100_40_pcie", 0.7
RUNS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("dtr", {}),
    ("delta", {}),
    ("delta", {"bandwidth": 1}),
    ("delta", {"filter": "cost_adjacent"}),
    ("delta", {"watermark": 0.05}),
)


def measure() -> list[dict[str, Any]]:
    """One row per model and run: slowdown against unlimited memory, share recomputed, bytes moved."""
    from sim import load_profile, simulate
    from sim.analysis.peak_memory import home_peak
    from workloads.capture import capture
    from workloads.hugging_face import default_step

    platform, rows = load_profile(PROFILE), []
    for kind, sizes in MODELS.items():
        step, _ = default_step({"model_type": kind, **sizes}, kind, kind, batch=16, sequence=512, optimizer=None)
        trace = capture(**step)
        free = simulate(trace, platform, "keep_all").log
        for policy, parameters in RUNS:
            found = simulate(trace, platform, policy, budget=int(SHARE * home_peak(free)), **parameters).summary()
            rows.append({
                "model": kind,
                "policy": policy,
                "parameters": dict(parameters),
                "slowdown": round(found["makespan_ns"] / free.end, 4),
                "recomputed": round(found["recompute_ns"] / free.end, 4),
                "moved": sum(found["moved_bytes"].values()),
            })  # fmt: skip
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per run."""
    lines = ["| Model | Policy | Time | Recomputed | Moved |", "| --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        given = " ".join((row["policy"], *(f"{key}={value}" for key, value in row["parameters"].items())))
        lines.append(
            f"| {row['model']} | `{given}` | {row['slowdown']:.3f} | {100 * row['recomputed']:.1f} % | "
            f"{row['moved'] / 1e6:,.0f} MB |"
        )
    return "\n".join(lines)
