"""The device of a run on the copy path: it walks its ops in program order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.engine.copy_path.copies import FREED, LEAVING, MADE, Copies
from sim.engine.copy_path.covered import RECOMPUTE, Program, program_of
from sim.engine.copy_path.wires import Elsewhere
from sim.engine.event_path.record import COUNTERS, Columns
from sim.engine.prepare import Plain, Prepared, Renewal
from sim.engine.resolve import Act, Resolved
from sim.hardware.platform import Platform
from sim.log import CAUSE, RESERVED_COLUMNS, EventLog
from sim.plan import Plan

WORKSPACE = CAUSE["workspace"]


def run(
    plan: Plan, platform: Platform, prepared: Prepared, resolved: Resolved, recompute_limit: float | None
) -> EventLog | None:
    """The log of a run that is covered; None if it has to take the event path after all."""
    program = program_of(prepared, resolved)
    spent = sum(max(prepared.total[op], 1) for op in resolved.recomputed)
    if program is None or (recompute_limit is not None and spent > recompute_limit * prepared.ideal_ns):
        return None
    copies = Copies(platform, prepared, resolved, program, asks=plan.online is not None)
    device = Device(copies, prepared, resolved, program)
    try:
        device.place()
        device.walk()
        device.close()
    except Elsewhere:
        return None
    if copies.now >= 2**62:
        return None  # more nanoseconds than a column holds
    intervals, changes = copies.tables()
    return EventLog(
        trace=prepared.trace,
        platform=platform,
        intervals=intervals,
        changes=changes,
        reserved=np.zeros((0, len(RESERVED_COLUMNS)), np.int64),
        end=copies.now,
        counters=dict.fromkeys(COUNTERS, 0) | copies.counters,
    )


class Device:
    """The device. It works on the lists of `Copies` directly: a call per op and list would cost more than the op."""

    def __init__(self, copies: Copies, prepared: Prepared, resolved: Resolved, program: Program) -> None:
        self._copies = copies
        self._prepared = prepared
        self._program = program
        self._home = prepared.home[prepared.main[0]]
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
        program, renewals, copies = self._program, self._prepared.renewals, self._copies
        changes = copies.changes
        before, after, anchors = program.before, program.after, program.anchors
        for run, (op, plain, why, dying) in enumerate(zip(program.ops, program.plain, program.why, program.dying)):
            if run in before:
                self._act(before[run], anchors[run])
            acts = after.get(run, ())
            if plain is not None:
                self._run(op, plain, why, acts, dying)
            else:
                self._renew(op, renewals[op], why, acts)
            if len(changes) > Columns.PACK:
                copies.pack()

    def _run(self, op: int, plain: Plain, why: int, acts: Sequence[Act], dying: Sequence[int]) -> None:
        """Run an op once it has what it reads, and space; then follow the steps of the instant at which it ends."""
        copies, prepared, home = self._copies, self._prepared, self._home
        reads, writes, out, workspace, ns = plain
        held, used, changes, bit = copies.held, copies.used, copies.changes, 1 << home
        for tensor in reads:
            if held[tensor] & (bit | LEAVING) != bit:
                copies.restore(reads, home, op)
                break
        if why == RECOMPUTE and not all(copies.is_absent(tensor) for tensor, _ in writes):
            raise Elsewhere
        if used[home] + out + workspace > copies.capacity[home]:
            copies.wait_for_space(home, out + workspace, op, prepared.operands[op])
        now = copies.now
        for tensor, bytes in writes:
            changes += (now, home, bytes, tensor, op, MADE)
        if workspace:
            changes += (now, home, workspace, -1, op, WORKSPACE)
        used[home] += out + workspace
        end, is_due = now + ns, ns > 0 and copies.run_beside(prepared.operands[op], now + ns)
        copies.ran(now, op, why)
        if workspace:
            used[home] -= workspace
            changes += (end, home, -workspace, -1, op, WORKSPACE)
        for tensor, _ in writes:
            held[tensor] |= bit
        copies.op_ended(is_due)
        if acts:
            self._act(acts, op)
            end = copies.now
        if copies.put_off:
            copies.free_touched(prepared.touched[op], op)
        else:
            stage, size = copies.stage, prepared.size
            for tensor in dying:
                if held[tensor] != bit or stage[tensor]:
                    copies.free_if_dead(tensor, op)
                else:  # the same for the one copy that most have, without a detour
                    held[tensor] = 0
                    used[home] -= size[tensor]
                    changes += (end, home, -size[tensor], tensor, op, FREED)
        copies.ask_again()

    def _renew(self, op: int, renewal: Renewal, why: int, acts: Sequence[Act]) -> None:
        """The same of an op that overwrites values in place."""
        copies, home, bit = self._copies, self._home, 1 << self._home
        reads, pairs, ns = renewal
        for tensor in reads:
            if copies.held[tensor] & (bit | LEAVING) != bit:
                copies.restore(reads, home, op)
                break
        copies.wait_to_overwrite(pairs, reads, home, op)
        now = copies.now
        is_due = ns > 0 and copies.run_beside(self._prepared.operands[op], now + ns)
        copies.ran(now, op, why)
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
