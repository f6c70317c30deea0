"""Training traces of convolutional networks, with the alternative algorithms among which older systems choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sim.arguments import explained
from sim.errors import WorkloadError, closest, closest_divisor, near
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from workloads.backward import backward
from workloads.convnets import NETS
from workloads.image_layers import KERNELS, ImageTape
from workloads.losses import cross_entropy
from workloads.optimizers import check_optimizer, update
from workloads.precision import Precision, precision_of
from workloads.stacks import as_workload, check_stack
from workloads.tape import Value
from workloads.zeros import Zeros, with_zeros


def cnn_names() -> tuple[str, ...]:
    """Names of the networks that `cnn` builds, sorted."""
    return tuple(sorted(NETS))


@explained
def cnn(
    name: str,
    batch: int,
    image: int | None = None,
    *,
    precision: str = "fp32",
    optimizer: str = "sgd_momentum",
    classes: int = 1000,
    dropout: float | None = None,
    micro_batches: int = 1,
    inplace_relu: bool = True,
    kernels: str = "torch",
    channels_last: bool = False,
    stack: str = "eager",
    zeros: Zeros | None = None,
) -> Trace:
    """One training iteration of a convolutional network in its steady state: forward, loss, backward, optimizer step.

    name: see `cnn_names()`.
    batch: images per iteration.
    image: height and width of an image in pixels; by default the network's own (224, inception-v4 299).
    precision, optimizer: as for `transformer`. In fp32, convolutions are rounded to TF32 where a chip has it, as
        PyTorch does by default.
    classes: width of the last layer.
    dropout: replaces the network's probability.
    micro_batches: gradients are accumulated over that many parts of the batch; each part updates the running statistics
        of batch norm.
    inplace_relu: each ReLU overwrites its input, as in the published networks (Caffe) and in torchvision; False as in
        Hugging Face's.
    kernels: `torch`, or `cudnn` as in the systems before PyTorch: pooling saves no indices, and an in-place ReLU also
        overwrites its gradient.
    channels_last: images and filters have their channels last (`torch.channels_last`), so that chips whose libraries
        convolve in that order transpose nothing.
    stack: as for `transformer`.
    zeros: the fraction of zeros in the results of ReLUs, on which sparse codecs depend; see `with_zeros`. By default
        nothing is stated of it.

    Convolutions are implicit GEMMs without workspace; `alternatives` has the other algorithms that support their shape,
    see `workloads.convolution_algorithms`. For a backward op, which computes both gradients, time factor and workspace
    are those of the forward op. Ops say how they split by batch (`Op.splits`); parts of a batch have their own
    statistics of batch norm (`batch_own`).

    A keep-all replay with `torch` kernels uses as much memory as PyTorch, except for workspaces inside kernels and
    rounding by the allocator; local response norm is cuDNN's single kernel.

    Raises WorkloadError naming what is wrong and the nearest valid value.
    """
    if name not in NETS:
        raise WorkloadError(f"network {name!r} is unknown{near(str(name), NETS)}")
    if kernels not in KERNELS:
        raise WorkloadError(f"kernels: {kernels!r} is unknown{near(str(kernels), KERNELS)}")
    check_stack(stack)
    net, types = NETS[name], _types(precision)
    check_optimizer(optimizer)
    image = net.image if image is None else image
    probability = net.dropout if dropout is None else dropout
    numbers = {"batch": batch, "image": image, "classes": classes, "micro_batches": micro_batches}
    _check_numbers(numbers, batch, micro_batches, probability)
    builder = TraceBuilder()
    tape = ImageTape(builder, types).open(inplace_relu=inplace_relu, kernels=kernels)
    samples, layers = batch // micro_batches, 0
    if micro_batches == 1:
        tape.samples = samples
    gradients: dict[int, Value] = {}
    for i in range(micro_batches):
        tape.prefix = f"mb{i}." if micro_batches > 1 else ""
        pixels = tape.constant("images", (samples, 3, image, image), types.weight, "input")
        labels = tape.constant("labels", (samples,), "int64", "input")
        logits = net.forward(tape, pixels, classes, probability)
        layers = max(layer for _, layer in tape.parameters) + 1
        tape.layer = -1
        loss = cross_entropy(tape, "loss", tape.to_full(logits, "loss.up"), labels, held=(logits,))
        tape.leave_autocast()
        backward(tape, loss, gradients)
    tape.prefix = ""
    update(builder, types, optimizer, tape.parameters, gradients)
    meta: dict[str, Any] = {
        "model": name,
        "family": "cnn",
        "batch": batch,
        "image": image,
        "samples": batch,
        "micro_batches": micro_batches,
        "precision": types.name,
        "optimizer": optimizer,
        "layers": layers,
        "inplace_relu": inplace_relu,
        "kernels": kernels,
        **({"channels_last": True} if channels_last else {}),
        "alternatives": "time factors of convolution algorithms are estimates",
        "parameters": sum(value.elements for value, _ in tape.parameters),
    }
    builder.meta.update(meta)
    trace = builder.build()
    products = sum(o.flops for o in trace.ops if o.kind in ("conv", "matmul"))
    choices = {trace.op_id(op): other for op, other in tape.choices.items() if other}
    built = Trace(
        trace.tensor_columns,
        replace(trace.op_columns, alternatives=choices),
        outputs=trace.outputs,
        carry=trace.carry,
        meta={**trace.meta, "model_flops": products},
    )
    return as_workload(built if zeros is None else with_zeros(built, zeros), stack)


def _check_numbers(counts: Mapping[str, object], batch: int, micro_batches: int, probability: object) -> None:
    """Raise WorkloadError for a count, or a probability of dropout, that cannot be one, naming the nearest that can."""
    for argument, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WorkloadError(f"{argument}: needs an integer of at least 1, has {value!r}{closest(value, 1)}")
    if batch % micro_batches:
        hint = closest_divisor(micro_batches, batch)
        raise WorkloadError(f"micro_batches: {micro_batches} does not divide batch {batch}{hint}")
    if isinstance(probability, bool) or not isinstance(probability, (int, float)) or not 0 <= probability < 1:
        hint = closest(probability, 0, 0.99, whole=False)
        raise WorkloadError(f"dropout: needs a number from 0 up to 1, has {probability!r}{hint}")


def _types(precision: str) -> Precision:
    """Its number types. Raises WorkloadError where they are about layers that there are none of here."""
    types = precision_of(precision)
    if types.linear:
        here = f"here it is {types.compute!r}"
        raise WorkloadError(f"precision {precision!r} is about linear layers of transformers; {here}")
    return types
