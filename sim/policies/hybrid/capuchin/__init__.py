"""Capuchin: measure one iteration, then swap what hides its copies and recompute what is cheaper than waiting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge

from sim.errors import PolicyError
from sim.eviction.replacement import movable_results
from sim.plan import Plan, Problem, Unpressed
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.capuchin.guide import Guide, guide_from
from sim.policies.hybrid.capuchin.running import Guided, Passive
from sim.policies.hybrid.capuchin.safeguard import no_slower
from sim.solvers.cascade import cascade


@dataclass(frozen=True, kw_only=True)
class Capuchin(Policy):
    """Swap or recompute tensors, each at the accesses that one measured iteration shows to be best.

    The measured iteration runs in passive mode: under pressure, tensors are moved to the host from the start of the
    access list, and the device waits for what it reads and is not there. Times of accesses are taken without the
    waits that this causes. From them, per tensor, the two consecutive accesses with most free time between them: from
    the end of the copy out that the first (evicted-access) begins to the start of the copy back that the second
    (back-access) needs. Candidates are results with more than one access whose gap lies in the peak interval, where
    memory would be exceeded if nothing left. By free time, longest first, they are swapped while it is not
    negative, until what leaves adds up to the excess. If that is not enough, each of the rest is swapped
    if the wait that this adds to those for the other copies on its link is shorter than its recomputation, and else
    recomputed. These are looked at by memory saving per second (MSPS): bytes over the time from the nearest ancestors
    that are resident, with the published rules for what the choice of one changes for the others.

    In a guided iteration a swapped tensor leaves after its evicted-access and returns at its in-trigger: the last
    access from which its copy arrives in time, but no earlier than it has left, and than the first from which memory
    holds it until its back-access. A recomputed one is dropped, and recomputed at its back-access; what is
    recomputed on the way and will be read stays while memory lasts (collective recomputation). Nothing waits for the
    end of a copy out but a request that finds no space. What still does not fit is moved as in passive mode. A
    tensor that was in flight at its back-access has its in-trigger moved earlier by a share of its swap time in the
    next iteration.

    Source: Peng, Shi, Dai, Jin, Ma, Xiong, Yang, Qian, "Capuchin: Tensor-based GPU Memory Management for Deep
        Learning", ASPLOS 2020, doi:10.1145/3373376.3378505. No code is public, and the paper was not at hand: the steps
        follow accounts of it. How the two choices alternate, and the order in which the rest is looked at, are
        this package's reading.
    Bounds: free time is exact where one link serves one direction and every swapped tensor finds it idle. What leaves
        adds up to the excess or is all there is; that it does so at every moment is not ensured. Nor does the published
        choice know what a recomputation needs beside its result, or which copies passive mode adds: without
        `fall_back`, about one in six guided iterations of small random nets took longer than the passive one, and
        one in six ran out of memory where that one fits. With it none does. The choice takes O(candidates²).
    Departs: before a guided iteration runs it is tried (replayed), as long as `fall_back` is set. If it would be slower
        than an earlier iteration, or not fit, the fastest one's guide takes its place or, if that one had none, passive
        mode; feedback goes on from the guide that was tried. The measured and the guided iterations are
        iterations of the run, as in the paper, and the result is the last one: `simulate(…).warm_up` has the others.
        Sizes and lifetimes, which the paper records at each allocation, are those of the trace. The peak interval from
        which in-triggers are kept is what remains of it when all that was chosen is away. A copy back does not begin
        after one that is needed later. Fetching a swapped source counts as time of a recomputation. A tensor is
        recomputed only if it can be for all of its life: received ones, results of an update and of ops that read views
        are not. Of what was recomputed for others, what is needed last is dropped first under pressure. Tensors beyond
        the host's capacity go on to the tier behind it. Another trace gets a measured iteration of its own.

    guided: how many guided iterations follow the measured one; 0 shows passive mode.
    hidden: when a swap counts as hidden: `alone`, if its free time is not negative, as published; or `queued`, if
        besides no copy of the tensors chosen before makes it late, nor the other way round.
    feedback: the share of its swap time by which a late tensor's in-trigger moves, per iteration.
    fall_back: whether no guided iteration may be slower than those before it; False as published.
    Raises PolicyError for an unknown choice, a negative number, or a platform without a host tier.
    """

    online = True
    recomputes = True
    moves = True
    needs = frozenset({"host"})
    fidelity = "reconstruction"
    rarely = "it recomputes only where a swap cannot be hidden and costs more"
    other_values = by_parameter(guided=0, hidden="queued", feedback=0.5)
    unseen = by_parameter(fall_back="on nets of layers guided iterations are the faster ones; see its own tests")

    guided: Annotated[int, Ge(0)] = 4
    hidden: Literal["alone", "queued"] = "alone"
    feedback: Annotated[float, Ge(0)] = 0.05
    fall_back: bool = True

    @property
    def warm_up(self) -> int:  # type: ignore[override]
        """The measured iteration and all guided ones but the last."""
        return self.guided

    def plan(self, problem: Problem) -> Plan:
        """Passive mode, or the swaps and drops of a guided iteration on top of it; notes: `phase`, `guide`, `next`."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"capuchin: {platform.name} has no host tier to swap to")
        host = platform.host.name
        movable = movable_results(trace)
        common: dict[str, Any] = {
            "chain": platform.cascade(host),
            "homes": tuple(platform.home(device).name for device in range(trace.devices)),
            "movable": movable,
            "size": trace.tensor_columns.bytes.tolist(),
        }
        past = [run for run in problem.history if run.trace == trace and "phase" in run.plan.notes]
        if not past or not self.guided:
            passive = partial(Passive, **common)
            return Plan(trace, online=passive, notes={"phase": "measure"}, unpressed=Unpressed())

        def plan_of(guide: Guide | None) -> Plan:
            if guide is None:
                passive = partial(Passive, **common)
                return Plan(trace, online=passive, notes={"phase": "passive"}, unpressed=Unpressed())
            online = partial(Guided, back=guide.back, **common)
            actions = cascade(trace, platform, guide.actions(host), host)
            return Plan(trace, actions, online=online, notes={"phase": "guide", "guide": guide}, unpressed=Unpressed())

        last = past[-1]
        before = last.plan.notes.get("guide")
        guide = last.plan.notes.get("next") or (before.after(last.log, self.feedback) if before else None)
        guide = guide or guide_from(problem, past[0], movable, queued=self.hidden == "queued")
        return no_slower(problem, past, guide, plan_of, self.feedback) if self.fall_back else plan_of(guide)
