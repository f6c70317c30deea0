"""The dimensions along which a transformer's tensors and ops can be divided among devices, besides its samples.

`tensor`: heads, the width of an MLP, or the vocabulary. Which weights have it their names tell (`COLUMNS`, `ROWS`,
`VOCABULARY`; of LoRA's adapters that matrix which meets the divided side of its layer, B or A); activations have it
from the products of such weights. `sequence`: the tokens of a sample; which tensors have it the trace says
(`Tensor.axes`), or where it says nothing of any axis, as an imported one, their sizes tell. `context` is the same,
where ranks of context parallelism divide the tokens (of the part of them that such a rank has, `sequence` is what ranks
of sequence parallelism divide further). `experts`: those of a layer, whose weights are one tensor, and the tokens' rows
sorted by expert (`sim.rewrites.experts`); these rows have `context`, too, since a rank has those of its tokens.
`queries`: what attention's gradients of keys and values are summed over; nothing has it, nor `blocks`: of a rank's
queries, the shares of the keys that they ask in turn, see `sim.rewrites.ring_attention`.

An op can be divided along a dimension where each result is either divided, too, or a sum over the shares: a product
whose two operands have the dimension contracts it. An op that only adds or copies takes terms of sums. A loss over a
divided vocabulary can be divided if each row knows what it needs of all its columns (`Rowwise`): its maximum, the sum
of its exponentials, the label's entry. Fused attention can be divided by the tokens that ask, if each rank has the keys
and values of all tokens; of their gradients it then has a term.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from sim.rewrites.experts import EXPERTS, Routed, expert_ops, routed
from sim.rewrites.layer_parts import LayerPart
from sim.rewrites.slots import owner, weights_of
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import Op
from sim.trace.tensor import TOKENS as OF_TOKENS
from sim.trace.tensor import Tensor

_MLP = ("mlp.gate", "mlp.up", "mlp.gate_up", "mlp.shared.gate", "mlp.shared.up")
COLUMNS = ("attn.qkv", "attn.q", "attn.k", "attn.v", "mlp.fc", *_MLP)
"""Linear layers whose results are divided: weights and biases."""
ROWS = ("attn.proj", "mlp.proj", "mlp.down", "mlp.shared.down")
"""Linear layers that sum over what is divided: weights only."""
VOCABULARY = ("wte.weight", "embed.weight", "head.weight", "head.bias")
"""Embedding and head."""

TENSOR, SEQUENCE, CONTEXT, QUERIES, BLOCKS = "tensor", "sequence", "context", "queries", "blocks"
DIMENSIONS = (TENSOR, SEQUENCE, CONTEXT, EXPERTS)
TOKENS = (SEQUENCE, CONTEXT)

_COLUMN = re.compile(
    rf"h\d+\.({'|'.join(map(re.escape, COLUMNS))}|mlp\.expert\d+\.(gate|up))\.(weight|bias|lora_B\.weight)"
)
_ROW = re.compile(rf"h\d+\.({'|'.join(map(re.escape, ROWS))}|mlp\.expert\d+\.down)\.(lora_A\.)?weight")
_SUM = re.compile(r".*\.grad\.(add|accumulate)(\.\d+)?")
_SCALED = re.compile(r".*\.bwd\.scale(\.\d+)?")
"""What multiplies gradients that forward has computed by that of the loss (`workloads.losses`, `chunked`)."""
_GRADIENT = re.compile(r"(.*)\.grad(\.part)?(\.\d+)?")


def is_divided(weight: str, by_tokens: Collection[LayerPart] = ()) -> bool:
    """Whether the weight of this name has the dimension `tensor`.

    by_tokens: parts of layers that ranks divide by tokens instead, with all weights on each.
    """
    known = weight in VOCABULARY or _COLUMN.fullmatch(weight) or _ROW.fullmatch(weight)
    return bool(known) and not any(part.has(weight) for part in by_tokens)


@dataclass(frozen=True)
class Dimensions:
    """Which tensors of a trace have which dimension, and which ops can be divided along it.

    has: per dimension the ids of the tensors that have it.
    family: per tensor, the weight that it belongs to: itself, its gradient, its state or a copy in another type; "".
    keys: the keys and values of fused attention, of which every token asks all others'.
    with_queries: of these tensors those in which queries lie, too.
    terms: gradients of keys and values.
    of_experts: the ops that work on the rows or the weights of each expert alone.
    routed: what routers make of tokens.
    """

    trace: Trace
    ops: tuple[Op, ...]
    has: dict[str, frozenset[int]]
    family: tuple[str, ...]
    keys: frozenset[int]
    with_queries: frozenset[int]
    terms: frozenset[int]
    of_experts: frozenset[int]
    routed: Routed

    def divides(self, op: int, dimension: str) -> bool:
        """Whether an op can be computed in shares along a dimension."""
        it = self.ops[op]
        if dimension == EXPERTS:
            return op in self.of_experts or it.kind == "optimizer"
        if dimension == CONTEXT and op in self.routed.ops:
            return all(t in self.has[CONTEXT] for t in (*it.reads, *it.writes))
        return _divides(it, operands(it), self.has[dimension], dimension)

    def divides_elements(self, dimension: str, t: int) -> bool:
        """Whether a share of a tensor along a dimension is a part of its elements."""
        return t in self.has.get(dimension, ()) and not (dimension == CONTEXT and t in self.routed.counts)

    def sums(self, op: int) -> bool:
        """Whether a result without the dimension along which the op is divided is a sum over the shares."""
        return self.ops[op].kind in ("matmul", "embedding", "reduce", "norm", "loss")

    def takes_terms(self, op: int) -> bool:
        """Whether an op is linear in all its reads, so that of terms of sums it computes a term of a sum."""
        it = self.ops[op]
        return it.kind == "copy" or (it.kind == "elementwise" and bool(_SUM.fullmatch(it.name) or _is_scaled(it)))

    def rowwise(self, op: int) -> int:
        """The divided tensor whose rows the op needs as a whole, -1 for none."""
        it, divided = self.ops[op], self.has[TENSOR]
        if it.kind != "loss":
            return -1
        saved = [t for t in it.reads if t not in divided and self._says_rows(t)]
        return next((t for t in operands(it) if t in divided), -1) if not saved else -1

    def _says_rows(self, t: int) -> bool:
        producer = int(self.trace.producer[t])
        return producer >= 0 and self.ops[producer].kind == "loss" and self.ops[producer].phase == "forward"


def operands(op: Op) -> tuple[int, ...]:
    """The reads that an op computes with; others it only holds, since autograd releases them when it ends."""
    if op.kind == "matmul" and op.phase == "backward":
        return op.reads[:2]
    if has_sums(op):
        return op.reads[:3]
    if _is_scaled(op):
        return op.reads[:1]
    if op.kind == "reduce":
        return op.reads[:1]
    return op.reads[:2] if op.kind == "loss" and op.phase == "forward" else op.reads


def has_sums(op: Op) -> bool:
    """Whether it computes gradients in forward, of a chunk of head and loss: it reads the slope, the head's weight, its
    input, and the sums so far of all gradients that it adds to."""
    return op.kind == "matmul" and op.phase == "forward" and len(op.reads) == 3 + len(op.writes) > 3


def _is_scaled(op: Op) -> bool:
    return op.kind == "elementwise" and bool(_SCALED.fullmatch(op.name))


def dimensions(trace: Trace, by_tokens: tuple[LayerPart, ...] = ()) -> Dimensions:
    """The dimensions of a trace on one device; found once per trace.

    by_tokens: parts of layers that do not have `tensor`.
    """
    return kept(trace, "dimensions", by_tokens, lambda: _find(trace, by_tokens))


def _find(trace: Trace, by_tokens: tuple[LayerPart, ...]) -> Dimensions:
    tensors, ops = list(trace.tensors), tuple(trace.ops)
    weights = weights_of(trace)
    family = tuple(owner(t.name, weights) or "" for t in tensors)
    of_weights = {t for op in ops if op.reads and all(family[r] for r in op.reads) for t in op.writes}  # dequantised
    tokens = {t.id for t in tensors if not family[t.id] and token_axis(trace, t.id) >= 0} - of_weights
    of_head = {
        t for op in ops if has_sums(op) for t in (*op.reads[3:], *op.writes)
    }  # sums: of the input, else of weights
    of_head = {t for t in of_head if len(tensors[t].shape or ()) != 3}
    tokens -= of_head
    sequence = own_tokens(trace)
    divided = {t.id for t in tensors if family[t.id] and is_divided(family[t.id], by_tokens)}
    by_name = {t.name: t.id for t in tensors}
    for op in ops:
        passes = _passes(op, divided, tensors)
        if has_sums(op) and op.reads[0] in divided:
            divided.update(of_head.intersection((*op.reads[3:], *op.writes)))
        for t in op.writes:
            if family[t]:
                continue
            gradient = _GRADIENT.fullmatch(tensors[t].name)
            of = by_name.get(gradient[1]) if gradient and op.phase == "backward" and op.kind == "copy" else None
            if (passes and _has_columns(tensors[t])) or of in divided:
                divided.add(t)
        if op.kind == "collective":  # each result is what was read in its place, in another form
            divided.update(t for source, t in zip(op.reads, op.writes, strict=False) if source in divided)
    attends = [op for op in ops if op.kind == "attention"]
    if sequence and not trace.tensor_columns.axes:
        tokens |= {t for op in attends for t in op.writes if (tensors[t].shape or ())[2:] == (sequence,)}
    keys = frozenset(t for op in attends if op.phase == "forward" for t in _keys(op, tokens))
    with_queries = keys.intersection(op.reads[0] for op in attends if op.phase == "forward" and op.reads)
    terms = frozenset(t for op in attends if op.phase == "backward" for t in op.writes[1:] if t in tokens)
    of_experts, by_expert = expert_ops(trace, ops, family)
    of_tokens, by_router = frozenset(tokens), routed(trace, ops, family, _context_ranks(trace))
    has = {TENSOR: frozenset(divided), SEQUENCE: of_tokens, EXPERTS: by_expert, QUERIES: frozenset[int]()}
    has[CONTEXT] = of_tokens | by_router.rows | by_router.counts
    return Dimensions(trace, ops, has, family, keys, with_queries, terms, of_experts, by_router)


def _keys(op: Op, tokens: set[int]) -> tuple[int, ...]:
    """Keys and values that fused attention reads: tensors of their own, or one with the queries."""
    apart = op.reads[1:3]
    return apart if len(apart) == 2 and tokens.issuperset(apart) else op.reads[:1]


def column_axis(weight: str) -> int:
    """Along which axis of each expert's matrix, (experts, results, inner), a weight of this name is divided."""
    return 2 if _ROW.fullmatch(weight) else 1


def own_tokens(trace: Trace) -> int:
    """How many tokens of a sample a rank has, of those that `context` divides; 0 where the trace states no sequence."""
    sequence = trace.meta.get("sequence")
    return sequence // _context_ranks(trace) if isinstance(sequence, int) else 0


def _context_ranks(trace: Trace) -> int:
    """Among how many ranks the tokens of a trace are divided, of which it is one."""
    ranks = trace.meta.get("context_ranks", 1)
    return ranks if isinstance(ranks, int) and ranks > 0 else 1


def token_axis(trace: Trace, t: int) -> int:
    """The axis of a tensor's shape that has the tokens, where activations have them; -1 for none.

    The trace says so, or where it says nothing of axes, sizes do: (batch, s, …), (batch, heads, s, …), (batch s, …).
    """
    columns = trace.tensor_columns
    if not columns.axes:
        return _axis_by_size(trace, columns.shape.get(t))
    names = columns.axes.get(t, ())
    return names.index(OF_TOKENS) if OF_TOKENS in names else -1


def _axis_by_size(trace: Trace, shape: tuple[int, ...] | None) -> int:
    batch, sequence = trace.meta.get("batch"), own_tokens(trace)
    if not shape or not isinstance(batch, int) or not sequence:
        return -1
    if len(shape) == 4:
        return 2 if shape[2] == sequence else -1
    if len(shape) in (2, 3) and shape[1] == sequence and shape[0] in (batch, 1):
        return 1
    return 0 if len(shape) == 2 and shape[0] == batch * sequence else -1


def _has_columns(t: Tensor) -> bool:
    """Whether a tensor can hold heads, columns or a vocabulary: no scalar, no random state.

    Of an expert's rows for a part of the tokens the axes are known where their number is not.
    """
    return len(t.axes or t.shape or ()) > 1


def _passes(op: Op, divided: set[int], tensors: list[Tensor]) -> bool:
    """Whether the results of an op have the dimension `tensor`."""
    parts = [t in divided for t in operands(op)]
    if not any(parts):
        return False
    if op.kind == "matmul":
        return not (all(_factors(parts)) and _is_linear(op, tensors))
    if op.kind == "embedding":
        return False
    if op.kind == "loss":
        columns = {(tensors[t].shape or ())[-1:] for t in operands(op) if t in divided}
        made = (tensors[t] for t in op.writes)
        return any((t.shape or ())[-1:] in columns and (t.axes or ("",))[-1] != OF_TOKENS for t in made)
    return op.kind in ("elementwise", "copy", "softmax", "attention", "reduce", "optimizer")


def _factors(parts: list[bool]) -> list[bool]:
    """What is known of each operand of an op, of the factors of a product; both may lie in one tensor."""
    return parts[:2] if len(parts) > 1 else parts * 2


def _is_linear(op: Op, tensors: list[Tensor]) -> bool:
    """Whether a product is one with a matrix, and not a batch of products, of every head."""
    return any(len(tensors[t].shape or ()) == 2 for t in (*operands(op)[:2], *op.writes))


def _divides(op: Op, used: tuple[int, ...], has: frozenset[int], dimension: str) -> bool:
    parts, results = [t in has for t in used], [t in has for t in op.writes]
    if has_sums(op):
        return parts[0]
    if op.kind == "elementwise" and not op.reads:
        return any(results)
    if op.kind != "optimizer" and not any(parts) and not any(results):
        return False
    match op.kind:
        case "optimizer":
            return True
        case "elementwise" | "copy":
            return all(results) and bool(results)
        case "norm":
            return dimension in TOKENS and any(parts[:1]) and (op.phase == "backward" or all(results))
        case "matmul":
            contracted = bool(parts) and all(_factors(parts))
            if dimension in TOKENS and contracted and any(results):
                return False  # each token with all others
            return any(parts[:2]) and (contracted or all(results))
        case "embedding":
            return any(parts) or any(results)
        case "attention":
            return any(parts)
        case "softmax":
            return dimension == TENSOR and any(parts)
        case "loss":
            return any(parts)
        case "reduce":
            return any(parts)
    return False


__all__ = [
    "BLOCKS",
    "CONTEXT",
    "DIMENSIONS",
    "EXPERTS",
    "QUERIES",
    "SEQUENCE",
    "TENSOR",
    "TOKENS",
    "Dimensions",
    "column_axis",
    "dimensions",
    "is_divided",
    "operands",
    "own_tokens",
    "token_axis",
]
