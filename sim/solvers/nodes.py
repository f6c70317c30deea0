"""A trace as solvers see it: nodes that run in order, values that pass between them, and what may be recomputed.

A node is one op, or several consecutive ops that are recomputed together; a value is what a node produces
and a later one reads. Stage t of a plan recomputes some earlier nodes, in order and each at most once,
and then runs node t for the first time. Weights, inputs and the ops of the update are outside: a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from sim.errors import PolicyError
from sim.plan import Problem
from sim.solvers.schedule import TraceIndex
from sim.trace.chain import before_update
from sim.trace.liveness import LiveSet


@dataclass(frozen=True, slots=True)
class NodeValue:
    """Tensors that one node produces, that the same nodes read, and that are live together.

    size: bytes.
    producer: node.
    readers: nodes, rising; the producer itself where its reruns read what it produced once.
    end: whether it must be resident after the last node.
    held_until: the last stage at whose start it must be resident, at least -1: a plan may not drop it.
    overwritten_at: the node that overwrites it, or the number of nodes.
    fresh: whether it needs new bytes.
    once: whether only the producer's first run produces it, not its reruns.
    tensors: which ones.
    """

    size: int
    producer: int
    readers: tuple[int, ...]
    end: bool
    held_until: int
    overwritten_at: int
    fresh: bool = True
    once: bool = False
    tensors: tuple[int, ...] = ()

    def produced_in(self, stage: int) -> bool:
        """Whether a run of its producer in a stage produces it."""
        return not self.once or stage == self.producer


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes to schedule and their values. Times in ns, sizes in bytes.

    members: per node its ops.
    repeats: per node the ops that a rerun runs, in order: without those that can't be recomputed.
    cost: per node, of a rerun.
    run_bytes: per node the bytes it takes while it runs, beyond what was resident before: results and workspace.
    rerun_bytes: the same for a rerun.
    last_rerun: per node the last stage in which it may be recomputed, at most itself for never.
    values: see `NodeValue`.
    outside: bytes that are resident throughout.
    border: the first stage in which nodes may be recomputed.
    """

    members: Sequence[Sequence[int]]
    repeats: Sequence[Sequence[int]]
    cost: Sequence[int]
    run_bytes: Sequence[int]
    rerun_bytes: Sequence[int]
    last_rerun: Sequence[int]
    values: Sequence[NodeValue]
    outside: int
    border: int = 0

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def produced_by(self) -> list[list[int]]:
        """Per node the values that it produces."""
        produced: list[list[int]] = [[] for _ in self.members]
        for v, value in enumerate(self.values):
            produced[value.producer].append(v)
        return produced

    @cached_property
    def read_by(self) -> list[list[int]]:
        """Per node the values that it reads."""
        read: list[list[int]] = [[] for _ in self.members]
        for v, value in enumerate(self.values):
            for reader in value.readers:
                read[reader].append(v)
        return read

    @cached_property
    def useful(self) -> tuple[list[list[int]], list[list[int]]]:
        """Per stage the earlier nodes that may be worth recomputing, and the values worth having resident at its start.

        The second list has one more entry: the values that must be resident after the last stage.
        """
        count = len(self)
        wanted = [value.end for value in self.values]
        runs: list[list[int]] = [[] for _ in range(count)]
        there: list[list[int]] = [[] for _ in range(count + 1)]
        there[count] = [v for v, want in enumerate(wanted) if want]
        for t in reversed(range(count)):
            reruns = {t}
            for i in reversed(range(t)):
                if self.border <= t <= self.last_rerun[i] and any(
                    t > self.values[v].held_until
                    and not self.values[v].once
                    and (wanted[v] or not reruns.isdisjoint(self.values[v].readers))
                    for v in self.produced_by[i]
                ):
                    reruns.add(i)
            for v, value in enumerate(self.values):
                wanted[v] = value.producer < t <= value.overwritten_at and (
                    wanted[v] or t <= value.held_until or not reruns.isdisjoint(value.readers)
                )
            runs[t] = sorted(reruns - {t})
            there[t] = [v for v, want in enumerate(wanted) if want]
        return runs, there

    def reruns(self, stages: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Per op the ops that are recomputed before it, as `schedule_of` takes them, given the nodes of each stage."""
        return {
            self.members[t][0]: [op for node in nodes for op in self.repeats[node]]
            for t, nodes in enumerate(stages)
            if nodes
        }


def body(problem: Problem, policy: str) -> int:
    """How many ops come before the last run of update ops. Raises PolicyError on several devices or engines."""
    trace = problem.trace
    c = trace.op_columns
    if trace.devices > 1:
        raise PolicyError(f"policy {policy!r} plans for one device; this trace has {trace.devices}")
    count = before_update(trace)
    main = problem.platform.engine_for(0)
    for op, engine in sorted(c.engine.items()):
        if op < count and problem.platform.engine_for(0, engine) != main:
            raise PolicyError(f"policy {policy!r} plans for one engine; op {c.name[op]!r} runs on {engine!r}")
    return count


def beyond(ops: int, most: int) -> str:
    """Why a policy that can only plan op by op refuses so many ops; "" if it does not."""
    return f"plans op by op for {most} ops at most (max_ops); there are {ops}" if ops > most else ""


def counts_all(index: TraceIndex, ops: int) -> bool:
    """Whether nodes of one op each count memory as the engine does, among the first so many ops.

    They do not where the program holds a tensor beyond its last reader among these ops, nor where the storage of an
    input is freed before the end, because what overwrote it is neither an output nor read later.
    """
    trace = index.trace
    held = ((trace.released > trace.last_use) & (trace.last_use < ops)).any()
    outputs = set(trace.outputs)
    return not held and all(
        t in outputs or index.overwritten_at[t] < len(index.reads) or any(reader >= ops for reader in trace.readers(t))
        for t in in_place_of_inputs(index)
        if index.producer[t] < ops
    )


def in_place_of_inputs(index: TraceIndex) -> set[int]:
    """Tensors that an op wrote in the storage of one without a producer."""
    found: set[int] = set()
    for t in sorted(index.overwritten, key=lambda t: index.producer[t]):
        if index.producer[t] < 0 or t in found:
            found.add(int(index.trace.replaced_by[t]))
    return found


def nodes_of(
    problem: Problem, index: TraceIndex, parts: Sequence[Sequence[int]], *, border: int = 0, apart: bool = False
) -> Nodes:
    """The nodes of a trace, given their ops: every op before the update once, in program order.

    An op that produces a weight gradient runs once, and the gradient stays until it is read or to the end. An op
    that nothing can recompute once its part has ended, such as one that overwrites an input, runs once, too; the rest
    of its part may be recomputed without it. A tensor that overwrites an input counts as the input does: it is
    resident throughout.
    Exact where each part is one op. Where it is more, all that leaves a part, and all that it reads, is
    taken to be resident until the part ends, so that a plan may need less than is estimated here.

    parts: the ops of each node.
    border: for a part of a trace, its forward and its backward: the node with which the backward begins. Values
        produced before it that other ops read must be resident at its start, not at the end; nothing is recomputed
        before it.
    apart: one value per tensor, also where tensors of a node are live together.
    """
    flat = [op for part in parts for op in part]
    weighted = index.gradient_ops.intersection(flat)
    until = index.recomputable_among(flat)
    # an op that produces a weight gradient runs once; so does what overwrites its result in place
    until.update(index.recomputable_among(op for op in flat if op not in weighted))
    follower = [*(part[0] for part in parts[1:]), 0]
    repeats = [_repeated(part, until, follower[i]) for i, part in enumerate(parts)]
    crossing, values = _values(index, parts, repeats, border, apart)
    return Nodes(
        members=parts,
        repeats=repeats,
        cost=[sum(problem.cost.op_ns(op) for op in part) for part in repeats],
        run_bytes=[taken(index, part, crossing) for part in parts],
        rerun_bytes=[taken(index, part, crossing) for part in repeats],
        last_rerun=_last_reruns(parts, repeats, until, weighted),
        values=values,
        outside=sum(size for t, size in enumerate(index.size) if index.producer[t] < 0),
        border=border,
    )


def _values(
    index: TraceIndex, parts: Sequence[Sequence[int]], repeats: Sequence[Sequence[int]], border: int, apart: bool
) -> tuple[set[int], list[NodeValue]]:
    """The tensors that pass from a part to another, or outlast it; and the same as values."""
    trace, count = index.trace, len(parts)
    node_of = {op: i for i, part in enumerate(parts) for op in part}
    runs_once = {op for part, reruns in zip(parts, repeats, strict=True) for op in set(part).difference(reruns)}
    kept, inputs = set(trace.outputs), in_place_of_inputs(index)
    grouped: dict[NodeValue, list[int]] = {}
    crossing: set[int] = set()
    for t, producer in enumerate(index.producer):
        if producer < 0 or producer not in node_of or t in inputs:
            continue
        read = trace.readers(t)
        at = node_of[producer]
        once = producer in runs_once
        overwriter = index.overwritten_at[t]
        overwritten_at = node_of.get(overwriter, count)
        users = [r for r in (*read, overwriter) if r in node_of]
        readers = {node_of[r] for r in users if r not in runs_once and (once or node_of[r] != at)}
        at_first = {node_of[r] for r in users} - readers - {at}  # their reruns do not read it
        wanted_outside = overwritten_at == count and any(r not in node_of for r in read)
        leaves = wanted_outside and at < border and t not in kept
        end = t in kept or (wanted_outside and not leaves)
        if overwritten_at == at or not (readers or at_first or wanted_outside or end):
            continue
        held = border if leaves else -1
        if not index.droppable[t]:
            held = overwritten_at if overwritten_at < count else max((*readers, held))
            held = count if end else held
        held = max((held, *(k if k == overwritten_at else k + 1 for k in at_first)))
        crossing.add(t)
        readers_of = tuple(sorted(readers))
        fresh, alone = index.replaces[t] < 0, (t,) if apart else ()
        key = NodeValue(0, at, readers_of, end, held, overwritten_at, fresh, once, alone)
        grouped.setdefault(key, []).append(t)
    values = [
        replace(key, size=sum(index.size[t] for t in tensors), tensors=tuple(tensors))
        for key, tensors in sorted(grouped.items(), key=lambda row: astuple(row[0]))
    ]
    return crossing, values


def _last_reruns(
    parts: Sequence[Sequence[int]],
    repeats: Sequence[Sequence[int]],
    until: Mapping[int, int],
    weighted: Collection[int],
) -> list[int]:
    """Per node the last stage in which it may be recomputed, itself for never."""
    last_rerun = []
    for i, part in enumerate(repeats):
        # no anchor may follow it
        last = min(until[op] for op in part) if not any(op in weighted for op in part) else 0
        stages = [t for t in range(i + 1, len(parts)) if parts[t][0] <= last]
        last_rerun.append(max(stages, default=i))
    return last_rerun


def _repeated(part: Sequence[int], until: Mapping[int, int], follower: int) -> list[int]:
    """The ops of a part that can be recomputed before the first op of the next one, or all where none can."""
    return [op for op in part if until[op] >= follower] or list(part)


def taken(index: TraceIndex, part: Sequence[int], crossing: Collection[int]) -> int:
    """The most bytes that a part takes while its ops run one by one and what leaves it stays resident."""
    last: Mapping[int, int] = {t: op for op in part for t in (*index.writes[op], *index.reads[op])}
    live, most = LiveSet(index.size, index.replaces), 0
    for op in part:
        # what takes over a storage from outside takes nothing
        mine = [t for t in index.writes[op] if index.replaces[t] < 0 or index.replaces[t] in live]
        most = max(most, live.run(mine, index.workspace[op]))
        live.free(t for t in (*index.reads[op], *index.writes[op]) if last[t] == op and t not in crossing)
    return most
