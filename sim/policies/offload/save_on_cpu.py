"""PyTorch's `save_on_cpu`: every saved tensor is copied to the host while the device waits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from sim.errors import PolicyError
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Policy, by_parameter
from sim.rewrites.rewriter import Rewriter
from sim.solvers.cascade import cascade
from sim.solvers.checkpoints import cached_casts
from sim.solvers.regions import Region
from sim.solvers.schedule import TraceIndex
from sim.solvers.undoing import forward_of
from sim.trace.chain import BACKWARD, FORWARD
from sim.trace.graph import Trace
from sim.trace.origin import Same
from sim.trace.tensor import ROLE_CODE

PAGEABLE = "host_pageable"
"""Name of the tier of ordinary, not page-locked, host memory on platforms that tell the two apart."""


class _Save(NamedTuple):
    """One saved copy: of `tensor`, once op `at` has run, read by the backward ops `readers`.

    used_until: the last forward op that needs the tensor, where the tensor itself goes to the host;
    -1 where a copy goes that stands for it.
    """

    tensor: int
    at: int
    readers: tuple[int, ...]
    used_until: int = -1


@dataclass(frozen=True, kw_only=True)
class SaveOnCpu(Policy):
    """Copy every tensor that autograd saves to the host at once, and back when its backward op runs.

    The device waits for each copy, one after the other: nothing overlaps, nothing is prefetched. As in
    PyTorch each saving op makes a copy of its own, of weights and inputs, too, so that a tensor saved
    twice is copied twice, and each backward op unpacks a new device copy, even of a weight that is resident.
    A rewrite adds a tensor, and an op of no time, for each copy but the last of a tensor. Copies of weights in
    a narrower type go to the host like every saved tensor, but autocast's cache holds them on the device, too,
    until the forward pass ends.
    Source: `torch.autograd.graph.save_on_cpu` (PyTorch documentation and source): pack copies and blocks,
        unpack copies back on the computing stream.
    Bounds: time = compute + all copies out + all copies in; in backward the device holds what one op needs.
    Departs: what is saved is what backward ops read here; a saved tensor that no kernel reads (the bias of
        a norm, the second copy that a loss keeps of its log-probabilities) is not copied. A tensor is saved
        once for each forward op whose backward ops read it, when that forward op has run; where that op does not
        touch the tensor, after its last forward use. While an added copy goes out
        it takes device memory beside its original; PyTorch copies straight from that. Tensors beyond the
        host's capacity go on to the next tier behind it, where the profile links one; PyTorch fails.

    pin_memory: False for ordinary host memory, the tier `host_pageable` where the platform has it.
    weights: whether weights are copied.
    duplicates: False copies each tensor once, after its last forward use, for all its backward readers.
    Raises PolicyError for a platform without a host tier.
    """

    moves = True
    rewrites = True
    saves = MappingProxyType({"copy": "PyTorch copies to the host straight from the saved tensor"})
    needs = frozenset({"host"})
    fidelity = "code"
    other_values = by_parameter(pin_memory=True, weights=False, duplicates=False)

    pin_memory: bool = False
    weights: bool = True
    duplicates: bool = True

    def plan(self, problem: Problem) -> Plan:
        """Two moves and two waits for each saved copy."""
        platform, trace = problem.platform, problem.trace
        if platform.host is None:
            raise PolicyError(f"save_on_cpu: {platform.name} has no host tier to copy to")
        host = PAGEABLE if not self.pin_memory and PAGEABLE in platform.tier_ids else platform.host.name
        after: dict[int, list[_Save]] = {}
        for save in self._saves(trace):
            after.setdefault(save.at, []).append(save)
        new = Rewriter(trace)
        ids = new.all_tensors()
        copies: dict[int, dict[int, int]] = {}  # backward op -> tensor -> the saved copy that it reads
        drops: dict[int, list[int]] = {}
        unpacked: set[int] = set()
        actions: list[Action] = []
        for op in trace.ops:
            saved = copies.get(op.id, {})
            reads = [saved.get(t, ids[t]) for t in op.reads]
            here = new.op(op, reads=reads, writes=[ids[t] for t in op.writes])
            for copy in saved.values():
                if copy not in unpacked:
                    unpacked.add(copy)
                    actions += [Move(copy, platform.home(op.device).name, before=here), Wait(copy, before=here)]
            packed = here
            # a tensor goes itself only after all that is copied from it
            for save in sorted(after.get(op.id, ()), key=lambda save: save.used_until):
                copy, stays = ids[save.tensor], save.used_until > op.id
                if save.used_until < 0:
                    copy, packed = _pack(new, trace, save, copy)
                elif stays:
                    drops.setdefault(save.used_until, []).append(copy)
                for reader in save.readers:
                    copies.setdefault(reader, {})[save.tensor] = copy
                actions += [Move(copy, host, keep=stays, after=packed), Wait(copy, after=packed)]
            actions += [Drop(copy, after=here) for copy in drops.get(op.id, ())]
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        built = new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)
        return Plan(built, cascade(built, platform, actions, host))

    def _saves(self, trace: Trace) -> list[_Save]:
        c, role = trace.op_columns, trace.tensor_columns.role
        undoes, cached = forward_of(trace), cached_casts(TraceIndex(trace), _forward_passes(trace))
        ignored = [ROLE_CODE["gradient"], ROLE_CODE["optimizer_state"]]
        if not self.weights:
            ignored.append(ROLE_CODE["weight"])
        found = []
        for t in range(len(trace.tensors)):
            producer, readers = int(trace.producer[t]), trace.readers(t)
            late = tuple(op for op in readers if c.phase[op] == BACKWARD)
            if role[t] in ignored or not late or not trace.tensor_columns.bytes[t]:
                continue
            early = [op for op in (producer, *readers) if op >= 0 and c.phase[op] == FORWARD and op < late[0]]
            if not early:
                continue
            last = max(early)
            until = cached.get(t, last)
            # one copy a forward op that saves it: a node of several backward ops unpacks it once
            nodes: dict[int, list[int]] = {}
            for op in late:
                own = undoes.get(op, last)
                nodes.setdefault(own if self.duplicates and own in early else last, []).append(op)
            saves = [_Save(t, at, tuple(ops)) for at, ops in nodes.items()]
            k = max(range(len(saves)), key=lambda i: saves[i].at)
            # the device must be there when those ops end: to wait for the copy, and before it comes back
            plain = not any(c.engine.get(op) or c.group.get(op) for op in (saves[k].at, until))
            if role[t] != ROLE_CODE["weight"] and plain:
                saves[k] = saves[k]._replace(used_until=until)
            found += saves
        return found


def _forward_passes(trace: Trace) -> list[Region]:
    """Runs of forward ops of one device with no backward op of that device between them: one per microbatch."""
    c = trace.op_columns
    device, phase = c.device.tolist(), c.phase.tolist()
    ops = sorted((op for op in range(len(phase)) if phase[op] <= BACKWARD), key=device.__getitem__)
    parts = groupby(ops, key=lambda op: (device[op], phase[op]))
    return [Region(tuple(part), ()) for (_, kind), part in parts if kind == FORWARD]


def _pack(new: Rewriter, trace: Trace, save: _Save, source: int) -> tuple[int, int]:
    """Add the tensor that stands for a saved copy, and the op that makes it; their ids."""
    old, at = trace.tensors[save.tensor], trace.ops[save.at]
    name = f"{old.name}.saved.{trace.op_columns.name[save.readers[0]]}"
    copy = new.tensor(old, Same(old.id), name=name, role="activation", saved_for="backward")
    where = {"phase": "forward", "layer": at.layer, "device": at.device}
    return copy, new.glue(f"{name}.pack", "copy", [source], [copy], duration=0, **where)
