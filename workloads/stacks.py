"""The software stack that runs a workload: eager, compiled as a whole or by layer, or with fused kernels.

Every trace is built as PyTorch runs it eagerly; `with_stack` rewrites it to what another stack runs. What each stack
fuses, who does it and where that was read is in `stacks.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from sim.arguments import explained
from sim.errors import WorkloadError, near
from sim.rewrites.stack import (
    accumulating_products,
    can_recompute,
    fuse_streams,
    recomputed_inside,
    stream_groups,
)
from sim.trace.graph import Trace
from sim.trace.index import TraceIndex
from sim.trace.layers import has_layers, op_layers
from sim.trace.op import KIND_CODE, PHASE_CODE

FORWARD = PHASE_CODE["forward"]
PRODUCTS = tuple(KIND_CODE[kind] for kind in ("matmul", "conv", "attention"))


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
    if stack == "eager":
        return trace
    what = stacks()[stack]
    groups = stream_groups(trace, columns=what["column_sums"])
    if what.get("regions", "graph") == "layer":
        if not has_layers(trace):
            raise WorkloadError(
                f"stack {stack!r} compiles layers, and this trace has none; 'compiled' compiles all as one"
            )
        layer = op_layers(trace)
        groups = [group for group in groups if layer[group[0]] >= 0]
    _refuse(trace, stack, groups)
    inputs = what["recompute"] == "inputs"
    recomputed = recomputed_inside(trace, groups) if inputs else not_saved(trace, groups, stack)
    groups = [*groups, *accumulating_products(trace)] if what["accumulates"] else groups
    return fuse_streams(trace, recomputed, groups, update=what["optimizer"], stack=stack)


def as_workload(trace: Trace, stack: str) -> Trace:
    """The trace as `with_stack` makes it, as a workload of its own: rewrites of it are compared with it."""
    found = with_stack(trace, stack)
    if found is trace:
        return trace
    return Trace(found.tensor_columns, found.op_columns, outputs=found.outputs, carry=found.carry, meta=found.meta)


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
    found = {op for op in joint.from_saved(kept).reruns if op in grouped and can_recompute(trace, op)}
    # what a kernel that fuses with nothing reads has to be in memory, and so has what that is made from
    c = trace.op_columns
    for op in sorted(found):
        readers = {r for t in trace.writes(op) for r in trace.readers(t)}
        if any(c.phase[r] != FORWARD and r not in grouped for r in readers):
            found.discard(op)
    return found
