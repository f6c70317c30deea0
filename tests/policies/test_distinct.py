"""No policy is another under a new name, and no parameter is decoration: each makes a run that differs.

All policies of the registry are held to this; those that plan for long are tried on small traces only.
"""

import dataclasses
import random
from functools import cache
from itertools import combinations

import pytest

from sim import load_profile, simulate
from sim.errors import Deadlock, Infeasible, PolicyError
from sim.hardware.platform import Platform
from sim.policies import names, policy_class
from sim.search import smallest_budget
from sim.trace import Implementation, Trace, TraceBuilder
from workloads import random_dag, transformer, uniform_chain, w1

SLOW = {name for name in names() if policy_class(name).slow and not policy_class(name).online}  # slow planners
LARGE = ("chain", "w1", "convolutions", "eager", "amp", "fused")
SMALL = ("steps", "few steps", "two ways", "one layer", "net", "knots")


def tried_on(*policies: str) -> tuple[str, ...]:
    """The problems on which to look for a difference, in order."""
    return SMALL if SLOW.intersection(policies) else (*LARGE, *SMALL)


@cache
def small_problems() -> dict[str, tuple[Trace, Platform, int | None]]:
    """What an exact planner does in a second: chains, chains with more inside their stages, W1, a random net."""
    a100 = load_profile("a100_40_pcie")
    steps, layer, net = uniform_chain(9, size=1 << 24, duration=50_000), w1(1), random_dag(6, 3, max_bytes=1 << 24)
    ways, knotted = two_ways(4), knots(3, 6, 4)
    return {
        "steps": (steps, a100, 5 << 24),
        "few steps": (steps, a100, 4 << 24),
        "two ways": (ways, a100, int(0.6 * _peak(ways, a100))),
        "one layer": (layer, a100, int(0.8 * _peak(layer, a100))),
        "net": (net, a100, int(0.85 * _peak(net, a100))),
        "knots": (knotted, a100, int(0.7 * _peak(knotted, a100))),
    }


def two_ways(stages: int) -> Trace:
    """Stages of a quick op and a dear one, so that a part of a stage is worth keeping; a weight each."""
    b, size = TraceBuilder({"batch": 1, "samples": 1}), 1 << 24
    x = [b.tensor("x0", size, "input")]
    saved = []
    for i in range(stages):
        w = b.tensor(f"w{i}", size, "weight", layer=i)
        wide = b.tensor(f"wide{i}", 3 * size, layer=i)
        x.append(b.tensor(f"x{i + 1}", size, layer=i))
        b.op(f"quick{i}", "elementwise", reads=x[-2:-1], writes=[wide], layer=i, duration=20_000)
        b.op(f"dear{i}", "matmul", reads=[wide, w], writes=x[-1:], layer=i, duration=10**6)
        saved.append((w, wide))
    gradient = b.tensor("loss.grad", size, "temporary")
    b.op("loss", "loss", phase="backward", reads=x[-1:], writes=[gradient], duration=0)
    for i in reversed(range(stages)):
        made = b.tensor(f"x{i}.grad", size, "temporary", layer=i)
        reads = [gradient, *saved[i], x[i]]
        b.op(f"dear{i}.bwd", "matmul", reads=reads, writes=[made], layer=i, duration=2 * 10**6, phase="backward")
        gradient = made
    return b.build(outputs=(gradient,), carry=())


def knots(stages: int, inside: int, seed: int) -> Trace:
    """Equal stages, each of some ops of mixed costs and sizes that read each other; backward reads all of it."""
    draw, size = random.Random(seed), 1 << 22
    shapes = [
        (
            draw.randint(1, 9),
            draw.randint(1, 9),
            draw.sample(range(max(0, k - 3), k + 1), min(k + 1, draw.randint(1, 2))),
        )
        for k in range(inside)
    ]
    b = TraceBuilder({"batch": 1, "samples": 1})
    made = [[b.tensor("x0", size, "input")]]
    for i in range(stages):
        t = [made[-1][-1]]
        for k, (large, slow, reads) in enumerate(shapes):
            t.append(b.tensor(f"t{i}.{k}", size if k == inside - 1 else large * size, layer=i))
            before = sorted({t[-2], *(t[r] for r in reads)})
            b.op(f"f{i}.{k}", "matmul", reads=before, writes=t[-1:], layer=i, duration=slow * 10**5)
        made.append(t)
    gradient = b.tensor("loss.grad", size, "temporary")
    b.op("loss", "loss", phase="backward", reads=made[-1][-1:], writes=[gradient], duration=0)
    for i, t in reversed(list(enumerate(made[1:]))):
        for k, (_, slow, reads) in reversed(list(enumerate(shapes))):
            needed = sorted({gradient, t[k], *(t[r] for r in reads)})
            gradient = b.tensor(f"g{i}.{k}", size, "temporary", layer=i)
            took = 2 * slow * 10**5
            b.op(f"b{i}.{k}", "matmul", reads=needed, writes=[gradient], layer=i, duration=took, phase="backward")
    return b.build(outputs=(gradient,), carry=())


@cache
def large_problems() -> dict[str, tuple[Trace | tuple[Trace, ...], Platform, int | None]]:
    """Transformers both ways of attention, a chain, W1; one of several lengths."""
    survey, a100 = load_profile("mt3000_survey"), load_profile("a100_40_pcie")
    eager = transformer("gpt2", batch=2, sequence=512, attention="eager", precision="amp_bf16")
    fused = transformer("gpt2", batch=4, sequence=512, precision="mixed_bf16", optimizer="adamw_fused", dropout=0.0)
    amp = transformer("gpt2", batch=8, sequence=512, precision="amp_bf16")
    chain = uniform_chain(24, size=1 << 24, duration=50_000)
    layers = w1(6)
    lengths = tuple(transformer("gpt2", batch=4, sequence=n, precision="amp_bf16") for n in (128, 256, 384, 512, 512))
    return {
        "eager": (eager, survey, int(0.7 * _peak(eager, survey))),
        "fused": (fused, a100, int(0.8 * _peak(fused, a100))),
        "amp": (amp, survey, int(0.7 * _peak(amp, survey))),
        "chain": (chain, a100, int(0.5 * _peak(chain, a100))),
        "w1": (layers, a100, int(0.6 * _peak(layers, a100))),
        "convolutions": (convolutions(8), a100, None),
        "roomy": (eager, survey, None),
        "lengths": (lengths, a100, int(0.8 * _peak(lengths[-1], a100))),
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


def outcome(problem: str, policy: str, parameters: tuple = ()) -> str | None:
    """Hash of the log, or what kept it from running; None where the policy does not apply."""
    return run(problem, policy, parameters)[0]


@cache
def run(problem: str, policy: str, parameters: tuple = ()) -> tuple[str | None, str]:
    """The same, and which limit of its search a planner met."""
    trace, platform, budget = (small_problems() if problem in SMALL else large_problems())[problem]
    try:
        result = simulate(trace, platform, policy, budget=budget, **dict(parameters))
    except PolicyError as error:
        return None, str(error) if "met its limit" in str(error) else ""
    except (Infeasible, Deadlock) as error:
        return f"{type(error).__name__}: {error}", ""
    # ids differ between rewritten traces; what happened when does not
    log = result.log
    happened = hash((tuple(log.events.itertuples(index=False)), tuple(log.memory.itertuples(index=False))))
    return str(happened), result.plan.notes.get("limit", "")


@cache
def missing_extra(policy: str) -> str:
    """What a policy says of an extra of the package that is not installed; "" where it has all it needs."""
    trace, platform, budget = small_problems()["steps"]
    try:
        simulate(trace, platform, policy, budget=budget)
    except PolicyError as error:
        return str(error) if "tiersim[" in str(error) else ""
    except (Infeasible, Deadlock):
        pass
    return ""


def skip_without_extra(*policies: str) -> None:
    for policy in policies:
        if policy_class(policy).solver and missing_extra(policy):
            pytest.skip(missing_extra(policy))


@pytest.mark.parametrize(("one", "other"), list(combinations(names(), 2)), ids=lambda name: name)
def test_two_policies_differ_somewhere(one, other):
    skip_without_extra(one, other)
    for problem in tried_on(one, other):
        first, second = outcome(problem, one), outcome(problem, other)
        if first is not None and second is not None and first != second:
            return
    pytest.fail(f"{one} and {other} do the same on every problem tried")


OTHER_VALUES = {
    "checkmate": {
        "remove_unnecessary": ("method=rounding", True),
        "method": "rounding",
        "grain": "stage",
        "max_ops": ("grain=stage", 6),
        "node_limit": 1,
        "time_limit": 1e-6,
    },
    "chen": {
        "remove_unnecessary": True,
        "method": {"method": "sqrt"},
        "threshold": ("method=threshold", 1 << 26),
        "segments": ("method=sqrt", 3),
    },
    "colossal_auto": {
        "remove_unnecessary": True,
        "slots": 20,
        "levels": 1,
        "offload": "none",
        "window": 1,
        "share": 0.5,
    },
    "dtr": {
        "heuristic": "lru",
        "deallocation": "ignore",
        "ties": "first",
        "staleness": "none",
        "by_size": False,
        "ignore_small": 0.5,
        "sample": True,
        "evicts": ["activation"],
    },
    "every_k": {"remove_unnecessary": True, "k": 3, "skip_last": True},
    "full_recompute": {"remove_unnecessary": True, "early_stop": False, "skip_last": True, "autocast_cache": False},
    "megtaichi": {
        "parts": 2,
        "neighbours": "both",
        "own_cost": True,
        "penalty": 2.0,
        "adjacent": False,
        "at_least": 1 << 26,
        "threshold": 0.5,
        "sample": True,
        "evicts": ["activation"],
    },
    "mimose": {
        "remove_unnecessary": True,
        "collect": 1,
        "round_to": 1024,
        "fallback": "largest",
        "static_size": 128,
        "verify": False,
    },
    "min_cut": {"remove_unnecessary": True, "aggressive": True, "regions": "layer"},
    "moccasin": {
        "remove_unnecessary": True,
        "runs": 3,
        "grain": "stage",
        "max_ops": ("grain=stage", 6),
        "work_limit": 1e-3,
        "time_limit": 1e-6,
    },
    "revolve": {"remove_unnecessary": True, "slots": 3},
    "rockmate": {
        "remove_unnecessary": True,
        "slots": 10,
        "levels": 1,
        "exact_ops": 2,
        "max_ops": 2,
        "node_limit": 1,
        "time_limit": 1e-6,
    },
    "rotor": {"remove_unnecessary": True, "slots": 20},
    "sac_knapsack": {
        "remove_unnecessary": True,
        "memory_budget": 0.5,
        "knapsack": "greedy",
        "regions": "graph",
        "runtime": "platform",
    },
    "selective_recompute": {
        "remove_unnecessary": True,
        "recompute": "attention_core",
        "early_stop": False,
        "autocast_cache": False,
    },
    "tso": {
        "remove_unnecessary": True,
        "modes": ["eager", "checkpoint"],
        "method": "price",
        "slots": 20,
        "launch": 10**6,
        "capture": 10**12,
        "replays": 1,
        "switch": 10**9,
    },
    "relax_and_fix": {"remove_unnecessary": False, "moments": 1, "rounds": 1},
    "twremat": {"remove_unnecessary": False, "order": "min_degree", "eager": True},
    "vlad": {"remove_unnecessary": True, "base": 6, "snapshots": 2},
    "lru_tiering": {"hits": 2, "pin_flops_per_byte": 1.0, "choice": "score", "watermark": 0.1, "prefetch": 4},
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
        "watermark": 0.1,
        "ties": "first",
        "evicts": ["activation"],
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


UNSEEN = {
    ("checkmate", "node_limit"): "graphs this small are solved at the root; see its own tests",
    ("megtaichi", "adjacent"): "it takes many small holes; see its own tests",
    ("mimose", "fallback"): "layers of a transformer are equal; see its own tests",
    (
        "moccasin",
        "remove_unnecessary",
    ): "what it proves best op by op leaves nothing to remove; docs/recompute.md shows it by stage",
    ("relax_and_fix", "moments"): "it changes what is proven, not the plan; see its own tests",
    ("rockmate", "node_limit"): "stages this small are solved at the root",
}
"""Parameters that can't be seen in a few seconds, and why."""

CASES = [
    (name, field.name)
    for name in names()
    for field in dataclasses.fields(policy_class(name))
    if (name, field.name) not in UNSEEN
]


@pytest.mark.parametrize(("name", "key"), CASES, ids=lambda value: value)
def test_every_parameter_changes_some_run(name, key):
    skip_without_extra(name)
    assert key in OTHER_VALUES.get(name, {}), f"OTHER_VALUES has no other value for {key!r} of {name!r}"
    base, changed = _parameters(name, key)
    for problem in (*tried_on(name), *(() if name in SLOW else ("roomy", "lengths"))):
        (with_it, limit), (without, _) = run(problem, name, changed), run(problem, name, base)
        if limit or (with_it is not None and with_it != without):
            return
    pytest.fail(f"{name}: {key}={OTHER_VALUES[name][key]!r} changes nothing on any problem tried")


def test_no_other_value_is_left_over():
    for name, values in OTHER_VALUES.items():
        if name in names():
            assert values.keys() == {field.name for field in dataclasses.fields(policy_class(name))}, name
