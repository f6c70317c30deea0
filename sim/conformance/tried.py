"""An example that does not fit, with more memory: most of what is drawn is too tight for most policies."""

from __future__ import annotations

from collections.abc import Iterator

from sim.conformance.examples import Example
from sim.conformance.replayed import Replayed, run_policy
from sim.policies.base import Policy


def tried(policy: Policy, example: Example, *, seed: int = 0) -> Iterator[tuple[Example, Replayed]]:
    """The example's run and, while it does not fit, runs with more memory; the last one tells how the policy did."""
    for roomier in example.with_more_memory():
        run = run_policy(policy, roomier.trace, roomier.platform, seed=seed)
        yield roomier, run
        if not run.refused:
            return
