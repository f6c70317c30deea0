"""The layered scheme for MT-3000: each part does what the survey says of it, alone and beside the others."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import load_profile
from sim.analysis.overlap import overlap
from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS, breaks, check_policy
from sim.errors import OutOfMemory, PolicyError, ProfileError
from sim.experiment import Result, problem_for, simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import WHY
from sim.pages import run_notes
from sim.policies import load
from sim.policies.hybrid.mt3000_layered.engines import mapped
from sim.policies.hybrid.mt3000_layered.zones import borders_of, intense_results, residency_groups
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from sim.trace.chain import Chain, Stage
from workloads import transformer
from workloads.synthetic import uniform_chain

GB = 10**9
ON: dict[str, Any] = {"tiering": "lru", "checkpoints": True, "mapping": "activations"}
ON |= {"release": True, "streams": True, "mode": "delta"}
OFF: dict[str, Any] = {"tiering": "none", "checkpoints": False, "mapping": "none"}
OFF |= {"release": False, "streams": False, "mode": "none"}
SAVES_MEMORY = ("tiering", "release", "checkpoints", "tso")


def alone(part: str) -> dict[str, Any]:
    return {**OFF, "mode": "tso"} if part == "tso" else {**OFF, part: ON[part]}


def without(part: str) -> dict[str, Any]:
    return {**ON, part: OFF[part]}


def machine(zone: int, rate: int = GB, ddr: int = 1 << 50) -> Platform:
    tiers = Tier("zone", zone, zone, 10**12, device=0), Tier("ddr", ddr, ddr, 10**11, kind="ddr")
    links = Link("d2h", "zone", "ddr", rate), Link("h2d", "ddr", "zone", rate)
    return Platform("toy", tiers, (Engine("dsp", 0, "zone", ("zone",), {"fp32": 10**12}),), links)


def run(trace: Trace, platform: Platform, **parameters: Any) -> Result:
    return simulate(trace, platform, "mt3000_layered", **parameters)


def copies(result: Result, lane: str = "d2h") -> list[str]:
    log = result.log
    rows = (log.interval("why") == WHY["move"]) & (log.interval("lane") == log.platform.lanes.index(lane))
    return [log.trace.tensors[t].name for t in log.interval("tensor")[rows]]


def reruns(result: Result) -> list[str]:
    log = result.log
    return [log.trace.ops[op].name for op in log.interval("op")[log.interval("why") == WHY["recompute"]]]


def accesses(text: str, flops: dict[str, int] | None = None, took: dict[str, int] | None = None) -> Trace:
    """One op per word: `A` produces the 10-byte tensor a, `a` reads it; 100 ns each. Final ops read all of them."""
    b = TraceBuilder()
    produced: dict[str, int] = {}
    for i, word in enumerate(text.split()):
        more: dict[str, Any] = {"duration": (took or {}).get(word, 100), "flops": (flops or {}).get(word, 0)}
        if word.isupper():
            produced[word.lower()] = b.tensor(word.lower(), 10)
            b.op(f"{i}{word}", writes=[produced[word.lower()]], dtype="fp32", **more)
        else:
            b.op(f"{i}{word}", reads=[produced[word]], **more)
    for name, tensor in produced.items():
        b.op(f"end.{name}", reads=[tensor], phase="backward", duration=100)
    return b.build()


def small() -> Trace:
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    return transformer(config, batch=4, sequence=64, precision="amp_bf16")


def survey_of(trace: Trace, share: float | None = None) -> Platform:
    """The shipped profile, launches so short that a small model's ops stay; with a share of what the trace needs."""
    survey = load_profile("mt3000_survey", overrides={"engines.dsp.launch": "1 us"})
    return survey if share is None else survey.with_budget(int(share * peak_of(trace, survey)))


def peak_of(trace: Trace, platform: Platform) -> int:
    return int(simulate(trace, platform.with_budget(1 << 50), "keep_all").summary()["peak_bytes"])


# ---- tiering ---------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_to_ddr_and_a_miss_brings_it_back():
    # three fit: producing d sends b (a was read again, c is younger); producing e then sends c
    result = run(accesses("A B C a D E"), machine(30), **alone("tiering"))
    assert copies(result)[:2] == ["b", "c"]
    assert copies(result, "h2d")[0] == "b"
    assert reruns(result) == []


def test_what_is_read_often_goes_after_the_rest():
    trace = accesses("A a a B C D")
    options = {**alone("tiering"), "tiering": "frequency"}
    assert copies(run(trace, machine(30), **alone("tiering")))[0] == "a"
    assert copies(run(trace, machine(30), **options))[0] == "b"
    assert copies(run(trace, machine(30), **options, hits=3))[0] == "a"


def test_tiering_alone_drops_nothing_where_ddr_is_full():
    with pytest.raises(OutOfMemory):
        run(accesses("A B C D E"), machine(30, ddr=10), **alone("tiering"))
    assert reruns(run(accesses("A B C D E"), machine(30, ddr=10), **{**alone("tiering"), "release": True}))


# ---- checkpoints -----------------------------------------------------------------------------------


def line_of(stages: list[tuple[int, int, int]]) -> Chain:
    """A chain whose stages have bytes of input, of what they save, and beside that."""
    x = (*(stage[0] for stage in stages), 1)
    made = tuple(
        Stage((i,), (), (), i, (), 1, 1, entering, saved, 0, beside, 0)
        for i, (entering, saved, beside) in enumerate(stages)
    )
    return Chain(made, x, 0, 0)


STAGES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9)


def working_set(line: Chain, starts: list[int], first: int, last: int) -> int:
    run_of = line.stages[first : last + 1]
    beside = max(max(s.saving_temp, line.x[first + i + 1]) for i, s in enumerate(run_of))
    return sum(line.x[start] for start in starts) + sum(stage.xbar for stage in run_of) + beside


@given(stages=STAGES, room=st.integers(0, 60))
def test_groups_are_maximal_runs_whose_working_set_fits(stages, room):
    line = line_of(stages)
    groups = residency_groups(line, room)
    assert [i for first, last in groups for i in range(first, last + 1)] == list(range(len(line)))
    starts: list[int] = []
    for first, last in groups:
        starts.append(first)
        assert first == last or working_set(line, starts, first, last) <= room
        assert last == len(line) - 1 or working_set(line, starts, first, last + 1) > room


def test_borders_are_what_passes_between_groups_and_there_are_none_where_all_fits():
    trace = uniform_chain(16)
    platform = machine(1 << 40)
    assert borders_of(problem_for(trace, platform)) == ([(0, 15)], [])
    peak = peak_of(trace, platform)
    groups, borders = borders_of(problem_for(trace, platform.with_budget(peak // 2)))
    assert len(groups) == len(borders) + 1 > 1
    for (_, last), border in zip(groups, borders, strict=False):
        assert trace.producer[border] == last  # one op per stage


def test_a_border_leaves_last():
    trace = uniform_chain(24)
    platform = machine(peak_of(trace, machine(1)) // 2, rate=10**15)
    result = run(trace, platform, **{**alone("tiering"), "checkpoints": True})
    borders = result.plan.notes["borders"]
    assert borders
    assert set(borders).isdisjoint(copies(result))
    assert not set(borders).isdisjoint(copies(run(trace, platform, **alone("tiering"))))


def test_results_of_compute_intensive_ops_are_recomputed_and_never_cross():
    trace, flops = accesses("A B C D"), {"A": 1000}  # 1000 FLOPs for 10 bytes
    intense = accesses("A B C D", flops=flops)
    options = {**alone("tiering"), "checkpoints": True}
    assert copies(run(trace, machine(30), **options))[0] == "a"
    first = run(intense, machine(30), **options)
    assert "a" not in copies(first)
    assert "0A" in reruns(first)
    # 10**12 FLOP/s beside 10**12 B/s: the balance of the engine is one FLOP per byte
    problem = problem_for(intense, machine(30))
    assert intense_results(problem, None).tolist() == [True, False, False, False]
    assert not intense_results(problem, 100.0).any()
    assert "a" in copies(run(intense, machine(30), **options, intensity=100.0))


# ---- the mapping table -----------------------------------------------------------------------------


def kinds() -> Trace:
    """A look-up, a product and what backward makes of both."""
    b = TraceBuilder()
    ids, rows, made = b.tensor("ids", 100, "input"), b.tensor("rows", 10**6), b.tensor("made", 10**6)
    b.op("look_up", "embedding", reads=[ids], writes=[rows], dtype="fp32", flops=0)
    b.op("product", "matmul", reads=[rows], writes=[made], dtype="fp32", flops=10**9)
    b.op("back", "matmul", reads=[made, rows], phase="backward", dtype="fp32", flops=10**9)
    return b.build(outputs=[], carry=())


def two_engines(lacks: tuple[str, ...] = (), cpu_peak: int = 10**10, reaches: tuple[str, ...] = ()) -> Platform:
    platform = machine(10**8, rate=10**10)
    (dsp,) = platform.engines
    cpu = Engine("cpu", -1, "ddr", ("ddr", *reaches), {"fp32": cpu_peak}, launch=100, main=False)
    return replace(platform, engines=(replace(dsp, lacks=lacks, launch=1000), cpu))


def engines_of(result: Result) -> dict[str, str]:
    log = result.log
    rows = log.interval("why") == WHY["run"]
    pairs = zip(log.interval("op")[rows].tolist(), log.interval("lane")[rows].tolist(), strict=True)
    return {log.trace.ops[op].name: log.platform.lanes[lane] for op, lane in pairs}


def test_a_kind_without_an_entry_runs_in_the_other_zone_and_its_results_cross():
    lacking = two_engines(lacks=("embedding",))
    with pytest.raises(ProfileError, match="engine 'dsp' cannot run ops of kind 'embedding', such as 'look_up'"):
        run(kinds(), lacking, **without("mapping"))
    result = run(kinds(), lacking, **alone("mapping"))
    assert engines_of(result) == {"look_up": "cpu", "product": "dsp", "back": "dsp"}
    assert result.plan.notes["engines"] == {"embedding": "cpu"}
    assert copies(result, "h2d") == ["rows"]
    assert result.summary()["overhead"] == 0  # what it is compared with runs there, too
    outcome = run_policy(load("mt3000_layered"), kinds(), lacking)
    assert [breaks(check, outcome) for check in CHECKS.values()] == [""] * len(CHECKS)


def test_where_short_memory_has_copies_made_before_the_other_zone_reads_them_the_law_holds():
    """In unlimited memory each copy waits for its reader; the law took the run, which is 0.1 % faster, for a fault."""
    sizes = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    trace = transformer(sizes, batch=4, sequence=64, precision="amp_bf16")
    platform = load_profile("mt3000_survey", overrides={f"links.{way}.rate": "10 GB/s" for way in ("d2h", "h2d")})
    policy = load("mt3000_layered")
    outcome = run_policy(policy, trace, platform.with_budget(5_000_000))
    (unlimited,) = policy.unlimited(problem_for(trace, platform.with_budget(1 << 40))).values()
    assert outcome.log.end < problem_for(trace, platform.with_budget(1 << 40)).evaluate(unlimited).end
    assert [breaks(check, outcome) for check in CHECKS.values()] == [""] * len(CHECKS)


def test_in_mode_tso_no_op_is_sent_to_the_other_zone():
    with pytest.raises(ProfileError, match="cannot run ops of kind 'embedding'"):
        run(kinds(), two_engines(lacks=("embedding",)), mode="tso")


@pytest.mark.parametrize(("peak", "where"), [(10**12, "dsp"), (10**14, "cpu")])
def test_of_two_entries_the_one_of_least_time_copies_included_is_chosen(peak, where):
    # a product takes 1 ms here; there 10 µs, and 100 µs for each copy of 1 MB
    result = run(kinds(), two_engines(cpu_peak=peak), **alone("mapping"))
    assert engines_of(result)["product"] == where
    assert result.plan.trace.op_columns.flops.tolist() == kinds().op_columns.flops.tolist()


def test_a_measured_op_stays_on_its_engine_unless_that_lacks_its_kind():
    b = TraceBuilder()
    b.op("a", "matmul", writes=[b.tensor("x", 8)], duration=10**9, dtype="fp32", flops=1)
    trace = b.build(outputs=[], carry=())
    assert engines_of(run(trace, two_engines())) == {"a": "dsp"}
    elsewhere = run(trace, two_engines(lacks=("matmul",)))
    assert engines_of(elsewhere) == {"a": "cpu"}
    assert elsewhere.summary()["makespan_ns"] < 10**6  # by the model of that engine


def test_what_reads_weights_leaves_the_zone_only_where_that_is_said():
    trace, lacks = small(), {"engines.dsp.runs.embedding": "none", "engines.dsp.launch": "1 us"}
    lacking = load_profile("mt3000_survey", overrides=lacks)
    with pytest.raises(ProfileError, match="cannot run ops of kind 'embedding', such as 'wte'; engines that can: cpu"):
        run(trace, lacking)
    policy = load("mt3000_layered", mapping="all")
    assert policy.manages == ("activations", "gradients", "optimizer_state", "weights")
    outcome = run_policy(policy, trace, lacking)
    assert [breaks(check, outcome) for check in CHECKS.values()] == [""] * len(CHECKS)
    assert set(outcome.plan.notes["engines"]) == {"embedding"}


def test_on_the_shipped_profile_only_ops_shorter_than_a_launch_leave_the_zone():
    trace = transformer("gpt2", batch=4, sequence=512, precision="amp_bf16")
    there, _ = mapped(problem_for(trace, load_profile("mt3000_survey")), roles=("activation", "temporary", "input"))
    # positions and labels, some kB: a launch takes 50 µs on the DSP cores, 10 µs and two copies of 5 µs for the CPU
    assert [trace.ops[op].name for op in sorted(there.op_columns.engine)] == ["positions", "loss.pad", "loss.shift"]


# ---- release and the director ----------------------------------------------------------------------


def test_the_least_of_recompute_cost_over_bytes_and_staleness_leaves():
    # when d asks, at 1400: a = 900 / (10 * 500), b = 300 / (10 * 200), c = 200 / (10 * 0), which is infinite
    trace = accesses("A B C D", took={"A": 900, "B": 300, "C": 200})
    assert copies(run(trace, machine(30), **alone("tiering")))[0] == "a"
    assert copies(run(trace, machine(30), **{**alone("tiering"), "release": True}))[0] == "b"


@pytest.mark.parametrize(("rate", "moved"), [(10**5, False), (10**15, True)])
def test_slow_links_make_the_director_recompute_and_fast_ones_move(rate, moved):
    trace = uniform_chain(24, size=1000, duration=1000)
    platform = machine(peak_of(trace, machine(1)) // 2, rate=rate)
    result = run(trace, platform, checkpoints=False)
    assert bool(copies(result)) is moved
    assert bool(reruns(result)) is not moved


# ---- streams and modes -----------------------------------------------------------------------------


def test_streams_of_their_own_raise_the_overlap():
    trace = small()
    platform = survey_of(trace, 3 / 4)
    options = {"checkpoints": False, "release": False}
    beside, waiting = (run(trace, platform, streams=streams, **options) for streams in (True, False))
    assert copies(waiting)
    assert copies(beside)
    assert overlap(waiting.log).fraction == 0
    assert overlap(beside.log).fraction > 0.5
    assert beside.summary()["makespan_ns"] < waiting.summary()["makespan_ns"]


@pytest.mark.parametrize("others", [{}, {"checkpoints": False}, {"release": False, "tiering": "frequency"}])
def test_in_mode_tso_no_byte_crosses(others):
    trace = small()
    platform = survey_of(trace, 3 / 4)
    result = run(trace, platform, mode="tso", **others)
    assert copies(result) == copies(result, "h2d") == []
    assert reruns(result)
    assert result.plan.notes["segments"]


def test_in_mode_tso_what_is_no_chain_drops_under_pressure():
    result = run(accesses("A B C a D E"), machine(30), mode="tso")
    assert copies(result) == []
    assert reruns(result)


# ---- the codec -------------------------------------------------------------------------------------


def saved_and_read_again(dtype: str) -> Trace:
    """a, of 100 bytes, is produced in forward, leaves for b, and is read in backward."""
    b = TraceBuilder()
    a, wide = b.tensor("a", 1000, dtype=dtype), b.tensor("b", 1600)
    b.op("make_a", writes=[a], duration=10**6)
    b.op("use_a", reads=[a], duration=1000)
    b.op("make_b", writes=[wide], duration=1000)
    b.op("use_b", reads=[wide], duration=1000)
    b.op("a.bwd", reads=[a], phase="backward", duration=1000)
    return b.build(outputs=[], carry=())


@pytest.mark.parametrize(("dtype", "kind"), [("fp32", "fp16"), ("fp16", "fp8"), ("bf16", "fp8"), ("", "half")])
def test_the_codec_halves_the_bytes_that_cross(dtype, kind):
    options = {"checkpoints": False, "streams": False, "mode": "none"}
    trace = saved_and_read_again(dtype)
    plain, half = (run(trace, machine(2000), codec=codec, **options) for codec in ("none", "half"))
    assert plain.summary()["moved_bytes"] == {"d2h": 1000, "h2d": 1000}
    assert half.summary()["moved_bytes"] == {"d2h": 500, "h2d": 500}
    assert copies(half) == copies(half, "h2d") == [f"a.{kind}"]
    assert half.plan.notes["approximate"] == ("a.decoded",)
    assert half.summary()["codec_ns"] > 0


def test_what_has_no_narrower_type_crosses_as_it_is():
    trace = saved_and_read_again("int64")
    result = run(trace, machine(2000), codec="half", checkpoints=False)
    assert result.plan.trace is trace
    assert copies(result) == ["a"]


def test_law_2_names_exactly_the_reads_that_are_approximate():
    trace = small()
    policy = load("mt3000_layered", codec="half", release=False, checkpoints=False)
    assert not policy.lossless
    platform = survey_of(trace, 3 / 4)
    outcome = run_policy(policy, trace, platform)
    assert [breaks(check, outcome) for check in CHECKS.values()] == [""] * len(CHECKS)
    decoded = {name.removesuffix(".decoded") for name in outcome.plan.notes["approximate"]}
    late = {
        op.name for op in trace.ops if op.phase != "forward" and any(trace.tensors[t].name in decoded for t in op.reads)
    }
    found = departures(outcome.plan.trace, trace)
    assert decoded
    assert {(d.what, d.op) for d in found} == {("lossy", name) for name in late}
    assert {d.tensor.removesuffix(".decoded") for d in found} == decoded
    # a policy that did not say so would break the law
    claims_exact = replace(outcome, policy=load("mt3000_layered", release=False, checkpoints=False))
    assert "lossy" in breaks(CHECKS["values"], claims_exact)
    shown = run_notes(simulate(trace, platform, policy))
    assert any(line.startswith(f"approximate, decoded by a lossy codec ({len(decoded)})") for line in shown)


def test_borders_stay_where_they_were_beside_a_codec():
    trace = small()
    platform = survey_of(trace, 3 / 4)
    exact, half = (run(trace, platform, codec=codec).plan.notes for codec in ("none", "half"))
    assert exact["borders"] == half["borders"] != ()


# ---- all of them -----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    values=st.sampled_from(list(product(*([ON[part], OFF[part]] for part in ON), [True, False]))),
    codec=st.sampled_from(["none", "half"]),
)
def test_with_an_infinite_zone_no_part_does_anything(values, codec):
    *parts, tso = values
    switches = dict(zip(ON, parts, strict=True)) | ({"mode": "tso"} if tso else {}) | {"codec": codec}
    trace = small()
    platform = survey_of(trace).with_budget(1 << 50)
    result, plain = run(trace, platform, **switches), simulate(trace, platform, "keep_all")
    assert np.array_equal(result.log.intervals, plain.log.intervals)


@pytest.mark.parametrize("part", [*ON, "tso"])
def test_a_part_alone_keeps_every_law(part):
    check_lawful(alone(part), must_fit=part in SAVES_MEMORY)


@pytest.mark.parametrize("part", ON)
def test_all_parts_but_one_keep_every_law(part):
    check_lawful(without(part), must_fit=True)


def check_lawful(parameters: dict[str, Any], *, must_fit: bool) -> None:
    """Every law on a small transformer in three quarters of its memory; one that saves none is refused by name."""
    trace = small()
    outcome = run_policy(load("mt3000_layered", **parameters), trace, survey_of(trace, 3 / 4))
    assert outcome.done if must_fit else isinstance(outcome.error, OutOfMemory), outcome.error
    assert [breaks(check, outcome) for check in CHECKS.values()] == [""] * len(CHECKS)


def test_the_plan_can_be_pickled_and_gives_the_same_log():
    trace = small()
    platform = survey_of(trace, 3 / 4)
    plan = load("mt3000_layered").plan(problem_for(trace, platform))
    assert pickle.loads(pickle.dumps(plan.online))() is not None
    assert run(trace, platform).log == run(trace, platform).log


def test_without_what_it_plans_ahead_it_knows_the_past_alone(tmp_path):
    policy = load("mt3000_layered", checkpoints=False, mapping="none")
    assert policy.plans_ahead == ""
    report = check_policy(policy, examples=15, name="mt3000_layered", folder=tmp_path, across_processes=False)
    assert report.passed, report.as_text()
    for ahead in ({"checkpoints": True}, {"mapping": "all"}, {"mode": "tso"}, {"codec": "half"}):
        assert replace(policy, **ahead).plans_ahead


def test_it_runs_where_there_is_no_ddr():
    lone = replace(machine(30), links=())
    assert reruns(run(accesses("A B C a D E"), lone))


@pytest.mark.parametrize(("parameters", "text"), [
    ({"tiering": "lfu"}, "tiering is 'lfu'"),
    ({"mode": "detla"}, "mode is 'detla'; expected .*did you mean 'delta'"),
    ({"hits": 0}, "hits is 0"),
    ({"watermark": 1.0}, "watermark is 1.0"),
])  # fmt: skip
def test_bad_parameters_are_refused(parameters, text):
    with pytest.raises(PolicyError, match=text):
        load("mt3000_layered", **parameters)
