"""What the names and shapes of PyTorch's ops reveal: whether they run a kernel, their phase, their FLOPs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence

from workloads.costs import executed, tile_of
from workloads.importers.optrace import kind_of as _kind_of

_SILENT = """
    alias as_strided as_strided_ chunk contiguous detach detach_ diagonal empty empty_like empty_strided expand
    expand_as flatten lift_fresh movedim narrow new_empty new_empty_strided numpy_T permute reshape resize_
    resolve_conj resolve_neg result_type select set_ size slice split split_with_sizes squeeze squeeze_ stride
    swapaxes t t_ to transpose transpose_ unbind
    unflatten unfold unsqueeze unsqueeze_ view view_as view_as_complex view_as_real _reshape_alias _unsafe_view
"""
SILENT = frozenset((*(f"aten::{name}" for name in _SILENT.split()), "detach", "detach_"))
"""Ops that only allocate or only create a view, unless they call another op (a copy)."""
_CALLERS = "clone full full_like new_full new_ones new_zeros ones ones_like zero_ zeros zeros_like _to_copy"
CALLERS = frozenset(f"aten::{name}" for name in _CALLERS.split())
"""Ops that only allocate and have another op (a copy, a fill) write, where they call one."""
READ_OUT = ("aten::item", "aten::_local_scalar_dense")
"""Ops that only hand a number to the program: what calls them (a fused optimizer, for its counters) works itself."""
_WRAPPER = re.compile(r"^autograd::engine::|^torch::autograd::AccumulateGrad$|^\w+Backward\d+$")


def is_silent(name: str) -> bool:
    """Whether an op runs no kernel itself: it allocates, creates a view, or only calls other ops for autograd."""
    return name in SILENT or _WRAPPER.search(name) is not None


_PHASES = (
    (re.compile(r"^Optimizer\.|optimi[sz]er|zero_grad|\bupdate\b", re.IGNORECASE), "update"),
    (re.compile(r"^autograd::engine|backward", re.IGNORECASE), "backward"),
    (re.compile(r"forward|recompute", re.IGNORECASE), "forward"),
)
ITEM_BYTES = {
    "float": 4, "double": 8, "long int": 8, "long": 8, "long long": 8, "int": 4, "short": 2, "short int": 2, "bool": 1,
    "unsigned char": 1, "signed char": 1, "char": 1, "c10::Half": 2, "c10::BFloat16": 2, "c10::complex<float>": 8,
    "c10::complex<double>": 16, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
"""Bytes of one element, by the C++ name that PyTorch's tracers print."""

DTYPES = {"float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16", "signed char": "int8"}


def kind_of(name: str, phase: str) -> str:
    """The kind of an op by a name such as `aten::addmm`."""
    return _kind_of(name.replace("::", "."), phase)


def phase_of(names: Iterable[str]) -> str | None:
    """The phase that the names of an op and its enclosing calls (innermost first) imply, None if none does."""
    for name in names:
        if name.startswith("aten::") and "backward" not in name:
            continue
        for pattern, phase in _PHASES:
            if pattern.search(name):
                return phase
    return None


def flops_of(name: str, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    """FLOPs of a matmul, a convolution or an attention, 2 per multiply-add; 0 for any other op.

    The backward of a convolution counts the gradients among its outputs (two where `outputs` is empty), that of a fused
    attention the five products of its published form. Shapes that do not fit the op give 0.

    name: of the op.
    inputs, outputs: the shapes of its tensors, in order.
    """
    base = name.rsplit("::", 1)[-1].split(".")[0]
    dims = [tuple(shape) for shape in inputs]
    if base in ("mm", "bmm", "_int_mm"):
        return _product(*dims[:2])
    if base in ("addmm", "baddbmm", "_addmm_activation", "addbmm"):
        return _product(*dims[1:3])
    if base in ("dot", "vdot"):
        return 2 * math.prod(dims[0]) if len(dims) > 1 and len(dims[0]) == 1 else 0
    if base in ("mv", "addmv"):
        matrix = dims[1 if base == "addmv" else 0] if len(dims) > 1 else ()
        return 2 * math.prod(matrix) if len(matrix) == 2 else 0
    if "grouped_mm" in base:
        return _grouped_product(*dims[:2])
    if _RECURRENT.search(base):
        return _recurrent(base, dims)
    if _CONVOLUTION.search(base):
        backward = "backward" in base
        shapes = [shape for shape in dims if len(shape) >= 3]
        if len(shapes) < 2 + backward or not (backward or outputs):
            return 0
        result, (x, weight) = (shapes[0], shapes[1:3]) if backward else (tuple(outputs[0]), shapes[:2])
        products = sum(1 for shape in outputs if len(shape) >= 3) or 2 if backward else 1
        return 2 * products * _multiplied(x, weight, result, "transpose" in base) * math.prod(weight[1:])
    if "attention" in base and not base.startswith("_fused_sdp_choice"):
        backward = "backward" in base
        query, key, value = dims[backward : backward + 3] if len(dims) >= 3 + backward else ((), (), ())
        if not len(query) == len(key) == len(value) == 4:
            return 0
        q, v = (3, 2) if backward else (1, 1)  # products with a row of queries or keys, and with one of values
        return 2 * math.prod(query[:-1]) * key[2] * (q * query[-1] + v * value[-1])
    return 0


CAUSAL = {
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Which argument of an attention says that its mask is causal.

A composed attention (`_scaled_dot_product_attention_math`) computes all scores: it is not among them.
"""


def is_causal(name: str, values: Sequence[object]) -> bool:
    """Whether an op is a fused attention under a causal mask; values: its arguments, as recorded."""
    place = CAUSAL.get(name.rsplit("::", 1)[-1].split(".")[0], len(values))
    return place < len(values) and str(values[place]).lower() in ("true", "1")


def executed_of(name: str, inputs: Sequence[Sequence[int]], flops: int, causal: bool) -> int:
    """Of the FLOPs of an op those that it executes; inputs: the shapes of its tensors; causal: its mask is."""
    first = "backward" in name
    if not causal or not flops:
        return flops
    return executed(flops, inputs[first][-2], inputs[first + 1][-2], causal=True, tile=tile_of(name))


CONVOLUTIONS = ("aten::convolution", "aten::_convolution")
"""Ops that say all about a convolution, whichever kernel they call for it."""
CONVOLUTION_BACKWARD = "aten::convolution_backward"


def results_of(name: str, inputs: Sequence[Sequence[int]], values: Sequence[object]) -> list[tuple[int, ...]]:
    """The shapes of the results of a convolution or its backward, from its arguments as recorded; [] where unknown."""
    try:
        if name == CONVOLUTION_BACKWARD:
            wanted = json.loads(str(values[10]).lower())
            return [tuple(shape) for shape, is_wanted in zip(inputs[1:3], wanted) if is_wanted]
        stride, padding, dilation = (json.loads(str(values[i])) for i in (3, 4, 5))
        x, weight = inputs[:2]
        if name not in CONVOLUTIONS or str(values[6]).lower() != "false":
            return []
        sides = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
        ]
    except (ValueError, TypeError, IndexError, ZeroDivisionError):
        return []
    known = sides and all(type(side) is int and 0 < side < 1 << 40 for side in sides)
    return [(x[0], weight[0], *sides)] if known else []


_CONVOLUTION = re.compile(r"convolution|conv_?(transpose|depthwise)?[123]d")


_RECURRENT = re.compile(r"mkldnn_rnn_layer|cudnn_rnn|miopen_rnn")


def _recurrent(base: str, dims: Sequence[tuple[int, ...]]) -> int:
    """FLOPs of recurrent layers: every step multiplies its input and its state by matrices; backward takes twice that.

    An op of oneDNN is one layer; others have the parameters of all layers, and states of three sides.
    """
    if len(dims) < 3 or len(dims[0]) != 3:
        return 0
    matrices = [shape for shape in (dims[1:3] if "mkldnn" in base else dims[1:]) if len(shape) == 2]
    return (4 if "backward" in base else 2) * dims[0][0] * dims[0][1] * sum(map(math.prod, matrices))


def _multiplied(x: tuple[int, ...], weight: tuple[int, ...], result: tuple[int, ...], transposed: bool) -> int:
    """The number of elements that are multiplied by a filter: of the result, or of the input if it is transposed.

    A transposed convolution has the same name as others, but its weight has the input's channels in front, not the
    result's. If both have equally many, the smaller of the two tensors is the one whose elements are strided.
    """
    if transposed or len(result) < 2 or weight[0] != result[1]:
        return math.prod(x)
    return math.prod(result) if weight[0] != x[1] else min(math.prod(x), math.prod(result))


def _grouped_product(*pair: tuple[int, ...]) -> int:
    """FLOPs where the rows, or the terms of a sum, are distributed over groups: each is multiplied once."""
    if len(pair) != 2 or not {len(pair[0]), len(pair[1])} <= {2, 3}:
        return 0
    groups = pair[0][0] if len(pair[0]) == len(pair[1]) == 3 else 1
    return 2 * groups * pair[0][-2] * pair[0][-1] * pair[1][-1]


def _product(*pair: tuple[int, ...]) -> int:
    if len(pair) != 2 or len(pair[0]) != len(pair[1]) or len(pair[0]) not in (2, 3):
        return 0
    return 2 * math.prod(pair[0]) * pair[1][-1]
