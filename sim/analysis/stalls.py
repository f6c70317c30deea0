"""Where a device's time goes: computation, recomputation and stalls, by cause and by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sim.analysis.lanes import CODEC, RECOMPUTE, RUN, STALL, on_main, stall_rows
from sim.log import STALLS, EventLog
from sim.trace.columns import distinct

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Stalls:
    """Nanoseconds on main lanes, summed over devices.

    compute_ns: first runs of ops.
    recompute_ns: recomputations.
    codec_ns: encoding and decoding.
    stall_ns: waiting.
    by_cause: stall time per cause, for each that occurred.
    recompute_overhead: recompute over compute time, None where nothing ran.
    """

    compute_ns: int
    recompute_ns: int
    codec_ns: int
    stall_ns: int
    by_cause: dict[str, int]
    recompute_overhead: float | None


def stalls(log: EventLog, device: int | None = None) -> Stalls:
    """Time on the main lanes of all devices, or of one."""
    rows = on_main(log, device)
    why, cause = log.interval("why")[rows], log.interval("cause")[rows]
    ns = (log.interval("end") - log.interval("start"))[rows]
    compute, recompute, codec = (int(ns[why == code].sum()) for code in (RUN, RECOMPUTE, CODEC))
    waits = why == STALL
    by_cause = {
        STALLS[code] or "unnamed": int(ns[waits & (cause == code)].sum()) for code in distinct(cause[waits]).tolist()
    }
    return Stalls(
        compute_ns=compute,
        recompute_ns=recompute,
        codec_ns=codec,
        stall_ns=sum(by_cause.values()),
        by_cause=by_cause,
        recompute_overhead=recompute / compute if compute else None,
    )


def stalls_by_op(log: EventLog, device: int | None = None) -> pd.DataFrame:
    """One row per op and cause, longest first: `op`, `cause`, `stall_ns`, `stalls` (how many)."""
    import pandas as pd

    rows = stall_rows(log, device)
    op, cause, ns, count = ([row[i] for row in rows] for i in range(4))
    return pd.DataFrame(
        {"op": op, "cause": cause, "stall_ns": np.array(ns, np.int64), "stalls": np.array(count, np.int64)}
    )
