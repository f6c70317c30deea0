"""Chakra nodes from any of their encodings: protobuf, the JSON of its tools, or a JSON list of nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sim.errors import TraceError
from workloads.importers import chakra_schema
from workloads.importers.reading import microseconds, need, texts, whole

MOST_NODES = 10_000_000


@dataclass(slots=True)
class ChakraNode:
    """One node.

    id, name, type: as in the file.
    deps: ids of the nodes that it depends on.
    duration: in ns.
    attrs: attributes by name.
    inputs, outputs: (values, shapes, types), each nested lists or None.
    """

    id: int
    name: str
    type: str
    deps: list[int]
    duration: int
    attrs: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Any, Any, Any] = (None, None, None)
    outputs: tuple[Any, Any, Any] = (None, None, None)

    def number(self, *names: str, most: int = 1 << 50) -> int | None:
        """The first of these attributes that exists, whether it was written signed or unsigned; None if none does."""
        for name in names:
            if self.attrs.get(name) is not None:
                value = self.attrs[name]
                if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 25:
                    value = int(value)  # JSON writes 64-bit numbers as text
                return whole(value, f"node {self.id}: {name}", 0, most)
        return None

    def text(self, name: str) -> str:
        """The value of an attribute if it is text, else ""."""
        value = self.attrs.get(name)
        return value if isinstance(value, str) else ""


def nodes_of(data: bytes) -> tuple[dict[str, Any], list[ChakraNode]]:
    """The attributes of the file, and its nodes. Raises TraceError if it is not a Chakra trace."""
    if data[:64].lstrip()[:1] in (b"{", b"["):
        return _from_json(_documents(data))
    stream = chakra_schema.decode(data)
    head = {attr.name: chakra_schema.value_of(attr) for attr in next(stream).attr}
    return head, _collect(_from_message(message) for message in stream)


def _collect(nodes: Iterable[ChakraNode]) -> list[ChakraNode]:
    """The nodes in topological order, otherwise in the order of the file."""
    rows: dict[int, ChakraNode] = {}
    for node in nodes:
        if node.id in rows:
            raise TraceError(f"two nodes have the id {node.id}")
        rows[node.id] = node
        if len(rows) > MOST_NODES:
            raise TraceError(f"more than {MOST_NODES:,} nodes")
    if not rows:
        raise TraceError("it has no nodes")
    done: dict[int, ChakraNode] = {}
    open_: dict[int, int] = {}
    for start in rows:
        stack = [start] if start not in done else []
        while stack:
            current = stack[-1]
            node, next_dep = rows[current], open_.get(current, 0)
            if current in done:
                stack.pop()
            elif next_dep == len(node.deps):
                done[current] = node
                stack.pop()
            else:
                open_[current] = next_dep + 1
                dep = node.deps[next_dep]
                if dep in rows and dep not in done and dep != current:
                    if dep in open_:
                        raise TraceError(f"node {dep} depends on itself through node {current}")
                    stack.append(dep)
    return list(done.values())


def _from_message(message: Any) -> ChakraNode:
    kinds = chakra_schema.NODE_TYPES
    return ChakraNode(
        message.id,
        texts(message.name, f"node {message.id}: name"),
        kinds[message.type] if 0 <= message.type < len(kinds) else f"type {message.type}",
        list(dict.fromkeys((*message.data_deps, *message.ctrl_deps))),
        microseconds(message.duration_micros, f"node {message.id}: duration_micros"),
        {attr.name: chakra_schema.value_of(attr) for attr in message.attr},
        _io(message.inputs.values, message.inputs.shapes, message.inputs.types),
        _io(message.outputs.values, message.outputs.shapes, message.outputs.types),
    )


# ---- JSON --------------------------------------------------------------------------------------------


def _documents(data: bytes) -> list[Any]:
    """The JSON documents in a file, one or more."""
    try:
        text = data.decode()
        decoder, position = json.JSONDecoder(), 0
        documents: list[Any] = []
        while True:
            position = re.compile(r"\s*").match(text, position).end()  # type: ignore[union-attr]
            if position >= len(text):
                return documents
            document, position = decoder.raw_decode(text, position)
            documents.append(document)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not valid JSON ({' '.join(str(error).split())[:100]})") from None


def _from_json(documents: list[Any]) -> tuple[dict[str, Any], list[ChakraNode]]:
    rows: list[Any] = documents
    head: dict[str, Any] = {}
    if len(documents) == 1:
        only = documents[0]
        if isinstance(only, dict):
            rows = need(only.get("workload_graph", only.get("nodes")), list, "workload_graph")
        else:
            rows = need(only, list, "the document")
    elif isinstance(rows[0], dict) and "id" not in rows[0] and "name" not in rows[0]:
        head, rows = _attrs(rows[0].get("attr", []), "GlobalMetadata"), rows[1:]
    return head, _collect(_from_row(need(row, dict, f"node {i}"), i) for i, row in enumerate(rows))


def _from_row(row: dict[str, Any], place: int) -> ChakraNode:
    """A node with the field names of the schema, of protobuf's JSON, or of the Chakra feeder's JSON."""
    row = {re.sub(r"(?<=[a-z])([A-Z])", r"_\1", str(key)).lower(): value for key, value in row.items()}
    number = _int(row.get("id", 0), f"node {place}: id", 1 << 64)
    where = f"node {number}"
    kind = row.get("type", row.get("node_type", 0))
    if isinstance(kind, int) and not isinstance(kind, bool):
        kinds = chakra_schema.NODE_TYPES
        kind = kinds[kind] if 0 <= kind < len(kinds) else f"type {kind}"
    deps: list[int] = []
    for key in ("data_deps", "ctrl_deps"):
        deps += [_int(dep, f"{where}: {key}", 1 << 64) for dep in need(row.get(key, []), list, f"{where}: {key}")]
    attrs = {key: value for key, value in row.items() if key not in ("id", "name", "attr", "inputs", "outputs")}
    attrs |= _attrs(row.get("attr", []), where)
    sides = []
    for key in ("inputs", "outputs"):
        held = need(row.get(key, {}), dict, f"{where}: {key}")
        sides.append(_io(held.get("values"), held.get("shapes"), held.get("types")))
    span = row.get("duration_micros", row.get("runtime", 0))
    span = int(span) if isinstance(span, str) and span.isdigit() and len(span) < 20 else span
    return ChakraNode(
        number,
        texts(row.get("name", f"node {number}"), f"{where}: name"),
        texts(kind, f"{where}: type"),
        list(dict.fromkeys(deps)),
        microseconds(span, f"{where}: duration"),
        attrs,
        *sides,
    )


def _attrs(rows: Any, where: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for attr in need(rows, list, f"{where}: attr"):
        for key, value in need(attr, dict, f"{where}: attr").items():
            if key not in ("name", "docString", "doc_string"):
                plain = value.get("values", []) if isinstance(value, dict) else value
                attributes[str(attr.get("name"))] = plain
    return attributes


def _int(value: Any, where: str, most: int) -> int:
    if isinstance(value, str) and value.isdigit() and len(value) < 25:
        value = int(value)
    return whole(value, where, 0, most)


def _io(*parts: Any) -> tuple[Any, Any, Any]:
    values, shapes, types = (_nested(part) for part in parts)
    return values, shapes, types


def _nested(value: Any) -> Any:
    """Nested lists from text in JSON or Python notation; None if it is neither."""
    if not isinstance(value, str):
        return value if isinstance(value, list) else None
    if not value:
        return None
    for text in (value, re.sub(r"\b(None|True|False)\b", "null", value.replace("'", '"'))):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return parsed if isinstance(parsed, list) else None
    return None
