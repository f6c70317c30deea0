"""The arithmetic of each dispatched op: FLOPs of products, convolutions, attention and recurrent layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from workloads.costs import executed, tile_of

Formula = Callable[[Sequence[Any]], int]
"""FLOPs of an op from its arguments, 2 per multiply-add."""


def flops_of(registry: dict[Any, Any], func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of a dispatched op.

    `torch.utils.flop_counter` knows most products, convolutions and attention. The others are counted here by the same
    rule, 2 per multiply-add. All other ops count as 0 FLOPs, because they are memory-bound (so does an outer product,
    which sums nothing and is dispatched as an elementwise product). The backward of a convolution is always counted
    here: PyTorch's counter (2.13) multiplies the weight's gradient by the number of groups. An in-place product counts
    like the product. Attention over packed sequences is bounded by what their longest says.

    registry: PyTorch's formulas, by op.
    func: the dispatched op.
    args, kwargs, out: its arguments and its result.
    """
    found = _known.get(func)
    if found is None:
        found = _known[func] = _formula_of(registry, func._overloadpacket)
    packet, name, formula = found
    if name == "convolution_backward":
        return _convolution_backward(*args, **kwargs)
    if name in PACKED:
        return _packed(func, args, kwargs, PACKED[name])
    if packet in registry:
        return int(registry[packet](*args, **kwargs, out_val=out))
    if name == "_trilinear":
        return _trilinear(*args, **kwargs)
    if formula is None:
        return 0
    given = [*args, *kwargs.values()]
    if formula is _convolution:
        return int(2 * out.numel() * prod(args[1].shape[1:]))
    return int(formula([x for x in given if hasattr(x, "shape")]))


def _formula_of(registry: dict[Any, Any], packet: Any) -> tuple[Any, str, Formula | None]:
    """An op as the registry knows it, its name, and the formula of those here."""
    name = str(packet).rpartition(".")[2]
    if name.endswith("_") and packet not in registry:
        name = name[:-1]
        packet = next((known for known in registry if str(known) == str(packet)[:-1]), packet)
    return packet, name, next((formula for pattern, formula in FORMULAS if re.fullmatch(pattern, name)), None)


def executed_of(func: Any, args: Any, kwargs: Any, flops: int) -> int:
    """Of the FLOPs of a dispatched op those that its kernel executes: a fused one skips scores that are masked.

    func, args, kwargs: as for `flops_of`. flops: what that counts.
    """
    if not flops:
        return flops
    name = str(func._overloadpacket).rpartition(".")[2]
    if not name.startswith("_scaled_dot_product_"):
        return flops
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("is_causal"):
        return flops
    return executed(flops, given["query"].shape[-2], given["key"].shape[-2], causal=True, tile=tile_of(name))


def _grouped(tensors: Sequence[Any]) -> int:
    """Each row times the matrix of its group: the rows, or the terms of a sum, are distributed over the groups."""
    a, b = tensors[0].shape, tensors[1].shape
    groups = a[0] if len(a) == len(b) == 3 else 1
    return int(2 * groups * a[-2] * a[-1] * b[-1])


def _product(first: int) -> Formula:
    """The product of two matrices, or of a batch of them, that stand at `first`."""

    def flops(tensors: Sequence[Any]) -> int:
        a, b = tensors[first].shape, tensors[first + 1].shape
        return int(2 * prod(a) * (b[-1] if len(b) > 1 else 1))

    return flops


def _linear(tensors: Sequence[Any]) -> int:
    x, weight = tensors[0].shape, tensors[1].shape
    return int(2 * prod(x) * weight[0])


def _attention(tensors: Sequence[Any]) -> int:
    """Queries times keys, and weights times values."""
    q, k, v = (x.shape for x in tensors[:3])
    return int(2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1]))


def _attention_backward(tensors: Sequence[Any]) -> int:
    """The first product recomputed, and two for each product of the forward pass: gradients of weights, v, q and k."""
    q, k, v = (x.shape for x in tensors[1:4])
    return int(2 * prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1]))


def _packed(func: Any, args: Any, kwargs: Any, products: tuple[int, int]) -> int:
    """Attention over packed sequences, whose lengths are values: all as long as the longest may be.

    No division of the tokens into sequences up to that long takes more. PyTorch's counter (2.13) takes all sequences to
    be of that length, which may be more tokens than there are.

    products: how many sum over a query's width, and how many over a value's.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    q, v, longest = given["query"].shape, given["value"].shape, int(given["max_k"])  # (tokens, heads, width)
    return 2 * int(q[0] * q[1]) * longest * (products[0] * int(q[2]) + products[1] * int(v[2]))


def _recurrent(tensors: Sequence[Any]) -> int:
    """Each step multiplies its input and its state by the weights."""
    x, w_input, w_state = tensors[:3]
    return 2 * int(x.shape[0] * x.shape[1]) * int(w_input.numel() + w_state.numel())


def _trilinear(
    a: Any,
    b: Any,
    c: Any,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> int:
    """The sum of products of three, as `F.bilinear` and its backward ask for it: two of them, then that and the third.

    Each is expanded by axes of size 1. What the third does not have is summed before it is multiplied.
    """

    def expanded(tensor: Any, axes: Sequence[int]) -> list[int]:
        shape = list(tensor.shape)
        for axis in sorted(axes):
            shape.insert(axis, 1)
        return shape

    first = [max(pair) for pair in zip(expanded(a, expand1), expanded(b, expand2), strict=True)]
    left = [1 if axis in sumdim and axis in expand3 else size for axis, size in enumerate(first)]
    second = [max(pair) for pair in zip(left, expanded(c, expand3), strict=True)]
    return int(2 * prod(first) + 2 * prod(second))


def _convolution(tensors: Sequence[Any]) -> int:
    raise NotImplementedError("counted from its result")


def _convolution_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> int:
    """The forward pass's arithmetic for each requested gradient: the input's and the weight's."""
    each = 2 * (x if transposed else gradient).numel() * prod(weight.shape[1:])
    return int(each) * sum(map(bool, output_mask[:2]))


PACKED = {"_varlen_attn": (1, 1), "_varlen_attn_out": (1, 1), "_varlen_attn_backward": (3, 2)}
"""Attention over packed sequences: how many products sum over a query's width, and how many over a value's."""

FORMULAS: tuple[tuple[str, Formula], ...] = (
    (r"_(scaled_)?grouped_mm(_v2)?|grouped_mm\w*", _grouped),
    (r"mv|dot|vdot|_int_mm|_weight_int\w*pack_mm\w*|_weight_norm_mm", _product(0)),
    (r"addmv|addbmm|_addmm_activation|_sparse_addmm", _product(1)),
    (r"mkldnn_linear|_linear_pointwise|_mkl_linear", _linear),
    (r"_scaled_dot_product_(flash_attention_for_cpu|fused_attention_overrideable)", _attention),
    (r"_scaled_dot_product_(flash_attention_for_cpu|fused_attention_overrideable)_backward", _attention_backward),
    (r"mkldnn_rnn_layer", _recurrent),
    (r"mkldnn_rnn_layer_backward", lambda tensors: 2 * _recurrent(tensors)),
    (r"mkldnn_convolution|_conv_depthwise2d|slow_conv3d_forward|conv_depthwise3d", _convolution),
)
"""Ops that PyTorch's counter does not know, by name, and their FLOPs. Backward counts twice the forward, except for
attention, which recomputes its weights."""

_known: dict[Any, tuple[Any, str, Formula | None]] = {}
"""What `_formula_of` said of an op: a recurrent model asks of the same ones for every position."""
