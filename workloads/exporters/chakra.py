"""Writes a run as Chakra execution traces (MLCommons), one file `<prefix>.<rank>.et` per device.

Every run of an op is a COMP_NODE, recomputation included. Every move between tiers is a MEM_STORE_NODE (out of a
device's own memory) or a MEM_LOAD_NODE (into it), with its bytes in `tensor_size`. Every member of a group is a
COMM_SEND_NODE, COMM_RECV_NODE or COMM_COLL_NODE, with its bytes in `comm_size`. Data dependencies point to the nodes
that made the operands available (an op or a load; for a load, the preceding store), control dependencies to the
preceding node on the same engine or link.

The format lacks capacities, the release of memory, and times below a microsecond; the attribute `duration_ns` has the
exact nanoseconds. A trace records how often a collective goes round its ring, not its type: `comm_type` follows from
that, and is ALL_REDUCE where it is not known, unless the op's name implies another. Attributes that other tools do not
know (`op`, `why`, `kind`, `phase`, …) and a table of tensors in the head let `workloads.importers.chakra` rebuild the
trace. A view (`Op.views`) has the storage of the tensor in which it lies, as in PyTorch's execution traces.
Alternatives, splits, release points, and engines other than the device's main one are not written.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.errors import TraceError
from sim.log import WHY, EventLog
from sim.regular_files import check_replaceable
from sim.trace.op import Op
from sim.trace.tensor import ROLES
from workloads.importers.chakra_schema import COLLECTIVES, NODE_TYPES, attribute, encode, messages

VERSION = "0.0.4"
COMM = {"send": "COMM_SEND_NODE", "recv": "COMM_RECV_NODE"}


@dataclass(slots=True)
class _Step:
    """What a lane did in one interval: run an op (possibly of a group) or move a tensor."""

    start: int
    end: int
    device: int
    lane: int
    why: str
    op: int
    tensor: int = -1
    bytes: int = 0
    loads: bool = False


@dataclass
class _Rank:
    """What has been written for one device.

    nodes: in order.
    ready: per tensor, (time in ns, node) of each op or load that made it available.
    stored: the same for stores.
    last: the last node of each lane.
    """

    nodes: list[Any] = field(default_factory=list)
    ready: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    stored: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


def export_chakra(log: EventLog, prefix: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write a run, one file `<prefix>.<device>.et` per device. Returns their paths.

    log: of the run.
    prefix: of the paths; each file appears complete or not at all.

    Raises TraceError for a run without ops, OSError where a file cannot be written.
    """
    steps = sorted(_steps(log), key=lambda s: (s.start, s.end, s.op, s.device))
    if not steps:
        raise TraceError("nothing ran in this log: there is nothing to export")
    ranks = [_Rank() for _ in range(log.trace.devices)]
    for order, step in enumerate(steps):
        _write_node(log, ranks[step.device], step, order)
    head = _head(log)
    paths = []
    for device, rank in enumerate(ranks):
        path = Path(f"{os.fspath(prefix)}.{device}.et")
        _save(path, encode([head, *rank.nodes]))
        paths.append(path)
    return tuple(paths)


# ---- what happened -----------------------------------------------------------------------------------


def _steps(log: EventLog) -> Iterator[_Step]:
    trace, engines = log.trace, len(log.platform.engines)
    homes = {log.platform.main_engine(device).home for device in range(log.trace.devices)}
    groups: dict[str, list[int]] = {}
    for op, name in trace.op_columns.group.items():
        groups.setdefault(name, []).append(op)
    moves: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    met: dict[tuple[int, int, str], tuple[int, int, int]] = {}
    for start, end, device, lane, why, op, tensor, _, size in log.intervals.tolist():
        if why in (WHY["run"], WHY["recompute"]):
            yield _Step(start, end, device, lane, "run" if why == WHY["run"] else "recompute", op)
        elif why == WHY["move"] and tensor >= 0:
            moves.setdefault((start, end, tensor, device), []).append((lane - engines, size))
        elif why == WHY["move"] and op in trace.op_columns.group:
            met.setdefault((start, end, trace.op_columns.group[op]), (start, end, size))
    for (start, end, tensor, device), hops in moves.items():
        target = log.platform.links[hops[-1][0]].target
        lane, size = hops[0]
        index = max(0, device)
        yield _Step(start, end, index, engines + lane, "move", -1, tensor, size, loads=target in homes)
    for (_, _, name), (start, end, size) in met.items():
        for op in groups[name]:
            device = int(trace.op_columns.device[op])
            yield _Step(start, end, device, -1, "run", op, bytes=size)


# ---- nodes -------------------------------------------------------------------------------------------


def _write_node(log: EventLog, rank: _Rank, step: _Step, order: int) -> None:
    trace = log.trace
    number = len(rank.nodes)
    node = messages()["Node"](id=number, start_time_micros=step.start // 1000)
    node.duration_micros = round((step.end - step.start) / 1000)
    node.attr.append(attribute("is_cpu_op", "bool", False))
    node.attr.append(attribute("order", "uint64", order))
    node.attr.append(attribute("why", "string", step.why))
    node.attr.append(attribute("duration_ns", "uint64", step.end - step.start))
    if step.lane in rank.last:
        node.ctrl_deps.append(rank.last[step.lane])
    rank.last[step.lane] = number
    if step.tensor >= 0:
        node.type = NODE_TYPES.index("MEM_LOAD_NODE" if step.loads else "MEM_STORE_NODE")
        node.name = ("load " if step.loads else "store ") + trace.tensor_columns.name[step.tensor]
        node.attr.append(attribute("tensor_size", "uint64", step.bytes))
        node.attr.append(attribute("kind", "string", "copy"))
        side = node.outputs if step.loads else node.inputs
        _list(side, log, [step.tensor])
        before = rank.stored if step.loads else rank.ready
        node.data_deps.extend(_available(before, [step.tensor], step.start))
        after = rank.ready if step.loads else rank.stored
        after.setdefault(step.tensor, []).append((step.end, number))
    else:
        op = trace.ops[step.op]
        node.name = op.name
        node.attr.extend(_op_attributes(log, op, step))
        node.type = NODE_TYPES.index(_type_of(op, step))
        _list(node.inputs, log, op.reads)
        _list(node.outputs, log, op.writes)
        node.data_deps.extend(_available(rank.ready, op.reads, step.start))
        for tensor in op.writes:
            rank.ready.setdefault(tensor, []).append((step.end, number))
    rank.nodes.append(node)


def _available(ready: dict[int, list[tuple[int, int]]], tensors: Any, start: int) -> list[int]:
    """The last nodes that made these tensors available before `start`."""
    nodes: dict[int, None] = {}
    for tensor in tensors:
        for end, number in reversed(ready.get(tensor, ())):
            if end <= start:
                nodes[number] = None
                break
    return list(nodes)


def _type_of(op: Op, step: _Step) -> str:
    if step.lane >= 0:
        return "COMP_NODE"
    return COMM.get(op.kind, "COMM_COLL_NODE")


def _op_attributes(log: EventLog, op: Op, step: _Step) -> Iterator[Any]:
    yield attribute("op", "int64", op.id)
    yield attribute("kind", "string", op.kind)
    yield attribute("phase", "string", op.phase)
    yield attribute("layer", "int64", op.layer)
    yield attribute("num_ops", "int64", op.flops)
    yield attribute("tensor_size", "uint64", int(log.trace.touched[op.id]))
    yield attribute("workspace", "uint64", op.workspace)
    yield attribute("random", "bool", op.random)
    yield attribute("dtype", "string", op.dtype)
    if op.bytes is not None:
        yield attribute("bytes", "uint64", op.bytes)
    if op.duration is None:
        yield attribute("modelled", "bool", True)
    if step.lane < 0:
        yield attribute("comm_size", "int64", step.bytes)
        yield attribute("comm_priority", "int32", op.priority)
        yield attribute("group", "string", op.group)
        if op.ring is not None:
            yield attribute("axis", "string", op.ring.axis)
            yield attribute("passes", "int64", op.ring.passes)
        yield from _ends(log, op)


def _ends(log: EventLog, op: Op) -> Iterator[Any]:
    members = sorted(i for i, name in log.trace.op_columns.group.items() if name == op.group)
    devices = [int(log.trace.op_columns.device[i]) for i in members]
    if op.kind in COMM:
        kinds = [log.trace.ops[i].kind for i in members]
        yield attribute("comm_src", "int32", devices[kinds.index("send")])
        yield attribute("comm_dst", "int32", devices[kinds.index("recv")])
        yield attribute("comm_tag", "int32", members[0])
    else:
        plain = op.name.upper().replace("-", "_")
        named = (i for i, name in enumerate(COLLECTIVES) if name in plain or name.replace("_", "") in plain)
        yield attribute("comm_type", "int64", next(named, 0 if op.ring is None else COLLECTIVES.index(_kind(log, op))))
        yield attribute("pg_name", "string", ",".join(map(str, devices)))


def _kind(log: EventLog, op: Op) -> str:
    """The type of a collective of which it is known how its ranks exchange."""
    assert op.ring is not None
    if op.ring.axis == "expert":
        return "ALL_TO_ALL"
    if op.ring.passes == 2:
        return "ALL_REDUCE"
    size = log.trace.tensor_columns.bytes
    read, written = (sum(int(size[t]) for t in tensors) for tensors in (op.reads, op.writes))
    return "ALL_GATHER" if written > read else "REDUCE_SCATTER"


def _list(side: Any, log: EventLog, tensors: Any) -> None:
    """List tensors as in PyTorch's execution traces: tensor, storage, offset, elements, bytes per element, device."""
    column, rows, kinds = log.trace.tensor_columns, [], []
    for tensor in tensors:
        storage = log.trace.view_of.get(int(tensor), int(tensor))
        while column.replaces[storage] >= 0:
            storage = int(column.replaces[storage])
        rows.append([int(tensor), storage, 0, int(column.bytes[tensor]), 1, "device"])
        kinds.append(f"Tensor({column.dtype[tensor]})")
    side.values = json.dumps(rows)
    side.types = json.dumps(kinds)
    side.shapes = json.dumps([list(column.shape.get(int(t), ())) for t in tensors])


def _head(log: EventLog) -> Any:
    trace, t = log.trace, log.trace.tensor_columns
    numbers = zip(t.bytes.tolist(), t.role.tolist(), t.layer.tolist(), t.replaces.tolist(), strict=True)
    table = [
        [i, t.name[i], size, ROLES[role], layer, t.dtype[i], replaces]
        for i, (size, role, layer, replaces) in enumerate(numbers)
    ]
    about = {"tensors": table, "outputs": list(trace.outputs), "carry": [list(pair) for pair in trace.carry]}
    about["meta"] = dict(trace.meta)
    head = messages()["GlobalMetadata"](version=VERSION)
    head.attr.append(attribute("schema", "string", "tiersim"))
    head.attr.append(attribute("tiersim", "string", json.dumps(about, default=str)))
    return head


def _save(path: Path, data: bytes) -> None:
    check_replaceable(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
