"""Parts of layers that ranks of tensor parallelism may divide by tokens rather than by heads and columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import LayoutError, near

ATTENTION, MLP, VOCABULARY = "attention", "mlp", "vocabulary"
PARTS = (ATTENTION, MLP, VOCABULARY)
"""Attention with its projections, the MLP, and the embedding with the head."""

_WEIGHT = re.compile(r"h(\d+)\.(attn|mlp)\.")
_OF_NAME = {"attn": ATTENTION, "mlp": MLP}
_SAID = re.compile(r"\s*([a-z_]+)(?:\s+([0-9]{1,9})(?:-([0-9]{1,9}))?)?\s*")


@dataclass(frozen=True, order=True)
class LayerPart:
    """A part of some layers: `attention`, `mlp` or `vocabulary`, of the layers `first` to `last`, -1 for all."""

    part: str
    first: int = -1
    last: int = -1

    def has(self, weight: str) -> bool:
        """Whether a weight of this name belongs to it; of names that are of no layer, whether it is the vocabulary."""
        found = _WEIGHT.match(weight)
        if found is None:
            return self.part == VOCABULARY
        here = self.first < 0 or self.first <= int(found[1]) <= self.last
        return here and self.part == _OF_NAME[found[2]]

    def __str__(self) -> str:
        if self.first < 0:
            return self.part
        return f"{self.part} {self.first}" + (f"-{self.last}" if self.last != self.first else "")


def layer_parts(said: object, key: str) -> tuple[LayerPart, ...]:
    """Parts as they are written: `"mlp, attention 0-3"`, or a sequence of such, in one order, each once.

    key: of the layout, for messages.

    Raises LayoutError naming what is not a part, and the nearest.
    """
    if isinstance(said, str):
        pieces: Sequence[object] = said.split(",") if said.strip() else []
    elif isinstance(said, list | tuple):
        pieces = said
    else:
        pieces = [said]
    if all(isinstance(piece, str | LayerPart) for piece in pieces):
        return tuple(sorted({_part(str(piece), key) for piece in pieces}))
    raise LayoutError(f"{key}: needs parts of layers such as 'mlp, attention 0-3', has {said!r}; nearest: 'mlp'")


def _part(piece: str, key: str) -> LayerPart:
    found = _SAID.fullmatch(piece)
    if found is None or found[1] not in PARTS:
        name = found[1] if found else piece.strip()
        raise LayoutError(f"{key}: {name!r} is not one of {', '.join(PARTS)}{near(name, PARTS)}")
    part, first, last = found[1], found[2], found[3]
    if first is None:
        return LayerPart(part)
    if part == VOCABULARY:
        raise LayoutError(f"{key}: the vocabulary is of no layer, has {piece.strip()!r}; nearest: 'vocabulary'")
    low, high = int(first), int(last or first)
    if low > high:
        raise LayoutError(f"{key}: {low}-{high} is not a range of layers; nearest: '{part} {high}-{low}'")
    return LayerPart(part, low, high)


__all__ = ["ATTENTION", "MLP", "PARTS", "VOCABULARY", "LayerPart", "layer_parts"]
