"""Which engines an op may run on, how long it takes there, and in which memory its operands then have to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.errors import PolicyError
from sim.hardware.cost import ns_on
from sim.hardware.mapping import can_run
from sim.hardware.platform import Engine, Platform
from sim.plan import Problem
from sim.rewrites.rewriter import with_columns
from sim.trace.graph import Trace
from sim.trace.op import KINDS


@dataclass(frozen=True)
class Choices:
    """Per op the engines that it may run on. Engines by their position in the platform, memories by name.

    able: per op the engines, its own first.
    ns: per op and engine the time of a run with all operands in the engine's home tier.
    memories: the home tiers of these engines, the device's first.
    """

    platform: Platform
    able: Sequence[Sequence[int]]
    ns: Mapping[tuple[int, int], int]
    memories: Sequence[str] = field(default=())

    def memory(self, engine: int) -> str:
        """Where operands of the ops of an engine have to be."""
        return self.platform.engines[engine].home

    def least_ns(self) -> int:
        """The time of every op once, each on its fastest engine."""
        return sum(min(self.ns[op, e] for e in engines) for op, engines in enumerate(self.able))


def choices_of(problem: Problem) -> Choices:
    """What each op may run on: its own engine, and any other of the device that runs its kind.

    An op that names its engine or belongs to a group stays; so does one whose time was measured, if its engine
    can run it: a measured time is one of its engine. Raises PolicyError where the platform has one engine, or one that
    reads another's memory in place.
    """
    trace, platform = problem.trace, problem.platform
    c = trace.op_columns
    units = [i for i, engine in enumerate(platform.engines) if engine.device in (-1, 0)]
    if len(units) < 2:
        raise PolicyError(
            f"policy 'xengine' chooses between engines; {platform.name} has one, {platform.main_engine(0).name!r}: "
            "take the policy 'checkmate'"
        )
    main = platform.engine_for(0)
    units = [i for i in units if i == main or _joined(platform, platform.engines[i].home)]
    _check_reach([platform.engines[i] for i in units])
    able: list[tuple[int, ...]] = []
    ns: dict[tuple[int, int], int] = {}
    for op in range(len(c.name)):
        own, kind = platform.engine_for(0, c.engine.get(op, "")), KINDS[c.kind[op]]
        capable = can_run(platform.engines[own], kind, c.dtype[op])
        measured = c.duration[op] >= 0
        engines = [own] if capable else []
        if not (op in c.engine or op in c.group or (capable and measured)):
            engines += [i for i in units if i != own and can_run(platform.engines[i], kind, c.dtype[op])]
        engines = engines or [own]  # nothing can run it: the run refuses it, and says so
        able.append(tuple(engines))
        for i in engines:
            own_time = i == own and measured
            ns[op, i] = int(c.duration[op] if own_time else ns_on(trace, np.array([op]), platform, i)[0])
    homes = dict.fromkeys([platform.home(0).name, *(platform.engines[i].home for row in able for i in row)])
    return Choices(platform, able, ns, tuple(homes))


def on_engines(trace: Trace, choices: Choices, chosen: Sequence[int]) -> Trace:
    """The trace with each op on an engine; one that leaves its own is priced by the platform."""
    moved = {op: engine for op, engine in enumerate(chosen) if engine != _own(trace, choices.platform, op)}
    if not moved:
        return trace
    c, duration = trace.op_columns, trace.op_columns.duration.copy()
    duration[list(moved)] = -1
    names = {op: choices.platform.engines[i].name.partition("@")[0] for op, i in moved.items()}
    return with_columns(trace, engine={**c.engine, **names}, duration=duration)


def _own(trace: Trace, platform: Platform, op: int) -> int:
    return platform.engine_for(0, trace.op_columns.engine.get(op, ""))


def _joined(platform: Platform, home: str) -> bool:
    """Whether copies can be made between the device's memory and another, both ways."""
    device = platform.home(0).name
    return home == device or bool(platform.route(device, home) and platform.route(home, device))


def _check_reach(engines: Sequence[Engine]) -> None:
    """Raise PolicyError where an engine reads in place what is resident for another."""
    homes = {engine.home for engine in engines}
    for engine in engines:
        other = next((tier for tier in engine.reaches if tier != engine.home and tier in homes), None)
        if other is not None:
            raise PolicyError(
                f"policy 'xengine' plans for copies between memories; {engine.name!r} reads {other!r} in place"
            )
