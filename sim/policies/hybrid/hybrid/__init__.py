"""Hybrid: each saved result is kept, offloaded or recomputed, whichever a linear program and a replay find fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge

from sim.errors import IllegalPlan, Infeasible, PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.hybrid.hybrid.drafts import Draft, Drafts, Replayed, replayed
from sim.policies.hybrid.hybrid.recomputations import beside_recomputation
from sim.policies.hybrid.mpress import MPress
from sim.policies.offload.swap_all import SwapAll
from sim.policies.recompute.full_recompute import FullRecompute
from sim.solvers.outcome import nothing_fits
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE
from sim.units import format_bytes

SEARCHES = 3
"""Where a replay shows what the model did not know, it goes on from that, at most so often in all."""
REPLAYS = 3
"""The fastest drafts that fit are replayed, so many."""
LATE = 1.001
"""By how much a replay may take longer than the model says, before drafts without copies are tried, too."""
UPDATE = (
    "; it is the update that does not fit: join a policy for it, as in 'optimizer_in_backward + hybrid' "
    "or 'zero_offload + hybrid'"
)
STATE = "; optimizer state and gradients, {} in all, stay here: join a policy for them, as in 'zero_offload + hybrid'"


@dataclass(frozen=True, kw_only=True)
class Hybrid(Policy):
    """Keep, offload or recompute the results of each forward op that backward reads, as time and memory allow.

    A linear program divides each op's results into shares that are kept, offloaded and recomputed. It knows the time
    of every op and copy, and in some 256 windows of the iteration what either direction of the link can carry and
    what is resident. So a copy costs nothing as long as the link has time before the memory is needed, then its stall;
    recomputation costs its ops. Shares are rounded in program order. A model of one device (ops one after another, a
    link in each direction, copies back as early as memory allows) times the draft and shows what the
    program did not know: transient results of recomputation, when an input is needed for it, copies that are late.
    The next round's program takes that into account; one that offloads everything is tried, too. A draft that misses
    the budget, and is faster than those that do not, is repaired: where it needs most, the way is changed of the
    resident results that cost least time for the memory they free. The best one is
    improved by changing single choices; the same is done for a program with 1 % less room, of which other shares are
    rounded. The fastest drafts are replayed, and
    `swap_all` where they take longer than unlimited memory; the fastest is the plan.
    In a composition the replays show what other parts hold and move, and the search goes on with that; so it does where
    a draft that should fit does not. Where a replay takes longer than the model says, since others use the link, drafts
    that copy nothing are tried, too.
    An op is recomputed once there. So what recomputation brings back stays to its last read, and in little memory, or
    beside a slow link, little of that fits. Therefore planners that recompute an op as often as it pays (`twremat`;
    `rotor`, on chains; `relax_and_fix`'s programs) say what to recompute, for the memory that there is and for more.
    Wherever that takes less time than what was found, copies of the rest are planned beside it in the same way.
    Where no such draft fits, what backward and the update produce for later ops may be offloaded, too, and
    `relax_and_fix` may solve as many programs as it does alone.
    Of pipelines this model knows the ops of each device, but not when it waits for others. So there a plan by the
    pipeline's timeline, that of `mpress`, is the plan if it takes no longer than unlimited memory, else it and
    `full_recompute` are compared with the drafts. Where no draft of forward results fits, `full_recompute` is the plan
    if that is faster than what does, with what its checkpoints hold for longer (`hold_longer`), the only rewrite that
    there is here.
    Recomputation that is chosen is lazy: an op is recomputed right before its results are first read, from what is
    resident or comes back for it. Results that only forward reads may be kept or offloaded, too, for others to be
    recomputed from; so an expensive op is not recomputed for the cheap ones behind it.

    Source: our own. The choice between three ways and its relaxation follow Beaumont et al., "Efficient Combination of
        Rematerialization and Offloading for Training DNNs", NeurIPS 2021; windows of link time: Huang et al.,
        "SwapAdvisor", and Peng et al., "Capuchin", both ASPLOS 2020; recomputing the cheap: Korthikanti et al., MLSys
        2023. What is recomputed more than once: see `twremat`, `rotor` and `relax_and_fix`.
    Bounds: `rounds` programs and one of about 5 columns per op and 6 per window, each with a schedule in O(ops); at
        most three replays per search, and one search but in compositions or where the fastest draft does not fit. At
        most eight plans of other planners with two programs each; of traces of more than 5,000 ops one, and of more
        than 1,500 none by `rotor`, whose time grows with the cube of the chain.
    Departs: no paper's design is claimed. It chooses among results of forward; what backward and the update produce is
        offloaded only where nothing fits otherwise, and never recomputed but by the planners named above. Some
        policies fit into less, or are faster, by freedoms that it does not have: `modnn` splits the batch; `vdnn` and
        `modnn` take other implementations of convolutions; `tso` launches captured graphs; `zero_offload` updates on
        the host's processor, beside the device; `optimizer_in_backward` and `olla` change the order of ops; lossy
        codecs make what is saved smaller.

    rounds: linear programs at most; on traces of more than some 4,000 ops fewer, two if one of them fits.
    Notes of the plan: `kept_bytes`, `offloaded_bytes`, `recomputed_bytes`; `expected_ns`, the model's time;
        none where the plan is another policy's.
    Raises Infeasible, with the smallest budget of any draft of its own choice, where nothing of that fits.
    """

    recomputes = True
    moves = True
    rewrites = True  # where `full_recompute` is the plan: what its checkpoints hold for longer
    solver = "lp"
    fidelity = "reconstruction"
    rarely = "nothing is offloaded or recomputed where all fits, and it rewrites only where nothing of its own does"
    other_values = by_parameter(rounds=1)

    rounds: Annotated[int, Ge(1)] = 6

    def plan(self, problem: Problem) -> Plan:
        """The fastest draft that fits, by replay."""
        drafts = Drafts(problem)
        plain = replayed(problem, drafts, drafts.kept())
        if plain.fits:
            return plain.plan
        simple = list(_of_stages(problem)) if problem.trace.devices > 1 else []
        if simple and simple[0].ns <= simple[0].plan.notes.get("unlimited_ns", 0):
            return simple[0].plan
        if shared := drafts.learn(plain):  # that replay ended early: one that goes on shows more
            drafts.learn(replayed(problem, drafts, drafts.away()))
        best = self._searched(problem, drafts, shared=shared)
        if best is None or (best.draft.moved and best.ns > LATE * best.draft.ns):  # the link has more to do
            dropping, _ = self._search(problem, drafts.without_copies())
            best = min((each for each in (best, dropping) if each), key=lambda each: each.ns, default=None)
        if narrow := best is None:
            wider = drafts.with_later()
            best = self._searched(problem, wider, shared=shared)
        if (more := beside_recomputation(problem, drafts, best.ns if best else None, hard=narrow)) is not None:
            best = more
        if best is None:
            tries = [replayed(problem, each, each.least(self.rounds)) for each in (drafts, wider)]
            best = min(tries, key=lambda run: (run.lacking, run.draft.least_bytes))
        if best.fits:
            simple.insert(0, Simple(best.plan, best.ns))
            if best.ns > plain.draft.ns and problem.platform.host is not None:
                simple += _replayed(problem, SwapAll())
        if narrow and problem.trace.devices == 1:
            simple += _replayed(problem, FullRecompute())
        if simple:
            return min(simple, key=attrgetter("ns")).plan
        devices = range(problem.trace.devices)
        if best.refusal and best.refusal.tier not in {problem.platform.home(device).name for device in devices}:
            raise best.refusal  # no budget helps where another tier is short
        what = f"policy 'hybrid': no draft fits {format_bytes(problem.budget)}"
        end = UPDATE if _peaks_in_update(best.draft) else _state_beside(problem, best.draft)
        raise nothing_fits(problem, what, best.draft.least_bytes, end=end)

    def _searched(self, problem: Problem, drafts: Drafts, *, shared: bool) -> Replayed | None:
        """The fastest of some drafts that fits, None if none does. shared: whether others hold or move something."""
        best: Replayed | None = None
        last: Replayed | None = None
        for _ in range(SEARCHES):
            fitting, first = self._search(problem, drafts)
            best = min((each for each in (best, fitting) if each), key=lambda each: each.ns, default=None)
            if first.fits and (not shared or (last and list(first.draft.choice) == list(last.draft.choice))):
                break
            for run in {id(run): run for run in (fitting, first) if run}.values():
                drafts.learn(run)
            last = first
        return best

    def _search(self, problem: Problem, drafts: Drafts) -> tuple[Replayed | None, Replayed]:
        """Of some drafts the one that is fastest when replayed, None if none fits; and the first that was replayed."""
        runs: list[Replayed] = []
        seen: set[tuple[int, ...]] = set()
        for draft in sorted(drafts.search(self.rounds), key=attrgetter("rank")):
            if len(runs) >= REPLAYS or (runs and runs[-1].fits and runs[-1].ns <= problem.least_ns(runs[-1].plan)):
                break  # nothing is faster than the ops alone
            if tuple(draft.choice) not in seen:
                seen.add(tuple(draft.choice))
                runs.append(replayed(problem, drafts, draft))
        return min((run for run in runs if run.fits), key=lambda run: run.ns, default=None), runs[0]


class Simple(NamedTuple):
    """A plan, and the time that its replay takes."""

    plan: Plan
    ns: int


def _of_stages(problem: Problem) -> Iterator[Simple]:
    """Plans for a pipeline: choices by its own timeline, or one recomputation per layer, which holds less."""
    yield from _replayed(problem, MPress(peers=problem.platform.has_peers, stripes=False))
    yield from _replayed(problem, FullRecompute())


def _replayed(problem: Problem, policy: Policy) -> Iterator[Simple]:
    """A policy's plan, if it has one that fits."""
    try:
        plan = policy.plan(problem)
        yield Simple(plan, problem.evaluate(plan).end)
    except (Infeasible, PolicyError, IllegalPlan):
        return


def _state_beside(problem: Problem, draft: Draft) -> str:
    """What to join where optimizer state and gradients, which stay here, take more than a draft lacks; else nothing."""
    trace, columns, ops = problem.trace, problem.trace.tensor_columns, problem.trace.op_columns
    if problem.platform.host is None or ops.engine:
        return ""
    state = (columns.role == ROLE_CODE["optimizer_state"]) & (trace.producer < 0)
    read = {t for op in np.flatnonzero(ops.phase == PHASE_CODE["update"]).tolist() for t in trace.reads(op)}
    gradients = [t for t in read if columns.role[t] == ROLE_CODE["gradient"]]
    held = int(columns.bytes[state].sum() + columns.bytes[gradients].sum())
    return "" if held < draft.least_bytes - problem.budget else STATE.format(format_bytes(held))


def _peaks_in_update(draft: Draft) -> bool:
    """Whether a draft needs most memory in the update, where this policy chooses nothing."""
    steps = max(draft.steps, key=lambda each: int(each.held.max(initial=0)))
    if not len(steps.ops):
        return False
    phase = draft.schedule.index.phase[steps.ops[int(steps.held.argmax())]]
    return phase == PHASE_CODE["update"]
