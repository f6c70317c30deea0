"""The data-flow cut behind ZeRO-Offload: which ops of the update run on the CPU, so that the fewest bytes cross."""

from __future__ import annotations

from sim.rewrites.fused_update import OPTIMIZER
from sim.rewrites.host_update import device_updates
from sim.solvers.flow import Flow
from sim.trace.graph import Trace
from sim.trace.tensor import ROLE_CODE

DEVICE, CPU = 0, 1
STATE = ROLE_CODE["optimizer_state"]


def cheapest_cut(trace: Trace) -> list[int]:
    """The ops of the update that run on the CPU where the fewest bytes cross between device and CPU in an iteration.

    Forward and backward, one node, stay on the device: their work grows with the batch. Whatever touches an optimizer
    state, or an optimizer's op where there are none, is one node on the CPU. All other ops of the update (clipping,
    scaling, conversions) are placed by a minimum cut. A value crosses once if what produces, reads or overwrites it is
    on both sides; what is carried to the next iteration is one value. Of equal cuts the one with the fewest ops on the
    CPU.
    """
    c, t = trace.op_columns, trace.tensor_columns
    updates = device_updates(trace)
    with_states = {op for op in updates if any(t.role[x] == STATE for x in (*trace.reads(op), *trace.writes(op)))}
    fixed = with_states or {op for op in updates if c.kind[op] == OPTIMIZER}
    free = [op for op in updates if op not in fixed]
    node = dict.fromkeys(fixed, CPU) | {op: 2 + k for k, op in enumerate(free)}
    values = [(nodes, size) for nodes, size in _values(trace, node) if len(nodes) > 1 and size]
    flow = Flow(2 + len(free) + 2 * len(values))
    for k, (nodes, size) in enumerate(values):
        enter = 2 + len(free) + 2 * k
        flow.add(enter, enter + 1, size)
        for each in nodes:
            flow.add(each, enter, None)
            flow.add(enter + 1, each, None)
    side = flow.sink_side()
    return [op for op in updates if side[node[op]]]


def crossing(trace: Trace, on_cpu: set[int]) -> int:
    """Bytes that cross in an iteration if these ops run on the CPU and all others on the device."""
    return sum(size for sides, size in _values(trace, dict.fromkeys(on_cpu, CPU)) if len(sides) > 1)


def _values(trace: Trace, node: dict[int, int]) -> list[tuple[set[int], int]]:
    """Per value the nodes that produce, read or overwrite it, and its bytes. node: of ops, `DEVICE` for all others."""
    carried = dict(trace.carry)
    found: dict[int, set[int]] = {}
    for x in range(len(trace.tensors)):
        ops = [int(trace.producer[x]), *trace.readers(x)]
        if (new := int(trace.replaced_by[x])) >= 0:
            ops.append(int(trace.producer[new]))
        found.setdefault(carried.get(x, x), set()).update(node.get(op, DEVICE) for op in ops if op >= 0)
    size = trace.tensor_columns.bytes
    return [(nodes, int(size[x])) for x, nodes in found.items()]
