"""The tape: forward ops in the order in which they run, each with the rule that appends its backward ops.

It is PyTorch's autograd without numbers. An op of a layer appends kernels to the trace and, where one of its inputs
needs a gradient, records a node: its inputs, its outputs, and a rule that takes the gradients of the outputs, appends
the backward kernels, and returns the gradients of those inputs that need one. What is computed from frozen weights and
inputs alone is not recorded, saves nothing and has no backward kernel. The tensors that a rule reads are those that
autograd saves, so the lifetimes in the trace are PyTorch's without being stated anywhere else. `workloads.backward`
walks the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from sim.trace.builder import TraceBuilder
from workloads.precision import BYTES, Precision, stored_bytes
from workloads.sizes import lengths_and_axes

ARITHMETIC = frozenset(("fp32", "bf16", "fp16", "fp8", "int8"))
"""The types that ops compute in; others are indices and masks."""


class Value(NamedTuple):
    """A tensor as the model sees it.

    tensor: id of its storage in the trace; views share it.
    shape, dtype: of the view.
    slot: identifies its gradient, if it needs one (`Tape.needs_gradient`), -1 for a value that never does; a reshaped
        view shares it.
    name: of the tensor.
    parameter: whether it is a weight.
    """

    tensor: int
    shape: tuple[int, ...]
    dtype: str
    slot: int
    name: str
    parameter: bool = False

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    def viewed(self, *shape: int) -> Value:
        """The same storage and the same gradient under another shape."""
        return self._replace(shape=shape)


Rule = Callable[..., Sequence["Value | None"]]


class Node(NamedTuple):
    """The record of one op for the backward pass; `rule` maps gradients of outputs to gradients of inputs."""

    layer: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    rule: Rule


class Kernel(NamedTuple):
    """An op that has not been appended to the trace yet; `settles`, `across`, `chunk`: see `Tape.op`."""

    name: str
    kind: str
    reads: Sequence[Value]
    writes: Sequence[Value]
    flops: int
    bytes: int | None
    random: bool
    settles: bool
    function: str = ""
    across: bool = False
    counted: int | None = None
    chunk: bool = False


class Tape:
    """Appends ops to a trace and records how to differentiate them.

    layer, phase: of the ops being appended.
    prefix: of every name (the microbatch).
    samples: in the batch; from 2 on, ops are marked as splittable by batch.
    routed: how many rows the expert at hand has, which need be no multiple of the samples; 0 for none.
    """

    def __init__(self, builder: TraceBuilder, precision: Precision) -> None:
        self.builder = builder
        self.precision = precision
        self.layer = -1
        self.phase = "forward"
        self.prefix = ""
        self.nodes: list[Node] = []
        self.parameters: list[tuple[Value, int]] = []  # with their layer
        self.left: dict[int, int] = {}  # uses of each slot: gradients that backward still waits for
        self.shared: set[int] = set()  # slots whose gradient is an incomplete sum
        self.product_flops = 0  # of matrix products and attention so far, without recomputation inside kernels
        self.waiting: dict[int, Value] = {}  # gradients that have arrived, by slot
        self.accumulating = False  # whether weights have gradients of an earlier microbatch
        self.samples = self.routed = 0
        self._rows: set[int] = set()  # tensors with one row per sample
        self._sums: set[int] = set()  # tensors that are summed over samples
        self._gradient_of: dict[int, int] = {}
        self._needing: set[int] = set()  # slots of values that need a gradient
        self._saving: list[tuple[int, str]] = []  # what the op that is recorded next saves, and why
        self._kernels: list[Kernel] = []  # of the current backward node
        self._overwritten: set[int] = set()
        self._slots = 0
        self._casts: dict[int, Value] = {}
        self.eight_bit: dict[tuple[int, str], tuple[Value, Value | None]] = {}  # see `workloads.eight_bits`
        self._tensor_names: dict[str, int] = {}
        self._op_names: dict[str, int] = {}

    # ---- tensors -----------------------------------------------------------------------------

    def parameter(self, name: str, *shape: int, frozen: str = "") -> Value:
        """A weight of the current layer, in the type of the weights.

        frozen: the type of a frozen weight, which has no gradient; "" for one that is trained.
        """
        dtype = frozen or self.precision.weight
        size = stored_bytes(prod(shape), dtype)
        tensor = self.builder.tensor(name, size, "weight", layer=self.layer, shape=shape, dtype=dtype)
        value = Value(tensor, shape, dtype, -1 if frozen else self.new_slot(), name, True)
        if not frozen:
            self._needing.add(value.slot)
        self.parameters.append((value, self.layer))
        return value

    def constant(self, name: str, shape: tuple[int, ...], dtype: str, role: str = "activation") -> Value:
        """A tensor without a gradient: ids, labels, masks, indices, statistics."""
        return self._value(self.prefix + name, shape, dtype, role, -1)

    def result(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        """A tensor of the forward pass that needs a gradient if an input of the op that computes it does."""
        return self._value(self.prefix + name, shape, dtype, "activation", self.new_slot())

    def unprefixed(self, name: str, shape: tuple[int, ...], dtype: str, role: str) -> Value:
        """A tensor without a gradient whose name has no prefix: microbatches may share it."""
        return self._value(name, shape, dtype, role, -1)

    def temporary(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        """A tensor of the backward pass."""
        return self._value(self.prefix + name, shape, dtype, "temporary", -1)

    def gradient(self, value: Value, over: Value | None = None) -> Value:
        """A new tensor for a gradient of `value`.

        The only contribution to a weight's gradient becomes that gradient without a copy (autograd's AccumulateGrad
        steals it). One of several contributions, or that of a later microbatch, also has the role of a gradient until
        it is added.

        value: the value to differentiate by.
        over: a tensor to overwrite with it.
        """
        name, role = f"{value.name}.grad", "gradient" if value.parameter else "temporary"
        if value.parameter and (self.accumulating or value.slot in self.shared or self.precision.main_gradients):
            name = f"{self.prefix}{name}.part"
        if over:
            new = self.overwrite(over, name, role)._replace(slot=-1, parameter=False)
        else:
            new = self._value(name, value.shape, value.dtype, role, -1)
        self._gradient_of[new.tensor] = value.tensor
        return new

    def main_gradient(self, value: Value, gradient: Value) -> Value:
        """A gradient of a weight in the type in which it is kept: a copy where that is another."""
        if gradient.dtype == self.precision.gradient:
            return gradient
        out = self._value(f"{value.name}.grad", value.shape, self.precision.gradient, "gradient", -1)
        self._gradient_of[out.tensor] = value.tensor
        self.op(f"{value.name.removeprefix(self.prefix)}.grad.main", "copy", [gradient], [out])
        self.finish_node()
        return out

    def is_sole(self, gradient: Value) -> bool:
        """Whether an incoming gradient has its own storage, which nothing else waits for."""
        size = gradient.elements * BYTES[gradient.dtype]
        shared = any(other.tensor == gradient.tensor for other in self.waiting.values())
        return not shared and self.builder.bytes_of(gradient.tensor) == size

    def overwrite(self, value: Value, name: str, role: str) -> Value:
        """A new value that overwrites `value` in place."""
        name = _unique(name, self._tensor_names)
        self._overwritten.add(value.tensor)
        size = self.builder.bytes_of(value.tensor)
        lengths, axes = lengths_and_axes(value.shape)
        old, dtype = value.tensor, value.dtype
        tensor = self.builder.tensor(
            name, size, role, layer=self.layer, shape=lengths, dtype=dtype, replaces=old, axes=axes
        )
        return value._replace(tensor=tensor, name=name)

    def result_over(self, value: Value, name: str) -> Value:
        """A new activation, with its own gradient, that overwrites `value` in place."""
        return self.overwrite(value, self.prefix + name, "activation")._replace(slot=self.new_slot())

    def slice_of(self, value: Value, name: str, *shape: int) -> Value:
        """A view of a part of a storage, with its own gradient."""
        return Value(value.tensor, shape, value.dtype, self.new_slot(), self.prefix + name)

    # ---- ops ---------------------------------------------------------------------------------

    def op(
        self,
        name: str,
        kind: str,
        reads: Sequence[Value],
        writes: Sequence[Value],
        *,
        flops: int = 0,
        bytes: int | None = None,
        random: bool = False,
        settles: bool = False,
        function: str = "",
        across: bool = False,
        counted: int | None = None,
        chunk: bool = False,
    ) -> None:
        """Append a kernel; the type of its arithmetic is that of its operands.

        name, kind, flops, bytes, random, function, counted: as for `sim.trace.Op`.
        reads, writes: operands and results.
        settles: the kernel converts a gradient that a node produced to the shape and type of its value. Autograd does
            this (validate_outputs) for all gradients after the node's own kernels.
        across: each sample's result depends on the other samples, so that parts of the batch compute something else.
        chunk: the kernel works on some of the batch's rows, so that it cannot be split by batch.
        """
        if kind in ("matmul", "attention"):
            self.product_flops += flops if counted is None else counted
        kernel = Kernel(name, kind, reads, writes, flops, bytes, random, settles, function, across, counted, chunk)
        if self.phase == "forward":
            self._append(kernel, [])
        else:
            self._kernels.append(kernel)

    def finish_node(self, given: Sequence[Value | None] = ()) -> None:
        """Append the backward kernels of one node.

        Incoming gradients are released after the node's own kernels, saved tensors only after its gradients have been
        converted (autograd's release_variables). So the last kernel of each group holds what the others read.

        given: the gradients of the node's outputs.
        """
        own = [kernel for kernel in self._kernels if not kernel.settles]
        settling = [kernel for kernel in self._kernels if kernel.settles]
        self._kernels.clear()
        passing = {v.tensor for v in given if v} | {v.tensor for kernel in own for v in kernel.writes}
        saved = [v for v in self._held(own) if v.tensor not in passing]
        for kernels, held in ((own, self._held(own[:-1])), (settling, self._held(settling[:-1]) + saved)):
            for kernel in kernels[:-1]:
                self._append(kernel, [])
            if kernels:  # there are none where the gradient passes through
                self._append(kernels[-1], held)

    def _held(self, kernels: Sequence[Kernel]) -> list[Value]:
        """The reads of kernels that a node keeps alive: neither weights nor overwritten tensors."""
        reads = (v for kernel in kernels for v in kernel.reads)
        return [v for v in reads if not v.parameter and v.tensor not in self._overwritten]

    def _append(self, kernel: Kernel, held: Sequence[Value]) -> None:
        operands = (*kernel.reads, *kernel.writes)
        reads = dict.fromkeys(v.tensor for v in kernel.reads)
        touched = kernel.bytes
        extra = dict.fromkeys(v.tensor for v in held if v.tensor not in reads)
        if extra and touched is None:  # it holds these without touching them
            touched = sum(map(self.builder.bytes_of, (*reads, *(v.tensor for v in kernel.writes))))
        self.builder.op(
            _unique(self.prefix + kernel.name, self._op_names),
            kernel.kind,
            reads=(*reads, *extra),
            writes=[v.tensor for v in kernel.writes],
            phase=self.phase,
            layer=self.layer,
            flops=kernel.flops,
            bytes=touched,
            random=kernel.random,
            dtype=self.precision.arithmetic(
                kernel.kind, next((v.dtype for v in operands if v.dtype in ARITHMETIC), "")
            ),
            splits=self._splits(kernel, (*reads, *extra)) if self.samples > 1 else (),
            function=kernel.function,
            counted=kernel.counted,
        )

    def _splits(self, kernel: Kernel, reads: Sequence[int]) -> tuple[str, ...]:
        """How a kernel may be split: `batch` if its results have one row per sample, `batch_sum` if they are sums,
        `batch_own` if samples depend on each other.

        The gradient of a tensor with rows has rows; that of a weight, a position or a loss is a sum over samples.
        """
        if self._rows.isdisjoint((*reads, *(v.tensor for v in kernel.writes))) and self._sums.isdisjoint(reads):
            return ()
        for v in kernel.writes:
            of = self._gradient_of.get(v.tensor)
            has_rows = self._has_rows(v) if of is None else of in self._rows
            (self._rows if has_rows else self._sums).add(v.tensor)
        if kernel.chunk:
            return ()
        if kernel.across:
            return ("batch_own",)
        return ("batch",) if any(v.tensor in self._rows for v in kernel.writes) else ("batch_sum",)

    def _has_rows(self, value: Value) -> bool:
        """Whether a shape allows for one row per sample, or one for each token of an expert."""
        return bool(value.shape) and (value.shape[0] % self.samples == 0 or value.shape[0] == self.routed)

    def per_sample(self, value: Value) -> None:
        """Note that a value without operands, such as a mask, has one row per sample all the same."""
        self._rows.add(value.tensor)

    def is_gradient_of(self, value: Value, of: Value) -> None:
        """Note that a result of the forward pass is a gradient: it has rows where the other one has."""
        self._gradient_of[value.tensor] = of.tensor

    def needs_gradient(self, *values: Value) -> bool:
        """Whether one of these is a trained weight or was computed from one."""
        return any(value.slot in self._needing for value in values)

    def record(self, inputs: Sequence[Value], outputs: Sequence[Value], rule: Rule) -> None:
        """Record a differentiable op, and what it saves, if one of its inputs needs a gradient; then its outputs do.

        rule: may compute the gradients only of inputs that need one, and must if that takes a kernel of its own.
        """
        saving, self._saving = self._saving, []
        if not self.needs_gradient(*inputs):
            return
        for tensor, reason in saving:
            self.builder.mark_saved(tensor, reason)
        for value in inputs:
            if self.needs_gradient(value):
                self.left[value.slot] = self.left.get(value.slot, 0) + 1
        self._needing.update(value.slot for value in outputs)
        self.nodes.append(Node(self.layer, tuple(inputs), tuple(outputs), rule))

    def save(self, value: Value, reason: str, needed_for: Value | None = None) -> None:
        """Note what the op that is recorded next saves, and why; weights, which are resident anyway, are skipped.

        needed_for: the input whose gradient alone is computed from it, so that it is saved only if that one is needed.
        """
        if not value.parameter and (needed_for is None or self.needs_gradient(needed_for)):
            self._saving.append((value.tensor, reason))

    # ---- autocast ----------------------------------------------------------------------------

    def to_compute(self, value: Value, name: str) -> Value:
        """The operand of a matrix product: under autocast a 16-bit copy of an fp32 one.

        Copies of trained weights are cached until the forward pass ends (autocast's weight cache). Copies of
        activations and of frozen weights are not cached: each product has its own.
        """
        if not self.precision.autocast or value.dtype != "fp32":
            return value
        if value.parameter and value.tensor in self._casts:
            return self._casts[value.tensor]
        copy = self.cast(value, self.precision.compute, name)
        if value.parameter and self.needs_gradient(value):
            self._casts[value.tensor] = copy
        return copy

    def to_full(self, value: Value, name: str) -> Value:
        """The operand of an op that autocast runs in fp32: softmax, norms, powers or losses."""
        return self.cast(value, "fp32", name) if self.precision.autocast else value

    def leave_autocast(self) -> None:
        """Drop the cached copies of weights, like the end of an autocast region.

        Copies that nothing saved, because the input beside them needs no gradient, are released here. Those of biases
        are not held: they are released by the op that reads them, which makes a difference of a few kilobytes.
        """
        last = self.builder.ops - 1
        for copy in self._casts.values():
            if len(copy.shape) > 1 and not self.builder.is_saved(copy.tensor):
                self.builder.release(copy.tensor, last)
        self._casts.clear()

    def cast(self, value: Value, dtype: str, name: str) -> Value:
        """A copy in another type; `value` itself if it has that type already."""
        if value.dtype == dtype:
            return value
        out = self.result(f"{name}.out", value.shape, dtype)
        self.op(name, "copy", [value], [out])
        self.record([value], [out], lambda g: [self.gradient_cast(g, value, f"{name}.bwd")])
        return out

    def gradient_cast(self, gradient: Value, value: Value, name: str) -> Value:
        """The gradient in the type of its value: backward casts it where types were promoted."""
        if gradient.dtype == value.dtype:
            return gradient
        out = self.gradient(value)
        self.op(name, "copy", [gradient], [out], settles=True)
        return out

    # ---- names -------------------------------------------------------------------------------

    def _value(self, name: str, shape: tuple[int, ...], dtype: str, role: str, slot: int) -> Value:
        name = _unique(name, self._tensor_names)
        size = prod(shape) * BYTES[dtype]
        lengths, axes = lengths_and_axes(shape)
        tensor = self.builder.tensor(name, size, role, layer=self.layer, shape=lengths, dtype=dtype, axes=axes)
        if role == "input":
            self._rows.add(tensor)
        return Value(tensor, shape, dtype, slot, name)

    def new_slot(self) -> int:
        """A new slot for a gradient."""
        self._slots += 1
        return self._slots


def _unique(name: str, taken: dict[str, int]) -> str:
    """The name, with the next free number appended if it is taken."""
    count = taken[name] = taken.get(name, 0) + 1
    return name if count == 1 else _unique(f"{name}.{count}", taken)
