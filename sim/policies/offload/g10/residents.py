"""What is behind the device when an iteration begins, and again when it ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.policies.offload.g10.scheduling import Given
from sim.policies.offload.g10.vitality import Period, Vitality, is_movable, users
from sim.trace.graph import Trace


class Away(NamedTuple):
    """A tensor that begins in a tier behind the device, and its value at the end, which returns there."""

    first: int
    final: int
    level: int


def away_of(trace: Trace, vitality: Vitality, short: int) -> list[Away]:
    """What begins behind the device: as many bytes as the first and the last op lack, and `short` more.

    First those that are not needed before the highest load, and of these the ones whose last use comes first: their
    copy out at the end is hidden behind the uses of others.
    """
    size = trace.tensor_columns.bytes
    ends = [int(vitality.load[i]) for i in (0, -1)] if len(vitality.ops) else [0]
    lacking = max(ends) - vitality.capacity + short
    if lacking <= 0:
        return []
    peak = int(np.argmax(vitality.load))
    candidates = []
    for t in np.flatnonzero((trace.producer < 0) & (size > 0)).tolist():
        final = _last_value(trace, t)
        if t in vitality.uses and is_movable(trace, final, vitality.device):
            candidates.append((vitality.uses[t][0] <= peak, max(users(trace, final)), t, final))
    found, spare = [], [level.spare for level in vitality.levels]
    for *_, t, final in sorted(candidates):
        level = next((level for level, bytes in enumerate(spare) if size[t] <= bytes), None)
        if lacking > 0 and level is not None:
            found.append(Away(t, final, level))
            spare[level] -= int(size[t])
            lacking -= int(size[t])
    return found


def _last_value(trace: Trace, tensor: int) -> int:
    """What has taken over a tensor's storage at the end."""
    while trace.replaced_by[tensor] >= 0:
        tensor = int(trace.replaced_by[tensor])
    return tensor


def given_by(trace: Trace, vitality: Vitality, away: list[Away]) -> list[Given]:
    """The time before the first use of each, and that after its last one."""
    place = {op: i for i, op in enumerate(vitality.ops)}
    found = []
    for one in away:
        size = int(trace.tensor_columns.bytes[one.first])
        found.append(Given(Period(one.first, size, -1, vitality.uses[one.first][0]), one.level, True))
        last = place[max(users(trace, one.final))]
        is_clean = one.final == one.first
        found.append(Given(Period(one.final, size, last, len(vitality.ops)), one.level, is_clean))
    return found
