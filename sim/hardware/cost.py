"""The time of an op: one rule for all engines.

Time of an op = launch + FLOPs / (efficiency * peak) + bytes / (share * bandwidth), unless the trace has a measured
duration. The sum fits published GEMM measurements better than the maximum of the two terms. An op that stands for
several kernels (`LOOPED`) has a launch for each. Operands in another tier are charged at that tier's bandwidth.

A platform with `op_time = "bound"` has the performance bound of DeepCuts instead (Jung, Dao, Lee, PLDI 2021): an op
takes launch + max(FLOPs / (efficiency * peak * waves), bytes / (share * bandwidth)). `waves` is the part of the cores
that blocks of `TILE` by `TILE` results keep busy, the last wave included; 1 where nobody says how many cores there
are. Its terms for shared memory and for what fits into a block need the tiles of a kernel, of which a trace says
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
from numpy.typing import NDArray

from sim.errors import ProfileError
from sim.hardware.platform import Engine, Platform, Tier
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import KINDS, PHASE_CODE
from sim.trace.tensor import ROLE_CODE

TILE = 128
"""Rows and columns of the results that a block of a product computes, as in the tiles that libraries prefer."""

TILED = ("matmul", "conv", "attention")
"""Kinds of op that are computed in such blocks."""

RESULT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp64": 8}
"""Bytes of an element of a product's result, 4 in other types."""

LOOPED = {"adamw_loop": (8, 8), "adafactor": (18, 9)}
"""How many kernels an op of an optimizer stands for that updates one parameter after the other, a matrix or a vector.

In PyTorch 2.13 `_single_tensor_adam` calls mul_, lerp_, mul_, addcmul_, sqrt, div, add_ and addcdiv_, and
`_single_tensor_adafactor` for a matrix norm (of the weight); norm, pow_, div_ and lerp_ for its rows and for its
columns; mm, mean, clamp_, div_; clamp_, rsqrt_ and mul_; norm (of the update) and add_; for a vector norm, mul, lerp_,
clone, clamp_, rsqrt_, mul_, norm and add_.
"""

FUSED = "fused"
"""The stack that updates all parameters in one kernel, whatever the optimizer."""

STAND_INS = {
    "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"),
    "tf32": ("fp32",),
    "fp32": ("fp64",),
    "fp64": (),
    "fp8": ("fp16", "bf16", "fp32"),
    "int8": ("fp16", "bf16", "fp32"),
}
"""The types whose peak to use where an engine has none for a type: bf16 and fp16 for each other, then wider types."""


def peak_dtype(engine: Engine, dtype: str) -> str:
    """The type whose peak is used for `dtype` on this engine.

    engine: the engine that runs the op.
    dtype: number type of the op's arithmetic; "" for the engine's first.

    Raises ProfileError where the engine has no peak for `dtype` or a type that stands in for it.
    """
    if not engine.peak:
        raise ProfileError(f"engine {engine.name!r} has no peak")
    if not dtype:
        return next(iter(engine.peak))
    for name in (dtype, *STAND_INS.get(dtype, ())):
        if name in engine.peak:
            return name
    raise ProfileError(f"engine {engine.name!r} has no peak for {dtype!r}; it has {', '.join(engine.peak)}")


def flops_per_second(engine: Engine, kind: str, dtype: str) -> float:
    """FLOP/s that an engine sustains on a kind of op in a type: peak times efficiency. Raises ProfileError.

    The efficiency is the engine's for that kind in that type (`matmul_fp32`), else for that kind, else its default,
    else 1.
    """
    priced = peak_dtype(engine, dtype)
    return engine.peak[priced] * efficiency_of(engine, kind, priced)


def efficiency_of(engine: Engine, kind: str, priced: str) -> float:
    """Fraction of the peak that an engine reaches on a kind of op in a type that it has a peak for."""
    table = engine.efficiency
    return table.get(f"{kind}_{priced}", table.get(kind, table.get("", 1.0)))


def bytes_per_second(engine: Engine, kind: str, tier: Tier, *, written: bool = False) -> int:
    """Bytes/s that an engine draws from a tier on a kind of op: the tier's bandwidth times the engine's share.

    written: of what it writes there, in place from another home.
    """
    bandwidth = (tier.write_bandwidth if written else 0) or tier.bandwidth
    share = engine.bandwidth_share.get(kind, engine.bandwidth_share.get("", 1.0))
    return max(1, round(bandwidth * share))


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Times of all ops. Shapes (ops,).

    engine: position of the engine in `platform.engines`.
    fixed: ns of launch and arithmetic, or the duration measured in the trace.
    bytes: bytes touched in memory, those of transpositions (`transposed`) included; 0 where the duration was measured.
    rate: bytes/s at which the engine touches them.
    total: ns of both parts when nothing else uses the memory, rounded up.
    """

    engine: NDArray[np.int32]
    fixed: NDArray[np.int64]
    bytes: NDArray[np.int64]
    rate: NDArray[np.int64]
    total: NDArray[np.int64]


def op_times(trace: Trace, platform: Platform) -> OpTimes:
    """Times of all ops of a trace with every operand in its engine's home tier.

    Raises ProfileError where an op needs an engine or a type that the platform lacks.
    """
    return kept(trace, "times", platform.timing_hash, lambda: _op_times(trace, platform))


def _op_times(trace: Trace, platform: Platform) -> OpTimes:
    c = trace.op_columns
    count = len(c.name)
    engine, groups = kept(trace.structure, "by_engine", platform.timing_hash, lambda: _by_engine(trace, platform))
    types, type_of = trace.op_types
    fixed, rate = np.zeros(count, np.int64), np.zeros(count, np.int64)
    moved = trace.touched.copy()
    for rows in groups:
        unit = platform.engines[int(engine[rows[0]])]
        kind = KINDS[c.kind[rows[0]]]
        if kind in unit.lacks:
            able = ", ".join(other.name for other in platform.engines if kind not in other.lacks) or "none"
            what = f"ops of kind {kind!r}, such as {c.name[int(rows[0])]!r}"
            raise ProfileError(f"{platform.name}: engine {unit.name!r} cannot run {what}; engines that can: {able}")
        fixed[rows] = _fixed_ns(unit, kind, types[type_of[rows[0]]], c.flops[rows])
        moved[rows] += transposed(trace, rows, unit)
        if kind == "optimizer" and unit.device >= 0:
            fixed[rows] += (kernels(trace)[rows] - 1) * unit.launch
        rate[rows] = bytes_per_second(unit, kind, platform.tier(unit.home))
    measured = c.duration >= 0
    whole = np.where(measured, c.duration, fixed)
    touched = np.where(measured, 0, moved)
    if platform.op_time == "bound":
        alone = np.array([unit.launch for unit in platform.engines], np.int64)[engine]
        cores = np.array([unit.cores for unit in platform.engines], np.int64)[engine]
        bound = _bounded(trace, np.arange(count), whole, alone, cores, _ceil_ns(touched, rate))
        whole = np.where(measured, whole, bound)
    total = whole + _ceil_ns(touched, rate)
    for column in (engine, whole, touched, rate, total):
        column.setflags(write=False)  # the engine and all who estimate share them
    return OpTimes(engine, whole, touched, rate, total)


def _by_engine(trace: Trace, platform: Platform) -> tuple[NDArray[np.int32], list[NDArray[np.int64]]]:
    """Per op its engine; and the ops in groups of one engine, kind and type: once for all traces of a structure."""
    c = trace.op_columns
    engine = np.zeros(len(c.name), np.int32)
    named = np.zeros(len(c.name), np.bool_)
    for i, name in c.engine.items():
        engine[i] = platform.engine_for(int(c.device[i]), name)
        named[i] = True
    for device in range(trace.devices):
        engine[(c.device == device) & ~named] = platform.engine_for(device)
    types, type_of = trace.op_types
    group = (engine.astype(np.int64) * len(KINDS) + c.kind) * max(len(types), 1) + type_of
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    return engine, np.split(order, starts[1:]) if len(order) else []


COMPILED = ("compiled", "compiled_layers")
"""The stacks of `torch.compile`."""


def transposed(trace: Trace, ops: NDArray[np.int64], unit: Engine) -> NDArray[np.int64]:
    """Bytes that an engine reads and writes to transpose the images of convolutions. Shape (ops,).

    A library whose kernels take channels last (`Engine.transposes`) transposes operands and results of a convolution
    with channels first there and back: each is read and written once more. The gradients of input and weight are two
    convolutions, which transpose the incoming gradient each for itself. Nothing is transposed in a trace whose images
    have channels last (`meta["channels_last"]`), nor under `torch.compile`, which puts them last. Left out: launches of
    these kernels, and the memory of the copies.

    ops: positions of ops of one kind and type.
    unit: the engine that runs them.
    """
    c, t = trace.op_columns, trace.tensor_columns
    again = np.zeros(len(ops), np.int64)
    if not len(ops) or KINDS[c.kind[ops[0]]] != "conv" or not unit.transposes:
        return again
    if trace.meta.get("channels_last") or trace.meta.get("stack") in COMPILED:
        return again
    if peak_dtype(unit, c.dtype[int(ops[0])]) not in unit.transposes:
        return again
    for place, op in enumerate(ops.tolist()):
        gradients = sum(len(t.shape.get(i, ())) != 1 for i in trace.writes(op))  # but for that of a bias
        if gradients > 1:
            again[place] = t.bytes[trace.reads(op)[0]]  # what arrives is the first operand
    return 2 * (trace.touched[ops] + again)


def kernels(trace: Trace) -> NDArray[np.int64]:
    """How many kernels each op stands for: 1, or what the loop of its optimizer runs for a parameter. Shape (ops,)."""
    found = np.ones(len(trace.op_columns.name), np.int64)
    rows = looped(trace)
    if len(rows):
        matrix, vector = LOOPED[str(trace.meta["optimizer"])]
        found[rows] = [matrix if _of_matrix(trace, op) else vector for op in rows.tolist()]
    return found


def looped(trace: Trace) -> NDArray[np.int64]:
    """The ops that stand for what an optimizer of `LOOPED` runs for one parameter. Captured ones are a kernel each."""
    c = trace.op_columns
    if str(trace.meta.get("optimizer", "")) not in LOOPED or trace.meta.get("stack") == FUSED:
        return np.zeros(0, np.int64)
    rows = np.flatnonzero((c.phase == PHASE_CODE["update"]) & (c.kind == KINDS.index("optimizer")))
    return np.array([op for op in rows.tolist() if c.name[op].startswith("optimizer.")], np.int64)


def _of_matrix(trace: Trace, op: int) -> bool:
    """Whether an update is that of a parameter of two dimensions or more, by the weights that it reads or writes."""
    t = trace.tensor_columns
    weights = (i for i in (*trace.reads(op), *trace.writes(op)) if t.role[i] == ROLE_CODE["weight"])
    return any(len(t.shape.get(i, ())) > 1 for i in weights)


def first_engines(trace: Trace, engine: NDArray[np.int32], idle: int) -> NDArray[np.int64]:
    """Per tensor the engine that first makes or uses it, in whose home tier it begins. Shape (tensors,).

    A tensor that is only overwritten is used by the op that takes over its storage.

    engine: per op the one that runs it, as `op_times` says.
    idle: that of a tensor which no op uses.
    """
    c = trace.op_columns
    first = np.full(len(trace.tensor_columns.name), idle, np.int64)
    for start, ids in ((c.read_start, c.read_ids), (c.write_start, c.write_ids)):
        op = np.repeat(np.arange(len(c.name)), np.diff(start))
        unmade = np.ones(len(ids), bool) if ids is c.write_ids else trace.producer[ids] < 0
        first[ids[unmade][::-1]] = engine[op[unmade]][::-1]  # of several the first stays, which comes last
    over = trace.replaced_by
    unread = np.flatnonzero((trace.producer < 0) & (over >= 0))
    unread = unread[[not trace.readers(t) for t in unread.tolist()]] if len(unread) else unread
    first[unread] = first[over[unread]]
    return first


def ns_on(trace: Trace, ops: NDArray[np.int64], platform: Platform, engine: int) -> NDArray[np.int64]:
    """Nanoseconds that ops of one kind and type take on an engine, their operands in its home tier. Shape (ops,).

    Raises ProfileError where the engine has no peak for the type.
    """
    c, unit = trace.op_columns, platform.engines[engine]
    kind = KINDS[c.kind[ops[0]]]
    moved = trace.touched[ops] + transposed(trace, ops, unit)
    rate = np.full(len(ops), bytes_per_second(unit, kind, platform.tier(unit.home)), np.int64)
    fixed, bytes = _fixed_ns(unit, kind, c.dtype[int(ops[0])], c.flops[ops]), _ceil_ns(moved, rate)
    if platform.op_time == "bound":
        each = np.ones(len(ops), np.int64)
        fixed = _bounded(trace, ops, fixed, unit.launch * each, unit.cores * each, bytes)
    return fixed + bytes


def _bounded(
    trace: Trace,
    ops: NDArray[np.int64],
    fixed: NDArray[np.int64],
    launch: NDArray[np.int64],
    cores: NDArray[np.int64],
    bytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Nanoseconds of launch and of what arithmetic takes longer than the bytes, which are added to that.

    fixed: launch and arithmetic; bytes: ns of the bytes touched.
    """
    c, size = trace.op_columns, trace.tensor_columns.bytes
    tiled = np.isin(c.kind[ops], [KINDS.index(kind) for kind in TILED]) & (cores > 0)
    arithmetic = (fixed - launch).astype(np.float64)
    for i in np.flatnonzero(tiled & (arithmetic > 0)).tolist():
        made = trace.writes(int(ops[i]))
        dtype = c.dtype[int(ops[i])]
        elements = max((int(size[t]) for t in made), default=0) // RESULT_BYTES.get(dtype, 4)
        arithmetic[i] /= waves(max(1, ceil(elements / TILE**2)), int(cores[i]))
    whole: NDArray[np.int64] = launch + np.maximum(np.ceil(arithmetic - 1e-6).astype(np.int64) - bytes, 0)
    return whole


def waves(blocks: int, cores: int) -> float:
    """Part of the cores that so many equal blocks keep busy, until the last wave of them has ended.

    >>> waves(80, 80), waves(81, 80), waves(40, 80)
    (1.0, 0.50625, 0.5)
    """
    return blocks / (cores * ceil(blocks / cores))


def _fixed_ns(unit: Engine, kind: str, dtype: str, flops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nanoseconds of launch and arithmetic of ops of one kind and type."""
    fixed = np.full(len(flops), unit.launch, np.float64)
    if (flops > 0).any():
        # float64 holds these sums to well under a nanosecond; the result is an integer from here on
        ns = flops * (1e9 / flops_per_second(unit, kind, dtype))
        fixed += np.ceil(ns - (1e-9 + 1e-15 * ns))  # the margin keeps a whole number of ns whole
    whole: NDArray[np.int64] = fixed.astype(np.int64)
    return whole


def _ceil_ns(bytes: NDArray[np.int64], rate: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nanoseconds for bytes at a rate in bytes/s, rounded up, without 64-bit overflow."""
    rate = np.maximum(rate, 1)
    seconds, rest = np.divmod(bytes, rate)
    # rest < rate <= ~1e13, so rest * 1e9 may exceed 2**63: compute the nanoseconds in two steps
    micro, rest = np.divmod(rest * 10**5, rate)
    whole: NDArray[np.int64] = seconds * 10**9 + micro * 10**4 - (-(rest * 10**4) // rate)
    return whole


def slow_operand_ns(
    platform: Platform, engine: int, kind: str, read: Mapping[str, int], written: Mapping[str, int]
) -> int:
    """Extra ns of an op for operands in tiers other than its engine's home tier, rounded up, at least 0.

    platform: the machine.
    engine: position of the engine in `platform.engines`.
    kind: kind of the op.
    read, written: bytes of operands and of results by the name of their tier.
    """
    unit = platform.engines[engine]
    home = platform.tier(unit.home)
    usual = bytes_per_second(unit, kind, home)
    extra = Fraction(0)
    for name in read.keys() | written.keys():
        tier = platform.tier(name)
        if tier.name != home.name:
            extra += tier.latency
            for writes, bytes in enumerate((read.get(name, 0), written.get(name, 0))):
                rate = bytes_per_second(unit, kind, tier, written=bool(writes))
                extra += Fraction(bytes * 10**9, rate) - Fraction(bytes * 10**9, usual)
    return max(0, ceil(extra))
