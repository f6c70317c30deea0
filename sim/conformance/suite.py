"""The suite: random examples that meet a policy's needs, every law on each, and a report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sim.conformance.again import check_online, check_optimal, check_repeats
from sim.conformance.machines import Document, machines, platform_of, toml_of
from sim.conformance.memory import check_capacity, check_carried, check_outcome
from sim.conformance.networks import Digits, models, networks
from sim.conformance.order import check_ops, check_order, check_tiling
from sim.conformance.replayed import LawBroken, Replayed, run_policy
from sim.conformance.traits import Exercised
from sim.conformance.values import check_values
from sim.errors import PolicyError
from sim.experiment import reference_run
from sim.hardware.platform import Platform
from sim.log import CAUSE, EventLog
from sim.policies.base import Policy
from sim.trace.graph import Trace
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
}
"""The laws by name, in order of their numbers."""

SPARE = (100, 60, 45, 30, 15, 70, 5, 50, 20, 0, 80, -10)
"""Budgets, as a percentage of the way from what the neediest op takes to the peak when all is kept."""


# ---- examples ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A trace, a machine as a document, and a budget in bytes."""

    trace: Trace
    machine: Document
    budget: int

    @property
    def platform(self) -> Platform:
        """The machine with that budget."""
        return platform_of(self.machine, self.budget)


@st.composite
def situations(draw: st.DrawFn, needs: frozenset[str] = frozenset(), *, exact: bool = False, real: int = 1) -> Example:
    """A trace and a machine that meet a policy's needs, and a budget from ample to too little.

    real: of ten traces, how many are of small models. exact: no allocator with addresses.
    """
    digits = Digits(draw(st.integers(0, 6 * 8 * 8 * 8 * len(SPARE) - 1)))
    one = digits.pick((True,) * 5 + (False,)) or bool(needs & {"chain", "history"})
    cpu = digits.pick((False, True, False, False, True, False, False, False)) or "cpu" in needs
    host = digits.pick((True,) * 7 + (False,)) or bool(needs & {"host", "cpu"})
    spare, tight = digits.pick(SPARE), digits.pick((0, 0, 0, 0, 0, 10, 50, 100))
    machine = draw(machines(devices=1 if one else 2, host=host, cpu=cpu, exact=exact))
    unit = 512 if machine["tiers"]["hbm"]["allocator"] == "caching" else 1
    kind = draw(st.integers(0, 9))
    if kind >= 10 - real:
        trace = draw(models())
    else:
        longest = 18 if needs & {"chain", "layers"} else 12
        trace = draw(networks(needs=needs, devices=1 if one else 2, cpu=cpu, unit=unit, longest=longest))
    log = reference_run(trace, platform_of(machine))
    if tight and host:
        # a host that holds what lies there from the start, and some percent of what the device needs
        most = {tier.name: peak for tier, peak in zip(log.platform.tiers, _peaks(log))}
        left = most["host"] + max(most.values()) * tight // 100
        machine = {
            **machine,
            "tiers": {**machine["tiers"], "host": {**machine["tiers"]["host"], "capacity": f"{max(left, 1)} B"}},
        }
    top, floor = _peak_and_floor(log)
    return Example(trace, machine, max(1, floor + (top - floor) * spare // 100))


def _peaks(log: EventLog) -> list[int]:
    """The most bytes in use, per tier."""
    rows = log.changes
    return [int(np.cumsum(rows[rows[:, 1] == i, 2]).max(initial=0)) for i in range(len(log.platform.tiers))]


def _peak_and_floor(log: EventLog) -> tuple[int, int]:
    """Bytes in a device's memory when all is kept, and what is there from the start with the neediest op beside it."""
    platform, trace, peaks = log.platform, log.trace, _peaks(log)
    size, top, floor = trace.tensor_columns.bytes, 0, 0
    for i, tier in enumerate(platform.tiers):
        if tier.device < 0:
            continue
        top = max(top, peaks[i])
        rows = log.changes[(log.changes[:, 1] == i) & (log.changes[:, 5] == CAUSE["placed"])]
        fixed = set(rows[:, 3].tolist())
        need = 0
        for op in trace.ops:
            if platform.home(op.device).name == tier.name:
                used = sum(int(size[t]) for t in {*op.reads, *op.writes} if t not in fixed)
                need = max(need, op.workspace + used)
        floor = max(floor, int(rows[:, 2].sum()) + need)
    return top, min(top, floor)


# ---- the report --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A law that was broken: on how many examples, and on the smallest one found, in files that can be run."""

    law: str
    sentence: str
    examples: int
    text: str
    files: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Report:
    """What the suite found of one policy.

    examples: how many were drawn; skipped: of them, those that the policy refused because a need was not
    met; refused: those that did not fit. shares: of those that ran, the fraction in which each declared
    trait really showed. broken: laws that were not kept. notes: what a reader should know.
    """

    policy: str
    seed: int
    examples: int
    skipped: int
    refused: int
    shares: Mapping[str, float] = field(default_factory=dict)
    broken: tuple[Broken, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every law was kept, and there was something to keep it on."""
        return not self.broken and self.examples > self.skipped + self.refused

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """Declared traits that showed in fewer than 30 % of the examples that ran."""
        return tuple(trait for trait, share in self.shares.items() if share < 0.3)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        found = dataclasses.asdict(self)
        return {**found, "passed": self.passed, "not_exercised": list(self.not_exercised)}

    def as_text(self) -> str:
        """The report as lines to read."""
        ran = self.examples - self.skipped - self.refused
        lines = [
            f"{self.policy}: {'passed' if self.passed else 'FAILED'}: {self.examples} examples, {ran} ran, "
            f"{self.refused} did not fit, {self.skipped} skipped (needs not met); seed {self.seed}"
        ]
        broken = {entry.law: entry for entry in self.broken}
        for law, check in CHECKS.items():
            sentence = _sentence(check)
            lines.append(f"  {'FAIL' if law in broken else 'ok':4}  {sentence}")
            if law in broken:
                entry = broken[law]
                lines.append(f"        broken on {entry.examples} of {self.examples} examples; on the smallest:")
                lines.append(f"        {entry.text}")
                if entry.command:
                    lines.append(f"        {entry.command}")
        if ran == 0:
            lines.append("  nothing ran: no law was put to the test")
        for trait, share in self.shares.items():
            mark = "  not exercised: " if share < 0.3 else "  "
            lines.append(f"{mark}{trait} in {share:.0%} of the examples that ran")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _sentence(check: Callable[[Replayed], None]) -> str:
    return (check.__doc__ or "").strip().splitlines()[0]


# ---- the run -----------------------------------------------------------------------------------


def check_policy(
    policy: Policy, *, examples: int = 50, seed: int = 0, name: str = "", folder: str | os.PathLike[str] = "."
) -> Report:
    """Hold a policy to every law on random examples; the same arguments give the same report.

    examples: how many to draw. name: what to call the policy, best as `sim.policies.load` knows it, so that
    the commands in the report work and a second process can be asked for law 7. folder: where a failing
    example is written, as a trace and a profile.
    """
    name = name or type(policy).__name__
    seen = Exercised(policy)
    broken: dict[str, int] = {}
    own: list[Example] = []

    def look(example: Example) -> None:
        run = run_policy(policy, example.trace, example.platform, seed=seed)
        seen.add(run)
        own.append(example)
        for law, check in CHECKS.items():
            if _breaks(check, run):
                broken[law] = broken.get(law, 0) + 1

    drawn = _strategy(policy)
    _for_each(drawn, look, examples, seed)
    found = []
    for law, count in broken.items():
        smallest, text = _smallest(drawn, CHECKS[law], policy, examples, seed)
        files, command = _write(smallest, policy, name, law, seed, Path(folder))
        found.append(Broken(law, _sentence(CHECKS[law]), count, text, files, command))
    return Report(
        policy=name,
        seed=seed,
        examples=seen.examples,
        skipped=seen.skipped,
        refused=seen.refused,
        shares=seen.shares(),
        broken=tuple(found),
        notes=tuple(seen.notes()),
    )


def _strategy(policy: Policy) -> st.SearchStrategy[Example]:
    return situations(policy.needs)


def _breaks(check: Callable[[Replayed], None], run: Replayed) -> str:
    """What a law says against a run, "" for nothing. A law that cannot read a log is broken, too."""
    try:
        check(run)
    except LawBroken as error:
        return str(error) or "broken"
    except PolicyError:
        return ""
    return ""


def _for_each(drawn: st.SearchStrategy[Example], look: Callable[[Example], None], count: int, first: int) -> None:
    @seed(first)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def all_of_them(example: Example) -> None:
        look(example)

    with _alone():
        all_of_them()


def _smallest(
    drawn: st.SearchStrategy[Example], check: Callable[[Replayed], None], policy: Policy, count: int, first: int
) -> tuple[Example, str]:
    """The same examples again, until the law is broken; then smaller ones."""
    found: list[tuple[Example, str]] = []

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
        text = _breaks(check, run_policy(policy, example.trace, example.platform, seed=first))
        if text:
            found.append((example, text))
            raise LawBroken(text)

    with _alone():
        try:
            until_broken()
        except LawBroken:
            pass
    return found[-1]


@contextmanager
def _alone() -> Iterator[None]:
    """Keep hypothesis from reading constants out of the user's files: examples would change with them.

    It would also leave a folder of what it read where the user works.
    """
    from hypothesis.internal.conjecture import providers

    own = getattr(providers, "_get_local_constants", None)
    if own is None:
        yield
        return
    providers._get_local_constants = providers.Constants  # type: ignore[attr-defined]
    try:
        yield
    finally:
        providers._get_local_constants = own  # type: ignore[attr-defined]


def _write(
    example: Example, policy: Policy, name: str, law: str, seed: int, folder: Path
) -> tuple[tuple[str, ...], str]:
    """The example as files, and the command that replays it."""
    stem = f"tiersim-check-{re.sub(r'[^A-Za-z0-9_.-]+', '_', Path(name).name)}-{law}"
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
    for entry in dataclasses.fields(policy):
        value = getattr(policy, entry.name)
        if value != entry.default:
            words += ["-p", f"{entry.name}={json.dumps(value, default=str)}"]
    return (str(trace), str(profile)), shlex.join(words)
