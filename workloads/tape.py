"""The tape: forward ops as they run, each with the rule that makes its backward ops.

It is PyTorch's autograd without numbers. An op of a layer appends kernels to the trace and, where its
result needs a gradient, records a node: its inputs, its outputs, and a rule that takes the gradients of
the outputs, appends the backward kernels, and gives the gradients of the inputs. What a rule reads is what
autograd saves; so the lifetimes in the trace are those of PyTorch without being stated anywhere else.
`workloads.backward` walks the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from sim.trace.builder import TraceBuilder
from workloads.precision import BYTES, Precision

FLOATS = frozenset(("fp32", "bf16", "fp16"))


class Value(NamedTuple):
    """A tensor as the model sees it; views share `tensor`, the storage's id in the trace.

    slot: where its gradient collects, -1 for a value without one; a reshaped view shares it.
    name: of the tensor. parameter: whether it is a weight.
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
    """What one op leaves behind for the backward pass; `rule` maps gradients of outputs to those of inputs."""

    layer: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    rule: Rule


class Kernel(NamedTuple):
    """One op of the trace before it is appended. settles: see `Tape.op`."""

    name: str
    kind: str
    reads: Sequence[Value]
    writes: Sequence[Value]
    flops: int
    bytes: int | None
    random: bool
    settles: bool


class Tape:
    """Appends ops to a trace and remembers how to differentiate them.

    layer, phase: of the ops appended now. prefix: put before every name (the microbatch). samples: how many the
    inputs hold; from 2 on, ops say that they may be split by batch.
    """

    def __init__(self, builder: TraceBuilder, precision: Precision) -> None:
        self.builder = builder
        self.precision = precision
        self.layer = -1
        self.phase = "forward"
        self.prefix = ""
        self.nodes: list[Node] = []
        self.parameters: list[tuple[Value, int]] = []  # with their layer
        self.left: dict[int, int] = {}  # uses of each slot: gradients that backward has to wait for
        self.shared: set[int] = set()  # slots whose gradient is a sum not yet complete
        self.product_flops = 0  # of matrix products and attention so far
        self.waiting: dict[int, Value] = {}  # gradients that have arrived, by slot
        self.accumulating = False  # whether weights have gradients of an earlier microbatch
        self.samples = 0
        self._rows: set[int] = set()  # tensors with one row a sample
        self._sums: set[int] = set()  # tensors that are summed over samples
        self._gradient_of: dict[int, int] = {}
        self._kernels: list[Kernel] = []  # of the backward node at hand
        self._overwritten: set[int] = set()
        self._slots = 0
        self._casts: dict[int, Value] = {}
        self._tensor_names: dict[str, int] = {}
        self._op_names: dict[str, int] = {}

    # ---- tensors -----------------------------------------------------------------------------

    def parameter(self, name: str, *shape: int) -> Value:
        """A weight of the current layer, in the type of the weights."""
        dtype = self.precision.weight
        size = prod(shape) * BYTES[dtype]
        tensor = self.builder.tensor(name, size, "weight", layer=self.layer, shape=shape, dtype=dtype)
        value = Value(tensor, shape, dtype, self.new_slot(), name, True)
        self.parameters.append((value, self.layer))
        return value

    def constant(self, name: str, shape: tuple[int, ...], dtype: str, role: str = "activation") -> Value:
        """A tensor without a gradient: ids, labels, masks, indices, statistics."""
        return self._value(self.prefix + name, shape, dtype, role, -1)

    def result(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        """A tensor of the forward pass that has a gradient."""
        return self._value(self.prefix + name, shape, dtype, "activation", self.new_slot())

    def temporary(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        """A tensor of the backward pass."""
        return self._value(self.prefix + name, shape, dtype, "temporary", -1)

    def gradient(self, value: Value, over: Value | None = None) -> Value:
        """A new tensor for a gradient of `value`, or one in the storage of `over`, which is gone then.

        The only contribution to a weight's gradient becomes that gradient without a copy (autograd's
        AccumulateGrad steals it); one of several, or of a later microbatch, is a gradient, too, until it is added.
        """
        name, role = f"{value.name}.grad", "gradient" if value.parameter else "temporary"
        if value.parameter and (self.accumulating or value.slot in self.shared):
            name = f"{self.prefix}{name}.part"
        if over:
            made = self.overwrite(over, name, role)._replace(slot=-1, parameter=False)
        else:
            made = self._value(name, value.shape, value.dtype, role, -1)
        self._gradient_of[made.tensor] = value.tensor
        return made

    def is_sole(self, gradient: Value) -> bool:
        """Whether a gradient that a node was given is a storage of its own that nobody else waits for."""
        size = gradient.elements * BYTES[gradient.dtype]
        shared = any(other.tensor == gradient.tensor for other in self.waiting.values())
        return not shared and self.builder.bytes_of(gradient.tensor) == size

    def overwrite(self, value: Value, name: str, role: str) -> Value:
        """A new value in the storage of `value`, which is gone then."""
        name = _unique(name, self._tensor_names)
        self._overwritten.add(value.tensor)
        size = self.builder.bytes_of(value.tensor)
        tensor = self.builder.tensor(
            name, size, role, layer=self.layer, shape=value.shape, dtype=value.dtype, replaces=value.tensor
        )
        return value._replace(tensor=tensor, name=name)

    def result_over(self, value: Value, name: str) -> Value:
        """A new activation in the storage of `value`, with a gradient of its own."""
        return self.overwrite(value, self.prefix + name, "activation")._replace(slot=self.new_slot())

    def slice_of(self, value: Value, name: str, *shape: int) -> Value:
        """A part of a storage, with a gradient of its own."""
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
    ) -> None:
        """Append a kernel. The type of its arithmetic is that of what it reads.

        settles: it brings a gradient that a node has made into the shape and the type of its value. Autograd
        does that (validate_outputs) for all of them when the node's own kernels are done.
        """
        if kind in ("matmul", "attention"):
            self.product_flops += flops
        kernel = Kernel(name, kind, reads, writes, flops, bytes, random, settles)
        if self.phase == "forward":
            self._append(kernel, [])
        else:
            self._kernels.append(kernel)

    def finish_node(self, given: Sequence[Value | None] = ()) -> None:
        """Append the backward kernels of one node; `given` are the gradients of its outputs.

        What a node was given is released when its own kernels are done, what it has saved when the gradients that
        it has made are settled, too (autograd's release_variables): the last kernel holds what the others read.
        """
        own = [kernel for kernel in self._kernels if not kernel.settles]
        settling = [kernel for kernel in self._kernels if kernel.settles]
        self._kernels.clear()
        passing = {v.tensor for v in given if v} | {v.tensor for kernel in own for v in kernel.writes}
        saved = [v for v in self._held(own) if v.tensor not in passing]
        for kernels, held in ((own, self._held(own[:-1])), (settling, self._held(settling[:-1]) + saved)):
            for kernel in kernels[:-1]:
                self._append(kernel, [])
            if kernels:  # none where the gradient only passes through
                self._append(kernels[-1], held)

    def _held(self, kernels: Sequence[Kernel]) -> list[Value]:
        """What kernels read and a node holds on to: neither weights nor what was overwritten."""
        reads = (v for kernel in kernels for v in kernel.reads)
        return [v for v in reads if not v.parameter and v.tensor not in self._overwritten]

    def _append(self, kernel: Kernel, held: Sequence[Value]) -> None:
        operands = (*kernel.reads, *kernel.writes)
        reads = dict.fromkeys(v.tensor for v in kernel.reads)
        touched = kernel.bytes
        extra = dict.fromkeys(v.tensor for v in held if v.tensor not in reads)
        if extra and touched is None:  # it holds them, it does not touch them
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
            dtype=next((v.dtype for v in operands if v.dtype in FLOATS), ""),
            splits=self._splits((*reads, *extra), kernel.writes) if self.samples > 1 else (),
        )

    def _splits(self, reads: Sequence[int], writes: Sequence[Value]) -> tuple[str, ...]:
        """How a kernel may be split: `batch` if its results have a row a sample, `batch_sum` if they add up over them.

        The gradient of what has rows has rows; that of a weight, a position or a loss is a sum.
        """
        if self._rows.isdisjoint(reads) and self._sums.isdisjoint(reads):
            return ()
        for v in writes:
            of = self._gradient_of.get(v.tensor)
            summed = v.shape[0] % self.samples if of is None else of not in self._rows
            (self._sums if summed else self._rows).add(v.tensor)
        return ("batch",) if any(v.tensor in self._rows for v in writes) else ("batch_sum",)

    def record(self, inputs: Sequence[Value], outputs: Sequence[Value], rule: Rule) -> None:
        """Remember a differentiable op."""
        for value in inputs:
            if value.slot >= 0:
                self.left[value.slot] = self.left.get(value.slot, 0) + 1
        self.nodes.append(Node(self.layer, tuple(inputs), tuple(outputs), rule))

    def save(self, value: Value, reason: str) -> None:
        """Note why autograd keeps a tensor. Weights are there anyway and are not noted."""
        if not value.parameter:
            self.builder.mark_saved(value.tensor, reason)

    # ---- autocast ----------------------------------------------------------------------------

    def to_compute(self, value: Value, name: str) -> Value:
        """The operand of a matrix product: under autocast a 16-bit copy of an fp32 one.

        Copies of weights are cached until the forward pass is over (autocast's weight cache); copies of
        activations are not: each product makes its own.
        """
        if not self.precision.autocast or value.dtype != "fp32":
            return value
        if value.parameter and value.tensor in self._casts:
            return self._casts[value.tensor]
        copy = self.cast(value, self.precision.compute, name)
        if value.parameter:
            self._casts[value.tensor] = copy
        return copy

    def to_full(self, value: Value, name: str) -> Value:
        """The operand of an op that autocast runs in fp32: softmax, norms, powers, losses."""
        return self.cast(value, "fp32", name) if self.precision.autocast else value

    def leave_autocast(self) -> None:
        """Forget the cached copies of weights, as the end of an autocast region does."""
        self._casts.clear()

    def cast(self, value: Value, dtype: str, name: str) -> Value:
        """A copy in another type; `value` itself where it has that type."""
        if value.dtype == dtype:
            return value
        out = self.result(f"{name}.out", value.shape, dtype) if value.slot >= 0 else None
        out = out or self.constant(f"{name}.out", value.shape, dtype)
        self.op(name, "copy", [value], [out])
        if value.slot >= 0:
            self.record([value], [out], lambda g: [self.gradient_cast(g, value, f"{name}.bwd")])
        return out

    def gradient_cast(self, gradient: Value, value: Value, name: str) -> Value:
        """The gradient in the type of its value: where types were promoted, backward casts back."""
        if gradient.dtype == value.dtype:
            return gradient
        out = self.gradient(value)
        self.op(name, "copy", [gradient], [out], settles=True)
        return out

    # ---- names -------------------------------------------------------------------------------

    def _value(self, name: str, shape: tuple[int, ...], dtype: str, role: str, slot: int) -> Value:
        name = _unique(name, self._tensor_names)
        size = prod(shape) * BYTES[dtype]
        tensor = self.builder.tensor(name, size, role, layer=self.layer, shape=shape, dtype=dtype)
        if role == "input":
            self._rows.add(tensor)
        return Value(tensor, shape, dtype, slot, name)

    def new_slot(self) -> int:
        """A place for a gradient."""
        self._slots += 1
        return self._slots


def _unique(name: str, taken: dict[str, int]) -> str:
    """The name, or with the next number behind it where it is taken."""
    count = taken[name] = taken.get(name, 0) + 1
    return name if count == 1 else _unique(f"{name}.{count}", taken)
