"""What replicas exchange beside computing: buckets of gradients, weights gathered ahead; closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.engine.replay import replay
from sim.errors import LayoutError, TraceError
from sim.hardware.platform import Link, rank_link
from sim.layout import DDP_BUCKETS, Layout, lay_out
from sim.log import WHY
from sim.plan import Plan
from sim.rewrites.batching import split_batch_ops
from sim.rewrites.next_step import without_barrier
from sim.rewrites.pipeline import pipeline
from sim.rewrites.ranks import all_ranks
from sim.rewrites.rewrite import unroll
from sim.rewrites.values import departures
from sim.rewrites.zero import shard
from sim.trace import Trace, TraceBuilder
from sim.trace.op import Ring
from tests.rewrites.test_replicas import CONFIG, line, op_named, peaks, reading, rebuilt, step
from workloads import transformer

MIB = 1 << 20


def network(
    weights: list[int], forward: int = 0, backward: int = 0, update: int = 0, ranks: int = 2, each: int = 1
) -> Trace:
    """Modules with one weight, `each` so many of a layer, and the nanoseconds that a replica takes for each of them."""
    b = TraceBuilder({"batch": ranks, "samples": ranks})
    x, gradients, new = b.tensor("x", ranks, "input"), [], []
    w = [b.tensor(f"w{i}", size, "weight", layer=i // each) for i, size in enumerate(weights)]
    for i in range(len(weights)):
        y = b.tensor(f"y{i}", ranks, layer=i // each)
        b.op(f"f{i}", reads=[x, w[i]], writes=[y], layer=i // each, duration=ranks * forward, splits=["batch"])
        x = y
    g = x
    for i in reversed(range(len(weights)) if backward else []):
        d, t = (
            b.tensor(f"g{i}", ranks, "temporary", layer=i // each),
            b.tensor(f"w{i}.grad", weights[i], "gradient", layer=i // each),
        )
        about = {"phase": "backward", "layer": i // each, "duration": ranks * backward, "splits": ["batch"]}
        b.op(f"b{i}", reads=[g, w[i]], writes=[d, t], **about)
        g, gradients = d, [*gradients, t]
    for i, t in enumerate(reversed(gradients)):
        new.append(b.tensor(f"w{i}.new", weights[i], "weight", layer=i // each, replaces=w[i]))
        b.op(f"u{i}", "optimizer", phase="update", layer=i // each, reads=[w[i], t], writes=[new[i]], duration=update)
    return b.build(outputs=new or w, carry=list(zip(new, w, strict=True)) if new else ())


def collectives(trace: Trace) -> list[list[str]]:
    """Which gradients each collective sums, in order."""
    rings = [op for op in trace.ops if op.ring is not None]
    return [[trace.tensors[t].name.removesuffix(".mb0") for t in op.reads] for op in rings]


@pytest.mark.parametrize("more", [{}, {"micro_batches": 2}], ids=str)
def test_ddp_copies_each_gradient_into_its_bucket_and_back_after_backward(more: dict) -> None:
    """As many bytes more from the start on as the weights have; the same bytes are summed in as many buckets."""
    whole, split = (lay_out(step(), "a100_80_sxm", {"dp": 2, "bucket": b, **more})[0] for b in ("ddp", "1 MiB"))
    weights = sum(t.bytes for t in split.tensors if t.role == "weight" and split.producer[t.id] < 0)
    buckets = [t for t in whole.tensors if t.name.endswith(".bucket")]
    assert {whole.producer[t.id] for t in buckets} == {-1}
    assert sum(t.bytes for t in buckets) == weights
    machine = line(1, 2)
    (time, held), (before, less) = peaks(whole, machine), peaks(split, machine)
    assert [a - b for a, b in zip(held, less, strict=True)] == [weights]
    assert time > before
    names = [op.name for op in whole.ops]
    into, back = (
        [i for i, name in enumerate(names) if name.endswith(end)] for end in (".bucket.copy", ".reduced.copy")
    )
    assert len(into) == len(back) == len(buckets)
    last = max(i for i, op in enumerate(whole.ops) if op.kind == "collective")
    assert max(into) < last < min(back)
    summed = ([op.bytes for op in t.ops if op.kind == "collective"] for t in (whole, split))
    assert len({sum(each) for each in summed}) == 1


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "cp": 2}, {"cp": 2, "micro_batches": 2}], ids=str)
def test_ddps_buckets_are_carried_and_each_copy_reads_and_writes_a_gradient(layout: dict) -> None:
    base = transformer(CONFIG, batch=8, sequence=16, precision="bf16", attention="flash", dropout=0.0)
    trace, _ = lay_out(base, "a100_80_sxm", {**layout, "bucket": "ddp"})
    buckets = {t.id: t for t in trace.tensors if t.name.endswith(".bucket")}
    weights = [t for t in base.tensors if t.role == "weight" and base.producer[t.id] < 0]
    assert len(buckets) == len(weights)
    assert {first for _, first in trace.carry} >= buckets.keys()
    copies = [op for op in trace.ops if op.name.endswith((".bucket.copy", ".reduced.copy"))]
    assert sum(op.bytes or 0 for op in copies) == 2 * 2 * sum(t.bytes for t in weights)
    in_buckets = [t for t in trace.tensors if t.name.endswith((".bucket.filled", ".bucket.reduced"))]
    assert {t.role for t in in_buckets} == {"temporary"}


def test_gradients_fill_the_buckets_of_ddp() -> None:
    """0.5, 0.7, 10, 20 and 4 MiB in the order in which they are ready."""
    sizes = [MIB // 2, 7 * MIB // 10, 10 * MIB, 20 * MIB, 4 * MIB]
    trace, _ = split_batch_ops(network(sizes[::-1], backward=1), 1, 2, buckets=DDP_BUCKETS)
    assert collectives(trace) == [["w4.grad", "w3.grad"], ["w2.grad", "w1.grad"], ["w0.grad"]]
    per_layer, _ = split_batch_ops(network(sizes[::-1], backward=1), 1, 2)
    assert len(collectives(per_layer)) == 5


@pytest.mark.parametrize("bucket", [1, 3 * MIB, 7 * MIB, 100 * MIB])
@pytest.mark.parametrize(("forward", "backward", "update"), [(1, 3 * MIB, 1000), (MIB, MIB, 0), (5, 1000, 7)])
def test_time_of_an_iteration(bucket: int, forward: int, backward: int, update: int) -> None:
    """A bucket is sent when it is ready and those before it are through; what backward does not hide is exposed."""
    sizes = [2 * MIB, 3 * MIB, MIB, 4 * MIB, 2 * MIB]
    trace, _ = split_batch_ops(network(sizes, forward, backward, update), 1, 2, buckets=[bucket])
    ready, waiting, sent = len(sizes) * forward, 0, 0
    for k, size in enumerate(reversed(sizes)):
        ready, waiting = ready + backward, waiting + size
        if waiting >= bucket or k == len(sizes) - 1:
            sent, waiting = max(ready, sent) + waiting, 0  # each of two ranks sends 2 (d - 1) / d bytes, at 1 GB/s
    assert peaks(trace, line(1, 2))[0] == max(ready, sent) + len(sizes) * update


def over_tokens(trace: Trace, ranks: int) -> Trace:
    """The same layers on one of so many ranks that divide tokens, whose gradients are summed before the update."""
    b = TraceBuilder(trace.meta)
    for t in trace.tensors:
        b.tensor(t.name, t.bytes, t.role, layer=t.layer)
    gradients = [t.id for t in trace.tensors if t.role == "gradient"]
    summed = {t: b.tensor(f"{trace.tensors[t].name}.summed", trace.tensors[t].bytes, "gradient") for t in gradients}
    for op in trace.ops:
        own = [summed[t] for t in op.reads if t in summed and op.phase == "update"]
        if own:
            about = {"phase": "update", "ring": Ring("context", ranks, 2), "group": f"{op.name}.sum"}
            b.op(f"{op.name}.sum", "collective", reads=[t for t in op.reads if t in summed], writes=own, **about)
        b.copy_op(op, reads=[summed.get(t, t) if own else t for t in op.reads], writes=list(op.writes), releases=())
    return b.build(outputs=trace.outputs)


@pytest.mark.parametrize("bucket", [1, 3 * MIB, 7 * MIB, 100 * MIB])
@pytest.mark.parametrize(("replicas", "tokens"), [(1, 2), (2, 2), (2, 4)])
def test_time_of_an_iteration_where_tokens_are_divided(replicas: int, tokens: int, bucket: int) -> None:
    """As above: replicas and the ranks that divide tokens sum a bucket once, together, beside what follows it."""
    sizes, each = [2 * MIB, 3 * MIB, MIB, 4 * MIB, 2 * MIB], 3 * MIB
    base = over_tokens(network(sizes, MIB, each, 1000, ranks=replicas), tokens)
    trace, _ = split_batch_ops(base, 1, replicas, buckets=[bucket])
    p = replicas * tokens
    sums = [op for op in trace.ops if op.kind == "collective"]
    assert {op.ring for op in sums} == {Ring("data_context", p, 2)}
    ready, waiting, sent = len(sizes) * MIB, 0, 0
    for k, size in enumerate(reversed(sizes)):
        ready, waiting = ready + each, waiting + size
        if waiting >= bucket or k == len(sizes) - 1:
            sent, waiting = max(ready, sent) + 2 * (p - 1) * waiting // p, 0
    own = line(1)
    links = (*own.links, Link(rank_link("data_context", 0), "hbm@0", "hbm@0", 10**9))
    assert peaks(trace, replace(own, links=links))[0] == max(ready, sent) + len(sizes) * 1000


def test_a_bucket_ends_with_its_stage() -> None:
    """No collective sums gradients of two devices, and none those of two parts of the model."""
    trace = pipeline(network([8, 8, 8, 8], backward=1), [0, 0, 1, 1], 1, ranks=2, buckets=[1 << 30])
    assert collectives(trace) == [["w3.grad", "w2.grad"], ["w1.grad", "w0.grad"]]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "bucket": "ddp"},
        {"dp": 4, "micro_batches": 2, "bucket": 5000, "zero": 1},
        {"dp": 2, "micro_batches": 2, "bucket": "1 KiB", "zero": 2},
        {"dp": 2, "pp": 2, "micro_batches": 2, "bucket": "ddp", "zero": 3, "schedule": "zb_h1", "prefetch": 2},
        {"dp": 4, "zero": 3, "prefetch": 0, "reshard": False},
    ],
    ids=str,
)
def test_one_rank_stands_for_all(layout: dict) -> None:
    trace, _ = lay_out(step(), "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, step())} <= {"repeated"}
    every = all_ranks(trace)
    assert {each.what for each in departures(every, step())} <= {"repeated"}
    one, (time, held) = peaks(trace, line(trace.devices, layout["dp"])), peaks(every, line(every.devices))
    assert one[0] == time
    assert [peak for peak in one[1] for _ in range(layout["dp"])] == held


def test_buckets_send_as_many_bytes_as_layers_do() -> None:
    per_layer, together = (lay_out(step(), "a100_80_sxm", {"dp": 2, "bucket": b})[0] for b in (0, "ddp"))
    sent = [[op.bytes or 0 for op in trace.ops if op.ring is not None] for trace in (per_layer, together)]
    assert sum(sent[0]) == sum(sent[1])
    assert len(sent[1]) == 1 < len(sent[0])


# ---- steps without a barrier --------------------------------------------------------------------------

UNIT = 4 * MIB
"""Nanoseconds and bytes of one slice at 1 GB/s."""


def three_layers() -> Trace:
    """Two units for each forward and backward, three for each sum of gradients among two replicas."""
    return split_batch_ops(network([3 * UNIT] * 3, 2 * UNIT, 2 * UNIT, 0), 1, 2)[0]


def ended(trace: Trace, op: str) -> int:
    log = replay(Plan(trace), line(1, 2))
    rows = (log.interval("op") == op_named(trace, op)) & (log.interval("why") == WHY["run"])
    return int(log.interval("end")[rows].max())


def test_the_next_forward_begins_before_all_gradients_are_summed() -> None:
    """After the first forward: last come first served 17 units, by priority of layers 15."""
    base = three_layers()
    last, start = "f2.mb0#1", 3 * 2 * UNIT
    assert ended(unroll(base, 2), last) - start == 17 * UNIT
    assert ended(without_barrier(base), last) - start == 15 * UNIT
    equal = without_barrier(base)
    first_come = rebuilt(equal, priority=np.zeros_like(equal.op_columns.priority))
    assert ended(first_come, last) - start == 17 * UNIT


def test_a_gradient_that_is_not_sliced_gains_nothing() -> None:
    """Sums of less than a slice are sent whole: first come first served is by priority, too."""
    whole = split_batch_ops(network([3 << 20] * 3, 2 << 20, 2 << 20, 0), 1, 2)[0]
    took = [ended(steps, "f2.mb0#1") - 3 * (2 << 20) for steps in (unroll(whole, 2), without_barrier(whole))]
    assert took == [17 << 20, 17 << 20]


def test_sums_that_backward_hides_gain_nothing() -> None:
    hidden = split_batch_ops(network([UNIT, UNIT, 1000], 2 * UNIT, 2 * UNIT, 0), 1, 2)[0]
    assert ended(without_barrier(hidden), "f2.mb0#1") <= ended(unroll(hidden, 2), "f2.mb0#1")


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach", "sgd"])
@pytest.mark.parametrize(
    "layout", [{"dp": 2}, {"dp": 2, "micro_batches": 2, "bucket": 4000}, {"dp": 2, "pp": 2}], ids=str
)
def test_steps_without_a_barrier_compute_the_same(layout: dict, optimizer: str) -> None:
    base = transformer(CONFIG, batch=8, sequence=16, precision="mixed_bf16", optimizer=optimizer)
    trace, _ = lay_out(base, "a100_80_sxm", {**layout, "barrier": False})
    assert {each.what for each in departures(trace, base)} <= {"repeated"}
    assert trace.meta["iterations"] == 2


def test_an_update_before_its_gradient_is_summed_is_wrong() -> None:
    trace, _ = lay_out(step(), "a100_80_sxm", {"dp": 2, "barrier": False})
    update = next(op for op in trace.ops if op.phase == "update")
    summed = next(t for t in update.reads if ".grad.reduced" in trace.tensors[t].name)
    own = trace.tensors[summed].replaces
    assert own is not None
    with pytest.raises(TraceError, match="overwrote it"):
        reading(trace, update.id, summed, own)


# ---- weights gathered ahead --------------------------------------------------------------------------


def test_two_steps_are_as_many_samples_and_flops() -> None:
    trace = transformer(CONFIG, batch=4, sequence=16, precision="mixed_bf16")
    one, two = (lay_out(trace, "h100", {"dp": 2, "barrier": barrier})[0].meta for barrier in (True, False))
    assert [two[key] for key in ("samples", "tokens", "model_flops")] == [
        2 * one[key] for key in ("samples", "tokens", "model_flops")
    ]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_gathered_weights_that_a_replica_holds(prefetch: int) -> None:
    """Those of the layer at hand and of `prefetch` more, beside 1 / d of all of them; the input, what a layer reads and
    what it writes are a byte each, the first two the same in the first layer.
    """
    layers, size, ranks = 6, 4 * MIB, 4
    split, _ = split_batch_ops(network([size] * layers, forward=1000, ranks=ranks), 1, ranks)
    trace = shard(split, ranks, 3, prefetch=prefetch)
    held = peaks(trace, line(1, ranks))[1][0]
    in_first = prefetch >= layers - 1  # all are gathered, and none is freed yet
    assert held == layers * size // ranks + (min(prefetch, layers - 1) + 1) * size + (2 if in_first else 3)


@pytest.mark.parametrize("took", [1000, 2 * MIB, 5 * MIB])
def test_time_of_forward_with_weights_gathered_ahead(took: int) -> None:
    """Without prefetch a layer waits for its own weights; one ahead, the longer of the two hides the other."""
    layers, size, ranks = 6, 4 * MIB, 4
    split, _ = split_batch_ops(network([size] * layers, forward=took, ranks=ranks), 1, ranks)
    gather = size * (ranks - 1) // ranks  # at 1 GB/s
    times = [peaks(shard(split, ranks, 3, prefetch=k), line(1, ranks))[0] for k in (0, 1)]
    assert times == [layers * (gather + took), gather + (layers - 1) * max(gather, took) + took]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(("forward", "backward"), [(1000, 1000), (5 * MIB, 3 * MIB), (MIB, 9 * MIB)])
def test_modules_gathered_one_by_one_are_layers_of_one_module_each(prefetch: int, forward: int, backward: int) -> None:
    """Two weights per layer, gathered by module, take the time and the memory of twice as many layers of one; sums of
    gradients are in one bucket for either.
    """
    sizes, ranks = [4 * MIB, 3 * MIB, 6 * MIB, MIB, 4 * MIB, 2 * MIB], 4
    found = []
    for each, gathered in ((1, "layer"), (2, "module"), (2, "layer")):
        whole = network(sizes, forward, backward, ranks=ranks, each=each)
        split, _ = split_batch_ops(whole, 1, ranks, buckets=[1 << 30])
        trace = shard(split, ranks, 3, prefetch=prefetch, gathered=gathered)
        assert {each.what for each in departures(trace, whole)} <= {"repeated"}
        found.append(peaks(trace, line(1, ranks)))
    assert found[0] == found[1]
    assert prefetch == 0 or found[0] != found[2]


def test_small_weights_are_gathered_with_the_next_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer of GPT-2 four collectives forward and four backward: its norms and biases come with its products."""
    monkeypatch.setattr("sim.rewrites.zero.PERSISTENT", 32 * 32)
    layout = {"dp": 4, "zero": 3, "micro_batches": 2, "gathered": "module"}
    trace, _ = lay_out(step(), "a100_80_sxm", layout)
    assert {each.what for each in departures(trace, step())} <= {"repeated"}

    def forward(made: Trace) -> list[list[str]]:
        """The weights that each collective of the second layer gathers for the first microbatch's forward."""
        names = [[made.tensors[t].name.split(".for.") for t in op.writes] for op in made.ops if op.ring is not None]
        own = [[each[0] for each in some] for some in names if len(some[0]) > 1 and ".bwd" not in some[0][1]]
        return [some for some in own if some[0].startswith("h1.")]

    one_by_one = forward(trace)
    assert len(one_by_one) == 2 * 4
    (together, _) = forward(lay_out(step(), "a100_80_sxm", {**layout, "gathered": "layer"})[0])
    assert sorted(name for names in one_by_one[:4] for name in names) == sorted(together)
    one, held = peaks(trace, line(1, 4))
    assert (one, held * 4) == peaks(all_ranks(trace), line(4))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"dp": 2, "zero": 3, "gathered": "modul"}, "gathered: 'modul' is unknown .did you mean 'module'"),
        (
            {"dp": 2, "gathered": "module"},
            "gathered: only weights that zero 3 divides are gathered, zero is 0; nearest: 3",
        ),
        ({"bucket": "25 MB"}, "bucket: gradients are summed among the replicas of dp, which is 1; nearest: dp 2"),
        ({"dp": 2, "bucket": "25 MBit"}, "bucket: .*; or 'ddp'"),
        ({"dp": 2, "bucket": -1}, "bucket: needs a size such as '25 MiB', or 'ddp', has -1; nearest: 0"),
        ({"dp": 2, "bucket": 25e6}, "bucket: needs a size such as '25 MiB', or 'ddp', has 25000000.0; nearest: 0"),
        ({"dp": 2, "bucket": None}, "bucket: needs a size such as '25 MiB', or 'ddp', has None; nearest: 0"),
        ({"dp": 2, "barrier": False, "gradient_buffer": True}, "barrier: .* not with gradient_buffer; nearest: true"),
        ({"barrier": False}, "barrier: gradients are summed among the replicas of dp, which is 1; nearest: dp 2"),
        ({"dp": 2, "zero": 1, "barrier": False}, "barrier: .* not with zero 1; nearest: zero 0, 1f1b"),
        ({"dp": 2, "prefetch": 2}, "prefetch: only weights that zero 3 divides are gathered, zero is 0; nearest: 3"),
        ({"dp": 2, "zero": 3, "prefetch": -1}, "prefetch: needs a whole number of layers, has -1; nearest: 0"),
    ],
)
def test_bad_values_name_the_nearest(layout: dict, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout(**layout)
