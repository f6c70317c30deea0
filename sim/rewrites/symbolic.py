"""What a trace computes, symbolically: a value is a hash of the op that produced it and of the values it read.

`plain_values` gives the value of every tensor when a trace runs as written; a replay that ends with other hashes has
read a stale value or lost one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from sim.trace.graph import Trace

Value = bytes


def first_value(tensor: int) -> Value:
    """The value of a tensor that exists from the start."""
    return hashlib.blake2b(b"start %d" % tensor, digest_size=16).digest()


def op_values(op: int, reads: Sequence[Value], count: int) -> list[Value]:
    """The values of the `count` tensors that an op writes, given the values that it reads, in order.

    Each op is a distinct function. A random op replays its seed, so it is no exception.
    """
    inner = hashlib.blake2b(b"op %d " % op + b"".join(reads), digest_size=16).digest()
    return [hashlib.blake2b(inner + b"%d" % k, digest_size=16).digest() if k else inner for k in range(count)]


def plain_values(trace: Trace) -> list[Value]:
    """The value of every tensor when the trace runs as written, by id.

    Each member of a group is a function of the reads of all members, in program order.
    """
    values: list[Value] = [first_value(t) for t in range(len(trace.tensors))]
    members = groups(trace)
    pending: dict[str, int] = {name: len(ops) for name, ops in members.items()}
    produced = (trace.producer < 0).tolist()
    waiting: list[int] = []

    def run(op: int, reads: Iterable[int]) -> None:
        writes = trace.writes(op)
        for t, value in zip(writes, op_values(op, [values[t] for t in reads], len(writes)), strict=True):
            values[t], produced[t] = value, True

    def try_op(op: int) -> bool:
        if not all(produced[t] for t in trace.reads(op)):
            return False
        name = trace.op_columns.group.get(op, "")
        if not name:
            run(op, trace.reads(op))
            return True
        pending[name] -= 1
        if not pending[name]:  # the last member to have its inputs: now all of them run
            reads = [t for member in members[name] for t in trace.reads(member)]
            for member in members[name]:
                run(member, reads)
        return True

    for op in range(len(trace.ops)):
        if not try_op(op):
            waiting.append(op)
        elif waiting and op in trace.op_columns.group:
            waiting = _drain(waiting, try_op)
    _drain(waiting, try_op)  # nothing is left: a trace whose groups cannot meet is refused where it is made
    return values


def _drain(waiting: list[int], try_op: object) -> list[int]:
    while True:
        left = [op for op in waiting if not try_op(op)]  # type: ignore[operator]
        if len(left) == len(waiting):
            return left
        waiting = left


def groups(trace: Trace) -> dict[str, list[int]]:
    """The members of every group, in program order."""
    members: dict[str, list[int]] = {}
    for op, name in sorted(trace.op_columns.group.items()):
        members.setdefault(name, []).append(op)
    return members


__all__ = ["Value", "first_value", "groups", "op_values", "plain_values"]
