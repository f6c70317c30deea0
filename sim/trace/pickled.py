"""How small frozen values travel to another process: those of a plan or an origin are many."""

from __future__ import annotations

from typing import Any, ClassVar


class Pickled:
    """Pickles as its fields in order, in a part of the time that frozen dataclasses with slots take."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple(getattr(self, each) for each in self.__match_args__)
