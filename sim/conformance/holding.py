"""Law 11, on memory: what the program holds beyond its last reader, a rewritten trace holds as long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from sim.conformance.replayed import LawBroken
from sim.rewrites.dimensions import TOKENS
from sim.trace.graph import Trace
from sim.trace.origin import (
    Along,
    Chosen,
    Encoded,
    Expr,
    Fused,
    Glue,
    Lossy,
    Microbatch,
    Origin,
    Packed,
    Part,
    Rowwise,
    Same,
)
from sim.trace.tensor import ROLE_CODE

Batch = tuple[int, int, int] | None
"""Microbatches (first, stop, count), None for all of them."""

Place = tuple[int, int, Batch]
"""Device, iteration and microbatches."""


def check_holding(trace: Trace, base: Trace) -> None:
    """A tensor that the program releases at an op is held until what stands for that op has run, in whatever order.

    It counts as far as it is on the tensor's device, in its iteration and its microbatches (or, where those have none,
    in none); where it is not, the nearest op before it that is. Of a gradient it is the sum over all microbatches and
    ranks that is held. What a rewrite adds otherwise, what is overwritten in place and outputs have no release point; a
    value that only gets another name in its storage is held by that name. A plan may drop what is held, as its log then
    says.
    """
    origin = Origin.identity(trace)
    device = trace.op_columns.device.tolist()
    places: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    for op, expr in enumerate(origin.ops):
        for id, iteration, batch in _leaves(expr):
            places[device[op], iteration, batch].append((id, op))
    outputs, names = set(trace.outputs), trace.tensor_columns.name
    is_gradient = trace.tensor_columns.role == ROLE_CODE["gradient"]
    for t, expr in enumerate(origin.tensors):
        producer, last = int(trace.producer[t]), _last_name(trace, origin, t)
        if producer < 0 or last in outputs or trace.replaced_by[last] >= 0:
            continue
        if isinstance(origin.ops[producer], Glue) and not is_gradient[t]:
            continue
        for id, iteration, batch in _leaves(expr):
            release = int(base.released[id])
            if release < 0 or (is_gradient[t] and _is_term(expr)):
                continue
            ends = [
                max((at for at in places[device[producer], iteration, which] if at[0] <= release), default=None)
                for which in dict.fromkeys((batch, None))
            ]
            until = next((end[1] for end in ends if end is not None), -1)
            if trace.held_until[last] < until:
                held, late = (trace.op_columns.name[op] for op in (int(trace.held_until[last]), until))
                raise LawBroken(
                    f"the program holds {base.tensor_columns.name[id]!r} until {base.op_columns.name[release]!r}; the "
                    f"rewritten trace releases {names[last]!r} after {held!r}, before {late!r} has run"
                )


def _is_term(expr: Expr) -> bool:
    """Whether a gradient is a term of a sum, over microbatches, replicas, or ranks that divide the tokens."""
    match expr:
        case Microbatch(of, first, stop, count):
            return stop - first < count or _is_term(of)
        case Along(of, dimension):
            return dimension in TOKENS or _is_term(of)
        case Part(of) | Rowwise(of) | Encoded(of) | Lossy(of):
            return _is_term(of)
        case Packed(parts) | Chosen(parts):
            return any(_is_term(part) for part in parts if part is not None)
        case _:
            return False


def _last_name(trace: Trace, origin: Origin, tensor: int) -> int:
    """The last of the tensors in one storage that hold this one's value, which glue passes on."""
    expr = origin.tensors[tensor]
    while (heir := int(trace.replaced_by[tensor])) >= 0:
        if not isinstance(origin.ops[int(trace.producer[heir])], Glue) or not _holds(origin.tensors[heir], expr):
            break
        tensor = heir
    return tensor


def _holds(expr: Expr | None, value: Expr) -> bool:
    """Whether an expression is a value, or has it in a pack or encoded."""
    if isinstance(expr, Packed):
        return any(_holds(part, value) for part in expr.parts)
    return expr == value or (isinstance(expr, Encoded) and _holds(expr.of, value))


def _leaves(expr: Expr | None, batch: Batch = None) -> Iterator[tuple[int, int, Batch]]:
    """Id, iteration and microbatches of every tensor or op of the base in an expression."""
    match expr:
        case Same(id, iteration):
            yield id, iteration, batch
        case Microbatch(of, first, stop, count):
            yield from _leaves(of, (first, stop, count))
        case Part(of) | Along(of) | Rowwise(of) | Encoded(of) | Lossy(of):
            yield from _leaves(of, batch)
        case Packed(parts) | Fused(parts):
            for part in parts:
                yield from _leaves(part, batch)
        case None | Glue():
            return
        case _:
            yield from _leaves(expr.of, batch)
