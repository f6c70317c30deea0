"""In which type a run's FLOPs were priced, where its machine has no peak for their own."""

from __future__ import annotations

from dataclasses import dataclass

from sim.analysis.figure import Figure
from sim.analysis.stand_in import stand_in
from sim.log import EventLog


@dataclass(frozen=True)
class Pricing:
    """The type of most FLOPs that no measured time replaces, "" for none, and the one whose peak prices them."""

    dtype: str
    priced_as: str


def priced_as(log: EventLog) -> Pricing:
    """In which type most FLOPs are, and in which they are priced."""
    return Pricing(*stand_in(log.trace, log.platform))


def _other(found: Pricing) -> str | None:
    return None if found.dtype == found.priced_as else f"{found.dtype} as {found.priced_as}"


FIGURES = {
    "priced_as": Figure(
        "text",
        "priced as another type",
        "the type of most FLOPs and the one whose peak prices them, where the machine has no peak for it",
        54,
        of=lambda log, reference: _other(priced_as(log)),
    )
}
