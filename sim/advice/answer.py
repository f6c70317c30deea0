"""The answer, as data and in words: what to use and why, what is next, what would change it, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sim.advice.ceiling import Ceiling
from sim.advice.layouts import Devices
from sim.advice.question import Question
from sim.advice.reasons import Change, Flip, Least, above
from sim.advice.state import State
from sim.advice.trials import SHARE, Row, best, effort, fits, micro_batches, speed, way
from sim.analysis.pareto import pareto
from sim.policies import load
from sim.report.error_bars import error_lines, policies_error, ratio_error, statement_errors
from sim.report.footer import priced_lines
from sim.report.verdict import difference, does
from sim.search import most_tried
from sim.units import format_bytes, format_percent, format_time

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 8
USUAL = {"attention": "sdpa", "loss": "torch", "stack": "eager", "micro_batches": 1}
"""Options of a workload that are named only if they have another value."""


@dataclass(frozen=True)
class Choice:
    """What was found with one combination of what the question leaves open.

    options: the combination.
    ceiling: what unlimited memory would give with it.
    best: the fastest run; None where none was needed, since that would be slower than the answer, or none fits.
    """

    options: Mapping[str, str]
    ceiling: Ceiling
    best: Row | None


@dataclass(frozen=True)
class Advice:
    """The answer.

    question: what was asked.
    state: what of the job is there before any activation.
    rows: every run of the search: the labels of a cell, `status`, and the figures of a summary.
    best: the row to take by the goal; None where nothing fits.
    runner_up: the best of another policy; None where there is none.
    ceiling: what unlimited memory would give at the best batch.
    flips: assumed and estimated figures that decide between the best and others.
    figures_tried, figures_all: how many such figures were varied, and how many there are.
    choices: what was found with each combination of what the question leaves open, at the best batch.
    changes: where nothing fits, changes of the workload with which it does.
    least: where every change leaves an op that alone holds more than the memory, the change with the smallest such op.
    skipped: runs for which no time was left.
    stopped: whether the search was, with Ctrl-C.
    near: how near the best is to the least time that any plan takes; "" where no time was left to tell.
    devices: the layouts that were tried, where several devices were asked for. Peaks are of the fullest one.
    """

    question: Question
    state: State
    rows: tuple[Row, ...]
    best: Row | None
    runner_up: Row | None
    ceiling: Ceiling
    flips: tuple[Flip, ...] = ()
    figures_tried: int = 0
    figures_all: int = 0
    choices: tuple[Choice, ...] = ()
    changes: tuple[Change, ...] = ()
    least: Least | None = None
    skipped: int = 0
    stopped: bool = False
    near: str = ""
    devices: Devices | None = None
    elapsed_s: float = field(default=0.0, compare=False)

    @property
    def front(self) -> list[Row]:
        """The runs at the best batch that no other beats in both time and peak, by peak; of equal ones the simplest."""
        kept: dict[tuple[int, int], Row] = {}
        for row in sorted(pareto(self.at_best), key=effort):
            kept.setdefault((row["peak_bytes"], row["makespan_ns"]), row)
        return sorted(kept.values(), key=lambda row: row["peak_bytes"])

    @property
    def at_best(self) -> list[Row]:
        """The runs that fit at the best batch, by time."""
        if self.best is None:
            return []
        same = [row for row in self.rows if fits(row) and row.get("batch") == self.best.get("batch")]
        return sorted(same, key=lambda row: row["makespan_ns"])

    @property
    def also(self) -> Row | None:
        """Where the search chose the batch: the run of the largest, or, if that was asked for, of the most throughput.

        None where it is the answer itself.
        """
        if self.best is None or "batch" not in self.best:
            return None
        found = [row for row in self.rows if fits(row) and not {"assumed", "change"} & {*row}]
        if self.question.goal == "batch":
            other = best(found)
        else:
            largest = max(row["batch"] for row in found)
            other = best(row for row in found if row["batch"] == largest)
        return None if other is None or other["batch"] == self.best["batch"] else other

    @property
    def indistinguishable(self) -> list[Row]:
        """The other runs at the best batch and budget whose speed the model's own error does not tell from the best."""
        if self.best is None:
            return []
        top = self.best
        others = {way(row): row for row in self.at_best if way(row) != way(top) and row["budget"] == top["budget"]}
        return [row for row in others.values() if is_same_speed(top, row)]

    def to_frame(self) -> pd.DataFrame:
        """All runs of the search as a DataFrame; nested figures become columns such as `stall_ns.transfer`."""
        import pandas as pd

        return pd.json_normalize([dict(row) for row in self.rows])

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        return {
            "question": {**self.question.workload, "profile": self.question.profile, "goal": self.question.goal,
                         "figures": dict(self.question.figures), "budget": self.question.budget},
            "state": asdict(self.state),
            "best": self.best,
            "runner_up": self.runner_up,
            "also": self.also,
            "unlimited": asdict(self.ceiling),
            "front": self.front,
            "flips": [asdict(flip) for flip in self.flips],
            "choices": [asdict(choice) for choice in self.choices],
            "changes": [{"options": dict(c.options), "text": c.text, "best": c.best} for c in self.changes],
            "least": None if self.least is None else asdict(self.least),
            "skipped": self.skipped,
            "stopped": self.stopped,
            "near": self.near,
            "indistinguishable": [way(row) for row in self.indistinguishable],
            "unfinished": [*_unfinished(self)],
            "error": statement_errors(self.question.profile),
            "layout": None if self.devices is None else dict(self.question.parallel or {}),
            "verdict": self.text().splitlines(),
        }  # fmt: skip

    def __repr__(self) -> str:
        return self.text().rstrip("\n")

    def text(self) -> str:
        """The answer in words."""
        return "\n".join(_verdict(self)) + "\n"


def _verdict(advice: Advice) -> list[str]:
    """The lines of the answer."""
    asked, top = advice.question, advice.best
    lines = [f"{_workload(advice)} on {asked.profile}, {format_bytes(advice.state.capacity)} of {advice.state.tier}",
             _state(advice), *([advice.devices.text()] if advice.devices else []), ""]  # fmt: skip
    if top is None:
        return [*lines, *_nothing(advice), *_end(advice)]
    lines += [_use(advice, top), *_short_of_time(advice)]
    if advice.runner_up is not None:
        lines.append(_next(advice, top, advice.runner_up))
    lines += _simpler(advice, top)
    if advice.near:
        lines.append(f"{advice.near[0].upper()}{advice.near[1:]}.")
    if (other := advice.also) is not None:
        word = "Largest batch tried, which fits" if _is_most(advice, other) else "Largest batch that fits"
        word = "Most throughput" if asked.goal == "batch" else word
        lines.append(f"{word}: {other['batch']}, with {other['policy']}{_divided(other, asked)}: {figures(other)}.")
    lines += [*_decisive(advice), *_choices(advice), "", *_front(advice), *_end(advice)]
    return lines


def _state(advice: Advice) -> str:
    """Of several combinations of which none was chosen, the one with the least."""
    several = advice.best is None and advice.question.open
    return advice.state.text().replace("state:", "state, where it is least:", 1) if several else advice.state.text()


def _workload(advice: Advice) -> str:
    axes = dict(advice.question.workload)
    if advice.best is None:
        axes |= {name: " or ".join(values) for name, values in advice.question.open.items()}
    name = axes.pop("model", None)
    if axes.pop("trace", None) is not None or advice.question.steps:  # a file of the search's own
        meta = advice.question.trace.meta
        name = meta.get("model", "trace")
        axes |= {key: meta[key] for key in ("batch", "sequence") if key in meta}
    shown = ", ".join(f"{key} {value}" for key, value in axes.items() if USUAL.get(key) != value)
    return f"{name}, {shown}" if shown else str(name)


def _four_digits(rate: float) -> str:
    """A rate to four digits, without an exponent: "79,780", "236.4"."""
    return f"{round(rate):,}" if rate >= 1000 else f"{rate:.4g}"


def figures(row: Row) -> str:
    """ "4.3 s per iteration, 236 tokens/s, peak 7.2 GB"."""
    tokens, unit = row.get("tokens_per_s"), "samples" if row.get("samples_per_s") else "iterations"
    rate = f"{_four_digits(tokens)} tokens/s" if tokens else f"{_four_digits(speed(row))} {unit}/s"
    return f"{_ms(row['makespan_ns'])} per iteration, {rate}, peak {_gb(row['peak_bytes'])}"


def _ms(ns: int) -> str:
    return format_time(ns, digits=3)


def _gb(size: int) -> str:
    return format_bytes(size, digits=3)


def _divided(row: Row, asked: Question | None = None) -> str:
    """ " in 4 micro-batches", or nothing for a batch that stays whole.

    asked: names what it leaves open, too: " in 4 micro-batches with amp_bf16 and adamw_8bit".
    """
    parts = f" in {micro_batches(row)} micro-batches" if micro_batches(row) > 1 else ""
    if asked is not None and row.get("parallel") not in (None, asked.layout):
        parts += f" in {row['parallel']}"
    return parts + (
        f" with {' and '.join(row[name] for name in asked.open)}" if asked is not None and asked.open else ""
    )


def _is_most(advice: Advice, row: Row) -> bool:
    """Whether no larger batch than that of a run is tried."""
    return bool(row.get("batch", 0) >= most_tried(micro_batches(advice.question.workload)))


def _use(advice: Advice, top: Row) -> str:
    at = f" at batch {top['batch']}{_divided(top, advice.question)}" if "batch" in top else ""
    slower = above(top, advice.ceiling)
    less = f"{1 + slower:.2g} times as long as" if slower >= 1 else f"{format_percent(slower)} slower than"
    less = "as fast as" if abs(slower) < 0.0005 else less
    if slower <= -0.0005:  # a policy that makes the work itself cheaper
        less = f"{format_percent(-slower)} less time than keeping everything"
    largest = f", the largest batch {'tried: larger ones may fit' if _is_most(advice, top) else 'found'}"
    goal = {"memory": ", the least memory found", "batch": largest}.get(advice.question.goal, "")
    saved = load(str(top["policy"])).saving_lines() if slower <= -0.0005 else ()
    why = f" ({'; '.join(line.removeprefix('declared saving: ') for line in saved)})" if saved else ""
    end = f"{less} with unlimited memory{why}. In each iteration {does(top)}."
    on = (
        ""
        if top.get("parallel") is None
        else f" on {advice.devices.number if advice.devices else 1} devices ({top['parallel']})"
    )
    return f"Use {top['policy']}{at}{on}{goal}: {figures(top)}; {end}"


def _next(advice: Advice, top: Row, other: Row) -> str:
    asked, over = advice.question, 100 * (speed(top) / speed(other) - 1)
    text = "as fast" if abs(over) < 0.05 else f"{format_percent(abs(over) / 100)} {'slower' if over > 0 else 'faster'}"
    peak = other["peak_bytes"] - top["peak_bytes"]
    more = [f"peak {_gb(abs(peak))} {'higher' if peak > 0 else 'lower'}"] if peak else []
    parts = ", ".join([*difference(top, other), *more])
    same = advice.indistinguishable
    told = (
        f"; {_runs(len(same)).removesuffix(' was').removesuffix(' were')} can't be told from the best" if same else ""
    )
    if is_same_speed(top, other):
        error, on = ratio_error(layouts=other.get("parallel") != top.get("parallel"))
        rest = f", nor can {len(same) - 1} more" if len(same) > 1 else ""
        told = f"; it can't be told from the best{rest} (within the model's own error of {format_percent(error)}, {on})"
    return f"Next: {other['policy']}{_divided(other, asked)}, {text}{': ' if parts else ''}{parts}{told}."


def is_same_speed(top: Row, other: Row) -> bool:
    """Whether two runs' speeds differ by no more than the model's own error for two policies, or two layouts."""
    error, _ = ratio_error(layouts=other.get("parallel") != top.get("parallel"))
    return speed(other) * (1 + error) >= speed(top)


def _simpler(advice: Advice, top: Row) -> Iterator[str]:
    """What is simpler than the choice and slower by less than the model's own error, of which only the fastest."""
    error = policies_error()
    near = [row for row in advice.at_best if speed(row) * (1 + error) >= speed(top) and _taken_on(row) < _taken_on(top)]
    if near:
        least = min(map(_taken_on, near))
        other = max((row for row in near if _taken_on(row) == least), key=speed)
        slower = f"{format_percent(speed(top) / speed(other) - 1)} slower, within the model's own error of"
        yield f"Simpler: {other['policy']}{_divided(other, advice.question)}, {slower} {format_percent(error)}."


def _taken_on(row: Row) -> tuple[int, int]:
    """How much a run takes upon itself: kinds of state that its policies move, and policies."""
    state = {"weights", "gradients", "optimizer_state"}
    return len(state & set(load(str(row["policy"])).manages)), effort(row)[0]


def _short_of_time(advice: Advice) -> Iterator[str]:
    """Beside the choice: what of the search had no time, which may be faster."""
    fit = len({(row.get("parallel"), way(row)) for row in filter(fits, advice.rows)} | _of_layouts(advice))
    few = "the only run that fits" if fit == 1 else f"the best of {fit} runs that fit"
    left = [*_unfinished(advice)]
    if advice.stopped:
        yield f"That is {few} so far: the search was stopped, and what was left out may be faster."
    elif left and advice.best is not None and above(advice.best, advice.ceiling) < 0.0005:
        yield f"Not all was run ({'; '.join(left)}), but nothing that keeps to the work itself is faster."
    elif left:
        yield f"That is {few} so far; what was not run may be faster: {'; '.join(left)} (give it more --seconds)."


def _of_layouts(advice: Advice) -> set[tuple[Any, ...]]:
    """What fitted in the search over layouts, and was not run once more."""
    if advice.devices is None:
        return set()
    ran = {(row.get("parallel"), str(row["policy"])) for row in advice.rows}
    return {(str(row.layout), row.policy) for row in advice.devices.search.fitting} - ran


def _unfinished(advice: Advice) -> Iterator[str]:
    """What of the search had no time, in parts of a sentence."""
    if advice.skipped:
        yield f"{_runs(advice.skipped)} left out"
    if late := sum(row["status"] == "timed_out" for row in advice.rows):
        yield f"{_runs(late)} ended after {SHARE:.0%} of the search's time"
    if advice.devices is not None and (left := advice.devices.search.left_out):
        yield f"{left:,} layouts were left out by an estimate"


def _decisive(advice: Advice) -> Iterator[str]:
    if not advice.figures_tried:
        return
    tried = f"{advice.figures_tried} of {advice.figures_all} tried"
    if not advice.flips:
        halved = "no assumed or estimated figure of the profile, halved or doubled,"
        yield f"Of what was run, {halved} makes the fastest of another kind faster by 1 % ({tried})."
        return
    paths = len({flip.path for flip in advice.flips})
    figures_ = "figure" if paths == 1 else "figures"
    yield f"{paths} assumed or estimated {figures_} of the profile, halved or doubled, would change this ({tried}):"
    for flip in advice.flips:
        by = "which alone fits" if flip.lead == float("inf") else f"faster by {format_percent(flip.lead)}"
        yield f"  {flip.path} = {flip.value} instead of {flip.text}: {flip.policy}, {by}"


def _choices(advice: Advice) -> Iterator[str]:
    if not advice.choices:
        return
    asked = " and ".join(advice.question.open)
    yield (
        f"By {asked}, which change the training itself, the fastest first:"
        if "and" in asked
        else (f"By {asked}, which changes the training itself, the fastest first:")
    )
    for choice in sorted(advice.choices, key=lambda choice: -speed(choice.best) if choice.best else 0.0)[:SHOWN]:
        name = ", ".join(choice.options.values())
        if choice.best is not None:
            yield f"  {name}: {choice.best['policy']}{_divided(choice.best)}: {figures(choice.best)}"
        else:
            yield f"  {name}: nothing found that fits; {choice.ceiling.speed:.4g} samples/s with unlimited memory"
    if len(advice.choices) > SHOWN:
        yield f"  and {len(advice.choices) - SHOWN} slower ones"


def _front(advice: Advice) -> Iterator[str]:
    front = advice.front
    fit = len(advice.at_best)
    few = "The only run that fits:" if fit == 1 else ""
    few = "The only run that fits in this layout:" if few and _of_layouts(advice) else few
    yield few or f"Of {fit} runs that fit, no other has both less time and a lower peak than these:"
    for row in front[-SHOWN:]:
        name = f"{row['policy']}{_divided(row, advice.question)}"
        yield f"  {_gb(row['peak_bytes']):>9}  {_ms(row['makespan_ns']):>8}  {name}"
    if len(front) > SHOWN:
        yield f"  and {len(front) - SHOWN} slower ones of lower peak"


def _nothing(advice: Advice) -> Iterator[str]:
    """What is known where nothing fits: of what was run to its end, and what was not."""
    rows = {str(row["policy"]): row for row in advice.rows if "change" not in row}
    refused = [name for name, row in rows.items() if row["fits"] is False and row["status"] != "not_applicable"]
    others = [row for row in rows.values() if row["status"] in ("not_applicable", "failed", "killed")]
    left = [*_unfinished(advice)]
    if advice.state.exceeds_all:
        yield "Nothing fits, whatever is moved or recomputed: the state alone is more than all memories hold."
    elif rows and len(others) == len(rows) and not left:
        why = str(others[0]["error"]).partition("\n")[0]
        more = f" (nor does any other of {len(rows)})" if len(rows) > 1 else ""
        yield f"{others[0]['policy']} does not apply: {why}{more}"
        return
    elif not refused and left:
        unknown = "No run ended in the time of the search, so that it is not known what fits"
        yield f"{unknown} ({'; '.join(left)}): give it more (--seconds)."
        if not (advice.changes or advice.question.exceeds):
            return
    elif left:
        of = "The one policy that was run" if len(refused) == 1 else f"Nothing of the {len(refused)} policies and"
        of += " does not fit" if len(refused) == 1 else " compositions that were run to an end fits"
        yield f"{of}; what else there is is not known: {'; '.join([*left, *_inapplicable(others)])} (--seconds)."
    elif rows:
        not_run = [*_inapplicable(others)]
        yield f"Nothing fits: {_policies(len(refused))}{'; ' if not_run else ''}{'; '.join(not_run)}."
    else:
        why = "moves enough of the state" if not advice.question.exceeds else "splits what is too large"
        yield f"Nothing fits: no policy or composition {why}."
    for change in advice.changes:
        yield f"With {change.text}, {change.best['policy']} fits: {figures(change.best)}."
    if advice.question.exceeds:
        op, size = advice.question.largest_op
        yield f"{op!r} alone holds {_gb(size)} while it runs, which nothing but splitting it makes less."
    if advice.least is not None:
        least = advice.least
        yield (f"No change helps: even with {least.text} {least.op!r} alone holds {_gb(least.bytes)}, "
               f"and there are {_gb(advice.state.capacity)}.")  # fmt: skip
    elif not advice.changes and any("change" in row for row in advice.rows):
        yield "None of the changes that were tried makes it fit."
    elif not advice.changes:
        why = "they are not looked for over several devices" if advice.devices else "no time was left for them"
        yield f"No changes of the job were tried: {why}."


def _inapplicable(rows: Sequence[Row]) -> Iterator[str]:
    """What could not be run, in parts of a sentence."""
    for status, verb in (("not_applicable", "not apply"), ("failed", "not run to an end"), ("killed", "not survive")):
        if number := sum(row["status"] == status for row in rows):
            yield f"{number} {'does' if number == 1 else 'do'} {verb}"


def _end(advice: Advice) -> Iterator[str]:
    budget, usable = advice.question.budget, advice.question.platform.home(0).capacity
    if budget is not None and budget > usable:
        yield f"the budget of {_gb(budget)} exceeds this machine: what takes more than {_gb(usable)} does not fit on it"
    if advice.best is not None and advice.best.get("priced_as"):
        yield from priced_lines(*advice.best["priced_as"].split(" as "))
    if advice.question.steps:
        yield "the batch was not divided into micro-batches: only the function that makes a step knows what one is"
    if advice.best is not None or advice.changes:
        also = [*(["layouts"] if advice.devices is not None else []), "peak"]
        also += ["machines"] if any("profile" in change.options for change in advice.changes) else []
        yield from error_lines([advice.question.platform], also=also)


def _policies(number: int) -> str:
    """So many policies, and the verb."""
    return "1 policy was run" if number == 1 else f"{number} policies and compositions were run"


def _runs(number: int) -> str:
    """So many runs, and the verb."""
    return "1 run was" if number == 1 else f"{number} runs were"
