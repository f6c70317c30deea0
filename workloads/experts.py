"""Mixture of experts: routing and the experts' MLPs.

`grouped` is Hugging Face's grouped-matrix form: tokens are sorted by expert, and one kernel multiplies all groups with
a stack of weights, (experts, columns, inner). `loop` runs one expert after another, each with its own weights and as
many rows as it has tokens (the module list of transformers before version 5). In this form experts can reside in
different tiers.
"""

from __future__ import annotations

import numpy as np

from sim.trace.tensor import ROWS, TOKENS
from workloads.activations import activation
from workloads.adapters import Tuning, linear_layer
from workloads.costs import element_flops, matmul_flops
from workloads.eight_bits import eight_bit_linear, multiplies_in_8_bits
from workloads.families import Config
from workloads.primitives import Gradients, elementwise, gather, linear, multiply, softmax, split
from workloads.sizes import named
from workloads.tape import Tape, Value


def routing(config: Config, tokens: int, *, seed: int, skew: float) -> dict[int, tuple[int, ...]]:
    """The number of tokens per expert, for each layer that has experts; a layer sums to tokens * experts_per_token.

    The loads are drawn from a multinomial distribution. None exceeds `tokens`, because no token uses an expert twice.
    Which tokens go to the same expert is not drawn, because neither memory nor time depends on it.

    config: of the model.
    tokens: in the batch.
    seed: of the random numbers.
    skew: the experts' shares fall as rank^-skew, with ranks in random order; 0 is uniform.
    """
    rng = np.random.default_rng(seed)
    loads = {}
    for layer in range(config.layers):
        if not config.has_experts(layer):
            continue
        share = (1.0 + rng.permutation(config.experts)) ** -skew
        load = rng.multinomial(tokens * config.experts_per_token, share / share.sum())
        while (excess := int((load - tokens).clip(min=0).sum())) > 0:
            load = load.clip(max=tokens)
            open_share = np.where(load < tokens, share, 0.0)
            load = load + rng.multinomial(excess, open_share / open_share.sum())
        loads[layer] = tuple(int(n) for n in load)
    return loads


def mixture(
    tape: Tape, name: str, x: Value, c: Config, weights: dict[str, Value], loads: tuple[int, ...], tuning: Tuning
) -> Value:
    """The sum of the chosen experts' outputs, weighted by the router; (batch, sequence, hidden)."""
    tokens, k = named(x.elements // c.hidden, TOKENS), c.experts_per_token
    flat = x.viewed(tokens, c.hidden)
    scores, choice = route(tape, f"{name}.router", flat, c, weights[f"{name}.router.weight"])
    if c.experts_form == "loop":
        y = _loop(tape, name, flat, scores, c, weights, loads, tuning)
    else:
        y = _grouped(tape, name, flat, scores, choice, c, weights, named(tokens * k, ROWS))
    return y.viewed(*x.shape)


def route(tape: Tape, name: str, x: Value, c: Config, weight: Value) -> tuple[Value, Value]:
    """The fp32 scores of the chosen experts, (tokens, k), and their indices."""
    tokens, k = x.shape[0], c.experts_per_token
    logits = tape.cast(linear(tape, name, x, weight), "fp32", f"{name}.up")
    shares = softmax(tape, f"{name}.softmax", logits)
    top = tape.result(f"{name}.top.out", (tokens, k), "fp32")
    choice = tape.constant(f"{name}.choice", (tokens, k), "int64")
    tape.op(f"{name}.top", "other", [shares], [top, choice], flops=shares.elements)
    tape.save(choice, "experts whose shares get a gradient")

    def top_rule(g: Value) -> Gradients:
        return [elementwise(tape, f"{name}.top.bwd", "copy", [g, choice], tape.gradient(shares))]

    tape.record([shares], [top], top_rule)
    total = tape.constant(f"{name}.total", (tokens, 1), "fp32")
    tape.op(f"{name}.sum", "reduce", [top], [total], flops=element_flops("sum", top.elements))
    out = tape.result(f"{name}.scores", (tokens, k), "fp32")
    elementwise(tape, f"{name}.normalise", "div", [top, total], out)
    tape.save(top, "numerator of a quotient")
    tape.save(total, "denominator of a quotient")

    def quotient_rule(g: Value) -> Gradients:  # a few kernels over k numbers per token
        return [elementwise(tape, f"{name}.normalise.bwd", "div", [g, top, total], tape.gradient(top))]

    tape.record([top], [out], quotient_rule)
    return out, choice


def _grouped(
    tape: Tape, name: str, x: Value, scores: Value, choice: Value, c: Config, weights: dict[str, Value], rows: int
) -> Value:
    tokens, width = x.shape[0], c.expert_ffn
    order, inverse, source = (
        tape.constant(f"{name}.{what}", (rows,), "int64") for what in ("order", "inverse", "source")
    )
    ends = tape.constant(f"{name}.ends", (1, c.experts), "int32")  # a sum over tokens: no row is one sample's
    tape.op(f"{name}.sort", "other", [choice], [order, inverse, source, ends], flops=rows)
    sorted_scores = gather(tape, f"{name}.scores", scores, (rows, 1), order)
    picked = gather(tape, f"{name}.dispatch", x, (rows, c.hidden), source)
    both = grouped_linear(tape, f"{name}.gate_up", picked, weights[f"{name}.gate_up.weight"], ends)
    gate, up = split(tape, f"{name}.gate_up", both, dict.fromkeys(("gate", "up"), (rows, width)))
    hidden = multiply(tape, f"{name}.mul", activation(tape, f"{name}.act", gate, c.activation), up)
    down = grouped_linear(tape, f"{name}.down", hidden, weights[f"{name}.down.weight"], ends)
    weighted = multiply(tape, f"{name}.weight", down, sorted_scores)  # fp32, as the scores are
    back = gather(tape, f"{name}.combine", weighted, (rows, c.hidden), inverse)
    total = tape.result(f"{name}.combine.sum.out", (tokens, c.hidden), back.dtype)
    tape.op(f"{name}.combine.sum", "reduce", [back], [total], flops=element_flops("sum", back.elements))
    # the sum's gradient is a view of that of its result, repeated
    tape.record([back], [total], lambda g: [g.viewed(*g.shape)])
    return tape.cast(total, x.dtype, f"{name}.combine.down")


def grouped_linear(tape: Tape, name: str, x: Value, weight: Value, ends: Value) -> Value:
    """Each group of rows times its own matrix, in one kernel; `ends` has the position after each group."""
    if multiplies_in_8_bits(tape):
        rows, columns = x.shape[0], weight.shape[1]
        flops = matmul_flops(rows, x.shape[1], columns)
        return eight_bit_linear(tape, name, x, weight, (rows, columns), flops, others=[ends])
    w = tape.to_compute(weight, f"{name}.weight.cast")
    a = tape.to_compute(x, f"{name}.input.cast")
    rows, inner = a.shape
    out = tape.result(f"{name}.out", (rows, weight.shape[1]), a.dtype)
    flops = matmul_flops(rows, inner, weight.shape[1])
    tape.op(name, "matmul", [a, w, ends], [out], flops=flops)
    tape.save(a, "operand of a matrix product: the weight's gradient", w)
    tape.save(w, "copy of the weight that was multiplied", a)
    tape.save(ends, "where the groups of rows end")

    def rule(g: Value) -> Gradients:
        da = dw = None
        if tape.needs_gradient(w):
            tape.op(f"{name}.bwd.weight", "matmul", [a, g, ends], [dw := tape.gradient(w)], flops=flops)
        if tape.needs_gradient(a):
            tape.op(f"{name}.bwd", "matmul", [g, w, ends], [da := tape.gradient(a)], flops=flops)
        return [da, dw]

    tape.record([a, w], [out], rule)
    return out


def _loop(
    tape: Tape,
    name: str,
    x: Value,
    scores: Value,
    c: Config,
    weights: dict[str, Value],
    loads: tuple[int, ...],
    tuning: Tuning,
) -> Value:
    """One expert after another; each adds its rows to the result in place (index_add_)."""
    total = tape.result(f"{name}.total.out", x.shape, x.dtype)
    tape.per_sample(total)
    tape.op(f"{name}.total", "elementwise", [], [total])
    for expert, rows in enumerate(loads):
        if not rows:
            continue
        e, tape.routed, rows = f"{name}.expert{expert}", rows, named(rows, ROWS)
        index, rank = (tape.constant(f"{e}.{what}", (rows,), "int64") for what in ("rows", "ranks"))
        tape.op(f"{e}.find", "other", [scores], [index, rank], flops=scores.shape[0])
        picked = gather(tape, f"{e}.dispatch", x, (rows, c.hidden), index)
        share = gather(tape, f"{e}.scores", scores, (rows, 1), index, rank)
        gate = activation(tape, f"{e}.act", linear_layer(tape, weights, f"{e}.gate", picked, tuning), c.activation)
        up = linear_layer(tape, weights, f"{e}.up", picked, tuning)
        hidden = multiply(tape, f"{e}.mul", gate, up)
        y = multiply(tape, f"{e}.weight", linear_layer(tape, weights, f"{e}.down", hidden, tuning), share)
        total = _add_rows(tape, f"{e}.combine", total, tape.cast(y, x.dtype, f"{e}.weight.down"), index)
    tape.routed = 0
    return total


def _add_rows(tape: Tape, name: str, total: Value, rows: Value, index: Value) -> Value:
    """`total` with `rows` added in place; the gradient of the rows is gathered from that of the total."""
    out = tape.result_over(total, f"{name}.out")
    flops = element_flops("add", rows.elements)
    tape.op(name, "elementwise", [total, rows, index], [out], flops=flops, bytes=3 * tape.builder.bytes_of(rows.tensor))
    tape.save(index, "rows whose gradients are picked", rows)
    tape.save(rows, "shape of the gradient: index_add_ keeps all that it added", rows)

    def rule(g: Value) -> Gradients:
        if not tape.needs_gradient(rows):
            return [g, None]
        gradient = tape.gradient(rows)
        touched = 2 * tape.builder.bytes_of(gradient.tensor)
        tape.op(f"{name}.bwd", "embedding", [g, index, rows], [gradient], bytes=touched)
        return [g, gradient]

    tape.record([total, rows], [out], rule)
    return out
