"""What a step asks of values that fake tensors do not have: a loss to print, whether gradients overflowed.

Outside the model's modules this decides on what is printed or skipped, and is answered as in a run where all goes well:
every value is finite, no gradient has overflowed, and a number is 1. Inside a module it decides on what is computed,
and nothing is answered.
"""

from __future__ import annotations

import math
from typing import Any

TRUTHS = {"isnan": False, "isinf": False, "isfinite": True, "isposinf": False, "isneginf": False}
"""What is true of a finite number."""
OVERFLOW = "_amp_foreach_non_finite_check_and_unscale_"
JOINED = {"mul": all, "bitwise_and": all, "logical_and": all, "bitwise_or": any, "logical_or": any}
NEGATED = ("bitwise_not", "logical_not")
KEPT = ("all", "any", "view", "_to_copy", "clone", "detach", "reshape", "alias")
NAME = "_tiersim_answer"


def note(op: str, args: Any, out: Any) -> None:
    """Keep what is known of a result under the assumption that all values are finite."""
    if op == OVERFLOW:
        setattr(args[1], NAME, 0.0)
        return
    known = _known(op, args)
    if known is not None and hasattr(out, "fake_mode"):
        setattr(out, NAME, known)


def _known(op: str, args: Any) -> Any:
    if op in TRUTHS:
        return TRUTHS[op]
    if op in ("eq", "ne") and len(args) > 1:
        if args[0] is args[1]:
            return op == "eq"
        if isinstance(args[1], float) and not math.isfinite(args[1]):
            return op == "ne"
        return None
    before = [getattr(x, NAME, None) for x in args[:2]]
    if op in JOINED and None not in before and len(before) == 2:
        return JOINED[op](before)
    if op in NEGATED and isinstance(before[0], bool):
        return not before[0]
    return before[0] if op in KEPT and before else None


def answer(tensor: Any) -> tuple[Any, str]:
    """The value that is read from a tensor of one element, and what is assumed by it."""
    known = getattr(tensor, NAME, None)
    if known is not None:
        return known, "all values are finite, and no gradient overflows"
    if str(tensor.dtype) == "torch.bool":
        return False, "a condition that is read outside the model is false"
    return (1.0 if tensor.dtype.is_floating_point else 1), "a number that is read outside the model is 1"
