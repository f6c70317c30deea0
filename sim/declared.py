"""What a declaration allows: the types, choices and bounds of parameters and traits, checked and put into words.

Declarations are annotations. Choices are a `Literal`, or `OneOf` where a registry elsewhere has them; bounds are those
of `annotated_types`; `Size`, `Rate` and `Time` are numbers or text with a unit:

    method: Literal["milp", "rounding"] = "milp"
    slots: Annotated[int, Ge(2)] = 500
    runtime: Annotated[str, OneOf(RUNTIMES)] = "flops"

The types that policies need are checked here; pydantic, slow to import, checks all others.
"""

from __future__ import annotations

import inspect
import operator
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin
from weakref import WeakKeyDictionary

import annotated_types

from sim.errors import UnitError, near
from sim.units import parse_bytes, parse_rate, parse_time


class OneOf:
    """Choices that a registry has: the names in any collection, as it is when a value is checked."""

    def __init__(self, registry: Collection[str]) -> None:
        self.registry = registry

    @property
    def values(self) -> tuple[str, ...]:
        """The names."""
        return tuple(self.registry)


class Quantity:
    """Text with a unit, which `read` turns into a number, or that number. words: what to give, `{ge}` the least."""

    def __init__(self, read: Callable[[str], int], words: str) -> None:
        self.read = read
        self.words = words


Size = Annotated[
    int | str, Quantity(parse_bytes, "bytes, {ge} or more, or a size such as '50 MB'"), annotated_types.Ge(0)
]
"""Bytes."""

Rate = Annotated[
    int | str, Quantity(parse_rate, "bytes/s, {ge} or more, or a rate such as '11 GB/s'"), annotated_types.Ge(1)
]
"""Bytes per second."""

Time = Annotated[
    int | str, Quantity(parse_time, "nanoseconds, {ge} or more, or a time such as '20 ms'"), annotated_types.Ge(0)
]
"""Nanoseconds."""

BOUNDS: Mapping[type, tuple[str, Callable[[Any, Any], bool]]] = {
    annotated_types.Ge: ("ge", operator.ge),
    annotated_types.Gt: ("gt", operator.gt),
    annotated_types.Le: ("le", operator.le),
    annotated_types.Lt: ("lt", operator.lt),
}
SCALARS: Mapping[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,)}
WITHIN = {
    ("ge",): "of at least {ge}",
    ("gt",): "above {gt}",
    ("le",): "of at most {le}",
    ("lt",): "below {lt}",
    ("ge", "le"): "from {ge} to {le}",
    ("ge", "lt"): "from {ge} to below {lt}",
    ("gt", "le"): "above {gt} and at most {le}",
    ("gt", "lt"): "above {gt} and below {lt}",
}
"""Bounds in words."""


def allows(declared: Any, value: Any) -> bool:
    """Whether a declaration allows a value. A whole number will do for a float; true and false are no numbers."""
    origin, inside = get_origin(declared), get_args(declared)
    if declared is Any:
        return True
    if origin is Annotated:
        return allows(inside[0], value) and _within(declared, value)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inside)
    if origin in (Union, UnionType):
        return any(allows(each, value) for each in inside)
    if declared in (None, NoneType):
        return value is None
    if declared is bool:
        return isinstance(value, bool)
    if declared in SCALARS:
        return isinstance(value, SCALARS[declared]) and not isinstance(value, bool)
    if origin is tuple and inside[1:] == (...,):
        return isinstance(value, tuple) and all(allows(inside[0], each) for each in value)
    if origin is frozenset:
        return isinstance(value, frozenset) and all(allows(inside[0], each) for each in value)
    if origin is Mapping:
        pairs = value.items() if isinstance(value, Mapping) else ((None, None),)
        return isinstance(value, Mapping) and all(allows(inside[0], k) and allows(inside[1], v) for k, v in pairs)
    return _adapter(declared)(value)


def expected(declared: Any) -> str:
    """What a declaration allows, in words."""
    origin, inside = get_origin(declared), get_args(declared)
    if origin is Literal:
        return _either([repr(choice) for choice in inside])
    if origin in (Union, UnionType):
        return _either([expected(each) for each in inside])
    if declared in (None, NoneType):
        return "None"
    if origin is tuple and inside[1:] == (...,):
        return f"tuple of {expected(inside[0])}"
    if origin is frozenset:
        return f"frozenset of {expected(inside[0])}"
    if origin is Mapping:
        return f"mapping from {expected(inside[0])} to {expected(inside[1])}"
    if origin is not Annotated:
        return inspect.formatannotation(declared)
    for each in _details(declared):
        if isinstance(each, OneOf):
            return _either([repr(choice) for choice in each.values])
        if isinstance(each, Quantity):
            return each.words.format(**bounds(declared))
    limits, words = bounds(declared), [expected(inside[0])]
    if limits:
        words.append(WITHIN[tuple(limits)].format(**limits))
    if any(isinstance(each, annotated_types.MinLen) for each in _details(declared)):
        words.append("(not empty)")
    return " ".join(words)


def hint(declared: Any, value: Any) -> str:
    """The nearest choice to a name that is none of them, or that is in a collection; the unit that was meant."""
    names = [str(choice) for choice in choices(declared) or ()]
    given = [value] if isinstance(value, str) else value if isinstance(value, Collection) else ()
    for each in given:
        if isinstance(each, str) and each not in names:
            found = near(each, names) if names else _meant(declared, each)
            return found if "did you mean" in found else ""
    return ""


def _meant(declared: Any, text: str) -> str:
    """What the reader of a quantity takes a text for."""
    parts = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    for each in (detail for part in parts for detail in _details(part) if isinstance(detail, Quantity)):
        try:
            each.read(text)
        except UnitError as error:
            _, found, rest = str(error).partition(" (did you mean ")
            return found + rest
    return ""


def choices(declared: Any) -> tuple[Any, ...] | None:
    """The values that a declaration, or the items of what it declares, may have; None where it names none."""
    if get_origin(declared) is Literal:
        return get_args(declared)
    if get_origin(declared) is Annotated:
        for each in _details(declared):
            if isinstance(each, OneOf):
                return each.values
    parts = [get_args(declared)[0]] if get_origin(declared) is Annotated else get_args(declared)
    return next((found for part in parts if (found := choices(part)) is not None), None)


def bounds(declared: Any) -> dict[str, Any]:
    """The bounds of a number by their names in `annotated_types`: ge, gt, le, lt; lower ones first."""
    if get_origin(declared) in (Union, UnionType):
        return next((found for part in get_args(declared) if (found := bounds(part))), {})
    kinds = {BOUNDS[type(each)][0]: each for each in _details(declared) if type(each) in BOUNDS}
    return {name: getattr(kinds[name], name) for name in ("ge", "gt", "le", "lt") if name in kinds}


def takes_anything(declared: Any) -> bool:
    """Whether every value of its type is allowed: no choices, no bounds, not even one item, and no flag."""
    origin, inside = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return all(takes_anything(part) for part in inside if part is not NoneType)
    if origin is tuple and inside[1:] == (...,):
        return takes_anything(inside[0])
    has_items = any(isinstance(each, annotated_types.MinLen) for each in _details(declared))
    return not (choices(declared) or bounds(declared) or has_items or "bool" in plain(declared))


def plain(declared: Any) -> str:
    """The type alone, without choices and bounds, as it is written."""
    origin, inside = get_origin(declared), get_args(declared)
    if origin is Annotated:
        return plain(inside[0])
    if origin is Literal:
        return " | ".join(dict.fromkeys(type(choice).__name__ for choice in inside))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(plain(each) for each in inside))
    if origin is tuple and inside[1:] == (...,):
        return f"tuple[{plain(inside[0])}, ...]"
    return "None" if declared is NoneType else inspect.formatannotation(declared)


_DECLARED: WeakKeyDictionary[type, Mapping[str, Any]] = WeakKeyDictionary()


def declarations(owner: type) -> Mapping[str, Any]:
    """What a class and its bases annotate, by name; `Any` for a type that a file imports for type checkers alone."""
    if owner not in _DECLARED:
        _DECLARED[owner] = {name: said for base in reversed(owner.__mro__) for name, said in _annotated(base)}
    return _DECLARED[owner]


def _annotated(owner: type) -> Iterator[tuple[str, Any]]:
    module = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    for name, said in inspect.get_annotations(owner).items():
        holder = type("holder", (), {"__annotations__": {name: said}})
        try:
            yield from typing.get_type_hints(holder, module, dict(vars(owner)), include_extras=True).items()
        except (NameError, AttributeError):
            yield name, Any


def allows_tuples(declared: Any) -> bool:
    """Whether a tuple may be given."""
    if get_origin(declared) in (Annotated, Union, UnionType):
        return any(allows_tuples(each) for each in get_args(declared))
    return declared is tuple or get_origin(declared) is tuple


def is_trait(declared: Any) -> bool:
    """Whether it belongs to the class and is not a parameter."""
    return declared is ClassVar or get_origin(declared) is ClassVar


def _details(declared: Any) -> Iterator[Any]:
    """The metadata of the type in `Annotated`, with groups such as `Interval` and `Len` split up."""
    for each in getattr(declared, "__metadata__", ()):
        if isinstance(each, annotated_types.GroupedMetadata):
            yield from each
        else:
            yield each


def _within(declared: Any, value: Any) -> bool:
    number = value
    for each in _details(declared):
        if isinstance(each, OneOf):
            if value not in each.values:
                return False
        elif isinstance(each, Quantity):
            try:
                number = each.read(value) if isinstance(value, str) else value
            except UnitError:
                return False
        elif type(each) in BOUNDS:
            name, holds = BOUNDS[type(each)]
            if not holds(number, getattr(each, name)):
                return False
        elif isinstance(each, annotated_types.MinLen):
            if len(value) < each.min_length:
                return False
        elif not isinstance(each, str):  # text beside a type only explains it
            return _adapter(declared)(value)
    return True


def _adapter(declared: Any) -> Callable[[Any], bool]:
    """pydantic's check of a type."""
    try:
        return _made_adapter(declared)
    except TypeError:  # what cannot be hashed is not kept
        return _made_adapter.__wrapped__(declared)


@cache
def _made_adapter(declared: Any) -> Callable[[Any], bool]:
    """The same, made once for each type."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    # in a tuple, because some types refuse a configuration from outside
    adapter = TypeAdapter(tuple[declared], config=ConfigDict(strict=True, arbitrary_types_allowed=True))

    def check(value: Any) -> bool:
        try:
            adapter.validate_python((value,))
        except ValidationError:
            return False
        return True

    return check


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
