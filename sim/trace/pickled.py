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
        return type(self), _fields(type(self))(self)


@cache
def _fields(kind: type[Pickled]) -> Callable[[Pickled], tuple[Any, ...]]:
    """What gives the fields of such a value."""
    names = kind.__match_args__
    return attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
