"""PatrickStar: no choice of evictions copies fewer chunks; gradients take their weights' place; one run measures."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from sim.errors import PolicyError
from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.plan import Move
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
    # at the last read of 2 neither 0 nor 1 is read again; 1 is read first in the next iteration, so that 0 is evicted
    order = (1, 0, 2)
    done = simulate(reads_of(order), machine(4 * SIZE + 10), "patrickstar", share=1.0, chunk=SIZE)
    dropped = done.memory.query("tier == 'hbm' and cause == 'dropped' and tensor != 'w2'")
    assert fetches(done.log) == 3
    assert len(dropped) == 2  # each after its last use: nothing is left that eviction would have to choose


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


def test_prefetch_hides_copies_and_adds_none() -> None:
    trace = reads_of((0, 1, 2, 3, 4))
    slow = replace(trace.op_columns, duration=trace.op_columns.duration + 2000)
    trace = Trace(trace.tensor_columns, slow, outputs=trace.outputs, carry=trace.carry, meta=trace.meta)
    budget = 5 * SIZE + 10
    late, early = (
        simulate(trace, machine(budget), "patrickstar", share=1.0, chunk=SIZE, prefetch=n).log for n in (0, 1)
    )
    assert fetches(late) == fetches(early) == 5
    assert late.end == 5 * (2010 + SIZE)
    assert early.end == 5 * 2010 + SIZE


def test_what_is_measured_is_what_is_no_model_state() -> None:
    b = TraceBuilder()
    x, w, y, z = b.tensor("x", 5, "input"), b.tensor("w", 100, "weight"), b.tensor("y", 7), b.tensor("z", 2)
    b.op("f", "matmul", reads=[x, w], writes=[y], duration=10, workspace=30)
    b.op("g", "matmul", reads=[y, w], writes=[z], duration=10)
    log = simulate(b.build(outputs=[z, w]), machine(), "keep_all").log
    assert non_model(log) == {"f": 5 + 7 + 30, "g": 5 + 7 + 2}


def test_equal_weights_waste_less_than_one_chunk() -> None:
    for count in (3, 4, 5):
        done = simulate(reads_of(tuple(range(count))), machine(), "patrickstar", chunk=2 * SIZE)
        assert done.plan.notes["padding"] == (count % 2) * SIZE


def test_parts_of_weights_that_ranks_gather_are_in_no_chunk() -> None:
    trace = transformer(TINY, batch=2, sequence=32, precision="mixed_fp16", optimizer="adamw_fused")
    layout = {"dp": 2, "zero": 3}
    assert simulate(trace, "v100_32", "patrickstar", parallel=layout).plan.notes["padding"] == 0


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
