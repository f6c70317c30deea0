"""A cache of the values used last, limited by their total weight."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Kept:
    """The values used last, by key, of a total weight of at most `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.things: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self.weight = 0

    def __contains__(self, key: Any) -> bool:
        return key in self.things

    def get(self, key: Any, make: Callable[[], T], weigh: Callable[[T], int] = lambda thing: 1) -> T:
        """The value of that key, made if it is missing."""
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
