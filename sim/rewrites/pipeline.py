"""The rewrite that spreads layers over devices: stages, microbatches, and what is sent between them."""

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
    """Run the layers on several devices, stage i on device i, one microbatch behind the other.

    schedule: `gpipe` (all forwards, then all backwards, in the order of the microbatches) or `1f1b` (stage s of S
    runs S - 1 - s forwards ahead, then one forward and one backward in turn). Updates come last. Ops of no
    layer go by their place: before the first layer to stage 0, after the last to the last stage, and so
    mirrored in backward; updates go where their weight is read first. What another stage reads is sent
    right after it is made and received where the stage begins the forward or backward that needs it
    (ops `send` and `recv` in one group); later readers there use the received copy. An input read by
    several stages lies on each. A weight of two stages (tied embeddings) is kept and updated on the one
    that reads it first, and sent once an iteration; its gradient's other half is sent back.
    Raises TraceError for a trace on several devices, a layer without a stage, or an update that needs the
    weights of several stages.
    """
    if schedule not in SCHEDULES:
        raise TraceError(f"pipeline: schedule {schedule!r} is unknown{near(schedule, SCHEDULES)}")
    if trace.devices > 1:
        raise TraceError("pipeline: the trace is on several devices already")
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
    begun = {"forward": False, "backward": False}
    layered = {
        phase: [op.id for op in trace.ops if op.phase == phase and op.layer >= 0] for phase in ("forward", "backward")
    }
    for op in trace.ops:
        if op.layer >= 0:
            if op.layer not in table:
                raise TraceError(f"pipeline: layer {op.layer} of op {op.name!r} has no stage")
            stage.append(table[op.layer])
            begun[op.phase] = True
        elif op.phase == "update":
            stage.append(_home_of_update(trace, op.id, stage))
        else:
            ahead = not layered[op.phase] or op.id < layered[op.phase][0]
            behind = not ahead and op.id > layered[op.phase][-1]
            if ahead or behind:
                stage.append(0 if ahead == (op.phase == "forward") else last)
            else:
                stage.append(stage[-1])
    owners: dict[int, set[int]] = {}
    for op_id, at in enumerate(stage):
        if c.phase[op_id] == 2:
            owners.setdefault(op_id, set()).update(
                _first_stage(trace, t, stage)
                for t in trace.reads(op_id)
                if role[t] in PERSISTENT and trace.producer[t] < 0
            )
            wrong = owners[op_id] - {at, -1}
            if wrong:
                raise TraceError(f"pipeline: op {c.name[op_id]!r} needs weights of stages {at} and {min(wrong)}")
    return stage


def _first_stage(trace: Trace, tensor: int, stage: Sequence[int]) -> int:
    """The stage of the first forward or backward reader, -1 if there is none."""
    return next((stage[op] for op in trace.readers(tensor) if trace.op_columns.phase[op] < 2), -1)


def _home_of_update(trace: Trace, op: int, stage: Sequence[int]) -> int:
    found = [_first_stage(trace, t, stage) for t in trace.reads(op)]
    made = [stage[int(trace.producer[t])] for t in trace.reads(op) if 0 <= trace.producer[t] < len(stage)]
    weights = [s for t, s in zip(trace.reads(op), found, strict=True) if trace.tensor_columns.role[t] in PERSISTENT]
    return next((s for s in (*weights, *made, *found) if s >= 0), 0)


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
    """All units in a program order that keeps each stage's own order and every dependency."""
    lists: list[list[Unit]] = []
    for s in range(stages):
        ahead = n if schedule == "gpipe" else min(n, stages - 1 - s)
        mine: list[Unit] = [(s, "forward", k) for k in range(ahead)]
        for k in range(n):
            if ahead + k < n:
                mine.append((s, "forward", ahead + k))
            mine.append((s, "backward", k))
        mine.append((s, "update", 0))
        lists.append([unit for unit in mine if unit in units])
    unit_of = {op: unit for unit, ops in units.items() for op in ops}
    needs = {
        unit: {unit_of[int(trace.producer[t])] for op in ops for t in trace.reads(op) if trace.producer[t] >= 0}
        - {unit}
        for unit, ops in units.items()
    }
    done: set[Unit] = set()
    order: list[tuple[Unit, list[int]]] = []
    at = [0] * stages
    while any(at[s] < len(lists[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            if at[s] < len(lists[s]) and needs[lists[s][at[s]]] <= done:
                unit = lists[s][at[s]]
                order.append((unit, units[unit]))
                done.add(unit)
                at[s] += 1
                moved = True
        if not moved:
            stuck = next(lists[s][at[s]] for s in range(stages) if at[s] < len(lists[s]))
            raise TraceError(
                f"pipeline: stage {stuck[0]} cannot run {stuck[1]} {stuck[2]}: a dependency goes backwards"
            )
    return order


class _Stages:
    """Writes the ops of all stages, with what is sent between them."""

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
        self.there: dict[tuple[int, int], int] = {}

    def build(self) -> Trace:
        trace, role = self.trace, self.trace.tensor_columns.role
        for old in self.tensors:
            if trace.producer[old.id] >= 0:
                continue
            if role[old.id] in PERSISTENT:
                self.send(old.id, "forward")
                continue
            for s in sorted(self.wanted_by[old.id]):
                self.there[old.id, s] = self.new.tensor(old, name=f"{old.name}.stage{s}")
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
        reads = [self.there.get((t, s), self.ids[t]) for t in view.reads]
        for t in view.writes:
            old = self.tensors[t].replaces
            if old is not None and (old, s) in self.there:
                self.new.builder.take_over(self.ids[t], self.there[old, s])
        self.new.op(view, reads=reads, writes=[self.ids[t] for t in view.writes], device=s)
        for t in view.writes:
            self.send(t, phase)

    def send(self, t: int, phase: str) -> None:
        name = self.tensors[t].name
        for s in sorted(self.wanted_by[t]):
            fields = {"phase": phase, "layer": self.tensors[t].layer, "group": f"{name}.to{s}"}
            self.new.glue(f"{name}.send{s}", "send", [self.ids[t]], [], device=self.home[t], **fields)

    def receive(self, t: int, s: int, phase: str) -> None:
        if self.home[t] == s or (t, s) in self.there:
            return
        name = self.tensors[t].name
        self.there[t, s] = self.new.tensor(
            self.tensors[t], Same(t), name=f"{name}.stage{s}", replaces=None, saved_for=self.tensors[t].saved_for
        )
        fields = {"phase": phase, "layer": self.tensors[t].layer, "group": f"{name}.to{s}"}
        self.new.glue(f"{name}.recv{s}", "recv", [], [self.there[t, s]], device=s, **fields)
