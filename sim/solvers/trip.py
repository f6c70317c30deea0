"""A trip to the host and back: what it takes of the link at least."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import PolicyError
from sim.hardware.platform import Platform
from sim.hardware.transfer_time import transfer_ns
from sim.plan import Problem


@dataclass(frozen=True)
class Trip:
    """What it takes to move a value to the host and back: least ns on the link, each way."""

    out: int
    back: int


def host_of(problem: Problem, policy: str) -> str:
    """The tier that tensors may leave for, "" for none. Raises PolicyError where the device reads it in place."""
    platform = problem.platform
    if platform.host is None:
        return ""
    engine = platform.main_engine(0)
    if platform.host.name in engine.reaches:
        raise PolicyError(
            f"policy {policy!r} plans for copies to and from the host; {engine.name!r} reads "
            f"{platform.host.name!r} in place"
        )
    return platform.host.name


def trip(platform: Platform, host: str, size: int) -> Trip:
    """The least ns of the copies of so many bytes. Copies that run side by side share their link's rate."""
    home, ns = platform.home(0).name, []
    for route in (platform.route(home, host), platform.route(host, home)):
        pace, alone = platform.pace(route), any(platform.links[i].copy_engines == 1 for i in route)
        # side by side fixed times overlap, and so do the nanoseconds begun
        ns.append(transfer_ns(size, pace.rate, pace.fixed) if alone else transfer_ns(size, pace.rate) - 1)
    return Trip(*ns)
