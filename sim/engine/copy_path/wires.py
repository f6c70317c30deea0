"""The links of a run on the copy path: queues by priority, then first come; bandwidth that is shared.

The rules are those of the event path's `links` and `flows`. At most one copy of a tensor is under way, so it is known
by its tensor. A copy over a link that draws from a pool takes the link's fixed time, then flows at its fair share.
"""

from __future__ import annotations

from fractions import Fraction
from heapq import heappop, heappush

from sim.engine.event_path.fairness import FairRates
from sim.engine.prepare import Prepared
from sim.hardware.platform import Platform
from sim.hardware.transfer_time import transfer_ns

NANO = 10**9
NEVER = 1 << 80


class Elsewhere(Exception):
    """What is left to the event path."""


class Wires:
    """All links.

    next_at: when a copy ends next, or begins to flow; NEVER for none. It holds once the instant has been settled.
    is_stale: whether something waits to be started, or for its share, at the end of this instant.
    began: by tensor when its copy has started, -1 for one that waits for its link.
    """

    def __init__(self, platform: Platform, prepared: Prepared) -> None:
        tensors, links = len(prepared.size), platform.links
        self.next_at = NEVER
        self.is_stale = False
        self.began = [-1] * tensors
        self._size = prepared.size
        self._link = [-1] * tensors
        self._delay = [0] * tensors
        self._ticket = [0] * tensors  # of its place in the queue, 0 for none
        self._at = [0] * tensors  # when it ends, or begins to flow
        self._fixed = [link.fixed for link in links]
        self._rate = [link.rate for link in links]
        self._is_shared = [link.name in prepared.charges for link in links]
        self._free = [link.copy_engines for link in links]
        self._queues: list[list[tuple[int, int, int]]] = [[] for _ in links]  # (priority, ticket, tensor)
        self._tickets = 0
        self._stale: set[int] = set()
        self._running: list[int] = []
        # what flows: bytes left in 1e-9 at a time, and the rate from then on
        self._flowing: list[int] = []
        self._left: dict[int, int | Fraction] = {}
        self._flow_rate: dict[int, int | Fraction] = {}
        self._since: dict[int, int] = {}
        self._shares_changed = False
        self._alone = -1  # started when nothing else ran: unless something does, its end is known
        self._rates = FairRates(platform)
        charges = prepared.charges
        self._users = [self._rates.number(((link.name, link.rate, charges.get(link.name, ())),)) for link in links]

    # ---- queues ------------------------------------------------------------------------------

    def submit(self, tensor: int, link: int, priority: int, delay: int) -> None:
        """Queue the copy of a tensor. delay: ns on top of the link's fixed time."""
        self._tickets += 1
        self._ticket[tensor] = self._tickets
        self._link[tensor] = link
        self._delay[tensor] = delay
        self.began[tensor] = -1
        heappush(self._queues[link], (priority, self._tickets, tensor))
        self._stale.add(link)
        self.is_stale = True

    def withdraw(self, tensor: int) -> None:
        """Forget one that has not started."""
        self._ticket[tensor] = 0

    def settle(self, now: int) -> None:
        """The end of an instant: free links start what is first in their queues, and what flows gets its share."""
        self.is_stale = False
        while self._stale:
            link = self._stale.pop()
            queue = self._queues[link]
            while queue and self._free[link]:
                _, ticket, tensor = heappop(queue)
                if ticket == self._ticket[tensor]:
                    self._start(tensor, link, now)
        if self._shares_changed:
            self._share(now)
        at = self._at
        self.next_at = min([at[tensor] for tensor in self._running], default=NEVER)

    def _start(self, tensor: int, link: int, now: int) -> None:
        self._free[link] -= 1
        self.began[tensor] = now
        size, fixed = self._size[tensor], self._fixed[link] + self._delay[tensor]
        if not self._is_shared[link] or not size:
            end = self._at[tensor] = now + transfer_ns(size, self._rate[link], fixed)
            if end == now:
                raise Elsewhere  # the end of an instant that is over
        elif not fixed:
            self._no_more_alone(now)
            self._begin_flow(tensor, now)
        elif self._running:
            self._no_more_alone(now)
            self._at[tensor] = now + fixed
        else:
            self._alone = tensor
            self._begin_flow(tensor, now + fixed)
            rate = self._flow_rate[tensor] = self._rates.of([self._users[link]])[0]
            self._at[tensor] = now + fixed + int(-(-self._left[tensor] // rate))
            self._shares_changed = False
        self._running.append(tensor)

    # ---- time --------------------------------------------------------------------------------

    def ended(self) -> list[int]:
        """The copies that end at `next_at`, by tensor; what begins to flow then does. To be settled afterwards."""
        now, at, size, left = self.next_at, self._at, self._size, self._left
        due = [tensor for tensor in self._running if at[tensor] == now]
        self.is_stale = True
        found = []
        for tensor in sorted(due) if len(due) > 1 else due:
            link = self._link[tensor]
            if tensor in left:
                self._flowing.remove(tensor)
                del left[tensor]
                self._shares_changed = True
            elif self._is_shared[link] and size[tensor]:
                self._begin_flow(tensor, now)
                continue
            self._running.remove(tensor)
            self._free[link] += 1
            self._stale.add(link)
            found.append(tensor)
        return found

    # ---- shared bandwidth --------------------------------------------------------------------

    def _begin_flow(self, tensor: int, time: int) -> None:
        self._flowing.append(tensor)
        self._left[tensor] = self._size[tensor] * NANO
        self._flow_rate[tensor] = 0
        self._since[tensor] = time
        self._shares_changed = True

    def _no_more_alone(self, now: int) -> None:
        """Another copy starts: one that was to flow by itself shares from when it begins to."""
        tensor, self._alone = self._alone, -1
        if tensor in self._left and self._since[tensor] > now:
            self._flowing.remove(tensor)
            del self._left[tensor]
            self._at[tensor] = self._since[tensor]

    def _share(self, now: int) -> None:
        self._shares_changed = False
        flowing, left, since, rates = self._flowing, self._left, self._since, self._flow_rate
        fair = self._rates.of([self._users[self._link[tensor]] for tensor in flowing])
        for tensor, rate in zip(flowing, fair, strict=True):
            if rate == rates[tensor]:
                continue  # it ends when it did
            rest = left[tensor] = left[tensor] - rates[tensor] * (now - since[tensor])
            since[tensor], rates[tensor] = now, rate
            self._at[tensor] = now + int(-(-rest // rate))
