"""ZeRO-Offload: the optimizer and its states reside on the host, weights for forward and backward on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from sim.declared import Size
from sim.errors import PolicyError, ProfileError
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.zero_offload.fused_update import fuse_updates
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.origin import Same
from sim.units import to_bytes

UPDATE = PHASE_CODE["update"]
CPU = "cpu"
"""Name of the engine that updates."""


@dataclass(frozen=True, kw_only=True)
class ZeroOffload(Policy):
    """Gradients are offloaded as they are produced, the CPU runs the update, and new weights come back in tiles.

    The update runs on the engine `cpu`, on host copies of the weights and on optimizer states that never leave
    the host. Whatever ops the trace's optimizer consists of, the CPU runs one fused op per tile: the parameters of one
    layer (those without a layer form another tile), or where the trace has no layers the parameters that its ops
    join. It touches gradient, weight and states once: 28 bytes per parameter with Adam. A gradient leaves once its
    bucket is full. When all have arrived the updates run; the new weights of a tile are copied to the device while the
    next tile is updated. The device's old copy is released when the new one is about to arrive.
    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021,
        arXiv:2101.06840, for one device; on several, each device sends what its own update ops read.
    Bounds: with 16-bit weights and gradients of M elements 2M bytes go down and 2M up, the least for
        any split that keeps the update on the CPU. Time = forward + backward + last bucket + the longer of
        updates and copies up (+ one tile). Model state on the device: weights and one bucket.
    Departs: an update is priced by the platform's model of the CPU, even where a duration was measured. A trace
        whose optimizer takes all parameters in one op, as a captured one does, has one tile. Ops of the update
        phase that are no optimizer's (clipping) run on the CPU one by one.
        Where an update op reads a 16-bit weight, the host keeps a copy of it beside the fp32 master. Under
        autocast device weights and gradients are fp32, and so are the copies. Conversion takes the CPU
        no time of its own, and gradients of a bucket are copied one by one.

    bucket: bytes of gradients that are copied together, an int or text such as "50 MB"; 0 copies each at once.
    delayed: delayed parameter update: the CPU updates with the gradients of the previous iteration while the
        device runs forward and backward, so that time = the longer of the two (+ the copies after).
        Weights are one step stale (`lossless` is then False); the gradients of an iteration are carried
        to the next, and new weights take device space beside the old ones as soon as they exist. Needs
        updates that read no result of other updates, so no clipping by the norm of all gradients.
    weights: where new weights go: back to the `device`, or they stay on the `host` for another policy to fetch, as in
        `zero_offload(weights=host) + weight_streaming`; then this one does not manage weights, and alone it leaves each
        op waiting for those that it reads.
    Raises PolicyError for a bucket that is not a size, a platform without host tier or an engine `cpu`, a delayed
        update in several steps, or one whose weights stay on the host.
    """

    moves = True
    rewrites = True
    needs = frozenset({"host", "cpu"})
    fidelity = "equations"
    saves = MappingProxyType({"fusion": "the CPU's optimizer is one kernel, which touches each operand once"})
    manages = ("gradients", "optimizer_state", "weights")
    other_values = by_parameter(bucket=1 << 26, delayed=True, weights="host")

    bucket: Size = 0
    delayed: bool = False
    weights: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        # traits that a parameter decides
        if self.delayed:
            object.__setattr__(self, "lossless", False)
        if self.weights == "host":
            if self.delayed:
                raise PolicyError("zero_offload: a delayed update needs its weights on the device: weights='device'")
            object.__setattr__(self, "manages", ("gradients", "optimizer_state"))

    def plan(self, problem: Problem) -> Plan:
        """The trace with its update on the CPU, the copies of gradients and weights, and the waits."""
        platform, trace = problem.platform, problem.trace
        if platform.host is None:
            raise PolicyError(f"zero_offload: {platform.name} has no host tier to offload to")
        try:
            host = platform.engines[platform.engine_for(0, CPU)].home
        except ProfileError:
            raise PolicyError(f"zero_offload: {platform.name} has no engine {CPU!r} to update on") from None
        updates = _updates(trace)
        if not updates:
            return Plan(trace)
        split = _Split(fuse_updates(trace, updates))
        if self.delayed:
            split.check_independent()
        new = _rewrite(split, self.delayed)
        homes = [platform.home(device).name for device in range(trace.devices)]
        actions = [*_gradients_down(split, new, host, to_bytes(self.bucket), self.delayed)]
        if self.weights == "device":
            actions += _weights_up(split, new, host, homes, self.delayed)
        place = {} if self.weights == "device" else {new.tensors[t]: host for t in new.fresh}
        return Plan(new.trace, tuple(actions), place=place)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The update beside the device, as here; without memory to save it may still be the faster one."""
        return {"the update on the CPU": self.plan(problem)}


def _updates(trace: Trace) -> list[int]:
    """The ops of the update phase that the device itself runs."""
    c = trace.op_columns
    ops = range(len(trace.ops))
    return [op for op in ops if c.phase[op] == UPDATE and not c.engine.get(op) and not c.group.get(op)]


class _Split:
    """Which ops update, and which tensors cross between them and the rest, by ids of the old trace.

    last_use: per tensor the last op other than an update that reads or produces it.
    read: the tensors that updates read.
    gradients: tensors that updates need and other ops produce.
    weights: tensors that exist from the beginning and that both need, with the value each ends as.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.updates = set(_updates(trace))
        self.last_use: dict[int, int] = {}
        used: dict[int, None] = {}
        self.read: set[int] = set()
        for op in range(len(trace.ops)):
            if op not in self.updates:
                self.last_use.update(dict.fromkeys((*trace.reads(op), *trace.writes(op)), op))
                continue
            overwritten = [int(trace.tensor_columns.replaces[t]) for t in trace.writes(op)]
            used.update(dict.fromkeys((*trace.reads(op), *(t for t in overwritten if t >= 0))))
            self.read.update(trace.reads(op))
        others = [t for t in used if int(trace.producer[t]) not in self.updates]
        self.gradients = [t for t in others if trace.producer[t] >= 0]
        self.weights = {t: self._end(t) for t in others if trace.producer[t] < 0 and t in self.last_use}

    def _end(self, tensor: int) -> int:
        while self.trace.replaced_by[tensor] >= 0:
            tensor = int(self.trace.replaced_by[tensor])
        return tensor

    def check_independent(self) -> None:
        """Raise PolicyError where an update reads a result of another one."""
        for op in sorted(self.updates):
            for t in self.trace.reads(op):
                if int(self.trace.producer[t]) in self.updates:
                    names, producer = self.trace.op_columns.name, int(self.trace.producer[t])
                    raise PolicyError(
                        f"zero_offload: delayed: update {names[op]!r} reads what {names[producer]!r} makes"
                    )


@dataclass
class _Rewritten:
    """The new trace, and the new ids of old ops and tensors.

    kept: per weight that updates read the host's copy at the start.
    fresh: per weight the tensor that is copied up: its new value, or a copy of that where the host keeps it.
    before: per gradient that of the previous iteration.
    """

    ops: dict[int, int] = field(default_factory=dict)
    tensors: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    fresh: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    trace: Trace = field(init=False)


def _rewrite(split: _Split, delayed: bool) -> _Rewritten:
    """Updates on the CPU, on host copies of the weights; first of all ops where they are delayed."""
    old, new, out = split.trace, Rewriter(split.trace), _Rewritten()
    outputs = set(old.outputs)
    out.tensors = [new.tensor(t) for t in old.tensors]
    for t, end in split.weights.items():
        if t in split.read:
            out.kept[t] = new.tensor(old.tensors[t], name=f"{old.tensors[t].name}.{CPU}")
        if end != t and end in outputs:
            rises = old.tensors[end]
            out.fresh[t] = new.tensor(rises, name=f"{rises.name}.up") if t in out.kept else out.tensors[end]
    if delayed:
        for t in split.gradients:
            gradient = old.tensors[t]
            out.before[t] = new.tensor(gradient, Same(t, -1), name=f"{gradient.name}.before")
    stand_ins = {**out.kept, **out.before}
    for tensor in old.tensors:
        replaced = tensor.replaces
        if replaced is not None and (replaced not in split.weights or replaced in out.kept):
            new.builder.take_over(out.tensors[tensor.id], stand_ins.get(replaced, out.tensors[replaced]))
    beside = {split.weights[t]: fresh for t, fresh in out.fresh.items() if t in out.kept}
    for op in sorted(old.ops, key=lambda op: (delayed and op.id not in split.updates, op.id)):
        updates = op.id in split.updates
        reads = [stand_ins.get(t, out.tensors[t]) if updates else out.tensors[t] for t in op.reads]
        writes = [out.tensors[t] for t in op.writes]
        if updates:
            writes += [beside[t] for t in op.writes if t in beside]
            out.ops[op.id] = new.op(op, reads=reads, writes=writes, engine=CPU, duration=None)
        else:
            out.ops[op.id] = new.op(op, reads=reads, writes=writes)
    ends = [out.tensors[t] for t in old.outputs] + list(beside.values())
    carry = [(out.tensors[a], out.kept.get(b, out.tensors[b]) if a in beside else out.tensors[b]) for a, b in old.carry]
    carry += [(beside[a], out.tensors[b]) for a, b in old.carry if a in beside]
    if delayed:
        ends += [out.tensors[t] for t in split.gradients if t not in outputs]
        carry += [(out.tensors[t], before) for t, before in out.before.items()]
    out.trace = new.build(outputs=ends, carry=carry)
    return out


def _gradients_down(split: _Split, new: _Rewritten, host: str, bucket: int, delayed: bool) -> Iterator[Action]:
    """Each bucket's moves when it is full, the last one's after the last gradient; then the wait for all."""
    size = split.trace.tensor_columns.bytes
    waiting: list[int] = []
    ready = sorted(split.gradients, key=lambda t: (split.last_use[t], t))
    for i, t in enumerate(ready):
        waiting.append(t)
        if i + 1 == len(ready) or sum(int(size[one]) for one in waiting) >= bucket:
            at = new.ops[split.last_use[t]]
            yield from (Move(new.tensors[one], host, after=at) for one in waiting)
            waiting = []
    first: dict[int, int] = {}
    for op in sorted(split.updates):
        first.setdefault(int(split.trace.op_columns.device[op]), op)
    if not delayed:
        for op in first.values():
            yield from (Wait(new.tensors[t], before=new.ops[op]) for t in ready)


def _weights_up(split: _Split, new: _Rewritten, host: str, homes: list[str], delayed: bool) -> Iterator[Action]:
    """Each new weight's move when the update that makes it has ended, and the release of what it replaces."""
    trace = split.trace
    for t, fresh in new.fresh.items():
        used = split.last_use[t]
        home = homes[int(trace.op_columns.device[used])]
        made = new.ops[int(trace.producer[split.weights[t]])]
        yield Drop(new.tensors[t], home, after=new.ops[used] if delayed else made)
        yield Move(fresh, home, after=made)
    for t, before in new.before.items():
        if trace.replaced_by[t] < 0:
            last = max(op for op in trace.readers(t) if op in split.updates)
            yield Drop(before, host, after=new.ops[last])
