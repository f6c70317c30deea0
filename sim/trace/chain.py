"""A trace as a chain of stages, each with its times and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.kept import kept
from sim.trace.layers import Block, blocks, op_layers
from sim.trace.liveness import LiveSet
from sim.trace.phases import BACKWARD, FORWARD, backward_ops, before_update, forward_ops, saved_tensors
from sim.trace.tensor import ROLE_CODE

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Block",
    "Chain",
    "Stage",
    "backward_ops",
    "before_update",
    "blocks",
    "chain",
    "forward_ops",
    "saved_tensors",
]

Ints = NDArray[np.int64]

RECOMPUTED = "recomputed"
"""Key of a captured trace's metadata: how many of its ops are recomputations of its own."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain. Times in ns, sizes in bytes; weights and their gradients are not counted.

    forward, backward: op ids.
    inputs: what it reads from the stage before (the one tensor of the cut; for stage 0 the trace's inputs).
    output: its last result.
    saved: tensors that it produces and its backward needs, its output included.
    uf, ub: time of its forward and of its backward.
    x: bytes of its inputs.
    xbar: bytes of `saved`.
    forward_temp: peak bytes beyond x and the output while it runs without saving.
    saving_temp: peak bytes beyond x and xbar while it runs and saves.
    backward_temp: peak bytes beyond `saved` and the gradient of its output while its backward runs; includes the
        gradient of its input.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    inputs: tuple[int, ...]
    output: int
    saved: tuple[int, ...]
    uf: int
    ub: int
    x: int
    xbar: int
    forward_temp: int
    saving_temp: int
    backward_temp: int


@dataclass(frozen=True)
class Chain:
    """A trace as a chain of L stages. Sizes in bytes.

    stages: in order.
    x: L + 1 sizes: the inputs of each stage, then the output of the last one.
    weights: size of weights and optimizer states.
    gradients: size of weight gradients. The chain's budget is the run's budget minus weights and gradients.
    """

    stages: tuple[Stage, ...]
    x: tuple[int, ...]
    weights: int
    gradients: int

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def stage_of(self) -> Mapping[int, int]:
        """The position of the stage that each forward and backward op belongs to."""
        pairs = ((op, i) for i, stage in enumerate(self.stages) for op in (*stage.forward, *stage.backward))
        return MappingProxyType(dict(pairs))


def chain(trace: Trace, op_ns: Sequence[int] | Ints, *, least: int = 2) -> Chain:
    """Cut the forward ops wherever exactly one activation is live between two of them and is not overwritten later.

    No stage ends with a tensor that is overwritten in place: it ends after the last op that overwrites it. A tensor is
    live at a position if an earlier op produced it and a later forward op reads it; weights, inputs, and tensors
    computed from weights alone do not count. A backward op belongs to a stage by the inner tensors and weights that it
    reads and by its layer; two stages are separated where a single gradient is live.

    trace: the trace to cut.
    op_ns: time of every op in ns.
    least: the smallest number of stages to accept.

    Raises TraceError if there are fewer than `least` stages, naming the op that reads across, or if backward ops do not
    come in the reverse order of the stages. It says so where the step was captured under checkpoints of its own.
    """
    times = np.asarray(op_ns, np.int64)
    try:
        return kept(trace, "chain", (times.tobytes(), least), lambda: _chain(trace, times, least))
    except TraceError as error:
        if not (count := trace.meta.get(RECOMPUTED)):
            raise
        raise TraceError(
            f"{error}; the step already recomputes {count} ops under checkpoints of its own: capture it without them"
        ) from error


def _chain(trace: Trace, times: Ints, least: int) -> Chain:
    staged = kept(trace.structure, "staged", None, lambda: _staged(trace))
    live_at, count = staged.live_at, len(staged.live_at) + 1
    if count < least:
        raise TraceError(_breaks(trace, forward_ops(trace)))
    stage_of = staged.stage_of.copy()
    _label(trace, backward_ops(trace), stage_of, staged.low, staged.high, live_at)
    pricing = _Pricing(trace, stage_of, live_at, count)
    stages = tuple(pricing.stage(i, times) for i in range(count))
    size, role = trace.tensor_columns.bytes, trace.tensor_columns.role
    end = int(size[stages[-1].output])
    persistent = (trace.producer < 0) & np.isin(role, PERSISTENT)
    is_weight_gradient = (role == ROLE_CODE["gradient"]) & (trace.producer >= 0)
    # a gradient that a backward op reads (to add it to another one) does not outlive that op
    c, by_backward = trace.op_columns, trace.op_columns.phase == BACKWARD
    is_weight_gradient[c.read_ids[np.repeat(by_backward, np.diff(c.read_start))]] = False
    gradients = int(size[is_weight_gradient].sum())
    return Chain(stages, (*(stage.x for stage in stages), end), int(size[persistent].sum()), gradients)


class _Staged(NamedTuple):
    """The stages of forward, and what of backward they bound, whatever the sizes.

    live_at: the tensor at each border.
    stage_of: per op the stage of a forward one, -1 for the others; the last entry serves producer -1.
    low, high: per backward op, in order, the first and the last stage that it may belong to.
    """

    live_at: list[int]
    stage_of: Ints
    low: Ints
    high: Ints


def _staged(trace: Trace) -> _Staged:
    activation, ops = activations(trace), forward_ops(trace)
    cuts, live_at = _cuts(trace, activation)
    marks = [0, *(cut + 1 for cut in cuts), len(ops)]
    stage_of = np.full(len(trace.ops) + 1, -1, np.int64)
    for i in range(len(marks) - 1):
        stage_of[ops[marks[i] : marks[i + 1]]] = i
    return _Staged(live_at, stage_of, *_spans_of_backward(trace, activation, stage_of.tolist(), live_at))


def activations(trace: Trace) -> NDArray[np.bool_]:
    """Whether each tensor is an activation: produced in forward, and not from weights or constants alone.

    The result of an op without reads is a constant (a mask, positions), unless the trace has no input at all.
    """
    return kept(trace.structure, "activations", None, lambda: _activations(trace))


def _activations(trace: Trace) -> NDArray[np.bool_]:
    given = (trace.producer < 0) & ~np.isin(trace.tensor_columns.role, PERSISTENT)
    has_input = bool((given & (trace.read_counts > 0)).any())
    alive, all_reads, all_writes = given.tolist(), trace.distinct_reads, trace.all_writes
    for op in forward_ops(trace).tolist():
        reads = all_reads[op]
        if any(alive[t] for t in reads) or not (reads or has_input):
            for t in all_writes[op]:
                alive[t] = True
    found: NDArray[np.bool_] = np.array(alive, np.bool_) & (trace.producer >= 0)
    found.setflags(write=False)
    return found


def _spans(trace: Trace, ops: Ints, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """Chosen tensors produced by `ops` and read by a later one: id, and the positions of producer and last reader."""
    position = np.full(len(trace.ops) + 1, -1, np.int64)
    position[ops] = np.arange(len(ops))
    last = np.full(len(trace.tensors), -1, np.int64)
    c = trace.op_columns
    np.maximum.at(last, c.read_ids, np.repeat(position[:-1], np.diff(c.read_start)))
    produced = position[trace.producer]
    ids = np.flatnonzero(chosen & (produced >= 0) & (last > produced))
    return ids, produced[ids], last[ids]


def _alone(ids: Ints, produced: Ints, last: Ints, positions: int) -> Ints:
    """The only tensor that is live at each position between two ops, -1 where there is none or several."""
    count, total = np.zeros(positions + 1, np.int64), np.zeros(positions + 1, np.int64)
    np.add.at(count, produced, 1)
    np.add.at(count, last, -1)
    np.add.at(total, produced, ids)
    np.add.at(total, last, -ids)
    return np.where(np.cumsum(count) == 1, np.cumsum(total), -1)[:positions]


def _cuts(trace: Trace, activation: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """The positions in the forward order after which a stage ends, and the tensor that is live at each."""
    ops = forward_ops(trace)
    alone = _alone(*_spans(trace, ops, activation), max(len(ops) - 1, 0))
    # a tensor that is overwritten in place cannot be a checkpoint, and its bytes belong to the one that overwrites it
    positions = np.flatnonzero((alone >= 0) & (trace.replaced_by[alone] < 0))
    # where the same tensor stays the only one, the stage ends at once: the ops that follow depend on weights alone
    keep = np.ones(len(positions), np.bool_)
    keep[1:] = alone[positions[1:]] != alone[positions[:-1]]
    return positions[keep].tolist(), alone[positions[keep]].tolist()


def _breaks(trace: Trace, ops: Ints) -> str:
    """Why this is not a chain: names the op that reads over the longest distance."""
    ids, produced, last = _spans(trace, ops, activations(trace))
    if not len(ids):
        return "this trace is not a chain: no forward op reads what another produced"
    worst = int(np.argmax(last - produced))
    reader, producer = trace.op_columns.name[ops[last[worst]]], trace.op_columns.name[ops[produced[worst]]]
    tensor = trace.tensor_columns.name[ids[worst]]
    return f"this trace is not a chain: op {reader!r} reads {tensor!r}, which {producer!r} produced much earlier"


def _spans_of_backward(
    trace: Trace, activation: NDArray[np.bool_], stage_of: list[int], borders: list[int]
) -> tuple[Ints, Ints]:
    """Per backward op the first and the last stage that it may differentiate, by what it reads and by its layer."""
    ops = backward_ops(trace)
    count, top = len(ops), len(borders)
    low, high = [0] * count, [top] * count
    layer_of, layers = op_layers(trace).tolist(), dict[int, tuple[int, int]]()
    for op in forward_ops(trace).tolist():
        layer, stage = layer_of[op], stage_of[op]
        a, b = layers.get(layer, (stage, stage))
        layers[layer] = min(a, stage), max(b, stage)
    layers.pop(-1, None)
    border = {t: i for i, t in enumerate(borders)}
    # tensors computed from weights or from nothing (a mask, rotary tables) may be read anywhere, like weights
    is_activation, producers, phase = activation.tolist(), trace.producer.tolist(), trace.op_columns.phase.tolist()
    users: dict[int, tuple[int, int]] = {}
    for k, op in enumerate(ops.tolist()):
        for t in trace.distinct_reads[op]:
            producer = producers[t]
            stage = stage_of[producer]
            if is_activation[t]:
                span = stage, stage + 1 if t in border else stage
            elif producer < 0 or phase[producer] == FORWARD:
                if t not in users:
                    stages = [stage_of[r] for r in trace.readers(t) if phase[r] == FORWARD]
                    users[t] = (min(stages), max(stages)) if stages else (0, top)
                span = users[t]
            else:
                continue
            low[k], high[k] = max(low[k], span[0]), min(high[k], span[1])
        a, b = layers.get(layer_of[op], (0, top))
        if a <= high[k] and b >= low[k]:
            low[k], high[k] = max(low[k], a), min(high[k], b)
    return np.array(low, np.int64), np.array(high, np.int64)


def _label(trace: Trace, ops: Ints, stage_of: Ints, low: Ints, high: Ints, borders: list[int]) -> None:
    """Assign each backward op to the stage that it differentiates: consecutive ops per stage, last stage first."""
    count, top = len(ops), len(borders)
    passing = trace.tensor_columns.role != ROLE_CODE["gradient"]
    ids, produced, last = _spans(trace, ops, passing)
    if count:
        # a tensor that crosses two borders or more (half of a tied weight's gradient) tells nothing about either
        highest, lowest = np.minimum.accumulate(high), np.maximum.accumulate(low[::-1])[::-1]
        near = lowest[produced] - highest[last] < 2
        ids, produced, last = ids[near], produced[near], last[near]
    alone = _alone(ids, produced, last, max(count - 1, 0))
    size = trace.tensor_columns.bytes
    # a stage may not end before all ops that belong to it or to a later stage, nor after one of an earlier stage
    after = np.zeros(top + 1, np.int64)
    before = np.full(top + 1, count, np.int64)
    for k in range(count):
        after[low[k]] = max(after[low[k]], k + 1)
        before[high[k]] = min(before[high[k]], k)
    at_least = np.maximum.accumulate(after[::-1])[::-1]
    at_most = np.minimum.accumulate(before)
    start = 0
    for i in range(top, 0, -1):  # the border between stage i and stage i - 1
        least, most = max(int(at_least[i]), start), int(at_most[i - 1])
        if least > most:
            name = trace.op_columns.name[ops[most]]
            raise TraceError(f"this trace is not a chain: backward op {name!r} comes before that of a later stage")
        earliest = max(least, start + 1) if start < most else least  # each stage gets an op while any are left
        end = earliest
        for position in range(max(earliest, 1), min(most, count - 1) + 1):
            t = int(alone[position - 1])
            if t >= 0 and size[t] == size[borders[i - 1]]:
                end = position
                break
        stage_of[ops[start:end]] = i
        start = end
    stage_of[ops[start:]] = 0


class _Pricing:
    """Computes the bytes and times of all stages by walking over the ops of each once or twice."""

    def __init__(self, trace: Trace, stage_of: Ints, borders: list[int], count: int) -> None:
        self.trace, self.borders, self.count = trace, borders, count
        self.reads, self.writes = trace.distinct_reads, trace.all_writes
        self.producer, self.phase = trace.producer.tolist(), trace.op_columns.phase.tolist()
        self.size = trace.tensor_columns.bytes.tolist()
        self.workspace = trace.op_columns.workspace.tolist()
        self.replaces = trace.tensor_columns.replaces.tolist()
        self.last_use = trace.last_use.tolist()
        role = trace.tensor_columns.role
        starts_outside = ~np.isin(role, PERSISTENT)
        self.counts = np.where(trace.producer < 0, starts_outside, role != ROLE_CODE["gradient"]).tolist()
        self.is_saved = np.zeros(len(self.size), np.bool_)
        self.is_saved[saved_tensors(trace)] = True
        self.forward: list[list[int]] = [[] for _ in range(count)]
        self.backward: list[list[int]] = [[] for _ in range(count)]
        for target, ops in ((self.forward, forward_ops(trace)), (self.backward, backward_ops(trace))):
            for op in ops.tolist():
                target[int(stage_of[op])].append(op)

    def stage(self, i: int, times: Ints) -> Stage:
        forward, backward = self.forward[i], self.backward[i]
        output, inputs = self.output(i), self.inputs(i)
        size, x = self.size, sum(self.size[t] for t in inputs)
        produced = [t for op in forward for t in self.writes[op] if self.counts[t]]
        saved = [t for t in produced if self.is_saved[t] or t == output]
        xbar = sum(size[t] for t in saved)
        peak_without_saving = self.forward_peak(forward, {output}) - size[output]
        peak_when_saving = self.forward_peak(forward, set(saved)) - xbar
        peak_in_backward = self.backward_peak(backward, saved) - xbar - size[output]
        return Stage(
            forward=tuple(forward),
            backward=tuple(backward),
            inputs=inputs,
            output=output,
            saved=tuple(saved),
            uf=int(times[forward].sum()),
            ub=int(times[backward].sum()),
            x=x,
            xbar=xbar,
            forward_temp=max(0, peak_without_saving),
            saving_temp=max(0, peak_when_saving),
            backward_temp=max(0, peak_in_backward),
        )

    def output(self, i: int) -> int:
        """The tensor at a stage's end; for the last stage, the result of its last op that backward reads first."""
        if i < len(self.borders):
            return self.borders[i]
        writes = self.writes[self.forward[i][-1]]
        if not writes:
            name = self.trace.op_columns.name[self.forward[i][-1]]
            raise TraceError(f"this trace is not a chain: op {name!r} ends the forward pass, but writes nothing")
        for op in self.backward[i]:
            for t in self.reads[op]:
                if t in writes:
                    return t
        return writes[0]

    def inputs(self, i: int) -> tuple[int, ...]:
        """The tensor at the cut before a stage; for the first stage, the trace's inputs that it reads."""
        if i:
            return (self.borders[i - 1],)
        read = dict.fromkeys(t for op in self.forward[0] for t in self.reads[op])
        return tuple(t for t in read if self.producer[t] < 0 and self.counts[t])

    def forward_peak(self, ops: list[int], keep: set[int]) -> int:
        """Peak bytes that a stage's forward adds if only `keep` remains at its end."""
        last: dict[int, int] = {}
        for op in ops:
            for t in (*self.writes[op], *self.reads[op]):
                last[t] = op
        return self.peak(ops, (), lambda t, op: last[t] == op and t not in keep)

    def backward_peak(self, ops: list[int], saved: list[int]) -> int:
        """Peak bytes while a stage's backward runs: saved tensors, gradients and temporaries."""
        if not ops:
            return 0
        incoming = {
            t
            for op in ops
            for t in self.reads[op]
            if 0 <= self.producer[t] < ops[0] and self.phase[self.producer[t]] == BACKWARD
        }
        held = [t for t in (*saved, *incoming) if self.counts[t] and self.last_use[t] >= ops[0]]
        return self.peak(ops, held, lambda t, op: self.last_use[t] <= op)

    def peak(self, ops: list[int], held: Iterable[int], ends: Callable[[int, int], bool]) -> int:
        """Peak bytes while `ops` run and `held` is live at the start; what overwrites a tensor that is not, is not."""
        live = LiveSet(self.size, self.replaces, held)
        peak = live.held
        for op in ops:
            writes = self.writes[op]
            mine = [t for t in writes if self.counts[t] and (self.replaces[t] < 0 or self.replaces[t] in live)]
            peak = max(peak, live.run(mine, self.workspace[op]))
            live.free([t for t in (*self.reads[op], *writes) if ends(t, op)])
        return peak
