"""The cells of docs/parallel.md on other machines, experts, policies inside a schedule, long sequences, and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from scripts.parallel_page.measure import MODELS, NO_LIMIT, PROFILE, SCHEDULES, SEQUENCE, Row
from sim import simulate
from sim.analysis.stages import stages
from sim.errors import OutOfMemory
from sim.layout import lay_out
from sim.trace import Trace
from workloads import transformer, with_stack

STAGES = 8
MIXTURE = "DeepSeek MoE 16B"
EXPERTS = {
    "model_type": "deepseek", "num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
    "max_position_embeddings": 4096,
}  # fmt: skip
MACHINES = {"ascend_910b": 8, "mt3000_cluster": 4}
"""Profiles, and how many of a node's devices divide layers or experts."""
BUDGETS = {"1f1b": "48 GiB", "interleaved": "52 GiB", "zb_v": "54 GiB"}
RECOMPUTED, OFFLOADED = "full_recompute", "offload_activations"
POLICIES = (
    "keep_all", RECOMPUTED, "selective_recompute(recompute=attention_core)", OFFLOADED,
    *(f"stages {which}: {RECOMPUTED}; rest: keep_all" for which in ("0-2", "4-7")),
)  # fmt: skip
LONG = (8192, 32768, 131072)
STEP = {"precision": "mixed_bf16", "attention": "flash", "loss": "fused", "optimizer": "adamw_fused"}
PARAMETERS = 7.5e9
"""Those of the model that is printed in ZeRO's table."""


def experts() -> Iterator[Row]:
    """Each schedule of a mixture of experts: seven stages of eight replicas that divide the experts."""
    for schedule in SCHEDULES:
        yield {"model": MIXTURE, "schedule": schedule, **_mixture(PROFILE, schedule, 8)}


def machines() -> Iterator[Row]:
    """1F1B of each model on the other machines."""
    for profile, ranks in MACHINES.items():
        for model, config in MODELS.items():
            base = transformer(config, batch=2 * STAGES, sequence=SEQUENCE, **STEP)
            layout = {"tp": ranks, "sequence_parallel": True, "pp": STAGES, "micro_batches": 2 * STAGES}
            yield {
                "model": model,
                "profile": profile,
                "devices": ranks * STAGES,
                **_ran(base, profile, layout, fused=True),
            }
        yield {"model": MIXTURE, "profile": profile, "devices": ranks * 7, **_mixture(profile, "1f1b", ranks)}


def policies() -> Iterator[Row]:
    """GPT-3 175B in less memory than the fullest stage of a schedule takes: each policy in each schedule."""
    base = transformer(MODELS["GPT-3 175B"], batch=2 * STAGES, sequence=SEQUENCE, **STEP)
    for schedule, budget in BUDGETS.items():
        layout = {"tp": 8, "sequence_parallel": True, "pp": STAGES, "micro_batches": 2 * STAGES, "schedule": schedule}
        trace, platform = lay_out(base, PROFILE, layout, kernels=partial(with_stack, stack="fused"))
        for policy in POLICIES:
            row: Row = {"schedule": schedule, "budget": budget, "policy": policy, "seconds": None, "peak_gib": None}
            try:
                log = simulate(trace, platform, policy, budget=budget).log
            except OutOfMemory:
                yield row
                continue
            peaks = [round(stage.peak_bytes / 2**30, 1) for stage in stages(log)]
            yield {**row, "seconds": round(log.end / 1e9, 3), "peak_gib": peaks}


def context() -> Iterator[Row]:
    """Llama 2 7B on eight devices that divide the tokens of a sample: keys gathered, and in blocks."""
    for profile in ("a100_80_sxm", "ascend_910b"):
        for tokens in LONG:
            base = transformer("meta-llama/Llama-2-7b-hf", batch=1, sequence=tokens, **STEP)
            for ring in (False, True):
                row = _ran(base, profile, {"cp": 8, "ring_attention": ring}, fused=True)
                yield {"profile": profile, "tokens": tokens, "ring_attention": ring, **row}


def zero() -> Iterator[Row]:
    """Training state of a replica of a model of 7.5 billion parameters at each level, between two microbatches."""
    config = {
        "model_type": "gpt2", "n_layer": 36, "n_embd": 4096, "n_head": 32, "n_positions": SEQUENCE,
        "vocab_size": 51200, "activation_function": "gelu",
    }  # fmt: skip
    for ranks in (4, 16, 64, 256, 1024):
        base = transformer(config, batch=2 * ranks, sequence=64, **STEP)
        parameters = sum(t.bytes for t in base.tensors if t.role == "weight" and base.producer[t.id] < 0) / 2
        row: Row = {"replicas": ranks}
        for level in range(4):
            trace, _ = lay_out(base, PROFILE, {"dp": ranks, "zero": level, "micro_batches": 2})
            row[f"level_{level}"] = round(_state(trace) / parameters * PARAMETERS / 1e9, 3)
        yield row


def _mixture(profile: str, schedule: str, ranks: int) -> Row:
    base = transformer(EXPERTS, batch=14 * ranks, sequence=SEQUENCE, **STEP)
    layout = {"dp": ranks, "ep": ranks, "pp": 7, "micro_batches": 14, "schedule": schedule}
    return _ran(base, profile, layout, fused=False)


def _ran(base: Trace, profile: str, layout: dict[str, Any], *, fused: bool) -> Row:
    """Time of an iteration, parts of it, and the peak of each stage, with everything kept in unlimited memory."""
    kernels = partial(with_stack, stack="fused") if fused else None
    trace, platform = lay_out(base, profile, layout, kernels=kernels)
    log = simulate(trace, platform, budget=NO_LIMIT).log
    table = stages(log)
    return {
        "seconds": round(log.end / 1e9, 3),
        "bubble": round(sum(stage.bubble_ns for stage in table) / (len(table) * log.end), 4),
        "exposed": round(sum(stage.exposed_ns for stage in table) / (len(table) * log.end), 4),
        "peak_gib": [round(stage.peak_bytes / 2**30, 2) for stage in table],
        "capacity_gib": round(lay_out(base, profile, layout)[1].home(0).capacity / 2**30, 1),
    }


def _state(trace: Trace) -> int:
    """Bytes of weights, optimizer states, and gradients that are held when the second microbatch begins."""
    size, names = trace.tensor_columns.bytes, trace.op_columns.name
    second = next(op.id for op in trace.ops if op.phase == "forward" and names[op.id].endswith(".mb1"))
    held = [t.id for t in trace.tensors if trace.producer[t.id] < 0 and t.role in ("weight", "optimizer_state")]
    for t in trace.tensors:
        if t.role == "gradient" and 0 <= trace.producer[t.id] < second <= max(trace.readers(t.id), default=-1):
            held.append(t.id)
    return sum(int(size[t]) for t in held)
