"""Why the best is the best, what would change that, and what to change where nothing fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.advice.candidates import lean
from sim.advice.ceiling import Ceiling
from sim.advice.goals import candidates_for
from sim.advice.question import Question
from sim.advice.trials import Row, Trials, best, fits, setting, speed
from sim.errors import ProfileError, WorkloadError
from sim.hardware.profile import load_profile
from sim.report.verdict import kind

NUMBER = re.compile(r"(\d+(?:\.\d+)?)(.*)", re.DOTALL)
FACTORS = (0.5, 2.0)
FLIPPED = 1.01
"""Another policy has to be faster by this factor to count as another answer."""
RIVALS = 3
MATTERS = ("links.", "tiers.", "engines.")
BESIDE_TIME = (".nominal", ".capacity")
"""Sizes of memories; the budget is asked about by itself."""


@dataclass(frozen=True)
class Flip:
    """An assumed figure that decides.

    path, text: the figure as the profile has it.
    value: another value of it, with which `policy` is the fastest.
    lead: how much faster it is then, as a fraction.
    """

    path: str
    text: str
    value: str
    policy: str
    lead: float


@dataclass(frozen=True)
class Change:
    """A change of the workload with which the job fits.

    options: what is changed, as options of a workload.
    text: the same in words, with what it costs.
    best: the fastest run found with it.
    """

    options: Mapping[str, Any]
    text: str
    best: Row


def flips(asked: Question, winner: Row, rows: Sequence[Row], trials: Trials) -> tuple[list[Flip], int, int]:
    """Assumed figures of the profile which, halved or doubled, make another policy the fastest; how many were tried.

    Runs the winner and the fastest policies of the other kinds (recomputing, copying, both, neither). Figures of links
    come first, then memories, then engines. Returns the flips, the number of figures tried, and that of all.
    """
    names = [str(winner["policy"]), *_rivals(winner, rows)]
    if len(names) < 2:
        return [], 0, 0
    figures = sorted(
        (
            fact
            for fact in asked.platform.assumed
            if fact.path.startswith(MATTERS) and not fact.path.endswith(BESIDE_TIME) and NUMBER.fullmatch(fact.text)
        ),
        key=lambda fact: next(i for i, part in enumerate(MATTERS) if fact.path.startswith(part)),
    )
    rounds = [
        (each, names, {"assumed": (fact.path, fact.text, value)})
        for fact in figures
        for value in _scaled(fact.text)
        if _loads(each := replace(asked, figures={**asked.figures, fact.path: value}))
    ]
    new = trials.run_all(rounds)
    found: list[Flip] = []
    for key in dict.fromkeys(row["assumed"] for row in new):
        these = [row for row in new if row["assumed"] == key]
        top, own = best(these), next((row for row in these if row["policy"] == winner["policy"]), None)
        if len(these) < len(names) or top is None or own is None or top["policy"] == winner["policy"]:
            continue
        lead = speed(top) / speed(own) - 1 if fits(own) else float("inf")
        if lead > FLIPPED - 1:
            path, text, value = key
            found.append(Flip(path, text, value, str(top["policy"]), lead))
    tried = len({row["assumed"][0] for row in new})
    return found, tried, len(figures)


def _scaled(text: str) -> Iterator[str]:
    match = NUMBER.fullmatch(text)
    assert match is not None
    for factor in FACTORS:
        yield f"{float(match[1]) * factor:.12g}{match[2]}"


def _loads(asked: Question) -> bool:
    try:
        load_profile(asked.profile, overrides=asked.figures)
    except ProfileError:  # an efficiency above 1
        return False
    return True


def _rivals(winner: Row, rows: Sequence[Row]) -> list[str]:
    """The fastest policy of each other kind with the winner's batch and setting, and the runner-up of its own."""
    same = [row for row in rows if fits(row) and row.get("batch") == winner.get("batch") and row is not winner
            and setting(row) == setting(winner)]  # fmt: skip
    ranked = sorted(same, key=speed, reverse=True)
    firsts: dict[str, str] = {}
    for row in ranked:
        firsts.setdefault(kind(row), str(row["policy"]))
    return [name for name in dict.fromkeys(firsts.values()) if name != winner["policy"]][:RIVALS]


def changes(asked: Question, trials: Trials, most: int = 2) -> list[Change]:
    """Where nothing fits: the nearest changes of the workload with which it does, those first that alter the least.

    Each is tried with the candidates that are likely to need the least memory, and only if no change makes one of them
    fit with all others.
    """
    for rest in (False, True):
        found: list[Change] = []
        for options, text in _ladder(asked.workload):
            if len(found) == most or not trials.left_s:
                break
            each = asked.changed(**options)
            if not _is_made(each):
                continue
            names = [name for part in candidates_for(each) for name in part]
            few = lean(names)
            top = best(trials.run(each, [name for name in names if (name not in few) == rest], change=text))
            if top is not None:
                found.append(Change(options, text, top))
        if found:
            return found
    return []


def _is_made(asked: Question) -> bool:
    """Whether there is such a workload: no chunked loss without a loss over tokens, no 4 bits for odd widths."""
    try:
        return bool(asked.ops)
    except WorkloadError:
        return False


def _ladder(workload: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes to try, from those that compute the same to those that train something else."""
    if "trace" in workload:
        return
    batch, sequence = workload.get("batch", 1), workload.get("sequence", 1024)
    same: dict[str, Any] = {}
    if workload.get("generate"):  # nothing is trained
        if batch > 1:
            yield {"batch": 1, "micro_batches": 1}, "one sample at a time"
        return
    if workload.get("loss", "torch") != "chunked":
        same = {"loss": "chunked"}
        yield dict(same), "the loss in chunks, which computes the same"
    if batch > 1 and workload.get("micro_batches", 1) < batch:
        same |= {"micro_batches": batch}
        yield dict(same), f"gradients accumulated over {batch} micro-batches, which is the same update"
    if batch > 1:
        yield {"batch": 1}, "one sample per iteration"
    if (
        str(workload.get("optimizer", "adamw_foreach")).startswith("adamw")
        and workload.get("optimizer") != "adamw_8bit"
    ):
        yield {**same, "optimizer": "adamw_8bit"}, "AdamW with 8-bit state, which is not the same update"
    while sequence > 256:
        sequence //= 2
        yield {**same, "sequence": sequence}, f"{sequence} tokens per sample"
    adapters: dict[str, Any] = {}
    if not workload.get("lora_rank"):
        adapters = {"lora_rank": 16}
        yield {**same, **adapters}, "LoRA of rank 16: adapters alone are trained"
    if workload.get("frozen_dtype") != "nf4":
        yield {**same, **adapters, "frozen_dtype": "nf4"}, "LoRA of rank 16 beside weights of 4 bits (QLoRA)"


def above(row: Row, most: Ceiling) -> float:
    """The slowdown of a run against unlimited memory, as a fraction; below 0 where a policy saves time otherwise."""
    return most.speed / speed(row) - 1
