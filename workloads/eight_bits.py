"""Linear layers that multiply in 8 bits, as Transformer Engine trains in FP8 and as inference in FP8 or INT8 runs.

Training (Transformer Engine's `Linear` and `LayerNormLinear` with delayed scaling, on Hopper; NVIDIA, "FP8 primer";
Micikevicius et al. 2022, arXiv:2209.05433). One kernel quantises an operand, and transposes it where a later product
needs that: 8-bit products of that generation contract the last axis of both operands alone. With x (rows, inner), w
(inner, columns), g the gradient of the result:

    forward   y  = q(x) q(w)        saves q(x)^T: 1 byte per element where 16-bit training saves 2
    backward  dx = q(g) q(w)^T      dw = q(x)^T q(g)

Results are in 16 bits. What several layers read (queries, keys and values; gate and up) is quantised once, as where
these are one layer. A weight is quantised once per iteration, with its transpose: 2 bytes per element beside it, which
stay (Transformer Engine's weight workspaces); recomputation and later microbatches find them there.

Inference: weights lie in memory in 8 bits; the input is quantised before each product.

Departs: an iteration begins without the 8-bit copies of weights, which are there after its first forward pass; scales
and histories of maxima (some numbers per tensor, or per column of a stored weight) take neither memory nor time; a
quantising kernel joins a fused one only where the stack fuses (`workloads.stacks`). Where sequence parallelism divides
tokens, gradients are gathered with their transposes, of which one would do; so are rows that go to experts on other
replicas, in 8 bits. Under ZeRO 3 each replica keeps its part of the copies, as of the weights (`sim.rewrites.zero`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.errors import WorkloadError
from workloads.costs import element_flops
from workloads.precision import QUANTISED
from workloads.tape import Tape, Value


def multiplies_in_8_bits(tape: Tape) -> bool:
    """Whether linear layers multiply in 8 bits here: inside the layers of the model, so not in its head."""
    return bool(tape.precision.linear) and tape.layer >= 0


def eight_bit_linear(
    tape: Tape,
    name: str,
    x: Value,
    weight: Value,
    shape: tuple[int, ...],
    flops: int,
    bias: Value | None = None,
    others: Sequence[Value] = (),
) -> Value:
    """x times a weight, in 8 bits, plus a bias; the result has `shape` and the type of x.

    flops: of the product, forward, and of each of the two in backward.
    others: what all three products read besides, as where groups of rows end; saved for backward.

    Raises WorkloadError for a weight in blocks with scales of their own (nf4).
    """
    if weight.dtype in QUANTISED:
        raise WorkloadError(f"{name}: precision {tape.precision.name!r} multiplies no weights stored as {weight.dtype}")
    stored = weight.dtype == tape.precision.linear
    row, turned = _quantised(tape, f"{name}.input", x, turned=tape.needs_gradient(weight))
    w, w_turned = (weight, None) if stored else _quantised(tape, name, weight, turned=tape.needs_gradient(x))
    out = tape.result(f"{name}.out", shape, x.dtype)
    biases = [bias] if bias else []
    tape.op(name, "matmul", [row, w, *biases, *others], [out], flops=flops)
    if turned:
        tape.save(turned, "operand of a matrix product, transposed: the weight's gradient", weight)
    if w_turned:
        tape.save(w_turned, "copy of the weight, transposed: the input's gradient", x)
    for other in others:
        tape.save(other, "where the groups of rows end")

    def rule(g: Value) -> list[Value | None]:
        of_input = of_weight = None
        g_row, g_turned = _quantised(tape, f"{name}.bwd.gradient", g, turned=turned is not None)
        if w_turned:
            of_input = tape.gradient(x)
            tape.op(f"{name}.bwd", "matmul", [g_row, w_turned, *others], [of_input], flops=flops)
        if turned and g_turned:
            of_weight = tape.gradient(weight)
            tape.op(f"{name}.bwd.weight", "matmul", [turned, g_turned, *others], [of_weight], flops=flops)
        if not bias or not tape.needs_gradient(bias):
            return [of_input, of_weight, *(None for _ in biases)]
        of_bias = tape.gradient(bias)
        tape.op(f"{name}.bwd.bias", "reduce", [g], [of_bias], flops=element_flops("sum", g.elements))
        return [of_input, of_weight, of_bias]

    tape.record([x, weight, *biases], [out], rule)
    return out


def _quantised(tape: Tape, name: str, value: Value, *, turned: bool) -> tuple[Value, Value | None]:
    """A copy in 8 bits, and its transpose where that is needed; what was quantised already is not quantised again.

    The transpose has the shape of the value: which axis comes first is not told apart here.
    """
    key = (value.tensor, value.name)  # views of parts share a storage
    known = tape.eight_bit.get(key)
    if known and (known[1] or not turned):
        return known
    base = (value.name if value.parameter else tape.prefix + name) + f".{tape.precision.linear}"
    role = "weight" if value.parameter else "activation" if tape.phase == "forward" else "temporary"
    names = (base, f"{base}.t") if turned else (base,)
    copies = [tape.unprefixed(each, value.shape, tape.precision.linear, role) for each in names]
    tape.op(f"{name}.quantise", "elementwise", [value], copies, flops=element_flops("mul", value.elements))
    tape.eight_bit[key] = (copies[0], copies[1] if turned else None)
    return tape.eight_bit[key]
