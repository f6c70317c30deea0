"""Law 11, second half: an op costs as much as the op that it stands for, except for declared savings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor

import numpy as np

from sim.conformance.holding import check_holding
from sim.conformance.replayed import LawBroken, Replayed
from sim.hardware.cost import op_times
from sim.plan import Move
from sim.policies.base import SAVINGS
from sim.rewrites.rewriter import with_columns
from sim.rewrites.slots import slots_of
from sim.rewrites.symbolic import groups
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.op import Implementation, Op
from sim.trace.origin import (
    Along,
    Encoded,
    Expr,
    Fused,
    Glue,
    Microbatch,
    Origin,
    Packed,
    Part,
    Same,
    Slots,
    leaves,
    resolved,
)


def check_costs(run: Replayed) -> None:
    """Law 11: an op of a rewritten trace costs what it stands for, except for savings that the policy declares."""
    unknown = set(run.policy.saves) - set(SAVINGS)
    if unknown:
        raise LawBroken(f"the policy declares a saving of {min(unknown)!r}; there are {', '.join(SAVINGS)}")
    if run.plan is None or run.plan.trace is run.trace or run.plan.trace == run.trace:
        return
    _Costs(run, run.plan.trace).check()
    if "release" not in run.policy.saves:
        check_holding(run.plan.trace, run.trace)


@dataclass(frozen=True)
class _Cost:
    """The least that an op may cost.

    duration: measured ns, -1 if the platform's model prices it.
    total: ns with its launch on the engine where it runs, -1 if that follows from the rest.
    """

    flops: int
    bytes: int
    workspace: int
    duration: int
    random: bool
    dtypes: frozenset[str]
    kinds: frozenset[str]
    total: int = -1


class _Costs:
    """Compares every op of a rewritten trace with what it stands for; ops that compute nothing of the base pass."""

    def __init__(self, run: Replayed, trace: Trace) -> None:
        self.run, self.trace, self.base = run, trace, run.trace
        self.exprs = [resolved(expr) for expr in Origin.identity(trace).ops]
        self.saves = run.policy.saves

    def check(self) -> None:
        ops = list(self.trace.ops)
        wanted = [self.wanted(op, expr) if _computes(expr) else None for op, expr in zip(ops, self.exprs)]
        for op, least in zip(ops, wanted, strict=True):
            if least is not None:
                self.attributes(op, least)
        self.counted(ops)
        self.meetings(ops)
        self.times(ops, wanted)
        self.pieces(ops)
        self.moving(ops)

    # ---- what an op must cost ----------------------------------------------------------------

    def wanted(self, op: Op, expr: Expr) -> _Cost:
        """The least that the op may cost: as its base, or as an implementation that the trace states."""
        plain = self.of(op, expr)
        other = self.implementation(op, expr)
        if other is None:
            return plain
        factor, share = Fraction(other.time_factor), self.share(expr)
        rounded = ceil if share == 1 else floor
        return replace(
            plain,
            flops=rounded(plain.flops * factor),
            bytes=rounded(plain.bytes * factor),
            workspace=floor(other.workspace * share),
            duration=rounded(plain.duration * factor) if plain.duration >= 0 else -1,
        )

    def implementation(self, op: Op, expr: Expr) -> Implementation | None:
        """The implementation of the base that the op, or its part of it, is in; None for the base's own.

        One is chosen as a whole, its time with its workspace, so that both tell which it is. A part has its share of
        them, rounded either way.
        """
        if "implementation" not in self.saves or list(_parts(expr)) != [expr]:
            return None
        base, share = self.base.ops[leaves(expr)[0].id], self.share(expr)
        slack = int(share < 1)
        fits = [
            other
            for other in (Implementation("", 1.0, base.workspace), *base.alternatives)
            if floor(other.workspace * share) <= op.workspace <= ceil(other.workspace * share)
            and abs(op.flops - ceil(base.flops * share * Fraction(other.time_factor))) <= slack
        ]
        best = min(fits, key=lambda other: other.time_factor, default=None)
        return best if best in base.alternatives else None

    def of(self, op: Op, expr: Expr) -> _Cost:
        parts = list(_parts(expr))
        if parts != [expr]:
            return self.fused(op, [self.of(op, part) for part in parts], parts)
        if isinstance(expr, Part | Microbatch | Along | Slots):
            whole, share = self.of(op, expr.of), self.part(expr)
            operands = len(op.reads) + len(op.writes)  # each of them is rounded down to whole bytes
            return replace(
                whole,
                flops=max(0, int(whole.flops * share) - 1),
                bytes=max(0, int(whole.bytes * share) - operands),
                workspace=int(whole.workspace * share),
                duration=int(whole.duration * share) if whole.duration >= 0 else -1,
            )
        assert isinstance(expr, Same)
        base = self.base.ops[expr.id]
        engine_for = self.run.platform.engine_for  # by the engine that runs it: the main engine may be named, too
        moved = engine_for(op.device, op.engine) != engine_for(base.device, base.engine)
        return _Cost(
            base.flops,
            int(self.base.touched[expr.id]),
            base.workspace,
            # a measured time is one of its engine
            -1 if base.duration is None or (moved and op.duration is None) else base.duration,
            base.random,
            frozenset((base.dtype,)),
            frozenset((base.kind,)),
        )

    def share(self, expr: Expr) -> Fraction:
        """The share of its op that a part of one is."""
        share = Fraction(1)
        while isinstance(expr, Part | Microbatch | Along | Slots):
            share, expr = share * self.part(expr), expr.of
        return share

    def part(self, expr: Part | Microbatch | Along | Slots) -> Fraction:
        """The share of what it is a part of; of an update that of the parameters' operands, by their bytes."""
        if not isinstance(expr, Slots):
            return Fraction(expr.stop - expr.first, expr.count)
        slots, size = slots_of(self.base, leaves(expr)[0].id), self.base.tensor_columns.bytes
        if len(slots) != expr.count:  # which law 2 refuses
            return Fraction(len(expr.slots), expr.count)
        weight = [sum(int(size[t]) for t in (*slot.reads, *slot.writes)) for slot in slots]
        return Fraction(sum(weight[k] for k in expr.slots), max(sum(weight), 1))

    def fused(self, op: Op, parts: list[_Cost], exprs: list[Expr]) -> _Cost:
        """A fusion of several ops into one kernel: the work of all, each in its own type and its own measured time.

        If declared, it saves all launches but one and touches each operand once: values that only its parts pass to
        each other are never in memory. A kernel of another engine has its own workspace, else it needs theirs. On the
        same engine a fusion has at least two parts.
        """
        engine = self.engine(op)
        elsewhere = any(self.engine(self.base.ops[leaf.id]) != engine for expr in exprs for leaf in leaves(expr))
        if len(parts) < 2 and not elsewhere:
            raise LawBroken(f"op {op.name!r} is a fusion of {len(parts)} op; there must be at least two")
        whole = _Cost(
            sum(part.flops for part in parts),
            sum(part.bytes for part in parts),
            max(part.workspace for part in parts),
            sum(max(part.duration, 0) for part in parts) if all(part.duration >= 0 for part in parts) else -1,
            any(part.random for part in parts),
            frozenset().union(*(part.dtypes for part in parts)),
            frozenset().union(*(part.kinds for part in parts)),
            self.together(op, parts, exprs),
        )
        if "fusion" not in self.saves:
            # the time of each part was rounded up to the nanosecond
            return replace(whole, total=max(0, whole.total - len(parts) + 1) if whole.total >= 0 else -1)
        size, replaces = self.trace.tensor_columns.bytes, self.trace.tensor_columns.replaces
        over = {int(replaces[t]) for t in op.writes}
        once = min(whole.bytes, sum(int(size[t]) for t in (*op.writes, *(t for t in op.reads if t not in over))))
        unit = self.run.platform.engines[engine]
        share = unit.bandwidth_share.get(op.kind, unit.bandwidth_share.get("", 1.0))
        rate = max(1, round(self.run.platform.tier(unit.home).bandwidth * share))
        spared = (len(parts) - 1) * unit.launch + -(-(whole.bytes - once) * 10**9 // rate) + len(parts)
        return replace(
            whole,
            bytes=once,
            workspace=0 if elsewhere else whole.workspace,
            duration=-1,
            total=max(0, whole.total - spared) if whole.total >= 0 else -1,
        )

    def together(self, op: Op, parts: list[_Cost], exprs: list[Expr]) -> int:
        """Nanoseconds of the parts of a fusion one after the other on its engine, each of its own kind and type."""
        engine, alone = self.engine(op), TraceBuilder()
        for i, (part, expr) in enumerate(zip(parts, exprs, strict=True)):
            base = self.base.ops[leaves(expr)[0].id]
            measured = part.duration >= 0 and self.engine(base) == engine  # a measured time is one of its engine
            alone.op(
                str(i),
                base.kind,
                flops=part.flops,
                bytes=part.bytes,
                device=op.device,
                engine=self.run.platform.engines[engine].name,
                duration=part.duration if measured else None,
                dtype=base.dtype,
            )
        return int(op_times(alone.build(), self.run.platform).total.sum())

    def engine(self, op: Op) -> int:
        return self.run.platform.engine_for(op.device, op.engine)

    # ---- what it does cost -------------------------------------------------------------------

    def attributes(self, op: Op, least: _Cost) -> None:
        for what, has, needs in (
            ("FLOPs", op.flops, least.flops),
            ("bytes touched", int(self.trace.touched[op.id]), least.bytes),
            ("bytes of workspace", op.workspace, least.workspace),
        ):
            if has < needs:
                raise LawBroken(f"op {op.name!r} has {has} {what}; what it stands for has {needs}")
        if op.random != least.random:
            raise LawBroken(f"op {op.name!r} is {'' if op.random else 'not '}random; what it stands for is otherwise")
        if op.dtype not in least.dtypes:
            known = " or ".join(repr(dtype) for dtype in sorted(least.dtypes))
            raise LawBroken(f"op {op.name!r} computes in {op.dtype!r}; what it stands for in {known}")
        if op.kind not in least.kinds:
            raise LawBroken(f"op {op.name!r} is of kind {op.kind!r}; what it stands for is not")

    def counted(self, ops: list[Op]) -> None:
        """No op counts more FLOPs than what it stands for: utilisation is told from them.

        One that executes more, and does nothing more, says so (`Op.counted`).
        """
        counts, base = self.trace.counted_flops, self.base.counted_flops
        for op in ops:
            expr = self.exprs[op.id]
            other = self.implementation(op, expr)
            factor = max(Fraction(1), Fraction(other.time_factor)) if other is not None else 1
            most = sum(ceil(int(base[leaves(part)[0].id]) * self.share(part) * factor) for part in _parts(expr))
            if counts[op.id] > most:
                raise LawBroken(f"op {op.name!r} counts {counts[op.id]} FLOPs; what it stands for counts {most}")

    def meetings(self, ops: list[Op]) -> None:
        """An op that stands for a member of a group meets ops that stand for all other members."""
        group, asked = self.trace.op_columns.group, groups(self.base)
        met: dict[str, set[int]] = defaultdict(set)
        for member, name in group.items():
            met[name].update(leaf.id for leaf in leaves(self.exprs[member]))
        for op in ops:
            for leaf in leaves(self.exprs[op.id]):
                others = set(asked.get(self.base.op_columns.group.get(leaf.id, ""), ()))
                if not others <= met[group.get(op.id, "")]:
                    names = ", ".join(repr(self.base.op_columns.name[other]) for other in sorted(others))
                    raise LawBroken(f"op {op.name!r} does not meet all that what it stands for meets: {names}")
                ring = self.base.op_columns.ring.get(leaf.id)
                if ring is not None and op.ring != ring:
                    raise LawBroken(
                        f"op {op.name!r} is among other ranks than what it stands for: {op.ring}, not {ring}"
                    )

    def times(self, ops: list[Op], wanted: list[_Cost | None]) -> None:
        """The time of each op on its engine, against that of an op there with the costs that it must have."""
        columns = self.trace.op_columns
        flops, touched = columns.flops.copy(), self.trace.touched.copy()
        duration = columns.duration.copy()
        for op, least in zip(ops, wanted, strict=True):
            if least is not None:
                flops[op.id], touched[op.id], duration[op.id] = least.flops, least.bytes, least.duration
        as_base = with_columns(self.trace, flops=flops, bytes=touched, duration=duration)
        has = op_times(self.trace, self.run.platform).total
        needs = op_times(as_base, self.run.platform)
        priced = op_times(with_columns(as_base, duration=np.full(len(ops), -1)), self.run.platform).total
        for op, least in zip(ops, wanted, strict=True):
            if least is None:
                continue
            needed = int(needs.total[op.id]) if least.total < 0 else least.total
            if self.elsewhere(op, least):  # a time that was measured on another engine says too little
                needed = max(needed, int(priced[op.id]))
            spared = self.launch(int(needs.engine[op.id]), least)
            if has[op.id] < needed - spared:
                raise LawBroken(
                    f"op {op.name!r} takes {has[op.id]} ns; what it stands for takes {needed} ns there"
                    + (f", or {needed - spared} without its launch" if spared else "")
                )

    def elsewhere(self, op: Op, least: _Cost) -> bool:
        """Whether a measured op runs on another engine than what it stands for."""
        leaves_of = [self.base.ops[leaf.id] for leaf in leaves(self.exprs[op.id])]
        return least.duration >= 0 and any(self.engine(base) != self.engine(op) for base in leaves_of)

    def launch(self, engine: int, least: _Cost) -> int:
        """Nanoseconds that an op may save if the policy declares it: the launch overhead in its time.

        That is its engine's overhead. A measured time does not tell its own: there the plan's figure counts, up to what
        a launch costs on this machine.
        """
        if "launch" not in self.saves:
            return 0
        assert self.run.plan is not None
        most, said = self.run.platform.engines[engine].launch, self.run.plan.notes.get("launch_ns")
        if least.duration >= 0:
            return min(said, most) if isinstance(said, int) else 0
        return most

    def moving(self, ops: list[Op]) -> None:
        """An op that computes nothing of the base takes at least the time of the bytes that it moves.

        An encoding or decoding moves all that it reads and writes. Any other such op, a concatenation or a copy, moves
        what it reads and writes, except values that take over another's storage: renaming bytes moves none. Members of
        groups move theirs over links.
        """
        tensors, size = Origin.identity(self.trace).tensors, self.trace.tensor_columns.bytes
        replaces = self.trace.tensor_columns.replaces
        least: dict[int, int] = {}
        codes: set[int] = set()
        for op, expr in zip(ops, self.exprs, strict=True):
            if _computes(expr) or op.group:
                continue
            operands = [*op.reads, *op.writes]
            if any(_is_code(tensors[t]) for t in operands):
                codes.add(op.id)
            elif self.is_sent(op):
                continue
            else:
                over = {t: int(replaces[t]) for t in op.writes if replaces[t] in op.reads}
                operands = [t for t in operands if t not in over and t not in over.values()]
            least[op.id] = sum(int(size[t]) for t in operands)
        if not least:
            return
        ids = list(least)
        flops, duration = self.trace.op_columns.flops.copy(), self.trace.op_columns.duration.copy()
        touched = self.trace.touched.copy()
        flops[ids], duration[ids], touched[ids] = 0, -1, list(least.values())
        plain = with_columns(self.trace, flops=flops, bytes=touched, duration=duration)
        has, needs = (op_times(trace, self.run.platform).total for trace in (self.trace, plain))
        for i, bytes in least.items():
            if bytes and has[i] < needs[i]:
                does = "encodes or decodes" if i in codes else "moves"
                raise LawBroken(
                    f"op {ops[i].name!r} {does} {bytes} B in {has[i]} ns; "
                    f"to read and write them takes {needs[i]} ns there"
                )

    def is_sent(self, op: Op) -> bool:
        """Whether an op copies a tensor that then goes to another tier at once, and the policy declares it."""
        if "copy" not in self.saves or op.kind != "copy" or len(op.reads) != 1 or len(op.writes) != 1:
            return False
        assert self.run.plan is not None
        moves = [act for act in self.run.plan.actions if isinstance(act, Move) and act.after is not None]
        return any(
            self.trace.tensor_id(act.tensor) == op.writes[0] and self.trace.op_id(act.after) == op.id
            for act in moves
            if act.after is not None
        )

    def pieces(self, ops: list[Op]) -> None:
        """The parts of an op add up to its work; where ops are fused part by part, to the work of all of them."""
        done: dict[Same, Fraction | int] = defaultdict(int)
        joined: dict[Same, frozenset[Same]] = {}
        for op, expr in zip(ops, self.exprs, strict=True):
            parts = list(_parts(expr))
            divided = [leaves(part)[0] for part in parts if isinstance(part, Part | Microbatch | Along | Slots)]
            if not divided:
                continue
            done[divided[0]] += op.flops - sum(self.of(op, part).flops for part in parts if isinstance(part, Same))
            if (other := self.implementation(op, expr)) is not None:  # what it spares, or takes more
                whole = self.base.ops[divided[0].id].flops
                done[divided[0]] += whole * self.share(expr) * (1 - Fraction(other.time_factor))
            if not all(leaf in joined and joined[leaf] is joined[divided[0]] for leaf in divided):
                all_of = frozenset(divided).union(*(joined[leaf] for leaf in divided if leaf in joined))
                joined.update(dict.fromkeys(all_of, all_of))
        for all_of in dict.fromkeys(joined.values()):
            has, needs = (sum(flops) for flops in zip(*((done[leaf], self.base.ops[leaf.id].flops) for leaf in all_of)))
            if has < needs:
                names = ", ".join(
                    repr(self.base.ops[leaf.id].name) for leaf in sorted(all_of, key=lambda leaf: leaf.id)
                )
                raise LawBroken(f"the parts of op {names} have {floor(has)} FLOPs together, not {needs}")


def _parts(expr: Expr) -> Iterator[Expr]:
    """The ops and parts of ops that an op does, one after the other; a part of a fusion is a fusion of parts."""
    if isinstance(expr, Fused):
        for part in expr.parts:
            yield from _parts(part)
    elif isinstance(expr, Part | Microbatch | Along | Slots):
        for inner in _parts(expr.of):
            yield replace(expr, of=inner)
    elif not isinstance(expr, Glue):
        yield expr


def _computes(expr: Expr) -> bool:
    """Whether an op does work of the base."""
    return next(_parts(expr), None) is not None


def _is_code(expr: Expr) -> bool:
    """Whether a tensor holds an encoded value."""
    if isinstance(expr, Packed):
        return any(part is not None and _is_code(part) for part in expr.parts)
    return isinstance(expr, Encoded) or (isinstance(expr, Part | Microbatch | Along) and _is_code(expr.of))
