"""The things used last, as many as weigh no more than they may together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Kept:
    """The things used last, by key, as many as weigh `most` together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.things: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self.weight = 0

    def __contains__(self, key: Any) -> bool:
        return key in self.things

    def get(self, key: Any, make: Callable[[], T], weigh: Callable[[T], int] = lambda thing: 1) -> T:
        """The thing of that key, made if need be."""
        if key in self.things:
            self.things.move_to_end(key)
        else:
            made = make()
            self.things[key] = made, weigh(made)
            self.weight += self.things[key][1]
            while self.weight > self.most and len(self.things) > 1:
                self.weight -= self.things.popitem(last=False)[1][1]
        thing: T = self.things[key][0]
        return thing
