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
    weights: dict[str, Value] = {}
    layers: list[str] = []  # linear ones

    def weight(name: str, *shape: int) -> None:
        weights[name] = tape.parameter(name, *shape, frozen=tuning.is_frozen(name))

    def linear(name: str, inner: int, columns: int, *, bias: bool) -> None:
        weight(f"{name}.weight", inner, columns)
        if bias:
            weight(f"{name}.bias", columns)
        layers.append(name)
        if tuning.adapts(name):
            for part, shape in (("lora_A", (inner, tuning.rank)), ("lora_B", (tuning.rank, columns))):
                weights[f"{name}.{part}.weight"] = tape.parameter(f"{name}.{part}.weight", *shape)

    def layer_norm(name: str) -> None:
        weight(f"{name}.weight", c.hidden)
        weight(f"{name}.bias", c.hidden)

    def mlp(name: str, width: int, *, bias: bool = False) -> None:
        for part, inner, columns in (("gate", c.hidden, width), ("up", c.hidden, width), ("down", width, c.hidden)):
            linear(f"{name}.{part}", inner, columns, bias=bias)

    def experts(name: str) -> None:
        weight(f"{name}.router.weight", c.experts, c.hidden)
        if c.experts_form == "loop":
            for expert in range(c.experts):
                mlp(f"{name}.expert{expert}", c.expert_ffn)
        else:
            weight(f"{name}.gate_up.weight", c.experts, 2 * c.expert_ffn, c.hidden)
            weight(f"{name}.down.weight", c.experts, c.hidden, c.expert_ffn)
        if c.shared_experts:
            mlp(f"{name}.shared", c.shared_experts * c.expert_ffn)

    def modern(h: str, layer: int) -> None:
        bias = "qkv" in c.biases
        linear(f"{h}.attn.q", c.hidden, c.heads * c.head, bias=bias)
        linear(f"{h}.attn.k", c.hidden, c.kv_heads * c.head, bias=bias)
        linear(f"{h}.attn.v", c.hidden, c.kv_heads * c.head, bias=bias)
        linear(f"{h}.attn.proj", c.heads * c.head, c.hidden, bias="proj" in c.biases)
        if c.has_experts(layer):
            experts(f"{h}.mlp")
        else:
            mlp(f"{h}.mlp", c.ffn, bias="mlp" in c.biases)
        weight(f"{h}.norm1.weight", c.hidden)
        weight(f"{h}.norm2.weight", c.hidden)

    def gpt2(h: str, layer: int) -> None:
        layer_norm(f"{h}.ln1")
        linear(f"{h}.attn.qkv", c.hidden, 3 * c.hidden, bias=True)
        linear(f"{h}.attn.proj", c.hidden, c.hidden, bias=True)
        layer_norm(f"{h}.ln2")
        linear(f"{h}.mlp.fc", c.hidden, c.ffn, bias=True)
        linear(f"{h}.mlp.proj", c.ffn, c.hidden, bias=True)

    def bert(h: str, layer: int) -> None:
        for part in ("q", "k", "v", "proj"):
            linear(f"{h}.attn.{part}", c.hidden, c.hidden, bias=True)
        layer_norm(f"{h}.ln1")
        linear(f"{h}.mlp.fc", c.hidden, c.ffn, bias=True)
        linear(f"{h}.mlp.proj", c.ffn, c.hidden, bias=True)
        layer_norm(f"{h}.ln2")

    if c.family in ("llama", "mixtral"):
        weight("embed.weight", c.vocabulary, c.hidden)
    else:
        weight("wte.weight", c.vocabulary, c.hidden)
        weight("wpe.weight", c.positions, c.hidden)
    if c.family == "bert":
        weight("wtt.weight", c.token_types, c.hidden)
        layer_norm("embed.ln")
    layer_of = {"gpt2": gpt2, "bert": bert}.get(c.family, modern)
    for i in range(c.layers):
        tape.layer = i
        layer_of(f"h{i}", i)
    tape.layer = -1
    if c.family == "gpt2":
        layer_norm("ln_f")
    elif c.family == "bert":
        linear("pooler", c.hidden, c.hidden, bias=True)
        linear("transform", c.hidden, c.hidden, bias=True)
        layer_norm("transform.ln")
        weight("head.bias", c.vocabulary)
        linear("next_sentence", c.hidden, 2, bias=True)
    else:
        weight("norm.weight", c.hidden)
    if not c.tied:
        weight("head.weight", c.vocabulary, c.hidden)
    check_names(tuning, c.family, weights, layers)
    return weights


def parameter_count(config: Config) -> int:
    """How many parameters a model has, counting tied weights once."""
    tape = Tape(TraceBuilder(), precision_of("fp32"))
    make_parameters(tape, config)
    return sum(value.elements for value, _ in tape.parameters)
