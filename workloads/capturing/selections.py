"""Selections by values: how many elements a condition keeps, as the person says who knows the data.

Fake tensors have no values, so that what `nonzero`, a boolean mask, `unique` or non-maximum suppression keeps has no
size. Where nothing is said the capture stops there. Else each condition is taken to hold for the share of its elements
that is given for its place in the code, and what is read of it follows: whether it holds anywhere, everywhere, or how
often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from sim.errors import WorkloadError
from workloads.capturing.places import open_frames

REST = "*"
"""The place that stands for all that are not named."""
REDUCED = "_tiersim_reduced"
REDUCTIONS = ("any", "all", "sum", "count_nonzero")
UNIQUE = {"_unique2": (2, None), "unique_dim": (3, 1), "unique_consecutive": (1, 3)}
"""Per op the position of the argument that asks for places, before that which asks for counts, and of the axis."""

Selected = float | str | Mapping[str, float] | None
"""A share, or shares by file (`rpn.py`) or line (`rpn.py:283`), or patterns of these; or "rpn.py:283=0.5,*=0.1"."""


class Selections:
    """What is taken of conditions on values.

    selected: as for `workloads.capture.capture`.

    Raises WorkloadError where it is neither a share from 0 to 1 nor shares by place.
    """

    def __init__(self, selected: Selected = None) -> None:
        shares: dict[Any, Any] = {} if selected is None else {REST: selected}
        if isinstance(selected, str):
            selected = _by_place(selected)
        if isinstance(selected, Mapping):
            shares = dict(selected)
        for place, share in shares.items():
            number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not isinstance(place, str) or not number or not 0 <= share <= 1:
                where = "" if place == REST else f" at {place!r}"
                raise WorkloadError(f"selected: needs a share from 0 to 1{where}, has {share!r}")
        self._shares: dict[str, float] = shares

    def share(self) -> tuple[float, str] | None:
        """The share for the line that runs, and that line; None where none is given."""
        if not self._shares:
            return None
        file, line = next(open_frames(), ("", 0))
        place = f"{file}:{line}"
        for wanted in (place, file):
            for pattern, share in self._shares.items():
                if pattern != REST and fnmatchcase(wanted, pattern):
                    return share, place
        return (self._shares[REST], place) if REST in self._shares else None


def _by_place(text: str) -> dict[str, float]:
    """One share, or shares by place: "rpn.py:283=0.5,*=0.1"."""
    found: dict[str, float] = {}
    for part in text.split(","):
        place, _, share = (each.strip() for each in part.rpartition("="))
        try:
            number = float(share)
        except ValueError:
            raise WorkloadError(f"selected: needs a share from 0 to 1, has {share!r}") from None
        if (place or REST) in found:
            raise WorkloadError(f"selected: {place or REST!r} is given twice")
        found[place or REST] = number
    return found


def note_reduced(op: str, args: Any, out: Any) -> None:
    """Keep of the result of a reduction of truths what it was reduced by, and from how many."""
    if op in REDUCTIONS and str(getattr(args[0], "dtype", "")) == "torch.bool" and hasattr(out, "fake_mode"):
        setattr(out, REDUCED, (op, args[0].numel() // max(out.numel(), 1)))


def read(tensor: Any, share: float) -> Any:
    """What is read of a condition that holds for a share of its elements; None for another number."""
    op, count = getattr(tensor, REDUCED, ("", 1))
    if op in ("sum", "count_nonzero"):
        return _part(count, share)
    if str(tensor.dtype) != "torch.bool":
        return None
    return {"any": share > 0 and count > 0, "all": share == 1 or not count}.get(op, share >= 0.5)


def chosen(op: str, args: Any, share: float) -> Any:
    """The result of a selection, None where the op is none."""
    torch: Any = import_module("torch")
    if op == "index":
        conditions = [i for i, x in enumerate(args[1]) if x is not None]
        if len(conditions) != 1 or str(args[1][conditions[0]].dtype) != "torch.bool":
            return None
        at, condition = conditions[0], args[1][conditions[0]]
        shape, count = args[0].shape, _part(condition.numel(), share)
        return args[0].new_empty((*shape[:at], count, *shape[at + condition.dim() :]))
    if op == "masked_select":
        return args[0].new_empty((_part(math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape)), share),))
    if op == "nonzero":
        return args[0].new_empty((_part(args[0].numel(), share), args[0].dim()), dtype=torch.int64)
    if op == "nms":
        return args[0].new_empty((_part(args[0].shape[0], share),), dtype=torch.int64)
    return _unique(op, args, share) if op in UNIQUE else None


def _unique(op: str, args: Any, share: float) -> Any:
    """The different values of a tensor, or its different rows; where each lies among them, and how often it occurs."""
    asked, axis = UNIQUE[op]
    whole, dim = args[0], None if axis is None or len(args) <= axis else args[axis]
    places, counts = (*args[asked : asked + 2], False, False)[:2]
    length = whole.numel() if dim is None else whole.shape[dim]
    count = max(_part(length, share), min(length, 1))
    shape = (
        (count,) if dim is None else tuple(count if i == dim % whole.dim() else n for i, n in enumerate(whole.shape))
    )
    where = (tuple(whole.shape) if dim is None else (length,)) if places else (0,)
    int64 = import_module("torch").int64
    return (
        whole.new_empty(shape),
        whole.new_empty(where, dtype=int64),
        whole.new_empty((count if counts else 0,), dtype=int64),
    )


def _part(count: int, share: float) -> int:
    return round(count * share)
