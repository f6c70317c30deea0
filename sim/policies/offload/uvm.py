"""Unified memory: pages migrate when the device touches them, and the least recently used make way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from sim.declared import Size, Time
from sim.errors import PolicyError
from sim.eviction.replacement import LeastRecent
from sim.hardware.platform import Platform
from sim.plan import Action, Memory, Move, Plan, Problem, Unpressed
from sim.policies.base import Policy, by_parameter
from sim.trace.graph import Trace
from sim.units import parse_time, to_bytes


@dataclass(frozen=True, kw_only=True)
class Uvm(Policy):
    """Demand paging: what an op reads and is not resident faults, page by page, and the device waits for its copy.

    Every tensor is managed: weights, optimizer state, gradients, activations. An op that reads one that is elsewhere
    takes a fault for each page of it; the copy waits for them, and the op for the copy. A page is in one place
    alone, so that each eviction copies it out again. When memory is full the tensor that was used longest ago leaves,
    while the device waits.
    Source: the baseline of Zhang et al., "G10: Enabling An Efficient Unified GPU Memory and Storage Architecture with
        Smart Tensor Migrations", MICRO 2023 (Base UVM), whose public configuration has 45 us for a fault. 2 MiB are the
        most that NVIDIA's driver migrates for one. Both make 9.5 GB/s of a link of 12 GB/s; a GTX 1080 was measured at
        8.2 GB/s (parallelArchitect, pascal-um-benchmark).
    Bounds: moves nothing where everything fits. A step is O(operands).
    Departs: tensors leave whole, not by page. The first touch of a new result costs nothing, as in a framework that
        keeps its memory mapped, and what is dead is freed without a copy. What does not fit at the start lies in the
        host. What an engine reads in place does not fault. Tensors beyond the host's capacity go on to the tier
        behind it.

    page: bytes that one fault migrates.
    fault: the time of a fault, in ns or as text such as "45 us".
    Raises PolicyError for a page of no bytes, a negative time, or a platform without a host tier.
    """

    online = True
    moves = True
    needs = frozenset({"host"})
    manages = ("activations", "gradients", "optimizer_state", "weights")
    fidelity = "reconstruction"
    other_values = by_parameter(page="64 KiB", fault="1 ms")

    page: Annotated[Size, Ge(1)] = "2 MiB"
    fault: Time = "45 us"

    def plan(self, problem: Problem) -> Plan:
        """The trace as it is, and what answers faults and pressure."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"uvm: {platform.name} has no host tier to migrate to")
        page, size = to_bytes(self.page), trace.tensor_columns.bytes.tolist()
        fault = parse_time(self.fault) if isinstance(self.fault, str) else self.fault
        online = partial(
            _Paging,
            chain=platform.cascade(platform.host.name),
            homes=tuple(platform.home(device).name for device in range(trace.devices)),
            movable=(np.array(size) > 0).tolist(),
            size=size,
            delay=[-(-bytes // page) * fault for bytes in size],
            faulting=_faulting(trace, platform),
        )
        return Plan(trace, place=overflow(trace, platform), online=online, unpressed=Unpressed())


def overflow(trace: Trace, platform: Platform) -> dict[int, str]:
    """What is resident at the start and does not fit into a device's memory beside the others: in the host."""
    assert platform.host is not None
    spare = {platform.home(device).name: platform.home(device).capacity for device in range(trace.devices)}
    place = {}
    for t in np.flatnonzero(trace.producer < 0).tolist():
        if trace.first_read[t] < 0 or trace.first_read[t] in trace.op_columns.engine:
            continue
        home = platform.home(int(trace.op_columns.device[trace.first_read[t]])).name
        size = int(trace.tensor_columns.bytes[t])
        if size <= spare[home]:
            spare[home] -= size
        else:
            place[t] = platform.host.name
    return place


def _faulting(trace: Trace, platform: Platform) -> Mapping[int, tuple[str, frozenset[str], tuple[int, ...]]]:
    """Per op of a device's own engine its home tier, the tiers that it reads in place, and what it reads."""
    engines = [platform.main_engine(device) for device in range(trace.devices)]
    found = {}
    for op, device in enumerate(trace.op_columns.device.tolist()):
        if op not in trace.op_columns.engine:
            engine = engines[device]
            found[op] = engine.home, frozenset(engine.reaches), trace.reads(op)
    return found


class _Paging(LeastRecent):
    """The least recently used leaves; what an op reads and cannot reach comes in behind its faults.

    delay: per tensor the time of its faults in ns. faulting: per op that faults its tier, those in reach, its reads.
    """

    def __init__(
        self,
        *,
        delay: Sequence[int],
        faulting: Mapping[int, tuple[str, frozenset[str], tuple[int, ...]]],
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self._delay = delay
        self._faulting = faulting

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        """The faults of an op; what an op of another device reads meanwhile is fetched when that has ended."""
        if op not in self._faulting:
            return ()
        home, reach, reads = self._faulting[op]
        return [
            Move(tensor, home, delay=self._delay[tensor])
            for tensor in dict.fromkeys(reads)
            if (there := memory.where(tensor))
            and reach.isdisjoint(there)
            and memory.in_flight(tensor) is None
            and not memory.is_locked(tensor)
        ]
