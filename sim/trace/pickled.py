"""How small frozen values travel to another process: those of a plan or an origin are many."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar


class Pickled:
    """Pickles as its fields in order, in a part of the time that frozen dataclasses with slots take."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), _reader(self.__match_args__)(self)


@cache
def _reader(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    """What reads the fields of these names."""
    return attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
