"""Experts in two tiers: hits of the cache as theory has them, and a step of a model of experts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sim.conformance.replayed import run_policy
from sim.conformance.suite import CHECKS
from sim.errors import PolicyError
from sim.experiment import simulate
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
