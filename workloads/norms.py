"""LayerNorm and RMSNorm."""

from __future__ import annotations

from workloads.costs import element_flops
from workloads.precision import promoted
from workloads.primitives import Gradients, elementwise, multiply, power
from workloads.tape import Tape, Value


def layer_norm(tape: Tape, name: str, x: Value, weight: Value, bias: Value, *, one_plus: bool = False) -> Value:
    """LayerNorm, one kernel per direction, in fp32 under autocast.

    Saves its input, and mean and 1/deviation per row in fp32. With a frozen weight and bias backward computes the
    gradient of the input alone.

    one_plus: it multiplies by 1 + weight, which is saved, and under autocast computes in 16 bits, as in Hugging Face's
        Nemotron (NemotronLayerNorm1P).
    """
    if one_plus:
        x, bias = _to_16_bits(tape, x, f"{name}.cast"), _to_16_bits(tape, bias, f"{name}.bias.cast")
        factor, weight = _plus_one(tape, f"{name}.weight", weight)
    else:
        x = tape.to_full(x, f"{name}.cast")
        factor = weight = tape.to_full(weight, f"{name}.weight.cast")
        bias = tape.to_full(bias, f"{name}.bias.cast")
    rows = (*x.shape[:-1], 1)
    out = tape.result(f"{name}.out", x.shape, x.dtype)
    mean, rstd = (tape.constant(f"{name}.{what}", rows, "fp32") for what in ("mean", "rstd"))
    flops = element_flops("layer_norm", x.elements)
    tape.op(name, "norm", [x, factor, bias], [out, mean, rstd], flops=flops)
    tape.save(x, "input of a norm")
    tape.save(mean, "mean of each row")
    tape.save(rstd, "1 / deviation of each row")
    copies = [v for v in (factor, bias) if not v.parameter]  # of 16-bit weights, in fp32
    for value in copies:
        tape.save(value, "copy of the weight or bias of a norm")

    def rule(g: Value) -> Gradients:
        gradients = [tape.gradient(v) if tape.needs_gradient(v) else None for v in (x, weight, bias)]
        summed = tape.needs_gradient(weight, bias)
        flops = element_flops("layer_norm_backward" if summed else "layer_norm_backward_input", x.elements)
        reads = [g, x, mean, rstd, factor, *(v for v in copies if v is not factor)]
        tape.op(f"{name}.bwd", "norm", reads, [v for v in gradients if v], flops=flops)
        return gradients

    tape.record([x, weight, bias], [out], rule)
    return out


def _to_16_bits(tape: Tape, x: Value, name: str) -> Value:
    return tape.cast(x, tape.precision.compute, name) if tape.precision.autocast else x


def _plus_one(tape: Tape, name: str, weight: Value) -> tuple[Value, Value]:
    """1 + weight as a norm reads it, and what it computes the gradient of, which passes through the sum."""
    one = tape.constant(f"{name}.one.out", weight.shape, weight.dtype)
    elementwise(tape, f"{name}.one", "add", [weight], one)
    if not tape.precision.autocast:
        return one, weight
    low = tape.result(f"{name}.cast.out", weight.shape, tape.precision.compute)
    tape.op(f"{name}.cast", "copy", [one], [low])
    tape.record([weight], [low], lambda g: [tape.gradient_cast(g, weight, f"{name}.cast.bwd")])
    return low, low


def rms_norm(tape: Tape, name: str, x: Value, weight: Value) -> Value:
    """RMSNorm, composed as in Hugging Face's Llama: in fp32, then cast back, then times the weight.

    A 16-bit input thus leaves an fp32 copy (saved for the square and the product) and, unless the weight is frozen, a
    16-bit normalised tensor (saved for the weight's gradient).
    """
    wide = tape.cast(x, "fp32", f"{name}.up")
    rows = (*x.shape[:-1], 1)
    square = power(tape, f"{name}.square", wide)
    mean = tape.result(f"{name}.mean.out", rows, "fp32")
    tape.op(f"{name}.mean", "reduce", [square], [mean], flops=element_flops("mean", x.elements))
    tape.record([square], [mean], lambda g: [_spread(tape, f"{name}.mean.bwd", g, square)])
    rstd = elementwise(tape, f"{name}.rstd", "div", [mean], tape.result(f"{name}.rstd.out", rows, "fp32"))
    tape.save(rstd, "1 / root mean square of each row")

    def rstd_rule(g: Value) -> Gradients:  # three kernels over one number per row
        return [elementwise(tape, f"{name}.rstd.bwd", "pow", [g, rstd], tape.gradient(mean))]

    tape.record([mean], [rstd], rstd_rule)
    normal = multiply(tape, f"{name}.normalise", wide, rstd)
    return scaled_rows(tape, name, tape.cast(normal, x.dtype, f"{name}.down"), weight)


def _spread(tape: Tape, name: str, g: Value, target: Value) -> Value:
    """The gradient of a mean over each row: one number, written to every element."""
    return elementwise(tape, name, "div", [g], tape.gradient(target))


def scaled_rows(tape: Tape, name: str, x: Value, weight: Value) -> Value:
    """x times one weight per column. Saves x: the weight's gradient is the sum over rows of g * x."""
    dtype = promoted(x.dtype, weight.dtype)
    out = elementwise(tape, name, "mul", [x, weight], tape.result(f"{name}.out", x.shape, dtype))
    tape.save(x, "normalised input: the weight's gradient", weight)

    def rule(g: Value) -> Gradients:
        gradient = total = None
        if tape.needs_gradient(x):
            gradient = elementwise(tape, f"{name}.bwd", "mul", [g, weight], tape.gradient(x))
        if not tape.needs_gradient(weight):
            return [gradient, None]
        product = tape.temporary(f"{name}.bwd.product", x.shape, x.dtype)
        elementwise(tape, f"{name}.bwd.weight.mul", "mul", [g, x], product)
        flops = element_flops("sum", x.elements)
        tape.op(f"{name}.bwd.weight", "reduce", [product], [total := tape.gradient(weight)], flops=flops)
        return [gradient, total]

    tape.record([x, weight], [out], rule)
    return out
