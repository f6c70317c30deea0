"""Hybrid on jobs drawn at random: never slower than what recomputes an op as often as it pays, and it fits there."""

from __future__ import annotations

import pytest

from tests.policies.hybrid.random_jobs import EQUAL, job, took

OTHERS = ("twremat", "rotor", "relax_and_fix", "full_recompute", "swap_all")


def loses_to(seed: int) -> list[str]:
    """The policies that are faster on the job of a seed, or fit where `hybrid` does not."""
    drawn = job(seed)
    mine, _ = took(drawn, "hybrid")
    found = ((name, took(drawn, name)[0]) for name in OTHERS)
    return [name for name, other in found if other is not None and (mine is None or mine > other + EQUAL)]


@pytest.mark.parametrize("seed", [22, 36])
def test_where_ops_are_recomputed_more_than_once_it_is_as_fast(seed):
    """A BERT beside a link of 1 GB/s, and a GPT-2 in a tenth less than recomputing all needs."""
    assert loses_to(seed) == []


@pytest.mark.parametrize(("seed", "other"), [(114, "relax_and_fix"), (119, "superneurons")])
def test_where_no_choice_among_results_of_forward_fits_what_comes_later_is_offloaded_too(seed, other):
    """A BERT whose update and loss need most, and a GPT-2 in fp32 whose GELU does in backward."""
    drawn = job(seed)
    mine, why = took(drawn, "hybrid")
    single, _ = took(drawn, other)
    assert mine is not None, why
    assert mine < 0.5 * single


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_on_jobs_drawn_at_random_it_loses_to_none_of_them(seed):
    assert loses_to(seed) == []
