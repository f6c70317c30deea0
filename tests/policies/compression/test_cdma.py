"""cDMA: copies of compressed bytes as fast as link and codec allow, on top of vDNN's plan."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from sim.conformance.order import check_order
from sim.conformance.replayed import LawBroken, replayed
from sim.engine.event_path.transfers import Transfers
from sim.engine.replay import replay
from sim.errors import IllegalPlan, PolicyError
from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.plan import Move, Plan, Wait
from sim.policies.compression.cdma import Cdma
from sim.policies.offload.vdnn import Vdnn
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, machine
from workloads import cnn

KIB = 1024


def coded(codec: int, rate: int = GB, fixed: int = 0, back: int | None = None):
    """A machine whose links have a codec, `back` that of the way back."""
    plain = machine(rate=rate, fixed=fixed)
    d2h, h2d = plain.links
    return replace(plain, links=(replace(d2h, codec=codec), replace(h2d, codec=codec if back is None else back)))


def trip() -> Trace:
    """A tensor of 1000 B that leaves after its producer and is read 10 us later."""
    b = TraceBuilder()
    x, y = b.tensor("x", 4, "input"), b.tensor("y", 1000)
    b.op("make", reads=[x], writes=[y], duration=10)
    b.op("wait", reads=[x], duration=10_000)
    b.op("use", reads=[y], writes=[b.tensor("z", 4)], duration=10)
    return b.build(outputs=[], carry=())


def spans(log) -> list[tuple[int, int]]:
    rows = log.events.query("why == 'move'")
    return list(zip((rows.end_ns - rows.start_ns).tolist(), rows.bytes.tolist()))


AWAY = Move("y", "host", after="make", wire=250)
BACK = Move("y", "hbm", before="use")


@pytest.mark.parametrize(
    ("codec", "out", "back"),
    [(100 * GB, 250, 250), (4 * GB, 250, 250), (2 * GB, 500, 500), (GB // 2, 2000, 2000)],
)
def test_a_copy_takes_the_slower_of_link_and_codec(codec, out, back):
    """At a byte a nanosecond: 250 B on the wire, or 1000 B through the codec."""
    log = replay(Plan(trip(), [AWAY, BACK, Wait("y", before="use")]), coded(codec, fixed=7))
    assert spans(log) == [(out + 7, 250), (back + 7, 250)]


def test_restoring_is_as_slow_as_its_own_codec():
    log = replay(Plan(trip(), [AWAY, BACK, Wait("y", before="use")]), coded(100 * GB, back=GB // 4))
    assert spans(log) == [(250, 250), (4000, 250)]


def test_a_plan_may_bring_its_codec_and_an_implicit_fetch_remembers_it():
    plan = Plan(trip(), [replace(AWAY, codec=GB // 2)])
    assert spans(replay(plan, machine())) == [(2000, 250), (2000, 250)]
    assert spans(replay(Plan(trip(), [AWAY]), machine())) == [(250, 250), (250, 250)]


@pytest.mark.parametrize(("link", "plan"), [(GB // 2, 4 * GB), (4 * GB, GB // 2)])
def test_of_two_codecs_on_the_way_the_slower_one_sets_the_pace(link, plan):
    log = replay(Plan(trip(), [replace(AWAY, codec=plan), BACK, Wait("y", before="use")]), coded(link))
    assert spans(log) == [(2000, 250), (2000, 250)]


def test_shared_bandwidth_limits_the_wire_and_the_codec_what_is_left():
    from sim.hardware.platform import Member, Pool

    platform = coded(2 * GB)
    users = (Member("d2h"), Member("h2d"))
    slow = replace(platform, pools=(Pool("bus", users, GB // 4),))
    wide = replace(platform, pools=(Pool("bus", users, 10 * GB),))
    plan = Plan(trip(), [AWAY, BACK, Wait("y", before="use")])
    assert [spans(replay(plan, p))[0] for p in (slow, wide)] == [(1000, 250), (500, 250)]


def test_a_codec_without_throughput_is_refused():
    with pytest.raises(IllegalPlan, match=r"a codec takes at least 1 B/s"):
        replay(Plan(trip(), [replace(AWAY, codec=0)]), machine())
    platform = load_profile("p100")
    trace = cnn("alexnet", 1, zeros=0.5)
    with pytest.raises(PolicyError, match=r"cdma: p100: link 'd2h' has no codec; state one \(--set links.d2h.codec="):
        simulate(trace, platform, Cdma(codec=None))
    with pytest.raises(PolicyError, match=r"cdma: .* has no host tier"):
        simulate(trace, machine(host=False), Cdma())
    known = load_profile("p100", overrides={"links.d2h.codec": "200 GB/s", "links.h2d.codec": "200 GB/s"})
    stated = simulate(trace, known, Cdma(codec=None, variant="all"))
    assert stated.log.end == simulate(trace, platform, Cdma(variant="all")).log.end


@pytest.mark.parametrize("word", ["y", "both"])
def test_a_codec_left_out_of_the_time_breaks_the_law(monkeypatch, word):
    """Planted: restoring takes no time, or neither does."""
    plan, platform = Plan(trip(), [AWAY, BACK, Wait("y", before="use")]), coded(GB // 2)
    check_order(replayed(Cdma(), plan, trip(), platform))
    whole = Transfers._codec_pace

    def forgets(self, tensor, route, wire, move):
        return None if word == "both" or move.wire is None else whole(self, tensor, route, wire, move)

    monkeypatch.setattr(Transfers, "_codec_pace", forgets)
    with pytest.raises(LawBroken, match=r"compresses or restores 1000 B in 250 ns"):
        check_order(replayed(Cdma(), plan, trip(), platform))


# ---- the policy ----------------------------------------------------------------------------------


def chain(zeros: float | None, copies: tuple[int, ...] = (300, 600, 200, 500)) -> Trace:
    """Convolutions of 400 ns whose inputs would take so many ns to copy, and a dense layer that stays."""
    b = TraceBuilder()
    made = [b.tensor("x0", copies[0], "input", zeros=zeros)]
    for i, size in enumerate((*copies[1:], 4)):
        made.append(b.tensor(f"x{i + 1}", size, zeros=zeros))
        b.op(f"f{i}", "conv", reads=made[-2:-1], writes=made[-1:], duration=400, flops=1)
    out, gradient = b.tensor("loss.out", 0), b.tensor("d", 4, "temporary")
    b.op("loss", "matmul", reads=made[-1:], writes=[out], duration=0, flops=1)
    b.op("loss.bwd", "matmul", reads=made[-1:], writes=[gradient], phase="backward", duration=0, flops=1)
    for i in reversed(range(len(copies))):
        new = b.tensor(f"d{i}", copies[i], "temporary")
        b.op(f"f{i}.bwd", "conv", reads=[gradient, made[i]], writes=[new], phase="backward", duration=400, flops=1)
        gradient = new
    return b.build(outputs=[gradient], carry=())


def test_what_returns_takes_its_whole_size_on_the_device():
    trace = chain(0.5, (304, 640, 256, 512))
    result = simulate(trace, machine(), Cdma(variant="all"))
    size = {t.name: t.bytes for t in trace.tensors}
    back = result.memory.query("tier == 'hbm' and cause == 'moved in'")
    assert set(back.tensor) == {"x0", "x1", "x2", "x3"}
    assert all(size[tensor] == delta for tensor, delta in zip(back.tensor, back.delta_bytes))


@pytest.mark.parametrize("zeros", [0.0, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("codec", ["200 GB/s", "0.5 GB/s"])
def test_forward_is_the_sum_of_the_slower_of_each_layer_and_its_compressed_copy(zeros, codec):
    sizes = (304, 600, 200, 500)
    result = simulate(chain(zeros, sizes), machine(), Cdma(variant="all", codec=codec))
    wires = [ceil(size / 4 / 8) + 4 * ceil(size / 4 * (1 - zeros)) for size in sizes]
    slowest = 0.5 if codec.startswith("0.5") else 200
    expected = sum(max(400, wire, ceil(size / slowest)) for wire, size in zip(wires, sizes))
    forward = result.log.events.query("op == 'f3' and why == 'run'").end_ns.item()
    last = max(400, wires[-1], ceil(sizes[-1] / slowest))
    assert forward == expected - last + 400
    out = result.log.events.query("why == 'move' and lane == 'd2h'")
    assert out.bytes.tolist() == wires
    assert out.bytes.sum() == result.log.events.query("why == 'move' and lane == 'h2d'").bytes.sum()


@pytest.mark.parametrize(("zeros", "variant"), [(0.5, "all"), (0.9, "conv")])
def test_the_passes_of_dyn_are_those_of_compressed_copies(zeros, variant):
    """Uncompressed, `conv` takes 4700 ns and `all` 4600; with codes that hide everywhere either takes 4500."""
    b = TraceBuilder()
    sizes = (300, 300, 200, 400)
    made = [b.tensor(f"x{n}", size, "input" if not n else "activation", zeros=zeros) for n, size in enumerate(sizes)]
    layers = [("f0", "conv", 500, 500), ("f1", "conv", 700, 1000), ("f2", "pool", 700, 1000), ("loss", "loss", 0, 100)]
    for n, (name, kind, ns, _) in enumerate(layers):
        b.op(name, kind, reads=[made[n]], writes=made[n + 1 : n + 2], duration=ns, flops=1)
    gradient = b.tensor("d", 400, "temporary")
    for n, (name, kind, _, ns) in reversed(list(enumerate(layers))):
        new = gradient if kind == "loss" else b.tensor(f"d{n}", sizes[n], "temporary")
        reads = [made[n]] if kind == "loss" else [gradient, made[n]]
        b.op(f"{name}.bwd", kind, reads=reads, writes=[new], phase="backward", duration=ns, flops=1)
        gradient = new
    trace = b.build()
    vdnn, cdma = (simulate(trace, machine(), policy, budget=1300).plan for policy in (Vdnn(), Cdma()))
    assert (vdnn.notes["variant"], cdma.notes["variant"]) == ("all", variant)


def test_what_states_no_zeros_counts_as_dense_and_is_told():
    unknown, dense = (simulate(chain(z), machine(), Cdma(variant="all")) for z in (None, 0.0))
    assert unknown.log.end == dense.log.end
    assert (unknown.plan.notes["unknown_zeros"], dense.plan.notes["unknown_zeros"]) == (4, 0)
    assert unknown.plan.notes["ratio"] == pytest.approx(32 / 33, abs=0.01)


def test_the_speedup_over_vdnn_is_in_the_published_range():
    """Abstract: 32 % on average, 61 % at most, at a mean ratio of 2.6.

    Here every ReLU's result has the zeros that give 2.6, and other tensors that are offloaded have none or fewer; all
    inputs are offloaded, on a P100 behind PCIe 3.
    """
    platform, gains = load_profile("p100"), []
    for name, batch in (("alexnet", 128), ("vgg-16", 64), ("googlenet", 64)):
        trace = cnn(name, batch, zeros="cdma", kernels="cudnn")
        plain, small = (simulate(trace, platform, f"{p}(variant=all)", budget="64 GB") for p in ("vdnn", "cdma"))
        gains.append(plain.log.end / small.log.end - 1)
        assert 1 < small.plan.notes["ratio"] < 2.6
    assert all(0 < gain < 0.61 for gain in gains)
    assert sum(gains) / len(gains) == pytest.approx(0.32, abs=0.12)
