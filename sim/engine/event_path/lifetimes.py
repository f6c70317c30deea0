"""When a copy of a tensor is released: the one place where that is decided.

    who asks                          what is released                                cause of the row
    the end of an op                  all copies of what nobody needs any more        freed
      a copy that has not begun then
      never does, unless the plan
      waits for it somewhere
    the end of a tensor's last copy   the same, if it died meanwhile                  freed
    pressure, where a plan keeps      what has been dead longest                      freed
      dead tensors
    a Drop of the plan                one copy                                        dropped (freed if it was dead)
    a Move without `keep`             the source, when the copy is complete           moved out
    a Move to where it already is     the copy that the move would have left          moved out
    a Move that is turned round       the copy, as soon as it has arrived             moved out
    an op that writes in place        the old value; its storage is the new one's     overwritten
    the end of the run                spare copies of what the next iteration gets    freed

Retained are: what an op still to run reads (program order, or a planned Recompute), what the program holds until its
release point, what has no producer (unless it has been overwritten), and the outputs. Nothing is released while it is
pinned, that is while an op reads or writes it, nor a copy that a transfer reads or writes: such a release is put off
until the last pin, or the transfer, has ended, and keeps the cause that came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from sim.engine.event_path.clock import Clock, Wake
from sim.engine.event_path.residency import LEAVING, Residency
from sim.engine.event_path.space import OVERWRITTEN, Space
from sim.engine.prepare import Prepared
from sim.log import CAUSE

FREED, DROPPED, MOVED_OUT = CAUSE["freed"], CAUSE["dropped"], CAUSE["moved out"]


class Lifetimes:
    """Per tensor what retains it: uses to come, and pins of ops under way.

    uses: reads still to come, and one more while the program holds it.
    pins: how many ops under way, or being restored, use it where it is.
    put_off: releases that wait: tensor -> tier -> cause.
    dead: what nobody needs, retained only until memory is short, dead longest first.
    """

    def __init__(
        self,
        prepared: Prepared,
        residency: Residency,
        space: Space,
        clock: Clock,
        *,
        lazy: bool | frozenset[int],
        watched: bool,
        waited: Set[int],
    ) -> None:
        """lazy: dead tensors, all or these, stay until memory is short.

        watched: an online part is told of each release.
        waited: tensors for whose copies the plan waits somewhere.
        """
        self.uses = list(prepared.uses)
        self.pins = [0] * len(prepared.size)
        self._prepared = prepared
        self._freeable = prepared.freeable
        self._permanent = prepared.permanent
        self._residency = residency
        self._copies = residency.copies
        self._in_flight = residency.in_flight
        self._space = space
        self._clock = clock
        self._lazy = lazy
        self._waited = waited
        self._tier_of = {} if lazy or watched else {1 << tier: tier for tier in range(len(space.names))}
        self.put_off: dict[int, dict[int, int]] = {}
        self.dead: dict[int, None] = {}
        self.overwriters: dict[int, list[Wake]] = {}

    # ---- retaining ---------------------------------------------------------------------------

    def expect_reads(self, tensors: Iterable[int]) -> None:
        """One more op that reads these is to run."""
        for tensor in tensors:
            self.uses[tensor] += 1

    def pin(self, tensors: Iterable[int]) -> None:
        """Keep these where they are."""
        for tensor in tensors:
            self.pins[tensor] += 1

    def unpin(self, tensors: Iterable[int]) -> None:
        """One reason fewer to keep these where they are."""
        for tensor in tensors:
            self.pins[tensor] -= 1

    def pin_operands(self, op: int) -> None:
        """An op runs: keep what it reads and writes where it is."""
        self.pin(self._prepared.operands[op])

    def unpin_operands(self, op: int) -> None:
        """An op has ended: who waits to overwrite what it read or produced looks again."""
        operands = self._prepared.operands[op]
        self.unpin(operands)
        if self.overwriters:
            self.wake_overwriters(operands)

    def wake_overwriters(self, tensors: Iterable[int]) -> None:
        """Who waits to overwrite these looks again."""
        for tensor in tensors:
            self._clock.wake(self.overwriters.pop(tensor, ()))

    def want_copy(self, tensor: int, tier: int) -> None:
        """A copy there is wanted again: a release of it that was put off is called off."""
        if tensor in self.put_off:
            self.put_off[tensor].pop(tier, None)

    def wait_to_overwrite(self, tensor: int, wake: Wake) -> None:
        """Fire an event when an op that reads or produced a tensor has ended."""
        self.overwriters.setdefault(tensor, []).append(wake)

    # ---- the end of an op --------------------------------------------------------------------

    def note_reads(self, op: int, *, first: bool) -> None:
        """An op that was counted on has read what it reads. first: its first run, at which the program lets go, too."""
        uses = self.uses
        for tensor in self._prepared.reads[op]:
            uses[tensor] -= 1
        if first and self._prepared.releases:
            for tensor in self._prepared.releases.get(op, ()):
                uses[tensor] -= 1

    def free_after(self, op: int) -> None:
        """At the end of an op: what was put off for it, then what nobody needs any more."""
        uses, pins, copies, put_off = self.uses, self.pins, self._copies, self.put_off
        for tensor in self._prepared.touched[op]:
            if pins[tensor] or (uses[tensor] > 0 and not put_off):
                continue
            if tensor in put_off:
                self._release_put_off(tensor, op)
            if uses[tensor] <= 0 and copies[tensor] and not self._permanent[tensor]:
                tier = self._tier_of.get(copies[tensor])
                if tier is None or not self._freeable[tensor] or tensor in self._in_flight:
                    self.free_if_dead(tensor, op)
                else:  # the same for the one copy that most have, without a detour
                    copies[tensor] = 0
                    self._space.give_copy(tensor, tier, op, FREED)

    # ---- releasing ---------------------------------------------------------------------------

    def free_if_dead(self, tensor: int, op: int) -> None:
        """Free a tensor that nothing retains."""
        bits = self._copies[tensor]
        if self.uses[tensor] > 0 or self.pins[tensor] or not bits:
            return
        if not self._freeable[tensor] and not self._is_overwritten(tensor):
            return
        transfer = self._in_flight.get(tensor)
        if transfer is not None and transfer.began < 0 and tensor not in self._waited:
            transfer.call_off()
            if tensor in self.put_off:
                self._release_put_off(tensor, op)
        if self._lazy is True or (self._lazy and tensor in self._lazy):
            self.dead.setdefault(tensor)
        else:
            self._free(tensor, op)

    def _is_overwritten(self, tensor: int) -> bool:
        """Whether another value has taken its place, so that what it was at the start need not be kept."""
        new = self._prepared.replaced_by[tensor]
        return new >= 0 and self._residency.produced[new]

    def _free(self, tensor: int, op: int) -> None:
        """Release every copy; while a transfer is busy with one of them, when it ends."""
        bits = self._copies[tensor] & ~LEAVING
        release = self._release_later if tensor in self._in_flight else self._release_now
        while bits:
            lowest = bits & -bits
            release(tensor, lowest.bit_length() - 1, op, FREED)
            bits -= lowest

    def release(self, tensor: int, tier: int, op: int, cause: int) -> None:
        """Release one copy now, or when its last reader or its transfer has done with it."""
        if self.pins[tensor] or (tensor in self._in_flight and self._in_flight[tensor].touches(tier)):
            self._release_later(tensor, tier, op, cause)
        else:
            self._release_now(tensor, tier, op, cause)

    def release_overwritten(self, tensor: int, tier: int, op: int) -> None:
        """An op has written over a value whose successor is already there: nothing takes its place."""
        self._release_now(tensor, tier, op, OVERWRITTEN)

    def take_over(self, old: int, new: int, tier: int, op: int) -> None:
        """An op has written over a value: its successor takes over the storage."""
        self._space.hand_over(old, new, tier, op)
        self.dead.pop(old, None)
        self._residency.remove(old, tier)

    def free_longest_dead(self, tier: int) -> bool:
        """Free the tensor that has been dead longest in a tier; False if there is none."""
        for tensor in self.dead:
            if self._copies[tensor] & 1 << tier and not self.pins[tensor] and tensor not in self._in_flight:
                self._free(tensor, -1)
                return True
        return False

    def release_spare(self, tensor: int, kept: int | None) -> None:
        """At the end of the run every copy goes but the one that the next iteration begins with."""
        for tier in range(len(self._space.names)):
            if tier != kept and self._residency.has_copy(tensor, tier):
                self._release_now(tensor, tier, -1, FREED)

    # ---- the end of a transfer ---------------------------------------------------------------

    def transfer_ended(self, tensor: int, op: int) -> None:
        """After the last copy of a tensor for now: the releases that waited for it."""
        if tensor in self.put_off and not self.pins[tensor]:
            self._release_put_off(tensor, op)
        if self.uses[tensor] <= 0:
            self.free_if_dead(tensor, -1)

    def transfer_given_up(self, tensor: int, op: int) -> None:
        """If a release waited for a transfer that was replaced, and nothing came in its place, it is due."""
        if tensor in self.put_off and tensor not in self._in_flight and not self.pins[tensor]:
            self._release_put_off(tensor, op)
            self.free_if_dead(tensor, op)

    # ---- doing -------------------------------------------------------------------------------

    def _release_put_off(self, tensor: int, op: int) -> None:
        if tensor not in self._in_flight:
            for tier, cause in sorted(self.put_off.pop(tensor).items()):
                if self._copies[tensor] & 1 << tier:
                    self._release_now(tensor, tier, op, cause)

    def _release_later(self, tensor: int, tier: int, _: int, cause: int) -> None:
        """Once nothing pins the tensor and no transfer is busy with it."""
        self.put_off.setdefault(tensor, {}).setdefault(tier, cause)

    def _release_now(self, tensor: int, tier: int, op: int, cause: int) -> None:
        self._space.give_copy(tensor, tier, op, cause)
        if self._lazy:
            self.dead.pop(tensor, None)
        self._residency.remove(tensor, tier)
