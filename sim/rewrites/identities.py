"""What follows of values that are known: the identities by which a rewritten trace is compared with its base.

All parts together are the tensor. All microbatches together are the tensor, by concatenation where it has rows, by a
sum where it has none. All shares along a dimension are the tensor, where it has the dimension, or add up to it.
Consecutive ranges join to a longer range. A pack has its parts, a lossless encoding what it encodes, a lossy one
`Lossy` of it, which is nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sim.rewrites.codecs import FORMATS
from sim.rewrites.dimensions import Dimensions
from sim.rewrites.experts import EXPERTS, row_span
from sim.rewrites.rewriter import slice_of
from sim.trace.graph import Trace
from sim.trace.origin import Along, Encoded, Expr, Lossy, Microbatch, Packed, Part, Rowwise, Same, leaves
from sim.trace.tensor import Tensor

LEAST_CODE = Fraction(1, 32)
"""The fewest bytes of a lossless encoding per byte of the tensor: one bit for an element of four bytes."""


@dataclass(frozen=True)
class Identities:
    """What holds of the tensors of a base.

    rows: per tensor whether it has one per sample. statistics: those that an op has of its own samples alone.
    dims: along which dimensions the base divides. iterations: how many the rewritten trace has of it.
    steps: whether these are steps on parts of its samples.
    """

    base: Trace
    rows: NDArray[np.bool_]
    statistics: Collection[int]
    dims: Dimensions
    iterations: int
    steps: bool

    def size(self, expr: Expr | None) -> tuple[int, bool]:
        """The fewest bytes of a tensor with this claim, and whether it must have exactly as many."""
        if isinstance(expr, Same):
            whole, count = int(self.base.tensor_columns.bytes[expr.id]), self.iterations
            if self.steps and self.rows[expr.id]:
                return slice_of(whole, expr.iteration, expr.iteration + 1, count), True
            return whole, True
        if isinstance(expr, Part | Microbatch):
            whole, exact = self.size(expr.of)
            if isinstance(expr, Microbatch) and not self.has_rows(expr.of):
                return whole, exact  # a sum is as large as its terms
            return self.sliced(whole, expr), exact and not self.is_scalar(expr)
        if isinstance(expr, Along):
            whole, exact = self.size(expr.of)
            has = self.has_elements(expr)
            if has and expr.dimension == EXPERTS and self.has_rows(expr.of):
                layer = int(self.base.tensor_columns.layer[leaves(expr)[0].id])
                return slice_of(whole, *row_span(self.base, layer, expr.first, expr.stop, expr.count)), exact
            return (self.sliced(whole, expr) if has else whole), exact and not self.is_scalar(expr)
        if isinstance(expr, Packed):
            return sum(self.size(part)[0] for part in expr.parts), False
        if isinstance(expr, Lossy):
            return self.size(expr.of)
        if isinstance(expr, Encoded):
            if expr.codec in FORMATS and isinstance(expr.of, Same):
                return self.format_size(expr, self.base.tensors[expr.of.id])
            whole = self.size(expr.of)[0]
            return (-(-whole * LEAST_CODE // 1) if expr.lossless else min(whole, 1)), False
        return 0, False

    def sliced(self, whole: int, expr: Part | Microbatch | Along) -> int:
        """Bytes of a share; a few of a scalar, which each rank has as a number of its own."""
        if self.is_scalar(expr):
            return whole * (expr.stop - expr.first) // expr.count
        return slice_of(whole, expr.first, expr.stop, expr.count)

    def is_scalar(self, expr: Expr) -> bool:
        """Whether an expression is of a scalar."""
        return any(self.base.tensor_columns.shape.get(leaf.id) == () for leaf in leaves(expr))

    def format_size(self, expr: Encoded, tensor: Tensor) -> tuple[int, bool]:
        """As `size`, of a code in a known format."""
        form = FORMATS[expr.codec]
        return (tensor.bytes, False) if form.sparse and tensor.zeros is None else (form.size(tensor), True)

    def closure(self, claims: Iterable[Expr], *, glue: bool, adds: bool) -> set[Expr]:
        """All values that follow from these."""
        have: set[Expr] = set()
        todo = list(claims)
        ranges: dict[tuple[type, Expr | tuple[Expr, str], int], list[tuple[int, int]]] = {}
        while todo:
            claim = todo.pop()
            if claim in have:
                continue
            have.add(claim)
            if isinstance(claim, Packed):
                todo += [part for part in claim.parts if part is not None]
            elif isinstance(claim, Encoded) and glue:
                todo.append(claim.of if claim.lossless else Lossy(claim.of, claim.codec))
            elif isinstance(claim, Part | Microbatch):
                held = ranges.setdefault((type(claim), claim.of, claim.count), [])
                held.append((claim.first, claim.stop))
                adds_up = adds and not self.is_statistic(claim.of)
                joins = isinstance(claim, Part) or adds_up or claim.count == 1 or self.has_rows(claim.of)
                if joins and tiles(held, 0, claim.count):
                    todo.append(claim.of)
            elif isinstance(claim, Along):
                held = ranges.setdefault((Along, (claim.of, claim.dimension), claim.count), [])
                held.append((claim.first, claim.stop))
                joins = (glue and self.has_elements(claim)) or adds
                if joins and tiles(held, 0, claim.count):
                    todo.append(claim.of)
        return have | self.within_shares(have) if glue and adds else have

    def within_shares(self, have: Iterable[Expr]) -> set[Expr]:
        """What follows of shares of shares: the share of a sum is the sum of the shares."""
        inner: dict[tuple[str, int, int, int], set[Expr]] = {}
        for x in have:
            if isinstance(x, Along) and isinstance(x.of, Along):
                inner.setdefault((x.dimension, x.first, x.stop, x.count), set()).add(x.of)
        joined = {like: self.closure(of, glue=True, adds=True) - of for like, of in inner.items()}
        return {Along(x, *like) for like, found in joined.items() for x in found}

    def covers(self, claim: Expr, have: set[Expr], *, glue: bool, adds: bool) -> bool:
        """Whether a value can be derived from the available ones by slicing, joining, packing or encoding."""
        if claim in have:
            return True
        if isinstance(claim, Packed):
            return all(part is None or self.covers(part, have, glue=glue, adds=adds) for part in claim.parts)
        if isinstance(claim, Encoded):
            return glue and self.covers(claim.of, have, glue=glue, adds=adds)
        if isinstance(claim, Part | Microbatch):
            rows = isinstance(claim, Part) or self.has_rows(claim.of)
            everything = (claim.first, claim.stop) == (0, claim.count)
            if (rows or everything) and self.covers(claim.of, have, glue=glue, adds=adds):
                return True
            held: dict[Expr, list[tuple[int, int]]] = {}
            for x in have:
                if isinstance(x, Part | Microbatch) and (type(x), x.count) == (type(claim), claim.count):
                    held.setdefault(x.of, []).append((x.first, x.stop))
            span, joins = (claim.first, claim.stop), rows or (adds and not self.is_statistic(claim.of))
            inner = {of for of, own in held.items() if span in own or (joins and tiles(own, *span))}
            if glue and inner:  # the part of a sum is the sum of the parts
                inner = self.closure(inner, glue=glue, adds=adds)
                if self.covers(claim.of, inner, glue=glue, adds=adds):
                    return True
            return glue and joins and tiles(held.get(claim.of, []), *span)
        if isinstance(claim, Along):
            if isinstance(claim.of, Rowwise):  # found by shares
                return glue and self.covers(replace(claim, of=claim.of.of), have, glue=glue, adds=adds)
            shares = [
                (x.first, x.stop)
                for x in have
                if isinstance(x, Along) and replace(x, first=0, stop=1) == replace(claim, first=0, stop=1)
            ]
            if glue and (adds or self.has_elements(claim)) and tiles(shares, claim.first, claim.stop):
                return True  # consecutive shares, or terms of a sum, together
            if not (glue and (adds or self.has_elements(claim))):
                return False
            like = (claim.dimension, claim.first, claim.stop, claim.count)
            inner = {x.of for x in have if isinstance(x, Along) and (x.dimension, x.first, x.stop, x.count) == like}
            if inner and self.covers(claim.of, self.closure(inner, glue=glue, adds=adds), glue=glue, adds=adds):
                return True  # the share of a sum is the sum of the shares
            return self.covers(claim.of, have, glue=glue, adds=adds)
        return False

    def is_statistic(self, expr: Expr) -> bool:
        """Whether an expression is of what an op has of its own samples alone."""
        return any(leaf.id in self.statistics for leaf in leaves(expr))

    def has_rows(self, expr: Expr) -> bool:
        """Whether an expression is of what has rows of samples."""
        return any(self.rows[leaf.id] for leaf in leaves(expr))

    def has(self, dimension: str, expr: Expr) -> bool:
        """Whether what an expression is a share of has a dimension, so that the share is a part of its elements."""
        if isinstance(expr, Rowwise):
            return False
        has = self.dims.has.get(dimension, frozenset())
        return any(leaf.id in has for leaf in leaves(expr))

    def has_elements(self, share: Along) -> bool:
        """Whether a share is a part of the elements, and no term of a sum or count of its own."""
        has = (self.dims.divides_elements(share.dimension, leaf.id) for leaf in leaves(share.of))
        return not isinstance(share.of, Rowwise) and any(has)


def tiles(held: list[tuple[int, int]], first: int, stop: int) -> bool:
    """Whether the ranges inside `first` to `stop` follow each other without gap or overlap."""
    end_so_far = first
    for start, end in sorted(span for span in held if span[0] >= first and span[1] <= stop):
        if start != end_so_far:
            return False
        end_so_far = end
    return end_so_far == stop


__all__ = ["LEAST_CODE", "Identities", "tiles"]
