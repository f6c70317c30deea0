"""XEngine (TACO 2022): Checkmate's program over several engines, each with a memory of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import product
from typing import Any

import pytest

from sim.analysis.peak_memory import home_peak
from sim.errors import Infeasible, PolicyError
from sim.experiment import Result, problem_for, reference_for, simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.log import WHY
from sim.policies import load
from sim.trace import Trace, TraceBuilder
from tests.machines import GB, machine

AMPLE = 1 << 40


def two_engines(
    hbm: int, host: int = AMPLE, *, cpu: int = GB // 10, rate: int = GB, lacks: tuple[str, ...] = ()
) -> Platform:
    """`npu` with 1 FLOP/ns on `hbm`, and `cpu` with so many FLOP/s on `host`."""
    platform = machine(hbm, host=host, rate=rate, cpu="host")
    npu, beside = platform.engines
    return replace(platform, engines=(npu, replace(beside, peak={"fp32": cpu}, lacks=lacks)))


def chain(length: int) -> Trace:
    """Ops of 10 FLOPs forward and back, each result 100 bytes."""
    b = TraceBuilder()
    x = [b.tensor(f"x{i}", 100) for i in range(length)]
    g = [b.tensor(f"g{i}", 100) for i in range(length)]
    for i in range(length):
        b.op(f"f{i}", "elementwise", reads=x[i - 1 : i] if i else [], writes=[x[i]], flops=10, bytes=0)
    for i in reversed(range(length)):
        reads = [*(x[i - 1 : i] if i else []), *g[i + 1 : i + 2]]
        b.op(f"b{i}", "elementwise", reads=reads, writes=[g[i]], flops=10, bytes=0, phase="backward")
    return b.build(outputs=[], carry=())


def run(trace: Trace, platform: Platform, **parameters: Any) -> Result:
    result = simulate(trace, platform, "xengine", **parameters)
    assert home_peak(result.log) <= platform.home(0).capacity
    assert result.log.counters["ignored_actions"] == result.log.counters["implicit_recomputes"] == 0
    return result


def engines(result: Result) -> set[str]:
    return set(result.plan.notes["engines"])


# ---- one engine ------------------------------------------------------------------------------------

OPTIMA = {(4, 300): 90, (4, 400): 80, (6, 300): 180, (6, 400): 140, (6, 500): 130, (8, 400): 210, (8, 500): 190}


@pytest.mark.parametrize(("length", "budget"), OPTIMA)
def test_one_engine_is_checkmates_optimum(length, budget):
    # the optima of the chain are known; a byte takes a second, and the other engine runs no op
    platform = two_engines(budget, rate=1, lacks=("elementwise",))
    mine = run(chain(length), platform)
    theirs = simulate(chain(length), platform, "checkmate")
    assert mine.log.end == theirs.log.end == mine.plan.notes["serial_ns"] == OPTIMA[length, budget]
    assert mine.plan.notes["program"] == "optimal"


@pytest.mark.parametrize("host", [300, AMPLE])
@pytest.mark.parametrize("cpu", [GB // 10, GB // 2, GB * 5 // 8, GB])
def test_copies_too_expensive_to_make_leave_the_best_single_engine(host, cpu):
    mine = run(chain(6), two_engines(400, host, cpu=cpu, rate=1))
    device = OPTIMA[6, 400]
    beside = (120 if host == AMPLE else OPTIMA[6, 300]) * GB // cpu
    assert mine.plan.notes["serial_ns"] == mine.log.end == min(device, beside)
    assert len(engines(mine)) == 1
    assert not (mine.log.interval("why") == WHY["move"]).any()


# ---- two engines -----------------------------------------------------------------------------------


def halves() -> Trace:
    """Two ops with an input of 200 bytes each, which stays; the second reads the first's result."""
    b = TraceBuilder()
    inputs = [b.tensor(f"w{i}", 200, "input") for i in range(2)]
    between, last = b.tensor("between", 10), b.tensor("last", 10)
    b.op("first", "matmul", reads=inputs[:1], writes=[between], flops=10)
    b.op("second", "matmul", reads=[inputs[1], between], writes=[last], flops=10)
    return b.build(outputs=[], carry=())


def test_both_memories_fit_what_neither_does():
    result = run(halves(), two_engines(250, 250))
    assert engines(result) == {"npu", "cpu"}
    assert result.plan.notes["program"] == "optimal"
    with pytest.raises(Infeasible, match=r"no plan of this class fits 250 B in 'hbm'; .* the program needs 420 B"):
        run(halves(), two_engines(250, 250, lacks=("matmul",)))
    with pytest.raises(
        Infeasible, match=r"fits 209 B in 'hbm' and 250 B in 'host'; .* the program needs 210 B in 'hbm'"
    ):
        run(halves(), two_engines(209, 250))


def net(layers: int = 3) -> Trace:
    """Layers with weights, and an update in place."""
    b = TraceBuilder()
    weights = [b.tensor(f"w{i}", 60, "weight") for i in range(layers)]
    x, gradients, new = [b.tensor("x", 100, "input")], [], []
    for i, weight in enumerate(weights):
        x.append(b.tensor(f"y{i}", 100))
        b.op(f"f{i}", "matmul", reads=[x[-2], weight], writes=[x[-1]], flops=20)
    g = b.tensor("g", 100)
    b.op("loss", "loss", reads=[x[-1]], writes=[g], flops=1)
    for i in reversed(range(layers)):
        gradients.insert(0, b.tensor(f"gw{i}", 60, "gradient"))
        reads, g = [x[i], weights[i], g], b.tensor(f"g{i}", 100)
        b.op(f"b{i}", "matmul", reads=reads, writes=[gradients[0], g], flops=40, phase="backward")
    for i, weight in enumerate(weights):
        new.append(b.tensor(f"new{i}", 60, "weight", replaces=weight))
        b.op(f"u{i}", "optimizer", reads=[weight, gradients[i]], writes=[new[-1]], flops=1, phase="update")
    return b.build(outputs=new, carry=list(zip(new, weights, strict=True)))


@pytest.mark.parametrize("budget", [400, 500, 600, 900])
def test_training_on_two_engines_ends_where_it_began(budget):
    result = run(net(), two_engines(budget, 500, cpu=GB // 4, rate=10 * GB))
    notes = result.plan.notes
    assert notes["program"] == "optimal"
    assert notes["bound_ns"] == notes["serial_ns"]
    # ops of another engine run beside the device: never later than one after the other
    assert result.log.end <= notes["serial_ns"]
    assert result.log.counters["returned_moves"] == 0
    assert engines(result) == ({"npu", "cpu"} if budget < 900 else {"npu"})


def test_unlimited_memory_has_engines_beside_each_other():
    platform = two_engines(600, 500, cpu=GB // 4, rate=10 * GB)
    mine, ample = run(net(), platform), run(net(), two_engines(AMPLE, 500, cpu=GB // 4, rate=10 * GB))
    # the program knows nothing of that, so that a plan for less memory may happen to be faster
    assert mine.log.end < ample.log.end
    assert reference_for(load("xengine"), net(), platform).makespan_ns <= mine.log.end


# ---- a machine that is shipped ---------------------------------------------------------------------


def recommender(rows: int) -> Trace:
    """26 lookups per sample in a table of fp32 rows of 32, and two dense layers; SGD that touches the rows read."""
    batch, width, looked_up, b = 2048, 512, 26 * 32, TraceBuilder({"model": "recommender"})
    ids, found = b.tensor("ids", 8 * 26 * batch, "input"), 4 * looked_up * batch
    table, first, second = (b.tensor(n, 4 * s, "weight") for n, s in
                            (("table", 32 * rows), ("w0", looked_up * width), ("w1", width * width)))  # fmt: skip
    e, x, y = b.tensor("e", found), b.tensor("x", 4 * width * batch), b.tensor("y", 4 * width * batch)
    flops = [2 * batch * looked_up * width, 2 * batch * width * width]
    b.op("lookup", "embedding", reads=[ids, table], writes=[e], bytes=2 * found, dtype="fp32")
    b.op("fc0", "matmul", reads=[e, first], writes=[x], flops=flops[0], dtype="fp32")
    b.op("fc1", "matmul", reads=[x, second], writes=[y], flops=flops[1], dtype="fp32")
    dy, dx = (b.tensor(n, 4 * width * batch, "temporary") for n in ("dy", "dx"))
    g0, g1, de = b.tensor("g0", 4 * looked_up * width, "gradient"), b.tensor("g1", 4 * width * width, "gradient"), None
    de = b.tensor("de", found, "gradient")
    b.op("loss", "loss", reads=[y], writes=[dy], flops=batch * width, dtype="fp32")
    for name, reads, made, k in (("w1", [dy, x], g1, 1), ("x", [dy, second], dx, 1), ("w0", [dx, e], g0, 0),
                                 ("e", [dx, first], de, 0)):  # fmt: skip
        b.op(f"{name}.bwd", "matmul", reads=reads, writes=[made], flops=flops[k], dtype="fp32", phase="backward")
    new = []
    for old, gradient, more in ((first, g0, {}), (second, g1, {}), (table, de, {"bytes": 3 * found})):
        new.append(b.tensor(f"new{len(new)}", b.bytes_of(old), "weight", replaces=old))
        b.op(
            f"sgd{len(new)}", "optimizer", reads=[old, gradient], writes=new[-1:], dtype="fp32", phase="update", **more
        )
    return b.build(outputs=new, carry=list(zip(new, (first, second, table), strict=True)))


def test_on_mt3000_a_table_larger_than_the_zone_stays_with_the_cpu_and_products_go_to_the_dsps():
    trace = recommender(100_000_000)  # 12.8 GB, and the zone has 8
    result = simulate(trace, "mt3000_survey", "xengine")
    assert result.plan.notes["program"] == "optimal"
    assert result.plan.notes["engines"] == {"cpu": 2, "dsp": 9}
    for other in ("keep_all", "hybrid", "weight_streaming", "zero_offload"):
        with pytest.raises(Infeasible):
            simulate(trace, "mt3000_survey", other)
    alone = load_profile("mt3000_survey", overrides={"engines.dsp.runs.default": "none"})
    assert simulate(trace, alone, "xengine").log.end > 4 * result.log.end


# ---- brute force -----------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[Trace, Platform]:
    """A graph of up to five ops, and two small memories."""
    rng, b, tensors = random.Random(seed), TraceBuilder(), list[int]()
    for i in range(rng.choice([3, 4, 5])):
        reads = rng.sample(tensors, min(len(tensors), rng.choice([0, 1, 1, 2])))
        tensors.append(b.tensor(f"t{i}", rng.choice([10, 20, 30])))
        workspace = rng.choice([0, 0, 10])
        flops = rng.choice([10, 20, 50])
        b.op(f"o{i}", "matmul", reads=reads, writes=tensors[-1:], flops=flops, bytes=0, workspace=workspace)
    rates = {"cpu": rng.choice([GB // 2, GB, 2 * GB]), "rate": rng.choice([GB // 2, GB, 10 * GB])}
    return b.build(outputs=[], carry=()), two_engines(rng.choice([40, 50, 60]), rng.choice([40, 50, 60]), **rates)


def least_ns(trace: Trace, platform: Platform) -> int | None:
    """The least serial time over all engines of ops, recomputations, copies and drops, by Dijkstra's algorithm."""
    speed = platform.engines[1].peak["fp32"]
    ns = [(op.flops, -(-op.flops * GB // speed)) for op in trace.ops]
    copy = [platform.move_ns(tensor.bytes, "hbm", "host") for tensor in trace.tensors]
    best: int | None = None
    for memory in product((0, 1), repeat=len(trace.ops)):
        found = _shortest(trace, memory, [ns[op][m] for op, m in enumerate(memory)], platform, copy, best)
        best = best if found is None else found
    return best


def _shortest(
    trace: Trace, memory: Sequence[int], ns: Sequence[int], platform: Platform, copy: Sequence[int], best: int | None
) -> int | None:
    """The least time with these memories, None where it is not below `best`.

    A state: the next op, and which tensors are resident, a bit per tensor and memory. Anything may be recomputed and
    copied at any time, which is more than the program allows.
    """
    size, capacity = [tensor.bytes for tensor in trace.tensors], [tier.capacity for tier in platform.tiers]
    needs = [sum(1 << 2 * t + memory[op.id] for t in op.reads) for op in trace.ops]
    least, queue = {(0, 0): 0}, [(0, 0, 0)]
    while queue:
        now, following, lies = heappop(queue)
        if best is not None and now >= best:
            return None
        if following == len(trace.ops):
            return now
        if now > least[following, lies]:
            continue
        used = [sum(size[t] for t in range(following) if lies >> 2 * t + m & 1) for m in (0, 1)]
        nexts = []
        for t, m in product(range(following), (0, 1)):
            bit, other = 1 << 2 * t + m, 1 << 2 * t + 1 - m
            if lies & bit:
                nexts.append((0, following, lies & ~bit))
                if not lies & other and used[1 - m] + size[t] <= capacity[1 - m]:
                    nexts.append((copy[t], following, lies | other))
        for op in range(following + 1):
            m, bit = memory[op], 1 << 2 * op + memory[op]
            fits = used[m] + size[op] + trace.ops[op].workspace <= capacity[m]
            if fits and not lies & bit and lies & needs[op] == needs[op]:
                nexts.append((ns[op], max(following, op + 1), lies | bit))
        for took, reached, new in nexts:
            if now + took < least.get((reached, new), 1 << 60):
                least[reached, new] = now + took
                heappush(queue, (now + took, reached, new))
    return None


@pytest.mark.parametrize("seed", range(28))
def test_the_program_finds_what_brute_force_finds(seed):
    trace, platform = drawn(seed)
    best = least_ns(trace, platform)
    if best is None:
        with pytest.raises(Infeasible, match="no plan of this class fits"):
            run(trace, platform)
        return
    result = run(trace, platform)
    assert result.plan.notes["serial_ns"] == best
    assert result.plan.notes["program"] == "optimal"
    assert result.log.end <= best


# ---- errors ----------------------------------------------------------------------------------------


def test_what_it_cannot_plan_it_refuses():
    def refused(trace: Trace, platform: Platform, said: str, **parameters: Any) -> None:
        with pytest.raises(PolicyError, match=said):
            simulate(trace, platform, "xengine", **parameters)

    refused(chain(4), machine(300, host=AMPLE), "toy has one, 'npu': take the policy 'checkmate'")
    refused(chain(21), two_engines(300), "for 40 ops at most .max_ops.; there are 42")
    refused(chain(4), two_engines(300), "for 7 ops at most .max_ops.; there are 8", max_ops=7)
    refused(chain(18), two_engines(300), "limit of time; raise node_limit or time_limit", time_limit=1e-6)
    b = TraceBuilder()
    for device in range(2):
        b.op(f"op{device}", device=device)
    refused(b.build(), machine(300, host=AMPLE, devices=2, cpu="host"), "plans for one device; this trace has 2")
    platform = two_engines(300)
    npu = replace(platform.engines[0], reaches=("hbm", "host"))
    in_place = replace(platform, engines=(npu, platform.engines[1]))
    refused(chain(4), in_place, "'npu' reads 'host' in place")


def test_a_tier_in_reach_that_is_nobodys_home_does_not_matter():
    # the host's processor reads pageable memory, too, where nothing of the program lies
    result = simulate(chain(4), load_profile("a100_40_pcie"), "xengine")
    assert engines(result) == {"gpu"}
    assert result.plan.notes["program"] == "optimal"


def test_a_measured_op_stays_on_its_engine():
    b = TraceBuilder()
    x = b.tensor("x", 100)
    b.op("measured", "matmul", writes=[x], flops=10, duration=1000)
    b.op("named", "matmul", reads=[x], writes=[b.tensor("y", 100)], flops=10, engine="npu")
    trace = b.build(outputs=[], carry=())
    result = run(trace, two_engines(AMPLE, cpu=100 * GB))
    assert engines(result) == {"npu"}
    assert problem_for(trace, two_engines(AMPLE)).cost.op_ns(0) == 1000


def test_what_has_no_bytes_is_copied_for_nothing_and_maybe_when_nothing_is_left_of_it():
    """Found by a thousand examples of the law: the plan of such an answer ended with a KeyError."""
    b = TraceBuilder()
    sizes = {"y0": 1, "y1": 0, "y2": 16, "y3": 64, "y4": 64, "d": 64, "d4": 64, "d4.1": 1, "d3": 16, "d2": 0, "d1": 1}
    t = {"x": b.tensor("x", 16, "input"), **{name: b.tensor(name, size) for name, size in sizes.items()}}
    t["sum"] = b.tensor("sum", 1, replaces=t["d4.1"])

    def op(name: str, reads: str, writes: str, flops: int = 0) -> None:
        phase = "backward" if ".bwd" in name or name in ("loss", "add") else "forward"
        named = [[t[one] for one in text.split()] for text in (reads, writes)]
        b.op(name, "elementwise", reads=named[0], writes=named[1], flops=flops, phase=phase)

    for name, reads, writes, flops in (
        ("f0", "x", "y0", 200),
        ("f1", "y0 x", "y1", 0),
        ("f2", "y1", "y2", 200),
        ("f3", "y2", "y3", 200),
        ("f4", "y3 y0", "y4", 0),
        ("loss", "y4", "d", 20),
        ("f4.bwd", "d y4", "d4 d4.1", 0),
        ("f3.bwd", "d4 y3", "d3", 400),
        ("f2.bwd", "d3 y2", "d2", 400),
        ("f1.bwd", "d2 y1", "d1", 0),
        ("add", "d4.1 d1", "sum", 20),
    ):
        op(name, reads, writes, flops)
    platform = two_engines(289, 144, cpu=GB, rate=GB)
    npu, cpu = (replace(e, peak={"fp32": peak}) for e, peak in zip(platform.engines, (10 * GB, GB), strict=True))
    hbm, host = (replace(tier, bandwidth=rate) for tier, rate in zip(platform.tiers, (10 * GB, 2 * GB), strict=True))
    run(b.build(outputs=[], carry=()), replace(platform, tiers=(hbm, host), engines=(npu, replace(cpu, launch=2))))
