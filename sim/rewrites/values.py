"""Whether a rewritten trace computes what its base computes, op by op, from what ops and tensors claim to stand for.

`departures` asks of each op: if what it reads is what `origin` claims, is what it writes, too? What follows of known
values `sim.rewrites.identities` says. Only the following is taken for granted:

- An op that stands for base op o must find among its reads every tensor that o reads (of that iteration, no
  other version). Its results are then o's: whole, in parts, or in a pack.
- A `Microbatch` of o needs `batch` or `batch_sum` in o's `splits`. It must find the same microbatch of tensors with
  rows, and tensors without rows whole; its results are that microbatch of o's results. A `Part` of an op must find that
  part of all its reads, or the whole of some.
- A `Microbatch` of an op with statistics over the samples (`batch_own`) has its own, and is listed as `own`: nothing
  joins them to those of all samples. It renews running statistics of an earlier microbatch, or of before the first; the
  last version of a replica is the one at the end.
- An op that stands for a share of o `Along` a dimension needs one that o can be divided along
  (`sim.rewrites.dimensions`). It must find that share of tensors with the dimension, or all of them, and all of tensors
  without it, or, where o is linear in its reads, the same term of each; a read that o only holds may be any share,
  and at the experts the rows of the tokens' rank.
  Its results are o's shares where they have the dimension, terms of a sum where o sums over it, else o's results.
  Attention by tokens finds all keys and values, and has a term of their gradients; block by block it finds those of a
  share, and has a term of all its results (`sim.rewrites.ring_attention`). A loss finds what its rows need to
  know of all their columns, which is found by shares like a sum.
- An op that declares that its weights are some updates behind (`Same.behind`) must find that version, and no other one.
  Of consecutive steps (`Origin.steps`), each on its part of the batch, what has rows has that many fewer bytes.
- Of symmetric ranks (`Origin.ranks`, `Origin.tensor`) one is checked: the others have the same claims on other
  parts, and a collective among them (`Op.ring`) reads those, too.
- An op of the optimizer updates each parameter from that parameter's own tensors (`sim.rewrites.slots`): `Slots` of it
  must find those of its parameters, and has their results.
- A `Fused` op computes its parts in order: each finds the op's reads and the results of the parts before it. Kinds
  that stream through their operands may be fused with each other, and with such ops of an earlier phase, which it
  recomputes.
- What one member of a group (send and receive, a collective) reads, all members read. A collective may stand for an op
  that only adds, and put the sum in the place of what it reads.
- A code in a format of `sim.rewrites.codecs` is lossless or lossy as that format is, and has that many bytes; any
  other lossless one is not smaller than `LEAST_CODE`. What is held in a wider floating-point type has as many times the
  bytes.
- The backward of a function of `SUFFICES` may find, instead of what forward saved, the code that suffices for it.
- An update that writes a 16-bit weight from its fp32 master (`sim.rewrites.masters`) need not find the old weight.
- A tensor has the role of the tensor it stands for, unless it is a copy. A base op overwrites in place only what it
  overwrites in the base, and with such a weight its gradient.

A false claim is therefore reported at the op that makes it, and not at the ops that depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from sim.errors import TraceError
from sim.rewrites.batching import batch_ops, batched, own_ops, renewed
from sim.rewrites.chunks import as_base, joined
from sim.rewrites.codecs import FORMATS, SUFFICES
from sim.rewrites.dimensions import BLOCKS, CONTEXT, DIMENSIONS, QUERIES, TENSOR, TOKENS, dimensions, operands
from sim.rewrites.fuse import PRODUCT, STREAMED
from sim.rewrites.identities import Identities
from sim.rewrites.masters import gradients_replaced, held_weights
from sim.rewrites.slots import slots_of
from sim.rewrites.split import ELEMENTWISE
from sim.rewrites.symbolic import groups
from sim.trace.graph import PERSISTENT, Trace
from sim.trace.op import KINDS, PHASE_CODE
from sim.trace.origin import (
    Along,
    Chosen,
    Encoded,
    Expr,
    Fused,
    Glue,
    Lossy,
    Microbatch,
    Origin,
    Packed,
    Part,
    Rowwise,
    Same,
    Slots,
    has_experts,
    leaves,
    map_leaves,
    resolved,
)
from sim.trace.tensor import ROLES

OF_A_REPLICA = ("tensor", "context", "neighbour")
"""Axes along which ranks divide the work of one replica."""
WIDER = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of the floating-point types of which each, but for the first two, has all values of those before it."""


@dataclass(frozen=True, slots=True)
class Departure:
    """One respect in which a rewritten trace does not compute what its base computes.

    what: `wrong` (no identity supports the claim), `lossy` (the value went through a lossy codec), `stale` (a value of
        another iteration or version), `delayed` (an older version of a weight, as the op declares), `own` (statistics
        of a microbatch alone, as the op declares), `missing` (an op or output of the base is absent), or `repeated` (a
        base op is computed more than once: same values, more work).
    op, tensor: names, "" for none.
    text: the whole sentence.
    """

    what: str
    op: str
    tensor: str
    text: str


def check_origin(rewritten: Trace, base: Trace, allowed: Sequence[str] = ("repeated",)) -> None:
    """Raise TraceError at the first departure of a kind that is not in `allowed`."""
    for departure in departures(rewritten, base):
        if departure.what not in allowed:
            raise TraceError(f"rewrite: {departure.what}: {departure.text}")


def departures(rewritten: Trace, base: Trace) -> tuple[Departure, ...]:
    """All departures of a rewritten trace from its base; none for a faithful rewrite.

    Where the samples of a chunked loss are divided, the trace is compared with the base whose chunks have been joined
    (`sim.rewrites.chunks`), and that with the base.

    Raises TraceError if the trace was not derived from that base.
    """
    origin = Origin.identity(rewritten)
    if origin.base != base.content_hash and (chunks := joined(base)) is not None:
        with_one = as_base(chunks.trace)
        if origin.base == with_one.content_hash:
            return (*departures(chunks.trace, base), *departures(rewritten, with_one))
    if origin.base != base.content_hash:
        raise TraceError("rewrite: this trace was derived from another base")
    if origin.iterations < 1:
        raise TraceError(f"rewrite: the trace claims to contain {origin.iterations} iterations of its base")
    if len(origin.ops) != len(rewritten.ops) or len(origin.tensors) != len(rewritten.tensors):
        raise TraceError("rewrite: the origin does not have one expression per op and tensor")
    for exprs, count in ((origin.tensors, len(base.tensors)), (origin.ops, len(base.ops))):
        if any(leaf.id >= count for expr in exprs for leaf in leaves(expr)):
            raise TraceError("rewrite: the origin refers to an op or tensor that its base does not have")
    return tuple(_Check(rewritten, base, origin).run())


def approximate(trace: Trace) -> tuple[str, ...]:
    """Names of the tensors that a lossy codec decodes; what is computed from them is approximate, too."""
    claims = trace.origin.tensors if trace.origin is not None else ()
    return tuple(trace.tensor_columns.name[t] for t, claim in enumerate(claims) if _is_lossy(claim))


class _Check:
    def __init__(self, trace: Trace, base: Trace, origin: Origin) -> None:
        self.trace, self.base, self.origin, self.of_ops = trace, base, origin, origin.ops
        self.own = own_ops(base)
        self.rows, self.by_batch = batched(base), batch_ops(base) | self.own
        self.versions = {t: old for old, t in renewed(base, self.own).items()}
        self.grown = self._grown()
        of_own = [t for op in np.flatnonzero(self.own).tolist() for t in base.writes(op)]
        gradient = ROLES.index("gradient")  # those of weights are sums
        self.statistics = {t for t in of_own if not self.rows[t] and base.tensor_columns.role[t] != gradient}
        self.of_parts = self.statistics - self.versions.keys()
        self.dims = dimensions(base)
        self.known = Identities(base, self.rows, self.statistics, self.dims, origin.iterations, origin.steps)
        self.last_of = {first: last for last, first in base.carry}
        self.gradient_of = gradients_replaced(base)
        self.constant = (base.producer < 0) & np.isin(base.tensor_columns.role, PERSISTENT)
        if origin.iterations == 1:
            self.claims: Sequence[Expr] = origin.tensors
        else:
            self.claims = [map_leaves(expr, self.settle) for expr in origin.tensors]
        self.of_tensors = self.claims
        if any(isinstance(_inmost(expr), Chosen) for expr in origin.tensors):
            self.claims = [resolved(expr) for expr in self.claims]
            self.origin = replace(origin, tensors=self.claims, ops=[resolved(expr) for expr in origin.ops])
        self.done: dict[Same, Fraction | int] = {}
        self.departures: list[Departure] = []

    def settle(self, leaf: Same) -> Same:
        """One name for one value: an initial tensor is the one that the previous iteration carried to it."""
        t, i = leaf.id, leaf.iteration
        while i > 0 and self.base.producer[t] < 0:
            if t in self.last_of:
                t = self.last_of[t]
            elif not self.constant[t]:
                break
            i -= 1
        return Same(t, i)

    def run(self) -> list[Departure]:
        trace, names = self.trace, self.trace.tensor_columns.name
        for t, size in enumerate(trace.tensor_columns.bytes.tolist()):
            least, exact = self.known.size(self.claims[t])
            if (size < least or (exact and size > least)) and size != least * self.times_as_wide(t):
                self.report("wrong", "", names[t], f"tensor {names[t]!r} has {size} bytes, not {least}")
        for t in np.flatnonzero(trace.producer < 0).tolist():
            for leaf in leaves(self.claims[t]):
                if (
                    self.base.producer[leaf.id] >= 0 and leaf.iteration >= 0
                ):  # below 0: produced before this trace starts
                    self.report(
                        "wrong", "", names[t], f"tensor {names[t]!r} exists from the start, {self.say(leaf)} does not"
                    )
        self.check_formats()
        self.check_roles()
        self.check_in_place()
        self.check_experts()
        members = groups(trace)
        for op, expr in enumerate(self.origin.ops):
            group = trace.op_columns.group.get(op)
            exchanges = isinstance(expr, Glue) or KINDS[trace.op_columns.kind[op]] == "collective"
            readers = members[group] if group and exchanges else [op]
            claims = [self.claims[t] for member in readers for t in trace.reads(member)]
            if op in trace.op_columns.ring and len(readers) == 1 and isinstance(expr, Glue):
                claims = self.of_all_ranks(op, (self.of_tensors[t] for t in trace.reads(op)))
            self.check_op(op, expr, claims)
        self.check_coverage()
        self.check_ends()
        return self.departures

    def of_all_ranks(self, op: int, claims: Iterable[Expr]) -> list[Expr]:
        """The claims of all symmetric ranks, given those of this one. op: the collective among them, -1 at the end."""
        origin = self.origin
        ranks = {"data": origin.ranks, "tensor": origin.tensor, "context": origin.context}
        if ring := self.trace.op_columns.ring.get(op):
            ranks |= {"neighbour": origin.context}
            groups = origin.ranks // origin.experts
            ranks |= {"expert": origin.experts, "expert_data": groups, "group": origin.group}
            ranks |= {"data_context": origin.ranks * origin.context, "expert_data_context": groups * origin.context}
            ranks |= {"group_data": origin.ranks // origin.group, "group_context": origin.group * origin.context}
        if ring is not None and ring.ranks != ranks[ring.axis]:
            name = self.trace.op_columns.name[op]
            have = f"{ranks[ring.axis]} {'ranks' if ring.axis in OF_A_REPLICA else 'replicas'}"
            self.report("wrong", name, "", f"op {name!r} joins {ring.ranks} {ring.axis} ranks of {have}")
        every = list(claims)
        for axis in (ring.axis,) if ring is not None else ranks:
            every = [self.origin.of_rank(claim, r, axis) for claim in every for r in range(ranks[axis])]
        return every if self.of_tensors is self.claims else [resolved(claim) for claim in every]

    def times_as_wide(self, t: int) -> int:
        """How often the type of what a tensor stands for goes into its own, which loses nothing; else 1."""
        claim, dtype, of_base = _inmost(self.claims[t]), self.trace.tensor_columns.dtype, self.base.tensor_columns.dtype
        if not isinstance(claim, Same):
            return 1
        own, base = (WIDER.get(each, 0) for each in (dtype[t], of_base[claim.id]))
        return own // base if own > base > 0 else 1

    def check_formats(self) -> None:
        """A code in a known format loses what that format loses."""
        for t, claim in enumerate(self.claims):
            form = FORMATS.get(claim.codec) if isinstance(claim, Encoded) and claim.lossless else None
            if form is not None and not form.lossless:
                name = self.trace.tensor_columns.name[t]
                text = f"tensor {name!r} is said to be lossless, but {form.name!r} is a lossy format"
                self.report("wrong", "", name, text)

    def check_roles(self) -> None:
        """Roles must match the base: they decide whether policies may move or drop a tensor."""
        role, of_base = self.trace.tensor_columns.role, self.base.tensor_columns.role
        for t, claim in enumerate(self.claims):
            producer = int(self.trace.producer[t])
            if producer >= 0 and isinstance(self.origin.ops[producer], Glue):
                continue  # a copy has a role of its own
            if isinstance(claim, Same) and role[t] != of_base[claim.id]:
                name = self.trace.tensor_columns.name[t]
                self.report("wrong", "", name, f"tensor {name!r} is {ROLES[role[t]]}, not {ROLES[of_base[claim.id]]}")

    def check_experts(self) -> None:
        """What other ranks do with their experts is what this one does with its own: each op, on the same operands."""
        other: dict[tuple[int, int], int] = {}
        for expr in self.of_tensors:
            for r, mine, leaf in _of_others(expr):
                if other.setdefault((r, mine.id), leaf.id) != leaf.id:
                    name, names = self.trace.tensor_columns.name, self.base.tensor_columns.name
                    text = f"{names[mine.id]!r} is said to be {names[leaf.id]!r} and another tensor on rank {r}"
                    self.report("wrong", "", name[0], text)
        for op, expr in enumerate(self.of_ops):
            if not isinstance(chosen := _inmost(expr), Chosen):
                continue
            own = self.operands(chosen.of)
            for r, part in enumerate(chosen.parts):
                theirs = self.operands(part)
                if theirs != [other.get((r, t), t) for t in own]:
                    name = self.trace.op_columns.name[op]
                    self.report("wrong", name, "", f"op {name!r} has other operands on rank {r} of the experts")

    def operands(self, expr: Expr) -> list[int]:
        """The tensors of the base that an op of it reads and writes, or some slots of one."""
        while isinstance(expr, Part | Microbatch | Along):
            expr = expr.of
        if isinstance(expr, Fused):
            return [t for part in expr.parts for t in self.operands(part)]
        if not isinstance(expr, Slots):
            return [t for leaf in leaves(expr) for t in (*self.base.reads(leaf.id), *self.base.writes(leaf.id))]
        slots = slots_of(self.base, leaves(expr)[0].id)
        return [t for k in expr.slots if k < len(slots) for t in (*slots[k].reads, *slots[k].writes)]

    def of_other_experts(self, op: int, leaf: Same) -> list[Same]:
        """The ops of the base that other ranks run for their experts where this one runs `leaf` for its own."""
        if self.origin.experts == 1:
            return []
        return [theirs for _, mine, theirs in _of_others(self.of_ops[op]) if mine == leaf]

    def check_in_place(self) -> None:
        """An op that stands for base ops must take over the storage that they take over, and no other."""
        replaces, before = self.trace.tensor_columns.replaces, self.base.tensor_columns.replaces
        for t in np.flatnonzero(replaces >= 0).tolist():
            producer = int(self.trace.producer[t])
            if producer < 0 or isinstance(self.origin.ops[producer], Glue):
                continue
            allowed: set[Same] = set()
            for leaf in leaves(self.claims[t]):
                allowed.add(leaf)  # a sum over microbatches, or a pack that is filled
                if leaf.id in self.gradient_of:
                    allowed.add(Same(self.gradient_of[leaf.id], leaf.iteration))
                old = int(before[leaf.id])
                while old >= 0:  # of this version, or of one before it
                    allowed.update(self.settle(Same(old, i)) for i in range(max(leaf.iteration, 0) + 1))
                    old = int(before[old])
            if KINDS[self.trace.op_columns.kind[producer]] == "collective":  # the sum of what it reads, in its place
                allowed.update(leaf for r in self.trace.reads(producer) for leaf in leaves(self.claims[r]))
            before_it = leaves(self.claims[int(replaces[t])])
            if before_it and allowed.isdisjoint(before_it):  # an empty slot may be filled with anything
                name, overwritten = (
                    self.trace.op_columns.name[producer],
                    self.trace.tensor_columns.name[int(replaces[t])],
                )
                written = self.trace.tensor_columns.name[t]
                self.report(
                    "wrong",
                    name,
                    written,
                    f"op {name!r} writes {written!r} in place of {overwritten!r}, which its base does not",
                )

    # ---- one op ------------------------------------------------------------------------------

    def check_op(self, op: int, expr: Expr, claims: list[Expr]) -> None:
        glue = isinstance(expr, Glue)
        adds = glue and self.trace.ops[op].kind in ("elementwise", "reduce", "collective")
        have = self.known.closure(claims, glue=glue, adds=adds)
        available = set(have)
        if not glue:
            available.update(self.results(op, expr, have, claims, Fraction(1)))
        for t in self.trace.writes(op):
            claim = self.claims[t]
            if claim not in available and not (
                self.known.covers(claim, available, glue=glue, adds=adds) or self.adds_to(t, claim, available)
            ):
                name, tensor = self.trace.op_columns.name[op], self.trace.tensor_columns.name[t]
                self.report("wrong", name, tensor, f"op {name!r} cannot produce {tensor!r}: {self.say(claim)}")

    def adds_to(self, t: int, claim: Expr, available: set[Expr]) -> bool:
        """Whether a result is what was there with the op's own part added: a product's, as in the base, or a gradient.

        A gradient of a weight may be added to the sum so far by the op that computes it, or casts it, if it reads that.
        """
        over = int(self.trace.tensor_columns.replaces[t])
        if over < 0:
            return False
        in_place = over in self.trace.reads(int(self.trace.producer[t]))
        role, gradient = self.base.tensor_columns.role, ROLES.index("gradient")
        if not all(leaf.id in self.grown or (in_place and role[leaf.id] == gradient) for leaf in leaves(claim)):
            return False
        have = self.known.closure({*available, self.claims[over]}, glue=True, adds=True)
        return self.known.covers(claim, have, glue=True, adds=True)

    def results(self, op: int, expr: Expr, have: set[Expr], claims: list[Expr], share: Fraction) -> set[Expr]:
        """What an op that stands for `expr` computes from the values it has."""
        if isinstance(expr, Same):
            return self.base_results(op, expr, have, claims, share)
        if isinstance(expr, Fused):
            available = set(have)
            for part in expr.parts:
                available |= self.results(op, part, available, claims, share)
            return available
        if isinstance(expr, Glue):  # within a kernel: what joins its parts
            return set(self.known.closure(list(have), glue=True, adds=True))
        if isinstance(expr, Slots):
            return self.slot_results(op, expr, have, claims, share)
        if isinstance(expr, Along) and len(leaves(expr)) > 1:  # of a kernel: its parts in order, each a share
            return self.results(op, _shares_of_parts(expr), have, claims, share)
        if isinstance(expr, Along):
            return self.shared_results(op, expr, have, claims, share)
        assert isinstance(expr, Part | Microbatch)
        kind, span = type(expr), (expr.first, expr.stop, expr.count)
        inner: set[Expr] = set()
        for claim in have:
            if isinstance(claim, kind) and (claim.first, claim.stop, claim.count) == span:
                inner.add(claim.of)
                continue
            if self.may_be_whole(claim, expr):
                inner.add(claim)
            if isinstance(expr, Microbatch):
                inner.update(self.renewed_by(claim, expr))
        inner = self.known.closure(inner, glue=False, adds=False)
        share = share * (expr.stop - expr.first) / expr.count
        inner_results = self.results(op, expr.of, inner, claims, share)
        last: set[Expr] = {x for x in inner_results if isinstance(x, Same) and x.id in self.versions}
        return {kind(result, *span) for result in inner_results} | last

    def may_be_whole(self, claim: Expr, restricted: Part | Microbatch) -> bool:
        if isinstance(restricted, Microbatch):
            return not any(leaf.id in self.of_parts for leaf in leaves(claim))
        return True  # the whole has the part

    def renewed_by(self, claim: Expr, by: Microbatch) -> list[Expr]:
        """What a microbatch finds in place of an old value: a version that earlier ones have renewed or added to.

        by: that microbatch. None for any other claim.
        """
        if not isinstance(claim, Microbatch) or claim.count != by.count or claim.first >= by.first:
            return []
        if all(x.id in self.versions for x in leaves(claim)):
            old = (Same(self.versions[x.id], x.iteration) for x in leaves(claim))
            return [self.settle(each) if self.origin.iterations > 1 else each for each in old]
        if (claim.first, claim.stop) == (0, by.first) and all(x.id in self.grown for x in leaves(claim)):
            return [map_leaves(claim.of, lambda x: Same(self.grown[x.id], x.iteration))]
        return []

    def _grown(self) -> dict[int, int]:
        """What products of the base add to, by the id of the result that takes its place."""
        base, replaces = self.base, self.base.tensor_columns.replaces
        products = (op for op in range(len(base.ops)) if KINDS[base.op_columns.kind[op]] == "matmul")
        results = ((t, int(replaces[t]), op) for op in products for t in base.writes(op) if replaces[t] >= 0)
        return {t: old for t, old, op in results if old in base.reads(op)}

    def shared_results(self, op: int, expr: Along, have: set[Expr], claims: list[Expr], share: Fraction) -> set[Expr]:
        """What an op computes that stands for a share of one along a dimension."""
        if expr.dimension == BLOCKS:
            return self.block_results(op, expr, have, claims, share)
        name, dims = self.trace.op_columns.name[op], self.dims
        (leaf,) = leaves(expr.of)
        like = (expr.dimension, expr.first, expr.stop, expr.count)
        shares = {x.of for x in have if isinstance(x, Along) and (x.dimension, x.first, x.stop, x.count) == like}
        parts = {of for of in shares if self.known.has(expr.dimension, of)}
        attends = expr.dimension in TOKENS and dims.ops[leaf.id].kind == "attention"
        if attends:  # its keys and values are those of all tokens
            parts = {of for of in parts if not any(x.id in dims.keys for x in leaves(of))}
        used, of_terms = operands(dims.ops[leaf.id]), False
        if expr.dimension not in DIMENSIONS or not dims.divides(leaf.id, expr.dimension):
            of_terms = dims.takes_terms(leaf.id) and {_like(expr.of, t) for t in used} <= shares - parts
            if not of_terms:
                what = self.base.op_columns.name[leaf.id]
                self.report("wrong", name, "", f"op {name!r}: {what!r} may not be divided along {expr.dimension!r}")
        others = [t for t in dims.ops[leaf.id].reads if t not in used]
        factors = {x for t in others for x in (_like(expr.of, t), replace(leaf, id=t))} & have
        inner = shares | factors if of_terms else parts | have
        rows = dims.rowwise(leaf.id) if expr.dimension == TENSOR else -1
        if rows >= 0 and Rowwise(_like(expr.of, rows)) not in have:
            self.report("wrong", name, "", f"op {name!r} does not know the rows of {self.say(Same(rows))}")
        if not self.origin.is_symmetric(expr):  # else each rank does as much
            share = share * (expr.stop - expr.first) / expr.count
        results = self.results(op, expr.of, self.known.closure(inner, glue=False, adds=False), claims, share)
        shared = {x for x in results if self.known.has(expr.dimension, x)} if not of_terms else results
        if of_terms or dims.sums(leaf.id):
            shared = results
        summed = {x for x in results if attends and any(each.id in dims.terms for each in leaves(x))}
        by_query = (QUERIES, *like[1:])
        return {Along(x, *(by_query if x in summed else like)) if x in shared else x for x in results}

    def block_results(self, op: int, expr: Along, have: set[Expr], claims: list[Expr], share: Fraction) -> set[Expr]:
        """What attention of a share of the queries to a share of the keys computes: the terms of that block."""
        dims, of, (leaf,) = self.dims, expr.of, leaves(expr.of)
        d, c = expr.first, expr.count
        by_rank = isinstance(of, Along) and (of.dimension, of.stop - of.first, of.count) == (CONTEXT, 1, c)
        if not by_rank or expr.stop - d != 1 or dims.ops[leaf.id].kind != "attention":
            name = self.trace.op_columns.name[op]
            self.report("wrong", name, "", f"op {name!r}: {self.say(of, self.base.op_columns.name)} has no blocks")
            return set()
        assert isinstance(of, Along)
        own, block = of.first, (of.first + d) % c

        def of_share(k: int) -> set[Expr]:
            return {
                x.of for x in have if isinstance(x, Along) and replace(x, of=of.of) == replace(of, first=k, stop=k + 1)
            }

        keys = {x for x in of_share(block) if any(each.id in dims.keys for each in leaves(x))}
        asks = of_share(own)
        keys -= {x for x in keys - asks if any(each.id in dims.with_queries for each in leaves(x))}
        asks = {x for x in asks if not any(each.id in dims.keys for each in leaves(x))}
        if not self.origin.is_symmetric(of):
            share = share / c
        results = self.results(
            op, of.of, self.known.closure(asks | keys | have, glue=False, adds=False), claims, share / c
        )

        def term(x: Expr) -> Along:
            k = block if any(each.id in dims.terms for each in leaves(x)) else own
            return replace(expr, of=replace(of, of=x, first=k, stop=k + 1))

        return {term(x) if self.known.has(CONTEXT, x) else x for x in results}

    def slot_results(self, op: int, expr: Slots, have: set[Expr], claims: list[Expr], share: Fraction) -> set[Expr]:
        """What an op computes that updates some parameters of an op of the base, or of a kernel that joins several."""
        name, of, names = self.trace.op_columns.name[op], expr.of, self.parameters(expr.of)
        if len(names) != expr.count or max(expr.slots, default=0) >= expr.count:
            self.report("wrong", name, "", f"op {name!r}: {self.say(of, self.base.op_columns.name)} has no such slots")
            return set()
        if isinstance(of, Fused):  # each of its ops for these parameters, in order
            available, chosen = set(have), {names[k] for k in expr.slots}
            for part in of.parts:
                own = self.parameters(part)
                slots = tuple(k for k, parameter in enumerate(own) if parameter in chosen)
                some = part if len(slots) == len(own) else Slots(part, slots, len(own))
                available |= self.results(op, some, available, claims, share) if slots else set()
            return available
        if isinstance(of, Slots):
            some = Slots(of.of, tuple(of.slots[k] for k in expr.slots), of.count)
            return self.slot_results(op, some, have, claims, share)
        if isinstance(of, Along):
            return self.results(op, replace(of, of=replace(expr, of=of.of)), have, claims, share)
        assert isinstance(of, Same)
        slots_of_base = slots_of(self.base, of.id)
        own_slots = [slots_of_base[k] for k in expr.slots]
        reads = {t for slot in own_slots for t in (*slot.reads, *slot.shared)}
        results = self.base_results(op, of, have, claims, share * len(own_slots) / expr.count, reads)
        return results & {Same(t, of.iteration) for slot in own_slots for t in slot.writes}

    def parameters(self, expr: Expr) -> list[str]:
        """The parameters that an op of the optimizer updates, in the order of its operands."""
        if isinstance(expr, Same):
            return [slot.parameter for slot in slots_of(self.base, expr.id)]
        if isinstance(expr, Fused):
            return list(dict.fromkeys(each for part in expr.parts for each in self.parameters(part)))
        if isinstance(expr, Slots):
            names = self.parameters(expr.of)
            return [names[k] for k in expr.slots if k < len(names)]
        return self.parameters(expr.of) if isinstance(expr, Along) else []

    def base_results(
        self,
        op: int,
        leaf: Same,
        have: set[Expr],
        claims: list[Expr],
        share: Fraction,
        only: set[int] | None = None,
    ) -> set[Expr]:
        """What an op computes that stands for an op of the base. only: of that op's reads, those it has to find."""
        base, c, b = self.base, self.trace.op_columns, self.base.op_columns
        name = c.name[op]
        if not self.is_alike(op, leaf):
            self.report("wrong", name, "", f"op {name!r} is of another kind or phase than {b.name[leaf.id]!r}")
        enclosing = self.origin.ops[op]
        while isinstance(enclosing, Part | Microbatch | Slots | Along):
            if isinstance(enclosing, Slots | Along):
                enclosing = enclosing.of
                continue
            if isinstance(enclosing, Microbatch):
                possible, way = bool(self.by_batch[leaf.id]) or self.is_done_again(op, leaf), "by batch"
            else:
                ways = set(b.splits.get(leaf.id, ())) - {"batch", "batch_sum", "batch_own"}
                possible, way = bool(ways) or base.ops[leaf.id].kind in ELEMENTWISE, "into parts"
            if not possible:
                self.report("wrong", name, "", f"op {name!r}: {b.name[leaf.id]!r} may not be split {way}")
            enclosing = enclosing.of
        share = share * self.times_done(self.of_ops[op])
        if self.own[leaf.id] and self.is_of_some(self.origin.ops[op]):
            text = f"op {name!r} has statistics of {self.say(self.origin.ops[op], b.name)} alone"
            self.report("own", name, "", text)
        done = Same(leaf.id, leaf.iteration)
        for each in (done, *self.of_other_experts(op, done)):
            self.done[each] = self.done.get(each, 0) + (1 if share == 1 else share)
        suffices = self.sufficient(leaf, have)
        shares = {_inside(x) for x in have if isinstance(x, Along)}
        used = operands(self.dims.ops[leaf.id]) if shares else ()
        held: set[int] = set()
        if has_experts(self.of_ops[op]):  # which may be rows of the tokens' rank
            held = set(base.reads(leaf.id)).difference(operands(self.dims.ops[leaf.id]))
        for t in base.reads(leaf.id):
            if t in suffices or (shares and t not in used and Same(t, leaf.iteration) in shares):
                continue
            if t in held and any(Same(t, leaf.iteration) in leaves(claim) for claim in claims):
                continue
            if only is not None and t not in only:
                continue
            wanted = Same(t, leaf.iteration)
            if self.origin.iterations > 1:
                wanted = self.settle(wanted)
            if leaf.behind and base.producer[t] < 0 and t in self.last_of and t not in self.versions.values():
                older = self.settle(Same(t, max(leaf.iteration - leaf.behind, 0)))
                if older in have and older != wanted:
                    text = f"op {name!r} reads {self.say(wanted)} as it was {leaf.behind} updates before"
                    self.report("delayed", name, base.tensor_columns.name[t], text)
                wanted = older
            if wanted not in have and t not in held_weights(base, base.reads(leaf.id), base.writes(leaf.id)):
                self.report_read(op, wanted, claims)
        return {Same(t, leaf.iteration) for t in base.writes(leaf.id)}

    def times_done(self, expr: Expr) -> int:
        """How many of the symmetric ranks do as much on other parts of the batch or of the weights."""
        origin, times = self.origin, self.origin.context if self.is_part_of_tokens_rank(expr) else 1
        again = origin.group > 1 and origin.of_rank(expr, origin.group) == expr  # by each group
        for axis, ranks in (
            ("expert", origin.experts),
            ("expert_data", origin.group if again else origin.ranks // origin.experts),
        ):
            if axis == "expert" and isinstance(_inmost(expr), Chosen):
                continue  # they do the same for other experts, see `of_other_experts`
            if ranks > 1 and origin.of_rank(expr, 1, axis) != expr:
                times *= ranks
        return times

    def is_of_some(self, expr: Expr) -> bool:
        """Whether an op is that of some samples, and not of all."""
        while isinstance(expr, Part | Microbatch | Along):
            if isinstance(expr, Microbatch) and expr.stop - expr.first < expr.count:
                return True
            expr = expr.of
        return False

    def is_done_again(self, op: int, leaf: Same) -> bool:
        """Whether a kernel recomputes an op of an earlier phase that reads no rows: as a whole for each microbatch."""
        earlier = self.base.op_columns.phase[leaf.id] < self.trace.op_columns.phase[op]
        return bool(earlier) and not any(self.rows[t] for t in self.base.reads(leaf.id))

    def is_part_of_tokens_rank(self, expr: Expr) -> bool:
        """Whether ranks that divide tokens work on other parts of the state."""
        if isinstance(expr, Fused):
            return any(map(self.is_part_of_tokens_rank, expr.parts))
        if isinstance(expr, Same | Glue | Packed):
            return False
        of_rank = isinstance(expr, Part) and self.origin.width(expr, "context") > 0
        return of_rank or self.is_part_of_tokens_rank(expr.of)

    def is_alike(self, op: int, leaf: Same) -> bool:
        """Whether an op has the kind and phase of a base op; in one kernel with others, of one like it.

        A fused kernel that streams through its operands may be of several such kinds, and may recompute what an
        earlier phase computed. A product may cast its result, or add it to another one, as it writes it.
        """
        c, b = self.trace.op_columns, self.base.op_columns
        if (c.kind[op], c.phase[op]) == (b.kind[leaf.id], b.phase[leaf.id]):
            return True
        if KINDS[c.kind[op]] == "collective" and c.phase[op] == b.phase[leaf.id] and self.dims.takes_terms(leaf.id):
            return True
        streams = KINDS[c.kind[op]] in STREAMED and KINDS[b.kind[leaf.id]] in STREAMED
        of_product = KINDS[c.kind[op]] == PRODUCT and KINDS[b.kind[leaf.id]] in ELEMENTWISE
        ends = of_product and c.phase[op] == b.phase[leaf.id]
        kernel = self.origin.ops[op]
        while isinstance(kernel, Part | Microbatch | Along):
            kernel = kernel.of
        return isinstance(kernel, Fused) and (ends or (streams and bool(b.phase[leaf.id] <= c.phase[op])))

    def sufficient(self, leaf: Same, have: set[Expr]) -> frozenset[int]:
        """What a backward op of the base saved in forward, if a code of it is there that suffices; else nothing."""
        function, base = self.base.op_columns.function.get(leaf.id, ""), self.base
        if function not in SUFFICES or base.op_columns.phase[leaf.id] != PHASE_CODE["backward"]:
            return frozenset()
        saved = frozenset(
            t for t in base.reads(leaf.id) if base.op_columns.phase[base.producer[t]] == 0 and base.producer[t] >= 0
        )
        codes = {Encoded(Same(t, leaf.iteration), SUFFICES[function], True) for t in saved}
        return saved if codes & have else frozenset()

    def report_read(self, op: int, wanted: Same, claims: list[Expr]) -> None:
        name, tensor = self.trace.op_columns.name[op], self.base.tensor_columns.name[wanted.id]
        what, how = "wrong", "does not read"
        storage = self.storage(wanted.id)
        for claim in claims:
            around = leaves(claim)
            if wanted in around and _is_lossy(claim):
                what, how = "lossy", "reads a lossy copy of"
            elif any(leaf != wanted and self.storage(leaf.id) == storage for leaf in around):
                what, how = "stale", "reads another version of"
        self.report(what, name, tensor, f"op {name!r} {how} {self.say(wanted)}")

    def storage(self, tensor: int) -> int:
        replaces = self.base.tensor_columns.replaces
        while replaces[tensor] >= 0:
            tensor = int(replaces[tensor])
        return tensor

    # ---- the whole ---------------------------------------------------------------------------

    def check_coverage(self) -> None:
        names = self.base.op_columns.name
        for i in range(self.origin.iterations):
            for op in range(len(names)):
                share = self.done.get(Same(op, i), 0)
                if share != 1:
                    what = "missing" if share < 1 else "repeated"
                    self.report(what, names[op], "", f"op {self.say(Same(op, i), names)} is computed {share} times")

    def check_ends(self) -> None:
        base, last = self.base, self.origin.iterations - 1
        ends = self.of_all_ranks(-1, (self.of_tensors[t] for t in self.trace.outputs))
        have = self.known.closure(ends, glue=True, adds=False)
        for t in base.outputs:
            if self.settle(Same(t, last)) not in have:
                name = base.tensor_columns.name[t]
                self.report("missing", "", name, f"output {name!r} does not exist at the end")
        carried = {first: Same(end, last) for end, first in base.carry}

        def at_the_end(leaf: Same) -> Expr:
            if leaf.iteration < 0:  # a value of an earlier iteration has the same age at the end as at the start
                return Same(leaf.id, leaf.iteration + self.origin.iterations)
            return self.settle(carried.get(leaf.id, leaf))

        for end, first in self.trace.carry:
            claim = self.claims[first]
            wanted = map_leaves(claim, at_the_end)
            if self.claims[end] != wanted and not _fills(self.claims[end], wanted):
                name = self.trace.tensor_columns.name[end]
                self.report("wrong", "", name, f"carry: {name!r} is not what the next iteration starts with")
        first_of_all = [self.of_tensors[first] for _, first in self.trace.carry]
        if self.of_tensors is not self.claims:
            first_of_all = self.of_all_ranks(-1, first_of_all)
        starts = {leaf.id for claim in first_of_all for leaf in leaves(claim)}
        for _, first in base.carry:
            if first not in starts:
                name = base.tensor_columns.name[first]
                self.report("missing", "", name, f"carry: nothing is carried to {name!r}")

    def say(self, expr: Expr, names: Sequence[str] | None = None) -> str:
        names = self.base.tensor_columns.name if names is None else names
        if isinstance(expr, Same):
            late = f" of iteration {expr.iteration}" if self.origin.iterations > 1 else ""
            return f"{names[expr.id]!r}{late}"
        if isinstance(expr, Slots):
            return f"slots {', '.join(map(str, expr.slots))} of {self.say(expr.of, names)}"
        if isinstance(expr, Part | Microbatch | Along):
            return f"{type(expr).__name__.lower()} {expr.first}-{expr.stop}/{expr.count} of {self.say(expr.of, names)}"
        return f"{type(expr).__name__.lower()} " + ", ".join(self.say(leaf, names) for leaf in leaves(expr))

    def report(self, what: str, op: str, tensor: str, text: str) -> None:
        self.departures.append(Departure(what, op, tensor, text))


def _inmost(expr: Expr) -> Expr:
    """What of which parts have been taken, down to what differs from rank to rank of the experts."""
    while isinstance(expr, Part | Microbatch | Along):
        expr = expr.of
    return expr


def _of_others(expr: Expr) -> list[tuple[int, Same, Same]]:
    """Of what differs from rank to rank of the experts: each other rank, and pairs of this one's leaves and its."""
    chosen = _inmost(expr)
    if not isinstance(chosen, Chosen):
        return []
    own = leaves(chosen.of)
    others = [(r, part) for r, part in enumerate(chosen.parts) if r != chosen.which]
    return [(r, *pair) for r, part in others for pair in zip(own, leaves(part), strict=True)]


def _inside(expr: Expr) -> Expr:
    """What an expression is a share of, along however many dimensions."""
    return _inside(expr.of) if isinstance(expr, Along) else expr


def _shares_of_parts(expr: Expr) -> Expr:
    """A share of a kernel, as the kernel of the shares of its parts."""
    if isinstance(expr, Fused):
        return expr
    assert isinstance(expr, Part | Microbatch | Along | Slots | Rowwise)
    inner = _shares_of_parts(expr.of)
    assert isinstance(inner, Fused)
    return Fused(tuple(replace(expr, of=part) for part in inner.parts))


def _like(expr: Expr, tensor: int) -> Expr:
    """The share of a tensor that an expression is of an op."""
    return map_leaves(expr, lambda op: Same(tensor, op.iteration))


def _is_lossy(expr: Expr) -> bool:
    if isinstance(expr, Lossy):
        return True
    if isinstance(expr, Packed):
        return any(part is not None and _is_lossy(part) for part in expr.parts)
    return not isinstance(expr, Same | Glue | Fused) and _is_lossy(expr.of)  # only ops are fused or glue


def _fills(end: Expr, wanted: Expr) -> bool:
    """Whether `end` is the pack `wanted` with some empty slots filled; one empty slot is any tensor's space."""
    if wanted == Packed((None,)):
        return True
    if not isinstance(end, Packed) or not isinstance(wanted, Packed):
        return False
    return all(b is None or a == b for a, b in zip(end.parts, wanted.parts, strict=True))
