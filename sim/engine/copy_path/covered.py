"""Which runs take the copy path, and what the device does in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from sim.engine.prepare import Plain, Prepared
from sim.engine.resolve import Act, Resolved
from sim.hardware.platform import Allocator, Platform
from sim.log import WHY
from sim.plan import Plan

EXACT = Allocator()
RUN, RECOMPUTE = WHY["run"], WHY["recompute"]


class Program(NamedTuple):
    """What the device does in turn: runs of ops, of which each recomputation is one.

    ops, plain, why: per run its op, what is known of that (`Prepared.plain`), and what the log calls the run.
    anchors: per run the op in whose place it runs.
    before, after: by run the actions that come before it, and after it.
    last_use: per tensor the last run that uses it, or at whose end the program releases it; -1 for none.
    dying: per run the tensors that nothing uses after it, and that may be freed then.
    """

    ops: Sequence[int]
    plain: Sequence[Plain | None]
    why: Iterable[int]
    anchors: Sequence[int]
    before: Mapping[int, Sequence[Act]]
    after: Mapping[int, Sequence[Act]]
    last_use: list[int]
    dying: list[list[int]]


def covers(plan: Plan, platform: Platform, prepared: Prepared, resolved: Resolved) -> bool:
    """Whether a run is one that this path may take: one device, one engine, copies without codecs."""
    lane = prepared.main[0]
    home = prepared.home[lane]
    return (
        prepared.dispatch is None
        and prepared.is_sequence
        and prepared.reach[lane] == 1 << home
        and all(tier.allocator == EXACT for tier in platform.tiers)
        and all(
            offset is None and (prepared.producer[tensor] < 0 or tier == home)
            for tensor, (tier, offset) in resolved.born.items()
        )
        and program_of(prepared, resolved) is not None
    )


def program_of(prepared: Prepared, resolved: Resolved) -> Program | None:
    """What the device does, kept with the plan; None where its actions are not all for this path."""
    kept = resolved.made.copied
    if not kept:
        kept.append(_program(prepared, resolved) if _are_covered(prepared, resolved) else None)
    known: Program | None = kept[0]
    return known


def _are_covered(prepared: Prepared, resolved: Resolved) -> bool:
    """Whether each action comes after what it is about and uses no codec, and all ops are plain or in place."""
    producer, plain, renewals = prepared.producer, prepared.plain, prepared.renewals
    for after, side in enumerate((resolved.before, resolved.after)):
        for anchor, acts in side.items():
            first = anchor + after
            for kind, target, _, move in acts:
                if move is not None and (move.wire is not None or move.codec is not None):
                    return False
                if kind != "recompute":
                    if producer[target] >= first:
                        return False
                elif after or target >= anchor or plain[target] is None:
                    return False
    return all(each is not None or op in renewals for op, each in enumerate(plain))


def _program(prepared: Prepared, resolved: Resolved) -> Program:
    ops, before, after = range(len(prepared.plain)), resolved.before, resolved.after
    if not resolved.recomputed:
        last_use, dying = prepared.deaths
        return Program(ops, prepared.plain, repeat(RUN), ops, before, after, last_use, dying)
    runs: list[tuple[int, int, int]] = []
    acts_before, acts_after = dict[int, Sequence[Act]](), dict[int, Sequence[Act]]()
    for op in ops:
        acts: list[Act] = []
        for act in before.get(op, ()):
            if act.kind != "recompute":
                acts.append(act)
                continue
            acts_before[len(runs)], acts = acts, []
            runs.append((act.target, RECOMPUTE, op))
        acts_before[len(runs)] = acts
        acts_after[len(runs)] = after.get(op, ())
        runs.append((op, RUN, op))
    last_use = [-1] * len(prepared.size)
    for run, (op, why, _) in enumerate(runs):
        for tensor in (*prepared.reads[op], *(prepared.releases.get(op, ()) if why == RUN else ())):
            last_use[tensor] = run
    freeable, touched = prepared.freeable, prepared.touched
    dying = [[t for t in touched[op] if last_use[t] <= run and freeable[t]] for run, (op, _, _) in enumerate(runs)]
    order, whys, anchors = zip(*runs, strict=True)
    plain = [prepared.plain[op] for op in order]
    return Program(order, plain, whys, anchors, acts_before, acts_after, last_use, dying)
