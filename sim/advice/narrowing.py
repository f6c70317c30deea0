"""The search at one batch: what each way could reach at most, then rounds of ever fewer ways.

A *way* is policies of state (one, a pair, or none) with a number of micro-batches. A few combinations of every way are
run first, without policies of state also what is likely to be the fastest, since what it reaches spares others; then
what plans quickly, all of it without policies of state and a few beside each of these; then, beside the best policies
of state and without any, what is likely to be the fastest, however long it plans; then all that is left, the quick ones
first. Some policies plan for a hundred times as long as others: a run that exceeds its round's part of the time is
stopped for now, and those that have been slow in one way wait in the others. Each round goes on with the ways whose
best so far is near the best of all, and with a few of those that nothing has fitted yet. Before each run it is asked
whether it can still win, by bounds on the speed of its way:

- without policies of state nothing is faster than everything kept in unlimited memory, with as many micro-batches;
- what only drops, recomputes and copies activations takes at least what `sim.least_time` proves for the budget;
- with policies of state nothing is faster than these policies' own plan in unlimited memory
  (`sim.advice.bench.pace_of`), nor loses less by micro-batches than everything kept does.

The first is proven but for policies whose work itself takes less time, which are tried all the same; the second is
proven. The third is an assumption: that more memory, and no second policy, make nobody slower. Online policies and
queues do not promise that. `scripts/make_advice.py` holds the choice against an exhaustive search. A run
that cannot be faster than the best found by more than `WORTH` is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.advice.candidates import BESIDE, FIRST, UNUSUAL, Space, space
from sim.advice.ceiling import ceiling, keeps_to_class
from sim.advice.question import Question
from sim.advice.state import State, state_of
from sim.advice.trials import BOUND, WORTH, Row, Trials, fits, setting, speed
from sim.advice.trials import way as way_of
from sim.analysis.summary import samples_in
from sim.policies import load

PROBES = ("", "keep_all", BESIDE[0])
"""What is combined with the policies of every way."""
FEW = 5
"""How many of those that have been the fastest are combined next with the policies of a way."""
STOPS = (1 / 64, 1 / 16, 1 / 4)
"""Parts of the search's time that a run may take in one round after the other, so that few policies that plan for long
keep none of the others from being run."""
RANKING = 0.5
"""The part of the time left that may go to how fast the combinations of what a question leaves open can be."""
FAR, NEAR = 0.6, 0.9
"""Parts of the speed of the best run that a way has to reach to be tried further, and to be tried to its end."""


@dataclass(frozen=True, eq=False)
class Way:
    """Policies of state with a number of micro-batches, and one combination of what the question leaves open.

    asked: the question with these.
    whole: the same with one micro-batch.
    base: the policies of state, "" for none.
    names: what may be tried, by what is combined with these policies ("" for nothing).
    most: samples, or iterations, per second that none of its runs exceeds.
    in_class: that of its runs that only drop, recompute and copy activations; the proven bound on these.
    """

    asked: Question
    whole: Question
    base: str
    names: Mapping[str, str]
    most: float
    in_class: float = float("inf")

    def key(self, beside: str) -> tuple[Any, ...]:
        """What tells a run of this way from those of others, see `sim.advice.trials.way`."""
        return self.names[beside], *setting_of(self.asked)


def setting_of(asked: Question) -> tuple[Any, ...]:
    """What a search may choose, as `sim.advice.trials.setting` says it of a row."""
    return setting({**asked.workload, "parallel": asked.layout})


def divisions(asked: Question) -> list[Question]:
    """The question with one micro-batch, and then with more: powers of two that divide the batch, and one sample each.

    Itself alone where their number is given, where the workload is fixed, or divided over devices, or not trained, and
    where a function makes it, which alone knows what a micro-batch is.
    """
    workload = asked.workload
    if asked.is_fixed or asked.steps or asked.parallel or workload.get("generate") or "micro_batches" in workload:
        return [asked]
    batch = workload.get("batch", 1)
    counts = {1 << k for k in range(1, batch.bit_length()) if batch % (1 << k) == 0} | ({batch} - {1})
    return [asked, *(asked.changed(micro_batches=count) for count in sorted(counts))]


def by_ceiling(variants: Sequence[Question], trials: Trials) -> list[Question]:
    """Variants of a question, that first which is the fastest with unlimited memory; those for which there is time.

    That is `RANKING` of the time left, so that some is left to run them, and one of them in any case.
    """
    if len(variants) < 2:
        return list(variants)
    speeds: dict[int, float] = {}
    ends = trials.used_s + RANKING * trials.left_s
    for i, each in enumerate(variants):
        if trials.left_s and (not speeds or trials.used_s < ends):
            speeds[i] = ceiling(each).speed
    trials.skipped_variants += len(variants) - len(speeds)
    return [variants[i] for i in sorted(speeds, key=lambda i: -speeds[i])]


class Search:
    """One search at one batch, and what it has run.

    trials: runs the candidates, and has the time.
    least: a speed that has been reached already, by other searches.
    """

    def __init__(self, asked: Question, trials: Trials, least: float = 0.0) -> None:
        self.asked = asked
        self.trials = trials
        self.least = least
        self.ran: dict[tuple[Any, ...], Row] = {}
        self._most: dict[tuple[Any, ...], float] = {}
        self.ways: list[Way] = []

    def run(self) -> list[Row]:
        """The rows of all rounds."""
        all_, ways = space(), list[Way]()
        variants = by_ceiling(self.asked.variants, self.trials)
        for each in sorted(variants, key=lambda each: each.parallel != self.asked.parallel):
            if ceiling(each).speed * (1 - WORTH) <= self.top or not self._has_time():
                continue
            state = state_of(each.trace, each.limited)
            if not state.exceeds_all:
                ways += self._first_round(each, names_within(all_, state))
        self.ways = self._near(ways, FAR)
        plain, stacked = [way for way in self.ways if not way.base], [way for way in self.ways if way.base]
        stops = [*(part * self.trials.seconds for part in STOPS), None]
        for stop_s in stops[:2]:
            self._try_all(plain, stop_s)
        self._try(stacked, {way: self._next(way, stops[0])[:FEW] for way in stacked}, stops[0])
        self._lead(plain, stacked)
        for stop_s in stops:
            self._try_all(plain, stop_s)
            near = self._near(stacked, NEAR)
            some = {way: self._next(way, stop_s)[: None if self._reaches(way, NEAR) else FEW] for way in near}
            self._try(near, some, stop_s)
        left = self._near(stacked, NEAR)
        self._try(left, {way: self._next(way, None) for way in left})
        return [*self.ran.values()]

    def _has_time(self) -> bool:
        """Whether there is time for one more combination; if not, it is noted that one was left out."""
        self.trials.skipped_variants += not self.trials.left_s
        return self.trials.left_s > 0

    def _lead(self, plain: Sequence[Way], stacked: Sequence[Way]) -> None:
        """Run what is likely to be the fastest without policies of state and beside the best, however long it plans."""
        first = [way for ways in (plain, stacked) for way in self._near(ways, NEAR)[:1]]
        first = [way for way in self._near(first, NEAR) if self._best(way)] or first
        self._try(first, dict.fromkeys(first, BESIDE))

    def _next(self, way: Way, stop_s: float | None) -> list[str]:
        """What is combined with the policies of a way next: what has not been, and may take less than some time."""
        return [
            other for other in self._order(way) if way.key(other) not in self.ran
            and (stop_s is None or self._takes_s(other) < stop_s)
        ]  # fmt: skip

    def _takes_s(self, other: str) -> float:
        """Seconds that a policy may take beside those of any way: as long as it has beside some."""
        return max(
            (self.trials.least_s(each.asked, each.names[other]) for each in self.ways if other in each.names),
            default=0.0,
        )

    def _near(self, ways: Sequence[Way], part: float) -> list[Way]:
        """Those ways that reach this part of the best run, the best first, and then those that nothing has fitted.

        Of a way of which not each kind of policy has been run, `FAR` is enough: where only what recomputes has been run
        beside policies of state, how fast it is to copy is not known.
        """
        found = [
            way for way in ways
            if not self._best(way) or self._reaches(way, part if self._is_judged(way) else min(part, FAR))
        ]  # fmt: skip
        return sorted(found, key=lambda way: (-self._best(way), -way.most))

    def _reaches(self, way: Way, part: float) -> bool:
        """Whether something of a way fits, and reaches this part of the best run."""
        return self._best(way) >= max(part * self.top, sys.float_info.min)

    def _is_judged(self, way: Way) -> bool:
        """Whether all of `BESIDE` have been run in a way."""
        return all(way.key(other) in self.ran for other in BESIDE if other in way.names)

    def _try_all(self, ways: Sequence[Way], stop_s: float | None) -> None:
        """Run all of some ways; what the first of them shows decides the order in the others."""
        for some in (ways[:1], ways[1:]):
            self._try(some, {way: self._order(way) for way in some}, stop_s)

    @property
    def top(self) -> float:
        """The speed of the fastest run so far."""
        return max(self.least, *(speed(row) for row in self.ran.values() if fits(row)), 0.0)

    def _first_round(self, whole: Question, names: Mapping[str, Mapping[str, str]]) -> list[Way]:
        """All ways of one combination of what is open: none with more micro-batches than could still be faster."""
        ways: list[Way] = []
        paces: dict[str, float] = {}
        most = ceiling(whole).speed
        for asked in divisions(whole):
            kept = ceiling(asked).speed
            if kept * (1 - WORTH) <= self.top or not self._has_time():
                break
            bare = [Way(asked, whole, "", names[""], kept, _in_class(asked))] if names.get("") else []
            self._try(bare, dict.fromkeys(bare, PROBES))
            ways += bare
            if kept * (1 - WORTH) <= self.top:
                break
            fitting = [way for way in bare if self._best(way)]
            if fitting and not any(map(self._best, ways[:-1])):  # what is found here spares others
                self._try(fitting, dict.fromkeys(fitting, BESIDE), STOPS[-1] * self.trials.seconds)
            if not paces:
                paces = self._paces(whole, [base for base in names if base])
            share = kept / most if most else 1.0
            stacked = [Way(asked, whole, base, names[base], paces[base] * share) for base in paces]
            stacked.sort(key=lambda way: way.most, reverse=True)
            self._try(stacked, dict.fromkeys(stacked, PROBES))
            ways += stacked
        return ways

    def _paces(self, whole: Question, bases: Sequence[str]) -> dict[str, float]:
        """The speed that policies of state have at most beside others, without those that do not apply.

        A pair takes at least the time of either of its policies.
        """
        alone = [base for base in bases if "+" not in base]
        paces: dict[str, float] = {}
        for row in self.trials.run(whole, alone, task={"pace": True}, apart=True, pace=True):
            if fits(row):
                paces[str(row["policy"])] = speed(row)
            elif row["status"] == "timed_out":  # nothing is known of it
                paces[str(row["policy"])] = float("inf")
        for base in bases:
            parts = [part.partition("(")[0] for part in base.split(" + ")]
            if base not in alone and all(part in paces for part in parts):
                paces[base] = min(paces[part] for part in parts)
        return paces

    def _try(self, ways: Sequence[Way], beside: Mapping[Way, Sequence[str]], stop_s: float | None = None) -> None:
        """Run what is to be combined with each of some ways and may still win: of each way one, then the next of each.

        stop_s: as for `Trials.each`; what has taken so long in one way is not run in others.
        """
        self._most |= {way.key(other): self._bound(way, other) for way in ways for other in way.names}
        for row in self.trials.each(
            [(way.asked, [way.names[other] for other in beside[way] if other in way.names], {}) for way in ways],
            wanted=lambda labels: (
                self._most[way_of(labels)] * (1 - WORTH) > self.top
                and (stop_s is None or self._takes_s(str(labels["policy"]).rpartition(" + ")[2]) < stop_s)
            ),
            task=BOUND,
            stop_s=stop_s,
        ):
            self.ran[way_of(row)] = row

    def _bound(self, way: Way, other: str) -> float:
        """The most that a run may reach; what takes less time itself may exceed it, and is tried for that once."""
        if way.asked.exceeds and not load(way.names[other]).rewrites:
            return 0.0
        if not way.base and keeps_to_class(other):
            return min(way.most, way.in_class)
        if other and load(other).saves:
            alone = self.ran.get((other, *setting_of(way.whole)))
            if alone is None or not alone.get("unlimited_ns"):
                return float("inf") if way.base == "" and way.asked is way.whole else way.most
            freed: float = speed(alone) * alone["makespan_ns"] / alone["unlimited_ns"]
            return way.most * max(1.0, freed / ceiling(way.whole).speed)
        return way.most

    def _best(self, way: Way) -> float:
        """The speed of the fastest run of a way so far."""
        rows = (self.ran.get(way.key(other)) for other in way.names)
        return max((speed(row) for row in rows if row is not None and fits(row)), default=0.0)

    def _order(self, way: Way) -> list[str]:
        """What is combined with the policies of a way: first what comes near the best of some way, or is likely to."""
        merit = dict.fromkeys(BESIDE, 1.0)
        for each in self.ways:
            best = self._best(each)
            for other in each.names if best else ():
                row = self.ran.get(each.key(other))
                if row is not None and fits(row):
                    merit[other] = max(speed(row) / best, merit.get(other, 0.0))
        usual = [*dict.fromkeys((*BESIDE, *FIRST, *way.names))]
        return sorted(
            way.names,
            key=lambda other: (-merit.get(other, 0.0), bool(other and UNUSUAL & load(other).needs), usual.index(other)),
        )


def _in_class(asked: Question) -> float:
    """The most samples, or iterations, per second of plans that only drop, recompute and copy activations."""
    if asked.bound is None:
        return float("inf")
    samples = samples_in(asked.trace.meta) or 1
    return 0.0 if asked.bound.makespan_ns is None else samples * 1e9 / max(1, asked.bound.makespan_ns)


def names_within(all_: Space, state: State) -> dict[str, dict[str, str]]:
    """By policies of state, what may be tried, by what is combined with them; nothing that leaves more than fits."""
    found: dict[str, dict[str, str]] = {}
    roles = {"": frozenset[str](), **all_.roles}
    for base in ("", *all_.bases):
        for other in (*([""] if base else []), *all_.beside(base)):
            if state.left(roles[base] | roles[other]) <= state.capacity:
                found.setdefault(base, {})[other] = " + ".join(filter(None, (base, other)))
    return found
