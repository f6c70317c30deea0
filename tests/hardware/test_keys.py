"""No key of a profile is decoration: each changes some run, or is there for readers and changes what they are told.

A key that is new in the schema fails here until `CHANGES` or `ABOUT` says how it is seen.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from sim import load_profile, simulate
from sim.engine.allocators import OPTIONS
from sim.errors import TiersimError
from sim.hardware.platform import Platform
from sim.hardware.schema import PARTS, ProfileFile, keys
from sim.plan import Move, Plan, Problem, Wait
from sim.policies.base import Policy
from sim.report.footer import Footer
from sim.report.listings import profile_page
from sim.report.page import RunView
from sim.report.page.run import run_data
from sim.trace import Trace, TraceBuilder
from sim.trace.op import KINDS
from tests.hardware.machine import MACHINE
from workloads import transformer

CHANGES = {
    "devices": ("devices = 2", "devices = 1"),
    "sharers": ("devices = 2", "devices = 1\nsharers = 3"),
    "op_time": ("devices = 2", 'devices = 2\nop_time = "bound"'),
    "dispatch": ("devices = 2", 'devices = 2\ndispatch = "cpu"'),
    "dispatch_scale": ("devices = 2", 'devices = 2\ndispatch = "cpu"\ndispatch_scale = 3'),
    "tiers.per_device": ('kind = "ddr"', 'kind = "ddr"\nper_device = true'),
    "tiers.capacity": ('value = "15 MB"', 'value = "5 MB"'),
    "tiers.bandwidth": ('bandwidth = "1 GB/s"\nlatency', 'bandwidth = "2 GB/s"\nlatency'),
    "tiers.write_bandwidth": ('latency = "0 ns"', 'latency = "0 ns"\nwrite_bandwidth = "0.1 GB/s"'),
    "tiers.latency": ('latency = "0 ns"', 'latency = "3 us"'),
    "tiers.pinning": ('latency = "0 ns"', 'latency = "0 ns"\npinning = "1 GB/s"'),
    "tiers.allocator": ('allocator = "exact"', 'allocator = "caching"'),
    "engines.home": ('main = false\nhome = "host"', 'main = false\nhome = "drive"'),
    "engines.reaches": ('reaches = ["hbm"]', "reaches = []"),
    "engines.main": None,  # two lines change: see `texts`
    "engines.peak": ("10 GFLOP/s", "20 GFLOP/s"),
    "engines.efficiency": ("matmul = 0.8", "matmul = 0.4"),
    "engines.bandwidth_share": ("norm = { value = 0.5", "norm = { value = 0.25"),
    "engines.launch": ('launch = "5 us"', 'launch = "6 us"'),
    "engines.bandwidth": ('launch = "5 us"', 'launch = "5 us"\nbandwidth = "0.5 GB/s"'),
    "engines.cores": ("cores = 5", "cores = 6"),
    "engines.clock": ('clock = "125 MHz"', 'clock = "250 MHz"'),
    "engines.vector": ('vector = "128 bit"', 'vector = "256 bit"'),
    "engines.units": ("units = { fp32 = 1 }", "units = { fp32 = 2 }"),
    "engines.runs": ("runs = { embedding", 'runs = { elementwise = "scalar", embedding'),
    "engines.image_order": ('launch = "5 us"', 'launch = "5 us"\nimage_order = { fp32 = "channels_last" }'),
    "engines.power": ('power = "300 W"', 'power = "200 W"'),
    "links.from": ('[links.h2d]\nfrom = "host"', '[links.h2d]\nfrom = "drive"'),
    "links.to": ('from = "hbm"\nto = "host"', 'from = "hbm"\nto = "drive"'),
    "links.peer": ('to = "near"', 'to = "near"\npeer = true'),
    "links.rate": ('rate = "1 GB/s"\nfixed = "10 us"', 'rate = "0.5 GB/s"\nfixed = "10 us"'),
    "links.fixed": ('fixed = "10 us"', 'fixed = "20 us"'),
    "links.copy_engines": ("copy_engines = 1", "copy_engines = 2"),
    "links.egress": ('egress = "2 GB/s"', 'egress = "0.5 GB/s"'),
    "links.codec": (
        'fixed = "10 us"\ncopy_engines = 1',
        'fixed = "10 us"\ncopy_engines = 1\ncodec = "100 MB/s"',
    ),
    "links.energy": ('energy = "60 pJ/B"\n\n[links.h2d]', 'energy = "90 pJ/B"\n\n[links.h2d]'),
    "pools.per_device": ("[pools.pcie]\nper_device = true", '[pools.pcie]\nper_device = true\nrate = "1 GB/s"'),
    "pools.devices": ("[pools.pcie]\nper_device = true", '[pools.pcie]\ndevices = 1\nrate = "1 GB/s"'),
    "pools.duplex": ("factors = { d2h = 0.95, h2d = 0.47 }", 'duplex = "half"\nfactors = { d2h = 0.95, h2d = 0.47 }'),
    "pools.rate": ('rate = "3 GB/s"', 'rate = "0.3 GB/s"'),
    "pools.charges": ("charges = { d2h = 1, ", "charges = { d2h = 9, "),
    "networks.per_node": ("per_node = 2", "per_node = 4"),
    "networks.nodes": ("per_node = 2", "per_node = 2\nnodes = 1"),
    "networks.rate": ('rate = "0.5 GB/s"', 'rate = "0.1 GB/s"'),
    "networks.fixed": ('fixed = "3 us"', 'fixed = "30 us"'),
    "pools.factors": ("factors = { d2h = 0.95, h2d = 0.47 }", "factors = { d2h = 0.1, h2d = 0.47 }"),
}
"""Per key, as `part.key`, what of the base is written otherwise."""

ABOUT = {
    "description": ('description = "made up"', 'description = "thought out"'),
    "notes": ('notes = ["none"]', 'notes = ["one"]'),
    "tiers.kind": ('kind = "hbm"', 'kind = "hbm3"'),
    "tiers.nominal": ('nominal = "16 MB"', 'nominal = "17 MB"'),
    **{f"{part}.source": ("", "") for part in PARTS},
    **{f"{part}.standing": ("", "") for part in PARTS},
    "fit.op_time": ("op_time = 0.07", "op_time = 0.08"),
    "fit.transfer_time": ('transfer_time = "no measurement"', "transfer_time = 0.1"),
}
"""Keys for readers, which change no run but what is said of the profile."""

FIRST = {"tiers": "hbm", "engines": "gpu", "links": "d2h", "pools": "dram", "networks": "net"}
WHERE = {"source": ('"sheet"', '"a run"', '"guess"'), "standing": ('"vendor"', '"measured"')}


def texts(key: str) -> tuple[str, str]:
    """The profile, and the same with one key that has another value."""
    if key == "engines.main":
        swapped = MACHINE.replace('home = "hbm"\nmain = true', 'home = "hbm"\nmain = ?').replace(
            'home = "hbm"\nmain = false', 'home = "hbm"\nmain = true'
        )
        return MACHINE, swapped.replace("main = ?", "main = false")
    if key in ("pools.per_device", "pools.devices"):  # two devices in one pool, or each in its own
        start, own = CHANGES[key]
        shared = own.replace("per_device = true\n", "").replace("devices = 1\n", "")
        return MACHINE.replace(start, own), MACHINE.replace(start, shared)
    if key == "dispatch_scale":  # of the CPU that launches, which there has to be
        return tuple(MACHINE.replace(*CHANGES[which], 1) for which in ("dispatch", key))
    part, _, name = key.rpartition(".")
    if name in WHERE:
        head = f"[{part}]" if part == "fit" else f"[{part}.{FIRST[part]}]"
        at = MACHINE.index(head)
        old = next(f"{name} = {value}" for value in WHERE[name] if f"{name} = {value}" in MACHINE[at : at + 200])
        new = f'{name} = "{"another" if name == "source" else "estimate"}"'
        return MACHINE, MACHINE[:at] + MACHINE[at:].replace(old, new, 1)
    old, new = {**CHANGES, **ABOUT}[key]
    assert MACHINE.count(old) == 1 or old in MACHINE, old
    return MACHINE, MACHINE.replace(old, new, 1)


# ---- runs that look at everything ------------------------------------------------------------------


class There(Policy):
    """Moves what the first op of each device makes to a tier beside it, to the host, and back; fetches a weight.

    The CPU writes its result in the device's memory.
    """

    moves = True

    def plan(self, problem: Problem) -> Plan:
        """Copies on every link at once, on all devices."""
        trace, actions, place = problem.trace, [], {}
        for device in range(trace.devices):
            tensor, beside = (trace.tensor_id(f"{name}{device}") for name in ("x", "z"))
            first, last = (trace.op_id(f"{name}{device}") for name in ("first", "last"))
            at = "" if len(problem.platform.tiers) == 4 else f"@{device}"
            host = problem.platform.host.name
            place[trace.tensor_id(f"v{device}")] = host
            place[trace.tensor_id(f"y{device}")] = f"hbm{at}"  # which the CPU writes in place
            actions += [Move(tensor, to=host, after=first), Move(beside, to=f"near{at}", after=first)]
            actions += [Move(trace.tensor_id(f"v{device}"), to=f"hbm{at}", after=first)]
            actions += [Wait(tensor, before=last), Move(tensor, to=f"hbm{at}", before=last)]
            # compressed, where the links have a codec
            actions += [Move(trace.tensor_id(f"n{device}"), to=host, keep=True, wire=1 << 19, after=f"norm{device}")]
        return Plan(trace, tuple(actions), place=place)


def every_kind(devices: int) -> Trace:
    """Ops of several kinds on the main engine, one on the CPU, and a result that the other device reads."""
    b, noted = TraceBuilder({"batch": 1, "samples": 1}), list[int]()
    for d in range(devices):
        w, v = b.tensor(f"w{d}", 1 << 20, "weight"), b.tensor(f"v{d}", 1 << 20, "weight")
        x, y, z, n, e = (b.tensor(f"{name}{d}", 1 << 20) for name in "xyzne")
        b.op(f"first{d}", "matmul", reads=[w], writes=[x, z], flops=10**7, dtype="fp32", device=d)
        b.op(f"norm{d}", "norm", reads=[w], writes=[n], flops=10**5, dtype="fp32", device=d)
        b.op(f"cpu{d}", "elementwise", reads=[n], writes=[y], flops=10**6, dtype="fp32", device=d, engine="cpu")
        b.op(f"side{d}", "elementwise", reads=[n], writes=[e], flops=10**6, dtype="fp32", device=d, engine="vector")
        noted.append(n)
        reads, made = [x, y, z, e, v, noted[0]], b.tensor(f"out{d}", 1 << 10)
        b.op(f"last{d}", "conv", reads=reads, writes=[made], dtype="fp32", device=d)
    return b.build()


@cache
def seen(text: str, folder: Path) -> tuple:
    """What runs on a machine: when which engine and link did what, what was held, what it took; or why not."""
    path = folder / "machine.toml"  # one name for all, since messages have it
    path.write_text(text, encoding="utf-8")
    try:
        platform = load_profile(path)
    except TiersimError as error:
        return (str(error).partition(": ")[2],)
    found = []
    for trace, policy in (
        (every_kind(2), There()),
        (every_kind(1), There()),
        (small(), "zero_offload"),
        (small(), "keep_all"),
    ):
        found.append(outcome(trace, platform, policy))
    try:
        log = simulate(small(4), path, parallel={"dp": 4}).log
        found.append(([log.end], tuple(link.rate for link in log.platform.links)))
    except TiersimError as error:
        found.append((type(error).__name__, str(error)))
    return tuple(found)


@cache
def small(batch: int = 1) -> Trace:
    """A transformer of some megabytes."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 512, "n_positions": 64}
    return transformer(config, batch=batch, sequence=32)


def outcome(trace: Trace, platform: Platform, policy: Policy | str) -> tuple:
    try:
        log = simulate(trace, platform, policy).log
    except TiersimError as error:
        return (type(error).__name__, str(error))
    from sim.analysis import summarize

    columns = [log.interval(name) for name in ("start", "end", "why", "bytes")]
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    summary = summarize(log)
    told = summary.energy_j, summary.more["pinning_ns"], tuple(summary.reserved_bytes.values())
    return rows, told, log.changes[:, [0, 2]].tolist()


KEYS = [*keys(ProfileFile), *(f"{part}.{key}" for part, model in PARTS.items() for key in keys(model))]
TABLES = set(PARTS)
"""Keys of a file that hold its parts."""


def test_every_key_of_the_schema_is_looked_at():
    assert {*CHANGES, *ABOUT} == set(KEYS) - TABLES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


def test_the_base_runs_everywhere(folder):
    assert all(isinstance(found[0], list) for found in seen(MACHINE, folder)), [f[:2] for f in seen(MACHINE, folder)]


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_changes_some_run(key, folder):
    before, after = texts(key)
    assert before != after
    first, second = seen(before, folder), seen(after, folder)
    assert first != second, f"{key} changes nothing"
    assert len(second) > 1, f"{key}: the other value is refused, which says nothing: {second}"


@pytest.mark.parametrize("key", ABOUT)
def test_a_key_for_readers_changes_what_they_are_told_and_no_run(key, folder, tmp_path):
    before, after = texts(key)
    assert before != after
    assert seen(before, folder) == seen(after, folder)
    assert told(before, tmp_path) != told(after, tmp_path), f"{key} is told nobody"


def told(text: str, folder: Path) -> tuple:
    path = folder / "machine.toml"
    path.write_text(text, encoding="utf-8")
    platform = load_profile(path)
    result = simulate(small(), platform, "keep_all")
    data = run_data(RunView("x", result.log, {}, Footer(platform)))
    return profile_page(str(path), as_json=True), data["tiers"], data["facts"], data["notes"]


def test_the_readme_lists_the_kinds_that_there_are():
    readme = (Path(__file__).parents[2] / "hardware_profiles" / "README.md").read_text(encoding="utf-8")
    said = readme[readme.index("Kinds of op: `") :].partition("`.")[0]
    assert set(said.replace("`", " ").replace("\n", " ").split()) >= set(KINDS)


def test_what_no_run_looks_at_is_refused(folder):
    path = folder / "compact.toml"
    path.write_text(MACHINE.replace('kind = "hbm"', 'kind = "hbm"\ncompact_rate = "1 GB/s"'), encoding="utf-8")
    with pytest.raises(TiersimError, match="compact_rate"):
        load_profile(path)


# ---- options of allocators ---------------------------------------------------------------------------

OTHER_OPTIONS = {
    ("caching", "expandable_segments"): (False, True),
    ("caching", "max_split_size"): ("21 MiB", "512 MiB"),
    ("pool", "fit"): ("first", "best"),
    ("pool", "ends"): (1, 2),
    ("pool", "classes"): ("pow2", "1 MiB, 20 MiB"),
    ("pool", "rounding"): (512, 1 << 20),
    ("planned", "rounding"): (512, 1 << 20),
}


def test_every_option_of_every_allocator_is_looked_at():
    assert set(OTHER_OPTIONS) == {(name, option) for name, options in OPTIONS.items() for option in options}


@pytest.mark.parametrize(("allocator", "option"), OTHER_OPTIONS)
def test_an_option_of_an_allocator_changes_some_run(allocator, option, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(MACHINE, encoding="utf-8")
    found = []
    for value in OTHER_OPTIONS[allocator, option]:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        at = {"tiers.hbm.allocator.name": allocator, f"tiers.hbm.allocator.{option}": text}
        if option == "ends":  # the best hole is the same from either end
            at["tiers.hbm.allocator.fit"] = "first"
        drawn = load_profile(path, overrides=at).with_budget(100 << 20)
        card = load_profile("a100_40_pcie", overrides=at).with_budget(2_600_000_000)
        found.append((outcome(scratch_beside(), drawn, "keep_all"), outcome(gpt2(), card, "dtr")))
    assert found[0] != found[1]


@cache
def gpt2() -> Trace:
    return transformer("gpt2", batch=2, sequence=256, precision="amp_bf16")


@cache
def scratch_beside() -> Trace:
    """While an op of another engine holds scratch space, one of the device needs the larger of two holes whole."""
    b, mb = TraceBuilder({"batch": 1, "samples": 1}), 1 << 20
    a, x, y, z = (b.tensor(name, size * mb) for name, size in (("a", 30), ("x", 30), ("y", 40), ("z", 0)))
    b.op("first", writes=[a], duration=1000)
    b.op("second", reads=[a], writes=[x], duration=1000)
    b.op("beside", reads=[x], writes=[z], duration=10**6, engine="vector", workspace=20 * mb)
    b.op("third", reads=[x], writes=[y], duration=1000)
    b.op("last", reads=[y, z], writes=[b.tensor("out", 8)], duration=1000)
    return b.build()
