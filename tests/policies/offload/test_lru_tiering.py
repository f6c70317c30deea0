"""Tiering: under pressure the least recently used result leaves, and a miss brings it back."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import OutOfMemory, PolicyError
from sim.experiment import simulate
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import GB, ROOMY, facts, machine
from tests.strategies import budgets, platforms, traces
from workloads.synthetic import w1


def accesses(text: str, size: int = 10, flops: dict[str, int] | None = None) -> Trace:
    """One op a word: `A` makes the 10-byte tensor a, `a` reads it; each takes 100 ns. A final op reads all."""
    b = TraceBuilder()
    made: dict[str, int] = {}
    for i, word in enumerate(text.split()):
        name, work = word.lower(), (flops or {}).get(word, 0)
        if word.isupper():
            made[name] = b.tensor(name, size)
            b.op(f"{i}{word}", reads=[], writes=[made[name]], duration=100, flops=work)
        else:
            b.op(f"{i}{word}", reads=[made[name]], writes=[], duration=100)
    for name, tensor in made.items():
        b.op(f"end.{name}", reads=[tensor], writes=[], phase="backward", duration=100)
    return b.build()


def sent(done) -> list[str]:
    return [tensor for lane, tensor, _, _ in done.moves if lane == "d2h"]


def test_the_least_recently_used_leaves_and_a_miss_brings_it_back(run) -> None:
    # three fit: producing d sends b (a was read again, c is younger); producing e then sends c
    done = run(accesses("A B C a D E"), "lru_tiering", 30)
    assert sent(done)[:2] == ["b", "c"]
    assert done.moves[0] == ("d2h", "b", 400, 410)  # d waits for its space
    assert done.ran("4D") == [(410, 510)]
    # at the end a is still there; b is missing, so that it comes back where the oldest leaves
    assert done.ran("end.a") == [(620, 720)]
    assert done.ran("end.b")[0][0] > 720
    assert ("h2d", "b") in {(lane, tensor) for lane, tensor, _, _ in done.moves}


def test_tensors_read_often_go_after_all_others(run) -> None:
    text = "A a a B C D"
    assert sent(run(accesses(text), "lru_tiering", 30))[0] == "a"
    assert sent(run(accesses(text), "lru_tiering", 30, hits=2))[0] == "b"
    assert sent(run(accesses(text), "lru_tiering", 30, hits=3))[0] == "a"


def test_results_of_intense_ops_are_pinned(run) -> None:
    trace = accesses("A B C D", flops={"A": 1000})  # 1000 FLOPs for 10 bytes touched
    assert sent(run(trace, "lru_tiering", 30))[0] == "a"
    assert sent(run(trace, "lru_tiering", 30, pin_flops_per_byte=99))[0] == "b"
    assert sent(run(trace, "lru_tiering", 30, pin_flops_per_byte=100))[0] == "a"
    with pytest.raises(OutOfMemory):
        run(accesses("A B", flops={"A": 1000, "B": 1000}), "lru_tiering", 10, pin_flops_per_byte=99)


def test_the_score_weighs_time_to_recompute_bytes_and_time_since_the_last_use(run) -> None:
    b = TraceBuilder()
    a, c, d, e = b.tensor("a", 10), b.tensor("c", 10), b.tensor("d", 10), b.tensor("e", 10)
    for name, tensor, took in (("A", a, 900), ("C", c, 300), ("D", d, 200)):
        b.op(name, reads=[], writes=[tensor], duration=took)
    b.op("E", reads=[], writes=[e], duration=100)
    for tensor in (a, c, d, e):
        b.op(f"end{tensor}", reads=[tensor], writes=[], phase="backward", duration=1)
    trace = b.build()
    # when E asks, at 1400: a = 900 / (10 * 500), c = 300 / (10 * 200), d = 200 / (10 * 1 ns)
    assert sent(run(trace, "lru_tiering", 30))[0] == "a"
    assert sent(run(trace, "lru_tiering", 30, choice="score"))[0] == "c"


def test_a_second_eviction_of_an_unchanged_tensor_copies_nothing(run) -> None:
    done = run(accesses("A B C a b c a b c a b c"), "lru_tiering", 20)
    assert all(bytes == 10 for bytes in done.out.values())
    assert done.back["a"] >= 30
    assert done.peak <= 20


def test_only_results_move(run) -> None:
    b = TraceBuilder()
    w, x = b.tensor("w", 50, "weight"), b.tensor("x", 10, "input")
    y, z, u = b.tensor("y", 10), b.tensor("z", 10), b.tensor("u", 10)
    b.op("f", reads=[x, w], writes=[y], duration=10)
    b.op("g", reads=[w], writes=[z], duration=10)
    b.op("h", reads=[w], writes=[u], duration=10)
    b.op("end", reads=[y], writes=[], phase="backward", duration=10)
    trace = b.build()
    assert sent(run(trace, "lru_tiering", 75)) == ["y"]
    with pytest.raises(OutOfMemory):
        run(trace, "lru_tiering", 69)


def test_a_full_host_takes_no_more(run) -> None:
    on = machine()
    small, smaller = (replace(on, tiers=(on.tiers[0], replace(on.tiers[1], capacity=size))) for size in (25, 15))
    assert run(accesses("A B C D"), "lru_tiering", 30, on=small).host_peak == 20
    # one went, and for it to come back another would have to go
    with pytest.raises(OutOfMemory, match=r"'end.a' needs 10 B in 'hbm'"):
        run(accesses("A B C D"), "lru_tiering", 30, on=smaller)


def test_overhead_grows_as_memory_shrinks_and_the_plan_can_be_sent_to_another_process(run) -> None:
    trace, on = w1(3), machine(rate=200 * GB)
    plain = run(trace, "keep_all", on=on)
    times = [run(trace, "lru_tiering", plain.peak * part // 8, on=on).time for part in (8, 7, 6, 5)]
    assert times[0] == plain.time
    assert times == sorted(times)
    assert times[-1] > times[0]
    online = run(trace, "lru_tiering", on=on, hits=2, choice="score").result.plan.online
    pickle.loads(pickle.dumps(online))()


def test_what_is_wrong_is_named() -> None:
    trace = accesses("A B")
    with pytest.raises(PolicyError, match=r"choice is 'lrru'; expected 'lru' or 'score' \(did you mean 'lru'"):
        simulate(trace, machine(), "lru_tiering", choice="lrru")
    with pytest.raises(PolicyError, match="hits is -1"):
        simulate(trace, machine(), "lru_tiering", hits=-1)
    with pytest.raises(PolicyError, match="toy has no host tier"):
        simulate(trace, machine(host=False), "lru_tiering")


PARAMETERS = ({}, {"hits": 2}, {"choice": "score"}, {"pin_flops_per_byte": 10.0})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_keeps_any_budget_and_moves_nothing_where_all_fits(data: st.DataObject) -> None:
    trace, platform = data.draw(traces(cpu=False)), data.draw(platforms(host=True))
    parameters = data.draw(st.sampled_from(PARAMETERS))
    roomy = facts(simulate(trace, platform, "lru_tiering", budget=ROOMY, **parameters))
    plain = facts(simulate(trace, platform, "keep_all", budget=ROOMY))
    assert (roomy.moves, roomy.time, roomy.peak) == ([], plain.time, plain.peak)
    try:
        done = facts(simulate(trace, platform, "lru_tiering", budget=data.draw(budgets(trace)), **parameters))
    except OutOfMemory:
        return
    # every tensor leaves once at most: its host copy stays, and what left came back before it was read
    for tensor, bytes in done.out.items():
        assert bytes == trace.tensors[trace.tensor_id(tensor)].bytes
    assert set(done.back) <= set(done.out)


# ---- ahead of need -------------------------------------------------------------------------------


def test_a_watermark_sends_away_beside_the_computing(run) -> None:
    text = "A B C D E"
    waits = run(accesses(text), "lru_tiering", 40)
    # e waits for a, which leaves when e is reached
    assert waits.moves[0] == ("d2h", "a", 400, 410)
    assert waits.ran("4E") == [(410, 510)]
    # with 10 of 40 bytes kept free a leaves as d begins, and b as e does: nobody waits
    ahead = run(accesses(text), "lru_tiering", 40, watermark=0.25)
    assert ahead.moves[:2] == [("d2h", "a", 300, 310), ("d2h", "b", 400, 410)]
    assert ahead.ran("3D", "4E") == [(300, 400), (400, 500)]
    assert ahead.result.summary()["stall_ns"].get("space", 0) == 0


def test_what_the_next_op_reads_is_not_sent_away_ahead_of_it(run) -> None:
    # 10 of 30 bytes are to stay free beside c: a is the oldest, but c is made of it
    b = TraceBuilder()
    made = [b.tensor(name, 10) for name in "abc"]
    b.op("A", writes=made[:1], duration=100)
    b.op("B", writes=made[1:2], duration=100)
    b.op("C", reads=made[:1], writes=made[2:], duration=100)
    b.op("end", reads=made, phase="backward", duration=100)
    done = run(b.build(), "lru_tiering", 30, watermark=0.34)
    assert sent(done) == ["b"]


def test_a_prefetch_brings_back_what_left_last_before_backward_reads_it(run) -> None:
    trace = chain_of(6)
    misses = run(trace, "lru_tiering", 45)
    fetched = run(trace, "lru_tiering", 45, prefetch=2)
    assert misses.result.summary()["stall_ns"]["transfer"] > 0
    assert fetched.result.summary()["stall_ns"].get("transfer", 0) == 0
    back = [tensor for lane, tensor, _, _ in fetched.moves if lane == "h2d"]
    assert back == sorted(back, reverse=True)  # the last to leave is the first that backward wants
    assert fetched.time < misses.time


def chain_of(layers: int) -> Trace:
    """Layers of 10 bytes, 100 ns each, that backward reads in reverse."""
    b = TraceBuilder()
    made = [b.tensor(f"x{i}", 10) for i in range(layers)]
    for i, tensor in enumerate(made):
        b.op(f"f{i}", reads=made[i - 1 : i] if i else (), writes=[tensor], duration=100)
    for i in reversed(range(layers)):
        b.op(f"b{i}", reads=[made[i]], writes=[], phase="backward", duration=100)
    return b.build()


def test_options_that_are_off_change_nothing(run) -> None:
    trace = w1(4)
    plain = run(trace, "lru_tiering", budget_of(trace))
    assert (
        plain.result.log.content_hash
        == run(trace, "lru_tiering", budget_of(trace), watermark=0.0, prefetch=0).result.log.content_hash
    )


def budget_of(trace: Trace) -> int:
    return int(0.7 * simulate(trace, machine(ROOMY), "keep_all").summary()["peak_bytes"])


def test_a_watermark_is_a_share() -> None:
    for wrong in ({"watermark": 1.0}, {"watermark": -0.1}, {"prefetch": -1}):
        for policy in ("lru_tiering", "delta"):
            if policy == "lru_tiering" or "watermark" in wrong:
                with pytest.raises(PolicyError, match=next(iter(wrong))):
                    simulate(w1(2), machine(), policy, **wrong)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_ahead_of_need_every_law_of_space_holds(data: st.DataObject) -> None:
    trace, platform = data.draw(traces(cpu=False)), data.draw(platforms(host=True))
    budget, watermark = data.draw(budgets(trace)), data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9]))
    for policy, depth in (("lru_tiering", {"prefetch": data.draw(st.integers(0, 3))}), ("delta", {"prefetch": "lifo"})):
        with suppress(OutOfMemory):
            log = simulate(trace, platform, policy, budget=budget, watermark=watermark, **depth).log
            assert log.complete
            assert log.counters["ignored_actions"] == 0
