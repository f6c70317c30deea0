"""The cells of docs/parallel.md: schedules on large models, and printed iterations beside simulated ones.

Long iterations are simulated with fewer microbatches m and fewer stages p of as many layers, and extended: past the
first p microbatches a pipeline of equal stages repeats itself, so that time and peak are linear in m and in p.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sim import simulate
from sim.analysis.stages import stages
from sim.layout import lay_out
from sim.policies import load as load_policy
from workloads import transformer, with_stack

PUBLISHED = Path(__file__).with_name("published.toml")
PROFILE = "a100_80_sxm"
SEQUENCE, VOCABULARY = 2048, 51200
NO_LIMIT = "10 TB"
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v")
MODELS = {
    "GPT-3 175B": {
        "model_type": "gpt2", "n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": SEQUENCE,
        "vocab_size": VOCABULARY, "activation_function": "gelu",
    },
    "Llama 2 70B": {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
}  # fmt: skip

Row = dict[str, Any]


def published() -> Mapping[str, Any]:
    """The printed iterations."""
    return tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Job:
    """A GPT model in a layout. batch: samples per microbatch. layers: per part of the model."""

    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    chunks: int
    dp: int
    micro_batches: int
    batch: int
    sequence_parallel: bool
    recompute: str
    async_sums: bool = False

    def run(self) -> tuple[float, int]:
        """Seconds of an iteration, and the peak of the first stage in bytes."""
        parts = self.pp * self.chunks
        config = {
            "model_type": "gpt2", "n_layer": self.layers * parts, "n_embd": self.width, "n_head": self.heads,
            "n_positions": SEQUENCE, "vocab_size": VOCABULARY, "activation_function": "gelu",
        }  # fmt: skip
        samples = self.batch * self.micro_batches * self.dp
        base = transformer(
            config, batch=samples, sequence=SEQUENCE, precision="mixed_fp16", attention="eager", loss="fused",
            optimizer="adamw_fused",
        )  # fmt: skip
        layout = {
            "tp": self.tp, "pp": self.pp, "dp": self.dp, "micro_batches": self.micro_batches,
            "sequence_parallel": self.sequence_parallel, "schedule": "interleaved" if self.chunks > 1 else "1f1b",
            "chunks": self.chunks, "async_sums": self.async_sums,
        }  # fmt: skip
        trace, platform = lay_out(base, PROFILE, layout, kernels=partial(with_stack, stack="fused"))
        core = {"recompute": "attention_core"} if self.recompute == "selective_recompute" else {}
        policy = load_policy(self.recompute, **core)
        log = simulate(trace, platform, policy, budget=NO_LIMIT).log
        return log.end / 1e9, stages(log)[0].peak_bytes

    def extended(self) -> tuple[float, float]:
        """As `run`, from shorter pipelines and fewer microbatches where it has many."""
        p, m = self.pp, self.micro_batches
        small = min(p, 4)  # from two stages the peak of eight came out 10 % too low
        least = min(m, 2 * small * self.chunks)  # chunks fill the stages later
        if p == 1 and m <= 2:
            return self.run()
        if m <= 3 * p and p <= 2:
            return self.run()
        time, peak = replace(self, pp=small, micro_batches=least).run()
        more, _ = replace(self, pp=small, micro_batches=least + small).run()
        per_microbatch = (more - time) / small
        seconds, held = time + (m - least) * per_microbatch, float(peak)
        if p > small:
            longer, higher = replace(self, pp=2 * small, micro_batches=2 * least).run()
            per_stage = (longer - time - least * per_microbatch) / small
            seconds += (p - small) * per_stage
            held += (p - small) * (higher - peak) / small
        return seconds, held


def measure(
    old: Mapping[str, Sequence[Row]], only: Sequence[str], save: Callable[[dict[str, list[Row]]], None]
) -> dict[str, list[Row]]:
    """All tables; those not named in `only`, where it names some, stay as they were."""
    from scripts.parallel_page import inside
    from scripts.parallel_page.cost import cost
    from scripts.parallel_page.memory import memory

    rows = {key: list(part) for key, part in old.items()}
    makers = {"korthikanti": _korthikanti, "megatron": _megatron, "schedules": _schedules}
    makers |= {name: getattr(inside, name) for name in ("experts", "machines", "policies", "context", "zero")}
    makers |= {"memory": memory, "cost": cost}
    for name, make in makers.items():
        if name in only or not only:
            rows[name] = []
            for row in make():
                rows[name].append(row)
                save(rows)
    return rows


def _korthikanti() -> Iterator[Row]:
    for name, a, h, layers, tp, pp, chunks, gpus, batch, micro, full, selective in published()["korthikanti"]:
        m = batch // micro * tp * pp // gpus
        job = Job(a, h, layers // (pp * chunks), tp, pp, chunks, gpus // (tp * pp), m, micro, False, "full_recompute")
        for printed, how in (
            (full, job),
            (selective, replace(job, sequence_parallel=True, recompute="selective_recompute")),
            (None, replace(job, recompute="keep_all")),
        ):
            seconds, peak = how.extended()
            beside, _ = replace(how, async_sums=True).extended()
            yield {
                "model": name, "recompute": how.recompute, "sequence_parallel": how.sequence_parallel,
                "printed_s": printed, "simulated_s": round(seconds, 3), "peak_gib": round(peak / 2**30, 2),
                "async_s": round(beside, 3),
            }  # fmt: skip


def _megatron() -> Iterator[Row]:
    for name, a, h, layers, tp, pp, chunks, gpus, batch, micro, rate in published()["megatron"]:
        dp = gpus // (tp * pp)
        job = Job(
            a, h, layers // (pp * chunks), tp, pp, chunks, dp, batch // (dp * micro), micro, False, "full_recompute"
        )
        work = 96 * batch * SEQUENCE * layers * h * h * (1 + SEQUENCE / (6 * h) + VOCABULARY / (16 * layers * h))
        seconds, peak = job.extended()
        yield {
            "model": name, "gpus": gpus, "printed_s": round(work / (gpus * rate * 1e12), 2),
            "simulated_s": round(seconds, 3), "peak_gib": round(peak / 2**30, 2),
        }  # fmt: skip


def _schedules() -> Iterator[Row]:
    for model, config in MODELS.items():
        for schedule in SCHEDULES:
            pp, m = 8, 16
            base = transformer(
                config, batch=m, sequence=SEQUENCE, precision="mixed_bf16", attention="flash", loss="fused",
                optimizer="adamw_fused",
            )  # fmt: skip
            layout = {"tp": 8, "pp": pp, "micro_batches": m, "schedule": schedule, "sequence_parallel": True}
            trace, platform = lay_out(base, PROFILE, layout, kernels=partial(with_stack, stack="fused"))
            log = simulate(trace, platform, budget=NO_LIMIT).log
            table = stages(log)
            yield {
                "model": model, "schedule": schedule, "seconds": round(log.end / 1e9, 3),
                "bubble": round(sum(stage.bubble_ns for stage in table) / (len(table) * log.end), 4),
                "exposed": round(sum(stage.exposed_ns for stage in table) / (len(table) * log.end), 4),
                "peak_gib": [round(stage.peak_bytes / 2**30, 2) for stage in table],
            }  # fmt: skip
