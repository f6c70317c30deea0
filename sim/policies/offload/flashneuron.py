"""FlashNeuron: activations go straight to a drive, chosen so that the last copy ends with the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le

from sim.errors import PolicyError
from sim.plan import Action, Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.rewrites.codecs import FORMATS, code_bytes
from sim.rewrites.encoding import Codec, encode, may_encode
from sim.rewrites.values import approximate
from sim.solvers.load_curve import SWAPPED, Absence, Curve, curve_of
from sim.solvers.spans import swappable
from sim.solvers.swap_trips import actions_of, scheduled
from sim.trace.chain import BACKWARD, saved_tensors
from sim.trace.graph import Trace

FLOATS = ("", "fp32", "tf32")


class Saved(NamedTuple):
    """A tensor that may be offloaded.

    tensor: its id.
    bytes: its size.
    ready_ns: when its last forward use ends, without stalls.
    form: the format in which it takes fewer bytes, "" for none.
    out_ns: the time of its copy to the drive, in that format.
    """

    tensor: int
    bytes: int
    ready_ns: int
    form: str
    out_ns: int


@dataclass(frozen=True, kw_only=True)
class FlashNeuron(Policy):
    """Offload saved activations to a drive that the device writes and reads itself, past the host and its memory.

    How much: all that forward saves, less a share of the memory that is free beside the initial tensors. Which: first
    in the order in which they are produced, until that is enough. If the drive would then still be writing when forward
    ends, the last chosen tensors that cannot be compressed make way for later ones that can, of at least as many bytes,
    until the last copy ends in time or nothing is left to exchange. Sparse tensors are compressed on the device before
    they leave, in rows of their elements that are not zero; with `fp16` the others lose half of their bits. Backward
    reads them in the order in which it needs them, each so that it arrives in time, and no earlier than memory
    holds it.
    Source: Bae et al., "FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks", FAST 2021; the
        choice in two phases as in its public code.
    Bounds: no byte passes the host's memory. Without stalls at the end of forward where an exchange reaches that.
        O(tensors^2) for the exchanges.
    Headline: batches 12.4 to 14 times as large as the memory of a V100 with 16 GB holds, and up to 37.8 % more
        throughput by it.
    Departs: its code takes a factor of two for each compression, here codes have their bytes. fp16 is off unless asked
        for, since it changes values. A copy begins after the last use in forward instead of after production. Times are
        those of the cost model instead of one measured iteration. Compressed tensors and others share one memory
        without ends. When a copy in begins is not public; here it is planned just in time, and where memory is full the
        device waits for a copy out.

    share: of the memory that is free beside the initial tensors, how much stays for activations.
    csr: whether sparse tensors are compressed.
    fp16: whether dense ones in 32 bits are cut to 16.
    Notes of the plan: `needed_bytes`; `offloaded`, how many tensors; `compressed`, by name of the tensor the format;
    `late_ns`, by how much the last copy is planned to end after forward; `approximate`, what fp16 decodes to.
    Raises PolicyError for a share beyond 0 to 1, or a platform without such a drive.
    """

    moves = True
    rewrites = True
    needs = frozenset({"drive"})
    fidelity = "equations"
    saves = MappingProxyType({"codec": "elements that are zero are not stored"})
    rarely = "it offloads only what is not free beside the initial tensors, and few random tensors state zeros"
    other_values = by_parameter(share=0.1, csr=False, fp16=True)

    share: Annotated[float, Ge(0), Le(1)] = 0.6
    csr: bool = True
    fp16: bool = False

    def __post_init__(self) -> None:
        if self.fp16:  # a trait by parameter
            object.__setattr__(self, "lossless", False)

    def plan(self, problem: Problem) -> Plan:
        """What leaves, encoded or not, and when it moves."""
        platform, trace = problem.platform, problem.trace
        drive = platform.drive
        if drive is None:
            raise PolicyError(
                f"flashneuron: {platform.name} has no drive that the device reads and writes past the host; "
                "a100_80_gds has one"
            )
        chosen: list[Saved] = []
        needed = late = 0
        for device in range(trace.devices):
            saved, forward_ns = self._saved(problem, device, drive.name)
            free = platform.home(device).capacity - _initial(trace, device)
            need = sum(one.bytes for one in saved) - int(self.share * max(free, 0))
            own = choose(saved, need, forward_ns)
            chosen += own
            needed += max(need, 0)
            late = max(late, _end(own) - forward_ns if own else 0)
        codecs = {one.tensor: Codec(one.form, lossless=FORMATS[one.form].lossless) for one in chosen if one.form}
        new = encode(trace, codecs) if codecs else trace
        names = trace.tensor_columns.name
        moved = [new.tensor_id(f"{names[one.tensor]}.{one.form}" if one.form else names[one.tensor]) for one in chosen]
        notes = {
            "needed_bytes": needed,
            "offloaded": len(chosen),
            "compressed": {names[t]: codec.name for t, codec in codecs.items()},
            "late_ns": max(late, 0),
            "approximate": approximate(new) if codecs else (),
        }
        return Plan(new, _moves(problem, new, moved, drive.name), notes=notes)

    def _saved(self, problem: Problem, device: int, drive: str) -> tuple[list[Saved], int]:
        """What may be offloaded, in the order of production, and when forward ends; ns without stalls."""
        trace, platform = problem.trace, problem.platform
        curve = curve_of(problem, device, drive)
        ends = dict(zip(curve.ops, curve.end.tolist(), strict=True))
        phase, home = trace.op_columns.phase, platform.home(device).name
        found, may_leave = [], swappable(trace, SWAPPED)
        for t in sorted(saved_tensors(trace).tolist(), key=lambda t: (int(trace.producer[t]), t)):
            producer = int(trace.producer[t])
            if producer not in ends or phase[producer] == BACKWARD or t not in may_leave:
                continue
            back = next(op for op in trace.readers(t) if phase[op] == BACKWARD)
            last = max((op for op in trace.readers(t) if op < back), default=producer)
            if ends[back] - ends[last] <= problem.cost.op_ns(back):
                continue  # it is needed at once
            form = self._form(trace, t)
            size = code_bytes(form, trace.tensors[t]) if form else int(trace.tensor_columns.bytes[t])
            out = platform.move_ns(size, home, drive)
            found.append(Saved(t, int(trace.tensor_columns.bytes[t]), ends[last], form, out))
        forward = max((end for op, end in ends.items() if phase[op] < BACKWARD), default=0)
        return found, forward

    def _form(self, trace: Trace, t: int) -> str:
        """The format in which a tensor takes fewer bytes, sparse before narrow; "" for none."""
        tensor = trace.tensors[t]
        if not may_encode(trace, t):
            return ""
        if self.csr and tensor.zeros is not None and code_bytes("csr", tensor) < tensor.bytes:
            return "csr"
        return "fp16" if self.fp16 and tensor.dtype in FLOATS and code_bytes("fp16", tensor) < tensor.bytes else ""


def choose(saved: Sequence[Saved], need: int, end_ns: int) -> list[Saved]:
    """Which tensors leave: in order until `need` bytes, then those that compress for the last that do not.

    end_ns: when the last copy should have ended.
    """
    chosen: list[Saved] = []
    for one in saved:
        if sum(other.bytes for other in chosen) >= need:
            break
        chosen.append(one)
    while _end(chosen) > end_ns:
        exchanged = _exchanged(saved, chosen)
        if exchanged is None:
            break
        chosen = exchanged
    return chosen


def _exchanged(saved: Sequence[Saved], chosen: Sequence[Saved]) -> list[Saved] | None:
    """The choice with its last tensor that compresses worse exchanged for later ones that compress better."""
    for worse, better in (("", ("csr", "fp16")), ("fp16", ("csr",))):
        leaving = next((one for one in reversed(chosen) if one.form == worse), None)
        if leaving is None:
            continue
        coming: list[Saved] = []
        for form in better:
            for one in saved:
                if one.form == form and one not in chosen and sum(c.bytes for c in coming) < leaving.bytes:
                    coming.append(one)
        if sum(one.bytes for one in coming) >= leaving.bytes:
            kept = {*chosen, *coming} - {leaving}
            return [one for one in saved if one in kept]
    return None


def _end(chosen: Sequence[Saved]) -> int:
    """When the last copy ends: one after the other, none before its tensor is ready."""
    now = 0
    for one in sorted(chosen, key=lambda one: one.ready_ns):
        now = max(now, one.ready_ns) + one.out_ns
    return now


def _initial(trace: Trace, device: int) -> int:
    """Bytes that are resident from the start on a device."""
    size, users = trace.tensor_columns.bytes, trace.first_read
    here = (trace.producer < 0) & (users >= 0)
    return int(size[here & (trace.op_columns.device[users] == device)].sum())


def _moves(problem: Problem, new: Trace, moved: Sequence[int], drive: str) -> tuple[Action, ...]:
    """The copies of these tensors of the trace that runs, and the waits where memory is full."""
    asked = replace(problem, trace=new, cost=problem.cost.over(new, problem.platform))
    actions: list[Action] = []
    for device in range(new.devices):
        home = problem.platform.home(device)
        curve = curve_of(asked, device, drive)
        absences = [one for t in moved if (one := _absence(new, curve, t)) is not None]
        actions += actions_of(scheduled(curve, absences, home.capacity), home.name, drive)
    return tuple(actions)


def _absence(trace: Trace, curve: Curve, t: int) -> Absence | None:
    """From the last use in forward to the first in backward; None where it is of another device."""
    if t not in curve.variables:
        return None
    variable, phase = curve.variables[t], trace.op_columns.phase
    early = [i for i in variable.accesses if phase[curve.ops[i]] < BACKWARD]
    back = next(i for i in variable.accesses if phase[curve.ops[i]] == BACKWARD)
    left = max(i for i in early if i < back)
    gap = int(curve.start[back] - curve.end[left])
    return Absence(t, variable.bytes, left, back, gap, variable.out_ns, variable.in_ns)
