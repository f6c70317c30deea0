"""A GPU's kernels on a CPU-only PyTorch.

PyTorch chooses some kernels by device. Fake tensors of device "cuda" cannot be differentiated without a CUDA build, so
a step is captured on the CPU, with the two choices that matter most for memory made as on CUDA. Dropout is one kernel
that saves a mask of one byte per element. scaled_dot_product_attention is flash attention in 16 bits without a mask,
memory-efficient attention otherwise, and single kernels where several query heads share a key head outside flash
attention. Everything else is the CPU's: recurrent layers (oneDNN instead of cuDNN, whose reserved space is unknown),
batch norm without cuDNN's reserved space, statistics of a 16-bit layer norm in 16 bits instead of fp32, no padding of
masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

CHOICES = ("cpu", "cuda")
FLASH_HEAD = 256
"""The largest head that flash attention supports."""


def counts_on_host(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer counts the steps of that group on the host although its parameters are on a GPU."""
    return not (group.get("fused") or group.get("capturable"))


@contextmanager
def mapped_to_cuda(count: Callable[[str], None]) -> Iterator[None]:
    """Send dropout and attention to the kernels that they have on CUDA; `count` is called each time.

    The registrations are global while the context lasts, and removed afterwards.
    """
    torch: Any = import_module("torch")
    aten = torch.ops.aten

    def dropout(x: Any, probability: float, train: bool) -> Any:
        if not train or probability == 0:
            return x
        count("dropout")
        return torch.native_dropout(x, probability, train)[0]

    def attention(
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        head = q.shape[-1]
        grouped = enable_gqa and q.shape[-3] != k.shape[-3]
        half = q.dtype in (torch.float16, torch.bfloat16)
        if q.dim() == 4 and half and attn_mask is None and head == v.shape[-1] and head <= FLASH_HEAD:
            count("flash attention")
            scale = head**-0.5 if scale is None else scale
            q, k, v = (torch.nn.functional.pad(x, (0, -head % 8)) if head % 8 else x for x in (q, k, v))
            out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
            return out[..., :head] if head % 8 else out
        if q.dim() == 4 and not grouped and not (attn_mask is not None and attn_mask.requires_grad):
            count("memory-efficient attention")
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
            if attn_mask is not None:
                attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(q, k, v, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
        count("composed attention")
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", dropout, "AutogradCPU")
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def grouped_products() -> Iterator[None]:
    """Let experts' grouped products have any type, as they do on CPUs and GPUs.

    PyTorch's own rule for fake tensors (2.13) takes bf16 alone. The registration is global while the context lasts.
    """
    torch: Any = import_module("torch")

    def product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        sums = a.dim() == b.dim() == 2  # groups of terms, else of rows
        if not sums and a.shape[-1] != b.shape[-2]:
            raise ValueError(f"_grouped_mm: {tuple(a.shape)} and {tuple(b.shape)} can't be multiplied")
        groups = [offs.numel()] if sums else [a.shape[0]] if a.dim() == b.dim() else []
        return a.new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)

    library = torch.library.Library("aten", "IMPL")
    if hasattr(torch.ops.aten, "_grouped_mm"):
        library.impl("_grouped_mm", product, "Meta")
    try:
        yield
    finally:
        library._destroy()
