"""Gist: feature maps are stored encoded from their last use in forward to their first in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.plan import Plan, Problem
from sim.policies.base import Policy, by_parameter
from sim.rewrites.codecs import FORMATS, SUFFICES, code_bytes
from sim.rewrites.encoding import Codec, encode, may_encode, result_of
from sim.rewrites.values import approximate
from sim.trace.chain import BACKWARD, saved_tensors
from sim.trace.graph import Trace
from sim.trace.tensor import ROLE_CODE, Tensor

FLOATS = ("", "fp64", "fp32", "tf32", "bf16", "fp16")
"""Types of what may be a feature map, rather than an index or a mask."""


@dataclass(frozen=True, kw_only=True)
class Gist(Policy):
    """Encode what forward saves, by who reads it in backward, on the device and in its own memory.

    Binarize: the backward of a max pooling reads a map of 4 bits per result, the place of the maximum, in the place of
    what it saved; a ReLU whose result only such poolings read in backward keeps 1 bit per element. Sparse storage,
    dense compute (SSDC): what states its fraction of zeros is kept as compressed sparse rows where these are smaller,
    and decoded before its first use in backward. Delayed precision reduction (DPR), lossy: all other feature maps, and
    the values of sparse rows, are kept in fewer bits; forward itself computes at full precision. Nothing leaves the
    device.
    Source: Jain, Phanishayee, Mars, Tang, Pekhimenko, "Gist: Efficient Data Encoding for Deep Neural Network
        Training", ISCA 2018: the three encodings and the pairs of layers that each is for.
    Bounds: bytes of a code: 1/8 per element (sign), 1/2 per result (pooling), (w + 1) per non-zero element and 4 per
        256 elements (rows of elements of w bytes), 2, 4/3 or 1 (DPR). Time beyond keep_all: that of the encodings and
        decodings, each of which reads and writes its operands once on the device. O(ops + tensors).
    Headline: up to 2x smaller footprint of five networks, 1.8x on average, for 4 % of time. Which part of that is
        sparse storage depends on fractions of zeros that were not published.
    Departs: reconstructed from the abstract and from descriptions of the encodings; row pointers and index widths are
        those descriptions'. Where the trace does not say how many elements are zero (`Tensor.zeros`), there is no
        sparse storage. The device computes an encoding as an op of its own, and does not fuse it with the layer; the
        map of a pooling is written from its saved result alone, as Gist's pooling kernel writes it. A ReLU or pooling
        that reads a code counts as many bytes touched as before, so that no op becomes faster. What is read again by
        the very next op is not encoded. ReLUs in place are an option of the workload (`inplace_relu`); memory is
        shared by lifetime, as every allocator here does. The planner does not look at the budget.

    binarize: encode for ReLUs and max poolings.
    sparse: encode as sparse rows.
    precision: of DPR: `fp16`, `fp10` (three to a word of 32 bits) or `fp8`; `none` keeps the values (`lossless`).
    Notes: `codes`, by format (how many tensors, their bytes, bytes of their codes); `unknown_zeros`, how many results
        of ReLUs state no fraction of zeros; `approximate`, names of the tensors that backward reads decoded by DPR.
    """

    rewrites = True
    fidelity = "reconstruction"
    rarely = "few random nets have ReLUs or poolings, or state how many elements are zero"
    other_values = by_parameter(binarize=False, sparse=False, precision="fp8")

    binarize: bool = True
    sparse: bool = True
    precision: Literal["none", "fp16", "fp10", "fp8"] = "none"

    def __post_init__(self) -> None:
        if self.precision != "none":  # a trait by parameter
            object.__setattr__(self, "lossless", False)

    def plan(self, problem: Problem) -> Plan:
        """The trace with codes in the place of feature maps, and no actions."""
        trace = problem.trace
        sufficient = self._sufficient(trace) if self.binarize else set()
        dense: dict[int | str, Codec] = {}
        for t in saved_tensors(trace).tolist():
            tensor = trace.tensors[t]
            form = self._format(tensor) if _waits(trace, t, sufficient) else None
            if form is not None:
                dense[t] = Codec(form, lossless=FORMATS[form].lossless)
        if not sufficient and not dense:
            return Plan(trace, notes={"codes": {}, "unknown_zeros": _unknown(trace)})
        new = encode(trace, dense, sorted(sufficient))
        notes = {"codes": _codes(trace, new), "unknown_zeros": _unknown(trace), "approximate": approximate(new)}
        return Plan(new, notes=notes)

    def _format(self, tensor: Tensor) -> str | None:
        """The smallest of the formats that this policy may use for a feature map, None where none is smaller."""
        small: list[str] = [] if self.precision == "none" else [self.precision]
        if self.sparse and tensor.zeros is not None:
            small += ["csr"] if self.precision == "none" else [f"csr_{self.precision}"]
        if tensor.dtype not in FLOATS or (tensor.shape is not None and len(tensor.shape) < 2):
            return None  # an index, a mask, or a statistic of each channel
        sizes = {form: code_bytes(form, tensor) for form in small}
        best = min(sizes, key=lambda form: sizes[form], default=None)
        return best if best is not None and sizes[best] < tensor.bytes else None

    def _sufficient(self, trace: Trace) -> set[int]:
        """The backward ops that are to read signs and maps: all poolings, and ReLUs that share with nothing else."""
        backward = {
            op: function
            for op, function in trace.op_columns.function.items()
            if function in SUFFICES and trace.op_columns.phase[op] == BACKWARD and _shrinks(trace, op, function)
        }
        pools = {op for op, function in backward.items() if function == "max_pool"}
        relus = {
            op
            for op, function in backward.items()
            if function == "relu"
            and all(
                other == op or other in pools
                for t in _saved(trace, op)
                for other in trace.readers(t)
                if trace.op_columns.phase[other] == BACKWARD
            )
        }
        return pools | relus


def _saved(trace: Trace, op: int) -> list[int]:
    """What a backward op reads that forward produced."""
    produced = trace.producer
    return [t for t in trace.reads(op) if produced[t] >= 0 and trace.op_columns.phase[produced[t]] < BACKWARD]


def _shrinks(trace: Trace, op: int, function: str) -> bool:
    """Whether the code that suffices for an op is smaller than what it is the code of."""
    saved = _saved(trace, op)
    result = trace.tensors[result_of(trace, saved)] if saved else None
    return result is not None and code_bytes(SUFFICES[function], result) < result.bytes


def _waits(trace: Trace, t: int, sufficient: set[int]) -> bool:
    """Whether a tensor may be encoded, and lies unused for a while between forward and backward."""
    phase = trace.op_columns.phase
    readers = [op for op in trace.readers(t) if op not in sufficient]
    late = [op for op in readers if phase[op] > 0]
    if not late or not may_encode(trace, t) or t in trace.outputs:
        return False
    early = max((op for op in readers if op < late[0]), default=int(trace.producer[t]))
    return late[0] > early + 1


def _codes(trace: Trace, new: Trace) -> dict[str, tuple[int, int, int]]:
    """By format: how many tensors are encoded in it, their bytes, and bytes of the codes."""
    found: dict[str, tuple[int, int, int]] = {}
    names = set(trace.tensor_columns.name)
    for tensor in new.tensors:
        of, _, form = tensor.name.rpartition(".")
        if form in FORMATS and of in names and tensor.name not in names:
            count, whole, coded = found.get(form, (0, 0, 0))
            whole += int(trace.tensor_columns.bytes[trace.tensor_id(of)])
            found[form] = count + 1, whole, coded + tensor.bytes
    return found


def _unknown(trace: Trace) -> int:
    """How many results of ReLUs do not state how many elements are zero."""
    relus = [op for op, function in trace.op_columns.function.items() if function == "relu"]
    forward = [op for op in relus if trace.op_columns.phase[op] < BACKWARD]
    activation = ROLE_CODE["activation"]
    made = [t for op in forward for t in trace.writes(op) if trace.tensor_columns.role[t] == activation]
    return sum(t not in trace.tensor_columns.zeros for t in made)
