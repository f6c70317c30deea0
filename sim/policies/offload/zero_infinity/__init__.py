"""ZeRO-Infinity: weights, gradients and optimizer states reside on the host or a drive; the device streams weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from sim.declared import Size
from sim.errors import PolicyError
from sim.hardware.platform import Platform
from sim.plan import Action, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.policies.offload.zero_infinity.update import Update
from sim.policies.sharing import rewriting
from sim.rewrites.fused_update import fuse_updates
from sim.rewrites.host_update import Split, device_updates, updated_on_host, updating_host
from sim.rewrites.masters import into_gradients, without_held_weights
from sim.rewrites.weight_parts import with_weight_parts
from sim.solvers.streaming import idle, parts_up, stream_weights
from sim.trace.graph import PERSISTENT, Trace
from sim.units import to_bytes


@dataclass(frozen=True, kw_only=True)
class ZeroInfinity(Policy):
    """No model state stays on the device: weights are fetched layer by layer, and the CPU streams what it updates.

    Weights reside on the host or the drive behind it. A run of ops of one layer and phase has its weights fetched when
    the run `ahead` of them earlier begins, and releases them at its end, in forward and again in backward. From a
    drive they take its link and the device's at once, through no more host memory than a copy's buffer, or the
    direct link where the machine has one. Gradients leave in buckets as they are complete. Then the CPU updates tile by
    tile (the parameters of one layer): gradient and states of the next `tiles` are read from the drive while one is
    updated, and new states and 16-bit weights are written back behind it. Nothing of a tile stays on the host.
    Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021,
        arXiv:2104.07857, sections 5.1 (offload of all states), 5.2.2 and 6.2 (overlap), 6.3 (pinned buffers).
    Bounds: with 16-bit weights and gradients of N parameters the drive holds 14N bytes between steps, 16N with
        gradients, 12N and 14N where weights stay on the device (a larger one shows a tile more: new states take their
        space in the instant in which the old ones give theirs up); the device the weights of `ahead` + 1 neighbouring
        runs, a bucket that fills and those that leave.
        Per step 2N bytes per fetch of all weights (up to twice, three times with recomputation) and 2N of gradients
        cross the device's link, and the update reads 16N and writes 14N bytes of the drive. Without overlap, work of
        `ait` FLOPs per byte runs at ait x rate / (ait x rate + peak) of the peak (section 4). Plans in O(ops +
        operands).
        On d ranks (`zero=3`) each has 1/d of all this: it fetches its part over its own links, and the network gathers
        (section 6.1, bandwidth-centric partitioning).
    Departs: what is fetched together is a layer, where the paper fetches operators, so that `ahead` counts layers and
        the device holds more. Operators are not tiled (5.1.3). The paper stages a weight on the host, drive to host
        three operators ahead and host to device two; here both links carry it at once. Buffers on the host are bounded
        by what is still being written; where the CPU is slower than the drive, tiles that were read wait there. Its
        Adam also keeps fp32 gradients, 4 of its 20 bytes per parameter, which no trace here has. Order and reuse are
        taken from the trace, which its first iteration records. Activations belong to other policies, as in
        `zero_infinity + full_recompute; checkpoints: swap_all`.

    states: where optimizer states and gradients reside: `host`, `nvme` (the tier behind the host), or `auto`, which is
        the drive if there is one.
    weights: where weights reside: `device`, `host`, `nvme` or `auto`.
    ahead: how many runs before its own a weight is fetched; 0 fetches it when its run begins.
    tiles: how many tiles ahead of the one being updated are read from the drive.
    bucket: bytes of gradients that are copied together, an int or text such as "50 MB"; 0 copies each at once.
    Raises PolicyError for a platform without host tier or engine `cpu`, or without a tier behind the host if one is
    asked for; Infeasible where the host cannot hold one tile.
    """

    moves = True
    rewrites = True
    needs = frozenset({"host", "cpu"})
    fidelity = "reconstruction"
    saves = MappingProxyType({"fusion": "the CPU's optimizer is one kernel, which touches each operand once"})
    manages = ("gradients", "optimizer_state", "weights")
    other_values = by_parameter(states="host", weights="device", ahead=0, tiles=3, bucket=1 << 26)

    states: Literal["auto", "host", "nvme"] = "auto"
    weights: Literal["auto", "device", "host", "nvme"] = "auto"
    ahead: Annotated[int, Ge(0)] = 3
    tiles: Annotated[int, Ge(0)] = 1
    bucket: Size = 0

    def plan(self, problem: Problem) -> Plan:
        """The update on the CPU, where state begins, the streams of weights and states."""
        platform, trace = problem.platform, problem.trace
        host, drive = self._tiers(platform)
        columns, updates = trace.tensor_columns, device_updates(trace)
        state = columns.bytes[np.isin(columns.role, PERSISTENT)]
        key = self, host, drive, platform.timing_hash, platform.tier(host).capacity, state.tobytes()
        return rewriting(trace, key, updates, lambda: self._streamed(trace, platform, host, drive, updates))

    def _streamed(self, trace: Trace, platform: Platform, host: str, drive: str, updates: Sequence[int]) -> Plan:
        """The plan with these ops of the update on the CPU."""
        fused = fuse_updates(with_weight_parts(trace, updates), updates)
        if self.weights == "device":
            fused = without_held_weights(into_gradients(fused))
        split = Split(fused) if updates else None
        new = updated_on_host(split, in_place=self.weights != "device") if split else None
        whole = new.trace if new else trace
        far = {"device": "", "host": host, "nvme": drive, "auto": drive or host}[self.weights]
        actions: list[Action] = []
        place: dict[int, str] = {}
        if far:
            streamed, place = stream_weights(whole, platform, far, self.ahead)
            actions += streamed
        if split and new:
            states = drive if self.states != "host" else ""
            update = Update(split, new, platform, host, states, place)
            update.check_fits()
            actions += update.gradients_out(to_bytes(self.bucket))
            actions += parts_up(whole, update.tile, [platform.home(d).name for d in range(whole.devices)])
            actions += update.streams(self.tiles)
            actions += update.weights_back()
            place = {**place, **update.place, **dict.fromkeys(idle(whole, "optimizer_state"), states or host)}
        return Plan(whole, tuple(actions), place=place)

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """The update beside the device, as here; without memory to save it may still be the faster one."""
        return {"the update on the CPU": self.plan(problem)}

    def _tiers(self, platform: Platform) -> tuple[str, str]:
        """The host, and the drive behind it or "" for none."""
        host = updating_host(platform, "zero_infinity", "to offload to")
        behind = platform.cascade(host)[1:]
        if "nvme" in (self.states, self.weights) and not behind:
            raise PolicyError(f"zero_infinity: {platform.name} has no tier behind {host!r} for nvme; use 'host'")
        return host, behind[0] if behind else ""
