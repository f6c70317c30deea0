"""What locking the pages of host memory takes, once before training."""

from __future__ import annotations

from sim.analysis.figure import Figure
from sim.analysis.peak_memory import peak_bytes
from sim.hardware.transfer_time import transfer_ns
from sim.log import EventLog


def pinning_ns(log: EventLog) -> int | None:
    """The time, in ns, to pin as many bytes as the run held at most in each tier whose pages have to be locked.

    A pool of that size is pinned before the first iteration and used by all; an iteration's time is without it. None
    where the machine states no such rate (`tiers.NAME.pinning`).
    """
    peaks = peak_bytes(log)
    rates = {tier.name: tier.pinning for tier in log.platform.tiers if tier.pinning}
    return sum(transfer_ns(peaks[name], rate) for name, rate in rates.items()) if rates else None


FIGURES = {
    "pinning_ns": Figure(
        "time",
        "pinning",
        "before training, once: to lock the pages of as much host memory as the run held at most",
        63,
        of=lambda log, reference: pinning_ns(log),
    )
}
