"""Traces of inference: a prompt, and the tokens that a decoder generates from it, one after another.

The first pass (prefill) reads the whole prompt and yields the first token; each further one (decode) reads the token
that the one before it has chosen. Each layer appends the keys and values of what a pass reads to its cache, which lives
until the last pass. With L layers, b samples, s tokens of prompt and n to generate the cache ends at

    2 L b (s + n - 1) kv_heads head  elements

and with P parameters in linear layers, of which the head's act on the last token alone, a decode pass after t tokens
takes 2 P b + 4 L b heads head (t + 1) FLOPs in products and attention.

Attention is one fused kernel in every precision. Weights are fixed: there is no loss, no gradient, no optimizer,
nothing is saved, and dropout is off. Tokens are chosen greedily. The parts of the batch run one after another, each
through all its passes.
"""

from __future__ import annotations

from dataclasses import replace

from sim.errors import WorkloadError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads.adapters import Tuning
from workloads.attention import REPEATING, Cache, Core
from workloads.experts import routing
from workloads.families import Config
from workloads.layers import Model
from workloads.parameters import make_parameters
from workloads.passes import decoder_body, head_weight
from workloads.precision import Precision
from workloads.primitives import linear, split
from workloads.tape import Tape, Value


def inference(
    c: Config,
    precision: Precision,
    tuning: Tuning,
    parts: tuple[int, int],
    prompt: int,
    generate: int,
    attention: str,
    route: tuple[int, float],
) -> Trace:
    """Prefill and decode of a decoder; `workloads.transformer` says what the arguments mean and checks most of them.

    parts: samples, and in how many parts they run. route: seed and skew of the loads of experts.
    Raises WorkloadError for a model that generates nothing, more tokens than it has positions or its window covers,
    or attention of single kernels.
    """
    _check(c, precision, attention, prompt, generate)
    batch, count = parts
    c = replace(c, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
    builder = TraceBuilder()
    tape = Tape(builder, precision)
    weights = make_parameters(tape, c, tuning)
    samples = batch // count
    if not c.experts:  # these divide their tokens differently
        tape.samples = samples
    tokens: list[Value] = []
    for part in range(count):
        cache = Cache()
        for step in range(generate):
            tape.prefix = (f"mb{part}." if count > 1 else "") + (f"token{step}." if step else "prefill.")
            core = Core(
                implementation=attention,
                batch=samples,
                sequence=1 if step else prompt,
                heads=c.heads,
                kv_heads=c.kv_heads,
                head=c.head,
                dropout=0.0,
                softmax_fp32=False,
                mask=None,
                cache=cache,
                causal=True,
            )
            seed = route[0] + part * generate + step
            loads = routing(c, samples * core.sequence, seed=seed, skew=route[1]) if c.experts else {}
            ids = tokens[-1] if step else tape.constant("ids", (samples, prompt), "int64", "input")
            tokens.append(_next(tape, Model(c, weights, core, loads, tuning), ids))
            tape.leave_autocast()
    builder.meta.update(
        model=c.name,
        family=c.family,
        batch=batch,
        sequence=prompt,
        generate=generate,
        tokens=batch * generate,
        samples=batch,
        micro_batches=count,
        precision=precision.name,
        attention=attention,
        layers=c.layers,
        parameters=sum(value.elements for value, _ in tape.parameters),
        model_flops=tape.product_flops,
        source=c.source,
    )
    return builder.build(outputs=[*(value.tensor for value, _ in tape.parameters), *(ids.tensor for ids in tokens)])


def _check(c: Config, precision: Precision, attention: str, prompt: int, generate: int) -> None:
    """Raise WorkloadError for what `inference` refuses."""
    if not c.of_family.causal:
        raise WorkloadError(f"generate: {c.name!r} is an encoder, which generates no tokens")
    if attention == "eager":
        raise WorkloadError("attention 'eager': with generate attention is one kernel: 'sdpa', or 'flash' in 16 bits")
    if attention == REPEATING:
        raise WorkloadError(
            f"attention {attention!r}: with generate the kernel reads the cache as it is; nearest: 'flash'"
        )
    if attention == "flash" and precision.compute == "fp32":
        raise WorkloadError("attention 'flash' computes in 16 bits: choose another precision, or attention 'sdpa'")
    longest = prompt + generate - 1
    if c.learned and longest > c.positions:
        raise WorkloadError(
            f"generate: {prompt} tokens of prompt and {generate} generated exceed the {c.positions} positions of "
            f"{c.name!r}"
        )
    if c.window and longest > c.window:
        raise WorkloadError(f"generate: {longest} tokens exceed the sliding window of {c.window} of {c.name!r}")


def _next(tape: Tape, model: Model, ids: Value) -> Value:
    """One pass over new tokens, and the token of each sample that follows the last of them."""
    x = decoder_body(tape, model, ids)
    if model.core.sequence > 1:
        (x,) = split(tape, "last", x, {"token": (x.shape[0], 1, x.shape[2])})
    logits = linear(tape, "head", x, head_weight(model))
    chosen = tape.constant("next", (x.shape[0], 1), "int64")
    tape.op("choose", "reduce", [logits], [chosen], flops=logits.elements)
    return chosen
