"""Which policies and compositions are tried, and in which order: from what each declares to manage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from sim.advice.state import State
from sim.policies import load, names

FIRST = ("hybrid", "full_recompute", "selective_recompute", "swap_all", "tso", "rotor", "capuchin", "dtr")
"""Policies of activations that are tried before others; order changes no answer of a search that ends in time."""
OFFLOADED = "full_recompute; checkpoints: swap_all"
"""Recompute all but the checkpoints, and copy those to the host: the least memory for activations."""
BESIDE = ("full_recompute", "hybrid", OFFLOADED, "swap_all")
"""Policies of activations that are tried beside each policy of state, the first of them, which plans at once, before
all others."""
STREAMED = "zero_offload(weights=host) + weight_streaming"
"""Two policies of state that share the weights: the host updates them, the device sees one layer's at a time."""
BELOW = ("zero_offload", "stronghold", "superoffload", STREAMED, "zero_infinity")
"""Policies of state that are tried before others, for the same reason as `FIRST`."""
LEAN = ("full_recompute", OFFLOADED, f"{STREAMED} + {OFFLOADED}", f"stronghold + {OFFLOADED}", "hybrid", "swap_all",
        "zero_offload + full_recompute", "save_on_cpu")  # fmt: skip
"""Those that are likely to need the least memory, in the order in which a search for the largest batch tries them."""

UNUSUAL = {"experts", "drive", "slc", "pool"}
"""What few workloads and machines have: policies that need it come last."""

STATE = {"weights", "gradients", "optimizer_state"}


def candidates(state: State) -> tuple[list[str], list[str]]:
    """Policies and compositions to try: those to try first, and the rest; only those that leave no more than fits.

    A policy that declares to plan slowly, or to change values, is never among them.
    """
    loaded = {name: load(name) for name in names()}
    roles = {name: set(policy.manages) for name, policy in loaded.items() if policy.lossless and not policy.slow}
    quick = list(roles)
    on_state = [name for name in quick if roles[name] and roles[name] <= STATE]
    plain = [name for name in quick if name not in on_state]
    pairs = [f"{a} + {b}" for a, b in combinations(on_state, 2) if not roles[a] & roles[b]]
    if {"zero_offload", "weight_streaming"} <= set(on_state):
        pairs.append(STREAMED)
    beside = [
        name for name in BESIDE if name in quick or (name == OFFLOADED and {"full_recompute", "swap_all"} <= set(quick))
    ]
    streams = [STREAMED] if state.resident.get("weights", 0) > state.capacity else []  # each needs a layer's at a time
    order = [*streams, *BELOW]
    below = sorted((*on_state, *pairs), key=lambda name: order.index(name) if name in order else len(order))
    stacks = {name: [f"{name} + {other}" for other in beside] for name in below}
    preferred = ["keep_all", *(name for name in FIRST if name in plain)]
    first = [*preferred, *(f"{name} + {BESIDE[0]}" for name in below if name in BELOW)]
    rest = [*(stack for name in below for stack in stacks[name]), OFFLOADED, *on_state, *pairs, *plain]
    rest.sort(key=lambda name: bool(UNUSUAL & load(name).needs))
    if state.exceeds_all:
        return [], []
    fitting = [name for name in dict.fromkeys((*first, *rest)) if state.left_by(name) <= state.capacity]
    # gradients may leave memory one by one as they are applied, so that what leaves them may fit: it is tried last
    late = {name for name in fitting if state.left_by(name, gradients=True) > state.capacity}
    soon = [name for name in fitting if name in first and name not in late]
    return soon, sorted((name for name in fitting if name not in soon), key=late.__contains__)


def by_state(names: Sequence[str], speeds: Mapping[str, float]) -> list[str]:
    """Candidates, those first whose policies of state are the fastest so far.

    speeds: candidate -> its speed, of those that have been run and fit.
    """
    top: dict[str, float] = {}
    for name, speed in speeds.items():
        base = _base(name)
        top[base] = max(speed, top.get(base, 0.0))
    return sorted(names, key=lambda name: -top.get(_base(name), 0.0))


def _base(name: str) -> str:
    """A composition without its last policy."""
    return name.removesuffix(OFFLOADED).rpartition(" + ")[0]


def lean(names: Sequence[str]) -> list[str]:
    """Those of some candidates that are likely to need the least memory; all where none of them is known to."""
    return [name for name in LEAN if name in names] or list(names)
