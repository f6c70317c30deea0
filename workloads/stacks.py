"""The software stack that runs a workload: eager, compiled as a whole or by layer, or with fused kernels.

Every trace is built as PyTorch runs it eagerly; `with_stack` rewrites it to what another stack runs. What each stack
fuses, who does it and where that was read is in `stacks.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from sim.arguments import explained
from sim.errors import TraceError, WorkloadError, near
from sim.rewrites.compared import Compared
from sim.rewrites.experts import APART
from sim.rewrites.resized import Resized
from sim.rewrites.stack import (
    accumulating_products,
    fuse_streams,
    recomputable,
    recomputed_inside,
    stream_groups,
)
from sim.trace.graph import Trace
from sim.trace.index import TraceIndex
from sim.trace.kept import kept
from sim.trace.launched import names_launched
from sim.trace.layers import has_layers, op_layers
from sim.trace.op import KIND_CODE, PHASE_CODE

FORWARD = PHASE_CODE["forward"]
PRODUCTS = tuple(KIND_CODE[kind] for kind in ("matmul", "conv", "attention"))

MOST_OPS = 100_000
MOST_SIZES = 3
MOST_FACTS = 12
"""Up to how many ops in all the traces have that a structure keeps of a stack, and how many of them, which sizes decide
differently; of how many stacks, with and without origin."""


@cache
def stacks() -> Mapping[str, Mapping[str, Any]]:
    """What each stack does, by its name, as `stacks.toml` says."""
    return tomllib.loads(Path(__file__).with_name("stacks.toml").read_text(encoding="utf-8"))


STACKS = tuple(stacks())


def check_stack(stack: str) -> None:
    """Raise WorkloadError, naming the nearest, where there is no such stack."""
    if stack not in STACKS:
        raise WorkloadError(f"stack {stack!r} is unknown{near(str(stack), STACKS)}")


@explained
def with_stack(trace: Trace, stack: str) -> Trace:
    """The trace of the same iteration as another stack runs it.

    trace: of an eager stack, from a configuration, a capture or a file.
    stack: eager, compiled, compiled_layers or fused; see `stacks.toml`. Fused ops are priced as element-wise kernels:
        one launch, each operand once. Compiled ones save what PyTorch's partitioner would, of the whole graph or of
        each layer; `fused` saves what enters a kernel.

    The new trace has an `origin`, which says of every op which ops of the eager one it computes; what backward
    recomputes in its kernels it computes once more than the eager one.

    Raises WorkloadError for an unknown stack, a trace that has one already, and one that no other stack can run:
    without ops that could be fused, with times measured for the eager kernels, or without the layers to compile.
    """
    check_stack(stack)
    if trace.meta.get("stack", "eager") != "eager":
        raise WorkloadError(f"stack: this trace is already of the stack {trace.meta['stack']!r}")
    return trace if stack == "eager" else _rewritten(trace, stack, has_origin=True)


def as_workload(trace: Trace, stack: str) -> Trace:
    """The trace as `with_stack` makes it, as a workload of its own: rewrites of it are compared with it."""
    check_stack(stack)
    if stack == "eager" or trace.meta.get("stack", "eager") != "eager":
        return with_stack(trace, stack)
    return _rewritten(trace, stack, has_origin=False)


@dataclass(frozen=True)
class _Known:
    """What a stack makes of a trace, for others of its structure.

    compared: what has been asked about sizes; groups: what is one kernel.
    cut: which ops backward computes once more as a cut says, that depends on all sizes; None for no cut.
    """

    compared: Compared
    groups: Sequence[Sequence[int]]
    cut: Collection[int] | None
    resized: Resized

    def over(self, trace: Trace, stack: str) -> Trace | None:
        """What the stack makes of another trace, None where its sizes decide otherwise."""
        if not self.compared.is_alike(trace):
            return None
        if self.cut is not None and not_saved(trace, self.groups, stack) != self.cut:
            return None
        try:
            return self.resized.over(trace)
        except (OverflowError, TraceError):
            return None  # a rewrite of this trace alone says of which op a number is too large


def _rewritten(trace: Trace, stack: str, *, has_origin: bool) -> Trace:
    """has_origin: whether the new trace says what its parts stand for."""
    known: list[_Known] = []
    may_share = trace.structure.is_shared and trace.origin is None and not names_launched(trace)
    if may_share:
        facts = stack, has_origin, bool(trace.meta.get(APART))
        known = kept(trace.structure, "stacks", facts, list, MOST_FACTS)
    for each in known:
        if (found := each.over(trace, stack)) is not None:
            return found
    what, compared = stacks()[stack], Compared(trace)
    groups = stream_groups(trace, what["column_sums"], compared)
    if what.get("regions", "graph") == "layer":
        if not has_layers(trace):
            raise WorkloadError(
                f"stack {stack!r} compiles layers, and this trace has none; 'compiled' compiles all as one"
            )
        layer = op_layers(trace)
        groups = [group for group in groups if layer[group[0]] >= 0]
    _refuse(trace, stack, groups)
    cut = None if what["recompute"] == "inputs" else not_saved(trace, groups, stack)
    recomputed = recomputed_inside(trace, groups, compared) if cut is None else cut
    joined = [*groups, *accumulating_products(trace)] if what["accumulates"] else groups
    fused = fuse_streams(trace, recomputed, joined, update=what["optimizer"], stack=stack, claimed=has_origin)
    most = min(MOST_SIZES, max(1, MOST_OPS // len(trace.op_columns.name)))
    if may_share and len(known) < most:
        compared.close()
        known.append(_Known(compared, groups, cut, Resized(trace, *fused)))
    return fused.trace


def after_division(stack: str | None, ranks: int) -> Callable[[Trace], Trace] | None:
    """The rewrite to a stack where layers are divided among several ranks before, since fused kernels cannot be.

    None where the trace may have the stack from the start: `lay_out(…, kernels=after_division(stack, tp * cp * ep))`.
    """
    return partial(with_stack, stack=stack) if ranks > 1 and stack is not None else None


def _refuse(trace: Trace, stack: str, groups: Sequence[Sequence[int]]) -> None:
    if not any(len(group) > 1 for group in groups):
        raise WorkloadError(f"stack {stack!r}: this trace has no ops that could be one kernel")
    measured = next((op for group in groups for op in group if trace.op_columns.duration[op] >= 0), None)
    if measured is not None:
        name = trace.op_columns.name[measured]
        raise WorkloadError(
            f"stack {stack!r}: the time of {name!r} was measured, and a kernel of several ops has no such time; "
            "use stack 'eager'"
        )


def not_saved(trace: Trace, groups: Sequence[Sequence[int]], stack: str = "compiled") -> set[int]:
    """The forward ops that backward computes once more, because PyTorch's partitioner does not save their results."""
    from sim.solvers.cuts import Joint, graphs_of  # slow to import, and needed by these stacks alone
    from sim.solvers.knapsack import PICKERS
    from sim.solvers.partition import Partitioner

    if trace.devices > 1:
        raise WorkloadError(f"stack {stack!r} needs a trace on one device; this one has {trace.devices}")
    index = TraceIndex(trace)
    joint = Joint(index)
    if not joint.wanted:
        return set()
    graphs, kept = graphs_of(index, joint, stack, stacks()[stack].get("regions", "graph"))
    for graph in graphs:
        kept |= {graph.nodes[i].tensor for i in Partitioner(graph).saved(1.0, PICKERS["dp"])}
    grouped = {op for group in groups for op in group}
    may_rerun = recomputable(trace)
    found = {op for op in joint.from_saved(kept).reruns if op in grouped and may_rerun[op]}
    # what a kernel that fuses with nothing reads has to be in memory, and so has what that is made from
    c = trace.op_columns
    for op in sorted(found):
        readers = {r for t in trace.writes(op) for r in trace.readers(t)}
        if any(c.phase[r] != FORWARD and r not in grouped for r in readers):
            found.discard(op)
    return found
