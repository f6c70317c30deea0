"""FLOPs and bytes of every kind of op, one rule per kind.

Matrix products and attention count 2 FLOPs per multiply-add, like `torch.utils.flop_counter`, so that sums can be
compared with it; as there, a causal mask does not halve them. What a fused kernel executes under such a mask is
`pairs`. The elementwise figures count arithmetic instructions of
a plain implementation. They matter little, because such ops are memory-bound. Bytes are the sum of an op's operands
unless a rule below says otherwise. What an optimizer's kernels cost is stated with them, in `workloads/optimizers.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from workloads.sizes import of_sizes

ELEMENT_FLOPS = {
    # kernel: (FLOPs per element, what is counted)
    "copy": (0, "a cast or a copy computes nothing"),
    "add": (1, "one addition"),
    "mul": (1, "one multiplication"),
    "div": (1, "one division"),
    "neg": (1, "one sign change"),
    "pow": (2, "two multiplications for a cube"),
    "mean": (1, "one addition"),
    "sum": (1, "one addition"),
    "tanh": (6, "exponential, two additions, one division, sign"),
    "tanh_backward": (3, "g (1 - y^2)"),
    "gelu": (8, "error function or tanh of a polynomial, and its product"),
    "gelu_backward": (14, "the same, its derivative, and the product"),
    "relu": (1, "one comparison"),
    "silu": (5, "sigmoid and product"),
    "silu_backward": (9, "g s (1 + x (1 - s)), with the sigmoid recomputed"),
    "dropout": (3, "random number, comparison, product"),
    "dropout_backward": (2, "two products"),
    "softmax": (5, "maximum, subtraction, exponential, sum, division"),
    "softmax_backward": (4, "product, sum, subtraction, product"),
    "layer_norm": (8, "mean, variance, normalisation, affine map"),
    "layer_norm_backward": (14, "three reductions and the input's gradient"),
    "layer_norm_backward_input": (9, "two of the reductions and the input's gradient"),
    "log_softmax": (5, "maximum, subtraction, exponential, sum, subtraction"),
    "log_softmax_backward": (4, "exponential, product, sum, subtraction"),
    "cross_entropy": (6, "log-softmax and the choice of one element"),
    "cross_entropy_backward": (3, "softmax minus one-hot, scaled"),
}
"""Arithmetic of elementwise and row-wise kernels."""


def element_flops(kernel: str, elements: int) -> int:
    """FLOPs of an elementwise or row-wise kernel over that many elements."""
    return ELEMENT_FLOPS[kernel][0] * elements


def matmul_flops(rows: int, inner: int, columns: int) -> int:
    """FLOPs of (rows, inner) times (inner, columns): one multiply-add, 2 FLOPs, for each triple."""
    return 2 * rows * inner * columns


TILES = {"flash": 128, "efficient": 64}
"""Queries of a block of a fused attention kernel, which computes or skips scores a block at a time.

flash: FlashAttention-2's forward kernels for heads of 32 to 256, flash_fwd_launch_template.h: 128 in most of them.
efficient: the memory-efficient kernel of xFormers and PyTorch on a GPU with tensor cores, kQueriesPerBlock.
"""


def tile_of(kernel: str) -> int:
    """Queries of a block of an attention kernel, by the name of its op."""
    return TILES["efficient" if "efficient" in kernel else "flash"]


@of_sizes
@cache
def pairs(queries: int, keys: int, *, causal: bool = False, window: int = 0, tile: int = TILES["flash"]) -> int:
    """Pairs of a query and a key whose scores a fused kernel computes.

    A block of queries goes from the first key that one of them sees to the last; its diagonal is computed in full.

    causal: query i sees the keys 0 … i (PyTorch's `is_causal`, whose mask begins at the upper left).
    window: and of those the last so many, 0 for all.
    tile: queries, and keys, of a block.

    >>> pairs(256, 256), pairs(256, 256, causal=True), pairs(4, 256, causal=True, tile=1)
    (65536, 49152, 10)
    """
    if not causal:
        return queries * keys
    full, rest = divmod(queries, tile)  # blocks, and the queries of one more
    behind = -(-(window - 1) // tile) if window else full  # blocks of keys that one sees before its own
    within = min(full, keys // tile)  # those with a block of keys of their own
    near = min(within, behind + 1)
    total = tile * tile * (near * (near + 1) // 2 + (within - near) * (behind + 1))
    total += tile * keys * max(0, min(full, behind + 1) - within)
    first, stop = max(within, behind + 1), min(full, behind - (-keys // tile))
    if stop > first:  # of these each sees a block of keys less than the one before
        total += tile * (stop - first) * (2 * (keys + behind * tile) - (first + stop - 1) * tile) // 2
    return total + rest * max(0, min(queries, keys) - max(0, full - behind) * tile)


def executed(flops: int, queries: int, keys: int, **masked: Any) -> int:
    """Of the FLOPs of attention to all keys those that a fused kernel executes; `masked`: as for `pairs`."""
    whole = max(queries * keys, 1)
    return -(-flops * pairs(queries, keys, **masked) // whole)


def attention_flops(batch_heads: int, sequence: int, head: int, keys: int | None = None) -> int:
    """FLOPs of attention: the two products QK^T and PV (torch.utils.flop_counter: sdpa_flop_count).

    keys: how many each query is compared with, by default as many as there are queries.
    """
    return 2 * matmul_flops(batch_heads * sequence, head, sequence if keys is None else keys)


def attention_backward_flops(batch_heads: int, sequence: int, head: int) -> int:
    """FLOPs of its backward: QK^T recomputed, dP, dV, dQ, dK (FlashAttention-2, 3.1; sdpa_backward_flop_count)."""
    return 5 * matmul_flops(batch_heads * sequence, head, sequence)


def embedding_bytes(rows: int, width_bytes: int) -> int:
    """Bytes of a lookup: it reads only the rows that it needs, not the table, and writes as many."""
    return 2 * rows * width_bytes
