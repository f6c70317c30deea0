"""AutoSwap: absences across the highest load, ranked by a score, are swapped until the load is low enough."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from sim.declared import Size
from sim.errors import PolicyError
from sim.plan import Action, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.autoswap.choosing import choose
from sim.solvers.cascade import cascade
from sim.solvers.load_curve import Curve, curve_of
from sim.solvers.swap_trips import Trip, actions_of, load_with, scheduled
from sim.units import to_bytes

LIMITS = 16
"""Limits that are tried without overhead, beside the one that is asked for: parts of the load with all resident."""
SMALLEST = 1 << 20
"""Bytes of the smallest block that the published code swaps."""
STATES = ("gradients", "optimizer_state", "weights")


@dataclass(frozen=True, kw_only=True)
class AutoSwap(Policy):
    """Swap a result between two accesses with the highest load between them, by score, until the limit is kept.

    The load curve has the bytes resident during each op, without stalls. A candidate is two consecutive accesses of one
    tensor, one before and one after the op of the highest load. Candidates are taken in order of a score, and the
    curve falls by their bytes in between, until it is within the limit. Copies out begin at the first access, in
    order; copies in end just in time for the second, each before the one that is needed next. Where such copies hold
    more than the limit, mode `limit` holds the device for the copy out, and begins the copy in when it fits; mode
    `no_overhead` accepts the load.
    Scores: `doa`, the duration of absence; `aoa`, the area of absence: the time that both copies leave of it times the
    bytes, or over them where it is negative; `wdoa`, the weighted duration: the load above the limit, summed over
    the ops of the absence; `swdoa`, the same on the curve as earlier choices have left it.
    Source: Zhang, Yeung, Shu, He, Wang, "Efficient Memory Management for GPU-based Deep Learning Systems",
        arXiv:1903.06631; the order of `doa`, the vote and the schedule as in the swap device of its public code (Apache
        SINGA).
    Bounds: `no_overhead` takes the time of unlimited memory where copies of both directions do not slow each other;
        `limit` keeps to the limit where the candidates suffice. O(candidates x (candidates + ops)), without overhead
        34 times at most. Slower than `swap_all` where the absences that cross the highest load do not suffice, or where
        a score takes those first that are too short, as `wdoa` and `swdoa` do. Slower than a policy for weights and
        states beside activations, as `g10`, where the link is never idle: these leave before there are activations, and
        return when no activation is left.
    Headline: up to 34.2 % less memory without overhead, on nets, batches and a card that the abstract does not name.
        Here, on `p100` with 32 images: Inception-v4 28.9 %, ResNet-50 22.7 %, VGG-16 22.6 % (12.5 % if its weights and
        their gradients stay). What binds is the link, which copies for the time of forward alone: no plan that begins
        with its weights on the device saves more than 30, 25 and 25 %; where convolutions run at half of the peak, or
        copies at 25 GB/s, ResNet-50 saves 31 or 43 %. The rest goes to tensors that are still on their way at the
        peak, for they leave whole: an annealed choice among the same absences saves 29.0, 23.8 and 23.7 %. What binds
        VGG-16 is a second peak, at the backward op of its second convolution. On the nets of the authors' public
        training script (CIFAR-10, batches of 100) ResNet saves 16 % where an op takes 6 us besides its work and 37 %
        where it takes 60, VGG 18 and 27 %.
    Departs: times and lifetimes are those of the trace and the cost model, not of measured iterations. No absence
        spans two iterations: with `variables=all` what exists from the start leaves after the first op. An access that
        writes has no buffer of ops behind it. The published code subtracts the copy out twice in `doa`, and sums `wdoa`
        over the wrong counter; here as the paper says. Without overhead, an absence that is too short for both copies
        stays; limits from the load itself down are tried until one is kept, and the lowest load is taken, where the
        published code plans for one. Tensors of less than 1 MiB, which it never swaps, leave where the others do not
        suffice. A sum of the scores, whose weights it finds by Bayesian optimisation, is left out: of 60 weightings the
        best was 1.3 % faster than the best score at most (ResNet-50 and GPT-2, three limits each), and without overhead
        saved a point more at most (six nets). Its other half is the policy `smartpool`. Tensors beyond the host's
        capacity go on to the tier behind it.

    score: by which candidates are ranked: one of the four, or `vote` for the sum of the ranks under `doa`, `aoa` and
        `wdoa`.
    mode: what is done where copies that would cost no time exceed the limit.
    limit: bytes that are to be resident at most; None: the budget.
    least: bytes of the smallest tensor that is swapped; None: 1 MiB, as published, or 0 where the rest does not suffice
        for the limit.
    variables: `activations`, what forward and backward produce for each other; `all`, as published: weights,
        gradients and optimizer states too.
    Notes of the plan: `load_bytes`, the highest load with all that is chosen away, without overhead that with copies.
    Raises PolicyError for an unknown score or mode, a negative size, or a platform without a host tier.
    """

    moves = True
    needs = frozenset({"host"})
    fidelity = "equations"
    rarely = "it moves only what is away across the highest load, and no more than the budget lacks"
    other_values = by_parameter(
        score="swdoa",
        mode="no_overhead",
        limit="200 MB",
        least="30 MB",
        variables="all",
    )

    score: Literal["doa", "aoa", "wdoa", "swdoa", "vote"] = "doa"
    mode: Literal["limit", "no_overhead"] = "limit"
    limit: Size | None = None
    least: Size | None = None
    variables: Literal["activations", "all"] = "activations"

    def __post_init__(self) -> None:
        if self.variables == "all":  # traits by parameter
            object.__setattr__(self, "manages", ("activations", *STATES))
            object.__setattr__(self, "yields", STATES)

    def plan(self, problem: Problem) -> Plan:
        """Moves, and waits where the limit asks for them, of each device on its own."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"autoswap: {platform.name} has no host tier to swap to")
        host = platform.host.name
        actions: list[Action] = []
        load = 0
        for device in range(trace.devices):
            home = platform.home(device)
            limit = home.capacity if self.limit is None else to_bytes(self.limit)
            curve = curve_of(problem, device, host, with_state=self.variables == "all")
            trips, after = self._within(curve, limit) if self.mode == "limit" else self._without_overhead(curve, limit)
            actions += actions_of(trips, home.name, host)
            load = max(load, after)
        return Plan(trace, cascade(trace, platform, actions, host), notes={"load_bytes": load})

    def _within(self, curve: Curve, limit: int) -> tuple[list[Trip], int]:
        """The trips that keep to a limit, and the highest load with all that is chosen away."""
        for least in self._sizes():
            chosen, after = choose(curve, limit, self.score, least)
            if after <= limit:
                break
        return scheduled(curve, chosen, limit), after

    def _without_overhead(self, curve: Curve, limit: int) -> tuple[list[Trip], int]:
        """The trips that leave the lowest load, for a limit that is lowered until that is within the one asked for."""
        best, lowest = list[Trip](), int(curve.load.max(initial=0))
        limits = {lowest * part // LIMITS for part in range(LIMITS)} | {limit}
        for asked, least in product(sorted(limits, reverse=True), self._sizes()):
            if lowest <= limit:
                break
            trips = scheduled(curve, choose(curve, asked, self.score, least)[0], None)
            after = int(load_with(curve, trips).max(initial=0))
            if after < lowest:
                best, lowest = trips, after
        return best, lowest

    def _sizes(self) -> tuple[int, ...]:
        """What is tried as the size of the smallest tensor that leaves."""
        return (SMALLEST, 0) if self.least is None else (to_bytes(self.least),)
