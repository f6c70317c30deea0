"""The tool for writing rewrites: a builder that records what each new tensor and op stands for.

The new trace has the release points of the old one; `sim.rewrites.holding` finds where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.rewrites.holding import carry_releases, has_points
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.launched import with_launched
from sim.trace.op import Op
from sim.trace.origin import Expr, Glue, Origin, Same, continued, first_same
from sim.trace.series import Mark
from sim.trace.tensor import Tensor

GLUE = Glue()
COPIED = ("name", "bytes", "role", "layer", "shape", "dtype", "zeros", "saved_for", "axes")
_copied = attrgetter(*COPIED)
Ints = NDArray[np.int64]


class Rewriter:
    """Collects the tensors and ops of a new trace together with what they stand for in the old one.

    The expressions given here refer to `trace`; `build` turns them into expressions over the first base.

    trace: the old trace.
    meta: entries to add to the old trace's.
    """

    def __init__(self, trace: Trace, meta: Mapping[str, Any] | None = None) -> None:
        self.trace = trace
        self.builder = TraceBuilder({**trace.meta, **(meta or {})})
        self.old_ops = first_same(len(trace.op_columns.name))
        self._tensors: list[Expr] = []
        self._ops: list[Expr] = []

    def tensor(self, like: Tensor, stands_for: Expr | None = None, **changes: Any) -> int:
        """Add a tensor like one of the old trace, with some fields changed. Returns its id.

        like: the old tensor.
        stands_for: what the new one stands for; by default the old tensor itself.
        changes: fields that differ; `replaces` must be a new id.
        """
        fields = dict(zip(COPIED, _copied(like)))
        fields.update(changes)
        self._tensors.append(Same(like.id) if stands_for is None else stands_for)
        return self.builder.tensor(**fields)

    def op(self, like: Op, stands_for: Expr | None = None, **changes: Any) -> int:
        """Add an op like one of the old trace, with some fields changed. Returns its id.

        like: the old op.
        stands_for: what the new one stands for; by default the old op itself.
        changes: fields that differ; `reads` and `writes` must be given, as new ids.
        """
        self._ops.append(self.old_ops[like.id] if stands_for is None else stands_for)
        return self.builder.copy_op(like, releases=(), **changes)

    def extend_ops(
        self,
        like: Sequence[int],
        stand_for: Sequence[Expr],
        reads: Sequence[Sequence[int]],
        writes: Sequence[Sequence[int]],
        changes: Mapping[str, Mapping[int, Any]],
    ) -> None:
        """Add many ops like some of the old trace; see `TraceBuilder.extend_ops_like`."""
        self._ops.extend(stand_for)
        self.builder.extend_ops_like(self.trace.op_columns, like, reads, writes, changes)

    def repeat_tensor(self, like: int, stands_for: Expr, name: str, bytes: int, replaces: int | None) -> int:
        """Add a tensor like one of the new trace; see `TraceBuilder.repeat_tensor`."""
        self._tensors.append(stands_for)
        return self.builder.repeat_tensor(like, name, bytes, replaces)

    def repeat_op(self, like: int, stands_for: Expr, *fields: Any) -> int:
        """Add an op like one of the new trace; see `TraceBuilder.repeat_op`."""
        self._ops.append(stands_for)
        return self.builder.repeat_op(like, *fields)

    def continue_series(self, before: Mark, between: Mark, number: int, count: int) -> bool:
        """Add `count` further blocks like the last two; see `TraceBuilder.continue_series`."""
        claims = []
        for claimed, place in ((self._tensors, 0), (self._ops, 1)):
            previous, last = claimed[before[place] : between[place]], claimed[between[place] :]
            series = [continued(old, new, count) for old, new in zip(previous, last)]
            if len(previous) != len(last) or not all(series):
                return False
            claims.append((claimed, chain.from_iterable(zip(*series))))
        if not self.builder.continue_series(before, between, number, count):
            return False
        for claimed, more in claims:
            claimed.extend(more)
        return True

    def copier(self) -> Callable[[int, Sequence[int], Sequence[int], int], int]:
        """A function that adds a copy of an old op, given its id, with as many operands, by new ids, and a device."""
        append, same, stand_for = self.builder.copier(self.trace.op_columns), self.old_ops, self._ops.append

        def copy(op: int, reads: Sequence[int], writes: Sequence[int], device: int) -> int:
            stand_for(same[op])
            return append(op, reads, writes, device)

        return copy

    def run_copier(self) -> Callable[[Ints, Ints, Ints, int], None]:
        """The same for runs of old ops, by column; see `TraceBuilder.run_copier`."""
        append, same, stand_for = self.builder.run_copier(self.trace.op_columns), self.old_ops, self._ops.extend

        def copy(run: Ints, reads: Ints, writes: Ints, device: int) -> None:
            stand_for([same[op] for op in run.tolist()])
            append(run, reads, writes, device)

        return copy

    def glue(self, name: str, kind: str, reads: Sequence[int], writes: Sequence[int], **fields: Any) -> int:
        """Add an op that computes nothing of the old trace. Returns its id."""
        self._ops.append(GLUE)
        return self.builder.op(name, kind, reads=reads, writes=writes, **fields)

    @property
    def op_count(self) -> int:
        """How many ops have been added."""
        return len(self._ops)

    def all_tensors(self, without: Collection[int] = ()) -> list[int]:
        """Add every tensor of the old trace unchanged, but for some. Returns the new ids by old id, -1 for those.

        What takes over the storage of one that is left out takes over what that took over.
        """
        columns, count = self.trace.tensor_columns, len(self.trace.tensor_columns.name)
        kept = np.ones(count, np.bool_)
        kept[list(without)] = False
        ids = np.flatnonzero(kept)
        new = np.full(count, -1)
        new[ids] = np.arange(len(self._tensors), len(self._tensors) + len(ids))
        same, olds, news = first_same(count), ids.tolist(), new.tolist()
        self._tensors += same if len(ids) == count else [same[old] for old in olds]
        numbers = {key: getattr(columns, key)[ids].astype(np.int64) for key in ("bytes", "role", "layer")}
        names, dtypes = ([column[old] for old in olds] for column in (columns.name, columns.dtype))
        self.builder.extend_tensors(names, dtypes, numbers)
        for old in np.flatnonzero(kept & (columns.replaces >= 0)).tolist():
            over = int(columns.replaces[old])
            while over >= 0 and news[over] < 0:
                over = int(columns.replaces[over])
            if over >= 0:
                self.builder.take_over(news[old], news[over])
        for key in ("shape", "zeros", "saved_for", "axes"):
            values = sorted(getattr(columns, key).items(), key=itemgetter(0))
            self.builder.note_all(key, [(news[old], value) for old, value in values if news[old] >= 0])
        return news

    def build(
        self,
        *,
        outputs: Iterable[int],
        carry: Iterable[tuple[int, int]],
        iterations: int = 1,
        ranks: int = 1,
        dealt: bool = False,
        tensor: int = 1,
        steps: bool = False,
        experts: int = 1,
        context: int = 1,
        group: int = 1,
        claimed: bool = True,
    ) -> Trace:
        """The new trace, with its origin.

        outputs, carry: as new ids.
        iterations: how many iterations of the old trace it contains.
        steps: whether these are steps on parts of its batch, see `Origin`.
        ranks, dealt, tensor, experts, context, group: which of the symmetric ranks it is one of, see `Origin`.
        claimed: False for a trace without origin, a workload of its own.
        """
        base = ""
        if claimed:  # it takes as long as everything else to find what a large trace hashes to
            base = self.trace.origin.base if self.trace.origin else self.trace.content_hash
        of_ranks = ranks, dealt, tensor, steps, experts, context, group
        origin = Origin(base, tuple(self._tensors), tuple(self._ops), iterations, *of_ranks)
        held = has_points(self.trace)  # where tensors are released the origin says
        said = origin.over(self.trace) if claimed or held else None
        new = self.builder.build(outputs=tuple(outputs), carry=tuple(carry), origin=said)
        new = carry_releases(self.trace, new, origin) if held else new
        new = with_launched(self.trace, new, self._ops)
        if claimed or new.origin is None:
            return new
        return Trace(new.tensor_columns, new.op_columns, outputs=new.outputs, carry=new.carry, meta=new.meta, like=new)

    @property
    def followed(self) -> tuple[Ints, Ints]:
        """Per tensor and per op of the new trace the one of the old trace that it stands for, -1 for none."""
        return followed(self._tensors), followed(self._ops)


def followed(claims: Sequence[Expr]) -> Ints:
    """Per row of a new trace that of the old one which it stands for, -1 for none."""
    return np.array([each.id if isinstance(each, Same) else -1 for each in claims], np.int64)


def with_columns(trace: Trace, meta: Mapping[str, Any] | None = None, **columns: Any) -> Trace:
    """The same trace with some op columns replaced, and its facts where others are given."""
    ops = replace(trace.op_columns, **columns)
    origin = Origin.identity(trace)
    return Trace(
        trace.tensor_columns,
        ops,
        outputs=trace.outputs,
        carry=trace.carry,
        meta=trace.meta if meta is None else meta,
        origin=origin,
        like=trace,
    )


def noted(trace: Trace, **entries: Any) -> Trace:
    """The same trace with entries in its `meta`."""
    return Trace(
        trace.tensor_columns,
        trace.op_columns,
        outputs=trace.outputs,
        carry=trace.carry,
        meta={**trace.meta, **entries},
        origin=Origin.identity(trace),
        like=trace,
    )


def slice_of(total: int, first: int, stop: int, count: int) -> int:
    """Bytes (or FLOPs) of the range `first` to `stop` of `count`; consecutive ranges add up to the total."""
    return total * stop // count - total * first // count
