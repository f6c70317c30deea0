"""PyTorch's `save_on_cpu`: every saved tensor is copied to the host while the device waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from sim.errors import PolicyError
from sim.plan import Action, Drop, Move, Plan, Problem, Wait
from sim.policies.base import Policy, by_parameter
from sim.policies.saved_copies import saves_of, with_copies
from sim.policies.sharing import rewriting, shared
from sim.solvers.cascade import cascade
from sim.trace.graph import Trace

PAGEABLE = "host_pageable"
"""Name of the tier of ordinary, not page-locked, host memory on platforms that tell the two apart."""


@dataclass(frozen=True, kw_only=True)
class SaveOnCpu(Policy):
    """Copy every tensor that autograd saves to the host at once, and back when its backward op runs.

    The device waits for each copy, one after the other: nothing overlaps, nothing is prefetched. As in
    PyTorch each saving op makes a copy of its own, of weights and inputs, too, so that a tensor saved
    twice is copied twice, and each backward op unpacks a new device copy, even of a weight that is resident.
    A rewrite adds a tensor, and an op of no time, for each copy but the last of a tensor. Copies of weights in
    a narrower type go to the host like every saved tensor, but autocast's cache holds them on the device, too,
    until the forward pass ends.
    Source: `torch.autograd.graph.save_on_cpu` (PyTorch documentation and source): pack copies and blocks,
        unpack copies back on the computing stream.
    Bounds: time = compute + all copies out + all copies in; in backward the device holds what one op needs.
    Departs: what is saved is what backward ops read here; a saved tensor that no kernel reads (the bias of
        a norm, the second copy that a loss keeps of its log-probabilities) is not copied. A tensor is saved
        once for each forward op whose backward ops read it, when that forward op has run; where that op does not
        touch the tensor, after its last forward use. While an added copy goes out
        it takes device memory beside its original; PyTorch copies straight from that. Tensors beyond the
        host's capacity go on to the next tier behind it, where the profile links one; PyTorch fails.

    pin_memory: False for ordinary host memory, the tier `host_pageable` where the platform has it.
    weights: whether weights are copied.
    duplicates: False copies each tensor once, after its last forward use, for all its backward readers.
    Raises PolicyError for a platform without a host tier.
    """

    moves = True
    rewrites = True
    saves = MappingProxyType({"copy": "PyTorch copies to the host straight from the saved tensor"})
    needs = frozenset({"host"})
    fidelity = "code"
    plans_from = "machine"
    other_values = by_parameter(pin_memory=True, weights=False, duplicates=False)

    pin_memory: bool = False
    weights: bool = True
    duplicates: bool = True

    def plan(self, problem: Problem) -> Plan:
        """Two moves and two waits for each saved copy."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        platform, trace = problem.platform, problem.trace
        if platform.host is None:
            raise PolicyError(f"save_on_cpu: {platform.name} has no host tier to copy to")
        host = PAGEABLE if not self.pin_memory and PAGEABLE in platform.tier_ids else platform.host.name
        homes = tuple(platform.home(each).name for each in range(trace.devices))
        key = self, host, homes, (trace.tensor_columns.bytes > 0).tobytes()
        plan = rewriting(trace, key, (), lambda: self._copied(trace, host, homes))
        actions = cascade(plan.trace, platform, plan.actions, host)
        return plan if actions is plan.actions else replace(plan, actions=actions)

    def _copied(self, trace: Trace, host: str, homes: Sequence[str]) -> Plan:
        """The plan, whatever of the host's tensors go on to a tier behind it."""
        new, packed = with_copies(trace, saves_of(trace, weights=self.weights, duplicates=self.duplicates))
        device = new.op_columns.device
        actions: list[Action] = []
        for one in packed:
            copy, at, needed = one.copy, one.at, one.readers[0]
            actions += [Move(copy, host, keep=one.used_until > at, after=at), Wait(copy, after=at)]
            actions += [Move(copy, homes[int(device[needed])], before=needed), Wait(copy, before=needed)]
        actions += [Drop(one.copy, after=one.used_until) for one in packed if one.used_until > one.at]
        return Plan(new, actions)
