"""What lives on the device while a step of PyTorch runs, counted storage by storage, and a step of every kind.

Models are built under fake tensors of device "cuda": shapes, types, views and the choice of kernels are those
of the CUDA path, nothing is allocated and no kernel runs. Shares no code with `workloads.capture`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNIT = 512
aten = torch.ops.aten


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """What a CUDA build has and this one lacks: the choice of attention kernels, and silu's backward as one kernel.

    A short form of the CUDA rules: flash attention takes 16-bit types without a mask and heads of at most 256, the
    memory-efficient kernel one key for each query head; the rest is composed. Without a CUDA kernel of its own
    PyTorch composes silu_backward, too, of four kernels with as many results.
    """

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        half, grouped = q.dtype != torch.float32, q.shape[1] != k.shape[1]
        if half and attn_mask is None and q.shape[-1] <= 256:
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if not grouped:
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
        composed = aten._scaled_dot_product_attention_math
        return composed(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    library.impl("silu_backward", lambda g, x: torch.empty_like(x), "CUDA")
    try:
        yield
    finally:
        library._destroy()


class Ledger(TorchDispatchMode):
    """Bytes by category after each op, each storage once and rounded up to 512 bytes; the highest point of each phase.

    `parameter`: parameters and buffers; `activation`: made in a forward pass or while a module is recomputed in
    backward; `rest`: gradients, temporaries, optimizer state; `other`: the batch.
    detail: whether to note all that lives at each highest point, in `where`.
    """

    def __init__(self, *, detail: bool = False) -> None:
        super().__init__()
        self.phase = ""
        self.detail = detail
        self.live: dict[str, int] = dict.fromkeys(("parameter", "activation", "rest", "other"), 0)
        self.peaks: dict[str, dict[str, int]] = {}
        self.host = self.host_peak = 0
        self.running = 0  # modules whose forward pass runs
        self.known: dict[int, weakref.ref] = {}
        self.where: dict[str, tuple[str, list[tuple[int, str, str]]]] = {}
        self.names: dict[int, tuple[int, str, str]] = {}

    def add(self, tensor: torch.Tensor, category: str, name: str = "") -> None:
        """Follow a tensor's storage until it is released."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.known or not storage.nbytes():
            return
        size = -(-storage.nbytes() // UNIT) * UNIT
        if tensor.device.type != "cuda":
            size, category = storage.nbytes(), ""
        self.known[address] = weakref.ref(storage, lambda _: self.release(address, category, size))
        self.names[address] = (size, category, f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        if category:
            self.live[category] += size
        else:
            self.host += size
            self.host_peak = max(self.host_peak, self.host)

    def release(self, address: int, category: str, size: int) -> None:
        self.known.pop(address, None)
        self.names.pop(address, None)
        if category:
            self.live[category] -= size
        else:
            self.host -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = "activation" if self.phase == "forward" or self.running else "rest"
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor, made, str(func))
        if self.phase:
            total = sum(self.live.values())
            if total > self.peaks.get(self.phase, {}).get("total", -1):
                self.peaks[self.phase] = {**self.live, "total": total}
                self.where[self.phase] = (str(func), list(self.names.values()) if self.detail else [])
        return out

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Know when a module runs."""

        def enter(*_) -> None:
            self.running += 1

        def leave(*_) -> None:
            self.running -= 1

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
