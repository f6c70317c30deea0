"""How full each tier was, when it was fullest, and what was resident then."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.analysis.lanes import FIRST, main_lanes
from sim.log import CAUSE, EventLog, Ints
from sim.trace.columns import distinct
from sim.trace.op import PHASES
from sim.trace.tensor import ROLES

if TYPE_CHECKING:
    import pandas as pd

    from sim.hardware.platform import Tier

T = TypeVar("T")

PART = 1 << 16
"""How many numbers of a long log are Python's at once."""
MOVED_IN, CALLED_OFF = CAUSE["moved in"], CAUSE["called off"]
CATEGORIES = (*ROLES, "workspace")
"""What the bytes in a tier are for: the roles of tensors, and workspace."""


@dataclass(frozen=True)
class Holder:
    """A tensor that was in the tier, and the bytes counted there for it."""

    tensor: str
    bytes: int
    role: str
    layer: int


@dataclass(frozen=True)
class Peak:
    """The first moment at which a tier held most. Bytes and ns.

    op: the op whose allocation set the peak, "" for none.
    by_role: resident bytes of each category; workspace is a category of its own.
    by_layer: resident bytes of each layer; -1 is workspace, and tensors of no layer.
    largest: the largest resident tensors.
    by_phase: the peak within each phase (forward, backward, update).
    reserved_bytes: the most that a caching allocator reserved in the tier, None for other allocators.
    """

    tier: str
    capacity: int
    bytes: int
    time_ns: int
    op: str
    by_role: dict[str, int]
    by_layer: dict[int, int]
    largest: tuple[Holder, ...]
    by_phase: dict[str, int]
    reserved_bytes: int | None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace at the peak."""
        return self.by_role.get("workspace", 0)


def peak_bytes(log: EventLog) -> dict[str, int]:
    """The peak of every tier, by name.

    Of a tier behind the devices, space that was reserved for copies which then never began does not count: a copy
    reserves its space when it joins the queue of its link, and a program that locks, or allocates, the memory of its
    host as copies begin needs none for these.
    """
    return dict(_kept(log, "peak_bytes", lambda: _peaks(log)))


def _peaks(log: EventLog) -> dict[str, int]:
    rows = _held(log)
    tiers, delta, names = (
        log.change("tier")[rows],
        log.change("delta")[rows],
        [tier.name for tier in log.platform.tiers],
    )
    peaks = dict.fromkeys(names, 0)
    for i in np.flatnonzero(np.bincount(tiers)).tolist():
        peaks[names[i]] = int(np.cumsum(delta[tiers == i]).max(initial=0))
    return peaks


def _held(log: EventLog) -> Ints:
    """The rows of `changes`, without what tiers behind the devices reserved for copies that never began."""
    rows: Ints = _kept(log, "held", lambda: _find_held(log))
    return rows


def _find_held(log: EventLog) -> Ints:
    cause = log.change("cause")
    if not (cause == CALLED_OFF).any():
        return np.arange(len(cause))
    homes = [log.platform.tier_ids[log.platform.home(device).name] for device in range(log.platform.devices)]
    ended = np.flatnonzero((cause == CALLED_OFF) & ~np.isin(log.change("tier"), homes))
    if not len(ended):
        return np.arange(len(cause))
    tier, tensor = log.change("tier"), log.change("tensor")
    reserved: dict[tuple[int, int], int] = {}
    left_out = set(ended.tolist())
    for row in np.flatnonzero((cause == MOVED_IN) | (cause == CALLED_OFF)).tolist():
        key = int(tier[row]), int(tensor[row])
        if cause[row] == MOVED_IN:
            reserved[key] = row
        elif row in left_out:
            left_out.add(reserved.pop(key))
    return np.delete(np.arange(len(cause)), sorted(left_out))


def _kept(log: EventLog, key: object, make: Callable[[], T]) -> T:
    """A figure that is asked for more than once, of references in every cell of a sweep; it goes with its log."""
    known: dict[object, T] = vars(log).setdefault("_figures", {})
    if key not in known:
        known[key] = make()
    return known[key]


def mean_bytes(log: EventLog, tier: str | None = None) -> int:
    """The bytes of a tier averaged over the time of the run, rounded down; by default of the fullest device's home.

    vDNN (Rhu et al. 2016) calls it average memory usage.
    """
    return _kept(log, ("mean_bytes", tier), lambda: _mean(log, tier))


def _mean(log: EventLog, tier: str | None) -> int:
    time, used = memory_over_time(log, tier)
    if not log.end or not len(time):
        return 0
    lasting = np.diff(time, append=log.end)
    return int(_sum(used.astype(float) * lasting) / log.end)


def _sum(wholes: NDArray[np.float64]) -> float:
    """The sum of whole numbers of at least 0, which may exceed 2^63, rounded once: no order has a part in it."""
    if wholes.max(initial=0) >= 2**62:
        return math.fsum(chain.from_iterable(wholes[i : i + PART].tolist() for i in range(0, len(wholes), PART)))
    high, low = np.divmod(wholes.astype(np.int64), 1 << 31)
    return float((int(high.sum()) << 31) + int(low.sum()))


def fullest_home(log: EventLog) -> Tier:
    """The home tier of the device of the trace that held most at its peak, of the first of equal ones.

    Every device has to hold its part, so that a single figure of several devices is that of the fullest one.
    """
    peaks = peak_bytes(log)
    homes = [log.platform.home(device) for device in range(log.trace.devices)]
    return max(homes, key=lambda home: peaks[home.name])  # `max` takes the first


def home_peak(log: EventLog) -> int:
    """The most bytes that the home tier of any device held."""
    return peak_bytes(log)[fullest_home(log).name]


def peak_memory(log: EventLog, tier: str | None = None, *, largest: int = 10) -> Peak:
    """The peak of one tier, by default the home tier of the fullest device.

    largest: how many tensors to name. Raises ProfileError on an unknown tier.
    """
    part, rows = _tier_rows(log, tier)
    time, delta, tensor, op = (log.change(name)[rows] for name in ("time", "delta", "tensor", "op"))
    used = np.cumsum(delta)
    top = int(np.argmax(used)) if len(used) and used.max() > 0 else -1
    columns = log.trace.tensor_columns
    held = np.zeros(len(columns.name) + 1, np.int64)  # the last entry is workspace
    np.add.at(held, tensor[: top + 1], delta[: top + 1])
    role = np.append(columns.role, len(ROLES))
    layer = np.append(columns.layer, -1)
    by_role, by_layer = np.zeros(len(CATEGORIES), np.int64), np.zeros(int(layer.max()) + 2, np.int64)
    np.add.at(by_role, role, held)
    np.add.at(by_layer, layer, held)  # -1 is the last entry
    none = len(by_layer) - 1
    layers = {-1 if i == none else i: int(by_layer[i]) for i in np.flatnonzero(by_layer).tolist()}
    order = np.lexsort((np.arange(len(held) - 1), -held[:-1]))[:largest]
    taken = np.cumsum(log.reserved[log.reserved[:, 1] == log.platform.tier_ids[part], 2])
    return Peak(
        tier=part,
        capacity=log.platform.tier(part).capacity,
        bytes=int(used[top]) if top >= 0 else 0,
        time_ns=int(time[top]) if top >= 0 else 0,
        op=log.trace.op_columns.name[int(op[top])] if top >= 0 and op[top] >= 0 else "",
        by_role={name: bytes for name, bytes in zip(CATEGORIES, by_role.tolist(), strict=True) if bytes},
        by_layer=layers,
        largest=tuple(
            Holder(columns.name[t], int(held[t]), ROLES[columns.role[t]], int(columns.layer[t]))
            for t in order.tolist()
            if held[t] > 0
        ),
        by_phase=_by_phase(log, part, time, delta, used),
        reserved_bytes=int(taken.max()) if len(taken) else None,
    )


def peaks_by_phase(log: EventLog, tier: str | None = None, *, unit: int = 1) -> dict[str, int]:
    """The most bytes in a tier within each phase, by default in the home tier of the fullest device.

    unit: every tensor is rounded up to a multiple of so many bytes, as an allocator does.

    Raises ProfileError on an unknown tier.
    """
    part, rows = _tier_rows(log, tier)
    delta = log.change("delta")[rows]
    rounded = np.sign(delta) * (-(-np.abs(delta) // unit) * unit)
    return _by_phase(log, part, log.change("time")[rows], rounded, np.cumsum(rounded))


def memory_over_time(log: EventLog, tier: str | None = None) -> tuple[Ints, Ints]:
    """Times (ns) of all changes of a tier and the bytes in use after each. Shapes (changes,) both."""
    _, rows = _tier_rows(log, tier)
    return log.change("time")[rows], np.cumsum(log.change("delta")[rows])


def roles_over_time(log: EventLog, tier: str | None = None) -> pd.DataFrame:
    """One row per change of a tier: `time_ns`, and the bytes of each category that ever held any."""
    import pandas as pd

    _, rows = _tier_rows(log, tier)
    delta, tensor = log.change("delta")[rows], log.change("tensor")[rows]
    role = np.append(log.trace.tensor_columns.role, len(ROLES))[tensor]
    columns = {"time_ns": log.change("time")[rows]}
    for code, name in enumerate(CATEGORIES):
        if (role == code).any():
            columns[name] = np.cumsum(np.where(role == code, delta, 0))
    return pd.DataFrame(columns)


def _tier_rows(log: EventLog, tier: str | None) -> tuple[str, Ints]:
    name = fullest_home(log).name if tier is None else log.platform.tier(tier).name
    rows = _held(log)
    return name, rows[log.change("tier")[rows] == log.platform.tier_ids[name]]


def _by_phase(log: EventLog, tier: str, time: Ints, delta: Ints, used: Ints) -> dict[str, int]:
    """The most in use within each phase: at each allocation in it, and as each of its ops starts.

    A moment belongs to the phase of the op that started last on the main lane of the tier's device, or
    of device 0 where the tier belongs to none; the time before the first op to that op's phase.
    """
    device = max(log.platform.tier(tier).device, 0)
    lanes = main_lanes(log)
    if device >= len(lanes):
        return {}
    ran = np.isin(log.interval("why"), FIRST) & (log.interval("lane") == lanes[device]) & (log.interval("op") >= 0)
    start, op = log.interval("start")[ran], log.interval("op")[ran]
    if not len(start) or not len(time):
        return {}
    order = np.argsort(start, kind="stable")
    start, phase = start[order], log.trace.op_columns.phase[op[order]]
    grows = delta > 0
    asked = phase[np.maximum(np.searchsorted(start, time[grows], "right") - 1, 0)]
    level = np.searchsorted(time, start, "right") - 1
    most = np.zeros(len(PHASES), np.int64)
    np.maximum.at(most, asked, used[grows])
    np.maximum.at(most, phase, np.where(level < 0, 0, used[level]))
    return {PHASES[code]: int(most[code]) for code in distinct(phase).tolist()}
