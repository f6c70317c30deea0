"""Experts in two tiers: hits of the cache as theory has them, and a step of a model of experts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS
from sim.errors import PolicyError
from sim.experiment import Result, simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.policies import load
from sim.trace import Trace, TraceBuilder
from tests.policies.offload.conftest import ROOMY, facts, machine
from workloads import transformer

BYTES = 100
MODEL = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "loop",
}


def requests(chosen: Sequence[int], experts: int, took: int = 10) -> Trace:
    """One layer per request, whose router chooses one expert of a set that all share; each takes `took` ns."""
    b = TraceBuilder()
    weights = [b.tensor(f"expert{e}.weight", BYTES, "weight") for e in range(experts)]
    x = b.tensor("x", 1, "input")
    for i, e in enumerate(chosen):
        y = b.tensor(f"y{i}", 1, layer=i)
        b.op(f"router{i}", "other", reads=[x], layer=i, duration=1)
        b.op(f"expert{e}.f{i}", "matmul", reads=[x, weights[e]], writes=[y], layer=i, duration=took)
        x = y
    return b.build(outputs=[x], carry=())


def drawn(experts: int, count: int, skew: float, seed: int = 1) -> list[int]:
    shares = [(1 + rank) ** -skew for rank in range(experts)]
    return random.Random(seed).choices(range(experts), shares, k=count)


def hits(chosen: Sequence[int], experts: int, **parameters: object) -> float:
    done = facts(simulate(requests(chosen, experts), machine(), "moe_tiering", **parameters))
    misses = sum(done.back.values()) // BYTES
    assert done.out == {}  # nothing changes an expert here, so that none is copied out
    return 1 - misses / len(chosen)


@pytest.mark.parametrize("slots", [2, 6])
def test_requests_of_equal_share_hit_as_often_as_there_are_slots_per_expert(slots) -> None:
    assert hits(drawn(8, 500, 0), 8, slots=slots) == pytest.approx(slots / 8, abs=0.05)


def test_with_a_slot_for_each_expert_every_one_is_fetched_once() -> None:
    chosen = drawn(8, 60, 0)
    for parameters in ({"slots": 8}, {}):
        done = facts(simulate(requests(chosen, 8), machine(), "moe_tiering", **parameters))
        assert done.back == {f"expert{e}.weight": BYTES for e in range(8)}


@pytest.mark.parametrize("slots", [2, 5])
def test_unequal_shares_hit_more_and_belady_misses_least(slots) -> None:
    """Least recent use and Belady's rule against both computed here from the list of requests."""
    chosen = drawn(8, 200, 1.2)
    by_rule = {}
    for rule in ("lru", "belady"):
        resident: list[int] = []
        missed = 0
        for i, e in enumerate(chosen):
            if e in resident:
                resident.remove(e)
            else:
                missed += 1
                if len(resident) == slots:
                    rest = chosen[i:]
                    far = max(resident, key=lambda r: rest.index(r) if r in rest else len(rest))
                    resident.remove(resident[0] if rule == "lru" else far)
            resident.append(e)
        by_rule[rule] = 1 - missed / len(chosen)
        assert hits(chosen, 8, slots=slots, replacement=rule) == pytest.approx(by_rule[rule])
    assert by_rule["belady"] >= by_rule["lru"] > slots / 8


def test_a_prediction_hides_the_copy_that_a_miss_waits_for() -> None:
    chosen = [0, 1, 2, 3, 0, 1, 2, 3]
    trace = requests(chosen, 4, took=200)  # a copy takes 100 ns, a router 1
    times = {
        name: simulate(trace, machine(), "moe_tiering", slots=2, speculate=name, accuracy=1.0).log.end
        for name in ("none", "router")
    }
    assert times == {"none": 8 * (1 + 100 + 200), "router": 8 * (1 + 200) + 100}
    wrong = simulate(trace, machine(), "moe_tiering", slots=2, speculate="router", accuracy=0.01)
    assert times["router"] < wrong.log.end
    assert sum(facts(wrong).back.values()) > sum(
        facts(simulate(trace, machine(), "moe_tiering", slots=2)).back.values()
    )


def test_the_iteration_before_predicts_the_same_choice() -> None:
    trace = requests([0, 1, 2, 3], 4, took=200)
    first, again = (
        simulate(trace, machine(), "moe_tiering", slots=2, speculate="previous", iterations=n).log.end for n in (1, 2)
    )
    assert (first, again) == (4 * 301, 4 * 201 + 100)


# ---- what is fetched when, by hand ---------------------------------------------------------------


def layered(chosen: Sequence[Sequence[int]], experts: int, took: int = 10, gather: int = 0) -> Trace:
    """Layers whose router chooses some of the experts that all share; `gather`: an op of the first one before all."""
    b = TraceBuilder()
    weights = [b.tensor(f"expert{e}.weight", BYTES, "weight") for e in range(experts)]
    x = b.tensor("x", 1, "input")
    for i, several in enumerate(chosen):
        b.op(f"router{i}", "other", reads=[x], layer=i, duration=1)
        if gather:
            b.op(f"expert{several[0]}.gather{i}", "other", reads=[x], layer=i, duration=gather)
        for e in several:
            y = b.tensor(f"y{i}.{e}", 1, layer=i)
            b.op(f"expert{e}.f{i}", "matmul", reads=[x, weights[e]], writes=[y], layer=i, duration=took)
            x = y
    return b.build(outputs=[x], carry=())


def copies(result: Result) -> list[str]:
    """The experts in the order in which their copies begin."""
    return [move[1].partition(".")[0] for move in facts(result).moves]


def test_what_a_layer_reads_has_the_slots_before_what_the_next_one_may() -> None:
    trace = layered([[0, 1], [2, 3]], 4, took=200)
    done = simulate(trace, machine(), "moe_tiering", slots=2, speculate="router", accuracy=1.0)
    # 0 arrives at 101; when 1 begins, at 301, 0 makes way for 2; when 2 begins, at 502, 1 does for 3
    moves = [(move[1], *move[2:]) for move in facts(done).moves]
    begun = {"expert0": 1, "expert1": 101, "expert2": 301, "expert3": 502}
    assert moves == [(f"{name}.weight", at, at + BYTES) for name, at in begun.items()]
    assert done.log.end == 902


def test_what_is_certain_overtakes_what_was_predicted() -> None:
    before, now = layered([[0, 1], [4, 5]], 6, took=10), layered([[0, 1], [2, 3]], 6, took=10)
    steps = simulate((before, now), machine(), "moe_tiering", slots=6, speculate="previous")
    # 4 is on its way when the router has chosen 2 and 3; 5 waits for them
    assert copies(steps) == [f"expert{e}" for e in (0, 1, 4, 2, 3, 5)]


@pytest.mark.parametrize("parameters", [{}, {"speculate": "router", "accuracy": 0.3}])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_experts_are_there_or_on_their_way_than_there_are_slots(slots, parameters) -> None:
    trace = layered([[e] for e in drawn(8, 60, 0)], 8, took=30)  # copies last longer than three ops
    done = facts(simulate(trace, machine(), "moe_tiering", slots=slots, **parameters))
    assert slots * BYTES <= done.peak <= slots * BYTES + 3


def test_fetching_begins_with_the_first_op_of_an_expert_even_if_that_reads_no_weight() -> None:
    trace = layered([[0], [1]], 2, gather=60)
    done = simulate(trace, machine(), "moe_tiering", slots=1)
    assert done.log.end == 2 * (1 + BYTES + 10)  # 60 of the copy's 100 ns pass beside that op


def step(chosen: Sequence[int], *, update: bool = False, devices: int = 1) -> Trace:
    """A training step: each layer has four experts of its own, and its router chooses one, in forward and backward."""
    b = TraceBuilder()
    x, news = [b.tensor(f"x{d}", 1, "input") for d in range(devices)], []
    weights = {
        (i, e): b.tensor(f"h{i}.expert{e}.weight", BYTES, "weight") for i in range(len(chosen)) for e in range(4)
    }
    for phase, order in (("forward", range(len(chosen))), ("backward", reversed(range(len(chosen))))):
        for i in order:
            d, e = i % devices, chosen[i]
            name = f"h{i}.expert{e}{'.bwd' if phase == 'backward' else ''}"
            y = b.tensor(f"{name}.y", 1)
            b.op(name, "matmul", reads=[x[d], weights[i, e]], writes=[y], phase=phase, layer=i, device=d, duration=10)
            x[d] = y
    for i, e in enumerate(chosen) if update else ():
        news.append(b.tensor(f"h{i}.expert{e}.new", BYTES, "weight", replaces=weights[i, e]))
        b.op(f"step{i}", "optimizer", reads=[weights[i, e]], writes=[news[-1]], phase="update", layer=i, duration=10)
    return b.build() if update else b.build(outputs=x, carry=())


def predicted(trace: Trace, platform: Platform, **parameters: object) -> dict[str, tuple[str, ...]]:
    """Per op that begins to read an expert, what is expected of the next layer."""
    plan = simulate(trace, platform, "moe_tiering", **parameters).plan
    return {trace.op_columns.name[op]: wanted[2] for op, wanted in plan.online.keywords["wanted"].items()}


def test_a_wrong_guess_is_another_expert_of_that_layer_and_backward_is_known() -> None:
    trace = step([0, 1, 2, 3])
    every = [predicted(trace, machine(), seed=seed, speculate="router", accuracy=1e-9) for seed in range(20)]
    for one in every:
        for i, right in ((1, 1), (2, 2), (3, 3)):
            (guess,) = one[f"h{i - 1}.expert{right - 1}"]
            assert guess.startswith(f"h{i}.")
            assert guess != f"h{i}.expert{right}"
        back = {f"h{i + 1}.expert{i + 1}.bwd": (f"h{i}.expert{i}",) for i in range(3)}
        assert {op: names for op, names in one.items() if op.endswith(".bwd")} == {**back, "h0.expert0.bwd": ()}
        assert one["h3.expert3"] == ("h3.expert3",)  # the first of backward
    assert len({tuple(one.values()) for one in every}) > 1, "the seed decides"
    assert predicted(trace, machine(), speculate="router", accuracy=1.0)["h0.expert0"] == ("h1.expert1",)


def test_each_device_expects_its_own_next_layer() -> None:
    card = load_profile("a100_80_sxm", overrides={"devices": "2"})
    for how in ({"speculate": "router", "accuracy": 1.0}, {"speculate": "previous", "iterations": 2}):
        one = predicted(step([0, 1, 2, 3], devices=2), card, **how)
        assert (one["h0.expert0"], one["h1.expert1"]) == (("h2.expert2",), ("h3.expert3",))


def test_an_expert_that_was_updated_leaves_like_any_other() -> None:
    done = facts(simulate(step([0, 1, 2, 3], update=True), machine(), "moe_tiering", slots=1))
    assert done.peak <= 2 * BYTES + 10  # one that leaves, and one that arrives
    assert done.out == {f"h{i}.expert{i}.new": BYTES for i in range(4)}


def test_experts_that_do_not_fit_the_host_begin_behind_it() -> None:
    card = load_profile("mt3000_survey_ssd", overrides={"tiers.ddr.capacity": str(2 * BYTES) + " B"})
    plan = simulate(step([0, 1, 2, 3]), card, "moe_tiering").plan
    place = list(plan.place.values())
    assert [place.count(tier) for tier in card.cascade(card.host.name)] == [2, 14]


def test_what_an_iteration_has_left_on_the_device_is_not_fetched_again() -> None:
    trace = step([0, 1], update=True)
    first, *_, last = (simulate(trace, machine(), "moe_tiering", iterations=n) for n in (1, 2, 3))
    assert facts(first).back == {f"h{i}.expert{i}.weight": BYTES for i in range(2)}
    assert facts(last).back == {}


def model(tokens: int = 32, **options: object) -> Trace:
    return transformer(MODEL, batch=1, sequence=tokens, precision="bf16", optimizer="sgd", **options)


def policy(**parameters: object) -> str:
    given = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return f"zero_offload(weights=host) + moe_tiering({given})"


def experts(trace: Trace) -> dict[str, int]:
    """Bytes of the weights of experts that ops read."""
    weights = (t for t in trace.tensors if ".expert" in t.name and t.role == "weight" and t.replaces is None)
    return {t.name: t.bytes for t in weights if trace.readers(t.id)}


def test_a_step_of_a_model_holds_the_experts_that_are_read() -> None:
    trace = model(4, routing_skew=3.0)
    keep = facts(simulate(trace, machine(), "zero_offload"))
    done = {slots: facts(simulate(trace, machine(), policy(slots=slots))) for slots in (1, 2, 8)}
    assert done[1].peak < done[2].peak < done[8].peak
    # those without tokens are not on the device at all
    idle = sum(t.bytes for t in trace.tensors if ".expert" in t.name and t.role == "weight") - 2 * sum(
        experts(trace).values()
    )
    assert done[8].peak == keep.peak - idle > 0
    fetched = {slots: {t: b for t, b in one.back.items() if t in experts(trace)} for slots, one in done.items()}
    assert sum(fetched[1].values()) > sum(fetched[2].values()) > sum(fetched[8].values())
    # with a slot for each, those that have tokens come once, and the others never
    assert fetched[8] == experts(trace)
    # nor do they leave where they are, whatever the others do
    every = {t.name for t in trace.tensors if ".expert" in t.name and t.role == "weight"}
    assert every - set(experts(trace))
    for one in done.values():
        assert not (every - set(experts(trace))) & (set(one.out) | set(one.back))
    assert len(experts(trace)) < 3 * 8


def test_where_all_experts_are_active_each_visit_streams_its_layer() -> None:
    trace = model()
    assert all(all(load) for load in trace.meta["expert_loads"][0].values())
    done = facts(simulate(trace, machine(), policy(slots=1)))
    expert = 3 * 64 * 128 * 2  # gate, up and down in 16 bits
    # four experts of two layers, forward and backward; the last of forward is the first of backward, and still there
    assert sum(bytes for name, bytes in done.back.items() if name in experts(trace)) == (2 * 8 - 1) * expert


def test_under_pressure_experts_leave_and_every_law_holds() -> None:
    trace = model(8, routing_skew=0.5)
    ample = simulate(trace, machine(), "moe_tiering")
    budget = int(0.97 * facts(ample).peak)
    for parameters in ({}, {"slots": 3, "speculate": "router"}):
        run = run_policy(load("moe_tiering", **parameters), trace, machine(budget))
        for law in ("capacity", "values", "ops", "order", "tiling", "carried", "unlimited", "costs"):
            CHECKS[law](run)
        assert run.done
    assert facts(simulate(trace, machine(), "moe_tiering", budget=budget)).peak <= budget


def test_routing_differs_per_iteration_and_its_experts_are_read() -> None:
    steps = tuple(model(8, routing_seed=seed, routing_skew=2.0) for seed in range(3))
    result = simulate(steps, load_profile("mt3000_survey"), policy(slots=3))
    assert result.log.complete
    assert len({str(step.meta["expert_loads"]) for step in steps}) == 3


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(PolicyError, match="moe_tiering: toy has no host tier for experts"):
        simulate(requests([0], 1), machine(ROOMY, host=False), "moe_tiering")
    grouped = transformer({**MODEL, "experts_implementation": "grouped"}, batch=1, sequence=8)
    with pytest.raises(PolicyError, match="no experts with weights of their own; a config needs experts_implem"):
        simulate(grouped, machine(), "moe_tiering")
    with pytest.raises(PolicyError, match="slots is 0; expected"):
        simulate(requests([0], 1), machine(), "moe_tiering", slots=0)
