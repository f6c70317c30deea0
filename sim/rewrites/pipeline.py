"""The rewrite for pipeline parallelism: layers on several devices, microbatches, and sends between the stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from sim.errors import TraceError
from sim.rewrites.batching import batched, split_batch_ops
from sim.rewrites.rewriter import Rewriter
from sim.rewrites.schedules import DIVIDED, SCHEDULES, Unit, device_of, unit_orders
from sim.rewrites.slots import Slot, initial_weights, parameters_of, split_updates
from sim.rewrites.steps import Version, consecutive_steps, updated
from sim.rewrites.tied_weights import with_copies, with_kept_terms
from sim.trace.columns import slots_of
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.layers import op_layers
from sim.trace.op import KIND_CODE, PHASE_CODE, PHASES
from sim.trace.origin import Same
from sim.trace.tensor import ROLE_CODE

__all__ = ["SCHEDULES", "computed_anywhere", "parts_of", "pipeline"]

COMPUTED = ("elementwise", "copy", "reduce", "other")
"""Kinds of op that each stage may run by itself."""


def pipeline(
    trace: Trace,
    stage_of_layer: Sequence[int] | Mapping[int, int],
    micro_batches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    ranks: int = 1,
    dealt: bool = False,
    experts: int = 1,
    buckets: Sequence[int] = (),
    parts: int = 0,
    own_statistics: bool = False,
) -> Trace:
    """Run the layers as pipeline stages, stage i on device i, on consecutive microbatches.

    Updates come last. Ops of no layer are assigned by position: before the first layer to stage 0, after the last one
    to the last stage, mirrored in backward; updates run where their weight is read first. An op that updates the
    weights of several stages is divided by parameter, and updates that need each other's results run in rounds. A
    tensor that another stage reads is sent as soon as it is produced, and received into space that the reading stage
    takes one unit (forward, backward) before the one that needs it (ops `send` and `recv` in one group), so that bytes
    arrive beside what runs before; later readers there use the received copy. An input that several stages read is
    present on each, and what is computed of inputs and constants alone (rotary tables, masks, positions;
    `computed_anywhere`) each stage computes itself in the unit that first reads it, as in Megatron-LM and wherever a
    stage is a module of its own. A weight of several stages (tied embeddings) is on each of them, with gradient, states
    and update of its own; each sums its part of the gradient over the microbatches, and these are summed once, after
    the last one (`sim.rewrites.tied_weights`). With `dealt`, or experts divided among replicas, the stage that reads it
    first sums the gradient of each microbatch and sends the others the result.

    Under `pipedream` each microbatch is a step of its own, see `sim.rewrites.steps`: an update follows its backward,
    and on stage s of S the forward of a later one runs on weights that are S - 1 - s updates old, which are kept for
    its backward. So a weight has S - s versions there. One of two stages is on the first alone, which sends it for each
    step; it has the versions of that stage, and so has what an op reads with it (the bias of a tied head).

    trace: a trace on one device.
    stage_of_layer: the stage of every layer, by index; with `chunks` its part of the model.
    micro_batches: number of microbatches.
    schedule: one of `sim.rewrites.schedules.SCHEDULES`.
    chunks: parts of the model per device: of S devices, part q runs on device q mod S; where the schedule folds the
        model (`FOLDED`), parts S to 2 S - 1 on the devices S - 1 to 0.
    parts: of the model, of which the first and the last may have no layers; by default as many as layers are on.
    ranks, dealt, experts, buckets: symmetric replicas of the pipeline, of which this is one, see `split_batch_ops`.
    own_statistics: whether batch norm may have statistics of each microbatch, see there; under `pipedream` it has.

    Raises TraceError for a trace on several devices, a layer without a stage, parts that do not divide among devices,
    a number of microbatches that the schedule has no order for, replicas under `pipedream`, or an update that needs the
    weights of several stages and cannot be divided.
    """
    table = stage_of_layer if isinstance(stage_of_layer, Mapping) else dict(enumerate(stage_of_layer))
    parts = parts or len(set(table.values()))
    if {0, parts - 1, *table.values()} != set(range(parts)):
        raise TraceError("pipeline: stages must be numbered 0, 1, … without a gap")
    if chunks < 1 or parts % chunks:
        raise TraceError(f"pipeline: {parts} parts do not divide into {chunks} per device")
    stages = max(parts // chunks, 1)
    orders = unit_orders(schedule, stages, chunks, micro_batches)
    if trace.devices > 1:
        raise TraceError("pipeline: the trace is already on several devices")
    trace, late = _updates_by_part(trace, table, parts), frozenset[int]()
    base_part = parts_of(trace, table, parts)
    _check_updates(trace, base_part)
    if schedule == "pipedream":
        if ranks > 1:
            raise TraceError("pipeline: pipedream updates after each microbatch of one pipeline; nearest: dp 1")
        split, which, versions = consecutive_steps(trace, micro_batches, _behind(trace, base_part, stages))
    else:
        on = [device_of(q, stages, schedule) for q in range(parts)]
        sums = list[int]()
        if not dealt and experts == 1:
            trace, base_part = with_kept_terms(trace, base_part, _sums_over_devices(trace, [on[q] for q in base_part]))
            sums = _sums_over_devices(trace, [on[q] for q in base_part])
        trace, base_part, late, once = with_copies(trace, base_part, on, sums)
        replicas: dict[str, Any] = {"experts": experts, "once": once, "buckets": buckets, "apart": base_part}
        replicas["own_statistics"] = own_statistics
        split, which = split_batch_ops(trace, micro_batches, ranks, dealt, passes=True, **replicas)
        versions = []
    part = [base_part[op] for op, _ in which]
    later = weight_gradients(trace) if schedule in DIVIDED else frozenset()
    units = _units(split, which, part, later, late, schedule == "pipedream")
    if schedule != "pipedream":
        orders = [_with_rounds(own, units) for own in orders]
    order = _order(split, units, [[unit for unit in own if unit in units] for own in orders])
    device = [device_of(q, stages, schedule) for q in range(parts)]
    return _Stages(split, part, order, device, versions).build()


def _behind(trace: Trace, part: Sequence[int], stages: int) -> list[int]:
    """Per op how many updates old the weights are that it reads: as many as stages follow the one that keeps them.

    Weights that an op reads together are as old as the oldest of them.
    """
    updates, phase = updated(trace), trace.op_columns.phase
    together = {
        op: found
        for op in range(len(trace.ops))
        if phase[op] < 2 and (found := [t for t in trace.reads(op) if t in updates])
    }
    behind = {t: stages - 1 - _first_part(trace, t, part) for found in together.values() for t in found}
    changed = True
    while changed:
        changed = False
        for found in together.values():
            oldest = max(behind[t] for t in found)
            changed |= any(behind[t] < oldest for t in found)
            behind.update(dict.fromkeys(found, oldest))
    return [behind[together[op][0]] if op in together else 0 for op in range(len(trace.ops))]


def _updates_by_part(trace: Trace, table: Mapping[int, int], parts: int) -> Trace:
    """The trace with an op of the update per part of the model, where one updates weights of several."""
    part = parts_of(trace, table, parts)
    initial = initial_weights(trace)

    def part_of(slot: Slot) -> int:
        return max(_first_part(trace, initial[slot.parameter], part), 0)

    return split_updates(trace, part_of)


def _sums_over_devices(trace: Trace, device: Sequence[int]) -> list[int]:
    """The ops of backward that only add up gradients of a weight, which several devices compute a part of.

    Such an op is the same for each microbatch and for the sums of all of them, as it may be split by `batch_sum`; so is
    one that only reads what such ops produce (a cast of the gradient).
    """
    c, role, producer, rows = trace.op_columns, trace.tensor_columns.role, trace.producer, batched(trace)
    found: list[int] = []
    for op, ways in c.splits.items():
        reads = trace.reads(op)
        adds = "batch_sum" in ways and all(
            role[t] == ROLE_CODE["gradient"] and producer[t] >= 0 and not rows[t] for t in reads
        )
        follows = adds and all(int(producer[t]) in found for t in reads)
        several = adds and len({device[int(producer[t])] for t in reads}) > 1
        if c.phase[op] == PHASE_CODE["backward"] and (several or follows):
            found.append(op)
    return found


def computed_anywhere(trace: Trace) -> frozenset[int]:
    """The forward ops of no layer that any stage can run: they read inputs, constants and what such ops compute alone.

    A constant is a tensor of the module that none but such ops read and nothing overwrites, such as the frequencies of
    rotary positions. Products, and what draws random numbers, are not among these ops.
    """
    c, role, producer = trace.op_columns, trace.tensor_columns.role.tolist(), trace.producer.tolist()
    able = (c.phase == PHASE_CODE["forward"]) & ~c.random & np.isin(c.kind, [KIND_CODE[kind] for kind in COMPUTED])
    able &= op_layers(trace) < 0
    able[[*c.group, *c.ring]] = False
    able[[int(producer[t]) for t in np.flatnonzero(trace.tensor_columns.replaces >= 0) if producer[t] >= 0]] = False
    able[[int(producer[t]) for t in np.flatnonzero(trace.replaced_by >= 0) if producer[t] >= 0]] = False
    found = set(np.flatnonzero(able).tolist())
    kept = {*trace.outputs, *(t for pair in trace.carry for t in pair)}

    def is_there(t: int) -> bool:
        if producer[t] >= 0:
            return producer[t] in found
        alone = trace.replaced_by[t] < 0 and all(reader in found for reader in trace.readers(t))
        return role[t] == ROLE_CODE["input"] or (role[t] == ROLE_CODE["weight"] and alone)

    while lost := {op for op in found if not all(map(is_there, trace.reads(op)))}:
        found -= lost
    return frozenset(op for op in found if kept.isdisjoint(trace.writes(op)))


def weight_gradients(trace: Trace) -> frozenset[int]:
    """The backward ops that no other op of backward waits for, but for sums of what they produce.

    Among them are those that gather operands for them alone: with sequence parallelism, the inputs of layers, of which
    a rank has its own tokens until then (`pre_process` of sail-sg's `zero-bubble-pipeline-parallelism`).
    """
    gradient, c = ROLE_CODE["gradient"], trace.op_columns
    role = trace.tensor_columns.role
    found: set[int] = set()
    for op in reversed(range(len(trace.ops))):
        gathers = op in c.ring and c.ring[op].passes == 1
        if c.phase[op] == PHASE_CODE["backward"] and all(
            (role[t] == gradient or gathers)
            and all(r in found or c.phase[r] == PHASE_CODE["update"] for r in trace.readers(t))
            for t in trace.writes(op)
        ):
            found.add(op)
    return frozenset(found)


def parts_of(trace: Trace, table: Mapping[int, int], parts: int = 0) -> list[int]:
    """The part of the model of every op, by default of as many as layers are on; of an update, its first weight's."""
    last = parts - 1 if parts else max(table.values(), default=0)
    part: list[int] = []
    layered = {
        phase: [op.id for op in trace.ops if op.phase == phase and op.layer >= 0] for phase in ("forward", "backward")
    }
    for op in trace.ops:
        if op.layer >= 0:
            if op.layer not in table:
                raise TraceError(f"pipeline: layer {op.layer} of op {op.name!r} has no stage")
            part.append(table[op.layer])
        elif op.phase == "update":
            part.append(_part_of_update(trace, op.id, part))
        else:
            ahead = not layered[op.phase] or op.id < layered[op.phase][0]
            behind = not ahead and op.id > layered[op.phase][-1]
            if ahead or behind:
                part.append(0 if ahead == (op.phase == "forward") else last)
            else:
                part.append(part[-1])
    return part


def _check_updates(trace: Trace, part: Sequence[int]) -> None:
    """Raise TraceError where an update needs the weights of several parts."""
    c, role = trace.op_columns, trace.tensor_columns.role
    for op, own in enumerate(part):
        if c.phase[op] != PHASE_CODE["update"]:
            continue
        needed = {
            _first_part(trace, t, part) for t in trace.reads(op) if role[t] in PERSISTENT and trace.producer[t] < 0
        }
        wrong = needed - {own, -1}
        if wrong:
            raise TraceError(f"pipeline: op {c.name[op]!r} needs weights of stages {own} and {min(wrong)}")


def _first_part(trace: Trace, tensor: int, part: Sequence[int]) -> int:
    """The part of the first forward or backward reader, -1 if there is none."""
    return next((part[op] for op in trace.readers(tensor) if trace.op_columns.phase[op] < 2), -1)


def _part_of_update(trace: Trace, op: int, part: Sequence[int]) -> int:
    readers = [_first_part(trace, t, part) for t in trace.reads(op)]
    producers = [part[int(trace.producer[t])] for t in trace.reads(op) if 0 <= trace.producer[t] < len(part)]
    weights = [s for t, s in zip(trace.reads(op), readers, strict=True) if trace.tensor_columns.role[t] in PERSISTENT]
    of_updated = (_first_part(trace, t, part) for t in _updated_by(trace, op))
    return next((s for s in (*weights, *of_updated, *producers, *readers) if s >= 0), 0)


def _updated_by(trace: Trace, op: int) -> list[int]:
    """The weights whose update an op of the optimizer is a step of, though it may read states or gradients alone."""
    initial, of = initial_weights(trace), parameters_of(trace)
    return [initial[name] for t in trace.reads(op) if (name := of[t]) is not None]


def _units(
    trace: Trace,
    which: list[tuple[int, int]],
    part: list[int],
    later: frozenset[int],
    late: frozenset[int],
    steps: bool,
) -> dict[Unit, list[int]]:
    """The ops of each unit, in order.

    An update for which stages need each other's results, as a gradient's norm over all of them, is done in rounds, each
    a unit of its own: an op comes a round after what another part of the model has to send it.

    later: ops of the base that are units of their own, after their backward.
    late: ops of its backward that need those of all stages, and are done with the update.
    steps: whether each microbatch has an update of its own.
    """
    units: dict[Unit, list[int]] = {}
    delayed: set[int] = set()  # of those units, with what sums their results
    phases, producer = trace.op_columns.phase.tolist(), trace.producer.tolist()
    rounds: dict[int, int] = {}  # of the ops of the update
    for op, (old, k) in enumerate(which):
        phase = "update" if old in late else PHASES[phases[op]]
        if phase == "update" and not steps:
            before = (producer[t] for t in trace.reads(op) if producer[t] in rounds)
            k = rounds[op] = max((rounds[made] + (part[made] != part[op]) for made in before), default=0)
        follows = bool(delayed) and any(producer[t] in delayed for t in trace.reads(op))
        if phase == "backward" and (old in later or follows):
            delayed.add(op)
            phase = "weight"
        units.setdefault((part[op], phase, k), []).append(op)
    return units


def _with_rounds(order: Sequence[Unit], units: Collection[Unit]) -> list[Unit]:
    """The units of a device with all rounds of the update at their end, in each those of its parts in turn."""
    rounds = 1 + max((k for _, phase, k in units if phase == "update"), default=0)
    updates = [unit for unit in order if unit[1] == "update"]
    return [
        *(unit for unit in order if unit not in updates),
        *((q, u, k) for k in range(rounds) for q, u, _ in updates),
    ]


def _order(trace: Trace, units: dict[Unit, list[int]], lists: list[list[Unit]]) -> list[tuple[Unit, list[int]]]:
    """All units in a program order that respects each device's own order (`lists`) and every dependency."""
    stages = len(lists)
    unit_of = {op: unit for unit, ops in units.items() for op in ops}
    producer = trace.producer.tolist()
    needs = {
        unit: {unit_of[producer[t]] for op in ops for t in trace.reads(op) if producer[t] >= 0} - {unit}
        for unit, ops in units.items()
    }
    done: set[Unit] = set()
    order: list[tuple[Unit, list[int]]] = []
    position = [0] * stages
    while any(position[s] < len(lists[s]) for s in range(stages)):
        progressed = False
        for s in range(stages):
            if position[s] < len(lists[s]) and needs[lists[s][position[s]]] <= done:
                unit = lists[s][position[s]]
                order.append((unit, units[unit]))
                done.add(unit)
                position[s] += 1
                progressed = True
        if not progressed:
            stuck = next(lists[s][position[s]] for s in range(stages) if position[s] < len(lists[s]))
            raise TraceError(
                f"pipeline: stage {stuck[0]} cannot run {stuck[1]} {stuck[2]}: a dependency points backwards"
            )
    return order


class _Stages:
    """Writes the ops of all stages, with the sends between them.

    part: of every op.
    device: of every part of the model.
    versions: of weights that are kept in several.
    """

    def __init__(
        self,
        trace: Trace,
        part: list[int],
        order: list[tuple[Unit, list[int]]],
        device: list[int],
        versions: Sequence[Sequence[Version]],
    ) -> None:
        ops, stage = trace.op_columns, [device[q] for q in part]
        stages = 1 + max(device, default=0)
        self.trace, self.stage, self.order, self.device, self.stages = trace, stage, order, device, stages
        self.new = Rewriter(trace, {"stages": stages})
        self.ids = self.new.all_tensors()
        self.copy = self.new.run_copier()
        self.new_ids = np.array(self.ids)
        self.replaces = trace.tensor_columns.replaces.tolist()
        in_order = [op for _, own in order for op in own]
        position = np.zeros(len(stage), np.int64)
        position[in_order] = np.arange(len(in_order))
        at = np.array(stage, np.int64)
        home = np.where(trace.producer >= 0, at[trace.producer], -1)
        for t in np.flatnonzero(trace.producer < 0).tolist():
            if readers := trace.readers(t):
                early = [op for op in readers if ops.phase[op] < 2]
                home[t] = stage[early[0]] if early else stage[min(readers, key=position.__getitem__)]
        self.home: list[int] = home.tolist()
        reading = np.repeat(np.arange(len(stage)), np.diff(ops.read_start))
        elsewhere = np.flatnonzero(at[reading] != home[ops.read_ids])
        self.wanted_by: dict[int, set[int]] = {}
        self.fetched: dict[int, list[int]] = {}
        for op, t in zip(reading[elsewhere].tolist(), ops.read_ids[elsewhere].tolist()):
            self.wanted_by.setdefault(t, set()).add(stage[op])
            self.fetched.setdefault(op, []).append(t)
        self.is_sent = np.zeros(len(home), np.bool_)
        self.is_sent[list(self.wanted_by)] = True
        # what is done with an op one by one: its results are sent, or take over what has been received
        self.sends = {int(trace.producer[t]) for t in self.wanted_by if trace.producer[t] >= 0}
        taking = self.is_sent[trace.tensor_columns.replaces] & (trace.tensor_columns.replaces >= 0)
        self.takes = set(trace.producer[taking].tolist())  # -1: from the start
        self.received: dict[tuple[int, int], int] = {}
        anywhere = computed_anywhere(trace)
        self.anywhere = {t for t in self.wanted_by if int(trace.producer[t]) in anywhere}
        for each in versions:
            self._reuse(each, position.tolist())

    def _reuse(self, versions: Sequence[Version], position: Sequence[int]) -> None:
        """Write each version of a weight into the storage of the oldest one that nothing reads any more."""
        trace = self.trace
        ended = [max((position[op] for op in trace.readers(each.value)), default=-1) for each in versions]
        oldest = 0
        for version in versions[1:]:
            if ended[oldest] <= position[int(trace.producer[version.storage])]:
                self.new.builder.take_over(self.ids[version.storage], self.ids[versions[oldest].value])
                oldest += 1

    def build(self) -> Trace:
        trace, role = self.trace, self.trace.tensor_columns.role
        for old in np.flatnonzero(trace.producer < 0).tolist():
            if role[old] in PERSISTENT:
                self.send(old, "forward")
                continue
            for s in sorted(self.wanted_by.get(old, ())):
                tensor = trace.tensors[old]
                self.received[old, s] = self.new.tensor(tensor, name=f"{tensor.name}.stage{s}")
        ahead: list[deque[tuple[list[int], str]]] = [deque() for _ in range(self.stages)]
        for (q, unit, _), ops in self.order:
            ahead[self.device[q]].append((ops, "backward" if unit == "weight" else unit))
        begun: set[int] = set()
        for (q, unit, _), ops in self.order:
            s, phase = self.device[q], "backward" if unit == "weight" else unit
            own = ahead[s]
            now = own.popleft()  # whose tensors have been received with those of the unit before, if there was one
            for unit_ops, its_phase in ((now,) if s not in begun else ()) + ((own[0],) if own else ()):
                for op in unit_ops:
                    for t in self.fetched.get(op, ()):
                        self.receive(t, s, its_phase)
            begun.add(s)
            for op in ops:
                for t in self.fetched.get(op, ()):
                    if t in self.anywhere:
                        self.compute(t, s)
            self.add(ops, s, phase)
        ids = self.ids
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        return self.new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)

    def add(self, ops: Sequence[int], s: int, phase: str) -> None:
        """The ops of a unit, in runs between those whose results are sent."""
        run = 0
        for i, op in enumerate(ops):
            if op in self.takes:
                for t in self.trace.writes(op):
                    if (old := (self.replaces[t], s)) in self.received:
                        self.new.builder.take_over(self.ids[t], self.received[old])
            if op in self.sends:
                self.copy_run(ops[run : i + 1], s)
                run = i + 1
                for t in self.trace.writes(op):
                    if t in self.wanted_by and t not in self.anywhere:
                        self.send(t, phase)
        self.copy_run(ops[run:], s)

    def copy_run(self, ops: Sequence[int], s: int) -> None:
        """Some ops of stage s, which read what it has received."""
        c, run = self.trace.op_columns, np.array(ops, np.int64)
        reads, writes = c.read_ids[slots_of(c.read_start, run)], c.write_ids[slots_of(c.write_start, run)]
        new = self.new_ids[reads]
        for i in np.flatnonzero(self.is_sent[reads]).tolist():
            new[i] = self.received.get((int(reads[i]), s), new[i])
        self.copy(run, new, self.new_ids[writes], s)

    def compute(self, t: int, s: int) -> int:
        """What stage s reads for a tensor that any stage can compute. Returns the new id."""
        if self.home[t] == s:
            return self.ids[t]
        if (t, s) not in self.received:
            op = int(self.trace.producer[t])
            for each in self.trace.writes(op) if op >= 0 else (t,):
                like = self.trace.tensors[each]
                self.received[each, s] = self.new.tensor(like, name=f"{like.name}.stage{s}", replaces=None)
            if op >= 0:
                reads = [self.compute(each, s) for each in self.trace.reads(op)]
                writes = [self.received[each, s] for each in self.trace.writes(op)]
                name = f"{self.trace.op_columns.name[op]}.stage{s}"
                self.new.op(self.trace.ops[op], reads=reads, writes=writes, name=name, device=s)
        return self.received[t, s]

    def send(self, t: int, phase: str) -> None:
        name, layer = self.trace.tensor_columns.name[t], int(self.trace.tensor_columns.layer[t])
        for s in sorted(self.wanted_by.get(t, ())):
            fields = {"phase": phase, "layer": layer, "group": f"{name}.to{s}"}
            self.new.glue(f"{name}.send{s}", "send", [self.ids[t]], [], device=self.home[t], **fields)

    def receive(self, t: int, s: int, phase: str) -> None:
        if self.home[t] == s or (t, s) in self.received or t in self.anywhere:
            return
        tensor = self.trace.tensors[t]
        name = tensor.name
        self.received[t, s] = self.new.tensor(tensor, Same(t), name=f"{name}.stage{s}", replaces=None)
        fields = {"phase": phase, "layer": tensor.layer, "group": f"{name}.to{s}"}
        self.new.glue(f"{name}.recv{s}", "recv", [], [self.received[t, s]], device=s, **fields)
