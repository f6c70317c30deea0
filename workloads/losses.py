"""The head and the loss, where a step with a large vocabulary has its peak.

`torch`: PyTorch's cross_entropy as Hugging Face calls it. Causal models copy 16-bit logits to fp32 first;
log-softmax makes a second fp32 tensor of that size (kept for backward), and backward two more, one after
the other. The caller holds the logits until the forward pass returns.
`fused`: one kernel that reads logits of any type, keeps them and one fp32 number a token, and writes the
gradient over them (as Megatron-LM's and Apex's kernels do).
`chunked`: head and loss together, over a slice of the tokens at a time; the gradients of the head's input
and weight are made in the forward pass and only scaled in backward, so no logits are kept (as Liger's
fused linear cross-entropy does). Slices are of `CHUNK` tokens.
"""

from __future__ import annotations

from workloads.costs import element_flops, matmul_flops
from workloads.precision import BYTES
from workloads.primitives import Gradients, elementwise, linear
from workloads.tape import Tape, Value

LOSSES = ("torch", "fused", "chunked")
CHUNK = 1024


def head_loss(
    tape: Tape, kind: str, name: str, x: Value, head: Value, labels: Value, *, bias: Value | None = None, causal: bool
) -> Value:
    """The mean cross-entropy of a linear head over x against labels, one a row.

    causal: whether labels are shifted by one and 16-bit logits copied to fp32 without autocast, too.
    """
    if kind == "chunked":
        return _chunked(tape, name, x, head, labels, bias)
    targets, *padded = shifted(tape, labels) if causal else (labels,)
    logits = linear(tape, name, x, head, bias)
    rows = logits.viewed(labels.elements, logits.shape[-1])
    if kind == "fused":
        return _fused(tape, "loss", rows, targets)
    wide = tape.cast(rows, "fp32", "loss.up") if causal else rows
    return cross_entropy(tape, "loss", wide, targets, held=(x, rows, wide, *padded))


def shifted(tape: Tape, labels: Value) -> tuple[Value, ...]:
    """Labels moved by one token, and the padded copy that they are cut from.

    The cut is a copy, too, unless there is one sample only, where it is a view of the padded labels.
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
    """log_softmax and nll_loss. held: what the caller of the model still refers to when the loss is made.

    PyTorch's cross_entropy asks for log_softmax in the type of x, also under autocast, which then casts what
    nll_loss reads.
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
    # the backward kernel is given its input and does not look at it: noted only where a copy is kept for it alone
    kept = [read] if read is not logs else []
    for value in kept:
        tape.save(value, "input of the loss")
    # it touches one logarithm a row; the rest of what it reads is only held
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
    tape.save(logits, "the softmax is computed again")
    tape.save(lse, "scale of each row's softmax")
    tape.save(labels, "where the softmax has one taken off")

    def rule(g: Value) -> Gradients:
        gradient = tape.gradient(logits, over=logits)
        flops = element_flops("cross_entropy_backward", logits.elements)
        tape.op(f"{name}.bwd.logits", "loss", [g, logits, labels, lse], [gradient], flops=flops)
        return [gradient]

    tape.record([logits], [out], rule)
    return out


def _chunked(tape: Tape, name: str, x: Value, head: Value, labels: Value, bias: Value | None) -> Value:
    w, a = tape.to_compute(head, f"{name}.weight.cast"), tape.to_compute(x, f"{name}.input.cast")
    tokens, inner, columns = labels.elements, a.shape[-1], head.elements // a.shape[-1]
    # gradients are made here, as results of the forward pass that backward scales
    kept = [tape.constant(f"{name}.{what}", v.shape, v.dtype) for what, v in (("dx", a), ("dw", w))]
    kept += [tape.constant(f"{name}.db", bias.shape, bias.dtype)] if bias else []
    zeros = kept
    tape.op(f"{name}.zero", "elementwise", [], kept)
    for start in range(0, tokens, CHUNK):
        rows = min(CHUNK, tokens - start)
        logits = tape.constant(f"{name}.logits", (rows, columns), a.dtype)
        flops = matmul_flops(rows, inner, columns)
        tape.op(f"{name}.chunk", "matmul", [a, w], [logits], flops=flops)
        slope = tape.overwrite(logits, f"{tape.prefix}{name}.dlogits", "activation")
        tape.op(
            f"{name}.chunk.loss",
            "loss",
            [logits, labels],
            [slope],
            flops=element_flops("cross_entropy", slope.elements),
        )
        made = [tape.overwrite(v, f"{first.name}.sum", "activation") for v, first in zip(kept, zeros, strict=True)]
        tape.op(f"{name}.chunk.bwd", "matmul", [slope, w, a, *kept], made, flops=2 * flops)
        tape.product_flops -= 2 * flops  # they belong to the backward pass
        kept = made
    out = tape.result("loss.out", (1,), "fp32")
    tape.op("loss", "loss", [labels], [out], flops=tokens)
    for value in kept:
        tape.save(value, "gradient made in the forward pass")

    def rule(g: Value) -> Gradients:
        made = []
        for value, target in zip(kept, (a, w, bias) if bias else (a, w), strict=True):
            made.append(elementwise(tape, f"{name}.bwd.scale", "mul", [value, g], tape.gradient(target, over=value)))
        return made

    tape.record([a, w, *([bias] if bias else [])], [out], rule)
    return out
