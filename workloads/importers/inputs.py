"""The tensors among the recorded arguments of a call: shapes and element types, and how much of a storage they show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from workloads.importers.aten import ITEM_BYTES

KEPT = ("Input type", "Input Dims", "Input Strides")
"""The arguments that are read."""
MOST_INPUTS = 4096


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a call was given.

    shape, kind: its sides, and the C++ name of its elements' type ("" where that is not known).
    shown: its sides without those along which it is expanded, whose elements are all the same ones.
    span: elements from its first to the end of the last row that its strides show, 0 where they are not known. Of a
        part of a tensor (a third of the columns) it is the whole.
    """

    shape: tuple[int, ...]
    kind: str
    shown: tuple[int, ...]
    span: int = 0

    @property
    def whole_bytes(self) -> int:
        """Bytes of what it is a part of, 0 where it is none, or that is not known."""
        return self.span * self.item if self.span > math.prod(self.shown) else 0

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES.get(self.kind, 4)

    @property
    def bytes(self) -> int:
        """Bytes of what it shows."""
        return math.prod(self.shown) * self.item


def inputs_of(args: dict[str, Any]) -> list[Input]:
    """The tensors among a call's arguments, lists flattened."""
    kinds, dims, strides = (args.get(key) for key in KEPT)
    if not isinstance(kinds, list) or not isinstance(dims, list):
        return []
    steps = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
    tensors: list[Input] = []
    for kind, shape, step in zip(kinds[:MOST_INPUTS], dims, steps):
        if not isinstance(kind, str) or not isinstance(shape, list):
            continue
        if kind == "TensorList":
            inner = step if isinstance(step, list) and len(step) == len(shape) else [None] * len(shape)
            pairs = zip(shape[:MOST_INPUTS], inner)
            tensors += [_input(each, "", known) for each, known in pairs if _is_shape(each)]
        elif kind in ITEM_BYTES and _is_shape(shape):
            tensors.append(_input(shape, kind, step))
    return tensors


def _input(shape: list[int], kind: str, strides: Any) -> Input:
    known = isinstance(strides, list) and len(strides) == len(shape)
    shown = tuple(n for n, step in zip(shape, strides) if step != 0 or n == 0) if known else tuple(shape)
    span = max((n * step for n, step in zip(shape, strides) if type(step) is int), default=0) if known else 0
    return Input(tuple(shape), kind, shown, span if 0 <= span < 1 << 50 else 0)


def _is_shape(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > 64:
        return False
    return all(type(side) is int and 0 <= side < 1 << 40 for side in value) and math.prod(value) < 1 << 50
