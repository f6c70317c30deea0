"""CSWAP: of what vDNN offloads, the device compresses those tensors whose swap becomes shorter by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Lt

from sim.declared import Rate
from sim.errors import OutOfMemory
from sim.hardware.transfer_time import transfer_ns
from sim.plan import Action, Cost, Drop, Move, Plan, Problem, Recompute, Wait
from sim.policies.base import Beside, by_parameter
from sim.policies.offload.vdnn import Vdnn
from sim.rewrites.codecs import FORMATS, code_bytes
from sim.rewrites.encoding import Codec, encode, may_encode
from sim.rewrites.rewrite import reorder
from sim.rewrites.values import approximate
from sim.trace.graph import Trace
from sim.units import parse_rate

FLOATS = ("", "fp64", "fp32", "tf32", "bf16", "fp16")


class _Trip(NamedTuple):
    """An offload of vDNN's plan and its way back: ops by id, the last of which the device waits at.

    until: the op after which the copy back is waited for; -1 where that is before `back`.
    """

    first: int
    last: int
    back: int
    until: int


@dataclass(frozen=True, kw_only=True)
class Cswap(Vdnn):
    """Offload and prefetch as vDNN does, and compress a tensor on the device where a time model says that it pays.

    For each tensor that is offloaded: without compression its swap costs what of the copies the layer beside them does
    not hide, out and back; with it, compression and decompression, which nothing hides, and what is not hidden of
    the smaller copies. It is compressed where that is less, in the smaller of two formats: before its layer, so
    that the copy of the code runs beside that; and decompressed before its first use in backward.
    Source: Chen, He, Zhang, Hao, "CSWAP: A Self-Tuning Compression Framework for Accelerating Tensor Swapping in GPUs",
        CLUSTER 2021; lossy codecs for dense tensors as in CSWAP+, TPDS 2022.
    Bounds: no device memory beyond vDNN's but the codes beside a layer; where even that does not fit, vDNN's plan. With
        one offload per layer and exact predictions never slower than compressing all or nothing. One replay more than
        vDNN.
    Headline: swaps take up to 50.9 % less time, training 20.7 % less than with vDNN on average of six networks on a
        V100. Here AlexNet, VGG-16, GoogLeNet and ResNet-50 with the zeros of cDMA's mean ratio take 16 to 27 % less
        with codecs of 60 GB/s (a figure of ours), 23 to 41 % with those that the device's memory allows, where all
        inputs are offloaded.
    Departs: equations reconstructed from the decision that the abstract states. Of its codecs, zero-value compression
        and sparse rows are here; run-length and LZ4 would need the order of values, of which a trace says nothing.
        Predictions come from the cost model, and may be made worse by `error`; no regression is trained, and launch
        geometry is not tuned. A trace has one fraction of zeros per tensor: a later epoch is another trace. Tensors
        that state none, inputs of the trace and what is overwritten stay uncompressed unless `precision` is given.

    choose: `model`, or `always` where a code is smaller.
    throughput: bytes/s, counted before compression, of the device's codec; None for what its memory allows.
    precision: of lossy codes for tensors that no sparse format makes smaller, as CSWAP+ has them (`lossless`).
    error: predictions of codec times are off by up to this share, drawn with the problem's seed.
    variant, algorithm, heavy, classifier: as for `vdnn`.
    Notes: as `vdnn`, and `compressed`, by name of the tensor the format; `predicted_ns`, by name what a swap costs
        without and with compression; `approximate`, names of what a lossy code decodes to.
    Raises PolicyError and OutOfMemory as `vdnn`.
    """

    rewrites = True
    fidelity = "reconstruction"
    other_values = by_parameter(
        choose=Beside("always", variant="all", throughput="1 MB/s"),
        throughput=Beside("1 MB/s", variant="all", choose="always"),
        precision=Beside("fp8", variant="all", choose="always"),
    )
    unseen = by_parameter(error="a decision changes only where the two costs of a swap are that near to each other")

    choose: Literal["model", "always"] = "model"
    throughput: Rate | None = None
    precision: Literal["none", "fp16", "fp8"] = "none"
    error: Annotated[float, Ge(0), Lt(1)] = 0.0

    def __post_init__(self) -> None:
        if self.precision != "none":  # a trait by parameter
            object.__setattr__(self, "lossless", False)

    def plan(self, problem: Problem) -> Plan:
        """vDNN's plan, with codes in the place of those tensors that are worth it."""
        base = super().plan(problem)
        cost = problem.cost.over(base.trace, problem.platform)
        trips = _trips(base, self._host(problem))
        codecs = {t: codec for t in trips if (codec := self._codec(base.trace, t)) is not None}
        if not codecs:
            return replace(base, notes={**base.notes, "compressed": {}, "predicted_ns": {}})
        codecs = self._timed(problem, base.trace, codecs)
        predicted = self._predicted(problem, base.trace, cost, trips, codecs)
        chosen = {t: c for t, c in codecs.items() if self.choose == "always" or predicted[t][1] < predicted[t][0]}
        plan = _rewritten(base, chosen, trips) if chosen else base
        if chosen:
            try:
                problem.evaluate(plan)
            except OutOfMemory:
                plan, chosen = base, {}
        name = base.trace.tensor_columns.name
        notes = {
            **base.notes,
            "compressed": {name[t]: codec.name for t, codec in chosen.items()},
            "predicted_ns": {name[t]: costs for t, costs in predicted.items()},
            "approximate": approximate(plan.trace) if chosen else (),
        }
        return replace(plan, notes=notes)

    def _codec(self, trace: Trace, t: int) -> Codec | None:
        """The format in which a tensor takes least, None where it takes no less in any."""
        tensor = trace.tensors[t]
        forms = ["zvc", "csr"] if tensor.zeros is not None else []
        sizes = {form: code_bytes(form, tensor) for form in forms}
        small = {form: size for form, size in sizes.items() if size < tensor.bytes}
        if not small and self.precision != "none" and tensor.dtype in FLOATS:
            size = code_bytes(self.precision, tensor)
            small = {self.precision: size} if size < tensor.bytes else {}
        best = min(small, key=lambda form: small[form], default=None)
        return None if best is None else Codec(best, lossless=FORMATS[best].lossless)

    def _timed(self, problem: Problem, trace: Trace, codecs: Mapping[int, Codec]) -> dict[int, Codec]:
        """The codecs with their times: of the memory that they touch, and of the stated throughput."""
        every = encode(trace, codecs)
        cost = problem.cost.over(every, problem.platform)
        name, size = trace.tensor_columns.name, trace.tensor_columns.bytes
        rate = parse_rate(self.throughput) if isinstance(self.throughput, str) else self.throughput
        found = {}
        for t, codec in codecs.items():
            least = transfer_ns(int(size[t]), int(rate)) if rate else 0
            times = [max(least, cost.op_ns(every.op_id(f"{name[t]}.{word}"))) for word in ("encode", "decode")]
            found[t] = replace(codec, encode_ns=times[0], decode_ns=times[1])
        return found

    def _predicted(
        self, problem: Problem, trace: Trace, cost: Cost, trips: Mapping[int, _Trip], codecs: Mapping[int, Codec]
    ) -> dict[int, tuple[int, int]]:
        """Per tensor the ns that its swap is not hidden for: as it is, and compressed."""
        draw, platform = Random(problem.seed), problem.platform
        host, left = self._host(problem), dict[tuple[int, int], int]()
        found = {}
        for t, trip in trips.items():
            whole = int(trace.tensor_columns.bytes[t])
            small = code_bytes(codecs[t].name, trace.tensors[t]) if t in codecs else whole
            home = platform.home(int(trace.op_columns.device[trip.first])).name
            stretches = (trip.first, trip.last, home, host), (trip.back, trip.until, host, home)
            costs = [0, 0]
            for first, last, source, target in stretches:
                if (first, last) not in left:
                    left[first, last] = sum(cost.op_ns(op) for op in _between(trace, first, last))
                hidden = left[first, last]
                copies = [platform.move_ns(size, source, target) for size in (whole, small)]
                costs = [before + max(0, copy - hidden) for before, copy in zip(costs, copies, strict=True)]
                left[first, last] = max(0, hidden - copies[t in codecs])
            if t in codecs:
                codec = codecs[t]
                took = (codec.encode_ns or 0) + (codec.decode_ns or 0)
                found[t] = costs[0], costs[1] + round(took * (1 + draw.uniform(-self.error, self.error)))
        return found


def _between(trace: Trace, first: int, last: int) -> Iterator[int]:
    """The ops of a device from one to another, both included."""
    device = trace.op_columns.device
    return (op for op in range(first, last + 1) if device[op] == device[first])


def _trips(plan: Plan, host: str) -> dict[int, _Trip]:
    """The offloads of vDNN's plan that a code can stand for: out, waited for, dropped, and back from the host."""
    trace, own = plan.trace, dict[int, list[Action]]()
    for action in plan.actions:
        if not isinstance(action, Recompute):
            own.setdefault(trace.tensor_id(action.tensor), []).append(action)
    found = {}
    for t, actions in own.items():
        moves = [move for move in actions if isinstance(move, Move)]
        if not may_encode(trace, t) or [move.to == host for move in moves] != [True, False]:
            continue
        waits = [wait for wait in actions if isinstance(wait, Wait)]
        first, back = (trace.op_id(move.before) for move in moves if move.before is not None)
        last = next(trace.op_id(wait.after) for wait in waits if wait.after is not None)
        until = [trace.op_id(w.after) for w in waits if w.after is not None and trace.op_id(w.after) >= back]
        found[t] = _Trip(first, last, back, until[0] if until else -1)
    return found


def _rewritten(base: Plan, codecs: Mapping[int, Codec], trips: Mapping[int, _Trip]) -> Plan:
    """The plan with codes: encoded before the layer beside which they leave, decoded before their first use."""
    old, names = base.trace, base.trace.tensor_columns.name
    coded = encode(old, codecs)
    at = {name: op for op, name in enumerate(coded.op_columns.name)}
    early: dict[int, list[int]] = {}
    for t in codecs:
        early.setdefault(at[old.op_columns.name[trips[t].first]], []).append(at[f"{names[t]}.encode"])
    moved = {op for ops in early.values() for op in ops}
    order = [one for op in range(len(coded.ops)) if op not in moved for one in (*early.get(op, ()), op)]
    trace = reorder(coded, order)
    actions = [new for action in base.actions for new in _translated(action, old, trace, codecs, trips)]
    return replace(base, trace=trace, actions=tuple(actions))


def _translated(
    action: Action, old: Trace, trace: Trace, codecs: Mapping[int, Codec], trips: Mapping[int, _Trip]
) -> Sequence[Action]:
    """An action of the old trace in the new one, on the code where the tensor has one."""
    before, after = (
        None if op is None else trace.op_id(old.op_columns.name[old.op_id(op)]) for op in (action.before, action.after)
    )
    if isinstance(action, Recompute):
        return (replace(action, op=old.op_columns.name[old.op_id(action.op)], before=before, after=after),)
    t = old.tensor_id(action.tensor)
    name = old.tensor_columns.name[t]
    if t not in codecs:
        return (replace(action, tensor=name, before=before, after=after),)
    if isinstance(action, Drop):
        return ()  # the tensor is released by its last use, and the code has moved
    code = f"{name}.{codecs[t].name}"
    if before is not None and action.before is not None and old.op_id(action.before) == trips[t].back:
        decode = trace.op_id(f"{name}.decode")
        before = min(before, decode)
    if isinstance(action, Move):
        return (replace(action, tensor=code, keep=False, before=before, after=after),)
    return (replace(action, tensor=code, before=before, after=after),)
