"""Weights reside on the host and are fetched layer by layer, for each visit of forward, backward and update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from sim.errors import PolicyError
from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.sharing import shared
from sim.solvers.streaming import stream_weights


@dataclass(frozen=True, kw_only=True)
class WeightStreaming(Policy):
    """Each weight is fetched some layers before the layer that reads it, and its copy is released behind that layer.

    A run is a maximal sequence of ops of one layer and phase on a device, those of no layer included. A weight that a
    run reads is fetched when the run `ahead` of them earlier begins, and released when its own run ends, unless one of
    the next `ahead` runs reads it, too: then it stays until there. A weight that the device itself updates goes
    back to the host after the update; one that nothing updates, or the host, only comes. The host keeps its copy all
    the time. A part of a weight that a collective gathers is fetched for that; what an op on another engine, or one
    that others join, reads stays where it is by default.
    Source: the schedule of Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
        Learning", SC 2021, arXiv:2104.07857, sections 5 and 6.2, on one device and without NVMe; "offload_param" with
        "cpu" in DeepSpeed's ZeRO-3. `zero_offload(weights=host) + weight_streaming` is the mechanism of FSDP2's
        `CPUOffloadPolicy` (PyTorch, torch.distributed.fsdp.fully_shard): parameters, gradients and optimizer states
        on the host, a part copied up before the all-gather that reads it, reduced gradients copied down in backward,
        the optimizer on the CPU. Per step of N fp32 parameters on d ranks (`zero=3`) each rank copies up to 4N/d bytes
        up per pass and 4N/d of gradients down, and its host memory holds all 16N/d bytes of its part.
    Bounds: weights resident at once: those of `ahead` + 1 neighbouring runs; bytes from the host per step: at most
        each weight's once per run that reads it. Time at least those bytes over the link's rate. O(ops + operands).
    Departs: DeepSpeed fetches by module and by a budget of live parameters, and takes order and reuse from the first
        iteration; here from the trace. The prefetch of the first runs starts with the iteration, not during the
        previous one. FSDP2 copies a part up just before its gather, with its mixed precision casts it on the device,
        and gathers 16 bits; here fp32 is gathered under autocast (`amp_bf16`), whose casts autograd keeps to backward,
        and with `mixed_bf16` 2N/d bytes of 16-bit weights cross. The CPU updates when all gradients have come down.

    ahead: how many runs before its own a weight is fetched; 0 fetches it when its run begins.
    Raises PolicyError for a platform without host tier, or a negative `ahead`.
    """

    moves = True
    needs = frozenset({"host"})
    manages = ("weights",)
    fidelity = "reconstruction"
    plans_from = "machine"
    other_values = by_parameter(ahead=2)

    ahead: Annotated[int, Ge(0)] = 1

    def plan(self, problem: Problem) -> Plan:
        """Where weights begin, their fetches, and their releases."""
        return shared(self, problem, lambda: self._plan(problem))

    def _plan(self, problem: Problem) -> Plan:
        trace, platform = problem.trace, problem.platform
        if platform.host is None:
            raise PolicyError(f"weight_streaming: {platform.name} has no host tier to keep weights in")
        actions, place = stream_weights(trace, platform, platform.host.name, self.ahead)
        return Plan(trace, actions, place=place)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """Weights on the host, where an op of its processor reads them without a copy."""
        return {"weights on the host": self.plan(problem)}
