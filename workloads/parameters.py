"""The weights of each family, in the order of the model."""

from __future__ import annotations

from sim.trace.builder import TraceBuilder
from workloads.adapters import EVERYTHING, Tuning, check_names
from workloads.families import RMS_NORM, Config
from workloads.precision import precision_of
from workloads.tape import Tape, Value


def make_parameters(tape: Tape, c: Config, tuning: Tuning = EVERYTHING) -> dict[str, Value]:
    """Add all weights of a model to the trace. Returns them by name; tied weights are one tensor.

    tuning: which of them are frozen, and which linear layers have an adapter.

    Raises WorkloadError where `tuning` names what the model does not have.
    """
    weights = _Weights(tape, c, tuning)
    weights.embeddings()
    layer_of = weights.decoder if c.of_family.causal else weights.bert
    for i in range(c.layers):
        tape.layer = i
        layer_of(f"h{i}", i)
    tape.layer = -1
    weights.head()
    check_names(tuning, c.family, weights.by_name, weights.layers)
    return weights.by_name


class _Weights:
    """Adds weights to a tape, layer by layer.

    by_name: those added so far.
    layers: linear layers so far.
    """

    def __init__(self, tape: Tape, c: Config, tuning: Tuning) -> None:
        self.by_name: dict[str, Value] = {}
        self.layers: list[str] = []
        self._tape, self._c, self._tuning = tape, c, tuning

    # ---- parts -------------------------------------------------------------------------------

    def weight(self, name: str, *shape: int, of_linear: bool = False) -> None:
        stored = self._tuning.stored(self._tape.precision, of_linear=of_linear)
        self.by_name[name] = self._tape.parameter(name, *shape, frozen=stored if self._tuning.is_frozen(name) else "")

    def linear(self, name: str, inner: int, columns: int, *, bias: bool = True) -> None:
        self.weight(f"{name}.weight", inner, columns, of_linear=True)
        if bias:
            self.weight(f"{name}.bias", columns)
        self.layers.append(name)
        if self._tuning.adapts(name):
            for part, shape in (("lora_A", (inner, self._tuning.rank)), ("lora_B", (self._tuning.rank, columns))):
                self.by_name[f"{name}.{part}.weight"] = self._tape.parameter(f"{name}.{part}.weight", *shape)

    def norm(self, name: str) -> None:
        self.weight(f"{name}.weight", self._c.hidden)
        if self._c.norm != RMS_NORM:
            self.weight(f"{name}.bias", self._c.hidden)

    def attention(self, name: str) -> None:
        c = self._c
        parts = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        for part, heads in {"qkv": sum(parts.values())}.items() if c.joint else parts.items():
            self.linear(f"{name}.{part}", c.hidden, heads * c.head, bias="qkv" in c.biases)
        self.linear(f"{name}.proj", c.heads * c.head, c.hidden, bias="proj" in c.biases)

    def mlp(self, name: str, width: int, *, bias: bool = False) -> None:
        c, has = self._c, self._c.of_family
        if c.gated and not c.joint:
            self.linear(f"{name}.gate", c.hidden, width, bias=bias)
        self.linear(f"{name}.{has.up}", c.hidden, 2 * width if c.gated and c.joint else width, bias=bias)
        self.linear(f"{name}.{has.down}", width, c.hidden, bias=bias)

    def experts(self, name: str) -> None:
        c = self._c
        self.weight(f"{name}.router.weight", c.experts, c.hidden)
        if c.experts_form == "loop":
            for expert in range(c.experts):
                self.mlp(f"{name}.expert{expert}", c.expert_ffn)
        else:
            self.weight(f"{name}.gate_up.weight", c.experts, 2 * c.expert_ffn, c.hidden)
            self.weight(f"{name}.down.weight", c.experts, c.hidden, c.expert_ffn)
        if c.shared_experts:
            self.mlp(f"{name}.shared", c.shared_experts * c.expert_ffn)

    # ---- layers ------------------------------------------------------------------------------

    def decoder(self, h: str, layer: int) -> None:
        c, (first, second, _) = self._c, self._c.of_family.norms
        last = c.of_family.norms_last
        if not last:
            self.norm(f"{h}.{first}")
        self.attention(f"{h}.attn")
        if not last:
            self.norm(f"{h}.{second}")
        if c.has_experts(layer):
            self.experts(f"{h}.mlp")
        else:
            self.mlp(f"{h}.mlp", c.ffn, bias="mlp" in c.biases)
        if last:
            self.norm(f"{h}.{first}")
            self.norm(f"{h}.{second}")

    def bert(self, h: str, _: int) -> None:
        self.attention(f"{h}.attn")
        self.norm(f"{h}.ln1")
        self.mlp(f"{h}.mlp", self._c.ffn, bias=True)
        self.norm(f"{h}.ln2")

    # ---- the ends ----------------------------------------------------------------------------

    def embeddings(self) -> None:
        c = self._c
        self.weight(f"{c.of_family.table}.weight", c.vocabulary, c.hidden)
        if c.learned:
            self.weight("wpe.weight", c.positions, c.hidden)
        if not c.of_family.causal:
            self.weight("wtt.weight", c.token_types, c.hidden)
            self.norm("embed.ln")

    def head(self) -> None:
        c = self._c
        if c.of_family.causal:
            self.norm(c.of_family.norms[-1])
        else:
            if c.next_sentence:
                self.linear("pooler", c.hidden, c.hidden)
            self.linear("transform", c.hidden, c.hidden)
            self.norm("transform.ln")
            self.weight("head.bias", c.vocabulary)  # untied, the library has a second one that nothing reads
            if c.next_sentence:
                self.linear("next_sentence", c.hidden, 2)
        if not c.tied:
            self.weight("head.weight", c.vocabulary, c.hidden)


def parameter_count(config: Config) -> int:
    """How many parameters a model has, counting tied weights once."""
    tape = Tape(TraceBuilder(), precision_of("fp32"))
    make_parameters(tape, config)
    return sum(value.elements for value, _ in tape.parameters)
