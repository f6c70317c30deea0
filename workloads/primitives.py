"""Elementary differentiable ops: the forward kernels, the tensors that autograd saves, the backward kernels.

Kernels and their order follow PyTorch's CUDA path (`derivatives.yaml`, `FunctionsManual.cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.errors import WorkloadError
from sim.trace.op import FUNCTIONS
from workloads.costs import element_flops, embedding_bytes, matmul_flops
from workloads.precision import BYTES, QUANTISED, promoted
from workloads.tape import Tape, Value

Gradients = Sequence[Value | None]


def elementwise(tape: Tape, name: str, kernel: str, reads: Sequence[Value], out: Value, *, function: str = "") -> Value:
    """Append an elementwise kernel with the result `out`. Returns it."""
    kind = "copy" if kernel == "copy" else "elementwise"
    tape.op(name, kind, reads, [out], flops=element_flops(kernel, out.elements), function=function)
    return out


def add(tape: Tape, name: str, a: Value, b: Value) -> Value:
    """a + b, of one shape. Saves nothing; the gradient passes through, cast where types were promoted."""
    out = elementwise(tape, name, "add", [a, b], tape.result(f"{name}.out", a.shape, promoted(a.dtype, b.dtype)))

    def rule(g: Value) -> Gradients:
        return [tape.gradient_cast(g, v, f"{name}.bwd") if tape.needs_gradient(v) else None for v in (a, b)]

    tape.record([a, b], [out], rule)
    return out


def shift(tape: Tape, name: str, x: Value) -> Value:
    """x plus a number, or a mask without a gradient. Saves nothing; the gradient passes through."""
    out = elementwise(tape, name, "add", [x], tape.result(f"{name}.out", x.shape, x.dtype))
    tape.record([x], [out], lambda g: [g])
    return out


def scale(tape: Tape, name: str, x: Value) -> Value:
    """x times a number. Saves nothing."""
    out = elementwise(tape, name, "mul", [x], tape.result(f"{name}.out", x.shape, x.dtype))
    tape.record([x], [out], lambda g: [elementwise(tape, f"{name}.bwd", "mul", [g], tape.gradient(x))])
    return out


def multiply(tape: Tape, name: str, a: Value, b: Value) -> Value:
    """a * b, of one shape or with b broadcast. Saves each factor that the other's gradient needs."""
    out = elementwise(tape, name, "mul", [a, b], tape.result(f"{name}.out", a.shape, promoted(a.dtype, b.dtype)))
    tape.save(a, "factor of a product", b)
    tape.save(b, "factor of a product", a)

    def rule(g: Value) -> Gradients:
        return [
            _times(tape, f"{name}.bwd.{side}", g, other, v) if tape.needs_gradient(v) else None
            for side, v, other in (("a", a, b), ("b", b, a))
        ]

    tape.record([a, b], [out], rule)
    return out


def _times(tape: Tape, name: str, g: Value, factor: Value, target: Value) -> Value:
    """The gradient of one factor: a product, a sum over broadcast axes, a cast where types differ."""
    wide = promoted(g.dtype, factor.dtype)
    if target.elements == g.elements and target.dtype == wide:
        return elementwise(tape, name, "mul", [g, factor], tape.gradient(target))
    product = tape.temporary(f"{name}.product", g.shape, wide)
    elementwise(tape, name, "mul", [g, factor], product)
    if target.elements != g.elements:
        total = tape.gradient(target) if target.dtype == wide else tape.temporary(f"{name}.sum.out", target.shape, wide)
        flops = element_flops("sum", g.elements)
        tape.op(f"{name}.sum", "reduce", [product], [total], flops=flops, settles=True)
        product = total
    return tape.gradient_cast(product, target, f"{name}.cast")


def power(tape: Tape, name: str, x: Value) -> Value:
    """x to a constant power, in fp32 under autocast. Saves x; backward computes x^(n-1), n x^(n-1) and the product."""
    x = tape.to_full(x, f"{name}.cast")
    out = elementwise(tape, name, "pow", [x], tape.result(f"{name}.out", x.shape, x.dtype))
    tape.save(x, "base of a power")

    def rule(g: Value) -> Gradients:
        root, slope = (tape.temporary(f"{name}.bwd.{what}.out", x.shape, x.dtype) for what in ("root", "slope"))
        elementwise(tape, f"{name}.bwd.root", "pow", [x], root)
        elementwise(tape, f"{name}.bwd.slope", "mul", [root], slope)
        return [elementwise(tape, f"{name}.bwd", "mul", [g, slope], tape.gradient(x))]

    tape.record([x], [out], rule)
    return out


def tanh(tape: Tape, name: str, x: Value) -> Value:
    """tanh(x). Saves its result."""
    out = elementwise(tape, name, "tanh", [x], tape.result(f"{name}.out", x.shape, x.dtype))
    tape.save(out, "result of tanh")

    def rule(g: Value) -> Gradients:
        return [elementwise(tape, f"{name}.bwd", "tanh_backward", [g, out], tape.gradient(x))]

    tape.record([x], [out], rule)
    return out


def unary(
    tape: Tape, name: str, kernel: str, x: Value, *, inplace: bool = False, inplace_backward: bool = False
) -> Value:
    """A fused activation (gelu, silu, relu). Saves its input; relu saves its result, which the next op reads anyway.

    inplace: overwrite x; possible only for relu, since the backward of the others reads their input.
    inplace_backward: overwrite the incoming gradient where nothing else reads it.
    """
    out = tape.result_over(x, f"{name}.out") if inplace else tape.result(f"{name}.out", x.shape, x.dtype)
    function = kernel if kernel in FUNCTIONS else ""
    elementwise(tape, name, kernel, [x], out, function=function)
    kept = out if kernel == "relu" else x
    tape.save(kept, f"{'result' if kernel == 'relu' else 'input'} of {kernel}")
    backward = "mul" if kernel == "relu" else f"{kernel}_backward"

    def rule(g: Value) -> Gradients:
        over = g if inplace_backward and tape.is_sole(g) else None
        gradient = tape.gradient(x, over=over)
        return [elementwise(tape, f"{name}.bwd", backward, [g, kept], gradient, function=function)]

    tape.record([x], [out], rule)
    return out


def dropout(tape: Tape, name: str, x: Value, probability: float) -> Value:
    """Dropout. Saves a mask of one byte per element (native_dropout). With probability 0 nothing is appended."""
    if not probability:
        return x
    out = tape.result(f"{name}.out", x.shape, x.dtype)
    mask = tape.constant(f"{name}.mask", x.shape, "bool")
    tape.op(name, "elementwise", [x], [out, mask], flops=element_flops("dropout", x.elements), random=True)
    tape.save(mask, "mask of dropout")

    def rule(g: Value) -> Gradients:
        return [elementwise(tape, f"{name}.bwd", "dropout_backward", [g, mask], tape.gradient(x))]

    tape.record([x], [out], rule)
    return out


def copy(tape: Tape, name: str, x: Value, *shape: int, forward: bool = True, backward: bool = True) -> Value:
    """x in another memory layout. forward, backward: whether x, and its gradient, must be copied for that."""
    if forward:
        out = elementwise(tape, name, "copy", [x], tape.result(f"{name}.out", shape, x.dtype))
    else:
        out = tape.slice_of(x, f"{name}.out", *shape)

    def rule(g: Value) -> Gradients:
        return [elementwise(tape, f"{name}.bwd", "copy", [g], tape.gradient(x)) if backward else g]

    tape.record([x], [out], rule)
    return out


def split(tape: Tape, name: str, x: Value, parts: dict[str, tuple[int, ...]]) -> list[Value]:
    """Views of parts of x in one storage; backward concatenates their gradients into a new tensor."""
    views = [tape.slice_of(x, f"{name}.{part}", *shape) for part, shape in parts.items()]

    def rule(*gs: Value | None) -> Gradients:
        return [elementwise(tape, f"{name}.split.bwd", "copy", [g for g in gs if g], tape.gradient(x))]

    tape.record([x], views, rule)
    return views


def linear(tape: Tape, name: str, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x @ weight + bias over the last axis of x; the weight is (inner, columns) or its transpose.

    Saves the operands of the product in the type of the computation: the input for the gradient of the weight, so not
    beside a frozen one; the weight for the gradient of the input. A quantised weight is converted to the type of the
    computation for each product, forward and backward, and no copy is saved; the result has the type of x.

    Raises WorkloadError where their types differ, which PyTorch refuses.
    """
    columns = bias.shape[0] if bias else weight.elements // x.shape[-1]
    quantised = weight.dtype in QUANTISED
    a = tape.to_compute(x, f"{name}.input.cast") if quantised else x
    w = dequantised(tape, name, weight, a.dtype) if quantised else tape.to_compute(weight, f"{name}.weight.cast")
    a = tape.to_compute(a, f"{name}.input.cast")
    b = tape.to_compute(bias, f"{name}.bias.cast") if bias else None
    if a.dtype != w.dtype:
        raise WorkloadError(
            f"{name} would multiply {a.dtype} by {w.dtype}, which PyTorch refuses: choose a precision with autocast, "
            f"or another frozen_dtype"
        )
    inner, rows = x.shape[-1], x.elements // x.shape[-1]
    out = tape.result(f"{name}.out", (*x.shape[:-1], columns), a.dtype)
    flops = matmul_flops(rows, inner, columns)
    tape.op(name, "matmul", [a, w, *([b] if b else [])], [out], flops=flops)
    tape.save(a, "operand of a matrix product: the weight's gradient", w)
    if not quantised:
        tape.save(w, "copy of the weight that was multiplied", a)

    def rule(g: Value) -> Gradients:
        gradients: dict[str, Value] = {}
        # addmm differentiates its input first, mm its weight
        for operand in ("input", "weight") if b else ("weight", "input"):
            if operand == "input" and tape.needs_gradient(a):
                factor = dequantised(tape, f"{name}.bwd", weight, a.dtype) if quantised else w
                gradients[operand] = tape.gradient(a)
                tape.op(f"{name}.bwd", "matmul", [g, factor], [gradients[operand]], flops=flops)
            elif operand == "weight" and tape.needs_gradient(w):
                gradients[operand] = tape.gradient(w)
                tape.op(f"{name}.bwd.weight", "matmul", [a, g], [gradients[operand]], flops=flops)
        if b and tape.needs_gradient(b):
            gradients["bias"] = tape.gradient(b)
            tape.op(f"{name}.bwd.bias", "reduce", [g], [gradients["bias"]], flops=element_flops("sum", g.elements))
        return [gradients.get(operand) for operand in ("input", "weight", *(("bias",) if b else ()))]

    tape.record([a, w, *([b] if b else [])], [out], rule)
    return tape.cast(out, x.dtype, f"{name}.down") if quantised else out


def dequantised(tape: Tape, name: str, weight: Value, dtype: str) -> Value:
    """A quantised weight in another type, for one product."""
    make = tape.constant if tape.phase == "forward" else tape.temporary
    out = make(f"{name}.dequantise.out", weight.shape, dtype)
    return elementwise(tape, f"{name}.dequantise", "mul", [weight], out)


def batched_matmul(tape: Tape, name: str, a: Value, b: Value, shape: tuple[int, ...], inner: int) -> Value:
    """A batch of products with a result of `shape`. Saves both operands; computes the gradient of b first."""
    out = tape.result(f"{name}.out", shape, a.dtype)
    flops = matmul_flops(out.elements // shape[-1], inner, shape[-1])
    tape.op(name, "matmul", [a, b], [out], flops=flops)
    tape.save(a, "left operand of a product", b)
    tape.save(b, "right operand of a product", a)

    def rule(g: Value) -> Gradients:
        left = right = None
        if tape.needs_gradient(b):
            tape.op(f"{name}.bwd.right", "matmul", [a, g], [right := tape.gradient(b)], flops=flops)
        if tape.needs_gradient(a):
            tape.op(f"{name}.bwd.left", "matmul", [g, b], [left := tape.gradient(a)], flops=flops)
        return [left, right]

    tape.record([a, b], [out], rule)
    return out


def softmax(tape: Tape, name: str, x: Value) -> Value:
    """Softmax over the last axis, in fp32 under autocast. Saves its result."""
    x = tape.to_full(x, f"{name}.cast")
    out = tape.result(f"{name}.out", x.shape, x.dtype)
    tape.op(name, "softmax", [x], [out], flops=element_flops("softmax", x.elements))
    tape.save(out, "result of softmax")

    def rule(g: Value) -> Gradients:
        gradient, flops = tape.gradient(x), element_flops("softmax_backward", x.elements)
        tape.op(f"{name}.bwd", "softmax", [g, out], [gradient], flops=flops)
        return [gradient]

    tape.record([x], [out], rule)
    return out


def embedding(tape: Tape, name: str, ids: Value, table: Value) -> Value:
    """Rows of a table. Saves the ids; the gradient of the table is dense."""
    width = table.shape[1]
    out = tape.result(f"{name}.out", (*ids.shape, width), table.dtype)
    moved = embedding_bytes(ids.elements, width * BYTES[table.dtype])
    tape.op(name, "embedding", [ids, table], [out], bytes=moved + ids.elements * 8)
    tape.save(ids, "rows whose gradients are scattered")

    def rule(g: Value) -> Gradients:
        gradient = tape.gradient(table)
        tape.op(f"{name}.bwd", "embedding", [g, ids], [gradient], flops=element_flops("sum", g.elements))
        return [gradient]

    tape.record([table], [out], rule)
    return out


def gather(tape: Tape, name: str, x: Value, shape: tuple[int, ...], *indices: Value) -> Value:
    """Rows (with two indices: elements) of x, repeats allowed. Saves the indices; backward adds into zeros."""
    out = tape.result(f"{name}.out", shape, x.dtype)
    moved = 2 * out.elements * BYTES[x.dtype] + 8 * sum(index.elements for index in indices)
    tape.op(name, "embedding", [x, *indices], [out], bytes=moved)
    for index in indices:
        tape.save(index, "rows whose gradients are scattered")

    def rule(g: Value) -> Gradients:
        gradient = tape.gradient(x)
        tape.op(f"{name}.bwd", "embedding", [g, *indices], [gradient], flops=element_flops("sum", g.elements))
        return [gradient]

    tape.record([x], [out], rule)
    return out
