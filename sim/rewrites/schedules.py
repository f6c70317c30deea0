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

gpipe: Huang et al., NeurIPS 2019. 1f1b: DAPPLE (Fan et al., PPoPP 2021), PipeDream-Flush (Narayanan et al., ICML 2021).
interleaved: Narayanan et al., SC 2021, in the order of Megatron-LM. zb_h1: Qi et al., ICLR 2024, in the order that
reproduces their table 5.
"""

from __future__ import annotations

from sim.errors import TraceError, near

Unit = tuple[int, str, int]
"""Part, phase and microbatch. Phases: `forward`, `backward`, `weight` (of a divided backward), `update`."""

SCHEDULES = ("gpipe", "1f1b", "naive", "interleaved", "zb_h1")
DIVIDED = frozenset({"zb_h1"})
"""Schedules that run the weight gradients of backward as units of their own."""


def unit_orders(schedule: str, stages: int, chunks: int, n: int) -> list[list[Unit]]:
    """The units of each device in order, updates last.

    schedule: one of `SCHEDULES`.
    stages: devices.
    chunks: parts per device; more than 1 for `interleaved` only.
    n: microbatches.

    Raises TraceError for an unknown schedule, or numbers that it has no order for.
    """
    if schedule not in SCHEDULES:
        raise TraceError(f"pipeline: schedule {schedule!r} is unknown{near(schedule, SCHEDULES)}")
    if schedule == "interleaved":
        if chunks < 2:
            raise TraceError("pipeline: interleaved needs at least 2 parts per device; nearest: 2, or 1f1b")
        if n % stages:
            nearest = max(stages, round(n / stages) * stages)
            raise TraceError(
                f"pipeline: interleaved needs microbatches that are a multiple of its {stages} stages, not {n}; "
                f"nearest: {nearest}"
            )
    elif chunks > 1:
        raise TraceError(f"pipeline: {schedule} has one part per device, not {chunks}; nearest: interleaved")
    orders = []
    for s in range(stages):
        match schedule:
            case "naive":
                order = [(s, phase, k) for k in range(n) for phase in ("forward", "backward")]
            case "gpipe":
                order = [(s, phase, k) for phase in ("forward", "backward") for k in range(n)]
            case "interleaved":
                order = _interleaved(s, stages, chunks, n)
            case "zb_h1":
                order = _zb_h1(s, stages, n)
            case _:
                forwards: list[Unit] = [(s, "forward", k) for k in range(n)]
                order = _alternate(forwards, [(s, "backward", k) for k in range(n)], stages - 1 - s)
        orders.append([*order, *((s + q * stages, "update", 0) for q in range(chunks))])
    return orders


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
