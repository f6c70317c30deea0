"""The weights of each family, in the order of the model."""

from __future__ import annotations

from sim.trace.builder import TraceBuilder
from workloads.adapters import EVERYTHING, Tuning, check_names
from workloads.models import Config
from workloads.precision import precision_of
from workloads.tape import Tape, Value


def make_parameters(tape: Tape, c: Config, tuning: Tuning = EVERYTHING) -> dict[str, Value]:
    """Add all weights of a model to the trace. Returns them by name; tied weights are one tensor.

    tuning: which of them are frozen, and which linear layers have an adapter.

    Raises WorkloadError where `tuning` names what the model does not have.
    """
    weights = _Weights(tape, c, tuning)
    weights.embeddings()
    layer_of = {"gpt2": weights.gpt2, "bert": weights.bert}.get(c.family, weights.modern)
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

    def layer_norm(self, name: str) -> None:
        self.weight(f"{name}.weight", self._c.hidden)
        self.weight(f"{name}.bias", self._c.hidden)

    def mlp(self, name: str, width: int, *, bias: bool = False) -> None:
        hidden = self._c.hidden
        for part, inner, columns in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
            self.linear(f"{name}.{part}", inner, columns, bias=bias)

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

    def modern(self, h: str, layer: int) -> None:
        """Of Llama's kind."""
        c, bias = self._c, "qkv" in self._c.biases
        self.linear(f"{h}.attn.q", c.hidden, c.heads * c.head, bias=bias)
        self.linear(f"{h}.attn.k", c.hidden, c.kv_heads * c.head, bias=bias)
        self.linear(f"{h}.attn.v", c.hidden, c.kv_heads * c.head, bias=bias)
        self.linear(f"{h}.attn.proj", c.heads * c.head, c.hidden, bias="proj" in c.biases)
        if c.has_experts(layer):
            self.experts(f"{h}.mlp")
        else:
            self.mlp(f"{h}.mlp", c.ffn, bias="mlp" in c.biases)
        self.weight(f"{h}.norm1.weight", c.hidden)
        self.weight(f"{h}.norm2.weight", c.hidden)

    def gpt2(self, h: str, _: int) -> None:
        c = self._c
        self.layer_norm(f"{h}.ln1")
        self.linear(f"{h}.attn.qkv", c.hidden, 3 * c.hidden)
        self.linear(f"{h}.attn.proj", c.hidden, c.hidden)
        self.layer_norm(f"{h}.ln2")
        self.linear(f"{h}.mlp.fc", c.hidden, c.ffn)
        self.linear(f"{h}.mlp.proj", c.ffn, c.hidden)

    def bert(self, h: str, _: int) -> None:
        c = self._c
        for part in ("q", "k", "v", "proj"):
            self.linear(f"{h}.attn.{part}", c.hidden, c.hidden)
        self.layer_norm(f"{h}.ln1")
        self.linear(f"{h}.mlp.fc", c.hidden, c.ffn)
        self.linear(f"{h}.mlp.proj", c.ffn, c.hidden)
        self.layer_norm(f"{h}.ln2")

    # ---- the ends ----------------------------------------------------------------------------

    def embeddings(self) -> None:
        c = self._c
        if c.family in ("llama", "mixtral"):
            self.weight("embed.weight", c.vocabulary, c.hidden)
        else:
            self.weight("wte.weight", c.vocabulary, c.hidden)
            self.weight("wpe.weight", c.positions, c.hidden)
        if c.family == "bert":
            self.weight("wtt.weight", c.token_types, c.hidden)
            self.layer_norm("embed.ln")

    def head(self) -> None:
        c = self._c
        if c.family == "gpt2":
            self.layer_norm("ln_f")
        elif c.family == "bert":
            if c.next_sentence:
                self.linear("pooler", c.hidden, c.hidden)
            self.linear("transform", c.hidden, c.hidden)
            self.layer_norm("transform.ln")
            self.weight("head.bias", c.vocabulary)  # untied, the library has a second one that nothing reads
            if c.next_sentence:
                self.linear("next_sentence", c.hidden, 2)
        else:
            self.weight("norm.weight", c.hidden)
        if not c.tied:
            self.weight("head.weight", c.vocabulary, c.hidden)


def parameter_count(config: Config) -> int:
    """How many parameters a model has, counting tied weights once."""
    tape = Tape(TraceBuilder(), precision_of("fp32"))
    make_parameters(tape, config)
    return sum(value.elements for value, _ in tape.parameters)
