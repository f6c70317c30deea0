"""`hybrid` against the policies that keep, drop, recompute and copy as it does, on jobs that a number draws.

python -m tests.policies.hybrid.random_jobs 0 100      the jobs of these seeds, a line each; status 1 if one is lost
python -m tests.policies.hybrid.random_jobs 0 100 a,b  beside these policies alone

A job is a model, a batch, a machine, the rate of its link and a budget, often below what recomputing all needs. Beside
`hybrid` run policies that have its freedoms: the same ops in the same order, nothing computed by another
implementation, in another place or in fewer bytes. It loses where one of them is faster, or fits where it does not.
`delta` and `lru_tiering` have one more, they also evict what backward produces.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sim.analysis.peak_memory import home_peak
from sim.errors import Infeasible, PolicyError
from sim.experiment import simulate
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.trace import Trace
from workloads import transformer
from workloads.cnn import cnn

CLASS = (
    "full_recompute", "selective_recompute", "every_k", "chen", "rotor", "sac_knapsack", "twremat", "min_cut",
    "colossal_auto(offload=none)", "relax_and_fix", "swap_all", "delta", "capuchin", "superneurons", "lru_tiering",
    "dtr", "full_recompute; checkpoints: swap_all", "joint_optimal",
)  # fmt: skip
PLENTY = 10**15
EQUAL = 5e-4
"""Overheads that differ by less than a twentieth of a point are alike."""
MACHINES = ("mt3000_survey", "mt3000_cluster", "gh200", "a100_40_pcie", "v100_32", "h100", "ascend_910b")
NETS = ("resnet-50", "resnet-101", "vgg-16", "alexnet", "googlenet", "inception-v4")


@dataclass(frozen=True)
class Job:
    """What a seed draws. kept: ns with unlimited memory."""

    words: str
    trace: Trace
    platform: Platform
    budget: int
    kept: int


def _model(draw: random.Random) -> tuple[str, Trace]:
    family = draw.choice(("cnn", "bert", "gpt2", "llama"))
    if family == "cnn":
        name, batch = draw.choice(NETS), draw.choice((8, 16, 32, 64))
        precision = draw.choice(("fp32", "amp_fp16"))
        return f"{name} batch {batch} {precision}", cnn(name, batch=batch, precision=precision)
    layers, width, batch, sequence = (
        draw.choice(each) for each in ((2, 3, 4, 8, 12), (256, 512, 768), (1, 2, 4, 8, 16), (128, 256, 512))
    )
    precision = draw.choice(("amp_bf16", "bf16", "fp32"))
    heads = width // 64
    if family == "llama":
        config = {
            "model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
            "num_key_value_heads": heads // 2, "intermediate_size": 11 * width // 4, "vocab_size": 4000,
            "max_position_embeddings": 2048,
        }  # fmt: skip
    elif family == "bert":
        config = {
            "model_type": "bert", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
            "intermediate_size": 4 * width, "vocab_size": 4000, "max_position_embeddings": 512,
        }  # fmt: skip
    else:
        config = {
            "model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": 4000,
            "n_positions": 512,
        }  # fmt: skip
    words = f"{family} {layers}x{width} batch {batch} seq {sequence} {precision}"
    return words, transformer(config, batch=batch, sequence=sequence, precision=precision)


def job(seed: int) -> Job:
    """The job of a seed."""
    draw = random.Random(seed)
    words, trace = _model(draw)
    name, rate = draw.choice(MACHINES), draw.choice((1, 3, 8, 20, 60))
    machine = load_profile(name, overrides={f"links.{way}.rate": f"{rate} GB/s" for way in ("d2h", "h2d")})
    kept = simulate(trace, machine, "keep_all", budget=PLENTY).log
    low, high = PLENTY, home_peak(kept)
    for text in ("full_recompute", "swap_all"):
        try:
            low = min(low, home_peak(simulate(trace, machine, text, budget=PLENTY).log))
        except PolicyError:
            continue
    share = draw.uniform(-0.4, 0.8)
    stays = sum(trace.tensor_columns.bytes[trace.producer < 0].tolist())
    budget = int(low + share * (high - low if share >= 0 else low - stays))
    return Job(f"{words} on {name}, link {rate} GB/s, share {share:.2f}", trace, machine, budget, kept.end)


def took(job: Job, policy: str) -> tuple[float | None, str]:
    """Time over that of unlimited memory, -1, None where it does not fit; and why."""
    try:
        return simulate(job.trace, job.platform, policy, budget=job.budget).log.end / job.kept - 1, ""
    except (Infeasible, PolicyError) as error:
        return None, str(error)


def main(arguments: Sequence[str]) -> int:
    """A line per job."""
    first, last = int(arguments[0]), int(arguments[1])
    names = arguments[2].split(",") if len(arguments) > 2 else CLASS
    lost = 0
    for seed in range(first, last):
        drawn = job(seed)
        began = time.process_time()
        mine, why = took(drawn, "hybrid")
        planning = time.process_time() - began
        others = sorted((found, name) for name in names if (found := took(drawn, name)[0]) is not None)
        loses = bool(others) and (mine is None or mine > others[0][0] + EQUAL)
        lost += loses
        shown = f"✗ ({why})" if mine is None else f"{100 * mine:.2f}"
        beside = "; ".join(f"{100 * found:.2f} {name}" for found, name in others[:3])
        word = "LOST" if loses else "ok  "
        print(f"{word} {seed} {drawn.words}: {shown} in {planning:.1f} s | {beside}", flush=True)
    print(f"{lost} of {last - first} lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
