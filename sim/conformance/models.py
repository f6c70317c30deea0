"""Small real models for the suite: they have what random nets lack."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import strategies as st

from sim.trace.graph import Trace


def models() -> st.SearchStrategy[Trace]:
    """Two-layer transformers with all parts of real ones, each with another attention, precision and optimizer."""
    return st.sampled_from(range(len(_MODELS))).map(_model)


_MODELS = (
    ("sdpa", "fp32", "sgd_momentum", None),
    ("eager", "amp_bf16", "adamw_fused", None),
    ("eager", "mixed_bf16", "adamw_foreach", 0.0),
    ("flash", "bf16", "adamw_loop", None),
)


@lru_cache
def _model(which: int) -> Trace:
    from workloads.transformer import transformer  # a program that checks nothing need not load it

    attention, precision, optimizer, dropout = _MODELS[which]
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 24, "n_positions": 8}
    return transformer(
        config,
        batch=4,
        sequence=8,
        precision=precision,
        attention=attention,
        optimizer=optimizer,
        dropout=dropout,
    )
