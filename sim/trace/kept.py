"""What is derived from a trace and shared by all runs of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property, wraps
from typing import Any, TypeVar

from sim.collecting import uncollected
from sim.trace.graph import Structure, Trace

Derived = TypeVar("Derived")
MOST = 4
MOST_COMMON = 32
"""The same of things that traces have in common; the policies of a study take turns."""
MOST_DERIVED = 8
"""The same of what is derived from each of these; so do its machines."""


def kept(trace: Trace | Structure, name: str, key: Hashable, make: Callable[[], Derived], most: int = MOST) -> Derived:
    """What `make` derives from a trace; made once per key while the trace lives, and nobody may change it.

    It is kept on the trace and freed with it: a table elsewhere would keep what is derived alive, and that the trace.

    trace: the trace, or its structure for what is the same for all traces of that.
    name: what it is; of each, the first of more than `most` keys is forgotten.
    """
    known: OrderedDict[Hashable, Derived] = vars(trace).setdefault(f"_{name}", OrderedDict())
    if key not in known:
        with uncollected():  # what stays, of a large trace millions of objects
            known[key] = make()
        while len(known) > most:
            known.popitem(last=False)
    return known[key]


def of_structure(make: Callable[[Any], Derived]) -> cached_property[Derived]:
    """A property of something that has a `trace` which no size has a part in: derived once for all traces of its
    structure, and not to be changed."""
    name = f"fact_{make.__qualname__}"

    @wraps(make)
    def fact(of: Any) -> Derived:
        return kept(of.trace.structure, name, None, lambda: make(of))

    return cached_property(fact)


def kept_together(trace: Trace, other: Trace, name: str) -> None:
    """Have two traces keep what is derived under a name together, since it is the same for both.

    other: a new one, for which nothing is kept yet.
    """
    vars(other)[f"_{name}"] = vars(trace).setdefault(f"_{name}", OrderedDict())


def in_common(structure: Structure, thing: object, name: str, key: Hashable, make: Callable[[], Derived]) -> Derived:
    """What `make` derives from a structure and a thing that is `had_in_common`; for another thing it is made each time.

    Nobody may change it. name, key: see `kept`.
    """
    thing_and_derived = structure.common.get(id(thing))  # it holds the thing, so that no other has its id
    if thing_and_derived is None:
        return make()
    derived: dict[tuple[str, Hashable], Any] = thing_and_derived[1]
    if (name, key) not in derived:
        while len(derived) >= MOST_DERIVED:
            derived.pop(next(iter(derived)))
        with uncollected():
            derived[name, key] = make()
    found: Derived = derived[name, key]
    return found


def had_in_common(structure: Structure, thing: object) -> None:
    """Note that traces of a structure have a thing in common, such as the actions of a policy that look at no sizes."""
    structure.common.setdefault(id(thing), (thing, {}))
    while len(structure.common) > MOST_COMMON:
        structure.common.pop(next(iter(structure.common)))
