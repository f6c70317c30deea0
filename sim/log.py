"""The event log: what happened in a run, in columns of integers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
"""Why a lane was busy (or, for `stall`, idle). `codec` is the first run of an op of that kind; its recomputation is
`recompute`, as for any op."""
FIRST_RUNS = ("run", "codec")

STALLS = ("", "transfer", "space", "hazard", "peer", "engine", "wait", "drain", "launch")
"""What a device waited for: a copy in flight, space, a copy of an old value that is about to be overwritten, the
other members of a group, the result of another engine, a planned `Wait`, the end of all copies, and the CPU that
dispatches ops. At the end of a run, before `drain`, `engine` and `peer` also cover waiting for ops and transfers that
are still in flight."""

CAUSES = ("placed", "made", "freed", "dropped", "moved in", "moved out", "workspace", "overwritten", "called off")
"""Why the use of a tier changed; `workspace` includes scratch space, both its allocation and its release. `called off`
is the release of space that was `moved in` for a copy which then never began."""

WHY = {name: code for code, name in enumerate(WHYS)}
STALL = {name: code for code, name in enumerate(STALLS)}
CAUSE = {name: code for code, name in enumerate(CAUSES)}

INTERVAL_COLUMNS = ("start", "end", "device", "lane", "why", "op", "tensor", "cause", "bytes")
CHANGE_COLUMNS = ("time", "tier", "delta", "tensor", "op", "cause")
RESERVED_COLUMNS = ("time", "tier", "delta")


@dataclass(frozen=True, eq=False)
class EventLog:
    """Everything that happened in one run; analyses read nothing else. Its tables are read-only.

    trace: the trace that was run.
    platform: the machine that it ran on.
    intervals: shape (n, 9), columns `INTERVAL_COLUMNS`: start and end in ns; device index (-1 for none); lane, a
        position in `platform.lanes`; why, a position in `WHYS`; op and tensor ids (-1 for none); for a stall its cause,
        a position in `STALLS`; for a copy its bytes on the wire.
    changes: shape (m, 6), columns `CHANGE_COLUMNS`: time in ns; tier, a position in `platform.tiers`; ± bytes; tensor
        (-1 for workspace); the op that caused it (-1 for none); cause, a position in `CAUSES`.
    reserved: shape (k, 3), columns `RESERVED_COLUMNS`: what a caching allocator reserved from its tier or returned.
    end: when the run ended, in ns.
    complete: whether the run finished; a partial log ends at the error.
    counters: `ignored_actions`, `implicit_moves`, `implicit_recomputes`, `pressure_calls`, `returned_moves`;
        `moves_cancelled` before they started, the `cancelled_bytes` that they would have put on the wire, and of these
        moves the `moves_without_space`, which never got space at their destination; ….
    """

    trace: Trace
    platform: Platform
    intervals: Ints
    changes: Ints
    reserved: Ints
    end: int
    complete: bool = True
    counters: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # a log is shared by whoever asks for it, a policy that has a plan evaluated as well
        for rows in (self.intervals, self.changes, self.reserved):
            rows.setflags(write=False)

    def copy(self) -> EventLog:
        """An equal log that shares no table with this one."""
        tables = {key: getattr(self, key).copy() for key in ("intervals", "changes", "reserved")}
        return replace(self, counters=dict(self.counters), **tables)

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
        """The intervals with names instead of ids, one row per interval, in order of start."""
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
        """The changes of each tier's use with names instead of ids, and the bytes in use after each change."""
        import pandas as pd

        rows = self.changes
        used = np.zeros(len(rows), np.int64)
        for tier in range(len(self.platform.tiers)):
            of_tier = rows[:, 1] == tier
            used[of_tier] = np.cumsum(rows[of_tier, 2])
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
    """The names for some ids, "" for -1."""
    table = np.empty(len(names) + 1, object)
    table[: len(names)] = list(names)
    table[-1] = ""
    return table[ids]
