"""The block schedule as a plan: ops column by column, beside them the copies of weights, cache and hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sim.plan import Action, Move, Plan
from sim.policies.offload.flexgen.job import Batch, Job
from sim.policies.offload.flexgen.placement import Shares, spread
from sim.rewrites.rewrite import reorder, to_engine
from sim.solvers.streaming import stream_weights
from sim.trace.graph import Trace


def plan_of(job: Job, shares: Shares, tiers: Sequence[str]) -> Plan:
    """The plan for these shares. tiers: device, host and, where there is one, the drive."""
    steps = zig_zag(job.batches, shares.batches)
    order = [op for b, v in steps for op in job.batches[b].visits[v]]
    trace = job.trace if order == sorted(order) else reorder(job.trace, order)
    place = {op: i for i, op in enumerate(order)}
    cache = _cache_tiers(job, shares)
    remote: set[int] = set()
    if shares.on_cpu:
        for batch in job.batches:
            attention = (op for op in job.attention(batch) if cache[_cached(job, batch, op)])
            remote.update(place[op] for op in attention)
        trace = to_engine(trace, remote, "cpu") if remote else trace
    tier_of = _weight_tiers(job, shares)
    actions: list[Action] = []
    start: dict[int, str] = {}
    for level, far in enumerate(tiers[1:], 1):
        others = {t for t, own in tier_of.items() if own != level}
        idle = {t for weights in job.weights.values() for t in weights} - tier_of.keys()
        if len(others) < len(tier_of):
            streamed, begins = stream_weights(trace, job.problem.platform, far, 1, but=others | idle)
            actions += streamed
            start |= begins
    actions += _activations(job, shares, steps, place, cache, remote, tiers, trace)
    fractions = {what: tuple(round(part, 4) for part in parts) for what, parts in shares.parts.items()}
    notes = {"batches": shares.batches, "block_ns": round(shares.ns), "on_cpu": shares.on_cpu, **fractions}
    return Plan(trace, tuple(actions), place=start, notes=notes)


def zig_zag(batches: Sequence[Batch], count: int) -> list[tuple[int, int]]:
    """Batch and visit in the order in which they run: blocks of so many batches, in each all batches visit by visit.

    Batches that visit other layers are in other blocks.
    """
    blocks: list[list[int]] = []
    for b, batch in enumerate(batches):
        if not blocks or len(blocks[-1]) == count or batches[blocks[-1][0]].layers != batch.layers:
            blocks.append([])
        blocks[-1].append(b)
    return [(b, v) for block in blocks for v in range(len(batches[block[0]].visits)) for b in block]


def _weight_tiers(job: Job, shares: Shares) -> dict[int, int]:
    """Per weight its tier, layer by layer in proportion."""
    weights = [t for own in job.weights.values() for t in own]
    return dict(zip(weights, spread([job.size[t] for t in weights], shares.parts["weights"]), strict=True))


def _cache_tiers(job: Job, shares: Shares) -> dict[tuple[int, int], int]:
    """Per batch and layer the tier of the cache: of all batches in proportion, layer by layer."""
    bytes: dict[tuple[int, int], int] = {}
    for b, batch in enumerate(job.batches):
        for t, visits in batch.cache.items():
            pair = batch.layers[visits[0]], b
            bytes[pair] = bytes.get(pair, 0) + job.size[t]
    pairs = sorted(bytes)
    levels = spread([bytes[pair] for pair in pairs], shares.parts["cache"])
    return {(b, layer): level for (layer, b), level in zip(pairs, levels, strict=True)}


def _cached(job: Job, batch: Batch, op: int) -> tuple[int, int]:
    """Batch and layer of the cache that an op reads."""
    t = next(t for t in job.trace.reads(op) if t in batch.cache)
    return job.batches.index(batch), batch.layers[batch.cache[t][0]]


def _activations(
    job: Job,
    shares: Shares,
    steps: Sequence[tuple[int, int]],
    place: dict[int, int],
    cache: dict[tuple[int, int], int],
    remote: set[int],
    tiers: Sequence[str],
    trace: Trace,
) -> Iterator[Action]:
    """Cache and hidden states leave when they are made, and return one batch ahead of their use."""
    at = {step: i for i, step in enumerate(steps)}

    def ahead(b: int, v: int) -> int:
        """The first op of what runs before a visit."""
        before, visit = steps[max(at[b, v] - 1, 0)]
        return place[job.batches[before].visits[visit][0]]

    sizes = [job.size[t] for batch in job.batches for t in batch.hidden]
    hidden = iter(spread(sizes, shares.parts["hidden"]))
    for b, batch in enumerate(job.batches):
        users = {v: {place[op] for op in ops} for v, ops in enumerate(batch.visits)}
        for t, (made, *read) in batch.cache.items():
            level = cache[b, batch.layers[made]]
            if not level:
                continue
            readers = {v: users[v].intersection(trace.readers(t)) for v in (made, *read)}
            last = {v: max(ops) for v, ops in readers.items() if ops}
            own = readers[made]
            stays = max((op for op in own if op not in remote), default=int(trace.producer[t]))
            near = tiers[1] if shares.on_cpu else tiers[0]
            yield Move(t, near if own & remote else tiers[level], after=stays)
            if own & remote and level > 1:
                yield Move(t, tiers[level], after=last[made])
            for v in read:
                where = tiers[1] if last[v] in remote else tiers[0]
                if where == tiers[level]:
                    continue
                yield Move(t, where, keep=True, before=ahead(b, v))
                if v != read[-1]:
                    yield Move(t, tiers[level], after=last[v])
        for t, (made, read_in) in batch.hidden.items():
            level = next(hidden)
            if not level or at[b, read_in] - at[b, made] < 2:
                continue  # nothing runs between
            last_use = max(users[made].intersection((*trace.readers(t), int(trace.producer[t]))))
            yield Move(t, tiers[level], after=last_use)
            yield Move(t, tiers[0], before=ahead(b, read_in))
