"""Hints in messages: the nearest valid names, and none that stands for another thing."""

import pytest

from sim.errors import near
from sim.hardware.profile import profile_names
from sim.policies import names
from workloads.models import model_names


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("a100", ("a100_40_g10", "a100_40_pcie", "a100_80_gds")),
        ("A100-40-PCIE", ("a100_40_pcie",)),
        ("mt300_survey", ("mt3000_survey",)),
        ("v100", ("v100_16", "v100_32")),
        ("910b", ("ascend_910b",)),
        ("h201", ()),
        ("a10", ()),
        ("4090", ()),
    ],
)
def test_a_card_is_suggested_by_how_its_name_begins_and_never_for_another_number(wrong, meant):
    assert offered(near(wrong, profile_names())) == meant


@pytest.mark.parametrize(
    ("wrong", "valid", "meant"),
    [
        ("swap", names(), ("swap_all", "swap_attention")),
        ("atn", ["add", "attn.core", "attn.add"], ("attn.add",)),
        ("convolution", ["matmul", "conv", "copy"], ("conv",)),
        ("recompute", names(), ("full_recompute", "selective_recompute")),
        ("full-recompute", names(), ("full_recompute",)),
        ("none", names(), ("keep_all",)),
        ("checkpoint", names(), ("full_recompute", "selective_recompute")),
        ("float16", ("bf16", "fp16", "fp32"), ("fp16",)),
        ("float16", names(), ()),
        ("gtp2-medium", model_names(), ("gpt2-medium",)),
        ("llama3", model_names(), ("llama3-70b", "llama3-8b", "llama3.1-405b")),
        ("", ["a", "b"], ()),
        ("x", [], ()),
        ("(" * 10_000_000, names(), ()),
    ],
)
def test_a_name_is_suggested_that_continues_or_has_the_words_or_is_spelt_alike(wrong, valid, meant):
    assert offered(near(wrong, valid)) == meant


def offered(hint: str) -> tuple[str, ...]:
    """The names that a hint offers as the one that was meant."""
    return tuple(hint.split("'")[1::2]) if "did you mean" in hint else ()
