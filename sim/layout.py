"""One way to say how a trace runs on many devices: a layout, and what it makes of a trace and a platform.

    simulate(trace, "a100_80_sxm", "full_recompute", parallel={"pp": 4, "schedule": "1f1b", "micro_batches": 8})

The trace is the whole iteration on one device, of all samples. A layout divides it; everything it does is a rewrite
whose `origin` says what each op and tensor stands for. Policies plan for the result like for any trace, and a budget
holds for each device.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from sim.arguments import explained
from sim.collecting import uncollected
from sim.errors import LayoutError, UnitError, near
from sim.hardware.nodes import placed
from sim.hardware.platform import Platform
from sim.hardware.profile import load_profile
from sim.rewrites.batching import batch_ops, batched, own_ops
from sim.rewrites.bucket_copies import bucket_copies
from sim.rewrites.chunks import CHUNKED, Chunks, as_base, cut, joined
from sim.rewrites.dimensions import TENSOR, column_axis, dimensions, is_divided, own_tokens, token_axis
from sim.rewrites.expert_parallel import experts_apart
from sim.rewrites.experts import experts_of
from sim.rewrites.experts_in_turn import experts_in_turn, in_order, refused
from sim.rewrites.gradient_buffer import gradient_buffers
from sim.rewrites.layer_parts import ATTENTION, MLP, VOCABULARY, LayerPart, layer_parts
from sim.rewrites.next_step import updates_by_layer, without_barrier
from sim.rewrites.pipeline import pipeline
from sim.rewrites.schedules import SCHEDULES, device_of, parts_per_device, refusal
from sim.rewrites.stage_partition import LayerCost
from sim.rewrites.tensor_parallel import divide_layers, divide_tokens
from sim.rewrites.zero import GATHERED, LEVELS, shard
from sim.stage_balance import balanced, by_latency, costs_by_share
from sim.trace.graph import Trace
from sim.trace.layers import op_layers
from sim.trace.op import KINDS
from sim.units import parse_bytes

ONE_EXPERT = re.compile(r"h\d+\.mlp\.expert\d+\.(gate|up)\.weight")
"""Weights of one expert, (inner, columns)."""
BALANCED, DAPPLE = "balanced", "dapple"
MOST = 10**9
"""The largest number that a layout may have; beyond it looking for the nearest valid one takes too long."""
CHOSEN = (BALANCED, DAPPLE)
DDP, DDP_BUCKETS = "ddp", (1 << 20, 25 << 20)
"""PyTorch's `DistributedDataParallel`: `kDefaultFirstBucketBytes`, and `bucket_cap_mb`."""


@dataclass(frozen=True)
class Layout:
    """How a trace is divided among devices.

    dp: replicas of the model, each with an equal part of the samples.
    tp: ranks among which the layers of each replica are divided, by heads, columns and vocabulary.
    sequence_parallel: with tp, whether what is not divided that way is divided by tokens.
    async_sums: with tp, whether backward gathers inputs and sums their gradients beside the products with weights, as
        Megatron-LM does by default (`sim.rewrites.async_sums`).
    keep_gathered: with sequence_parallel, whether the inputs of layers that forward gathers are kept for backward, as
        autograd does for PyTorch's DTensor; else backward gathers them once more, as in Megatron-LM.
    sum_each: with tp, whether each linear layer copies its input, and sums the gradient of that over the ranks by
        itself, as PaddlePaddle's do; else layers that share an input sum once, as Megatron-LM's.
    by_tokens: with sequence_parallel, parts of layers that the ranks of tp divide by tokens, too, with all weights on
        each: "mlp, attention 0-3" are all MLPs, and attention in the first four layers (`sim.rewrites.layer_parts`).
        Attention then gathers keys and values, and must be fused. Gradients of such weights are summed once.
    ep: of the replicas, how many next to each other divide the experts of a mixture; all else each of them has whole.
    cp: ranks among which the tokens of each replica's samples are divided, with all weights on each of them, or with
        `tp` the same part of them: context parallelism, which needs fused attention. Gradients are summed, and training
        state is divided, among these ranks and the replicas together.
    ring_attention: with cp, whether keys and values go from rank to rank in blocks, beside the products with them
        (`sim.rewrites.ring_attention`); else those of all tokens are gathered before.
    zero: of the training state, which is the same for all replicas and ranks of `cp`, what each keeps only its part
        of: 0 nothing, 1 the optimizer states, 2 the gradients too, 3 the weights too.
    shard_within: of the replicas, how many next to each other (a node's) divide the training state by `zero`; parts of
        gradients are summed over those in other groups: hybrid sharding, PyTorch FSDP's HYBRID_SHARD. 1 is as `zero` 0;
        0: all replicas.
    reshard: at level 3, whether gathered weights are freed after forward and gathered again for backward.
    reshard_to: at level 3, among how many replicas next to each other weights that forward has used stay divided, until
        backward has gathered them from these: FSDP2's `reshard_after_forward` as a number. 0: all replicas.
    barrier: whether a step waits for all gradients. Without it two steps are simulated, the second of which begins when
        the gradients of the first layer are summed; sums have the priority of their layer (`sim.rewrites.next_step`).
    gradient_buffer: whether gradients of weights are accumulated in buffers that exist from the start, as Megatron-LM's
        (`sim.rewrites.gradient_buffer`); else each is there from its first microbatch to the update.
    gathered: at level 3, what is gathered together: the weights of a `layer`, as FSDP's units, or of each `module` that
        has a large one, as DeepSpeed's hooks do.
    prefetch: at level 3, how many layers, or modules, ahead weights are gathered; 0: a layer waits for its own.
    bucket: gradients are summed over replicas in buckets of so many bytes ("25 MiB"), in the order in which backward
        produces them: a bucket closes with the gradient that reaches them. `ddp`: as PyTorch's DDP does by default,
        1 MiB the first, 25 MiB the others, which gradients are copied into and back out of
        (`sim.rewrites.bucket_copies`); with `zero`, where each replica gets its part, only the sizes. 0: one per layer.
    pp: stages of the pipeline.
    schedule: one of `sim.rewrites.schedules.SCHEDULES`.
    micro_batches: into how many parts the samples of a replica are divided, each of which goes through the pipeline by
        itself. Under `pipedream` each of them is a step of its own, with an update.
    chunks: parts of the model per device: 2 or more for `interleaved`, by default 2.
    layers: how many layers each part has, in order; by default all as many. The first and the last of several may have
        0, so that they have the embedding and the loss alone. `balanced`: so many that the slowest device
        takes the least time, with all its parts; `dapple`: so many that a whole iteration does (`sim.stage_balance`).

    Raises LayoutError for a value that no trace could run with, naming the key and the nearest valid value.
    """

    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    pp: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    chunks: int = 0
    layers: tuple[int, ...] | str = ()
    cp: int = 1
    ep: int = 1
    reshard: bool = True
    reshard_to: int = 0
    prefetch: int = 1
    bucket: int | str = 0
    barrier: bool = True
    gradient_buffer: bool = False
    ring_attention: bool = False
    async_sums: bool = False
    by_tokens: tuple[LayerPart, ...] = ()
    gathered: str = "layer"
    keep_gathered: bool = False
    sum_each: bool = False
    shard_within: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise LayoutError(f"schedule: {self.schedule!r} is unknown{near(str(self.schedule), SCHEDULES)}")
        if type(self.chunks) is int and self.chunks == 0:
            object.__setattr__(self, "chunks", parts_per_device(self.schedule))
        for key in ("dp", "tp", "cp", "ep", "pp", "micro_batches", "chunks"):
            _positive(key, getattr(self, key))
        if type(self.zero) is not int or self.zero not in LEVELS:
            nearest = min(LEVELS, key=lambda level: abs(level - min(_as_number(self.zero), MOST)))
            raise LayoutError(
                f"zero: needs one of {', '.join(map(str, LEVELS))}, has {self.zero!r}; nearest: {nearest}"
            )
        if not isinstance(self.reshard, bool):
            more = "; for a number of replicas there is reshard_to" if isinstance(self.reshard, int) else ""
            raise LayoutError(f"reshard: needs true or false, has {self.reshard!r}{more}")
        if not self.reshard and self.zero < 3:
            raise LayoutError(
                f"reshard: only weights that zero 3 divides are gathered, zero is {self.zero}; nearest: 3"
            )
        self._check_reshard_to()
        self._check_shard_within()
        self._check_exchanges()
        self._check_division_of_layers()
        if self.dp % self.ep:
            nearest = nearest_divisor(self.dp, self.ep)
            raise LayoutError(f"ep: {self.ep} ranks of experts do not divide dp {self.dp}; nearest: {nearest}")
        if isinstance(self.layers, str):
            if self.layers not in CHOSEN:
                raise LayoutError(f"layers: needs a list of numbers, {BALANCED!r} or {DAPPLE!r}, has {self.layers!r}")
            if self.layers == DAPPLE and self.chunks > 1:
                raise LayoutError(f"layers: {DAPPLE!r} plans for one part per device, not for {self.chunks}")
        elif isinstance(self.layers, Sequence) and not isinstance(self.layers, bytes):
            object.__setattr__(self, "layers", tuple(self.layers))
            ends = (0, len(self.layers) - 1) if len(self.layers) > 1 else ()
            for part, number in enumerate(self.layers):
                if part not in ends or number != 0 or isinstance(number, bool):
                    _positive("layers", number)
        else:
            raise LayoutError(
                f"layers: needs a list of numbers, one for each part of the model, {BALANCED!r} or {DAPPLE!r}, "
                f"has {self.layers!r}"
            )
        if why := refusal(self.schedule, self.pp, self.chunks, self.micro_batches):
            raise LayoutError(why)
        if self.schedule == "pipedream" and self.dp > 1:
            raise LayoutError("dp: pipedream updates after each microbatch of one pipeline; nearest: 1")
        if self.schedule == "pipedream" and self.cp > 1 and self.zero:
            raise LayoutError("zero: pipedream keeps several versions of each weight, all of them whole; nearest: 0")
        if self.layers not in ((), *CHOSEN) and len(self.layers) != self.parts:
            raise LayoutError(f"layers: {len(self.layers)} numbers for {self.parts} parts of the model")

    def _check_division_of_layers(self) -> None:
        """Raise LayoutError for what the ranks of tp and cp cannot do."""
        for key in ("sequence_parallel", "ring_attention", "async_sums", "keep_gathered", "sum_each"):
            if not isinstance(getattr(self, key), bool):
                raise LayoutError(f"{key}: needs true or false, has {getattr(self, key)!r}")
        object.__setattr__(self, "by_tokens", layer_parts(self.by_tokens, "by_tokens"))
        apart = any(part.part == ATTENTION for part in self.by_tokens)
        for is_wrong, why in (
            (
                self.ring_attention and self.cp == 1,
                "ring_attention: blocks go round among the ranks of cp, which is 1; nearest: cp 2",
            ),
            (
                self.async_sums and self.tp == 1,
                "async_sums: the ranks of tp sum gradients of inputs, and tp is 1; nearest: tp 2",
            ),
            (
                self.sequence_parallel and self.tp == 1,
                "sequence_parallel: divides tokens among the ranks of tp, which is 1; nearest: tp 2",
            ),
            (
                self.keep_gathered and not self.sequence_parallel,
                "keep_gathered: inputs are gathered only with sequence_parallel; nearest: false",
            ),
            (
                self.sum_each and (self.tp == 1 or self.sequence_parallel or self.async_sums),
                "sum_each: needs tp, and neither sequence_parallel nor async_sums, which sum per block; nearest: false",
            ),
            (
                self.by_tokens and not self.sequence_parallel,
                "by_tokens: the ranks of tp divide tokens only with sequence_parallel; nearest: ''",
            ),
            (
                self.cp > 1 and apart,
                "by_tokens: the ranks of cp divide attention by tokens already; nearest: cp 1, or 'mlp'",
            ),
        ):
            if is_wrong:
                raise LayoutError(why)

    def _check_reshard_to(self) -> None:
        """Raise LayoutError for groups of replicas that cannot keep weights together."""
        if self.reshard_to == 0 and self.reshard_to is not False:
            return
        _positive("reshard_to", self.reshard_to)
        for is_wrong, what, instead in (
            (self.zero < 3, f"only weights that zero 3 divides are gathered, zero is {self.zero}", "zero 3"),
            (not self.reshard, "weights are not freed after forward with reshard false", "reshard true"),
            (self.ep > 1, f"not with experts that {self.ep} replicas divide", "ep 1"),
        ):
            if is_wrong:
                raise LayoutError(f"reshard_to: {what}; nearest: {instead}")
        proper = [n for n in range(2, self.dp) if self.dp % n == 0]
        if self.reshard_to not in proper:
            nearest = min(proper, key=lambda n: abs(n - self.reshard_to), default=0)
            raise LayoutError(
                f"reshard_to: {self.reshard_to} does not divide the {self.dp} replicas of dp into several groups of "
                f"several; nearest: {nearest}"
            )

    def _check_shard_within(self) -> None:
        """Raise LayoutError for groups of replicas that cannot divide the training state."""
        if self.shard_within == 0 and self.shard_within is not False:
            return
        _positive("shard_within", self.shard_within)
        for is_wrong, what, instead in (
            (self.zero == 0, "replicas divide nothing at zero 0", "zero 1"),
            (self.ep > 1, f"not with experts that {self.ep} replicas divide", "ep 1"),
            (self.reshard_to, "groups of reshard_to are of all replicas that divide weights", "reshard_to 0"),
        ):
            if is_wrong:
                raise LayoutError(f"shard_within: {what}; nearest: {instead}")
        if self.dp % self.shard_within:
            nearest = nearest_divisor(self.dp, self.shard_within)
            raise LayoutError(
                f"shard_within: {self.shard_within} does not divide the {self.dp} replicas of dp; nearest: {nearest}"
            )
        if self.shard_within == 1 < self.cp and self.dp > 1:
            least = next(n for n in range(2, self.dp + 1) if self.dp % n == 0)
            raise LayoutError(
                f"shard_within: ranks that divide tokens divide the state, too, with replicas; nearest: {least}"
            )

    def _check_exchanges(self) -> None:
        """Raise LayoutError for a way to gather weights or to sum gradients that there is not; `bucket` in bytes."""
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise LayoutError(f"prefetch: needs a whole number of layers, has {self.prefetch!r}; nearest: 0")
        if self.prefetch != 1 and self.zero < 3:
            raise LayoutError(
                f"prefetch: only weights that zero 3 divides are gathered, zero is {self.zero}; nearest: 3"
            )
        if self.gathered not in GATHERED:
            raise LayoutError(f"gathered: {self.gathered!r} is unknown{near(str(self.gathered), GATHERED)}")
        if self.gathered != "layer" and self.zero < 3:
            raise LayoutError(
                f"gathered: only weights that zero 3 divides are gathered, zero is {self.zero}; nearest: 3"
            )
        if isinstance(self.bucket, str) and self.bucket != DDP:
            try:
                object.__setattr__(self, "bucket", parse_bytes(self.bucket))
            except UnitError as error:
                raise LayoutError(f"bucket: {error}; or {DDP!r}") from None
        whole = isinstance(self.bucket, int) and not isinstance(self.bucket, bool) and self.bucket >= 0
        if not whole and self.bucket != DDP:
            raise LayoutError(f"bucket: needs a size such as '25 MiB', or {DDP!r}, has {self.bucket!r}; nearest: 0")
        if not isinstance(self.gradient_buffer, bool):
            raise LayoutError(f"gradient_buffer: needs true or false, has {self.gradient_buffer!r}")
        if self.gradient_buffer and self.zero > 1:
            raise LayoutError(
                f"gradient_buffer: holds all gradients, and not parts of them (zero {self.zero}); nearest: zero 1"
            )
        if not isinstance(self.barrier, bool):
            raise LayoutError(f"barrier: needs true or false, has {self.barrier!r}")
        if not self.barrier and self.dp * self.cp == 1:
            raise LayoutError("barrier: gradients are summed among the replicas of dp, which is 1; nearest: dp 2")
        if not self.barrier and (self.zero or self.schedule == "pipedream"):
            wrong = f"zero {self.zero}" if self.zero else self.schedule
            raise LayoutError(f"barrier: each replica updates all its weights, not with {wrong}; nearest: zero 0, 1f1b")
        if not self.barrier and self.gradient_buffer:
            raise LayoutError("barrier: the next step has buffers of its own, not with gradient_buffer; nearest: true")
        if self.bucket and self.dp * self.cp == 1:
            raise LayoutError("bucket: gradients are summed among the replicas of dp, which is 1; nearest: dp 2")

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of the first, the second, … bucket of gradients, the last for all that follow; () for one per layer."""
        if isinstance(self.bucket, str):
            return DDP_BUCKETS
        return (self.bucket,) if self.bucket else ()

    @property
    def parts(self) -> int:
        """Parts of the model."""
        return self.pp * self.chunks

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def is_trivial(self) -> bool:
        """Whether it changes nothing."""
        return self.devices == 1 and self.micro_batches == 1 and not self.gradient_buffer

    def said(self) -> dict[str, Any]:
        """The keys that are not their defaults; `to_layout` of them is the same layout."""
        plain = {each.name: each.default for each in fields(self)} | {"chunks": parts_per_device(self.schedule)}
        said = {key: getattr(self, key) for key, default in plain.items() if getattr(self, key) != default}
        return said | ({"by_tokens": ", ".join(map(str, self.by_tokens))} if self.by_tokens else {})

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.said().items()) or "one device"


def to_layout(given: Layout | Mapping[str, Any] | None) -> Layout:
    """A layout as it is, or of a table of its fields; None is one device. Raises LayoutError."""
    if given is None:
        return Layout()
    if isinstance(given, Layout):
        return given
    if not isinstance(given, Mapping):
        raise LayoutError(f"expected a table such as {{'pp': 4, 'micro_batches': 8}}, not a {type(given).__name__}")
    known = [field.name for field in fields(Layout)]
    for key in given:
        if key not in known:
            raise LayoutError(f"{key!r} is unknown{near(str(key), known)}")
    return Layout(**given)


def with_devices(given: Mapping[str, Any]) -> dict[str, Any]:
    """A table of a layout's fields where `devices`, if it is there, stands for the replicas that they make.

    Raises LayoutError where the devices do not divide among the stages and replicas given.
    """
    table = dict(given)
    devices = table.pop("devices", None)
    if devices is None:
        return table
    _positive("devices", devices)
    for key in ("pp", "tp", "cp", "dp"):
        _positive(key, table.get(key, 1))
    each, dp = prod(table.get(key, 1) for key in ("pp", "tp", "cp")), table.get("dp")
    if devices % each or (dp is not None and dp * each != devices):
        nearest = dp * each if dp is not None else max(each, round(devices / each) * each)
        raise LayoutError(
            f"devices: {devices} are not dp * tp * cp * pp with tp * cp * pp = {each}; nearest: {nearest}"
        )
    return {**table, "dp": devices // each}


@explained
def lay_out(
    trace: Trace,
    platform: Platform | str | os.PathLike[str],
    parallel: Layout | Mapping[str, Any] | None,
    *,
    overrides: Mapping[str, str] | None = None,
    kernels: Callable[[Trace], Trace] | None = None,
) -> tuple[Trace, Platform]:
    """The trace as a layout divides it, and the platform with as many devices.

    trace: an iteration on one device.
    platform: a platform, or the name or file of a profile. Of a profile of one device as many are made as the layout
        takes, up to a node's where it states what joins nodes.
    parallel: a layout, or a table of its fields.
    overrides: figures of the profile to change, see `load_profile`.
    kernels: a rewrite of what a rank does with all samples, before they are divided: `workloads.with_stack`, since
        kernels that fuse ops can be divided along tensors only before they are fused.

    Raises LayoutError naming the key at fault and the nearest valid value.
    """
    with uncollected():
        return _laid_out(trace, platform, to_layout(parallel), overrides, kernels)


def machine_for(
    platform: Platform | str | os.PathLike[str], layout: Layout, overrides: Mapping[str, str] | None = None
) -> Platform:
    """A node with as many devices as a layout takes, at most all that it may have; arguments as for `lay_out`."""
    if isinstance(platform, Platform):
        return platform
    machine = load_profile(platform, overrides=overrides)
    if layout.is_trivial:
        return machine
    most = machine.networks[0].per_node if machine.networks else layout.devices if machine.devices == 1 else 0
    node = min(layout.devices, most)
    if machine.devices < node:
        machine = load_profile(platform, overrides={**(overrides or {}), "devices": str(node)})
    return machine


def _laid_out(
    trace: Trace,
    platform: Platform | str | os.PathLike[str],
    layout: Layout,
    overrides: Mapping[str, str] | None,
    kernels: Callable[[Trace], Trace] | None,
) -> tuple[Trace, Platform]:
    machine = machine_for(platform, layout, overrides)
    if layout.is_trivial:
        return trace if kernels is None else kernels(trace), machine
    if trace.devices > 1:
        raise LayoutError(f"the trace is already on {trace.devices} devices")
    _check_devices(machine, layout)
    _check_training(trace, layout)
    _check_samples(trace, layout)
    check_division(trace, layout.tp, layout.sequence_parallel, layout.cp, layout.by_tokens)
    if layout.keep_gathered and "fp8" in str(trace.meta.get("precision")):
        raise LayoutError("keep_gathered: in FP8 backward reads the input in another form; nearest: false")
    check_context(trace, layout.cp)
    check_experts(trace, layout.ep, layout.cp, are_kernels_fused=kernels is not None)
    asked, layout = layout, with_layers(trace, machine, layout)
    table = part_of_layer(trace, layout)
    chunks = _joined_chunks(trace, layout)
    trace = as_base(chunks.trace) if chunks is not None else trace
    trace = experts_apart(trace) if layout.ep > 1 else trace  # whose gradients others sum
    trace = divide_tokens(trace, layout.cp, layout.ring_attention)
    parts: dict[str, Any] = {
        "by_tokens": layout.by_tokens,
        "keep_gathered": layout.keep_gathered,
        "sum_each": layout.sum_each,
    }
    trace = divide_layers(trace, layout.tp, layout.sequence_parallel, layout.async_sums, **parts)
    trace = in_order(trace, layout.ep) if layout.ep > 1 and experts_in_turn(trace) else trace
    trace = trace if kernels is None else kernels(trace)
    trace = trace if layout.barrier else updates_by_layer(trace)
    within = layout.shard_within % layout.dp  # 0 where all replicas divide the state
    level = layout.zero if layout.shard_within != 1 or layout.dp == 1 else 0
    dealt = level > 1 and layout.dp * layout.cp > 1
    replicas: dict[str, Any] = {"ranks": layout.dp, "dealt": dealt, "experts": layout.ep, "buckets": layout.buckets}
    replicas |= {"parts": layout.parts, "own_statistics": True}
    divided = pipeline(trace, table, layout.micro_batches, layout.schedule, layout.chunks, **replicas)
    axes: dict[str, Any] = {"tensor": layout.tp, "context": layout.cp, "experts": layout.ep}
    axes |= {"group": layout.reshard_to or 1, "neighbours": layout.ring_attention}
    axes |= {"shards": within or 1}
    gathers = layout.prefetch, layout.reshard_to or 1, layout.gathered
    sharded = shard(divided, layout.dp, level, layout.reshard, *gathers, within)
    sharded = gradient_buffers(sharded) if layout.gradient_buffer else sharded
    sharded = bucket_copies(sharded) if layout.bucket == DDP and layout.barrier else sharded
    sharded = sharded if layout.barrier else without_barrier(sharded)
    sharded = sharded if chunks is None else cut(sharded, chunks)
    sharded = _named(sharded, asked)
    return sharded, placed(machine, layout.pp, layout.dp, **axes)


def _joined_chunks(trace: Trace, layout: Layout) -> Chunks | None:
    """The trace with the chunks of its loss joined where its samples are divided; None where there is nothing to do.

    Raises LayoutError for chunks that are not as `workloads.losses` makes them.
    """
    if trace.meta.get("loss") != CHUNKED or layout.dp * layout.micro_batches * layout.tp * layout.cp == 1:
        return None
    chunks = joined(trace)
    if chunks is None:
        key = next((key for key in ("dp", "micro_batches", "tp") if getattr(layout, key) > 1), "cp")
        raise LayoutError(f"{key}: no chunks of loss 'chunked' are known, whose tokens could be divided; nearest: 1")
    return chunks


def _named(trace: Trace, layout: Layout) -> Trace:
    """The trace with the layout in `meta["layout"]`: its devices, and its keys that are not their defaults."""
    meta = {**trace.meta, "layout": {"devices": layout.devices, **layout.said()}}
    columns = trace.tensor_columns, trace.op_columns
    return Trace(*columns, outputs=trace.outputs, carry=trace.carry, meta=meta, origin=trace.origin, like=trace)


def with_layers(
    trace: Trace, machine: Platform, layout: Layout, costs: Callable[[int], Sequence[LayerCost]] | None = None
) -> Layout:
    """The layout with a number of layers per part, where it says only how they are chosen.

    trace: an iteration on one device, of all samples.
    machine: a node with as many devices as the layout takes, at most all that it has.
    costs: of each layer of the trace on the machine, by the share of it; see `sim.stage_balance.costs_by_share`.
    """
    if not isinstance(layout.layers, str) or layout.pp == 1:
        return layout
    count = len({layer for layer in op_layers(trace).tolist() if layer >= 0})
    if layout.parts > max(count, 1):
        raise LayoutError(f"pp: {count} layers do not make {layout.parts} parts; nearest: {max(count, 1)}")
    costs = costs or costs_by_share(trace, machine)
    ranks, n = layout.tp * layout.cp, layout.micro_batches
    if layout.layers == BALANCED:
        device = [device_of(part, layout.pp, layout.schedule) for part in range(layout.parts)]
        return replace(layout, layers=balanced(costs(layout.dp * ranks * n), machine, device, ranks * layout.dp))
    return replace(layout, layers=by_latency(costs(ranks * n), machine, layout.pp, layout.dp, ranks, n))


def _check_training(trace: Trace, layout: Layout) -> None:
    """Raise LayoutError where a trace that generates tokens is divided otherwise than by tensor parallelism."""
    if "generate" in trace.meta:
        for key in ("dp", "pp", "cp", "ep", "micro_batches"):
            if (n := getattr(layout, key)) > 1:
                of = "passes that generate tokens, which read each other's keys and values, are divided by tp alone"
                raise LayoutError(f"{key}: {n}: {of}; nearest: 1")


def _check_samples(trace: Trace, layout: Layout) -> None:
    """Raise LayoutError where the samples do not divide among replicas and microbatches."""
    if layout.dp * layout.micro_batches > 1:
        key = "dp" if layout.dp > 1 else "micro_batches"
        over_all = _norm_over_samples(trace)
        if over_all:
            said = f"norm {over_all!r} takes its statistics over all samples"
            raise LayoutError(f"{key}: {said}: on parts of them it would compute something else; nearest: 1")
    samples = trace.meta.get("batch")
    if not isinstance(samples, int):
        return
    if samples % layout.dp:
        nearest = nearest_divisor(samples, layout.dp)
        raise LayoutError(f"dp: {layout.dp} does not divide the batch of {samples}; nearest: {nearest}")
    if samples // layout.dp % layout.micro_batches:
        nearest = nearest_divisor(samples // layout.dp, layout.micro_batches)
        of = f"batch of {samples}" if layout.dp == 1 else f"{samples // layout.dp} samples of a replica"
        raise LayoutError(f"micro_batches: {layout.micro_batches} does not divide the {of}; nearest: {nearest}")


def _norm_over_samples(trace: Trace) -> str:
    """The first norm of forward that reads rows of samples and cannot be split by them; "" for none."""
    splits, rows, c = batch_ops(trace) | own_ops(trace), batched(trace), trace.op_columns
    norms = (op for op in range(len(c.name)) if KINDS[c.kind[op]] == "norm" and c.phase[op] == 0 and not splits[op])
    return next((c.name[op] for op in norms if any(rows[t] for t in trace.reads(op))), "")


def check_division(
    trace: Trace, tp: int, sequence_parallel: bool, cp: int = 1, by_tokens: tuple[LayerPart, ...] = ()
) -> None:
    """Raise LayoutError where the layers of a trace do not divide among so many ranks.

    cp: ranks among which the tokens are divided before `sequence_parallel` divides them.
    by_tokens: parts of layers of which heads and columns are not divided.
    """
    if tp == 1:
        return
    _check_divisible("tp", trace)
    _check_rows_of_experts(trace, sequence_parallel)
    check_by_tokens(trace, by_tokens, cp * tp)
    most = divisible(trace, by_tokens)
    if not most and not by_tokens:  # else of the vocabulary alone, which need not divide
        raise LayoutError("tp: the trace has no layers that are known to divide; nearest: 1")
    if most % tp:
        raise LayoutError(f"tp: {tp} does not divide heads and columns ({most}); nearest: {nearest_divisor(most, tp)}")
    sequence = trace.meta.get("sequence")
    if sequence_parallel and isinstance(sequence, int) and sequence % cp == 0 and sequence // cp % tp:
        nearest = nearest_divisor(math.gcd(sequence // cp, most), tp)
        what = f"sequence of {sequence}" if cp == 1 else f"{sequence // cp} tokens of a rank of cp {cp}"
        raise LayoutError(f"tp: {tp} does not divide the {what}; nearest: {nearest}")


def check_context(trace: Trace, cp: int) -> None:
    """Raise LayoutError where the tokens of a trace do not divide among so many ranks."""
    if cp == 1:
        return
    _check_divisible("cp", trace)
    sequence = trace.meta.get("sequence")
    if not isinstance(sequence, int):
        raise LayoutError("cp: the trace states no sequence; nearest: 1")
    if sequence % cp:
        raise LayoutError(
            f"cp: {cp} does not divide the sequence of {sequence}; nearest: {nearest_divisor(sequence, cp)}"
        )
    if not any(op.kind == "attention" for op in trace.ops):
        raise LayoutError("cp: scores of all tokens with all others cannot be divided by tokens; try attention 'flash'")


def check_experts(trace: Trace, ep: int, cp: int = 1, *, are_kernels_fused: bool = False) -> None:
    """Raise LayoutError where the experts of a trace do not divide among so many replicas.

    cp: ranks that divide the tokens of each. are_kernels_fused: whether kernels are fused once layers are divided.
    """
    if ep == 1:
        return
    numbers = set(experts_of(trace).values())
    if not numbers:
        numbers = {len(loads) for loads in experts_in_turn(trace).values()}
        if not numbers:
            raise LayoutError(f"ep: {_lacking_of_experts(trace)}; nearest: 1")
        if 0 in numbers:
            raise LayoutError(f"ep: {refused(trace, ep)}; nearest: 1")
    experts = math.gcd(*numbers)
    if experts % ep:
        raise LayoutError(f"ep: {ep} does not divide the {experts} experts; nearest: {nearest_divisor(experts, ep)}")
    if experts_in_turn(trace):
        if why := refused(trace, ep):
            raise LayoutError(f"ep: {why}; nearest: 1")
        if cp > 1 or are_kernels_fused:
            what = "with cp" if cp > 1 else "in fused kernels"
            raise LayoutError(
                f"ep: experts that run one after another are not divided {what}; try experts_implementation 'grouped'; "
                "nearest: 1"
            )
    if trace.meta.get("stack", "eager") != "eager":
        raise LayoutError(
            f"ep: experts in kernels of the stack {trace.meta['stack']!r} cannot be divided once they are fused; build "
            "the trace eager, and give lay_out(…, kernels=…)"
        )
    if int(trace.meta.get("micro_batches", 1)) > 1:
        raise LayoutError("ep: the trace has microbatches already; give micro_batches in the layout instead")


def _lacking_of_experts(trace: Trace) -> str:
    """What a trace would have to say so that its experts could be divided."""
    columns = trace.tensor_columns
    weights = (name for t, name in enumerate(columns.name) if trace.producer[t] < 0 and "expert" in name)
    lacking = ["how many rows each expert has (meta['expert_loads'])"] if "expert_loads" not in trace.meta else []
    lacking += [] if trace.op_columns.splits else ["which ops divide by samples (Op.splits)"]
    if (name := next(weights, "")) and lacking:
        return f"{name!r} is of an expert, but the trace does not say {', nor '.join(lacking)}; build it by transformer"
    return "the trace has no experts that can be divided"


def _check_rows_of_experts(trace: Trace, sequence_parallel: bool) -> None:
    """Raise LayoutError where rows sorted by expert would be taken for tokens: one expert per token has as many.

    A trace that names its axes tells them apart.
    """
    if trace.tensor_columns.axes:
        return
    tokens = math.prod(int(trace.meta.get(key, 0)) for key in ("batch", "sequence"))
    of_layers = [rows for layers in trace.meta.get("expert_loads") or () for rows in layers.values()]
    loads = map(sum, of_layers) if experts_of(trace) else (rows for of_layer in of_layers for rows in of_layer)
    if sequence_parallel and tokens in loads:
        raise LayoutError(
            "sequence_parallel: rows of experts, one for each token, cannot be told from tokens; nearest: false"
        )


def _check_divisible(key: str, trace: Trace) -> None:
    """Raise LayoutError for a trace whose layers cannot be divided among ranks at all."""
    if trace.meta.get("stack", "eager") != "eager":
        raise LayoutError(
            f"{key}: the kernels of the stack {trace.meta['stack']!r} cannot be divided once they are fused; build the "
            "trace eager, and give lay_out(…, kernels=…)"
        )
    if int(trace.meta.get("micro_batches", 1)) > 1:
        raise LayoutError(f"{key}: the trace has microbatches already; give micro_batches in the layout instead")


def check_by_tokens(trace: Trace, by_tokens: tuple[LayerPart, ...], ranks: int) -> None:
    """Raise LayoutError for parts of layers that so many ranks cannot divide by tokens."""
    names = [name for t, name in enumerate(trace.tensor_columns.name) if trace.producer[t] < 0]
    weights = list(filter(is_divided, names))
    layers = max(op_layers(trace).tolist(), default=-1) + 1
    for part in by_tokens:
        if part.last >= layers:
            nearest = replace(part, first=min(part.first, layers - 1), last=layers - 1)
            raise LayoutError(f"by_tokens: no '{part}' in a model of {layers} layers; nearest: '{nearest}'")
        if not any(map(part.has, weights)):
            raise LayoutError(f"by_tokens: the trace has no '{part}' that is known to divide; nearest: ''")
        if part.part == MLP and any(part.has(name) and ".router." in name for name in names):
            raise LayoutError("by_tokens: experts are divided by columns, or by ep; nearest: 'attention'")
        if part.part == VOCABULARY and trace.meta.get("loss") == CHUNKED:
            raise LayoutError("by_tokens: the chunks of loss 'chunked' are of all tokens; nearest: 'mlp'")
    if by_tokens and not any(is_divided(name, by_tokens) for name in weights):
        raise LayoutError(f"by_tokens: nothing is left that heads or columns divide; nearest: cp {ranks} without tp")
    if any(part.part == ATTENTION for part in by_tokens) and not any(op.kind == "attention" for op in trace.ops):
        raise LayoutError(
            "by_tokens: scores of all tokens with all others cannot be divided by tokens; try attention 'flash'"
        )


def divisible(trace: Trace, by_tokens: tuple[LayerPart, ...] = ()) -> int:
    """What all heads and columns of layers that can be divided have as a common divisor; 0 where there are none.

    by_tokens: parts of layers whose heads and columns are not divided.
    """
    known, found = dimensions(trace, by_tokens), 0
    for t in known.has[TENSOR]:
        shape = trace.tensor_columns.shape.get(t, ())
        if trace.tensor_columns.layer[t] >= 0 and not known.family[t] and len(shape) > 2:
            by_head = len(shape) == 4 or _is_by_head(trace, t, shape)
            found = math.gcd(found, shape[1] if by_head else shape[-1])
    for name in experts_of(trace):
        shape = trace.tensor_columns.shape[trace.tensor_id(name)]
        at = column_axis(name)
        found = math.gcd(found, shape[at] // 2 if at == 1 else shape[at])  # gate and up, each by itself
    for t, name in enumerate(trace.tensor_columns.name):
        if trace.producer[t] < 0 and ONE_EXPERT.fullmatch(name):
            found = math.gcd(found, trace.tensor_columns.shape[t][-1])
    return found


def _is_by_head(trace: Trace, t: int, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is what attention saves of its scores: (batch, heads, tokens), the tokens padded or not."""
    made, tokens = int(trace.producer[t]), own_tokens(trace) or 0
    if made < 0 or KINDS[trace.op_columns.kind[made]] != "attention":
        return False
    return shape[0] == trace.meta.get("batch") and token_axis(trace, t) != 1 and 0 < tokens <= shape[2]


def part_of_layer(trace: Trace, layout: Layout) -> dict[int, int]:
    """The part of the model of each layer. Raises LayoutError where the layers do not divide."""
    layers = sorted({layer for layer in op_layers(trace).tolist() if layer >= 0})
    if layout.parts > 1 and not layers:
        raise LayoutError("pp: the trace states no layers; nearest: 1")
    sizes = layout.layers
    if isinstance(sizes, str) or not sizes:
        if len(layers) % layout.parts:
            possible = [pp for pp in range(1, len(layers) + 1) if len(layers) % (pp * layout.chunks) == 0]
            key, near_to = ("pp", layout.pp) if possible else ("chunks", layout.chunks)  # no pp divides so many chunks
            possible = possible or [n for n in range(1, len(layers) + 1) if len(layers) % (n * layout.pp) == 0]
            nearest = min(possible, key=lambda number: (abs(number - near_to), number), default=1)
            what = f"{len(layers)} layers do not divide into {layout.parts} parts"
            raise LayoutError(f"{key}: {what}; nearest: {nearest}, or give layers")
        sizes = (len(layers) // max(layout.parts, 1),) * layout.parts
    if sum(sizes) != len(layers) or not any(sizes):
        raise LayoutError(f"layers: {list(sizes)} are {sum(sizes)}; the model has {len(layers)}")
    parts = [part for part, size in enumerate(sizes) for _ in range(size)]
    return dict(zip(layers, parts, strict=True))


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of a number that is nearest to the one wanted, the smaller of two."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return min({*small, *(number // each for each in small)}, key=lambda each: (abs(each - wanted), each))


def _positive(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        nearest = max(1, round(min(_as_number(value), MOST)))
        raise LayoutError(f"{key}: needs a whole number of at least 1, has {value!r}; nearest: {nearest}")
    if value > MOST:
        raise LayoutError(f"{key}: is {value}, and at most {MOST}")


def _as_number(value: object) -> float:
    """The number that a value is, or that a text holds; 0 for any other."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else 0.0
    except (ValueError, OverflowError):
        return 0.0
    return number if number == number else 0.0


def _check_devices(machine: Platform, layout: Layout) -> None:
    """Raise LayoutError where a machine has fewer devices and no network, or no link from each to the next."""
    devices = layout.devices
    key = next((key for key in ("dp", "tp", "cp") if getattr(layout, key) > 1), "pp")
    if machine.devices < devices and not machine.networks:
        raise LayoutError(
            f"{key}: {machine.name} has {machine.devices} device(s) and states no network to others, and {devices} are "
            f"needed; nearest: {machine.devices}, or load_profile(…, overrides={{'devices': '{devices}'}})"
        )
    for network in machine.networks[-1:]:  # the outermost
        most = network.nodes * network.per_node
        if 0 < most < devices:
            has = f"{network.name!r} of {machine.name} joins {most} devices"
            raise LayoutError(f"{key}: {has}, and {devices} are needed; nearest: {most}")
    for device in range(1, min(devices, machine.devices)):
        if not machine.route(machine.home(device - 1).name, machine.home(device).name):
            raise LayoutError(f"pp: {machine.name} has no link from one device to the next; nearest: 1")
    if key != "pp" and min(devices, machine.devices) > 1 and not machine.has_peers:
        raise LayoutError(f"{key}: {machine.name} has no link from one device to the next; nearest: 1")


__all__ = ["Layout", "lay_out", "to_layout", "with_devices"]
