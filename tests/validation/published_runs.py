"""Published training iterations, and the same iterations simulated.

`data/published_runs.csv` holds every run graded A (set up without a guess that matters) or B (one or two guesses) of
public tables, as printed, with its source. `set`: `develop` or `check`, by source; no figure of the simulator is fitted
to either. `setup`: what is simulated, as JSON: the arguments of `transformer` or `cnn`, `profile`, `policy`, the keys
of a layout (`LAYOUT`), `accumulate` (micro-batches per update), `card` (one of `CARDS`, where the profile is of another
card of that kind), `network` (bytes/s per device between nodes, where the source states it), `flash` (which version of
FlashAttention, see `FLASH`), `fuses` (what alone a stack fuses: see `FUSED`), `context` (bytes that the reading
includes beside those of tensors), `dispatch` (who launches: a CPU under the stack by default, else "graphs"),
`bitsandbytes` (a version before 0.43.2, whose products with 4-bit weights hold their inputs until backward: pull
request 1270), `joint_adapters` (LitGPT's projection of queries, keys and values: see there), `last_stage` (the device
that was read; else the fullest), `pytorch` (the version in the source's container, where it is known), `paddle`
(PaddlePaddle ran), `lazy_kernels` (false where the source prints a CUDA before 12.2 and nothing turns that on),
`communicators` (the ranks of each that the framework makes beside those of the layout, as `card_reading` takes them),
`reads_each` (the program reads from the device before each micro-batch), `biases_apart`, `softmax_apart`,
`reduces_to_one` and `built` (the type in which weights are made): see `paddle_runs`, `memory_only` (its time is not
that of training). `missing`: why nothing is, where nothing is.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sim.analysis.card_reading import card_reading
from sim.analysis.peak_memory import home_peak, peak_bytes, peak_memory
from sim.errors import TiersimError, WorkloadError
from sim.experiment import simulate
from sim.hardware.profile import load_profile
from sim.layout import lay_out
from sim.rewrites.chunks import as_base
from sim.rewrites.gradient_buffer import gradient_buffers
from sim.rewrites.rewriter import Rewriter, with_columns
from sim.rewrites.stack import fuse_streams, recomputed_inside, stream_groups
from sim.trace import Trace
from sim.trace.launched import AWAITED
from tests.validation.paddle_runs import biases_apart, pool_of_building, reducing_to_one, softmax_apart
from workloads import cnn, transformer, with_stack

DATA = Path(__file__).parent / "data" / "published_runs.csv"
SETS = ("develop", "check")
LAYOUT = (
    *(
        "dp",
        "tp",
        "cp",
        "ring_attention",
        "sequence_parallel",
        "async_sums",
        "keep_gathered",
        "sum_each",
        "pp",
        "zero",
        "shard_within",
        "schedule",
        "chunks",
    ),
    *("layers", "bucket", "gradient_buffer", "gathered"),
)
SOFTWARE = ("pytorch", "paddle", "lazy_kernels", "communicators")
READING = ("context", "last_stage", "memory_only", "reads_each", "reduces_to_one", "built", *SOFTWARE)
MACHINE = ("dispatch", "profile", "card", "network", "flash")
RUN = (
    *(*LAYOUT, *READING, *MACHINE, "policy", "accumulate", "cnn", "model", "batch", "stack", "fuses"),
    *("bitsandbytes", "joint_adapters", "biases_apart", "softmax_apart"),
)
FLASH = {
    1: {
        "a100_80_sxm": {"engines.gpu.efficiency.attention": "0.325"},
        "h100": {"engines.gpu.efficiency.attention": "0.178"},
    },
}
"""What another version of FlashAttention than the profile's reaches.

Version 1: 25 to 40 % of an A100's peak (Dao 2023, arXiv:2307.08691, abstract). On an H100, version 2 computes at 333
TFLOP/s forward (causal) and 318 backward (8,192 tokens, heads of 128; Shah et al. 2024, arXiv:2407.08608, figures 5 and
6), and is 1.3 to 1.5 and 2 times as fast as version 1 in Triton (Dao 2023, section 4.1, on an A100; neither has
instructions of the H100's own): 7 / (2 / 238 + 5 / 159) = 176 of 989 TFLOP/s over the two products of forward and the
five of backward.
"""
CARDS = {
    "A100 40 GB": {
        "tiers.hbm.nominal": "40 GiB",
        "tiers.hbm.capacity": "39.18 GiB",
        "tiers.hbm.bandwidth": "1555 GB/s",
    },
    "H100 96 GB HBM2e": {
        "tiers.hbm.nominal": "96 GB",
        "tiers.hbm.capacity": "94.1 GiB",
        "tiers.hbm.bandwidth": "2400 GB/s",
        "engines.gpu.efficiency.matmul": "0.76",
    },
    "A800": {"links.nvlink.rate": "157 GB/s", "links.nvlink.egress": "157 GB/s"},
    "H800": {"links.nvlink.rate": "163 GB/s", "links.nvlink.egress": "163 GB/s"},
}
"""What differs of a card from that of the profile.

A100 40 GB: NVIDIA's A100 datasheet, the SXM4 card of 40 GB; what is usable of it as in `a100_40_pcie`. A800 and H800:
NVLink of 400 GB/s in both directions where A100 and H100 have 600 and 900 (NVIDIA's datasheets), at what the profiles
measure of these. H100 96 GB, of 500 W: large products reach 0.69 of the peak in bf16 (pytorch/ao,
torchao/testing/training/roofline_utils.py), which 0.76 gives one of 8192 x 8192 x 8192, its bytes and launch apart.
"""
FUSED = {"norms": {"norm", "norm1", "norm2"}}
"""The modules whose ops alone are fused, as the norms are by PaddleNLP's `use_fused_rms_norm`."""
UNITS = {"GiB": 2**30, "GB": 10**9, "MB (bytes // 1024^2)": 2**20, "bytes": 1}
OF_THE_CARD = ("memory used of the card", "NVML", "VRAM")
"""How definitions begin of readings that count what PyTorch's allocator reserves, and what lies outside of it."""
RESERVED = ("peak reserved",)
"""How definitions begin of readings of what PyTorch's allocator reserves, alone; all others are of what it has given:
its blocks, rounded up, with what is not split off (c10/cuda/CUDACachingAllocator.cpp, `allocated_bytes`)."""
CACHING = {"tiers.hbm.allocator": "caching"}
PERIOD = "s per iteration"
"""The metric that is a time; its rate is that of iterations."""
DEVICES = "8"
"""Of a node; all nodes in the tables with more than one device have eight."""


class Outcome(NamedTuple):
    """What a run came to here. rate: as the source prints it; peak: bytes of one device; refusal: why there is none."""

    rate: float | None
    peak: int | None
    refusal: str = ""


@cache
def rows() -> tuple[Mapping[str, Any], ...]:
    """All rows, `setup` read. Raises WorkloadError for one without a grade, a set or, where it is run, a precision."""
    return read(DATA.read_text(encoding="utf-8"))


def read(text: str) -> tuple[Mapping[str, Any], ...]:
    """Rows of such a file."""
    found = []
    for row in csv.DictReader(text.splitlines()):
        where = f"published run {row['id']!r}"
        if row["complete"] not in ("A", "B"):
            raise WorkloadError(f"{where}: grade {row['complete']!r} is not A or B")
        if row["set"] not in SETS:
            raise WorkloadError(f"{where}: set {row['set']!r} is not develop or check")
        if bool(row["setup"]) == bool(row["missing"]):
            raise WorkloadError(f"{where}: needs a setup, or says what is missing")
        setup = json.loads(row["setup"]) if row["setup"] else None
        if setup is not None and not setup.get("precision"):
            raise WorkloadError(f"{where}: the setup has no precision; give it one, or say that it is missing")
        found.append({**row, "setup": setup})
    return tuple(found)


def simulated(row: Mapping[str, Any]) -> Outcome:
    """The run of a row, extrapolated from two numbers of micro-batches to that of the row.

    Time is linear in the micro-batches of an update once a pipeline is full, so two runs tell it.
    """
    setup = row["setup"]
    stages, total = setup.get("pp", 1), setup.get("accumulate", 1)
    first = min(total, stages)
    counts = [first] if total == first else [first, min(total, 2 * first)]
    reading = row["peak_memory_definition"] if row["peak_memory"] else ""
    if counts == [1] and setup.get("memory_only") and setup["precision"] == "megatron_bf16":
        counts = [2]  # the buffers of the gradients, which exist from the start, are full only in a second one
    try:
        runs = [_run(setup, count, reading) for count in counts]
    except TiersimError as error:
        return Outcome(None, None, str(error).split(";")[0][:160])
    time, peak = runs[-1]
    if len(runs) > 1 and counts[1] > counts[0]:
        time += (time - runs[0][0]) * (total - counts[1]) / (counts[1] - counts[0])
    rate = None if setup.get("memory_only") else _rate(row, total, time / 1e9)
    return Outcome(rate, peak + setup.get("context", 0))


def _run(setup: Mapping[str, Any], micro_batches: int, reading: str) -> tuple[int, int]:
    """Nanoseconds and peak bytes of an update of so many micro-batches.

    reading: which bytes, as the source defines them; "" where it prints none. Of the card, what the allocator reserves
        alone where the source says how large the context is (`context`) or nobody does.
    """
    layout = {key: setup[key] for key in LAYOUT if key in setup}
    several = devices_of(setup) > 1
    samples = setup["batch"] * micro_batches * layout.get("dp", 1)
    axes = {key: value for key, value in setup.items() if key not in RUN}
    if not several:
        axes["micro_batches"] = micro_batches
    trace = cnn(setup["cnn"], samples, **axes) if "cnn" in setup else transformer(setup["model"], batch=samples, **axes)
    trace = holding_inputs(trace) if "bitsandbytes" in setup else trace
    trace = joint_adapters(trace) if "joint_adapters" in setup else trace
    trace = as_base(biases_apart(trace)) if "biases_apart" in setup else trace
    trace = as_base(softmax_apart(trace)) if "softmax_apart" in setup else trace
    overrides = {**(CACHING if reading else {}), "dispatch": setup.get("dispatch", "cpu")}
    overrides |= CARDS[setup["card"]] if "card" in setup else {}
    overrides |= FLASH[setup["flash"]].get(setup["profile"], {}) if "flash" in setup else {}
    overrides |= {"networks.infiniband.rate": setup["network"]} if "network" in setup else {}
    if layout.get("gradient_buffer") and not several:
        trace = gradient_buffers(trace)
    if several:
        overrides["devices"] = DEVICES
        layout["micro_batches"] = micro_batches
    # kernels are fused after the layers are divided, as they are in a run
    stacked = partial(with_stack, stack=setup.get("stack", "eager"))
    if "fuses" in setup:
        stacked = partial(fusing_only, modules=FUSED[setup["fuses"]])
    platform = load_profile(setup["profile"], overrides=overrides)
    divided, device = lay_out(trace, platform, layout, kernels=stacked) if several else (stacked(trace), platform)
    divided = reducing_to_one(divided) if setup.get("reduces_to_one") else divided
    divided = reading_each(divided) if setup.get("reads_each") else divided
    log = simulate(divided, device, setup["policy"]).log
    if setup.get("last_stage"):
        return log.end, peak_bytes(log)[device.home(divided.devices - 1).name]
    if not reading.startswith((*OF_THE_CARD, *RESERVED)):
        return log.end, home_peak(log)
    software = {key: setup[key] for key in SOFTWARE if key in setup}
    read = card_reading(log, **software)
    if reading.startswith(OF_THE_CARD) and "context" not in setup and read:
        pools = [pool_of_building(divided, each.device, setup["built"]) if "built" in setup else 0 for each in read]
        return log.end, max(each.bytes + max(0, pool - each.tensors) for each, pool in zip(read, pools, strict=True))
    if reading.startswith(RESERVED) and read:
        return log.end, max(each.tensors for each in read)
    reserved = [peak_memory(log, device.home(d).name).reserved_bytes for d in range(divided.devices)]
    return log.end, max((each for each in reserved if each is not None), default=home_peak(log))


def fusing_only(trace: Trace, modules: set[str]) -> Trace:
    """The trace with what the fused stack makes of the ops of these modules; the rest runs eagerly.

    What is made of a module's result (`MODULE.out.…`) is not of the module: copies of it, and sums of its gradients.
    """
    own = re.compile(rf"(^|\.)({'|'.join(modules)})(\.(?!out\.)|$)")
    inside = [own.search(name) is not None for name in trace.op_columns.name]
    groups = [[op for op in group if inside[op]] for group in stream_groups(trace)]
    groups = [group for group in groups if group]
    return fuse_streams(trace, recomputed_inside(trace, groups), groups, update=False, stack="fused").trace


def reading_each(trace: Trace) -> Trace:
    """The trace of a program that reads from the device before each micro-batch (`name.mbK`)."""
    c = trace.op_columns
    first: dict[tuple[int, str], int] = {}
    for op, name in enumerate(c.name):
        _, found, part = name.rpartition(".mb")
        if found and part.isdecimal():
            first.setdefault((int(c.device[op]), part), op)
    return with_columns(trace, {**trace.meta, AWAITED: sorted(first.values())})


def holding_inputs(trace: Trace) -> Trace:
    """The trace in which backward of a product with a dequantised weight reads the input of the product, too."""
    new, ops = Rewriter(trace, {}), {op.name: op for op in trace.ops}
    ids = new.all_tensors()
    for op in trace.ops:
        held = list[int]()
        if f"{op.name}.dequantise" in ops and op.name.endswith(".bwd"):
            held = [t for t in ops[op.name.removesuffix(".bwd")].reads[:1] if t not in op.reads]
        new.op(op, reads=[ids[t] for t in (*op.reads, *held)], writes=[ids[t] for t in op.writes])
    carry = [(ids[old], ids[fresh]) for old, fresh in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def joint_adapters(trace: Trace) -> Trace:
    """The trace with adapters of queries and values as LitGPT's `MergedLinear` has them (lit_gpt/lora.py, 2023-10).

    One product makes queries, keys and values, which attention then holds as a whole, since its values are a view of
    it; both adapters have one dropout; and their results are padded with zeros for the keys by `index_copy`, whose
    backward holds them.
    """
    new, names = Rewriter(trace, {}), {t.name: t.id for t in trace.tensors}
    shared, kept = dict[int, int](), dict[str, list[int]]()
    for layer in range(int(trace.meta["layers"])):
        part = f"h{layer}.attn"
        for end in ("out", "mask"):
            shared[names[f"{part}.v.lora_dropout.{end}"]] = names[f"{part}.q.lora_dropout.{end}"]
        kept[f"{part}.core.bwd"] = [names[f"{part}.q.lora.add.out"], names[f"{part}.k.out"]]
        for each in "qv":
            kept[f"{part}.{each}.lora.scale.bwd"] = [names[f"{part}.{each}.lora_B.out"]]
    ids = new.all_tensors(without=shared)
    for theirs, ours in shared.items():
        ids[theirs] = ids[ours]
    for op in trace.ops:
        if not op.name.endswith(".v.lora_dropout"):
            reads = [ids[t] for t in (*op.reads, *kept.get(op.name, ()))]
            new.op(op, reads=reads, writes=[ids[t] for t in op.writes])
    carry = [(ids[old], ids[fresh]) for old, fresh in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def devices_of(setup: Mapping[str, Any]) -> int:
    """How many devices a layout takes."""
    return prod(setup.get(key, 1) for key in ("dp", "tp", "cp", "pp"))


def _rate(row: Mapping[str, Any], accumulate: int, seconds: float) -> float:
    """An iteration of so many seconds in the row's metric."""
    setup, metric = row["setup"], row["metric"]
    if metric.startswith(PERIOD):
        return 1 / seconds
    samples = setup["batch"] * accumulate * setup.get("dp", 1)
    if metric.startswith("tokens/s"):
        samples *= setup["sequence"]
    if "per device" in metric:
        samples /= devices_of(setup)
    return samples / seconds


def printed_peak(row: Mapping[str, Any]) -> float | None:
    """The printed peak in bytes, None where there is none, or only a bound ("> 80")."""
    if not row["peak_memory"] or row["peak_memory"].startswith(">"):
        return None
    return float(row["peak_memory"]) * UNITS[row["peak_memory_unit"]]


def printed_rate(row: Mapping[str, Any]) -> float | None:
    """The printed rate; None for a run that did not fit, or of which only memory is printed."""
    if not row["value"] or row["value"] == "OOM":
        return None
    return 1 / float(row["value"]) if row["metric"].startswith(PERIOD) else float(row["value"])
