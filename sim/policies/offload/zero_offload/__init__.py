"""ZeRO-Offload: the optimizer and its states reside on the host, weights for forward and backward on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from sim.declared import Size
from sim.errors import PolicyError
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.zero_offload.cut import cheapest_cut
from sim.policies.sharing import rewriting
from sim.rewrites.fused_update import fuse_updates
from sim.rewrites.host_update import OnHost, Split, device_updates, updated_on_host, updating_host
from sim.rewrites.masters import into_gradients, without_held_weights
from sim.rewrites.weight_parts import with_weight_parts
from sim.solvers.streaming import buckets, idle, parts_up
from sim.trace.graph import Trace
from sim.units import to_bytes


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
        arXiv:2101.06840. On d devices that share states (`zero` 1 to 3; its own runs have 2) each sends its part of the
        gradients down and its part of the new weights up, 2M / d each, and the network gathers the weights.
    Bounds: with 16-bit weights and gradients of M elements 2M bytes go down and 2M up, the least for
        any split that keeps optimizer states on the CPU. With fp32 masters the host holds 14M: 12M of states and 2M of
        gradients, whose places the new weights take (16M where the update is delayed). Time = forward + backward + last
        bucket + the longer of updates and copies up (+ one tile). Model state on the device: weights, one bucket, and
        the gradients that wait for the link where backward is faster (GPT-3 2.7B with a sample of 512 tokens: almost
        all).
    Departs: an update is priced by the platform's model of the CPU, even where a duration was measured. A trace
        whose optimizer takes all parameters in one op, as a captured one does, has one tile. Ops of the update
        phase that are no optimizer's (clipping) run on the CPU one by one.
        Where an update op reads a weight that has no fp32 master, the host keeps a copy of it, unless weights reside
        there anyway. Under autocast device weights and gradients are fp32, and so are the copies. Conversion takes the
        CPU no time of its own, and gradients of a bucket are copied one by one.

    bucket: bytes of gradients that are copied together, an int or text such as "50 MB"; 0 copies each at once.
    delayed: delayed parameter update: the CPU updates with the gradients of the previous iteration while the
        device runs forward and backward, so that time = the longer of the two (+ the copies after).
        Weights are one step stale (`lossless` is then False); the gradients of an iteration are carried
        to the next, and new weights take device space beside the old ones as soon as they exist. Needs
        updates that read no result of other updates, so no clipping by the norm of all gradients.
    weights: where new weights go: back to the `device`, or they stay on the `host` for another policy to fetch, as in
        `zero_offload(weights=host) + weight_streaming`, which then owns them; alone, each op waits for those that it
        reads.
    partition: which ops of the update the CPU runs: those of the whole `phase`, or of the `cut` of the data-flow graph
        with the fewest bytes across it (section 3), which may leave clipping or scaling on the device.
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
    unseen = by_parameter(partition="needs an update with ops besides the optimizer's: test_zero_offload_cut.py")

    bucket: Size = 0
    delayed: bool = False
    weights: Literal["device", "host"] = "device"
    partition: Literal["phase", "cut"] = "phase"

    def __post_init__(self) -> None:
        # traits that a parameter decides
        if self.delayed:
            object.__setattr__(self, "lossless", False)
        if self.weights == "host":
            if self.delayed:
                raise PolicyError("zero_offload: a delayed update needs its weights on the device: weights='device'")
            object.__setattr__(self, "yields", ("weights",))

    def plan(self, problem: Problem) -> Plan:
        """The trace with its update on the CPU, the copies of gradients and weights, and the waits."""
        platform, trace = problem.platform, problem.trace
        host = updating_host(platform, "zero_offload", "to offload to")
        updates = device_updates(trace)
        chosen = cheapest_cut(trace) if self.partition == "cut" else updates
        if not chosen:
            return Plan(trace)
        homes = tuple(platform.home(device).name for device in range(trace.devices))
        key = (self, tuple(chosen), host, homes)
        return rewriting(trace, key, updates, lambda: self._rewritten(trace, chosen, host, homes))

    def _rewritten(self, trace: Trace, chosen: Sequence[int], host: str, homes: Sequence[str]) -> Plan:
        """The plan where the CPU runs these ops of the update."""
        fused = fuse_updates(with_weight_parts(trace, chosen), chosen)
        if self.weights == "device":
            fused = without_held_weights(fused if self.delayed else into_gradients(fused))
        stay = {trace.op_columns.name[op] for op in {*device_updates(trace)} - {*chosen}}
        split = Split(fused, [op for op in device_updates(fused) if fused.op_columns.name[op] not in stay])
        if self.delayed:
            split.check_independent("zero_offload: delayed")
        new = updated_on_host(split, self.delayed, in_place=self.weights == "host")
        actions = [*_gradients_down(split, new, host, to_bytes(self.bucket), self.delayed)]
        if self.weights == "device":
            actions += _weights_up(split, new, host, homes, self.delayed)
        actions += parts_up(new.trace, [new.ops[op] for op in split.updates], homes)
        place = dict.fromkeys(idle(new.trace, "optimizer_state"), host)
        if self.weights == "host":
            place.update({new.tensors[t]: host for t in split.weights})
        return Plan(new.trace, tuple(actions), place=place)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The update beside the device, as here; without memory to save it may still be the faster one."""
        return {"the update on the CPU": self.plan(problem)}


def _gradients_down(split: Split, new: OnHost, host: str, bucket: int, delayed: bool) -> Iterator[Action]:
    """Each bucket's moves when it is full, the last one's after the last gradient; then the wait for all."""
    ready = split.ready()
    full = [(new.tensors[t], new.ops[split.last_use[t]]) for t in ready]
    for tensors, at in buckets(full, new.trace.tensor_columns.bytes, bucket):
        yield from (Move(tensor, host, after=at) for tensor in tensors)
    first: dict[int, int] = {}
    for op in sorted(split.updates):
        first.setdefault(int(split.trace.op_columns.device[op]), op)
    if not delayed:
        for op in first.values():
            yield from (Wait(new.tensors[t], before=new.ops[op]) for t in ready)


def _weights_up(split: Split, new: OnHost, host: str, homes: Sequence[str], delayed: bool) -> Iterator[Action]:
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
