"""What a comparison says in two lines: which policy is the fastest and what it does, and what the others cost.

Of several jobs: in how many each is the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sim.report.cells import MODEL_ERROR, Row, clock, ordered, percent, size, standings, total
from sim.report.error_bars import measured_on

DOES = {
    "recomputation": "it recomputes for {recompute} and copies nothing",
    "copies": "it copies {moved}{waiting} and recomputes nothing",
    "both": "it recomputes for {recompute} and copies {moved}{waiting}",
    "neither": "everything stays where it is: nothing is recomputed, nothing copied",
}
OTHERWISE = {
    "recomputation": "that only recomputes",
    "copies": "that only copies",
    "both": "that recomputes and copies",
    "neither": "that does neither",
}
NAMED = 4


def kind(row: Row) -> str:
    """By what a run stayed within its memory: `recomputation`, `copies`, `both`, or `neither`; "" if unknown."""
    if row.get("recompute_ns") is None or row.get("moved_bytes") is None:
        return ""
    recomputes, moves = bool(row["recompute_ns"]), copied(row) > 0
    return {(True, True): "both", (True, False): "recomputation", (False, True): "copies"}.get(
        (recomputes, moves), "neither"
    )


def copied(row: Row) -> int:
    """The bytes that a run copied to stay within its memory: all on the wire but what its layout exchanges anyway."""
    return int(total(row["moved_bytes"])) - int(row.get("exchanged_bytes") or 0)


def does(row: Row, *, binary: bool = False) -> str:
    """What a run does to stay within its memory, in words; "" if unknown."""
    if not kind(row):
        return ""
    causes = row.get("stall_ns") or 0
    of_others = causes.get("peer", 0) if isinstance(causes, Mapping) else 0
    stall = total(causes) - of_others
    said = DOES[kind(row)].format(
        recompute=clock(row["recompute_ns"]),
        moved=size(copied(row), binary),
        waiting=f", waits {clock(stall)} for that" if stall else " without waiting",
    )
    exchanged = row.get("exchanged_bytes")
    return f"{said}; its devices exchange {size(exchanged, binary)}" if exchanged else said


def difference(row: Row, other: Row) -> list[str]:
    """What `other` spends more than `row`, and then less, the largest first: "320 ms more recomputation"."""
    parts = {
        what: total(other.get(key) or 0) - total(row.get(key) or 0)
        for key, what in (
            ("recompute_ns", "recomputation"),
            ("stall_ns", "waiting for copies and memory"),
            ("codec_ns", "compressing"),
        )
    }
    if "compute_ns" in row and "compute_ns" in other:
        parts["computing"] = total(other["compute_ns"]) - total(row["compute_ns"])
    apart = other["makespan_ns"] - row["makespan_ns"]
    worth, sign = max(1, abs(apart)) / 20, -1 if apart < 0 else 1  # first what makes it slower, or faster
    ranked = sorted(parts.items(), key=lambda part: (part[1] * sign <= 0, -abs(part[1])))
    return [f"{clock(abs(ns))} {'more' if ns > 0 else 'less'} {what}" for what, ns in ranked if abs(ns) > worth]


def verdict_lines(rows: Sequence[Row], model_error: float = MODEL_ERROR, *, binary: bool = False) -> list[str]:
    """One or two lines; none where nothing ran.

    rows: see `sim.report.cells`.
    model_error: times nearer to the fastest than this fraction are not called slower.
    """
    ran = ordered(rows)
    fitting = [row for row in ran if row["fits"]]
    if not fitting:
        return list(_nothing(ran, binary))
    top = fitting[0]
    over = top.get("overhead")
    against = ""
    if over is not None:
        own = (top.get("unlimited_run") or "keep_all") != "keep_all"  # which does less than keep_all does there
        that = "its own time" if own else "that"
        against = f", {percent(abs(over))} {'above' if over > 0 else 'below'} {that} with unlimited memory"
        against = ", as with unlimited memory" if percent(over) == percent(0) else against
    least = f"{clock(top['makespan_ns'])}{against}, peak {size(top['peak_bytes'], binary)}"
    word = "the only one that fits" if len(fitting) == 1 and len(ran) > 1 else "the fastest"
    first = f"{top['policy']} is {word}: " if len(ran) > 1 else f"{top['policy']}: "
    why = does(top, binary=binary)
    near = _near(top.get("above_bound"))
    return [f"{first}{least}{f'; {why}' if why else ''}{near}.", *_others(fitting, model_error)]


def winners_lines(jobs: Sequence[Sequence[Row]], model_error: float = MODEL_ERROR) -> list[str]:
    """How many of several jobs each policy is the fastest in; no line where one policy alone was run.

    jobs: per job its rows, see `sim.report.cells`; several of one policy (with other parameters, or another seed) count
        as that policy.
    model_error: see `verdict_lines`.
    """
    if len({row["policy"] for rows in jobs for row in rows}) < 2:
        return []
    first, near, empty = Counter[str](), Counter[str](), 0
    for rows in jobs:
        fitting = [row for row in ordered(rows) if row["fits"]]
        if not fitting:
            empty += any(row["fits"] is False for row in rows)
            continue
        top, limit = fitting[0], (1 + model_error) * fitting[0]["makespan_ns"]
        first[top["policy"]] += 1
        near.update({str(row["policy"]) for row in fitting if row["makespan_ns"] <= limit} - {str(top["policy"])})
    lines = []
    if first:
        (name, count), *rest = first.most_common(NAMED)
        others = "".join(f", {other} in {wins}" for other, wins in rest)
        lines.append(f"{name} is the fastest in {count} of {len(jobs)} jobs{others}.")
    if near:
        names = ", ".join(f"{name} in {count}" for name, count in near.most_common(NAMED))
        error = f"{percent(model_error)}{measured_on(model_error)}"
        lines.append(f"Not told from the fastest (within the model's own error of {error}): {names}.")
    return [*lines, *([f"No policy fits in {empty} of {len(jobs)} jobs."] if empty else [])]


def _near(above: float | None) -> str:
    """How near a run is to the least that is proven possible, as the end of a sentence; "" if unknown."""
    if above is None:
        return ""
    if percent(above) == percent(0):
        return "; no plan of its class is faster"
    return f"; within {percent(above)} of what any plan of its class can reach"


def _others(fitting: Sequence[Row], model_error: float) -> Iterator[str]:
    """What is as good, and the first of each kind that is not."""
    top, standing = fitting[0], standings(fitting, model_error)
    near = [str(row["policy"]) for row in fitting[1:] if standing[row["policy"]].same]
    parts = []
    if near:
        more = f" and {len(near) - NAMED} more" if len(near) > NAMED else ""
        names = ", ".join(near[:NAMED]) + more
        error = f"{percent(model_error)}{measured_on(model_error)}"
        parts.append(f"{names} can't be told from it (within the model's own error of {error})")
    seen = {"", *(kind(row) for row in fitting if row is top or standing[row["policy"]].same)}
    for row in fitting:
        if kind(row) not in seen:
            seen.add(kind(row))
            over = percent(standing[row["policy"]].over, sign=True)
            why = ", ".join(difference(top, row)[:1])
            parts.append(f"the fastest {OTHERWISE[kind(row)]} is {row['policy']}, {over}{f': {why}' if why else ''}")
    if parts:
        yield f"{parts[0][0].upper() if near == [] else parts[0][0]}{'; '.join(parts)[1:]}."


def _nothing(ran: Sequence[Row], binary: bool) -> Iterator[str]:
    """Where nothing fits: the policy that needs the least, as far as it is known."""
    tried = [row for row in ran if row["fits"] is False]
    if not tried:
        return
    known = [row for row in tried if row.get("floor_bytes")]
    state = {str(row["error"]) if row.get("refusal") == "state" else "" for row in tried}
    why = f": {state.pop()}" if len(state) == 1 and "" not in state else ""
    yield (
        f"None of {len(tried)} policies fits" if len(tried) > 1 else f"{tried[0]['policy']} does not fit"
    ) + f"{why}."
    hints = []
    if known:
        least = min(known, key=lambda row: int(row["floor_bytes"]))
        hints.append(f"The smallest budget known to fit is {size(least['floor_bytes'], binary)}, of {least['policy']}.")
    if len(tried) > 1:
        hints.append("Compositions of policies, and the nearest job that fits: tiersim advise.")
    if hints:
        yield " ".join(hints)
