"""MindSpeed's swap-attention: what each layer's attention saves is offloaded, and fetched during its own backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, MinLen

from sim.errors import PolicyError
from sim.plan import Action, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.composition.selectors import meets
from sim.policies.saved_copies import Save, Trip, following, round_trips, saves_of
from sim.policies.sharing import alike
from sim.solvers.cascade import cascade
from sim.trace.chain import activations, backward_ops, forward_ops
from sim.trace.graph import Trace
from sim.trace.layers import layer_runs, op_layers


@dataclass(frozen=True, kw_only=True)
class SwapAttention(Policy):
    """Offload what the modules named save, in every layer, and fetch it while the rest of that layer runs backward.

    Each saved tensor goes out when it is saved. When its layer's forward has ended, the device waits for the copies and
    releases the tensors; when the first backward op of the layer has run, the copies back begin, and the first
    op that reads one of them waits for all.
    Source: MindSpeed, `core/memory/swap_attention` (`--swap-attention`, `--swap-modules`).
    Bounds: the device holds what one layer's attention saves, and what all other modules save. A layer hides its
        copies behind its own ops alone: where what attention saves takes longer to copy than the MLP to run, it is
        slower than `swap_all`, which fetches a layer earlier and holds the tensors of two.
    Departs: tensors that share a storage are one here. Published copies of both directions share a stream, which
        differs only between the last layer's forward and its backward. `--recompute-num-layers` is a composition
        here. Tensors beyond the host's capacity go on to the next tier behind it.

    modules: patterns for the names of forward ops, or for what the names begin with, whose saved tensors are offloaded.
    layers: how many layers, from the first; None for all.
    min_bytes: of a tensor that is offloaded.
    Raises PolicyError for a platform without a host tier, and for modules that no op of a layer has.
    """

    moves = True
    needs = frozenset({"host", "layers"})
    fidelity = "code"
    rarely = "ops of random nets are not called attention"
    other_values = by_parameter(modules=("*.mlp",), layers=1, min_bytes=1 << 24)

    modules: Annotated[tuple[str, ...], MinLen(1)] = ("*.attn", "*.self_attention", "*.self_attn")
    layers: Annotated[int, Ge(0)] | None = None
    min_bytes: Annotated[int, Ge(0)] = 1 << 19

    def plan(self, problem: Problem) -> Plan:
        """A round trip for each tensor that such a module saves."""
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"swap_attention: {platform.name} has no host tier to offload to")
        host, homes = platform.host.name, tuple(platform.home(each).name for each in range(trace.devices))
        bytes = trace.tensor_columns.bytes
        key = "swap_attention", self, host, homes, (bytes >= max(self.min_bytes, 1)).tobytes()
        actions = alike(trace, key, lambda: self._trips(trace, host, homes))
        return Plan(trace, cascade(trace, platform, actions, host))

    def _trips(self, trace: Trace, host: str, homes: Sequence[str]) -> tuple[Action, ...]:
        active, device, after = activations(trace), trace.op_columns.device, following(trace)
        forward, backward = (
            {op: run for run in layer_runs(trace, ops.tolist()) for op in run}
            for ops in (forward_ops(trace), backward_ops(trace))
        )
        chosen = self._chosen(trace)
        groups: dict[int, list[Save]] = {}  # by the first op of the layer's backward
        for save in saves_of(trace, weights=False, duplicates=False):
            large = trace.tensor_columns.bytes[save.tensor] >= self.min_bytes
            if large and save.node in chosen and active[save.tensor] and save.tensor not in trace.outputs:
                groups.setdefault(backward[save.readers[0]][0], []).append(save)
        actions: list[Action] = []
        for begin, group in groups.items():
            needed = min(save.readers[0] for save in group)
            fetch = after.get(begin, needed)
            trips = [(save, Trip(after.get(forward[save.node][-1], begin), fetch, needed)) for save in group]
            actions += round_trips(trace, trips, host, homes[int(device[begin])])
        return tuple(actions)

    def _chosen(self, trace: Trace) -> set[int]:
        """The forward ops of the modules, in the first layers of each device."""
        name, device, layer = trace.op_columns.name, trace.op_columns.device.tolist(), op_layers(trace).tolist()
        ops = [op for op in forward_ops(trace).tolist() if layer[op] >= 0]
        found = [op for op in ops if any(meets(name[op], pattern) for pattern in self.modules)]
        if not found:
            raise PolicyError(
                f"swap_attention: no op of a layer matches modules {list(self.modules)}; "
                f"ops of layers are called {', '.join(map(repr, (name[op] for op in ops[:3])))}, …"
            )
        own: dict[int, list[int]] = {}
        for op in ops:
            own.setdefault(device[op], []).append(layer[op])
        first = {d: set(sorted(set(layers))[: self.layers]) for d, layers in own.items()}
        return {op for op in found if layer[op] in first[device[op]]}
