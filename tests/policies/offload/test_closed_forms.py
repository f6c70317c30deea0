"""Four layers drawn by hand: bytes each way, peaks and the least time in closed form, and the runs that meet them.

The formulas know the published rules alone, and share nothing with the policies but the trace. A byte takes a
nanosecond on a link of 1 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, permutations
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.experiment import simulate
from sim.hardware.platform import Link, Platform, Tier
from sim.trace import Trace, TraceBuilder
from tests.policies.compression.test_cswap import fast
from tests.policies.offload.conftest import GB, ROOMY, Facts, facts, machine
from tests.policies.offload.test_flashneuron import with_drive

LAYERS = 4
INPUT = SMALL = 4
"""Bytes of the trace's input, which stays, and of each gradient."""

QUICK = settings(max_examples=25, deadline=None)


@dataclass(frozen=True)
class Job:
    """Four layers, each of which saves its result for backward. sizes in bytes, times in ns."""

    sizes: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    loss: int

    def trace(self, workspace: int = 0) -> Trace:
        """workspace: bytes that the loss alone needs."""
        b = TraceBuilder()
        y = [b.tensor("x", INPUT, "input")]
        for n, (size, took) in enumerate(zip(self.sizes, self.forward, strict=True), 1):
            y.append(b.tensor(f"y{n}", size, layer=n, dtype="fp32", shape=(1, size // 4)))
            b.op(f"f{n}", "conv", reads=[y[-2]], writes=[y[-1]], layer=n, duration=took)
        d = b.tensor("d", SMALL, "temporary")
        b.op("loss", "loss", writes=[d], phase="backward", duration=self.loss, workspace=workspace)
        for n in range(LAYERS, 0, -1):
            made = b.tensor(f"d{n}", SMALL, "temporary", layer=n)
            took = self.backward[n - 1]
            b.op(f"b{n}", "conv", reads=[d, y[n]], writes=[made], layer=n, phase="backward", duration=took)
            d = made
        return b.build(outputs=(), carry=())

    @property
    def forward_ends(self) -> list[int]:
        return list(accumulate(self.forward))

    def away(self, copies: Sequence[int]) -> list[int]:
        """When each of the first results has left, over one link in order, each after its last use in forward."""
        ends, free, away = self.forward_ends, 0, []
        for n, copy in enumerate(copies):
            free = max(free, ends[min(n + 1, LAYERS - 1)]) + copy
            away.append(free)
        return away

    def end(self, begins: int, arrives: dict[int, int]) -> int:
        """The end of backward, which begins at a time and reads the results at their arrival."""
        time = begins
        for n in reversed(range(LAYERS)):
            time = max(time, arrives.get(n, 0)) + self.backward[n]
        return time


NS = st.sampled_from((10, 50, 100, 300))
SIZE = st.integers(1, 100).map(lambda n: 4 * n)


def four(values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[values] * LAYERS)


JOBS = st.builds(Job, four(SIZE), four(NS), four(NS), st.sampled_from((10, 100)))


def least_where_the_loss_needs_space(job: Job, count: int) -> int:
    """The first `count` results leave, the loss begins when the last has left, and they return in the order of need."""
    begins = max(job.forward_ends[-1], job.away(job.sizes[:count])[-1]) + job.loss
    arrives, free = {}, begins
    for n in reversed(range(count)):
        free += job.sizes[n]
        arrives[n] = free
    return job.end(begins, arrives)


def pooled() -> Platform:
    plain = machine()
    return replace(plain, tiers=tuple(replace(t, kind="pooled") if t.name == "host" else t for t in plain.tiers))


def by_region() -> Platform:
    """A drive whose regions read and write a byte a nanosecond, at the same time."""
    plain = machine()
    tiers = [Tier(kind, ROOMY, ROOMY, GB, kind=kind) for kind in ("slc", "tlc")]
    links = [Link(f"d2{tier}", "hbm", tier, GB) for tier in ("slc", "tlc")]
    links += [Link(f"{tier}2d", tier, "hbm", GB) for tier in ("slc", "tlc")]
    links += [Link("fold", "slc", "tlc", GB)]
    return replace(plain, tiers=(*plain.tiers, *tiers), links=(*plain.links, *links))


@pytest.mark.parametrize(
    ("policy", "platform"), [("pooled_memory", pooled()), ("slc_cache(recompute=False)", by_region())]
)
@QUICK
@given(JOBS, st.integers(1, LAYERS), st.data())
def test_what_the_loss_lacks_crosses_once_each_way_in_the_least_time(policy, platform, job, count, data) -> None:
    """The first results are away longest: they leave, as many as the loss lacks bytes; none of them is one too many."""
    leave = job.sizes[:count]
    lacks = data.draw(st.integers(max(sum(leave) - min(leave), 0) + 1, sum(leave)))
    budget = 2 * sum(job.sizes) + 64
    trace = job.trace(workspace=lacks + budget - sum(job.sizes) - INPUT - SMALL)
    done = facts(simulate(trace, platform.with_budget(budget), policy))
    assert done.out == done.back == {f"y{n}": size for n, size in enumerate(leave, 1)}
    assert done.host_peak == sum(leave)
    assert done.peak == budget - (sum(leave) - lacks), "the loss with what it needs, which is most"
    assert done.time == least_where_the_loss_needs_space(job, count)


@QUICK
@given(JOBS, st.integers(1, LAYERS), *[st.sampled_from((GB // 4, GB // 2, GB, 2 * GB))] * 2)
def test_flashneuron_writes_what_is_needed_past_the_host_and_is_late_by_what_its_drive_is(job, count, write, read):
    """The first results leave until there are enough; where all have left with forward, backward waits for reads alone.

    A copy back begins with an op, and when its tensor has left.
    """
    need, free = sum(job.sizes[:count]), 10 * sum(job.sizes)
    share = (sum(job.sizes) - need + 0.5) / free
    platform = with_drive(free + INPUT, write=write, read=read)
    done = facts(simulate(job.trace(), platform, "flashneuron", share=share))
    away = job.away([ceil(size * GB / write) for size in job.sizes[:count]])
    end = job.forward_ends[-1]
    assert done.result.plan.notes["needed_bytes"] == need
    assert done.result.plan.notes["late_ns"] == max(away[-1] - end, 0)
    assert "host" not in {tier for tier, peak in done.result.summary()["peak_by_tier"].items() if peak}
    if away[-1] > end:
        return
    assert done.out == done.back == {f"y{n}": size for n, size in enumerate(job.sizes[:count], 1)}
    assert done.result.summary()["peak_by_tier"]["drive"] == need
    starts = list(accumulate((*job.forward, job.loss, *job.backward[:0:-1]), initial=0))
    begins = [min((start for start in starts if start >= left), default=starts[-1]) for left in away]
    best = None
    for order in permutations(range(count)):
        free_at, arrives = 0, {}
        for n in order:
            free_at = max(free_at, begins[n]) + ceil(job.sizes[n] * GB / read)
            arrives[n] = free_at
        time = job.end(end + job.loss, arrives)
        best = time if best is None else min(best, time)
    assert done.time == best


@QUICK
@given(JOBS)
def test_gist_keeps_half_of_each_result_for_the_time_of_both_conversions(job) -> None:
    """Each converts what it reads and writes at the memory's rate; the original lives until its code is there."""
    sizes, codes = job.sizes, [size // 2 for size in job.sizes]
    trace = job.trace(workspace=sum(sizes))
    done = facts(simulate(trace, machine(), "gist", precision="fp16"))
    plain = sum(job.forward) + job.loss + sum(job.backward)
    assert done.time == plain + 2 * sum(size + code for size, code in zip(sizes, codes, strict=True))
    assert (done.moves, done.host_peak) == ([], 0)
    held = [sum(codes), sum(sizes) + SMALL]  # the loss
    moments = [sum(held)]
    for n in range(LAYERS):
        before = sum(codes[:n])
        above = sizes[n + 1] if n + 1 < LAYERS else 0
        moments.append(before + sizes[n] + codes[n] + above)  # its conversion, after the layer that reads it
        moments.append(before + codes[n] + sizes[n] + SMALL)  # and back
        moments.append(before + sizes[n] + 2 * SMALL)  # its backward
    assert done.peak == INPUT + max(moments)


# ---- vDNN's chain: each layer saves its input, and ends with its copy --------------------------------------


LOSS = 20


def chain(
    sizes: Sequence[int], forward: Sequence[int], backward: Sequence[int], zeros: Sequence[float | None]
) -> Trace:
    """Four convolutions whose inputs have these sizes and shares of zeros, and a loss that takes 20 ns backward."""
    b = TraceBuilder()
    x = [b.tensor("x1", sizes[0], "input", dtype="fp32", shape=(sizes[0] // 4,))]
    for n in range(1, LAYERS + 1):
        size, zero = (sizes[n], zeros[n]) if n < LAYERS else (SMALL, None)
        x.append(b.tensor(f"x{n + 1}", size, layer=n, zeros=zero, dtype="fp32", shape=(size // 4,)))
        b.op(f"f{n}", "conv", reads=[x[-2]], writes=[x[-1]], layer=n, duration=forward[n - 1])
    d = b.tensor("d5", SMALL, "temporary")
    b.op("loss", "loss", reads=[x[-1]], writes=[b.tensor("out", 0)], duration=0)
    b.op("loss.bwd", "loss", reads=[x[-1]], writes=[d], phase="backward", duration=LOSS)
    for n in range(LAYERS, 0, -1):
        made = b.tensor(f"d{n}", sizes[n - 1], "temporary", layer=n)
        took = backward[n - 1]
        b.op(f"b{n}", "conv", reads=[d, x[n - 1]], writes=[made], layer=n, phase="backward", duration=took)
        d = made
    return b.build(outputs=(), carry=())


def layers_end_with_their_copies(
    forward: Sequence[int], backward: Sequence[int], copies: Sequence[int], codecs: Sequence[int] = (0,) * LAYERS
) -> int:
    """Each layer and the copy of its input; in backward that of the layer below. Codecs stand alone, one each way."""
    time = sum(codec + max(took, copy) for codec, took, copy in zip(codecs, forward, copies, strict=True))
    time += max(LOSS, copies[-1])
    for n in range(LAYERS - 1, 0, -1):
        time += codecs[n] + max(backward[n], copies[n - 1])
    return time + codecs[0] + backward[0]


def zero_values(size: int, zeros: float | None) -> int:
    """A bit per element, and those that are not zero."""
    return ceil(size / 4 / 8) + 4 * ceil(size / 4 * (1 - (zeros or 0)))


def sparse_rows(size: int, zeros: float) -> int:
    """Value and column of those that are not zero, and a pointer per 256."""
    return 5 * ceil(size / 4 * (1 - zeros)) + 4 * ceil(size / 4 / 256)


INPUTS = four(st.integers(2, 150).map(lambda n: 4 * n))
ZEROS = st.tuples(st.none(), *[st.sampled_from((0.0, 0.25, 0.5, 0.75, 0.9))] * (LAYERS - 1))
RATES = st.sampled_from((GB // 2, GB, 2 * GB))
LONG = four(st.sampled_from((10, 50, 100, 300, 600)))


@QUICK
@given(INPUTS, LONG, LONG, ZEROS, RATES, st.sampled_from((GB // 2, GB, 3 * GB, 200 * GB)))
def test_cdma_takes_the_slower_of_layer_link_and_codec(sizes, forward, backward, zeros, rate, codec) -> None:
    done = facts(
        simulate(chain(sizes, forward, backward, zeros), machine(rate=rate), "cdma", variant="all", codec=codec)
    )
    wires = [zero_values(size, zero) for size, zero in zip(sizes, zeros, strict=True)]
    copies = [max(ceil(wire * GB / rate), ceil(size * GB / codec)) for wire, size in zip(wires, sizes, strict=True)]
    assert done.time == layers_end_with_their_copies(forward, backward, copies)
    assert sum(done.out.values()) == sum(done.back.values()) == done.host_peak == sum(wires)
    below = (0, *sizes[:-1])
    layer = [first + second for first, second in zip(sizes, (*sizes[1:], SMALL), strict=True)]
    back = [x + above + d + under for x, above, d, under in zip(sizes, (*sizes[1:], SMALL), sizes, below, strict=True)]
    assert done.peak == max(*layer, 2 * SMALL + sizes[-1], *back)


@pytest.mark.parametrize("choose", ["always", "model"])
@QUICK
@given(INPUTS, LONG, LONG, ZEROS, RATES, st.sampled_from((GB // 2, GB, 4 * GB, 20 * GB)))
def test_cswap_is_the_best_of_all_choices(choose, sizes, forward, backward, zeros, rate, codec) -> None:
    """Of every set of tensors to compress, drawn up one by one; or all that become smaller."""
    trace, platform = chain(sizes, forward, backward, zeros), fast(rate)
    done = facts(simulate(trace, platform, "cswap", variant="all", choose=choose, throughput=codec))
    code = {n: min(zero_values(sizes[n], zeros[n]), sparse_rows(sizes[n], zeros[n])) for n in range(1, LAYERS)}
    smaller = [n for n in code if code[n] < sizes[n]]
    found = {}
    for chosen in (set(some) for count in range(LAYERS) for some in combinations(smaller, count)):
        wires = [code[n] if n in chosen else sizes[n] for n in range(LAYERS)]
        # a codec passes over memory at 1,000 bytes a nanosecond, where that is slower
        took = [
            max(ceil(sizes[n] * GB / codec), ceil((sizes[n] + wires[n]) / 1000)) * (n in chosen) for n in range(LAYERS)
        ]
        copies = [ceil(wire * GB / rate) for wire in wires]
        found[frozenset(chosen)] = layers_end_with_their_copies(forward, backward, copies, took), sum(wires)
    time, wire = found[frozenset(smaller)] if choose == "always" else min(found.values())
    assert done.time == time
    assert sum(done.out.values()) == sum(done.back.values()) == done.host_peak
    if choose == "always":
        assert done.host_peak == wire


def test_of_copies_back_that_begin_together_what_is_read_first_comes_first() -> None:
    """All four leave for the loss, and return behind it: the last layer's result is read first."""
    job = Job((224, 312, 392, 396), (10, 100, 50, 10), (300, 10, 50, 10), 10)
    budget = sum(job.sizes) + 64
    trace = job.trace(workspace=budget - INPUT - SMALL)
    done: Facts = facts(simulate(trace, by_region().with_budget(budget), "slc_cache(recompute=False)"))
    assert [tensor for lane, tensor, _, _ in done.moves if lane == "slc2d"] == ["y4", "y3", "y2", "y1"]
    assert done.time == least_where_the_loss_needs_space(job, LAYERS)
