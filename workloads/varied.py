"""Training steps on inputs of different lengths, one after the other, as one trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sim.arguments import explained
from sim.errors import WorkloadError
from sim.trace.builder import TraceBuilder
from sim.trace.graph import PERSISTENT, Trace
from workloads.transformer import transformer


@explained
def varied_lengths(
    config: str | Path | Mapping[str, Any], *, batch: int, sequences: Sequence[int], **options: Any
) -> Trace:
    """One step of a transformer per sequence length, in order, on the same weights; see `joined`.

    For policies that plan each step separately, pass the steps themselves:
    `simulate([transformer(config, batch=…, sequence=s) for s in sequences], …)`.

    config, batch, options: arguments of `transformer`.
    sequences: tokens per sample of each step.
    """
    return joined([transformer(config, batch=batch, sequence=length, **options) for length in sequences])


@explained
def joined(steps: Sequence[Trace]) -> Trace:
    """Join steps of one model into one trace: each step starts with what the previous one carries over.

    Weights and optimizer states are matched by name; those that a step does not overwrite are shared. Names gain `#0`,
    `#1`, …. Inputs are new in each step and, like all tensors without a producer, exist from the start: the inputs of
    all steps are resident throughout. Only the last step's outputs are kept. In the metadata, `samples`, `tokens` and
    `model_flops` are summed, and `sequences` lists each step's `sequence`.

    Raises WorkloadError for no steps, or where a step starts with a tensor that the previous one does not leave.
    """
    if not steps:
        raise WorkloadError("joined: needs at least one step")
    builder = TraceBuilder(_meta(steps))
    starts: dict[str, int] = {}  # weights and states by name, as they are at the start
    left: dict[str, int] = {}  # and as the previous step leaves them
    ids: list[int] = []
    for k, step in enumerate(steps):
        ids = []
        kept = (step.producer < 0) & np.isin(step.tensor_columns.role, PERSISTENT)
        for t in step.tensors:
            if kept[t.id] and k > 0:
                if t.name not in left or builder.bytes_of(left[t.name]) != t.bytes:
                    start = f"step {k} starts with {t.name!r} of {t.bytes:,} B"
                    raise WorkloadError(f"joined: {start}, which step {k - 1} does not leave")
                ids.append(left[t.name])
                continue
            fields = {name: getattr(t, name) for name in ("layer", "shape", "dtype", "zeros", "saved_for", "axes")}
            ids.append(builder.tensor(f"{t.name}#{k}", t.bytes, t.role, **fields))
            if kept[t.id]:
                starts[t.name] = left[t.name] = ids[-1]
        for t in step.tensors:
            if t.replaces is not None:
                builder.take_over(ids[t.id], ids[t.replaces])
        for op in step.ops:
            builder.copy_op(
                op,
                name=f"{op.name}#{k}",
                reads=[ids[t] for t in op.reads],
                writes=[ids[t] for t in op.writes],
                releases=[ids[t] for t in op.releases],
                group=f"{op.group}#{k}" if op.group else "",
            )
        left |= {step.tensors[first].name: ids[last] for last, first in step.carry}
    carry = [(ids[last], starts[steps[-1].tensors[first].name]) for last, first in steps[-1].carry]
    return builder.build(outputs=[ids[t] for t in steps[-1].outputs], carry=carry)


def _meta(steps: Sequence[Trace]) -> dict[str, Any]:
    """The metadata that all steps share, with counts of work summed."""
    first = dict(steps[0].meta)
    shared = {key: value for key, value in first.items() if all(step.meta.get(key) == value for step in steps)}
    for key in ("samples", "tokens", "model_flops"):
        if all(isinstance(step.meta.get(key), int) for step in steps):
            shared[key] = sum(step.meta[key] for step in steps)
    return {**shared, "iterations": len(steps), "sequences": [step.meta.get("sequence") for step in steps]}
