"""Wrong files from right ones: values of a document replaced, deleted, doubled and swapped, and bytes changed.

Everything follows from a `random.Random`, so that a case is repeated by its number.
"""

from __future__ import annotations

import json
import marshal
import re
from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate, islice
from random import Random
from typing import Any

Document = Any
Place = tuple[Any, Any]

WORDS = (
    *("", " ", "0", "-1", "9" * 30, "1" * 5000, "x", "w", "cpu", "START", "aten::empty", "aten::add_", "x0", "\n"),
    "\x00",
    *("\x1b[31m", "\ud800", "é" * 600, "../../etc/passwd", "/etc/passwd", "/dev/zero", "=1+1", "nan", "1e400", "80 GB"),
    *("-5 GB", "9e99 GB/s", "1 ns", "keep_all", "dtr", "keep_all + dtr", "a.py:B", "$x^$", "%s", "{0}", "__class__"),
)  # fmt: skip
NUMBERS = (
    *range(-3, 40),
    *(10**6, 10**9, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**40, -(2**63), -(10**40), 10**5000),
    *(0.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
)
OTHERS: tuple[Document, ...] = (
    *(None, True, False, [], {}, [[]], [[[]]], [{}], {"values": []}, {"": 1}, [1, 2, 3, 4, 5, "cpu"], ["x"] * 300),
    *([-1, -1, -1, -1, -1, "cpu"], {"a": {"b": {"c": [None]}}}),
)


def odd(rng: Random) -> Document:
    """A value that few places expect."""
    return deepcopy(rng.choice(rng.choice((WORDS, NUMBERS, OTHERS))))


class Places(Sequence[Place]):
    """Every (container, key) of a document, made when it is asked for: a case asks for two of thousands."""

    def __init__(self, document: Document) -> None:
        self._containers: list[Any] = []
        stack = [document] if isinstance(document, (dict, list)) else []
        while stack:
            self._containers.append(here := stack.pop())
            values = here.values() if isinstance(here, dict) else here
            stack += [value for value in values if value.__class__ in (dict, list)]
        self._ends = list(accumulate(map(len, self._containers)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Place:
        which = bisect_right(self._ends, index)
        here = self._containers[which]
        offset = index - (self._ends[which - 1] if which else 0)
        return here, next(islice(here, offset, None)) if isinstance(here, dict) else offset


def mutated(rng: Random, document: Document) -> Document:
    """The document with one to four changes; now and then something else altogether."""
    changed = marshal.loads(marshal.dumps(document))  # a copy, in a tenth of the time that `deepcopy` takes
    if rng.random() < 0.02:
        return odd(rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        spots = Places(changed)
        if not spots:
            break
        holder, key = rng.choice(spots)
        other, its = rng.choice(spots)
        how = rng.randrange(6)
        if how <= 1:
            holder[key] = odd(rng)
        elif how == 2:
            del holder[key]
        elif how == 3:
            holder[key] = deepcopy(other[its])
        elif how == 4 and isinstance(holder, list):
            holder.insert(key, deepcopy(holder[key]))
        elif how == 4:
            holder[rng.choice(WORDS)] = odd(rng)
        elif not isinstance(holder[key], (list, dict)) and not isinstance(other[its], (list, dict)):
            holder[key], other[its] = other[its], holder[key]
    if rng.random() < 0.01:
        changed = nested(rng, changed)
    return changed


def nested(rng: Random, document: Document) -> Document:
    """The document with one value nested thousands of times, as text: no writer of JSON goes that deep."""
    spots = Places(document)
    if spots:
        holder, key = rng.choice(spots)
        depth = rng.choice((300, 3000, 100_000))
        holder[key] = f"{DEEP}{'[' if rng.random() < 0.7 else '{'}{depth}"
    return document


DEEP = "\ue000"
"""The beginning of a text that stands for a value too deep to be one: its bracket and its depth follow."""


def as_json(document: Document) -> bytes:
    """JSON, with half characters and unlimited numbers as they come."""
    try:
        text = json.dumps(document, separators=(",", ":"))
    except ValueError:  # a number of more digits than Python writes
        text = _text(document)
    return _deepened(text).encode("utf-8", "surrogatepass")


def _deepened(text: str) -> str:
    """The text with what is too deep in it written out."""

    def nest(found: re.Match[str]) -> str:
        depth = int(found[2])
        return "[" * depth + "]" * depth if found[1] == "[" else '{"a":' * depth

    return re.sub(r'"\\ue000([\[{])(\d+)"', nest, text) if r"\ue000" in text else text


def _text(value: Document) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return _number(value) if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)


def _number(value: int) -> str:
    return str(value) if value.bit_length() < 10_000 else "1" + "0" * 5000


def as_toml(document: Document) -> bytes:
    """TOML of a table; what TOML has no word for stays as it is in JSON."""
    if not isinstance(document, dict):
        return as_json(document)
    return _deepened("\n".join(_toml_lines(document, ()))).encode("utf-8", "surrogatepass")


def _toml_lines(table: dict[str, Document], above: tuple[str, ...]) -> list[str]:
    tables = {key: value for key, value in table.items() if isinstance(value, dict) and value}
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in table.items() if key not in tables]
    for key, value in tables.items():
        path = (*above, key)
        lines += [f"[{'.'.join(map(_key, path))}]", *_toml_lines(value, path)]
    return lines


def _key(key: Document) -> str:
    text = str(key)
    return text if text.replace("_", "a").isalnum() and text.isascii() else json.dumps(text)


def _toml(value: Document) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(str(value), str(value))
    return _number(value) if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)


def damaged(rng: Random, data: bytes) -> bytes:
    """The bytes with a few flipped, cut, inserted or doubled."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        at = rng.randrange(len(raw) + 1)
        how = rng.randrange(5)
        if how == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del raw[at : at + rng.choice((1, 2, 8, 1 << 20))]
        elif how == 2:
            raw[at:at] = rng.randbytes(rng.randrange(8))
        elif how == 3:
            raw[at:at] = raw[at : at + 40]
        elif at < len(raw):
            raw[at] = rng.choice(b'0\n"[]{}=,.:-\x00\xff')
    return bytes(raw)


def bent(rng: Random, text: str) -> str:
    """A text with characters lost, doubled, replaced or joined to another word."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        how = rng.randrange(4)
        if how == 0:
            text = text[:at] + text[at + 1 :]
        elif how == 1:
            text = text[:at] + rng.choice("()+:,=*?.[]{}'\" \n\x00é-0129{}|;^~") + text[at:]
        elif how == 2:
            text = text[:at] + str(rng.choice(WORDS)) + text[at:]
        else:
            text = text[:at] + text[max(0, at - rng.choice((1, 3, 2000))) :]
    return text
