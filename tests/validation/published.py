"""Figures printed in papers, lectures and surveys, beside what this simulator computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from scripts.offload_page.published import ten_billion, tflops
from sim.engine.replay import replay
from sim.experiment import simulate
from sim.hardware.platform import Engine, Link, Platform, Tier
from sim.log import WHY, EventLog
from sim.plan import Plan
from sim.rewrites.pipeline import pipeline
from sim.trace import Trace, TraceBuilder
from sim.trace.op import KIND_CODE, PHASE_CODE
from sim.trace.tensor import ROLE_CODE
from tests.validation import fine_tuning
from tests.validation.oracle import machine
from workloads import transformer


class Figure(NamedTuple):
    """One printed figure. tolerance: how far ours may be from it, relative; how: what is computed here."""

    what: str
    source: str
    standing: str
    printed: float
    unit: str
    ours: Callable[[], float]
    tolerance: float
    how: str


MEGATRON = {"175B": (12288, 96), "530B": (20480, 128)}
"""Hidden size and heads, table 3 of Korthikanti et al."""


def megatron(name: str, layers: int = 2) -> Trace:
    """Layers of such a model, one sample of 2048 tokens."""
    hidden, heads = MEGATRON[name]
    config = {
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048,
        "vocab_size": 51200, "activation_function": "gelu",
    }  # fmt: skip
    return transformer(config, batch=1, sequence=2048, precision="mixed_fp16", attention="eager")


def held_by_layers(log: EventLog) -> int:
    """Bytes of activations inside layers that live when backward begins."""
    c, tensors = log.trace.op_columns, log.trace.tensor_columns
    ops, why = log.interval("op"), log.interval("why")
    began = min(log.interval("start")[(why == WHY["run"]) & (c.phase[ops] == PHASE_CODE["backward"])])
    tensor, delta, time = (log.change(name) for name in ("tensor", "delta", "time"))
    inside = (
        (tensor >= 0)
        & (tensors.layer[tensor] >= 0)
        & (tensors.role[tensor] == ROLE_CODE["activation"])
        & (time < began)
    )
    return int(delta[inside].sum())


def saved_by_selective(name: str) -> float:
    """Percent of the activations that are saved by recomputing the attention core."""
    trace = megatron(name)
    kept = held_by_layers(simulate(trace, machine(), "keep_all").log)
    left = held_by_layers(simulate(trace, machine(), "selective_recompute", recompute="attention_core").log)
    return 100 * (1 - left / kept)


def core_flops(name: str, passes: int) -> float:
    """Percent of model FLOPs that the attention cores of the layers take in that many forward passes."""
    layers = {"175B": 96, "530B": 105}[name]
    trace = megatron(name, layers)
    log = simulate(trace, machine(), "selective_recompute", recompute="attention_core").log
    again = log.interval("op")[log.interval("why") == WHY["recompute"]]
    kinds = trace.op_columns.kind[again]
    products = int(trace.op_columns.flops[again][kinds == KIND_CODE["matmul"]].sum())
    return 100 * passes * products / float(trace.meta["model_flops"])


def pipeline_time(stages: int, micro_batches: int, schedule: str) -> float:
    """Time in forwards of one microbatch, a backward taking two, with links that take no time to speak of."""
    unit = 100_000
    b = TraceBuilder({"batch": micro_batches, "samples": micro_batches})
    x, saved = b.tensor("x", micro_batches, "input"), []
    for i in range(stages):
        y = b.tensor(f"y{i}", micro_batches, layer=i)
        b.op(f"f{i}", reads=[x], writes=[y], layer=i, duration=unit * micro_batches, splits=("batch",))
        saved.append(y)
        x = y
    g = b.tensor("g", micro_batches, "temporary")
    b.op("loss", reads=[x], writes=[g], duration=0, splits=("batch",))
    for i in reversed(range(stages)):
        new = b.tensor(f"g{i}", micro_batches, "temporary", layer=i)
        took = 2 * unit * micro_batches
        reads = [g, saved[i]]
        b.op(f"b{i}", phase="backward", reads=reads, writes=[new], layer=i, duration=took, splits=("batch",))
        g = new
    devices = range(stages)
    line = Platform(
        "line",
        tuple(Tier(f"hbm@{i}", 1 << 40, 1 << 40, 10**12, device=i) for i in devices),
        tuple(Engine(f"gpu@{i}", i, f"hbm@{i}", (f"hbm@{i}",), {"fp32": 10**12}) for i in devices),
        tuple(Link(f"l{i}.{j}", f"hbm@{i}", f"hbm@{j}", 10**18) for i in devices for j in devices if i != j),
    )
    trace = pipeline(b.build(outputs=[], carry=()), list(devices), micro_batches, schedule)
    return replay(Plan(trace), line).end / unit


def bytes_a_parameter(precision: str) -> float:
    """Weights, gradients and optimizer state of a GPT-2, bytes per parameter."""
    trace = transformer("gpt2-small", batch=1, sequence=16, precision=precision)
    made = {t for op in trace.ops for t in op.writes}
    held = sum(
        t.bytes
        for t in trace.tensors
        if (t.role in ("weight", "optimizer_state") and t.id not in made) or _kept(trace, t)
    )
    return held / float(trace.meta["parameters"])


def offloaded_10b() -> float:
    """TFLOP/s of ZeRO-Offload's 10 B model (50 layers of 4096) with checkpoints, what is recomputed counted, too."""
    return tflops(ten_billion(), recomputed=True)


def gpt3(part: str) -> float:
    """GiB of GPT-3: 96 layers of 12288, batch 128, 2048 tokens, vocabulary 50000; one layer built, then multiplied."""
    one, two = (_gpt3_parts(layers) for layers in (1, 2))
    return (one[part] + 95 * (two[part] - one[part])) / 2**30


def _gpt3_parts(layers: int) -> dict[str, int]:
    config = {
        "model_type": "gpt2", "n_layer": layers, "n_embd": 12288, "n_head": 96, "n_positions": 2048,
        "vocab_size": 50000, "activation_function": "gelu",
    }  # fmt: skip
    trace = transformer(config, batch=128, sequence=2048, precision="mixed_fp16", attention="eager")
    made = {t for op in trace.ops for t in op.writes}
    statistics = (".mean", ".rstd")
    return {
        "weights and gradients": sum(
            t.bytes for t in trace.tensors if _kept(trace, t) or (t.role == "weight" and t.id not in made)
        ),
        "optimizer": sum(t.bytes for t in trace.tensors if t.role == "optimizer_state" and t.id not in made),
        "activations": sum(t.bytes for t in trace.tensors if t.saved_for and not t.name.endswith(statistics)),
    }


KORTHIKANTI = "Korthikanti et al., MLSys 2023"
LECTURE = "lecture on large-model training"
SURVEY = "survey of memory optimisation"
TORCHTUNE = "torchtune's README, table of memory options"

FIGURES = (
    Figure(
        "GPT-3 175B: activations that selective recomputation saves",
        KORTHIKANTI,
        "paper",
        70,
        "%",
        lambda: saved_by_selective("175B"),
        0.01,
        "bytes that layers hold as backward begins, engine",
    ),
    Figure(
        "MT-NLG 530B: the same", KORTHIKANTI, "paper", 65, "%", lambda: saved_by_selective("530B"), 0.01, "the same"
    ),
    Figure(
        "GPT-3 175B: FLOPs that it adds",
        KORTHIKANTI,
        "paper; counts three passes of the attention core",
        2.7,
        "%",
        lambda: core_flops("175B", 3),
        0.03,
        "recomputed ops counted three times; counted once, as they run, 0.9 %",
    ),
    Figure(
        "MT-NLG 530B: the same",
        KORTHIKANTI,
        "paper; counts three passes of the attention core",
        1.6,
        "%",
        lambda: core_flops("530B", 3),
        0.04,
        "the same; once is 0.5 %",
    ),
    Figure(
        "GPipe, 4 stages, 8 microbatches: (m + p - 1)(F + B)",
        "Huang et al., NeurIPS 2019",
        "formula",
        33,
        "F",
        lambda: pipeline_time(4, 8, "gpipe"),
        1e-3,
        "engine on 4 devices, B = 2 F",
    ),
    Figure(
        "1F1B, 4 stages, 8 microbatches: the same makespan",
        "Fan et al. (DAPPLE), PPoPP 2021",
        "formula",
        33,
        "F",
        lambda: pipeline_time(4, 8, "1f1b"),
        1e-3,
        "engine on 4 devices, B = 2 F",
    ),
    Figure(
        "1F1B, 8 stages, 32 microbatches",
        "Fan et al. (DAPPLE), PPoPP 2021",
        "formula",
        117,
        "F",
        lambda: pipeline_time(8, 32, "1f1b"),
        1e-3,
        "engine on 8 devices, B = 2 F",
    ),
    Figure(
        "mixed precision with Adam",
        "Rajbhandari et al. (ZeRO), SC 2020",
        "formula, stage 0: (2 + 2 + 12) bytes",
        16,
        "bytes per parameter",
        lambda: bytes_a_parameter("mixed_fp16"),
        1e-3,
        "trace of GPT-2 small",
    ),
    Figure(
        "FP32 with Adam, 1 : 1 : 2",
        SURVEY,
        "formula",
        16,
        "bytes per parameter",
        lambda: bytes_a_parameter("fp32"),
        1e-3,
        "trace of GPT-2 small",
    ),
    Figure(
        "GPT-3: parameters and gradients",
        LECTURE,
        "printed as 650 GB; the unit is GiB",
        650,
        "GiB",
        lambda: gpt3("weights and gradients"),
        1e-3,
        "trace, 4 bytes per parameter",
    ),
    Figure(
        "GPT-3: optimizer",
        LECTURE,
        "printed as 1950 GB; the unit is GiB",
        1950,
        "GiB",
        lambda: gpt3("optimizer"),
        1e-3,
        "trace, 12 bytes per parameter",
    ),
    Figure(
        "GPT-3: activations, batch 128",
        LECTURE,
        "printed as 32895 GB; GiB, and the formula's factor 4 is one too many",
        32895,
        "GiB",
        lambda: gpt3("activations"),
        1e-4,
        "trace, all that is saved for backward",
    ),
    Figure(
        "GPT-3: cards of 80 GB",
        LECTURE,
        "printed as 440; 80 GiB each",
        440,
        "cards",
        lambda: sum(map(gpt3, ("weights and gradients", "optimizer", "activations"))) / 80,
        0.01,
        "sum of the three",
    ),
    Figure(
        "DeepSeek: 671 billion parameters in FP32",
        SURVEY,
        "printed as GB; the unit is GiB",
        2499.67,
        "GiB",
        lambda: 671e9 * 4 / 2**30,
        1e-5,
        "arithmetic",
    ),
    Figure(
        "ZeRO-Offload: 10 billion parameters on one V100",
        "Ren et al., USENIX ATC 2021",
        "paper; 10 samples of 1,024 tokens second-hand; whether recomputation counts is not said",
        40,
        "TFLOP/s",
        offloaded_10b,
        0.25,
        "engine, `zero_offload + full_recompute`, one step without accumulation; without what is recomputed 31.5",
    ),
    *(
        Figure(
            f"Llama 3.2 3B: {line.what}",
            TORCHTUNE,
            "measured on an A100 by its authors; attention kernel and first optimizer not stated",
            line.gib,
            "GiB",
            partial(fine_tuning.peak_gib, line.what),
            line.tolerance,
            f"engine, `a100_80_sxm`, `{line.policy}`",
        )
        for line in fine_tuning.LINES
    ),
    Figure(
        "Llama 3.2 3B: tokens per second with activation offload over those without",
        TORCHTUNE,
        "measured on an A100 by its authors",
        7301 / 7309,
        "",
        lambda: fine_tuning.speed("activation offload", "optimizer in backward"),
        0.1,
        "engine; where the link keeps up, nothing waits",
    ),
)
"""All that a run or a trace of ours can be put beside."""

READINGS = (
    (
        "34.2 TB of activations (DeepSeek)",
        SURVEY,
        "no batch is given. (2 + 9L) bsh + bsv gives 34.216 decimal TB where "
        "tokens times bytes per element is 2^23: an inference, not a comparison",
    ),
    ("SwapAdvisor: throughput + 53 %", SURVEY, "the paper's 53 to 99 % are *of* a GPU with unlimited memory"),
    ("ZeRO-Offload passes 100 billion parameters", SURVEY, "the paper: 13 billion on one V100, 70 billion on a DGX-2"),
    (
        "DELTA: batches 2.04 (ResNet-50) and 2.25 times (ResNet-101) as large",
        "Tang et al., arXiv:2203.15980",
        "the slowdown that bounds them is not given. Samples on `v100_32` take 19 and 25 % longer at those batches; "
        "until nothing fits, batches grow 4.7 and 7.0 times, and samples then take about 3 times as long",
    ),
    (
        "17.6 GiB with 8-bit AdamW, Llama 3.2 3B",
        TORCHTUNE,
        "the same run here has 15.0 GiB. The table does not name the optimizer's package; 32-bit states of the "
        "embedding alone, as one of them can keep, would make most of the difference",
    ),
    ("vDNN offloads parameters", SURVEY, "the paper: inputs of layers (feature maps)"),
    ("BERT with 768 hidden layers", "report", "hidden size 768"),
    (
        "InceptionV4 40 GB, BERT 73 GB, Wide ResNet-152 180 GB",
        "report",
        "sequence length, precision and optimizer are not given",
    ),
    (
        "ZeRO stages 1 to 3: 31.4, 16.6, 1.9 GB per rank of 120",
        "Rajbhandari et al.",
        "4 + 12/N, 2 + 14/N, 16/N bytes per "
        "parameter, 7.5 billion on 64 ranks: arithmetic; the shipped tests of those policies say what they reach",
    ),
)
"""What was read otherwise than printed, or cannot be compared."""


def _kept(trace, t):
    """Whether a tensor is a gradient that the update reads, and no addend of one."""
    return t.role == "gradient" and any(trace.ops[op].phase == "update" for op in trace.readers(t.id))
