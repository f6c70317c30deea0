"""The layers of the model families: the forward ops, their order and their names.

Order and composition follow Hugging Face's modelling files, on which the reference figures were measured. Where the
published code of a model differs, the function says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads.adapters import Tuning, linear_layer
from workloads.attention import Core, attention_core
from workloads.experts import mixture
from workloads.models import Config
from workloads.norms import layer_norm, rms_norm
from workloads.primitives import (
    add,
    dropout,
    elementwise,
    multiply,
    power,
    scale,
    shift,
    split,
    tanh,
    unary,
)
from workloads.tape import Tape, Value


@dataclass
class Model:
    """What a forward pass needs besides the tape.

    config: of the model.
    weights: by name.
    core: the shape of its attention core.
    loads: tokens per expert, by layer.
    tuning: which linear layers have an adapter.
    """

    config: Config
    weights: dict[str, Value]
    core: Core
    loads: dict[int, tuple[int, ...]]
    tuning: Tuning

    def linear(self, tape: Tape, name: str, x: Value) -> Value:
        """A linear layer, with its bias and its adapter where it has them."""
        return linear_layer(tape, self.weights, name, x, self.tuning)

    def norm(self, tape: Tape, name: str, x: Value) -> Value:
        """LayerNorm where there is a bias, RMSNorm elsewhere."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return layer_norm(tape, name, x, weight, bias) if bias else rms_norm(tape, name, x, weight)


def gpt2_layer(tape: Tape, model: Model, h: str, x: Value) -> Value:
    """Pre-norm: attention and a two-matrix MLP, each with dropout and a residual. One product yields q, k and v."""
    c = model.config
    normal = model.norm(tape, f"{h}.ln1", x)
    qkv = model.linear(tape, f"{h}.attn.qkv", normal)
    q, k, v = split(tape, f"{h}.attn.qkv", qkv, dict.fromkeys("qkv", (*x.shape[:-1], c.hidden)))
    y = attention_core(tape, f"{h}.attn", model.core, q, k, v)
    y = dropout(tape, f"{h}.attn.dropout", model.linear(tape, f"{h}.attn.proj", y), c.residual_dropout)
    x = add(tape, f"{h}.attn.add", y, x)
    normal = model.norm(tape, f"{h}.ln2", x)
    y = activation(tape, f"{h}.mlp.act", model.linear(tape, f"{h}.mlp.fc", normal), c.activation)
    y = dropout(tape, f"{h}.mlp.dropout", model.linear(tape, f"{h}.mlp.proj", y), c.residual_dropout)
    return add(tape, f"{h}.mlp.add", x, y)


def bert_layer(tape: Tape, model: Model, h: str, x: Value) -> Value:
    """Post-norm: attention and a two-matrix MLP, each followed by dropout, residual and norm."""
    c = model.config
    q, k, v = (model.linear(tape, f"{h}.attn.{part}", x) for part in "qkv")
    y = attention_core(tape, f"{h}.attn", model.core, q, k, v)
    y = dropout(tape, f"{h}.attn.dropout", model.linear(tape, f"{h}.attn.proj", y), c.residual_dropout)
    x = model.norm(tape, f"{h}.ln1", add(tape, f"{h}.attn.add", y, x))
    y = activation(tape, f"{h}.mlp.act", model.linear(tape, f"{h}.mlp.fc", x), c.activation)
    y = dropout(tape, f"{h}.mlp.dropout", model.linear(tape, f"{h}.mlp.proj", y), c.residual_dropout)
    return model.norm(tape, f"{h}.ln2", add(tape, f"{h}.mlp.add", y, x))


def llama_layer(tape: Tape, model: Model, h: str, x: Value, rotary: tuple[Value, Value]) -> Value:
    """Pre-norm with RMSNorm: attention with rotary positions, then SwiGLU, or experts."""
    normal = model.norm(tape, f"{h}.norm1", x)
    q, k, v = (model.linear(tape, f"{h}.attn.{part}", normal) for part in "qkv")
    q = rotate(tape, f"{h}.attn.rope.q", q, rotary, model.core.query_shape)
    k = rotate(tape, f"{h}.attn.rope.k", k, rotary, model.core.key_shape)
    y = attention_core(tape, f"{h}.attn", model.core, q, k, v)
    x = add(tape, f"{h}.attn.add", x, model.linear(tape, f"{h}.attn.proj", y))
    normal = model.norm(tape, f"{h}.norm2", x)
    if tape.layer in model.loads:
        y = mixture(tape, f"{h}.mlp", normal, model.config, model.weights, model.loads[tape.layer], model.tuning)
        if model.config.shared_experts:
            y = add(tape, f"{h}.mlp.shared.add", y, swiglu(tape, model, f"{h}.mlp.shared", normal))
    else:
        y = swiglu(tape, model, f"{h}.mlp", normal)
    return add(tape, f"{h}.mlp.add", x, y)


def swiglu(tape: Tape, model: Model, name: str, x: Value) -> Value:
    """down(silu(gate(x)) * up(x))."""
    gate = unary(tape, f"{name}.act", model.config.activation, model.linear(tape, f"{name}.gate", x))
    up = model.linear(tape, f"{name}.up", x)
    return model.linear(tape, f"{name}.down", multiply(tape, f"{name}.mul", gate, up))


def activation(tape: Tape, name: str, x: Value, kind: str) -> Value:
    """The activation of a two-matrix MLP.

    `gelu_new` is composed of eight kernels, as in Hugging Face's GPT-2, and saves four tensors; every other activation
    is one kernel and saves one.
    """
    if kind != "gelu_new":
        return unary(tape, name, kind, x)
    half = scale(tape, f"{name}.half", x)
    cube = scale(tape, f"{name}.cube.scale", power(tape, f"{name}.cube", x))
    inner = scale(tape, f"{name}.inner.scale", add(tape, f"{name}.inner", x, cube))
    return multiply(tape, f"{name}.out", half, shift(tape, f"{name}.one", tanh(tape, f"{name}.tanh", inner)))


def rotary_tables(tape: Tape, sequence: int, head: int, dtype: str) -> tuple[Value, Value]:
    """Cosines and sines of all positions, (1, 1, sequence, head): computed once per pass, kept for all layers."""
    tables = [tape.constant(f"rotary.{what}", (1, 1, sequence, head), dtype) for what in ("cos", "sin")]
    tape.op("rotary", "elementwise", [], tables, flops=10 * sequence * head)
    return tables[0], tables[1]


def rotate(tape: Tape, name: str, x: Value, rotary: tuple[Value, Value], shape: tuple[int, ...]) -> Value:
    """x cos + rotate_half(x) sin. Saves only the tables; fp32 tables give an fp32 result."""
    x = x.viewed(*shape)
    cos, sin = rotary
    straight = multiply(tape, f"{name}.cos", x, cos)
    low, high = _half(tape, f"{name}.low", x), _half(tape, f"{name}.high", x)
    minus = elementwise(tape, f"{name}.neg", "neg", [high], tape.result(f"{name}.neg.out", high.shape, x.dtype))
    tape.record([high], [minus], lambda g: [elementwise(tape, f"{name}.neg.bwd", "neg", [g], tape.gradient(high))])
    turned = elementwise(tape, f"{name}.turn", "copy", [minus, low], tape.result(f"{name}.turn.out", shape, x.dtype))
    tape.record([minus, low], [turned], lambda g: [g.viewed(*low.shape), g.viewed(*low.shape)])
    return add(tape, f"{name}.add", straight, multiply(tape, f"{name}.sin", turned, sin))


def _half(tape: Tape, name: str, x: Value) -> Value:
    """A view of half of each head; backward writes its gradient into zeros of full size (slice_backward)."""
    view = tape.slice_of(x, name, *x.shape[:-1], x.shape[-1] // 2)
    tape.record([x], [view], lambda g: [elementwise(tape, f"{name}.bwd", "copy", [g], tape.gradient(x))])
    return view
