"""CUDA's autocast on a CPU-only PyTorch: `torch.autocast("cuda")` as real scripts write it.

Without a GPU PyTorch disables it with a warning, and a captured step would run in fp32. During a capture, it therefore
acts as the CPU's autocast, on CPU tensors. The two cast different ops: on CUDA softmax, norms, powers, exponentials and
losses run in fp32, on a CPU mostly in 16 bits. So CUDA's lists (from PyTorch's documentation of `torch.amp`) apply from
the first such region on. Nesting and disabling contexts work as usual.

Departs: ops that only the CPU's list casts to fp32 (Fourier transforms, some linear algebra) are cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

LOWER = ("addmv", "addr", "mv", "prelu")
"""Ops that CUDA's autocast computes in 16 bits and the CPU's does not."""

_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss
    nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp
"""
FP32 = tuple(_FP32.split())
"""Ops that CUDA's autocast computes in fp32."""

FP32_RESULT = ("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum", "linalg_vector_norm")
"""Ops that it computes in fp32 from 16 bits, without a copy of the operand, if no type is requested."""

PROMOTED = ("addcdiv", "addcmul", "atan2", "cross", "dot", "vdot", "index_put", "scatter_add", "tensordot")
"""Ops that it computes in the widest type of their operands."""

COUNTS: list[Callable[[str], None]] = []
"""Who counts the regions: the innermost of the contexts."""
FOR_CUDA = "_tiersim_for_cuda"


@contextmanager
def cuda_autocast(count: Callable[[str], None]) -> Iterator[None]:
    """Let `torch.autocast("cuda")` work on fake CPU tensors; `count` is called for each region that is entered.

    The registrations are global while the context lasts, and removed afterwards. Regions may be created in one such
    context and entered in another inside it.
    """
    COUNTS.append(count)
    try:
        with _patched() if len(COUNTS) == 1 else nullcontext():
            yield
    finally:
        COUNTS.pop()


@contextmanager
def _patched() -> Iterator[None]:
    torch: Any = import_module("torch")
    autocast = torch.amp.autocast_mode.autocast
    plain, plain_enter = autocast.__init__, autocast.__enter__
    plain_is_on = torch.is_autocast_enabled
    casts = _Casts(torch)

    def init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            device_type = "cpu"
            setattr(self, FOR_CUDA, enabled)
        plain(self, device_type, dtype, enabled, cache_enabled)

    def enter(self: Any) -> Any:
        if getattr(self, FOR_CUDA, False):
            casts.register()
            COUNTS[-1]("autocast")
        return plain_enter(self)

    def is_on(device_type: str | None = None) -> bool:
        return bool(plain_is_on("cpu" if device_type in (None, "cuda") else device_type))

    autocast.__init__, autocast.__enter__, torch.is_autocast_enabled = init, enter, is_on
    try:
        yield
    finally:
        autocast.__init__, autocast.__enter__, torch.is_autocast_enabled = plain, plain_enter, plain_is_on
        casts.close()


class _Casts:
    """Registers CUDA's lists in place of the CPU's when they are first needed."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.library: Any = None
        key = torch._C.DispatchKey.AutocastCPU
        self.below = partial(torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(key))

    def register(self) -> None:
        """Apply CUDA's lists until `close`."""
        if self.library is not None:
            return
        self.library = self.torch.library.Library("aten", "IMPL")
        for names, rule in ((LOWER, self.lower), (FP32, self.fp32), (FP32_RESULT, self.result), (PROMOTED, self.wide)):
            for name in names:
                packet = getattr(self.torch.ops.aten, name, None)
                for overload in packet.overloads() if packet is not None else ():
                    op = getattr(packet, overload)
                    if any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments):
                        continue  # in place or into a given tensor: autocast does not change these
                    if not self.torch._C._dispatch_has_kernel(op.name()):
                        continue  # an overload for TorchScript's numbers
                    if self.torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU"):
                        continue  # the CPU's list has it, and casts it as well
                    self.library.impl(op, partial(rule, op), "AutocastCPU")

    def close(self) -> None:
        """Remove all registrations."""
        if self.library is not None:
            self.library._destroy()

    def lower(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(op, self.torch.get_autocast_dtype("cpu"), args, kwargs)

    def fp32(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(op, self.torch.float32, args, kwargs)

    def wide(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        types = {x.dtype for x in self.leaves((args, kwargs)) if self.is_cast(x)}
        widest = self.torch.float32 if self.torch.float32 in types else self.torch.get_autocast_dtype("cpu")
        return self.run(op, widest if types else None, args, kwargs)

    def result(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in op._schema.arguments]
        position = names.index("dtype") if "dtype" in names else len(args)
        requested = kwargs.get("dtype") if position >= len(args) else args[position]
        half = self.is_cast(args[0]) and args[0].dtype != self.torch.float32
        if not half or requested is not None or "dtype" not in names:
            return self.run(op, None, args, kwargs)
        softmax = {"softmax": "_softmax", "log_softmax": "_log_softmax"}.get(op._overloadpacket.__name__)
        if softmax and args[0].dtype == self.torch.float16 and isinstance(args[1], int):
            # this kernel reads 16 bits and writes 32
            with self.below():
                return getattr(self.torch.ops.aten, softmax).default(args[0], args[1], True)
        if position < len(args):
            args = (*args[:position], self.torch.float32, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "dtype": self.torch.float32}
        return self.run(op, None, args, kwargs)

    def run(self, op: Any, dtype: Any, args: Any, kwargs: Any) -> Any:
        """Cast the tensors, then run the op without autocast."""
        with self.below():
            if dtype is not None:
                args, kwargs = self.map(lambda x: x.to(dtype) if self.is_cast(x) else x, (args, kwargs))
            return op(*args, **kwargs)

    def is_cast(self, value: Any) -> bool:
        torch = self.torch
        return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16, torch.float32)

    @property
    def map(self) -> Any:
        return import_module("torch.utils._pytree").tree_map

    @property
    def leaves(self) -> Any:
        return import_module("torch.utils._pytree").tree_leaves
