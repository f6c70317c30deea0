"""Why the best is the best, what would change that, and what to change where nothing fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.advice.candidates import OFFLOADED, STREAMED, lean
from sim.advice.ceiling import Ceiling
from sim.advice.goals import candidates_for
from sim.advice.question import Question
from sim.advice.state import state_of
from sim.advice.trials import Row, Trials, best, fits, setting, speed
from sim.errors import ProfileError, WorkloadError
from sim.hardware.platform import Fact
from sim.hardware.profile import load_profile, profile_names
from sim.policies import load
from sim.report.verdict import kind
from sim.units import format_bytes

NUMBER = re.compile(r"(\d+(?:\.\d+)?)(.*)", re.DOTALL)
FACTORS = (0.5, 2.0)
FLIPPED = 1.01
"""Another policy has to be faster by this factor to count as another answer."""
RIVALS = 3
UNSURE = ("assumed", "estimate")
MATTERS = ("links.", "tiers.", "engines.")
SMALLER = {
    "adamw_8bit": "AdamW with 8-bit state, which is not the same update",
    "adafactor": "Adafactor, another optimizer with a smaller state",
    "sgd": "SGD without momentum, another optimizer without state",
}
"""Optimizers of less state than AdamW, those first that are nearer to it."""
NARROWER = {"fp32": "bf16", "amp_bf16": "bf16", "mixed_bf16": "bf16", "megatron_bf16": "bf16",
            "amp_fp16": "fp16", "mixed_fp16": "fp16"}  # fmt: skip
"""Per precision one that keeps weights, gradients and state in 16 bits."""
MOST_DOUBLINGS = 12
LEANEST = (f"{STREAMED} + {OFFLOADED}", f"stronghold + {OFFLOADED}", OFFLOADED)
"""What needs the least memory, with state on the host and without; the first few others where none is a candidate."""
LEAST_TRIED = 3
BESIDE_TIME = (".nominal", ".capacity")
"""Sizes of memories; the budget is asked about by itself."""


@dataclass(frozen=True)
class Flip:
    """An assumed or estimated figure that decides.

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
    """A change of the job with which it fits.

    options: what is changed, as options of a workload; or `budget`, in bytes, or `profile`.
    text: the same in words, with what it costs.
    best: the fastest run found with it; empty for one that was not tried yet.
    """

    options: Mapping[str, Any]
    text: str
    best: Row


def flips(asked: Question, winner: Row, rows: Sequence[Row], trials: Trials) -> tuple[list[Flip], int, int]:
    """Uncertain figures of the profile which, halved or doubled, make another policy the fastest; how many were tried.

    Runs the winner and the fastest policies of the other kinds (recomputing, copying, both, neither). Figures of links
    come first, then memories, then engines, but see `_uncertain`. Returns the flips, the number of figures tried, and
    that of all.
    """
    names = [str(winner["policy"]), *_rivals(winner, rows)]
    if len(names) < 2:
        return [], 0, 0
    figures = _uncertain(asked, winner)
    rounds = [
        (each, names, {"assumed": (fact.path, fact.text, value)})
        for fact in figures
        for value in _scaled(fact.text)
        if _loads(each := replace(asked, figures={**asked.figures, fact.path: value}))
    ]
    new = [row for row in trials.run_all(rounds) if "assumed" in row]  # a figure of 0 is the same machine
    found: list[Flip] = []
    late = {row["assumed"] for row in new if row["status"] == "timed_out"}  # of these nothing is known
    new = [row for row in new if row["assumed"] not in late]
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


def _uncertain(asked: Question, winner: Row) -> list[Fact]:
    """Figures that nobody measured or published, and estimates, of what times depend on: links, memories, engines.

    Before all others those of the host's engines where they update the weights; of equal ones the assumed first.
    """
    main = asked.platform.main_engine(0).name.partition("@")[0]
    on_host = "optimizer_state" in load(str(winner["policy"])).manages

    def order(fact: Fact) -> tuple[bool, int, bool]:
        of_host = fact.path.startswith("engines.") and not fact.path.startswith(f"engines.{main}.")
        part = next(i for i, part in enumerate(MATTERS) if fact.path.startswith(part))
        return not (on_host and of_host), part, fact.standing != "assumed"

    return sorted(
        (
            fact
            for fact in asked.platform.facts
            if fact.standing in UNSURE
            and fact.path.startswith(MATTERS)
            and not fact.path.endswith(BESIDE_TIME)
            and NUMBER.fullmatch(fact.text)
        ),
        key=order,
    )


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


@dataclass(frozen=True)
class Least:
    """The least that any of the changes tried needs for one op, and more than there is.

    text: the change.
    op: the op of forward or backward that holds most.
    bytes: what it holds.
    """

    text: str
    op: str
    bytes: int


def changes(asked: Question, trials: Trials, most: int = 2) -> tuple[list[Change], Least | None]:
    """Where nothing fits: the nearest changes of the job with which something does, those first that alter the least.

    Each is tried with the candidates of the least memory, then with others that are likely to need little, and only if
    no change makes one of them fit with all others. One with which a single op still holds more than the memory is not
    run. Beside changes of the workload one of the machine: more memory.

    Returns the changes, and what the least demanding one lacks where all are of that kind.
    """
    possible: list[tuple[Question, Change]] = []
    least: Least | None = None
    for each, change in _ladder(asked):
        if not trials.left_s:
            break
        if not _is_made(each):
            continue
        op, size = each.largest_op
        if each.exceeds:
            least = Least(change.text, op, size) if least is None or size < least.bytes else least
        elif not state_of(each.trace, each.limited).exceeds_all:
            possible.append((each, change))
    for names_of in (_leanest, _lean, _others):
        found: dict[int, Change] = {}
        for i, (each, change) in _cheapest_first(possible):
            nearer = sum(_of_machine_alone(found[j]) == _of_machine_alone(change) for j in found if j < i)
            if nearer >= (1 if _of_machine_alone(change) else most) or not trials.left_s:
                continue
            if (top := best(trials.run(each, names_of(each), change=change.text))) is not None:
                found[i] = replace(change, best=top)
        if found:
            return [_faster(possible[i][0], found[i], trials) for i in _nearest(found, most)], None
    return [], None if possible else least


def _cheapest_first(possible: Sequence[tuple[Question, Change]]) -> list[tuple[int, tuple[Question, Change]]]:
    """Changes with their places in the ladder; those first whose traces take less than twice as long to run as any."""
    few = min((each.ops for each, _ in possible), default=0)
    return sorted(enumerate(possible), key=lambda item: item[1][0].ops > 2 * few)


def _of_machine_alone(change: Change) -> bool:
    """Whether a change is one of the machine, and leaves the job as it is."""
    return bool({"budget", "profile"} & {*change.options})


def _nearest(found: Mapping[int, Change], most: int) -> list[int]:
    """The places of the nearest changes of the workload, and of the nearest of the machine."""
    workload = [i for i in sorted(found) if not _of_machine_alone(found[i])]
    machine = [i for i in sorted(found) if _of_machine_alone(found[i])]
    return [*workload[:most], *machine[:1]]


def _faster(asked: Question, change: Change, trials: Trials) -> Change:
    """The same change with the fastest of those that are likely to need little memory."""
    more = trials.run(asked, _lean(asked), change=change.text)
    return replace(change, best=best([change.best, *more]) or change.best)


def _leanest(asked: Question) -> list[str]:
    every = [name for part in candidates_for(asked) for name in part]
    return [name for name in LEANEST if name in every] or lean(every)[:LEAST_TRIED]


def _lean(asked: Question) -> list[str]:
    return lean([name for part in candidates_for(asked) for name in part])


def _others(asked: Question) -> list[str]:
    every, few = [name for part in candidates_for(asked) for name in part], _lean(asked)
    return [name for name in every if name not in few]


def _is_made(asked: Question) -> bool:
    """Whether there is such a workload: no chunked loss without a loss over tokens, no 4 bits for odd widths."""
    try:
        return asked.kept is not None
    except (ProfileError, WorkloadError):
        return False


def _ladder(asked: Question) -> Iterator[tuple[Question, Change]]:
    """Changes to try, from those that compute the same to those that train something else; then more memory."""
    if not asked.is_fixed:
        for options, text in _of_batch(asked.workload["batch"]) if asked.steps else _of_workload(asked.workload):
            yield asked.changed(**options), Change(options, text, {})
    for each, options, text in _of_machine(asked):
        yield each, Change(options, text, {})


def _of_machine(asked: Question) -> Iterator[tuple[Question, dict[str, Any], str]]:
    """More memory: a larger budget where one was given, else a machine of the same name with more."""
    has, whole = asked.limited.home(0).capacity, asked.platform.home(0).capacity
    if has < whole:
        for size in sorted({min(has << k, whole) for k in range(1, MOST_DOUBLINGS)}):
            yield replace(asked, budget=size), {"budget": size}, f"a budget of {format_bytes(size)}"
    family, larger = asked.profile.partition("_")[0], list[tuple[int, str]]()
    for name in profile_names():
        if name != asked.profile and name.partition("_")[0] == family:
            size = load_profile(name).home(0).capacity
            larger += [(size, name)] if size > whole else []
    for size, name in sorted(larger):
        yield (
            replace(asked, profile=name, figures={}, budget=None),
            {"profile": name},
            (f"{name}, a machine of {format_bytes(size)}"),
        )


def _of_batch(batch: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes of what a function makes: fewer samples."""
    if batch > 2:
        yield {"batch": batch // 2}, f"{batch // 2} samples per iteration"
    if batch > 1:
        yield {"batch": 1}, "one sample per iteration"


def _of_workload(workload: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes of the workload; what computes the same is kept in those that do not."""
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
        yield {"micro_batches": batch}, f"gradients accumulated over {batch} micro-batches, which is the same update"
        if same:
            same |= {"micro_batches": batch}
            yield (
                dict(same),
                f"gradients accumulated over {batch} micro-batches and the loss in chunks, the same update",
            )
    one = {**same, **({"batch": 1, "micro_batches": 1} if batch > 1 else {})}
    if batch > 2:
        yield {**same, "batch": batch // 2, "micro_batches": batch // 2}, f"{batch // 2} samples per iteration"
    if batch > 1:
        yield dict(one), "one sample per iteration"
    optimizer = str(workload.get("optimizer", "adamw_foreach"))
    for name, text in SMALLER.items():
        if optimizer.startswith("adamw") and optimizer != name:
            yield {**same, "optimizer": name}, text
    precision = str(workload.get("precision", "amp_bf16"))
    if precision in NARROWER:
        narrow = NARROWER[precision]
        yield {**same, "precision": narrow}, f"all in {narrow}, without weights in fp32: it trains with less precision"
    shorter = [length for k in range(1, 16) if (length := sequence >> k) >= 128]
    for length in shorter:
        yield {**same, "sequence": length}, f"{length} tokens per sample"
    if workload.get("lora_rank") and workload.get("frozen_dtype") == "nf4":
        adapters: dict[str, Any] = {}
    elif workload.get("lora_rank"):
        adapters = {"frozen_dtype": "nf4"}
        yield {**same, **adapters}, "weights of 4 bits beside the adapters (QLoRA)"
    else:
        yield {**same, "lora_rank": 16}, "LoRA of rank 16: adapters alone are trained"
        adapters = {"lora_rank": 16, "frozen_dtype": "nf4"}
        yield {**same, **adapters}, "LoRA of rank 16 beside weights of 4 bits (QLoRA)"
    for length in shorter:
        yield {**one, **adapters, "sequence": length}, f"LoRA beside weights of 4 bits, one sample of {length} tokens"
    if precision in NARROWER:
        narrow = NARROWER[precision]
        for length in (sequence, *shorter):
            yield (
                {**one, **adapters, "sequence": length, "precision": narrow},
                (f"LoRA beside weights of 4 bits, all else in {narrow}, one sample of {length} tokens"),
            )


def above(row: Row, most: Ceiling) -> float:
    """The slowdown of a run against unlimited memory, as a fraction; below 0 where a policy saves time otherwise."""
    return most.speed / speed(row) - 1
