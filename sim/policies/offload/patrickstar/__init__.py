"""PatrickStar: weights and their gradients live in chunks, which move between device and host as memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated

from annotated_types import Ge, Gt, Le

from sim.declared import Size
from sim.errors import IllegalPlan, OutOfMemory
from sim.hardware.platform import Platform
from sim.plan import Action, Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.patrickstar.chunks import Walk, chunks_of
from sim.policies.offload.patrickstar.measured import non_model
from sim.rewrites.fused_update import OPTIMIZER, fuse_updates, tiles
from sim.rewrites.host_update import OnHost, Split, device_updates, updated_on_host, updating_host
from sim.rewrites.masters import into_gradients
from sim.rewrites.weight_parts import with_weight_parts
from sim.solvers.streaming import parts_up
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE
from sim.units import to_bytes

UPDATE = PHASE_CODE["update"]
WEIGHT, STATE = ROLE_CODE["weight"], ROLE_CODE["optimizer_state"]
TILES = 0.8
"""Of the memory that is left, the part that optimizer states on the device may fill."""


@dataclass(frozen=True, kw_only=True)
class PatrickStar(Policy):
    """Chunks of weights are fetched when an op reads one of theirs, and evicted farthest next use first.

    Weights of a device are dealt to chunks in the order in which they are first read. A chunk is fetched and evicted as
    a whole. In backward a weight makes way for its gradient, which takes its place in the chunk. How many bytes of
    chunks the device may hold at a moment (before each op) is what the rest, measured in the iteration before, leaves
    of `share` of its memory, less two chunks. Where that is short, the chunk goes to the host whose next use on the
    device is farthest ahead (Belady's MIN), counting on into the next iteration. The first iteration measures: chunks
    may use only `warm_up_share`, and the least recently used one is evicted. As many tiles of the optimizer (the
    parameters of one layer) as fit beside the peak of the rest are updated on the device, where their states stay;
    the CPU updates the others in order, after their gradients have come down. In a run of several ranks that share the
    weights (`zero=3`) a group of chunks, one per rank, is dealt: each rank's chunk has its part of the group's weights,
    is used by the all-gather that brings the others' parts, and receives its part of the gradients from their
    reduce-scatter; then twice as many chunks as ranks are left free.
    Source: Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management", IEEE TPDS
        34(1), 2023, arXiv:2108.05818, and its repository (PatrickStar 0.4.6). `prefetch` and `share=0.9` are those of
        Gemini in Colossal-AI.
    Bounds: no policy that fetches on access evicts fewer equal chunks. Model state of a parameter in 16 bits with
        Adam: 14 bytes, on the device or on the host, whichever updates it, since the gradient replaces the weight and
        the new weight, which is written from the fp32 master, the gradient; 16 without masters, where the program
        holds gradients beyond their update, or beside recomputation that reads a weight after its gradient is there,
        which a replay of the plan tells. On p ranks each has 1/p of that, and sends 6 (p - 1) / p bytes per
        parameter and step. Padding of a chunk: less than the next weight, which did not fit; it is counted in `padding`
        of the plan's notes, and takes no memory here. Plans in O(ops x chunks).
    Departs: a chunk's tensors are copied one by one, each at the fixed time of a copy. The host keeps a weight, whose
        space its gradient takes later, so that weights are evicted without a copy. Gradients of the CPU's tiles do not
        return to the device. What is dealt to ranks is 1/p of each weight instead of every p-th chunk, since one rank
        is simulated for all, whose chunks would have other weights; and an all-gather brings a layer's weights, one
        layer ahead, instead of a group of chunks on access: as many bytes in collectives of other sizes. What a
        reduce-scatter gives the CPU leaves when that ends, and what the device updates returns when the update reads
        it. Whole weights whose state alone is dealt (`zero` 1 and 2), which the paper has not, are in no chunk.
        Optimizer states on the device never leave it. What is measured is exact; the paper samples.

    chunk: bytes of weights in a chunk, an int or text such as "128 MB" (64 Mi elements in 16 bits).
    share: part of the device's memory that is counted on after the first iteration.
    warm_up_share: part of the device's memory for chunks in the first iteration.
    prefetch: how many chunks ahead of the one that is read are fetched, as far as there is space; 0 fetches on access.
    Raises PolicyError for a chunk of no bytes, or a platform without host tier or engine `cpu`.
    """

    moves = True
    rarely = "chunks move only where not all of them fit, and nets this small have few"
    rewrites = True
    needs = frozenset({"host", "cpu"})
    warm_up = 1
    fidelity = "equations"
    saves = MappingProxyType({"fusion": "an optimizer step is one kernel per tile, which touches each operand once"})
    manages = ("gradients", "optimizer_state", "weights")
    other_values = by_parameter(chunk=1 << 24, share=0.5, prefetch=2)
    unseen = by_parameter(warm_up_share="the iteration that it shapes is not the one whose result is reported")

    chunk: Annotated[Size, Ge(1)] = 1 << 27
    share: Annotated[float, Gt(0), Le(1)] = 0.8
    warm_up_share: Annotated[float, Gt(0), Le(1)] = 0.2
    prefetch: Annotated[int, Ge(0)] = 0

    def plan(self, problem: Problem) -> Plan:
        """Which tiles the CPU updates; where each chunk is at each op."""
        plan = self._plan(problem, in_place=True)
        try:
            problem.evaluate(plan)
        except IllegalPlan:  # recomputation beside it reads a weight after the gradient has taken its place
            return self._plan(problem, in_place=False)
        except OutOfMemory:
            pass
        return plan

    def _plan(self, problem: Problem, *, in_place: bool) -> Plan:
        """in_place: whether a gradient takes the place of its 16-bit weight, and the new weight the gradient's."""
        platform, trace = problem.platform, problem.trace
        host = updating_host(platform, "patrickstar", "to move chunks to")
        updates = device_updates(trace)
        rest = non_model(problem.history[-1].log) if problem.history else {}
        budgets = {d: platform.home(d).capacity for d in range(trace.devices)}
        kept = self._kept(trace, budgets, rest) if problem.history else []
        stay = {op for tile in kept for op in tile}
        updates = [op for op in updates if op not in stay]
        fused = fuse_updates(with_weight_parts(trace, updates), updates) if updates else trace
        fused = into_gradients(fused) if in_place else fused
        own = {trace.op_columns.name[op] for op in stay}
        split = Split(fused, [op for op in device_updates(fused) if fused.op_columns.name[op] not in own])
        new = updated_on_host(split, in_place=True) if split.updates else None
        whole = new.trace if new else fused
        actions: list[Action] = []
        place: dict[int, str] = {}
        size = to_bytes(self.chunk)
        padding = 0
        for device, budget in budgets.items():
            home, names = platform.home(device).name, whole.op_columns.name
            chunks = chunks_of(whole, platform, device, size)
            if not chunks:
                continue
            padding += sum(max(size - chunk.bytes, 0) for chunk in chunks)
            place |= {w.id: home if w.on_device else host for chunk in chunks for w in chunk.weights}
            room = [int(self.warm_up_share * budget)] * len(names)
            if problem.history:
                states = sum(_states(trace, tile) for tile in kept if trace.op_columns.device[tile[0]] == device)
                ranks = max(chunk.ranks for chunk in chunks)
                most = int(self.share * budget) - states - 2 * ranks * max(chunk.bytes for chunk in chunks)
                ops = [op for op in range(len(names)) if whole.op_columns.device[op] == device]
                used = [rest.get(names[op], 0) for op in ops]
                for op, two in zip(ops, pairwise([*used, 0]), strict=True):
                    room[op] = most - max(two)
            walk = Walk(whole, chunks, room, home, host, belady=bool(problem.history))
            actions += walk.actions(self.prefetch)
        if new:
            actions += _rest(split, new, host, actions)
            homes = [platform.home(device).name for device in budgets]
            actions += parts_up(whole, [new.ops[op] for op in split.updates], homes)
        place |= _states_placed(whole, platform, host)
        return Plan(whole, tuple(actions), place=place, notes={"padding": padding, "tiles_on_device": len(kept)})

    def _kept(self, trace: Trace, budgets: Mapping[int, int], rest: Mapping[str, int]) -> list[list[int]]:
        """The first tiles whose states fit, per device, into `TILES` of what weights and the peak of the rest leave."""
        c, t = trace.op_columns, trace.tensor_columns
        optimizer = [op for op in device_updates(trace) if c.kind[op] == OPTIMIZER]
        grouped = sorted(tiles(trace, optimizer))
        found = []
        for device, budget in budgets.items():
            own = [op for op in range(len(c.name)) if c.device[op] == device]
            read = {x for op in own for x in trace.reads(op)}
            weights = sum(int(t.bytes[x]) for x in read if t.role[x] == WEIGHT and trace.producer[x] < 0)
            left = (budget - weights - max((rest.get(c.name[op], 0) for op in own), default=0)) * TILES
            for tile in (tile for tile in grouped if c.device[tile[0]] == device):
                left -= _states(trace, tile)
                if left < 0:
                    break
                found.append(tile)
        return found

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The update beside the device, as here; without memory to save it may still be the faster one."""
        return {"chunks": self.plan(problem)}


def _states(trace: Trace, tile: Sequence[int]) -> int:
    """Bytes of the optimizer states that a tile has."""
    t, read = trace.tensor_columns, {x for op in tile for x in trace.reads(op)}
    return sum(int(t.bytes[x]) for x in read if t.role[x] == STATE and trace.producer[x] < 0)


def _states_placed(trace: Trace, platform: Platform, host: str) -> dict[int, str]:
    """Optimizer states begin where their update runs, wherever the iteration before has left them."""
    c, t, found = trace.op_columns, trace.tensor_columns, dict[int, str]()
    for op in range(len(c.name)):
        if c.phase[op] == UPDATE and op not in c.group:
            where = host if op in c.engine else platform.home(int(c.device[op])).name
            found |= {x: where for x in trace.reads(op) if t.role[x] == STATE and trace.producer[x] < 0}
    return found


def _rest(split: Split, new: OnHost, host: str, planned: Sequence[Action]) -> Iterator[Action]:
    """Gradients that are in no chunk leave when they are complete; the CPU's first update waits for none of them."""
    moved = {action.tensor for action in planned if isinstance(action, Move)}
    for t in split.ready():
        if new.tensors[t] not in moved:
            yield Move(new.tensors[t], host, after=new.ops[split.last_use[t]])
