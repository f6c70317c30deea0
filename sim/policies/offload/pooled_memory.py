"""A pool of memory behind a fabric: what the device lacks is spread over its nodes and fetched over several at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from sim.declared import Time
from sim.errors import PolicyError
from sim.hardware.platform import Platform
from sim.hardware.transfer_time import transfer_ns
from sim.plan import Action, Move, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.solvers.load_curve import Absence, Curve, curve_of
from sim.solvers.longest_away import longest_away, most_away, parts
from sim.units import parse_time


@dataclass(frozen=True, kw_only=True)
class PooledMemory(Policy):
    """Spread what memory lacks over the nodes of a pool, and prefetch each tensor in time for its use.

    While more is resident than fits, the tensor that is away longest across the peak leaves, to the node of the pool
    that holds least of what is away then, of those with space for it. Its copy back begins so early that it ends in
    time, in the order of need: the time of one stream before its use, and behind what is needed before it as far as the
    port of the device is shared; and no earlier than memory holds it.
    Source: Zuo et al., "Serving Large Language Models on Huawei CloudMatrix384", arXiv:2506.12708, for the pool and its
        figures; its use for activations in training is the proposal of a survey of domestic platforms, without rules.
    Bounds: all copies of a direction together take at least their bytes over `pool_rate`: the least of the device's
        port, the ports of the nodes and their links. O(offloads x ops).
    Departs: all of it is this package's reading. A tensor lies on one node; several at a time use several. Each of
        several devices has a part of each node, as it needs. There is no tier behind the pool.

    nodes: over how many nodes of the pool tensors are spread; None: all.
    margin: time by which a copy back should end before its use.
    Notes of the plan: `nodes`, by node the bytes sent there; `rate`, bytes/s of these nodes to the device.
    Raises PolicyError for a number below 1, a negative time, or a platform without a tier of kind `pooled`.
    """

    moves = True
    needs = frozenset({"pool"})
    fidelity = "reconstruction"
    rarely = "it moves only what the budget lacks"
    other_values = by_parameter(nodes=1, margin="20 ms")

    nodes: Annotated[int, Ge(1)] | None = None
    margin: Time = 0

    def plan(self, problem: Problem) -> Plan:
        """The copies of each device, out early and back in time."""
        platform = problem.platform
        pool = pool_nodes(platform)[: self.nodes]
        if not pool:
            raise PolicyError(
                f"pooled_memory: {platform.name} has no tier of kind 'pooled' that devices write and read; "
                "cloudmatrix384_die has some"
            )
        margin = parse_time(self.margin) if isinstance(self.margin, str) else int(self.margin)
        actions: list[Action] = []
        sent = dict.fromkeys(pool, 0)
        devices = range(problem.trace.devices)
        curves = [curve_of(problem, device, pool[0]) for device in devices]
        loads = [longest_away(curves[device], platform.home(device).capacity) for device in devices]
        needs = [most_away(chosen) for chosen, _ in loads]
        space = {node: parts(platform.tier(node).capacity, needs) for node in pool}
        for device, curve, (chosen, load) in zip(devices, curves, loads, strict=True):
            home = platform.home(device).name
            where = _spread({node: space[node][device] for node in pool}, chosen, sent)
            actions += [Move(one.tensor, node, after=curve.ops[one.left]) for one, node in where.items()]
            starts = _starts(problem, curve, chosen, load, where, home, margin)
            actions += [Move(one.tensor, home, before=curve.ops[start]) for one, start in starts]
        rate = pool_rate(platform, pool, platform.home(0).name)
        return Plan(problem.trace, tuple(actions), notes={"nodes": sent, "rate": rate})


def pool_nodes(platform: Platform) -> tuple[str, ...]:
    """The shared tiers of kind `pooled` that device 0 writes and reads."""
    home = platform.home(0).name
    shared = (tier for tier in platform.tiers if tier.kind == "pooled" and tier.device == -1)
    return tuple(t.name for t in shared if platform.route(home, t.name) and platform.route(t.name, home))


def _spread(space: Mapping[str, int], chosen: Sequence[Absence], sent: dict[str, int]) -> dict[Absence, str]:
    """Per absence, in order, the node that holds least of what is away then, of those that have space for it.

    space: by node the bytes that it has for this device.
    sent: by node the bytes sent there so far, which grow. Where no node has space the run will say so.
    """
    where: dict[Absence, str] = {}
    pool = list(space)
    for one in sorted(chosen, key=lambda one: (one.left, one.back, one.tensor)):
        away = dict.fromkeys(pool, 0)
        for other, node in where.items():
            away[node] += other.bytes if other.back > one.left else 0
        fits = [node for node in pool if away[node] + one.bytes <= space[node]]
        where[one] = min(fits or pool, key=lambda node: (away[node], sent[node], pool.index(node)))
        sent[where[one]] += one.bytes
    return where


def pool_rate(platform: Platform, nodes: Sequence[str], home: str) -> int:
    """Bytes/s at which all streams from these nodes together reach a device.

    What each node's link carries, no more than any bandwidth that they share, and in sum no more than what all share.
    """
    links = {node: [platform.links[i] for i in platform.route(node, home)] for node in nodes}
    each = {node: min(link.rate for link in route) for node, route in links.items()}
    whole = None
    for pool in platform.pools:
        charge = {member.name: member.charge for member in pool.members}
        users = {node: max(charge[link.name] for link in route if link.name in charge)
                 for node, route in links.items() if any(link.name in charge for link in route)}  # fmt: skip
        if pool.rate is None or not users:
            continue
        for node, share in users.items():
            each[node] = min(each[node], int(pool.rate / share))
        if len(users) == len(nodes):
            limit = int(pool.rate / min(users.values()))
            whole = limit if whole is None else min(whole, limit)
    total = sum(each.values())
    return total if whole is None else min(total, whole)


def _starts(
    problem: Problem,
    curve: Curve,
    chosen: Sequence[Absence],
    load: np.ndarray[tuple[int], np.dtype[np.int64]],
    where: dict[Absence, str],
    home: str,
    margin: int,
) -> Iterator[tuple[Absence, int]]:
    """Per absence the position before which its copy back begins, in the order of need."""
    limit, nodes = problem.platform.tier(home).capacity, tuple(dict.fromkeys(where.values()))
    rate = pool_rate(problem.platform, nodes, home) if nodes else 1
    free = int(curve.end[-1]) if len(curve.end) else 0
    begins: list[tuple[Absence, int]] = []
    for one in sorted(chosen, key=lambda one: (-one.back, -one.left)):
        due = min(int(curve.start[one.back]) - margin, free)
        latest = due - problem.cost.move_ns(one.tensor, where[one], home)
        begin = int(np.searchsorted(curve.start, latest, side="right")) - 1
        begin = min(max(begin, one.left + 1), one.back)
        full = np.flatnonzero(load[begin : one.back] + one.bytes > limit)
        begin += int(full[-1]) + 1 if len(full) else 0
        load[begin : one.back] += one.bytes
        free = due - transfer_ns(one.bytes, rate)
        begins.append((one, begin))
    yield from reversed(begins)
