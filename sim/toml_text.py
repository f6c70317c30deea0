"""TOML from a file: one guard for profiles and studies."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Any

DEEP = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){100}")
"""A key of a hundred parts: what reads it takes the square of their number."""


def parse_toml(text: str, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """The tables of a TOML text.

    parse_float: makes a figure from the text of a number with a fraction.

    Raises ValueError, one line that says what is wrong and where, without the file's name.
    """
    text = text.removeprefix("\ufeff")  # as Windows' editors begin a file
    if DEEP.search(text):
        raise ValueError("not TOML: nested too deeply")
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except RecursionError:
        raise ValueError("not TOML: nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        message, line, column = match.groups() if match else (str(error), None, None)
        if line is None:
            lines = text.split("\n")
            line, column = str(len(lines)), str(len(lines[-1]) + 1)
        raise ValueError(f"line {line}, column {column}: not TOML: {message}") from None
    except ArithmeticError:  # of decimal: an exponent of thousands of digits
        raise ValueError("not TOML: a number that cannot be computed with") from None
    except ValueError:  # an integer of thousands of digits
        raise ValueError("not TOML: a number of thousands of digits") from None
