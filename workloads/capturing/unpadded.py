"""Attention masks of Hugging Face's models (version 5): left out where a real run leaves them out.

A model looks at its mask before it attends. Where no token is padding, it passes none, so that attention may be flash
attention. Under fake tensors it can't look, and builds and passes a mask, which costs memory and selects another
kernel. So a capture answers in its place: no token is padding and a row is one sequence, unless a mask with padding was
given with its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

MODULE = "transformers.masking_utils"
KEY = "attention_mask"
NOTE = "batches without padding"

LOOK = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""Functions of a padding mask, their first argument: whether no mask need be passed."""
PACKED = "find_packed_sequence_indices"
"""The function that returns None if no row consists of several sequences."""


def has_padding(torch: Any, given: Any) -> bool:
    """Whether a mask with padding is among the inputs, with its values."""
    if isinstance(given, Mapping):
        return any(_masks(torch, value) if key == KEY else has_padding(torch, value) for key, value in given.items())
    return isinstance(given, (list, tuple)) and any(has_padding(torch, value) for value in given)


def _masks(torch: Any, mask: Any) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.device.type == "meta" or hasattr(mask, "fake_mode"):
        return False
    return mask.dim() == 2 and not bool((mask != 0).all())


@contextmanager
def unpadded(assumed: Callable[[str], None]) -> Iterator[None]:
    """Let models take their batches to be without padding; `assumed` is called with a note each time one asks."""
    masking = sys.modules.get(MODULE)
    before = {name: getattr(masking, name) for name in (*LOOK, PACKED) if hasattr(masking, name)}

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
