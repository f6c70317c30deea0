"""How many elements of activations are zero: stated figures, and a model of what follows from them.

A trace knows no values, so that the fraction of zeros of a tensor (`Tensor.zeros`) is stated, never computed: of each
ReLU's result it is given, and of results that only select or join elements it follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction

from sim.arguments import explained
from sim.errors import WorkloadError, near
from sim.trace.graph import Trace
from sim.trace.op import Op

Zeros = float | str | Mapping[str, float]
"""The fraction of zeros in the results of ReLUs: one for all, the name of a published one, or one per pattern."""

PUBLISHED: Mapping[str, tuple[float, str]] = {
    "symmetric": (0.5, "a ReLU of what is distributed symmetrically about zero (a model, not a measurement)"),
    "cnvlutin": (
        0.44,
        "mean over the inputs of convolutions of trained networks: Albericio et al., ISCA 2016, as quoted by "
        "Shi, Chu 2017, arXiv:1704.07724",
    ),
    "cdma": (
        0.6466,
        "at which zero-value compression of fp32 reaches the mean ratio of 2.6 in the abstract of Rhu et al., "
        "HPCA 2018, arXiv:1705.01626 (computed: 1 - (1/2.6 - 1/32))",
    ),
}
"""Fractions by name, each with where it is from."""


@explained
def with_zeros(trace: Trace, relu: Zeros) -> Trace:
    """The same trace with the fractions of zeros that are stated, or follow, in `Tensor.zeros`.

    The result of a ReLU has the stated fraction z. The result of max pooling is zero where its whole window of k
    elements is; for windows of independent elements that is z ** k, fewer than neighbours that are alike give. A
    copy or concatenation has the mean of its inputs. Of all other tensors nothing is known, gradients included.
    The metadata (`zeros`) say what was stated and where it is from.

    trace: with the functions of its ops (`Op.function`), as `cnn` and `transformer` build it.
    relu: a fraction from 0 to 1 for all results of ReLUs; a name of `PUBLISHED`; or fractions by pattern (`conv1*`) of
        the name of the ReLU, of which the first that matches counts, and what matches none stays unknown.
    Raises WorkloadError for a fraction or a name that is none, a pattern that matches no ReLU, or a trace without any.
    """
    stated, source = _stated(relu)
    zeros: dict[int, float] = {}
    unused = set(stated)
    relus = 0
    for op in trace.ops:
        if op.phase != "forward":
            continue
        if op.function == "relu":
            relus += 1
            pattern = next((p for p in stated if fnmatchcase(op.name, p)), None)
            if pattern is not None:
                unused.discard(pattern)
                zeros.update(dict.fromkeys(op.writes, stated[pattern]))
        else:
            fraction = _following(trace, op, zeros)
            if fraction is not None:
                zeros[op.writes[0]] = fraction
    if not relus:
        raise WorkloadError("zeros: the trace has no ReLU that says so (`Op.function`); nothing follows for it")
    if unused:
        names = [op.name for op in trace.ops if op.function == "relu" and op.phase == "forward"]
        raise WorkloadError(f"zeros: {min(unused)!r} matches no ReLU{near(min(unused), names)}")
    return Trace(
        replace(trace.tensor_columns, zeros=zeros),
        trace.op_columns,
        outputs=trace.outputs,
        carry=trace.carry,
        meta={**trace.meta, "zeros": source},
        origin=trace.origin,
    )


def _stated(relu: Zeros) -> tuple[dict[str, float], str]:
    """Fractions by pattern, and what the metadata say of them."""
    if isinstance(relu, str):
        if relu not in PUBLISHED:
            raise WorkloadError(f"zeros: {relu!r} is unknown{near(relu, PUBLISHED)}")
        fraction, source = PUBLISHED[relu]
        return {"*": fraction}, f"{fraction:g} of each ReLU's result: {source}"
    patterns = dict(relu) if isinstance(relu, Mapping) else {"*": relu}
    for pattern, value in patterns.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            of = "" if pattern == "*" else f" of {pattern!r}"
            raise WorkloadError(f"zeros: the fraction{of} is {value!r}; expected a number from 0 to 1")
    if not isinstance(relu, Mapping):
        return patterns, f"{relu:g} of each ReLU's result: given by the user"
    return patterns, f"given by the user for {len(patterns)} patterns of ReLUs"


def _following(trace: Trace, op: Op, zeros: Mapping[int, float]) -> float | None:
    """The fraction of zeros in the first result of an op, None where it does not follow."""
    if not op.writes or any(t not in zeros for t in op.reads) or not op.reads:
        return None
    if op.function == "max_pool" and len(op.reads) == 1:
        shape = trace.tensors[op.writes[0]].shape
        elements = 1
        for size in shape or ():
            elements *= size
        # one comparison per element of a window, see `max_pool` in workloads/image_layers.py
        return zeros[op.reads[0]] ** (op.flops // elements) if shape and op.flops >= elements > 0 else None
    if op.kind == "copy":
        sizes = {t: int(trace.tensor_columns.bytes[t]) for t in op.reads}
        total = sum(sizes.values())
        return float(sum(Fraction(zeros[t]) * size for t, size in sizes.items()) / total) if total else None
    return None
