"""The model families: the parts that a transformer is built of, and which of them each family has.

A decoder is one mechanism (`workloads.passes`, `workloads.layers`): a norm, attention with learned or rotary positions,
a norm, an MLP. What a family fixes stands in `FAMILIES`; what the keys of a model choose, in its `Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

LAYER_NORM, LAYER_NORM_1P, RMS_NORM = "layer_norm", "layer_norm_1p", "rms_norm"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of a family have unless their keys say otherwise, and how their parts are called.

    norm, gated, learned, rotary, joint: see `Config`.
    activation: of the MLP.
    tied: whether head and embedding are one matrix.
    biased: whether every linear layer has a bias.
    drops_all, dropout: whether embeddings and sums have dropout, too, and not attention alone; its probability.
    grouped: whether several heads of queries may share one of keys and values.
    ffn: width of the MLP in hidden widths, 0 where the keys must say it.
    positions: longest sequence where the keys do not say it, 0 where they must.
    causal: whether a token attends to itself and those before it alone.
    softmax_fp32: whether composed attention computes its softmax in fp32 whatever the type.
    norms: names of the norms before attention and MLP, and of the last one.
    table: name of the embedding of tokens.
    up, down: names of the linear layers of an MLP without a gate.
    norms_last: whether the weights of a layer's norms follow those of its linear layers.
    result_first: whether the sum after attention is result + residual and not residual + result.
    joins_heads: whether rotated parts of heads, that lie (batch, heads, tokens, part), are joined to the others.
    """

    norm: str
    gated: bool = False
    learned: bool = False
    rotary: float = 0.0
    joint: bool = False
    activation: str
    tied: bool
    biased: bool = False
    drops_all: bool = True
    dropout: float
    grouped: bool
    ffn: int = 0
    positions: int = 0
    causal: bool = True
    softmax_fp32: bool = False
    norms: tuple[str, str, str]
    table: str
    up: str = "fc"
    down: str = "proj"
    norms_last: bool = False
    result_first: bool = False
    joins_heads: bool = False


_GPT2 = Family(
    norm=LAYER_NORM,
    learned=True,
    joint=True,
    activation="gelu_new",
    tied=True,
    biased=True,
    dropout=0.1,
    grouped=False,
    ffn=4,
    norms=("ln1", "ln2", "ln_f"),
    table="wte",
    result_first=True,
)
_LLAMA = Family(
    norm=RMS_NORM,
    gated=True,
    rotary=1.0,
    activation="silu",
    tied=False,
    drops_all=False,
    dropout=0.0,
    grouped=True,
    positions=2048,
    softmax_fp32=True,
    norms=("norm1", "norm2", "norm"),
    table="embed",
    up="up",
    down="down",
    norms_last=True,
)
FAMILIES: Mapping[str, Family] = {
    "gpt2": _GPT2,
    "bert": replace(_GPT2, joint=False, activation="gelu", causal=False),
    "llama": _LLAMA,
    "mixtral": _LLAMA,
    "nemotron": replace(_LLAMA, norm=LAYER_NORM_1P, gated=False, rotary=0.5, activation="relu2", joins_heads=True),
    "megatron": replace(_GPT2, activation="gelu", grouped=True, result_first=False),
    "gpt": replace(_GPT2, joint=False, activation="gelu", result_first=False),  # PaddleNLP's
}
"""What each family has. BERT's layers are its own: their norms come after the sums (`workloads.layers.bert_layer`)."""


@dataclass(frozen=True)
class Config:
    """The sizes of a transformer, and the parts that it is built of.

    family: one of `FAMILIES`. hidden, ffn, head, expert_ffn: widths in elements. positions:
    longest sequence (the size of the table where positions are learned). tied: head and embedding are one
    matrix. biases: which linear layers have one, of "qkv", "proj" and "mlp". experts, experts_per_token,
    shared_experts, dense_layers (the first layers, without experts), expert_every (from there on every
    such layer has them), experts_form ("grouped", "loop").
    window: tokens that attention looks back at most, 0 for all.
    next_sentence: whether a BERT has the pooler and the head that tell whether two sentences follow each other.
    published: parameters as published, 0 if unknown. source: where the sizes were published.
    norm: `LAYER_NORM`, `LAYER_NORM_1P` (LayerNorm with 1 + weight, in the type of the computation) or `RMS_NORM`.
    gated: whether an MLP is down(activation(gate(x)) * up(x)), and not down(activation(up(x))).
    learned: whether a vector per position is added to the embedding.
    rotary: share of each head that is rotated by position.
    joint: whether queries, keys and values come from one product, and gate and up from another.
    """

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int
    positions: int
    activation: str
    tied: bool
    biases: frozenset[str]
    embedding_dropout: float
    attention_dropout: float
    residual_dropout: float
    token_types: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    expert_every: int = 1
    experts_form: str = "grouped"
    window: int = 0
    next_sentence: bool = True
    published: int = 0
    source: str = ""
    norm: str = LAYER_NORM
    gated: bool = False
    learned: bool = True
    rotary: float = 0.0
    joint: bool = False

    @property
    def of_family(self) -> Family:
        """What its family has."""
        return FAMILIES[self.family]

    @property
    def turned(self) -> int:
        """Elements of each head that are rotated by position."""
        return int(self.head * self.rotary)

    def dropping(self, probability: float) -> Config:
        """The same with another probability of dropout, where it has any."""
        rest = probability if self.of_family.drops_all else 0.0
        return replace(self, embedding_dropout=rest, attention_dropout=probability, residual_dropout=rest)

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of that layer is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers and layer % self.expert_every == 0
