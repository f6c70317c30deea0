"""What is run: each policy on its own workload, all on two transformers, and the factors of the ablation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile, profile_names
from sim.policies import family, names, policy_class
from sim.trace.graph import Trace
from workloads import cnn, transformer

ROOMY = 1 << 60
FAMILIES = ("offload", "compression")
BASELINES = ("full_recompute",)
"""What offloading competes with: shown beside, not counted."""


def policies() -> list[str]:
    """Every policy of the two families, as the registry has them."""
    return [name for name in names() if family(name) in FAMILIES]


@dataclass(frozen=True)
class Job:
    """A trace and a machine. budgets: bytes, or fractions of what keeping everything needs."""

    title: str
    profile: str
    budgets: tuple[float, ...]
    model: str | Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    image: bool = False

    def trace(self) -> Trace:
        """A new trace of the model."""
        return cnn(self.model, **self.options) if self.image else transformer(self.model, **self.options)  # type: ignore[arg-type]

    def platform(self) -> Platform:
        """The machine."""
        return load_profile(self.profile)


def _net(name: str, batch: int, profile: str, budget: float, **options: Any) -> Job:
    given = {"batch": batch, "optimizer": "sgd", "kernels": "cudnn", **options}
    return Job(f"{name}, {batch} images", profile, (budget,), name, given, image=True)


VGG = _net("vgg-16", 256, "p100", 12 * 2**30)
ZEROS = _net("vgg-16", 128, "v100_16", 0.8, zeros="cdma")
RESNET = _net("resnet-50", 32, "p100", 0.7)
LAYERS = Job(
    "8 layers of Llama 2 7B, 8 x 2048, bf16",
    "a100_80_sxm",
    (0.8,),
    {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    {"batch": 8, "sequence": 2048, "precision": "bf16", "attention": "flash", "optimizer": "adamw_fused"},
)
STATES = Job(
    "GPT-3 2.7B, 4 x 1024, mixed precision",
    "v100_32",
    (32e9,),
    "gpt3-2.7b",
    {"batch": 4, "sequence": 1024, "precision": "mixed_fp16", "attention": "flash", "optimizer": "adamw_fused"},
)
BERT = Job(
    "BERT-base, 64 x 512, fp32",
    "a100_40_pcie",
    (0.8,),
    "bert-base",
    {"batch": 64, "sequence": 512, "optimizer": "adamw_fused"},
)
EXPERTS = Job(
    "6 layers of 8 experts, 2 x 512, mixed precision",
    "mt3000_survey",
    (0.9,),
    {
        "model_type": "mixtral",
        "num_hidden_layers": 6,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "experts_implementation": "loop",
        "vocab_size": 32000,
    },
    {"batch": 2, "sequence": 512, "precision": "mixed_fp16", "optimizer": "adamw_fused"},
)
TOKENS = Job(
    "12 layers of OPT-30B, 48 x 512 and 2 tokens, fp16",
    "v100_16",
    (0.5,),
    {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 7168,
        "n_head": 56,
        "n_positions": 2048,
        "vocab_size": 50272,
        "activation_function": "relu",
    },
    {"batch": 48, "sequence": 512, "generate": 2, "micro_batches": 4, "precision": "fp16"},
)

OWN: Mapping[str, Job] = {
    "vdnn": VGG,
    "vdnn_pp": VGG,
    "modnn": VGG,
    "swapadvisor": RESNET,
    "autoswap": RESNET,
    "smartpool": _net("resnet-50", 32, "p100", 0.995),
    "tflms": _net("resnet-50", 64, "v100_16", 0.7),
    "zero_offload": STATES,
    "zero_infinity": STATES,
    "patrickstar": STATES,
    "stronghold": STATES,
    "offload_activations": LAYERS,
    "layer_offload": LAYERS,
    "swap_attention": replace(LAYERS, budgets=(0.93,)),
    "superoffload": replace(STATES, profile="gh200"),
    "moe_tiering": EXPERTS,
    "flashneuron": _net("vgg-16", 256, "a100_80_gds", 0.7),
    "slc_cache": Job(
        "GPT-2, 8 x 512, amp_fp16",
        "mt3000_survey_slc",
        (0.75,),
        "gpt2",
        {"batch": 8, "sequence": 512, "precision": "amp_fp16", "optimizer": "adamw_fused"},
    ),
    "pooled_memory": Job(
        "GPT-2 medium, 8 x 1024, amp_bf16",
        "cloudmatrix384_die",
        (0.6,),
        "gpt2-medium",
        {"batch": 8, "sequence": 1024, "precision": "amp_bf16", "optimizer": "adamw_fused"},
    ),
    "swap_all": LAYERS,
    "save_on_cpu": LAYERS,
    "lru_tiering": BERT,
    "uvm": BERT,
    "g10": BERT,
    "flexgen": TOKENS,
    "gist": ZEROS,
    "cdma": ZEROS,
    "cswap": ZEROS,
}
"""A workload of its time for each policy; of one that is not named, `RESNET`."""

TRANSFORMERS = {
    "gpt2": Job(
        "GPT-2 medium, 8 x 1024, amp_bf16",
        "a100_40_pcie",
        (0.9, 0.6, 0.37),
        "gpt2-medium",
        {"batch": 8, "sequence": 1024, "precision": "amp_bf16", "optimizer": "adamw_fused"},
    ),
    "llama": Job(
        "Llama 2 7B, 1 x 2048, mixed precision",
        "a100_80_sxm",
        (83e9, 40e9),
        "llama2-7b",
        {"batch": 1, "sequence": 2048, "precision": "mixed_bf16", "attention": "flash", "optimizer": "adamw_fused"},
    ),
}

PINNED, PAGEABLE = "pinned, 25 GB/s", "pageable, 7.2 GB/s, 3 bytes charged"
RATES = (4, 7, 12, 18, 25, 36, 55, 300)
FIXED = (5, 15, 32, 100)
SHARERS = (1, 2, 4, 8)
CHUNKS = (0.25, 2, 16, 64)
GRID = (7, 18, 55)


def _both(key: str, value: str) -> dict[str, str]:
    return {f"links.{link}.{key}": value for link in ("d2h", "h2d")}


@cache
def factors() -> dict[str, dict[str, dict[str, str]]]:
    """Per factor of the ablation its values, each as overrides of `LAYERS`'s machine; the first row is the default."""
    fixed, rate = 15e-6, 25e9
    up = "pools.switch_up.rate"
    wide = {f"pools.{pool}.rate": "2000 GB/s" for pool in ("host_dram", "switch_up", "switch_down")}
    return {
        "rate, GB/s": {str(r): {**_both("rate", f"{r} GB/s"), **(wide if r > 26 else {})} for r in RATES},
        "out over in": {
            "1.1 (910B)": {"links.d2h.rate": "27.5 GB/s"},
            "1": {},
            "1.56 (P800)": {"links.d2h.rate": "39 GB/s", "pools.switch_up.rate": "39 GB/s"},
            "0.87 (GH200)": {"links.d2h.rate": "21.75 GB/s"},
        },
        "duplex": {
            "full": {"pools.pcie.duplex": "full"},
            "0.95, 0.47": {},
            "half": {"pools.pcie.duplex": "half"},
        },
        "fixed time, us": {str(us): _both("fixed", f"{us} us") for us in FIXED},
        "sharers": {str(n): {"sharers": str(n)} for n in SHARERS},
        "host pool, GB/s": {str(r): {"pools.host_dram.rate": f"{r} GB/s"} for r in (44, 100, 177)},
        "host memory": {
            PINNED: {},
            PAGEABLE: {
                **_both("rate", "7.2 GB/s"),
                "pools.host_dram.charges.d2h": "3",
                "pools.host_dram.charges.h2d": "3",
            },
        },
        "copy engines": {"1": {}, "2": _both("copy_engines", "2")},
        # one at a time says nothing of two at once
        "rate, out over in, duplex": {
            f"{r}, {times:g}, {duplex}": {
                **_both("rate", f"{r} GB/s"),
                "links.d2h.rate": f"{r * times:g} GB/s",
                "pools.pcie.duplex": duplex,
                **(wide if r > 26 else {up: f"{max(r * times, 26):g} GB/s"}),
            }
            for r in GRID
            for times in (1, 1.56)
            for duplex in ("full", "half")
        },
        # each chunk of a copy pays the fixed time: c bytes take fixed + c / rate
        "chunk, MB": {
            str(mb): _both("rate", f"{mb * 1e6 / (fixed + mb * 1e6 / rate) / 1e9:.4g} GB/s") for mb in CHUNKS
        },
    }


@cache
def own_values(factor: str) -> frozenset[str]:
    """The values of a factor with which the machine is the one of its profile."""
    plain = load_profile(LAYERS.profile)
    parts = "tiers", "engines", "links", "pools"
    machines = {
        value: load_profile(LAYERS.profile, overrides=given) for value, given in factors().get(factor, {}).items()
    }
    return frozenset(
        value for value, each in machines.items() if all(getattr(each, part) == getattr(plain, part) for part in parts)
    )


ADAM = {"0.06": 0.015, "0.2": 0.05, "1.4": 0.33}
"""CPU Adam, 1e9 parameters/s: the share of host memory's 120 GB/s that its 28 bytes per parameter reach."""


def platforms() -> list[str]:
    """Shipped machines of one device with a host."""
    found = []
    for name in profile_names():
        platform = load_profile(name)
        if platform.devices == 1 and platform.host is not None:
            found.append(name)
    return found


STATE_JOBS = ("llama",)
"""Transformers whose weights and states alone exceed the device: only policies that manage these can run them."""
WIDE = ("rate, GB/s", "sharers", "host pool, GB/s")
"""Factors that policies for states alone are run under, too."""


def quick(name: str) -> bool:
    """Whether a policy plans fast enough for the factors of the link and for all machines."""
    return not policy_class(name).slow
