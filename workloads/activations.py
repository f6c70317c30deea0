"""Activations of an MLP: one kernel each, or the kernels that Hugging Face's models compose them of."""

from __future__ import annotations

from workloads.primitives import add, multiply, power, scale, shift, tanh, unary
from workloads.tape import Tape, Value


def activation(tape: Tape, name: str, x: Value, kind: str) -> Value:
    """The activation of an MLP, one of the values of `workloads.keys.ACTIVATIONS`.

    `gelu_new` is composed of eight kernels, as in Hugging Face's GPT-2, and saves four tensors; `relu2`, the square of
    a ReLU, of two, which save one tensor. Every other activation is one kernel and saves one.
    """
    if kind == "relu2":
        return power(tape, f"{name}.square", unary(tape, name, "relu", x))
    if kind != "gelu_new":
        return unary(tape, name, kind, x)
    half = scale(tape, f"{name}.half", x)
    cube = scale(tape, f"{name}.cube.scale", power(tape, f"{name}.cube", x))
    inner = scale(tape, f"{name}.inner.scale", add(tape, f"{name}.inner", x, cube))
    return multiply(tape, f"{name}.out", half, shift(tape, f"{name}.one", tanh(tape, f"{name}.tanh", inner)))
