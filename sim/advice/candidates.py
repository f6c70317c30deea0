"""Which policies and compositions are tried, and in which order: from what each declares to manage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from sim.advice.state import State
from sim.policies import load, names

FIRST = ("hybrid", "full_recompute", "selective_recompute", "swap_all", "dtr", "tso", "rotor", "capuchin")
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


@dataclass(frozen=True)
class Space:
    """All that is searched: every lossless policy that plans quickly, and what may go together.

    Every policy of state (weights, gradients, optimizer state), and every pair of them that shares none of it, alone
    and combined with every policy that manages none of what it manages.

    bases: the policies of state and their pairs.
    others: the other policies, and `OFFLOADED`.
    roles: what each of them manages.
    """

    bases: tuple[str, ...]
    others: tuple[str, ...]
    roles: Mapping[str, frozenset[str]]

    def beside(self, base: str) -> list[str]:
        """What may be combined with policies of state; "" for none of these."""
        if not base:
            return list(self.others)
        return [other for other in self.others if other != "keep_all" and not self.roles[base] & self.roles[other]]

    @property
    def every(self) -> list[str]:
        """All that is searched."""
        stacks = (f"{base} + {other}" for base in self.bases for other in self.beside(base))
        return [*self.others, *self.bases, *stacks]


def space() -> Space:
    """All that a search may try, whatever the workload and the machine."""
    loaded = {name: load(name) for name in names()}
    roles = {name: frozenset(each.manages) for name, each in loaded.items() if each.lossless and not each.slow}
    on_state = [name for name in roles if roles[name] and roles[name] <= STATE]
    others = [name for name in roles if name not in on_state]
    pairs = {f"{a} + {b}": roles[a] | roles[b] for a, b in combinations(on_state, 2) if not roles[a] & roles[b]}
    if {"zero_offload", "weight_streaming"} <= {*on_state}:
        pairs[STREAMED] = roles["zero_offload"] | roles["weight_streaming"]
    if {"full_recompute", "swap_all"} <= {*others}:
        roles[OFFLOADED] = roles["full_recompute"] | roles["swap_all"]
        others.append(OFFLOADED)
    return Space((*on_state, *pairs), tuple(others), {**roles, **pairs})


def candidates(state: State) -> tuple[list[str], list[str]]:
    """Policies and compositions to try: those to try first, and the rest; only those that leave no more than fits.

    They are a part of `space`: with policies of state only those of `BESIDE` are combined.
    """
    all_ = space()
    streams = [STREAMED] if state.resident.get("weights", 0) > state.capacity else []  # each needs a layer's at a time
    order = [*streams, *BELOW]
    below = sorted(all_.bases, key=lambda name: order.index(name) if name in order else len(order))
    plain = [name for name in all_.others if name != OFFLOADED]
    stacks = {name: [f"{name} + {other}" for other in BESIDE if other in all_.others] for name in below}
    preferred = ["keep_all", *(name for name in FIRST if name in plain)]
    first = [*preferred, *(f"{name} + {BESIDE[0]}" for name in below if name in BELOW)]
    rest = [*(stack for name in below for stack in stacks[name]), OFFLOADED, *all_.bases, *plain]
    rest.sort(key=lambda name: bool(UNUSUAL & load(name).needs))
    if state.exceeds_all:
        return [], []
    fitting = [name for name in dict.fromkeys((*first, *rest)) if state.left_by(name) <= state.capacity]
    # gradients may leave memory one by one as they are applied, so that what leaves them may fit: it is tried last
    late = {name for name in fitting if state.left_by(name, gradients=True) > state.capacity}
    soon = [name for name in fitting if name in first and name not in late]
    return soon, sorted((name for name in fitting if name not in soon), key=late.__contains__)


def lean(names: Sequence[str]) -> list[str]:
    """Those of some candidates that are likely to need the least memory; all where none of them is known to."""
    return [name for name in LEAN if name in names] or list(names)
