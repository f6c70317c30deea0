"""The Chakra execution-trace schema (MLCommons, version 0.0.4), as far as it is read and written here.

A file is a sequence of length-prefixed messages: one GlobalMetadata, then Nodes. The message classes are built on first
use from the list of fields below, so that no generated code has to match the installed protobuf.
Field numbers: `et_def.proto` of the MLCommons Chakra repository. Enumerations are read as whole numbers, which are
encoded identically and preserve values that later versions add; unknown fields (typed storage records) are skipped.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from sim.errors import TraceError

NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE",
    "COMM_COLL_NODE", "STORAGE_NODE", "BATCH_NODE", "CHECKPOINT_NODE",
)  # fmt: skip
COLLECTIVES = (
    "ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK", "BARRIER",
)  # fmt: skip
VALUES = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
"""Types of an attribute's value; value i has field number 3 + 2 i, and a list of such values the next one."""

_PACKAGE = "ChakraProtoMsg"
_MESSAGES: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "GlobalMetadata": (("version", 1, "string", False), ("attr", 2, "AttributeProto", True)),
    "IOInfo": (("values", 1, "string", False), ("shapes", 2, "string", False), ("types", 3, "string", False)),
    "Node": (
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "int32", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    ),
}


@cache
def messages() -> dict[str, Any]:
    """The message classes by name: GlobalMetadata, Node, IOInfo, AttributeProto and its lists."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    Field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tiersim_chakra.proto", package=_PACKAGE, syntax="proto3")

    def add(message: Any, name: str, number: int, kind: str, many: bool) -> Any:
        row = message.field.add(name=name, number=number, label=Field.LABEL_REPEATED if many else Field.LABEL_OPTIONAL)
        if kind in VALUES:
            row.type = getattr(Field, f"TYPE_{kind.upper()}")
        else:
            row.type, row.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
        return row

    attribute = file.message_type.add(name="AttributeProto")
    add(attribute, "name", 1, "string", False)
    add(attribute, "doc_string", 2, "string", False)
    attribute.oneof_decl.add(name="value")
    for i, kind in enumerate(VALUES):
        add(attribute, f"{kind}_val", 3 + 2 * i, kind, False).oneof_index = 0
        add(attribute, f"{kind}_list", 4 + 2 * i, f"{kind.title()}List", False).oneof_index = 0
        add(file.message_type.add(name=f"{kind.title()}List"), "values", 1, kind, True)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            add(message, *field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{n}")) for n in names}


def attribute(name: str, kind: str, value: Any) -> Any:
    """An attribute with a value of one of `VALUES`."""
    return messages()["AttributeProto"](name=name, **{f"{kind}_val": value})


def value_of(attr: Any) -> Any:
    """The value of an attribute, a list if it has several, None if it has none."""
    which = attr.WhichOneof("value")
    if which is None:
        return None
    held = getattr(attr, which)
    return list(held.values) if which.endswith("_list") else held


def decode(data: bytes) -> Iterator[Any]:
    """The messages of a file: its GlobalMetadata, then every Node. Raises TraceError if it is not such a file."""
    from google.protobuf.message import DecodeError
    from google.protobuf.proto import parse_length_prefixed

    stream, classes = io.BytesIO(data), messages()
    count = 0
    while stream.tell() < len(data):
        offset = stream.tell()
        try:
            message = parse_length_prefixed(classes["Node" if count else "GlobalMetadata"], stream)
        except (DecodeError, ValueError, EOFError) as error:
            raise TraceError(f"message {count} at byte {offset}: {' '.join(str(error).split())[:200]}") from None
        if message is None:
            break
        count += 1
        yield message
    if not count:
        raise TraceError("the file is empty")


def encode(all_messages: Iterable[Any]) -> bytes:
    """The bytes of a file with these messages."""
    from google.protobuf.proto import serialize_length_prefixed

    stream = io.BytesIO()
    for message in all_messages:
        serialize_length_prefixed(message, stream)
    return stream.getvalue()
