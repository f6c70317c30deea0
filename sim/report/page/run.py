"""What the page shows of one run, as JSON values: figures as the tables print them, events in packed columns.

Columns that rise are kept as differences, so that they compress: the page adds them up again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.analysis.lanes import stall_rows
from sim.analysis.peak_memory import peak_memory
from sim.analysis.traffic import traffic
from sim.log import STALLS, WHYS, EventLog, Ints
from sim.report.error_bars import error_lines
from sim.report.footer import INCLUDES, LEAVES_OUT, Footer, footer_lines, notes_beside, warnings
from sim.report.table import summary_lines
from sim.report.tracks import Scene
from sim.trace.graph import Trace
from sim.trace.kept import kept
from sim.trace.op import KINDS, PHASES
from sim.trace.tensor import ROLES

FIDELITY = {
    "code": "checked against the authors' code",
    "equations": "the paper's algorithm",
    "reconstruction": "detail of the published system was not public, so its headline is not credited",
}
SCOPE = (
    ("time", f"{INCLUDES}; copies with queues and shared bandwidth", LEAVES_OUT),
    (
        "memory",
        "every tensor's storage; workspaces where they are known",
        "the framework's context; fragmentation, unless a tier has an allocator with addresses or a cache",
    ),
    ("values", "followed symbolically: a plan that would compute something else is refused", "rounding, convergence"),
)
"""What every figure includes and leaves out: about, included, left out."""


WAITS_FOR = {
    "transfer": "a copy of something that it reads",
    "space": "bytes that something leaving will free",
    "wait": "a copy that the plan told it to wait for",
    "hazard": "a copy of an old value, before it is overwritten",
    "peer": "the other members of a group, or at the end of the run its transfer",
    "engine": "a result of another engine, or at the end of the run the ops still on it",
    "drain": "the end of all copies, at the end of the run",
    "launch": "the CPU to dispatch the op",
}
"""What a stall of each cause waits for."""


@dataclass(frozen=True)
class RunView:
    """A run as a page shows it.

    title: its policy.
    summary: as `Result.summary`.
    footer: platform, workload, and the command that reproduces it.
    doc: the policy's docstring.
    manages: what it may drop or move.
    links: (text, address) of files kept next to the page.
    """

    title: str
    log: EventLog
    summary: Mapping[str, Any]
    footer: Footer
    fidelity: str = ""
    manages: Sequence[str] = ()
    doc: str = ""
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SavedView:
    """A run as it was saved for a page, in place of the run itself.

    data: as `run_data` returned it.
    """

    data: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Its policy."""
        return str(self.data["title"])


def run_data(view: RunView | SavedView) -> dict[str, Any]:
    """The data of a run's page; JSON values only."""
    if isinstance(view, SavedView):
        return dict(view.data)
    log, footer, platform = view.log, view.footer, view.log.platform
    return {
        "title": view.title,
        "workload": footer.workload,
        "platform": platform.name,
        "description": platform.description,
        "memory": footer_lines(footer)[1],
        "steady": footer.steady,
        "warm_up": footer.warm_up,
        "fidelity": [view.fidelity, FIDELITY.get(view.fidelity, "")],
        "manages": list(view.manages),
        "doc": _unwrapped(view.doc),
        "links": [list(link) for link in view.links],
        "caution": [],
        "command": footer.command,
        "warnings": warnings(footer),
        "notes": list(platform.notes),
        "beside": [*error_lines([platform]), *notes_beside(footer)],
        "facts": facts_data([platform]),
        "scope": [list(line) for line in SCOPE],
        "figures": dict(view.summary),
        "summary": [list(line) for line in summary_lines(view.summary)],
        "end": log.end,
        "complete": log.complete,
        "whys": list(WHYS),
        "causes": [[cause, WAITS_FOR.get(cause, "")] for cause in STALLS],
        "kinds": list(KINDS),
        "phases": list(PHASES),
        "roles": list(ROLES),
        **trace_data(log.trace),
        "lanes": _lanes(log),
        "tiers": [_tier(log, number) for number in range(len(platform.tiers))],
        "stalls": [list(row) for row in stall_rows(log, None)],
        "traffic": [[t.link, t.bytes, t.transfers, t.busy_ns, t.busy, t.utilisation] for t in traffic(log)],
    }


def trace_data(trace: Trace) -> Mapping[str, Any]:
    """What the page shows of the trace, the same for all runs of it."""

    def make() -> dict[str, Any]:
        ops, tensors = trace.op_columns, trace.tensor_columns
        return {
            "ops": {
                "name": list(ops.name),
                "kind": ops.kind.tolist(),
                "phase": ops.phase.tolist(),
                "layer": ops.layer.tolist(),
            },
            "tensors": {
                "name": list(tensors.name),
                "role": tensors.role.tolist(),
                "layer": tensors.layer.tolist(),
                "bytes": tensors.bytes.tolist(),
            },
        }

    return kept(trace, "trace_data", None, make)


def _unwrapped(doc: str) -> str:
    """A docstring without line breaks inside paragraphs; lists and headings keep theirs."""
    return re.sub(r"(?<=\S)\n *(?=[^\s*-])(?!\w+(?:, \w+)*:\s|Raises )", " ", doc)


def facts_data(platforms: Sequence[Any]) -> list[list[str]]:
    """Figures of profiles: profile, path, text, standing, source; assumed ones first."""
    facts = [[p.name, fact.path, fact.text, fact.standing, fact.source] for p in platforms for fact in p.facts]
    return sorted(facts, key=lambda fact: fact[3] != "assumed")


def _lanes(log: EventLog) -> dict[str, Any]:
    """Every interval, track by track in order of start.

    gap: from the end of the previous interval.
    """
    scene = Scene(log)
    rows, track_of = log.intervals, scene.track_of
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0], track_of))]
    counts = np.bincount(track_of, minlength=len(scene.tracks))
    first = np.cumsum(counts) - counts
    before = np.concatenate(([0], rows[:-1, 1])) if len(rows) else np.zeros(0, np.int64)
    before[first[counts > 0]] = 0
    links = log.platform.links
    engines = len(log.platform.engines)
    route = [
        [links[t.lane - engines].source, links[t.lane - engines].target] if t.lane >= engines else None
        for t in scene.tracks
    ]
    return {
        "groups": list(scene.processes),
        "tracks": [
            [track.name, track.process, track.is_main, count, ends]
            for track, count, ends in zip(scene.tracks, counts.tolist(), route, strict=True)
        ],
        "gap": (rows[:, 0] - before).tolist(),
        "length": (rows[:, 1] - rows[:, 0]).tolist(),
        "device": rows[:, 2].tolist(),
        "why": rows[:, 4].tolist(),
        "op": _steps(rows[:, 5]),
        "tensor": _steps(rows[:, 6]),
        "cause": rows[:, 7].tolist(),
        "bytes": rows[:, 8].tolist(),
    }


def _tier(log: EventLog, number: int) -> dict[str, Any]:
    """A tier: its capacity, every change of its use, and its peak.

    at: the change that reached the peak, -1 for none.
    """
    tier = log.platform.tiers[number]
    rows = log.changes[log.changes[:, 1] == number]
    peak = peak_memory(log, tier.name, largest=0)
    homes = {engine.home for engine in log.platform.engines if engine.main}
    return {
        "name": tier.name,
        "kind": tier.kind,
        "capacity": tier.capacity,
        "nominal": tier.nominal,
        "limit": "budget" if log.platform.budget is not None and tier.name in homes else "capacity",
        "home": tier.name in homes,
        "time": _steps(rows[:, 0]),
        "delta": rows[:, 2].tolist(),
        "tensor": _steps(rows[:, 3]),
        "peak": {
            "at": int(np.argmax(np.cumsum(rows[:, 2]))) if peak.bytes else -1,
            "bytes": peak.bytes,
            "time": peak.time_ns,
            "op": peak.op,
            "by_role": peak.by_role,
            "by_phase": peak.by_phase,
            "reserved": peak.reserved_bytes,
        },
    }


def _steps(column: Ints) -> list[int]:
    """Differences of a column; the first is that from 0."""
    steps: list[int] = np.diff(column, prepend=0).tolist()
    return steps
