"""Differentiable ops of convolutional networks: the forward kernels, the saved tensors, the backward kernels.

Images are (batch, channels, height, width). Kernels follow PyTorch's CUDA path without cuDNN's own batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.errors import WorkloadError
from sim.trace.op import Implementation
from workloads.convolution_algorithms import Convolution
from workloads.costs import element_flops
from workloads.precision import BYTES
from workloads.primitives import Gradients, elementwise, linear, unary
from workloads.tape import Tape, Value

POOL_FLOPS = 1  # a comparison or an addition per element of each window
NORM_FLOPS = 8  # batch norm, per element: mean, variance, normalisation, affine map
NORM_BACKWARD_FLOPS = 11  # two reductions, and the input's gradient
LRN_FLOPS = 12  # local response norm, per element: squares, window sum, power, quotient


KERNELS = ("torch", "cudnn")
"""Kernels of pooling and ReLU: PyTorch's own, or cuDNN's, as in Caffe, Torch 7 and older systems.
cuDNN's max pooling saves its result instead of the indices of the maxima, and the backward of an in-place ReLU
overwrites the incoming gradient."""


class ImageTape(Tape):
    """A tape that also creates weights on first use, keeps running statistics, and records alternative algorithms.

    With several microbatches, a layer uses the weights of the first one.

    weights, statistics: by name.
    choices: alternatives of convolutions by the name of the op.
    inplace_relu: whether a ReLU overwrites its input.
    kernels: one of `KERNELS`.
    """

    weights: dict[str, Value]
    statistics: dict[str, Value]
    choices: dict[str, tuple[Implementation, ...]]
    inplace_relu: bool
    kernels: str

    def open(self, *, inplace_relu: bool = True, kernels: str = "torch") -> ImageTape:
        """Set the options and start with no weights. Returns the tape itself."""
        self.weights, self.statistics, self.choices = {}, {}, {}
        self.inplace_relu, self.kernels = inplace_relu, kernels
        return self

    def weight(self, name: str, *shape: int) -> Value:
        """The weight of that name, created on first use."""
        if name not in self.weights:
            self.weights[name] = self.parameter(name, *shape)
        return self.weights[name]

    def statistic(self, name: str, *shape: int, dtype: str = "fp32") -> Value:
        """A buffer of the model, created on first use; it is not a parameter."""
        if name not in self.statistics:
            size = BYTES[dtype]
            for n in shape:
                size *= n
            tensor = self.builder.tensor(name, size, "weight", layer=self.layer, shape=shape, dtype=dtype)
            self.statistics[name] = Value(tensor, shape, dtype, -1, name)
        return self.statistics[name]


def conv(
    tape: ImageTape,
    name: str,
    x: Value,
    filters: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    groups: int = 1,
    bias: bool = False,
) -> Value:
    """A convolution. Saves its operands in the type of the computation; its backward is one op for all gradients."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    pads = (padding, padding) if isinstance(padding, int) else padding
    batch, channels, *size = x.shape
    weight = tape.weight(f"{name}.weight", filters, channels // groups, high, wide)
    offset = tape.weight(f"{name}.bias", filters) if bias else None
    shape = Convolution(batch, channels, (size[0], size[1]), filters, (high, wide), stride, pads, groups)
    if min(shape.result) < 1:
        raise WorkloadError(f"image: too small: the input of {name} is smaller than its window")
    w = tape.to_compute(weight, f"{name}.weight.cast")
    a = tape.to_compute(x, f"{name}.input.cast")
    b = tape.to_compute(offset, f"{name}.bias.cast") if offset else None
    out = tape.result(f"{name}.out", (batch, filters, *shape.result), a.dtype)
    operands = [a, w, *([b] if b else [])]
    tape.op(name, "conv", operands, [out], flops=shape.flops)
    tape.save(a, "input of a convolution: the weight's gradient")
    tape.save(w, "copy of the weight that was convolved")
    alternatives = shape.implementations(a.dtype)
    for op in (name, f"{name}.bwd"):
        tape.choices[tape.prefix + op] = alternatives

    def rule(g: Value) -> Gradients:
        gradients = [tape.gradient(v) if tape.needs_gradient(v) else None for v in operands]
        flops = shape.flops * (2 if tape.needs_gradient(a) else 1)
        tape.op(f"{name}.bwd", "conv", [g, a, w], [v for v in gradients if v], flops=flops)
        return gradients

    tape.record(operands, [out], rule)
    return out


def batch_norm(tape: ImageTape, name: str, x: Value) -> Value:
    """Batch norm, over batch and pixels. Saves its input, and mean and 1/deviation per channel.

    A separate op updates the running statistics in place, so that the norm itself can be recomputed. Parts of the batch
    have means of their own.
    """
    channels = x.shape[1]
    weight, bias = (tape.weight(f"{name}.{what}", channels) for what in ("weight", "bias"))
    out = tape.result(f"{name}.out", x.shape, x.dtype)
    mean, rstd = (tape.constant(f"{name}.{what}", (channels,), "fp32") for what in ("mean", "rstd"))
    flops = NORM_FLOPS * x.elements
    tape.op(name, "norm", [x, weight, bias], [out, mean, rstd], flops=flops, across=True)
    kept = [("running_mean", "fp32"), ("running_var", "fp32"), ("batches", "int64")]
    names = [f"{name}.{what}" for what, _ in kept]
    before = [
        tape.statistic(n, *(() if n.endswith("batches") else (channels,)), dtype=dtype)
        for n, (_, dtype) in zip(names, kept, strict=True)
    ]
    after = [tape.overwrite(v, f"{n}.new", "weight") for n, v in zip(names, before, strict=True)]
    tape.op(f"{name}.statistics", "elementwise", [*before, mean, rstd], after, flops=4 * channels, across=True)
    tape.statistics.update(zip(names, after, strict=True))
    tape.save(x, "input of a norm")
    tape.save(mean, "mean of each channel")
    tape.save(rstd, "1 / deviation of each channel")

    def rule(g: Value) -> Gradients:
        gradients = [tape.gradient(v) for v in (x, weight, bias)]
        flops = NORM_BACKWARD_FLOPS * x.elements
        tape.op(f"{name}.bwd", "norm", [g, x, mean, rstd, weight], gradients, flops=flops, across=True)
        return gradients

    tape.record([x, weight, bias], [out], rule)
    return out


def local_response_norm(tape: Tape, name: str, x: Value) -> Value:
    """Local response norm across channels, one kernel per direction as in cuDNN and Caffe. Saves input and result."""
    out = tape.result(f"{name}.out", x.shape, x.dtype)
    tape.op(name, "norm", [x], [out], flops=LRN_FLOPS * x.elements)
    tape.save(x, "input of a norm")
    tape.save(out, "result of a norm")

    def rule(g: Value) -> Gradients:
        tape.op(f"{name}.bwd", "norm", [g, x, out], [gradient := tape.gradient(x)], flops=LRN_FLOPS * x.elements)
        return [gradient]

    tape.record([x], [out], rule)
    return out


def relu(tape: ImageTape, name: str, x: Value) -> Value:
    """ReLU, in place if the tape says so. Saves its result."""
    backward = tape.inplace_relu and tape.kernels == "cudnn"
    return unary(tape, name, "relu", x, inplace=tape.inplace_relu, inplace_backward=backward)


def max_pool(
    tape: ImageTape, name: str, x: Value, kernel: int, stride: int, padding: int = 0, *, up: bool = False
) -> Value:
    """Max pooling. Saves its input, and the 64-bit index of each maximum or (cuDNN) its result.

    up: round the size of the result up, as Caffe does.
    """
    shape = _pooled(name, x, kernel, stride, padding, up)
    out = tape.result(f"{name}.out", shape, x.dtype)
    flops = POOL_FLOPS * kernel * kernel * out.elements
    kept = out if tape.kernels == "cudnn" else tape.constant(f"{name}.indices", shape, "int64")
    tape.op(name, "pool", [x], list(dict.fromkeys((out, kept))), flops=flops, function="max_pool")
    tape.save(x, "input of a pooling")
    tape.save(kept, "result of a pooling" if kept is out else "where each maximum was")

    def rule(g: Value) -> Gradients:
        gradient = tape.gradient(x)
        tape.op(f"{name}.bwd", "pool", [g, x, kept], [gradient], flops=out.elements, function="max_pool")
        return [gradient]

    tape.record([x], [out], rule)
    return out


def average_pool(tape: Tape, name: str, x: Value, kernel: int, stride: int = 1, padding: int = 0) -> Value:
    """Average pooling. Saves its input, of which backward needs only the shape."""
    shape = _pooled(name, x, kernel, stride, padding, False)
    return _averaged(tape, name, x, shape, POOL_FLOPS * kernel * kernel)


def adaptive_pool(tape: Tape, name: str, x: Value, size: int) -> Value:
    """Average pooling to `size` x `size` pixels, a copy where the image has that size. Saves its input."""
    each = -(-x.shape[2] // size) * -(-x.shape[3] // size)
    return _averaged(tape, name, x, (*x.shape[:2], size, size), POOL_FLOPS * each)


def _averaged(tape: Tape, name: str, x: Value, shape: tuple[int, ...], flops: int) -> Value:
    out = tape.result(f"{name}.out", shape, x.dtype)
    tape.op(name, "pool", [x], [out], flops=flops * out.elements)
    tape.save(x, "input of a pooling")

    def rule(g: Value) -> Gradients:
        tape.op(f"{name}.bwd", "pool", [g, x], [gradient := tape.gradient(x)], flops=flops * out.elements)
        return [gradient]

    tape.record([x], [out], rule)
    return out


def global_mean(tape: Tape, name: str, x: Value) -> Value:
    """The mean over all pixels, (batch, channels). Saves nothing."""
    out = tape.result(f"{name}.out", (*x.shape[:2], 1, 1), x.dtype)
    tape.op(name, "pool", [x], [out], flops=x.elements)
    tape.record([x], [out], lambda g: [elementwise(tape, f"{name}.bwd", "div", [g], tape.gradient(x))])
    return out.viewed(*x.shape[:2])


def concatenate(tape: Tape, name: str, parts: Sequence[Value]) -> Value:
    """Concatenation along the channels. The gradients of the parts are views of the whole gradient."""
    batch, _, *size = parts[0].shape
    out = tape.result(f"{name}.out", (batch, sum(v.shape[1] for v in parts), *size), parts[0].dtype)
    elementwise(tape, name, "copy", parts, out)
    tape.record(list(parts), [out], lambda g: [g._replace(shape=v.shape) for v in parts])
    return out


def add_in_place(tape: Tape, name: str, x: Value, y: Value) -> Value:
    """x + y, in place of x. Saves nothing; the gradient passes through unchanged."""
    out = tape.result_over(x, f"{name}.out")
    tape.op(name, "elementwise", [x, y], [out], flops=element_flops("add", x.elements))
    tape.record([x, y], [out], lambda g: [g, g])
    return out


def dense(tape: ImageTape, name: str, x: Value, columns: int) -> Value:
    """A fully connected layer with bias."""
    weight = tape.weight(f"{name}.weight", x.shape[-1], columns)
    return linear(tape, name, x, weight, tape.weight(f"{name}.bias", columns))


def _pooled(name: str, x: Value, kernel: int, stride: int, padding: int, up: bool) -> tuple[int, ...]:
    sizes = []
    for n in x.shape[2:]:
        span = n + 2 * padding - kernel
        count = (-(-span // stride) if up else span // stride) + 1
        # a window that would start beyond the image and its left padding is omitted
        sizes.append(count - 1 if up and (count - 1) * stride >= n + padding else count)
    if min(sizes) < 1:
        raise WorkloadError(f"image: too small: the input of {name} is smaller than its window")
    return (*x.shape[:2], *sizes)
