"""Chakra's files of protobuf as documents, so that their values are replaced, deleted, doubled and swapped like others.

A message is a table of values by field number, as text; what is written follows each value's own type, so that a wrong
value leaves a message that is well formed and says something else.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from workloads.importers.chakra_schema import decode

VARINT, EIGHT_BYTES, LENGTH = 0, 1, 2
MOST_FIELD = (1 << 29) - 1


def documents(data: bytes) -> list[Any]:
    """The messages of a file: its metadata, then its nodes."""
    return [_document(message) for message in decode(data)]


def _document(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        nested, many = field.message_type is not None, not isinstance(value, str | bytes | int | float)
        if nested and not hasattr(value, "ListFields"):
            found[str(field.number)] = [_document(each) for each in value]
        elif nested:
            found[str(field.number)] = _document(value)
        else:
            found[str(field.number)] = list(value) if many else value
    return found


def encoded(messages: Any) -> bytes:
    """A file with these messages, each after its length."""
    rows = messages if isinstance(messages, list) else [messages]
    return b"".join(_varint(len(data)) + data for data in map(_message, rows))


def _message(value: Any) -> bytes:
    if not isinstance(value, dict):
        return _bytes(value)
    fields = ((_number(key), each) for key, held in value.items() for each in (held if _many(held) else [held]))
    return b"".join(_field(number, each) for number, each in fields)


def _many(value: Any) -> bool:
    return isinstance(value, list)


def _number(key: Any) -> int:
    """The number of a field; any text is one."""
    text = str(key)
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else zlib.crc32(_bytes(text))
    return number % MOST_FIELD or 1


def _field(number: int, value: Any) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value % (1 << 64))
    if isinstance(value, float):
        return _varint(number << 3 | EIGHT_BYTES) + struct.pack("<d", value)
    data = _message(value)
    return _varint(number << 3 | LENGTH) + _varint(len(data)) + data


def _bytes(value: Any) -> bytes:
    if isinstance(value, int):
        value %= 1 << 64
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
