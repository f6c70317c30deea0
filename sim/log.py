"""The event log: what happened in a run, in columns of integers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.hardware.platform import Platform
from sim.trace.graph import Trace

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]

WHYS = ("run", "recompute", "move", "codec", "stall")
"""Why a lane was busy (or, for `stall`, why it was not). `codec` is the first run of an op of that kind; run again it
is `recompute`, as any op."""
FIRST_RUNS = ("run", "codec")

STALLS = ("", "transfer", "space", "hazard", "peer", "engine", "wait", "drain")
"""What a device waited for: a copy on its way, space, a copy of an old value before it is overwritten,
the other members of a group, the result of another engine, a planned `Wait`, and the end of all copies.
At the end of a run, `engine` and `peer` also wait for what is still under way there, before `drain` does."""

CAUSES = ("placed", "made", "freed", "dropped", "moved in", "moved out", "workspace", "overwritten")
"""Why the use of a tier changed; `workspace` holds scratch space too, taken and given back."""

WHY = {name: code for code, name in enumerate(WHYS)}
STALL = {name: code for code, name in enumerate(STALLS)}
CAUSE = {name: code for code, name in enumerate(CAUSES)}

INTERVAL_COLUMNS = ("start", "end", "device", "lane", "why", "op", "tensor", "cause", "bytes")
CHANGE_COLUMNS = ("time", "tier", "delta", "tensor", "op", "cause")
RESERVED_COLUMNS = ("time", "tier", "delta")


@dataclass(frozen=True, eq=False)
class EventLog:
    """All that happened in one run; analyses read nothing else.

    intervals: shape (n, 9), columns `INTERVAL_COLUMNS`: times in ns; device index (-1 for none); lane,
    a position in `platform.lanes`; why, a position in `WHYS`; op and tensor ids (-1 for none); for a
    stall its cause, a position in `STALLS`; for a copy its bytes on the wire.
    changes: shape (m, 6), columns `CHANGE_COLUMNS`: time in ns; tier, a position in `platform.tiers`;
    ± bytes; tensor (-1 for workspace); op that did it (-1 for none); cause, a position in `CAUSES`.
    reserved: shape (k, 3), `RESERVED_COLUMNS`: what a caching allocator took from or gave back to its tier.
    counters: `ignored_actions`, `implicit_moves`, `implicit_recomputes`, `pressure_calls`, `returned_moves`;
    `moves_cancelled` before they started, `cancelled_bytes` that they would have put on the wire, and of them
    `moves_without_space`, which never got space at their destination; ….
    complete: whether the run came to its end; a partial log ends at the error.
    """

    trace: Trace
    platform: Platform
    intervals: Ints
    changes: Ints
    reserved: Ints
    end: int
    complete: bool = True
    counters: Mapping[str, int] = field(default_factory=dict)

    def interval(self, column: str) -> Ints:
        """One column of `intervals`, by name."""
        return self.intervals[:, INTERVAL_COLUMNS.index(column)]

    def change(self, column: str) -> Ints:
        """One column of `changes`, by name."""
        return self.changes[:, CHANGE_COLUMNS.index(column)]

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of all rows, as hexadecimal digits: equal logs have equal hashes."""
        digest = hashlib.sha256()
        for part in (self.intervals, self.changes, self.reserved):
            digest.update(repr(part.shape).encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        digest.update(repr((self.end, self.complete, sorted(self.counters.items()))).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventLog) and self.content_hash == other.content_hash

    def __hash__(self) -> int:
        return hash(self.content_hash)

    @cached_property
    def events(self) -> pd.DataFrame:
        """The intervals with names instead of ids, one row each, in order of start."""
        import pandas as pd

        names = self.trace.op_columns.name, self.trace.tensor_columns.name
        rows = self.intervals
        return pd.DataFrame(
            {
                "start_ns": rows[:, 0],
                "end_ns": rows[:, 1],
                "device": rows[:, 2],
                "lane": _names(self.platform.lanes, rows[:, 3]),
                "why": _names(WHYS, rows[:, 4]),
                "op": _names(names[0], rows[:, 5]),
                "tensor": _names(names[1], rows[:, 6]),
                "cause": _names(STALLS, rows[:, 7]),
                "bytes": rows[:, 8],
            }
        )

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The changes of each tier's use with names instead of ids, with the bytes in use after each."""
        import pandas as pd

        rows = self.changes
        used = np.zeros(len(rows), np.int64)
        for tier in range(len(self.platform.tiers)):
            at = rows[:, 1] == tier
            used[at] = np.cumsum(rows[at, 2])
        return pd.DataFrame(
            {
                "time_ns": rows[:, 0],
                "tier": _names([tier.name for tier in self.platform.tiers], rows[:, 1]),
                "delta_bytes": rows[:, 2],
                "used_bytes": used,
                "tensor": _names(self.trace.tensor_columns.name, rows[:, 3]),
                "op": _names(self.trace.op_columns.name, rows[:, 4]),
                "cause": _names(CAUSES, rows[:, 5]),
            }
        )


def _names(names: Any, ids: Ints) -> NDArray[np.object_]:
    """Names of ids, "" for -1."""
    table = np.empty(len(names) + 1, object)
    table[: len(names)] = list(names)
    table[-1] = ""
    return table[ids]
