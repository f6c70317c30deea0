"""Arguments of the wrong kind, for functions that people call from Python.

Nothing is checked beforehand: a function that works with what it was given goes on doing so. Where it ends in an error
of Python's own and an argument is not what its annotation says, the answer is one line that names that argument.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from sim.errors import TiersimError

P = ParamSpec("P")
R = TypeVar("R")

WORDS: dict[Any, str] = {
    None: "None",
    types.NoneType: "None",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    os.PathLike: "a path",
    Callable: "a function",
    Sequence: "a list",
    Mapping: "a table",
}

KINDS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
"""What numbers are besides Python's own: those of NumPy."""


class ArgumentError(TiersimError, TypeError):
    """An argument of the wrong kind; names the function, the argument, and what is expected."""


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; an error of Python's own becomes an `ArgumentError` where an argument is of the wrong kind."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except (TypeError, AttributeError, ValueError, OverflowError, LookupError, MemoryError) as error:
            wrong = None if _is_said(error) else next(_wrong(function, args, options), None)
            if wrong is None:
                raise
            raise ArgumentError(wrong) from error

    return call


def _is_said(error: Exception) -> bool:
    """Whether it is one of this package; that of a function within is said better by the one that was called."""
    return isinstance(error, TiersimError) and not isinstance(error, ArgumentError)


def _wrong(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[str]:
    """A line for each argument that is not what its annotation says."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **options)
    except TypeError:  # too many or an unknown one, which Python's own error says
        return
    for name, value in given.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kind = _resolved(parameter.annotation, function)
        if not _is(value, kind):
            yield f"{function.__name__}: {name}: expected {_words(kind)}, found {_found(value)}"


def _resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """The annotation; `Any` where it names what only a type checker imports."""
    try:
        hints = typing.get_type_hints(
            types.SimpleNamespace(__annotations__={"it": annotation}), vars(inspect.getmodule(function))
        )
    except NameError:
        return Any
    return hints["it"]


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; true where that cannot be told."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, int) and abs(value) >> 63:
        return False
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is type:
        return isinstance(value, type)
    if origin is Callable:
        return callable(value)
    if origin is Sequence and not isinstance(value, (str, bytes)):
        few = value if isinstance(value, Sequence) else ()
        return isinstance(value, Sequence) and all(_is(each, inner[0]) for each in few)
    if origin is Mapping and isinstance(value, Mapping):
        return all(_is(key, inner[0]) and _is(each, inner[1]) for key, each in value.items())
    plain = KINDS.get(origin or kind, origin or kind)
    try:
        return isinstance(value, plain) and not (plain is Sequence and isinstance(value, (str, bytes)))
    except TypeError:  # `Any`, a type variable, a protocol
        return True


def _words(kind: Any) -> str:
    """What a kind is, in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(_words(each) for each in inner))
        return f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is type:
        return f"a class of {getattr(inner[0], '__name__', 'any kind')}"
    if (origin or kind) in WORDS:
        return WORDS[origin or kind]
    name = getattr(origin or kind, "__name__", str(kind))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _found(value: Any) -> str:
    """A value and its type, shortened."""
    if value is None or isinstance(value, bool):
        return str(value)
    kind = type(value).__name__
    if isinstance(value, int) and abs(value) >> 63:
        return f"one of {value.bit_length()} bits"
    if isinstance(value, (str, float, int)):
        return f"{value!r:.40} ({kind})"
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
