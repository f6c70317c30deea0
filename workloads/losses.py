"""The head and the loss, where a step with a large vocabulary has its peak.

`torch`: PyTorch's cross_entropy as Hugging Face calls it. Causal models copy 16-bit logits to fp32 first; log-softmax
produces a second fp32 tensor of that size (saved for backward), and backward two more, one after the other. The caller
holds the logits until the forward pass returns.
`fused`: one kernel that reads logits of any type, saves them and one fp32 number per token, and overwrites them with
their gradient (like the kernels of Megatron-LM and Apex).
`vocab_parallel`: Megatron-LM's vocab_parallel_cross_entropy, what it runs unless its fused kernel is asked for: an fp32
copy of 16-bit logits becomes their softmax in place, which is saved and then becomes their gradient in place, to be
copied back to 16 bits. The caller holds the logits until the forward pass returns.
`chunked`: head and loss together, for a slice of `CHUNK` tokens at a time. The gradients of the head's input and weight
are computed in the forward pass, if they are needed, and only scaled in backward, so no logits are saved (like Liger's
fused linear cross-entropy).
"""

from __future__ import annotations

from sim.trace.tensor import TOKENS
from workloads.costs import element_flops, matmul_flops
from workloads.precision import BYTES
from workloads.primitives import Gradients, elementwise, linear
from workloads.sizes import named
from workloads.tape import Tape, Value

LOSSES = ("torch", "fused", "vocab_parallel", "chunked")
CHUNK = 1024
SOFTMAX_ACCESSES = 8  # the maximum: 1; in place: minus it 2, exp 2, over the sum 2; the sum: 1


def head_loss(
    tape: Tape, kind: str, name: str, x: Value, head: Value, labels: Value, *, bias: Value | None = None, causal: bool
) -> Value:
    """The mean cross-entropy of a linear head over x.

    tape: where its ops are appended.
    kind: one of `LOSSES`.
    name: of the head's ops.
    x: input of the head.
    head, bias: its weight and, where it has one, its bias.
    labels: one per row of x.
    causal: shift the labels by one, and copy 16-bit logits to fp32 even without autocast.
    """
    if kind == "chunked":
        return _chunked(tape, name, x, head, labels, bias)
    tokens = named(labels.elements, TOKENS)
    if kind == "vocab_parallel":  # whose labels come shifted
        logits = linear(tape, name, x, head, bias)
        return _vocab_parallel(tape, "loss", logits.viewed(tokens, logits.shape[-1]), labels)
    targets, *padded = shifted(tape, labels) if causal else (labels,)
    logits = linear(tape, name, x, head, bias)
    rows = logits.viewed(tokens, logits.shape[-1])
    if kind == "fused":
        return _fused(tape, "loss", rows, targets)
    wide = tape.cast(rows, "fp32", "loss.up") if causal else rows
    return cross_entropy(tape, "loss", wide, targets, held=(x, rows, wide, *padded))


def shifted(tape: Tape, labels: Value) -> tuple[Value, ...]:
    """Labels shifted by one token, and the padded copy that they are sliced from.

    The slice is copied, too, except for a single sample, where it is a view of the padded labels.
    """
    batch, sequence = labels.shape
    padded = tape.constant("loss.padded", (batch, sequence + 1), "int64")
    tape.op("loss.pad", "copy", [labels], [padded])
    if batch == 1:
        return (padded, padded)
    targets = tape.constant("loss.targets", labels.shape, "int64")
    tape.op("loss.shift", "copy", [padded], [targets])
    return (targets, padded)


def cross_entropy(tape: Tape, name: str, x: Value, targets: Value, *, held: tuple[Value, ...] = ()) -> Value:
    """log_softmax and nll_loss.

    PyTorch's cross_entropy requests log_softmax in the type of x even under autocast, which then casts the input of
    nll_loss.

    tape: where its ops are appended.
    name: of the ops.
    x: logits.
    targets: index of the right column per row.
    held: tensors that the caller of the model still refers to when the loss is computed.
    """
    logs = tape.result(f"{name}.log_softmax.out", x.shape, x.dtype)
    flops = element_flops("log_softmax", x.elements)
    tape.op(f"{name}.log_softmax", "loss", [x], [logs], flops=flops)
    tape.save(logs, "result of log-softmax")
    tape.save(targets, "which logarithm of each row is the loss")

    def logs_rule(g: Value) -> Gradients:
        flops = element_flops("log_softmax_backward", x.elements)
        tape.op(f"{name}.log_softmax.bwd", "loss", [g, logs], [gradient := tape.gradient(x)], flops=flops)
        return [gradient]

    tape.record([x], [logs], logs_rule)
    read = tape.to_full(logs, f"{name}.log_softmax.up")
    out = tape.result(f"{name}.out", (1,), read.dtype)
    count = tape.constant(f"{name}.total_weight", (1,), read.dtype)
    tape.save(count, "by what the mean divides")
    # the backward kernel takes its input without reading it: recorded only where a copy is saved for it alone
    kept = [read] if read is not logs else []
    for value in kept:
        tape.save(value, "input of the loss")
    # it touches one logarithm per row; its other reads are only held
    rows = targets.elements
    touched = rows * (8 + BYTES[read.dtype])
    tape.op(name, "loss", [read, targets, *held], [out, count], flops=rows, bytes=touched)

    def rule(g: Value) -> Gradients:
        gradient = tape.gradient(read)
        touched = rows * 8 + tape.builder.bytes_of(gradient.tensor) if kept else None
        tape.op(f"{name}.bwd.scatter", "copy", [g, targets, count, *kept], [gradient], bytes=touched)
        return [gradient]

    tape.record([read], [out], rule)
    return out


def _fused(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    out = tape.result(f"{name}.out", (1,), "fp32")
    lse = tape.constant(f"{name}.logsumexp", labels.shape, "fp32")
    flops = element_flops("cross_entropy", logits.elements)
    tape.op(name, "loss", [logits, labels], [out, lse], flops=flops)
    tape.save(logits, "the softmax is recomputed")
    tape.save(lse, "scale of each row's softmax")
    tape.save(labels, "where the softmax has one taken off")

    def rule(g: Value) -> Gradients:
        gradient = tape.gradient(logits, over=logits)
        flops = element_flops("cross_entropy_backward", logits.elements)
        tape.op(f"{name}.bwd.logits", "loss", [g, logits, labels, lse], [gradient], flops=flops)
        return [gradient]

    tape.record([logits], [out], rule)
    return out


def _vocab_parallel(tape: Tape, name: str, logits: Value, labels: Value) -> Value:
    """Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py."""
    wide, held = logits, []
    if logits.dtype != "fp32":
        wide, held = tape.constant(f"{name}.wide", logits.shape, "fp32"), [logits]
        tape.op(f"{name}.up", "copy", [logits], [wide])
    soft = tape.overwrite(wide, f"{tape.prefix}{name}.softmax.out", "activation")
    touched = SOFTMAX_ACCESSES * wide.elements * BYTES["fp32"]
    flops = element_flops("softmax", wide.elements)
    tape.op(f"{name}.softmax", "loss", [wide], [soft], flops=flops, bytes=touched)
    tape.save(soft, "result of softmax")
    tape.save(labels, "where the softmax has one taken off")
    out = tape.result(f"{name}.out", (1,), "fp32")
    rows = labels.elements
    touched = rows * (8 + BYTES["fp32"])  # one entry of each row; 16-bit logits are only held
    tape.op(name, "loss", [soft, labels, *held], [out], flops=rows, bytes=touched)

    def rule(g: Value) -> Gradients:
        slope = tape.gradient(logits, over=soft)
        tape.op(f"{name}.bwd.logits", "loss", [g, soft, labels], [slope], flops=slope.elements)
        return [tape.gradient_cast(slope, logits, f"{name}.bwd.down")]

    tape.record([logits], [out], rule)
    return out


def _chunked(tape: Tape, name: str, x: Value, head: Value, labels: Value, bias: Value | None) -> Value:
    w, a = tape.to_compute(head, f"{name}.weight.cast"), tape.to_compute(x, f"{name}.input.cast")
    tokens, inner, columns = labels.elements, a.shape[-1], head.elements // a.shape[-1]
    # gradients are computed here, as results of the forward pass that backward scales
    operands = [("dx", a), ("dw", w), *([("db", bias)] if bias else [])]
    wanted = [(what, v) for what, v in operands if tape.needs_gradient(v)]
    products = sum(what != "db" for what, _ in wanted)
    kept = [tape.constant(f"{name}.{what}", v.shape, v.dtype) for what, v in wanted]
    initial = kept
    for value, (what, of) in zip(kept, wanted, strict=True):
        tape.is_gradient_of(value, of)
        if what == "dx":
            tape.per_sample(value)
    tape.op(f"{name}.zero", "elementwise", [], kept)
    for start in range(0, tokens, CHUNK):
        rows = named(min(CHUNK, tokens - start), TOKENS)
        logits = tape.constant(f"{name}.logits", (rows, columns), a.dtype)
        flops = matmul_flops(rows, inner, columns)
        tape.op(f"{name}.chunk", "matmul", [a, w], [logits], flops=flops, chunk=True)
        slope = tape.overwrite(logits, f"{tape.prefix}{name}.dlogits", "activation")
        tape.op(
            f"{name}.chunk.loss",
            "loss",
            [logits, labels],
            [slope],
            flops=element_flops("cross_entropy", slope.elements),
            chunk=True,
        )
        sums = [tape.overwrite(v, f"{first.name}.sum", "activation") for v, first in zip(kept, initial, strict=True)]
        for value, (_, of) in zip(sums, wanted, strict=True):
            tape.is_gradient_of(value, of)
        tape.op(f"{name}.chunk.bwd", "matmul", [slope, w, a, *kept], sums, flops=products * flops, chunk=True)
        kept = sums
    out = tape.result("loss.out", (1,), "fp32")
    tape.op("loss", "loss", [labels], [out], flops=tokens)
    for value in kept:
        tape.save(value, "gradient computed in the forward pass")

    def rule(g: Value) -> Gradients:
        gradients: dict[str, Value] = {}
        for value, (what, target) in zip(kept, wanted, strict=True):
            gradient = tape.gradient(target, over=value)
            gradients[what] = elementwise(tape, f"{name}.bwd.scale", "mul", [value, g], gradient)
        return [gradients.get(what) for what, _ in operands]

    tape.record([v for _, v in operands], [out], rule)
    return out
