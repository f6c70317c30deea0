"""Numbers that a script draws with `random` or NumPy while its step is captured: always the same ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NOTE = "what the script draws with random or NumPy is drawn from seed 0"


@contextmanager
def seeded(assumed: Callable[[str], None]) -> Iterator[None]:
    """Draw from seed 0 while the context lasts, and from where one was before after it.

    assumed: is called with a note where something was drawn.
    """
    numpy: Any = sys.modules["numpy"]  # the package needs it
    before = random.getstate(), numpy.random.get_state()
    random.seed(0)
    numpy.random.seed(0)
    start = _state(numpy)
    made = numpy.random.default_rng

    def default_rng(seed: Any = None) -> Any:
        if seed is None:
            assumed(NOTE)
        return made(0 if seed is None else seed)

    from unittest.mock import patch  # brings asyncio with it

    try:
        with patch.object(numpy.random, "default_rng", default_rng):
            yield
    finally:
        if _state(numpy) != start:
            assumed(NOTE)
        random.setstate(before[0])
        numpy.random.set_state(before[1])


def _state(numpy: Any) -> tuple[Any, ...]:
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), name, keys.tobytes(), *rest
