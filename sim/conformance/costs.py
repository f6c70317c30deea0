"""Law 11, second half: an op costs what the op costs that it stands for; what is saved is declared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from sim.conformance.replayed import LawBroken, Replayed
from sim.hardware.cost import op_times
from sim.policies.base import SAVINGS
from sim.trace.graph import Trace
from sim.trace.op import Op
from sim.trace.origin import Expr, Fused, Glue, Microbatch, Origin, Part, Same
from sim.trace.rewriter import with_columns


def check_costs(run: Replayed) -> None:
    """Law 11: an op of a rewritten trace costs what it stands for, but for the savings that the policy declares."""
    unknown = set(run.policy.saves) - set(SAVINGS)
    if unknown:
        raise LawBroken(f"the policy declares a saving of {min(unknown)!r}; there are {', '.join(SAVINGS)}")
    if run.plan is None or run.plan.trace is run.trace or run.plan.trace == run.trace:
        return
    _Costs(run, run.plan.trace).check()


@dataclass(frozen=True)
class _Cost:
    """What an op costs at least. duration: measured ns, -1 where the platform's model prices it."""

    flops: int
    bytes: int
    workspace: int
    duration: int
    random: bool
    dtypes: frozenset[str]
    kinds: frozenset[str]


class _Costs:
    """Every op of a rewritten trace beside what it stands for. What computes nothing of the base is not judged."""

    def __init__(self, run: Replayed, trace: Trace) -> None:
        self.run, self.trace, self.base = run, trace, run.trace
        self.exprs = Origin.identity(trace).ops
        self.saves = run.policy.saves

    def check(self) -> None:
        ops = list(self.trace.ops)
        wanted = [None if isinstance(expr, Glue) else self.wanted(op, expr) for op, expr in zip(ops, self.exprs)]
        for op, least in zip(ops, wanted, strict=True):
            if least is not None:
                self.attributes(op, least)
        self.times(ops, wanted)
        self.pieces(ops)

    # ---- what an op must cost ----------------------------------------------------------------

    def wanted(self, op: Op, expr: Expr) -> _Cost:
        """The least of what the op may cost: as its base, or as an implementation that the trace states."""
        plain = self.of(op, expr)
        if not isinstance(expr, Same) or "implementation" not in self.saves:
            return plain
        for other in self.base.ops[expr.id].alternatives:
            factor = Fraction(other.time_factor)
            scaled = replace(
                plain,
                flops=-(-plain.flops * factor // 1),
                bytes=-(-plain.bytes * factor // 1),
                workspace=other.workspace,
                duration=-(-plain.duration * factor // 1) if plain.duration >= 0 else -1,
            )
            # an implementation is chosen as a whole: its time with its workspace
            if op.workspace == other.workspace and op.flops == scaled.flops:
                return scaled
        return plain

    def of(self, op: Op, expr: Expr) -> _Cost:
        if isinstance(expr, Fused):
            return self.fused(op, [self.of(op, part) for part in expr.parts])
        if isinstance(expr, Part | Microbatch):
            whole, share = self.of(op, expr.of), Fraction(expr.stop - expr.first, expr.count)
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
        moved = op.engine != base.engine  # a measured time is one of its engine
        return _Cost(
            base.flops,
            int(self.base.touched[expr.id]),
            base.workspace,
            -1 if base.duration is None or (moved and op.duration is None) else base.duration,
            base.random,
            frozenset((base.dtype,)),
            frozenset((base.kind,)),
        )

    def fused(self, op: Op, parts: list[_Cost]) -> _Cost:
        """One kernel of several. Where that is declared, it touches each operand once and has no workspace."""
        whole = _Cost(
            sum(part.flops for part in parts),
            sum(part.bytes for part in parts),
            max(part.workspace for part in parts),
            sum(max(part.duration, 0) for part in parts) if all(part.duration >= 0 for part in parts) else -1,
            any(part.random for part in parts),
            frozenset().union(*(part.dtypes for part in parts)),
            frozenset().union(*(part.kinds for part in parts)),
        )
        if "fusion" not in self.saves:
            return whole
        size, replaces = self.trace.tensor_columns.bytes, self.trace.tensor_columns.replaces
        over = {int(replaces[t]) for t in op.writes}
        once = sum(int(size[t]) for t in (*op.writes, *(t for t in op.reads if t not in over)))
        return replace(whole, bytes=min(whole.bytes, once), workspace=0, duration=-1)

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
        for op, least in zip(ops, wanted, strict=True):
            if least is None:
                continue
            spared = self.launch(int(needs.engine[op.id]), least)
            if has[op.id] < needs.total[op.id] - spared:
                raise LawBroken(
                    f"op {op.name!r} takes {has[op.id]} ns; what it stands for takes {needs.total[op.id]} ns there"
                    + (f", or {needs.total[op.id] - spared} without its launch" if spared else "")
                )

    def launch(self, engine: int, least: _Cost) -> int:
        """Nanoseconds that an op may spare where the policy declares it: one launch, of its engine or as its plan says.

        A measured time says nothing of its launch: there only what the plan says counts.
        """
        if "launch" not in self.saves:
            return 0
        assert self.run.plan is not None
        said = self.run.plan.notes.get("launch_ns")
        if isinstance(said, int):
            return said
        return 0 if least.duration >= 0 else self.run.platform.engines[engine].launch

    def pieces(self, ops: list[Op]) -> None:
        """All parts of an op together do what it does."""
        done: dict[Same, int] = defaultdict(int)
        divided: set[Same] = set()
        for op, expr in zip(ops, self.exprs, strict=True):
            for leaf in _ranges(expr):
                done[leaf] += op.flops
                divided.add(leaf)
        for leaf in divided:
            base = self.base.ops[leaf.id]
            if done[leaf] < base.flops:
                raise LawBroken(f"the parts of op {base.name!r} have {done[leaf]} FLOPs together, not {base.flops}")


def _ranges(expr: Expr) -> Iterator[Same]:
    """The op that a part or microbatch is one of."""
    inner = expr
    while isinstance(inner, Part | Microbatch):
        inner = inner.of
    if inner is not expr and isinstance(inner, Same):
        yield inner
