"""Hybrid: against every whole choice on small nets, and against the mechanisms that it joins."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sim.analysis.peak_memory import home_peak, peak_bytes
from sim.errors import Infeasible, OutOfMemory, PolicyError
from sim.experiment import Result, problem_for, simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.hardware.profile import load_profile
from sim.plan import Move
from sim.policies.hybrid.hybrid import drafts as drafts_of_hybrid
from sim.policies.hybrid.hybrid.drafts import Drafts
from sim.policies.hybrid.hybrid.results import OFFLOAD, RECOMPUTE
from sim.rewrites.pipeline import pipeline
from sim.solvers.linear import LinearProgram
from sim.trace import Trace, TraceBuilder
from workloads import transformer
from workloads.cnn import cnn
from workloads.synthetic import unet, w1

MB, MS, GB = 10**6, 10**6, 10**9
PLENTY = 10**15
INFINITE = float("inf")
BATCHES = {"gpt2-small": (4, 512), "gpt2-medium": (2, 512), "llama-1b": (4, 1024)}
"""Batch and sequence of the models of the grid, as in benchmarks/hybrid.py."""


def machine(budget: int, rate: int | None = GB) -> Platform:
    """At 1 GB/s a MB takes a millisecond to copy."""
    tiers = Tier("hbm", budget, budget, 10**12, device=0), Tier("host", PLENTY, PLENTY, 10**11, kind="ddr")
    links = (Link("d2h", "hbm", "host", rate), Link("h2d", "host", "hbm", rate)) if rate else ()
    return Platform("toy", tiers, (Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**12}),), links)


def random_chain(seed: int, *, between: bool = False) -> tuple[Trace, int]:
    """A net of two to four layers with backward and a link's rate, both drawn.

    between: whether a layer's last op reads what forward alone reads, and the second reads that of the first, too.
    """
    draw = random.Random(seed)
    b = TraceBuilder()
    before = b.tensor("x", MB, "input")
    layers, inner = [], []
    for i in range(2 if between else draw.randint(2, 4)):
        result = b.tensor(f"y{i}", draw.randint(1, 6) * MB)
        entering = [before]
        if between:
            inner.append(b.tensor(f"m{i}", draw.randint(1, 6) * MB))
            b.op(f"m{i}", reads=entering, writes=[inner[i]], duration=draw.randint(1, 9) * MS, layer=i)
            entering = [*inner]
        b.op(f"f{i}", reads=entering, writes=[result], duration=draw.randint(1, 9) * MS, layer=i)
        layers.append((before, result))
        before = result
    gradient = b.tensor("gl", MB, "temporary")
    b.op("loss", reads=[before], writes=[gradient], duration=MS)
    for i, (entering, result) in reversed(list(enumerate(layers))):
        passed = b.tensor(f"g{i}", draw.randint(1, 3) * MB, "temporary")
        reads = [gradient, entering, *([result] if draw.random() < 0.5 else [])]
        b.op(f"b{i}", reads=reads, writes=[passed], duration=draw.randint(2, 18) * MS, phase="backward", layer=i)
        gradient = passed
    last = b.tensor("w", MB, "gradient")
    b.op("end", reads=[gradient], writes=[last], duration=MS, phase="backward")
    return b.build(outputs=[last], carry=()), draw.choice([GB // 2, GB, 2 * GB, 5 * GB])


def plain(trace: Trace, platform: Platform) -> Result:
    return simulate(trace, platform, "keep_all", budget=PLENTY)


# ---- drawn by hand -----------------------------------------------------------------------------


def two_layers() -> Trace:
    """y0 (4 MB, 2 ms) is in the way of the loss, right behind its last reader; b1 leaves 6 ms for its way back."""
    b = TraceBuilder()
    x, y0, y1, g = b.tensor("x", 0, "input"), b.tensor("y0", 4 * MB), b.tensor("y1", MB), b.tensor("g", MB, "gradient")
    b.op("f0", reads=[x], writes=[y0], duration=2 * MS)
    b.op("f1", reads=[y0], writes=[y1], duration=MS)
    b.op("loss", reads=[y1], writes=[g], duration=9 * MS, workspace=4 * MB)
    out = b.tensor("out", MB, "gradient")
    b.op("b1", reads=[g], writes=[out], duration=6 * MS, phase="backward")
    end = b.tensor("end", MB, "gradient")
    b.op("b0", reads=[y0, out], writes=[end], duration=MS, phase="backward")
    return b.build(outputs=[end], carry=())


@pytest.mark.parametrize(
    ("rate", "way", "ms"),
    [
        (4 * GB, "offloaded", 19),  # y0 leaves while f1 reads it; b1 covers the way back
        (2 * GB, "offloaded", 19 + 1),  # the loss waits for 1 ms
        (GB, "recomputed", 19 + 2),  # 2 ms of f0 are less than 4 ms of waiting
        (None, "recomputed", 19 + 2),
    ],
)
def test_the_cheaper_way_is_taken(rate, way, ms):
    result = simulate(two_layers(), machine(8 * MB, rate), "hybrid")
    assert (result.log.end, result.plan.notes[f"{way}_bytes"]) == (ms * MS, 4 * MB)


def shared_source(size: int) -> Trace:
    """`a` takes 10 ms, forward alone reads it: for `p` and `q`, 4 MB and 1 ms each, which backward reads one by one."""
    b = TraceBuilder()
    x, a, p, q = b.tensor("x", 0, "input"), b.tensor("a", size * MB), b.tensor("p", 4 * MB), b.tensor("q", 4 * MB)
    b.op("fa", reads=[x], writes=[a], duration=10 * MS)
    b.op("fp", reads=[a], writes=[p], duration=MS)
    b.op("fq", reads=[a], writes=[q], duration=MS)
    before = b.tensor("g0", MB, "gradient")
    b.op("loss", reads=[x], writes=[before], duration=5 * MS, workspace=10 * MB)
    for name, read in (("bq", q), ("idle", x), ("bp", p)):
        after = b.tensor(f"{name}.out", MB, "gradient")
        b.op(name, reads=[before, read], writes=[after], duration=3 * MS, phase="backward")
        before = after
    return b.build(outputs=[before], carry=())


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (1, 1 + 1),  # `a` stays beside the loss in the place of `p` and `q`
        (4, 10 + 1 + 1),  # it does not: it is recomputed once for both
    ],
)
def test_what_forward_alone_reads_is_kept_or_recomputed_once(size, more):
    trace = shared_source(size)
    result = simulate(trace, machine(12 * MB, None), "hybrid")
    assert result.log.end == (26 + more) * MS


def test_what_forward_alone_reads_is_offloaded_only_where_something_is_recomputed_from_it():
    trace = shared_source(1)
    drafts = Drafts(problem_for(trace, machine(PLENTY, GB)))
    ways = {s.tensors[0]: way for s, way in zip(drafts.results.saved, drafts.away().choice, strict=True)}
    moved = {action.tensor for action in drafts.plan(drafts.away()).actions if isinstance(action, Move)}
    assert (ways, moved) == ({1: OFFLOAD, 2: OFFLOAD, 3: OFFLOAD}, {2, 3})
    from_it = drafts.draft([OFFLOAD, RECOMPUTE, RECOMPUTE])
    plan = drafts.plan(from_it)
    assert {action.tensor for action in plan.actions if isinstance(action, Move)} == {1}
    assert problem_for(trace, machine(PLENTY, GB)).evaluate(plan).end == from_it.ns


# ---- brute force -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.55, 0.7, 0.85])
@pytest.mark.parametrize(("seed", "between"), [*((s, False) for s in (0, 1, 3, 4, 7)), *((s, True) for s in range(5))])
def test_no_whole_choice_is_faster_on_small_nets(seed, between, share):
    trace, rate = random_chain(seed, between=between)
    budget = int(home_peak(plain(trace, machine(1, rate)).log) * share)
    problem = problem_for(trace, machine(budget, rate))
    drafts = Drafts(problem)
    ends = []
    for choice in itertools.product(*(drafts.results.ways(i) for i in range(len(drafts.results.saved)))):
        with contextlib.suppress(OutOfMemory):
            ends.append(problem.evaluate(drafts.plan(drafts.draft(choice))).end)
    if ends:
        assert simulate(trace, machine(budget, rate), "hybrid").log.end == min(ends)
    else:
        with pytest.raises(Infeasible) as refusal:
            simulate(trace, machine(budget, rate), "hybrid")
        floor = refusal.value.floor_bytes
        assert simulate(trace, machine(floor, rate), "hybrid").log.complete
        with pytest.raises(Infeasible):
            simulate(trace, machine(floor - 1, rate), "hybrid")


@pytest.mark.parametrize("between", [False, True])
def test_a_draft_that_misses_is_repaired_wherever_some_choice_fits(between):
    """From all kept, which leaves everything to the repair, on nets on which all choices can be tried."""
    repaired = fastest = 0
    for seed, share in itertools.product(range(12), (0.55, 0.7, 0.85)):
        trace, rate = random_chain(seed, between=between)
        budget = int(home_peak(plain(trace, machine(1, rate)).log) * share)
        drafts = Drafts(problem_for(trace, machine(budget, rate)))
        ways = [drafts.results.ways(i) for i in range(len(drafts.results.saved))]
        if fitting := [draft.ns for draft in map(drafts.draft, itertools.product(*ways)) if not draft.excess]:
            found = drafts.repaired(drafts.kept(), None)
            assert not found.excess, (seed, share)
            repaired, fastest = repaired + 1, fastest + (found.ns == min(fitting))
    assert repaired >= 5
    assert fastest >= 0.9 * repaired


# ---- the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_model_times_a_draft_as_the_engine_does(seed, between):
    trace, rate = random_chain(seed, between=between)
    problem = problem_for(trace, machine(PLENTY, rate))
    drafts = Drafts(problem)
    for choice in itertools.product(*(drafts.results.ways(i) for i in range(len(drafts.results.saved)))):
        draft = drafts.draft(choice)
        log = problem.evaluate(drafts.plan(draft))
        assert (draft.excess, draft.ns) == (0, log.end)
        assert draft.least_bytes <= home_peak(log)


# ---- what it must not lose to -------------------------------------------------------------------

OTHERS = ("keep_all", "full_recompute", "selective_recompute", "every_k", "swap_all", "vdnn")


def overheads(trace: Trace, platform: Platform, budget: int, names: Iterable[str]) -> dict[str, int]:
    """Makespans of the policies that fit."""
    found = {}
    for name in names:
        with contextlib.suppress(Infeasible, PolicyError):
            found[name] = simulate(trace, platform, name, budget=budget).log.end
    return found


@pytest.mark.parametrize("share", [0.45, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(20, 26))
def test_on_small_nets_it_is_never_slower_than_the_mechanisms_that_it_joins(seed, share):
    trace, rate = random_chain(seed)
    platform = machine(1, rate)
    budget = int(home_peak(plain(trace, platform).log) * share)
    found = overheads(trace, platform, budget, ("hybrid", *OTHERS))
    assert not found or found["hybrid"] == min(found.values())


SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 1000, "n_positions": 256}
NETS = {
    "unet": lambda: unet(4, size=1 << 22),
    "microbatches": lambda: transformer(SMALL, batch=8, sequence=256, precision="bf16", micro_batches=2),
    "in place": lambda: cnn("alexnet", batch=64),
}


@pytest.mark.parametrize("net", NETS)
def test_on_other_nets_it_is_never_slower(net):
    trace = NETS[net]()
    platform = load_profile("mt3000_survey", overrides={f"links.{way}.rate": "8 GB/s" for way in ("d2h", "h2d")})
    peaks = []
    for name in ("full_recompute", "swap_all"):
        with contextlib.suppress(PolicyError):
            peaks.append(home_peak(simulate(trace, platform, name, budget=PLENTY).log))
    budget = int(min(peaks) + 0.2 * (home_peak(plain(trace, platform).log) - min(peaks)))
    found = overheads(trace, platform, budget, ("hybrid", *OTHERS))
    assert found["hybrid"] == min(found.values())


def two_devices(budget: int) -> Platform:
    tiers = [Tier(f"hbm{i}", budget, budget, 10**12, device=i) for i in range(2)]
    engines = tuple(Engine(f"npu{i}", i, f"hbm{i}", (f"hbm{i}",), {"fp32": 10**12, "fp16": 10**14}) for i in range(2))
    links = [Link(f"d2h{i}", f"hbm{i}", "host", 8 * GB) for i in range(2)]
    links += [Link(f"h2d{i}", "host", f"hbm{i}", 8 * GB) for i in range(2)]
    links += [Link("there", "hbm0", "hbm1", 50 * GB), Link("back", "hbm1", "hbm0", 50 * GB)]
    return Platform("two", (*tiers, Tier("host", PLENTY, PLENTY, 10**11, kind="ddr")), engines, tuple(links))


def test_two_devices_are_planned_each_on_its_own():
    trace = pipeline(w1(4), [0, 0, 1, 1], 2)
    kept = peak_bytes(plain(trace, two_devices(PLENTY)).log)
    budget = int(0.8 * max(kept["hbm0"], kept["hbm1"]))
    found = overheads(trace, two_devices(budget), budget, ("hybrid", *OTHERS))
    assert found["hybrid"] == min(found.values())


def test_without_a_host_it_recomputes():
    trace, lone = two_layers(), machine(8 * MB, None)
    assert simulate(trace, lone, "hybrid").plan.notes["recomputed_bytes"] == 4 * MB


def test_beside_zero_offload_it_sees_what_that_moves():
    """Its own model would count states and gradients, which are on the host; the replay shows that they are."""
    trace = transformer(SMALL, batch=8, sequence=256, precision="amp_bf16")
    platform = load_profile("mt3000_survey", overrides={f"links.{way}.rate": "10 GB/s" for way in ("d2h", "h2d")})
    alone = simulate(trace, platform, "zero_offload + full_recompute", budget=PLENTY).log
    names = [f"zero_offload + {name}" for name in ("hybrid", "full_recompute", "swap_all")]
    found = overheads(trace, platform, home_peak(alone), names)
    assert found[names[0]] == min(found.values())


def linked(rate: int) -> Platform:
    return load_profile("mt3000_survey", overrides={f"links.{way}.rate": f"{rate} GB/s" for way in ("d2h", "h2d")})


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1408, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip


def test_where_another_part_keeps_the_link_busy_it_drops_rather_than_copies():
    trace, platform = transformer(LLAMA, batch=16, sequence=128, precision="amp_bf16"), linked(1)
    budget = home_peak(simulate(trace, platform, "zero_offload + full_recompute", budget=PLENTY).log)
    found = overheads(trace, platform, budget, [f"zero_offload + {name}" for name in ("hybrid", "twremat")])
    assert found["zero_offload + hybrid"] <= found["zero_offload + twremat"]


def test_a_draft_that_misses_by_little_beside_another_part_shows_where():
    """The fastest drafts lack 0.3 MB beside gradients that are still leaving; others cost 4 %."""
    trace, platform = transformer(SMALL, batch=8, sequence=256, precision="amp_bf16"), linked(10)
    kept, least = (
        simulate(trace, platform, text, budget=PLENTY).log for text in ("zero_offload", "zero_offload + full_recompute")
    )
    budget = int(home_peak(least) + 0.3 * (home_peak(kept) - home_peak(least)))
    assert simulate(trace, platform, "zero_offload + hybrid", budget=budget).log.end == kept.end


@pytest.mark.parametrize(("batch", "budget", "other"), [(8, 663_200_000, "dtr"), (32, 1_118_600_000, "twremat")])
def test_near_the_least_memory_a_draft_that_misses_by_little_is_mended(batch, budget, other):
    """A ResNet-101 at a budget that hardly a policy fits: blind changes of single choices did not lead to a draft."""
    trace, platform = cnn("resnet-101", batch=batch), linked(5)
    kept, single = plain(trace, platform).log.end, simulate(trace, platform, other, budget=budget).log.end
    problem = problem_for(trace, platform.with_budget(budget))
    drafts = Drafts(problem)
    best = min(drafts.search(6), key=lambda draft: draft.rank)
    end = problem.evaluate(drafts.plan(best)).end
    assert end - kept < 0.4 * (single - kept)


# ---- transformers ------------------------------------------------------------------------------

SINGLE = ("full_recompute", "selective_recompute", "swap_all", "twremat")


@pytest.mark.parametrize(("rate", "margin"), [(5, 0.05), (20, 0.0)])
def test_it_is_faster_than_each_mechanism_alone(rate, margin):
    trace = transformer("gpt2", batch=2, sequence=512, precision="amp_bf16")
    links = {f"links.{way}.rate": f"{rate} GB/s" for way in ("d2h", "h2d")}
    platform = load_profile("mt3000_survey", overrides=links)
    kept = plain(trace, platform).log
    least = home_peak(simulate(trace, platform, "full_recompute", budget=PLENTY).log)
    budget = int(least + 0.2 * (home_peak(kept) - least))
    mine = simulate(trace, platform, "hybrid", budget=budget).log.end / kept.end
    others = []
    for name in SINGLE:
        with contextlib.suppress(Infeasible):
            others.append(simulate(trace, platform, name, budget=budget).log.end / kept.end)
    assert mine <= min(others) - margin


def test_a_draft_that_just_misses_the_budget_is_followed_by_one_that_fits(monkeypatch):
    """On large traces, where there is work for two rounds only, one tensor too many must not decide."""
    monkeypatch.setattr(drafts_of_hybrid, "WORK", 1)
    trace = transformer(SMALL | {"n_layer": 8}, batch=4, sequence=256, precision="amp_bf16")
    platform = load_profile("mt3000_survey", overrides={f"links.{way}.rate": "2 GB/s" for way in ("d2h", "h2d")})
    kept = plain(trace, platform).log
    least = home_peak(simulate(trace, platform, "full_recompute", budget=PLENTY).log)
    budget = int(least + 0.7 * (home_peak(kept) - least))
    assert simulate(trace, platform, "hybrid", budget=budget).log.end < 1.05 * kept.end


# ---- the grid ----------------------------------------------------------------------------------

CELLS = json.loads((Path(__file__).parents[3] / "benchmarks" / "hybrid.json").read_text(encoding="utf-8"))


def test_on_the_grid_it_is_never_slower_than_what_does_not_contain_it():
    for cell in CELLS:
        others = [took for name, took in cell["overhead"].items() if "hybrid" not in name and took is not None]
        assert cell["overhead"]["hybrid"] <= min(others, default=INFINITE) + 1e-4, cell


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", CELLS[::13], ids=lambda cell: " ".join(str(cell[key]) for key in ("model", "rate", "share"))
)
def test_the_cells_are_what_is_simulated_now(cell):
    batch, sequence = BATCHES[cell["model"]]
    trace = transformer(cell["model"], batch=batch, sequence=sequence, precision="amp_bf16")
    rates = {f"links.{way}.rate": f"{cell['rate']} GB/s" for way in ("d2h", "h2d")}
    platform = load_profile("mt3000_survey", overrides=rates | {"tiers.zone.bandwidth": f"{cell['bandwidth']} GB/s"})
    kept = plain(trace, platform).log
    mine = simulate(trace, platform, "hybrid", budget=cell["budget"]).log
    assert mine.end / kept.end - 1 == pytest.approx(cell["overhead"]["hybrid"], abs=1e-3)


def test_where_the_update_does_not_fit_the_refusal_names_what_does():
    # one update of all weights, with temporaries of their size; its backward needs less
    trace = transformer("gpt2", batch=1, sequence=64, precision="amp_bf16")
    budget = int(0.9 * home_peak(simulate(trace, "mt3000_survey", budget="100 GB").log))
    with pytest.raises(Infeasible, match=r"it is the update that does not fit.* 'optimizer_in_backward \+ hybrid'"):
        simulate(trace, "mt3000_survey", "hybrid", budget=budget)
    for text in ("optimizer_in_backward + hybrid", "zero_offload + hybrid"):
        assert simulate(trace, "mt3000_survey", text, budget=budget).log.complete


def test_where_state_and_gradients_leave_too_little_the_refusal_names_what_moves_them():
    trace, floors = transformer(SMALL | {"n_layer": 4}, batch=8, sequence=128, precision="bf16"), set()
    for budget, named in ((1 * MB, False), (25 * MB, True)):  # in 1 MB the weights alone do not fit
        with pytest.raises(Infeasible) as refused:
            simulate(trace, "mt3000_survey", "hybrid", budget=budget)
        floors.add(refused.value.floor_bytes)
        beside = f"{6 * trace.meta['parameters'] / MB:.2f} MB in all, stay here: join a policy for them, as in 'zero"
        assert (beside in str(refused.value)) == named
    assert len(floors) == 1
    assert simulate(trace, "mt3000_survey", "zero_offload + hybrid", budget=25 * MB).log.complete


def test_where_backward_ends_first_the_refusal_still_names_the_update():
    """The draft of least memory keeps more in backward than it must: the update's needs are what counts for it."""
    b = TraceBuilder()
    x, y, z = b.tensor("x", MB, "input"), b.tensor("y", 4 * MB), b.tensor("z", 4 * MB)
    w, g, t = b.tensor("w", MB, "weight"), b.tensor("g", MB, "gradient"), b.tensor("t", 20 * MB, "temporary")
    new = b.tensor("new", MB, "weight", replaces=w)
    b.op("f0", reads=[x, w], writes=[y], duration=MS)
    b.op("f1", reads=[y], writes=[z], duration=MS)
    b.op("b", reads=[y, z], writes=[g], duration=MS, phase="backward")
    b.op("mul", reads=[g], writes=[t], duration=MS, phase="update")
    b.op("add", reads=[w, t], writes=[new], duration=MS, phase="update")
    trace = b.build(outputs=[new], carry=[(new, w)])
    with pytest.raises(Infeasible, match="it is the update that does not fit"):
        simulate(trace, machine(8 * MB), "hybrid")


@pytest.mark.slow  # every draft is refused, and each budget that is tried has some
def test_where_the_host_is_too_small_the_refusal_names_the_host():
    config = {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    trace = transformer(config, batch=4, sequence=128)
    small = load_profile("a100_40_pcie", overrides={"tiers.host.capacity": "3 MB"})
    with pytest.raises(OutOfMemory, match="in 'host'"):  # which holds the states, and not a budget that would do
        simulate(trace, small, "zero_offload + hybrid", budget="30 MB")


def test_where_the_solver_finds_nothing_the_choice_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS gives up now and then, with neither an answer nor a proof that there is none."""

    def unsolved(self: LinearProgram, **_: object) -> SimpleNamespace:
        return SimpleNamespace(x=None, status=4)

    monkeypatch.setattr(LinearProgram, "solve", unsolved)
    fitted = 0
    for seed in range(8):
        trace, rate = random_chain(seed)
        budget = home_peak(simulate(trace, machine(PLENTY, rate), "keep_all").log) * 9 // 10
        with contextlib.suppress(Infeasible):
            assert home_peak(simulate(trace, machine(budget, rate), "hybrid").log) <= budget
            fitted += 1
    assert fitted
