"""Traces that differ in batch and sequence alone: built once with sizes as symbols, filled in for all others.

A generator computes with a `Size` as with an integer, and what it computes is noted: each number of the trace becomes
a formula of the sizes. Where it decides something by a size (a comparison, the length of a loop, a name), what it has
seen is noted as a condition. For other sizes the formulas are evaluated if all conditions hold; if one does not, or
a number is needed in a way that cannot be noted, the trace is built as ever. So nothing depends on what the generator
does with sizes: PyTorch's symbolic shapes work like this, with guards.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, NoReturn, ParamSpec, cast

import numpy as np
from numpy.typing import NDArray

from sim.errors import TraceError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace

KEPT = 8
MOST_FORMULAS = 8
FORMULAS_WITHOUT_USE = 2
MOST_OPS = 50_000
"""Of how many models formulas are kept; how many of each, at most and where none has served another size yet; up to
how many ops a trace may have for that."""
P = ParamSpec("P")
Operation = Callable[..., Any]


class Step(NamedTuple):
    """How a number is computed: from numbers before it, by their positions."""

    operation: Operation
    operands: tuple[int, ...]


class Named(int):
    """A length of a shape of which it is known what it counts: one of `sim.trace.tensor.AXES`.

    It is a plain number in all other respects: what is computed with it has no name.
    """

    axis: str


@dataclass(frozen=True)
class _Naming:
    """The operation by which a size gets a name: its value stays."""

    axis: str

    def __call__(self, length: int) -> int:
        return length


def named(length: Any, axis: str) -> int:
    """A length, or a size, that counts what `axis` says (`sim.trace.tensor.AXES`) where it stands in a shape."""
    if type(length) is Size:
        return cast(int, length.of.result(_Naming(axis), (length.place,)))
    known = Named(length)
    known.axis = axis
    return known


def lengths_and_axes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """A shape of plain numbers and sizes, and what each axis counts, "" for no name; None where none has any."""
    for length in shape:
        if type(length) is not int:
            break
    else:
        return shape, None
    names = tuple([length.axis if type(length) is Named else _axis(length) for length in shape])
    return tuple([int(each) if type(each) is Named else each for each in shape]), names if any(names) else None


def _axis(length: Any) -> str:
    step = length.of.steps[length.place] if type(length) is Size else None
    return step.operation.axis if step is not None and type(step.operation) is _Naming else ""


class Symbols:
    """All numbers of a trace that depend on sizes, in the order in which they are computed, and the conditions.

    The first are the sizes themselves and constants; `value` is what each was when the trace was built.
    """

    def __init__(self) -> None:
        self.value: list[int] = []
        self.steps: list[Step | None] = []
        self.conditions: dict[Step, Any] = {}
        self._known: dict[Any, int] = {}

    def size(self, value: int) -> Size:
        """A new size."""
        return self._append(value, None)

    def _append(self, value: int, step: Step | None) -> Size:
        self.value.append(value)
        self.steps.append(step)
        return Size(self, len(self.value) - 1)

    def number(self, given: Any) -> int:
        """The position of an operand, -1 for all else than whole numbers."""
        if type(given) is Size:
            return given.place
        if type(given) not in (int, Named):
            return -1
        given = int(given)
        if given not in self._known:
            self._known[given] = self._append(given, None).place
        return self._known[given]

    def result(self, operation: Operation, operands: tuple[int, ...]) -> Size:
        """What an operation makes of some numbers, each computed once."""
        step = Step(operation, operands)
        if step not in self._known:
            value = operation(*(self.value[place] for place in operands))
            self._known[step] = self._append(value, step).place
        return Size(self, self._known[step])

    def outcome(self, operation: Operation, *operands: int) -> Any:
        """What an operation says, on which the trace depends from now on."""
        step = Step(operation, operands)
        if step not in self.conditions:
            self.conditions[step] = operation(*(self.value[place] for place in operands))
        return self.conditions[step]

    def evaluated(self, sizes: Sequence[int]) -> list[int] | None:
        """All numbers for other sizes; None where a condition does not hold."""
        value = list(self.value)
        value[: len(sizes)] = sizes
        for place, step in enumerate(self.steps):
            if step is not None:
                operation, operands = step
                if len(operands) == 2:  # as most have
                    value[place] = operation(value[operands[0]], value[operands[1]])
                else:
                    value[place] = operation(*[value[i] for i in operands])
        holds = all(
            operation(*[value[i] for i in operands]) == seen for (operation, operands), seen in self.conditions.items()
        )
        return value if holds else None


def _arithmetic(operation: Operation) -> tuple[Callable[[Size, Any], Any], Callable[[Size, Any], Any]]:
    def forward(self: Size, other: Any) -> Any:
        number = self.of.number(other)
        return NotImplemented if number < 0 else self.of.result(operation, (self.place, number))

    def backward(self: Size, other: Any) -> Any:
        number = self.of.number(other)
        return NotImplemented if number < 0 else self.of.result(operation, (number, self.place))

    return forward, backward


def _comparison(operation: Operation) -> Callable[[Size, Any], Any]:
    def compare(self: Size, other: Any) -> Any:
        number = self.of.number(other)
        return NotImplemented if number < 0 else self.of.outcome(operation, self.place, number)

    return compare


class Size:
    """A whole number that depends on sizes. Whatever is not noted here takes its value, which becomes a condition."""

    __slots__ = ("of", "place")

    def __init__(self, of: Symbols, place: int) -> None:
        self.of = of
        self.place = place

    __add__, __radd__ = _arithmetic(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul)
    __floordiv__, __rfloordiv__ = _arithmetic(operator.floordiv)
    __mod__, __rmod__ = _arithmetic(operator.mod)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def __neg__(self) -> Size:
        return self.of.result(operator.neg, (self.place,))

    def __bool__(self) -> bool:
        return bool(self.of.outcome(bool, self.place))

    def __index__(self) -> int:
        return int(self.of.outcome(operator.index, self.place))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __truediv__(self, other: Any) -> Any:
        return self.__index__() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.__index__()

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __str__(self) -> str:
        return str(self.__index__())

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)


def of_sizes(function: Callable[P, int]) -> Callable[P, int]:
    """Have a function of whole numbers that loops or decides by them noted as one operation on sizes."""

    @wraps(function)
    def noted(*args: P.args, **kwargs: P.kwargs) -> int:
        symbols = next((each.of for each in (*args, *kwargs.values()) if type(each) is Size), None)
        if symbols is None:
            return function(*args, **kwargs)
        given = [(None, arg) for arg in args] + list(kwargs.items())
        sized = tuple(each.place for _, each in given if type(each) is Size)
        fixed = tuple((key, Size if type(each) is Size else each) for key, each in given)
        return cast(int, symbols.result(_Call(function, fixed), sized))

    return noted


@dataclass(frozen=True)
class _Call:
    """A function with its arguments by name, None for one by place; where one is `Size`, that is given in the call."""

    function: Callable[..., int]
    fixed: tuple[tuple[str | None, Any], ...]

    def __call__(self, *sizes: int) -> int:
        rest = iter(sizes)
        given = [(name, next(rest) if value is Size else value) for name, value in self.fixed]
        by_place = [value for name, value in given if name is None]
        return self.function(*by_place, **{name: value for name, value in given if name is not None})


# ---- traces ------------------------------------------------------------------------------------


class SizedBuilder(TraceBuilder):
    """A builder whose numbers may be sizes: the trace has their values, and of each the formula is kept here."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self.symbols = symbols
        self.sized: dict[str, dict[int, int]] = {
            key: {} for key in ("tensor", "flops", "bytes", "workspace", "counted")
        }
        self.shapes: dict[int, tuple[Any, ...]] = {}

    def tensor(self, name: str, bytes: int, role: str = "activation", **fields: Any) -> int:
        """See `TraceBuilder.tensor`."""
        shape = fields.pop("shape", None)
        row = super().tensor(name, _value(bytes), role, shape=shape and [_value(n) for n in shape], **fields)
        if (place := _place(bytes)) is not None:
            self.sized["tensor"][row] = place
        if shape and any(type(n) is Size for n in shape):
            self.shapes[row] = tuple(shape)
        return row

    def op(self, name: str, kind: str = "other", **fields: Any) -> int:
        """See `TraceBuilder.op`."""
        keys = ("flops", "bytes", "workspace", "counted")
        sized = {key: place for key in keys if (place := _place(fields.get(key))) is not None}
        row = super().op(name, kind, **{**fields, **{key: _value(fields[key]) for key in sized}})
        for key, place in sized.items():
            self.sized[key][row] = place
        return row

    def bytes_of(self, tensor: int) -> int:
        """See `TraceBuilder.bytes_of`."""
        place = self.sized["tensor"].get(tensor)
        return super().bytes_of(tensor) if place is None else cast(int, Size(self.symbols, place))

    def build(self, **ends: Any) -> Trace:
        """See `TraceBuilder.build`."""
        self.sized_meta, self.meta = self.meta, {key: _value(value) for key, value in self.meta.items()}
        return super().build(**ends)

    def _not_noted(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("rows that are copied have no formulas")

    repeat_tensor = repeat_op = extend_tensors = extend_ops = copier = run_copier = _not_noted
    continue_series = _not_noted


def _place(number: Any) -> int | None:
    return number.place if type(number) is Size else None


def _value(number: Any) -> Any:
    return number.of.value[number.place] if type(number) is Size else number


@dataclass(frozen=True)
class _Column:
    """Some rows of a column, and where the number of each is among all that depend on sizes."""

    rows: NDArray[np.int64]
    places: NDArray[np.int64]

    def filled(self, column: NDArray[np.int64], numbers: Sequence[int]) -> NDArray[np.int64]:
        """The column for these numbers."""
        if not len(self.rows):
            return column
        new = column.copy()
        new[self.rows] = np.array(numbers, object)[self.places].astype(np.int64)
        return new


class Formulas:
    """A trace whose numbers are formulas of its batch and sequence."""

    def __init__(self, trace: Trace, builder: SizedBuilder) -> None:
        self.trace, self._symbols, self._meta = trace, builder.symbols, builder.sized_meta
        self._columns = {
            key: _Column(np.array(list(rows), np.int64), np.array(list(rows.values()), np.int64))
            for key, rows in builder.sized.items()
        }
        self._counted = builder.sized["counted"]
        self._fixed_counts = {row: n for row, n in trace.op_columns.counted.items() if row not in self._counted}
        shape_of, self._shapes = dict[int, int](), list[tuple[Any, ...]]()
        known: dict[tuple[Any, ...], int] = {}
        for row, shape in builder.shapes.items():
            key = tuple((each.place,) if type(each) is Size else each for each in shape)
            if key not in known:
                known[key] = len(self._shapes)
                self._shapes.append(key)
            shape_of[row] = known[key]
        fixed = {row: shape for row, shape in trace.tensor_columns.shape.items() if row not in shape_of}
        self._fixed_shapes = list(fixed.values())
        place = {**shape_of, **{row: len(self._shapes) + i for i, row in enumerate(fixed)}}
        self._shape_rows = list(trace.tensor_columns.shape)
        self._shape_places = [place[row] for row in self._shape_rows]

    def at(self, batch: int, sequence: int) -> Trace | None:
        """The trace for these sizes; None where a condition does not hold, or a number is too large for a trace."""
        try:
            numbers = self._symbols.evaluated((batch, sequence))
            return None if numbers is None else self._filled(numbers)
        except (ArithmeticError, TraceError):
            return None  # who builds it as ever says which; a division may be by what a condition rules out

    def _filled(self, numbers: Sequence[int]) -> Trace:
        shapes = [tuple([numbers[n[0]] if type(n) is tuple else n for n in shape]) for shape in self._shapes]
        shapes += self._fixed_shapes
        old, ops = self.trace.tensor_columns, self.trace.op_columns
        tensors = replace(
            old,
            bytes=self._columns["tensor"].filled(old.bytes, numbers),
            shape=dict(zip(self._shape_rows, map(shapes.__getitem__, self._shape_places), strict=True)),
        )
        columns: dict[str, Any] = {
            key: self._columns[key].filled(getattr(ops, key), numbers) for key in ("flops", "bytes", "workspace")
        }
        flops = columns["flops"].tolist()
        sized = {row: numbers[place] for row, place in self._counted.items() if numbers[place] != flops[row]}
        counted = {
            **self._fixed_counts,
            **sized,
        }  # of few ops: of those of which as many are counted as are executed, none
        meta = {key: numbers[v.place] if type(v) is Size else v for key, v in self._meta.items()}
        return Trace(
            tensors,
            replace(ops, **columns, counted=counted),
            outputs=self.trace.outputs,
            carry=self.trace.carry,
            meta=meta,
            like=self.trace,
        )


Build = Callable[[TraceBuilder, int, int], Trace]
"""Builds a trace with a builder, for a batch and a sequence."""


class Known:
    """What has been built of one model: formulas, of which each holds for some sizes. closed: no more are made."""

    def __init__(self) -> None:
        self.formulas: list[Formulas] = []
        self.hits = 0
        self.closed = False

    def at(self, build: Build, batch: int, sequence: int) -> Trace:
        """The trace for these sizes."""
        for formulas in self.formulas:
            if (trace := formulas.at(batch, sequence)) is not None:
                self.hits += 1
                formulas.trace.derive()  # others are likely to follow
                self.formulas.remove(formulas)
                self.formulas.insert(0, formulas)  # the next sizes are likely to be alike
                return trace
        if not self.closed and (made := _formulas(build, batch, sequence)) is not None:
            self.formulas.append(made)
            self.closed = len(self.formulas) == (MOST_FORMULAS if self.hits else FORMULAS_WITHOUT_USE)
            # a copy, since what is derived from a trace is kept as long as it is
            return made.at(batch, sequence) or made.trace
        self.closed = True
        return build(TraceBuilder(), batch, sequence)


_known: OrderedDict[str, Known] = OrderedDict()


def at_sizes(key: str, build: Build, batch: int, sequence: int) -> Trace:
    """The trace that `build` makes for these sizes; from the second time on that a key is given, by formulas.

    key: everything else that the trace depends on.
    """
    if key in _known:
        _known.move_to_end(key)
        return _known[key].at(build, batch, sequence)
    trace = build(TraceBuilder(), batch, sequence)
    if len(trace.op_columns.name) <= MOST_OPS:
        _known[key] = Known()
        while len(_known) > KEPT:
            _known.popitem(last=False)
    return trace


def _formulas(build: Build, batch: int, sequence: int) -> Formulas | None:
    symbols = Symbols()
    sizes = symbols.size(batch), symbols.size(sequence)
    builder = SizedBuilder(symbols)
    try:
        return Formulas(build(builder, *cast(tuple[int, int], sizes)), builder)
    except Exception:  # whatever it is that sizes cannot do: numbers can, or say what is wrong
        return None
