"""Compositions: several policies on one job, each for the tensors that it owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sim.errors import Deadlock, IllegalPlan, Infeasible, PolicyError
from sim.log import EventLog
from sim.plan import Action, Plan, Problem, Recompute, Run
from sim.policies.base import FIDELITIES, Policy, joins
from sim.policies.composition import selectors
from sim.policies.composition.checkpoints import with_recomputation
from sim.policies.composition.merging import Place, by_ids, carried_over, merged, restricted
from sim.policies.composition.online import JoinedOnline, droppable_among
from sim.policies.composition.ownership import Part, is_narrowed, managed_beside, own_ops, owners, taken_away
from sim.policies.composition.rewriting import held_among, implemented_among, rewrites
from sim.policies.composition.selectors import CHECKPOINTS, REST
from sim.trace.graph import Trace
from sim.trace.tensor import ROLES

ATTEMPTS = 8
"""Budgets that planners are given in turn, until their plan, replayed with the others', fills the true one."""
PRECISION = 0.005
"""Of the budget: an interval as small as this ends that search before its last attempt."""


@dataclass(frozen=True, kw_only=True)
class Composition(Policy):
    """Several policies on one job, each for the tensors that it owns.

    A part owns what it manages (`zero_offload + full_recompute`: state, and activations), or of that what its selector
    names (`layers 0-7: full_recompute; rest: swap_all`). `rest` is what no other part owns; `checkpoints` are
    activations that the other parts leave resident from forward to backward, for backward ops or for recomputation. A
    tensor has one owner.

    Parts plan in the order given, each on the trace that those before it have rewritten, and know nothing of each
    other's decisions; where a later one recomputes from what an earlier one has released for good, they plan once more,
    and the replays that they ask for show those first plans, too. Of each plan what is about the part's own tensors is
    carried out. Copies and waits at an op come before recomputation there. Where a recomputation reads what another
    part has offloaded, the prefetch starts earlier by as many ops; parts for checkpoints, or weights alone, see what
    the recomputations planned before them read. A planner that keeps to a budget counts what its own model of memory
    counts, not what other parts move away: its budget is searched by halving, with at most eight replays of all parts
    together, so that up to 8 % of the true one may stay unused. Under pressure online parts are asked in the order
    given, and the first with an answer answers; each sees what others own as pinned.
    Notes of the plan: `parts`, those of the parts; `owned`, a line for each part that says what it owns; `idle_parts`,
        a line for each part that does nothing.

    Source: what users combine today, such as ZeRO-Offload with activation checkpointing (DeepSpeed's
        `activation_checkpointing`), or selective recomputation with offload by module (Megatron-LM).
    Bounds: time at least that of the slowest part alone on what it owns; no optimality carries over.
    Departs: published combinations decide jointly; here each part decides for itself. Of a rewrite that only chooses
        other implementations, what is about ops without a result that the selector names is left out.

    parts: what is combined.
    Raises PolicyError for two owners of a tensor, a selector that matches nothing, a rewrite that is restricted to
    a part of what it rewrites, or one that changes what an earlier part has decided on; Infeasible where only short
    memory brings such an error.
    """

    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        """The composition as `sim.policies.load` reads it."""
        clauses: list[str] = []
        for i, part in enumerate(self.parts):
            if i and part.selector == self.parts[i - 1].selector:
                clauses[-1] += f" + {part.label}"
            else:
                clauses.append(f"{part.selector}: {part.label}" if part.selector else part.label)
        return "; ".join(clauses)

    def __post_init__(self) -> None:
        if not self.parts:
            raise PolicyError("a composition needs at least one policy")
        for part in self.parts:
            if part.selector:
                selectors.check(part.selector)
        rests = [part for part in self.parts if REST in selectors.terms(part.selector)]
        for i, one in enumerate(rests):
            for other in rests[i + 1 :]:
                words, theirs = managed_beside(one, self.parts), managed_beside(other, self.parts)
                if both := [word for word in words if word in theirs]:
                    raise PolicyError(f"{one.label!r} and {other.label!r} both own the rest of the {both[0]}")

    # ---- traits --------------------------------------------------------------------------------

    @property
    def online(self) -> bool:  # type: ignore[override]
        """Whether a part decides while it runs."""
        return any(part.policy.online for part in self.parts)

    @property
    def recomputes(self) -> bool:  # type: ignore[override]
        """Whether a part recomputes."""
        return any(part.policy.recomputes for part in self.parts)

    @property
    def moves(self) -> bool:  # type: ignore[override]
        """Whether a part moves bytes."""
        return any(part.policy.moves for part in self.parts)

    @property
    def rewrites(self) -> bool:  # type: ignore[override]
        """Whether a part changes the trace."""
        return any(part.policy.rewrites for part in self.parts)

    @property
    def splits_batch(self) -> bool:  # type: ignore[override]
        """Whether a part may split the batch."""
        return any(part.policy.splits_batch for part in self.parts)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        """Whether all parts keep the values."""
        return all(part.policy.lossless for part in self.parts)

    @property
    def plans_ahead(self) -> str:  # type: ignore[override]
        """What any part takes from the whole trace."""
        said = (
            part.policy.plans_ahead or ("" if part.policy.online else "a part plans offline") for part in self.parts
        )
        checkpoints = any(CHECKPOINTS in selectors.terms(part.selector) for part in self.parts)
        own = "what is a checkpoint depends on the whole trace" if checkpoints else ""
        return "; ".join(dict.fromkeys(filter(None, (*said, own))))

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What any part needs."""
        return frozenset().union(*(part.policy.needs for part in self.parts))

    @property
    def solver(self) -> str:  # type: ignore[override]
        """What the parts solve with."""
        return ", ".join(dict.fromkeys(part.policy.solver for part in self.parts if part.policy.solver))

    @property
    def warm_up(self) -> int:  # type: ignore[override]
        """The most iterations that any part measures before its steady state."""
        return max(part.policy.warm_up for part in self.parts)

    @property
    def manages(self) -> tuple[str, ...]:  # type: ignore[override]
        """What all parts manage."""
        return tuple(dict.fromkeys(word for part in self.parts for word in part.policy.manages))

    @property
    def fidelity(self) -> str:  # type: ignore[override]
        """That of the least faithful part."""
        return max((part.policy.fidelity for part in self.parts), key=FIDELITIES.index)

    @property
    def rarely(self) -> str:  # type: ignore[override]
        """Why what its parts declare shows seldom."""
        said = [part.policy.rarely for part in self.parts]
        narrowed = "a part does nothing where no tensor that its selector names has to go"
        return "; ".join(dict.fromkeys(filter(None, (*said, narrowed if any(p.selector for p in self.parts) else ""))))

    @property
    def slow(self) -> bool:  # type: ignore[override]
        """Whether a part plans slowly."""
        return any(part.policy.slow for part in self.parts)

    @property
    def saves(self) -> Mapping[str, str]:  # type: ignore[override]
        """What the parts save by their rewrites."""
        return {kind: why for part in self.parts for kind, why in part.policy.saves.items()}

    def saving_lines(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the parts declare of that, a line each."""
        return tuple(dict.fromkeys(line for part in self.parts for line in part.policy.saving_lines()))

    # ---- the plan ------------------------------------------------------------------------------

    def plan(self, problem: Problem) -> Plan:
        """The parts' plans as one."""
        if len(self.parts) == 1:
            return self._alone(problem)
        refused: list[_Refused] = []
        first = self._attempt(problem, problem.budget, refused)
        error = self._refusal(first.error, problem) if isinstance(first.error, PolicyError) else first.error
        ample = _ample(problem)
        most = self._attempt(problem, ample, refused, other_than=first.plan)
        if first.plan is not None and most.plan is None:
            return first.plan
        found = [each for each in (first, most) if each.end is not None]
        low, high, least = 0, ample, most
        guess = problem.budget
        for _ in range(ATTEMPTS if most.end is None else 0):
            now = first if guess == problem.budget else self._attempt(problem, guess, refused)
            if now.plan is not None and now.end is None:
                high, least = guess, now
            else:
                low = guess
                found += [now] if now.end is not None else []
            if high - low <= PRECISION * problem.budget:
                break
            guess = (low + high) // 2
        best = min(found, key=_Attempt.order, default=least)
        if best.plan is None or (not found and isinstance(error, _Prevented)):
            raise error or PolicyError("no part of the composition made a plan")
        return best.plan  # where none fits, the replay of the smallest says what is short, and where

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """What the parts' freedoms are worth, alone and together."""
        alone = {name: plan for part in self.parts for name, plan in part.policy.unlimited(problem).items()}
        # one whose freedom is worth nothing on this trace may use it on what another part has made of it
        free = any(type(part.policy).unlimited is not Policy.unlimited for part in self.parts)
        return {**alone, "the composition": self.plan(problem)} if free else {}

    def _alone(self, problem: Problem) -> Plan:
        """The plan of the only part."""
        part = self.parts[0]
        if not part.selector:
            return part.policy.plan(problem)
        try:
            return self._planned(problem, problem.budget, [])[0]
        except PolicyError as error:
            raise self._refusal(error, problem) from None

    def _attempt(
        self, problem: Problem, budget: int, refused: list[_Refused], other_than: Plan | None = None
    ) -> _Attempt:
        """The plan when every part is given a budget, and its replay.

        other_than: a plan that has been replayed; nothing is attempted where this one is the same.
        """
        try:
            plan, made = self._planned(problem, budget, refused)
            if other_than is not None and plan.decides_as(other_than):
                return _Attempt()
            try:
                return _replayed(problem, plan)
            except IllegalPlan:  # a part has released what a later one's recomputation reads
                return _replayed(problem, self._planned(problem, budget, [], before=made)[0])
        except (Infeasible, PolicyError) as error:
            return _Attempt(error=error)

    def _refusal(self, error: PolicyError, problem: Problem) -> Infeasible:
        """The refusal that an error stands for, where more memory would have prevented it. Raises it elsewhere.

        A part that only does nothing there may lack what it needs.
        """
        roomy = problem.with_budget(_ample(problem))
        try:
            plan, _ = self._planned(roomy, roomy.budget, [])
        except (Infeasible, PolicyError):
            raise error from None
        if error.part and does_nothing(error.part, plan):
            raise error
        return _Prevented(error, "; more memory prevents that")

    def _planned(
        self, problem: Problem, budget: int, refused: list[_Refused], before: Sequence[_Made] = ()
    ) -> tuple[Plan, list[_Made]]:
        """The parts' plans for a budget as one, and each.

        before: what the parts have planned without knowing of those after them; now their replays show those, too.
        refused: earlier refusals: what was refused for more memory beside the same plans is again, so that a part that
            keeps to no budget, however ample, is not asked for each. What is refused now is added.
        """
        trace, made = problem.trace, list[_Made]()
        for i, part in enumerate(self.parts):
            for earlier in refused:
                if earlier.holds(budget, made):
                    raise earlier.error
            asked = self._asked(problem, trace, budget, made, before)
            try:
                plan = part.policy.plan(asked)
            except PolicyError as error:
                error.part = part.label
                raise
            except Infeasible as error:
                refusal = error.error if isinstance(error, _Prevented) else error  # of its only plan
                refused.append(_Refused(budget, made, refusal))
                raise refusal from None
            if part.selector and not rewrites(plan.trace, asked.trace):
                own = own_ops(self.parts, i, asked.trace)
                new = implemented_among(own, plan.trace, asked.trace)
                managed = own_ops(self.parts, i, asked.trace, part.policy.manages)
                plan = replace(plan, trace=held_among(managed, new, asked.trace))
            made = _with(made, part, plan, trace, asked.trace)
            trace = made[-1].plan.trace
        return self._joined(made, trace, problem), made

    def _asked(
        self, problem: Problem, trace: Trace, budget: int, made: Sequence[_Made], before: Sequence[_Made]
    ) -> Problem:
        """The problem as the part after those sees it."""
        i = len(made)
        part, seen = self.parts[i], trace
        if not part.policy.online and _asks_what_recomputation_reads(part):
            seen = _as_it_runs(trace, made)

        def evaluate(plan: Plan, budget: int | None = None) -> EventLog:
            try:
                now = _with(made, part, plan, trace, seen)
                if before and now[-1].plan.trace == before[i].plan.trace:
                    for later in before[i + 1 :]:
                        now = _with(now, later.part, later.plan, now[-1].plan.trace, later.given)
                        now[-1] = now[-1]._replace(aware=later.aware)
                together = self._joined(now, now[-1].plan.trace, problem)
            except PolicyError as error:  # another of the plans that the part tries may do
                raise _Prevented(error) from None
            return problem.evaluate(together, budget)

        decides_online = part.policy.online and not part.policy.plans_ahead  # by the memory that there is
        platform = problem.platform if decides_online else problem.platform.with_budget(budget)
        return replace(
            problem,
            trace=seen,
            platform=platform,
            cost=problem.cost.over(seen, platform),
            evaluate=evaluate,
            history=_history(problem.history, i),
            least_ns=lambda plan: 0,
        )

    def _joined(self, made: Sequence[_Made], trace: Trace, problem: Problem) -> Plan:
        owned = _owned(made, trace)
        kept = []
        for each, own in zip(made, owned, strict=True):
            actions = restricted(each.actions, trace, own)
            # what an online part, or a rewrite alone, does with a tensor stands in no action
            unsaid = each.plan.online is not None or (each.part.selector and not each.actions)
            narrowed = len(actions) < len(each.actions) or (unsaid and is_narrowed(each.part, own, each.plan.trace))
            if each.rewrites and narrowed:
                raise _cannot_be_restricted(each, made, owned, trace)
            kept.append(actions)
        seen = [
            droppable_among(own, trace) if each.plan.keep_dead else own for each, own in zip(made, owned, strict=True)
        ]
        parts = [(each.plan.online, own) for each, own in zip(made, seen, strict=True) if each.plan.online is not None]
        every = frozenset[int]().union(*owned)
        place = {  # where a part for all that it manages leaves what nobody manages is its own affair
            tensor: where
            for each, own in zip(made, owned, strict=True)
            for tensor, where in each.place.items()
            if tensor in own or (tensor not in every and not each.part.selector)
        }
        return Plan(
            trace,
            tuple(merged(kept, [each.aware for each in made], trace, problem.platform)),
            place=place,
            online=JoinedOnline(parts, trace) if parts else None,
            keep_dead=_kept_dead(made, seen),
            notes={
                "parts": tuple(each.plan.notes for each in made),
                "given": tuple(each.given.content_hash for each in made),
                "owned": tuple(_owned_line(each.part, own, trace) for each, own in zip(made, owned, strict=True)),
                "idle_parts": tuple(_idle(made, owned, kept)),
            },
        )


@joins
def joined(policies: Sequence[Policy], selector: str = "") -> Policy:
    """Policies as one, those that are compositions by their parts. selector: narrows what each of them owns."""
    parts: list[Part] = []
    for policy in policies:
        if not isinstance(policy, Policy):
            raise PolicyError(f"{policy!r} is not a policy, so that nothing can be joined with it")
        inner = policy.parts if isinstance(policy, Composition) else (Part(policy),)
        parts += [part._replace(selector=" & ".join(filter(None, (part.selector, selector)))) for part in inner]
    return Composition(parts=tuple(parts))


class _Made(NamedTuple):
    """What a part has planned for the trace that it was given, its actions and places over the last trace.

    aware: whether it saw the reads of recomputations, see `_as_it_runs`.
    """

    part: Part
    plan: Plan
    actions: list[Action]
    place: Mapping[int, Place]
    given: Trace
    rewrites: bool
    aware: bool

    def over(self, old: Trace, new: Trace, rewriter: str) -> _Made:
        """The same over what a later part has made of the trace."""
        if new is old:
            return self
        if self.plan.online is not None:
            raise PolicyError(
                f"{rewriter!r} rewrites the trace on which {self.part.label!r} has decided; name it before that"
            )
        actions, place = carried_over(self.actions, self.place, old, new, self.part.label, rewriter)
        return self._replace(actions=actions, place=place)


class _Prevented(Infeasible):
    """A plan that another part, or what its own part owns, does not let be; of other plans it says nothing."""

    proven = False

    def __init__(self, error: PolicyError, more: str = "") -> None:
        super().__init__(f"{error}{more}")
        self.error = error


class _Refused(NamedTuple):
    """A part's refusal of a budget, beside the plans of those before it."""

    budget: int
    made: Sequence[_Made]
    error: Infeasible | PolicyError

    def holds(self, budget: int, made: Sequence[_Made]) -> bool:
        """Whether the same part would be asked beside the same plans, for no more memory."""
        return (
            budget <= self.budget
            and len(made) == len(self.made)
            and all(
                now.plan.decides_as(then.plan) and not (now.part.policy.online and now.part.policy.plans_ahead)
                for now, then in zip(made, self.made, strict=True)
            )
        )


def _with(made: Sequence[_Made], part: Part, plan: Plan, given: Trace, seen: Trace) -> list[_Made]:
    """What is planned with one more part, over its trace.

    given: the trace that the parts before have made. seen: that trace as the part saw it, of the same ops and tensors.
    """
    if plan.trace is seen:
        plan = replace(plan, trace=given)
    actions, changed = [by_ids(action, plan.trace) for action in plan.actions], rewrites(plan.trace, given)
    last = _Made(part, plan, actions, plan.place, given=given, rewrites=changed, aware=seen is not given)
    return [*(each.over(given, plan.trace, part.label) for each in made), last]


def _owned(made: Sequence[_Made], trace: Trace) -> list[frozenset[int]]:
    """The tensors that each part owns."""
    return owners([each.part for each in made], [each.actions for each in made], trace, [one.rewrites for one in made])


def _cannot_be_restricted(
    each: _Made, made: Sequence[_Made], owned: Sequence[frozenset[int]], trace: Trace
) -> PolicyError:
    """The error where a part's rewrite is about tensors that it does not own."""
    label, own = each.part.label, owned[[one is each for one in made].index(True)]
    if each.part.selector:
        return PolicyError(f"{label!r} rewrites the trace and cannot be restricted to {each.part.selector!r}")
    about = [trace.tensor_id(action.tensor) for action in each.actions if not isinstance(action, Recompute)]
    about += np.flatnonzero(selectors.roles(trace, each.part.policy.manages)).tolist()  # what an online part decides on
    tensor = next(t for t in about if t not in own)
    owner = next((one.part.label for one, theirs in zip(made, owned, strict=True) if tensor in theirs), "")
    role = ROLES[trace.tensor_columns.role[tensor]]
    whose = (
        f"which {owner!r} owns"
        if owner
        else f"whose role is {role!r}; it manages {', '.join(each.part.policy.manages)}"
    )
    return PolicyError(f"{label!r} rewrites the trace for tensor {trace.tensor_columns.name[tensor]!r}, {whose}")


def _owned_line(part: Part, own: Collection[int], trace: Trace) -> str:
    """What a part owns: how many tensors, by role."""
    count = Counter(ROLES[role] for role in trace.tensor_columns.role[[*own]].tolist())
    roles = ", ".join(f"{number:,} {role}" for role, number in sorted(count.items()))
    written = f"{part.selector}: {part.label}" if part.selector else part.label
    return f"part {written!r} owns {len(own):,} tensors" + (f": {roles}" if own else "")


def _idle(made: Sequence[_Made], owned: Sequence[frozenset[int]], kept: Sequence[Sequence[Action]]) -> Iterator[str]:
    """A line for each part that does nothing, though its policy can."""
    for each, own, actions in zip(made, owned, kept, strict=True):
        policy, plan = each.part.policy, each.plan
        rewritten = plan.trace is not each.given and plan.trace.content_hash != each.given.content_hash
        acts = actions or plan.online is not None or plan.keep_dead or own.intersection(each.place)
        if rewritten or (own and acts) or not (policy.recomputes or policy.moves or policy.rewrites):
            continue
        why = "nothing that it owns has to change here" if own else "it owns no tensor of this trace"
        yield f"{_nothing(each.part.label)}: {why}"


def _nothing(label: str) -> str:
    return f"part {label!r} does nothing"


def does_nothing(label: str, plan: Plan) -> bool:
    """Whether a plan of a composition says so of a part."""
    return any(line.startswith(_nothing(label)) for line in plan.notes.get("idle_parts", ()))


def _asks_what_recomputation_reads(part: Part) -> bool:
    """Whether a part plans for what recomputation reads rather than recomputes: checkpoints, or weights alone."""
    return CHECKPOINTS in selectors.terms(part.selector) or part.policy.manages == ("weights",)


def _as_it_runs(trace: Trace, made: Sequence[_Made]) -> Trace:
    """The trace as such a part sees it: with the reads of the recomputations that the parts before it have planned."""
    owned = _owned(made, trace)
    actions = [action for each, own in zip(made, owned, strict=True) for action in restricted(each.actions, trace, own)]
    return with_recomputation(trace, actions, taken_away(actions, trace))


def _kept_dead(made: Sequence[_Made], owned: Sequence[frozenset[int]]) -> frozenset[int]:
    """What stays without further readers: of the parts that drop the dead themselves, what they own."""
    found: set[int] = set()
    for each, own in zip(made, owned, strict=True):
        keeps = each.plan.keep_dead
        found |= own if keeps is True else own & keeps if keeps else frozenset()
    return frozenset(found)


class _Attempt(NamedTuple):
    """A plan, None for none; when its replay ends, in ns, None where it does not fit; why there is none."""

    plan: Plan | None = None
    end: int | None = None
    error: Infeasible | PolicyError | None = None

    def order(self) -> int:
        """That end, of one that fits."""
        assert self.end is not None
        return self.end


def _replayed(problem: Problem, plan: Plan) -> _Attempt:
    """A plan with its replay."""
    try:
        return _Attempt(plan, problem.evaluate(plan).end)
    except (Infeasible, Deadlock):
        return _Attempt(plan)


def _history(history: tuple[Run, ...], i: int) -> tuple[Run, ...]:
    """Earlier iterations as part i planned them, where what it was given ran and not a later rewrite of it."""
    found = []
    for run in history:
        given, notes = run.plan.notes.get("given", ()), run.plan.notes.get("parts", ())
        if i < len(given) and given[i] == run.plan.trace.content_hash:
            found.append(replace(run, trace=run.plan.trace, plan=replace(run.plan, notes=notes[i])))
    return tuple(found)


def _ample(problem: Problem) -> int:
    """A budget at which nothing has to leave."""
    trace = problem.trace
    return problem.budget + 2 * int(trace.tensor_columns.bytes.sum()) + int(trace.op_columns.workspace.max(initial=0))
