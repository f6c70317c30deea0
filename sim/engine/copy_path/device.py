"""The device of a run on the copy path: it walks its ops in program order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.engine.copy_path.asked import Asked
from sim.engine.copy_path.copies import FREED, LEAVING, MADE, NONE, Copies
from sim.engine.copy_path.covered import RECOMPUTE, RUN, Program, program_of
from sim.engine.copy_path.wires import Elsewhere
from sim.engine.event_path.record import Columns
from sim.engine.event_path.refusals import RecomputeLimit
from sim.engine.event_path.residency import listens
from sim.engine.prepare import Plain, Prepared, Renewal
from sim.engine.resolve import Act, Resolved
from sim.errors import OutOfMemory, Thrashing
from sim.hardware.platform import Platform
from sim.log import CAUSE, RESERVED_COLUMNS, EventLog
from sim.plan import Plan

WORKSPACE = CAUSE["workspace"]


def run(
    plan: Plan, platform: Platform, prepared: Prepared, resolved: Resolved, recompute_limit: float | None
) -> EventLog | None:
    """The log of a run that is covered; None if it has to take the event path after all.

    Raises OutOfMemory and Thrashing with the log of what ran.
    """
    program = program_of(prepared, resolved)
    if program is None:
        return None
    online = None if plan.online is None else plan.online()
    is_told = online is not None and listens(online)
    copies = Copies(platform, prepared, resolved, program, lazy=plan.keep_dead, is_told=is_told)
    asked = Asked(plan, online, platform, prepared, resolved, copies)
    device = Device(copies, asked, plan, platform, prepared, resolved, program, recompute_limit)
    try:
        device.place()
        device.walk()
        device.close()
    except Elsewhere:
        return None
    except (OutOfMemory, Thrashing) as error:
        error.attach(_log(copies, prepared, platform, complete=False))
        raise
    if copies.now >= 2**62:
        return None  # more nanoseconds than a column holds
    return _log(copies, prepared, platform, complete=True)


def _log(copies: Copies, prepared: Prepared, platform: Platform, *, complete: bool) -> EventLog:
    intervals, changes = copies.tables()
    return EventLog(
        trace=prepared.trace,
        platform=platform,
        intervals=intervals,
        changes=changes,
        reserved=np.zeros((0, len(RESERVED_COLUMNS)), np.int64),
        end=copies.now,
        complete=complete,
        counters=copies.counters,
    )


class Device:
    """The device. It works on the lists of `Copies` directly: a call per op and list would cost more than the op."""

    def __init__(
        self,
        copies: Copies,
        asked: Asked,
        plan: Plan,
        platform: Platform,
        prepared: Prepared,
        resolved: Resolved,
        program: Program,
        recompute_limit: float | None,
    ) -> None:
        self._copies = copies
        self._asked = asked
        self._prepared = prepared
        self._program = program
        self._recompute_limit = RecomputeLimit(prepared, recompute_limit)
        self._home = prepared.home[prepared.main[0]]
        self._name = platform.tiers[self._home].name
        self._is_watched = plan.online is not None
        self._lazy = plan.keep_dead
        self._lane = prepared.main[0]
        self._tiers = prepared.first_tier  # of what exists from the start
        if resolved.born:
            born = {tensor: tier for tensor, (tier, _) in resolved.born.items()}
            self._tiers = [born.get(tensor, tier) for tensor, tier in enumerate(self._tiers)]

    def place(self) -> None:
        """Tensors without a producer exist from the start."""
        producer, tiers = self._prepared.producer, self._tiers
        self._copies.place((tensor, tiers[tensor]) for tensor in range(len(producer)) if producer[tensor] < 0)

    # ---- ops ---------------------------------------------------------------------------------

    def walk(self) -> None:
        """All runs of ops in order."""
        program, renewals, copies, asked = self._program, self._prepared.renewals, self._copies, self._asked
        changes = copies.changes
        before, after, anchors = program.before, program.after, program.anchors
        for run, (op, plain, why, dying) in enumerate(zip(program.ops, program.plain, program.why, program.dying)):
            if run in before:
                self._act(before[run], anchors[run])
            if why == RECOMPUTE:
                self._recompute(op, counted=True)
                continue
            if asked.asks_before and (slow := asked.before(op)):
                self._answer(slow, op)
            acts = after.get(run, ())
            if plain is not None:
                self._run(op, plain, acts, dying)
            else:
                self._renew(op, renewals[op], acts)
            if len(changes) > Columns.PACK:
                copies.pack()
                asked.tell()
        asked.tell()

    def _run(self, op: int, plain: Plain, acts: Sequence[Act], dying: Sequence[int]) -> None:
        """Run an op once it has what it reads, and space; then follow the steps of the instant at which it ends."""
        copies, prepared, home = self._copies, self._prepared, self._home
        reads, writes, out, workspace, ns = plain
        held, used, changes, bit, is_told = copies.held, copies.used, copies.changes, 1 << home, copies.is_told
        if self._is_watched:
            self._asked.reach(op, reads)
        for tensor in reads:
            if held[tensor] & (bit | LEAVING) != bit:
                self._restore(op)
                break
        if used[home] + out + workspace > copies.capacity[home]:
            copies.pin(prepared.operands[op])
            copies.wait_for_space(home, out + workspace, op, "its results")
            copies.unpin(prepared.operands[op])
        now = copies.now
        for tensor, bytes in writes:
            changes += (now, home, bytes, tensor, op, MADE)
        if workspace:
            changes += (now, home, workspace, -1, op, WORKSPACE)
        used[home] += out + workspace
        end, is_due = now + ns, False
        if ns and (copies.is_stale or copies.wires.next_at <= end):
            is_due = copies.run_beside(prepared.operands[op], end)
        copies.pass_run(now, end, op)
        if workspace:
            used[home] -= workspace
            changes += (end, home, -workspace, -1, op, WORKSPACE)
        for tensor, _ in writes:
            held[tensor] |= bit
            if is_told:
                copies.news.append(("came", tensor, self._name, end))
        copies.op_ended(is_due)
        if acts:
            self._act(acts, op)
            end = copies.now
        if copies.put_off:
            copies.free_touched(prepared.touched[op], op)
        elif dying:
            stage, size, lazy = copies.stage, prepared.size, self._lazy
            for tensor in dying:
                if held[tensor] != bit or stage[tensor]:
                    copies.free_if_dead(tensor, op)
                elif lazy and (lazy is True or tensor in lazy):
                    copies.keep_dead(tensor)
                else:  # the same for the one copy that most have, without a detour
                    held[tensor] = 0
                    used[home] -= size[tensor]
                    changes += (end, home, -size[tensor], tensor, op, FREED)
                    if is_told:
                        copies.news.append(("went", tensor, self._name, end))
        if copies.waiting:
            copies.ask_again()

    # ---- recomputation -----------------------------------------------------------------------

    def _restore(self, op: int) -> None:
        """Have all at home that an op reads; on an explicit stack, what has been released is recomputed."""
        copies, reads = self._copies, self._prepared.reads
        copies.pin(reads[op])
        stack = [op]
        while True:
            here = stack[-1]
            producer = copies.restore(reads[here], self._home, here)
            if producer >= 0:
                copies.count("implicit_recomputes")
                self._open(producer)
                stack.append(producer)
            elif len(stack) > 1:
                self._finish_again(stack.pop(), counted=False)
            else:
                break
        copies.unpin(reads[op])

    def _recompute(self, op: int, *, counted: bool) -> None:
        """Recompute an op, as the plan says or its online part. counted: its reads were expected."""
        self._open(op)
        self._restore(op)
        self._finish_again(op, counted=counted)

    def _open(self, op: int) -> None:
        """An op is to be recomputed: what it reads is pinned until it has ended."""
        self._recompute_limit.spend(op)
        self._copies.pin(self._prepared.reads[op])
        if self._is_watched:
            self._asked.note_reads(op, self._prepared.reads[op])

    def _finish_again(self, op: int, *, counted: bool) -> None:
        """Recompute an op that has what it reads, and follow the steps of the instant at which it ends."""
        copies, prepared = self._copies, self._prepared
        plain = prepared.plain[op]
        copies.pin(prepared.writes[op])
        is_due = self._run_again(op, plain) if plain else self._renew_again(op, prepared.renewals[op])
        copies.unpin(prepared.operands[op])
        copies.op_ended(is_due, counted=counted)
        copies.free_touched(prepared.touched[op], op)
        if plain is None:
            for old, _ in prepared.renewals[op].pairs:
                copies.free_if_dead(old, op)
        copies.ask_again()

    def _renew_again(self, op: int, renewal: Renewal) -> bool:
        """Recompute an op that overwrites values in place; whether something else ends then, too.

        Raises Elsewhere where another op that is being restored needs one of these values.
        """
        copies, home = self._copies, self._home
        reads, pairs, ns = renewal
        if any(copies.pins[old] > (old in reads) for old, _ in pairs):
            raise Elsewhere
        copies.wait_to_overwrite(pairs, reads, home, op)
        now = copies.now
        is_due = ns > 0 and copies.run_beside((), now + ns)
        copies.ran(now, op, RECOMPUTE)
        copies.take_over(pairs, home, op)
        return is_due

    def _run_again(self, op: int, plain: Plain) -> bool:
        """The same of one that does not. Results that are resident are recomputed in workspace.

        Raises Elsewhere where copies of its results are under way.
        """
        copies, prepared, home = self._copies, self._prepared, self._home
        _, writes, out, workspace, ns = plain
        held, used, changes, bit = copies.held, copies.used, copies.changes, 1 << home
        spare = [tensor for tensor, _ in writes if held[tensor] & bit]
        if used[home] + out + workspace > copies.capacity[home]:
            copies.wait_for_space(home, out + workspace, op, "its results")
        if any(copies.stage[tensor] != NONE or (held[tensor] & bit > 0) != (tensor in spare) for tensor, _ in writes):
            raise Elsewhere
        now = copies.now
        for tensor, bytes in writes:
            if tensor in spare:
                changes += (now, home, bytes, -1, op, WORKSPACE)
            else:
                changes += (now, home, bytes, tensor, op, MADE)
        if workspace:
            changes += (now, home, workspace, -1, op, WORKSPACE)
        used[home] += out + workspace
        end, is_due = now + ns, ns > 0 and copies.run_beside((), now + ns)
        copies.ran(now, op, RECOMPUTE)
        for tensor in spare:
            used[home] -= prepared.size[tensor]
            changes += (end, home, -prepared.size[tensor], -1, op, WORKSPACE)
        if workspace:
            used[home] -= workspace
            changes += (end, home, -workspace, -1, op, WORKSPACE)
        for tensor, _ in writes:
            if tensor not in spare:
                held[tensor] |= bit
                if copies.is_told:
                    copies.news.append(("came", tensor, self._name, end))
        return is_due

    def _renew(self, op: int, renewal: Renewal, acts: Sequence[Act]) -> None:
        """Run an op that overwrites values in place."""
        copies, home, bit = self._copies, self._home, 1 << self._home
        reads, pairs, ns = renewal
        if self._is_watched:
            self._asked.reach(op, reads)
        for tensor in reads:
            if copies.held[tensor] & (bit | LEAVING) != bit:
                self._restore(op)
                break
        copies.wait_to_overwrite(pairs, reads, home, op)
        now = copies.now
        is_due = ns > 0 and copies.run_beside(self._prepared.operands[op], now + ns)
        copies.ran(now, op, RUN)
        copies.take_over(pairs, home, op)
        copies.op_ended(is_due)
        self._act(acts, op)
        copies.free_touched(self._prepared.touched[op], op)
        for old, _ in pairs:
            copies.free_if_dead(old, op)
        copies.ask_again()

    def _act(self, acts: Sequence[Act], op: int) -> None:
        """What the plan does before or after an op, but for recomputations."""
        copies = self._copies
        for act in acts:
            if act[3] is not None:
                copies.move(act, op)
            elif act[0] == "drop":
                copies.drop(act[1], act[2], op)
            else:
                copies.wait_for_copy(act[1], op)

    def _answer(self, acts: Sequence[Act], op: int) -> None:
        """What an online part has the device do before an op, in order."""
        for act in acts:
            if act.kind == "wait":
                self._copies.wait_for_copy(act.target, op)
            elif act.kind != "recompute":
                self._asked.apply((act,), op)
            elif act.target < op:
                self._recompute(act.target, counted=False)
            else:
                raise Elsewhere

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """All copies end; what is carried must be where it was, and its spare copies are released.

        Raises Elsewhere where something has to be brought back.
        """
        copies, prepared, home = self._copies, self._prepared, self._home
        copies.drain(len(prepared.total) - 1)
        held, producer = copies.held, prepared.producer
        if not all(held[tensor] for tensor in prepared.trace.outputs):
            raise Elsewhere
        carried = [
            (tensor, self._tiers[first] if producer[first] < 0 else -1) for tensor, first in prepared.trace.carry
        ]
        if not all(tier < 0 or held[tensor] >> tier & 1 for tensor, tier in carried):
            raise Elsewhere
        for tensor, tier in sorted(carried, key=lambda pair: pair[1] in (-1, home)):  # first what belongs elsewhere
            copies.release_spare(tensor, tier)
