"""The words that a policy declares itself with: its traits' values, and what falls under them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

Fidelity = Literal["code", "equations", "reconstruction"]
Managed = Literal["activations", "gradients", "optimizer_state", "weights"]
Needed = Literal[
    "chain", "layers", "history", "experts", "drive", "slc", "pool", "host", "cpu", "backward", "inference", "peers"
]
PlansFrom = Literal["problem", "machine", "structure"]

FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
MANAGES: tuple[Managed, ...] = get_args(Managed)
NEEDS: tuple[Needed, ...] = get_args(Needed)

MANAGED_AS: Mapping[str, Managed] = MappingProxyType(
    {
        "activation": "activations",
        "temporary": "activations",
        "input": "activations",
        "gradient": "gradients",
        "optimizer_state": "optimizer_state",
        "weight": "weights",
    }
)
"""Which word of `manages` the role of a tensor falls under."""

SAVINGS = {
    "implementation": "another implementation of an op, as the trace states it: its time and its workspace",
    "launch": "one launch an op, where several are launched together",
    "codec": "fewer bytes on the wire than the tensor has, by a lossless codec; down to a bit for four bytes",
    "copy": "the copy of a tensor that goes to another tier at once, which is taken straight from the original",
    "release": "the release of what the program holds beyond its last reader: it is earlier",
    "fusion": "one kernel of several ops: it is launched once and touches each operand once",
}
"""By what a rewrite may make an op cheaper than the one that it stands for."""
