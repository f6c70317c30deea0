"""Which policies and compositions are tried, and in which order: from what each declares to manage."""

from __future__ import annotations

from itertools import combinations

from sim.advice.state import State
from sim.policies import load, names

FIRST = ("hybrid", "swap_all", "full_recompute", "selective_recompute", "tso", "rotor", "capuchin", "dtr")
"""Policies of activations that are tried before others; order changes no answer of a search that ends in time."""
BESIDE = ("hybrid", "full_recompute", "swap_all")
"""Policies of activations that are tried beside each policy of state."""
STREAMED = "zero_offload(weights=host) + weight_streaming"
"""Two policies of state that share the weights: the host updates them, the device sees one layer's at a time."""

STATE = {"weights", "gradients", "optimizer_state"}


def candidates(state: State) -> tuple[list[str], list[str]]:
    """Policies and compositions to try: those to try first, and the rest; only those that leave no more than fits.

    A policy that declares to plan slowly is never among them.
    """
    loaded = {name: load(name) for name in names()}
    roles = {name: set(policy.manages) for name, policy in loaded.items() if not policy.slow}
    quick = list(roles)
    on_state = [name for name in quick if roles[name] and roles[name] <= STATE]
    plain = [name for name in quick if name not in on_state]
    pairs = [f"{a} + {b}" for a, b in combinations(on_state, 2) if not roles[a] & roles[b]]
    if {"zero_offload", "weight_streaming"} <= set(on_state):
        pairs.append(STREAMED)
    stacks = [f"{below} + {beside}" for below in (*on_state, *pairs) for beside in BESIDE if beside in quick]
    preferred = ["keep_all", *(name for name in FIRST if name in plain)]
    first = [*preferred, *(s for s in stacks if s.endswith(BESIDE[:2]))]
    rest = [*on_state, *pairs, *(name for name in plain if name not in preferred), *stacks]
    fitting = [name for name in dict.fromkeys((*first, *rest)) if state.left_by(name) <= state.capacity]
    return [name for name in fitting if name in first], [name for name in fitting if name not in first]
