"""What locking the pages of host memory takes, once before training."""

from __future__ import annotations

from dataclasses import dataclass

from sim.analysis.figure import Figure
from sim.analysis.peak_memory import peak_bytes
from sim.hardware.transfer_time import transfer_ns
from sim.log import EventLog


@dataclass(frozen=True)
class Pinning:
    """Host memory whose pages are locked before the first iteration; an iteration's time is without it.

    bytes: the most that the run held there.
    took_ns: to lock so many, None where the machine states no rate (`tiers.NAME.pinning`).
    """

    bytes: int
    took_ns: int | None


def pinning(log: EventLog) -> Pinning:
    """A pool as large as what the run held at most, in each tier whose pages have to be locked."""
    peaks = peak_bytes(log)
    rates = {tier.name: tier.pinning for tier in log.platform.tiers if tier.pinning}
    took = sum(transfer_ns(peaks[name], rate) for name, rate in rates.items())
    return Pinning(sum(peaks[name] for name in rates), took if rates else None)


FIGURES = {
    "pinning_ns": Figure(
        "time",
        "pinning",
        "before training, once: to lock the pages of as much host memory as the run held at most",
        63,
        of=lambda log, reference: pinning(log).took_ns,
    )
}
