"""Law 2: the same values. A value is a hash of its op and of what it read; see `sim.rewrites.symbolic`.

Rewritten traces are compared with their bases by `sim.rewrites.values`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from sim.conformance.ledger import FOREVER, MADE, MOVED_IN, OVERWRITTEN, Ledger, Stay, Work
from sim.conformance.replayed import LawBroken, Replayed
from sim.rewrites.identities import LEAST_CODE
from sim.rewrites.symbolic import Value, first_value, groups, op_values, plain_values
from sim.rewrites.values import departures
from sim.trace.graph import Trace
from sim.trace.origin import Origin

NOTHING: Value = b"nothing"
FIGURES = ("samples", "tokens", "batch", "sequence", "model_flops")
"""Keys of `meta` from which rates and utilisations are computed."""


def check_values(run: Replayed) -> None:
    """Law 2: every read, and every output at the end, has the value of the plain run of the original trace."""
    if run.plan is not None and run.plan.trace is not run.trace:
        _same_computation(run)
    if run.log is None:
        return
    _wires(run)
    _Symbolic(run.ledger).check(run.done)


def _same_computation(run: Replayed) -> None:
    """A rewritten trace computes what it stands for; values differ only as the policy declares."""
    assert run.plan is not None
    if run.plan.trace == run.trace:
        return
    allowed = {"repeated"} if run.policy.recomputes else set()
    if not run.policy.lossless:
        allowed |= {"lossy", "stale"}
    for departure in departures(run.plan.trace, run.trace):
        if departure.what not in allowed:
            raise LawBroken(f"the rewritten trace: {departure.what}: {departure.text}")

    _figures(run.plan.trace, run.trace)


def _figures(trace: Trace, base: Trace) -> None:
    """The amounts of work from which rates are computed are those of the original trace."""
    count = Origin.identity(trace).iterations
    for key in FIGURES:
        has, asked = trace.meta.get(key), base.meta.get(key)
        if has != asked and not (isinstance(asked, int | float) and has == asked * count):
            raise LawBroken(f"the rewritten trace's metadata say {key} {has!r}; the original trace says {asked!r}")


def _wires(run: Replayed) -> None:
    """A copy puts all bytes on the wire, or as few as a lossless codec that the policy declares needs.

    So does one of a lossy policy: what a copy loses would be restored from nothing. Values are lost by a rewrite
    (`Encoded`, `Lossy`), whose op takes its time.
    """
    least = LEAST_CODE if "codec" in run.policy.saves else 1
    size = run.ledger.trace.tensor_columns.bytes
    for copy in run.ledger.copies:
        whole = int(size[copy.tensor]) if copy.tensor >= 0 else 0
        if copy.bytes < -(-whole * least // 1):
            name = run.ledger.names[copy.tensor]
            raise LawBroken(f"the transfer of {name!r}, {whole} B, puts {copy.bytes} B on the wire, and loses nothing")


class _Symbolic:
    """Values of all stays of a log, each from the run or transfer that gave it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.plain = plain_values(ledger.trace)
        self.members = groups(ledger.trace)
        self.readers: dict[Stay, list[tuple[int, int, str]]] = defaultdict(list)
        self.read: dict[tuple[Work, int], Stay] = {}
        self.copied: dict[Stay, Stay] = {}

    def check(self, done: bool) -> None:
        for work in self.ledger.works:
            for tensor in self.ledger.trace.reads(work.op):
                self.note(work, tensor)
        for stay in self.ledger.stays:
            if stay.copy is not None:
                self.copied[stay] = self.source(stay)
                self.readers[self.copied[stay]].append((stay.copy.start, stay.copy.end, self.transfer(stay)))
        self.no_overwrite_under_way()
        self.overwrites()
        values = self.values()
        for (work, tensor), stay in self.read.items():
            if values[stay] != self.plain[tensor]:
                op, name = self.ledger.op_names[work.op], self.ledger.names[tensor]
                raise LawBroken(f"op {op!r} at {work.start} ns reads another value of {name!r}")
        if done:
            self.outputs(values)

    def note(self, work: Work, tensor: int) -> None:
        reach = self.ledger.reach[self.ledger.engine_of(work)]
        what = f"op {self.ledger.op_names[work.op]!r}"
        stay = self.held(tensor, reach, work.start, work.end, what)
        self.readers[stay].append((work.start, work.end, what))
        self.read[work, tensor] = stay

    def transfer(self, stay: Stay) -> str:
        return f"the transfer of {self.ledger.names[stay.tensor]!r} to {self.ledger.tier_names[stay.tier]!r}"

    def source(self, stay: Stay) -> Stay:
        """What a transfer copied."""
        assert stay.copy is not None
        copy, what = stay.copy, self.transfer(stay)
        return self.held(copy.tensor, {copy.source}, copy.start, copy.end, what, before=stay.row)

    def held(self, tensor: int, tiers: set[int], start: int, end: int, what: str, before: int = FOREVER) -> Stay:
        """The copy in one of these tiers that is held all the time, preferably one that is complete."""
        here = [stay for stay in self.ledger.of[tensor] if stay.tier in tiers and stay.row < before]
        near = [stay for stay in here if stay.release >= end]
        there = [stay for stay in near if stay.come <= start]
        # law 4 covers copies that are not complete yet: here only whether the value is right
        later = sorted((stay for stay in near if stay.come > start), key=lambda stay: (stay.come, stay.row))
        went = [stay for stay in here if stay.come <= start < stay.release < end]
        if there:
            return there[-1]
        if later and not went:
            return later[0]
        name = self.ledger.names[tensor]
        gone = [stay.release for stay in here if stay.come <= start]
        how = f"was given up at {max(gone)} ns" if gone else "was never resident"
        raise LawBroken(f"{what} from {start} to {end} ns reads {name!r}, which {how}")

    def no_overwrite_under_way(self) -> None:
        """Nothing reads a copy while an op overwrites it."""
        for stay, uses in self.readers.items():
            if stay.heir is None or stay.heir.work is None:
                continue
            writer = stay.heir.work
            for start, end, what in uses:
                own = what == f"op {self.ledger.op_names[writer.op]!r}"
                if not own and max(start, writer.start) < min(end, writer.end):
                    op, name = self.ledger.op_names[writer.op], self.ledger.names[stay.tensor]
                    raise LawBroken(f"{what} reads {name!r} from {start} to {end} ns while op {op!r} overwrites it")

    def overwrites(self) -> None:
        """Whenever an op writes in place, first run or not, the old value is lost at its end."""
        trace, compressed = self.ledger.trace, self.compressed()
        for new in np.flatnonzero(trace.tensor_columns.replaces >= 0).tolist():
            old = int(trace.tensor_columns.replaces[new])
            for work in self.ledger.works_of.get(int(trace.producer[new]), ()):
                reach = self.ledger.reach[self.ledger.engine_of(work)]
                near = [s for s in self.ledger.of[old] if s.tier in reach and s.come <= work.start < s.release]
                near = [stay for stay in near if (old, stay.tier) not in compressed]
                if near and not any(s.gone_by == OVERWRITTEN and s.release == work.end for s in near):
                    op, name = self.ledger.op_names[work.op], self.ledger.names[old]
                    raise LawBroken(f"op {op!r} overwrites {name!r} at {work.end} ns, and its old value is still held")

    def compressed(self) -> set[tuple[int, int]]:
        """(tensor, tier) in which a link may have left a compressed copy, too small to overwrite."""
        size = self.ledger.trace.tensor_columns.bytes
        return {(c.tensor, c.target) for c in self.ledger.copies if c.bytes < size[c.tensor]}

    # ---- values ------------------------------------------------------------------------------

    def values(self) -> dict[Stay, Value]:
        """The value of every stay; `NOTHING` for one that was never filled. No recursion: traces are long."""
        values: dict[Stay, Value] = {}
        made: dict[Work, dict[int, Value]] = {}
        for first in self.ledger.stays:
            stack = [first]
            while stack:
                stay = stack[-1]
                if stay in values:
                    stack.pop()
                    continue
                needed = self.sources(stay)
                missing = [one for one in needed if one not in values]
                if missing:
                    stack += missing
                    continue
                values[stay] = self.value(stay, values, made)
                stack.pop()
        return values

    def sources(self, stay: Stay) -> list[Stay]:
        """The stays whose values decide this one's."""
        if stay.cause == MOVED_IN and stay.copy is not None:
            return [self.copied[stay]]
        if stay.cause == MADE and stay.work is not None:
            return [self.read[key] for key in self.inputs(stay.work) if key in self.read]
        return []

    def inputs(self, work: Work) -> list[tuple[Work, int]]:
        """What decides a run's results: its reads, and those of all members of its group."""
        group = self.ledger.trace.op_columns.group.get(work.op)
        works = [work]
        if group:
            same = [(m, self.ledger.works_of[m]) for m in self.members[group]]
            works = [w for _, found in same for w in found if (w.start, w.end) == (work.start, work.end)]
        return [(w, tensor) for w in works for tensor in self.ledger.trace.reads(w.op)]

    def value(self, stay: Stay, values: dict[Stay, Value], made: dict[Work, dict[int, Value]]) -> Value:
        if stay.cause == MOVED_IN:
            return values[self.copied[stay]] if stay in self.copied else NOTHING
        if stay.cause != MADE:
            return first_value(stay.tensor)
        work = stay.work
        if work is None:
            return NOTHING
        if work not in made:
            writes = self.ledger.trace.writes(work.op)
            reads = [values.get(self.read[key], NOTHING) for key in self.inputs(work)]
            made[work] = dict(zip(writes, op_values(work.op, reads, len(writes)), strict=True))
        return made[work][stay.tensor]

    def outputs(self, values: dict[Stay, Value]) -> None:
        for tensor in self.ledger.trace.outputs:
            there = [stay for stay in self.ledger.of[tensor] if stay.release == FOREVER]
            name = self.ledger.names[tensor]
            if not there:
                raise LawBroken(f"output {name!r} is not resident at the end")
            for stay in there:
                if values[stay] != self.plain[tensor]:
                    raise LawBroken(f"output {name!r} has another value in {self.ledger.tier_names[stay.tier]!r}")
