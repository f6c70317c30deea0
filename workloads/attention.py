"""The attention core: from queries, keys and values to the result that is projected.

`eager` composes it of single kernels, whose names contain `.attn.core.`. `sdpa` selects the kernel that PyTorch's
scaled_dot_product_attention selects on CUDA: flash attention in 16 bits, memory-efficient attention in fp32, and the
composed "math" form in fp32 where several query heads share a key head (grouped-query attention), which the
memory-efficient kernel does not support. `flash` requires flash attention. `flash_repeat` copies keys and values for
each query head that shares them before that kernel, which then saves the copies: `repeat_kv` of torchtitan
(torchtitan/models/llama/model.py, 2024) and of the Transformers library, and torchtune's `MultiHeadAttention`; the
kernel itself needs none.

Fused kernels save queries, keys, values, their result and one fp32 number per query (the logarithm of the sum of
exponentials), and replay dropout from the random state. The fp32 accumulators that the flash backward kernel allocates
internally are not modelled. Under a causal mask they skip the blocks of scores that are masked, forward and backward:
`flops` of their ops are what they execute, `counted` what PyTorch's counter counts. Single kernels compute all scores.

In inference each layer appends its keys and values to a cache, and one fused kernel attends to all that is in it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sim.errors import WorkloadError
from sim.trace.tensor import TOKENS
from workloads.costs import TILES, attention_backward_flops, attention_flops, element_flops, executed
from workloads.precision import BYTES, promoted
from workloads.primitives import (
    Gradients,
    batched_matmul,
    copy,
    dropout,
    elementwise,
    scale,
    softmax,
)
from workloads.sizes import named
from workloads.tape import Tape, Value

REPEATING = "flash_repeat"
FLASH = ("flash", REPEATING)
"""The implementations that require flash attention."""


@dataclass(frozen=True)
class Cache:
    """The keys and values of the tokens so far, per layer in one tensor per pass: (batch, 2, kv_heads, tokens, head).

    It grows by a tensor per pass, as a cache in blocks does: what is in it is never copied.
    """

    parts: dict[int, list[Value]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Core:
    """The shape of an attention core and how it is computed.

    implementation: eager, sdpa, flash or flash_repeat.
    batch: samples.
    sequence: tokens per sample.
    heads, kv_heads: heads of queries, and of keys and values.
    head: width of a head.
    dropout: probability.
    softmax_fp32: softmax in fp32 whatever the type (Llama).
    mask: the additive mask of the eager form, (batch, 1, sequence, sequence), or None.
    cache: in inference, of the tokens before these.
    causal: whether a token attends to itself and those before it alone.
    window: and of those to the last so many, 0 for all.
    by_head: whether queries lie by head, (batch, heads, tokens, head), since parts of heads have been joined.
    """

    implementation: str
    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head: int
    dropout: float
    softmax_fp32: bool
    mask: Value | None
    cache: Cache | None = None
    causal: bool = False
    window: int = 0
    by_head: bool = False

    @property
    def query_shape(self) -> tuple[int, ...]:
        """(batch, heads, sequence, head)."""
        return (self.batch, self.heads, self.sequence, self.head)

    @property
    def key_shape(self) -> tuple[int, ...]:
        """(batch, kv_heads, sequence, head)."""
        return (self.batch, self.kv_heads, self.sequence, self.head)


def attention_core(tape: Tape, name: str, core: Core, q: Value, k: Value, v: Value) -> Value:
    """The result of attention over the projected (and rotated) q, k and v: (batch, sequence, heads * head)."""
    q, k, v = q.viewed(*core.query_shape), k.viewed(*core.key_shape), v.viewed(*core.key_shape)
    projected = k, v
    q, k, v = (tape.to_compute(x, f"{name}.{part}.cast") for x, part in ((q, "q"), (k, "k"), (v, "v")))
    if core.cache is not None:
        return _cached(tape, f"{name}.core", core, core.cache, q, k, v)
    if core.implementation == "eager":
        # one head of one sample is a view for all heads of queries, unless it is cast, which then writes them all
        one = core.kv_heads == 1 and core.batch == 1  # the batch of several heads is not a condition
        views = tuple(one and x is old for x, old in zip((k, v), projected, strict=True))
        return _composed(tape, f"{name}.core", core, q, k, v, math=False, views=views)
    if q.dtype != "fp32":
        if core.implementation == REPEATING and core.kv_heads != core.heads:
            one = core.kv_heads == 1  # a view for all heads of queries, which this kernel reads as it is
            k, v = (_repeat(tape, f"{name}.core.{part}.repeat", core, x, one) for x, part in ((k, "k"), (v, "v")))
        return _fused(tape, f"{name}.core", core, q, k, v, kernel="flash")
    if core.implementation in FLASH:
        raise WorkloadError(
            f"attention {core.implementation!r} computes in 16 bits: choose another precision, or attention 'sdpa'"
        )
    if core.kv_heads != core.heads:
        return _composed(tape, f"{name}.core", core, q, k, v, math=True)
    return _fused(tape, f"{name}.core", core, q, k, v, kernel="efficient")


def _fused(tape: Tape, name: str, core: Core, q: Value, k: Value, v: Value, *, kernel: str) -> Value:
    # of the other kernel padded to whole tiles
    rows = core.sequence if kernel == "flash" else named(-(-core.sequence // 32) * 32, TOKENS)
    out = tape.result(f"{name}.out", core.query_shape, q.dtype)
    lse = tape.constant(f"{name}.logsumexp", (core.batch, core.heads, rows), "fp32")
    # flash attention saves a seed of two words, the other kernel one word; both save an offset
    seed = tape.constant(f"{name}.seed", (2 if kernel == "flash" else 1,), "int64")
    offset = tape.constant(f"{name}.offset", (1,), "int64")
    size = (core.batch * core.heads, core.sequence, core.head)
    tile = TILES[kernel]

    def run(name: str, reads: list[Value], writes: list[Value], counted: int, *, random: bool = False) -> None:
        tokens = core.sequence
        flops = executed(counted, tokens, tokens, causal=core.causal, window=core.window, tile=tile)
        tape.op(name, "attention", reads, writes, flops=flops, random=random, counted=counted)

    run(name, [q, k, v], [out, lse, seed, offset], attention_flops(*size), random=core.dropout > 0)
    for value, reason in (
        (q, "queries"),
        (k, "keys"),
        (v, "values"),
        (out, "result of attention"),
        (lse, "scale of each row of probabilities, which are recomputed"),
        (seed, "random state of dropout"),
        (offset, "random state of dropout"),
    ):
        tape.save(value, reason)

    def rule(g: Value) -> Gradients:
        gradients = [tape.gradient(x) for x in (q, k, v)]
        flops = attention_backward_flops(*size)
        # one kernel computes all three, whichever are needed
        run(f"{name}.bwd", [g, q, k, v, out, lse, seed, offset], gradients, flops)
        tape.product_flops -= flops - 2 * attention_flops(*size)  # the scores that it recomputes
        return gradients

    tape.record([q, k, v], [out], rule)
    merged = core.batch, core.sequence, core.heads * core.head
    if core.by_head and kernel == "flash":  # whose result lies as the queries do
        return copy(tape, f"{name}.merge", out, *merged, backward=False)
    return out.viewed(*merged)


def _cached(tape: Tape, name: str, core: Core, cache: Cache, q: Value, k: Value, v: Value) -> Value:
    """Attention of new tokens to these and all before them; nothing is saved, since inference has no backward."""
    new = tape.constant(f"{name}.cache", (core.batch, 2, *core.key_shape[1:]), k.dtype)
    size = BYTES[k.dtype]
    tape.op(f"{name}.append", "copy", [k, v], [new], bytes=2 * new.elements * size)
    parts = cache.parts[tape.layer]
    parts.append(new)
    out = tape.result(f"{name}.out", core.query_shape, q.dtype)
    keys = sum(part.shape[3] for part in parts)
    counted = attention_flops(core.batch * core.heads, core.sequence, core.head, keys)
    # one token attends to all before it; those of a prompt, the first pass, to one another
    masked = core.causal and core.sequence == keys
    flops = executed(counted, core.sequence, keys, causal=masked)
    touched = (q.elements + out.elements + sum(part.elements for part in parts)) * size
    tape.op(name, "attention", [q, *parts], [out], flops=flops, bytes=touched, counted=counted)
    return out.viewed(core.batch, core.sequence, core.heads * core.head)


def _composed(
    tape: Tape,
    name: str,
    core: Core,
    q: Value,
    k: Value,
    v: Value,
    *,
    math: bool,
    views: tuple[bool, ...] = (False, False),
) -> Value:
    """Attention composed of single kernels.

    views: whether keys, and values, that several heads share are repeated by a view of them.
    math: as in sdpa's math form: scale queries and keys instead of scores, and mask in place.
    """
    batch, heads, sequence, head = core.query_shape
    several = batch > 1  # a batched product needs (batch * heads, …) contiguous: for one sample a view suffices
    shared = core.kv_heads != heads
    if shared:
        k, v = (
            _repeat(tape, f"{name}.{part}.repeat", core, x, as_view)
            for x, part, as_view in zip((k, v), "kv", views, strict=True)
        )
    if math:
        q, k = scale(tape, f"{name}.q.scale", q), scale(tape, f"{name}.k.scale", k)
    q = copy(tape, f"{name}.q.copy", q, *core.query_shape, forward=several)
    if not shared:
        k = copy(tape, f"{name}.k.copy", k, batch, heads, head, sequence, forward=several, backward=False)
    scores = batched_matmul(tape, f"{name}.qk", q, k, (batch, heads, sequence, sequence), head)
    if not math:
        scores = scale(tape, f"{name}.scale", scores)
    if core.mask is not None:
        scores = _masked(tape, f"{name}.mask", scores, core.mask)
    if core.softmax_fp32:
        weights = softmax(tape, f"{name}.softmax", tape.cast(scores, "fp32", f"{name}.softmax.up"))
        weights = tape.cast(weights, q.dtype, f"{name}.softmax.down")
    else:
        weights = tape.cast(softmax(tape, f"{name}.softmax", scores), v.dtype, f"{name}.softmax.down")
    weights = dropout(tape, f"{name}.dropout", weights, core.dropout)
    if not shared:
        v = copy(tape, f"{name}.v.copy", v, *core.query_shape, forward=several)
    mixed = batched_matmul(tape, f"{name}.av", weights, v, core.query_shape, sequence)
    return copy(tape, f"{name}.merge", mixed, batch, sequence, heads * head, backward=several)


def _masked(tape: Tape, name: str, scores: Value, mask: Value) -> Value:
    """Scores plus the additive mask, in the wider of their types."""
    dtype = promoted(scores.dtype, mask.dtype)
    out = elementwise(tape, name, "add", [scores, mask], tape.result(f"{name}.out", scores.shape, dtype))
    tape.record([scores], [out], lambda g: [tape.gradient_cast(g, scores, f"{name}.bwd")])
    return out


def _repeat(tape: Tape, name: str, core: Core, x: Value, as_view: bool) -> Value:
    """Keys or values repeated for each query head; backward sums over the heads of a group."""
    if as_view:
        out = tape.slice_of(x, f"{name}.out", *core.query_shape)
    else:
        out = elementwise(tape, name, "copy", [x], tape.result(f"{name}.out", core.query_shape, x.dtype))

    def rule(g: Value) -> Gradients:
        gradient = tape.gradient(x)
        tape.op(f"{name}.bwd", "reduce", [g], [gradient], flops=element_flops("sum", g.elements))
        return [gradient]

    tape.record([x], [out], rule)
    return out


def causal_mask(tape: Tape, batch: int, sequence: int, dtype: str) -> Value:
    """The additive mask of the eager form: a full matrix per sample, in the type of the embedded tokens."""
    mask = tape.constant("mask.out", (batch, 1, sequence, sequence), dtype)
    tape.per_sample(mask)
    tape.op("mask", "elementwise", [], [mask])
    return mask
