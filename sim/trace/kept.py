"""What is derived from a trace and shared by all runs of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from sim.collecting import uncollected
from sim.trace.graph import Structure, Trace

Derived = TypeVar("Derived")
MOST = 4


def kept(trace: Trace | Structure, name: str, key: Hashable, make: Callable[[], Derived]) -> Derived:
    """What `make` derives from a trace; made once per key while the trace lives, and nobody may change it.

    It is kept on the trace and freed with it: a table elsewhere would keep what is derived alive, and that the trace.

    trace: the trace, or its structure for what is the same for all traces of that.
    name: what it is; of each, the first of more than `MOST` keys is forgotten.
    """
    known: OrderedDict[Hashable, Derived] = vars(trace).setdefault(f"_{name}", OrderedDict())
    if key not in known:
        with uncollected():  # what stays, of a large trace millions of objects
            known[key] = make()
        while len(known) > MOST:
            known.popitem(last=False)
    return known[key]
