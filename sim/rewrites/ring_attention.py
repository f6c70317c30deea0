"""Ring attention: keys and values go from rank to rank in blocks, each block's product beside the next one's transfer.

Of c ranks that divide the tokens, rank r asks with its own queries, in turn, the keys and values of the ranks r, r + 1,
…, r + c - 1 (modulo c). While it multiplies with one block it receives the next one from its neighbour and sends on the
one at hand, so that it holds two blocks besides its own, and never the keys and values of all tokens. The results of
the blocks, each with the scale of its rows (the logarithm of the sum of exponentials), are added up by an op per block.
In backward the blocks go round once more, and so do the sums of their gradients: each rank adds its term to the sum of
the block at hand and sends it on, the last one to where the block is from. With m bytes of a block's keys and values a
rank sends per layer

    forward (c - 1) m            backward (c - 1) m + c m

and with p ns for the product of a block, t ns for its transfer, forward takes p + (c - 1) max(p, t), of which
(c - 1) max(0, t - p) is exposed; backward is hidden but for the last hop home where a product takes longer than two
transfers. Causal work is dealt out evenly: a rank has two slices of the tokens, from both ends, so that with every
block as much is left of the product.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR 2024 (2023),
section 3; the two slices are those of Megatron-LM's context parallelism (`cp_comm_type` `p2p`) and of zigzag-style
`ring-flash-attention`, whose backward this is (block, then its gradients, c hops).

Departs: sums of results and of gradients have the type of what they sum, where some codes keep them in fp32. Under a
sliding window all blocks take part, each with an equal share of the work. The random state of dropout is that of the
first block. Where queries, keys and values are one tensor (GPT-2) all of it goes round.

In terms of what is computed (`sim.trace.origin`): the share of attention `Along` `context` r, and of that the share
`Along` `blocks` d, is that of the queries of share r with the keys of share (r + d) modulo c. A result of it is a term
of a sum over d, as is a gradient of the keys of a share: of those the d-th term comes from the queries d shares before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.rewrites.dimensions import BLOCKS, CONTEXT, Dimensions, token_axis
from sim.rewrites.rewriter import Rewriter, slice_of
from sim.trace.op import Op, Ring
from sim.trace.origin import Along, Same

NEIGHBOUR = "neighbour"


class RingAttention:
    """Writes a rank's attention block by block.

    new: what is written. dims: of the trace. ranks: how many divide the tokens.
    held: the rank's own tensor for an operand of an op: its tokens', or the whole of what has none.
    result: adds a result of an op, this rank's tokens of a tensor, given its id and what to change. Returns the new id.
    fields: of an op that works on a tensor for another one, given both and a layer.
    """

    def __init__(
        self,
        new: Rewriter,
        dims: Dimensions,
        ranks: int,
        held: Callable[[int, Op], int],
        result: Callable[..., int],
        fields: Callable[[int, Op, int], dict[str, Any]],
    ) -> None:
        self.new, self.dims, self.ranks = new, dims, ranks
        self.held, self.result, self.fields = held, result, fields

    def applies(self, op: Op) -> bool:
        """Whether an op is attention that reads keys and, in backward, writes their gradients by themselves."""
        asks = op.kind == "attention" and any(t in self.dims.keys for t in op.reads)
        return asks and (op.phase == "forward" or any(t in self.dims.terms for t in op.writes))

    def add(self, op: Op) -> None:
        """All blocks of an op."""
        keys = list(dict.fromkeys(t for t in op.reads if t in self.dims.keys))
        gradients = [t for t in op.writes if t in self.dims.terms]
        sums = [t for t in op.writes if t in self.dims.has[CONTEXT] and t not in gradients]
        block = {t: self.held(t, op) for t in keys}
        so_far: dict[int, int] = {}
        for d in range(self.ranks):
            coming = self._next_block(op, block, d) if d + 1 < self.ranks else {}
            terms = self._multiply(op, d, block, gradients)
            if not d:
                so_far = {t: terms[t] for t in (*sums, *gradients)}
            else:
                so_far |= self._add_up(op, d, sums, so_far, terms)
                so_far |= self._add_up(op, d, gradients, so_far, terms)
            if gradients:
                so_far |= self._send_on(op, d, gradients, so_far)
            block = coming

    def _own(self, t: int, share: int) -> Along:
        return Along(Same(t), CONTEXT, share, share + 1, self.ranks)

    def _terms(self, t: int, share: int, first: int, stop: int) -> Along:
        """Terms of a tensor's share: those of so many blocks."""
        return Along(self._own(t, share), BLOCKS, first, stop, self.ranks)

    def _temporary(self, t: int, of: Along, name: str, **changes: Any) -> int:
        """A tensor of the size and shape of a rank's share, which no op of the old trace knows."""
        tensor = self.dims.trace.tensors[t]
        size = slice_of(tensor.bytes, 0, 1, self.ranks)
        fields = {"role": "temporary", "saved_for": "", "replaces": None, "shape": self._shape(t), **changes}
        return self.new.tensor(tensor, of, name=name, bytes=size, **fields)

    def _shape(self, t: int) -> tuple[int, ...] | None:
        """The shape of a rank's share: of queries, keys, results (batch, heads, tokens, width), or without the last."""
        shape = self.dims.trace.tensors[t].shape
        if shape is None or len(shape) not in (3, 4):
            return None
        at = 2 if len(shape) == 4 or self._is_scale(t) else 1
        return (*shape[:at], shape[at] // self.ranks, *shape[at + 1 :])

    def _is_scale(self, t: int) -> bool:
        shape = self.dims.trace.tensors[t].shape or ()
        return len(shape) == 3 and token_axis(self.dims.trace, t) != 1

    def _transfer(self, op: Op, d: int, what: str, reads: Sequence[int], writes: Sequence[int], t: int) -> None:
        """To one neighbour, and the same from the other one."""
        size = sum(map(self.new.builder.bytes_of, writes))
        name, ring = f"{op.name}.{what}{d}", Ring(NEIGHBOUR, self.ranks, 1)
        fields = self.fields(t, op, op.layer)
        self.new.glue(name, "collective", reads, writes, bytes=size, ring=ring, group=name, **fields)

    def _next_block(self, op: Op, block: Mapping[int, int], d: int) -> dict[int, int]:
        names = self.dims.trace.tensor_columns.name
        coming = {t: self._temporary(t, self._own(t, d + 1), f"{names[t]}.block{d + 1}.for.{op.name}") for t in block}
        self._transfer(op, d + 1, "block", list(block.values()), list(coming.values()), next(iter(block)))
        return coming

    def _multiply(self, op: Op, d: int, block: Mapping[int, int], gradients: Sequence[int]) -> dict[int, int]:
        """The product with a block: for each result its term, or what the first block alone says."""
        c, names = self.ranks, self.dims.trace.tensor_columns.name
        reads = [block[t] if t in block else self.held(t, op) for t in op.reads]
        if d:
            reads[:0] = [self.held(t, op) for t in block if t in self.dims.with_queries]
        terms: dict[int, int] = {}
        for t in op.writes:
            if t in self.dims.has[CONTEXT]:
                of = self._terms(t, d if t in gradients else 0, d, d + 1)
                terms[t] = self._temporary(t, of, f"{names[t]}.of_block{d}")
            elif not d:
                terms[t] = self.result(t)
        self.new.op(
            op,
            Along(Along(Same(op.id), CONTEXT, 0, 1, c), BLOCKS, d, d + 1, c),
            name=f"{op.name}.with_block{d}",
            reads=reads,
            writes=list(terms.values()),
            flops=slice_of(op.flops, d, d + 1, c * c),
            bytes=None if op.bytes is None else -(-op.bytes // c),
            workspace=-(-op.workspace // c),
            duration=None if op.duration is None else -(-op.duration // (c * c)),
            alternatives=tuple(replace(other, workspace=-(-other.workspace // c)) for other in op.alternatives),
        )
        return terms

    def _add_up(
        self, op: Op, d: int, sums: Sequence[int], so_far: Mapping[int, int], terms: Mapping[int, int]
    ) -> dict[int, int]:
        """Add the terms of a block. Gradients grow in place; results are rescaled by an op that reads both."""
        if not sums:
            return {}
        in_place, names = op.phase == "backward", self.dims.trace.tensor_columns.name
        grown: dict[int, int] = {}
        for t in sums:
            over = {"replaces": so_far[t]} if in_place else {}
            of_keys = t in self.dims.terms
            if d + 1 == self.ranks and not of_keys:
                grown[t] = self.result(t, **over)
            else:
                of = self._own(t, d) if d + 1 == self.ranks else self._terms(t, d if of_keys else 0, 0, d + 1)
                grown[t] = self._temporary(t, of, f"{names[t]}.to_block{d}", **over)
        reads = [each for t in sums for each in (so_far[t], terms[t])]
        name, fields = f"{names[sums[0]]}.add{d}", self.fields(sums[0], op, op.layer)
        self.new.glue(name, "elementwise", reads, list(grown.values()), **fields)
        return grown

    def _send_on(self, op: Op, d: int, gradients: Sequence[int], so_far: Mapping[int, int]) -> dict[int, int]:
        """Send the sums of the block at hand after it, the last ones to where the block is from."""
        names, home = self.dims.trace.tensor_columns.name, d + 1 == self.ranks
        received = {
            t: self.result(t)
            if home
            else self._temporary(t, self._terms(t, d + 1, 0, d + 1), f"{names[t]}.received{d + 1}")
            for t in gradients
        }
        self._transfer(op, d + 1, "gradients", [so_far[t] for t in gradients], list(received.values()), gradients[0])
        return received


__all__ = ["NEIGHBOUR", "RingAttention"]
