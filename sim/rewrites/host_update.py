"""A rewrite: the update runs on the host's processor, on host copies of the weights, as one op per tile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sim.errors import PolicyError, ProfileError
from sim.hardware.platform import Platform
from sim.rewrites.kept import kept
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.origin import Same

UPDATE = PHASE_CODE["update"]
CPU = "cpu"
"""Name of the engine that updates."""


def updating_host(platform: Platform, policy: str, purpose: str) -> str:
    """The home tier of the CPU that updates.

    policy, purpose: for the error: which policy asks, and what the host tier is for, as in "to offload to".
    Raises PolicyError where the machine has no host tier or no such engine.
    """
    if platform.host is None:
        raise PolicyError(f"{policy}: {platform.name} has no host tier {purpose}")
    try:
        return platform.engines[platform.engine_for(0, CPU)].home
    except ProfileError:
        raise PolicyError(f"{policy}: {platform.name} has no engine {CPU!r} to update on") from None


def device_updates(trace: Trace) -> list[int]:
    """The ops of the update phase that the device itself runs."""
    c = trace.op_columns
    ops = range(len(trace.ops))
    return [op for op in ops if c.phase[op] == UPDATE and not c.engine.get(op) and not c.group.get(op)]


class Split:
    """Which ops update on the CPU, and which tensors cross between them and the rest, by ids of the old trace.

    updates: of the device's ops of the update phase, all where none are given.
    last_use: per tensor the last op other than an update that reads or produces it.
    read: the tensors that updates read.
    gradients: tensors that updates need and other ops produce.
    weights: tensors that exist from the beginning and that both need, or that updates write elsewhere, with the value
        each ends as.
    """

    def __init__(self, trace: Trace, updates: Collection[int] | None = None) -> None:
        self.trace = trace
        self.updates = set(device_updates(trace) if updates is None else updates)
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
        self.weights = {t: self.end(t) for t in others if trace.producer[t] < 0 and t in self.last_use}
        for end, t in trace.carry:  # where the new value takes another place
            if trace.replaced_by[t] < 0 and trace.producer[end] in self.updates and t in self.last_use:
                self.weights.setdefault(t, end)

    def end(self, tensor: int) -> int:
        """The value that takes over its storage last."""
        while self.trace.replaced_by[tensor] >= 0:
            tensor = int(self.trace.replaced_by[tensor])
        return tensor

    def ready(self) -> list[int]:
        """The gradients in the order in which they are complete."""
        return sorted(self.gradients, key=lambda t: (self.last_use[t], t))

    def check_independent(self, who: str) -> None:
        """Raise PolicyError where an update reads a result of another one. who: the policy, and what asks for it."""
        for op in sorted(self.updates):
            for t in self.trace.reads(op):
                if int(self.trace.producer[t]) in self.updates:
                    names, producer = self.trace.op_columns.name, int(self.trace.producer[t])
                    raise PolicyError(f"{who}: update {names[op]!r} reads what {names[producer]!r} makes")


@dataclass
class OnHost:
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


def updated_on_host(split: Split, delayed: bool = False, in_place: bool = False) -> OnHost:
    """Updates on the CPU, on host copies of the weights; first of all ops where they are delayed.

    in_place: no such copies: the weights themselves reside where the CPU updates them, and their new values replace
        them there. Only one that no update reads, such as a 16-bit weight written from its master, gets a new tensor.
    """

    def make() -> tuple[OnHost, Trace]:
        out = _updated_on_host(split, delayed, in_place)
        return out, out.trace

    return kept(split.trace, ("updated_on_host", frozenset(split.updates), delayed, in_place), make)


def _updated_on_host(split: Split, delayed: bool, in_place: bool) -> OnHost:
    old, new, out = split.trace, Rewriter(split.trace), OnHost()
    outputs = set(old.outputs)
    out.tensors = new.all_tensors()
    own = {t for t in split.weights if in_place and t in split.read}
    for t, end in split.weights.items():
        if t in own:
            continue
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
    replaces = old.tensor_columns.replaces
    for t in np.flatnonzero(replaces >= 0).tolist():
        replaced = int(replaces[t])
        if replaced in stand_ins:
            new.builder.take_over(out.tensors[t], stand_ins[replaced])
        elif replaced in split.weights and replaced not in own:
            new.builder.take_over(out.tensors[t], -1)
    beside = {split.weights[t]: fresh for t, fresh in out.fresh.items() if t in out.kept}
    copy, device = new.copier(), old.op_columns.device.tolist()
    for op in sorted(range(len(device)), key=lambda op: (delayed and op not in split.updates, op)):
        reads, writes = old.reads(op), [out.tensors[t] for t in old.all_writes[op]]
        if op in split.updates:
            writes += [beside[t] for t in old.all_writes[op] if t in beside]
            read = [stand_ins.get(t, out.tensors[t]) for t in reads]
            out.ops[op] = new.op(old.ops[op], reads=read, writes=writes, engine=CPU, duration=None)
        else:
            out.ops[op] = copy(op, [out.tensors[t] for t in reads], writes, device[op])
    ends = [out.tensors[t] for t in old.outputs] + list(beside.values())
    carry = [(out.tensors[a], out.kept.get(b, out.tensors[b]) if a in beside else out.tensors[b]) for a, b in old.carry]
    carry += [(beside[a], out.tensors[b]) for a, b in old.carry if a in beside]
    if delayed:
        ends += [out.tensors[t] for t in split.gradients if t not in outputs]
        carry += [(out.tensors[t], before) for t, before in out.before.items()]
    out.trace = new.build(outputs=ends, carry=carry)
    return out


class Resident(NamedTuple):
    """A trace with weights that are in two places: copies on the device beside those on the host.

    copies: per copy the last op that reads it, and its new value.
    """

    trace: Trace
    copies: Mapping[int, tuple[int, int]]


def with_resident(trace: Trace, reads: Mapping[int, Sequence[int]]) -> Resident:
    """Some ops read a resident copy of a weight; its update makes a new one for the next iteration.

    Ops keep their ids. reads: per weight, which an op updates, the ops that read the copy, in order.
    """
    new, copies = Rewriter(trace), dict[int, tuple[int, int]]()
    new.all_tensors()
    copy_of: dict[tuple[int, int], int] = {}  # per op and weight
    fresh_of: dict[int, int] = {}  # per last value of a weight
    ends = [(t, last) for last, t in trace.carry if t in reads]
    carry = list(trace.carry)
    for t, end in ends:
        old, final = trace.tensors[t], trace.tensors[end]
        copy = new.tensor(old, name=f"{old.name}.resident")
        fresh = new.tensor(final, name=f"{final.name}.resident", replaces=None)
        copies[copy] = reads[t][-1], fresh
        fresh_of[end] = fresh
        carry.append((fresh, copy))
        copy_of.update({(op, t): copy for op in reads[t]})
    add = new.copier()
    for op, device in enumerate(trace.op_columns.device.tolist()):
        read, writes = [copy_of.get((op, t), t) for t in trace.reads(op)], trace.writes(op)
        if made := [fresh_of[t] for t in writes if t in fresh_of]:
            new.op(trace.ops[op], reads=read, writes=[*writes, *made])
        else:
            add(op, read, writes, device)
    return Resident(new.build(outputs=[*trace.outputs, *fresh_of.values()], carry=carry), copies)
