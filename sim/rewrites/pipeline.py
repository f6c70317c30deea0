"""The rewrite for pipeline parallelism: layers on several devices, microbatches, and sends between the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.errors import TraceError, near
from sim.rewrites.batching import split_batch_ops
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.origin import Same

SCHEDULES = ("gpipe", "1f1b")


def pipeline(
    trace: Trace, stage_of_layer: Sequence[int] | Mapping[int, int], micro_batches: int, schedule: str = "1f1b"
) -> Trace:
    """Run the layers as pipeline stages, stage i on device i, on consecutive microbatches.

    Updates come last. Ops of no layer are assigned by position: before the first layer to stage 0, after the last one
    to the last stage, mirrored in backward; updates run where their weight is read first. A tensor that another stage
    reads is sent as soon as it is produced, and received where that stage starts the forward or backward that needs it
    (ops `send` and `recv` in one group); later readers there use the received copy. An input that several stages read
    is present on each. A weight of two stages (tied embeddings) is kept and updated on the stage that reads it first,
    and sent once per iteration; the other half of its gradient is sent back.

    trace: a trace on one device.
    stage_of_layer: the stage of every layer, by index.
    micro_batches: number of microbatches.
    schedule: `gpipe` (all forwards, then all backwards, in the order of the microbatches) or `1f1b` (stage s of S
        runs S - 1 - s forwards ahead, then alternates one forward and one backward).

    Raises TraceError for a trace on several devices, a layer without a stage, or an update that needs the weights of
    several stages.
    """
    if schedule not in SCHEDULES:
        raise TraceError(f"pipeline: schedule {schedule!r} is unknown{near(schedule, SCHEDULES)}")
    if trace.devices > 1:
        raise TraceError("pipeline: the trace is already on several devices")
    base_stage = _stages(trace, stage_of_layer)
    stages = max(base_stage, default=0) + 1
    split, which = split_batch_ops(trace, micro_batches)
    stage = [base_stage[op] for op, _ in which]
    units = _units(split, which, stage)
    order = _order(split, units, stages, micro_batches, schedule)
    return _Stages(split, stage, order).build()


Unit = tuple[int, str, int]  # stage, phase, microbatch


def _stages(trace: Trace, stage_of_layer: Sequence[int] | Mapping[int, int]) -> list[int]:
    """The stage of every op."""
    table = stage_of_layer if isinstance(stage_of_layer, Mapping) else dict(enumerate(stage_of_layer))
    if sorted(set(table.values())) != list(range(len(set(table.values())))):
        raise TraceError("pipeline: stages must be numbered 0, 1, … without a gap")
    last = max(table.values(), default=0)
    c, role = trace.op_columns, trace.tensor_columns.role
    stage: list[int] = []
    started = {"forward": False, "backward": False}
    layered = {
        phase: [op.id for op in trace.ops if op.phase == phase and op.layer >= 0] for phase in ("forward", "backward")
    }
    for op in trace.ops:
        if op.layer >= 0:
            if op.layer not in table:
                raise TraceError(f"pipeline: layer {op.layer} of op {op.name!r} has no stage")
            stage.append(table[op.layer])
            started[op.phase] = True
        elif op.phase == "update":
            stage.append(_stage_of_update(trace, op.id, stage))
        else:
            ahead = not layered[op.phase] or op.id < layered[op.phase][0]
            behind = not ahead and op.id > layered[op.phase][-1]
            if ahead or behind:
                stage.append(0 if ahead == (op.phase == "forward") else last)
            else:
                stage.append(stage[-1])
    owners: dict[int, set[int]] = {}
    for op_id, own_stage in enumerate(stage):
        if c.phase[op_id] == 2:
            owners.setdefault(op_id, set()).update(
                _first_stage(trace, t, stage)
                for t in trace.reads(op_id)
                if role[t] in PERSISTENT and trace.producer[t] < 0
            )
            wrong = owners[op_id] - {own_stage, -1}
            if wrong:
                raise TraceError(f"pipeline: op {c.name[op_id]!r} needs weights of stages {own_stage} and {min(wrong)}")
    return stage


def _first_stage(trace: Trace, tensor: int, stage: Sequence[int]) -> int:
    """The stage of the first forward or backward reader, -1 if there is none."""
    return next((stage[op] for op in trace.readers(tensor) if trace.op_columns.phase[op] < 2), -1)


def _stage_of_update(trace: Trace, op: int, stage: Sequence[int]) -> int:
    readers = [_first_stage(trace, t, stage) for t in trace.reads(op)]
    producers = [stage[int(trace.producer[t])] for t in trace.reads(op) if 0 <= trace.producer[t] < len(stage)]
    weights = [s for t, s in zip(trace.reads(op), readers, strict=True) if trace.tensor_columns.role[t] in PERSISTENT]
    return next((s for s in (*weights, *producers, *readers) if s >= 0), 0)


def _units(trace: Trace, which: list[tuple[int, int]], stage: list[int]) -> dict[Unit, list[int]]:
    """The ops of each forward, backward and update of a stage, in order."""
    units: dict[Unit, list[int]] = {}
    for op, (_, k) in enumerate(which):
        phase = trace.ops[op].phase
        units.setdefault((stage[op], phase, 0 if phase == "update" else k), []).append(op)
    return units


def _order(
    trace: Trace, units: dict[Unit, list[int]], stages: int, n: int, schedule: str
) -> list[tuple[Unit, list[int]]]:
    """All units in a program order that respects each stage's own order and every dependency."""
    lists: list[list[Unit]] = []
    for s in range(stages):
        ahead = n if schedule == "gpipe" else min(n, stages - 1 - s)
        schedule_of_stage: list[Unit] = [(s, "forward", k) for k in range(ahead)]
        for k in range(n):
            if ahead + k < n:
                schedule_of_stage.append((s, "forward", ahead + k))
            schedule_of_stage.append((s, "backward", k))
        schedule_of_stage.append((s, "update", 0))
        lists.append([unit for unit in schedule_of_stage if unit in units])
    unit_of = {op: unit for unit, ops in units.items() for op in ops}
    needs = {
        unit: {unit_of[int(trace.producer[t])] for op in ops for t in trace.reads(op) if trace.producer[t] >= 0}
        - {unit}
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
    """Writes the ops of all stages, with the sends between them."""

    def __init__(self, trace: Trace, stage: list[int], order: list[tuple[Unit, list[int]]]) -> None:
        self.trace, self.stage, self.order = trace, stage, order
        self.new = Rewriter(trace, {"stages": max(stage, default=0) + 1})
        self.ids = self.new.all_tensors()
        self.tensors = list(trace.tensors)
        self.home = [stage[p] if p >= 0 else -1 for p in trace.producer.tolist()]
        self.wanted_by: list[set[int]] = [set() for _ in self.tensors]
        position = {op: i for i, op in enumerate(op for _, ops in order for op in ops)}
        for t in self.tensors:
            readers = sorted(trace.readers(t.id), key=position.__getitem__)
            if self.home[t.id] < 0 and readers:
                early = [op for op in trace.readers(t.id) if trace.op_columns.phase[op] < 2]
                self.home[t.id] = stage[early[0]] if early else stage[readers[0]]
            self.wanted_by[t.id] = {stage[op] for op in readers} - {self.home[t.id]}
        self.received: dict[tuple[int, int], int] = {}

    def build(self) -> Trace:
        trace, role = self.trace, self.trace.tensor_columns.role
        for old in self.tensors:
            if trace.producer[old.id] >= 0:
                continue
            if role[old.id] in PERSISTENT:
                self.send(old.id, "forward")
                continue
            for s in sorted(self.wanted_by[old.id]):
                self.received[old.id, s] = self.new.tensor(old, name=f"{old.name}.stage{s}")
        for (s, phase, _), ops in self.order:
            for op in ops:
                for t in trace.reads(op):
                    self.receive(t, s, phase)
            for op in ops:
                self.add(op, s, phase)
        ids = self.ids
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        return self.new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)

    def add(self, op: int, s: int, phase: str) -> None:
        view = self.trace.ops[op]
        reads = [self.received.get((t, s), self.ids[t]) for t in view.reads]
        for t in view.writes:
            old = self.tensors[t].replaces
            if old is not None and (old, s) in self.received:
                self.new.builder.take_over(self.ids[t], self.received[old, s])
        self.new.op(view, reads=reads, writes=[self.ids[t] for t in view.writes], device=s)
        for t in view.writes:
            self.send(t, phase)

    def send(self, t: int, phase: str) -> None:
        name = self.tensors[t].name
        for s in sorted(self.wanted_by[t]):
            fields = {"phase": phase, "layer": self.tensors[t].layer, "group": f"{name}.to{s}"}
            self.new.glue(f"{name}.send{s}", "send", [self.ids[t]], [], device=self.home[t], **fields)

    def receive(self, t: int, s: int, phase: str) -> None:
        if self.home[t] == s or (t, s) in self.received:
            return
        name = self.tensors[t].name
        self.received[t, s] = self.new.tensor(
            self.tensors[t], Same(t), name=f"{name}.stage{s}", replaces=None, saved_for=self.tensors[t].saved_for
        )
        fields = {"phase": phase, "layer": self.tensors[t].layer, "group": f"{name}.to{s}"}
        self.new.glue(f"{name}.recv{s}", "recv", [], [self.received[t, s]], device=s, **fields)
