"""Which weights are trained: frozen ones, and LoRA's adapters beside them (Hu et al. 2021, arXiv:2106.09685).

A frozen weight has no gradient and no optimizer state. Beside an adapted linear layer of k inputs and q outputs are two
trained matrices of r (k + q) weights: result = base(x) + B(A(dropout(x))) * scale. Ops, their order and their types are
those of PEFT (`peft.tuners.lora.layer.Linear`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from sim.errors import WorkloadError, near
from workloads.costs import matmul_flops
from workloads.eight_bits import eight_bit_linear, multiplies_in_8_bits
from workloads.precision import PRECISIONS, QUANTISED, Precision
from workloads.primitives import add, copy, dropout, linear, scale
from workloads.tape import Tape, Value

DEFAULT_TARGETS = {
    "gpt2": ("attn.qkv",),
    "bert": ("attn.q", "attn.v"),
    "megatron": ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj"),
}
"""The linear layers that PEFT adapts unless told otherwise, by family; for all other families as for BERT. Those of
Megatron-LM's models are what NeMo adapts (nemo/collections/llm/peft/lora.py: LoRA.target_modules)."""

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer but the head, as in PEFT."""

PEFT_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": {"c_attn": ("attn.qkv",), "c_proj": ("proj",), "c_fc": ("mlp.fc",)},
    "bert": {
        "query": ("attn.q",),
        "key": ("attn.k",),
        "value": ("attn.v",),
        "dense": ("proj", "fc", "pooler", "transform"),
    },
    "megatron": {
        "linear_qkv": ("attn.qkv",),
        "linear_proj": ("attn.proj",),
        "linear_fc1": ("mlp.fc",),
        "linear_fc2": ("mlp.proj",),
    },
    "gpt": {
        "q_proj": ("attn.q",),
        "k_proj": ("attn.k",),
        "v_proj": ("attn.v",),
        "qkv_proj": ("attn.qkv",),
        "out_proj": ("attn.proj",),
        "linear1": ("mlp.fc",),
        "linear2": ("mlp.proj",),
    },
    "llama": {
        "q_proj": ("attn.q",),
        "k_proj": ("attn.k",),
        "v_proj": ("attn.v",),
        "o_proj": ("attn.proj",),
        "gate_proj": ("gate",),
        "up_proj": ("up",),
        "down_proj": ("down",),
    },
}
"""What the models of Hugging Face, Megatron-LM and PaddleNLP call the linear layers of each family, and how their names
end here."""

FROZEN_DTYPES = (*dict.fromkeys(p.weight for p in PRECISIONS.values()), *QUANTISED)
"""The types in which frozen weights can be stored."""


@dataclass(frozen=True)
class Tuning:
    """What is trained of a model.

    frozen: patterns of the weights that are not, see `matches`.
    dtype: in which frozen weights are stored, "" as the trained ones.
    rank: of LoRA's adapters, 0 for none.
    targets: the linear layers that have adapters: names as they were given, and how the names of the layers end for
        which each stands.
    dropout: probability before an adapter.
    """

    frozen: tuple[str, ...] = ()
    dtype: str = ""
    rank: int = 0
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropout: float = 0.0

    def is_frozen(self, weight: str) -> bool:
        """Whether the weight of that name is not trained."""
        return any(matches(weight, pattern) for pattern in self.frozen)

    def stored(self, precision: Precision, *, of_linear: bool) -> str:
        """In which type a frozen weight is stored. Of quantised ones only the matrices of linear layers are."""
        if self.dtype in QUANTISED:
            return self.dtype if of_linear else precision.compute
        return self.dtype or (precision.stored if of_linear else "") or precision.weight

    def adapts(self, layer: str) -> bool:
        """Whether the linear layer of that name has an adapter."""
        return any(_ends(layer, end) for ends in self.targets.values() for end in ends)


EVERYTHING = Tuning()
"""All weights are trained."""


def tuning_of(
    family: str,
    *,
    frozen: str | Sequence[str] | None,
    frozen_dtype: str | None,
    lora_rank: int,
    lora_targets: str | Sequence[str] | None,
    lora_dropout: float,
) -> Tuning:
    """What is trained, from the arguments of `transformer`, which says what they mean.

    Raises WorkloadError for a type that is unknown or an argument that needs another one.
    """
    if frozen_dtype is not None and frozen_dtype not in FROZEN_DTYPES:
        raise WorkloadError(f"frozen_dtype {frozen_dtype!r} is unknown{near(str(frozen_dtype), FROZEN_DTYPES)}")
    patterns = _listed("frozen", frozen) if frozen is not None else ("*",) if lora_rank else ()
    if not lora_rank:
        for argument, value in (("lora_targets", lora_targets), ("lora_dropout", lora_dropout or None)):
            if value is not None:
                raise WorkloadError(f"{argument}: needs adapters: give lora_rank, too")
    if frozen_dtype is not None and not patterns:
        raise WorkloadError("frozen_dtype: nothing is frozen: give frozen or lora_rank, too")
    names: tuple[str, ...] = ()
    if lora_targets is not None:
        names = _listed("lora_targets", lora_targets)
    elif lora_rank:
        names = DEFAULT_TARGETS.get(family, DEFAULT_TARGETS["bert"])
    targets = {name: _peft_names(family).get(name, (name,)) for name in names}
    return Tuning(patterns, frozen_dtype or "", lora_rank, targets, lora_dropout)


def matches(weight: str, pattern: str) -> bool:
    """Whether a pattern (`*`, `?`, `[0-5]`) stands for a weight: for its name, or for a part of the model it is in.

    >>> [matches("h1.attn.q.weight", p) for p in ("h1", "h*.attn", "*.weight", "h1.attn.q.weight", "attn")]
    [True, True, True, True, False]
    """
    parts = weight.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def check_names(tuning: Tuning, family: str, weights: Iterable[str], layers: Collection[str]) -> None:
    """Raise WorkloadError for a pattern or a target that stands for nothing, naming the nearest that does.

    family: of the model.
    weights: names of all its weights.
    layers: names of its linear layers.
    """
    weights = list(weights)
    for pattern in tuning.frozen:
        if not any(matches(weight, pattern) for weight in weights):
            parts = dict.fromkeys(".".join(w.split(".")[:n]) for w in weights for n in range(1, w.count(".") + 2))
            raise WorkloadError(f"frozen: {pattern!r} stands for no weight{near(pattern, parts)}")
    ends = dict.fromkeys(layer.partition(".")[2] or layer for layer in layers)
    for target, stands_for in tuning.targets.items():
        if not any(_ends(layer, end) for layer in layers for end in stands_for):
            known = [ALL_LINEAR, *_peft_names(family), *ends]
            raise WorkloadError(f"lora_targets: {target!r} stands for no linear layer{near(target, known)}")


def linear_layer(tape: Tape, weights: Mapping[str, Value], name: str, x: Value, tuning: Tuning = EVERYTHING) -> Value:
    """The linear layer of that name, with its bias and its adapter where it has them.

    Beside a quantised weight PEFT clones the result before it adds, casts what it adds instead of the sum, and leaves
    types to autocast where that is on (`peft.tuners.lora.bnb.Linear4bit`).
    """
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if multiplies_in_8_bits(tape):
        rows, columns = x.elements // x.shape[-1], weight.elements // x.shape[-1]
        flops = matmul_flops(rows, x.shape[-1], columns)
        out = eight_bit_linear(tape, name, x, weight, (*x.shape[:-1], columns), flops, bias)
    else:
        out = linear(tape, name, x, weight, bias)
    if not tuning.adapts(name):
        return out
    quantised = weight.dtype in QUANTISED
    if quantised:
        out = copy(tape, f"{name}.lora.clone", out, *out.shape, backward=False)
    down, up = weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"]
    y = x if quantised and tape.precision.autocast else tape.cast(x, down.dtype, f"{name}.lora.cast")
    y = dropout(tape, f"{name}.lora_dropout", y, tuning.dropout)
    y = linear(tape, f"{name}.lora_B", linear(tape, f"{name}.lora_A", y, down), up)
    y = scale(tape, f"{name}.lora.scale", y)
    if quantised and not tape.precision.autocast:
        y = tape.cast(y, out.dtype, f"{name}.lora.down")
    total = add(tape, f"{name}.lora.add", out, y)
    return total if quantised else tape.cast(total, out.dtype, f"{name}.lora.down")


def _peft_names(family: str) -> Mapping[str, tuple[str, ...]]:
    return PEFT_NAMES.get(family, PEFT_NAMES["llama"])


def _ends(layer: str, target: str) -> bool:
    return target == ALL_LINEAR or layer == target or layer.endswith(f".{target}")


def _listed(argument: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Names from a text with commas or a list of texts. Raises WorkloadError."""
    names = value.split(",") if isinstance(value, str) else value
    if (
        not isinstance(names, Sequence)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
    ):
        raise WorkloadError(f"{argument}: needs names, such as 'a,b' or ['a', 'b'], has {value!r}")
    return tuple(name.strip() for name in names)
