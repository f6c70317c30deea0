"""Every error that a user of the simulator can encounter.

    TiersimError
    ├── UnitError        a quantity without a unit, or with the wrong one
    ├── ProfileError     a hardware profile that cannot be read
    ├── TraceError       a trace that cannot be computed: a read before the write, two producers, …
    ├── WorkloadError    a model configuration without a needed key, an unknown model, …
    ├── LayoutError      a layout over devices that a trace or a machine has no place for
    ├── PolicyError      an unknown policy or parameter, or a trace that does not meet a policy's needs
    ├── PolicyFailed     a fault in a policy's own code; the exception it raised is the cause
    ├── IllegalPlan      an action that cannot be carried out; names the op and the tensor
    ├── Deadlock         ops are left, but nothing can happen any more
    ├── Infeasible       a planner proved that no plan of its class fits the budget
    ├── Thrashing        a run that recomputes more than the limit allows
    └── OutOfMemory      a run that needs more than a tier's capacity

The last three are answers rather than mistakes: `simulate` raises them, `compare` turns them into a row.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class TiersimError(Exception):
    """Base class of all errors of this package; the message is one line."""


class Caution(UserWarning):
    """Something that keeps nothing from going on, but that a person should know; on the command line, a line."""


class UnitError(TiersimError, ValueError):
    """A quantity that cannot be read in the required unit."""


class ProfileError(TiersimError):
    """A hardware profile with one or more mistakes.

    problems: one line per mistake.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class TraceError(TiersimError):
    """A trace that cannot be computed."""


class WorkloadError(TiersimError):
    """A workload that cannot be built from the given configuration."""


class LayoutError(TiersimError):
    """A layout over devices that a trace or a machine has no place for; names the key and the nearest valid value."""


class PolicyError(TiersimError):
    """An unknown policy, a wrong parameter, or a trace that does not meet a policy's needs.

    part: the part of a composition that says so of itself, as it is written; "" for none.
    """

    part: str = ""


class PolicyFailed(TiersimError):
    """A fault in a policy's own code: it raised an exception other than these, or did not return a plan."""


class IllegalPlan(TiersimError):
    """An action or a read that cannot be carried out under this plan."""


class Deadlock(TiersimError):
    """No event is left, but some op has not run.

    waiters: who waits for what, one sentence each.
    """

    def __init__(self, message: str, waiters: Iterable[str] = ()) -> None:
        self.waiters = tuple(waiters)
        super().__init__("; ".join((message, *self.waiters)))


class Infeasible(TiersimError):
    """No plan of this policy's class fits.

    floor_bytes: the smallest budget known to fit, None if unknown.
    log: the `EventLog` of the run until then, None if nothing ran.
    plan: the `Plan` that ran, None if nothing did.
    attempt: the `Result` of what ran until then, None if nothing did.
    proven: whether it is a claim about all plans of the class; a policy that has only found none sets it to False.
    """

    plan: Any = None
    attempt: Any = None
    proven: bool = True

    def __init__(self, message: str, *, floor_bytes: int | None = None, log: Any = None) -> None:
        self.floor_bytes = floor_bytes
        self.log = log
        super().__init__(message)

    def attach(self, log: Any) -> None:
        """What ran until then."""
        self.log = log


class Thrashing(Infeasible):
    """A run that spends more than `limit` times the ideal time of its trace on recomputation.

    recompute_ns: time of recomputation when the limit was exceeded.
    ideal_ns: time of every op run once, one after the other.
    limit: the multiple of `ideal_ns` that was allowed.
    log: the run until then.
    """

    def __init__(
        self,
        message: str,
        *,
        recompute_ns: int = 0,
        ideal_ns: int = 0,
        limit: float = 0,
        floor_bytes: int | None = None,
        log: Any = None,
    ) -> None:
        self.recompute_ns = recompute_ns
        self.ideal_ns = ideal_ns
        self.limit = limit
        super().__init__(message, floor_bytes=floor_bytes, log=log)


class OutOfMemory(Infeasible):
    """A request for memory that did not fit after everything evictable had left.

    tier: name of the tier.
    need_bytes: size of the request.
    free_bytes: free space in the tier.
    largest_hole_bytes: the largest free block of the tier.
    holders: (tensor name, bytes, why it stays) of the largest residents.
    full: that tier, and the shared tiers that had too little free space to take as many bytes.
    log: the run until then.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str = "",
        need_bytes: int = 0,
        free_bytes: int = 0,
        largest_hole_bytes: int = 0,
        holders: tuple[tuple[str, int, str], ...] = (),
        full: tuple[str, ...] = (),
        floor_bytes: int | None = None,
        log: Any = None,
    ) -> None:
        self.tier = tier
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes
        self.largest_hole_bytes = largest_hole_bytes
        self.holders = holders
        self.full = full or ((tier,) if tier else ())
        super().__init__(message, floor_bytes=floor_bytes, log=log)


def refusal_kind(error: TiersimError) -> str:
    """The kind of a refusal, for a row of a table: `out_of_memory`, `thrashing`, `deadlock` or `infeasible`."""
    kinds = {OutOfMemory: "out_of_memory", Thrashing: "thrashing", Deadlock: "deadlock"}
    return kinds.get(type(error), "infeasible")


BEGAN = ("out_of_memory", "thrashing")
"""Kinds of refusals of runs that had begun."""


def refusal_record(error: TiersimError) -> dict[str, Any]:
    """A refusal as keys of a row: its kind and message; where memory was short, what was asked for and what held it."""
    record: dict[str, Any] = {"refusal": refusal_kind(error), "error": str(error)}
    if isinstance(error, OutOfMemory):
        record["holders"] = [list(holder) for holder in error.holders]
        record |= {"full": list(error.full), "need_bytes": error.need_bytes, "free_bytes": error.free_bytes}
    return record


def near(wrong: str, valid: Iterable[str], order: Callable[[str], Any] | None = None) -> str:
    """A hint to append to a message: the nearest valid spellings, or a list of valid ones.

    order: sorts names that a wrong one may stand for alike; default: the alphabet.

    >>> near("gtp2", ["gpt2", "bert-base"])
    " (did you mean 'gpt2'?)"
    >>> near("a100", ["a100_40_pcie", "a100_80_sxm", "p100"])
    " (did you mean 'a100_40_pcie' or 'a100_80_sxm'?)"
    """
    choices = sorted(valid)
    close = nearest(wrong, choices, order)
    if close:
        *first, last = map(repr, close)
        return f" (did you mean {', '.join(first)}{' or ' if first else ''}{last}?)"
    if not choices:
        return ""
    shown = ", ".join(repr(choice) for choice in choices[:8])
    if len(choices) > 8:
        return f" (valid: {shown}, …)"
    if len(choices) == 1:
        return f" (valid: {shown})"
    alike = difflib.get_close_matches(wrong[:LONGEST].casefold(), choices, n=1)  # another number counts here
    return f" (valid: {shown}{f'; nearest: {alike[0]!r}' if alike else ''})"


def closest(value: object, least: float, most: float = math.inf, *, whole: bool = True) -> str:
    """A hint to append to a message about a number: the nearest valid one, "" where the value is not a finite number.

    value: what was given; text may be a number, too.
    least, most: of valid numbers.
    whole: whether these are whole.

    >>> closest(0, 1)
    '; nearest: 1'
    >>> closest("1024.5", 1), closest(1.5, 0, 0.99, whole=False), closest("much", 1)
    ('; nearest: 1024', '; nearest: 0.99', '')
    """
    try:
        number = min(max(float(value), least), most)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return ""
    if isinstance(value, bool) or not math.isfinite(number):
        return ""
    return f"; nearest: {round(number) if whole else f'{number:g}'}"


def closest_name(wrong: str, valid: Iterable[str]) -> str:
    """The same of a name: a hint to append to a message that lists the valid ones, "" where none is near.

    >>> closest_name("gif", ["png", "svg", "pdf"])
    '; nearest: png'
    """
    return "".join(f"; nearest: {name}" for name in nearest(wrong, valid)[:1])


def closest_divisor(value: int, count: int) -> str:
    """A hint to append to a message about a number that does not divide a count: the nearest that does.

    >>> closest_divisor(3, 4)
    '; nearest: 2'
    """
    start = min(value, count)
    found = next(n for away in range(count) for n in (start - away, start + away) if n > 0 and count % n == 0)
    return f"; nearest: {found}"


NEAREST = 3
"""The most names that a hint offers."""

SHORTEST = 3
"""Characters of a word that is compared by itself."""

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("adam", "adamw"), ("adamw_foreach", "adamw_fused")),
    **dict.fromkeys(("float16", "half"), ("fp16",)),
    **dict.fromkeys(("bfloat16", "brain_float"), ("bf16",)),
    **dict.fromkeys(("float32", "float", "single"), ("fp32",)),
    **dict.fromkeys(("none", "baseline", "nothing", "no_policy"), ("keep_all",)),
    **dict.fromkeys(
        (
            *("checkpoint", "checkpoints", "checkpointing", "recompute", "recomputation", "remat", "rematerialization"),
            *("ckpt", "gradient_checkpointing", "activation_checkpointing", "recompute_activations"),
        ),
        ("full_recompute", "selective_recompute"),
    ),
    **dict.fromkeys(("offload", "offloading", "cpu_offload"), ("offload_activations", "zero_offload")),
    **dict.fromkeys(("nvme", "nvme_offload", "ssd_offload"), ("zero_infinity",)),
    **dict.fromkeys(("deepspeed", "zero"), ("zero_offload", "zero_infinity")),
    **dict.fromkeys(("time", "timeout", "time-limit"), ("seconds", "time-limit")),
    **dict.fromkeys(("context", "seq-len", "seqlen", "context-length", "max-length"), ("seq",)),
    **dict.fromkeys(("bs", "batchsize"), ("batch",)),
    **dict.fromkeys(("machine", "gpu", "hardware"), ("profile",)),
    "device": ("devices", "profile"),
    **dict.fromkeys(("store", "stores", "database"), ("results",)),
    **dict.fromkeys(("simulate", "simulation", "train"), ("run",)),
    **dict.fromkeys(("benchmark", "bench", "tradeoff", "pareto"), ("compare",)),
    **dict.fromkeys(("recommend", "suggest", "plan"), ("advise",)),
    **dict.fromkeys(("tensor-parallel", "tensor-parallel-size", "tensor-model-parallel-size", "tp-size"), ("tp",)),
    **dict.fromkeys(("pipeline-parallel", "pipeline-parallel-size", "pipeline-model-parallel-size"), ("pp",)),
    **dict.fromkeys(("data-parallel", "data-parallel-size", "replicas"), ("dp",)),
    **dict.fromkeys(("context-parallel", "context-parallel-size"), ("cp",)),
    **dict.fromkeys(("expert-parallel", "expert-parallel-size", "expert-model-parallel-size"), ("ep",)),
    **dict.fromkeys(("gradient-accumulation-steps", "gradient-accumulation", "grad-accum"), ("micro-batches",)),
    **dict.fromkeys(("strategy", "algorithm"), ("policy", "policies")),
    **dict.fromkeys(("config", "workload", "network"), ("model",)),
    "platform": ("profile",),
    **dict.fromkeys(("gpus", "num-gpus", "n-gpus", "ngpus", "nproc-per-node", "world-size"), ("devices",)),
    **dict.fromkeys(("memory", "capacity", "mem", "memory-limit", "max-memory", "vram", "ram"), ("budget",)),
    **dict.fromkeys(("workers", "num-workers", "n-jobs", "threads", "processes"), ("jobs",)),
    **dict.fromkeys(("steps", "num-steps", "max-steps", "epochs"), ("iterations",)),
    "b": ("batch",),
    "m": ("model",),
    "s": ("seq",),
    "j": ("jobs",),
    "v": ("version",),
    **dict.fromkeys(("dtype", "amp"), ("precision",)),
    **dict.fromkeys(("gif", "jpg", "jpeg", "bmp", "tiff", "webp"), ("png",)),
    **dict.fromkeys(("eps", "ps"), ("pdf",)),
}
"""What other tools call things, and what they are called here; it counts where such a name is among the valid ones."""

LONGEST = 100
"""How many characters of a wrong name are compared: it may come from a file, and comparing takes its square."""


def nearest(wrong: str, valid: Iterable[str], order: Callable[[str], Any] | None = None) -> list[str]:
    """The names that a wrong one may stand for, few: what other tools call so, else those that continue it, else
    contain it, else are spelt alike, begin it, or have a word that is.

    A number is a whole word: "a10" does not stand for "a100", nor "h800" for "h100".

    order: sorts those that continue or contain it; default: the alphabet.
    """
    choices, wrong = sorted(valid), wrong[:LONGEST].casefold()
    folded = {choice: choice.casefold() for choice in choices}
    exact = [choice for choice in choices if folded[choice] == wrong]
    if exact or not wrong:
        return exact
    for text in (wrong.replace(" ", "_"), wrong.replace("_", "-")):
        if known := [name for name in ELSEWHERE.get(text, ()) if name in folded]:
            return known
    bare = re.sub(r"(?<=\d)gi?b?(?![^\W_])", "", wrong).replace("-", "_")  # "a100-80gb": sizes have no unit in names
    for text in dict.fromkeys((wrong, bare)):
        whole = rf"{re.escape(text)}(?![^\W_])"
        any_ending = rf"{re.escape(text)}(?!\d)" if text[-1].isdigit() else re.escape(text)
        generations = whole if text[-1].isdigit() else rf"{whole}|{re.escape(text)}\d"  # "llama": llama-1b, llama2-7b
        for pattern in (generations, any_ending, rf".*[\W_]{whole}") if len(text) > 1 else ():
            if found := [choice for choice in choices if re.match(pattern, folded[choice])]:
                return sorted(found, key=order)[:NEAREST]
    named = {text: choice for choice, text in folded.items() if not _renumbered(wrong, text)}
    if len(wrong) <= len("list"):  # of a short word another first letter makes another word: "gist"
        named = {text: choice for text, choice in named.items() if text[:1] == wrong[0]}
    if alike := difflib.get_close_matches(wrong, named, n=1, cutoff=0.6):
        return [named[alike[0]]]
    longer = [choice for choice in choices if len(choice) >= SHORTEST and wrong.startswith(folded[choice])]
    return [max(longer, key=len)] if longer else _by_word(wrong, named)


def _by_word(wrong: str, named: Mapping[str, str]) -> list[str]:
    """The shortest name one of whose words is spelt like the last word of a wrong one."""
    words: dict[str, str] = {}
    for text in sorted(named, key=len):
        for word in re.findall(r"[^\W_]+", text):
            words.setdefault(word, named[text])
    last = (re.findall(r"[^\W_]+", wrong) or [""])[-1]
    words = {word: name for word, name in words.items() if re.findall(r"\d", word) == re.findall(r"\d", last)}
    alike = difflib.get_close_matches(last, words, n=1, cutoff=0.8) if len(last) >= SHORTEST else []
    return [words[alike[0]]] if alike else []


def _renumbered(wrong: str, right: str) -> bool:
    """Whether two names differ by other digits, and not only by ones swapped, lost or doubled: they name two things."""
    first, second = re.findall(r"\d", wrong), re.findall(r"\d", right)
    return len(first) == len(second) and sorted(first) != sorted(second)
