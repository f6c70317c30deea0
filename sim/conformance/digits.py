"""Choices encoded as one number, because numbers are drawn and shrunk faster than structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Digits:
    """Choices encoded as one number: 0 is the first choice everywhere."""

    def __init__(self, code: int) -> None:
        self.code = code

    def pick(self, choices: Sequence[T]) -> T:
        """The next choice."""
        self.code, digit = divmod(self.code, len(choices))
        return choices[digit]
