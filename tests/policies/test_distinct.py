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
from sim.hardware.platform import Allocator, Link, Platform
from sim.layout import lay_out
from sim.policies import names, policy_class
from sim.policies.base import Beside, default_of
from sim.search import smallest_budget
from sim.trace import Implementation, Trace, TraceBuilder
from workloads import random_dag, transformer, uniform_chain, w1

SLOW = {name for name in names() if policy_class(name).slow and not policy_class(name).online}  # slow planners
NEEDED = {
    "drive": ("steps of a drive", "direct drive", "regions"),
    "experts": ("experts", "mixture"),
    "slc": ("steps of regions", "regions"),
    "pool": ("steps of a pool", "regions", "mixture"),
    "inference": ("tokens",),
    "peers": ("stages",),
}
"""Per need of a policy the problems whose machine, or trace, has it."""
LARGE = ("chain", "w1", "convolutions", "eager", "amp", "fused", "tight convolutions")
SMALL = ("two ways", "steps", "few steps", "one layer", "net", "knots", "branches", "few ways", "addresses")


def tried_on(*policies: str) -> tuple[str, ...]:
    """The problems on which to look for a difference, in order."""
    needed = dict.fromkeys(
        one for name in policies for need in policy_class(name).needs for one in NEEDED.get(need, ())
    )
    return (*needed, *(SMALL if SLOW.intersection(policies) else (*LARGE, *SMALL)))


@cache
def small_problems() -> dict[str, tuple[Trace, Platform, int | None]]:
    """What an exact planner does in a second: chains, some with more inside their stages, W1, a net, branches."""
    a100 = load_profile("a100_40_pcie")
    steps, layer, net = uniform_chain(9, size=1 << 24, duration=50_000), w1(1), random_dag(6, 3, max_bytes=1 << 24)
    ways, few, knotted = two_ways(4), two_ways(3), knots(3, 6, 4)
    return {
        "steps": (steps, a100, 5 << 24),
        "few steps": (steps, a100, 4 << 24),
        "two ways": (ways, a100, int(0.6 * _peak(ways, a100))),
        "one layer": (layer, a100, int(0.8 * _peak(layer, a100))),
        "net": (net, a100, int(0.85 * _peak(net, a100))),
        "knots": (knotted, a100, int(0.7 * _peak(knotted, a100))),
        "branches": (branches(12, 1), a100, None),
        "few ways": (few, a100, int(0.8 * _peak(few, a100))),
        # what plans give no address takes the highest free range, and leaves holes
        "addresses": (layer, with_addresses(a100), int(1.02 * _peak(layer, a100))),
        "steps of regions": (steps, load_profile("mt3000_survey_slc"), 5 << 24),
        "steps of a drive": (steps, load_profile("a100_80_gds"), 5 << 24),
        "steps of a pool": (steps, load_profile("cloudmatrix384_die"), 5 << 24),
        "stages": stages(),
    }


def stages() -> tuple[Trace, Platform, int]:
    """Two stages of a pipeline on cards with slow links, of which the first holds more."""
    small = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 200, "n_positions": 264}
    base, slow = transformer(small, batch=4, sequence=64, precision="amp_fp16"), {"links.nvlink.rate": "2 GB/s"}
    slow |= {f"links.{link}.rate": "1 GB/s" for link in ("d2h", "h2d")}
    trace, platform = lay_out(base, "v100_16", {"pp": 2, "micro_batches": 4, "schedule": "1f1b"}, overrides=slow)
    return trace, platform, int(0.78 * _peak(trace, platform))


def with_addresses(platform: Platform) -> Platform:
    """The same machine, where plans give addresses in the device's memory."""
    home = platform.home(0).name
    planned = (dataclasses.replace(t, allocator=Allocator("planned")) if t.name == home else t for t in platform.tiers)
    return dataclasses.replace(platform, tiers=tuple(planned))


def two_ways(stages: int) -> Trace:
    """Stages of a cheap op and an expensive one, so that a part of a stage is worth keeping; a weight each."""
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


def branches(ops: int, seed: int) -> Trace:
    """Ops that read some of the latest results, so that they have many orders; the program holds one to the end."""
    draw, size = random.Random(seed), 1 << 20
    b = TraceBuilder({"batch": 1, "samples": 1})
    made = [b.tensor("x", size, "input")]
    for i in range(ops):
        reads = sorted(draw.sample(made[-6:], min(len(made), draw.randint(1, 2))))
        made.append(b.tensor(f"t{i}", draw.randint(1, 9) * size))
        workspace = draw.choice([0, 0, 2]) * size
        b.op(f"op{i}", "matmul", reads=reads, writes=made[-1:], workspace=workspace, duration=10**5)
    b.release(made[1], ops - 1)
    return b.build(outputs=made[-1:], carry=())


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
        "tight convolutions": (convolutions(8), a100, int(0.7 * _peak(convolutions(8), a100))),
        "direct drive": (convolutions(8), load_profile("a100_80_gds"), int(0.7 * _peak(convolutions(8), a100))),
        "regions": (eager, with_drives(), int(0.7 * _peak(eager, survey))),
        "experts": (requests(), with_drives(), None),
        "mixture": (mixture(), with_drives(), None),
        "tokens": (tokens(), with_drives(), int(0.7 * _peak(tokens(), survey))),
        "roomy": (eager, survey, None),
        "drive": (fused, load_profile("mt3000_survey_ssd"), None),
        "lengths": (lengths, a100, int(0.8 * _peak(lengths[-1], a100))),
    }


def with_drives() -> Platform:
    """MT-3000 with a drive whose fast region is soon full, one that the device reaches past the host, and a pool."""
    plain = load_profile("mt3000_survey_slc", overrides={"tiers.slc.capacity": "100 MB"})
    drive = dataclasses.replace(plain.tier("tlc"), name="drive", kind="nvme")
    out, back = Link("direct_write", "zone", "drive", 10**9), Link("direct_read", "drive", "zone", 2 * 10**9)
    # and two nodes of a pool
    nodes = [dataclasses.replace(plain.tier("ddr"), name=f"pool{n}", kind="pooled") for n in range(2)]
    ways = [Link(f"out{n}", "zone", f"pool{n}", 10**9) for n in range(2)]
    ways += [Link(f"in{n}", f"pool{n}", "zone", 10**9) for n in range(2)]
    return dataclasses.replace(plain, tiers=(*plain.tiers, drive, *nodes), links=(*plain.links, out, back, *ways))


def requests() -> Trace:
    """Layers whose routers choose one of three experts in turn, and some again; backward reads what they read."""
    b = TraceBuilder({"batch": 1, "samples": 1})
    weights = [b.tensor(f"expert{e}.weight", 1 << 24, "weight") for e in range(3)]
    x = [b.tensor("x", 1 << 24, "input")]
    chosen = (0, 1, 2, 0, 0, 2, 1, 1, 0, 2)
    for i, e in enumerate(chosen):
        x.append(b.tensor(f"y{i}", 1 << 24, layer=i))
        b.op(f"expert{e}.f{i}", "matmul", reads=[x[-2], weights[e]], writes=x[-1:], layer=i, duration=10**6)
    gradient = b.tensor("loss.grad", 1 << 24, "temporary")
    b.op("loss", "loss", reads=x[-1:], writes=[gradient], phase="backward", duration=10**4)
    for i, e in reversed(list(enumerate(chosen))):
        made = b.tensor(f"y{i}.grad", 1 << 24, "temporary", layer=i)
        reads = [gradient, x[i], weights[e]]
        b.op(f"f{i}.bwd", "matmul", reads=reads, writes=[made], layer=i, duration=2 * 10**6, phase="backward")
        gradient = made
    return b.build(outputs=(gradient,), carry=())


@cache
def tokens() -> Trace:
    """A prompt and two tokens of a small transformer, in two parts that are independent."""
    config = {"model_type": "gpt2", "n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    return transformer(config, batch=4, sequence=32, generate=2, precision="fp16", micro_batches=2)


def mixture() -> Trace:
    """A small transformer with experts of their own."""
    config = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 1, "experts_implementation": "loop"}
    return transformer(config, batch=1, sequence=32)


def convolutions(layers: int) -> Trace:
    """Convolutions and ReLUs in turn, each convolution with a faster way that needs workspace; a classifier."""
    b = TraceBuilder({"batch": 1, "samples": 1})
    made = [b.tensor("x", 1 << 24, "input")]
    faster = (Implementation("gemm", 0.5, 1 << 25),)
    for i in range(layers):
        for kind in ("conv", "elementwise") if i < layers - 1 else ("matmul", "elementwise"):
            made.append(
                b.tensor(f"{kind}{i}.out", 1 << 24, layer=i, zeros=0.75 if kind == "elementwise" and i % 2 else None)
            )
            more = {"conv": {"alternatives": faster}, "elementwise": {"function": "relu"}}.get(kind, {})
            b.op(f"{kind}{i}", kind, reads=made[-2:-1], writes=made[-1:], layer=i, duration=5 * 10**5, **more)
    gradient = b.tensor("loss.grad", 1 << 24, "temporary")
    b.op("loss", "loss", reads=made[-1:], writes=[gradient], duration=10**5)
    for i in reversed(range(layers)):
        for at, kind in ((2 * i + 2, "elementwise"), (2 * i + 1, "conv" if i < layers - 1 else "matmul")):
            reads = [gradient, made[at - 1]]
            gradient = b.tensor(f"{kind}{i}.grad", 1 << 24, "temporary", layer=i)
            more = {"layer": i, "phase": "backward", "function": "relu" if kind == "elementwise" else ""}
            b.op(f"{kind}{i}.bwd", kind, reads=reads, writes=[gradient], duration=10**6, **more)
    return b.build()


def _peak(trace, platform):
    return smallest_budget(trace, platform, "keep_all", tolerance=0.01)


def outcome(problem: str, policy: str, parameters: tuple = ()) -> str | None:
    """Hash of the log, or what kept it from running; None where the policy does not apply."""
    return run(problem, policy, parameters)[0]


@cache
def run(problem: str, policy: str, parameters: tuple = ()) -> tuple[str | None, str]:
    """The same, and which limit of its search a planner met."""
    trace, platform, budget = (small_problems() if problem in small_problems() else large_problems())[problem]
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


LARGE_ONLY = {
    name: problem
    for name in names()
    for need, problem in (("inference", "tokens"), ("peers", "stages"))
    if need in policy_class(name).needs
}
"""Tried on nothing but this problem, a transformer, which takes slow planners a minute and more."""

PAIRS = [
    pytest.param(
        *pair,
        marks=pytest.mark.slow
        if ("joint_optimal" in pair and "poet" not in pair) or (LARGE_ONLY.keys() & {*pair} and SLOW & {*pair})
        else (),
    )
    for pair in combinations(names(), 2)
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_two_policies_differ_somewhere(one, other):
    skip_without_extra(one, other)
    for name in LARGE_ONLY.keys() & {one, other}:
        # None: what plans for a backward pass, or one device, has no plan for what the other one is for
        problem = LARGE_ONLY[name]
        assert outcome(problem, one) != outcome(problem, other)
        return
    for problem in (*tried_on(one, other), *(() if SLOW & {one, other} else ("roomy",))):
        first, second = outcome(problem, one), outcome(problem, other)
        if first is not None and second is not None and first != second:
            return
    pytest.fail(f"{one} and {other} do the same on every problem tried")


def _parameters(name: str, key: str) -> tuple[tuple, tuple]:
    """(parameters to compare with, parameters with this one changed)."""
    value = policy_class(name).said_of_parameters("other_values")[key]
    base = dict(value.others) if isinstance(value, Beside) else {}
    other = value.value if isinstance(value, Beside) else value
    return tuple(base.items()), tuple({**base, key: other}.items())


CASES = [
    (name, field.name)
    for name in names()
    for field in dataclasses.fields(policy_class(name))
    if field.name not in policy_class(name).said_of_parameters("unseen")
]


@pytest.mark.parametrize(("name", "key"), CASES, ids=lambda value: value)
def test_every_parameter_changes_some_run(name, key):
    skip_without_extra(name)
    values = policy_class(name).said_of_parameters("other_values")
    assert key in values, f"{name}: `other_values` has none for {key!r}"
    base, changed = _parameters(name, key)
    for problem in (*tried_on(name), *(() if name in SLOW else ("roomy", "lengths", "drive"))):
        (with_it, limit), (without, _) = run(problem, name, changed), run(problem, name, base)
        if limit or (with_it is not None and with_it != without):
            return
    pytest.fail(f"{name}: {key}={values[key]!r} changes nothing on any problem tried")


@pytest.mark.parametrize("name", names())
def test_what_is_said_of_parameters_is_said_of_its_own(name):
    policy = policy_class(name)
    fields = {field.name for field in dataclasses.fields(policy)}
    values, unseen = policy.said_of_parameters("other_values"), policy.said_of_parameters("unseen")
    assert fields == values.keys() | unseen.keys()
    assert all(unseen.values())
    for field in dataclasses.fields(policy):
        value = values.get(field.name)
        assert (value.value if isinstance(value, Beside) else value) != default_of(field) or field.name not in values
