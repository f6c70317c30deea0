"""Small real models for the suite: they have what random nets lack."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import strategies as st

from sim.trace.graph import Trace


def models() -> st.SearchStrategy[Trace]:
    """Two-layer transformers with all parts of real ones, each with another attention, precision and optimizer."""
    return st.sampled_from(range(len(_MODELS))).map(lambda which: anew(_model(which)))


def generations() -> st.SearchStrategy[Trace]:
    """Prompts and a few generated tokens of two-layer transformers, in one part or several that are independent."""
    return st.sampled_from(range(len(_GENERATIONS))).map(lambda which: anew(_generation(which)))


def anew(trace: Trace) -> Trace:
    """An equal trace that has computed nothing yet: what a policy does to one is not there in the next example."""
    columns = (trace.tensor_columns, trace.op_columns)
    return Trace(*columns, outputs=trace.outputs, carry=trace.carry, meta=trace.meta, origin=trace.origin)


_GENERATIONS = ((2, 2, "fp32"), (4, 3, "fp16"), (1, 4, "bf16"), (3, 1, "fp16"))
"""Parts of the batch, tokens, precision."""


@lru_cache
def _generation(which: int) -> Trace:
    from workloads.transformer import transformer

    parts, tokens, precision = _GENERATIONS[which]
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 24}
    return transformer(config, batch=2 * parts, sequence=12, generate=tokens, micro_batches=parts, precision=precision)


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
