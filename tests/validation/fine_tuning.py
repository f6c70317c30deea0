"""torchtune's table of memory options, each line added to the last, beside runs of the same job.

README of pytorch/torchtune: Llama 3.2 3B on one A100, two packed samples of 4,096 tokens, all states in bf16, AdamW;
"peak active" memory. Its chunked loss keeps the logits, which `fused` here does, too. Adapters are those of its
configuration for that model (rank 64 on all linear layers but keys). Not stated: attention kernel; which optimizer the
first lines have.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from sim.experiment import simulate
from workloads import transformer

LLAMA_3B = {
    "model_type": "llama", "num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 24,
    "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 131072, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Llama 3.2 3B by its model card."""
TARGETS = "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


class Line(NamedTuple):
    """One line of the table. GiB and tokens per second as printed; what runs here; relative tolerance of the memory."""

    what: str
    gib: float
    tokens: int
    policy: str
    options: dict[str, object]
    tolerance: float = 0.05


OFFLOADED = "full_recompute; checkpoints: swap_all"
LINES = (
    Line("packed", 60.0, 7075, "keep_all", {"loss": "torch"}),
    Line("checkpointing", 24.9, 7210, "full_recompute", {}),
    Line("optimizer in backward", 23.1, 7309, "optimizer_in_backward + full_recompute", {}),
    Line("activation offload", 21.8, 7301, f"optimizer_in_backward + {OFFLOADED}", {}),
    Line("LoRA", 8.5, 8210, OFFLOADED, {"lora_rank": 64, "lora_targets": TARGETS}),
    Line("QLoRA", 4.6, 8035, OFFLOADED, {"lora_rank": 64, "lora_targets": TARGETS, "frozen_dtype": "nf4"}, 0.06),
)


@cache
def summary(what: str) -> dict[str, object]:
    """The figures of that line's run."""
    line = next(line for line in LINES if line.what == what)
    options = {"loss": "fused", "optimizer": "adamw_fused", "attention": "flash", **line.options}
    trace = transformer(LLAMA_3B, batch=2, sequence=4096, precision="bf16", **options)
    return simulate(trace, "a100_80_sxm", line.policy).summary()


def peak_gib(what: str) -> float:
    """Peak memory of that line in GiB."""
    return summary(what)["peak_bytes"] / 2**30


def speed(what: str, over: str) -> float:
    """Tokens per second of one line over those of another."""
    return summary(over)["makespan_ns"] / summary(what)["makespan_ns"]
