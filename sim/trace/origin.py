"""What the tensors and ops of a rewritten trace stand for, in terms of the trace it was derived from.

A rewrite changes *what* is computed. To make it checkable, each new tensor and op carries an expression over
the ids of the base trace:

    Same(id, iteration, behind)       that tensor or op of the base (in that iteration); for an op, with weights that
                                      are so many updates older than those of the iteration
    Part(of, first, stop, count)      its elements from first/count to stop/count
    Microbatch(of, first, stop, n)    its share for microbatches first … stop-1 of n: those rows where it has
                                      a batch dimension, the sum over those rows where it was summed
    Along(of, dimension, first, stop, n)  its share along a dimension (`sim.rewrites.dimensions`): those elements
                                      where it has the dimension, a term of the sum where it was summed
    Rowwise(of)                       what its rows need to know of all their columns, such as their maximum
    Chosen((a, b, …), which)          one of several tensors or ops, of which each rank that divides the experts has the
                                      one of its number: a's, b's, … expert has the same place on its rank
    Packed((a, b, None, …))           several tensors in one storage; None is a slot not yet filled
    Encoded(of, codec, lossless)      its encoding by a codec
    Lossy(of, codec)                  its reconstruction by a lossy codec
    Slots(of, slots, count)           for an op of the optimizer: updates those of its `count` parameters alone
    Fused((a, b, …))                  for an op: computes a, then b, … in one kernel that touches each operand
                                      once; intermediate results are never in memory
    Glue()                            for an op: computes nothing of the base, only moves, joins, splits,
                                      adds up or re-encodes values

An iteration shift is `Same` with another iteration. `sim.rewrites.values` checks these claims; they are
never trusted. A rewrite of a rewrite is expressed over the first base (`Origin.over`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeAlias

from sim.errors import TraceError
from sim.trace.pickled import Pickled


@dataclass(frozen=True, slots=True)
class Same(Pickled):
    """That tensor or op of the base trace, in that iteration.

    behind: for an op, how many updates older than those of the iteration the weights are that it reads, or those that
        the first iteration starts with where there are no older ones: a stale version that a rewrite declares.
    """

    id: int
    iteration: int = 0
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Part(Pickled):
    """The elements from `first / count` to `stop / count` of a tensor, or an op on them alone."""

    of: Expr
    first: int
    stop: int
    count: int


@dataclass(frozen=True, slots=True)
class Microbatch(Pickled):
    """A tensor or op restricted to microbatches `first` … `stop - 1` of `count`."""

    of: Expr
    first: int
    stop: int
    count: int


@dataclass(frozen=True, slots=True)
class Along(Pickled):
    """A tensor or op restricted to the shares `first` … `stop - 1` of `count` along a dimension."""

    of: Expr
    dimension: str
    first: int
    stop: int
    count: int


@dataclass(frozen=True, slots=True)
class Chosen(Pickled):
    """One of several tensors or ops, of which each rank that divides the experts has the one of its number."""

    parts: tuple[Expr, ...]
    which: int

    @property
    def of(self) -> Expr:
        """The one that this rank has."""
        return self.parts[self.which]


@dataclass(frozen=True, slots=True)
class Rowwise(Pickled):
    """What each row of a tensor needs to know of all its columns: maximum, sum of exponentials, the label's entry."""

    of: Expr


@dataclass(frozen=True, slots=True)
class Packed(Pickled):
    """Several tensors in one storage, in order; None for an empty slot."""

    parts: tuple[Expr | None, ...]


@dataclass(frozen=True, slots=True)
class Encoded(Pickled):
    """A tensor as encoded by `codec`.

    lossless: decoding restores exactly the same values.
    """

    of: Expr
    codec: str
    lossless: bool


@dataclass(frozen=True, slots=True)
class Lossy(Pickled):
    """What a lossy codec decodes."""

    of: Expr
    codec: str


@dataclass(frozen=True, slots=True)
class Fused(Pickled):
    """An op that computes several ops of the base, in this order."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Slots(Pickled):
    """An op of the optimizer restricted to some of the `count` parameters that it updates, by their order."""

    of: Expr
    slots: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Glue(Pickled):
    """An op with no counterpart in the base: it moves, joins, splits, adds up or re-encodes values."""


ALONE = ("experts", "blocks")
"""Dimensions of which every rank has shares of its own."""
OF_CONTEXT = ("context", "queries")
"""Dimensions that ranks of context parallelism divide: tokens, and what is summed over those that ask."""
KEPT = 50_000
_same: tuple[Same, ...] = ()

Expr: TypeAlias = Same | Part | Microbatch | Along | Chosen | Rowwise | Packed | Encoded | Lossy | Fused | Slots | Glue


_SHARES = Part, Microbatch
_OF_ONE = *_SHARES, Along, Slots, Rowwise


def map_leaves(expr: Expr, change: Callable[[Same], Expr]) -> Expr:
    """The expression with each `Same` in it replaced by `change` of it."""
    if isinstance(expr, Same):
        return change(expr)
    if isinstance(expr, _OF_ONE):
        inner = map_leaves(expr.of, change)
        if inner is expr.of:
            return expr
        if isinstance(inner, Glue):
            return inner  # a part of what computes nothing of the base
        if isinstance(expr, _SHARES):
            return type(expr)(inner, expr.first, expr.stop, expr.count)
        return _of_slots(inner, expr) if isinstance(expr, Slots) else replace(expr, of=inner)
    if isinstance(expr, Packed):
        return Packed(tuple(None if part is None else map_leaves(part, change) for part in expr.parts))
    if isinstance(expr, Fused):
        return Fused(tuple(map_leaves(part, change) for part in expr.parts))
    if isinstance(expr, Chosen):
        parts = tuple(map_leaves(part, change) for part in expr.parts)
        return parts[0] if isinstance(parts[0], Glue) else Chosen(parts, expr.which)
    if isinstance(expr, Encoded):
        return Encoded(map_leaves(expr.of, change), expr.codec, expr.lossless)
    if isinstance(expr, Lossy):
        return Lossy(map_leaves(expr.of, change), expr.codec)
    return expr


def _of_slots(inner: Expr, outer: Slots) -> Expr:
    """`outer` of an op that may itself update some parameters of an op only."""
    if isinstance(inner, Slots):
        return replace(inner, slots=tuple(inner.slots[k] for k in outer.slots))
    if isinstance(inner, Part | Microbatch | Along):
        return replace(inner, of=_of_slots(inner.of, outer))
    return replace(outer, of=inner)


def first_same(count: int) -> tuple[Same, ...]:
    """`Same` of the first ids; those of few are kept, since every rewrite asks for them."""
    global _same
    if count > KEPT:
        return tuple(map(Same, range(count)))
    if count > len(_same):
        _same = (*_same, *map(Same, range(len(_same), count)))
    return _same[:count]


def resolved(expr: Expr) -> Expr:
    """The expression with what this rank has in place of each `Chosen`."""
    if isinstance(expr, Chosen):
        return resolved(expr.of)
    if isinstance(expr, Packed):
        return Packed(tuple(None if part is None else resolved(part) for part in expr.parts))
    if isinstance(expr, Fused):
        return Fused(tuple(map(resolved, expr.parts)))
    if isinstance(expr, Same | Glue):
        return expr
    inner = resolved(expr.of)
    return expr if inner is expr.of else replace(expr, of=inner)


def leaves(expr: Expr | None) -> list[Same]:
    """Every `Same` in an expression."""
    if isinstance(expr, Same):
        return [expr]
    if isinstance(expr, Packed | Fused):
        return [leaf for part in expr.parts for leaf in leaves(part)]
    if expr is None or isinstance(expr, Glue):
        return []
    return leaves(expr.of)


class Rewritten(Protocol):
    """What is asked of a trace here."""

    origin: Origin | None

    @property
    def ops(self) -> Sequence[object]:
        """Its ops."""

    @property
    def tensors(self) -> Sequence[object]:
        """Its tensors."""

    @property
    def content_hash(self) -> str:
        """Of its whole content."""


@dataclass(frozen=True)
class Origin:
    """What every tensor and op of a trace stands for.

    base: content hash of the trace that the expressions refer to.
    tensors, ops: one expression per tensor and per op, by id.
    iterations: how many iterations of the base this trace contains.
    ranks: how many symmetric replicas this trace is one of. Each has the same ops and tensors, on other parts: where
        this one has microbatches `first` … `stop - 1` of n or such parts, replica r has those `r * n / ranks` further.
    dealt: microbatches are dealt to the replicas in turn instead: replica r has those r further.
    tensor: how many symmetric ranks divide the layers of this replica, of which this is one. Where it has share 0
        along a dimension, rank r has share r.
    context: how many symmetric ranks divide the tokens of this replica, each of which `tensor` ranks divide further.
        Where it has share k along `context` or `queries`, rank r has share r + k, modulo their number.
    experts: of the replicas, how many next to each other divide the experts of one model. Replica r has share r modulo
        that number along `experts`; what each has of the batch is such a share (the outer `Microbatch`) of what they
        have together (the inner one), of which replica r has that of group r // experts.
    group: of the replicas, how many next to each other keep gathered weights together, or divide the training state: of
        a part of as many, replica r has that of r modulo that number; of the sum over the microbatches of the first so
        many replicas, that of its own group. Of a part of as many as there are replicas (or such in a group) and ranks
        of `context` each, rank k of replica r (in the group) has that of r context + k.
    steps: the iterations are consecutive steps on equal parts of the batch of one: of what has rows, iteration k has
        those of part k.
    """

    base: str
    tensors: Sequence[Expr]
    ops: Sequence[Expr]
    iterations: int = 1
    ranks: int = 1
    dealt: bool = False
    tensor: int = 1
    steps: bool = False
    experts: int = 1
    context: int = 1
    group: int = 1

    def __getattr__(self, name: str) -> str:
        """The content hash of the base, where that was not needed before: it takes long."""
        if name != "base" or "_of" not in vars(self):
            raise AttributeError(name)
        found: str = vars(self).pop("_of").content_hash
        vars(self)["base"] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def is_like(self, other: Origin) -> bool:
        """Whether it says the same, of whatever base."""
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(self)[1:])

    @property
    def symmetric(self) -> int:
        """How many symmetric ranks there are, of which this trace is one."""
        return self.ranks * self.context * self.tensor

    def is_symmetric(self, expr: Along) -> bool:
        """Whether a share is that of one of the ranks that divide layers or tokens, each of which has one."""
        of_context = expr.dimension in OF_CONTEXT and self.context > 1
        ranks = self.context if of_context else self.tensor
        return expr.dimension not in ALONE and (expr.stop - expr.first, expr.count) == (1, ranks)

    @staticmethod
    def identity(trace: Rewritten) -> Origin:
        """The origin of a trace: the one it has, else itself."""
        if trace.origin is not None:
            return trace.origin
        return _of_itself(trace)

    def of_rank(self, expr: Expr, rank: int, axis: str = "data") -> Expr:
        """What rank `rank` along an axis (`sim.trace.op.AXES`) has where this one, which is rank 0, has `expr`."""
        if rank == 0:
            return expr
        if axis == "group":
            return self.of_rank(expr, rank)
        if axis == "group_data":
            return self.of_rank(expr, rank * self.group)
        if axis == "neighbour":
            return self.of_rank(expr, rank, "context")
        if axis.endswith("_context"):  # those that divide a replica's tokens next to each other
            replica, tokens = divmod(rank, self.context)
            return self.of_rank(self.of_rank(expr, replica, axis.removesuffix("_context")), tokens, "context")
        if axis in ("expert", "expert_data"):
            return self.of_rank(expr, rank * self.experts if axis == "expert_data" else rank)
        if axis == "data" and self.experts > 1:
            return self._of_member(expr, *divmod(rank, self.experts))
        if isinstance(expr, Packed):
            return Packed(tuple(None if part is None else self.of_rank(part, rank, axis) for part in expr.parts))
        if isinstance(expr, Fused):
            return Fused(tuple(self.of_rank(part, rank, axis) for part in expr.parts))
        if isinstance(expr, Chosen):
            return replace(expr, parts=tuple(self.of_rank(part, rank, axis) for part in expr.parts))
        if isinstance(expr, Same | Glue):
            return expr
        inner = self.of_rank(expr.of, rank, axis)
        if inner != expr.of:
            expr = replace(expr, of=inner)
            if not (isinstance(expr, Part) and self.is_sum_of_group(inner)):
                return expr
        if not isinstance(expr, Part | Microbatch | Along):
            return expr
        if axis == "data" and 1 < self.group < self.ranks:
            if isinstance(expr, Part) and expr.count in (self.group, self.group * self.context):
                rank %= self.group
            elif self.is_sum_of_group(expr):
                return self._shifted(expr, rank // self.group * (expr.stop - expr.first))
        width = self.width(expr, axis)
        if not width or expr.stop - expr.first > width:
            return expr  # all ranks have it
        shift = rank * width
        if isinstance(expr, Along):  # blocks of keys are counted from the rank's own
            shift = (expr.first + shift) % expr.count - expr.first
        return self._shifted(expr, shift)

    @staticmethod
    def _shifted(expr: Part | Microbatch | Along, shift: int) -> Expr:
        return replace(expr, first=expr.first + shift, stop=expr.stop + shift)

    def is_sum_of_group(self, expr: Expr) -> bool:
        """Whether an expression is the sum over the microbatches of a group of several replicas, and not of all."""
        if not isinstance(expr, Microbatch) or not 1 < self.group < self.ranks:
            return False
        return 0 < self.width(expr, "data") * self.group == expr.stop - expr.first

    def _of_member(self, expr: Expr, group: int, member: int) -> Expr:
        """What a member of a group of replicas that divide the experts has, see `experts`."""
        if isinstance(expr, Packed):
            return Packed(tuple(None if part is None else self._of_member(part, group, member) for part in expr.parts))
        if isinstance(expr, Fused):
            return Fused(tuple(self._of_member(part, group, member) for part in expr.parts))
        if isinstance(expr, Chosen):
            return Chosen(tuple(self._of_member(part, group, member) for part in expr.parts), expr.which + member)
        if isinstance(expr, Same | Glue):
            return expr
        inner = self._of_member(expr.of, group, member)
        shift = 0
        if isinstance(expr, Along) and expr.dimension == "experts" and expr.count == self.experts:
            shift = member
        elif isinstance(expr, Part):
            groups = self.ranks // self.experts
            if expr.count == (groups if has_experts(expr) else self.ranks) * self.context:
                shift = (group if has_experts(expr) else group * self.experts + member) * self.context
        elif isinstance(expr, Microbatch) and (within := _microbatches(expr.of)):
            shift = member if within == 1 else 0  # else rows of what the member has
        elif isinstance(expr, Microbatch):
            groups = self.ranks // self.experts
            width = 1 if self.dealt else expr.count // groups
            shift = group * width if expr.stop - expr.first <= width else 0  # else all groups have it
        if isinstance(expr, Part | Microbatch | Along) and shift:
            return replace(expr, of=inner, first=expr.first + shift, stop=expr.stop + shift)
        return expr if inner == expr.of else replace(expr, of=inner)

    def width(self, expr: Part | Microbatch | Along, axis: str) -> int:
        """By how many shares an expression differs from a rank to the next; 0 where all ranks have the same."""
        if axis in ("tensor", "context") and not isinstance(expr, Part):
            of_context = isinstance(expr, Along) and expr.dimension in OF_CONTEXT and self.context > 1
            symmetric = isinstance(expr, Along) and self.is_symmetric(expr)
            return int(symmetric and of_context == (axis == "context"))
        if isinstance(expr, Part):
            return self._width_of_part(expr, axis)
        if not isinstance(expr, Microbatch) or expr.count % self.ranks:
            return 0
        return 1 if self.dealt else expr.count // self.ranks

    def _width_of_part(self, expr: Part, axis: str) -> int:
        """Parts of the state are counted over the ranks that divide tokens first; of other parts all have all."""
        if axis == "tensor":
            return 0
        of_group = self.group > 1 and expr.count == self.group * self.context
        if axis == "context":
            replicas = self.ranks // self.experts if has_experts(expr) else self.ranks
            return int(self.context > 1 and (of_group or expr.count == replicas * self.context))
        if expr.count == self.ranks * self.context or of_group:
            return self.context
        return int(1 < expr.count == self.group)

    def over(self, trace: Rewritten) -> Origin:
        """This origin, which refers to `trace`, in terms of the base that `trace` was derived from."""
        middle = trace.origin
        if middle is None:
            return self

        def through(exprs: Sequence[Expr], own: Sequence[Expr]) -> tuple[Expr, ...]:
            def change(leaf: Same) -> Expr:
                shift = leaf.iteration * middle.iterations
                expr, behind = exprs[leaf.id], leaf.behind
                if not shift and not behind:
                    return expr
                return map_leaves(expr, lambda inner: Same(inner.id, inner.iteration + shift, inner.behind + behind))

            def composed(expr: Expr) -> Expr:
                """`map_leaves` in short for what most are: an old tensor or op as it is, or a microbatch of one."""
                of = expr.of if isinstance(expr, Microbatch) else expr
                if not isinstance(of, Same) or of.iteration or of.behind:
                    return map_leaves(expr, change)
                inner = exprs[of.id]
                if not isinstance(expr, Microbatch) or isinstance(inner, Glue):
                    return inner
                return expr if inner == of else Microbatch(inner, expr.first, expr.stop, expr.count)

            return tuple(map(composed, own))

        return Origin(
            middle.base,
            through(middle.tensors, self.tensors),
            through(middle.ops, self.ops),
            self.iterations * middle.iterations,
            max(self.ranks, middle.ranks),
            self.dealt or middle.dealt,
            max(self.tensor, middle.tensor),
            self.steps or middle.steps,
            max(self.experts, middle.experts),
            max(self.context, middle.context),
            max(self.group, middle.group),
        )


def _of_itself(trace: Rewritten) -> Origin:
    """The origin of a trace that stands for itself; its hash is computed when it is asked for."""
    found = object.__new__(Origin)
    rest = {each.name: each.default for each in fields(Origin)[3:]}
    vars(found).update(tensors=first_same(len(trace.tensors)), ops=first_same(len(trace.ops)), _of=trace, **rest)
    return found


def continued(previous: Expr, last: Expr, count: int) -> list[Expr]:
    """The `count` expressions that follow the last two of a series: of microbatches that go on, or of what stays.

    [] where the two are of different things.
    """
    if previous == last:
        return [last] * count
    if isinstance(previous, Chosen) and isinstance(last, Chosen) and len(previous.parts) == len(last.parts):
        series = [continued(a, b, count) for a, b in zip(previous.parts, last.parts, strict=True)]
        return [Chosen(parts, last.which) for parts in zip(*series, strict=True)] if all(series) else []
    if isinstance(previous, Along) and isinstance(last, Along) and replace(previous, of=last.of) == last:
        return [replace(last, of=of) for of in continued(previous.of, last.of, count)]
    if not (isinstance(previous, Microbatch) and isinstance(last, Microbatch) and previous.count == last.count):
        return []
    of, n, first, stop = continued(previous.of, last.of, count), last.count, last.first, last.stop
    on, longer = first - previous.first, stop - previous.stop
    return [Microbatch(each, first + i * on, stop + i * longer, n) for i, each in enumerate(of, 1)]


def has_experts(expr: Expr) -> bool:
    """Whether an expression is of a share of the experts."""
    while not isinstance(expr, Same | Glue | Fused | Packed):
        if isinstance(expr, Chosen) or (isinstance(expr, Along) and expr.dimension == "experts"):
            return True
        expr = expr.of
    return False


def _microbatches(expr: Expr) -> int:
    """Of how many microbatches, one in the other, an expression is a share."""
    number = 0
    while not isinstance(expr, Same | Glue | Fused | Packed):
        number += isinstance(expr, Microbatch)
        expr = expr.of
    return number


# ---- as JSON values ----------------------------------------------------------------------------


def to_json(expr: Expr) -> Any:
    """An expression as JSON values: an id, or a list that starts with the name of the expression."""
    if isinstance(expr, Same):
        if expr.behind:
            return ["same", expr.id, expr.iteration, expr.behind]
        return ["same", expr.id, expr.iteration] if expr.iteration else expr.id
    if isinstance(expr, Part | Microbatch):
        word = "part" if isinstance(expr, Part) else "microbatch"
        return [word, to_json(expr.of), expr.first, expr.stop, expr.count]
    if isinstance(expr, Along):
        return ["along", to_json(expr.of), expr.dimension, expr.first, expr.stop, expr.count]
    if isinstance(expr, Rowwise):
        return ["rowwise", to_json(expr.of)]
    if isinstance(expr, Chosen):
        return ["chosen", expr.which, *map(to_json, expr.parts)]
    if isinstance(expr, Slots):
        return ["slots", to_json(expr.of), list(expr.slots), expr.count]
    if isinstance(expr, Packed):
        return ["packed", *(None if part is None else to_json(part) for part in expr.parts)]
    if isinstance(expr, Encoded):
        return ["encoded", to_json(expr.of), expr.codec, expr.lossless]
    if isinstance(expr, Lossy):
        return ["lossy", to_json(expr.of), expr.codec]
    if isinstance(expr, Fused):
        return ["fused", *map(to_json, expr.parts)]
    return ["glue"]


def from_json(value: Any) -> Expr:
    """The expression that `to_json` wrote. Raises TraceError for anything else."""
    match value:
        case int(id) if id >= 0 and value is not True and value is not False:
            return Same(id)
        case ["same", int(id), int(iteration)] if id >= 0:
            return Same(id, iteration)
        case ["same", int(id), int(iteration), int(behind)] if id >= 0 and behind > 0:
            return Same(id, iteration, behind)
        case ["part" | "microbatch" as word, of, int(first), int(stop), int(count)] if 0 <= first < stop <= count:
            return (Part if word == "part" else Microbatch)(from_json(of), first, stop, count)
        case ["along", of, str(dimension), int(first), int(stop), int(count)] if 0 <= first < stop <= count:
            return Along(from_json(of), dimension, first, stop, count)
        case ["rowwise", of]:
            return Rowwise(from_json(of))
        case ["chosen", int(which), *parts] if 0 <= which < len(parts):
            return Chosen(tuple(map(from_json, parts)), which)
        case ["slots", of, [*slots], int(count)] if _are_slots(slots, count):
            return Slots(from_json(of), tuple(slots), count)
        case ["packed", *parts]:
            return Packed(tuple(None if part is None else from_json(part) for part in parts))
        case ["encoded", of, str(codec), bool(lossless)]:
            return Encoded(from_json(of), codec, lossless)
        case ["lossy", of, str(codec)]:
            return Lossy(from_json(of), codec)
        case ["fused", *parts]:
            return Fused(tuple(map(from_json, parts)))
        case ["glue"]:
            return Glue()
    raise TraceError(f"stands_for: {str(value)[:60]!r} is not an origin")


def _are_slots(slots: list[Any], count: int) -> bool:
    """Whether these are positions below `count`, in order."""
    whole = all(isinstance(slot, int) and not isinstance(slot, bool) for slot in slots)
    return bool(slots) and whole and sorted(set(slots)) == slots and slots[0] >= 0 and slots[-1] < count
