"""The optimizer step: its states, reads, writes and temporaries.

`adamw_foreach` (PyTorch's default on a GPU) updates all parameters together, kernel by kernel, so that the denominators
of all of them, sqrt(v) / c + eps, are resident at once: as many bytes as the parameters. `adamw_fused` has no
temporaries, and a 4-byte step counter per parameter tensor on the device. `adamw_loop` updates one parameter at a time;
its temporaries are the sqrt and the quotient, and the quotient of the previous parameter, which the loop variable still
holds. `adafactor` does likewise, with the second moment of a matrix as one value per row and one per column and no
first moment (Shazeer, Stern, "Adafactor", ICML 2018, as `torch.optim.Adafactor` computes it). `adamw_8bit` keeps both
moments in blocks of 256 values of one byte, each block with an fp32 scale, and is one kernel (Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", ICLR 2022, and their bitsandbytes: parameters of less than 4,096 elements keep
fp32 moments). Its two code tables of 1 KB are left out. `lion` keeps a momentum alone and steps by the sign of its
interpolation with the gradient (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023,
arXiv:2302.06675, program 1), here in one kernel that touches each operand once. `sgd` and `sgd_momentum` update in
place.

The foreach and fused kernels for one layer's parameters are one op here, so that each layer's update is visible;
PyTorch launches them in pieces, too. Gradients live until zero_grad: the last op of their layer holds them. With fp32
masters of 16-bit weights 16-bit gradients are first copied to fp32, except by `adamw_fused`, `adamw_8bit` and `lion`,
and the new weight is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from sim.errors import WorkloadError, near
from sim.trace.builder import TraceBuilder
from workloads.precision import BYTES, Precision
from workloads.tape import Value

# How often the optimizers' kernels access arrays of the size of the parameters.
FOREACH_MOMENTS = 8  # lerp_(m, g): 3; mul_(v): 2; addcmul_(v, g, g): 3
FOREACH_SQRT = 2  # sqrt(v): 2
FOREACH_STEP = 10  # mul_(p) for the weight decay: 2; div_, add_ on the denominator: 4; addcdiv_(p, m, d): 4
FUSED_ADAM = 7  # reads p, g, m, v; writes p, m, v: 28 bytes per parameter in fp32
ADAFACTOR = (
    17  # norm(p): 1; two norms of g: 2; product of the factors: 1; div_, clamp_, rsqrt_ on it: 6; mul_(u, g): 3;
)
# norm(u): 1; add_(p, u): 3; all that has one value per row or column is left out
LION = 5  # reads p, g, m; writes p, m: 20 bytes per parameter in fp32
SGD = 3  # add_(p, g)
SGD_MOMENTUM = SGD + 5  # and before it mul_(b): 2; add_(b, g): 3
ADAM_FLOPS = 14  # decay 1; two moments 2 + 3; root, division, sum 3; quotient, step 3; corrections 2
ADAM_8BIT_FLOPS = ADAM_FLOPS + 2 * 11  # per moment: times the scale, over the new one, 8 comparisons, 1 for the maximum
ADAFACTOR_FLOPS = 15  # norms of p, g twice and u 2 each; product, quotient, maximum, root, times g 1 each; step 2
LION_FLOPS = 10  # interpolation 3, its sign 1; decay 1 and step 2; momentum 3
SGD_FLOPS = 2  # the step
SGD_MOMENTUM_FLOPS = SGD_FLOPS + 2  # and the decayed momentum


class State(NamedTuple):
    """Shape and number type of one state of a parameter."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * BYTES[self.dtype]


@dataclass
class Slot:
    """One parameter with its tensors; their ids are replaced as the step progresses.

    weight: the parameter.
    layer: its layer, -1 for none.
    gradient: the gradient that the update reads.
    update: the tensor that is updated: the weight itself or its fp32 master.
    state: optimizer states by name.
    bytes: size of a state with one value per element, and of the update.
    formats: shape and type of each state.
    held: the gradient as backward produced it where the update reads a copy, else -1.
    """

    weight: Value
    layer: int
    gradient: int
    update: int
    state: dict[str, int]
    bytes: int
    formats: dict[str, State]
    held: int = -1


class Step:
    """Appends the ops of one optimizer step to a trace."""

    def __init__(self, builder: TraceBuilder, precision: Precision, slots: list[Slot]) -> None:
        self.builder, self.precision, self.slots = builder, precision, slots

    def by_layer(self, what: str, run: Callable[[str, list[Slot]], None]) -> None:
        """One op for the parameters of each layer, and one for those outside layers."""
        for layer, slots in self._of_layers().items():
            name = "rest" if layer < 0 else f"h{layer}"
            run(f"optimizer.{name}.{what}", slots)

    def _of_layers(self) -> dict[int, list[Slot]]:
        """The parameters of each layer, -1 for those outside layers."""
        found: dict[int, list[Slot]] = {}
        for slot in self.slots:
            found.setdefault(slot.layer, []).append(slot)
        return found

    def temporary(self, slot: Slot, what: str) -> int:
        """A temporary of the same size and type as a parameter's state."""
        name, dtype = f"{slot.weight.name}.{what}", self.precision.state
        return self.builder.tensor(
            name, slot.bytes, "temporary", layer=slot.layer, shape=slot.weight.shape, dtype=dtype
        )

    def update_states(self, slot: Slot, states: tuple[str, ...]) -> list[int]:
        """New values of a parameter's states, in place."""
        for what in states:
            slot.state[what] = self._overwrite(slot, slot.state[what], what, "optimizer_state")
        return [slot.state[what] for what in states]

    def new_weight(self, slot: Slot) -> list[int]:
        """The new weight, in place; with fp32 masters also the new master."""
        new = [self._overwrite(slot, slot.weight.tensor, "", "weight")]
        if slot.update != slot.weight.tensor:
            slot.update = self._overwrite(slot, slot.update, "master", "optimizer_state")
            new.append(slot.update)
        return new

    def _overwrite(self, slot: Slot, old: int, what: str, role: str) -> int:
        size = self.builder.bytes_of(old)
        dtype = slot.weight.dtype if role == "weight" else self.precision.state
        shape, dtype = slot.formats.get(what, (slot.weight.shape, dtype))
        name = ".".join(filter(None, (slot.weight.name, what, "new")))
        return self.builder.tensor(name, size, role, layer=slot.layer, shape=shape, dtype=dtype, replaces=old)

    def op(self, name: str, reads: list[int], writes: list[int], touched: int, flops: int, workspace: int = 0) -> int:
        """Append an op of the update phase. touched: bytes that it touches, since it holds further tensors.

        Returns its id.
        """
        return self.builder.op(
            name,
            "optimizer",
            reads=reads,
            writes=writes,
            phase="update",
            bytes=touched,
            flops=flops,
            workspace=workspace,
            dtype=self.precision.state,
            splits=("rows",),
        )

    # ---- AdamW -------------------------------------------------------------------------------

    def adamw_foreach(self) -> None:
        """All moments, then all square roots, then all weights."""
        if self.precision.gradient != self.precision.state:
            self.by_layer("cast", self._cast)
        self.by_layer("moments", self._moments)
        self.by_layer("sqrt", self._sqrt)
        self.by_layer("step", self._finish)

    def _cast(self, name: str, slots: list[Slot]) -> None:
        reads = [slot.gradient for slot in slots]
        for slot in slots:
            slot.held, slot.gradient = slot.gradient, self.temporary(slot, "grad.master")
        touched = sum(slot.bytes + self.builder.bytes_of(slot.held) for slot in slots)
        self.op(name, reads, [slot.gradient for slot in slots], touched, 0)

    def _moments(self, name: str, slots: list[Slot]) -> None:
        reads = [t for s in slots for t in (s.gradient, s.state["m"], s.state["v"])]
        size = sum(s.bytes for s in slots)
        writes = [t for s in slots for t in self.update_states(s, ("m", "v"))]
        self.op(name, reads, writes, FOREACH_MOMENTS * size, 8 * _elements(slots))

    def _sqrt(self, name: str, slots: list[Slot]) -> None:
        for slot in slots:
            slot.state["denominator"] = self.temporary(slot, "denominator")
        writes = [s.state["denominator"] for s in slots]
        touched = FOREACH_SQRT * sum(s.bytes for s in slots)
        self.op(name, [s.state["v"] for s in slots], writes, touched, _elements(slots))

    def _finish(self, name: str, slots: list[Slot]) -> None:
        reads = [t for s in slots for t in (s.state["m"], s.state["denominator"], s.update, *_held(s))]
        writes = [t for s in slots for t in self.new_weight(s)]
        touched = FOREACH_STEP * sum(s.bytes for s in slots)
        self.op(name, reads, writes, touched, 5 * _elements(slots))

    def adamw_loop(self) -> None:
        """One parameter after another."""
        before = 0
        accesses = FOREACH_MOMENTS + FOREACH_SQRT + FOREACH_STEP

        def one(slot: Slot, reads: list[int], writes: list[int]) -> int:
            nonlocal before
            scratch, before = before + 2 * slot.bytes, slot.bytes
            flops = ADAM_FLOPS * slot.weight.elements
            return self.op(f"optimizer.{slot.weight.name}", reads, writes, accesses * slot.bytes, flops, scratch)

        self.one_by_one(one)

    def one_by_one(self, update: Callable[[Slot, list[int], list[int]], int]) -> None:
        """A loop over the parameters; the gradients of a layer are held until its last one has been updated.

        update: appends the op of a parameter, given what it reads and writes; returns the op's id.
        """
        if self.precision.gradient != self.precision.state:
            self.by_layer("cast", self._cast)
        layers = self._of_layers()
        for slot in self.slots:
            states = tuple(slot.state)
            reads = [slot.gradient, slot.update, *slot.state.values(), *_held(slot)]
            op = update(slot, list(dict.fromkeys(reads)), [*self.update_states(slot, states), *self.new_weight(slot)])
            if slot is layers[slot.layer][-1]:
                own = _gradients(slot)
                for t in (t for s in layers[slot.layer] for t in _gradients(s)):
                    if t not in own:
                        self.builder.release(t, op)

    # ---- other states ------------------------------------------------------------------------

    def adamw_8bit(self) -> None:
        """One kernel for everything, which decodes and encodes the moments as it goes."""
        self.by_layer("step", self._8bit)

    def _8bit(self, name: str, slots: list[Slot]) -> None:
        reads = [t for s in slots for t in (s.gradient, s.update, *s.state.values(), *_held(s))]
        states = sum(self.builder.bytes_of(t) for s in slots for t in s.state.values())
        writes = [t for s in slots for t in (*self.update_states(s, tuple(s.state)), *self.new_weight(s))]
        parameters = sum(2 * s.bytes + self.builder.bytes_of(s.gradient) for s in slots)
        self.op(name, reads, writes, parameters + 2 * states, ADAM_8BIT_FLOPS * _elements(slots))

    def adafactor(self) -> None:
        """One parameter after another; what its local variables held last stays until they are assigned again."""
        held: dict[str, int] = {}

        def one(slot: Slot, reads: list[int], writes: list[int]) -> int:
            scratch = _most_held(held, _factored(slot))
            size, elements = slot.bytes, slot.weight.elements
            name = f"optimizer.{slot.weight.name}"
            return self.op(name, reads, writes, ADAFACTOR * size, ADAFACTOR_FLOPS * elements, scratch)

        self.one_by_one(one)

    # ---- in one kernel -----------------------------------------------------------------------

    def in_one_kernel(self, accesses: int, flops: int) -> None:
        """Everything at once, in place: reads gradients, weights and states, and writes weights and states.

        accesses: to arrays of the size of the parameters. flops: per parameter.
        """

        def step(name: str, slots: list[Slot]) -> None:
            reads = [t for s in slots for t in (s.gradient, s.update, *s.state.values(), *_held(s))]
            writes = [t for s in slots for t in (*self.update_states(s, tuple(s.state)), *self.new_weight(s))]
            self.op(name, reads, writes, accesses * sum(s.bytes for s in slots), flops * _elements(slots))

        self.by_layer("step", step)

    def adamw_fused(self) -> None:
        """One kernel, which counts its steps on the device."""
        self.in_one_kernel(FUSED_ADAM, ADAM_FLOPS)

    def lion(self) -> None:
        """One kernel, which reads the momentum before it replaces it."""
        self.in_one_kernel(LION, LION_FLOPS)

    def sgd(self) -> None:
        """Foreach, without momentum and weight decay."""
        self._sgd(SGD, SGD_FLOPS)

    def sgd_momentum(self) -> None:
        """Foreach, without weight decay."""
        self._sgd(SGD_MOMENTUM, SGD_MOMENTUM_FLOPS)

    def _sgd(self, accesses: int, flops: int) -> None:
        if self.precision.gradient != self.precision.state:
            self.by_layer("cast", self._cast)
        self.in_one_kernel(accesses, flops)


def _elements(slots: list[Slot]) -> int:
    return sum(slot.weight.elements for slot in slots)


def _factored(slot: Slot) -> list[tuple[str, int]]:
    """The temporaries of Adafactor for one parameter in order: the variable that holds each, and its bytes.

    A variable's old tensor is released once the new one exists; the mean of the rows' factors has no variable.
    """
    whole = [("estimate", slot.bytes)]
    if "variance" in slot.state:
        return [("squared", slot.bytes), *whole, ("update", 0)]
    rows, columns = slot.formats["row_var"].bytes, slot.formats["col_var"].bytes
    mean = ("", rows // slot.weight.shape[-2])
    return [("row_mean", rows), ("col_mean", columns), *whole, mean, ("update", 0)]


def _most_held(held: dict[str, int], made: Iterable[tuple[str, int]]) -> int:
    """The most bytes that temporaries hold at once. held: bytes per variable, updated."""
    most = 0
    for name, size in made:
        most = max(most, sum(held.values()) + size)
        if name:
            held[name] = size
    return most


def _gradients(slot: Slot) -> list[int]:
    """The gradients of a parameter, which live until zero_grad: backward's, and the copy for its master."""
    return [slot.gradient, slot.held] if slot.held >= 0 else [slot.gradient]


def _held(slot: Slot) -> list[int]:
    """Tensors that an op of a parameter's update holds in addition to its operands."""
    # 16-bit weights with a master are only written, never read, but must be resident
    return _gradients(slot) + ([] if slot.update == slot.weight.tensor else [slot.weight.tensor])


OPTIMIZERS: dict[str, tuple[Callable[[Step], None], tuple[str, ...]]] = {
    "adamw_foreach": (Step.adamw_foreach, ("m", "v")),
    "adamw_fused": (Step.adamw_fused, ("m", "v", "step")),
    "adamw_loop": (Step.adamw_loop, ("m", "v")),
    "adamw_8bit": (Step.adamw_8bit, ("m.8bit", "m.scale", "v.8bit", "v.scale")),
    "adafactor": (Step.adafactor, ("row_var", "col_var", "variance")),
    "lion": (Step.lion, ("m",)),
    "sgd": (Step.sgd, ()),
    "sgd_momentum": (Step.sgd_momentum, ("m",)),
}
"""The optimizers, and the states that they keep per parameter: see `STATES`."""

BLOCK, SMALL = 256, 4096
"""8-bit states: elements that share a scale, and of how many elements a parameter must be to have them."""


def _in_8_bits(shape: tuple[int, ...], dtype: str) -> State:
    return State(shape, "uint8") if prod(shape) >= SMALL else State(shape, "fp32")


def _scales(shape: tuple[int, ...], dtype: str) -> State | None:
    return State((-(-prod(shape) // BLOCK),), "fp32") if prod(shape) >= SMALL else None


STATES: dict[str, Callable[[tuple[int, ...], str], State | None]] = {
    "step": lambda shape, dtype: State((), "fp32"),
    "m.8bit": _in_8_bits,
    "m.scale": _scales,
    "v.8bit": _in_8_bits,
    "v.scale": _scales,
    "row_var": lambda shape, dtype: State((*shape[:-1], 1), dtype) if len(shape) > 1 else None,
    "col_var": lambda shape, dtype: State((*shape[:-2], 1, shape[-1]), dtype) if len(shape) > 1 else None,
    "variance": lambda shape, dtype: State(shape, dtype) if len(shape) < 2 else None,
}
"""What a state is for a parameter of a shape, given the number type of states: None where it has none.

A state that isn't named here has one value per element.
"""


def check_optimizer(name: str) -> None:
    """Raise WorkloadError, naming the nearest valid one, if an optimizer is unknown."""
    if name not in OPTIMIZERS:
        raise WorkloadError(f"optimizer {name!r} is unknown{near(str(name), OPTIMIZERS)}")


def update(
    builder: TraceBuilder,
    precision: Precision,
    optimizer: str,
    parameters: list[tuple[Value, int]],
    gradients: dict[int, Value],
) -> None:
    """Append one optimizer step, in the steady state: the optimizer's states exist from the start.

    A parameter that no gradient reaches (that of an expert without tokens) keeps its value and its states.

    builder: where its ops are appended.
    precision: number types of weights and states.
    optimizer: one of `OPTIMIZERS`.
    parameters: weights and their layers, in the order of the model.
    gradients: by the weight's slot.
    """
    run, states = OPTIMIZERS[optimizer]
    slots = []
    for weight, layer in parameters:
        size = weight.elements * BYTES[precision.state]
        found = {what: STATES.get(what, State)(weight.shape, precision.state) for what in states}
        formats = {what: state for what, state in found.items() if state}
        if precision.master:
            formats["master"] = State(weight.shape, precision.state)
        ids = {
            what: builder.tensor(
                f"{weight.name}.{what}",
                state.bytes,
                "optimizer_state",
                layer=layer,
                shape=state.shape,
                dtype=state.dtype,
            )
            for what, state in formats.items()
        }
        master = ids.pop("master", weight.tensor)
        if weight.slot in gradients:
            slots.append(Slot(weight, layer, gradients[weight.slot].tensor, master, ids, size, formats))
    run(Step(builder, precision, slots))
