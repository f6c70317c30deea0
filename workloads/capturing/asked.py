"""What a step asks of values that fake tensors do not have: a loss to print, whether gradients overflowed.

Outside the model's modules this decides on what is printed or skipped, and is answered as in a run where all goes well:
every value is finite, no gradient has overflowed, and a number is 1, or the mean of the integers among which it was
drawn (the length of a sequence, the size of an image). Inside a module it decides on what is computed,
and nothing is answered, with two exceptions. A batch's integers (ids, labels, masks) are taken to be 1, and what is
compared with them, counted in them or selected by them is as it would be then. A random number that is looked at
(whether a layer is dropped, which size an image gets, how far two images are mixed) is its mean. A number that a module
keeps beside its weights (the place in a queue) is the one that it last stored there, or 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from workloads.capturing.packed import values_of

TRUTHS = {"isnan": False, "isinf": False, "isfinite": True, "isposinf": False, "isneginf": False}
"""What is true of a finite number."""
OVERFLOW = "_amp_foreach_non_finite_check_and_unscale_"
BETWEEN: Mapping[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul")},
    **dict.fromkeys(("bitwise_and", "logical_and"), operator.and_),
    **dict.fromkeys(("bitwise_or", "logical_or"), operator.or_),
    "floor_divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0,
}
"""Of two integers or truths."""
NEGATED = ("bitwise_not", "logical_not")
_KEPT = """
    all any max min amax amin view _unsafe_view _to_copy clone detach reshape alias slice select unsqueeze squeeze
    expand transpose permute t repeat flip roll masked_select stack cat
"""
KEPT = frozenset(_KEPT.split())
"""Ops whose results have the value that all elements of their operand have."""
BATCHES = ("randint", "random_", "ones", "empty")
"""Ops that make a batch of integers, outside of modules."""
DRAWN: Mapping[str, Callable[..., float]] = {
    "rand": lambda *_: 0.5,
    "uniform_": lambda low=0.0, high=1.0, *_: (low + high) / 2,
}
"""Ops that draw a number, and its mean."""
DRAWN_INSIDE: Mapping[str, Callable[[Any], int]] = {
    "randint": lambda args: (sum([0, *(x for x in args if isinstance(x, int))][-2:]) - 1) // 2,  # from, up to but not
    "multinomial": lambda args: (args[0].shape[-1] - 1) // 2,
}
"""Ops that draw integers, and their mean from the arguments: what a module reads of one, or a script of a batch."""
FOLLOWED = {*BETWEEN, *NEGATED, *KEPT, "clamp", "masked_fill", "sum"}
UNCHANGED = ("_to_copy", "clone", "detach", "alias", "view")
NAME, RANDOM, COUNT, NUMBER = "_tiersim_answer", "_tiersim_random", "_tiersim_count", "_tiersim_number"
MEAN_OF = "_tiersim_mean"
"""The mean of the integers among which a batch's were drawn, outside of modules."""
FINITE = "all values are finite, and no gradient overflows"
OUTSIDE = "a number that is read outside the model is 1"
MEAN = "a random number that a module looks at is its mean"
DRAWN_OUTSIDE = "a random integer that is read outside the model is the mean of those among which it is drawn"
EQUAL = "the sequences of a batch are equally long"
KEPT_NUMBER = "an integer that a module keeps is the number that it last stored, or 0"
BATCH = "a batch's integers that are looked at are 1"


def note(op: str, args: Any, out: Any, inside: bool) -> None:
    """Keep what is known of all elements of a result under these assumptions. inside: whether a module runs."""
    if op == OVERFLOW:
        setattr(args[1], NAME, 0.0)
        return
    if op == "lift_fresh" and str(out.dtype) == "torch.bool" and type(args[0]).__name__ == "Tensor":
        with import_module("torch.utils._python_dispatch")._disable_current_modes():
            setattr(out, COUNT, int(args[0].sum()))  # made of values that are there
    elif op == "lift_fresh" and args[0].numel() == 1 and _is_whole(args[0]) and type(args[0]).__name__ == "Tensor":
        with import_module("torch.utils._python_dispatch")._disable_current_modes():
            setattr(out, NUMBER, args[0].item())
    elif op in UNCHANGED and (count := getattr(args[0], COUNT, None)) is not None:
        setattr(out, COUNT, count)
    _note_mean(op, args, out, inside)
    drawn = _mean(op, args, out, inside)
    known = drawn if drawn is not None else _known(op, args, out)
    if known is None:
        return
    random = drawn is not None or any(getattr(x, RANDOM, False) for x in args)
    for each in out if isinstance(out, (list, tuple)) else (out,):
        if hasattr(each, "fake_mode"):
            setattr(each, NAME, known)
            setattr(each, RANDOM, random)


def _note_mean(op: str, args: Any, out: Any, inside: bool) -> None:
    """Keep of a batch's integers the mean of those among which they were drawn, and of what is computed from them."""
    mean = None
    if op == "randint" and not inside:
        mean = DRAWN_INSIDE[op](args)
    elif op in KEPT or op in ("unbind", "split", "chunk"):
        mean = getattr(args[0], MEAN_OF, None)
    elif op in BETWEEN and len(args) > 1:
        each = [x if type(x) is int else getattr(x, MEAN_OF, None) for x in args[:2]]
        mean = BETWEEN[op](*each) if None not in each else None
    if type(mean) is int:
        for part in out if isinstance(out, (list, tuple)) else (out,):
            if hasattr(part, "fake_mode") and _is_whole(part):
                setattr(part, MEAN_OF, mean)


def of_batch(tensor: Any) -> None:
    """A tensor is part of a batch."""
    if hasattr(tensor, "fake_mode") and _is_whole(tensor) and known_value(tensor) is None:
        setattr(tensor, NAME, _one(tensor))


def known_value(tensor: Any) -> Any:
    """The value of all elements of a tensor, None where nothing is known of it."""
    return getattr(tensor, NAME, None)


def selected(op: str, args: Any) -> tuple[Any, str]:
    """The result of an op whose size depends on values, and what is assumed by it; None where nothing can be."""
    if op == "_ctc_loss":
        scores, targets = args[:2]
        frames, batch = scores.shape[:2]
        longest = targets.shape[1] if targets.dim() == 2 else targets.numel() // batch
        return (scores.new_empty(batch), scores.new_empty((batch, frames, 2 * longest + 1))), EQUAL
    return _chosen(op, args), BATCH if values_of(_condition(op, args)) is None else ""


def _condition(op: str, args: Any) -> Any:
    """The tensor that says what an op selects."""
    return next((x for x in args[1] if x is not None), None) if op == "index" else args[-1]


def _chosen(op: str, args: Any) -> Any:
    """What a condition chooses of a tensor, None where it is not known of how many elements it is true."""
    if op == "index":
        conditions = [x for x in args[1] if x is not None]
        if len(conditions) != 1 or args[1][0] is None or (count := _count(conditions[0])) is None:
            return None
        return args[0].new_empty((count, *args[0].shape[conditions[0].dim() :]))
    if op not in ("masked_select", "nonzero") or (count := _count(args[-1])) is None:
        return None
    condition = args[-1]
    if op == "nonzero":
        return condition.new_empty((count, condition.dim()), dtype=import_module("torch").int64)
    whole = math.prod(import_module("torch").broadcast_shapes(args[0].shape, condition.shape))
    return args[0].new_empty((count * whole // max(condition.numel(), 1),))


def _count(condition: Any) -> int | None:
    """Of how many elements a condition is true, as far as that is known."""
    known = known_value(condition)
    if known is not None:
        return condition.numel() if known else 0
    values = values_of(condition)
    if values is not None:
        with import_module("torch.utils._python_dispatch")._disable_current_modes():
            return int(values.count_nonzero())
    return getattr(condition, COUNT, None)


def answer(tensor: Any, inside: bool) -> tuple[Any, str]:
    """The value that is read from a tensor of one element, and what is assumed by it.

    inside: whether a module reads it.
    """
    known = known_value(tensor)
    if known is not None and inside:
        return known, MEAN if getattr(tensor, RANDOM, False) else BATCH
    if (mean := getattr(tensor, MEAN_OF, None)) is not None:
        return mean, DRAWN_OUTSIDE
    if known is not None:
        return known, OUTSIDE if type(known) is int else FINITE
    if str(tensor.dtype) == "torch.bool":
        return False, "a condition that is read outside the model is false"
    return (1.0 if tensor.dtype.is_floating_point else 1), OUTSIDE


def _mean(op: str, args: Any, out: Any, inside: bool) -> Any:
    """The mean of a number that an op draws, None where it draws none, or several."""
    if op == "_sample_dirichlet" and out.dim() and out.numel() == out.shape[-1]:
        return 1 / out.numel()  # shares of one whole, taken to be alike (of a beta distribution: a = b)
    if op in DRAWN and out.numel() == 1:
        return DRAWN[op](*args[1:])
    if op in DRAWN_INSIDE and inside and out.numel() == 1:
        return DRAWN_INSIDE[op](args)
    return None


def _known(op: str, args: Any, out: Any) -> Any:
    if op in TRUTHS:
        return TRUTHS[op]
    if op in ("eq", "ne") and len(args) > 1:
        if args[0] is args[1]:
            return op == "eq"
        if isinstance(args[1], float) and not math.isfinite(args[1]):
            return op == "ne"
    if op not in FOLLOWED:
        return None
    before = [_operand(x) for x in args[:2]]
    if op in BETWEEN and len(before) == 2 and None not in before and _is_whole(out):
        return BETWEEN[op](*before)
    if op == "masked_fill" and isinstance(known_value(args[1]), bool) and _is_whole(args[0]):
        return args[2] if known_value(args[1]) and isinstance(args[2], int) else before[0]
    if not before or before[0] is None:
        return None
    if op == "clamp":
        low, high = (*args[1:], None, None)[:2]
        number = before[0] if low is None else max(before[0], low)
        return number if high is None else min(number, high)
    if op in NEGATED and isinstance(before[0], bool):
        return not before[0]
    if op == "sum" and _is_whole(out) and out.numel():
        return int(before[0]) * (args[0].numel() // out.numel())
    return before[0] if op in KEPT else None


def _operand(value: Any) -> Any:
    """What is known of an operand: a number, or a tensor's value. A single integer that is unknown is 1."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        each = {_operand(x) for x in value}
        return each.pop() if len(each) == 1 else None
    known = known_value(value)
    if known is None and hasattr(value, "fake_mode") and value.dim() == 0 and _is_whole(value):
        return _one(value) if str(value.dtype) != "torch.bool" else None
    return known


def _one(tensor: Any) -> Any:
    return True if str(tensor.dtype) == "torch.bool" else 1


def _is_whole(value: Any) -> bool:
    """Whether a tensor has integers or truths."""
    return hasattr(value, "dtype") and not value.dtype.is_floating_point and not value.dtype.is_complex
