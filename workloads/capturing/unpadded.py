"""Attention masks of Hugging Face's models (version 5): left out where a real run leaves them out.

A model looks at its mask before it attends. Where no token is padding, it passes none, so that attention may be flash
attention. Under fake tensors it can't look, and builds and passes a mask, which costs memory and selects another
kernel. So a capture answers in its place: no token is padding, unless a mask with padding was given with its values,
and a row is one sequence, unless positions that start again were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

MODULE = "transformers.masking_utils"
KEY, POSITIONS = "attention_mask", "position_ids"
NOTE = "batches without padding"

LOOK = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""Functions of a padding mask, their first argument: whether no mask need be passed."""
PACKED = "find_packed_sequence_indices"
"""The function that returns None if no row consists of several sequences."""


def has_padding(torch: Any, given: Any) -> bool:
    """Whether a mask with padding is among the inputs, with its values."""
    return any(mask.dim() == 2 and not bool((mask != 0).all()) for mask in _given(torch, given, KEY))


def is_packed(torch: Any, given: Any) -> bool:
    """Whether positions are among the inputs, with their values, that start again within a row: several sequences."""
    return any(bool((at.diff(dim=-1) != 1).any()) for at in _given(torch, given, POSITIONS) if at.dim())


def _given(torch: Any, given: Any, key: str) -> Iterator[Any]:
    """The inputs of that name that have values."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            if name != key:
                yield from _given(torch, value, key)
            elif isinstance(value, torch.Tensor) and value.device.type != "meta" and not hasattr(value, "fake_mode"):
                yield value
    elif isinstance(given, (list, tuple)):
        for value in given:
            yield from _given(torch, value, key)


@contextmanager
def unpadded(assumed: Callable[[str], None], *, packed: bool = False) -> Iterator[None]:
    """Let models take their batches to be without padding; `assumed` is called with a note each time one asks.

    packed: rows are known to consist of several sequences, so that a mask keeps these apart.
    """
    masking = sys.modules.get(MODULE)
    asked = LOOK if packed else (*LOOK, PACKED)
    before = {name: getattr(masking, name) for name in asked if hasattr(masking, name)}

    def without_values(look: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(look)
        def answer(padding_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
            if padding_mask is not None:
                assumed(NOTE)
            return look(None, *args, **kwargs)

        return answer

    def one_sequence(look: Callable[..., Any]) -> Callable[..., None]:
        @wraps(look)
        def answer(*args: Any, **kwargs: Any) -> None:
            assumed(NOTE)
            look(*args, **kwargs)  # its ops run all the same

        return answer

    for name, plain in before.items():
        setattr(masking, name, one_sequence(plain) if name == PACKED else without_values(plain))
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(masking, name, plain)
