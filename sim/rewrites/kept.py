"""Keeps what a rewrite made of a trace while that lives: policies, and parts of a composition, ask for it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from sim.trace.graph import Trace

Made = TypeVar("Made")

MOST_OPS = 200_000
"""Traces of so many ops together are kept beside the one that they were made of; those asked for last stay."""


def kept(trace: Trace, key: Hashable, make: Callable[[], tuple[Made, Trace]]) -> Made:
    """What `make` returns first, which it is called for once per key. What is returned must not be changed.

    trace: what the rewrite reads; the result stays as long as it does, and does not travel with it.
    key: the rewrite and everything else that decides its result.
    make: the result, and the new trace in it, whose size counts.
    """
    held: OrderedDict[Hashable, tuple[Any, int]] = vars(trace).setdefault("_rewritten", OrderedDict())
    if key in held:
        held.move_to_end(key)
        return held[key][0]  # type: ignore[no-any-return]
    made, new = make()
    held[key] = made, len(new.op_columns.name)
    while sum(ops for _, ops in held.values()) > MOST_OPS:
        held.popitem(last=False)
    return made
