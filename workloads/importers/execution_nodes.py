"""The nodes of a PyTorch execution trace: calls, and the tensors among their arguments and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sim.errors import TraceError
from workloads.importers.aten import is_causal
from workloads.importers.reading import need, texts, whole

MOST_VALUES = 1 << 20
"""The most values of one call; more are refused."""


class Seen(NamedTuple):
    """A tensor among the values of a call.

    storage, bytes, shape, kind, device, offset, tensor: as recorded; `kind` is its element type.
    argument: index of the argument or result that it belongs to.
    """

    storage: int
    bytes: int
    shape: tuple[int, ...]
    kind: str
    device: str
    argument: int
    offset: int
    tensor: int

    def covers(self, size: int) -> bool:
        """Whether it covers all of a storage of that size."""
        return self.offset == 0 and self.bytes >= size


@dataclass(slots=True)
class Node:
    """One call.

    id, name, parent, schema: as recorded.
    inputs, outputs: tensors among its arguments and results.
    written, overwritten: arguments that it writes in place, and those of them that it overwrites completely.
    silent: whether it runs no kernel.
    inner: whether it is part of an op.
    causal: whether it is a fused attention under a causal mask.
    last: the largest id among its calls.
    given_on: storages among its outputs that its own calls produced.
    """

    id: int
    name: str
    parent: int
    schema: str
    inputs: list[Seen]
    outputs: list[Seen]
    written: frozenset[int]
    overwritten: frozenset[int]
    silent: bool = False
    inner: bool = False
    causal: bool = False
    last: int = 0
    given_on: set[int] = field(default_factory=set)


def read_node(row: dict[str, Any], where: str) -> Node:
    """One node of the JSON, in the old or the new layout. Raises TraceError naming `where` it is."""
    number = whole(row.get("id"), f"{where}: id", 0, 1 << 62)
    attrs = row.get("attrs", [])
    named: dict[str, Any] = {}
    for attr in attrs if isinstance(attrs, list) else []:
        if isinstance(attr, dict) and isinstance(attr.get("name"), str):
            named[attr["name"]] = attr.get("value")
    parent = row.get("ctrl_deps", row.get("parent", 0))
    schema = named.get("op_schema", row.get("op_schema", ""))
    schema = schema[:20_000] if isinstance(schema, str) else ""
    name = texts(row.get("name"), f"{where}: name")
    given = _fields(row, "input")
    inputs = tensors_in(given, f"{where} ({name}): inputs")
    outputs = tensors_in(_fields(row, "output"), f"{where} ({name}): outputs")
    return Node(
        number,
        name,
        whole(parent, f"{where}: ctrl_deps", 0, 1 << 62),
        schema,
        inputs,
        outputs,
        *written(name, schema),
        causal=is_causal(name, given[0]),
    )


def written(name: str, schema: str) -> tuple[frozenset[int], frozenset[int]]:
    """The arguments that a call writes in place, and those of them that it overwrites completely.

    The schema marks the former: `add_(Tensor(a!) self, Tensor other) -> …`. The latter are those after the star
    (`*, Tensor(a!) out`), and the first argument of `fill_`, `zero_` and `copy_`.
    """
    text = schema.split("->")[0]
    start = text.find("(")
    if start < 0:
        return frozenset(), frozenset()
    depth, argument, marked, results, star, since = 0, 0, set(), set(), False, start + 1
    for position in range(start + 1, len(text)):
        char = text[position]
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            if text[since:position].strip() == "*":  # the bare star is not an argument
                star = True
            else:
                argument += 1
            since = position + 1
        elif char == "!":
            marked.add(argument)
            if star:
                results.add(argument)
    if name in ("aten::fill_", "aten::zero_", "aten::copy_") and 0 in marked:
        results.add(0)
    return frozenset(marked), frozenset(results)


def _fields(row: dict[str, Any], side: str) -> tuple[Any, Any, Any, Any]:
    held = row.get(f"{side}s", [])
    if isinstance(held, dict):
        return held.get("values", []), held.get("shapes"), held.get("types"), held.get("strides")
    return held, row.get(f"{side}_shapes"), row.get(f"{side}_types"), row.get(f"{side}_strides")


def tensors_in(fields: tuple[Any, Any, Any, Any], where: str) -> list[Seen]:
    """The tensors among nested values; shapes and strides are nested alike."""
    values, shapes, types, strides = fields
    tensors: list[Seen] = []
    budget = MOST_VALUES
    for argument, value in enumerate(need(values, list, where)):
        kind = _item(types, argument)
        kind = kind if isinstance(kind, str) else ""
        stack = [(value, _item(shapes, argument), _item(strides, argument))]
        while stack:
            value, shape, stride = stack.pop()
            budget -= 1
            if budget < 0:
                raise TraceError(f"{where}: more than {MOST_VALUES:,} values")
            if _is_tensor(value):
                tensors.append(_seen(value, shape, stride, kind, argument, where))
            elif isinstance(value, list):
                inner = range(len(value) - 1, -1, -1)
                stack += [(value[i], _item(shape, i), _item(stride, i)) for i in inner if isinstance(value[i], list)]
    return tensors


def _item(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) and index < len(value) else None


def _is_tensor(value: Any) -> bool:
    """Whether these are the six values of a tensor: five whole numbers and the name of a device."""
    return (
        isinstance(value, list)
        and len(value) == 6
        and isinstance(value[5], str)
        and all(type(part) is int for part in value[:5])
    )


def _seen(value: list[Any], shape: Any, stride: Any, kind: str, argument: int, where: str) -> Seen:
    _, storage, offset, elements, item, device = value
    for part, noun in ((offset, "offset"), (elements, "elements"), (item, "bytes per element")):
        whole(part, f"{where}: tensor {value[0]}: {noun}", 0, 1 << 48)
    sides = tuple(shape) if isinstance(shape, list) and all(type(s) is int and 0 <= s < 1 << 48 for s in shape) else ()
    steps = stride if isinstance(stride, list) and all(type(s) is int for s in stride) else []
    extent = elements
    if elements and len(steps) == len(sides) and sides:
        extent = 1 + sum((side - 1) * abs(step) for side, step in zip(sides, steps, strict=True))
    size = whole((offset + extent) * item if elements else 0, f"{where}: tensor {value[0]}: bytes")
    inner = kind[kind.find("Tensor(") + 7 :] if "Tensor(" in kind else ""
    end = inner.find(")")
    return Seen(storage, size, sides, inner[:end] if end >= 0 else "", device[:40], argument, offset, value[0])
