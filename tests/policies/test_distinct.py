"""No policy is another under a new name, and no parameter is decoration: each makes a run that differs."""

import dataclasses
from functools import cache
from itertools import combinations

import pytest

from sim import load_profile, simulate
from sim.errors import Deadlock, Infeasible, PolicyError
from sim.policies import names, policy_class
from sim.search import smallest_budget
from sim.trace import Implementation, Trace, TraceBuilder
from workloads import transformer, uniform_chain, w1

SLOW = [name for name in names() if policy_class(name).slow]
QUICK = [name for name in names() if name not in SLOW]


@cache
def problems() -> dict[str, tuple[Trace, object, int | None]]:
    """Traces with a platform and a budget: transformers both ways of attention, a chain, W1."""
    survey, a100 = load_profile("mt3000_survey"), load_profile("a100_40_pcie")
    eager = transformer("gpt2", batch=2, sequence=512, attention="eager", precision="amp_bf16")
    fused = transformer("gpt2", batch=4, sequence=512, precision="mixed_bf16", optimizer="adamw_loop", dropout=0.0)
    amp = transformer("gpt2", batch=8, sequence=512, precision="amp_bf16")
    chain = uniform_chain(24, size=1 << 24, duration=50_000)
    layers = w1(6)
    return {
        "eager": (eager, survey, int(0.7 * _peak(eager, survey))),
        "fused": (fused, a100, int(0.8 * _peak(fused, a100))),
        "amp": (amp, survey, int(0.7 * _peak(amp, survey))),
        "chain": (chain, a100, int(0.5 * _peak(chain, a100))),
        "w1": (layers, a100, int(0.6 * _peak(layers, a100))),
        "convolutions": (convolutions(8), a100, None),
        "roomy": (eager, survey, None),
    }


def convolutions(layers: int) -> Trace:
    """Convolutions and activations in turn, each convolution with a faster way that needs workspace; a classifier."""
    b = TraceBuilder({"batch": 1, "samples": 1})
    made = [b.tensor("x", 1 << 24, "input")]
    faster = (Implementation("gemm", 0.5, 1 << 25),)
    for i in range(layers):
        for kind in ("conv", "elementwise") if i < layers - 1 else ("matmul", "elementwise"):
            made.append(b.tensor(f"{kind}{i}.out", 1 << 24, layer=i))
            more = {"alternatives": faster} if kind == "conv" else {}
            b.op(f"{kind}{i}", kind, reads=made[-2:-1], writes=made[-1:], layer=i, duration=10**6, **more)
    gradient = b.tensor("loss.grad", 1 << 24, "temporary")
    b.op("loss", "loss", reads=made[-1:], writes=[gradient], duration=10**5)
    for i in reversed(range(layers)):
        for at, kind in ((2 * i + 2, "elementwise"), (2 * i + 1, "conv" if i < layers - 1 else "matmul")):
            reads = [gradient, made[at - 1]]
            gradient = b.tensor(f"{kind}{i}.grad", 1 << 24, "temporary", layer=i)
            b.op(f"{kind}{i}.bwd", kind, reads=reads, writes=[gradient], layer=i, duration=2 * 10**6, phase="backward")
    return b.build()


def _peak(trace, platform):
    return smallest_budget(trace, platform, "keep_all", tolerance=0.01)


@cache
def outcome(problem: str, policy: str, parameters: tuple = ()) -> str | None:
    """Hash of the log, or what kept it from running; None where the policy does not apply."""
    trace, platform, budget = problems()[problem]
    try:
        log = simulate(trace, platform, policy, budget=budget, **dict(parameters)).log
    except PolicyError:
        return None
    except (Infeasible, Deadlock) as error:
        return f"{type(error).__name__}: {error}"
    # ids differ between rewritten traces; what happened when does not
    return str(hash((tuple(log.events.itertuples(index=False)), tuple(log.memory.itertuples(index=False)))))


@pytest.mark.parametrize(("one", "other"), list(combinations(QUICK, 2)), ids=lambda name: name)
def test_two_policies_differ_somewhere(one, other):
    for problem in ("chain", "w1", "convolutions", "eager", "amp", "fused"):
        first, second = outcome(problem, one), outcome(problem, other)
        if first is not None and second is not None and first != second:
            return
    pytest.fail(f"{one} and {other} do the same on every problem tried")


OTHER_VALUES = {
    "chen": {"method": {"method": "sqrt"}, "threshold": ("method=threshold", 1 << 26), "segments": ("method=sqrt", 3)},
    "dtr": {
        "heuristic": "lru",
        "deallocation": "ignore",
        "ties": "first",
        "staleness": "none",
        "by_size": False,
        "ignore_small": 0.5,
        "sample": True,
    },
    "every_k": {"k": 3, "skip_last": True},
    "full_recompute": {"early_stop": False, "skip_last": True, "autocast_cache": False},
    "min_cut": {"aggressive": True},
    "revolve": {"slots": 3},
    "rotor": {"slots": 20},
    "sac_knapsack": {"memory_budget": 0.5, "knapsack": "greedy"},
    "selective_recompute": {"recompute": "attention_core", "early_stop": False, "autocast_cache": False},
    "vlad": {"base": 6, "snapshots": 2},
    "lru_tiering": {"hits": 2, "pin_flops_per_byte": 1.0, "choice": "score"},
    "save_on_cpu": {"pin_memory": True, "weights": False, "duplicates": False},
    "swap_all": {"ahead": 2, "unit": "op"},
    "vdnn": {
        "variant": "all",
        "algorithm": ("variant=all", "m"),
        "heavy": ["norm"],
        "classifier": ("variant=all", ("norm",)),
    },
    "zero_offload": {"bucket": 1 << 26, "delayed": True},
    "delta": {
        "filter": "cost_adjacent",
        "recompute_cost": "own",
        "bandwidth": 10**9,
        "prefetch": "lifo",
        "prefetch_depth": 1,
        "prefetch_forward": True,
        "ties": "first",
    },
}
"""Per policy and parameter a value that is not the default."""


def _parameters(name: str, key: str) -> tuple[tuple, tuple]:
    """(parameters to compare with, parameters with this one changed)."""
    value = OTHER_VALUES[name][key]
    if isinstance(value, tuple):
        with_key, with_value = value[0].split("=")
        base = {with_key: with_value}
        return tuple(base.items()), tuple({**base, key: value[1]}.items())
    if isinstance(value, dict):
        return (), tuple(value.items())
    return (), ((key, tuple(value) if isinstance(value, list) else value),)


CASES = [
    (name, field.name) for name in QUICK for field in dataclasses.fields(policy_class(name)) if name in OTHER_VALUES
]


@pytest.mark.parametrize(("name", "key"), CASES, ids=lambda value: value)
def test_every_parameter_changes_some_run(name, key):
    base, changed = _parameters(name, key)
    for problem in problems():
        with_it = outcome(problem, name, changed)
        if with_it is not None and with_it != outcome(problem, name, base):
            return
    pytest.fail(f"{name}: {key}={OTHER_VALUES[name][key]!r} changes nothing on any problem tried")


def test_every_policy_with_parameters_has_its_other_values():
    for name in QUICK:
        fields = {field.name for field in dataclasses.fields(policy_class(name))}
        assert fields == OTHER_VALUES.get(name, {}).keys(), name
