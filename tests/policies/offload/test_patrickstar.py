"""PatrickStar: no choice of evictions copies fewer chunks; gradients take their weights' place; one run measures."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from sim.engine.replay import replay
from sim.errors import PolicyError
from sim.experiment import Result, simulate
from sim.hardware.profile import load_profile
from sim.plan import Move, Plan
from sim.policies.offload import patrickstar
from sim.policies.offload.patrickstar.chunks import Chunk, Walk, Weight, chunks_of
from sim.policies.offload.patrickstar.measured import non_model
from sim.rewrites.values import departures
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import machine
from tests.policies.offload.test_zero_offload import layers
from workloads.transformer import transformer

TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 64, "vocab_size": 128}
SIZE = 1000


def reads_of(order: tuple[int, ...]) -> Trace:
    """Ops that read one weight each, in this order; nothing else takes space."""
    b = TraceBuilder()
    x = b.tensor("x", 1, "input")
    weights = [b.tensor(f"w{i}", SIZE, "weight") for i in range(max(order) + 1)]
    for k, i in enumerate(order):
        y = b.tensor(f"y{k}", 1)
        b.op(f"op{k}", "matmul", reads=[x, weights[i]], writes=[y], duration=10)
        x = y
    return b.build()


def fewest_fetches(order: tuple[int, ...], slots: int) -> int:
    """By trying every chunk at every eviction."""

    @cache
    def least(k: int, held: frozenset[int]) -> int:
        if k == len(order):
            return 0
        if order[k] in held:
            return least(k + 1, held)
        left = [held] if len(held) < slots else [held - {out} for out in held]
        return 1 + min(least(k + 1, rest | {order[k]}) for rest in left)

    return least(0, frozenset())


def lru_fetches(order: tuple[int, ...], slots: int) -> int:
    held: list[int] = []
    fetched = 0
    for i in order:
        if i in held:
            held.remove(i)
        else:
            fetched += 1
            held = held[-slots + 1 :] if len(held) == slots else held
        held.append(i)
    return fetched


def fetches(log) -> int:
    return int((log.events.lane == "h2d").sum())


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_evictions_fetches_fewer_equal_chunks(seed) -> None:
    draw = random.Random(seed)
    chunks, slots = draw.randint(3, 5), draw.randint(2, 3)
    order = (*range(chunks), *(draw.randrange(chunks) for _ in range(12)))
    budget = (slots + 2) * SIZE + 10  # two chunks are left free, and 10 bytes for the rest
    share = {"share": 1.0, "warm_up_share": (slots * SIZE + 10) / budget, "chunk": SIZE}
    done = simulate(reads_of(order), machine(budget), "patrickstar", **share)
    assert fetches(done.log) == fewest_fetches(order, slots)
    assert fetches(done.log) <= fetches(done.warm_up[0].log) <= lru_fetches(order, slots)
    assert done.summary()["peak_bytes"] <= budget


def test_next_uses_count_on_into_the_next_iteration() -> None:
    # behind op 3 neither of the first two is read again; the other one is read first in the next iteration
    trace = reads_of((0, 1, 0, 2))
    order = {"sooner": [0, 2], "later": [1], "now": [3]}
    weights = {
        name: Weight(i, SIZE, reads, reads[-1], True, new=i + 10) for i, (name, reads) in enumerate(order.items())
    }
    for names in (("sooner", "later", "now"), ("later", "sooner", "now")):
        chunks = [Chunk([weights[name]], accesses=order[name]) for name in names]
        assert [chunk.next_use(3, 4) - 4 for chunk in chunks] == [order[name][0] for name in names]
        walk = Walk(trace, chunks, [3 * SIZE] * 3 + [2 * SIZE], "hbm", "host", belady=True)
        left = [a.tensor for a in walk.actions(0) if isinstance(a, Move) and a.to == "host"]
        assert left == [weights["later"].new]


def test_a_gradient_takes_its_weights_place() -> None:
    # a weight of 1000 B has 4000 B of fp32 master and momentum: 2 + 8 of the 14 bytes of Adam with two moments
    trace = layers(6, 1000, 2000, 4000)
    done = simulate(trace, machine(3000 + 100), "patrickstar", chunk=1000, share=1.0)
    log = done.log
    start = int(log.events.query("op == 'adam0' and why == 'run'").start_ns.iloc[0])
    rows = done.memory[done.memory.time_ns < start]
    role = {t.name: t.role for t in log.trace.tensors}
    held: dict[str, int] = {}
    for tensor, delta in zip(rows.tensor, rows.delta_bytes, strict=True):
        held[role.get(tensor, "workspace")] = held.get(role.get(tensor, "workspace"), 0) + delta
    assert held["weight"] == 0, "the 16-bit weights have made way"
    assert 6 * 1000 <= held["gradient"] <= 7 * 1000, "one on its way is in both places"
    assert held["optimizer_state"] == 6 * 4000
    assert not departures(done.plan.trace, trace)


def most_model_state(done: Result, tier: str) -> int:
    """The most bytes of weights, gradients and optimizer states in a tier, once per instant that something changes."""
    role = {t.name: t.role for t in done.log.trace.tensors}
    rows = done.memory[done.memory.tier == tier]
    model = rows[[role.get(name) in ("weight", "gradient", "optimizer_state") for name in rows.tensor]]
    return int(model.groupby("time_ns").delta_bytes.sum().cumsum().max())


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach"])
def test_model_state_takes_the_paper_s_14_bytes_a_parameter_wherever_it_is_updated(optimizer) -> None:
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer=optimizer)
    elements = trace.meta["parameters"]
    counters = sum(t.bytes for t in trace.tensors if t.shape == () and trace.producer[t.id] < 0)
    # 2 of weight, then gradient, then new weight; 4 each of master and two moments
    rest = max(non_model(simulate(trace, machine(), "zero_offload").log).values())
    on_host = simulate(trace, machine(rest + 2 * elements + 120_000), "patrickstar", chunk=20_000, share=1.0)
    assert on_host.plan.notes["tiles_on_device"] == 0
    assert most_model_state(on_host, "host") == 14 * elements + counters
    on_device = simulate(trace, machine(10**9), "patrickstar", chunk=20_000, share=1.0)
    assert sum(on_device.summary()["moved_bytes"].values()) == 0
    # beside it the gradient of one op, in whose end its weight makes way
    largest = max(sum(trace.tensors[t].bytes for t in op.writes if trace.tensors[t].role == "gradient")
                  for op in trace.ops)  # fmt: skip
    assert 0 <= most_model_state(on_device, "hbm") - (14 * elements + counters) <= largest
    for done in (on_host, on_device):
        assert not departures(done.plan.trace, trace)


@pytest.mark.parametrize(
    ("text", "bytes"), [("{} + full_recompute", 14), ("full_recompute + {}", 14), ("{} + dtr", 16)]
)
def test_weights_make_way_for_their_gradients_where_recomputation_does_not_read_them_after_that(text, bytes) -> None:
    """Biases, which backward does not read, had made way before; `dtr` recomputes backward ops, too.

    So plans in which recomputation stood behind could not be carried out.
    """
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    elements = trace.meta["parameters"]
    counters = sum(t.bytes for t in trace.tensors if t.shape == () and trace.producer[t.id] < 0)
    on_host = simulate(trace, machine(450_000), text.format("patrickstar(chunk=20000, share=1.0)"))
    assert on_host.summary()["recompute_ns"]
    assert most_model_state(on_host, "host") == bytes * elements + counters


def test_each_weight_makes_way_for_its_own_gradient() -> None:
    # one update of two parameters; backward makes the gradient of the last one first, so that its id is the lower one
    b = TraceBuilder()
    large, small = b.tensor("large", 1000, "weight"), b.tensor("small", 10, "weight")
    x, y, z = b.tensor("x", 1, "input"), b.tensor("y", 1), b.tensor("z", 1)
    b.op("f0", "matmul", reads=[x, large], writes=[y], duration=10)
    b.op("f1", "matmul", reads=[y, small], writes=[z], duration=10)
    of_small, between = b.tensor("small.grad", 10, "gradient"), b.tensor("dy", 1, "temporary")
    b.op("b1", "matmul", reads=[z, y, small], writes=[of_small, between], phase="backward", duration=10)
    of_large = b.tensor("large.grad", 1000, "gradient")
    b.op("b0", "matmul", reads=[between, x, large], writes=[of_large], phase="backward", duration=10)
    state = b.tensor("state", 20_000, "optimizer_state")  # more than the device has: the CPU updates
    news = [b.tensor("large.new", 1000, "weight", replaces=large), b.tensor("small.new", 10, "weight", replaces=small)]
    news.append(b.tensor("state.new", 20_000, "optimizer_state", replaces=state))
    reads = [of_large, large, of_small, small, state]
    b.op("adam", "optimizer", reads=reads, writes=news, phase="update", duration=10)
    done = simulate(b.build(), machine(10_000), "patrickstar", chunk=1000, share=1.0)
    whole = done.plan.trace
    # both are in chunks, and leave when the update wants them; what is in none leaves as soon as it is complete
    down = {whole.tensor_columns.name[m.tensor]: m for m in done.plan.actions if isinstance(m, Move) and m.to == "host"}
    assert {"large.grad", "small.grad"} <= set(down)
    assert all(down[name].after is None for name in ("large.grad", "small.grad"))


def test_gradients_come_down_and_weights_go_up_once_where_chunks_fit() -> None:
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    elements = trace.meta["parameters"]
    # every chunk fits beside the rest, and no optimizer state
    rest = max(non_model(simulate(trace, machine(), "zero_offload").log).values())
    budget = rest + 2 * elements + 6 * 20_000
    done = simulate(trace, machine(budget), "patrickstar", chunk=20_000, share=1.0)
    assert done.plan.notes["tiles_on_device"] == 0
    moved = done.summary()["moved_bytes"]
    assert moved["d2h"] == 2 * elements
    assert 2 * elements <= moved["h2d"] <= 4 * elements
    assert done.summary()["makespan_ns"] <= done.warm_up[0].log.end


def test_with_ample_memory_the_device_updates_and_nothing_moves() -> None:
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    card = load_profile("a100_40_pcie")
    done = simulate(trace, card, "patrickstar")
    assert done.plan.notes["tiles_on_device"] == TINY["n_layer"] + 1
    assert sum(done.summary()["moved_bytes"].values()) == 0
    assert done.log.end == simulate(trace, card, "keep_all").log.end
    assert done.warm_up[0].log.end > done.log.end


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_room_for_chunks_is_what_the_rest_leaves_at_this_moment_and_the_next(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = layers(3, 1000, 2000, 4000)
    heavy = trace.op_columns.workspace.copy()
    heavy[1] = 5000  # of the second layer's forward
    trace = Trace(trace.tensor_columns, replace(trace.op_columns, workspace=heavy), outputs=trace.outputs,
                  carry=trace.carry, meta=trace.meta)  # fmt: skip
    rooms = []
    walk = patrickstar.Walk
    monkeypatch.setattr(patrickstar, "Walk", lambda *of, **more: rooms.append(of[2]) or walk(*of, **more))
    # three weights of 1000 and the peak of the rest leave 0.8 * 6996 for states: one tile of 4000
    done = simulate(trace, machine(15_000), "patrickstar", chunk=1000, share=share)
    assert done.plan.notes["tiles_on_device"] == 1
    names = done.plan.trace.op_columns.name
    assert set(rooms[0]) == {int(0.2 * 15_000)}, "the warm-up iteration measures nothing yet"
    room = dict(zip(names, rooms[1], strict=True))
    most = int(share * 15_000) - 4000 - 2 * 1000
    # f1 holds x, two results and its workspace; f2 x and three results, and the loss their gradient too
    assert [room["f0"], room["f1"], room["f2"]] == [most - 5003, most - 5003, most - 5]
    engine = done.plan.trace.op_columns.engine
    assert [names[op] for op in range(len(names)) if names[op].startswith("adam") and op in engine] == [
        "adam1",
        "adam2",
    ]


def test_room_for_chunks_is_not_what_another_device_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    b = TraceBuilder()
    x, y = [b.tensor(f"x{d}", 1, "input") for d in (0, 1)], [0, 0]
    for k in range(3):  # in turn, the ops of the second device with a workspace
        for d in (0, 1):
            w, y[d] = b.tensor(f"w{d}.{k}", 100, "weight"), b.tensor(f"y{d}.{k}", 1)
            b.op(f"f{d}.{k}", "matmul", reads=[x[d], w], writes=[y[d]], device=d, workspace=5000 * d, duration=10)
            x[d] = y[d]
    rooms = []
    walk = patrickstar.Walk
    monkeypatch.setattr(patrickstar, "Walk", lambda *of, **more: rooms.append(of[2]) or walk(*of, **more))
    card = load_profile("a100_80_sxm", overrides={"devices": "2"})
    done = simulate(b.build(), card, "patrickstar", budget=20_000, chunk=1000, share=1.0)
    first, second = ([room[op.id] for op in done.plan.trace.ops if op.device == d] for d, room in enumerate(rooms[2:]))
    assert min(first) > 5000 + max(second) - 10


def test_part_of_the_states_on_the_device_is_faster_than_none() -> None:
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    elements = trace.meta["parameters"]
    card = load_profile("a100_40_pcie")
    rest = max(non_model(simulate(trace, card, "zero_offload").log).values())
    ends, tiles = [], []
    for more in (0, 8, 100):
        budget = rest + (3 + more) * elements
        done = simulate(trace, card, "patrickstar", budget=budget, chunk=20_000, share=1.0)
        ends.append(done.log.end)
        tiles.append(done.plan.notes["tiles_on_device"])
    assert tiles[0] < tiles[1] < tiles[2]
    assert ends[0] > ends[1] > ends[2]


@pytest.mark.parametrize("chunk", [20_000, 60_000, 150_000])
def test_a_chunk_of_which_the_device_updates_a_part_is_fetched_whole(chunk) -> None:
    """That part begins on the device; what the CPU updates of the same chunk is fetched when an op first reads it."""
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    card = load_profile("a100_40_pcie")
    rest = max(non_model(simulate(trace, card, "zero_offload").log).values())
    done = simulate(trace, card, "patrickstar", budget=rest + 11 * trace.meta["parameters"], chunk=chunk, share=1.0)
    chunks = chunks_of(done.plan.trace, card, 0, chunk)
    assert 0 < done.plan.notes["tiles_on_device"] < TINY["n_layer"] + 1
    assert any({w.on_device for w in each.weights} == {True, False} for each in chunks)
    assert done.log.counters["implicit_moves"] == 0


def test_prefetch_hides_copies_and_adds_none() -> None:
    trace = reads_of((0, 1, 2, 3, 4))
    slow = replace(trace.op_columns, duration=trace.op_columns.duration + 2000)
    trace = Trace(trace.tensor_columns, slow, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)
    budget = 5 * SIZE + 10
    runs = [simulate(trace, machine(budget), "patrickstar", share=1.0, chunk=SIZE, prefetch=n) for n in (0, 1)]
    late, early = (run.log for run in runs)
    assert fetches(late) == fetches(early) == 5
    assert late.end == 5 * (2010 + SIZE)
    assert early.end == 5 * 2010 + SIZE
    names = trace.tensor_columns.name
    at = {names[a.tensor]: a.before for a in runs[1].plan.actions if isinstance(a, Move)}
    assert at == {"w0": 0, "w1": 0, "w2": 1, "w3": 2, "w4": 3}


def test_chunks_are_filled_in_the_order_of_first_use() -> None:
    trace = reads_of((2, 0, 1))
    chunks = chunks_of(trace, machine(), 0, 2 * SIZE)
    assert [[trace.tensor_columns.name[w.id] for w in chunk.weights] for chunk in chunks] == [["w2", "w0"], ["w1"]]


def test_prefetch_takes_no_more_than_chunks_may_hold() -> None:
    trace = reads_of((0, 1, 2, 3, 4))
    budget = 4 * SIZE + 10  # two chunks, and two that are left free
    done = simulate(trace, machine(budget), "patrickstar", share=1.0, chunk=SIZE, prefetch=3)
    assert done.summary()["peak_bytes"] <= budget - 2 * SIZE


@pytest.mark.parametrize(("engine", "accesses"), [("", [0, 2, 3]), ("cpu", [0, 2])])
def test_the_op_that_makes_a_gradient_needs_the_chunk_that_it_goes_to(engine, accesses) -> None:
    b = TraceBuilder()
    x, w, y, dy = b.tensor("x", 1, "input"), b.tensor("w", 100, "weight"), b.tensor("y", 1), b.tensor("dy", 1)
    g, fresh = b.tensor("g", 100, "gradient"), b.tensor("w.new", 100, "weight", replaces=w)
    b.op("f", "matmul", reads=[x, w], writes=[y], duration=10)
    b.op("loss", "loss", reads=[y], writes=[dy], phase="backward", duration=10)
    b.op("b", "matmul", reads=[dy, x], writes=[g], phase="backward", duration=10)  # as that of any first layer
    b.op("adam", "optimizer", reads=[g, w], writes=[fresh], phase="update", engine=engine, duration=10)
    (chunk,) = chunks_of(b.build(), machine(), 0, 100)
    assert chunk.accesses == accesses


def test_what_is_measured_is_what_is_no_model_state() -> None:
    b = TraceBuilder()
    x, w, y, z = b.tensor("x", 5, "input"), b.tensor("w", 100, "weight"), b.tensor("y", 7), b.tensor("z", 2)
    g = b.tensor("g", 100, "gradient")
    b.op("f", "matmul", reads=[x, w], writes=[y], duration=10, workspace=30)
    b.op("g", "matmul", reads=[y, w], writes=[z], duration=10, workspace=60)
    b.op("b", "matmul", reads=[x, z], writes=[g], phase="backward", duration=10)
    log = simulate(b.build(outputs=[z, w]), machine(), "keep_all").log
    # of each while it runs alone, though the next one begins in the nanosecond in which it ends
    assert non_model(log) == {"f": 5 + 7 + 30, "g": 5 + 7 + 2 + 60, "b": 5 + 2}


def test_what_is_measured_includes_what_arrives_while_an_op_runs() -> None:
    b = TraceBuilder()
    x, far, u, z, end = (b.tensor(name, size, role) for name, size, role in
                         (("x", 5, "input"), ("far", 70, "input"), ("u", 1, "activation"), ("z", 2, "activation"),
                          ("end", 1, "activation")))  # fmt: skip
    b.op("beside", "matmul", reads=[far], writes=[u], engine="cpu", duration=50)
    b.op("g", "matmul", reads=[x], writes=[z], duration=100)
    b.op("h", "matmul", reads=[far, z], writes=[end], duration=10)
    place = {far: "host", u: "host"}
    log = replay(Plan(b.build(outputs=[end]), (Move(far, "hbm", after=0),), place=place), machine())
    assert non_model(log)["g"] == 5 + 2 + 70


def test_equal_weights_waste_less_than_one_chunk() -> None:
    for count in (3, 4, 5):
        done = simulate(reads_of(tuple(range(count))), machine(), "patrickstar", chunk=2 * SIZE)
        assert done.plan.notes["padding"] == (count % 2) * SIZE


def dealt(ranks: int, budget: int, rate: str = "235 GB/s", **parameters) -> Result:
    trace = transformer(TINY, batch=4, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    card = {"devices": str(ranks), "links.nvlink.rate": rate, "links.nvlink.egress": rate}
    layout, given = {"dp": ranks, "zero": 3}, {"chunk": 20_000, "share": 1.0, **parameters}
    card = load_profile("a100_80_sxm", overrides=card)
    return simulate(trace, card, "patrickstar", parallel=layout, budget=budget, **given)


@pytest.mark.parametrize("ranks", [2, 4])
def test_chunks_are_dealt_to_ranks_and_the_network_carries_what_the_paper_counts(ranks) -> None:
    done = dealt(ranks, 10**12)
    trace = done.plan.trace
    elements = transformer(TINY, batch=4, sequence=32, precision="mixed_fp16").meta["parameters"]
    moved = done.summary()["moved_bytes"]
    # an all-gather for forward, one for backward and a reduce-scatter, each of 16 bits
    assert moved["data@0"] == pytest.approx(6 * (ranks - 1) / ranks * elements, rel=1e-3)
    assert moved["d2h"] == moved["h2d"] == done.log.counters["implicit_moves"] == 0
    chunks = chunks_of(trace, done.log.platform, 0, 20_000)
    assert {chunk.ranks for chunk in chunks} == {ranks}
    weights = {w.id for chunk in chunks for w in chunk.weights}
    assert {trace.tensor_columns.name[t].rpartition(".")[2] for t in weights} == {"shard"}
    assert sum(chunk.bytes for chunk in chunks) == pytest.approx(2 * elements / ranks, rel=1e-3)
    assert done.plan.notes["padding"] == sum(20_000 - chunk.bytes for chunk in chunks)
    largest = max(w.bytes for chunk in chunks for w in chunk.weights)
    assert all(20_000 - chunk.bytes < largest for chunk in chunks[:-1])


@pytest.mark.parametrize(("ranks", "budget"), [(2, 2_200_000), (4, 1_300_000)])
def test_a_rank_copies_its_own_part_and_prefetch_hides_it(ranks, budget) -> None:
    """The CPU updates most tiles: 16-bit gradients go down and weights come up once, of this rank's part alone."""
    elements = transformer(TINY, batch=4, sequence=32, precision="mixed_fp16").meta["parameters"]
    late, early = dealt(ranks, budget), dealt(ranks, budget, prefetch=2)
    for done in (late, early):
        moved = done.summary()["moved_bytes"]
        assert 1.5 * elements / ranks < moved["d2h"] <= 2 * elements / ranks
        assert moved["h2d"] <= 4 * elements / ranks
        assert done.summary()["peak_bytes"] <= budget
        assert most_model_state(done, "host") == pytest.approx(14 * elements / ranks * share_on_host(done), rel=2e-3)
    assert early.log.end < late.log.end


def share_on_host(done: Result) -> float:
    """The share of the parameters that the CPU updates."""
    trace = done.plan.trace
    moment = {op.engine: 0 for op in trace.ops if op.phase == "update"}
    for op in trace.ops:
        if op.phase == "update":
            moment[op.engine] += sum(trace.tensors[t].bytes for t in op.reads if ".m." in trace.tensors[t].name)
    return moment["cpu"] / sum(moment.values())


@pytest.mark.parametrize(
    ("budget", "rate", "parameters"),
    [(1_900_000, "200 MB/s", {"chunk": 50_000}), (2_000_000, "50 MB/s", {"chunk": 70_000, "share": 0.8})],
)
def test_a_chunk_may_leave_and_return_while_the_network_still_sums_a_gradient_of_it(budget, rate, parameters) -> None:
    """The device has moved on: where the chunk is evicted and fetched again the gradient is not there yet."""
    done = dealt(4, budget, rate, **parameters)
    names = done.plan.trace.tensor_columns.name
    sums = [a for a in done.plan.actions if isinstance(a, Move) and ".grad." in names[a.tensor] and a.to == "host"]
    assert sums
    assert all(a.before is None for a in sums)
    assert done.log.counters["ignored_actions"] == 0


def test_buffers_are_left_for_a_chunk_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = []
    walk = patrickstar.Walk
    monkeypatch.setattr(patrickstar, "Walk", lambda *of, **more: rooms.append(of[2]) or walk(*of, **more))
    one, other = (dealt(4, 2_200_000, chunk=chunk) for chunk in (20_000, 8_000))
    largest = [max(each.bytes for each in chunks_of(run.plan.trace, run.log.platform, 0, size))
               for run, size in ((one, 20_000), (other, 8_000))]  # fmt: skip
    assert one.plan.notes["tiles_on_device"] == other.plan.notes["tiles_on_device"]
    planned, smaller = rooms[1], rooms[3]  # those after the warm-up
    assert max(smaller) - max(planned) == 2 * 4 * (largest[0] - largest[1])


def test_what_is_wrong_is_named() -> None:
    trace = layers(2, 10, 20, 40)
    with pytest.raises(PolicyError, match="chunk is 0"):
        simulate(trace, machine(), "patrickstar", chunk=0)
    with pytest.raises(PolicyError, match=r"share is 1\.5"):
        simulate(trace, machine(), "patrickstar", share=1.5)
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(trace, machine(host=False), "patrickstar")
    with pytest.raises(PolicyError, match="toy has no engine 'cpu'"):
        simulate(trace, replace(machine(), engines=machine().engines[:1]), "patrickstar")
