"""How PyTorch runs products and convolutions, where that is not in the ops themselves: types that they round to, and
the order of an image's dimensions."""

from __future__ import annotations

from typing import Any

from workloads.precision import CONVOLUTIONS, PRODUCTS


def rounded_to_tf32(torch: Any) -> tuple[str, ...]:
    """The kinds of op whose fp32 operands may be rounded to TF32, by PyTorch's settings as they are now."""
    cudnn = torch.backends.cudnn
    convolutions = CONVOLUTIONS if _allows(getattr(cudnn, "conv", cudnn)) else ()
    others = tuple(kind for kind in PRODUCTS if kind not in CONVOLUTIONS)
    return (*convolutions, *(others if _allows(torch.backends.cuda.matmul) else ()))


def _allows(backend: Any) -> bool:
    """Whether a part of PyTorch computes fp32 products in TF32; before PyTorch 2.9 a flag said so."""
    precision = getattr(backend, "fp32_precision", None)
    return bool(backend.allow_tf32) if precision is None else precision == "tf32"


def has_channels_last(torch: Any, args: Any) -> bool:
    """Whether a convolution, by its arguments, is of images or filters with channels last: then all of it is."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    return any(
        x.dim() in orders and x.is_contiguous(memory_format=orders[x.dim()]) and not x.is_contiguous() for x in args[:2]
    )
