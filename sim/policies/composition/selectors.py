"""Selectors: which tensors of a trace a part of a composition may own, by layer, stage, role or name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sim.errors import PolicyError, near, nearest
from sim.policies.traits import MANAGED_AS, MANAGES
from sim.trace.graph import Trace
from sim.trace.layers import tensor_layers
from sim.trace.tensor import ROLES

Mask = NDArray[np.bool_]
"""One entry per tensor."""

STATE = ("gradients", "optimizer_state", "weights")
REST, CHECKPOINTS = "rest", "checkpoints"
WORDS = (*MANAGES, "state", REST, CHECKPOINTS)
RANGE = r"\d+(?:-\d+)?"
LAYERS = re.compile(rf"(layer|stage)s?\s+({RANGE}(?:[\s,]+{RANGE})*)")
"""Layers of the model; stages are devices of a pipeline, where each is one."""
GLOB = re.compile(r"[*?\[.]")


def roles(trace: Trace, words: tuple[str, ...]) -> Mask:
    """The tensors whose role falls under some of the words of `manages`."""
    return np.isin(trace.tensor_columns.role, [i for i, role in enumerate(ROLES) if MANAGED_AS[role] in words])


def terms(selector: str) -> list[str]:
    """What a tensor must meet, one after the other."""
    return [term.strip() for term in selector.split("&")]


def selected(trace: Trace, selector: str) -> Mask:
    """The tensors that a selector names: those that meet all its terms, joined by `&`.

    A term is `layers 0-7 10`, `stages 0-1`, a word of `manages` or `state`, or a pattern such as `*.attn`: a tensor
    meets it if its name or that of the op that produces it matches, or a leading part of either that ends before a dot.
    The tensors of `rest` and `checkpoints` depend on the other parts; here they are all.

    Raises PolicyError for layers or stages that this trace has not, naming how many it has, a pattern that nothing
    matches, and terms that have no tensor in common.
    """
    mask = np.ones(len(trace.tensor_columns.name), np.bool_)
    for term in terms(selector):
        met = _term(trace, term)
        if not met.any() and term not in WORDS:
            raise PolicyError(f"selector {term!r} matches no tensor of this trace{_nearest_pattern(trace, term)}")
        mask &= met
    if not mask.any() and "&" in selector:
        raise PolicyError(f"selector {selector!r} matches no tensor of this trace: its terms have none in common")
    return mask


def check(selector: str) -> None:
    """Raises PolicyError where a selector cannot be one on any trace."""
    for term in terms(selector):
        if not term:
            raise PolicyError(f"selector {selector!r}: a term is missing beside '&'")
        if not (LAYERS.fullmatch(term) or term in WORDS or GLOB.search(term)):
            raise PolicyError(
                f"selector {term!r}{near(term, (*WORDS, 'layers 0-7', 'stages 0-1'))}; a selector is 'layers 0-7', "
                f"'stages 0-1', one of {', '.join(WORDS)}, or a pattern with '*' or '.' for names of ops and tensors"
            )
        numbered = LAYERS.fullmatch(term)
        for low, high in re.findall(r"(\d+)-(\d+)", term) if numbered else ():
            if _amount(low) > _amount(high):
                raise PolicyError(
                    f"selector {term!r}: {low}-{high} is not a range of {numbered and numbered[1]}s "
                    f"(did you mean '{high}-{low}'?)"
                )


def _amount(number: str) -> tuple[int, str]:
    """What orders numbers as their values do; what is typed may have more digits than Python converts."""
    digits = number.lstrip("0")
    return len(digits), digits


def _value(number: str) -> int:
    """The value of a number that a trace has, however many zeros it begins with."""
    return int(number.lstrip("0") or "0")


def _term(trace: Trace, term: str) -> Mask:
    if term in (REST, CHECKPOINTS):
        return np.ones(len(trace.tensor_columns.name), np.bool_)
    if term in WORDS:
        return roles(trace, STATE if term == "state" else (term,))
    found = LAYERS.fullmatch(term)
    if found is None:
        return _named(trace, term)
    numbers = _numbers(trace, found[1])
    most = int(numbers.max(initial=-1))
    chosen = np.zeros(len(numbers), np.bool_)
    for piece in re.findall(RANGE, found[2]):
        low, _, high = piece.partition("-")
        if _amount(high or low) > _amount(str(most)) or most < 0:
            raise PolicyError(f"selector {term!r}: {_how_many(numbers, found[1])}{_within(low, high, found[1], most)}")
        chosen |= (numbers >= _value(low)) & (numbers <= _value(high or low))
    return chosen


def _how_many(numbers: NDArray[np.int32], what: str) -> str:
    """How many layers or stages a trace has, for a message."""
    there = np.unique(numbers[numbers >= 0])
    if not len(there):
        return f"this trace has no {what}s"
    if what == "stage" and len(there) == 1:
        return "this trace has 1 stage, 0; stages are devices of a pipeline (--pp)"
    span = f"{there[0]} to {there[-1]}" if len(there) > 1 else str(there[0])
    return f"this trace has {len(there)} {what}{'s' if len(there) > 1 else ''}, {span}"


def _within(low: str, high: str, what: str, most: int) -> str:
    """The range that ends where the trace does, as a hint; "" where nothing of the range is there."""
    if most < 0 or _amount(low) > _amount(str(most)):
        return ""
    return f" (did you mean '{what}s {low if _value(low) == most else f'{low}-{most}'}'?)"


def _numbers(trace: Trace, of: str) -> NDArray[np.int32]:
    """Per tensor its layer, or its stage: the device of the op that produces it, or of its first reader."""
    if of == "layer":
        return tensor_layers(trace)
    device, producer = trace.op_columns.device, trace.producer
    first = producer.copy()
    for t in np.flatnonzero(producer < 0).tolist():
        first[t] = next(iter(trace.readers(t)), -1)
    stages: NDArray[np.int32] = np.where(first >= 0, device[np.maximum(first, 0)], -1)
    return stages


def meets(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, or a leading part of it that ends before a dot does."""
    return fnmatchcase(name, pattern) or ("." in name and meets(name.rpartition(".")[0], pattern))


def _named(trace: Trace, pattern: str) -> Mask:
    @cache
    def matches(name: str) -> bool:
        return meets(name, pattern)

    by_op = np.array([matches(name) for name in trace.op_columns.name], np.bool_)
    own = np.array([matches(name) for name in trace.tensor_columns.name], np.bool_)
    made = trace.producer >= 0
    return own | (made & by_op[np.where(made, trace.producer, 0)])


def _nearest_pattern(trace: Trace, term: str) -> str:
    """The pattern nearest to one that matches nothing, as the end of a message: each that is offered matches."""
    names = trace.op_columns.name
    patterns = {pattern for name in names for pattern in _patterns(name) if term[0] != "*" or pattern[0] == "*"}
    close = nearest(term, patterns)
    return near(term, close) if close else f"; ops are called {', '.join(map(repr, sorted(names)[:3]))}, …"


def _patterns(name: str) -> Iterator[str]:
    """Patterns for the leading parts of a name: of `h0.attn.add`, `h0.attn` and, in any layer, `*.attn` are two."""
    first, *rest = name.split(".")
    for i in range(len(rest)):
        inner = ".".join(rest[: i + 1])
        yield from (f"{first}.{inner}", f"*.{inner}")
    if not rest:
        yield f"*{first}"
