"""The number types in which a model is trained, and how autocast chooses between two of them."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import WorkloadError, near

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "int8": 1, "bool": 1, "uint8": 1}
"""Bytes of one element of each type."""

QUANTISED = ("nf4", "nf4_double")
"""Types in which bitsandbytes stores frozen weights: 4 bits each and an fp32 scale per 64 of them; with double
quantisation a scale of 8 bits, and an fp32 scale per 256 of those (Dettmers et al. 2023, arXiv:2305.14314)."""


def stored_bytes(elements: int, dtype: str) -> int:
    """Bytes of a tensor with its scales; the tables of the 16 and 256 codes are not counted.

    >>> stored_bytes(4096 * 4096, "nf4") / 4096**2, round(stored_bytes(4096 * 4096, "nf4_double") / 4096**2, 4)
    (0.5625, 0.5159)
    """
    if dtype not in QUANTISED:
        return elements * BYTES[dtype]
    blocks = -(-elements // 64)
    scales = blocks + 4 * -(-blocks // 256) if dtype == "nf4_double" else 4 * blocks
    return -(-elements // 2) + scales


CONVOLUTIONS = ("conv",)
"""Kinds of op that PyTorch runs in TF32 unless it is told not to (`torch.backends.cudnn.allow_tf32`)."""

PRODUCTS = ("conv", "matmul", "attention")
"""Those that it runs in TF32 after `torch.set_float32_matmul_precision("high")`."""


@dataclass(frozen=True)
class Precision:
    """How a training run uses number types.

    name: what `transformer` calls it.
    weight: type of weights.
    compute: type of matrix products and attention.
    autocast: PyTorch's autocast chooses the type per op; without it every op computes in `weight`.
    master: the optimizer keeps an fp32 copy of 16-bit weights, as in Megatron-LM and DeepSpeed (2 + 2 + 12 bytes per
        parameter with Adam).
    main_gradients: the gradients of weights are kept in fp32, as Megatron-LM does for bf16 (`main_grad`; its argument
        accumulate_allreduce_grads_in_fp32, which bf16 implies): 2 + 4 + 12 bytes per parameter with Adam, the table of
        its distributed optimizer.
    linear: an 8-bit type in which the linear layers inside the model's layers multiply (`workloads.eight_bits`), ""
        for `compute`. All else, attention and the head among it, computes as without it.
    stored: the type in which the weights of these linear layers lie in memory, "" for `weight`; for inference alone.
    tf32: the kinds of op whose fp32 operands a chip may round to TF32 while it multiplies, where it has units for that.
    """

    name: str
    weight: str
    compute: str
    autocast: bool = False
    master: bool = False
    main_gradients: bool = False
    linear: str = ""
    stored: str = ""
    tf32: tuple[str, ...] = CONVOLUTIONS

    def arithmetic(self, kind: str, dtype: str) -> str:
        """The type in which an op of a kind computes whose operands have this type."""
        return "tf32" if dtype == "fp32" and kind in self.tf32 else dtype

    @property
    def gradient(self) -> str:
        """Type of the gradients of weights, once all that contributes to them is added."""
        return "fp32" if self.main_gradients else self.weight

    @property
    def state(self) -> str:
        """Type of the optimizer's state: that of the weights it updates, as with `zeros_like`."""
        return "fp32" if self.master else self.weight


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", "fp32", "fp32"),
        Precision("tf32", "fp32", "fp32", tf32=PRODUCTS),
        Precision("bf16", "bf16", "bf16"),
        Precision("fp16", "fp16", "fp16"),
        Precision("amp_bf16", "fp32", "bf16", autocast=True),
        Precision("amp_fp16", "fp32", "fp16", autocast=True),
        Precision("mixed_bf16", "bf16", "bf16", master=True),
        Precision("mixed_fp16", "fp16", "fp16", master=True),
        Precision("megatron_bf16", "bf16", "bf16", master=True, main_gradients=True),
        Precision("mixed_fp8", "bf16", "bf16", master=True, linear="fp8"),
        Precision("megatron_fp8", "bf16", "bf16", master=True, main_gradients=True, linear="fp8"),
        Precision("fp8", "bf16", "bf16", linear="fp8", stored="fp8"),
        Precision("int8", "fp16", "fp16", linear="int8", stored="int8"),
    )
}
"""The precisions by name. fp16 needs loss scaling, which is not modelled, because it takes no memory of its own."""


def precision_of(name: str) -> Precision:
    """The precision of that name. Raises WorkloadError, naming the nearest valid one."""
    if name not in PRECISIONS:
        raise WorkloadError(f"precision {name!r} is unknown{near(str(name), PRECISIONS)}")
    return PRECISIONS[name]


def promoted(*dtypes: str) -> str:
    """The type of a result of operands of mixed types: the widest floating type (PyTorch, "type promotion")."""
    if "fp32" in dtypes:
        return "fp32"
    return next(d for d in dtypes if d in ("bf16", "fp16"))
