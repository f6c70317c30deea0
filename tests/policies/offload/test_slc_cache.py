"""An SLC region as a cache: how long writes take, what is trimmed and folded, and where recomputation is faster."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from sim.errors import PolicyError
from sim.experiment import simulate
from sim.hardware.platform import Link, Member, Platform, Pool, Tier
from sim.hardware.profile import load_profile
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, Facts, facts, machine
from workloads import transformer


def drive(region: int, *, slow: int = GB // 4, read: int = GB) -> Platform:
    """The machine of the other tests with a drive: `region` bytes that take a byte a ns, and cells at `slow` bytes/s.

    The drive does one thing at a time: what is under way shares its time.
    """
    plain = machine()
    tiers = (Tier("slc", region, region, GB, kind="slc"), Tier("tlc", ROOMY, ROOMY, GB, kind="tlc"))
    links = (
        Link("d2slc", "hbm", "slc", GB),
        Link("d2tlc", "hbm", "tlc", slow),
        Link("slc2d", "slc", "hbm", read),
        Link("tlc2d", "tlc", "hbm", read),
        Link("fold", "slc", "tlc", slow),
    )
    shared = Pool("drive", tuple(Member(link.name, Fraction(GB, link.rate)) for link in links), GB)
    return replace(plain, tiers=(*plain.tiers, *tiers), links=(*plain.links, *links), pools=(shared,))


def net(sizes: list[int], took: int = 10, *, cheap: int = 0) -> Trace:
    """Results of these sizes that one backward op each reads, the last first, after an op that needs 1000 bytes.

    cheap: ns of the forward ops where recomputing them is to be possible, 0 for ops that overwrite what they read.
    """
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    kept = []
    for n, size in enumerate(sizes):
        kept.append(b.tensor(f"y{n}", size, layer=n))
        b.op(f"f{n}", "conv", reads=[x], writes=kept[-1:], layer=n, duration=cheap or took)
    d = b.tensor("d", 1, "temporary")
    b.op("loss", "loss", writes=[d], workspace=1000, duration=took, phase="backward")
    for n in reversed(range(len(sizes))):
        made = b.tensor(f"d{n}", 1, "temporary", layer=n)
        b.op(f"f{n}.bwd", "conv", reads=[d, kept[n], x], writes=[made], layer=n, duration=took, phase="backward")
        d = made
    return b.build(outputs=(), carry=())


def run(trace: Trace, platform: Platform, **parameters: object) -> Facts:
    return facts(simulate(trace, platform.with_budget(1010), "slc_cache", **{"recompute": False, **parameters}))


@pytest.mark.parametrize("region", [0, 100, 250, 400, 1000])
def test_so_many_bytes_at_once_take_the_time_of_the_region_and_then_of_the_cells_behind(region) -> None:
    trace = net([50] * 8, took=1)
    done = run(trace, drive(max(region, 1)))
    fast = min(400, region) // 50 * 50  # whole tensors
    ends = [end for lane, _, _, end in done.moves if lane.startswith("d2")]
    assert sum(done.out.values()) == 400
    assert done.result.plan.notes["written"] == {"slc": fast, "tlc": 400 - fast}
    # from the end of the first op on; and what is written first has waited for nothing
    assert max(ends) - 1 == pytest.approx(fast + 4 * (400 - fast), abs=8)


def test_what_returns_is_trimmed_so_that_a_footprint_within_the_region_stays_in_it() -> None:
    trace = net([50] * 8)
    for iterations in (1, 3):
        result = simulate(trace, drive(400).with_budget(1010), "slc_cache", recompute=False, iterations=iterations)
        assert {lane for lane, *_ in facts(result).moves} == {"d2slc", "slc2d"}
        assert result.plan.notes["folded"] == 0


def test_a_tensor_that_has_returned_leaves_its_space_to_the_next() -> None:
    b = TraceBuilder()
    x, held = b.tensor("x", 1, "input"), [b.tensor(f"t{n}", 100) for n in range(3)]
    for n, t in enumerate(held):
        b.op(f"make{n}", "conv", reads=[x], writes=[t], duration=200)
        b.op(f"large{n}", "other", reads=[x], workspace=1000, duration=200)
        b.op(f"use{n}", "conv", reads=[t], duration=200)
    done = run(b.build(outputs=(), carry=()), drive(100))
    assert done.result.plan.notes["written"] == {"slc": 300, "tlc": 0}
    assert {lane for lane, *_ in done.moves} == {"d2slc", "slc2d"}


def test_the_time_bends_where_the_region_ends() -> None:
    trace = net([50] * 8, took=1)
    times = [run(trace, drive(region)).time for region in (1, 100, 200, 300, 400, 500)]
    steps = [before - after for before, after in pairwise(times)]
    assert steps[-1] == 0
    assert all(step == pytest.approx(100 * 3, abs=8) for step in steps[:-1])


def test_folding_makes_space_for_what_is_needed_sooner() -> None:
    trace = net([50, 50, 50, 50], took=100)
    plain = run(trace, drive(100))
    assert plain.result.plan.notes["written"] == {"slc": 100, "tlc": 100}
    folded = run(trace, drive(100), replacement="farthest")
    assert folded.result.plan.notes == {"written": {"slc": 200, "tlc": 0}, "folded": 100, "recomputed": 0}
    moves = [(lane, tensor) for lane, tensor, _, _ in folded.moves if lane == "fold"]
    assert moves == [("fold", "y0"), ("fold", "y1")]  # they are needed last
    assert {tensor for lane, tensor, _, _ in folded.moves if lane == "slc2d"} == {"y2", "y3"}


def test_space_is_free_for_what_leaves_at_the_op_that_uses_what_was_there() -> None:
    b = TraceBuilder()
    x, held = b.tensor("x", 1, "input"), [b.tensor(f"t{n}", 100) for n in range(3)]
    b.op("make0", "conv", reads=[x], writes=[held[0]], duration=200)
    for n in range(2):
        b.op(f"large{n}", "other", reads=[x], workspace=950, duration=200)
        b.op(f"turn{n}", "conv", reads=[held[n]], writes=[held[n + 1]], duration=200)
    b.op("large2", "other", reads=[x], workspace=950, duration=200)
    b.op("last", "conv", reads=[held[2]], duration=200)
    done = run(b.build(outputs=(), carry=()), drive(100))
    assert done.result.plan.notes["written"] == {"slc": 300, "tlc": 0}


def test_what_came_first_is_folded_unless_it_is_needed_before_the_newcomer() -> None:
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    held = [b.tensor(f"t{n}", size) for n, size in enumerate((50, 60, 40))]
    for n, t in enumerate(held):
        b.op(f"make{n}", "conv", reads=[x], writes=[t], duration=100)
    b.op("large", "other", reads=[x], workspace=1000, duration=200)
    for n in (0, 2, 1):  # t1 is needed last
        b.op(f"use{n}", "conv", reads=[held[n]], duration=200)
    done = run(b.build(outputs=(), carry=()), drive(110), replacement="lru")
    assert [(lane, tensor) for lane, tensor, _, _ in done.moves if lane == "fold"] == [("fold", "t1")]
    assert done.result.plan.notes == {"written": {"slc": 150, "tlc": 0}, "folded": 60, "recomputed": 0}


def test_what_is_away_itself_recomputes_nothing() -> None:
    """y1 is made of y0; y0 leaves, so that y1 is read from the drive however slow that is."""
    b = TraceBuilder()
    x, kept = b.tensor("x", 1, "input"), [b.tensor(f"y{n}", 50) for n in range(2)]
    b.op("f0", "conv", reads=[x], writes=kept[:1], duration=100)
    b.op("f1", "conv", reads=kept[:1], writes=kept[1:], duration=100)
    b.op("large", "other", reads=[x], workspace=1000, duration=100)
    b.op("use", "conv", reads=kept, writes=[b.tensor("z", 1)], duration=100)
    slow = drive(1000, read=GB // 100).with_budget(1010)
    done = simulate(b.build(outputs=(), carry=()), slow, "slc_cache")
    assert done.plan.notes["recomputed"] == 1


def test_what_returns_later_than_the_horizon_passes_the_region_by() -> None:
    done = run(net([50] * 4), drive(1000), horizon=50)
    written = {lane: {t for other, t, _, _ in done.moves if other == lane} for lane in ("d2slc", "d2tlc")}
    # y3 is away for the loss alone, 10 ns; y2 for its own forward op, the loss and y3's backward, 30; y1 50, y0 70
    assert written == {"d2slc": {"y1", "y2", "y3"}, "d2tlc": {"y0"}}


def test_what_is_recomputed_faster_than_it_is_read_is_dropped() -> None:
    for read, dropped in ((GB, 0), (GB * 5 // 8, 0), (GB // 100, 4)):  # 50, 80 or 5000 ns; an op takes 100
        done = simulate(net([50] * 4, cheap=100), drive(1000, read=read).with_budget(1010), "slc_cache")
        assert done.plan.notes["recomputed"] == dropped
        assert done.log.counters["implicit_recomputes"] == dropped


def test_the_region_is_faster_than_the_cells_behind_it_and_those_than_a_disk() -> None:
    card = load_profile("mt3000_survey_slc")
    trace = transformer("gpt2", batch=4, sequence=512, precision="amp_bf16")
    peak = facts(simulate(trace, card, "keep_all")).peak
    times = {
        store: simulate(trace, card, "slc_cache", budget=int(0.75 * peak), store=store, recompute=False).log.end
        for store in ("slc", "tlc", "hdd")
    }
    assert times["slc"] < times["tlc"] < times["hdd"]
    best = simulate(trace, card, "slc_cache", budget=int(0.75 * peak), store="hdd")
    assert best.plan.notes["recomputed"] > 0
    assert best.log.end < times["hdd"]


def test_each_device_of_a_pipeline_has_its_part_of_the_region() -> None:
    small = {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 512}
    trace = transformer(small, batch=8, sequence=128, precision="mixed_fp16", optimizer="adamw_fused")
    layout, ran = {"pp": 2, "micro_batches": 2}, {}
    for region in ("1 GB", "5 MB"):
        card = load_profile("mt3000_survey_slc", overrides={"devices": "2", "tiers.slc.capacity": region})
        done = simulate(trace, card, "slc_cache(recompute=False)", parallel=layout, budget="14 MB")
        ran[region] = done.plan.notes["written"]
    assert ran["1 GB"]["tlc"] == 0 < ran["5 MB"]["tlc"]
    assert ran["1 GB"]["slc"] == ran["5 MB"]["slc"] + ran["5 MB"]["tlc"] > 5 * 10**6


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match="slc_cache: toy has no tier of kind 'slc'; mt3000_survey_slc has one"):
        simulate(net([4]), machine(), "slc_cache")
    with pytest.raises(PolicyError, match="slc_cache: toy has no tier of kind 'hdd'"):
        simulate(net([4]), drive(100), "slc_cache", store="hdd")
    with pytest.raises(PolicyError, match="horizon is '-1 ns'; expected"):
        simulate(net([4]), drive(100), "slc_cache", horizon="-1 ns")
