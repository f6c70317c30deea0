"""Policies of the offload family beside another one: what they own is theirs, or they say in one line why not."""

from __future__ import annotations

from functools import cache

import pytest

from sim import load_profile
from sim.analysis.peak_memory import home_peak
from sim.conformance.replayed import Run, run_policy
from sim.conformance.suite import APPLIES, CHECKS
from sim.errors import Infeasible, PolicyError
from sim.hardware.platform import Platform
from sim.policies import family, load, names
from sim.trace import Trace
from workloads import transformer

EXPERTS = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
EXPERTS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
EXPERTS |= {"num_local_experts": 4, "num_experts_per_tok": 1, "experts_implementation": "loop"}
PLAIN = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 64}
WHERE = {
    "flashneuron": ("a100_80_gds", "training"),
    "moe_tiering": ("mt3000_survey", "experts"),
    "slc_cache": ("mt3000_survey_slc", "training"),
    "pooled_memory": ("cloudmatrix384_die", "training"),
    "flexgen": ("a100_80_sxm", "tokens"),
    "superoffload": ("gh200", "training"),
}
QUICKER = {"autotm": "autotm(mode=static)", "swapadvisor": "swapadvisor(population=4, generations=1)"}
FAMILY = [name for name in names() if family(name) in ("offload", "compression") and name != "smartpool"]
LAWS = ("capacity", "values", "ops", "order", "tiling", "carried", "costs")
"""Those of one run; the others plan again."""

FORMS = {
    "behind recomputation": "full_recompute + {}",
    "by layers": "layers 0: full_recompute; rest: {}",
    "beside states": "{states} + {}",
}


@cache
def trace(kind: str) -> Trace:
    if kind == "tokens":
        return transformer(PLAIN, batch=4, sequence=32, generate=2, precision="fp16", micro_batches=2)
    options = {"batch": 2, "sequence": 64, "precision": "mixed_fp16", "optimizer": "adamw_fused"}
    return transformer(EXPERTS if kind == "experts" else PLAIN, **options)


@cache
def machine(profile: str, kind: str, share: float) -> Platform:
    platform = load_profile(profile)
    peak = home_peak(run_policy(load("keep_all"), trace(kind), platform).log)
    return load_profile(profile, overrides={f"tiers.{platform.home(0).name}.capacity": f"{int(share * peak)} B"})


def outcome(name: str, form: str) -> Run | PolicyError:
    """The run of a policy in a composition, or the refusal of the composition."""
    profile, kind = WHERE.get(name, ("a100_40_pcie", "training"))
    states = "optimizer_in_backward" if kind == "tokens" else "zero_offload"
    try:
        policy = load(FORMS[form].format(QUICKER.get(name, name), states=states))
    except PolicyError as refused:
        return refused
    return run_policy(policy, trace(kind), machine(profile, kind, 0.9))


@pytest.mark.parametrize("name", FAMILY)
def test_it_composes_by_what_it_owns_or_says_why_not(name: str) -> None:
    ran = 0
    for form in FORMS:
        run = outcome(name, form)
        error = run if isinstance(run, PolicyError) else run.error
        if isinstance(run, PolicyError) or error is not None:
            assert isinstance(error, PolicyError | Infeasible), f"{name} {form}: {error}"
            assert "\n" not in str(error)
            continue
        assert run.crash is None
        ran += 1
        for law, check in CHECKS.items():
            if law in LAWS and APPLIES.get(law, lambda _: True)(run):
                check(run)
    assert ran, f"{name} runs beside no other policy"
