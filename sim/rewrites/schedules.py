"""Pipeline schedules: in which order each device runs the forwards and backwards of its parts of the model.

A *part* is a consecutive piece of the model; of S devices with v parts each, device s holds parts s, s + S, …. A *unit*
is what a device runs without a break: the forward, the backward or (where backward is divided) the weight gradients of
one part and one microbatch, or a part's update. In the formulas below F, B and W are the times of a forward, of a
backward (its part for the inputs where it is divided) and of the weight gradients, n the microbatches; stages are
equal and links take no time.

    naive         one microbatch after the other                    nS (F + B)
    gpipe         all forwards, then all backwards                  (n + S - 1) (F + B), n microbatches in flight
    1f1b          S - 1 - s forwards ahead, then alternating        (n + S - 1) (F + B), min(S - s, n) in flight
    interleaved   1f1b over v parts of a device                     idle (S - 1) (F + B), of parts
    zb_h1         1f1b; weight gradients later, s behind            idle (S - 1) (F + B - W)
    zb_v          1f1b of two parts per device, in a V              no idle time inside, 2 S in flight, F = B = W
    dualpipe_v    the same parts, forwards beside backwards         idle (S - 1) F where F = B = W; 2 S + 1 in flight
    pipedream     1f1b, each microbatch with its own update         (n + S - 1) (F + B), S - s versions of weights

gpipe: Huang et al., NeurIPS 2019. 1f1b: DAPPLE (Fan et al., PPoPP 2021), PipeDream-Flush (Narayanan et al., ICML 2021).
interleaved: Narayanan et al., SC 2021, in the order of Megatron-LM. zb_h1: Qi et al., ICLR 2024, in the order that
reproduces their table 5.
"""

from __future__ import annotations

from sim.errors import TraceError, near

Unit = tuple[int, str, int]
"""Part, phase and microbatch. Phases: `forward`, `backward`, `weight` (of a divided backward), `update`."""

SCHEDULES = ("gpipe", "1f1b", "naive", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "pipedream")
FOLDED = frozenset({"zb_v", "dualpipe_v"})
"""Schedules whose devices hold two parts, device s of S the parts s and 2 S - 1 - s: the loss is where the input is."""
DIVIDED = FOLDED | {"zb_h1"}
"""Schedules that run the weight gradients of backward as units of their own."""


def device_of(part: int, stages: int, schedule: str) -> int:
    """The device that holds a part of the model."""
    if schedule in FOLDED and part >= stages:
        return 2 * stages - 1 - part
    return part % stages


def parts_per_device(schedule: str) -> int:
    """How many parts a device has where nothing is said."""
    return 2 if schedule == "interleaved" or schedule in FOLDED else 1


def refusal(schedule: str, stages: int, chunks: int, n: int) -> str:
    """Why a schedule has no order for these numbers: the key at fault, what it needs and the nearest; "" if it has."""
    if schedule == "interleaved":
        if chunks < 2:
            return "chunks: interleaved needs at least 2 parts per device; nearest: 2, or 1f1b"
        if n % stages:
            nearest = max(stages, round(n / stages) * stages)
            return f"micro_batches: interleaved needs a multiple of its {stages} stages, not {n}; nearest: {nearest}"
    elif chunks != parts_per_device(schedule):
        has = parts_per_device(schedule)
        what = "one part" if has == 1 else f"{has} parts"
        return f"chunks: {schedule} has {what} per device, not {chunks}; nearest: {has}"
    if schedule == "dualpipe_v" and n < 2 * stages:
        return f"micro_batches: dualpipe_v needs at least 2 per stage, {2 * stages}, not {n}; nearest: {2 * stages}"
    return ""


def unit_orders(schedule: str, stages: int, chunks: int, n: int) -> list[list[Unit]]:
    """The units of each device in order, updates last (but for `pipedream`).

    schedule: one of `SCHEDULES`.
    stages: devices.
    chunks: parts per device; 2 for the schedules of `FOLDED`, more than 1 otherwise for `interleaved` only.
    n: microbatches.

    Raises TraceError for an unknown schedule, or numbers that it has no order for.
    """
    if schedule not in SCHEDULES:
        raise TraceError(f"pipeline: schedule {schedule!r} is unknown{near(schedule, SCHEDULES)}")
    if why := refusal(schedule, stages, chunks, n):
        raise TraceError(f"pipeline: {why}")
    orders = []
    for s in range(stages):
        forwards: list[Unit] = [(s, "forward", k) for k in range(n)]
        backwards: list[Unit] = [(s, "backward", k) for k in range(n)]
        match schedule:
            case "naive":
                order = [(s, phase, k) for k in range(n) for phase in ("forward", "backward")]
            case "gpipe":
                order = [*forwards, *backwards]
            case "interleaved":
                order = _interleaved(s, stages, chunks, n)
            case "zb_h1":
                order = _zb_h1(s, stages, n)
            case "zb_v":
                order = _zb_v(s, stages, n)
            case "dualpipe_v":
                order = _dualpipe_v(s, stages, n)
            case _:
                order = _alternate(forwards, backwards, stages - 1 - s)
        if schedule == "pipedream":
            orders.append([unit for one in order for unit in _with_update(one)])
        else:
            held = sorted(q for q in range(stages * chunks) if device_of(q, stages, schedule) == s)
            orders.append([*order, *((q, "update", 0) for q in held)])
    return orders


def _with_update(unit: Unit) -> list[Unit]:
    """A unit, and the update that follows it where it is a backward."""
    part, phase, k = unit
    return [unit, (part, "update", k)] if phase == "backward" else [unit]


def _alternate(forwards: list[Unit], backwards: list[Unit], ahead: int) -> list[Unit]:
    """`ahead` forwards, then one forward and one backward alternately, then the rest of the backwards."""
    order = forwards[:ahead]
    for k, backward in enumerate(backwards):
        order += [*forwards[ahead + k : ahead + k + 1], backward]
    return order


def _interleaved(s: int, stages: int, chunks: int, n: int) -> list[Unit]:
    """Rounds of as many microbatches as there are stages go through the parts of a device one after the other."""
    rounds = [(k // (stages * chunks)) * stages + k % stages for k in range(n * chunks)]
    part = [k % (stages * chunks) // stages for k in range(n * chunks)]
    forwards: list[Unit] = [(s + part[k] * stages, "forward", rounds[k]) for k in range(n * chunks)]
    backwards: list[Unit] = [(s + (chunks - 1 - part[k]) * stages, "backward", rounds[k]) for k in range(n * chunks)]
    return _alternate(forwards, backwards, min(n * chunks, 2 * (stages - s - 1) + (chunks - 1) * stages))


def _zb_h1(s: int, stages: int, n: int) -> list[Unit]:
    """1F1B; a microbatch's weight gradients once more than `s` of them wait, and at once when no forward is left."""
    ahead = min(n, stages - 1 - s)
    order: list[Unit] = [(s, "forward", k) for k in range(ahead)]
    weights = 0
    for k in range(n):
        is_steady = ahead + k < n
        if is_steady:
            order.append((s, "forward", ahead + k))
        order.append((s, "backward", k))
        if k + 1 - weights > (s if is_steady else 0):
            order.append((s, "weight", weights))
            weights += 1
    return [*order, *((s, "weight", k) for k in range(weights, n))]


class _Folded:
    """The order of a device with parts 0 (towards the input) and 1; the units of each phase come by microbatch.

    waiting: weight gradients that are left for later, first in, first out.
    """

    def __init__(self, s: int, stages: int) -> None:
        self.parts = (s, 2 * stages - 1 - s)
        self.order: list[Unit] = []
        self.next = {(part, phase): 0 for part in (0, 1) for phase in ("forward", "backward", "weight")}
        self.waiting: list[int] = []

    def add(self, words: str, times: int = 1) -> None:
        """Add units so often: F0, B1, W0 are one unit; X1 is a backward with its weight gradients, Z1 leaves these."""
        for _ in range(times):
            for word in words.split():
                part = int(word[1])
                if word[0] in "BXZ":
                    self._add(part, "backward")
                if word[0] == "Z":
                    self.waiting.append(part)
                if word[0] in "FWX":
                    self._add(part, "forward" if word[0] == "F" else "weight")

    def add_waiting(self) -> None:
        """The weight gradients that have waited longest."""
        self._add(self.waiting.pop(0), "weight")

    def count(self, part: int, phase: str) -> int:
        """How many such units there are."""
        return self.next[part, phase]

    def _add(self, part: int, phase: str) -> None:
        self.order.append((self.parts[part], phase, self.next[part, phase]))
        self.next[part, phase] += 1


def _zb_v(s: int, stages: int, n: int) -> list[Unit]:
    """Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, as PyTorch's `ScheduleZBVZeroBubble`.

    Of fewer than 2 S - 1 microbatches the order is that of as many, the others left out.
    """
    whole, of = max(n, 2 * stages - 1), _Folded(s, stages)
    of.add("F0", 2 * (stages - s) - 1)
    of.add("F1 F0", s)
    of.add("F1 B1 W1", stages - s)
    while of.count(1, "forward") < whole:
        of.add("F0" if of.count(0, "forward") < whole else "")
        of.add("B0 W0 F1 B1 W1")
    of.add("B0 B1", s)
    of.add("B0 W0", stages - s)
    of.add("W1", whole - of.count(1, "weight"))
    of.add("W0", whole - of.count(0, "weight"))
    return [unit for unit in of.order if unit[2] < n]


def _dualpipe_v(s: int, stages: int, n: int) -> list[Unit]:
    """DeepSeek's DualPipeV (github.com/deepseek-ai/DualPipe), whose joint blocks of a forward and a backward run one
    after the other here: what communicates in one may still be hidden by the other.
    """
    after, of = stages - s - 1, _Folded(s, stages)
    of.add("F0", 2 * after)
    of.add("F0 F1", s + 1)
    of.add("X1 F1", after)
    of.add("F0 X1 F1 X0", n - 2 * stages + s + 1)
    of.add("X1 F1 X0", after)
    for k in range(2 * (s + 1)):  # of the backwards, the later half leaves its weight gradients
        of.add(("X" if k < s + 1 else "Z") + str((k + 1) % 2))
    for _ in range(after):
        of.add_waiting()
        of.add("Z0")
    while of.waiting:
        of.add_waiting()
    return of.order
