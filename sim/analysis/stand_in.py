"""The type whose peak prices most FLOPs of a trace, where a machine states none for their own."""

from __future__ import annotations

from sim.hardware.cost import peak_dtype
from sim.hardware.platform import Platform
from sim.trace.graph import Trace


def stand_in(trace: Trace, platform: Platform) -> tuple[str, str]:
    """The type of most FLOPs that no measured time replaces, "" for none, and the one whose peak prices them."""
    flops: dict[str, int] = {}
    columns = trace.op_columns
    for dtype, count, measured in zip(columns.dtype, columns.flops.tolist(), columns.duration.tolist(), strict=True):
        if dtype and count and measured < 0:
            flops[dtype] = flops.get(dtype, 0) + count
    main = max(flops, key=lambda dtype: flops[dtype], default="")
    return main, peak_dtype(platform.main_engine(0), main) if main else ""
