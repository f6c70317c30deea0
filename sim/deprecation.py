"""Names that were renamed: the earlier one still works, warns, and names the present one (`docs/stability.md`)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field
from typing import Any

from sim.errors import Caution, PolicyError

_EARLIER = "earlier names"


class Renamed(DeprecationWarning):
    """An earlier name of something was used."""


def formerly(*names: str) -> Mapping[str, tuple[str, ...]]:
    """Metadata of a policy's parameter that had other names: `field(default=None, metadata=formerly("grain"))`."""
    return {_EARLIER: names}


def warn_renamed(what: str, old: str, new: str) -> None:
    """Warn that `old` is an earlier name, at the line that called this program."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("sim", "workloads"):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{what} {old!r} is now called {new!r}", Renamed, stacklevel=level)


def present_names(what: str, given: Mapping[str, Any], fields: Collection[Field[Any]]) -> dict[str, Any]:
    """Values of parameters by their present names; each earlier name warns.

    Raises PolicyError if a parameter is given under both.
    """
    present = {old: field.name for field in fields for old in field.metadata.get(_EARLIER, ())}
    values = {key: value for key, value in given.items() if key not in present}
    for old in given:
        if old in present:
            new = present[old]
            if new in values:
                raise PolicyError(f"{what} {old!r} is an earlier name of {new!r}: give one of them")
            warn_renamed(what, old, new)
            values[new] = given[old]
    return values


@contextmanager
def told_on_stderr() -> Iterator[None]:
    """For the command line: each use of an earlier name, and each caution, is a line on standard error, once."""
    told: set[str] = set()

    def tell(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, (Renamed, Caution)):
            show(message, category, *place, **more)
        elif str(message) not in told:
            told.add(str(message))
            print(f"tiersim: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.simplefilter("always", Renamed)
        warnings.simplefilter("always", Caution)
        warnings.showwarning = tell
        yield
