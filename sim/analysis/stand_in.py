"""The type whose peak prices most FLOPs of a trace, where a machine states none for their own."""

from __future__ import annotations

import numpy as np

from sim.hardware.cost import peak_dtype
from sim.hardware.platform import Platform
from sim.trace.graph import Trace


def stand_in(trace: Trace, platform: Platform) -> tuple[str, str]:
    """The type of most FLOPs that no measured time replaces, "" for none, and the one whose peak prices them."""
    columns, (types, which) = trace.op_columns, trace.op_types
    counts = np.flatnonzero((columns.flops != 0) & (columns.duration < 0))
    codes, first = np.unique(which[counts], return_index=True)
    flops = {  # in the order of their first ops, and in Python, where no sum is too large
        types[code]: sum(columns.flops[counts[which[counts] == code]].tolist())
        for code in codes[np.argsort(first)].tolist()
        if types[code]
    }
    main = max(flops, key=lambda dtype: flops[dtype], default="")
    return main, peak_dtype(platform.main_engine(0), main) if main else ""
