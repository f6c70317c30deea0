"""What ZeRO-Offload's authors print for one V100, beside what comes out here, and what that is made of."""

from __future__ import annotations

from typing import Any

from sim.experiment import Result, simulate
from sim.hardware.profile import load_profile
from sim.log import WHY
from workloads.transformer import transformer

PROFILE, POLICY = "v100_32", "zero_offload + full_recompute"
LARGEST, TFLOPS = 13e9, 40.0
"""Ren et al., USENIX ATC 2021: the largest model on one V100 of 32 GB, in parameters; and TFLOP/s of one of 10e9."""


def rows(name: str) -> list[dict[str, Any]]:
    """One for `zero_offload`, and none for others: a step of 10e9 parameters, and the largest model."""
    return [{"policy": name, **ten_billion(), **largest()}] if name == "zero_offload" else []


def step(layers: int, batch: int) -> Result:
    """Of the authors' models: layers of 4096, 1,024 tokens; with checkpoints."""
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": 4096, "n_head": 32, "n_positions": 1024}
    shape = {"batch": batch, "sequence": 1024, "precision": "mixed_fp16", "attention": "eager"}
    return simulate(transformer({**config, "vocab_size": 50257}, **shape), PROFILE, POLICY)


def ten_billion() -> dict[str, int]:
    """50 layers and 10 samples: the step's time, what it is made of, its FLOPs and those that are recomputed."""
    result = step(50, 10)
    log, done = result.log, result.summary()
    repeated = log.interval("op")[log.interval("why") == WHY["recompute"]]
    return {
        "parameters": log.trace.meta["parameters"],
        "time_ns": log.end,
        "own_ns": done["compute_ns"],
        "recompute_ns": done["recompute_ns"],
        "update_ns": done["stall_ns"]["engine"],
        "flops": int(log.trace.meta["model_flops"]),
        "recomputed_flops": int(log.trace.op_columns.flops[repeated].sum()),
    }


def tflops(row: dict[str, Any], *, recomputed: bool, steps: int = 1) -> float:
    """TFLOP/s with what is recomputed or without; of an update after so many steps, by arithmetic."""
    time = steps * row["time_ns"] - (steps - 1) * row["update_ns"]
    return float(steps * (row["flops"] + recomputed * row["recomputed_flops"]) / time / 1e3)


def largest() -> dict[str, float]:
    """The parameters that card and host hold, with 4 samples; what a layer takes of the card, and its weights of that.

    Each further layer takes as much as those between models of 4 and of 8.
    """
    few, more = (step(layers, 4) for layers in (4, 8))
    sizes = [result.log.trace.meta["parameters"] for result in (few, more)]
    layer = (sizes[1] - sizes[0]) // 4
    found: dict[str, float] = {"layer_parameters": layer}
    for tier in ("hbm", "host"):
        used, used_more = (result.summary()["peak_by_tier"][tier] for result in (few, more))
        each = (used_more - used) // 4
        found[f"{tier}_layer_bytes"] = each
        found[f"{tier}_parameters"] = sizes[0] + (load_profile(PROFILE).tier(tier).capacity - used) // each * layer
    return found
