"""Single changes of a run, each simulated: more memory, a faster part, another value of the policy's parameters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from sim.engine.replay import RECOMPUTE_LIMIT
from sim.errors import Deadlock, Infeasible, TiersimError
from sim.experiment import simulate
from sim.hardware.platform import Platform
from sim.policies import label
from sim.policies.base import Policy
from sim.units import format_bytes

if TYPE_CHECKING:
    from sim.experiment import Result
    from sim.trace.graph import Trace

MORE_MEMORY = 1.1
FASTER = 2


@dataclass(frozen=True)
class Tried:
    """A change that was simulated.

    what: the change, in words.
    of: `policy`, which a user may choose, or `machine`.
    makespan_ns: of the run with it; None where that does not fit or the policy refuses it.
    """

    what: str
    of: str
    makespan_ns: int | None


def tried(
    result: Result, trace: Trace, *, seconds: float, seed: int = 0, recompute_limit: float | None = RECOMPUTE_LIMIT
) -> tuple[tuple[Tried, ...], int]:
    """Each single change with its time, the greatest help first; and for how many there was no time left.

    All else is as in the run: a number of iterations that is not the policy's own, too.
    """
    until = time.monotonic() + seconds
    found, left = [], 0
    count = len(result.warm_up)
    iterations = None if count == result.policy.warm_up else count + 1
    for what, of, platform, policy in _changes(result):
        if time.monotonic() > until:
            left += 1
            continue
        try:
            end = simulate(
                trace, platform, policy, iterations=iterations, seed=seed, recompute_limit=recompute_limit
            ).log.end
        except (Infeasible, Deadlock):
            found.append(Tried(what, of, None))
        except TiersimError:  # values of parameters that do not go together
            continue
        else:
            found.append(Tried(what, of, end))
    return tuple(sorted(found, key=lambda each: each.makespan_ns or float("inf"))), left


def _changes(result: Result) -> Iterator[tuple[str, str, Platform, Policy]]:
    platform, policy = result.platform, result.policy
    for name, value in type(policy).said_of_parameters("other_values").items():
        if name in {field.name for field in fields(policy)} and getattr(policy, name) != value:
            try:
                other = replace(policy, **{name: value})
            except TiersimError:
                continue
            yield label(other), "policy", platform, other
    budget = int(platform.home(0).capacity * MORE_MEMORY)
    more = f"{format_bytes(budget, digits=3)} of {platform.home(0).name}, a tenth more"
    yield more, "machine", platform.with_budget(budget), policy
    for what, other_platform in _faster(platform):
        yield what, "machine", other_platform, policy


def _faster(platform: Platform) -> Iterator[tuple[str, Platform]]:
    """The machine with one kind of its parts twice as fast."""
    if platform.links:
        links = tuple(replace(link, rate=FASTER * link.rate) for link in platform.links)
        pools = tuple(replace(pool, rate=FASTER * pool.rate if pool.rate else None) for pool in platform.pools)
        names = ", ".join(link.name for link in platform.links[:4]) + (", …" if len(links) > 4 else "")
        yield f"links twice as fast ({names})", replace(platform, links=links, pools=pools)
    homes = dict.fromkeys(engine.home for engine in platform.engines if engine.main)
    tiers = tuple(replace(t, bandwidth=FASTER * t.bandwidth) if t.name in homes else t for t in platform.tiers)
    yield f"{', '.join([*homes][:4])} with twice the bandwidth", replace(platform, tiers=tiers)
    engines = tuple(
        replace(engine, peak={dtype: FASTER * rate for dtype, rate in engine.peak.items()}) if engine.main else engine
        for engine in platform.engines
    )
    yield "engines with twice the FLOP/s", replace(platform, engines=engines)
    yield from _faster_beside(platform)
    launches = tuple(replace(e, launch=e.launch // FASTER) if e.main else e for e in platform.engines)
    if any(engine.launch for engine in platform.engines if engine.main):
        yield "launches in half the time", replace(platform, engines=launches)
    if platform.dispatch:
        dispatch = tuple(
            replace(d, **{name: getattr(d, name) // FASTER for name in ("forward", "backward", "update", "once")})
            for d in platform.dispatch
        )
        yield "a CPU that launches in half the time", replace(platform, dispatch=dispatch)


def _faster_beside(platform: Platform) -> Iterator[tuple[str, Platform]]:
    """Engines that are not a device's main one, a host's CPU for example, with what their op times follow from."""
    names = {engine.name for engine in platform.engines if not engine.main}
    if not names:
        return
    engines = tuple(
        replace(
            engine,
            peak={dtype: FASTER * rate for dtype, rate in engine.peak.items()},
            bandwidth_share={kind: FASTER * share for kind, share in {"": 1.0, **engine.bandwidth_share}.items()},
            launch=engine.launch // FASTER,
        )
        if engine.name in names
        else engine
        for engine in platform.engines
    )
    pools = tuple(
        replace(pool, rate=FASTER * pool.rate)
        if pool.rate and any(member.name in names for member in pool.members)
        else pool
        for pool in platform.pools
    )
    shared = [pool.name for pool, before in zip(pools, platform.pools, strict=True) if pool is not before]
    also = f", and what they share ({', '.join(shared)})" if shared else ""
    yield f"{', '.join(sorted(names)[:4])} twice as fast{also}", replace(platform, engines=engines, pools=pools)
