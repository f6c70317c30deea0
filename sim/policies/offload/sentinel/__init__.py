"""Sentinel: pages of one lifetime, migrated every few layers; how many, and what to do when late, is found by trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Annotated, Literal

from annotated_types import Ge

from sim.declared import Size
from sim.errors import PolicyError
from sim.eviction.farthest import FarthestNextUse
from sim.plan import Action, Online, Plan, Problem, Unpressed
from sim.policies.base import Beside, Policy, by_parameter
from sim.policies.offload.sentinel.migration import Migration, lengths
from sim.policies.offload.sentinel.pages import Profiled, profiled
from sim.solvers.outcome import fastest
from sim.solvers.spans import users
from sim.units import to_bytes


@dataclass(frozen=True, kw_only=True)
class Sentinel(Policy):
    """Keep what lives within a layer; migrate the rest between intervals of layers, the next interval's needs ahead.

    A profiling step shows each tensor's layers and accesses. Those that are smaller than a page share one with
    others of the same first and last layer and as many accesses, and pages migrate whole. What lives within one layer
    stays in a part of the fast tier that is reserved for it. For an interval of `interval` layers, what neither it nor
    the next one uses gives space, the farthest next use first, then the coldest, and leaves at the end of the interval
    that used it last; what the next one uses is brought from the slow tier when the interval begins, the hottest
    (accesses per byte) first, as far as there is space. If that is late, the device
    either waits at the start of the interval, or goes on: where its engine reads the slow tier in place, on what is
    still there, else until an op needs it. Lengths and both cases are each tried for one step, and the fastest is
    kept.
    Source: Ren, Luo, Wu, Zhang, Jeon, Li, "Sentinel: Efficient Tensor Migration and Allocation on Heterogeneous Memory
        Systems for Deep Learning", HPCA 2021, arXiv:1909.05182. The paper was not at hand; intervals follow accounts
        of it.
    Bounds: nothing migrates where all fits. A replay per length that fits (six at most), and two for the case of late
        prefetches. O(intervals x pages) each.
    Headline: a fifth of the peak as fast memory costs 8 % at most on DRAM and Optane. Here on `xeon_optane`, where
        copies run at the rates of all cores, it costs ResNet-50 (32 images) 7.8 %, ResNet-101 2.2, ResNet-152 0.6 and
        Inception-v4 9.2: the device waits for space while the first layers' results leave at 12 GB/s; at twice that
        ResNet-50 takes 3.0 % more. At the rates of one thread beside the compute, which the profile states, 148.
    Departs: lifetimes and accesses are those of the trace, and a step of trial is a replay, not an iteration of the
        run. Rounding to pages is counted (`page_bytes`), and not copied; each tensor of a page is a copy of its own.
        What the next iteration begins with is used at the end, as it were, and returns in the last interval. Lengths
        are powers of two. What begins in the slow tier, as it does not fit, is what is needed last. Under pressure that
        the intervals do not foresee, what is needed last is moved out, where the GPU's variant has page faults. What
        other engines or devices use stays. Slower than `swap_all` where weights or optimizer states are what is needed
        last, and so leave, to return an interval ahead of the update or the end, which takes less time than their
        copies; and where layers are few and long, since tensors leave at the end of their interval and return with the
        next one's beginning, hottest first, as in a U-Net (32 % on `gh200` with 60 % of the memory).

    interval: layers per interval; None: found by trial.
    late: `wait`, `go_on`, or `trial` for the better of both.
    page: bytes of a page.
    coallocate: whether pages are shared by tensors of one lifetime alone; else in the order of allocation.
    Notes of the plan: `interval`; `late`; `fits`: whether each interval's own needs do; `page_bytes` and `tensor_bytes`
        that migrate per step.
    Raises PolicyError for a platform without a host tier, or a number below 1.
    """

    online = True
    moves = True
    needs = frozenset({"host"})
    manages = ("activations", "gradients", "optimizer_state", "weights")
    fidelity = "reconstruction"
    plans_ahead = "the layers that use each tensor, from the profiling step"
    rarely = "it moves only what exceeds the memory"
    other_values = by_parameter(
        interval=3, late=Beside("wait", interval=2), page="64 MiB", coallocate=Beside(False, page="64 MiB")
    )

    interval: Annotated[int, Ge(1)] | None = None
    late: Literal["trial", "wait", "go_on"] = "trial"
    page: Annotated[Size, Ge(1)] = "4 KiB"
    coallocate: bool = True

    def plan(self, problem: Problem) -> Plan:
        """The intervals that were fastest."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"sentinel: {platform.name} has no host tier to migrate to")
        page = to_bytes(self.page)
        devices = [profiled(problem, device, page, coallocate=self.coallocate) for device in range(trace.devices)]
        tried = [self.interval] if self.interval else lengths(max(len(each.layers) for each in devices))
        migrations = cache(partial(_migrations, problem, devices, platform.host.name))
        make = partial(_plan, problem, _online(problem, platform.host.name), migrations)
        first = make(tried[0], waits=self.late == "wait")
        if not first.actions and not first.place:
            return first
        plans = chain([first], (make(length, waits=self.late == "wait") for length in tried[1:]))
        fitting = (plan for plan in plans if plan.notes["fits"])
        best = fastest(problem, chain([next(fitting, first)], fitting))
        if self.late == "trial":
            best = fastest(problem, [best, make(best.notes["interval"], waits=True)])
        return best


def _migrations(problem: Problem, devices: Sequence[Profiled], slow: str, length: int) -> list[Migration]:
    """Per device what migrates, with intervals of so many layers."""
    homes = map(problem.platform.home, range(len(devices)))
    return [Migration(each, home.capacity, length, home.name, slow) for each, home in zip(devices, homes, strict=True)]


def _online(problem: Problem, slow: str) -> Callable[[], Online]:
    """What answers pressure that no interval foresees."""
    trace, platform = problem.trace, problem.platform
    size = trace.tensor_columns.bytes.tolist()
    return partial(
        FarthestNextUse,
        chain=platform.cascade(slow),
        homes=tuple(platform.home(device).name for device in range(trace.devices)),
        movable=[bytes > 0 for bytes in size],
        size=size,
        uses=users(trace),
    )


def _plan(
    problem: Problem,
    online: Callable[[], Online],
    migrations: Callable[[int], Sequence[Migration]],
    length: int,
    *,
    waits: bool,
) -> Plan:
    """The plan with intervals of so many layers. waits: whether the device waits for late prefetches."""
    found = migrations(length)
    actions: list[Action] = []
    for one in found:
        actions += [*one.waits(), *one.actions] if waits else one.actions
    place = {tensor: one.slow for one in found for tensor in one.begin_slow}
    notes = {
        "interval": length,
        "late": "wait" if waits else "go_on",
        "fits": all(one.fits for one in found),
        "page_bytes": sum(one.page_bytes for one in found),
        "tensor_bytes": sum(one.tensor_bytes for one in found),
    }
    return Plan(problem.trace, actions, place=place, online=online, notes=notes, unpressed=Unpressed())
