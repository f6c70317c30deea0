"""The optimizer step: its states, reads, writes and temporaries.

`adamw_foreach` (PyTorch's default on a GPU) updates all parameters together, kernel by kernel, so that the denominators
of all of them, sqrt(v) / c + eps, are resident at once: as many bytes as the parameters. `adamw_fused` has no
temporaries, and a 4-byte step counter per parameter tensor on the device. `adamw_loop` updates one parameter at a time;
its temporaries are the sqrt and the quotient, and the quotient of the previous parameter, which the loop variable still
holds. `sgd` and `sgd_momentum` update in place.

The foreach and fused kernels for one layer's parameters are one op here, so that each layer's update is visible;
PyTorch launches them in pieces, too. Gradients live until zero_grad: the last op of their layer holds them. With fp32
masters of 16-bit weights the gradients are first copied to fp32, except by the fused kernel, and the new weight is
copied back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim.errors import WorkloadError, near
from sim.trace.builder import TraceBuilder
from workloads import costs
from workloads.precision import BYTES, Precision
from workloads.tape import Value


@dataclass
class Slot:
    """One parameter with its tensors; their ids are replaced as the step progresses.

    weight: the parameter.
    layer: its layer, -1 for none.
    gradient: the gradient that the update reads.
    update: the tensor that is updated: the weight itself or its fp32 master.
    state: optimizer states by name.
    bytes: size of one state tensor.
    held: the gradient as backward produced it where the update reads a copy, else -1.
    """

    weight: Value
    layer: int
    gradient: int
    update: int
    state: dict[str, int]
    bytes: int
    held: int = -1


class Step:
    """Appends the ops of one optimizer step to a trace."""

    def __init__(self, builder: TraceBuilder, precision: Precision, slots: list[Slot]) -> None:
        self.builder, self.precision, self.slots = builder, precision, slots

    def by_layer(self, what: str, run: Callable[[str, list[Slot]], None]) -> None:
        """One op for the parameters of each layer, and one for those outside layers."""
        for layer in dict.fromkeys(slot.layer for slot in self.slots):
            name = "rest" if layer < 0 else f"h{layer}"
            run(f"optimizer.{name}.{what}", [slot for slot in self.slots if slot.layer == layer])

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
        name = ".".join(filter(None, (slot.weight.name, what, "new")))
        shape = () if what == "step" else slot.weight.shape
        return self.builder.tensor(name, size, role, layer=slot.layer, shape=shape, dtype=dtype, replaces=old)

    def op(self, name: str, reads: list[int], writes: list[int], touched: int, flops: int, workspace: int = 0) -> None:
        """Append an op of the update phase. touched: bytes that it touches, since it holds further tensors."""
        self.builder.op(
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
        if self.precision.master:
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
        self.op(name, reads, writes, costs.FOREACH_MOMENTS * size, 8 * _elements(slots))

    def _sqrt(self, name: str, slots: list[Slot]) -> None:
        for slot in slots:
            slot.state["denominator"] = self.temporary(slot, "denominator")
        writes = [s.state["denominator"] for s in slots]
        touched = costs.FOREACH_SQRT * sum(s.bytes for s in slots)
        self.op(name, [s.state["v"] for s in slots], writes, touched, _elements(slots))

    def _finish(self, name: str, slots: list[Slot]) -> None:
        reads = [t for s in slots for t in (s.state["m"], s.state["denominator"], s.update, *_held(s))]
        writes = [t for s in slots for t in self.new_weight(s)]
        touched = costs.FOREACH_STEP * sum(s.bytes for s in slots)
        self.op(name, reads, writes, touched, 5 * _elements(slots))

    def adamw_fused(self) -> None:
        """One kernel for everything."""
        self.by_layer("step", self._fused)

    def _fused(self, name: str, slots: list[Slot]) -> None:
        reads = [t for s in slots for t in (s.gradient, s.update, *s.state.values(), *_held(s))]
        writes = [t for s in slots for t in (*self.update_states(s, ("m", "v", "step")), *self.new_weight(s))]
        size = sum(s.bytes for s in slots)
        self.op(name, reads, writes, costs.FUSED_ADAM * size, costs.ADAM_FLOPS * _elements(slots))

    def adamw_loop(self) -> None:
        """One parameter after another."""
        if self.precision.master:
            self.by_layer("cast", self._cast)
        before = 0
        accesses = costs.FOREACH_MOMENTS + costs.FOREACH_SQRT + costs.FOREACH_STEP
        last = {slot.layer: slot for slot in self.slots}
        for slot in self.slots:
            reads = [slot.gradient, slot.update, slot.state["m"], slot.state["v"], *_held(slot)]
            if slot is last[slot.layer]:
                reads += [t for s in self.slots if s.layer == slot.layer for t in _gradients(s)]
            writes = [*self.update_states(slot, ("m", "v")), *self.new_weight(slot)]
            scratch = before + 2 * slot.bytes
            flops = costs.ADAM_FLOPS * slot.weight.elements
            reads = list(dict.fromkeys(reads))
            self.op(f"optimizer.{slot.weight.name}", reads, writes, accesses * slot.bytes, flops, scratch)
            before = slot.bytes

    # ---- SGD ---------------------------------------------------------------------------------

    def sgd(self) -> None:
        """Foreach, with or without momentum, without weight decay: everything in place."""
        if self.precision.master:
            self.by_layer("cast", self._cast)
        self.by_layer("step", self._sgd)

    def _sgd(self, name: str, slots: list[Slot]) -> None:
        reads = [t for s in slots for t in (s.gradient, s.update, *s.state.values(), *_held(s))]
        writes = [t for s in slots for t in (*self.update_states(s, tuple(s.state)), *self.new_weight(s))]
        momentum = any(s.state for s in slots)
        accesses, flops = (costs.SGD_MOMENTUM, costs.SGD_MOMENTUM_FLOPS) if momentum else (costs.SGD, costs.SGD_FLOPS)
        self.op(name, reads, writes, accesses * sum(s.bytes for s in slots), flops * _elements(slots))


def _elements(slots: list[Slot]) -> int:
    return sum(slot.weight.elements for slot in slots)


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
    "sgd": (Step.sgd, ()),
    "sgd_momentum": (Step.sgd, ("m",)),
}
"""The optimizers, and the states that they keep per parameter."""


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
        ids = {}
        for what in (*states, "master") if precision.master else states:
            scalar = what == "step"
            ids[what] = builder.tensor(
                f"{weight.name}.{what}",
                4 if scalar else size,
                "optimizer_state",
                layer=layer,
                shape=() if scalar else weight.shape,
                dtype="fp32" if scalar else precision.state,
            )
        master = ids.pop("master", weight.tensor)
        slots.append(Slot(weight, layer, gradients[weight.slot].tensor, master, ids, size))
    run(Step(builder, precision, slots))
