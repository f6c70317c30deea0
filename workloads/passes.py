"""The passes of the model families: what a forward pass computes from the tokens to the loss, or to the head."""

from __future__ import annotations

from dataclasses import replace

from workloads.activations import activation
from workloads.attention import Core, causal_mask
from workloads.layers import Model, bert_layer, decoder_layer, rotary_tables
from workloads.losses import cross_entropy, head_loss
from workloads.primitives import add, dropout, embedding, split, tanh
from workloads.tape import Tape, Value


def decoder_pass(tape: Tape, model: Model, loss: str) -> Value:
    """The loss of a decoder: its body, and a head over all tokens, tied or untied."""
    ids, labels = _inputs(tape, model.core)
    x = decoder_body(tape, model, ids)
    return head_loss(tape, loss, "head", x, head_weight(model), labels, causal=True)


def decoder_body(tape: Tape, model: Model, ids: Value) -> Value:
    """A decoder up to its head: an embedding, learned or rotary positions, pre-norm layers, a norm."""
    c, w, core, table = model.config, model.weights, model.core, model.config.of_family.table
    x = embedding(tape, table, ids, w[f"{table}.weight"])
    if c.learned:
        x = _positions(tape, "wpe", x, w["wpe.weight"])
    rotary = rotary_tables(tape, core.sequence, c.turned, x.dtype) if c.rotary else None
    if core.implementation == "eager":
        model.core = replace(core, mask=causal_mask(tape, core.batch, core.sequence, x.dtype))
    x = dropout(tape, "dropout", x, c.embedding_dropout)
    for i in range(c.layers):
        tape.layer = i
        x = decoder_layer(tape, model, f"h{i}", x, rotary)
    tape.layer = -1
    return model.norm(tape, c.of_family.norms[-1], x)


def head_weight(model: Model) -> Value:
    """The matrix of the head: one of its own, or the embedding."""
    c = model.config
    return model.weights[f"{c.of_family.table}.weight" if c.tied else "head.weight"]


def bert_pass(tape: Tape, model: Model, loss: str) -> Value:
    """The loss of BERT's pre-training: masked tokens over the whole sequence, and whether sentences follow."""
    c, w, core = model.config, model.weights, model.core
    ids, labels = _inputs(tape, core)
    types = tape.constant("token_types", (core.batch, core.sequence), "int64", "input")
    following = tape.constant("next_sentence.labels", (core.batch,), "int64", "input") if c.next_sentence else None
    x = add(
        tape, "embed.add", embedding(tape, "wte", ids, w["wte.weight"]), embedding(tape, "wtt", types, w["wtt.weight"])
    )
    x = _positions(tape, "wpe", x, w["wpe.weight"])
    x = dropout(tape, "dropout", model.norm(tape, "embed.ln", x), c.embedding_dropout)
    for i in range(c.layers):
        tape.layer = i
        x = bert_layer(tape, model, f"h{i}", x)
    tape.layer = -1
    pooled = None
    if following is not None:
        (first,) = split(tape, "pooler.first", x, {"token": (core.batch, c.hidden)})
        pooled = tanh(tape, "pooler.act", model.linear(tape, "pooler", first))
    y = activation(tape, "transform.act", model.linear(tape, "transform", x), c.activation)
    y = model.norm(tape, "transform.ln", y)
    tokens = head_loss(tape, loss, "head", y, head_weight(model), labels, bias=w["head.bias"], causal=False)
    if following is None or pooled is None:
        return tokens
    two = model.linear(tape, "next_sentence", pooled)
    sentence = cross_entropy(tape, "next_sentence.loss", two, following)
    return add(tape, "loss.add", tokens, sentence)


def loss_of(tape: Tape, model: Model, loss: str) -> Value:
    """The loss of a model, whose head computes it in one of the ways in `workloads.losses`."""
    return (decoder_pass if model.config.of_family.causal else bert_pass)(tape, model, loss)


def _inputs(tape: Tape, core: Core) -> tuple[Value, Value]:
    shape = (core.batch, core.sequence)
    return tape.constant("ids", shape, "int64", "input"), tape.constant("labels", shape, "int64", "input")


def _positions(tape: Tape, name: str, x: Value, table: Value) -> Value:
    """x plus one learned vector per position, broadcast over the batch; its gradient is summed over the batch."""
    positions = tape.constant("positions", (1, x.shape[1]), "int64")
    tape.op("positions", "other", [], [positions])
    vectors = embedding(tape, name, positions, table)
    out = tape.result(f"{name}.add.out", x.shape, x.dtype)
    tape.op(f"{name}.add", "elementwise", [x, vectors], [out], flops=x.elements)

    def rule(g: Value) -> list[Value | None]:
        if x.shape[0] == 1 or not tape.needs_gradient(vectors):
            return [g, g]
        gradient = tape.gradient(vectors)
        tape.op(f"{name}.add.bwd", "reduce", [g], [gradient], flops=g.elements, settles=True)
        return [g, gradient]

    tape.record([x, vectors], [out], rule)
    return out
