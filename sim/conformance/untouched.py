"""Law 7: a policy leaves alone the program that runs and checks it."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from typing import Any

OURS = ("sim", "workloads")


def watched() -> Callable[[], str]:
    """A function that says what has been replaced since now in the modules of this program, "" for nothing.

    Functions, classes with their members, and constants with their entries. What is imported later does not count.
    """
    before = {where: (value, _entries(value)) for where, value in _parts()}

    def replaced() -> str:
        now = dict(_parts())
        for where in now:
            within = where.rpartition(".")[0]
            if where not in before and within in before and isinstance(now.get(within), type):
                return _said(where)  # a new member of a class
        for where, (value, entries) in before.items():
            if where not in now or now[where] is not value or _entries(value) != entries:
                return _said(where)
        return ""

    return replaced


def _said(where: str) -> str:
    return f"the policy replaces {where}, a part of the program that runs it"


def _parts() -> Iterator[tuple[str, Any]]:
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] in OURS]
    for name, module in [*modules, ("builtins", builtins)]:
        for key, value in list(vars(module).items()):
            if callable(value) or key.isupper():
                yield f"{name}.{key}", value
            if isinstance(value, type) and value.__module__ == name and module is not builtins:
                yield from ((f"{name}.{key}.{member}", each) for member, each in _members(value))


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """What a class does: its functions and properties."""
    return ((key, each) for key, each in list(vars(found).items()) if callable(each) or hasattr(each, "__get__"))


def _entries(value: Any) -> tuple[int, ...]:
    """What a table holds, by identity; nothing of other values."""
    if type(value) is dict:
        return tuple(id(each) for pair in value.items() for each in pair)
    return tuple(map(id, value)) if type(value) in (list, set) else ()
