"""How policies are written: with parameters; and several combined, each with what it owns.

    zero_offload + full_recompute
    checkmate(method=rounding)
    zero_offload + activations: lru_tiering
    layers 0-7: full_recompute; layers 8-11 & *.attn: swap_all; rest: keep_all
    full_recompute; checkpoints: swap_all(ahead=2)

`;` begins a new clause: within one, a part without a selector has that of the part before it. A colon ends a selector
where a space follows it; `path/to/file.py:Class` has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sim.errors import PolicyError

OPENING, CLOSING = "([{", ")]}"
WORDS = {"True": True, "False": False, "None": None}
SPECIAL = re.compile(r"[\s\[\](){},;+=\"'\\]")
"""What in a value would be taken for something else."""

MOST_PARTS = 100
"""How many policies may be combined; what they do to each other takes the square of their number."""

NUMBERS = re.compile(r"(?:^|[;+&])\s*(?:layer|stage)s?\s[\d\s,-]+$")
"""A selector that has not ended."""


class Term(NamedTuple):
    """One part as it is written. selector: "" for none."""

    selector: str
    name: str
    parameters: Mapping[str, Any]


def terms(text: str) -> list[Term]:
    """The parts of a composition in order; one without selector or parameters for a plain name. Raises PolicyError."""
    if text.isidentifier():  # as most are
        return [Term("", text, {})]
    found: list[Term] = []
    for clause in split_outside(text, ";"):
        selector = ""
        for part in split_outside(clause, "+"):
            if len(found) == MOST_PARTS:
                raise PolicyError(f"policy {text[:40] + '…'!r}: more than {MOST_PARTS} policies are combined")
            own, call = _selector(part, text)
            selector = own or selector
            name, inside = _call(call, text)
            if not name and inside:
                raise PolicyError(
                    f"policy {text!r}: brackets hold a policy's parameters, not policies; without them a selector "
                    "holds up to the next ';', as in 'zero_offload; layers 0-3: full_recompute; rest: swap_all'"
                )
            if ": " in name:
                raise PolicyError(
                    f"policy {text!r}: {call!r} has a second selector; two are joined by '&', as in "
                    "'layers 0-3 & *.attn'"
                )
            if not name:
                raise PolicyError(f"policy {text!r}: a policy is missing beside '+', ';' or ':'")
            found.append(Term(selector, name, parameters_in(inside, call)))
    return found


def listed(text: str) -> list[str]:
    """The policies of a list with commas. One between the numbers of a selector ends none: `layers 0,5: dtr`."""
    found: list[str] = []
    for piece in split_outside(text, ","):
        if found and NUMBERS.search(found[-1]):
            found[-1] += f", {piece}"
        else:
            found.append(piece)
    return [name for name in found if name]


def split_outside(text: str, separator: str) -> list[str]:
    """The pieces of a text between separators that are in no bracket and in no quotes, stripped."""
    pieces, depth, quote, start, escaped = [], 0, "", 0, False
    for i, sign in enumerate(text):
        if escaped:
            escaped = False
        elif quote and sign == "\\":
            escaped = True
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in OPENING:
            depth += 1
        elif sign in CLOSING:
            depth -= 1
        elif sign == separator and depth <= 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    return [*pieces, text[start:].strip()]


def text_of(name: str, parameters: Mapping[str, Any]) -> str:
    """A policy and its parameters as `terms` reads them."""
    inside = ", ".join(f"{key}={_value_text(value)}" for key, value in parameters.items())
    return f"{name}({inside})" if inside else name


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        try:
            return json.dumps(list(value))
        except TypeError:  # objects of a policy of one's own, which no text can stand for
            return str(value)
    if isinstance(value, float) or (isinstance(value, str) and (_value(value) != value or SPECIAL.search(value))):
        return json.dumps(value)
    return str(value)


def _selector(part: str, text: str) -> tuple[str, str]:
    """(selector, policy) of a part; the selector is "" where it has none."""
    head, colon, rest = f"{part} ".partition(": ")
    if not colon or any(sign in head for sign in "({"):
        return "", part
    if not head.strip():
        raise PolicyError(f"policy {text!r}: a selector is missing before ':'")
    return head.strip(), rest.strip()


def _call(part: str, text: str) -> tuple[str, str]:
    """(name, parameters) of `name(parameters)`."""
    name, bracket, inside = part.partition("(")
    if bracket and not inside.rstrip().endswith(")"):
        raise PolicyError(f"policy {text!r}: {part!r} has no closing bracket")
    return name.strip(), inside.rstrip()[:-1] if bracket else ""


def parameters_in(inside: str, part: str) -> dict[str, Any]:
    """The parameters between the brackets of a part, as values. Raises PolicyError, which names the part."""
    found: dict[str, Any] = {}
    for pair in _pairs(inside):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise PolicyError(f"policy {part!r}: {pair!r}: expected parameter=value")
        if key.strip() in found:
            raise PolicyError(f"policy {part!r}: {key.strip()} is given twice")
        found[key.strip()] = _value(value.strip())
    return found


def _pairs(inside: str) -> Iterator[str]:
    if inside.strip():
        yield from split_outside(inside, ",")


def _value(text: str) -> Any:
    """A value as JSON or one of Python's three words, else as text; text, too, is what nests too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return WORDS.get(text, text)
