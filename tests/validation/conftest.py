"""Fixtures of the validation tests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from sim.trace import ROLES, Trace


@dataclass
class Replay:
    """Bytes by role: at the start, after each phase, and at the highest point of each phase."""

    start: dict[str, int]
    after: dict[str, dict[str, int]] = field(default_factory=dict)
    peak: dict[str, dict[str, int]] = field(default_factory=dict)
    peak_op: dict[str, str] = field(default_factory=dict)

    def peak_bytes(self, phase: str) -> int:
        return sum(self.peak[phase].values())


def replay_keeping_all(trace: Trace, unit: int = 512) -> Replay:
    """What lives when every tensor stays until its last reader has ended; sizes rounded up to `unit` bytes.

    Written apart from the engine: outputs are there when an op starts, its inputs until it has ended.
    """

    def rounded(size: int) -> int:
        return -(-size // unit) * unit

    last: dict[int, int] = {}
    made_by: dict[int, int] = {}
    ops = list(trace.ops)
    for op in ops:
        for t in (*op.reads, *op.writes):
            last[t] = op.id
        for t in op.writes:
            made_by[t] = op.id
    tensors = list(trace.tensors)
    kept = {t.id for t in tensors if t.id not in made_by} | set(trace.outputs)
    taken_over = {t.replaces for t in tensors if t.replaces is not None}
    dying = defaultdict(list)
    for t, op_id in last.items():
        if t not in kept and t not in taken_over:
            dying[op_id].append(tensors[t])
    live = dict.fromkeys(ROLES, 0)
    for t in tensors:
        if t.id not in made_by:
            live[t.role] += rounded(t.bytes)
    result = Replay(dict(live))
    for op in ops:
        for t in op.writes:
            if (old := tensors[t].replaces) is not None:
                live[tensors[old].role] -= rounded(tensors[old].bytes)
            live[tensors[t].role] += rounded(tensors[t].bytes)
        now = {**live, "temporary": live["temporary"] + rounded(op.workspace)}
        if op.phase not in result.peak or sum(now.values()) > result.peak_bytes(op.phase):
            result.peak[op.phase], result.peak_op[op.phase] = now, op.name
        for tensor in dying[op.id]:
            live[tensor.role] -= rounded(tensor.bytes)
        result.after[op.phase] = dict(live)
    return result


@pytest.fixture
def replay():
    return replay_keeping_all
