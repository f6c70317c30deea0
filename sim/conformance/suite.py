"""The suite: random examples that meet a policy's needs, every law on each, and a report."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from sim.arguments import explained
from sim.cache import cache_folder
from sim.conformance.across_processes import Ended, elsewhere, outcome_hash
from sim.conformance.causality import check_online
from sim.conformance.costs import check_costs
from sim.conformance.examples import Example, examples_for, for_each, on_its_own
from sim.conformance.memory import check_capacity, check_carried, check_outcome
from sim.conformance.optimality import check_optimal, is_compared
from sim.conformance.order import check_ops, check_order, check_tiling
from sim.conformance.random_platforms import toml_of
from sim.conformance.repeatability import check_repeats
from sim.conformance.replayed import LawBroken, Replayed, run_policy
from sim.conformance.traits import ENOUGH, SELDOM, Exercised
from sim.conformance.tried import tried
from sim.conformance.unlimited import check_unlimited
from sim.conformance.untouched import watched
from sim.conformance.values import check_values
from sim.errors import PolicyError
from sim.limits import SECONDS, TooLong, limited
from sim.policies import parameters_of
from sim.policies.base import Policy
from sim.policies.composition import Composition, does_nothing
from sim.trace.io import save

CHECKS: Mapping[str, Callable[[Replayed], None]] = {
    "capacity": check_capacity,
    "values": check_values,
    "ops": check_ops,
    "order": check_order,
    "tiling": check_tiling,
    "outcome": check_outcome,
    "repeats": check_repeats,
    "optimal": check_optimal,
    "carried": check_carried,
    "online": check_online,
    "unlimited": check_unlimited,
    "costs": check_costs,
}
"""The laws by name, in order of their numbers."""

APPLIES: Mapping[str, Callable[[Replayed], bool]] = {
    "outcome": lambda run: True,
    "repeats": lambda run: run.crash is None,
    "optimal": is_compared,
    "carried": lambda run: run.done and bool(run.trace.carry),
    "online": lambda run: run.done and run.plan is not None and run.plan.online is not None,
    "costs": lambda run: run.done and run.plan is not None and run.plan.trace != run.trace,
}
"""What an example needs in order to put a law to the test, where that is more than to run to its end."""

CHANCES = 3
"""Runs that need a plan of its class, and have one: of so many an optimal policy claims an optimum in one at least."""

MOST_SKIPPED = 0.75
"""The part of the examples that a policy may say it cannot be used for, beyond what it declares to need."""

ELSEWHERE = 5
"""Most examples that a second process repeats."""

ONCE_MORE = 20, 10
"""Most examples that are run once more after all others: of the first ones, and of the others, at random."""

SHRINKS = 500
"""Most examples that are tried to find a smaller one that breaks a law."""

# ---- the report --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A broken law.

    law: its name.
    sentence: the law.
    examples: how many broke it.
    text: what the smallest of them broke.
    files: that example, as a trace and a profile.
    command: the command that replays it.
    """

    law: str
    sentence: str
    examples: int
    text: str
    files: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Report:
    """The suite's report on one policy.

    policy: its name.
    seed: that of the examples.
    examples: how many were drawn.
    skipped: those that the policy refused because a need was not met.
    refused: those that did not fit, ample memory included.
    failed: those that ended in any other error.
    shares: per declared trait the fraction of examples completed in less than ample memory in which it showed.
    broken: the laws that were broken.
    notes: remarks for the reader.
    exercised: the laws that some example put to the test.
    rarely: why a declared trait seldom shows, as the policy says.
    """

    policy: str
    seed: int
    examples: int
    skipped: int
    refused: int
    failed: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    broken: tuple[Broken, ...] = ()
    notes: tuple[str, ...] = ()
    exercised: tuple[str, ...] = ()
    rarely: str = ""

    @property
    def ran(self) -> int:
        """Examples that completed."""
        return self.examples - self.skipped - self.refused - self.failed

    @property
    def passed(self) -> bool:
        """Whether every law was kept, some example completed, and no declared trait is an empty word."""
        return not self.broken and self.ran > 0 and not self.never_shown

    @property
    def never_shown(self) -> tuple[str, ...]:
        """Declared traits that showed in none of many examples, and that the policy does not call rare."""
        if self.ran < ENOUGH or self.rarely:
            return ()
        return tuple(trait for trait, share in self.shares.items() if not share)

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """Declared traits that showed in fewer than 30 % of the examples that ran in less than ample memory."""
        return tuple(trait for trait, share in self.shares.items() if share < SELDOM)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        found = dataclasses.asdict(self)
        lists = {"not_exercised": list(self.not_exercised), "never_shown": list(self.never_shown)}
        return {**found, "passed": self.passed, **lists}

    def as_text(self) -> str:
        """The report as text."""
        failed = f"{self.failed} failed, " if self.failed else ""
        lines = [
            f"{self.policy}: {'passed' if self.passed else 'FAILED'}: {self.examples} examples, {self.ran} ran, "
            f"{failed}{self.refused} did not fit, {self.skipped} skipped (needs not met); seed {self.seed}"
        ]
        broken = {entry.law: entry for entry in self.broken}
        for law, check in CHECKS.items():
            verdict = "FAIL" if law in broken else "ok" if law in self.exercised else "–"
            idle = "" if law in broken or law in self.exercised or not self.ran else " (not exercised)"
            lines.append(f"  {verdict:4}  {sentence(check)}{idle}")
            if law in broken:
                entry = broken[law]
                if self.examples:
                    lines.append(f"        broken on {entry.examples} of {self.examples} examples; on the smallest:")
                lines.append(f"        {entry.text}")
                if entry.command:
                    lines.append(f"        {entry.command}")
        if self.ran == 0:
            lines.append("  nothing ran: no law was put to the test")
        for trait, share in self.shares.items():
            mark = "  FAIL  declared, and never shown: " if trait in self.never_shown else "  "
            mark = "  not exercised: " if share < SELDOM and not mark.strip() else mark
            lines.append(f"{mark}{trait} in {share:.0%} of the examples that ran in less than ample memory")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def sentence(check: Callable[[Replayed], None]) -> str:
    """The law that a check stands for, as one sentence."""
    return (check.__doc__ or "").strip().splitlines()[0]


# ---- the run -----------------------------------------------------------------------------------


@explained
def check_policy(
    policy: Policy,
    *,
    examples: int = 50,
    seed: int = 0,
    name: str = "",
    folder: str | os.PathLike[str] | None = None,
    across_processes: bool = True,
    time_limit_s: float | None = SECONDS,
    beat: Callable[[], None] = lambda: None,
) -> Report:
    """Check that a policy keeps every law on random examples; the same arguments give the same report.

    examples: how many to draw.
    seed: that of the examples and of the policy.
    name: the name of the policy, best as `sim.policies.load` knows it, so that the commands in the report work and a
        second process can load it for law 7.
    folder: where a failing example is written, as a trace and a profile; None for the folder of caches.
    across_processes: whether law 7 uses that process.
    time_limit_s: processor time that the policy may take to plan an example and run it, None for no limit; each law
        that asks it once more gives it as much again.
    beat: called before each run and each law, so that who waits for the report sees that the check goes on.

    Raises PolicyError if `examples` is below 1.
    """
    if examples < 1:
        raise PolicyError(f"examples must be at least 1, not {examples}")
    name = name or type(policy).__name__
    asked = [(name, policy)] if across_processes else []
    replaced = watched()
    try:
        with limited(time_limit_s):
            seen, drawn = Exercised(policy), examples_for(policy)
        there = elsewhere(asked, examples=min(examples, ELSEWHERE), seed=seed, time_limit_s=time_limit_s)
    except (Ended, TooLong) as error:
        return _ended(name, seed, error)
    broken: dict[str, list[tuple[Example, str]]] = {}
    exercised: set[str] = set()
    kept: list[tuple[Example, str]] = []

    def look(example: Example) -> None:
        faults: dict[str, tuple[Example, str]] = {}
        for case in example.with_more_memory():
            beat()
            with limited(time_limit_s):
                run = run_policy(policy, case.trace, case.platform, seed=seed)
                exercised.update(law for law in CHECKS if (APPLIES[law](run) if law in APPLIES else run.done))
                seen.note_claim(run)
                for law, text in _broken_by(run, beat):
                    faults.setdefault(law, (case, text))
            if not run.refused:
                break
        if run.crash is None and not run.met_time_limit:
            kept.append((case, outcome_hash(run)))
        with limited(time_limit_s):
            if text := _called_a_need(policy, example, run, seed):
                faults.setdefault("outcome", (example, text))
        seen.add(run, ample=case is not example and case.budget == case.ample)
        for law, fault in faults.items():
            broken.setdefault(law, []).append(fault)

    try:
        for_each(drawn, look, examples, seed)
        if case := _answers_otherwise(policy, kept, seed, time_limit_s, beat):
            text = "after all other examples it does something else than before: it remembers them"
            broken.setdefault("repeats", []).append((case, text))
        differ = [text for text in (replaced(), *(answer.difference() for answer in there)) if text]
    except TooLong as error:
        return _ended(name, seed, error, seen, broken)
    found = []
    for law, cases in broken.items():
        smallest, text = _smallest(drawn, CHECKS[law], policy, examples, seed, beat) or cases[0]
        files, command = _write(smallest, policy, name, law, seed, folder)
        found.append(Broken(law, sentence(CHECKS[law]), len(cases), text, files, command))
    found += _unproven(policy, seen, {*exercised, *broken})
    found += [Broken("repeats", sentence(check_repeats), 1, text) for text in differ[:1] if "repeats" not in broken]
    return Report(
        policy=name,
        seed=seed,
        examples=seen.examples,
        skipped=seen.skipped,
        refused=seen.refused,
        failed=seen.failed,
        shares=seen.shares(),
        broken=tuple(found),
        notes=tuple(seen.notes()),
        exercised=tuple(law for law in CHECKS if law in exercised),
        rarely=policy.rarely,
    )


def _ended(
    name: str,
    seed: int,
    error: Ended | TooLong,
    seen: Exercised | None = None,
    before: Mapping[str, Sequence[tuple[Example, str]]] = MappingProxyType({}),
) -> Report:
    """The report of a check that could not go on.

    seen: of the examples before the one that was under way, if any.
    before: the laws that those broke, as `check_policy` keeps them; no example of them is made smaller.
    """
    text = str(error) if isinstance(error, Ended) else f"TooLong: {error}"
    broken = [Broken("outcome", sentence(check_outcome), 1, text)]
    broken += [
        Broken(law, sentence(CHECKS[law]), len(cases), cases[0][1]) for law, cases in before.items() if law != "outcome"
    ]
    if seen is None:
        return Report(name, seed, examples=0, skipped=0, refused=0, broken=tuple(broken))
    return Report(name, seed, seen.examples + 1, seen.skipped, seen.refused, seen.failed + 1, broken=tuple(broken))


def _broken_by(run: Replayed, beat: Callable[[], None]) -> Iterator[tuple[str, str]]:
    """The laws that a run breaks, and how."""
    for law, check in CHECKS.items():
        beat()  # each may take as long as a run
        if text := breaks(check, run):
            yield law, text


def _answers_otherwise(
    policy: Policy,
    kept: Sequence[tuple[Example, str]],
    seed: int,
    time_limit_s: float | None,
    beat: Callable[[], None],
) -> Example | None:
    """An example that has another result once all have run, when some are run once more; None for none."""
    early, late = ONCE_MORE
    first, later = kept[:early], kept[early:]
    for example, before in [*first, *random.Random(seed).sample(later, min(len(later), late))]:
        beat()
        with limited(time_limit_s):
            run = run_policy(policy, example.trace, example.platform, seed=seed)
        if not run.met_time_limit and outcome_hash(run) != before:
            return example
    return None


def _called_a_need(policy: Policy, example: Example, run: Replayed, seed: int) -> str:
    """What is wrong with a policy that says it cannot be used, and plans with more memory; "" for nothing.

    Where it, or the part of a composition that says so, then keeps everything, that has planned nothing, and may lack
    what a plan needs.
    """
    if not isinstance(run.error, PolicyError) or example.ample <= example.budget:
        return ""
    ample = run_policy(policy, example.trace, replace(example, budget=example.ample).platform, seed=seed)
    plan = ample.plan
    if not ample.done or plan is None or not (plan.actions or plan.online or plan.trace != example.trace):
        return ""
    if run.error.part and does_nothing(run.error.part, plan):
        return ""
    text = f"it cannot be used with {example.budget} B, and can with more: that is a refusal for memory"
    return f"{text}, Infeasible; it says: {run.error}"


def _unproven(policy: Policy, seen: Exercised, tried: Collection[str]) -> list[Broken]:
    """Claims that enough examples have not put to the test: an optimum, and laws kept where it can seldom be used.

    tried: the laws that some example put to the test.
    """
    found = []
    if "repeats" not in tried and seen.ran >= ENOUGH:
        text = "no example put it to the test: each plan met a limit of time"
        found.append(Broken("repeats", sentence(check_repeats), seen.ran, text))
    if policy.optimal and "optimal" not in tried and seen.ran >= ENOUGH:
        text = (
            "no example put it to the test: no plan's notes claim it (`status`), or `in_class` accepts no simple plan"
        )
        found.append(Broken("optimal", sentence(check_optimal), seen.ran, text))
    elif len(seen.claimed) >= CHANCES and not any(seen.claimed):
        where = f"in {len(seen.claimed)} runs that need a plan of its class, and have one"
        text = f"{where}, it claims no optimum"
        found.append(Broken("optimal", sentence(check_optimal), len(seen.claimed), text))
    selects = isinstance(policy, Composition) and any(part.selector for part in policy.parts)  # what few traces have
    if seen.skipped > MOST_SKIPPED * seen.examples and seen.examples >= ENOUGH and not selects:
        text = f"it can be used in {seen.examples - seen.skipped} of {seen.examples} examples; `needs` says for which"
        found.append(Broken("outcome", sentence(check_outcome), seen.skipped, f"{text}: {seen.why_skipped}"))
    return found


def breaks(check: Callable[[Replayed], None], run: Replayed) -> str:
    """How a run breaks a law, "" if it keeps it. A law that cannot read the log is broken, too."""
    try:
        check(run)
    except LawBroken as error:
        return str(error) or "broken"
    except Exception as error:
        return f"the run cannot be checked: {type(error).__name__}: {error}"
    return ""


def _smallest(
    drawn: st.SearchStrategy[Example],
    check: Callable[[Replayed], None],
    policy: Policy,
    count: int,
    first: int,
    beat: Callable[[], None],
) -> tuple[Example, str] | None:
    """Repeat the examples until the law is broken, then shrink that one. None if none breaks it this time."""
    found: list[tuple[Example, str]] = []
    tries = itertools.count(1)

    @seed(first)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(drawn)
    def until_broken(example: Example) -> None:
        if next(tries) > count + SHRINKS:
            raise TooLong("small enough")
        beat()
        with limited(SECONDS):
            for case, run in tried(policy, example, seed=first):
                text = breaks(check, run)
                if text:
                    found.append((case, text))
                    raise LawBroken(text)

    with on_its_own(), suppress(LawBroken, Flaky, TooLong):
        until_broken()
    return found[-1] if found else None


def _write(
    example: Example, policy: Policy, name: str, law: str, seed: int, given: str | os.PathLike[str] | None
) -> tuple[tuple[str, ...], str]:
    """The example as files, and the command that replays it."""
    stem = f"tiersim-check-{re.sub(r'[^A-Za-z0-9_.-]+', '_', Path(name).name)}-{law}"
    if given is None:  # one folder for the policies of all folders: another of this name has other files
        stem += f"-{hashlib.sha256(f'{Path(name).absolute()} {parameters_of(policy)}'.encode()).hexdigest()[:8]}"
    folder = cache_folder("checks") if given is None else Path(given)
    folder.mkdir(parents=True, exist_ok=True)
    trace, profile = folder / f"{stem}.jsonl", folder / f"{stem}.toml"
    save(example.trace, trace)
    profile.write_text(toml_of(example.machine), encoding="utf-8")
    words = [
        "tiersim",
        "run",
        "--trace",
        str(trace),
        "--profile",
        f"./{profile}" if folder == Path(".") else str(profile),
    ]
    words += ["--policy", name, "--budget", f"{example.budget} B", "--seed", str(seed)]
    defaults = {field.name: field.default for field in dataclasses.fields(policy)}
    for key, value in parameters_of(policy).items():
        if value != defaults[key]:
            words += ["-p", f"{key}={json.dumps(value, default=str)}"]
    return (str(trace), str(profile)), shlex.join(words)
