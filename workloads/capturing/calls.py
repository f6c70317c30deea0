"""Which layer an op belongs to: each call of a module that is a layer has a number of its own.

A shared layer or a recurrent cell is called several times in a step. Its calls share weights, but what they save is
apart, and each is recomputed on its own. A gradient of such weights belongs to the first call, whose backward is the
last to add to it. Microbatches are not further calls: counting starts over with the first forward op after a backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from workloads.capturing.layers import called_repeatedly, layer_paths, outermost
from workloads.capturing.wrapped import WrappedParts


class LayerCalls:
    """Follows the calls of a module's layers.

    root: the module.
    wanted: which parts are layers, as for `workloads.capture.capture`.
    apart: parts that are models of their own.
    """

    def __init__(self, root: Any, wanted: str | Sequence[str] | None = None, apart: Sequence[str] = ()) -> None:
        self._root = root
        self._paths = layer_paths(root, wanted, apart)
        self._wrapped = WrappedParts(root) if wanted is None else None
        self._layer_of: dict[str, str] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._keys: list[tuple[str, int]] = []
        self._count: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._unused = set(apart)
        self._current: dict[str, int] = {}

    def restart(self) -> None:
        """A forward pass begins."""
        self._count.clear()
        self._current.clear()

    def settle(self) -> None:
        """The step has run: layers are what its library wraps, if it says so; without any, repeated calls are."""
        if self._wrapped is not None and (wrapped := self._wrapped.found()):
            self._paths = outermost(wrapped)
            self._layer_of.clear()
        self._unused -= {path.partition(".")[0] for path in self._seen} if self._seen else self._unused
        if self._unused:
            self._paths = tuple(path for path in self._paths if self.is_used(path))
            self._layer_of.clear()
        if not self._paths:
            self._paths = called_repeatedly(self._root, self._count)
            self._layer_of.clear()
        self.restart()

    def close(self) -> None:
        """The step runs no more; a library whose model it is is left as it was."""
        if self._wrapped is not None:
            self._wrapped.close()

    def is_used(self, path: str) -> bool:
        """Whether the step calls the model in which a module or parameter is."""
        return path.partition(".")[0] not in self._unused

    def entered(self, path: str) -> None:
        """A module is called."""
        self._seen.add(path)
        self._current[path] = self._count[path]
        self._count[path] += 1

    def entered_again(self, path: str, number: int) -> None:
        """A module is called by a checkpoint's recomputation, in the backward of the call with that number."""
        self._current[path] = self._keys[number][1] if number >= 0 else 0

    def number(self, path: str) -> int:
        """The number of the layer in which a module is, in its present call; -1 for no layer."""
        layer = self._layer(path)
        return self._number(layer, self._current.get(layer, 0)) if layer else -1

    def first(self, path: str) -> int:
        """The number of the first call of the layer in which a module is; -1 for no layer."""
        layer = self._layer(path)
        return self._number(layer, 0) if layer else -1

    def in_order(self, used: Iterable[int]) -> tuple[tuple[str, ...], dict[int, int]]:
        """The path of each layer in the order in which they run, then of those that don't; and numbers in that order.

        used: the numbers in the order of ops; -1 is passed over.
        """
        idle = [self._number(path, 0) for path in self._paths]
        order = [n for n in dict.fromkeys((*used, *idle)) if n >= 0]
        return tuple(self._keys[n][0] for n in order), {-1: -1, **{n: i for i, n in enumerate(order)}}

    def _number(self, layer: str, call: int) -> int:
        key = layer, call
        if key not in self._numbers:
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return self._numbers[key]

    def _layer(self, path: str) -> str:
        found = self._layer_of.get(path)
        if found is None:
            parts = path.split(".")
            prefixes = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
            found = self._layer_of[path] = next((prefix for prefix in prefixes if prefix in self._paths), "")
        return found
