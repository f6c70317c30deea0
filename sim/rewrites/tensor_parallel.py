"""The rewrite for tensor parallelism: heads, MLPs and vocabulary divided among t devices, as in Megatron-LM.

Of t ranks each keeps 1/t of the weights of attention, MLP, embedding and head, with their gradients and states. The
first linear layer of a block is divided by columns, the second one by rows; each rank then has a term of the sum, and
an all-reduce adds them, as it does for the gradient of the block's input: four times per layer, each sends
2 (t - 1) / t of its bytes. The rest is computed by every rank. With sequence parallelism that rest is divided by
tokens: a reduce-scatter takes the place of the all-reduce, and an all-gather precedes each block; backward gathers a
block's input once more, of which only the own tokens were kept. Of a layer's activations, s tokens of b samples, width
h, a heads, a rank saves

    s b h (10 + 24 / t + 5 a s / (h t))            with sequence parallelism  s b h / t (34 + 5 a s / h)

Where layers are linear functions of the gathered input, as PyTorch's DTensor and nanotron without asynchronous
communication have them, autograd saves that input (`keep_gathered`): 4 s b h (1 - 1 / t) more, one gather per block
fewer. PaddlePaddle's layers, which are divided each by itself (`sum_each`), copy their input, and sum its gradient over
the ranks before that of another layer is added: with queries, keys and values, gate and up five sums per layer in
backward instead of two, and five copies saved of s b h elements instead of two tensors.

The ranks do the same on other parts; the new trace is that of the first and stands for all (`Origin.tensor`).

Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", MLSys 2023, sections 4.2 and 4.3.
`divide_tokens`: every rank has all weights and its part of the tokens alone; what a token asks of others is fused
attention, for which keys and values are gathered, in forward and again in backward; a reduce-scatter adds their
gradients. This is context parallelism as PyTorch does it by default (`_context_parallel`, rotation by all-gather), with
causal work dealt out evenly; keys and values of s tokens take s / c of the memory between. Per layer and pass a rank
sends (c - 1) / c of the keys and values. With `ring` they go round in blocks instead (`sim.rewrites.ring_attention`).
Where queries, keys and values are one tensor (GPT-2), all of it is gathered. What is made of positions alone, such as
rotary tables, is made for the own tokens, as of PyTorch's sharded buffers.

Both together: a rank that has 1 / c of the tokens has 1 / t of the layers' heads and columns for them, and gathers keys
and values of its own heads alone, so that what it sends per layer for attention falls by t. With sequence parallelism
the c-th part of the tokens is divided by t further.

A mixture's experts are divided like an MLP, each by its own columns and rows; router and sorting are done by every
rank for all its tokens, and the terms of the experts' results are summed at the experts, row by row. With experts
divided among replicas, too, an all-to-all joins ranks with the same part of the layers (Singh et al., "A Hybrid
Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training", ICS 2023, section 3).

Where tokens are divided, each rank routes its own: the router works on each token alone, and rows, sorted by expert,
are those of the rank's tokens, 1 / c of all. The gradients of its experts are terms of sums over these ranks.

Parts of layers may be divided by tokens where others are by heads and columns (`by_tokens`): an MLP then takes the
tokens that each rank has, with all its weights on each, attention its own tokens' queries with gathered keys and
values. Nothing is gathered or summed between; instead the gradients of these weights are, once per iteration.

Departs: the vocabulary is not padded, a part of it is rounded down to whole bytes. The loss exchanges what its rows
need once per op that needs it. Terms of a gradient that are added to one that all ranks have (of q, k and v in BERT)
are summed each by itself. With sequence parallelism, gradients of what every rank keeps are summed once, before the
update. Gradients of weights over ranks that divide tokens are summed before the update, too; where replicas are made of
the trace (`sim.rewrites.batching`), one collective among both takes the place of these sums, beside backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from sim.errors import TraceError
from sim.rewrites.async_sums import sums_beside_weight_gradients
from sim.rewrites.batching import sent
from sim.rewrites.dimensions import (
    CONTEXT,
    QUERIES,
    SEQUENCE,
    TENSOR,
    Dimensions,
    column_axis,
    dimensions,
    has_sums,
    is_divided,
    operands,
    token_axis,
)
from sim.rewrites.layer_parts import VOCABULARY, LayerPart
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.rewrites.ring_attention import RingAttention
from sim.rewrites.slots import split_updates
from sim.trace.graph import Trace
from sim.trace.op import Op, Ring
from sim.trace.origin import Along, Expr, Rowwise, Same
from sim.trace.tensor import Tensor

WHOLE = "whole"
ROW_NUMBERS = 3
"""Numbers of four bytes that a row's loss needs of all its columns: maximum, sum of exponentials, the label's entry."""


def divide_tokens(trace: Trace, ranks: int, ring: bool = False) -> Trace:
    """The first of so many symmetric ranks, each with all weights and a part of every sample's tokens.

    trace: a trace on one device, of a transformer with fused attention, its layers not divided yet.
    ranks: how many; with 1 the trace itself is returned.
    ring: whether keys and values go from rank to rank in blocks, rather than being gathered.

    Raises TraceError for attention in several kernels, which cannot be divided so.
    """
    return trace if ranks == 1 else _Division(trace, ranks, CONTEXT, ring).build()


def divide_layers(
    trace: Trace,
    ranks: int,
    sequence_parallel: bool = False,
    async_sums: bool = False,
    by_tokens: tuple[LayerPart, ...] = (),
    keep_gathered: bool = False,
    sum_each: bool = False,
) -> Trace:
    """The first of so many symmetric ranks, each with a part of every layer.

    trace: a trace on one device, of a transformer, or a rank's of `divide_tokens`.
    ranks: how many; with 1 the trace itself is returned.
    sequence_parallel: whether what is not divided by heads or columns is divided by tokens.
    async_sums: whether backward gathers and sums beside products (`sim.rewrites.async_sums`).
    by_tokens: with sequence_parallel, parts of layers that are divided by tokens, too, with all weights on each rank.
    keep_gathered: with sequence_parallel, whether what forward gathers stays until backward has read it, too.
    sum_each: without sequence_parallel, whether each layer that is divided by columns copies its input, and sums the
        gradient of that by itself, as PaddlePaddle's `ColumnParallelLinear`.

    Raises TraceError for attention in several kernels, which cannot be divided by tokens.
    """
    if ranks == 1:
        return trace
    apart = split_updates(trace, lambda slot: int(is_divided(slot.parameter, by_tokens)))
    tokens = SEQUENCE if sequence_parallel else ""
    divided = _Division(apart, ranks, tokens, False, by_tokens, keep_gathered, sum_each).build()
    return sums_beside_weight_gradients(divided) if async_sums else divided


class _Division:
    """The trace as it is rewritten.

    tokens: the dimension along which what is not divided otherwise is divided by tokens, "" for none; `context` where
        nothing is divided by heads or columns.
    forms: per tensor of the old trace, the new ones that hold it: whole, or this rank's share along a dimension.
    term: of a tensor of which this rank has a term of a sum only, the dimension summed over and the new tensor.
    gathered: what has been gathered for ops of a phase and layer, or, where it is kept, of a layer.
    kept: of the inputs that forward gathers or copies, and backward reads, too, this rank's share, or the original.
    read: with `sum_each` and `keep_gathered`, per tensor what each op of forward has read for it, by the op's name.
    read_in_backward: the new tensors that backward reads.
    looks_up_own: whether embeddings are whole, so that each rank looks up those of its tokens.
    """

    def __init__(
        self,
        trace: Trace,
        ranks: int,
        tokens: str,
        ring: bool = False,
        by_tokens: tuple[LayerPart, ...] = (),
        keep_gathered: bool = False,
        sum_each: bool = False,
    ) -> None:
        self.trace, self.ranks, self.tokens, self.context = trace, ranks, tokens, tokens == CONTEXT
        self.keep_gathered, self.kept = keep_gathered, dict[int, int]()
        self.sum_each, self.read = sum_each, dict[int, dict[str, int]]()
        self.read_in_backward = set[int]()
        self.axis = CONTEXT if self.context else TENSOR
        self.mark = f".{CONTEXT}" if self.context else ""  # in names, since both divisions may exchange a tensor
        self.dims: Dimensions = dimensions(trace, by_tokens)
        self.ops, self.tensors = self.dims.ops, list(trace.tensors)
        about = {"tensor_ranks": ranks, "sequence_parallel": bool(tokens)}
        self.new = Rewriter(trace, {"context_ranks": ranks} if self.context else about)
        self.forms: list[dict[str, int]] = [{} for _ in self.tensors]
        self.term: dict[int, tuple[str, int]] = {}
        self.gathered: dict[tuple[int, str, int], int] = {}
        self.blocks = RingAttention(self.new, self.dims, ranks, self._by_tokens, self._of_blocks, self._fields)
        self.is_ring = ring
        self.looks_up_own = any(part.part == VOCABULARY for part in by_tokens)

    @property
    def _of_all(self) -> dict[str, Any]:
        """What differs in a tensor of all tokens: where ranks have their own, it has none that could be divided."""
        return {"axes": None} if self.context else {}

    def build(self) -> Trace:
        """The new trace."""
        trace = self.trace
        for first in self.tensors:
            if trace.producer[first.id] < 0:
                divided = first.id in self.dims.has[TENSOR] and not self.context
                self._add_tensor(first.id, TENSOR if divided else WHOLE)
        for op in self.ops:
            self._add(op)
        self._save_instead()
        last = self.ops[-1]
        ids = {}
        for t in (*trace.outputs, *(t for pair in trace.carry for t in pair)):
            ids[t] = self._held(t) if t not in self.term else self._whole(t, last)
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        tensor, context = (1, self.ranks) if self.context else (self.ranks, 1)
        return self.new.build(outputs=[ids[t] for t in trace.outputs], carry=carry, tensor=tensor, context=context)

    # ---- ops ---------------------------------------------------------------------------------

    def _add(self, op: Op) -> None:
        dimension, of_terms = self._dimension(op)
        if self.is_ring and dimension == CONTEXT and self.blocks.applies(op) and self._has_shares(op):
            self.blocks.add(op)
            return
        if op.ring is not None:
            self._exchange(op, op.ring)
            return
        used = operands(op)
        self._sum_gradients(op, used)
        if of_terms:
            reads = [self.term[t][1] if t in used else self._held(t, op) for t in op.reads]
        else:
            reads = [self._read(t, op, dimension) if t in used else self._held(t, op) for t in op.reads]
        if op.phase == "backward":
            self.read_in_backward.update(reads)
        elif op.phase == "forward" and (self.sum_each or self.keep_gathered):
            for t, new in zip(op.reads, reads, strict=True):
                self.read.setdefault(t, {})[op.name] = new
        if dimension == TENSOR and (rows := self.dims.rowwise(op.id)) >= 0:
            reads.append(self._rows(rows, op))
        if not dimension:
            self.new.op(op, reads=reads, writes=[self._add_tensor(t, WHOLE) for t in op.writes])
            return
        writes = [self._add_result(t, op, dimension) for t in op.writes]
        n = self.ranks
        self.new.op(
            op,
            self._share(Same(op.id), dimension),
            reads=reads,
            writes=writes,
            flops=slice_of(op.flops, 0, 1, n),
            bytes=None if op.bytes is None else self._touched(op, reads, writes),
            workspace=-(-op.workspace // n),
            duration=None if op.duration is None else -(-op.duration // n),
            alternatives=tuple(replace(other, workspace=-(-other.workspace // n)) for other in op.alternatives),
        )

    def _exchange(self, op: Op, ring: Ring) -> None:
        """A collective among other ranks: of what it reads each result has the form: a share, a term, or the whole."""
        reads, writes = [], []
        for source, t in zip(op.reads, op.writes, strict=True):
            if ring.passes == 2 and source in self.term:  # a sum of terms is a term
                dimension, term = self.term[source]
                reads.append(term)
                stands_for = self._share(Same(t), dimension)
                writes.append(self.new.tensor(self.tensors[t], stands_for, replaces=term))
                self.term[t] = dimension, writes[-1]
                continue
            form = TENSOR if TENSOR in self.forms[source] else WHOLE
            reads.append(self.forms[source][form] if form == TENSOR else self._whole(source, op))
            writes.append(self._add_tensor(t, form))
        size = max(sum(map(self.new.builder.bytes_of, ids)) for ids in (reads, writes))
        self.new.op(op, reads=reads, writes=writes, bytes=sent(size, ring))

    def _dimension(self, op: Op) -> tuple[str, bool]:
        """Along which dimension the op is divided, "" for none, and whether it takes terms of sums over it."""
        dims, used = self.dims, operands(op)
        if op.kind == "optimizer":
            return (TENSOR if not self.context and all(t in dims.has[TENSOR] for t in op.writes) else ""), False
        if not self.context and dims.divides(op.id, TENSOR) and any(t in dims.has[TENSOR] for t in (*used, *op.writes)):
            return TENSOR, False
        terms = {self.term[t][0] if t in self.term else "" for t in used}
        adds = op.kind != "copy" and self.sum_each and op.phase == "backward"
        if len(terms) == 1 and "" not in terms and not adds and dims.takes_terms(op.id) and self._is_summed_later(op):
            return terms.pop(), True
        some = (*used, *op.writes) if self.context else used  # a rank makes its tokens of what it has whole, too
        by_tokens = any(t in dims.has[CONTEXT] if self.context else self._has_own_tokens(t) for t in some)
        by_tokens = by_tokens or (self.looks_up_own and op.kind == "embedding")
        if self.tokens and by_tokens and dims.divides(op.id, self.tokens):
            return self.tokens, False
        if self.context and self._mixes_tokens(op):
            raise TraceError(f"context parallelism: op {op.name!r} works on all tokens at once; use fused attention")
        return "", False

    def _mixes_tokens(self, op: Op) -> bool:
        """Whether it computes something for each token with each other one, outside of fused attention."""
        tokens = self.dims.has[CONTEXT]
        of_all = op.kind == "softmax" or (op.kind == "matmul" and all(t in tokens for t in op.reads[:2]))
        return of_all and any(t in tokens for t in op.reads) and any(t in tokens for t in op.writes)

    def _is_summed_later(self, op: Op) -> bool:
        """Whether it is as well to sum over the ranks after the op: it adds, or casts what is then added or kept."""
        if op.kind != "copy" or all(self.dims.family[t] for t in op.writes):
            return True
        readers = {r for t in op.writes for r in self.trace.readers(t)}
        return all(self.ops[r].kind != "copy" and self.dims.takes_terms(r) for r in readers)

    def _has_own_tokens(self, t: int) -> bool:
        summed = t in self.term and self.term[t][0] in (TENSOR, QUERIES)
        return t in self.dims.has[SEQUENCE] and (SEQUENCE in self.forms[t] or summed)

    def _touched(self, op: Op, reads: Sequence[int], writes: Sequence[int]) -> int:
        """Bytes touched by a share of an op that states them: in proportion to its operands."""
        size = self.trace.tensor_columns.bytes
        before = sum(int(size[t]) for t in (*op.reads, *op.writes))
        now = sum(self.new.builder.bytes_of(t) for t in (*reads, *writes))
        assert op.bytes is not None
        return min(op.bytes, max(-(-op.bytes // self.ranks), op.bytes * now // max(before, 1)))

    def _share(self, expr: Expr, dimension: str) -> Along:
        return Along(expr, dimension, 0, 1, self.ranks)

    def _save_instead(self) -> None:
        """Of what is kept whole, or copied, backward needs the share, or the original, only where it reads that."""
        for share in set(self.kept.values()) - self.read_in_backward:
            self.new.builder.set_saved(share, "")

    # ---- results -----------------------------------------------------------------------------

    def _add_result(self, t: int, op: Op, dimension: str) -> int:
        """A result of an op that is divided along a dimension: a share of it, a term, or the whole."""
        if dimension and dimension == self.tokens and op.kind == "attention" and t in self.dims.terms:
            dimension = QUERIES
        elif t in self.dims.has[dimension]:
            return self._add_tensor(t, dimension)
        if dimension == QUERIES or self.dims.sums(op.id) or self.dims.takes_terms(op.id):
            tensor = self.tensors[t]
            over = self._storage(t, WHOLE if has_sums(op) and tensor.replaces not in self.term else "term")
            new = self.new.tensor(tensor, self._share(Same(t), dimension), replaces=over, **self._of_all)
            self.term[t] = (dimension, new)
            return new
        return self._add_tensor(t, WHOLE)

    def _add_tensor(self, t: int, form: str, **changes: Any) -> int:
        """A tensor in a form. Returns the new id."""
        tensor = self.tensors[t]
        fields: dict[str, Any] = {"replaces": self._storage(t, form), **changes}
        if form == WHOLE:
            new = self.new.tensor(tensor, **self._of_all, **fields)
        else:
            if self.dims.divides_elements(form, t):
                fields |= {"bytes": slice_of(tensor.bytes, 0, 1, self.ranks), "shape": self._shape(tensor, form)}
            new = self.new.tensor(tensor, self._share(Same(t), form), **fields)
        self.forms[t][form] = new
        return new

    def _storage(self, t: int, form: str) -> int | None:
        """The new tensor whose storage a result takes over."""
        old = self.tensors[t].replaces
        if old is None:
            return None
        return self.term[old][1] if form == "term" and old in self.term else self.forms[old].get(form)

    def _shape(self, t: Tensor, form: str) -> tuple[int, ...] | None:
        """The shape of a share of an activation where it is known."""
        if t.shape is None or (self.dims.family[t.id] and len(t.shape) < 3):
            return None
        if self.dims.family[t.id]:
            at = column_axis(self.dims.family[t.id])
            return (*t.shape[:at], t.shape[at] // self.ranks, *t.shape[at + 1 :])
        if form == TENSOR:
            at = 1 if len(t.shape) == 4 else len(t.shape) - 1
        else:
            at = 0 if t.id in self.dims.routed.rows else token_axis(self.trace, t.id)
        at %= len(t.shape)  # of attention's statistics, the last
        size, rest = divmod(t.shape[at], self.ranks)
        return None if rest else (*t.shape[:at], size, *t.shape[at + 1 :])

    # ---- operands ----------------------------------------------------------------------------

    def _read(self, t: int, op: Op, dimension: str) -> int:
        """The tensor that an op, divided along a dimension or not at all, reads for `t`."""
        asks_all = dimension == self.tokens and op.kind == "attention" and t in self.dims.keys
        if dimension and t in self.dims.has[dimension] and not asks_all:
            if dimension in self.forms[t]:
                return self.forms[t][dimension]
            if dimension == self.tokens and t in self.term and self.term[t][0] in (TENSOR, QUERIES):
                return self._reduce_scatter(t, op)
        whole = self._whole(t, op)
        return self._copy(t, whole, op) if self.sum_each and dimension == TENSOR and op.kind == "matmul" else whole

    def _copy(self, t: int, whole: int, op: Op) -> int:
        """The copy of its input that a layer divided by columns makes in forward and reads in backward."""
        if op.phase == "backward":
            return self._as_in_forward(t, op, whole)
        is_input = t == op.reads[0] and self.tensors[t].role == "activation"
        if op.phase != "forward" or t in self.dims.has[TENSOR] or not is_input:
            return whole
        tensor, name = self.tensors[t], f"{self.tensors[t].name}.for.{op.name}"
        copy = self.new.tensor(tensor, name=name, replaces=None)
        self.new.glue(f"{name}.copy", "copy", [whole], [copy], **self._fields(t, op, op.layer))
        if tensor.saved_for:
            self.kept[copy] = whole
        return copy

    def _as_in_forward(self, t: int, op: Op, otherwise: int) -> int:
        """What the op whose backward this one belongs to has read for a tensor, where it is kept; else `otherwise`."""
        read = self.read.get(t, {})
        names = [name for name in read if op.name.startswith(f"{name}.bwd")]
        return read[max(names, key=len)] if names and op.phase == "backward" else otherwise

    def _by_tokens(self, t: int, op: Op) -> int:
        """This rank's tokens of what an op of attention reads, or the whole of what has none."""
        return self.forms[t][CONTEXT] if t in self.dims.keys else self._read(t, op, CONTEXT)

    def _has_shares(self, op: Op) -> bool:
        """Whether the rank has its tokens of all keys that an op reads."""
        return all(CONTEXT in self.forms[t] for t in op.reads if t in self.dims.keys)

    def _of_blocks(self, t: int, **changes: Any) -> int:
        """A result of attention that has been added up over the blocks."""
        return self._add_tensor(t, CONTEXT if t in self.dims.has[CONTEXT] else WHOLE, **changes)

    def _held(self, t: int, op: Op | None = None) -> int:
        """A tensor in the form that there is, for an op that only holds it: what was kept, or copied, for that."""
        own = next(iter(self.forms[t].values())) if self.forms[t] else self.term[t][1]
        return own if op is None else self._as_in_forward(t, op, own)

    def _whole(self, t: int, op: Op) -> int:
        """All of a tensor: as it is, summed or gathered."""
        if WHOLE in self.forms[t]:
            return self.forms[t][WHOLE]
        if t in self.term:
            return self._all_reduce([t], op)[0]
        key = (t, "" if self.keep_gathered else op.phase, op.layer)
        if key not in self.gathered:
            (form,) = self.forms[t]
            tensor, name = self.tensors[t], f"{self.tensors[t].name}{self.mark}.for.{op.name}"
            role = tensor.role if self.keep_gathered else "temporary"
            fields = {"role": role, "replaces": None, "saved_for": "", **self._of_all}
            whole = self.new.tensor(tensor, name=name, **fields)
            self.gathered[key] = whole
            self._collective(f"{name}.all_gather", [self.forms[t][form]], [whole], tensor.bytes, 1, t, op, op.layer)
        elif self.keep_gathered and self.tensors[t].saved_for:
            self.new.builder.set_saved(self.gathered[key], self.tensors[t].saved_for)
            self.kept[self.gathered[key]] = self._held(t)
        return self.gathered[key]

    def _sum_gradients(self, op: Op, used: Sequence[int]) -> None:
        """Sum the gradients of a layer that an update reads by one collective."""
        if op.phase != "update":
            return
        by_layer: dict[int, list[int]] = {}
        for t in dict.fromkeys(used):
            if t in self.term and WHOLE not in self.forms[t]:
                layer = self.tensors[t].layer
                by_layer.setdefault(layer if layer >= 0 else -1 - t, []).append(t)
        for tensors in by_layer.values():
            self._all_reduce(tensors, op)

    # ---- collectives -------------------------------------------------------------------------

    def _all_reduce(self, tensors: Sequence[int], op: Op) -> list[int]:
        """The sums of terms, in their place."""
        terms = [self.term[t][1] for t in tensors]
        wholes = []
        for t, term in zip(tensors, terms, strict=True):
            name = f"{self.tensors[t].name}{self.mark}.summed"
            wholes.append(self.new.tensor(self.tensors[t], name=name, replaces=term, **self._of_all))
            self.forms[t][WHOLE] = wholes[-1]
            del self.term[t]
        size, first = sum(self.tensors[t].bytes for t in tensors), tensors[0]
        name = f"{self.tensors[first].name}.{self.axis}.all_reduce"
        self._collective(name, terms, wholes, size, 2, first, op)
        return wholes

    def _reduce_scatter(self, t: int, op: Op) -> int:
        """This rank's tokens of the sum of terms."""
        term = self.term.pop(t)[1]
        own = self._add_tensor(t, self.tokens, name=f"{self.tensors[t].name}{self.mark}.summed", replaces=None)
        name = f"{self.tensors[t].name}{self.mark}.reduce_scatter"
        self._collective(name, [term], [own], self.tensors[t].bytes, 1, t, op)
        return own

    def _rows(self, t: int, op: Op) -> int:
        """What the rows of a divided tensor need to know of all its columns."""
        tensor = self.tensors[t]
        assert tensor.shape is not None
        size = prod(tensor.shape[:-1]) * ROW_NUMBERS * 4
        changes: dict[str, Any] = {
            "bytes": size,
            "shape": None,
            "axes": None,
            "dtype": "fp32",
            "role": "temporary",
            "zeros": None,
            "saved_for": "",
        }
        name, part = f"{op.name}.rows", self._share(Rowwise(Same(t)), TENSOR)
        own = self.new.tensor(tensor, part, name=f"{name}.own", replaces=None, **changes)
        whole = self.new.tensor(tensor, Rowwise(Same(t)), name=name, replaces=own, **changes)
        self.new.glue(f"{name}.find", "other", [self.forms[t][TENSOR]], [own], **self._fields(t, op, op.layer))
        self._collective(f"{name}.all_reduce", [own], [whole], size, 2, t, op, op.layer)
        return whole

    def _collective(
        self,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        size: int,
        passes: int,
        t: int,
        op: Op,
        layer: int | None = None,
    ) -> None:
        """A collective on a tensor for an op, in a layer, by default that of the tensor."""
        ring = Ring(self.axis, self.ranks, passes)
        fields = self._fields(t, op, self.tensors[t].layer if layer is None else layer)
        self.new.glue(name, "collective", reads, writes, bytes=sent(size, ring), ring=ring, group=name, **fields)

    def _fields(self, t: int, op: Op, layer: int) -> dict[str, Any]:
        """Fields of an op that works on a tensor for another op."""
        producer = int(self.trace.producer[t])
        splits = self.ops[producer].splits if producer >= 0 and op.phase != "update" else ()
        batch = tuple(way for way in splits if way in ("batch", "batch_sum"))
        dtype = self.tensors[t].dtype
        return {"phase": op.phase, "layer": layer, "device": op.device, "dtype": dtype, "splits": batch}


__all__ = ["ROW_NUMBERS", "divide_layers", "divide_tokens"]
