"""The layers of the model families: the forward ops, their order and their names.

Order and composition follow Hugging Face's modelling files, on which the reference figures were measured. Where the
published code of a model differs, the function says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads.activations import activation
from workloads.adapters import Tuning, linear_layer
from workloads.attention import Core, attention_core
from workloads.experts import mixture
from workloads.families import LAYER_NORM_1P, RMS_NORM, Config
from workloads.norms import layer_norm, rms_norm
from workloads.primitives import add, dropout, elementwise, multiply, split
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
        """The norm that the model has."""
        weight, kind = self.weights[f"{name}.weight"], self.config.norm
        if kind == RMS_NORM:
            return rms_norm(tape, name, x, weight)
        return layer_norm(tape, name, x, weight, self.weights[f"{name}.bias"], one_plus=kind == LAYER_NORM_1P)


def decoder_layer(tape: Tape, model: Model, h: str, x: Value, rotary: tuple[Value, Value] | None) -> Value:
    """Pre-norm: attention, then an MLP or experts, each with a norm before it, dropout and a residual.

    rotary: tables of rotary positions, where the model has them.
    """
    c, (first, second, _) = model.config, model.config.of_family.norms
    normal = model.norm(tape, f"{h}.{first}", x)
    q, k, v = _queries_keys_values(tape, model, f"{h}.attn", normal)
    if rotary:
        q = rotate(tape, f"{h}.attn.rope.q", q, rotary, model.core.query_shape)
        k = rotate(tape, f"{h}.attn.rope.k", k, rotary, model.core.key_shape)
    y = attention_core(tape, f"{h}.attn", model.core, q, k, v)
    y = dropout(tape, f"{h}.attn.dropout", model.linear(tape, f"{h}.attn.proj", y), c.residual_dropout)
    x = add(tape, f"{h}.attn.add", *((y, x) if c.of_family.result_first else (x, y)))
    normal = model.norm(tape, f"{h}.{second}", x)
    if tape.layer in model.loads:
        y = mixture(tape, f"{h}.mlp", normal, c, model.weights, model.loads[tape.layer], model.tuning)
        if c.shared_experts:
            y = add(tape, f"{h}.mlp.shared.add", y, mlp(tape, model, f"{h}.mlp.shared", normal))
    else:
        y = mlp(tape, model, f"{h}.mlp", normal)
    return add(tape, f"{h}.mlp.add", x, dropout(tape, f"{h}.mlp.dropout", y, c.residual_dropout))


def _queries_keys_values(tape: Tape, model: Model, name: str, x: Value) -> tuple[Value, Value, Value]:
    """From one product or from three."""
    if not model.config.joint:
        q, k, v = (model.linear(tape, f"{name}.{part}", x) for part in "qkv")
        return q, k, v
    c = model.config
    qkv = model.linear(tape, f"{name}.qkv", x)
    widths = {"q": c.heads * c.head, "k": c.kv_heads * c.head, "v": c.kv_heads * c.head}
    q, k, v = split(tape, f"{name}.qkv", qkv, {part: (*x.shape[:-1], width) for part, width in widths.items()})
    return q, k, v


def mlp(tape: Tape, model: Model, name: str, x: Value) -> Value:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""
    c, has = model.config, model.config.of_family
    if not c.gated:
        y = activation(tape, f"{name}.act", model.linear(tape, f"{name}.{has.up}", x), c.activation)
        return model.linear(tape, f"{name}.{has.down}", y)
    if c.joint:
        both = model.linear(tape, f"{name}.{has.up}", x)
        halves = dict.fromkeys(("gate", "up"), (*x.shape[:-1], both.shape[-1] // 2))
        gate, up = split(tape, f"{name}.{has.up}", both, halves)
        gate = activation(tape, f"{name}.act", gate, c.activation)
    else:
        gate = activation(tape, f"{name}.act", model.linear(tape, f"{name}.gate", x), c.activation)
        up = model.linear(tape, f"{name}.{has.up}", x)
    return model.linear(tape, f"{name}.{has.down}", multiply(tape, f"{name}.mul", gate, up))


def bert_layer(tape: Tape, model: Model, h: str, x: Value) -> Value:
    """Post-norm: attention and a two-matrix MLP, each followed by dropout, residual and norm."""
    c = model.config
    q, k, v = _queries_keys_values(tape, model, f"{h}.attn", x)
    y = attention_core(tape, f"{h}.attn", model.core, q, k, v)
    y = dropout(tape, f"{h}.attn.dropout", model.linear(tape, f"{h}.attn.proj", y), c.residual_dropout)
    x = model.norm(tape, f"{h}.ln1", add(tape, f"{h}.attn.add", y, x))
    y = dropout(tape, f"{h}.mlp.dropout", mlp(tape, model, f"{h}.mlp", x), c.residual_dropout)
    return model.norm(tape, f"{h}.ln2", add(tape, f"{h}.mlp.add", y, x))


def rotary_tables(tape: Tape, sequence: int, head: int, dtype: str) -> tuple[Value, Value]:
    """Cosines and sines of all positions, (1, 1, sequence, head): computed once per pass, kept for all layers."""
    tables = [tape.constant(f"rotary.{what}", (1, 1, sequence, head), dtype) for what in ("cos", "sin")]
    tape.op("rotary", "elementwise", [], tables, flops=10 * sequence * head)
    return tables[0], tables[1]


def rotate(tape: Tape, name: str, x: Value, rotary: tuple[Value, Value], shape: tuple[int, ...]) -> Value:
    """x cos + rotate_half(x) sin. Saves only the tables; fp32 tables give an fp32 result.

    Where the tables are narrower than the heads, of each head the first elements are rotated and joined to the others.
    """
    x = x.viewed(*shape)
    width, turned = shape[-1], rotary[0].shape[-1]
    if turned == width:
        return _turned(tape, name, x, rotary)
    first = _part(tape, f"{name}.first", x, turned)
    rest = _part(tape, f"{name}.rest", x, width - turned)
    first = _turned(tape, name, first, rotary)
    return _joined(tape, f"{name}.join", first, tape.cast(rest, first.dtype, f"{name}.rest.up"))


def _turned(tape: Tape, name: str, x: Value, rotary: tuple[Value, Value]) -> Value:
    cos, sin = rotary
    straight = multiply(tape, f"{name}.cos", x, cos)
    half = x.shape[-1] // 2
    low, high = _part(tape, f"{name}.low", x, half), _part(tape, f"{name}.high", x, half)
    minus = elementwise(tape, f"{name}.neg", "neg", [high], tape.result(f"{name}.neg.out", high.shape, x.dtype))
    tape.record([high], [minus], lambda g: [elementwise(tape, f"{name}.neg.bwd", "neg", [g], tape.gradient(high))])
    turned = _joined(tape, f"{name}.turn", minus, low)
    return add(tape, f"{name}.add", straight, multiply(tape, f"{name}.sin", turned, sin))


def _joined(tape: Tape, name: str, a: Value, b: Value) -> Value:
    """Two parts of each head side by side; their gradients are views of that of the result."""
    shape = (*a.shape[:-1], a.shape[-1] + b.shape[-1])
    out = elementwise(tape, name, "copy", [a, b], tape.result(f"{name}.out", shape, a.dtype))
    tape.record([a, b], [out], lambda g: [g.viewed(*a.shape), g.viewed(*b.shape)])
    return out


def _part(tape: Tape, name: str, x: Value, width: int) -> Value:
    """A view of a part of each head; backward writes its gradient into zeros of full size (slice_backward)."""
    view = tape.slice_of(x, name, *x.shape[:-1], width)
    tape.record([x], [view], lambda g: [elementwise(tape, f"{name}.bwd", "copy", [g], tape.gradient(x))])
    return view
