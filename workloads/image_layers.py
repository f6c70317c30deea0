"""Differentiable ops of convolution nets: what each runs, what autograd keeps, what it runs backward.

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

POOL_FLOPS = 1  # a comparison or an addition for each element of each window
NORM_FLOPS = 8  # batch norm, an element: mean, variance, normalisation, affine map
NORM_BACKWARD_FLOPS = 11  # two reductions, and the input's gradient
LRN_FLOPS = 12  # local response norm, an element: squares, window sum, power, quotient


KERNELS = ("torch", "cudnn")
"""What runs pooling and ReLU: PyTorch's own kernels, or cuDNN's, as in Caffe, Torch 7 and the older systems.
cuDNN's max pooling keeps its result instead of the indices of the maxima, and the gradient of a ReLU in place
overwrites the one that arrives."""


class ImageTape(Tape):
    """A tape that also makes weights as layers come, keeps running statistics, and knows other algorithms.

    choices: alternatives of convolutions by the name of the op. inplace_relu: whether a ReLU overwrites its
    input. kernels: one of `KERNELS`. With several microbatches a layer that was there before finds its weights
    again.
    """

    weights: dict[str, Value]
    statistics: dict[str, Value]
    choices: dict[str, tuple[Implementation, ...]]
    inplace_relu: bool
    kernels: str

    def open(self, *, inplace_relu: bool = True, kernels: str = "torch") -> ImageTape:
        """Prepare the books; returns itself."""
        self.weights, self.statistics, self.choices = {}, {}, {}
        self.inplace_relu, self.kernels = inplace_relu, kernels
        return self

    def weight(self, name: str, *shape: int) -> Value:
        """The weight of that name, made when first asked for."""
        if name not in self.weights:
            self.weights[name] = self.parameter(name, *shape)
        return self.weights[name]

    def statistic(self, name: str, *shape: int, dtype: str = "fp32") -> Value:
        """A buffer of the model that is no parameter."""
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
    """A convolution. Saves its operands in the type in which it computes; backward is one op for all gradients."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    pads = (padding, padding) if isinstance(padding, int) else padding
    batch, channels, *size = x.shape
    weight = tape.weight(f"{name}.weight", filters, channels // groups, high, wide)
    offset = tape.weight(f"{name}.bias", filters) if bias else None
    shape = Convolution(batch, channels, (size[0], size[1]), filters, (high, wide), stride, pads, groups)
    if min(shape.result) < 1:
        raise WorkloadError(f"image: too small: {name} has nothing left to look at")
    w = tape.to_compute(weight, f"{name}.weight.cast")
    a = tape.to_compute(x, f"{name}.input.cast")
    b = tape.to_compute(offset, f"{name}.bias.cast") if offset else None
    out = tape.result(f"{name}.out", (batch, filters, *shape.result), a.dtype)
    operands = [a, w, *([b] if b else [])]
    tape.op(name, "conv", operands, [out], flops=shape.flops)
    tape.save(a, "input of a convolution: the weight's gradient")
    tape.save(w, "copy of the weight that was convolved")
    other = shape.implementations(a.dtype)
    for op in (name, f"{name}.bwd"):
        tape.choices[tape.prefix + op] = other

    def rule(g: Value) -> Gradients:
        made = [tape.gradient(v) if v.slot >= 0 else None for v in operands]
        flops = shape.flops * (2 if a.slot >= 0 else 1)
        tape.op(f"{name}.bwd", "conv", [g, a, w], [v for v in made if v], flops=flops)
        return made

    tape.record(operands, [out], rule)
    return out


def batch_norm(tape: ImageTape, name: str, x: Value) -> Value:
    """Over batch and pixels. Saves its input, and mean and 1/deviation a channel.

    An op of its own renews the running statistics in place, so that the norm itself can be run again.
    """
    channels = x.shape[1]
    weight, bias = (tape.weight(f"{name}.{what}", channels) for what in ("weight", "bias"))
    out = tape.result(f"{name}.out", x.shape, x.dtype)
    mean, rstd = (tape.constant(f"{name}.{what}", (channels,), "fp32") for what in ("mean", "rstd"))
    flops = NORM_FLOPS * x.elements
    tape.op(name, "norm", [x, weight, bias], [out, mean, rstd], flops=flops)
    kept = [("running_mean", "fp32"), ("running_var", "fp32"), ("batches", "int64")]
    names = [f"{name}.{what}" for what, _ in kept]
    before = [
        tape.statistic(n, *(() if n.endswith("batches") else (channels,)), dtype=dtype)
        for n, (_, dtype) in zip(names, kept, strict=True)
    ]
    after = [tape.overwrite(v, f"{n}.new", "weight") for n, v in zip(names, before, strict=True)]
    tape.op(f"{name}.statistics", "elementwise", [*before, mean, rstd], after, flops=4 * channels)
    tape.statistics.update(zip(names, after, strict=True))
    tape.save(x, "input of a norm")
    tape.save(mean, "mean of each channel")
    tape.save(rstd, "1 / deviation of each channel")

    def rule(g: Value) -> Gradients:
        made = [tape.gradient(v) for v in (x, weight, bias)]
        flops = NORM_BACKWARD_FLOPS * x.elements
        tape.op(f"{name}.bwd", "norm", [g, x, mean, rstd, weight], made, flops=flops)
        return made

    tape.record([x, weight, bias], [out], rule)
    return out


def local_response_norm(tape: Tape, name: str, x: Value) -> Value:
    """Across channels, one kernel each way as in cuDNN and Caffe. Saves its input and its result."""
    out = tape.result(f"{name}.out", x.shape, x.dtype)
    tape.op(name, "norm", [x], [out], flops=LRN_FLOPS * x.elements)
    tape.save(x, "input of a norm")
    tape.save(out, "result of a norm")

    def rule(g: Value) -> Gradients:
        tape.op(f"{name}.bwd", "norm", [g, x, out], [made := tape.gradient(x)], flops=LRN_FLOPS * x.elements)
        return [made]

    tape.record([x], [out], rule)
    return out


def relu(tape: ImageTape, name: str, x: Value) -> Value:
    """In the storage of x, whose value is gone, if the tape says so. Saves its result."""
    backward = tape.inplace_relu and tape.kernels == "cudnn"
    return unary(tape, name, "relu", x, inplace=tape.inplace_relu, inplace_backward=backward)


def max_pool(
    tape: ImageTape, name: str, x: Value, kernel: int, stride: int, padding: int = 0, *, up: bool = False
) -> Value:
    """Saves its input and the index of each maximum in 64 bits, or its result. up: round the size up, as Caffe does."""
    shape = _pooled(name, x, kernel, stride, padding, up)
    out = tape.result(f"{name}.out", shape, x.dtype)
    flops = POOL_FLOPS * kernel * kernel * out.elements
    kept = out if tape.kernels == "cudnn" else tape.constant(f"{name}.indices", shape, "int64")
    tape.op(name, "pool", [x], list(dict.fromkeys((out, kept))), flops=flops)
    tape.save(x, "input of a pooling")
    tape.save(kept, "result of a pooling" if kept is out else "where each maximum was")

    def rule(g: Value) -> Gradients:
        tape.op(f"{name}.bwd", "pool", [g, x, kept], [made := tape.gradient(x)], flops=out.elements)
        return [made]

    tape.record([x], [out], rule)
    return out


def average_pool(tape: Tape, name: str, x: Value, kernel: int, stride: int = 1, padding: int = 0) -> Value:
    """Saves its input, of which backward needs the shape only."""
    shape = _pooled(name, x, kernel, stride, padding, False)
    return _averaged(tape, name, x, shape, POOL_FLOPS * kernel * kernel)


def adaptive_pool(tape: Tape, name: str, x: Value, size: int) -> Value:
    """The mean of `size` x `size` parts, a copy where the image has that size. Saves its input."""
    each = -(-x.shape[2] // size) * -(-x.shape[3] // size)
    return _averaged(tape, name, x, (*x.shape[:2], size, size), POOL_FLOPS * each)


def _averaged(tape: Tape, name: str, x: Value, shape: tuple[int, ...], flops: int) -> Value:
    out = tape.result(f"{name}.out", shape, x.dtype)
    tape.op(name, "pool", [x], [out], flops=flops * out.elements)
    tape.save(x, "input of a pooling")

    def rule(g: Value) -> Gradients:
        tape.op(f"{name}.bwd", "pool", [g, x], [made := tape.gradient(x)], flops=flops * out.elements)
        return [made]

    tape.record([x], [out], rule)
    return out


def global_mean(tape: Tape, name: str, x: Value) -> Value:
    """The mean of all pixels, (batch, channels). Saves nothing."""
    out = tape.result(f"{name}.out", (*x.shape[:2], 1, 1), x.dtype)
    tape.op(name, "pool", [x], [out], flops=x.elements)
    tape.record([x], [out], lambda g: [elementwise(tape, f"{name}.bwd", "div", [g], tape.gradient(x))])
    return out.viewed(*x.shape[:2])


def concatenate(tape: Tape, name: str, parts: Sequence[Value]) -> Value:
    """Along the channels. The gradients of the parts are views of the whole's."""
    batch, _, *size = parts[0].shape
    out = tape.result(f"{name}.out", (batch, sum(v.shape[1] for v in parts), *size), parts[0].dtype)
    elementwise(tape, name, "copy", parts, out)
    tape.record(list(parts), [out], lambda g: [g._replace(shape=v.shape) for v in parts])
    return out


def add_in_place(tape: Tape, name: str, x: Value, y: Value) -> Value:
    """x + y in the storage of x, whose value is gone. Saves nothing; the gradient passes on as it is."""
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
        room = n + 2 * padding - kernel
        count = (-(-room // stride) if up else room // stride) + 1
        # a window that would begin behind the image and its left padding is left out
        sizes.append(count - 1 if up and (count - 1) * stride >= n + padding else count)
    if min(sizes) < 1:
        raise WorkloadError(f"image: too small: {name} has nothing left to look at")
    return (*x.shape[:2], *sizes)
