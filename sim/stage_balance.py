"""How many layers each part of a model gets so that the slowest device of a pipeline is as fast as it can be.

The embedding counts to the first layer, the last norm, head and loss to the last one: with a large vocabulary, equal
numbers of layers are not equal times. Times are those of the machine's op-time model for a microbatch, without update;
the choice is PipeDream's (`sim.rewrites.stage_partition`), without replicated stages, or DAPPLE's
(`sim.rewrites.dapple_planner`), which counts how the pipeline fills and drains and the sums of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.errors import LayoutError
from sim.hardware.cost import op_times
from sim.hardware.nodes import hop_rates
from sim.hardware.platform import Platform
from sim.rewrites.dapple_planner import LayerTimes, Machines, plan
from sim.rewrites.pipeline import computed_anywhere, parts_of
from sim.rewrites.stage_partition import LayerCost, partition, shared
from sim.trace.graph import Trace
from sim.trace.layers import op_layers
from sim.trace.op import PHASE_CODE
from sim.trace.tensor import ROLE_CODE

UPDATE, FORWARD = PHASE_CODE["update"], PHASE_CODE["forward"]


def costs_by_share(trace: Trace, machine: Platform) -> Callable[[int], list[LayerCost]]:
    """A function that says what each layer takes for a microbatch.

    trace: an iteration on one device, of all samples.
    machine: on which it would run.

    The function is given among how many equal replicas, ranks and microbatches the work is divided.
    """
    layers = sorted({layer for layer in op_layers(trace).tolist() if layer >= 0})
    place = np.array(parts_of(trace, {layer: i for i, layer in enumerate(layers)}), np.int64)
    total, phase = op_times(trace, machine).total.astype(np.int64), trace.op_columns.phase
    fixed = np.minimum([machine.engines[machine.engine_for(0, name)].launch for name in _engines(trace)], total)
    columns, anywhere, n = trace.tensor_columns, computed_anywhere(trace), len(layers)
    weights = [0] * n
    crossing: list[tuple[int, int]] = []  # of each cut that a tensor crosses the layer before it, and its bytes
    for t, size in enumerate(columns.bytes.tolist()):
        made, readers = int(trace.producer[t]), [op for op in trace.readers(t) if phase[op] == FORWARD]
        if made < 0 and columns.role[t] == ROLE_CODE["weight"] and readers:
            weights[place[readers[0]]] += size
        elif made >= 0 and phase[made] == FORWARD and readers and made not in anywhere:
            crossing += ((layer, size) for layer in range(place[made], max(place[op] for op in readers)))
    cut, sizes = np.array(crossing, np.int64).reshape(-1, 2).T

    def costs(share: int) -> list[LayerCost]:
        own = fixed + (total - fixed) // share
        in_forward, trained = phase == FORWARD, phase != UPDATE
        each = (
            _sums(place[trained], own[trained], n),
            _sums(cut, sizes // share, n),
            weights,
            _sums(place[in_forward], own[in_forward], n),
        )
        return [LayerCost(*layer) for layer in zip(*each, strict=True)]

    return costs


def _sums(layer: NDArray[np.int64], values: NDArray[np.int64], layers: int) -> list[int]:
    """The sum of the values of each layer."""
    found = np.zeros(layers, np.int64)
    np.add.at(found, layer, values)
    return [int(each) for each in found]


def balanced(costs: Sequence[LayerCost], machine: Platform, device: Sequence[int], ranks: int = 1) -> tuple[int, ...]:
    """How many layers each part gets.

    costs: of each layer, of a rank's part of a microbatch. device: of each part. ranks: devices of each stage.
    """
    rate, between = _inside(machine), _between(machine, device, ranks)
    if len(set(device)) < len(device):
        return shared(costs, device, rate, between)
    return partition(costs, len(device), rate, len(device), replicated=False, hops=between).layers


def by_latency(
    costs: Sequence[LayerCost], machine: Platform, stages: int, replicas: int, ranks: int, micro_batches: int
) -> tuple[int, ...]:
    """How many layers each stage gets so that DAPPLE's latency of an iteration is least.

    costs: of each layer, of a rank's part of a microbatch, which a stage's replicas divide.
    replicas: of each stage, next to each other. ranks: among which a replica's layers are divided.
    """
    times = [LayerTimes(c.forward, c.time - c.forward, c.sent, c.weights // ranks) for c in costs]
    inside, networks = _inside(machine), machine.networks
    each = max(min(machine.devices // ranks, stages * replicas), 1)
    nodes = -(-stages * replicas // each)
    nested = tuple((max(outer.per_node // (each * ranks), 1), net.rate) for net, outer in pairwise(networks))
    between = networks[-1].rate if networks else inside
    where = Machines((each,) * nodes, inside, between, tuple(level for level in nested if level[0] < nodes))
    found = plan(times, where, micro_batches, stages=stages, replicas=replicas, ways=("append",))
    return tuple(stage.layers for stage in found)


def _inside(machine: Platform) -> int:
    """Bytes per second from one device of a machine to the next."""
    homes = [machine.home(device).name for device in range(min(machine.devices, 2))]
    route = machine.route(*homes) if len(homes) == 2 else ()
    return min((machine.links[i].rate for i in route), default=10**18)


def _between(machine: Platform, device: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Bytes per second from each part to the next one; () where all are as fast, or nothing is known of the links."""
    inside = _inside(machine)
    try:
        rates = tuple(rate or inside for rate in hop_rates(machine, device, ranks))
    except LayoutError:
        return ()
    return () if {*rates} <= {inside} else rates


def _engines(trace: Trace) -> list[str]:
    return [trace.op_columns.engine.get(op, "") for op in range(len(trace.op_columns.name))]
